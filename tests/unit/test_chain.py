"""Chains of drafts through the tier, against a float64 reference that keeps its own record of every token
(contracts 1 and 8, C20, C25, C38)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool import sketch
from oasis_sglang.memory_pool.extend import ExtendSequence
from oasis_sglang.memory_pool.host_pool import HostPool
from tests.unit import oracle
from tests.unit.harness import Harness, Sequence


def committed(host: HostPool, layer: int, s: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
    return oracle.sequence(host, layer, s.pages, s.tokens)


class Record:
    """K and V of one sequence's accepted tokens, per layer `[tokens, H, D]` float64."""

    def __init__(self, harness: Harness, s: Sequence) -> None:
        self.layers = [committed(harness.tier.host, layer, s) for layer in range(harness.geometry.layers)]

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        old = self.layers[layer]
        self.layers[layer] = (torch.cat((old[0], k.double())), torch.cat((old[1], v.double())))


def expected(
    harness: Harness, record: Record, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, asking: int
) -> torch.Tensor:
    """`[t, Hq, D]`: each token of the chain over the pages that the first `asking` of them choose and the tail."""
    config, page = harness.config, harness.config.page_size
    keys, values = (torch.cat((old, new.double())) for old, new in zip(record.layers[layer], (k, v), strict=True))
    before = record.layers[layer][0].shape[0]
    tail = before // page
    if layer < config.dense_layers:
        chosen = [list(range(tail))] * keys.shape[1]
    else:
        chosen = oracle.top_pages(q[:asking].double(), keys, before + 1, config, harness.scale)
    outs = []
    for j in range(q.shape[0]):
        ks, vs = [], []
        for head, pages in enumerate(chosen):
            lanes = [x for p in pages for x in range(p * page, (p + 1) * page)]
            lanes += range(tail * page, before + j + 1)
            ks.append(keys[lanes, head])
            vs.append(values[lanes, head])
        outs.append(oracle.attention(q[j].double(), torch.stack(ks), torch.stack(vs), harness.scale))
    return torch.stack(outs)


def step(harness: Harness, sequences: list[Sequence], records: list[Record], accepted: list[int], exact: bool) -> None:
    seen = harness.verify(sequences, accepted)
    asking = 1 if harness.tier.probe else harness.tier.chain
    for layer, (q, k, v, out) in enumerate(seen):
        for i, record in enumerate(records):
            if exact:
                right = expected(harness, record, layer, q[i], k[i], v[i], asking)
                torch.testing.assert_close(out[i].double(), right, rtol=1e-4, atol=1e-4)
            record.append(layer, k[i, : accepted[i]], v[i, : accepted[i]])
    assert bool(torch.stack([out for *_, out in seen]).isfinite().all())
    check(harness, sequences, records)


def check(harness: Harness, sequences: list[Sequence], records: list[Record]) -> None:
    """The host pool, its fill marks and the summaries hold the accepted tokens and no other."""
    tier, page = harness.tier, harness.config.page_size
    tier.check_integrity()
    for s, record in zip(sequences, records, strict=True):
        fill = tier.host.fill[s.pages].tolist()
        assert fill == [min(max(s.tokens - p * page, 0), page) for p in range(len(s.pages))]
        for layer, (k, v) in enumerate(record.layers):
            held = committed(tier.host, layer, s)
            assert torch.equal(held[0], k)
            assert torch.equal(held[1], v)
            for p in range(-(-s.tokens // page)):
                block = k[p * page : (p + 1) * page].transpose(0, 1)  # [H, tokens, D]
                row = tier.summaries.table[layer, tier.summaries.row_ids(torch.tensor(s.pages[p]))]
                if harness.config.summary == "minmax":
                    assert torch.equal(row.double(), torch.cat((block.amax(1), block.amin(1)), dim=-1))
                    continue
                codes, steps = oracle.quantised(block)
                held, scales = sketch.decode(row, codes.shape[-1])
                assert torch.equal(held[:, : block.shape[1]].double(), codes)
                assert torch.equal(scales[:, : block.shape[1]].double(), steps.squeeze(-1))


def start(harness: Harness, prompts: list[int], final: int) -> tuple[list[Sequence], list[Record]]:
    sequences = []
    for prompt in prompts:
        s = harness.admit(final)
        assert s is not None
        harness.extend(s, prompt)
        sequences.append(s)
    return sequences, [Record(harness, s) for s in sequences]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_chains_of_any_fate(data: st.DataObject) -> None:
    """Under `wait`, each token of a chain attends to what the reference says; under any policy only accepted tokens
    are ever committed, whatever page boundaries, budget crossings and rejections they meet."""
    chain = data.draw(st.integers(2, 8), "chain")
    budget = data.draw(st.integers(2, 4), "budget pages")
    skip = data.draw(st.booleans(), "skip")
    config = OasisConfig(
        page_size=16,
        token_budget=budget * 16,
        slack_ratio=data.draw(st.sampled_from([0.0, 0.5]), "slack"),
        sink_tokens=data.draw(st.sampled_from([0, 16]), "sink"),
        min_sparse_len=data.draw(st.sampled_from([0, (budget + 2) * 16 + 5]), "min sparse"),
        summary=data.draw(st.sampled_from(["sketch", "minmax"]), "summary"),
        dense_layers=data.draw(st.integers(0, 1), "dense layers"),
        miss_policy="skip" if skip else "wait",
        predictor=data.draw(st.sampled_from(["draft", "previous", "none"]), "predictor") if skip else "previous",
        fetch_ratio=data.draw(st.sampled_from([1.0, 0.3]), "fetch ratio") if skip else 1.0,
    )
    harness = Harness(
        config,
        kv_heads=data.draw(st.integers(1, 2), "kv heads"),
        group=data.draw(st.integers(1, 3), "group"),
        host_pages=80,
        device_pages=(config.max_set_pages + 1) * 3,
        context_len=600,
        chain=chain,
        probe=data.draw(st.booleans(), "probe"),
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    prompts = data.draw(st.lists(st.integers(1, 12 * 16), min_size=1, max_size=3), "prompts")
    steps = data.draw(st.integers(1, 14), "steps")
    sequences, records = start(harness, prompts, max(prompts) + steps * chain)
    for _ in range(steps):
        accepted = [data.draw(st.integers(1, chain), "accepted") for _ in sequences]
        step(harness, sequences, records, accepted, exact=not skip)
    for s in sequences:
        harness.drop(s)
    assert harness.tier.sets.owned_pages == 0


@pytest.mark.parametrize("policy", ["wait", "skip"])
@pytest.mark.parametrize("slack", [0.0, 0.5])
def test_long_decoding_over_many_page_boundaries(policy: str, slack: float) -> None:
    """The tightest working set and the longest chain, over boundaries at every offset."""
    config = OasisConfig(
        page_size=16,
        token_budget=64,
        slack_ratio=slack,
        miss_policy=policy,
        predictor="draft" if policy == "skip" else "previous",
    )
    harness = Harness(
        config, host_pages=200, device_pages=2 * (config.max_set_pages + 1), rows=2, context_len=1200, chain=8
    )
    sequences, records = start(harness, [70, 33], 1000)
    chance = torch.Generator().manual_seed(3)
    for _ in range(60):
        accepted = torch.randint(1, 9, (2,), generator=chance).tolist()
        step(harness, sequences, records, accepted, exact=policy == "wait")


def test_probe_attends_as_plain_decoding_does() -> None:
    """Under `wait` and `probe`, the first token of each step gets the bits that decoding without drafts gives it."""
    config = OasisConfig(page_size=16, token_budget=64)
    plain = Harness(config, host_pages=60, device_pages=40, context_len=600)
    probe = Harness(config, host_pages=60, device_pages=40, context_len=600, chain=2, probe=True)
    (a,), (b,) = start(plain, [150], 300)[0], start(probe, [150], 300)[0]
    for _ in range(40):
        slots, probe_slots = plain._grow(a, 1), probe._grow(b, 2)
        a.tokens += 1
        row = torch.tensor([a.attempt.row])
        plan = plain.tier.plan_decode(row, torch.tensor([a.tokens]), slots, torch.tensor([a.pages]))
        other = probe.tier.plan_decode(
            torch.tensor([b.attempt.row]), torch.tensor([b.tokens + 2]), probe_slots, torch.tensor([b.pages]), 2
        )
        for layer in range(2):
            q, k, v = plain.noise(2, 4, 8), plain.noise(2, 2, 8), plain.noise(2, 2, 8)
            one = plain.tier.decode(plan, layer, q[:1], k[:1], v[:1], plain.scale)
            two = probe.tier.decode(other, layer, q, k, v, plain.scale)
            torch.testing.assert_close(two[:1], one, rtol=1e-5, atol=1e-6)
        plain.tier.finish_decode(plan)
        probe.tier.finish_decode(other, torch.tensor([1]))
        b.tokens += 1
    for layer in range(2):
        for x, y in zip(committed(plain.tier.host, layer, a), committed(probe.tier.host, layer, b), strict=True):
            assert torch.equal(x, y)


def test_drafts_that_want_different_pages_all_get_them() -> None:
    """C25: a page counts for the draft that wants it most. Page p's keys point along axis p and its values are p, so a
    draft that asks along axis p reads p if that page is attended to, and something else if it is not."""
    config = OasisConfig(page_size=16, token_budget=64, slack_ratio=0.0)
    harness = Harness(config, layers=1, kv_heads=1, group=1, context_len=600, chain=4)
    s = harness.admit(200)
    assert s is not None
    tokens = 7 * 16 + 4
    page_of = torch.arange(tokens) // 16
    keys, values = 10 * torch.eye(8)[page_of].view(tokens, 1, 8), page_of.view(tokens, 1, 1).expand(-1, 1, 8).float()
    slots = harness._grow(s, tokens)
    part = ExtendSequence(s.attempt.row, 0, tokens, slots, torch.tensor(s.pages))
    harness.tier.extend(0, part, torch.zeros(tokens, 1, 8), keys, values, harness.scale)
    harness.tier.finish_extend([part])
    s.tokens = tokens
    slots = harness._grow(s, 4)
    plan = harness.tier.plan_decode(
        torch.tensor([s.attempt.row]), torch.tensor([tokens + 4]), slots, torch.tensor([s.pages]), 4
    )
    asked = torch.tensor([1, 6, 0, 3])
    q = 10 * torch.eye(8)[asked].view(4, 1, 8)
    out = harness.tier.decode(plan, 0, q, torch.zeros(4, 1, 8), torch.zeros(4, 1, 8), harness.scale)
    torch.testing.assert_close(out[:, 0], asked.view(4, 1).expand(4, 8).float(), rtol=0, atol=1e-3)
