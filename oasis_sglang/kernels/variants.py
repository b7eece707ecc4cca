"""Every variant of every kernel that is launched, found by launching them on tensors that hold no data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.attend import attend
from oasis_sglang.kernels.backup import backup, write_tokens
from oasis_sglang.kernels.gather import gather
from oasis_sglang.kernels.launch import Launch, recording
from oasis_sglang.kernels.place import place, remember
from oasis_sglang.kernels.score import score_minmax, score_sketches
from oasis_sglang.kernels.select import Selected, select
from oasis_sglang.kernels.summaries import append_minmax, append_sketches, build_minmax, build_sketches
from oasis_sglang.memory_pool.sketch import LANES, SCALE_BYTES
from oasis_sglang.memory_pool.working_set import WorkingSets

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
DTYPES = (BF16, FP16, FP32, FP8)
DIMS, PAGES, GROUPS, QUERIES = (64, 80, 96, 128, 256), (16, 32, 64), (1, 2, 4, 8), (1, 4, 8)
HEADS, LAYERS, HOST_PAGES = 8, 36, 4096
# A batch of one, whose sequences are split most, and one that fills the device unsplit.
BATCHES = (1, 128)
# Tokens of page tables, and batches of 131,072 tokens each, that are cut into 16 to 64 and into 1 to 64 parts.
WIDE_TOKENS, SPLIT_BATCHES = (4096, 8192, 16384), (1, 2, 4, 8, 16, 32, 128)
# (dtype, head dim, page size, group, query tokens, batch): what common models ask for, and the edges of what works.
USUAL = (
    (BF16, 128, 16, 4, 1, 1),
    (BF16, 128, 16, 8, 8, 4),
    (BF16, 128, 64, 4, 4, 128),
    (FP16, 128, 32, 4, 4, 4),
    (FP32, 128, 16, 4, 4, 4),
    (FP8, 128, 16, 4, 4, 4),
    (BF16, 64, 16, 3, 1, 4),
    (BF16, 80, 32, 1, 1, 4),
    (FP8, 96, 32, 8, 2, 4),
    (BF16, 256, 16, 2, 4, 4),
)

Shape = tuple[torch.dtype, int, int, int, int, int]
# What is asked for most; the fewest shapes in which any two values meet; every combination.
Extent = Literal["usual", "pairwise", "all"]
Call = Callable[[], Any]


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def attend_call(
    kv: torch.dtype, dim: int, page: int, group: int, t: int, batch: int, tokens: int = 2048, logs: bool = False
) -> Call:
    """`tokens` that a page table names; `logs` of the softmaxes' sums, which servers do not ask for."""
    q = empty(batch, t, HEADS * group, dim, dtype=BF16 if kv == FP8 else kv)
    pool = empty(HOST_PAGES, page * dim, dtype=kv)
    table = empty(batch, HEADS, tokens // page + 2)
    lse = empty(batch, t, HEADS * group, dtype=FP32) if logs else None
    return lambda: attend(q, pool, pool, table, empty(batch), page, 1.0, lse=lse)


def score_call(kv: torch.dtype, dim: int, page: int, group: int, t: int, batch: int, tokens: int = 32768) -> Call:
    """Sketches of half the dimensions, or of all where a model's rotary embeddings ask for that (here: at 80)."""
    q = empty(batch, t, HEADS * group, dim, dtype=BF16 if kv == FP8 else kv)
    kept = dim if dim == 80 else dim // 2
    blocks = -(-page // LANES)
    sketches = empty(HOST_PAGES, blocks * (LANES * kept // 2 + SCALE_BYTES), dtype=torch.uint8)
    pages = empty(batch, tokens // page)
    return lambda: score_sketches(q, empty(kept), sketches, pages, empty(batch), HEADS, page, 1.0)


def minmax_call(kv: torch.dtype, dim: int, page: int, group: int, t: int, batch: int) -> Call:
    q = empty(batch, t, HEADS * group, dim, dtype=kv)
    summaries = empty(HOST_PAGES, 2 * dim, dtype=kv)
    return lambda: score_minmax(q, summaries, empty(batch, 32768 // page), empty(batch), HEADS, 1.0)


def copy_calls(kv: torch.dtype, dim: int, page: int, t: int, batch: int) -> Iterator[tuple[str, Call]]:
    tokens = batch * t
    host = empty(HOST_PAGES, LAYERS, HEADS, 2, page, dim, dtype=kv)
    pool = empty(HOST_PAGES, page * dim, dtype=kv)
    lanes = pool.view(-1, page, dim)
    misses, count = empty(batch, HEADS, 2048 // page), empty(batch, HEADS, dtype=torch.int32)
    new, step = empty(tokens, HEADS, dim, dtype=kv), empty(LAYERS, tokens, HEADS, dim, dtype=kv)
    yield "gather", lambda: gather(host, 0, pool, pool, misses, misses, count)
    yield "write", lambda: write_tokens(lanes, lanes, empty(tokens, HEADS), empty(tokens), new, new)
    yield "backup", lambda: backup(host, empty(tokens), empty(batch), step, step)


def summary_calls(kv: torch.dtype, dim: int, page: int, t: int, batch: int) -> Iterator[tuple[str, Call]]:
    kept = dim if dim == 80 else dim // 2
    rows, blocks, tokens = HOST_PAGES * HEADS, -(-page // LANES), batch * t
    bounds = empty(LAYERS, rows, 2 * dim, dtype=kv)
    sketches = empty(LAYERS, rows, blocks * (LANES * kept // 2 + SCALE_BYTES), dtype=torch.uint8)
    keys, step = empty(64, HEADS, page, dim, dtype=kv), empty(LAYERS, tokens, HEADS, dim, dtype=kv)
    pages, slots, accepted = empty(64), empty(tokens), empty(batch)
    yield "build minmax", lambda: build_minmax(bounds[0], pages, keys, page)
    yield "append minmax", lambda: append_minmax(bounds, slots, accepted, step, page)
    yield "build sketch", lambda: build_sketches(sketches[0], empty(kept), pages, keys, page)
    yield "append sketch", lambda: append_sketches(sketches, empty(kept), slots, accepted, step, page)


def empty_sets(config: OasisConfig, batch: int, pages: int) -> WorkingSets:
    """Maps that hold no data either."""
    width = config.max_set_pages
    sets = WorkingSets(layers=1, kv_heads=1, device_pages=1, rows=1, set_pages=1, sequence_pages=1, device="meta")
    sets.set_pages, sets.sequence_pages = width, pages + 1
    sets.pages, sets.width = empty(batch, width), empty(batch)
    sets.cells.rows = empty(1, batch * width, HEADS)
    sets.page_of = sets.last_used = empty(1, batch, HEADS, width, dtype=torch.int32)
    sets.slot_of = empty(1, batch, HEADS, pages + 1, dtype=torch.int32)
    return sets


def select_call(config: OasisConfig, pages: int) -> Call:
    """A selection over `pages` columns."""
    batch = 4
    sets = empty_sets(config, batch, pages)
    table = empty(batch, HEADS, config.budget_pages + 2)
    out = Selected.allocate(batch, HEADS, config.budget_pages, config.fetch_cap_pages, "meta")
    scores, step = empty(batch, HEADS, pages, dtype=FP32), empty(1, dtype=torch.int32)
    return lambda: select(
        scores, empty(batch), empty(batch), empty(batch, pages), 0, sets, config, step, table, empty(batch), out=out
    )


def place_calls(config: OasisConfig, t: int) -> Iterator[tuple[str, Call]]:
    """Pages placed for a selection that follows, and for one that is remembered, for good too."""
    batch, budget = 4, config.budget_pages
    sets = empty_sets(config, batch, 64)
    step = faults = empty(1, dtype=torch.int32)
    rows, pages = empty(batch), empty(batch, t)
    new, table = empty(batch * t, HEADS), empty(batch, HEADS, budget + 1 + (t > 1))
    chosen = empty(batch, HEADS, budget, dtype=torch.int32)
    given = (0, rows, rows, pages, pages, sets, step, new, table, faults, budget)
    yield "place", lambda: place(*given)
    for keep in (False, True):
        yield f"recall keep={keep}", partial(place, *given, chosen=chosen, chosen_tail=rows, keep=keep)
    yield "remember", lambda: remember(empty(batch, HEADS, budget), rows, chosen)


def pairwise(*axes: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Few rows, one value of each axis in each, such that any two values of two axes meet in one of them."""
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {row: {(i, row[i], j, row[j]) for i in range(len(row)) for j in range(i)} for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.append(tuple(axis[i] for axis, i in zip(axes, best, strict=True)))
    return chosen


def select_configs(extent: Extent) -> Iterator[OasisConfig]:
    yield OasisConfig()
    yield OasisConfig(page_size=64, token_budget=2048, sink_tokens=64, recent_tokens=128, fetch_ratio=0.05)
    if extent == "pairwise":
        for page, budget, ratio in ((32, 1024, 0.1), (16, 4096, 0.1)):
            yield OasisConfig(page_size=page, token_budget=budget, fetch_ratio=ratio)
    elif extent == "all":
        for page, budget, ratio in itertools.product(PAGES, (512, 1024, 4096), (0.1, 1.0)):
            yield OasisConfig(page_size=page, token_budget=budget, fetch_ratio=ratio)


def split_calls() -> Iterator[tuple[str, Call]]:
    """Into every number of parts that sequences are cut into: joined attention by wide page tables, shares by batches;
    and attention whose logarithms are asked for."""
    for kv, dim, tokens in itertools.product(DTYPES, DIMS, WIDE_TOKENS):
        yield f"attend {str(kv)[6:]} D={dim} L={tokens}", attend_call(kv, dim, 16, 1, 1, 1, tokens)
    for group, batch in itertools.product(GROUPS, SPLIT_BATCHES):
        yield f"score sketch G={group} n={batch}", score_call(BF16, 128, 16, group, 1, batch, 1 << 17)
    for kv, dim, page, group, t, batch in USUAL:
        name = f"{str(kv)[6:]} D={dim} P={page} G={group} t={t} n={batch}"
        yield f"attend {name} logs", attend_call(kv, dim, page, group, t, batch, logs=True)


def calls(extent: Extent) -> Iterator[tuple[str, Call]]:
    axes = (DTYPES, DIMS, PAGES, GROUPS, QUERIES, BATCHES)
    shapes: list[Any] = list(USUAL)
    if extent != "usual":
        shapes = list(itertools.product(*axes)) if extent == "all" else pairwise(*axes)
    everything = extent != "usual"
    for kv, dim, page, group, t, batch in shapes:
        name = f"{str(kv)[6:]} D={dim} P={page} G={group} t={t} n={batch}"
        yield f"attend {name}", attend_call(kv, dim, page, group, t, batch)
    if extent == "all":
        yield from split_calls()
    # Sketches, copies and appends are the same for many of these.
    for kv, dim, page, group, t, batch in shapes if everything else shapes[:2] + shapes[6:]:
        name = f"{str(kv)[6:]} D={dim} P={page} G={group} t={t} n={batch}"
        yield f"score sketch {name}", score_call(kv, dim, page, group, t, batch)
    for kv, dim, page, group, t, batch in shapes if everything else shapes[:1] + shapes[3:5] + shapes[9:]:
        if kv != FP8:  # which has no largest and smallest: torch does not compare them
            name = f"{str(kv)[6:]} D={dim} P={page} G={group} t={t} n={batch}"
            yield f"score minmax {name}", minmax_call(kv, dim, page, group, t, batch)
    for config in select_configs(extent):
        name = f"K={config.budget_pages} C={config.fetch_cap_pages} W={config.max_set_pages}"
        yield f"select {name}", select_call(config, 32768 // config.page_size)
        for t in (1, 4):
            yield from ((f"{kind} {name} t={t}", call) for kind, call in place_calls(config, t))
    for kv, dim, page, _, t, batch in shapes if everything else shapes[:1] + shapes[5:6] + shapes[7:8]:
        name = f"{str(kv)[6:]} D={dim} P={page} t={t} n={batch}"
        yield from ((f"{kind} {name}", call) for kind, call in copy_calls(kv, dim, page, t, batch))
        if kv != FP8:
            yield from ((f"{kind} {name}", call) for kind, call in summary_calls(kv, dim, page, t, batch))


def variants(capability: tuple[int, int], extent: Extent = "usual") -> Iterator[tuple[str, Launch]]:
    """Launches for a device of this compute capability, each with the name of the call that makes it."""
    for name, call in calls(extent):
        with recording(capability) as launches:
            call()
        for launch in launches:
            yield name, launch
