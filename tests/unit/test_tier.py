"""The tier against a float64 reference that reads the host pool only (contract 1, C20, C21, C23, C38)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.config import OasisConfig
from tests.unit import oracle
from tests.unit.harness import Harness, Sequence


def check_decode(harness: Harness, sequences: list[Sequence], tolerance: float = 1e-4) -> None:
    queries, outputs = harness.decode(sequences)
    for layer, (q, out) in enumerate(zip(queries, outputs, strict=True)):
        for i, s in enumerate(sequences):
            dense = layer < harness.config.dense_layers
            expected = oracle.decode(
                harness.tier.host, layer, s.pages, s.tokens, q[i], harness.config, harness.scale, dense=dense
            )
            torch.testing.assert_close(out[i].double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_wait_without_cap_is_exact_top_k(data: st.DataObject) -> None:
    """Contract 1: whatever the pool sizes, `wait` without a cap is top-K attention."""
    page = data.draw(st.sampled_from([16, 32, 64]), "page")
    budget = data.draw(st.integers(2, 5), "budget pages")
    config = OasisConfig(
        page_size=page,
        token_budget=budget * page,
        slack_ratio=data.draw(st.sampled_from([0.0, 0.3, 1.0]), "slack"),
        summary=data.draw(st.sampled_from(["sketch", "minmax"]), "summary"),
        sink_tokens=data.draw(st.sampled_from([0, page]), "sink"),
        recent_tokens=data.draw(st.sampled_from([0, page]) if budget > 2 else st.just(0), "recent"),
        min_sparse_len=data.draw(st.sampled_from([0, (budget + 3) * page]), "min sparse"),
        dense_layers=data.draw(st.integers(0, 1), "dense layers"),
    )
    harness = Harness(
        config,
        kv_heads=data.draw(st.integers(1, 3), "kv heads"),
        group=data.draw(st.integers(1, 8), "group"),
        device_pages=config.max_set_pages * 3 + data.draw(st.integers(0, 9), "spare"),
        host_pages=100,
        context_len=20 * page,
        seed=data.draw(st.integers(0, 999), "seed"),
    )
    sequences = []
    for _ in range(data.draw(st.integers(1, 3), "sequences")):
        prompt = data.draw(st.integers(1, 14 * page), "prompt")
        s = harness.admit(prompt + 24)
        assert s is not None
        first = data.draw(st.integers(1, prompt), "chunk")
        harness.extend(s, first)
        if prompt > first:
            harness.extend(s, prompt - first)
        sequences.append(s)
    for _ in range(data.draw(st.integers(1, 20), "steps")):
        check_decode(harness, sequences)
        harness.tier.check_integrity()


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_selected_set_at_the_budget(extra: int) -> None:
    """C20: up to the budget everything is attended; one token beyond, exactly the budget and the tail."""
    config = OasisConfig(token_budget=64, page_size=16)
    harness = Harness(config)
    s = harness.admit(200)
    assert s is not None
    harness.extend(s, 64 + extra - 1)
    queries, outputs = harness.decode([s])
    assert s.tokens == 64 + extra
    for layer in range(2):
        k, v = oracle.sequence(harness.tier.host, layer, s.pages, s.tokens)
        expected = oracle.attention(queries[layer][0].double(), k.transpose(0, 1), v.transpose(0, 1), harness.scale)
        torch.testing.assert_close(outputs[layer][0].double(), expected, rtol=1e-4, atol=1e-4)


def test_sink_and_recent_count_in_the_budget() -> None:
    """C20: beyond the budget exactly the budget is selected, sink and recent tokens in it."""
    config = OasisConfig(token_budget=64, page_size=16, sink_tokens=16, recent_tokens=16)
    harness = Harness(config)
    s = harness.admit(200)
    assert s is not None
    harness.extend(s, 150)
    check_decode(harness, [s])
    assert harness.tier.stats.selected == 2 * 2 * config.budget_pages


def test_one_mask_decides_sparse_or_dense() -> None:
    """C21: the mask follows the current length, for sequences that grow past the threshold too."""
    from oasis_sglang.attention.page_table import sparse_mask

    config = OasisConfig(token_budget=64, page_size=16, min_sparse_len=200)
    lengths = torch.tensor([100, 1100, 199, 200])
    assert sparse_mask(lengths, config).tolist() == [False, True, False, True]
    harness = Harness(config)
    s = harness.admit(240)
    assert s is not None
    harness.extend(s, 190)
    for _ in range(30):
        check_decode(harness, [s])
    assert harness.tier.stats.sparse_sequences == 21  # lengths 200 to 220
    assert harness.tier.stats.dense_sequences == 9


def test_prefill_equals_dense_in_chunks_and_after_a_prefix_hit() -> None:
    """C30: chunks and prefix hits longer than the budget do not change the prefill."""
    harness = Harness(OasisConfig(token_budget=32, page_size=16))
    s = harness.admit(300)
    assert s is not None
    for chunk in (40, 64, 1, 97):
        prefix = s.tokens
        queries, outputs = harness.extend(s, chunk)
        for layer in range(2):
            k, v = oracle.sequence(harness.tier.host, layer, s.pages, s.tokens)
            expected = oracle.causal(queries[layer], k, v, prefix, harness.scale)
            torch.testing.assert_close(outputs[layer].double(), expected, rtol=1e-4, atol=1e-4)
    check_decode(harness, [s])


@pytest.mark.parametrize("chunk", [100, 26])
def test_tokens_decoded_before_a_retraction_attend_as_they_did(chunk: int) -> None:
    """C5, contract 1: computed again in one extend or several, they get top-K attention like the first time; dense
    attention would change their keys and values, and the text that follows. The prompt stays dense."""
    config = OasisConfig(token_budget=48, sink_tokens=16, dense_layers=1, host_to_device_ratio=1)
    harness, prompt, total = Harness(config, layers=3), 120, 224
    s = harness.admit(total + 4)
    assert s is not None
    harness.extend(s, prompt + 4, prompt)
    while s.tokens < total:
        first, count = s.tokens, min(chunk, total - s.tokens)
        queries, outputs = harness.extend(s, count, prompt)
        for layer, (q, out) in enumerate(zip(queries, outputs, strict=True)):
            for i in range(count):
                expected = oracle.decode(
                    harness.tier.host, layer, s.pages, first + i + 1, q[i], config, harness.scale, dense=layer < 1
                )
                torch.testing.assert_close(out[i].double(), expected, rtol=1e-4, atol=1e-4)
    check_decode(harness, [s])


def test_reused_pages_carry_no_trace_of_their_last_owner() -> None:
    """C38: after eviction and reuse, summaries and attention are those of the new data."""
    config = OasisConfig(token_budget=32, page_size=16, summary="minmax")  # sketches: test_chain.py
    harness = Harness(config, host_pages=14, device_pages=20)
    for _ in range(6):
        s = harness.admit(200)
        assert s is not None
        harness.extend(s, 150)
        for _ in range(18):
            check_decode(harness, [s])
        tier, full = harness.tier, s.tokens // 16
        for layer in range(2):
            for page in s.pages[:full]:
                keys = tier.host.kv[page, layer, :, 0]
                row = tier.summaries.table[layer, tier.summaries.row_ids(torch.tensor(page))]
                assert torch.equal(row, torch.cat((keys.amax(1), keys.amin(1)), dim=-1))
        harness.drop(s)
        tier.check_integrity()
        assert tier.sets.owned_pages == 0
        assert int(tier.host.fill.sum()) == 0


@pytest.mark.parametrize("predictor", ["previous", "none"])
@pytest.mark.parametrize("fetch_ratio", [0.25, 1.0])
def test_skip_attends_to_budget_and_tail_without_waiting(predictor: str, fetch_ratio: float) -> None:
    """`skip` attends to exactly the budget's pages that are resident; the cap bounds what is fetched per step."""
    config = OasisConfig(
        token_budget=64, page_size=16, miss_policy="skip", predictor=predictor, fetch_ratio=fetch_ratio, slack_ratio=0.5
    )
    harness = Harness(config)
    s = harness.admit(400)
    assert s is not None
    harness.extend(s, 50)
    fetched = [harness.tier.transfer.stats.pages]
    for _ in range(200):
        _, outputs = harness.decode([s])
        assert all(bool(torch.isfinite(o).all()) for o in outputs)
        harness.tier.check_integrity()
        fetched.append(harness.tier.transfer.stats.pages)
    per_step = [b - a for a, b in itertools.pairwise(fetched)]
    layers_and_heads = 2 * 2
    assert max(per_step) <= layers_and_heads * config.fetch_cap_pages
    assert (sum(per_step) > 0) == (predictor == "previous")
    resident = harness.tier.sets.slot_of[:, s.attempt.row]
    chosen = harness.tier.chosen[:, s.attempt.row].long()
    assert bool((resident.gather(-1, chosen) >= 0).all()), "pages chosen for the next step must be resident"


def test_capped_wait_attends_to_the_best_resident_pages() -> None:
    """With a cap, what is attended is the top-K of the resident set after the swaps, for every head."""
    config = OasisConfig(token_budget=64, page_size=16, fetch_ratio=0.25, slack_ratio=0.0)
    harness = Harness(config)
    s = harness.admit(400)
    assert s is not None
    harness.extend(s, 300)
    for _ in range(30):
        _, outputs = harness.decode([s])
        assert all(bool(torch.isfinite(o).all()) for o in outputs)
        harness.tier.check_integrity()
    assert harness.tier.stats.dropped > 0
    assert harness.tier.stats.missed - harness.tier.stats.dropped <= 30 * 2 * 2 * 1


def test_what_extends_bring_in_is_counted_apart() -> None:
    """A working set comes with the prompt; what decode steps fetch are their misses and nothing else."""
    config = OasisConfig(page_size=4, token_budget=16, slack_ratio=0.25)
    harness = Harness(config, layers=2, kv_heads=2, device_pages=20)
    for prompt, pages in ((60, 7), (9, 3)):  # budget, slack, tail and one more; a short sequence, whole
        before = harness.tier.stats.extend_pages
        s = harness.admit(80)
        assert s is not None
        harness.extend(s, prompt)
        assert harness.tier.stats.extend_pages - before == pages * 2 * 2
        for _ in range(5):
            harness.decode([s])
        harness.drop(s)
    fetched = harness.tier.transfer.stats.pages - harness.tier.stats.extend_pages
    assert fetched == harness.tier.stats.missed > 0
    assert 0 < harness.tier.stats.extend_seconds < harness.tier.transfer.stats.seconds


def test_decoding_what_was_never_written_raises() -> None:
    """C19, C23: no kernel reads a page that nobody wrote; it raises before attention."""
    harness = Harness(OasisConfig(token_budget=32, page_size=16))
    s = harness.admit(300)
    assert s is not None
    s.pages, s.tokens = [harness.free.pop() for _ in range(12)], 180
    with pytest.raises(RuntimeError, match="not on the device"):
        harness.decode([s])
    t = harness.admit(300)
    assert t is not None
    harness.extend(t, 180)
    harness.tier.invalidate(torch.tensor(t.pages[2:4]))
    with pytest.raises(RuntimeError, match="the host pool does not hold"):
        harness.decode([t])
    with pytest.raises(RuntimeError, match="which hold"):
        harness.extend(t, 8)


def test_poisoned_pools_stay_invisible() -> None:
    """Contract 7: pools poisoned with NaN (the harness does it) never show in an output, bf16 included."""
    config = OasisConfig(token_budget=32, page_size=16)
    harness = Harness(config, dtype=torch.bfloat16)
    sequences = [harness.admit(200) for _ in range(3)]
    for s, n in zip(sequences, (5, 33, 170), strict=True):
        assert s is not None
        harness.extend(s, n)
    for _ in range(20):
        _, outputs = harness.decode([s for s in sequences if s is not None])
        assert all(bool(torch.isfinite(o).all()) for o in outputs)
