"""Sparse decode and chain verification: attention of a few query tokens over a page table per KV head.

Split-K as in FlashDecoding (Dao et al., 2023): the lanes of a sequence are cut into equal parts, each program does one
with the online softmax of FlashAttention (arXiv 2205.14135), and a second kernel joins the parts by the logarithms of
their softmax sums. The query heads of a group times the query tokens are the rows of one matrix product, so that K and
V of a KV head are read once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from oasis_sglang.kernels.launch import (
    INDIRECT_STAGES,
    ceil_div,
    converts_fp8,
    dot_dtype,
    launch,
    page_bits,
    pow2,
    require_rows,
    split_count,
    workspace,
)

FP8 = torch.float8_e4m3fn
MAX_QUERIES = 8
MAX_SPLITS = 64
# Lanes that are worth a program of their own.
SPLIT_LANES = 256
# Query rows of a program, at most; of float32, whose products take the registers of three: where there are more, more
# programs read K and V.
MAX_ROWS, MAX_WIDE_ROWS = 64, 32
# Of a thread, where the compiler would else spill some so that another block fits a multiprocessor.
MAX_REGISTERS = 255
# Parts that are joined at once, at least: one kernel for all batches whose sequences are cut into up to as many.
JOINED = 8
# Bytes of K, and of V, in one step of the loop, as they are multiplied: 8-bit pools are widened first.
TILE_BYTES = 16384
# float32 as three products of TensorFloat-32, which drop only the product of the lowest bits: exact ones have no tensor
# cores, and their operands do not fit the registers.
PRECISION = tl.constexpr("tf32x3")
# float8_e4m3fn put into the bits of float16 is smaller by this: the exponents' biases are 7 and 15.
BYTE_SCALE = 256.0


@triton.jit
def widen(x, DTYPE: tl.constexpr):
    """K or V as they lie in the pool, as `DTYPE`. Bytes are float8_e4m3fn of a device that does not convert it: sign,
    exponent and mantissa are moved to their places in a float16, which makes them `BYTE_SCALE` smaller."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(DTYPE)
    else:
        return x.to(DTYPE)


@triton.jit(
    do_not_specialize=["table_stride_n", "table_stride_h", "queries", "group", "page_shift", "splits"],
    do_not_specialize_on_alignment=["table", "tokens"],
)
def attend_kernel(
    q,
    k_rows,
    v_rows,
    table,
    tokens,
    out,
    lse,
    parts,
    part_lse,
    q_stride_n,
    q_stride_t,
    q_stride_h,
    k_stride,
    v_stride,
    table_stride_n,
    table_stride_h,
    scale,
    v_scale,
    queries,
    group,
    page_shift,
    splits,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CUT: tl.constexpr,
    DOT: tl.constexpr,
):
    """One part of the lanes of one (sequence, KV head), for `BLOCK_M` of its query rows. Scores are kept in base 2:
    `scale` includes log2(e)."""
    head, i = tl.program_id(1), tl.program_id(2).to(tl.int64)
    split, first_m = tl.program_id(0) % splits, tl.program_id(0) // splits * BLOCK_M
    heads = tl.num_programs(1)
    total = tl.load(tokens + i).to(tl.int32)

    m = first_m + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query, member = m // group, m % group
    in_row, in_dim = m < queries * group, d < D
    q += i * q_stride_n + head * group * q_stride_h
    q_at = query * q_stride_t + member * q_stride_h
    tile = tl.load(q + q_at[:, None] + d[None, :], mask=in_row[:, None] & in_dim[None, :], other=0.0).to(DOT)
    # Query token j of t sees all lanes but the last t - 1 - j.
    seen = tl.where(in_row, total - (queries - 1 - query), 0)

    # The parts of a sequence follow its own length, so that none idles; how many there are does not.
    blocks = tl.cdiv(total, BLOCK_N)
    part = tl.cdiv(blocks, splits) * BLOCK_N
    first = split * part
    end = tl.minimum(first + part, total)
    row_table = table + i * table_stride_n + head * table_stride_h
    page_mask = (1 << page_shift) - 1

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_N):
        lane = start + tl.arange(0, BLOCK_N)
        valid = lane < end
        # Lanes without a token are never loaded: what they hold may be NaN, and 0 * NaN is NaN.
        row = tl.load(row_table + (lane >> page_shift), mask=valid, other=0)
        inside = (lane & page_mask) * D
        k_at = row * k_stride + inside
        k = tl.load(k_rows + k_at[None, :] + d[:, None], mask=valid[None, :] & in_dim[:, None], other=0.0)
        score = tl.dot(tile, widen(k, DOT), input_precision=PRECISION) * scale
        score = tl.where(lane[None, :] < tl.minimum(seen, end)[:, None], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        # -inf less -inf is NaN: a row that has seen nothing yet is measured from 0.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        shrink = tl.exp2(top - base)
        mass = mass * shrink + tl.sum(weight, 1)
        v_at = row * v_stride + inside
        v = tl.load(v_rows + v_at[:, None] + d[None, :], mask=valid[:, None] & in_dim[None, :], other=0.0)
        acc = tl.dot(weight.to(DOT), widen(v, DOT), acc * shrink[:, None], input_precision=PRECISION)
        top = new_top

    # Worked out again from what is only known here (0 is added), since registers that keep it through the loop spill.
    m = first_m + tl.arange(0, BLOCK_M) + tl.minimum(total, 0)
    query, member = m // group, m % group
    in_row = m < queries * group
    some = mass > 0
    in_tile = in_row[:, None] & in_dim[None, :]
    result = acc * (v_scale / tl.where(some, mass, 1.0))[:, None]
    logs = tl.where(some, top + tl.log2(tl.where(some, mass, 1.0)), float("-inf"))
    if not CUT:
        first_row = i * (queries * heads * group) + head * group
        row = query * (heads * group) + member
        tl.store(out + first_row * D + row[:, None] * D + d[None, :], result, mask=in_tile)
        if lse is not None:
            tl.store(lse + first_row + row, logs * 0.6931471805599453, mask=in_row)
    else:
        first_row = ((i * heads + head) * splits + split) * (queries * group)
        tl.store(part_lse + first_row + m, logs, mask=in_row)
        if end > first:
            tl.store(parts + first_row * D + m[:, None] * D + d[None, :], result, mask=in_tile)


@triton.jit(do_not_specialize=["queries", "group", "splits"])
def merge_kernel(
    parts,
    part_lse,
    out,
    lse,
    queries,
    group,
    splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Join the parts of one (sequence, query token, query head)."""
    at, query_head = tl.program_id(0), tl.program_id(1)
    i, query, head, member = at // queries, at % queries, query_head // group, query_head % group
    heads, split = tl.num_programs(1) // group, tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    row = ((i.to(tl.int64) * heads + head) * splits + split) * (queries * group) + query * group + member
    logs = tl.load(part_lse + row, mask=split < splits, other=float("-inf"))
    top = tl.max(logs, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(logs - base)
    mass = tl.sum(weight, 0)
    # A part that saw nothing was not written, and may hold anything.
    wrote = logs > float("-inf")
    part = tl.load(parts + row[:, None] * D + d[None, :], mask=wrote[:, None] & (d < D)[None, :], other=0.0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(mass > 0, mass, 1.0)
    out_row = at.to(tl.int64) * tl.num_programs(1) + query_head
    tl.store(out + out_row * D + d, result, mask=d < D)
    if lse is not None:
        logs = tl.where(mass > 0, base + tl.log2(tl.where(mass > 0, mass, 1.0)), float("-inf"))
        tl.store(lse + out_row, logs * 0.6931471805599453)


def splits_of(sequences: int, kv_heads: int, columns: int, page_size: int, device: torch.device) -> int:
    """Parts that `attend` cuts each sequence into, from capacities alone."""
    return split_count(sequences * kv_heads, columns * page_size, SPLIT_LANES, MAX_SPLITS, device)


def workspace_size(
    sequences: int,
    queries: int,
    query_heads: int,
    kv_heads: int,
    dim: int,
    columns: int,
    page_size: int,
    device: torch.device,
) -> int:
    """float32 that `attend` needs to work in for these shapes."""
    splits = splits_of(sequences, kv_heads, columns, page_size, device)
    return sequences * queries * query_heads * splits * (dim + 1) if splits > 1 else 0


def attend(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    page_size: int,
    scale: float,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    work: torch.Tensor | None = None,
) -> torch.Tensor:
    """`AttentionOps.attend`, which reads lengths on the device.

    Args:
        q: `[n, t, Hq, D]`, t at most 8; the last dimension contiguous.
        k_rows, v_rows: `[R, page_size * D]` of q's dtype or float8_e4m3fn, rows of any stride.
        table: `[n, H, N]` int64 pool rows, the last dimension contiguous; columns past a sequence's pages are not read.
        tokens: `[n]` integers, valid lanes: 0 for an empty row, whose output is zero, else at least t. The last t are
            the query tokens.
        scale: what q.k is multiplied with before the softmax.
        k_scale, v_scale: what stored K and V stand for is this much times their value.
        out: `[n, t, Hq, D]` contiguous, of q's dtype. lse: `[n, t, Hq]` float32, contiguous: gets the log of each
            softmax's sum, -inf for an empty row.
        work: `workspace_size` float32 to work in.

    Returns:
        `out`, or a new tensor like it.

    Raises:
        ValueError: too many query tokens, pages that are no power of two, dtypes that do not go together, or memory
            that is not laid out as said.
    """
    n, t, query_heads, dim = q.shape
    heads, columns = table.shape[1:]
    group = query_heads // heads
    if not 1 <= t <= MAX_QUERIES:
        raise ValueError(f"{t} query tokens per sequence; 1 to {MAX_QUERIES} work")
    if k_rows.dtype != v_rows.dtype or k_rows.dtype not in (q.dtype, FP8):
        raise ValueError(f"K {k_rows.dtype} and V {v_rows.dtype} must both be {q.dtype}, the queries' dtype, or {FP8}")
    for name, x in (("q", q), ("k_rows", k_rows), ("v_rows", v_rows), ("table", table)):
        require_rows(name, x)
    if k_rows.dtype == FP8 and not converts_fp8(q.device):
        k_rows, v_rows = k_rows.view(torch.uint8), v_rows.view(torch.uint8)
        k_scale, v_scale = k_scale * BYTE_SCALE, v_scale * BYTE_SCALE
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    splits = splits_of(n, heads, columns, page_size, q.device)
    rows = n * query_heads * t * splits if splits > 1 else 0
    room = workspace(work, rows * (dim + 1), q.device)
    block_d = pow2(dim)
    block_m = min(max(16, pow2(t * group)), MAX_ROWS if q.element_size() == 2 else MAX_WIDE_ROWS)
    # More query rows leave registers for fewer lanes.
    tile, registers = (TILE_BYTES, None) if block_m == 16 else (TILE_BYTES // 2, MAX_REGISTERS)
    launch(
        attend_kernel,
        (splits * ceil_div(t * group, block_m), heads, n),
        q,
        k_rows,
        v_rows,
        table,
        tokens,
        out,
        lse,
        room[: rows * dim],
        room[rows * dim :],
        *q.stride()[:3],
        k_rows.stride(0),
        v_rows.stride(0),
        *table.stride()[:2],
        scale * k_scale * math.log2(math.e),
        v_scale,
        t,
        group,
        page_bits(page_size),
        splits,
        D=dim,
        BLOCK_M=block_m,
        BLOCK_D=block_d,
        BLOCK_N=min(max(tile // (block_d * q.element_size()), 16), 128),
        CUT=splits > 1,
        DOT=dot_dtype(q.dtype),
        num_warps=4 if block_m * block_d <= 32 * 128 else 8,
        num_stages=INDIRECT_STAGES,
        registers=registers,
    )
    if splits > 1:
        launch(
            merge_kernel,
            (n * t, query_heads),
            room[: rows * dim],
            room[rows * dim :],
            out,
            lse,
            t,
            group,
            splits,
            D=dim,
            BLOCK_D=block_d,
            BLOCK_S=max(splits, JOINED),
        )
    return out
