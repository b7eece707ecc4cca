"""Pages brought in behind the steps' backs: whatever becomes of a plan, a step attends to whole pages (contracts 3-5).

The workers are one object here, which copies when a test says so, never, or by halves.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool import prefetcher
from oasis_sglang.memory_pool.pieces import NumpySteps
from tests.unit import oracle
from tests.unit.harness import Harness, Sequence


class Ended(NamedTuple):
    sequence: int
    status: str


class Courier:
    """A client of workers that are slow, lossy or idle, by the moods in the hat."""

    stats = None

    @property
    def outstanding(self) -> int:
        return len(self.waiting)

    def __init__(self, harness: Harness, moods: list[str], seed: int) -> None:
        self.harness, self.moods, self.random = harness, moods, random.Random(seed)
        self.waiting: dict[int, tuple[str, np.ndarray, np.ndarray]] = {}
        self.submitted = self.polls = 0
        self.reversed = False
        self.cancelled: list[tuple[int, int]] = []
        self.attempts: list[list[list[int]]] = []

    def submit(self, attempts, source_ids, target_ids, *, step, first_layer, end_layer):  # type: ignore[no-untyped-def]
        assert sum(count for _, _, count in attempts) == len(source_ids) == len(target_ids) > 0
        assert 0 <= first_layer < end_layer <= self.harness.geometry.layers
        mood = self.random.choice(self.moods)
        if mood == "full":
            return None
        self.submitted += 1
        self.attempts.append(attempts.tolist())
        self.waiting[self.submitted] = (mood, source_ids.copy(), target_ids.copy())
        self._write(source_ids, target_ids, spoil=True)  # it has begun
        return self.submitted

    def _write(self, source: np.ndarray, target: np.ndarray, *, spoil: bool) -> None:
        g, pool = self.harness.geometry, self.harness.pool
        halves = pool.view(-1, g.page_size, g.head_dim)
        stride = halves.shape[0] // (2 * g.layers)
        pieces = self.harness.tier.host.kv.view(-1, 2, g.page_size, g.head_dim)
        for s, t in zip(source.tolist(), target.tolist(), strict=True):
            halves[t] = torch.nan if spoil else pieces[s, 0]
            halves[t + stride] = torch.nan if spoil else pieces[s, 1]

    def poll(self) -> list[Ended]:
        self.polls += 1
        ends = []
        for sequence, (mood, source, target) in sorted(self.waiting.items(), reverse=self.reversed):
            if mood == "never" or (mood == "slow" and self.random.random() < 0.9):
                continue
            del self.waiting[sequence]
            if mood == "lost":
                ends.append(Ended(sequence, "lost"))
                continue
            self._write(source, target, spoil=False)
            ends.append(Ended(sequence, "done"))
        return ends

    def cancel(self, attempt: tuple[int, int]) -> None:
        self.cancelled.append(attempt)

    def give_up(self) -> None:
        """The workers that never answered are gone for certain."""
        self.waiting = {k: ("lost", *rest) for k, (_, *rest) in self.waiting.items()}


def watched(harness: Harness) -> dict[int, tuple[torch.Tensor, ...]]:
    """What `fill_table` is told last, by layer: rows, pages, tails."""
    seen: dict[int, tuple[torch.Tensor, ...]] = {}
    fill = harness.tier.sets.fill_table

    def spy(layer, rows, pages, tail, table, at):  # type: ignore[no-untyped-def]
        seen[layer] = (rows.clone(), pages.clone(), tail.clone())
        fill(layer, rows, pages, tail, table, at)
        cells = harness.tier.sets.cells.rows[layer]
        assert bool(torch.isin(table, cells).all()), "C13: a step reads a row that a copy may write"

    harness.tier.sets.fill_table = spy  # type: ignore[method-assign]
    return seen


def check_step(harness: Harness, running: list[Sequence], seen: dict[int, tuple[torch.Tensor, ...]], page: int) -> None:
    """One step; every sparse sequence attends to as many different pages as the budget has, whole, from the host."""
    seen.clear()
    queries, outputs = harness.decode(running)
    for layer, output in enumerate(outputs):
        assert bool(torch.isfinite(output).all())
        rows, pages, tails = seen.get(layer, (torch.empty(0), torch.empty(0), torch.empty(0)))
        for row, chosen, tail in zip(rows.tolist(), pages, tails.tolist(), strict=True):
            at = next(i for i, s in enumerate(running) if s.attempt.row == row)
            s = running[at]
            k, v = oracle.sequence(harness.tier.host, layer, s.pages, s.tokens)
            ks, vs = [], []
            for head, mine in enumerate(chosen.tolist()):
                assert len(set(mine)) == harness.config.budget_pages
                assert max(mine) < tail
                lanes = [t for p in [*mine, tail] for t in range(p * page, min((p + 1) * page, s.tokens))]
                ks.append(k[lanes, head])
                vs.append(v[lanes, head])
            expected = oracle.attention(queries[layer][at].double(), torch.stack(ks), torch.stack(vs), harness.scale)
            torch.testing.assert_close(output[at].double(), expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_becomes_of_plans(data: st.DataObject) -> None:
    """Contracts 3, 4 and 5: plans done, slow, refused, lost with their worker, or never ended, requests coming and
    leaving in between; steps attend to whole pages, and no row of the pool gets lost."""
    page = 4
    budget = data.draw(st.integers(2, 5), "budget pages")
    config = OasisConfig(
        page_size=page,
        token_budget=budget * page,
        slack_ratio=data.draw(st.sampled_from([0.0, 0.5]), "slack"),
        fetch_ratio=data.draw(st.sampled_from([0.4, 1.0]), "fetch"),
        miss_policy="skip",
    )
    seed = data.draw(st.integers(0, 99), "seed")
    harness = Harness(
        config, layers=4, group=1, host_pages=120, device_pages=3 * config.max_set_pages, rows=3,
        context_len=40 * page, seed=seed, spare_pages=data.draw(st.integers(1, 12), "spare"),
    )  # fmt: skip
    moods = data.draw(st.lists(st.sampled_from(["done", "slow", "lost", "never", "full"]), min_size=1), "moods")
    courier = Courier(harness, moods, seed)
    harness.tier.prefetch_by(courier)
    if data.draw(st.booleans(), "without a compiler"):
        prefetch = harness.tier.prefetcher
        prefetch.steps = NumpySteps(harness.tier.sets, prefetch._shape)  # type: ignore[union-attr]
    seen = watched(harness)
    running: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 8), "rounds")):
        if len(running) < 3 and data.draw(st.booleans(), "join"):
            s = harness.admit(30 * page)
            if s is not None:
                harness.extend(s, data.draw(st.sampled_from([3, budget + 1, budget + 3, 14]), "prompt") * page - 1)
                running.append(s)
        elif running and data.draw(st.integers(0, 3), "leave") == 0:
            harness.drop(running.pop(data.draw(st.integers(0, len(running) - 1), "which")))
        for _ in range(data.draw(st.integers(1, 7), "steps") if running else 0):
            if max(s.tokens for s in running) >= 28 * page:
                break
            check_step(harness, running, seen, page)
        if data.draw(st.integers(0, 3), "lost") == 0:
            courier.give_up()
        harness.tier.check_integrity()
    for s in running:
        harness.drop(s)
    courier.give_up()
    assert harness.tier.in_flight() == 0
    harness.tier.check_integrity()
    assert harness.tier.sets.cells.lent() == 0
    stats = harness.tier.prefetcher.stats  # type: ignore[union-attr]
    assert stats.used + stats.wasted <= stats.issued


def running_harness(moods: list[str], **more: int) -> tuple[Harness, Courier, Sequence]:
    config = OasisConfig(page_size=4, token_budget=16, slack_ratio=0.5, miss_policy="skip")
    shape = {"layers": 4, "spare_pages": 8, **more}
    harness = Harness(config, group=1, device_pages=16, rows=2, **shape)
    courier = Courier(harness, moods, 0)
    harness.tier.prefetch_by(courier)
    s = harness.admit(200)
    assert s is not None
    harness.extend(s, 60)
    return harness, courier, s


def test_ranks_decide_alike_whenever_copies_end() -> None:
    """C17: two ranks get the same requests, and their workers end in different orders, or never. Over 1,000 steps both
    admit, place and count alike, and write the same KV: nothing that a scheduler decides depends on a copy's end."""
    page, rng = 4, random.Random(17)
    config = OasisConfig(page_size=page, token_budget=12, slack_ratio=0.5, miss_policy="skip")
    moods = ["done", "done", "slow", "lost", "never", "full"]
    room = {"host_pages": 130, "device_pages": 2 * config.max_set_pages + 4, "rows": 3, "context_len": 40 * page}
    ranks = [Harness(config, layers=2, group=1, spare_pages=6, seed=1, **room) for _ in range(2)]
    couriers = [Courier(rank, moods, seed) for seed, rank in enumerate(ranks)]
    for rank, courier in zip(ranks, couriers, strict=True):
        rank.tier.prefetch_by(courier)
    running: list[list[Sequence]] = [[], []]
    logs: list[list[object]] = [[], []]
    steps = refused = 0
    while steps < 1000:
        joins, prompt, leaves, which = rng.random() < 0.3, rng.randrange(3, 60), rng.random() < 0.1, rng.random()
        for rank, mine, log in zip(ranks, running, logs, strict=True):
            if joins and len(mine) < 3:
                s = rank.admit(30 * page)
                log.append(s and tuple(s.attempt))
                if s is not None:
                    rank.extend(s, prompt)
                    mine.append(s)
                refused += s is None
            mine_left = [s for s in mine if s.tokens >= 30 * page - 1]
            if leaves and mine:
                mine_left.append(mine[int(which * len(mine))])
            for s in dict.fromkeys(mine_left):
                mine.remove(s)
                rank.drop(s)
            if mine:
                rank.decode(mine)
            sets = rank.tier.sets
            log.append((sets.free_pages, sets.free_rows, sets.owned_pages, sets.width.tolist(), sets.pages.tolist()))
        if rng.random() < 0.5:
            couriers[steps % 2].give_up()
        assert logs[0] == logs[1]
        for log in logs:
            log.clear()
        steps += bool(running[0])
    assert refused > 0
    assert couriers[0].submitted > 100
    for rank, courier in zip(ranks, couriers, strict=True):
        courier.give_up()
        assert rank.tier.in_flight() == 0
        rank.tier.check_integrity()
    assert torch.equal(ranks[0].tier.host.kv.nan_to_num(), ranks[1].tier.host.kv.nan_to_num())


def test_a_plan_done_in_time_is_used() -> None:
    harness, courier, s = running_harness(["done"])
    before = harness.tier.transfer.stats.pages
    for _ in range(8):
        harness.decode([s])
    stats = harness.tier.prefetcher.stats  # type: ignore[union-attr]
    assert harness.tier.transfer.stats.pages == before, "nothing was copied by the step itself"
    assert harness.tier.in_flight() == 0
    assert stats.issued > 0
    assert stats.used == stats.issued
    assert stats.late == stats.wasted == stats.dropped == 0
    assert tuple(courier.attempts[0][0][:2]) == tuple(s.attempt)


def test_plans_may_end_in_any_order() -> None:
    """C54: the last layers' plan is done first, and taken first."""
    harness, courier, s = running_harness(["done"], layers=24)
    courier.reversed = True
    for _ in range(6):
        harness.decode([s])
    assert harness.tier.in_flight() == 0
    stats = harness.tier.prefetcher.stats  # type: ignore[union-attr]
    assert len(courier.attempts) > 6, "a step has several plans"
    assert 0 < stats.used == stats.issued


def test_a_step_looks_for_messages_once_where_all_is_done() -> None:
    """Neither a layer nor a plan costs a look of its own: one step's two plans are found together."""
    harness, courier, s = running_harness(["done"], layers=24)
    harness.decode([s])
    steps = 6
    for _ in range(steps):
        before = courier.polls
        harness.decode([s])
        assert courier.polls == before + 1
    assert courier.submitted == 2 * (steps + 1)


def test_a_layer_that_gets_no_row_takes_none_from_others() -> None:
    """Misses without a spare row are undone; the rest of their plan is copied and used."""
    harness, _, s = running_harness(["done"])
    cells = harness.tier.sets.cells
    held = {(1, 0): cells.left[1, 0], (2, 1): cells.left[2, 1]}
    for at in held:
        cells.left[at] = 0
    seen = watched(harness)
    for _ in range(6):
        check_step(harness, [s], seen, 4)
    stats = harness.tier.prefetcher.stats  # type: ignore[union-attr]
    assert stats.dropped > 0
    assert stats.late == 0
    assert harness.tier.in_flight() == 0
    assert 0 < stats.used == stats.issued
    for at, left in held.items():
        assert cells.left[at] == 0
        cells.left[at] = left
    harness.tier.check_integrity()


def test_a_plan_never_outgrows_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces than one message may hold are sent in several; a step must not fail for it."""
    monkeypatch.setattr(prefetcher, "PIECES_PER_PLAN", 2)
    harness, courier, s = running_harness(["done"])
    seen = watched(harness)
    for _ in range(6):
        check_step(harness, [s], seen, 4)
    assert max(sum(count for *_, count in plan) for plan in courier.attempts) == 2
    assert harness.tier.in_flight() == 0
    stats = harness.tier.prefetcher.stats  # type: ignore[union-attr]
    assert 0 < stats.used == stats.issued
    harness.tier.check_integrity()


def test_nothing_is_asked_of_workers_when_nothing_is_fetched() -> None:
    """C49: a step whose pages are all resident neither sends nor looks for messages."""
    harness, courier, s = running_harness(["done"])
    harness.drop(s)
    short = harness.admit(60)
    assert short is not None
    harness.extend(short, 9)
    for _ in range(7):
        harness.decode([short])
    assert courier.submitted == courier.polls == 0


def test_a_completion_after_its_request_left_changes_nothing() -> None:
    """C1, C2 and contract 4, made certain: the copy ends when the row has its next request already."""
    harness, courier, s = running_harness(["never"])
    harness.decode([s])
    assert courier.waiting
    harness.drop(s)
    assert courier.cancelled == [tuple(s.attempt)]
    other = harness.admit(200)
    assert other is not None
    assert other.attempt.row == s.attempt.row
    harness.extend(other, 60)
    maps = [x.clone() for x in (harness.tier.sets.page_of, harness.tier.sets.slot_of, harness.tier.sets.cells.rows)]
    courier.waiting = {k: ("done", *rest) for k, (_, *rest) in courier.waiting.items()}
    assert harness.tier.in_flight() == 0
    now = (harness.tier.sets.page_of, harness.tier.sets.slot_of, harness.tier.sets.cells.rows)
    assert all(torch.equal(a, b) for a, b in zip(maps, now, strict=True))
    stats = harness.tier.prefetcher.stats  # type: ignore[union-attr]
    assert (stats.used, stats.wasted) == (0, stats.issued)
    harness.tier.check_integrity()


@pytest.mark.parametrize("spare", [0, 8])
def test_without_spare_rows_or_workers_resident_pages_do(spare: int) -> None:
    """Contract 5: nothing can be sent for; steps go on, and what was dropped is counted."""
    harness, _, s = running_harness(["full"], spare_pages=spare)
    seen = watched(harness)
    for _ in range(6):
        check_step(harness, [s], seen, 4)
    stats = harness.tier.prefetcher.stats  # type: ignore[union-attr]
    assert stats.issued == 0
    assert stats.dropped > 0
    assert harness.tier.sets.cells.lent() == 0


def test_a_stopped_worker_keeps_its_rows_until_it_is_gone() -> None:
    """C4: memory lent to a process that may still write is not used for anything else."""
    harness, courier, s = running_harness(["never"])
    seen = watched(harness)
    for _ in range(10):
        check_step(harness, [s], seen, 4)
    lent = harness.tier.sets.cells.lent()
    assert lent > 0
    for _, (_, source, target) in courier.waiting.items():
        courier._write(source, target, spoil=True)  # it writes after all
    check_step(harness, [s], seen, 4)
    courier.give_up()
    harness.tier.in_flight()
    assert harness.tier.sets.cells.lent() < lent
    harness.tier.check_integrity()


def test_rows_of_a_lost_plan_come_back_to_the_next_steps() -> None:
    """Contract 4: steps that cannot send for anything, since plans that never ended have all the rows, notice that
    these are over; nobody else looks."""
    harness, courier, s = running_harness(["never"])
    cells = harness.tier.sets.cells
    for _ in range(20):
        harness.decode([s])
        if not cells.left.any():
            break
    assert not cells.left.any(), "every spare row is lent"
    for _ in range(3):
        harness.decode([s])
    courier.give_up()
    courier.moods = ["done"]
    before = courier.submitted
    for _ in range(3):
        harness.decode([s])
    assert courier.submitted > before
    harness.tier.check_integrity()


@pytest.mark.parametrize("moods", [["done"], ["slow", "lost"], ["never"], ["full"]])
def test_wait_is_exact_whatever_drafts_prefetch(moods: list[str]) -> None:
    """Contracts 1 and 5: with `wait` a draft's query only warms the device; attention is top-K by the token's own."""
    config = OasisConfig(page_size=4, token_budget=16, slack_ratio=0.5, predictor="draft", probe=True)
    harness = Harness(
        config, layers=3, group=1, device_pages=20, rows=2, chain=2, probe=True, spare_pages=6, seed=3
    )  # fmt: skip
    courier = Courier(harness, moods, 0)
    harness.tier.prefetch_by(courier)
    s = harness.admit(200)
    assert s is not None
    harness.extend(s, 60)
    for _ in range(12):
        at = s.tokens
        for layer, (q, k, v, out) in enumerate(harness.verify([s], [1])):
            keys, values = oracle.sequence(harness.tier.host, layer, s.pages, at)
            keys = torch.cat((keys, k[0, :1].double()))
            values = torch.cat((values, v[0, :1].double()))
            chosen = oracle.top_pages(q[0, 0].double(), keys, at + 1, config, harness.scale)
            ks, vs = [], []
            for head, mine in enumerate(chosen):
                lanes = [t for p in [*mine, at // 4] for t in range(p * 4, min((p + 1) * 4, at + 1))]
                ks.append(keys[lanes, head])
                vs.append(values[lanes, head])
            expected = oracle.attention(q[0, 0].double(), torch.stack(ks), torch.stack(vs), harness.scale)
            torch.testing.assert_close(out[0, 0].double(), expected, atol=1e-5, rtol=1e-4)
        harness.tier.check_integrity()
    stats = harness.tier.prefetcher.stats  # type: ignore[union-attr]
    if moods == ["done"]:
        assert stats.used > 0
