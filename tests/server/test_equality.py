"""Within the budget, answers are those of dense SGLang (contracts 1 and 11): token by token, and in every logprob."""

from __future__ import annotations

import math
from typing import Any

import pytest

from oasis_sglang.serving import Client, Server, ask_all, greedy
from tests.server.truth import LOGPROB_FIELDS, LOGPROB_PROMPTS, NEW_TOKENS, Truth, assert_same

pytestmark = [pytest.mark.server, pytest.mark.slow]

TOLERANCE = 1e-5


def test_twenty_prompts(within_budget: Server, truth: Truth) -> None:
    """Contract 1, C52: prompts of 20 to 1,543 tokens at once, a device pool that cannot hold them all."""
    client = Client(within_budget.url)
    answers = ask_all(client, truth.prompts, greedy(NEW_TOKENS, ignore_eos=True))
    assert_same(truth.prompts, answers, truth.answers)
    assert client.oasis()["sparse_sequences_total"] == 0
    texts = [client.generate(prompt, greedy(NEW_TOKENS, ignore_eos=True))["text"] for prompt in truth.prompts[6:9]]
    assert texts == [answer.text for answer in truth.answers[6:9]], "not streamed, from the radix cache"


@pytest.mark.parametrize("at", range(len(LOGPROB_PROMPTS)), ids=lambda at: f"prompt-{LOGPROB_PROMPTS[at]}")
def test_logprobs(within_budget: Server, truth: Truth, at: int) -> None:
    """Contract 1: the same text can hide a distribution that is slightly wrong; the logprobs of the input, of the
    output and of the runners-up cannot."""
    client = Client(within_budget.url)
    prompt, expected = truth.prompts[LOGPROB_PROMPTS[at]], truth.logprobs[at]
    ours = client.generate(prompt, greedy(16, ignore_eos=True), **LOGPROB_FIELDS)
    assert ours["output_ids"] == expected["output_ids"]
    assert len(ours["meta_info"]["input_token_logprobs"]) == len(prompt)
    for name in ("input_token_logprobs", "output_token_logprobs"):
        assert_close(ours["meta_info"][name], expected["meta_info"][name])
    for name in ("input_top_logprobs", "output_top_logprobs"):
        for our, their in zip(ours["meta_info"][name], expected["meta_info"][name], strict=True):
            assert (our is None) == (their is None)
            if our is not None:
                assert_close(our, their)


def assert_close(ours: list[Any], theirs: list[Any]) -> None:
    """Rows of [logprob, token id, text]; the first input token has no logprob."""
    assert [row[1] for row in ours] == [row[1] for row in theirs]
    for (our, *_), (their, *_) in zip(ours, theirs, strict=True):
        assert (our is None) == (their is None)
        if our is not None:
            assert math.isclose(our, their, abs_tol=TOLERANCE), f"{our} and {their}"


def test_second_turn(within_budget: Server, truth: Truth) -> None:
    """The second turn reads the first from the host pool, says so, and gets what dense SGLang gets from scratch."""
    client = Client(within_budget.url)
    prompt = truth.prompts[16]
    first = client.stream(prompt, greedy(NEW_TOKENS, ignore_eos=True))
    assert first.cached_tokens == 0
    assert_same([prompt], [first], [truth.answers[16]])
    loaded = client.oasis()["load_back_tokens_total"]
    second = client.stream(truth.second_turn, greedy(32, ignore_eos=True))
    assert_same([truth.second_turn], [second], [truth.second_answer])
    # Pages are cached whole, and the last token of an answer is never computed.
    turn = len(prompt) + NEW_TOKENS - 1
    assert second.cached_tokens == turn // 16 * 16
    assert second.meta["cached_tokens_details"] == {"device": 0, "host": second.cached_tokens}
    assert client.oasis()["load_back_tokens_total"] - loaded == second.cached_tokens


@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_salts_do_not_share(within_budget: Server, truth: Truth, field: str) -> None:
    """C46: what one tenant's prompt left in the host pool must not serve, or time, another tenant's."""
    client = Client(within_budget.url)
    prompt, expected = truth.prompts[13], truth.answers[13].output_ids[:4]
    cached = []
    for salt in ("a", "b", "a"):
        answer = client.stream(prompt, greedy(4, ignore_eos=True), **{field: salt})
        assert answer.output_ids == expected
        cached.append(answer.cached_tokens)
    assert cached == [0, 0, (len(prompt) - 1) // 16 * 16], "whole pages; a prompt's last token is always computed"


def test_dense_prefill_beyond_the_budget(small_pools: Server, truth: Truth) -> None:
    """C30: chunks of 64 tokens and a prefix hit of more than ten budgets. Prefill is dense whatever the budget, so its
    logprobs are those of dense SGLang; the decode that follows is sparse and ends."""
    client = Client(small_pools.url)
    fields = {"return_logprob": True, "top_logprobs_num": 5}
    whole = client.generate(truth.long, greedy(1), **fields)
    hit = client.generate(truth.long, greedy(24, ignore_eos=True), **fields)
    assert hit["meta_info"]["cached_tokens"] == 1584 >= 10 * 128
    for ours in (whole, hit):
        assert ours["output_ids"][0] == truth.long_first["output_ids"][0]
        expected = truth.long_first["meta_info"]["output_top_logprobs"][0]
        assert_close(ours["meta_info"]["output_top_logprobs"][0], expected)
    assert hit["meta_info"]["completion_tokens"] == 24
    assert client.oasis()["sparse_sequences_total"] > 0
