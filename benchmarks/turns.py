"""Two servers decode the same prompts a few seconds each in turn, the other standing still meanwhile (SIGSTOP).

One whole answer after the other takes minutes, in which a shared machine changes its speed by tens of percent; turns
this short meet both servers alike.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from oasis_sglang.serving import Answer, Client, Server, ask_all, greedy

LOOK_EVERY = 0.05  # seconds
# Steps left out when a server goes on: the one it stood still in, and the next, which finds the caches cold.
SETTLING_STEPS = 2


class Decoding:
    """One answer per prompt, under way together on a server that runs in turns only."""

    def __init__(self, server: Server, prompts: Sequence[str], new_tokens: int) -> None:
        """Returns, with the server standing still, once every prompt has got its first tokens."""
        self.server, self.client = server, Client(server.url)
        self._new_tokens = new_tokens
        self._seen: dict[int, Answer] = {}
        self._thread = ThreadPoolExecutor(1)
        with server.running():
            self.before = self.client.oasis()
            self._answers: Future[list[Answer]] = self._thread.submit(
                ask_all, self.client, prompts, greedy(new_tokens, ignore_eos=True), None, self._seen.__setitem__
            )
            while len(self._seen) < len(prompts) and not self._answers.done():
                time.sleep(LOOK_EVERY)
        if self._answers.done():
            self._answers.result()  # raises what went wrong
        if self.over:
            raise RuntimeError(f"{len(prompts)} answers of {new_tokens} tokens never were under way together")

    def turn(self, seconds: float) -> list[float]:
        """Let the server decode; the milliseconds that its steps took."""
        start = time.perf_counter()
        with self.server.running():
            time.sleep(seconds)
            end = time.perf_counter()
        times = [when for when, _ in self._seen[0].arrivals if start <= when <= end]
        return [1000 * (b - a) for a, b in itertools.pairwise(times)][SETTLING_STEPS - 1 :]

    @property
    def over(self) -> bool:
        """Whether some answer is: fewer than all decode then."""
        return any(answer.tokens >= self._new_tokens for answer in self._seen.values())

    def finish(self) -> dict[str, Any]:
        """Wait for the answers; what `/server_info` says then."""
        with self.server.running():
            self._answers.result()
            self._thread.shutdown()
            return self.client.oasis()


def take_turns(first: Decoding, second: Decoding, seconds: float) -> list[tuple[float, float]]:
    """Mean milliseconds per step of either, for each pair of turns until one of them is over. Neither always goes
    first."""
    pairs: list[tuple[float, float]] = []
    while True:
        order = (first, second) if len(pairs) % 2 == 0 else (second, first)
        took = {decoding: decoding.turn(seconds) for decoding in order}
        if first.over or second.over:
            return pairs
        if not all(took.values()):
            raise RuntimeError(f"no whole step in {seconds:g} s; give --turn more seconds")
        pairs.append((statistics.mean(took[first]), statistics.mean(took[second])))


def speedup(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """How much faster the second is: median over the pairs of turns, with its standard error, that of the mean times
    √(π/2) as for normal errors."""
    ratios = [first / second for first, second in pairs]
    error = math.sqrt(math.pi / 2 / len(ratios)) * statistics.stdev(ratios)
    return {"of_turns": ratios, "median": statistics.median(ratios), "standard_error": error}
