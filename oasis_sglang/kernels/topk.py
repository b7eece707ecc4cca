"""The best pages by their scores, whatever their number: within a kernel, by one program.

The score that the K-th best page has is found as in radix selection: a histogram of the highest byte of the scores'
order-preserving integers says which byte that score has, then the next byte among those that share it, four passes in
all; one more pass collects the pages at and above it, and a bitonic network puts those K in order. Scores are read from
memory in each pass, so there is no limit to their number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from oasis_sglang.memory_pool.working_set import NONE

ABSENT = tl.constexpr(NONE)


@triton.jit
def order(score, column, candidates, sink, recent, slot_of, RESIDENT: tl.constexpr):
    """Scores as uint32 in the same order: 0 for pages that are not to be had, the largest for sink and recent pages.
    What is not a number counts as less than any."""
    score = tl.where(score == score, score, float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    image = bits.to(tl.uint32, bitcast=True) ^ tl.where(bits < 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
    forced = (column < sink) | (column >= candidates - recent)
    image = tl.where(forced, 0xFFFFFFFF, image).to(tl.uint32)
    had = column < candidates
    if RESIDENT:
        had = had & (tl.load(slot_of + column, mask=had, other=ABSENT) != ABSENT)
    return tl.where(had, image, 0).to(tl.uint32)


@triton.jit
def best_pages(
    scores,
    candidates,
    want,
    sink,
    recent,
    slot_of,
    keys,
    BUDGET: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDENT: tl.constexpr,
):
    """The `want` best pages in order `[BUDGET]` int64, -1 after the last; of equal ones the lower first."""
    prefix = tl.full([], 0, tl.uint32)
    need = want
    byte = tl.arange(0, 256)
    for level in tl.static_range(4):
        seen = tl.zeros([256], tl.int32)
        for start in range(0, candidates, BLOCK):
            column = start + tl.arange(0, BLOCK)
            score = tl.load(scores + column, mask=column < candidates, other=float("-inf"))
            image = order(score, column, candidates, sink, recent, slot_of, RESIDENT)
            counts = image > 0
            if level > 0:
                counts = counts & ((image >> (32 - 8 * level)) == prefix)
            digit = ((image >> (24 - 8 * level)) & 255).to(tl.int32)
            seen += tl.histogram(digit, 256, mask=counts)
        reach = tl.cumsum(seen, 0, reverse=True)  # how many have this byte or a larger one
        found = tl.maximum(tl.sum((reach >= need).to(tl.int32), 0) - 1, 0)
        need -= tl.sum(tl.where(byte > found, seen, 0), 0)
        prefix = (prefix << 8) | found.to(tl.uint32)

    # `need` pages that have just the least score are wanted too: the lowest.
    taken = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    tl.debug_barrier()
    for start in range(0, candidates, BLOCK):
        column = start + tl.arange(0, BLOCK)
        score = tl.load(scores + column, mask=column < candidates, other=float("-inf"))
        image = order(score, column, candidates, sink, recent, slot_of, RESIDENT)
        tie = (image == prefix) & (image > 0)
        nth = equal + tl.cumsum(tie.to(tl.int32), 0)
        take = (image > prefix) | (tie & (nth <= need))
        at = taken + tl.cumsum(take.to(tl.int32), 0) - 1
        # Larger scores first, then lower pages, in one number that is not negative.
        key = (image.to(tl.int64) << 31) | (0x7FFFFFFF - column).to(tl.int64)
        tl.store(keys + at, key, mask=take & (at < BUDGET))
        taken += tl.sum(take.to(tl.int32), 0)
        equal += tl.sum(tie.to(tl.int32), 0)
    tl.debug_barrier()
    k = tl.arange(0, BUDGET)
    key = tl.load(keys + k, mask=k < taken, other=-1)
    key = tl.sort(key, descending=True)
    return tl.where(key >= 0, 0x7FFFFFFF - (key & 0x7FFFFFFF), ABSENT)
