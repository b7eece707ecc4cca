"""Logits of pages by their key summaries, and what split softmax needs of each part of them."""

from __future__ import annotations

import triton
import triton.language as tl

# Adding and taking away 1.5 * 2^23 rounds a float32 to the nearest integer, halves to even, as torch.round does.
ROUNDER = tl.constexpr(12582912.0)
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def to_codes(x, unit, LARGEST: tl.constexpr):
    """`x / unit`, rounded half to even and clamped to `LARGEST`; 0 where the unit is."""
    some = unit > 0
    whole = (tl.div_rn(x, tl.where(some, unit, 1.0)) + ROUNDER) - ROUNDER
    return tl.where(some, tl.minimum(tl.maximum(whole, -LARGEST), LARGEST), 0.0)


@triton.jit
def page_rows(pages, column, valid, head, stride, FROM_PAGES: tl.constexpr):
    """Rows of the summary table: host pages times heads plus the head, or rows as they are given."""
    at = tl.load(pages + column * stride, mask=valid, other=0)
    if FROM_PAGES:
        at = at * tl.num_programs(1) + head
    return at


@triton.jit
def keep_logits(logit, column, end, top, mass, logits, in_row, row, columns):
    """Store logits `[M, pages]` and update each row's maximum and sum; returns them."""
    counts = column < end
    logit = tl.where(counts[None, :], logit, float("-inf"))
    at = row[:, None] * columns + column[None, :]
    tl.store(logits + at, logit, mask=in_row[:, None] & counts[None, :])
    new_top = tl.maximum(top, tl.max(logit, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    mass = mass * tl.exp(top - base) + tl.sum(tl.exp(logit - base[:, None]), 1)
    return new_top, mass


@triton.jit(
    do_not_specialize=["pages_stride_n", "pages_stride_h", "queries", "group", "splits"],
    do_not_specialize_on_alignment=["pages", "counts"],
)
def sketch_kernel(
    q,
    dims,
    table,
    units,
    pages,
    counts,
    logits,
    tops,
    masses,
    q_stride_n,
    q_stride_t,
    q_stride_h,
    pages_stride_n,
    pages_stride_h,
    pages_stride,
    columns,
    scale,
    queries,
    group,
    splits,
    KEPT: tl.constexpr,
    PAGE: tl.constexpr,
    LANES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    FROM_PAGES: tl.constexpr,
):
    """Logits by sketches: the largest q.k of a page's tokens, products of integers being exact."""
    split, head, i = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    half: tl.constexpr = KEPT // 2
    block_bytes: tl.constexpr = LANES * half + SCALE_BYTES
    tokens: tl.constexpr = (PAGE + LANES - 1) // LANES * LANES
    width: tl.constexpr = tokens // LANES * block_bytes

    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_C)
    query, member = m // group, m % group
    in_row, in_half = m < queries * group, c < half
    q_at = i * q_stride_n + query * q_stride_t + (head * group + member) * q_stride_h
    in_tile = in_row[:, None] & in_half[None, :]
    low_dims = tl.load(dims + c, mask=in_half, other=0)
    high_dims = tl.load(dims + half + c, mask=in_half, other=0)
    low = tl.load(q + q_at[:, None] + low_dims[None, :], mask=in_tile, other=0.0).to(tl.float32)
    high = tl.load(q + q_at[:, None] + high_dims[None, :], mask=in_tile, other=0.0).to(tl.float32)
    unit = tl.div_rn(tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)), 127.0)
    low = to_codes(low, unit[:, None], 127.0).to(tl.int8)
    high = to_codes(high, unit[:, None], 127.0).to(tl.int8)

    total = tl.minimum(tl.load(counts + i).to(tl.int32), columns)
    part = tl.cdiv(tl.cdiv(total, BLOCK_P), splits) * BLOCK_P
    first = split * part
    end = tl.minimum(first + part, total)
    row = ((i * heads + head) * (queries * group) + m).to(tl.int64)
    pages += i * pages_stride_n + head * pages_stride_h
    x = tl.arange(0, BLOCK_P * tokens)
    lane = x % tokens
    inside = lane // LANES * block_bytes
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    for start in range(first, end, BLOCK_P):
        column = start + x // tokens
        valid = (column < end) & (lane < PAGE)
        base = page_rows(pages, column, valid, head, pages_stride, FROM_PAGES) * width + inside
        at = base[None, :] + (64 * (c // 4) + c % 4)[:, None] + 4 * (lane % LANES)[None, :]
        packed = tl.load(table + at, mask=valid[None, :] & in_half[:, None], other=0)
        # Dimensions past the kept ones have codes too, which meet zeros of the query.
        dots = tl.dot(low, (packed & 15).to(tl.int8) - 8, out_dtype=tl.int32)
        dots = tl.dot(high, (packed >> 4).to(tl.int8) - 8, dots, out_dtype=tl.int32)
        step = tl.load(units + (base + LANES * half) // 2 + lane % LANES, mask=valid, other=0.0).to(tl.float32)
        each = dots.to(tl.float32) * (unit * scale)[:, None] * step[None, :]
        each = tl.where(valid[None, :], each, float("-inf"))
        best = tl.max(tl.reshape(each, [BLOCK_M, BLOCK_P, tokens]), 2)
        here = start + tl.arange(0, BLOCK_P)
        top, mass = keep_logits(best, here, end, top, mass, logits, in_row, row, columns)
    tl.store(tops + row * splits + split, top, mask=in_row)
    tl.store(masses + row * splits + split, mass, mask=in_row)


@triton.jit
def signed(q, q_at, in_row, d, D: tl.constexpr, DOT: tl.constexpr):
    """Dimensions `d` of the queries' positive and negative parts, `[M, d]` each."""
    inside = in_row[:, None] & (d < D)[None, :]
    tile = tl.load(q + q_at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.maximum(tile, 0.0).to(DOT), tl.minimum(tile, 0.0).to(DOT)


@triton.jit
def add_bounds(above, below, table, base, valid, d, bound, D: tl.constexpr, DOT: tl.constexpr):
    """`bound` `[M, pages]` and what dimensions `d` of the pages' largest and smallest keys add to it."""
    at = base[None, :] + d[:, None]
    inside = valid[None, :] & (d < D)[:, None]
    high = tl.load(table + at, mask=inside, other=0.0).to(DOT)
    low = tl.load(table + at + D, mask=inside, other=0.0).to(DOT)
    bound = tl.dot(above, high, bound, input_precision=PRECISION)
    return tl.dot(below, low, bound, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=["pages_stride_n", "pages_stride_h", "queries", "group", "splits"],
    do_not_specialize_on_alignment=["pages", "counts"],
)
def minmax_kernel(
    q,
    table,
    pages,
    counts,
    logits,
    tops,
    masses,
    q_stride_n,
    q_stride_t,
    q_stride_h,
    pages_stride_n,
    pages_stride_h,
    pages_stride,
    columns,
    scale,
    queries,
    group,
    splits,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    FROM_PAGES: tl.constexpr,
    DOT: tl.constexpr,
):
    """Logits by bounds: the sum over dimensions of max(q high, q low), which is q+ . high + q- . low. `BLOCK_D`
    dimensions at a time: where they are not all, the queries are read again with every block of pages."""
    split, head, i = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    m = tl.arange(0, BLOCK_M)
    query, member = m // group, m % group
    in_row = m < queries * group
    q_at = i * q_stride_n + query * q_stride_t + (head * group + member) * q_stride_h
    if BLOCK_D >= D:
        above, below = signed(q, q_at, in_row, tl.arange(0, BLOCK_D), D, DOT)

    total = tl.minimum(tl.load(counts + i).to(tl.int32), columns)
    part = tl.cdiv(tl.cdiv(total, BLOCK_P), splits) * BLOCK_P
    first = split * part
    end = tl.minimum(first + part, total)
    row = ((i * heads + head) * (queries * group) + m).to(tl.int64)
    pages += i * pages_stride_n + head * pages_stride_h
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    for start in range(first, end, BLOCK_P):
        column = start + tl.arange(0, BLOCK_P)
        valid = column < end
        base = page_rows(pages, column, valid, head, pages_stride, FROM_PAGES) * (2 * D)
        bound = tl.zeros([BLOCK_M, BLOCK_P], tl.float32)
        if BLOCK_D >= D:
            bound = add_bounds(above, below, table, base, valid, tl.arange(0, BLOCK_D), bound, D, DOT)
        else:
            for dim in range(0, D, BLOCK_D):
                d = dim + tl.arange(0, BLOCK_D)
                plus, minus = signed(q, q_at, in_row, d, D, DOT)
                bound = add_bounds(plus, minus, table, base, valid, d, bound, D, DOT)
        top, mass = keep_logits(bound * scale, column, end, top, mass, logits, in_row, row, columns)
    tl.store(tops + row * splits + split, top, mask=in_row)
    tl.store(masses + row * splits + split, mass, mask=in_row)
