"""Figures on the lookahead, against values worked out by hand and in float64."""

from __future__ import annotations

import pytest
import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.speculative import sampler
from oasis_sglang.speculative.sampler import KeysOfSequence, LookaheadStats
from tests.unit import oracle
from tests.unit.harness import Harness


def test_agreement_counts_pages_both_chose() -> None:
    stats = LookaheadStats()
    assert stats.agreement is None
    predicted = torch.tensor([[[1, 2, 3], [4, 5, 6]]])
    stats.count_agreement(predicted, torch.tensor([[[3, 2, 9], [7, 8, 9]]]))
    assert (stats.agreed, stats.pages) == (2, 6)
    assert stats.agreement == pytest.approx(1 / 3)


def test_mass_is_the_softmax_over_what_is_attended() -> None:
    generator = torch.Generator().manual_seed(1)
    query, full, tail = (torch.randn(*shape, generator=generator) for shape in ((4, 8), (2, 3, 16, 8), (2, 5, 8)))
    attended = torch.tensor([[0, 2], [1, 2]])
    stats = LookaheadStats()
    stats.count_mass(KeysOfSequence(query, full, tail), attended, 0.3)
    masses = []
    for head in range(4):
        kv = head // 2
        keys = torch.cat((full[kv].reshape(-1, 8), tail[kv])).double()
        weight = torch.softmax(keys @ query[head].double() * 0.3, 0)
        lanes = [p * 16 + i for p in attended[kv].tolist() for i in range(16)] + list(range(48, 53))
        masses.append(float(weight[lanes].sum()))
    assert stats.mean_mass == pytest.approx(sum(masses) / 4, abs=1e-6)


@pytest.mark.parametrize("chain", [1, 3])
def test_the_tier_samples_what_it_attends_to(monkeypatch: pytest.MonkeyPatch, chain: int) -> None:
    """Sampled at every step: the mass of the pages really attended, the agreement with the query's own choice."""
    monkeypatch.setattr("oasis_sglang.memory_pool.tier.samples", lambda step, layer, layers: layer == 1)
    config = OasisConfig(
        token_budget=64, miss_policy="skip", predictor="draft", fetch_ratio=0.25, debug_attention_mass=True
    )
    harness = Harness(config, host_pages=60, device_pages=40, context_len=600, chain=chain)
    s = harness.admit(300)
    assert s is not None
    harness.extend(s, 200)
    agreed = pages = 0
    mass = []
    for _ in range(12):
        chosen = harness.tier.chosen[1, s.attempt.row].tolist()
        before, last_tail = s.tokens, int(harness.tier.chosen_tail[s.attempt.row])
        q, k, _v, _out = (x[0] for x in harness.verify([s], [1])[1])
        tail = before // 16
        chosen = [[*each[:-1], tail - 1] if tail != last_tail else each for each in chosen]
        keys = oracle.sequence(harness.tier.host, 1, s.pages, before + 1)[0]
        assert torch.equal(keys[-1], k[0].double())
        true = oracle.top_pages(q[0].double(), keys, before + 1, config, harness.scale)
        for head in range(2):
            agreed += len(set(true[head]) & set(chosen[head]))
            pages += len(true[head])
            for g in range(2):
                weight = torch.softmax(keys[:, head] @ q[0, head * 2 + g].double() * harness.scale, 0)
                lanes = [p * 16 + i for p in chosen[head] for i in range(16)] + list(range(tail * 16, before + 1))
                mass.append(float(weight[lanes].sum()))
    assert (harness.tier.lookahead.agreed, harness.tier.lookahead.pages) == (agreed, pages)
    assert harness.tier.lookahead.mean_mass == pytest.approx(sum(mass) / len(mass), abs=1e-5)


def test_layers_take_turns() -> None:
    seen = [(step, layer) for step in range(64 * 6) for layer in range(3) if sampler.samples(step, layer, 3)]
    assert seen == [(0, 0), (64, 1), (128, 2), (192, 0), (256, 1), (320, 2)]
