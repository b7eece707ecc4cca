"""A tier whose extends and steps go through kernels, in Triton's interpreter, against the float64 reference."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.kernels.streams import Streams
from oasis_sglang.memory_pool import sketch
from oasis_sglang.memory_pool.device_tier import DeviceTier
from tests.unit import oracle
from tests.unit.harness import Harness, Sequence
from tests.unit.test_tier import check_decode

pytestmark = pytest.mark.interpreter


class Log(Streams):
    """Says when it was joined."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def join(self) -> None:
        self.said.append("join")


def harness(log: Log | None = None, layers: int = 1, chain: int = 1, **settings: Any) -> Harness:
    config = OasisConfig(**{"page_size": 16, "token_budget": 64, "slack_ratio": 0.5, **settings})
    kind = functools.partial(DeviceTier, query_heads=4, batch=3, streams=log)
    return Harness(config, head_dim=16, rows=3, layers=layers, chain=chain, kind=kind, ops=TritonOps())


def admit(h: Harness, final: int) -> Sequence:
    s = h.admit(final)
    assert s is not None
    return s


def check_summaries(h: Harness, s: Sequence) -> None:
    tier, page = h.tier, h.config.page_size
    for layer in range(h.geometry.layers):
        keys, _ = oracle.sequence(tier.host, layer, s.pages, s.tokens)
        for number, block in enumerate(keys.split(page)):
            block = block.transpose(0, 1)
            row = tier.summaries.table[layer, tier.summaries.row_ids(torch.tensor(s.pages[number]))]
            if h.config.summary == "minmax":
                assert torch.equal(row.double(), torch.cat((block.amax(1), block.amin(1)), dim=-1))
                continue
            codes, steps = oracle.quantised(block)
            held, scales = sketch.decode(row, codes.shape[-1])
            assert torch.equal(held[:, : block.shape[1]].double(), codes)
            assert torch.equal(scales[:, : block.shape[1]].double(), steps.squeeze(-1))


@pytest.mark.parametrize("summary", ["sketch", "minmax"])
def test_chunks_and_prefixes(summary: Any) -> None:
    """Dense attention over prefix and chunk, wherever in a page a chunk ends; what is stored and summarised is right,
    and the next step finds its pages."""
    h = harness(summary=summary, layers=2)
    s = admit(h, 140)
    for chunk in (37, 27, 1, 50):
        prefix = s.tokens
        queries, outputs = h.extend(s, chunk)
        for layer in range(2):
            k, v = oracle.sequence(h.tier.host, layer, s.pages, s.tokens)
            right = oracle.causal(queries[layer], k, v, prefix, h.scale)
            torch.testing.assert_close(outputs[layer].double(), right, rtol=1e-4, atol=1e-4)
        check_summaries(h, s)
        assert h.tier.host.fill[s.pages].sum() == s.tokens
    h.tier.check_integrity()
    for _ in range(2):
        check_decode(h, [s])
    assert h.tier.stats.load_back_tokens == 37 + 64 + 65


def test_tokens_decoded_before_a_retraction_attend_as_they_did() -> None:
    h, prompt = harness(sink_tokens=16), 70
    s = admit(h, 140)
    h.extend(s, prompt, prompt)
    first = s.tokens
    queries, outputs = h.extend(s, 36, prompt)
    for i in range(36):
        right = oracle.decode(h.tier.host, 0, s.pages, first + i + 1, queries[0][i], h.config, h.scale)
        torch.testing.assert_close(outputs[0][i].double(), right, rtol=1e-4, atol=1e-4)
    check_decode(h, [s])


@pytest.mark.parametrize("prompt", [79, 80, 81])
def test_a_prompt_at_the_budget_chooses_for_the_first_step(prompt: int) -> None:
    """`skip`: 80 tokens are dense, and their next token is not. What the last query of the prompt wants is attended."""
    h = harness(miss_policy="skip", predictor="previous")
    s = admit(h, 120)
    asked, _ = h.extend(s, prompt)
    keys, _ = oracle.sequence(h.tier.host, 0, s.pages, prompt)
    queries, outputs = h.decode([s])
    k, v = oracle.sequence(h.tier.host, 0, s.pages, s.tokens)
    tail = prompt // 16
    chosen = [list(range(tail))] * 2
    if prompt >= 80:
        weights = oracle.page_weights(asked[0][-1:].double(), keys, (prompt - 1) // 16, h.config, h.scale)
        chosen = [x.topk(4).indices.tolist() for x in weights]
        if prompt == 80:  # page 4 was the tail when pages were chosen
            chosen = [[*pages[:-1], 4] for pages in chosen]
    lanes = [[t for p in [*pages, tail] for t in range(16 * p, min(16 * p + 16, s.tokens))] for pages in chosen]
    ks, vs = (torch.stack([x[at, head] for head, at in enumerate(lanes)]) for x in (k, v))
    right = oracle.attention(queries[0][0].double(), ks, vs, h.scale)
    torch.testing.assert_close(outputs[0][0].double(), right, rtol=1e-4, atol=1e-4)
    h.tier.check_integrity()


def test_pages_are_fenced_before_they_change_hands() -> None:
    log = Log()
    h = harness(log)
    sets = h.tier.sets
    release = sets.release
    sets.release = lambda attempt: (log.said.append("free"), release(attempt))[1]  # type: ignore[method-assign]
    s = admit(h, 60)
    h.extend(s, 20)
    check_decode(h, [s])
    log.said.clear()
    h.drop(s)
    assert log.said == ["join", "free"]
    log.said.clear()
    h.tier.check_integrity()
    assert log.said == ["join"]  # maps that a step beside compute still changes are not looked at
    h.drop(Sequence(s.attempt, []))
    assert sets.stale_releases == 1
    assert sets.owned_pages == 0


def test_rows_and_pages_are_used_again() -> None:
    """Sequences come and go; the device counts what it chose and fetched."""
    h = harness()
    tier = h.tier
    assert isinstance(tier, DeviceTier)
    for prompt in (100, 50, 130):
        s = admit(h, prompt + 10)
        h.extend(s, prompt)
        for _ in range(3):
            check_decode(h, [s])
        h.drop(s)
        assert int(tier.host.fill.sum()) == 0
    tier.read_stats()
    assert tier.stats.selected == 6 * 2 * 4  # steps of the first and the last, KV heads, pages
    assert 0 <= tier.stats.dropped <= tier.stats.missed <= tier.stats.selected
    assert tier.in_flight() == 0


def test_chains_are_committed_as_far_as_they_are_accepted() -> None:
    h = harness(chain=3)
    s = admit(h, 130)
    h.extend(s, 92)
    for accepted in (1, 3, 2):
        before = [oracle.sequence(h.tier.host, 0, s.pages, s.tokens)]
        ((_, k, v, _),) = h.verify([s], [accepted])
        held = oracle.sequence(h.tier.host, 0, s.pages, s.tokens)
        for side, new in enumerate((k, v)):
            assert torch.equal(held[side], torch.cat((before[0][side], new[0, :accepted].double())))
        assert int(h.tier.host.fill[s.pages].sum()) == s.tokens
        check_summaries(h, s)
        h.tier.check_integrity()


def test_decoding_what_is_not_there_is_told_afterwards() -> None:
    """No page table names what nobody wrote without a trace: steps do not stop to look, the idle check does."""
    h = harness()
    s = admit(h, 300)
    s.pages, s.tokens = [h.free.pop() for _ in range(12)], 180
    h.decode([s])
    with pytest.raises(RuntimeError, match="pages that were not on the device or not written"):
        h.tier.check_integrity()
    t = harness()
    s = admit(t, 300)
    t.extend(s, 180)
    t.tier.invalidate(torch.tensor(s.pages[10:11]))
    t.decode([s])
    with pytest.raises(RuntimeError, match="pages that were not on the device or not written"):
        t.tier.check_integrity()
    with pytest.raises(RuntimeError, match="which hold"):
        t.extend(s, 8)
