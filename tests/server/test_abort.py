"""Requests that end early, wherever they are (C1, C3, C6): nothing stays held, and the others do not notice.

The fixtures see after each test that no working set, device page or slot is left, and that SGLang's leak check passed.
"""

from __future__ import annotations

import pytest
import requests

from oasis_sglang.serving import Client, Documents, Server, greedy
from tests.server.checks import Background, post, until
from tests.server.truth import NEW_TOKENS, Truth, assert_same

pytestmark = [pytest.mark.server, pytest.mark.slow]

FULL = greedy(NEW_TOKENS, ignore_eos=True)
LONG = greedy(400, ignore_eos=True)  # longer than any test waits
AT = 13


@pytest.fixture
def client(within_budget: Server) -> Client:
    return Client(within_budget.url)


def assert_serves(client: Client, truth: Truth) -> None:
    client.flush_cache(wait=600)
    state = client.oasis()
    assert (state["host_tokens_written"], state["working_sets"], state["device_tokens_used"]) == (0, 0, 0)
    answer = client.stream(truth.prompts[AT], greedy(16, ignore_eos=True))
    assert answer.output_ids == truth.answers[AT].output_ids[:16]


def test_client_leaves_while_decoding(client: Client, truth: Truth) -> None:
    """C1: a closed browser tab frees the device; the other request's text is untouched (C3)."""
    leaving = Background(client, truth.prompts[14], LONG)
    staying = Background(client, truth.prompts[AT], FULL)
    leaving.wait_for_tokens(3)
    leaving.leave()
    assert leaving.join().tokens < 100
    assert_same([truth.prompts[AT]], [staying.join()], [truth.answers[AT]])
    until(lambda: client.oasis()["working_sets"] == 0, "the release")
    assert_serves(client, truth)


def test_client_leaves_during_prefill(client: Client, truth: Truth, documents: Documents) -> None:
    """C1: gone before the first token."""
    body = {"input_ids": documents.text(91, 2000), "sampling_params": LONG}
    with pytest.raises(requests.ReadTimeout):
        requests.post(f"{client.url}/generate", json=body, timeout=0.7)
    assert_serves(client, truth)


def test_client_leaves_while_queued(client: Client, truth: Truth, documents: Documents) -> None:
    """C1: a request that waits for device pages holds none, and the one behind it gets its turn."""
    running = Background(client, documents.text(92, 1200), LONG)  # 101 of 170 pages
    running.wait_for_tokens(1)
    # The next does not fit beside it; what follows does not overtake it.
    body = {"input_ids": documents.text(94, 900), "sampling_params": LONG}  # 82 pages
    with pytest.raises(requests.ReadTimeout):
        requests.post(f"{client.url}/generate", json=body, timeout=2)
    assert client.oasis()["working_sets"] == 1
    behind = Background(client, truth.prompts[AT], FULL)
    running.leave()
    assert_same([truth.prompts[AT]], [behind.join()], [truth.answers[AT]])
    assert_serves(client, truth)


@pytest.mark.parametrize("stage", ["prefill", "decode", "queue"])
def test_abort_by_name(client: Client, truth: Truth, documents: Documents, stage: str) -> None:
    """C1: `/abort_request` reaches a request in every stage, and says so to its client."""
    running = [Background(client, documents.text(95, 1200), LONG)] if stage == "queue" else []
    for request in running:
        request.wait_for_tokens(1)
    held = len(running)
    target = Background(client, documents.text(97, 1200), LONG, rid=f"target-{stage}")
    if stage == "decode":
        target.wait_for_tokens(3)
    elif stage == "prefill":
        until(lambda: client.loads()[0]["num_running_reqs"] or client.oasis()["working_sets"], "its start")
    else:
        until(lambda: client.loads()[0]["num_waiting_reqs"] or target.done, "its place in the queue")
        assert client.oasis()["working_sets"] == held
    client.abort(f"target-{stage}")
    assert target.join().meta["finish_reason"]["type"] == "abort"
    assert target.answer.tokens < 400
    for request in running:
        assert not request.done
        request.leave()
    assert_serves(client, truth)


def test_abort_everything(client: Client, truth: Truth) -> None:
    """C1: six requests at once, some decoding, some not yet."""
    requests_ = [Background(client, prompt, LONG) for prompt in truth.prompts[10:16]]
    requests_[0].wait_for_tokens(2)

    def over() -> bool:
        client.abort(everything=True)  # again for those that a busy machine had not sent yet
        return all(request.done for request in requests_)

    until(over, "the end of all")
    for request in requests_:
        assert request.join().meta["finish_reason"]["type"] == "abort"
    assert_serves(client, truth)


def test_abort_of_retracted_requests(client: Client, truth: Truth) -> None:
    """C6: requests that were retracted hold nothing and wait; aborted there, again and again, they leave nothing."""
    aborted = 0
    for turn in range(34):  # three requests each: a hundred in all
        waiting = [Background(client, truth.prompts[at], LONG, rid=f"retracted-{turn}-{at}") for at in (8, 9, 10)]
        for request in waiting:
            request.wait_for_tokens(1)
        assert post(client, "/pause_generation", {"mode": "retract"}).status_code == 200
        until(lambda: client.oasis()["working_sets"] == 0, "the retraction")
        client.abort(f"retracted-{turn}-8")
        client.abort(everything=turn % 2 == 0, rid=f"retracted-{turn}-9")
        assert post(client, "/continue_generation", {}).status_code == 200
        client.abort(everything=True)
        # On a busy machine some may have come to their end before the pause.
        aborted += sum(request.join().meta["finish_reason"]["type"] == "abort" for request in waiting)
        client.flush_cache(wait=600)
        state = client.oasis()
        assert (state["host_tokens_written"], state["working_sets"], state["device_tokens_used"]) == (0, 0, 0)
    assert aborted > 50
    assert_serves(client, truth)
