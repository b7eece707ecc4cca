"""The watch over the workers of one rank: a thread that starts them, hears them, and replaces those it loses."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import NamedTuple

import zmq

from oasis_sglang.memory_pool.prefetch.folder import EndpointFolder
from oasis_sglang.memory_pool.prefetch.messages import BadMessage, Hello, Stop, decode, encode
from oasis_sglang.memory_pool.prefetch.process import Endpoints, Layout, State, WorkerProcess
from oasis_sglang.memory_pool.prefetch.settings import SILENCE_SECONDS, STOPPED_SECONDS
from oasis_sglang.memory_pool.prefetch.sockets import can_read, try_send

logger = logging.getLogger(__name__)

# Between two looks at the processes.
TICK_SECONDS = 0.1
# A watch that slept this long was itself stopped or starved, and its workers' silence proves nothing.
OVERSLEPT_SECONDS = 1.0
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 5.0
# A worker that was in service for this long is healthy, and its next loss is a first one.
HEALTHY_SECONDS = 10.0
# What `stop` gives the workers to end by themselves, and then the kernel to end them.
POLITE_SECONDS = 0.2
KILL_SECONDS = 0.4
# Frames read in a row, so that a flood of them cannot keep the watch from looking at the processes.
FRAMES_AT_ONCE = 256


class View(NamedTuple):
    """What other threads see. Replaced as a whole, so that it needs no lock."""

    states: tuple[State, ...]
    generations: tuple[int, ...]  # of each worker, its newest; 0 before the first
    pids: tuple[int | None, ...]
    endpoints: dict[int, Endpoints]  # of every generation that is not certainly gone
    newest: int  # generation
    restarts: int
    bad_messages: int


class _Slot:
    """One worker: its process, or when to start the next one."""

    def __init__(self) -> None:
        self.process: WorkerProcess | None = None
        self.generation = 0
        self.losses = 0  # in a row
        self.next_start = 0.0
        self.lost_at: float | None = None


class Watch:
    """Everything but `stop` and the reading of `view` happens in the thread, the start of processes included: the
    kernel ends a worker with the thread that started it."""

    def __init__(self, count: int, layout: Layout) -> None:
        self.folder = EndpointFolder()
        starting: State = "starting"
        self.view = View((starting,) * count, (0,) * count, (None,) * count, {}, 0, 0, 0)
        self._slots = [_Slot() for _ in range(count)]
        self._newest = 0
        self._restarts = 0
        self._bad_messages = 0
        self._bad_frames_of_the_dead = 0
        self._owner = os.getpid()
        self._stopping = threading.Event()
        self._impatient = threading.Event()
        self._context = zmq.Context()
        self._heartbeats = self.folder.endpoint("heartbeats")
        try:
            self._hellos = self._context.socket(zmq.PULL)
            self._hellos.linger = 0
            self._hellos.rcvhwm = 16 * count
            self._hellos.bind(self._heartbeats)
        except zmq.ZMQError:
            self.folder.remove()
            raise
        # Whoever opened the memories may close them, and restarts still need them.
        self._layout = layout._replace(source_fd=os.dup(layout.source_fd), target_fd=os.dup(layout.target_fd))
        self._thread = threading.Thread(target=self._run, name="oasis-prefetch-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the workers, the thread and the folder. May be called from any thread, a finalizer's included."""
        if os.getpid() != self._owner:
            return  # a fork of the rank process ends; the workers are not its own
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(TICK_SECONDS + POLITE_SECONDS + KILL_SECONDS + 0.2)
        if self._thread.is_alive():
            for process in self._processes():
                process.kill()
            self.folder.remove()

    def replace_stopped(self) -> None:
        """Wait no longer for workers that somebody stopped. May be called from any thread."""
        self._impatient.set()

    def _processes(self) -> list[WorkerProcess]:
        return [process for slot in self._slots if (process := slot.process) is not None]

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopping.is_set():
            try:
                self._hellos.poll(int(TICK_SECONDS * 1000))
                now = time.monotonic()
                if now - last > OVERSLEPT_SECONDS:
                    for process in self._processes():
                        process.heard = max(process.heard, now - OVERSLEPT_SECONDS)
                last = now
                self._turn(now)
            except Exception:
                logger.exception("The watch over the prefetch workers met an error and goes on")
                self._stopping.wait(TICK_SECONDS)
        self._end()

    def _turn(self, now: float) -> None:
        self._listen(now)
        impatient = self._impatient.is_set()
        self._impatient.clear()
        for index, slot in enumerate(self._slots):
            process = slot.process
            if process is None:
                if now >= slot.next_start:
                    self._start(index, slot, now)
            elif process.state == "lost":
                self._bury(slot)
            elif process.look_for_stop(now):
                logger.warning(
                    "Prefetch worker %d (pid %d) was silent for %.0f s: it is stopped. Until it goes on steps do "
                    "without it; it is replaced in %.0f s, or before the server is idle",
                    index,
                    process.pid,
                    SILENCE_SECONDS,
                    STOPPED_SECONDS - SILENCE_SECONDS,
                )
            elif process.state == "stopped" and impatient:
                self._give_up(index, slot, f"(pid {process.pid}) is stopped with plans that must end", now)
            elif trouble := process.trouble(now):
                self._give_up(index, slot, f"(pid {process.pid}) {trouble}", now)
            elif process.state == "ready" and now - process.ready_since > HEALTHY_SECONDS:
                slot.losses = 0
        self._publish()

    def _listen(self, now: float) -> None:
        for _ in range(FRAMES_AT_ONCE):
            if not can_read(self._hellos):
                return
            try:
                message = decode(self._hellos.recv())
            except BadMessage:
                self._bad_messages += 1
                continue
            if isinstance(message, Hello):
                self._hear(message, now)
            else:
                self._bad_messages += 1

    def _hear(self, hello: Hello, now: float) -> None:
        for index, slot in enumerate(self._slots):
            process = slot.process
            if process is None or (process.generation, process.pid) != (hello.generation, hello.pid):
                continue
            process.heard = now
            process.bad_frames = hello.bad_frames
            if process.state == "starting":
                process.state, process.ready_since = "ready", now
                if slot.lost_at is not None:
                    seconds = now - slot.lost_at
                    logger.info("Prefetch worker %d is back (pid %d) after %.1f s", index, process.pid, seconds)
                slot.lost_at = None
            elif process.state == "stopped":
                process.state, process.ready_since = "ready", now
                logger.info("Prefetch worker %d (pid %d) goes on", index, process.pid)

    def _start(self, index: int, slot: _Slot, now: float) -> None:
        self._newest += 1
        try:
            slot.process = WorkerProcess(self._newest, self._layout, self.folder, self._heartbeats, now)
        except OSError as error:
            self._give_up(index, slot, f"cannot be started: {error}", now)
            return
        slot.generation = self._newest
        if slot.losses:
            self._restarts += 1

    def _give_up(self, index: int, slot: _Slot, why: str, now: float) -> None:
        backoff = min(FIRST_BACKOFF_SECONDS * 2 ** min(slot.losses, 10), LAST_BACKOFF_SECONDS)
        slot.losses += 1
        slot.next_start = now + backoff
        slot.lost_at = now if slot.lost_at is None else slot.lost_at
        logger.warning(
            "Prefetch worker %d %s. Its pages are fetched when they are needed; a new worker starts in %.1f s",
            index,
            why,
            backoff,
        )
        if slot.process:
            slot.process.state = "lost"
            slot.process.kill()
            self._bury(slot)

    def _bury(self, slot: _Slot) -> None:
        if slot.process and slot.process.reap():
            self._bad_frames_of_the_dead += slot.process.bad_frames
            slot.process = None

    def _publish(self) -> None:
        processes = self._processes()
        self.view = View(
            states=tuple(self._state(slot) for slot in self._slots),
            generations=tuple(slot.generation for slot in self._slots),
            pids=tuple(slot.process.pid if slot.process else None for slot in self._slots),
            endpoints={process.generation: process.endpoints for process in processes},
            newest=self._newest,
            restarts=self._restarts,
            bad_messages=self._bad_messages
            + self._bad_frames_of_the_dead
            + sum(process.bad_frames for process in processes),
        )

    def _end(self) -> None:
        """Ask, then kill, then put everything away."""
        orders = []
        for process in self._processes():
            process.state = "lost"  # it takes no more plans
            order = self._context.socket(zmq.PUSH)
            order.linger = 0
            order.connect(process.endpoints.plans)
            try_send(order, encode(Stop()))
            orders.append(order)
        self._await_ends(POLITE_SECONDS)
        for process in self._processes():
            process.kill()
        self._await_ends(KILL_SECONDS)
        for socket in (self._hellos, *orders):
            socket.close(linger=0)
        self._context.destroy(linger=0)
        os.close(self._layout.source_fd)
        os.close(self._layout.target_fd)
        self.folder.remove()

    def _await_ends(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while True:
            for slot in self._slots:
                self._bury(slot)
            self._publish()
            if not self._processes() or time.monotonic() > end:
                return
            time.sleep(0.01)

    def _state(self, slot: _Slot) -> State:
        if slot.process is not None:
            return slot.process.state
        return "lost" if slot.losses or self._stopping.is_set() else "starting"
