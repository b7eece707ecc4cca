"""Scoring and selection of pages against `TorchOps` and `TorchSelector`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_scale import Scale
from benchmarks.gpu_sets import on_device
from benchmarks.gpu_stage import Item
from benchmarks.gpu_verdict import equal, near
from oasis_sglang.attention.selector import Selection, TorchSelector
from oasis_sglang.attention.torch_ops import TorchOps
from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.score import score_minmax, score_sketches
from oasis_sglang.kernels.select import Selected, select
from oasis_sglang.memory_pool.host_pool import HostPool
from oasis_sglang.memory_pool.sizing import PoolGeometry
from oasis_sglang.memory_pool.sketch import KeySketches, every_dim, slow_half
from oasis_sglang.memory_pool.summaries import KeySummaries
from oasis_sglang.memory_pool.working_set import WorkingSets

NOWHERE = -(1 << 40)
STEP = 1 << 20
# A softmax's exponentials are not torch's, nor is the order in which minmax adds up.
BOUND = 1e-4


def items(scale: Scale) -> list[Item]:
    found = []
    for t in (1, 4):
        for kind in ("sketch", "minmax"):
            found.append(Item(f"score {kind} t={t}", 6.0, partial(check_scores, scale, kind, t)))
    found.append(Item("score sketch, every dimension", 6.0, partial(check_scores, scale, "sketch", 1, True)))
    pages = scale.page
    for name, keys in (
        ("uncapped", {}),
        ("capped", {"fetch_ratio": 0.05}),
        # One page each: of several that must be taken, torch's order is its own.
        ("sink page", {"sink_tokens": pages}),
        ("recent page", {"recent_tokens": pages}),
    ):
        found.append(Item(f"select {name}", 6.0, partial(check_select, scale, keys)))
    return found


def host_pool(scale: Scale, pages: int, *, layers: int = 1, every: bool = False) -> HostPool:
    """An empty one of the model's shape, whose sketches keep the slower half of the dimensions, or every one."""
    geometry = PoolGeometry(
        layers=layers,
        kv_heads=scale.kv_heads,
        head_dim=scale.head_dim,
        itemsize=scale.dtype.itemsize,
        page_size=scale.page,
        sketch=every_dim(scale.head_dim) if every else slow_half(scale.head_dim),
    )
    return HostPool(pages, geometry, scale.dtype)


def check_scores(scale: Scale, kind: str, t: int, every: bool = False) -> dict[str, Any]:
    """Of sequences of several lengths that name random pages; columns past their ends name no page at all."""
    random = torch.Generator().manual_seed(3 + t)
    pool, n, columns = scale.check_pages, 3, 2 * scale.check_pages
    host = host_pool(scale, pool, every=every)
    summaries = KeySketches(host) if kind == "sketch" else KeySummaries(host)
    keys = torch.randn(pool, scale.kv_heads, scale.page, scale.head_dim, generator=random).to(scale.dtype)
    summaries.rebuild(0, torch.arange(1, pool + 1), keys, scale.page)
    counts = torch.tensor([columns, 1, columns // 2 + 1])
    beyond = torch.arange(columns) >= counts.view(-1, 1)
    pages = torch.randint(1, pool + 1, (n, columns), generator=random)
    q = torch.randn(n, t, scale.query_heads, scale.head_dim, generator=random).to(scale.dtype)

    rows = summaries.row_ids(pages.masked_fill(beyond, 0)).transpose(1, 2)
    each = [summaries.score(TorchOps(), 0, x, rows, counts, scale.scale) for x in q.unbind(1)]
    want = torch.stack(each).amax(0)
    at = partial(torch.Tensor.to, device=scale.device)
    table, named = at(summaries.table[0]), at(pages.masked_fill(beyond, NOWHERE))
    if isinstance(summaries, KeySketches):
        got = score_sketches(
            at(q), at(summaries.dims), table, named, at(counts), scale.kv_heads, scale.page, scale.scale
        )
    else:
        got = score_minmax(at(q), table, named, at(counts), scale.kv_heads, scale.scale)
    functions = ["score_sketches" if kind == "sketch" else "score_minmax"]
    shape = f"n={n} t={t} pages={columns} kept={len(host.geometry.sketch)}" if kind == "sketch" else f"n={n} t={t}"
    return near(functions, shape, got, want, BOUND)


class Given:
    """Scores in the place of summaries: `TorchSelector` then selects by these."""

    def __init__(self, scores: torch.Tensor) -> None:
        self._scores = scores

    def row_ids(self, pages: torch.Tensor) -> torch.Tensor:
        return pages.unsqueeze(-1)

    def score(self, *_: Any) -> torch.Tensor:
        return self._scores


class SelectCase:
    """Working sets in a state that steps may have left, and scores of which no two are alike."""

    def __init__(self, scale: Scale, keys: dict[str, Any]) -> None:
        random = torch.Generator().manual_seed(5)
        self.config = OasisConfig(page_size=scale.page, token_budget=scale.budget, **keys)
        n, heads, width = 3, scale.kv_heads, self.config.max_set_pages
        longest = 4 * scale.budget // scale.page
        self.sets = WorkingSets(
            layers=1, kv_heads=heads, device_pages=n * width, rows=n, set_pages=width, sequence_pages=longest + 1
        )
        attempts = [self.sets.reserve(width) for _ in range(n)]
        self.rows = torch.tensor([attempt.row for attempt in attempts if attempt is not None])
        self.tail = torch.tensor([longest, longest // 2, self.config.budget_pages + 1])
        for row, last in zip(self.rows.tolist(), self.tail.tolist(), strict=True):
            held = min(width - 1, last)
            for head in range(heads):
                pages = torch.cat((torch.randperm(last, generator=random)[:held], torch.tensor([last])))
                slots = torch.randperm(width, generator=random)[: held + 1]
                self.sets.page_of[0, row, head, slots] = pages.to(torch.int32)
                self.sets.slot_of[0, row, head, pages] = slots.to(torch.int32)
                used = torch.randperm(width, generator=random)[: held + 1]
                self.sets.last_used[0, row, head, slots] = used.to(torch.int32)
        order = torch.rand(n, heads, longest, generator=random).argsort(-1).float() / longest
        self.scores = order.masked_fill(torch.arange(longest) >= self.tail.view(-1, 1, 1), -torch.inf)
        self.host_pages = torch.randint(1, 1 << 30, (n, longest + 1), generator=random)
        self.table = torch.full((n + 1, heads, self.config.budget_pages + 2), -7)
        self.at = torch.arange(n, 0, -1)

    def expected(self) -> Selection:
        """The maps and the table change."""
        selector = TorchSelector(self.config, TorchOps(), Given(self.scores), self.sets)  # type: ignore[arg-type]
        q = torch.zeros(self.rows.numel(), 1, 1, 1)
        return selector.refresh(0, q, self.rows, self.tail, self.host_pages, STEP, 1.0, self.table, self.at)

    def run(self, sets: WorkingSets, table: torch.Tensor, device: torch.device) -> Selected:
        scores, tail, rows, pages, at = (
            x.to(device) for x in (self.scores, self.tail, self.rows, self.host_pages, self.at)
        )
        step = torch.tensor([STEP], dtype=torch.int32, device=device)
        return select(scores, tail, rows, pages, 0, sets, self.config, step, table, at)


def check_select(scale: Scale, keys: dict[str, Any]) -> dict[str, Any]:
    case = SelectCase(scale, keys)
    sets, table = on_device(case.sets, scale.device), case.table.clone().to(scale.device)
    got = case.run(sets, table, scale.device)
    want = case.expected()
    found = Selected(*(x.cpu() for x in got))
    sequence, head, nth = (torch.arange(found.host.shape[-1]) < found.count.unsqueeze(-1)).nonzero(as_tuple=True)
    host, row, slot, page, evicted = (x[sequence, head, nth] for x in found[1:6])
    shape = f"n=3 K={case.config.budget_pages} C={case.config.fetch_cap_pages} misses={want.missed}"
    pairs = {name: (getattr(sets, name), getattr(case.sets, name)) for name in ("slot_of", "page_of", "last_used")}
    pairs |= {
        "table": (table, case.table),
        "attended": (found.attended, want.attended),
        "misses": (torch.stack((host, head, row, sequence, slot, page, evicted)), want.misses),
        "missed": (found.missed.sum().view(1), torch.tensor([want.missed])),
    }
    return equal(["select"], shape, pairs)
