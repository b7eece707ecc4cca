"""Page selection on the device: the budget's pages, the misses to bring in, their victims, and the page table.

One program per (sequence, KV head); `topk.py` says how it finds the best pages.

Triton orders accesses to memory within a program only where it is told to, hence the barriers: between reading a map
and writing it, and between writing and reading it again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.launch import launch, pow2
from oasis_sglang.kernels.topk import ABSENT, best_pages
from oasis_sglang.memory_pool.working_set import WorkingSets

BLOCK = 1024
WARPS = 8  # with 4 it spills registers on sm_80
LAST = tl.constexpr(2**63 - 1)


class Selected(NamedTuple):
    """What a selection decided, in fixed shapes (n sequences, H KV heads, K budget pages, C misses at most).

    Of `host` to `evicted` the first `count` of each head's C are misses, the most wanted first; the others hold -1.
    """

    attended: torch.Tensor  # [n, H, K] int64 logical pages, best first; -1 where there are fewer candidates
    host: torch.Tensor  # [n, H, C] int64 host page
    row: torch.Tensor  # [n, H, C] int64 row of the device pool
    slot: torch.Tensor  # [n, H, C] int64 slot of the working set
    page: torch.Tensor  # [n, H, C] int64 logical page
    evicted: torch.Tensor  # [n, H, C] int64 logical page that was in the slot, -1 where it was empty
    count: torch.Tensor  # [n, H] int32 misses admitted
    missed: torch.Tensor  # [n, H] int32 misses, those that the cap left out included

    @classmethod
    def allocate(cls, sequences: int, kv_heads: int, budget: int, cap: int, device: torch.device | str) -> Selected:
        """Room for the results of `select`, for as many sequences as it will ever be called with at once."""
        wide = (sequences, kv_heads)
        attended = torch.empty(*wide, budget, dtype=torch.int64, device=device)
        lists = torch.empty(5, *wide, cap, dtype=torch.int64, device=device)
        counts = torch.empty(2, *wide, dtype=torch.int32, device=device)
        return cls(attended, *lists.unbind(), *counts.unbind())


@triton.jit
def write_pages(
    pages,
    slots,
    tail_row,
    attended,
    table,
    owned,
    cells,
    head,
    heads,
    want,
    BUDGET_PAGES: tl.constexpr,
    BUDGET: tl.constexpr,
):
    """Attended pages and the page table: their pool rows, then the tail's."""
    k = tl.arange(0, BUDGET)
    inside = k < BUDGET_PAGES
    tl.store(attended + k, pages, mask=inside)
    # A page that is nowhere, which a working set of the right size never has, is read as the reserved page.
    here = inside & (slots != ABSENT)
    device_page = tl.load(owned + slots, mask=here, other=0)
    row = tl.load(cells + device_page * heads + head)
    tl.store(table + k, row, mask=inside & (k < want))
    tl.store(table + want, tail_row)


@triton.jit(
    do_not_specialize=["host_stride", "sequence_pages", "table_stride_n", "table_stride_h"],
    do_not_specialize_on_alignment=[
        "tail", "rows", "host_pages", "owned", "cells", "slot_of", "page_of", "last_used", "table", "at", "attended",
        "miss_host", "miss_row", "miss_slot", "miss_page", "miss_evicted", "miss_count", "missed",
    ],
)  # fmt: skip
def select_kernel(
    scores,
    tail,
    rows,
    host_pages,
    owned,
    cells,
    slot_of,
    page_of,
    last_used,
    step,
    table,
    at,
    attended,
    miss_host,
    miss_row,
    miss_slot,
    miss_page,
    miss_evicted,
    miss_count,
    missed,
    scratch,
    columns,
    host_stride,
    sequence_pages,
    table_stride_n,
    table_stride_h,
    BUDGET_PAGES: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    CAP: tl.constexpr,
    SET_PAGES: tl.constexpr,
    BUDGET: tl.constexpr,
    SLOTS: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    head, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    lane = i * heads + head
    row = tl.load(rows + i).to(tl.int64)
    c = tl.arange(0, LIST)
    for_list = lane * CAP + c
    if row < 0:
        tl.store(miss_count + lane, 0)
        tl.store(missed + lane, 0)
        tl.store(miss_host + for_list, ABSENT, mask=c < CAP)
        tl.store(miss_row + for_list, ABSENT, mask=c < CAP)
        tl.store(miss_slot + for_list, ABSENT, mask=c < CAP)
        tl.store(miss_page + for_list, ABSENT, mask=c < CAP)
        tl.store(miss_evicted + for_list, ABSENT, mask=c < CAP)
        return
    now = tl.load(step).to(tl.int32)
    last = tl.load(tail + i).to(tl.int32)
    candidates = tl.minimum(last, columns)
    want = tl.minimum(candidates, BUDGET_PAGES)
    scores += lane * columns
    slot_of += (row * heads + head) * sequence_pages
    page_of += (row * heads + head) * SET_PAGES
    last_used += (row * heads + head) * SET_PAGES
    owned += row * SET_PAGES
    attended += lane * BUDGET_PAGES
    scratch += lane * BUDGET
    table += tl.load(at + i) * table_stride_n + head * table_stride_h

    pages = best_pages(scores, candidates, want, SINK, RECENT, slot_of, scratch, BUDGET, BLOCK, False)
    wanted = pages != ABSENT
    slots = tl.load(slot_of + pages, mask=wanted, other=ABSENT)
    missing = wanted & (slots == ABSENT)
    tail_slot = tl.load(slot_of + last)
    tl.store(last_used + slots, now, mask=wanted & (slots != ABSENT))
    tl.store(last_used + tail_slot, now, mask=tail_slot != ABSENT)
    tl.debug_barrier()

    # The least recently used slots first, of equal ones the lower; those that this step uses never. Slots that a row
    # does not own are marked as used later than any step.
    w = tl.arange(0, SLOTS)
    used = tl.load(last_used + w, mask=w < SET_PAGES, other=now)
    free = used < now
    age = tl.where(free, (used.to(tl.int64) << 32) | w.to(tl.int64), LAST)
    room = tl.minimum(tl.sum(free.to(tl.int32), 0), CAP)
    rank = tl.cumsum(missing.to(tl.int32), 0) - 1
    admitted = missing & (rank < room)
    count = tl.sum(admitted.to(tl.int32), 0)
    misses = tl.sum(missing.to(tl.int32), 0)
    tl.store(miss_count + lane, count)
    tl.store(missed + lane, misses)

    order_of_leaving = (tl.sort(age) & 0xFFFFFFFF).to(tl.int32)
    victim = tl.gather(order_of_leaving, tl.where(admitted, rank, 0), 0)
    evicted = tl.load(page_of + victim, mask=admitted, other=ABSENT)
    host = tl.load(host_pages + i * host_stride + pages, mask=admitted, other=0)
    device_page = tl.load(owned + victim, mask=admitted, other=0)
    pool_row = tl.load(cells + device_page * heads + head, mask=admitted, other=0)
    tl.debug_barrier()
    tl.store(slot_of + evicted, ABSENT, mask=admitted & (evicted != ABSENT))
    tl.store(page_of + victim, pages.to(tl.int32), mask=admitted)
    tl.store(slot_of + pages, victim, mask=admitted)
    tl.store(last_used + victim, now, mask=admitted)
    listed = lane * CAP + rank
    tl.store(miss_host + listed, host, mask=admitted)
    tl.store(miss_row + listed, pool_row, mask=admitted)
    tl.store(miss_slot + listed, victim.to(tl.int64), mask=admitted)
    tl.store(miss_page + listed, pages, mask=admitted)
    tl.store(miss_evicted + listed, evicted.to(tl.int64), mask=admitted)
    unused = (c >= count) & (c < CAP)
    tl.store(miss_host + for_list, ABSENT, mask=unused)
    tl.store(miss_row + for_list, ABSENT, mask=unused)
    tl.store(miss_slot + for_list, ABSENT, mask=unused)
    tl.store(miss_page + for_list, ABSENT, mask=unused)
    tl.store(miss_evicted + for_list, ABSENT, mask=unused)

    tail_page = tl.load(owned + tail_slot, mask=tail_slot != ABSENT, other=0)
    tail_row = tl.load(cells + tail_page * heads + head)
    if misses == count:
        slots = tl.where(admitted, victim, slots)
        write_pages(pages, slots, tail_row, attended, table, owned, cells, head, heads, want, BUDGET_PAGES, BUDGET)
    else:
        # Some stayed out: attend to the best that are resident.
        tl.debug_barrier()
        pages = best_pages(scores, candidates, want, SINK, RECENT, slot_of, scratch, BUDGET, BLOCK, True)
        slots = tl.load(slot_of + pages, mask=pages != ABSENT, other=ABSENT)
        tl.store(last_used + slots, now, mask=slots != ABSENT)
        write_pages(pages, slots, tail_row, attended, table, owned, cells, head, heads, want, BUDGET_PAGES, BUDGET)


def workspace_size(sequences: int, kv_heads: int, config: OasisConfig) -> int:
    """int64 that `select` needs to work in."""
    return sequences * kv_heads * pow2(config.budget_pages)


def select(
    scores: torch.Tensor,
    tail: torch.Tensor,
    rows: torch.Tensor,
    host_pages: torch.Tensor,
    layer: int,
    sets: WorkingSets,
    config: OasisConfig,
    step: torch.Tensor,
    table: torch.Tensor,
    at: torch.Tensor,
    *,
    cap: int | None = None,
    out: Selected | None = None,
    work: torch.Tensor | None = None,
) -> Selected:
    """Choose the budget's pages, swap in at most `cap` that are missing, and write the page table.

    As `PageSelector.refresh` does, once pages are scored. The maps of one layer of `sets`, which must be on the device,
    say at once that the misses are there; whoever attends loads them first. Where the cap, or slots that this step
    uses, leave some of a head's pages out, that head attends to the best that are resident, sink and recent pages
    first.

    Args:
        scores: `[n, H, N]` float32, contiguous; what is not a number counts as less than any.
        tail: `[n]` int64 page that each sequence writes to, resident; the first of those N before it are candidates.
            Where they are fewer than the budget's, all are taken, and the tail comes right after them in the table.
        rows: `[n]` int64 distinct working-set rows; a negative one leaves everything but its miss list as it is.
        host_pages: `[n, at least N]` int64 host pages of each sequence in order, the last dimension contiguous.
        step: `[1]` int32 on the device, larger than in every earlier call.
        table: `[any, H, more than K]` int64; rows `at` `[n]` of it get the pool rows of the attended pages, then of the
            tail.
        cap: misses admitted per head, at most; None for the configuration's.
        out: results of an earlier call, or `Selected.allocate`, to be written again.
        work: `workspace_size` int64, contiguous, to work in.

    Raises:
        ValueError: scores, results or a workspace of other shapes than said.
    """
    n, heads, columns = scores.shape
    budget = config.budget_pages
    cap = min(config.fetch_cap_pages if cap is None else cap, budget)
    if not scores.is_contiguous() or scores.dtype != torch.float32:
        raise ValueError(f"scores must be contiguous float32, not {scores.dtype} with strides {scores.stride()}")
    if table.shape[-1] <= budget:
        raise ValueError(f"a table of {table.shape[-1]} columns has no room for {budget} pages and the tail")
    if out is None:
        out = Selected.allocate(n, heads, budget, cap, scores.device)
    elif out.attended.shape[1:] != (heads, budget) or out.host.shape[1:] != (heads, cap) or out.host.shape[0] < n:
        raise ValueError(f"results of shape {tuple(out.host.shape)} do not fit {n} sequences with {cap} misses")
    room = workspace_size(n, heads, config)
    if work is None:
        work = torch.empty(room, dtype=torch.int64, device=scores.device)
    elif work.dtype != torch.int64 or work.numel() < room or not work.is_contiguous():
        raise ValueError(f"a workspace of {room} contiguous int64 is needed, not {work.numel()} {work.dtype}")
    launch(
        select_kernel,
        (heads, n),
        scores,
        tail,
        rows,
        host_pages,
        sets.pages,
        sets.cells.rows[layer],
        sets.slot_of[layer],
        sets.page_of[layer],
        sets.last_used[layer],
        step,
        table,
        at,
        *out,
        work,
        columns,
        host_pages.stride(0),
        sets.sequence_pages,
        *table.stride()[:2],
        BUDGET_PAGES=budget,
        SINK=config.sink_pages,
        RECENT=config.recent_pages,
        CAP=cap,
        SET_PAGES=sets.set_pages,
        BUDGET=pow2(budget),
        SLOTS=pow2(sets.set_pages),
        LIST=pow2(cap),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out
