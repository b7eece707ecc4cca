"""Requests that outgrow a small budget, retracted all the time, on a host pool that holds hardly more than one of them.

Sparse answers are compared with the same requests served one at a time, which the test hook never retracts: that one
run computes exact top-K attention is proven against float64 in the unit tests.
"""

from __future__ import annotations

import pytest

from oasis_sglang.serving import Answer, Client, Documents, Server, ask_all, greedy
from tests.server.checks import Background, refusal
from tests.server.truth import NEW_TOKENS, Truth, assert_same

pytestmark = [pytest.mark.server, pytest.mark.slow]

CONTEXT = 2048
HOST_TOKENS = 2112


@pytest.fixture
def client(small_pools: Server) -> Client:
    return Client(small_pools.url)


def retractions(answers: list[Answer]) -> int:
    return sum(int(answer.meta["num_retractions"]) for answer in answers)


def test_retracted_within_budget(client: Client, truth: Truth) -> None:
    """C5: eight requests, one retracted every few steps: each is token for token what dense SGLang gives unharmed."""
    prompts, dense = truth.short()
    answers = ask_all(client, prompts, greedy(NEW_TOKENS, ignore_eos=True))
    assert retractions(answers) > 0
    assert_same(prompts, answers, dense)


def test_retracted_beyond_the_budget(client: Client, documents: Documents) -> None:
    """C5, C21, contract 2: lengths from dense to nine budgets in one batch, two that cross the threshold while they
    decode, chunks of 64 tokens between the decode steps, and more tokens than the host pool holds."""
    lengths = (40, 100, 130, 300, 500, 1100)
    sampling = greedy(48, ignore_eos=True)
    prompts = [documents.text(100 + at, length) for at, length in enumerate(lengths)]
    assert sum(lengths) + 48 * len(lengths) > HOST_TOKENS
    alone = [client.stream(prompt, sampling) for prompt in prompts]
    before = client.oasis()
    client.flush_cache()
    together = ask_all(client, prompts, sampling)
    assert retractions(alone) == 0
    assert retractions(together) > 0
    assert_same(prompts, together, alone)
    after = client.oasis()
    for key in ("sparse_sequences_total", "dense_sequences_total", "fetched_pages_total", "misses_total"):
        assert after[key] > before[key]
    assert after["dropped_misses_total"] == 0, "no cap, policy `wait`"


def test_the_longest_prompt(client: Client, truth: Truth, documents: Documents) -> None:
    """C28: the longest prompt that is accepted is served, with a host pool of hardly more than that; one token more
    is refused at once with both numbers, and does not hold up what comes behind it."""
    longest = CONTEXT - 1 - 5 - 1  # SGLang keeps six tokens back
    answer = client.stream(documents.text(110, longest), greedy(4, ignore_eos=True))
    assert answer.meta["prompt_tokens"] == longest
    assert answer.tokens == 4
    prompts, dense = truth.short()
    running = Background(client, prompts[5], greedy(NEW_TOKENS, ignore_eos=True))
    running.wait_for_tokens(1)
    message = refusal(client, documents.text(111, longest + 1), greedy(4))
    assert f"({longest + 1} tokens)" in message
    assert f"maximum allowed length ({longest + 1} tokens)" in message
    behind = client.stream(prompts[6], greedy(NEW_TOKENS, ignore_eos=True))
    assert_same(prompts[5:7], [running.join(), behind], dense[5:7])
