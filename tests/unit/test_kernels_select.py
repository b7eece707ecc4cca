"""Selection on the device against a plain restatement of it, and in the place of the tier's own selector."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oasis_sglang.attention.selector import Selection
from oasis_sglang.attention.torch_ops import TorchOps
from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.score import score_minmax, score_sketches
from oasis_sglang.kernels.select import Selected, select, workspace_size
from oasis_sglang.memory_pool.sketch import KeySketches
from oasis_sglang.memory_pool.working_set import NONE, WorkingSets
from tests.unit.harness import Harness, Sequence

pytestmark = pytest.mark.interpreter


class Case:
    """Sequences with scores and working sets in some state that selections may have left."""

    def __init__(
        self,
        candidates: list[int],
        *,
        budget: int = 4,
        sink: int = 0,
        recent: int = 0,
        slack: float = 0.5,
        heads: int = 2,
        fill: float = 0.8,
        levels: int | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            fill: which share of the slots hold a page.
            levels: distinct scores, None for as many as there are pages.
        """
        random = torch.Generator().manual_seed(seed)
        page = 16
        self.config = OasisConfig(
            page_size=page,
            token_budget=budget * page,
            sink_tokens=sink * page,
            recent_tokens=recent * page,
            slack_ratio=slack,
        ).validate()
        n, width, longest = len(candidates), self.config.sparse_set_pages, max(candidates)
        self.step = torch.tensor([1000], dtype=torch.int32)
        self.sets = WorkingSets(
            layers=2,
            kv_heads=heads,
            device_pages=n * width,
            rows=n + 2,
            set_pages=width + 1,
            sequence_pages=longest + 2,
        )
        self.rows = torch.tensor([self.sets.reserve(width).row for _ in candidates])  # type: ignore[union-attr]
        self.tail = torch.tensor(candidates)
        # cells of a head change places, as copies behind a step's back make them
        for layer in range(2):
            for head in range(heads):
                order = torch.randperm(n * width, generator=random) + 1
                self.sets.cells.rows[layer, 1:, head] = self.sets.cells.rows[layer, order, head]
        for i, row in enumerate(self.rows.tolist()):
            for layer in range(2):
                for head in range(heads):
                    count = min(max(round(fill * (width - 1)), min(budget, candidates[i])), width - 1, candidates[i])
                    pages = [*torch.randperm(candidates[i], generator=random)[:count].tolist(), candidates[i]]
                    slots = torch.randperm(width, generator=random)[: len(pages)]
                    self.sets.page_of[layer, row, head, slots] = torch.tensor(pages, dtype=torch.int32)
                    self.sets.slot_of[layer, row, head, pages] = slots.to(torch.int32)
                    used = torch.randint(990, 1000, (len(pages),), generator=random)
                    self.sets.last_used[layer, row, head, slots] = used.to(torch.int32)
        self.sets.check_integrity()
        self.scores = torch.rand(n, heads, longest, generator=random)
        if levels is not None:
            self.scores = (self.scores * levels).floor() / levels
        self.scores.masked_fill_(torch.arange(longest) >= self.tail.view(-1, 1, 1), -torch.inf)
        self.host_pages = torch.randint(1, 10**6, (n, longest + 1), generator=random)
        self.table = torch.full((n + 1, heads, budget + 2), -7)
        self.at = torch.arange(n, 0, -1)

    def select(self, cap: int | None, **more: Any) -> Selected:
        return select(
            self.scores, self.tail, self.rows, self.host_pages, 1, self.sets, self.config, self.step, self.table,
            self.at, cap=cap, **more,
        )  # fmt: skip

    def expected(self, cap: int | None) -> tuple[dict[str, Any], Any]:
        """Lists that `Selected` and the table should hold; the maps are changed."""
        table = self.table.clone()
        found = plain(
            self.scores, self.tail, self.rows, self.host_pages, 1, self.sets, self.config, int(self.step), table,
            self.at, cap,
        )  # fmt: skip
        return found, table


def plain(
    scores: torch.Tensor,
    tail: torch.Tensor,
    rows: torch.Tensor,
    host_pages: torch.Tensor,
    layer: int,
    sets: WorkingSets,
    config: OasisConfig,
    step: int,
    table: torch.Tensor,
    at: torch.Tensor,
    cap: int | None = None,
) -> dict[str, Any]:
    """What a selection does, one head after the other. Lists per (sequence, head), in the fields of `Selected`."""
    budget = config.budget_pages
    cap = min(config.fetch_cap_pages if cap is None else cap, budget)
    results: dict[str, Any] = {name: [] for name in Selected._fields}
    for i, row in enumerate(rows.tolist()):
        last = int(tail[i])
        want = min(budget, last)
        for head in range(scores.shape[1]):
            slot_of, page_of = sets.slot_of[layer, row, head], sets.page_of[layer, row, head]
            used = sets.last_used[layer, row, head]
            score = [-torch.inf if s != s else s for s in scores[i, head].tolist()]
            for p in range(last):
                if p < config.sink_pages or p >= last - config.recent_pages:
                    score[p] = torch.inf
            ranked = sorted(range(last), key=lambda p: (-score[p], p))
            wanted = ranked[:want]
            used[int(slot_of[last])] = step
            for p in wanted:
                if slot_of[p] != NONE:
                    used[int(slot_of[p])] = step
            missing = [p for p in wanted if slot_of[p] == NONE]
            leaving = sorted((int(u), w) for w, u in enumerate(used.tolist()) if u < step)
            admitted = missing[: min(cap, len(leaving))]
            found = []
            for p, (_, slot) in zip(admitted, leaving, strict=False):
                evicted = int(page_of[slot])
                if evicted != NONE:
                    slot_of[evicted] = NONE
                page_of[slot], slot_of[p], used[slot] = p, slot, step
                cell = int(sets.cells.rows[layer, sets.pages[row, slot], head])
                found.append((int(host_pages[i, p]), cell, slot, p, evicted))
            if len(admitted) < len(missing):
                wanted = [p for p in ranked if slot_of[p] != NONE][:want]
                for p in wanted:
                    used[int(slot_of[p])] = step
            for column, p in enumerate([*wanted, last]):
                device = sets.pages[row, int(slot_of[p])]
                table[at[i], head, column] = sets.cells.rows[layer, device, head]
            results["attended"].append(wanted + [NONE] * (budget - want))
            padded = found + [(NONE,) * 5] * (cap - len(found))
            for name, values in zip(
                ("host", "row", "slot", "page", "evicted"), zip(*padded, strict=True), strict=False
            ):
                results[name].append(list(values))
            results["count"].append(len(admitted))
            results["missed"].append(len(missing))
    return results


def check(case: Case, twin: Case, cap: int | None, **more: Any) -> Selected:
    got = case.select(cap, **more)
    want, table = twin.expected(cap)
    n, heads, _ = case.scores.shape
    for name, value in got._asdict().items():
        if value.numel():
            assert value[:n].reshape(n * heads, *value.shape[2:]).tolist() == want[name], name
    assert torch.equal(case.table, table)
    for name in ("slot_of", "page_of", "last_used"):
        assert torch.equal(getattr(case.sets, name), getattr(twin.sets, name)), name
    case.sets.check_integrity()
    return got


SHAPES: list[tuple[list[int], dict[str, Any]]] = [
    ([9, 30, 6], {}),
    ([40], {"budget": 7, "sink": 1, "recent": 2, "levels": 4, "seed": 1}),
    ([25, 11], {"budget": 5, "slack": 0.0, "heads": 3, "levels": 2, "seed": 2}),
    ([12, 50, 33, 8], {"budget": 8, "sink": 2, "heads": 1, "fill": 1.0, "seed": 3}),
    ([2, 4, 20], {"budget": 4, "recent": 1, "fill": 0.0, "seed": 4}),  # fewer candidates than the budget, empty slots
    ([64, 17], {"budget": 16, "slack": 2.0, "levels": 1, "seed": 5}),  # all pages alike
]


@pytest.mark.parametrize("cap", [None, 0, 1, 3])
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_selection_is_that_of_its_description(number: int, cap: int | None) -> None:
    """Pages in order, ties to the lower; misses in order, capped; victims least recently used; maps and table."""
    candidates, shape = SHAPES[number]
    check(Case(candidates, **shape), Case(candidates, **shape), cap)


def test_results_and_workspace_are_reused() -> None:
    """A graph holds one set of results: an earlier step's must leave no trace."""
    case, twin = Case([30, 22], seed=8), Case([30, 22], seed=8)
    out = Selected.allocate(5, 2, 4, 4, "cpu")
    for x in out:
        x.fill_(12345)
    work = torch.full((workspace_size(2, 2, case.config),), 2**62)
    for cap_seed in range(3):
        for c in (case, twin):
            random = torch.Generator().manual_seed(cap_seed)
            c.scores = torch.rand(c.scores.shape, generator=random)
            c.step += 1
        assert check(case, twin, None, out=out, work=work) is out


def test_rows_that_are_no_ones_change_nothing() -> None:
    """Padded rows of a batch have no working set: no map, no table row is touched, and nothing is to be fetched."""
    case, twin = Case([30, 22], seed=3), Case([30, 22], seed=3)
    case.rows = torch.cat((case.rows[:1], torch.tensor([-1]), case.rows[1:]))
    case.at = torch.cat((case.at[:1], torch.tensor([0]), case.at[1:]))
    case.tail = torch.cat((case.tail[:1], torch.tensor([0]), case.tail[1:]))
    case.scores = torch.cat((case.scores[:1], torch.full_like(case.scores[:1], torch.nan), case.scores[1:]))
    case.host_pages = torch.cat((case.host_pages[:1], torch.full_like(case.host_pages[:1], -1), case.host_pages[1:]))
    got = case.select(None)
    want, table = twin.expected(None)
    assert got.count[1].tolist() == got.missed[1].tolist() == [0, 0]
    assert bool((got.host[1] == NONE).all())
    assert got.page[[0, 2]].flatten(0, 1).tolist() == want["page"]
    assert torch.equal(case.table, table)
    for name in ("slot_of", "page_of", "last_used"):
        assert torch.equal(getattr(case.sets, name), getattr(twin.sets, name)), name


@pytest.mark.parametrize("cap", [None, 2])
def test_scores_that_are_not_numbers_still_choose_pages(cap: int | None) -> None:
    """One request's numeric trouble must leave its maps consistent, and choose pages that there are."""
    case, twin = Case([30, 22], seed=6), Case([30, 22], seed=6)
    for c in (case, twin):
        c.scores[0] = torch.nan
        c.scores[1, 0, 3:9] = torch.nan
    check(case, twin, cap)


def test_tens_of_thousands_of_pages() -> None:
    """Up to 65,536 candidates of which many are alike; the last ones have to be found too."""
    case = Case([65536], budget=24, heads=1, seed=7, levels=3000)
    twin = Case([65536], budget=24, heads=1, seed=7, levels=3000)
    for c in (case, twin):
        c.scores[0, 0, -1] = 2.0
        c.scores[0, 0, 5000:5010] = 1e-30
    got = check(case, twin, 5)
    assert got.attended[0, 0, 0] == 65535 or got.missed[0, 0] > got.count[0, 0]


def test_results_of_another_shape_are_refused() -> None:
    case = Case([30, 22])
    with pytest.raises(ValueError, match="do not fit 2 sequences with 3 misses"):
        case.select(3, out=Selected.allocate(2, 2, 4, 4, "cpu"))
    case.table = case.table[..., :4]
    with pytest.raises(ValueError, match="no room for 4 pages and the tail"):
        case.select(3)


class StepSelector:
    """A `PageSelector` for the tier of a CPU host, by the kernels or by torch's scores and `plain`."""

    def __init__(self, harness: Harness, *, kernels: bool) -> None:
        self.config, self.tier, self.kernels = harness.config, harness.tier, kernels

    def _scores(
        self, layer: int, q: torch.Tensor, pages: torch.Tensor, tail: torch.Tensor, scale: float
    ) -> torch.Tensor:
        summaries = self.tier.summaries
        g, table = summaries.geometry, summaries.table[layer]
        if not self.kernels:
            rows = summaries.row_ids(pages).transpose(1, 2)
            return torch.stack([summaries.score(TorchOps(), layer, x, rows, tail, scale) for x in q.unbind(1)]).amax(0)
        if isinstance(summaries, KeySketches):
            return score_sketches(q, summaries.dims, table, pages, tail, g.kv_heads, g.page_size, scale)
        return score_minmax(q, table, pages, tail, g.kv_heads, scale)

    def refresh(
        self,
        layer: int,
        q: torch.Tensor,
        rows: torch.Tensor,
        tail: torch.Tensor,
        host_pages: torch.Tensor,
        step: int,
        scale: float,
        table: torch.Tensor,
        at: torch.Tensor,
    ) -> Selection:
        pages = host_pages.contiguous()
        scores, sets, config = self._scores(layer, q, pages, tail, scale), self.tier.sets, self.config
        if self.kernels:
            now = torch.tensor([step], dtype=torch.int32)
            got = select(scores, tail, rows, pages, layer, sets, config, now, table, at)
        else:
            lists = plain(scores, tail, rows, pages, layer, sets, config, step, table, at)
            got = Selected(*(torch.tensor(lists[x]).unflatten(0, scores.shape[:2]) for x in Selected._fields))
        sequence, head, nth = (torch.arange(got.host.shape[-1]) < got.count.unsqueeze(-1)).nonzero(as_tuple=True)
        host, row, slot, page, evicted = (x[sequence, head, nth] for x in got[1:6])
        misses = torch.stack((host, head, row, sequence, slot, page, evicted))
        return Selection(got.attended, misses, int(got.missed.sum()))


@pytest.mark.parametrize(
    ("policy", "summary", "fetch", "chain"),
    [("wait", "sketch", 1.0, 1), ("wait", "minmax", 1.0, 3), ("skip", "sketch", 0.3, 1), ("skip", "sketch", 0.5, 2)],
)
def test_a_tier_decodes_the_same_by_the_kernels(policy: Any, summary: Any, fetch: float, chain: int) -> None:
    """Steps of several sequences, of which some cross from dense to sparse, choose, fetch and evict the same pages as
    the plain selection does; and give what the tier's own selector gives, as long as no cap makes them differ."""
    config = OasisConfig(
        page_size=16, token_budget=64, miss_policy=policy, summary=summary, fetch_ratio=fetch, slack_ratio=0.5
    )
    outputs, maps = [], []
    for kind in ("kernels", "plain", "own")[: 3 if policy == "wait" else 2]:
        harness = Harness(config, head_dim=16, device_pages=40, rows=3, layers=1, chain=chain)
        if kind != "own":
            harness.tier.selector = StepSelector(harness, kernels=kind == "kernels")
        sequences: list[Sequence] = []
        for tokens in (60, 190, 78):  # 78 crosses the budget on the way, 60 does not
            s = harness.admit(tokens + 24)
            assert s is not None
            harness.extend(s, tokens)
            sequences.append(s)
        steps = []
        for number in range(4):
            if chain == 1:
                steps.append(harness.decode(sequences)[1][0])
            else:
                kept = [1 + (number + i) % chain for i in range(3)]
                steps.append(harness.verify(sequences, kept)[0][3])
        harness.tier.check_integrity()
        outputs.append(torch.stack(steps))
        maps.append(harness.tier.sets)
    assert torch.equal(outputs[0], outputs[1])
    for name in ("slot_of", "page_of", "last_used"):
        assert torch.equal(getattr(maps[0], name), getattr(maps[1], name)), name
    torch.testing.assert_close(outputs[0], outputs[-1], rtol=1e-5, atol=1e-5)
