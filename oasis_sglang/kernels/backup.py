"""Where new tokens go: into the tail page on the device at once, into the host pool when they are accepted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_sglang.kernels.launch import launch, page_bits, pow2, require_rows

# By item size.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def same_bytes(x: torch.Tensor) -> torch.Tensor:
    """8-bit floats as their bytes: copies need no arithmetic, and not every device knows them."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def as_integers(x: torch.Tensor) -> torch.Tensor:
    """Floats as integers of their size, so that one kernel copies all dtypes of it."""
    return x.view(INTEGERS[x.element_size()])


@triton.jit(
    do_not_specialize=["rows_stride", "page_shift"],
    do_not_specialize_on_alignment=["rows", "offsets"],
)
def write_kernel(
    k_lanes,
    v_lanes,
    rows,
    offsets,
    k,
    v,
    k_stride_n,
    k_stride_h,
    v_stride_n,
    v_stride_h,
    rows_stride,
    page_shift,
    D: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    row = tl.load(rows + i * rows_stride + head, mask=head < H, other=-1)
    inside = (row >= 0)[:, None] & (d < D)[None, :]
    to = ((row << page_shift) + tl.load(offsets + i))[:, None] * D + d[None, :]
    tl.store(
        k_lanes + to, tl.load(k + i * k_stride_n + head[:, None] * k_stride_h + d[None, :], mask=inside), mask=inside
    )
    tl.store(
        v_lanes + to, tl.load(v + i * v_stride_n + head[:, None] * v_stride_h + d[None, :], mask=inside), mask=inside
    )


@triton.jit(
    do_not_specialize=["tokens", "layers", "first", "queries", "page_shift"],
    do_not_specialize_on_alignment=["slots", "accepted"],
)
def backup_kernel(
    host,
    slots,
    accepted,
    k,
    v,
    tokens,
    layers,
    first,
    queries,
    page_shift,
    D: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token of one layer."""
    at, layer = tl.program_id(0), tl.program_id(1)
    token = at.to(tl.int64)
    if at % queries < tl.load(accepted + at // queries):
        head, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        inside = (head < H)[:, None] & (d < D)[None, :]
        source = ((layer * tokens + token) * H + head)[:, None] * D + d[None, :]
        slot = tl.load(slots + token)
        page_size = 1 << page_shift
        piece = ((slot >> page_shift) * layers + first + layer) * H + head
        to = (piece * (2 * page_size) + (slot & (page_size - 1)))[:, None] * D + d[None, :]
        tl.store(host + to, tl.load(k + source, mask=inside), mask=inside)
        tl.store(host + to + page_size * D, tl.load(v + source, mask=inside), mask=inside)


def write_tokens(
    k_lanes: torch.Tensor,
    v_lanes: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """`AttentionOps.write_tokens`; a token whose row is negative is not written.

    Args:
        k_lanes, v_lanes: `[R, page_size, D]` contiguous, the pool.
        rows: `[n, H]` int64, the last dimension contiguous. offsets: `[n]` int64.
        k, v: `[n, H, D]` of the pool's dtype, the last dimension contiguous.

    Raises:
        ValueError: dtypes differ, or memory that is not laid out as said.
    """
    n, heads, dim = k.shape
    if k.dtype != k_lanes.dtype or v.dtype != v_lanes.dtype:
        raise ValueError(f"K {k.dtype} and V {v.dtype} do not go into pools of {k_lanes.dtype} and {v_lanes.dtype}")
    if not (k_lanes.is_contiguous() and v_lanes.is_contiguous()):
        raise ValueError("the pool must be contiguous")
    for name, x in (("k", k), ("v", v), ("rows", rows)):
        require_rows(name, x)
    launch(
        write_kernel,
        (n,),
        as_integers(k_lanes),
        as_integers(v_lanes),
        rows,
        offsets,
        as_integers(k),
        as_integers(v),
        *k.stride()[:2],
        *v.stride()[:2],
        rows.stride(0),
        page_bits(k_lanes.shape[1]),
        D=dim,
        H=heads,
        BLOCK_H=pow2(heads),
        BLOCK_D=pow2(dim),
    )


def backup(
    host: torch.Tensor,
    slots: torch.Tensor,
    accepted: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int = 0,
) -> None:
    """Write the accepted tokens of a step to the host pool, all layers at once (`HostPool.write_step`), or some layers.

    How many tokens of a page are written is counted by the host pool (`HostPool.mark_written`), on the host.

    Args:
        host: `[pages, layers, H, 2, page_size, D]` contiguous, pinned where the device is a GPU.
        slots: `[n * t]` int64. accepted: `[n]` how many of each sequence's t tokens are kept, 0 for an empty row.
        k, v: `[layers, n * t, H, D]` contiguous, of the pool's item size.
        first: layer of the pool that the first of `k` and `v` is.

    Raises:
        ValueError: memory that is not laid out as said.
    """
    layers, tokens, heads, dim = k.shape
    if not (host.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        raise ValueError("the host pool and the step's K and V must be contiguous")
    if same_bytes(k).dtype != same_bytes(host).dtype:
        raise ValueError(f"K and V of {k.dtype} do not go into a host pool of {host.dtype}")
    launch(
        backup_kernel,
        (tokens, layers),
        as_integers(host),
        slots,
        accepted,
        as_integers(k),
        as_integers(v),
        tokens,
        host.shape[1],
        first,
        tokens // max(accepted.numel(), 1),
        page_bits(host.shape[4]),
        D=dim,
        H=heads,
        BLOCK_H=pow2(heads),
        BLOCK_D=pow2(dim),
    )
