"""`sglang serve` with everything in a file, without a radix cache: the other way in, and no tree to hold KV."""

from __future__ import annotations

import pytest

from oasis_sglang.serving import Client, Documents, Server, ask_all, greedy
from tests.server.checks import Background, LogWatch, wait_until_idle
from tests.server.truth import NEW_TOKENS, Truth, assert_same

pytestmark = [pytest.mark.server, pytest.mark.slow]

WITHIN = range(3, 12)  # prompts of 37 to 150 tokens: with 64 more, within 256 and a page


def test_the_file_is_followed(no_radix: Server) -> None:
    """Flags in a file reach the rank process; what is not named keeps its default."""
    info = Client(no_radix.url).server_info()
    state = info["internal_states"][0]["oasis"]
    assert (state["config"]["token_budget"], state["config"]["recent_tokens"]) == (256, 32)
    assert (state["config"]["page_size"], state["config"]["miss_policy"]) == (16, "wait")
    assert (state["device_tokens_total"], state["host_tokens_total"]) == (2080, 2080)
    assert (info["attention_backend"], info["page_size"], info["disable_radix_cache"]) == ("oasis", 16, True)


def test_text_and_no_reuse(no_radix: Server, truth: Truth) -> None:
    """Contract 1 without a radix cache: dense SGLang's text, nothing cached, nothing kept afterwards."""
    client = Client(no_radix.url)
    prompts, dense = [truth.prompts[at] for at in WITHIN], [truth.answers[at] for at in WITHIN]
    answers = ask_all(client, prompts, greedy(NEW_TOKENS, ignore_eos=True))
    assert_same(prompts, answers, dense)
    again = client.stream(prompts[0], greedy(4, ignore_eos=True))
    assert again.cached_tokens == 0
    assert again.output_ids == dense[0].output_ids[:4]
    assert wait_until_idle(client)["host_tokens_written"] == 0


def test_host_pool_full_in_mid_flight(no_radix: Server, documents: Documents) -> None:
    """C5, C9, C11: four requests are admitted that the host pool cannot hold to their end. SGLang retracts, the request
    starts again, and its text is what it is when it has the pool to itself."""
    client, watch = Client(no_radix.url), LogWatch(no_radix)
    prompts, sampling = [documents.text(120 + at, 464) for at in range(4)], greedy(96)
    running = []
    for prompt in prompts:  # one after the other: SGLang counts what it admits together to its end
        running.append(Background(client, prompt, sampling))
        running[-1].wait_for_tokens(1)
    together = [request.join() for request in running]
    assert sum(int(answer.meta["num_retractions"]) for answer in together) > 0
    assert "KV cache pool is full. Retract requests." in watch.text()
    alone = [client.stream(prompt, sampling) for prompt in prompts]
    assert sum(int(answer.meta["num_retractions"]) for answer in alone) == 0
    assert_same(prompts, together, alone)


def test_the_longest_prompt(no_radix: Server, documents: Documents) -> None:
    """C28: without a radix cache SGLang admits `ignore_eos` requests by another path, which must not wait for ever
    either."""
    answer = Client(no_radix.url).stream(
        documents.text(130, 1900), greedy(140, ignore_eos=True, stop=["the", "a", "e"])
    )
    assert answer.meta["prompt_tokens"] == 1900
