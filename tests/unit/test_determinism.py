"""Contract 1: within the budget a sequence's bits do not depend on budget, pool or company. C48 and C49: nothing grows,
and a step with everything resident costs nothing extra."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import psutil
import pytest
import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.working_set import WorkingSets
from tests.unit.harness import Harness
from tests.unit.replay import Replay

STEPS = 20
# (page, small budget): widths of the page table that are and are not whole blocks of the attention kernel
BUDGETS = [(16, 64), (16, 496), (16, 512), (16, 1040), (32, 512), (64, 640)]


def replay(config: OasisConfig, **sizes: Any) -> Replay:
    shape = {
        "kv_heads": 2,
        "group": 3,
        "head_dim": 64,
        "host_pages": 520,
        "device_pages": 460,
        "rows": 6,
        "context_len": 2400,
        "dtype": torch.bfloat16,
    }
    return Replay(config, **{**shape, **sizes})


def lengths(budget: int, page: int) -> list[int]:
    """Prompts that stay within the budget for `STEPS` more tokens."""
    return [1, budget // 2 - 3, budget - page - 5, budget - STEPS]


def alone(config: OasisConfig, name: int, prompt: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    harness = replay(config)
    sequence, outputs = harness.start(name, prompt, prompt + STEPS)
    return outputs, harness.steps([sequence], STEPS)[0]


@pytest.mark.parametrize(("page", "budget"), BUDGETS)
def test_bits_do_not_depend_on_the_budget(page: int, budget: int) -> None:
    """Contract 1: within budget a sequence gets the bits of the dense path (a budget that nothing exceeds), prompt and
    decode, whatever the slack, the policy and the sinks."""
    large = OasisConfig(page_size=page, token_budget=2048 // page * page)
    small = OasisConfig(page_size=page, token_budget=budget)
    other = OasisConfig(page_size=page, token_budget=budget, slack_ratio=1.0, miss_policy="skip", sink_tokens=page)
    for name, prompt in enumerate(lengths(budget, page)):
        expected_prompt, expected = alone(large, name, prompt)
        for config in (small, other):
            outputs, got = alone(config, name, prompt)
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected_prompt, strict=True))
            assert torch.equal(got, expected), f"prompt of {prompt} tokens, budget {budget}"


@pytest.mark.parametrize("policy", ["wait", "skip"])
@pytest.mark.parametrize(("page", "budget"), BUDGETS)
def test_bits_do_not_depend_on_company(page: int, budget: int, policy: str) -> None:
    """Contract 1: beside long sparse sequences, and in any place of the batch, a short one computes what it does alone.
    The long ones get the same bits in any order."""
    config = OasisConfig(page_size=page, token_budget=budget, miss_policy=policy)
    prompts = lengths(budget, page)
    expected = [alone(config, name, prompt)[1] for name, prompt in enumerate(prompts)]
    long = budget + 6 * page
    runs = []
    for backwards in (False, True):
        harness = replay(config)
        batch = [harness.start(name, prompt, prompt + STEPS)[0] for name, prompt in enumerate(prompts)]
        batch += [harness.start(10 + name, long + name, long + name + STEPS)[0] for name in range(2)]
        outputs = harness.steps(batch[::-1] if backwards else batch, STEPS)
        runs.append(outputs[::-1] if backwards else outputs)
        assert harness.tier.stats.sparse_sequences == 2 * STEPS
    for got, want in zip(runs[0], expected, strict=False):
        assert torch.equal(got, want)
    for forwards, reverse in zip(*runs, strict=True):
        assert torch.equal(forwards, reverse)


def test_bits_beside_long_dense_sequences() -> None:
    """Contract 1: a large min_sparse_len makes the page table wider than any sparse one; short and sparse sequences
    must not notice."""
    config = OasisConfig(token_budget=256, min_sparse_len=1200)
    prompts = [3, 200, 1170, 1300]
    expected = [alone(config, name, prompt)[1] for name, prompt in enumerate(prompts)]
    harness = replay(config)
    batch = [harness.start(name, prompt, prompt + STEPS)[0] for name, prompt in enumerate(prompts)]
    for got, want, prompt in zip(harness.steps(batch, STEPS), expected, prompts, strict=True):
        assert torch.equal(got, want), f"prompt of {prompt} tokens"


@pytest.mark.parametrize("policy", ["wait", "skip"])
def test_a_sequence_that_crosses_leaves_the_others_alone(policy: str) -> None:
    """C21: when one sequence turns sparse in mid-decode, the working sets of those that already are must not be
    touched for it (evicting a page that another's step had been promised stopped the server)."""
    config = OasisConfig(token_budget=64, miss_policy=policy, slack_ratio=0.0)
    expected = alone(config, 1, 250)[1]
    harness = replay(config)
    long, _ = harness.start(1, 250, 250 + STEPS)
    crossing, _ = harness.start(2, 70, 70 + STEPS)
    got = harness.steps([crossing, long], STEPS)[1]
    assert harness.tier.stats.dense_sequences == 10  # lengths 71 to 80; 20 steps in all
    assert torch.equal(got, expected)


def test_cycles_leave_nothing_behind() -> None:
    """C48: 10^4 requests come and go in constant memory, and what a request holds is no view of the free lists."""
    sets = WorkingSets(layers=2, kv_heads=2, device_pages=64, rows=8, set_pages=8, sequence_pages=32)
    lists = {x.untyped_storage().data_ptr() for x in (sets.pages, sets.width, sets.page_of, sets.slot_of)}
    before = {name: x.clone() for name, x in vars(sets).items() if isinstance(x, torch.Tensor)}
    process = psutil.Process()

    def cycle(times: int) -> int:
        for i in range(times):
            attempt = sets.reserve(1 + i % 8)
            assert attempt is not None
            sets.release(attempt)
        gc.collect()
        return process.memory_info().rss

    rounds = [cycle(5000) for _ in range(4)]
    # What else the process does may take memory in any one of them.
    assert min(b - a for a, b in itertools.pairwise(rounds)) < 1 << 18
    sets.check_integrity()
    assert (sets.requests, sets.owned_pages, sets.stale_releases) == (0, 0, 0)
    assert {x.untyped_storage().data_ptr() for x in (sets.pages, sets.width, sets.page_of, sets.slot_of)} == lists
    assert all(torch.equal(getattr(sets, name), x) for name, x in before.items())
    attempt = sets.reserve(3)
    assert attempt is not None
    owned = sets.pages[attempt.row].clone()
    sets._free_pages.reverse()
    assert torch.equal(sets.pages[attempt.row], owned)
    assert all(type(page) is int for page in sets._free_pages), "a tensor in the free list keeps its storage alive"


def test_tier_cycles_leave_nothing_behind() -> None:
    """C48, C6: prompts, steps and releases by the hundred end where they began."""
    harness = Harness(OasisConfig(token_budget=32), head_dim=8)
    process = psutil.Process()
    rss = []
    for i in range(300):
        s = harness.admit(120)
        assert s is not None
        harness.extend(s, 60 + i % 40)
        harness.decode([s])
        harness.drop(s)
        if i in (99, 299):
            gc.collect()
            rss.append(process.memory_info().rss)
    assert rss[1] - rss[0] < 2 << 20
    assert harness.tier.sets.owned_pages == 0
    assert int(harness.tier.host.fill.sum()) == 0
    assert sorted(harness.free) == list(range(1, 65))


class Counting:
    """Counts the loads of a transfer engine that copy something."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.calls, self.pieces = engine, 0, 0
        self.stats = engine.stats

    def load(self, layer: int, host: torch.Tensor, heads: torch.Tensor, device: torch.Tensor) -> None:
        self.calls += 1
        self.pieces += host.numel()
        self.engine.load(layer, host, heads, device)

    def wait(self, layer: int) -> None:
        self.engine.wait(layer)

    def in_flight(self) -> int:
        return int(self.engine.in_flight())


@pytest.mark.parametrize("policy", ["wait", "skip"])
@pytest.mark.parametrize("tokens", [90, 140])
def test_a_step_with_everything_resident_moves_nothing(
    tokens: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C49: dense (90 tokens) or sparse with the whole sequence on the device (140), a step makes no collective and
    copies no page; a dense one does not even ask."""
    for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "reduce", "send", "recv"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **__: pytest.fail(f"{name} in a step"))
    config = OasisConfig(token_budget=128 if tokens < 128 else 64, slack_ratio=2.0, miss_policy=policy)
    harness = Harness(config, device_pages=60)
    s = harness.admit(tokens + 30)
    assert s is not None
    harness.extend(s, tokens)
    counting = Counting(harness.tier.transfer)
    harness.tier.transfer = counting
    for _ in range(30):
        harness.decode([s])
    assert counting.pieces == 0
    assert harness.tier.stats.missed == 0
    sparse = tokens > 128
    assert harness.tier.stats.sparse_sequences == (30 if sparse else 0)
    assert counting.calls == (30 * 2 if sparse else 0)
