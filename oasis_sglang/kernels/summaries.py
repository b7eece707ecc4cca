"""Key summaries on the device, of whole pages and token by token: min/max as `KeySummaries` has them, and 4-bit
sketches as `KeySketches` has them, to the byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_sglang.kernels.launch import ceil_div, launch, page_bits, pow2, require_rows
from oasis_sglang.kernels.logits import to_codes
from oasis_sglang.memory_pool.sketch import LANES, LARGEST, SCALE_BYTES


@triton.jit(do_not_specialize=["last_tokens"], do_not_specialize_on_alignment=["pages"])
def build_minmax_kernel(
    table,
    pages,
    keys,
    stride_m,
    stride_h,
    stride_p,
    last_tokens,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One (page, KV head)."""
    at, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = tl.where(at == tl.num_programs(0) - 1, last_tokens, PAGE)
    lane, d = tl.arange(0, PAGE), tl.arange(0, BLOCK_D)
    inside = (lane < tokens)[:, None] & (d < D)[None, :]
    key = tl.load(
        keys + at * stride_m + head * stride_h + lane[:, None] * stride_p + d[None, :], mask=inside, other=0.0
    )
    key = key.to(tl.float32)
    high = tl.max(tl.where(inside, key, float("-inf")), 0)
    low = tl.min(tl.where(inside, key, float("inf")), 0)
    to = (tl.load(pages + at) * tl.num_programs(1) + head) * (2 * D) + d
    tl.store(table + to, high, mask=d < D)
    tl.store(table + to + D, low, mask=d < D)


@triton.jit(
    do_not_specialize=["tokens", "layer_rows", "queries", "page_shift"],
    do_not_specialize_on_alignment=["slots", "accepted"],
)
def append_minmax_kernel(
    table,
    slots,
    accepted,
    keys,
    tokens,
    layer_rows,
    queries,
    page_shift,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The tokens of one sequence, one after the other, for one KV head of one layer."""
    i, head, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    kept = tl.load(accepted + i)
    d = tl.arange(0, BLOCK_D)
    high = tl.zeros([BLOCK_D], tl.float32)
    low = tl.zeros([BLOCK_D], tl.float32)
    before = tl.full([], -1, tl.int64)
    for j in range(queries):
        token = i * queries + j
        within = (d < D) & (j < kept)
        slot = tl.load(slots + token)
        page = slot >> page_shift
        key = tl.load(keys + ((layer * tokens + token) * heads + head) * D + d, mask=within, other=0.0).to(tl.float32)
        to = (layer * layer_rows + page * heads + head) * (2 * D) + d
        # What an earlier token of this sequence wrote is still in registers, and may not be in memory yet.
        fresh = (slot & ((1 << page_shift) - 1)) == 0
        load = within & (page != before) & (fresh == 0)
        high = tl.where(page == before, high, tl.load(table + to, mask=load, other=0.0).to(tl.float32))
        low = tl.where(page == before, low, tl.load(table + to + D, mask=load, other=0.0).to(tl.float32))
        high = tl.where(fresh, key, tl.maximum(high, key))
        low = tl.where(fresh, key, tl.minimum(low, key))
        before = page
        tl.store(table + to, high, mask=within)
        tl.store(table + to + D, low, mask=within)


@triton.jit
def encode(low, high, LARGEST: tl.constexpr):
    """Packed codes `[tokens, d / 2]` and scales `[tokens]` float16 of the two halves of the kept dimensions."""
    most = tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1))
    scale = tl.div_rn(most, LARGEST * 1.0).to(tl.float16)
    step = scale.to(tl.float32)[:, None]
    first = (to_codes(low, step, LARGEST * 1.0) + 8).to(tl.int32)
    second = (to_codes(high, step, LARGEST * 1.0) + 8).to(tl.int32)
    return (first | (second << 4)).to(tl.uint8), scale


@triton.jit(do_not_specialize=["last_tokens", "page_size"], do_not_specialize_on_alignment=["pages", "dims"])
def build_sketch_kernel(
    table,
    units,
    dims,
    pages,
    keys,
    stride_m,
    stride_h,
    stride_p,
    last_tokens,
    page_size,
    KEPT: tl.constexpr,
    LANES: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One block of tokens of one (page, KV head)."""
    at, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    half: tl.constexpr = KEPT // 2
    block_bytes: tl.constexpr = LANES * half + SCALE_BYTES
    tokens = tl.where(at == tl.num_programs(0) - 1, last_tokens, page_size)
    lane, c = tl.arange(0, LANES), tl.arange(0, BLOCK_C)
    there, in_half = block * LANES + lane < tokens, c < half
    from_row = keys + at * stride_m + head * stride_h + (block * LANES + lane)[:, None] * stride_p
    inside = there[:, None] & in_half[None, :]
    low_dims = tl.load(dims + c, mask=in_half, other=0)
    high_dims = tl.load(dims + half + c, mask=in_half, other=0)
    low = tl.load(from_row + low_dims[None, :], mask=inside, other=0.0).to(tl.float32)
    high = tl.load(from_row + high_dims[None, :], mask=inside, other=0.0).to(tl.float32)
    packed, scale = encode(low, high, LARGEST)
    row = tl.load(pages + at) * tl.num_programs(1) + head
    to = (row * tl.num_programs(2) + block) * block_bytes
    codes = table + to + (64 * (c // 4) + c % 4)[None, :] + (4 * lane)[:, None]
    tl.store(codes, packed, mask=in_half[None, :] & (lane < LANES)[:, None])
    tl.store(units + (to + LANES * half) // 2 + lane, scale)


@triton.jit(
    do_not_specialize=["tokens", "layer_rows", "queries", "page_shift"],
    do_not_specialize_on_alignment=["dims", "slots", "accepted"],
)
def append_sketch_kernel(
    table,
    units,
    dims,
    slots,
    accepted,
    keys,
    tokens,
    layer_rows,
    queries,
    page_shift,
    KEPT: tl.constexpr,
    D: tl.constexpr,
    LANES: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    H: tl.constexpr,
):
    """One token of one layer, all KV heads."""
    at, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = at.to(tl.int64)
    half: tl.constexpr = KEPT // 2
    block_bytes: tl.constexpr = LANES * half + SCALE_BYTES
    if at % queries < tl.load(accepted + at // queries):
        head, c = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_C)
        in_half = c < half
        inside = (head < H)[:, None] & in_half[None, :]
        from_row = keys + ((layer * tokens + token) * H + head)[:, None] * D
        low_dims = tl.load(dims + c, mask=in_half, other=0)
        high_dims = tl.load(dims + half + c, mask=in_half, other=0)
        low = tl.load(from_row + low_dims[None, :], mask=inside, other=0.0).to(tl.float32)
        high = tl.load(from_row + high_dims[None, :], mask=inside, other=0.0).to(tl.float32)
        packed, scale = encode(low, high, LARGEST)
        slot = tl.load(slots + token)
        page_size = 1 << page_shift
        blocks = (page_size + LANES - 1) // LANES
        lane = slot & (page_size - 1)
        row = layer * layer_rows + (slot >> page_shift) * H + head
        to = (row * blocks + lane // LANES) * block_bytes
        codes = table + to[:, None] + (64 * (c // 4) + c % 4)[None, :] + 4 * (lane % LANES)
        tl.store(codes, packed, mask=inside)
        tl.store(units + (to + LANES * half) // 2 + lane % LANES, scale, mask=head < H)


def build_minmax(table: torch.Tensor, pages: torch.Tensor, keys: torch.Tensor, last_tokens: int) -> None:
    """`KeySummaries.rebuild` of one layer.

    Args:
        table: `[rows, 2 * D]` of the keys' dtype, contiguous: one layer of `KeySummaries.table`.
        pages: `[m]` int64 host pages in sequence order.
        keys: `[m, H, page_size, D]`, the last dimension contiguous; all pages full but the last, which holds
            `last_tokens`.
    """
    m, heads, page, dim = keys.shape
    require_rows("keys", keys)
    launch(
        build_minmax_kernel,
        (m, heads),
        table,
        pages,
        keys,
        *keys.stride()[:3],
        last_tokens,
        PAGE=page,
        D=dim,
        BLOCK_D=pow2(dim),
    )


def append_minmax(
    table: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, keys: torch.Tensor, page_size: int
) -> None:
    """`KeySummaries.append_step` for the accepted tokens of each sequence, all layers at once.

    Args:
        table: `[layers, rows, 2 * D]` contiguous.
        slots: `[n * t]` int64; tokens of a sequence follow each other, and sequences are on pages of their own.
        accepted: `[n]` how many of each sequence's t tokens are kept, 0 for an empty row.
        keys: `[layers, n * t, H, D]` contiguous.
    """
    layers, tokens, heads, dim = keys.shape
    n = accepted.numel()
    launch(
        append_minmax_kernel,
        (n, heads, layers),
        table,
        slots,
        accepted,
        keys,
        tokens,
        table.shape[1],
        tokens // max(n, 1),
        page_bits(page_size),
        D=dim,
        BLOCK_D=pow2(dim),
    )


def build_sketches(
    table: torch.Tensor, dims: torch.Tensor, pages: torch.Tensor, keys: torch.Tensor, last_tokens: int
) -> None:
    """`KeySketches.rebuild` of one layer.

    Args:
        table: `[rows, bytes]` uint8, contiguous: one layer of `KeySketches.table`.
        dims: `[d]` int64, the dimensions that sketches keep.
        pages, keys, last_tokens: as for `build_minmax`.
    """
    m, heads, page, _ = keys.shape
    require_rows("keys", keys)
    launch(
        build_sketch_kernel,
        (m, heads, ceil_div(page, LANES)),
        table,
        table.view(torch.float16),
        dims,
        pages,
        keys,
        *keys.stride()[:3],
        last_tokens,
        page,
        KEPT=dims.numel(),
        LANES=LANES,
        LARGEST=LARGEST,
        SCALE_BYTES=SCALE_BYTES,
        BLOCK_C=pow2(dims.numel() // 2),
    )


def append_sketches(
    table: torch.Tensor,
    dims: torch.Tensor,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    keys: torch.Tensor,
    page_size: int,
) -> None:
    """`KeySketches.append_step` for the accepted tokens of each sequence, all layers at once.

    Args:
        table: `[layers, rows, bytes]` uint8, contiguous.
        dims: `[d]` int64, the dimensions that sketches keep.
        slots: `[n * t]` int64, distinct. accepted, keys: as for `append_minmax`.
    """
    layers, tokens, heads, dim = keys.shape
    launch(
        append_sketch_kernel,
        (tokens, layers),
        table,
        table.view(torch.float16),
        dims,
        slots,
        accepted,
        keys,
        tokens,
        table.shape[1],
        tokens // max(accepted.numel(), 1),
        page_bits(page_size),
        KEPT=dims.numel(),
        D=dim,
        LANES=LANES,
        LARGEST=LARGEST,
        SCALE_BYTES=SCALE_BYTES,
        BLOCK_C=pow2(dims.numel() // 2),
        BLOCK_H=pow2(heads),
        H=heads,
    )
