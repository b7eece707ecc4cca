"""The life of requests on one server: how they end, pause, and are refused, against dense SGLang's answers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import requests

from oasis_sglang.serving import Client, Documents, Server, greedy
from tests.server.checks import Background, post, refusal, until
from tests.server.truth import CONTEXT, NEW_TOKENS, Truth, assert_same

pytestmark = [pytest.mark.server, pytest.mark.slow]

FULL = greedy(NEW_TOKENS, ignore_eos=True)
AT = 13  # a prompt of 240 tokens


@pytest.fixture
def client(within_budget: Server) -> Client:
    return Client(within_budget.url)


# -- how answers end --------------------------------------------------------------------------------------------------


def test_streaming(client: Client, truth: Truth) -> None:
    """A client that concatenates chunks must end up with what a client that waits gets."""
    seen: list[str] = []
    answer = client.stream(truth.prompts[AT], FULL, on_chunk=lambda a: seen.append(a.text))
    whole = client.generate(truth.prompts[AT], FULL)
    assert answer.text == whole["text"] == truth.answers[AT].text
    assert answer.output_ids == whole["output_ids"]
    assert len(seen) > NEW_TOKENS // 2
    assert all(after.startswith(before.rstrip("�")) for before, after in itertools.pairwise(seen))


def test_stop_string(client: Client, truth: Truth) -> None:
    """The text ends before the first place where the stop string stands, as it does in dense SGLang's text."""
    text = truth.answers[AT].text
    stop = text[len(text) // 2 :][:6]
    answer = client.generate(truth.prompts[AT], {**FULL, "stop": [stop]})
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["meta_info"]["completion_tokens"] < NEW_TOKENS


def test_stop_token(client: Client, truth: Truth) -> None:
    """The first time dense SGLang gives the token is where the answer ends."""
    ids = truth.answers[12].output_ids  # running text, which no end-of-text token cuts short
    token = ids[len(ids) // 2]
    answer = client.generate(truth.prompts[12], {**greedy(NEW_TOKENS), "stop_token_ids": [token]})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert answer["meta_info"]["completion_tokens"] == ids.index(token) + 1


def test_natural_end(client: Client, truth: Truth) -> None:
    """A chat answer ends where dense SGLang's does; `ignore_eos` goes on from there."""
    natural = client.stream(truth.question, greedy(48))
    assert_same([truth.question], [natural], [truth.natural])
    assert natural.meta["finish_reason"] == truth.natural.meta["finish_reason"]
    further = client.stream(truth.question, greedy(48, ignore_eos=True))
    assert further.tokens == 48
    assert further.output_ids[: natural.tokens] == natural.output_ids


@pytest.mark.parametrize("count", [1, 16, 17])
def test_length(client: Client, truth: Truth, count: int) -> None:
    """`max_new_tokens` is met exactly, also where the request ends at its prefill or as its page fills."""
    answer = client.stream(truth.prompts[AT], greedy(count, ignore_eos=True))
    assert answer.output_ids == truth.answers[AT].output_ids[:count]
    assert answer.meta["finish_reason"] == {"type": "length", "length": count}


def test_parallel_samples(client: Client, truth: Truth) -> None:
    """`n=2` shares one prompt: both greedy samples are dense SGLang's answer, and sampled ones run."""
    both: Any = client.generate(truth.prompts[AT], {**greedy(16, ignore_eos=True), "n": 2})
    assert [answer["output_ids"] for answer in both] == [truth.answers[AT].output_ids[:16]] * 2
    sampled: Any = client.generate(
        truth.prompts[AT], {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 16, "ignore_eos": True, "n": 2}
    )
    assert [answer["meta_info"]["completion_tokens"] for answer in sampled] == [16, 16]


def test_sampling_with_a_seed(client: Client, truth: Truth) -> None:
    sampling = {"temperature": 0.7, "top_k": 20, "sampling_seed": 7, "max_new_tokens": 12, "ignore_eos": True}
    assert client.stream(truth.prompts[AT], sampling).tokens == 12


# -- pause, flush -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(client: Client, truth: Truth, mode: str) -> None:
    """C40, C5: a pause keeps or gives back what the request holds; either way its text is dense SGLang's."""
    request = Background(client, truth.prompts[AT], FULL)
    request.wait_for_tokens(5)
    assert post(client, "/pause_generation", {"mode": mode}).status_code == 200
    until(lambda: (client.oasis()["working_sets"] == 0) == (mode == "retract"), "the pause")
    before = client.oasis()["decode_steps_total"]
    # Retracted requests hold nothing, so the cache may be flushed under them; those that pause in place forbid it.
    assert post(client, "/flush_cache").status_code == (200 if mode == "retract" else 400)
    assert client.oasis()["decode_steps_total"] == before
    assert not request.done
    if mode == "retract":
        assert client.oasis()["host_tokens_written"] == 0
    assert post(client, "/continue_generation", {}).status_code == 200
    assert_same([truth.prompts[AT]], [request.join()], [truth.answers[AT]])


def test_pause_that_aborts(client: Client, truth: Truth) -> None:
    """C1: the default mode of a pause ends every request."""
    request = Background(client, truth.prompts[AT], FULL)
    request.wait_for_tokens(2)
    assert post(client, "/pause_generation", {}).status_code == 200
    assert post(client, "/continue_generation", {}).status_code == 200
    assert request.join().meta["finish_reason"]["type"] == "abort"


def test_flush_while_idle(client: Client, truth: Truth) -> None:
    """C40: afterwards nothing of the prompt is left to be found, on the host or elsewhere."""
    prompt = truth.prompts[AT]
    assert client.stream(prompt, greedy(2)).cached_tokens == 0
    assert client.stream(prompt, greedy(2)).cached_tokens == 224
    assert client.oasis()["host_tokens_written"] >= 240
    client.flush_cache(wait=None)
    assert client.oasis()["host_tokens_written"] == 0
    again = client.stream(prompt, FULL)
    assert again.cached_tokens == 0
    assert_same([prompt], [again], [truth.answers[AT]])


def test_flush_while_busy(client: Client, truth: Truth) -> None:
    """C40: a flush that cannot wait fails and changes nothing; one that can wait waits for the request to end."""
    prompt = truth.prompts[AT]
    request = Background(client, prompt, FULL)
    request.wait_for_tokens(2)
    response = post(client, "/flush_cache")
    assert response.status_code == 400
    assert not request.done
    client.flush_cache(wait=600)
    state = client.oasis()
    assert (state["host_tokens_written"], state["working_sets"], state["device_tokens_used"]) == (0, 0, 0)
    assert_same([prompt], [request.join()], [truth.answers[AT]])
    assert client.stream(prompt, greedy(2)).cached_tokens == 0


# -- refused requests, health -----------------------------------------------------------------------------------------


def test_longer_than_the_context(client: Client, truth: Truth) -> None:
    """C29: SGLang's own 400, word for word."""
    message = refusal(client, truth.too_long, greedy(4))
    assert message == truth.too_long_refusal
    assert str(CONTEXT) in message


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "The prompt has no tokens"),
        ([], "input_ids cannot be empty"),  # SGLang's own
        ([1, 2, 99_999_999], "99999999"),
        ([1, -5], "-5"),
    ],
)
def test_prompts_that_cannot_be_computed(client: Client, truth: Truth, prompt: Any, message: str) -> None:
    """400, and the server goes on."""
    assert message in refusal(client, prompt, greedy(4))
    answer = client.stream(truth.question, greedy(2))
    assert answer.tokens == 2


def test_beam_search(client: Client, truth: Truth) -> None:
    """Contract 10: beam search copies KV by slot, which this pool does not do: 400, and the queue moves on."""
    request = Background(client, truth.prompts[AT], FULL)
    request.wait_for_tokens(1)
    message = refusal(client, truth.prompts[0], {**greedy(4), "beam_width": 2})
    assert "beam_width=2 does not work with --kv-backend oasis" in message
    assert_same([truth.prompts[AT]], [request.join()], [truth.answers[AT]])


def test_health_under_a_long_prefill(client: Client, documents: Documents) -> None:
    """C42: an orchestrator that polls must not restart a server that is working."""
    request = Background(client, documents.text(90, 3000), greedy(8))
    polls = 0
    while not request.done:
        assert requests.get(f"{client.url}/health", timeout=120).status_code == 200
        polls += 1
    assert polls
    assert request.join().meta["prompt_tokens"] == 3000
