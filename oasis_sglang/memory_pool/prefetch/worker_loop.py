"""What a worker does: take plans, copy them piece by piece, report, and be heard of all the while."""

from __future__ import annotations

import logging
import os
import time
from collections import deque

import zmq

from oasis_sglang.memory_pool.prefetch.job import Job, Refused
from oasis_sglang.memory_pool.prefetch.lifeline import parent_is_gone
from oasis_sglang.memory_pool.prefetch.messages import (
    BadMessage,
    Cancel,
    Completion,
    Hello,
    Plan,
    Stop,
    decode,
    encode,
)
from oasis_sglang.memory_pool.prefetch.piece_copy import PieceCopy
from oasis_sglang.memory_pool.prefetch.settings import HEARTBEAT_SECONDS, WorkerSettings
from oasis_sglang.memory_pool.prefetch.sockets import can_read, try_send

logger = logging.getLogger(__name__)

# Bytes copied before the sockets are looked at again: a tenth of a millisecond or so.
RUN_BYTES = 1 << 20
# Frames read before the next run, so that a flood of them cannot stop the copies or the heartbeat.
FRAMES_AT_ONCE = 256


class WorkerLoop:
    """Plans are copied one after the other, in the order they came. Everything happens in one thread."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.memory = PieceCopy(
            settings.source_fd,
            settings.target_fd,
            width=settings.width,
            value_stride=settings.value_stride,
            library=settings.library,
        )
        self._jobs: deque[Job] = deque()
        self._unsent: deque[Completion] = deque()
        self._done = 0
        self._bad_frames = 0
        self._next_hello = 0.0
        self._run_pieces = max(1, RUN_BYTES // self.memory.piece_bytes)
        if settings.test_piece_delay or settings.test_gate_fd is not None:
            self._run_pieces = 1
        self._context = context = zmq.Context()
        self._plans = context.socket(zmq.PULL)
        self._completions = context.socket(zmq.PUSH)
        self._hellos = context.socket(zmq.PUSH)
        # Cancels come through the same socket as plans, hence twice the room.
        self._plans.rcvhwm = 2 * settings.queue_plans
        self._completions.sndhwm = settings.queue_plans
        self._hellos.sndhwm = 2
        for socket in (self._plans, self._completions, self._hellos):
            socket.linger = 0
        self._plans.bind(settings.plans)
        self._completions.bind(settings.completions)
        self._hellos.connect(settings.heartbeats)

    def run(self) -> None:
        """Work until told to stop, or until the parent is gone."""
        while self._beat() and self._receive():
            worked = self._work()
            sent = self._send()
            if not worked and not sent:
                self._sleep()
        self._context.destroy(linger=0)

    def _beat(self) -> bool:
        """Say hello when it is time. False when there is nobody left to say it to."""
        now = time.monotonic()
        if now < self._next_hello:
            return True
        self._next_hello = now + HEARTBEAT_SECONDS
        if parent_is_gone(self.settings.parent, self.settings.lifeline_fd):
            return False
        hello = Hello(os.getpid(), self.settings.generation, len(self._jobs), self._done, self._bad_frames)
        try_send(self._hellos, encode(hello))  # one that does not fit is not missed: the next comes soon
        return True

    def _receive(self) -> bool:
        """Take what has arrived. False after a stop."""
        for _ in range(FRAMES_AT_ONCE):
            if not self._has_room() or not can_read(self._plans):
                break
            try:
                message = decode(self._plans.recv())
            except BadMessage:
                self._bad_frames += 1
                continue
            match message:
                case Plan():
                    self._accept(message)
                case Cancel():
                    for job in self._jobs:
                        job.cancel(message)
                case Stop():
                    return False
                case _:
                    self._bad_frames += 1
        return True

    def _has_room(self) -> bool:
        """Whether to read on. With as many plans as a client may have waiting, cancels can follow and must be heard."""
        return len(self._jobs) + len(self._unsent) <= self.settings.queue_plans

    def _accept(self, plan: Plan) -> None:
        try:
            self._jobs.append(Job(plan, self.memory))
        except Refused as refusal:
            logger.warning("plan %d is refused: %s", plan.sequence, refusal)
            self._finish(Completion(self.settings.generation, plan.sequence, "refused", 0, 0, 0.0))

    def _work(self) -> bool:
        """Copy one run of the oldest plan, or end it. False when there is nothing that can be done now."""
        if not self._jobs or not self._pass_gate():
            return False
        job = self._jobs[0]
        run = job.next_run(self._run_pieces)
        if not run:
            self._finish(self._jobs.popleft().completion(self.settings.generation, "done"))
            return True
        try:
            job.copy(run)
        except Exception:
            logger.exception("plan %d failed", job.plan.sequence)
            self._finish(self._jobs.popleft().completion(self.settings.generation, "failed"))
        if self.settings.test_piece_delay:
            time.sleep(self.settings.test_piece_delay)
        return True

    def _pass_gate(self) -> bool:
        gate = self.settings.test_gate_fd
        if gate is None:
            return True
        try:
            return os.read(gate, 1) != b""  # the tests' end is non-blocking
        except BlockingIOError:
            return False

    def _finish(self, completion: Completion) -> None:
        self._done += 1
        self._unsent.append(completion)

    def _send(self) -> bool:
        """Report what has ended. What cannot be sent now stays for later: a completion is never dropped."""
        sent = False
        while self._unsent and try_send(self._completions, encode(self._unsent[0])):
            self._unsent.popleft()
            sent = True
        return sent

    def _sleep(self) -> None:
        """Wait for a message, for room to send, or until the next heartbeat."""
        poller = zmq.Poller()
        if self._has_room():
            poller.register(self._plans, zmq.POLLIN)
        poller.register(self.settings.lifeline_fd, zmq.POLLIN)
        if self._unsent:
            poller.register(self._completions, zmq.POLLOUT)
        if self._jobs and self.settings.test_gate_fd is not None:
            poller.register(self.settings.test_gate_fd, zmq.POLLIN)
        wait = max(0.0, self._next_hello - time.monotonic())
        events = dict(poller.poll(int(wait * 1000) + 1))
        if self.settings.lifeline_fd in events:
            self._next_hello = 0.0  # look at once
