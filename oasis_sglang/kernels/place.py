"""Where a step's tokens and pages are, per layer: the pages that new tokens begin get their slots, and the page table
is written as far as it follows from the maps.

All of it happens on the device, in the layer's turn: the maps of a layer belong to the lookahead of the last step
until that has ended, and a host that would look at them had to wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from oasis_sglang.kernels.launch import THREADS, launch, pow2
from oasis_sglang.kernels.topk import ABSENT
from oasis_sglang.memory_pool.working_set import PINNED, WorkingSets

NEVER = tl.constexpr(PINNED)


@triton.jit
def slot_for(page, may_start, width, slot_of, page_of, last_used, now, set_pages, SLOTS: tl.constexpr):
    """Slot of a page that is being written, given to it now where it has none and may start: slot i for page i while
    the sequence fits, else the least recently used one. -1 where it has none."""
    slot = tl.load(slot_of + page)
    if (slot == ABSENT) & may_start:
        w = tl.arange(0, SLOTS)
        used = tl.load(last_used + w, mask=w < set_pages, other=NEVER)
        age = (used.to(tl.int64) << 32) | w.to(tl.int64)
        oldest = (tl.min(age, 0) & 0xFFFFFFFF).to(tl.int32)
        slot = tl.where(page < width, page.to(tl.int32), oldest)
        evicted = tl.load(page_of + slot)
        tl.debug_barrier()
        tl.store(slot_of + tl.maximum(evicted, 0), ABSENT, mask=evicted != ABSENT)
        tl.debug_barrier()
        tl.store(page_of + slot, page.to(tl.int32))
        tl.store(slot_of + page, slot)
    tl.store(last_used + tl.maximum(slot, 0), now, mask=slot != ABSENT)
    tl.debug_barrier()
    return slot


@triton.jit(
    do_not_specialize=["sequence_pages", "budget_pages", "set_pages", "columns"],
    do_not_specialize_on_alignment=[
        "rows", "sparse_rows", "pages", "offsets", "widths", "owned", "cells", "slot_of", "page_of", "last_used",
        "chosen", "chosen_tail", "token_rows", "table",
    ],
)  # fmt: skip
def place_kernel(
    rows,
    sparse_rows,
    pages,
    offsets,
    widths,
    owned,
    cells,
    slot_of,
    page_of,
    last_used,
    chosen,
    chosen_tail,
    step,
    token_rows,
    table,
    faults,
    sequence_pages,
    budget_pages,
    set_pages,
    columns,
    T: tl.constexpr,
    SLOTS: tl.constexpr,
    LINE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """One (sequence, KV head)."""
    head, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    row = tl.load(rows + i)
    c = tl.arange(0, LINE)
    table += (i * heads + head) * columns
    if row < 0:
        for j in tl.static_range(T):
            tl.store(token_rows + (i * T + j) * heads + head, -1)
        tl.store(table + c, tl.zeros([LINE], tl.int64), mask=c < columns)
        return
    now = tl.load(step)
    width = tl.load(widths + row)
    owned += row * set_pages
    slot_of += (row * heads + head) * sequence_pages
    page_of += (row * heads + head) * set_pages
    last_used += (row * heads + head) * set_pages

    # A chain that was cut short may have started its last page already; that page is in every chain until it is full.
    first, last = tl.load(pages + i * T), tl.load(pages + i * T + T - 1)
    at_start = tl.load(offsets + i * T) == 0
    slot = slot_for(first, at_start, width, slot_of, page_of, last_used, now, set_pages, SLOTS)
    next_slot = slot
    if T > 1:
        next_slot = slot_for(
            last, at_start | (last != first), width, slot_of, page_of, last_used, now, set_pages, SLOTS
        )
    lost = (slot == ABSENT) | (next_slot == ABSENT)
    tail_row = tl.load(cells + tl.load(owned + tl.maximum(slot, 0)) * heads + head)
    next_row = tl.load(cells + tl.load(owned + tl.maximum(next_slot, 0)) * heads + head)
    for j in tl.static_range(T):
        page = tl.load(pages + i * T + j)
        at = tl.where(page == first, tail_row, next_row)
        tl.store(token_rows + (i * T + j) * heads + head, tl.where(lost, -1, at))

    sparse = tl.load(sparse_rows + i) >= 0
    if sparse:
        # What the last step chose. A page that was the tail then was no candidate: it takes the place of the least
        # wanted. Where nothing is chosen ahead, selection writes these columns later.
        line = tl.zeros([LINE], tl.int64)
        if chosen is not None:
            chosen += (row * heads + head) * budget_pages
            inside = c < budget_pages
            want = tl.load(chosen + c, mask=inside, other=ABSENT)
            fresh = tl.load(chosen_tail + row) != first
            want = tl.where(fresh & (c == budget_pages - 1), (first - 1).to(tl.int32), want)
            slots = tl.load(slot_of + want, mask=inside & (want >= 0), other=ABSENT)
            here = slots != ABSENT
            device_page = tl.load(owned + slots, mask=here, other=0)
            line = tl.load(cells + device_page * heads + head, mask=here, other=0)
            lost = lost | (tl.sum(here.to(tl.int32), 0) < budget_pages)
            if KEEP:
                # Nothing else protects these pages, or remembers what took a page's place.
                tl.store(chosen + c, want, mask=inside)
                tl.store(last_used + slots, now, mask=here)
        spill = tl.where(last == first, 0, next_row)
        line = tl.where(c == budget_pages, tail_row, tl.where(c == budget_pages + 1, spill, line))
        tl.store(table + c, line, mask=c < columns)
    else:
        held = c <= last
        lost = lost | (last >= tl.minimum(width, columns))
        device_page = tl.load(owned + c, mask=held & (c < width), other=0)
        line = tl.load(cells + device_page * heads + head)
        tl.store(table + c, tl.where(held, line, 0), mask=c < columns)
    tl.atomic_add(faults, 1, mask=lost)


@triton.jit(do_not_specialize=["budget_pages"], do_not_specialize_on_alignment=["attended", "rows", "chosen"])
def remember_kernel(attended, rows, chosen, budget_pages, BUDGET: tl.constexpr):
    """One (sequence, KV head)."""
    head, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(0)
    row = tl.load(rows + i)
    if row >= 0:
        k = tl.arange(0, BUDGET)
        inside = k < budget_pages
        page = tl.load(attended + (i * heads + head) * budget_pages + k, mask=inside)
        tl.store(chosen + (row * heads + head) * budget_pages + k, page.to(tl.int32), mask=inside)


def place(
    layer: int,
    rows: torch.Tensor,
    sparse_rows: torch.Tensor,
    pages: torch.Tensor,
    offsets: torch.Tensor,
    sets: WorkingSets,
    step: torch.Tensor,
    token_rows: torch.Tensor,
    table: torch.Tensor,
    faults: torch.Tensor,
    budget_pages: int,
    *,
    chosen: torch.Tensor | None = None,
    chosen_tail: torch.Tensor | None = None,
    keep: bool = False,
) -> None:
    """Start the pages that new tokens reach for the first time, and say where tokens and pages are.

    Args:
        rows: `[n]` int64 distinct working-set rows, negative for none: its token rows become -1, its table 0.
        sparse_rows: `[n]` int64, `rows` where a sequence is sparse, else negative.
        pages, offsets: `[n, t]` int64 page and lane of each new token; t at most a page's tokens, so that there are at
            most two pages.
        sets: on the device; of its maps those of `layer` are read and changed.
        step: `[1]` int32 on the device; the pages that tokens go to count as used then.
        token_rows: `[n * t, H]` int64, contiguous; gets the pool rows of the new tokens' pages.
        table: `[n, H, columns]` int64, contiguous. A dense sequence's line gets its pages in order. A sparse one's gets
            the chosen pages, or nothing yet, then the first new token's page, then the last one's where that is
            another; whatever is left names the reserved page.
        faults: `[1]` int32; counts lines whose pages are not on the device, of which nothing should be made.
        chosen: `[rows, H, budget_pages]` int32 pages chosen ahead; chosen_tail: `[rows + 1]` int64 page that a row
            wrote to when they were chosen. keep: what is attended now stays chosen, and counts as used.
    """
    n, t = pages.shape
    heads, columns = table.shape[1:]
    launch(
        place_kernel,
        (heads, n),
        rows,
        sparse_rows,
        pages,
        offsets,
        sets.width,
        sets.pages,
        sets.cells.rows[layer],
        sets.slot_of[layer],
        sets.page_of[layer],
        sets.last_used[layer],
        chosen,
        chosen_tail,
        step,
        token_rows,
        table,
        faults,
        sets.sequence_pages,
        budget_pages,
        sets.set_pages,
        columns,
        T=t,
        SLOTS=max(pow2(sets.set_pages), THREADS),
        LINE=max(pow2(columns), THREADS),
        KEEP=keep,
    )


def remember(attended: torch.Tensor, rows: torch.Tensor, chosen: torch.Tensor) -> None:
    """Keep `attended` `[n, H, K]` int64, contiguous, as `chosen` `[rows, H, K]` int32 of rows `[n]`; a negative row's
    is dropped."""
    n, heads, budget = attended.shape
    launch(remember_kernel, (heads, n), attended, rows, chosen, budget, BUDGET=max(pow2(budget), THREADS))
