"""Bringing (page, head) pieces from the host pool to the device pool, by a few programs that leave the rest of the
device to others.

The host pool is read where it is, through the device's view of pinned memory: how many pieces there are is known to the
device alone, and a copy engine would have to be told by the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_sglang.kernels.launch import THREADS, launch, pow2

# Programs that copy at once, and words of 8 bytes that each has on the way: two per thread are one vector of 16 bytes.
PROGRAMS = 16
BLOCK = 1024


@triton.jit(
    do_not_specialize=["lists", "heads", "layers", "layer", "cap"],
    do_not_specialize_on_alignment=["pages", "rows", "count"],
)
def gather_kernel(
    host,
    k_rows,
    v_rows,
    pages,
    rows,
    count,
    lists,
    heads,
    layers,
    layer,
    cap,
    WORDS: tl.constexpr,
    LISTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies pieces `program`, `program + programs`, ... of all lists' pieces put one after the other."""
    each = tl.arange(0, LISTS)
    ends = tl.cumsum(tl.load(count + each, mask=each < lists, other=0), 0)
    total = tl.max(ends, 0)
    for piece in range(tl.program_id(0), total, tl.num_programs(0)):
        before = ends <= piece
        of = tl.sum(before.to(tl.int32), 0)
        nth = piece - tl.max(tl.where(before, ends, 0), 0)
        at = of.to(tl.int64) * cap + nth
        page, row = tl.load(pages + at), tl.load(rows + at)
        source = host + ((page * layers + layer) * heads + of % heads) * (2 * WORDS)
        for start in range(0, WORDS, BLOCK):
            word = start + tl.arange(0, BLOCK)
            inside = word < WORDS
            k = tl.load(source + word, mask=inside)
            v = tl.load(source + WORDS + word, mask=inside)
            tl.store(k_rows + row * WORDS + word, k, mask=inside)
            tl.store(v_rows + row * WORDS + word, v, mask=inside)


def words(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as words of 8 bytes."""
    return x.view(-1).view(torch.int64)


def gather(
    host: torch.Tensor,
    layer: int,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
    count: torch.Tensor,
    programs: int = PROGRAMS,
) -> None:
    """Copy the pieces of one layer that a selection admitted.

    Args:
        host: `[pages, layers, H, 2, page_size, D]` contiguous, pinned where the device is a GPU.
        k_rows, v_rows: `[R, page_size * D]` contiguous, the device pool, of the same item size.
        pages: `[n, H, C]` int64 host pages, contiguous; rows: `[n, H, C]` int64 rows of the pool, contiguous. Of each
            (sequence, head) the first `count` are copied.
        count: `[n, H]` int32, contiguous.
        programs: programs to start, at most: each copies one piece at a time.

    Raises:
        ValueError: the pools are laid out otherwise, or a piece is not a multiple of 16 bytes.
    """
    heads, cap = pages.shape[1:]
    width = host.shape[4] * host.shape[5] * host.element_size()
    if not (host.is_contiguous() and k_rows.is_contiguous() and v_rows.is_contiguous()):
        raise ValueError("the host pool and the device pool must be contiguous")
    if k_rows.shape[-1] * k_rows.element_size() != width or width % 16:
        raise ValueError(f"rows of {k_rows.shape[-1]} {k_rows.dtype} do not take pieces of {width} bytes")
    if not cap:
        return
    launch(
        gather_kernel,
        (programs,),
        words(host),
        words(k_rows),
        words(v_rows),
        pages,
        rows,
        count,
        count.numel(),
        heads,
        host.shape[1],
        layer,
        cap,
        WORDS=width // 8,
        LISTS=max(pow2(count.numel()), THREADS),
        BLOCK=min(BLOCK, pow2(width // 8)),
    )
