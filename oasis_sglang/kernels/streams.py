"""Work beside the compute stream: one side stream, and events between the two.

Compute never waits for all of the side stream's work, only for what was marked under a key; the side stream never
starts before what compute had issued when it was forked. On a CPU everything runs in order and nothing is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator

import torch


class Streams:
    """Of a device that has one stream. Everything is done in order, so nothing is ever waited for."""

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        """What is issued inside runs on the side stream, after all that compute has issued so far."""
        yield

    def mark(self, key: Hashable) -> None:
        """Call the side stream's work up to here `key`, in the place of what was called so before."""

    def wait(self, key: Hashable) -> None:
        """Let compute wait for the work called `key`; at once where there is none or it was waited for already."""

    def join(self) -> None:
        """Let compute wait for all of the side stream's work."""

    def lend(self, x: torch.Tensor) -> None:
        """The side stream uses memory that was allocated for compute: it is not to be given to others before that."""


class CudaStreams(Streams):
    """A CUDA stream beside the current one.

    Within a graph capture, forks and joins become edges of the graph. A graph knows no event of another graph or of
    work outside: capture begins and ends joined, and so does every replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()
        self._events: dict[Hashable, torch.cuda.Event] = {}
        self._pending: set[Hashable] = set()
        self._apart = False  # whether the side stream has work that compute has not waited for

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        self._forked.record(torch.cuda.current_stream(self._device))
        self._side.wait_event(self._forked)
        self._apart = True
        with torch.cuda.stream(self._side):
            yield

    def mark(self, key: Hashable) -> None:
        event = self._events.get(key)
        if event is None:
            event = self._events[key] = torch.cuda.Event()
        event.record(self._side)
        self._pending.add(key)

    def wait(self, key: Hashable) -> None:
        if key in self._pending:
            self._pending.discard(key)
            torch.cuda.current_stream(self._device).wait_event(self._events[key])

    def join(self) -> None:
        if self._apart:
            self._joined.record(self._side)
            torch.cuda.current_stream(self._device).wait_event(self._joined)
            self._apart = False
        self._pending.clear()

    def lend(self, x: torch.Tensor) -> None:
        x.record_stream(self._side)


def streams_for(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else Streams()
