"""The ops a device must offer. Signatures fold KV heads into the page axis, so that a per-head page table is ordinary
paged attention with one KV head: batch = sequences x KV heads, group = query heads per KV head.

Shapes use: n sequences, t query tokens per sequence, Hq query heads, H KV heads, G = Hq / H, D head dim, P page size,
N page-table columns, R pool rows (pages x H). A pool row `page * H + head` is one (page, head) piece. Query head j
belongs to KV head j // G.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch


class TableLayout:
    """What is the same for every layer of a step: which lanes of the page table hold tokens. What only some ops need is
    made when it is first asked for.

    The table of sequence i lists its pages in order; the first `tokens[i]` lanes are valid, and the last t of them
    are the query tokens themselves, so query token j sees `tokens[i] - (t - 1 - j)` lanes (a causal tail).
    """

    def __init__(self, tokens: torch.Tensor, columns: int, page_size: int, queries: int, dtype: torch.dtype) -> None:
        """
        Args:
            tokens: `[n]` valid lanes per sequence, at least `queries`, at most `columns * page_size`; 0 for an empty
                (padded) sequence, whose output is zero.
            columns: N.
            queries: t.
            dtype: of the queries; the mask is added to their scores.
        """
        lanes = columns * page_size
        # Elsewhere looking would mean to wait for the device, and tables are as wide as they can be.
        if tokens.device.type == "cpu" and int(tokens.amax()) > lanes:
            raise ValueError(f"{int(tokens.amax())} tokens do not fit {columns} columns of {page_size}")
        self.tokens = tokens
        self.columns = columns
        self.queries = queries
        self.page_size = page_size
        self._dtype = dtype

    @functools.cached_property
    def empty(self) -> torch.Tensor:
        """`[n]` bool."""
        return self.tokens == 0

    @functools.cached_property
    def has_empty(self) -> bool:
        return bool(self.empty.any())

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """`[n, 1, t, lanes]`, added to scores."""
        tokens, device = self.tokens, self.tokens.device
        lane = torch.arange(self.columns * self.page_size, device=device)
        seen = tokens.view(-1, 1) - torch.arange(self.queries - 1, -1, -1, device=device)  # [n, t]
        visible = lane < seen.unsqueeze(-1)  # [n, t, lanes]
        zero = torch.zeros((), dtype=self._dtype, device=device)
        # An empty sequence sees lane 0, so that softmax stays finite; its output is overwritten.
        visible = visible | (self.empty.view(-1, 1, 1) & (lane == 0))
        return torch.where(visible, zero, zero - torch.inf).unsqueeze(1)

    @functools.cached_property
    def unwritten(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(sequence, lane) pairs of last pages that hold no token; columns past them name the reserved page."""
        tokens = self.tokens.view(-1, 1)
        end = -(-tokens // self.page_size) * self.page_size
        lane = torch.arange(self.columns * self.page_size, device=tokens.device)
        sequence, at = ((lane >= tokens) & (lane < end)).nonzero(as_tuple=True)
        return sequence, at


class AttentionOps(Protocol):
    def write_tokens(
        self,
        k_lanes: torch.Tensor,
        v_lanes: torch.Tensor,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Put one new token per sequence into its tail page.

        Args:
            k_lanes, v_lanes: `[R, P, D]`, the pool.
            rows: `[n, H]` pool rows. offsets: `[n]` lanes.
            k, v: `[n, H, D]`.
        """

    def attend(
        self,
        q: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        table: torch.Tensor,
        layout: TableLayout,
        scale: float,
    ) -> torch.Tensor:
        """Attention of each query token over the tokens its page table names.

        Args:
            q: `[n, t, Hq, D]`.
            k_rows, v_rows: `[R, P * D]`, the pool; rows that the table does not name may hold anything, NaN included,
                and so may lanes past a sequence's `tokens`.
            table: `[n, H, N]` int64 pool rows; columns past a sequence's pages name a row of the reserved page, which
                is finite.

        Returns:
            `[n, t, Hq, D]`; zero for an empty sequence.
        """

    def score_pages(
        self, q: torch.Tensor, summaries: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """How much each page may matter to a query: Quest's upper bound of q.k from the page's smallest and largest
        key, softmaxed over pages, mean over the query heads of a KV head.

        Args:
            q: `[n, Hq, D]`.
            summaries: `[R, 2 * D]` largest then smallest key.
            rows: `[n, H, N]` int64 rows of `summaries`.
            pages: `[n]` columns that count; the others score -inf.

        Returns:
            `[n, H, N]` float32.
        """

    def score_sketches(
        self,
        q: torch.Tensor,
        sketches: torch.Tensor,
        rows: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
        page_size: int,
    ) -> torch.Tensor:
        """How much each page may matter to a query: the largest q.k of its tokens as their 4-bit codes tell it,
        softmaxed over pages, mean over the query heads of a KV head. The query is rounded to 8 bits first, so that
        products are exact integers and every implementation gets the same.

        Args:
            q: `[n, Hq, d]` the dimensions that sketches keep.
            sketches: `[R, bytes]` uint8, see `sketch.py`.
            rows: `[n, H, N]` int64 rows of `sketches`.
            pages: `[n]` columns that count; the others score -inf.

        Returns:
            `[n, H, N]` float32.
        """

    def prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int, scale: float) -> torch.Tensor:
        """Causal attention of one sequence's new tokens over prefix and new tokens.

        Args:
            q: `[m, Hq, D]` new tokens.
            k, v: `[H, prefix + m, D]`.

        Returns:
            `[m, Hq, D]`.
        """
