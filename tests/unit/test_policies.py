"""Every policy over random batches: a page that a step was promised is there when it comes (contracts 3, 4, 7)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.config import OasisConfig
from tests.unit.harness import Harness, Sequence


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sequences_come_grow_cross_and_leave(data: st.DataObject) -> None:
    """Contract 7: with any policy, predictor, cap and slack, no step names a page that was evicted before it (that
    stopped the server), reads an unwritten lane (NaN), or fetches more than the cap."""
    page = data.draw(st.sampled_from([4, 16]), "page")
    budget = data.draw(st.integers(2, 5), "budget pages")
    config = OasisConfig(
        page_size=page,
        token_budget=budget * page,
        slack_ratio=data.draw(st.sampled_from([0.0, 0.0, 0.5]), "slack"),
        fetch_ratio=data.draw(st.sampled_from([0.2, 0.5, 1.0]), "fetch"),
        sink_tokens=data.draw(st.sampled_from([0, page]) if budget > 2 else st.just(0), "sink"),
        recent_tokens=data.draw(st.sampled_from([0, page]) if budget > 2 else st.just(0), "recent"),
        min_sparse_len=data.draw(st.sampled_from([0, (budget + 4) * page, (budget + 4) * page + 1]), "min sparse"),
        miss_policy=data.draw(st.sampled_from(["skip", "skip", "wait"]), "policy"),
        predictor=data.draw(st.sampled_from(["previous", "none"]), "predictor"),
        dense_layers=data.draw(st.sampled_from([0, 1]), "dense layers"),
    )
    harness = Harness(
        config,
        kv_heads=2,
        group=1,
        head_dim=8,
        host_pages=90,
        device_pages=3 * config.max_set_pages,
        rows=3,
        context_len=40 * page,
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    running: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 12), "rounds")):
        if len(running) < 3 and data.draw(st.booleans(), "join"):
            # around the places where a page fills, the budget is exceeded or the sequence turns sparse
            base = data.draw(st.sampled_from([1, budget, budget + 2, budget + 4, 12]), "prompt pages") * page
            prompt = max(1, base + data.draw(st.integers(-2, 2), "more"))
            s = harness.admit(prompt + 30 * page)
            if s is not None:
                harness.extend(s, prompt)
                running.append(s)
        elif running and data.draw(st.integers(0, 3), "leave") == 0:
            harness.drop(running.pop(data.draw(st.integers(0, len(running) - 1), "which")))
        for _ in range(data.draw(st.integers(1, page), "steps") if running else 0):
            if max(s.tokens for s in running) >= 28 * page:
                break
            before = harness.tier.transfer.stats.pages
            _, outputs = harness.decode(running)
            assert all(bool(torch.isfinite(x).all()) for x in outputs)
            per_lane = (harness.tier.transfer.stats.pages - before) / (2 * 2 * len(running))
            assert per_lane <= 2 * config.fetch_cap_pages, "at most one refresh now and, on crossing, one more"
        harness.tier.check_integrity()
    for s in running:
        harness.drop(s)
    assert harness.tier.sets.owned_pages == 0
    assert int(harness.tier.host.fill.sum()) == 0


@pytest.mark.parametrize("slack", [0.0, 0.5])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_prompt_that_fills_its_working_set(slack: float, extra: int) -> None:
    """`skip`: a prompt of exactly as many pages as its working set holds; the page that the first step starts must not
    evict one that the prompt's last query chose for that step."""
    config = OasisConfig(token_budget=64, page_size=16, miss_policy="skip", slack_ratio=slack)
    for seed in range(8):
        harness = Harness(config, seed=seed)
        s = harness.admit(300)
        assert s is not None
        harness.extend(s, config.max_set_pages * 16 + extra)
        chosen = harness.tier.chosen[:, s.attempt.row].long()
        for _ in range(3):
            harness.decode([s])
        assert chosen.shape[-1] == config.budget_pages
        harness.tier.check_integrity()
