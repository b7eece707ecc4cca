"""What must hold of a server after every test, and small helpers to use one."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import requests

from oasis_sglang.serving import Answer, Client, RequestFailed, Server

# SGLang's leak checks and its scheduler's death both end in one of these.
ALARMS = re.compile(r"leak|Traceback|Exception|Scheduler hit an exception|SIGQUIT|RuntimeError", re.IGNORECASE)
IDLE_WAIT = 180.0  # seconds; other work may have the cores
AT_REST = {"working_sets": 0, "device_tokens_used": 0, "transfers_in_flight": 0, "stale_releases_total": 0}


class LogWatch:
    """Reads what a server's log gains from here on."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.start = len(server.log())

    def text(self) -> str:
        return self.server.log()[self.start :]

    def assert_clean(self) -> None:
        lines = [line for line in self.text().splitlines() if ALARMS.search(line)]
        assert not lines, "\n".join(lines[:20])


def until(condition: Callable[[], Any], what: str, timeout: float = IDLE_WAIT) -> Any:
    """Poll until `condition()` is true and return it; fail with `what` when it never is."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {timeout:.0f} s")


def wait_until_idle(client: Client) -> dict[str, Any]:
    """Wait until the scheduler is at rest and return our counters, all of which must say so.

    A server that is idle runs SGLang's leak check and ours, and ends itself when one fails: so it must answer after.
    """
    until(lambda: not client.oasis()["working_sets"], "working sets are still held")
    # One more request, so that the scheduler goes through its idle checks once more after the last.
    client.generate([1, 2, 3], {"temperature": 0, "max_new_tokens": 1})
    state = until(lambda: (s := client.oasis())["working_sets"] == 0 and s, "working sets are held")
    assert {key: state[key] for key in AT_REST} == AT_REST
    return dict(state)


class Background:
    """A streamed request in a thread of its own; `answer` grows while it runs."""

    def __init__(self, client: Client, prompt: str | Sequence[int], sampling: Mapping[str, Any], **fields: Any) -> None:
        self.client = client
        self.answer = Answer()
        self.error: Exception | None = None
        self._leave = False
        self._response: requests.Response | None = None
        self._call = (prompt, sampling, fields)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        prompt, sampling, fields = self._call

        def seen(answer: Answer) -> bool:
            self.answer = answer
            return not self._leave

        try:
            self.answer = self.client.stream(prompt, sampling, on_chunk=seen, **fields)
        except (RequestFailed, requests.RequestException) as error:
            self.error = error

    def wait_for_tokens(self, count: int) -> None:
        until(lambda: self.error or self.answer.tokens >= count or self.done, f"{count} tokens")

    def leave(self) -> None:
        """Drop the connection at the next token, as a client that goes away does."""
        self._leave = True

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> Answer:
        self._thread.join(IDLE_WAIT)
        assert self.done, "the request never ended"
        if self.error is not None:
            raise self.error
        return self.answer


def refusal(client: Client, prompt: str | Sequence[int], sampling: Mapping[str, Any], **fields: Any) -> str:
    """The message of the 400 that a request gets, at once."""
    started = time.monotonic()
    with pytest.raises(RequestFailed) as error:
        client.generate(prompt, sampling, **fields)
    assert error.value.status == 400, str(error.value)
    assert time.monotonic() - started < 10
    return str(error.value)


def post(client: Client, path: str, body: Any = None, timeout: float = 60.0) -> requests.Response:
    return requests.post(client.url + path, json=body, timeout=timeout)


def metrics(client: Client) -> dict[str, float]:
    """`/metrics` by name, labels dropped (one rank)."""
    text = requests.get(f"{client.url}/metrics", timeout=60).text
    found = re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}
