"""Page tables per KV head as FlashInfer's paged attention reads them: lists of pages, one after the other.

Sequence i and KV head h are the request r = i * H + h of an attention with one KV head, to which a pool row is a page:

    indices         | pages of request 0 | pages of request 1 | ... |      int32 pool rows
                    ^ indptr[0] = 0      ^ indptr[1]                ^ indptr[n * H]
    last_page_len   lanes of each request's last page that hold tokens

A sequence without tokens has lists without pages: nothing is read for it, whatever its queries are, and FlashInfer's
output of it is zero.

Lengths are on the device, so lists are written there: nothing here waits for it, sizes follow from shapes, and
addresses never change, so that a CUDA graph can hold the writing and the reading.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

INT32_MAX = 2**31 - 1


class PageLists(NamedTuple):
    """Of a step's requests, int32."""

    indptr: torch.Tensor  # [n * H + 1]
    indices: torch.Tensor  # [n * H * N], anything past indptr[-1] names row 0
    last_page_len: torch.Tensor  # [n * H]


def page_list_bytes(requests: int, columns: int) -> int:
    """Of `PageListBuffers`: `indptr` and `last_page_len`, and for each entry itself, its place and where it is from."""
    return 4 * (2 * requests + 1) + requests * columns * (4 + 8 + 8)


class PageListBuffers:
    """Memory for the lists of the largest step; a smaller step's are the first part of it."""

    def __init__(self, *, batch: int, kv_heads: int, columns: int, page_size: int, device: torch.device) -> None:
        """
        Args:
            batch: most sequences, padding included. columns: N of the widest page table.

        Raises:
            ValueError: more lanes than FlashInfer can number.
        """
        requests = batch * kv_heads
        if requests * columns * page_size > INT32_MAX:
            raise ValueError(
                f"{batch} sequences with {kv_heads} KV heads and {columns} pages of {page_size} tokens each are "
                f"{requests * columns * page_size} lanes; FlashInfer numbers up to {INT32_MAX}, which is "
                f"{INT32_MAX // (kv_heads * columns * page_size)} sequences of that size"
            )
        self.batch, self.kv_heads, self.columns, self.page_size = batch, kv_heads, columns, page_size
        self._indptr = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self._indices = torch.zeros(requests * columns, dtype=torch.int32, device=device)
        self._last_page_len = torch.ones(requests, dtype=torch.int32, device=device)
        self._order = torch.arange(requests * columns, device=device)
        # Where in the page table each entry of `_indices` comes from, counted in halves of its numbers.
        self._source = torch.ones(requests * columns, dtype=torch.int64, device=device)

    def part(self, sequences: int) -> PageLists:
        """The lists of a step of this many sequences.

        Raises:
            ValueError: more than there is memory for.
        """
        if not 1 <= sequences <= self.batch:
            raise ValueError(f"a step of {sequences} sequences; page lists have memory for 1 to {self.batch}")
        requests = sequences * self.kv_heads
        return PageLists(
            self._indptr[: requests + 1], self._indices[: requests * self.columns], self._last_page_len[:requests]
        )

    def measure(self, tokens: torch.Tensor, columns: int) -> None:
        """Write what is the same for every layer of a step: the lengths, and where its pages stand in page tables.

        Args:
            tokens: `[n]` as in `TableLayout`. columns: N of the step's page tables.

        Raises:
            ValueError: more than there is memory for.
        """
        if not 1 <= columns <= self.columns:
            raise ValueError(f"a page table of {columns} columns; page lists have memory for 1 to {self.columns}")
        n, heads = tokens.numel(), self.kv_heads
        indptr, _, last_page_len = self.part(n)
        pages = torch.div(tokens + (self.page_size - 1), self.page_size, rounding_mode="floor")
        last_page_len.view(n, heads).copy_((tokens - (pages - 1) * self.page_size).unsqueeze(1))
        counts = pages.unsqueeze(1).expand(n, heads).reshape(-1)
        ends = counts.cumsum(0)
        indptr[1:].copy_(ends)
        position = self._order[: n * heads * columns]
        request = torch.searchsorted(ends, position, right=True).clamp_max_(n * heads - 1)
        column = position - (ends - counts)[request]
        # Number x of the table is its halves 2 x and 2 x + 1, low one first. A high half is 0, as is the reserved row.
        source = torch.where(position < ends[-1], 2 * (request * columns + column), 1)
        self._source[: source.numel()].copy_(source)

    def name_pages(self, table: torch.Tensor, pool_rows: int) -> None:
        """Write the pages of one layer: a single launch, since there is one of it per layer.

        Args:
            table: `[n, H, N]` int64 contiguous pool rows, of the step that was measured last.
            pool_rows: R.

        Raises:
            ValueError: a table that is not laid out as said, or rows that int32 cannot number.
        """
        if pool_rows - 1 > INT32_MAX:
            raise ValueError(
                f"a pool of {pool_rows} rows (pages times KV heads); FlashInfer numbers {INT32_MAX + 1}. Larger pages "
                "(page_size) make fewer rows"
            )
        if table.dtype != torch.int64 or not table.is_contiguous():
            raise ValueError(f"the page table must be contiguous int64, not {table.dtype} with {table.stride()}")
        size = table.numel()
        torch.index_select(table.view(torch.int32).view(-1), 0, self._source[:size], out=self._indices[:size])
