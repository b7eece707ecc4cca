"""Scoring pages by their key summaries, min/max bounds (Quest, arXiv 2406.10774) or 4-bit sketches.

Two kernels: the first writes every query row's logit of every page, and for each part of the pages the row's maximum
and sum, as split softmax needs them; the second turns logits into shares of a row's softmax, takes the mean over the
query heads of a group and the maximum over the query tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_sglang.kernels.launch import (
    INDIRECT_STAGES,
    ceil_div,
    dot_dtype,
    launch,
    pow2,
    require_rows,
    split_count,
    workspace,
)
from oasis_sglang.kernels.logits import minmax_kernel, sketch_kernel
from oasis_sglang.memory_pool.sketch import LANES, SCALE_BYTES

MAX_SPLITS = 64
SPLIT_PAGES = 64
TOKENS_PER_BLOCK = 256
SHARE_BLOCK = 512
# Dimensions of float32 that minmax multiplies at once: more of them, in both signs, do not fit the registers.
WIDE_DIMS = 64


@triton.jit(do_not_specialize=["queries"], do_not_specialize_on_alignment=["counts"])
def share_kernel(
    logits,
    tops,
    masses,
    counts,
    scores,
    columns,
    queries,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """From logits to scores, for one block of pages of one (sequence, KV head)."""
    head, i = tl.program_id(1), tl.program_id(2).to(tl.int64)
    lane = i * tl.num_programs(1) + head
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = column < tl.minimum(tl.load(counts + i).to(tl.int32), columns)
    split = tl.arange(0, SPLITS)
    best = tl.zeros([BLOCK], tl.float32)
    for query in range(queries):
        share = tl.zeros([BLOCK], tl.float32)
        for member in range(G):
            row = (lane * queries + query) * G + member
            top = tl.load(tops + row * SPLITS + split)
            most = tl.max(top, 0)
            base = tl.where(most == float("-inf"), 0.0, most)
            mass = tl.sum(tl.load(masses + row * SPLITS + split) * tl.exp(top - base), 0)
            logit = tl.load(logits + row * columns + column, mask=valid, other=float("-inf"))
            share += tl.exp(logit - base) / tl.where(mass > 0, mass, 1.0)
        # A query that is not a number leaves 0: any page is as good as another then.
        best = tl.maximum(best, share / G)
    # Also the columns that do not count are written, so that scores need no clearing.
    tl.store(scores + lane * columns + column, tl.where(valid, best, float("-inf")), mask=column < columns)


def splits_of(sequences: int, kv_heads: int, columns: int, device: torch.device) -> int:
    """Parts that each sequence's pages are cut into, from capacities alone."""
    return split_count(sequences * kv_heads, columns, SPLIT_PAGES, MAX_SPLITS, device)


def workspace_size(
    sequences: int, queries: int, query_heads: int, kv_heads: int, columns: int, device: torch.device
) -> int:
    """float32 that scoring needs to work in for these shapes."""
    return sequences * queries * query_heads * (columns + 2 * splits_of(sequences, kv_heads, columns, device))


class _Scoring:
    """What both kinds of scoring have in common: shapes, strides, and the room for logits."""

    def __init__(
        self, q: torch.Tensor, pages: torch.Tensor, heads: int, out: torch.Tensor | None, work: torch.Tensor | None
    ) -> None:
        self.n, self.t, query_heads, _ = q.shape
        self.heads, self.columns = heads, pages.shape[-1]
        self.group = query_heads // heads
        require_rows("q", q)
        self.splits = splits_of(self.n, heads, self.columns, q.device)
        self.rows = self.n * self.t * query_heads
        self.room = workspace(work, self.rows * (self.columns + 2 * self.splits), q.device)
        if out is None:
            out = torch.empty(self.n, heads, self.columns, dtype=torch.float32, device=q.device)
        self.scores = out
        self.grid = (self.splits, heads, self.n)
        # [n, columns] host pages for all heads, or [n, H, columns] rows
        self.from_pages = pages.dim() == 2
        strides = (pages.stride(0), 0 if self.from_pages else pages.stride(1), pages.stride(-1))
        self.strides = (*q.stride()[:3], *strides, self.columns)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits `[rows, columns]`, maxima and sums `[rows, splits]` each."""
        logits, tops, masses = self.room.split(
            [self.rows * self.columns, self.rows * self.splits, self.rows * self.splits]
        )
        return logits, tops, masses

    def share(self, counts: torch.Tensor) -> torch.Tensor:
        launch(
            share_kernel,
            (ceil_div(self.columns, SHARE_BLOCK), self.heads, self.n),
            *self.parts,
            counts,
            self.scores,
            self.columns,
            self.t,
            G=self.group,
            BLOCK=SHARE_BLOCK,
            SPLITS=self.splits,
        )
        return self.scores


def score_sketches(
    q: torch.Tensor,
    dims: torch.Tensor,
    sketches: torch.Tensor,
    pages: torch.Tensor,
    counts: torch.Tensor,
    kv_heads: int,
    page_size: int,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    work: torch.Tensor | None = None,
) -> torch.Tensor:
    """`AttentionOps.score_sketches` for t query tokens: of their scores a page gets the largest.

    Logits are bit-equal to torch's: integers are exact, and their factors are applied in the same order.

    Args:
        q: `[n, t, Hq, D]` whole queries.
        dims: `[d]` int64, the dimensions that sketches keep; d a multiple of 8.
        sketches: `[R, bytes]` uint8, contiguous, one layer's table.
        pages: `[n, N]` int64 host pages, or `[n, H, N]` rows of `sketches`.
        counts: `[n]` integers, columns that count; the others are not read and score -inf.
        out: `[n, H, N]` float32, contiguous. work: `workspace_size` float32 to work in.

    Returns:
        `out`, or a new tensor like it.
    """
    s = _Scoring(q, pages, kv_heads, out, work)
    tokens = ceil_div(page_size, LANES) * LANES
    block_m = max(16, pow2(s.t * s.group))
    launch(
        sketch_kernel,
        s.grid,
        q,
        dims,
        sketches,
        sketches.view(torch.float16),
        pages,
        counts,
        *s.parts,
        *s.strides,
        scale,
        s.t,
        s.group,
        s.splits,
        KEPT=dims.numel(),
        PAGE=page_size,
        LANES=LANES,
        SCALE_BYTES=SCALE_BYTES,
        BLOCK_M=block_m,
        BLOCK_C=max(32, pow2(dims.numel() // 2)),
        BLOCK_P=max(TOKENS_PER_BLOCK // tokens // (block_m // 16), 1),
        FROM_PAGES=s.from_pages,
        num_stages=INDIRECT_STAGES,
    )
    return s.share(counts)


def score_minmax(
    q: torch.Tensor,
    summaries: torch.Tensor,
    pages: torch.Tensor,
    counts: torch.Tensor,
    kv_heads: int,
    scale: float,
    *,
    out: torch.Tensor | None = None,
    work: torch.Tensor | None = None,
) -> torch.Tensor:
    """`AttentionOps.score_pages` for t query tokens: of their scores a page gets the largest.

    Args:
        q: `[n, t, Hq, D]`.
        summaries: `[R, 2 * D]` of q's dtype, contiguous, one layer's table.
        pages: `[n, N]` int64 host pages, or `[n, H, N]` rows of `summaries`.
        counts: `[n]` integers, columns that count; the others are not read and score -inf.
        out: `[n, H, N]` float32, contiguous. work: `workspace_size` float32 to work in.

    Returns:
        `out`, or a new tensor like it.

    Raises:
        ValueError: `summaries` are of another dtype than the queries.
    """
    if summaries.dtype != q.dtype:
        raise ValueError(f"summaries of {summaries.dtype} do not go with queries of {q.dtype}")
    s = _Scoring(q, pages, kv_heads, out, work)
    block_m, block_d = max(16, pow2(s.t * s.group)), pow2(q.shape[3])
    if q.element_size() > 2:
        block_d = min(block_d, WIDE_DIMS)
    launch(
        minmax_kernel,
        s.grid,
        q,
        summaries,
        pages,
        counts,
        *s.parts,
        *s.strides,
        scale,
        s.t,
        s.group,
        s.splits,
        D=q.shape[3],
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        BLOCK_P=min(max(8192 // (block_d * q.element_size()), 16), 64),
        FROM_PAGES=s.from_pages,
        DOT=dot_dtype(q.dtype),
        num_stages=INDIRECT_STAGES,
    )
    return s.share(counts)
