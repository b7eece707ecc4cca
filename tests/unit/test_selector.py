"""Page selection of every implementation against the bound worked out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.attention.selector import NativeSelector, PageSelector, Selection, TorchSelector
from oasis_sglang.config import OasisConfig
from oasis_sglang.native.build import load_library
from tests.unit import oracle
from tests.unit.harness import Harness, Sequence

KINDS = (
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(load_library() is None, reason="needs a C++ compiler")),
)
DTYPES = (torch.float32, torch.bfloat16)


def create(kind: str, harness: Harness) -> PageSelector:
    tier, ops = harness.tier, harness.tier.ops
    library = load_library()
    if kind == "torch" or library is None:
        return TorchSelector(harness.config, ops, tier.summaries, tier.sets)
    return NativeSelector(harness.config, library, tier.summaries, tier.sets)


def prefilled(
    config: OasisConfig, lengths: list[int], dtype: torch.dtype, **shape: int
) -> tuple[Harness, list[Sequence]]:
    harness = Harness(
        config,
        layers=1,
        host_pages=sum(n // config.page_size + 2 for n in lengths),
        device_pages=config.max_set_pages * len(lengths),
        rows=len(lengths),
        context_len=1024,
        dtype=dtype,
        **shape,
    )
    sequences = []
    for tokens in lengths:
        s = harness.admit(tokens + 1)
        assert s is not None
        harness.extend(s, tokens)
        sequences.append(s)
    return harness, sequences


def refresh(
    kind: str, harness: Harness, sequences: list[Sequence], q: torch.Tensor, selector: PageSelector | None = None
) -> Selection:
    longest = max(len(s.pages) for s in sequences)
    return (selector or create(kind, harness)).refresh(
        0,
        q.view(len(sequences), -1, harness.query_heads, harness.geometry.head_dim),
        torch.tensor([s.attempt.row for s in sequences]),
        torch.tensor([(s.tokens - 1) // harness.config.page_size for s in sequences]),
        torch.tensor([s.pages + [0] * (longest - len(s.pages)) for s in sequences]),
        harness.tier.step + 1,
        harness.scale,
        torch.zeros(len(sequences), harness.geometry.kv_heads, harness.config.budget_pages + 1, dtype=torch.int64),
        torch.arange(len(sequences)),
    )


def check_pages(taken: list[int], budget: int, candidates: int) -> None:
    assert len(set(taken)) == budget
    assert set(taken) <= set(range(candidates))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_best_pages_by_quests_bound(kind: str, data: st.DataObject) -> None:
    """No page that is left out scores above one that is taken, for odd head sizes, ties and lengths too."""
    budget = data.draw(st.integers(1, 9), "budget pages")
    config = OasisConfig(page_size=16, token_budget=budget * 16, summary="minmax")
    lengths = data.draw(st.lists(st.integers((budget + 2) * 16, 40 * 16), min_size=1, max_size=3), "lengths")
    dim = data.draw(st.sampled_from([8, 20, 64, 80]), "head dim")
    harness, sequences = prefilled(
        config,
        lengths,
        data.draw(st.sampled_from(DTYPES), "dtype"),
        kv_heads=data.draw(st.integers(1, 3), "kv heads"),
        group=data.draw(st.integers(1, 4), "group"),
        head_dim=dim,
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    summaries, heads = harness.tier.summaries, harness.geometry.kv_heads
    if data.draw(st.booleans(), "ties"):  # every page says the same
        summaries.table[0] = summaries.table[0, summaries.row_ids(torch.tensor(sequences[0].pages[:1]))[0, 0]]
    queries = data.draw(st.integers(1, 4), "queries")
    q = harness.noise(len(sequences), queries, harness.query_heads, dim)
    chosen = refresh(kind, harness, sequences, q).attended
    for i, s in enumerate(sequences):
        candidates = (s.tokens - 1) // 16
        table = summaries.table[0, summaries.row_ids(torch.tensor(s.pages[:candidates]))].double()
        high, low = table.transpose(0, 1).split(dim, -1)  # [heads, candidates, dim]
        ask = q[i].double().view(queries, heads, -1, 1, dim)
        bound = torch.maximum(ask * high[:, None], ask * low[:, None]).sum(-1) * harness.scale
        scores = torch.softmax(bound, -1).mean(2).amax(0)
        for head in range(heads):
            taken = chosen[i, head].tolist()
            check_pages(taken, budget, candidates)
            # the tier gives the last one's place away at page boundaries
            assert scores[head, taken[-1]] <= scores[head, taken].min() * (1 + 1e-4)
            left = [p for p in range(candidates) if p not in taken]
            assert scores[head, left].max() <= scores[head, taken].min() * (1 + 1e-4)
    harness.tier.check_integrity()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sketches_choose_the_same_pages_everywhere(data: st.DataObject) -> None:
    """Products of codes are exact, so torch and compiled code agree to the page; and both with the float64 oracle
    wherever that sees a difference."""
    page = data.draw(st.sampled_from([8, 16, 32, 64]), "page")
    budget = data.draw(st.integers(1, 5), "budget pages")
    config = OasisConfig(page_size=page, token_budget=budget * page)
    lengths = data.draw(st.lists(st.integers((budget + 2) * page, 12 * page), min_size=1, max_size=2), "lengths")
    dim = data.draw(st.sampled_from([8, 24, 64, 80, 128]), "head dim")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    shape = {
        "kv_heads": data.draw(st.integers(1, 2), "kv heads"),
        "group": data.draw(st.integers(1, 4), "group"),
        "head_dim": dim,
        "seed": data.draw(st.integers(0, 99), "seed"),
    }
    queries = data.draw(st.integers(1, 3), "queries")
    chosen = []
    for kind in ("torch", "native") if load_library() else ("torch",):
        harness, sequences = prefilled(config, lengths, dtype, **shape)
        q = harness.noise(len(sequences), queries, harness.query_heads, dim)
        chosen.append(refresh(kind, harness, sequences, q).attended.sort(-1).values)
        harness.tier.check_integrity()
    assert torch.equal(chosen[0], chosen[-1])
    for i, s in enumerate(sequences):
        keys = oracle.sequence(harness.tier.host, 0, s.pages, s.tokens)[0]
        expected = oracle.top_pages(q[i].double(), keys, s.tokens, config, harness.scale)
        assert chosen[0][i].tolist() == [sorted(pages) for pages in expected]


@pytest.mark.parametrize("kind", KINDS)
def test_sink_and_recent_pages_are_attended_to_under_a_cap_too(kind: str) -> None:
    """They are resident from the prompt on, so they are among the best that are, whatever queries say."""
    config = OasisConfig(
        page_size=16, token_budget=64, sink_tokens=16, recent_tokens=16, miss_policy="skip", fetch_ratio=0.25
    )
    harness, sequences = prefilled(config, [300], torch.float32)
    left_out = 0
    for _ in range(8):
        picked = refresh(kind, harness, sequences, 5 * harness.noise(1, harness.query_heads, 8))
        left_out += picked.missed - picked.misses.shape[1]
        for lane in picked.attended[0].tolist():
            assert {0, 299 // 16 - 1} <= set(lane)
    assert left_out > 0
    harness.tier.check_integrity()


@pytest.mark.parametrize("summary", ["sketch", "minmax"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_is_not_a_number_still_selects_pages(kind: str, dtype: torch.dtype, summary: Any) -> None:
    """One request's numeric trouble must not write outside of its lanes nor leave its maps inconsistent."""
    config = OasisConfig(page_size=16, token_budget=64, summary=summary)
    harness, sequences = prefilled(config, [300, 260], dtype)
    q = harness.noise(2, harness.query_heads, 8)
    sane = q.clone()
    q[0] = torch.nan
    chosen = refresh(kind, harness, sequences, q).attended
    harness.tier.check_integrity()
    for lane in chosen[0].tolist():
        check_pages(lane, 4, 299 // 16)
    other, again = prefilled(config, [300, 260], dtype)
    assert torch.equal(chosen[1], refresh(kind, other, again, sane).attended[1])


@pytest.mark.parametrize("kind", KINDS)
def test_misses_stay_after_the_next_selection(kind: str) -> None:
    """A step gathers those of several layers before it has them fetched."""
    config = OasisConfig(page_size=16, token_budget=32, slack_ratio=0.0)
    harness, sequences = prefilled(config, [300, 400], torch.float32)
    selector = create(kind, harness)
    seen = []
    for _ in range(4):
        q = harness.noise(2, 1, harness.query_heads, harness.geometry.head_dim)
        picked = refresh(kind, harness, sequences, q, selector)
        harness.tier.step += 1
        seen.append((picked.misses, picked.misses.clone()))
    assert sum(copy.shape[1] for _, copy in seen) > 8
    assert all(torch.equal(misses, copy) for misses, copy in seen)
