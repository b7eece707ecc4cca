"""The rank process's side: hands plans to workers and hears what became of them, never waiting for either."""

from __future__ import annotations

import functools
import os
from typing import Protocol, cast

import numpy as np
import zmq

from oasis_sglang.memory_pool.prefetch.ledger import AttemptKey, Finished, Ledger
from oasis_sglang.memory_pool.prefetch.messages import (
    IDS,
    BadMessage,
    Cancel,
    Completion,
    Message,
    Plan,
    decode,
    encode,
    encode_into,
)
from oasis_sglang.memory_pool.prefetch.process import Endpoints
from oasis_sglang.memory_pool.prefetch.sockets import can_read, try_send


class WorkerList(Protocol):
    """What the client asks of `Workers`."""

    queue_plans: int

    def ready(self) -> list[tuple[int, int]]:
        """Worker and generation of those that can take plans."""

    def endpoints(self, generation: int) -> Endpoints | None:
        """Where a generation listens; None once it is reaped."""

    def is_reaped(self, generation: int) -> bool:
        """Whether the process is certainly gone."""


class ClientStats:
    """Totals since start."""

    def __init__(self) -> None:
        self.plans_submitted = 0
        self.plans_dropped = 0  # no worker was ready, or all queues were full
        self.plans_lost = 0
        self.cancels_dropped = 0  # the attempt's pieces are copied for nothing
        self.stale_completions = 0
        self.bad_messages = 0
        self.pieces = 0
        self.bytes = 0
        self.copy_seconds = 0.0  # in the workers


def _raw(ids: np.ndarray) -> bytes:
    """The memory of an array, which can be encoded as bytes and is copied once less."""
    return cast(bytes, ids.data)


@functools.cache
def _context() -> zmq.Context[zmq.Socket[bytes]]:
    """One for the process, which nobody ends: one that is ended by the garbage collector waits for sockets that are
    part of the same garbage, for ever.

    Its thread is `SCHED_BATCH`, so that it interrupts nobody when a frame is handed to it: with all cores busy a step
    would stand still for longer than all the rest of handing over a plan takes."""
    context = zmq.Context()
    context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


class _Link:
    """The sockets to one generation of a worker."""

    def __init__(self, context: zmq.Context, endpoints: Endpoints, queue_plans: int) -> None:
        self.plans = context.socket(zmq.PUSH)
        self.completions = context.socket(zmq.PULL)
        self.plans.sndhwm = 2 * queue_plans  # plans and cancels
        self.completions.rcvhwm = queue_plans
        for socket, endpoint in ((self.plans, endpoints.plans), (self.completions, endpoints.completions)):
            socket.linger = 0
            socket.connect(endpoint)

    def send(self, frame: bytes | bytearray) -> bool:
        return try_send(self.plans, frame)

    def close(self) -> None:
        self.plans.close(linger=0)
        self.completions.close(linger=0)


class PrefetchClient:
    """Hands out plans and collects their ends. For one thread, and the only client of its workers.

    No call waits, and nothing that a worker does or fails to do raises. Every plan that `submit` took is reported by
    `poll` exactly once; until then its target memory is lent to a process that may write to it.
    """

    def __init__(self, workers: WorkerList) -> None:
        self._workers = workers
        self._context = _context()
        self._links: dict[int, _Link] = {}  # by generation
        self._ledger = Ledger()
        self._frame = bytearray()  # of plans
        self._stats = ClientStats()

    @property
    def outstanding(self) -> int:
        """Plans submitted and not reported."""
        return self._ledger.outstanding

    @property
    def stats(self) -> ClientStats:
        self._stats.plans_submitted = self._ledger.submitted
        self._stats.stale_completions = self._ledger.stale
        return self._stats

    def submit(
        self,
        attempts: object,
        source_ids: object,
        target_ids: object,
        *,
        step: int,
        first_layer: int,
        end_layer: int,
    ) -> int | None:
        """Have `source_ids[i]` copied to `target_ids[i]` for every i.

        Args:
            attempts: `[n, 3]` integers, (row, generation, pieces) of those that the pieces are for, in the order of the
                pieces; kept until the plan has ended.
            source_ids, target_ids: `[pieces]` int64, in host memory. An id out of range makes the plan `refused`.

        Returns:
            The number of the plan, or None when no worker takes it now: counted as dropped, and nothing is lent.

        Raises:
            ValueError: the plan is larger than `messages.MAX_FRAME_BYTES`.
        """
        shares = np.ascontiguousarray(attempts, dtype=IDS).reshape(-1, 3)
        sources, targets = np.ascontiguousarray(source_ids, dtype=IDS), np.ascontiguousarray(target_ids, dtype=IDS)
        pieces = len(sources)
        sequence = self._ledger.next_sequence()
        plan = Plan(sequence, step, first_layer, end_layer, _raw(shares), _raw(sources), _raw(targets))
        encode_into(self._frame, plan)
        ready = [generation for _, generation in self._workers.ready()]
        if len(ready) > 1:
            ready.sort(key=self._ledger.pieces_of)
        for generation in ready:
            if self._ledger.plans_of(generation) >= self._workers.queue_plans:
                continue
            link = self._link(generation)
            if link is not None and link.send(self._frame):
                self._ledger.submit(sequence, generation, shares, pieces)
                return sequence
        self._stats.plans_dropped += 1
        return None

    def cancel(self, attempt: AttemptKey) -> None:
        """Spare the workers what is not copied yet of an attempt, (row, generation). Its plans are still reported."""
        row, generation = attempt
        message = encode(Cancel(row, generation))
        for worker_generation in self._ledger.cancel((row, generation)):
            if not self._links[worker_generation].send(message):
                self._stats.cancels_dropped += 1

    def poll(self) -> list[Finished]:
        """Every plan that has ended since the last call, in no particular order."""
        finished: list[Finished] = []
        for generation, link in list(self._links.items()):
            # Asked first: what a process sent before it was gone is read before its plans are given up.
            gone = self._workers.is_reaped(generation)
            finished += self._read(generation, link)
            if gone:
                lost = self._ledger.lose(generation)
                self._stats.plans_lost += len(lost)
                finished += lost
                link.close()
                del self._links[generation]
        return finished

    def close(self) -> None:
        """Close the sockets. Plans not reported by then never are: stop the workers and `poll` first."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def _link(self, generation: int) -> _Link | None:
        link = self._links.get(generation)
        if link is None:
            endpoints = self._workers.endpoints(generation)
            if endpoints is None:
                return None
            try:
                link = self._links[generation] = _Link(self._context, endpoints, self._workers.queue_plans)
            except zmq.ZMQError:  # no descriptors left
                return None
        return link

    def _read(self, generation: int, link: _Link) -> list[Finished]:
        finished: list[Finished] = []
        # No worker has more to say than this, and a flood of frames must not hold up the step.
        for _ in range(2 * self._workers.queue_plans):
            if not can_read(link.completions):
                break
            message = self._decode(link.completions.recv())
            if message is None or (end := self._ledger.complete(message, generation)) is None:
                continue
            finished.append(end)
            self._stats.pieces += end.pieces
            self._stats.bytes += end.bytes
            self._stats.copy_seconds += end.seconds
        return finished

    def _decode(self, frame: bytes) -> Completion | None:
        try:
            message: Message = decode(frame)
        except BadMessage:
            self._stats.bad_messages += 1
            return None
        if not isinstance(message, Completion):
            self._stats.bad_messages += 1
            return None
        return message
