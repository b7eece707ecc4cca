"""HTTP client of a running SGLang server, with the arrival time of every token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests

TIMEOUT = 1800.0  # seconds; a long prompt queued behind others on a small CPU takes minutes


class RequestFailed(RuntimeError):
    """The server refused or broke off a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


@dataclass
class Answer:
    """A finished (or broken off) answer. Times are seconds of `time.perf_counter`."""

    text: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    sent: float = 0.0
    # (time, tokens received by then), one entry per streamed chunk.
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.arrivals[0][0]

    @property
    def last(self) -> float:
        return self.arrivals[-1][0]

    @property
    def ttft(self) -> float:
        """Seconds from sending the request to its first token."""
        return self.first - self.sent

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][1] if self.arrivals else 0

    @property
    def cached_tokens(self) -> int:
        return int(self.meta.get("cached_tokens") or 0)

    def tokens_between(self, start: float, end: float) -> int:
        """Tokens that arrived after `start` and not after `end`."""
        counts = [(when, count) for when, count in self.arrivals if when <= end]
        before = max((count for when, count in counts if when <= start), default=0)
        return max((count for _, count in counts), default=0) - before


def greedy(max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """Sampling parameters of a greedy answer of a given length."""
    return {"temperature": 0, "max_new_tokens": max_new_tokens, **more}


class Client:
    """One server's endpoints. Safe to share between threads."""

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout

    def _call(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        response = requests.request(method, self.url + path, timeout=self.timeout, **kwargs)
        if response.status_code != 200:
            raise RequestFailed(response.status_code, response.text[:2000])
        return response

    def generate(self, prompt: str | Sequence[int], sampling: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        """One `/generate` call, not streamed: SGLang's own JSON."""
        result: dict[str, Any] = self._call("POST", "/generate", json=_payload(prompt, sampling, fields)).json()
        return result

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: Mapping[str, Any],
        on_chunk: Callable[[Answer], bool | None] | None = None,
        **fields: Any,
    ) -> Answer:
        """One streamed `/generate` call.

        `on_chunk` sees the answer so far after every chunk; when it returns False the connection is dropped, which
        is how a client that goes away looks to the server.
        """
        answer = Answer(sent=time.perf_counter())
        payload = _payload(prompt, sampling, {**fields, "stream": True})
        with requests.post(f"{self.url}/generate", json=payload, stream=True, timeout=self.timeout) as response:
            if response.status_code != 200:
                raise RequestFailed(response.status_code, response.text[:2000])
            for chunk in _events(response):
                if "error" in chunk:
                    error = chunk["error"]
                    raise RequestFailed(int(error.get("code") or 500), str(error.get("message")))
                answer.text = chunk["text"]
                answer.meta = chunk["meta_info"]
                answer.output_ids = chunk.get("output_ids") or answer.output_ids
                answer.arrivals.append((time.perf_counter(), int(answer.meta["completion_tokens"])))
                if on_chunk is not None and on_chunk(answer) is False:
                    break
        return answer

    def flush_cache(self, wait: float | None = 60.0) -> None:
        """Empty the radix cache; raises `RequestFailed` when the server is still busy after `wait` seconds.

        The scheduler itself decides what idle means, so this is also the reliable way to wait for it: `/v1/loads`
        reads a snapshot that lags behind by several decode steps.
        """
        self._call("POST", "/flush_cache" + ("" if wait is None else f"?timeout={wait:g}"))

    def abort(self, rid: str = "", everything: bool = False) -> None:
        self._call("POST", "/abort_request", json={"rid": rid, "abort_all": everything})

    def server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._call("GET", "/server_info").json()
        return info

    def state(self) -> dict[str, Any]:
        """The scheduler's own part of `/server_info` (first rank)."""
        states = self.server_info().get("internal_states") or [{}]
        return dict(states[0])

    def loads(self) -> list[dict[str, Any]]:
        """`/v1/loads`, one entry per rank: a snapshot that an idle server keeps current and a decoding one lets lag."""
        entries: list[dict[str, Any]] = self._call("GET", "/v1/loads").json()["loads"]
        return entries

    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V per token, as the server reports its pool."""
        usage = self.state()["memory_usage"]
        return float(usage["kvcache"]) * (1 << 30) / int(usage["token_capacity"])

    def oasis(self) -> dict[str, Any]:
        """The backend's counters, empty on a server that runs without it."""
        return dict(self.state().get("oasis") or {})


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens per second of all answers together while all of them were decoding; 0 if they never all were."""
    start, end = max(answer.first for answer in answers), min(answer.last for answer in answers)
    tokens = sum(answer.tokens_between(start, end) for answer in answers)
    return tokens / (end - start) if end > start else 0.0


def _payload(prompt: str | Sequence[int], sampling: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    key, value = ("text", prompt) if isinstance(prompt, str) else ("input_ids", list(prompt))
    return {key: value, "sampling_params": dict(sampling), **fields}


def _events(response: requests.Response) -> Iterator[dict[str, Any]]:
    """Parsed server-sent events, each as soon as it is complete."""
    for line in response.iter_lines(chunk_size=None):
        if line.startswith(b"data:"):
            data = line[len(b"data:") :].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def ask_all(
    client: Client,
    prompts: Sequence[str | Sequence[int]],
    sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    concurrency: int | None = None,
    on_chunk: Callable[[int, Answer], None] | None = None,
    **fields: Any,
) -> list[Answer]:
    """Stream every prompt, `concurrency` at a time (all at once by default); answers in the order of the prompts."""
    each = [sampling] * len(prompts) if isinstance(sampling, Mapping) else list(sampling)

    def one(index: int) -> Answer:
        def seen(answer: Answer) -> None:
            if on_chunk is not None:
                on_chunk(index, answer)

        return client.stream(prompts[index], each[index], on_chunk=seen, **fields)

    with ThreadPoolExecutor(concurrency or max(len(prompts), 1)) as pool:
        return list(pool.map(one, range(len(prompts))))
