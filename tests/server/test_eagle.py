"""The EAGLE-3 draft that comes with the package: whatever it drafts, the text is the target's (contracts 1, 8, 11)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oasis_sglang.serving import Client, Documents, Server, ask_all, greedy, oasis_flags
from oasis_sglang.speculative.shipped import shipped_draft
from tests.server.checks import Background, LogWatch, until, wait_until_idle
from tests.server.conftest import FP32, RETRACTIONS, WITHIN_BUDGET, ServerFactory
from tests.server.truth import NEW_TOKENS, Truth, assert_same

pytestmark = [pytest.mark.server, pytest.mark.slow]

# Chi-square of seven degrees of freedom that a right sampler exceeds once in a hundred million runs.
CHI_SQUARE = 52.0


@pytest.fixture(scope="module")
def eagle(model_path: str) -> list[str]:
    """Flags of a server that drafts."""
    draft = shipped_draft(Path(model_path))
    if draft is None:
        pytest.skip(f"no draft for {model_path} comes with the package")
    return [*WITHIN_BUDGET, "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]


@pytest.fixture(scope="module")
def drafting(truth: Truth, server_factory: ServerFactory, eagle: list[str]) -> Iterator[Server]:
    """Three drafts a step, which is what is taken where nothing is said."""
    with server_factory(eagle) as server:
        watch = LogWatch(server)
        yield server
        wait_until_idle(Client(server.url))
        watch.assert_clean()


def test_the_text_of_dense_sglang(drafting: Server, truth: Truth) -> None:
    answers = ask_all(Client(drafting.url), truth.prompts, greedy(NEW_TOKENS, ignore_eos=True))
    assert_same(truth.prompts, answers, truth.answers)
    steps = sum(answer.meta["spec_verify_ct"] for answer in answers)
    # the first token of each is the prefill's
    assert (len(answers) * (NEW_TOKENS - 1)) / steps > 1.3, "the draft agrees too rarely to be the one that was trained"


def test_accept_length_after_load_back(drafting: Server, truth: Truth, documents: Documents) -> None:
    """C39: prefixes that come back from the host pool have draft KV that works."""
    client = Client(drafting.url)
    client.flush_cache()
    prompts = [documents.text(200 + at, 600) for at in range(8)]

    def accept_length() -> float:
        answers = ask_all(client, prompts, greedy(NEW_TOKENS, ignore_eos=True), concurrency=2)
        cached.append(sum(answer.cached_tokens for answer in answers))
        return len(answers) * NEW_TOKENS / sum(answer.meta["spec_verify_ct"] for answer in answers)

    cached: list[int] = []
    before, after = accept_length(), accept_length()
    assert cached[0] == 0
    assert cached[1] >= 8 * 576
    assert after >= 0.9 * before


def test_bigram_keys(drafting: Server, documents: Documents) -> None:
    """C55: with EAGLE the radix tree's keys are pairs of tokens. Of 384 + 64 tokens the last has no KV, and with the
    last but one there is no pair: 446 could be found again, and 432 are in whole pages."""
    client = Client(drafting.url)
    client.flush_cache()
    prompt = documents.text(230, 384)
    answer = client.stream(prompt, greedy(64, ignore_eos=True))
    again = client.stream([*prompt, *answer.output_ids, *documents.text(231, 40)], greedy(1))
    assert again.cached_tokens == 432


def test_sampled_text_follows_the_target(drafting: Server, model_path: str, documents: Documents) -> None:
    """Four tokens of the two most likely each, sampled 512 times: the last three come from verification, and their
    eight combinations appear as often as the target's own probabilities say, computed by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, torch_dtype=torch.float32)
    prompt = documents.text(240, 40)
    runs = 512

    @torch.no_grad()
    def two_best(tokens: list[int]) -> tuple[list[int], list[float]]:
        best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
        return best.indices.tolist(), best.values.softmax(-1).tolist()

    first = two_best(prompt)[0][0]
    expected: dict[tuple[int, ...], float] = {}
    for choice in itertools.product((0, 1), repeat=3):
        tokens, chance = [*prompt, first], 1.0
        for which in choice:
            ids, shares = two_best(tokens)
            tokens.append(ids[which])
            chance *= shares[which]
        expected[tuple(tokens[-3:])] = chance

    sampling = {"temperature": 1.0, "top_k": 2, "max_new_tokens": 3, "ignore_eos": True}
    client = Client(drafting.url)
    # its KV but the last token's comes from the cache, so that this costs decode steps only
    answers = ask_all(client, [[*prompt, first]] * runs, [sampling] * runs, concurrency=16)
    counts = Counter(tuple(answer.output_ids) for answer in answers)
    assert counts.keys() <= expected.keys()
    chi_square = sum((counts[key] - runs * share) ** 2 / (runs * share) for key, share in expected.items())
    assert math.isfinite(chi_square)
    assert chi_square < CHI_SQUARE, {key: (counts[key], runs * share) for key, share in expected.items()}


def test_greedy_and_sampled_in_one_batch(drafting: Server, truth: Truth) -> None:
    """Greedy requests keep dense SGLang's text beside sampled ones of every kind."""
    client = Client(drafting.url)
    kinds = [{"temperature": 0.8}, {"temperature": 1.2, "top_k": 20}, {"temperature": 0.7, "top_p": 0.8}]
    prompts, sampling = [], []
    for at in range(6):
        prompts += [truth.prompts[at], truth.prompts[at]]
        sampling += [greedy(NEW_TOKENS, ignore_eos=True), {**kinds[at % 3], "max_new_tokens": 48, "ignore_eos": True}]
    answers = ask_all(client, prompts, sampling)
    assert_same(prompts[::2], answers[::2], truth.answers[:6])
    assert [answer.tokens for answer in answers[1::2]] == [48] * 6


def test_requests_that_leave_do_not_disturb_those_that_stay(drafting: Server, truth: Truth) -> None:
    """C3: four requests share a prefix, two of them leave while their drafts are verified and come again, and two more
    have nothing to do with them. Each is dense SGLang's answer to one prompt, taken up at another token."""
    client = Client(drafting.url)
    at = 12
    right = truth.answers[at].output_ids

    def take_up(said: int) -> Background:
        left = greedy(NEW_TOKENS - said, ignore_eos=True)
        return Background(client, [*truth.prompts[at], *right[:said]], left)

    for round_ in range(3):
        client.flush_cache()
        staying = {said: take_up(said) for said in (0, 5)}
        leaving = [take_up(said) for said in (11, 23)]
        others = {i: Background(client, truth.prompts[i], greedy(NEW_TOKENS, ignore_eos=True)) for i in (9, 13)}
        for each, tokens in zip(leaving, (1 + round_, 2 + 3 * round_), strict=True):
            each.wait_for_tokens(tokens)
            each.leave()
        staying |= {said: take_up(said) for said in (11, 23)}
        for said, request in staying.items():
            assert request.join().output_ids == right[said:], f"taken up at token {said}"
        for i, request in others.items():
            assert request.join().output_ids == truth.answers[i].output_ids
        for each in leaving:
            each.join()
    wait_until_idle(client)


def test_what_is_seen_from_outside(drafting: Server, truth: Truth) -> None:
    client = Client(drafting.url)
    client.stream(truth.prompts[3], greedy(NEW_TOKENS, ignore_eos=True))
    state = until(lambda: (s := client.oasis()).get("verify_steps_total") and s, "no verification was counted")
    assert 1.0 < state["accepted_tokens_total"] / state["verify_steps_total"] <= 4.0


def test_what_the_text_repeats_is_copied(drafting: Server, truth: Truth, documents: Documents) -> None:
    """Of a text that stands in the prompt twice, the second time but for its end, the drafts are copies."""
    client = Client(drafting.url)
    before = client.oasis()
    text = documents.text(250, 120)
    prompt = [*text, *documents.text(251, 20), *text[:80]]
    answer = client.stream(prompt, greedy(24, ignore_eos=True))
    state = until(
        lambda: (s := client.oasis())["verify_steps_total"] > before["verify_steps_total"] and s, "nothing was verified"
    )
    copied = state["copied_chains_total"] - before["copied_chains_total"]
    assert 0 < copied <= answer.meta["spec_verify_ct"]


@pytest.mark.parametrize(("drafts", "page_size"), [(1, 32), (2, 64), (5, 16)])
def test_other_chains_and_pages(
    drafts: int, page_size: int, truth: Truth, server_factory: ServerFactory, eagle: list[str], documents: Documents
) -> None:
    """Dense SGLang's text with chains and pages of any length. C27: 50 requests whose ends fall anywhere in a page
    strand none; SGLang's idle leak check is on, and the pool is whole."""
    chain = ["--speculative-num-steps", str(drafts), "--speculative-num-draft-tokens", str(drafts + 1)]
    with server_factory([*oasis_flags({"page_size": page_size}, 3072), *FP32, *eagle[-4:], *chain]) as server:
        client, watch = Client(server.url), LogWatch(server)
        answers = ask_all(client, truth.prompts, greedy(NEW_TOKENS, ignore_eos=True))
        assert_same(truth.prompts, answers, truth.answers)
        prompts = [documents.text(300 + at, 20 + 13 * at % 170) for at in range(50)]
        lengths = [greedy(3 + 7 * at % 29, ignore_eos=True) for at in range(50)]
        answers = ask_all(client, prompts, lengths)
        assert [answer.tokens for answer in answers] == [3 + 7 * at % 29 for at in range(50)]
        client.flush_cache()
        wait_until_idle(client)
        watch.assert_clean()


def test_retracted_and_aborted_in_mid_chain(truth: Truth, server_factory: ServerFactory, eagle: list[str]) -> None:
    """A retraction every few steps, and requests that leave: the others' text is dense SGLang's, nothing is held."""
    with server_factory(eagle, RETRACTIONS) as server:
        client, watch = Client(server.url), LogWatch(server)
        leaving = [Background(client, truth.prompts[at], greedy(400, ignore_eos=True)) for at in (3, 7)]
        staying = list(range(8, 14))
        asked = [Background(client, truth.prompts[at], greedy(NEW_TOKENS, ignore_eos=True)) for at in staying]
        for count, request in enumerate(leaving, 2):
            request.wait_for_tokens(count)
            request.leave()
        answers = [request.join() for request in asked]
        assert_same([truth.prompts[at] for at in staying], answers, [truth.answers[at] for at in staying])
        assert sum(int(answer.meta["num_retractions"]) for answer in answers) > 0
        client.flush_cache(wait=600)
        wait_until_idle(client)
        watch.assert_clean()
