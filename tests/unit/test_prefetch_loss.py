"""Workers that die, stop or stay silent, and servers that do: no plan is forgotten, nothing is left behind."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oasis_sglang.memory_pool.prefetch import process, settings, watch
from oasis_sglang.memory_pool.prefetch.folder import EndpointFolder
from oasis_sglang.memory_pool.prefetch.supervisor import Workers
from tests.unit.prefetch_rig import (
    PIECES,
    SLOTS,
    WIDTH,
    Memories,
    Rig,
    RuntimeFolder,
    is_running,
    until,
    worker_pids,
)


class Load:
    """Keeps workers busy, and checks every plan's data against its source and every free slot for stray writes."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.chance = random.Random(11)
        self.free = list(range(SLOTS))
        self.lent: dict[int, list[tuple[int, int]]] = {}  # sequence: (slot, piece)
        self.ends = {"done": 0, "lost": 0}

    def submit(self) -> None:
        size = self.chance.randint(1, 12)
        if len(self.free) < size:
            return
        self.chance.shuffle(self.free)
        slots, pieces = self.free[:size], [self.chance.randrange(PIECES) for _ in range(size)]
        assert all(self.rig.memories.is_untouched(slot) for slot in slots), "a write to memory that was not lent"
        sequence = self.rig.submit(pieces, slots)
        if sequence is not None:
            del self.free[:size]
            self.lent[sequence] = list(zip(slots, pieces, strict=True))

    def collect(self) -> None:
        for end in self.rig.poll():
            self.ends[end.status] += 1
            for slot, piece in self.lent.pop(end.sequence):
                if end.status == "done":
                    assert self.rig.memories.holds(slot, piece)
                self.rig.memories.wipe(slot)
                self.free.append(slot)
        stats = self.rig.client.stats
        assert self.rig.client.outstanding == len(self.lent) == stats.plans_submitted - len(self.rig.finished)


@pytest.mark.slow
def test_workers_killed_at_random_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9, 20 times under load: every plan is reported once, `done` means the data is there, workers come back."""
    monkeypatch.setattr(watch, "LAST_BACKOFF_SECONDS", 0.1)
    with Rig(2, piece_delay=0.0005) as rig:
        load = Load(rig)
        for kills in range(1, 21):
            end = time.monotonic() + load.chance.uniform(0, 0.2)
            while time.monotonic() < end or not rig.workers.ready():
                load.submit()
                load.collect()
            index, _ = load.chance.choice(rig.workers.ready())
            if pid := rig.workers.pid(index):
                os.kill(pid, signal.SIGKILL)
            until(lambda kills=kills: load.collect() or rig.workers.restarts == kills)
        until(lambda: len(rig.workers.ready()) == 2)
        while load.lent:
            load.collect()
        before = load.ends["done"]
        while load.ends["done"] < before + 50:
            load.submit()
            load.collect()
        while load.lent:
            load.collect()
        assert load.ends["lost"] > 0
        assert rig.client.stats.plans_lost == load.ends["lost"]
        assert sorted(load.free) == list(range(SLOTS))
        assert all(rig.memories.is_untouched(slot) for slot in range(SLOTS))
        assert list(rig.workers.folder.glob("plans-*")) != []
        assert len(list(rig.workers.folder.iterdir())) == 2 * 2 + 2, "sockets of the dead are gone"


def test_a_stopped_worker_is_replaced_when_its_plans_must_end_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger=watch.__name__)
    with Rig(2, piece_delay=0.01) as rig:
        stopped, generation = rig.pid(0), rig.workers.generation(0)
        os.kill(stopped, signal.SIGSTOP)
        start = time.monotonic()
        plans = [rig.submit([i], [i]) for i in range(20)]
        assert None not in plans
        until(lambda: rig.workers.states() == ("stopped", "ready"))
        assert is_running(stopped), "it may go on, and no step waits for it"
        rig.workers.replace_stopped()
        ends = rig.wait()
        lost_after = time.monotonic() - start
        lost = [end.sequence for end in ends if end.status == "lost"]
        done = [end.sequence for end in ends if end.status == "done"]
        assert len(lost) + len(done) == 20
        assert lost
        assert done
        assert lost_after < 3.5
        assert all(rig.memories.holds(plans.index(sequence), plans.index(sequence)) for sequence in done)
        assert not is_running(stopped)
        assert rig.workers.is_reaped(generation)
        back_after = until(lambda: len(rig.workers.ready()) == 2)
        assert back_after < 5.0
        assert rig.workers.generation(0) > generation
        for slot in range(20):
            rig.memories.wipe(slot)
        for i in range(20):
            rig.submit([i], [i])
        assert {end.status for end in rig.wait()} == {"done"}
        assert all(rig.memories.holds(i, i) for i in range(20))
    messages = [record.getMessage() for record in caplog.records if record.name == watch.__name__]
    assert len(messages) == 3
    assert messages[0].startswith(f"Prefetch worker 0 (pid {stopped}) was silent for 2 s: it is stopped. Until it goes")
    assert messages[1].startswith(f"Prefetch worker 0 (pid {stopped}) is stopped with plans that must end. Its pages")
    assert messages[1].endswith("a new worker starts in 0.1 s")
    assert messages[2].startswith("Prefetch worker 0 is back (pid ")


def test_a_stopped_worker_that_goes_on_is_back_in_service_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """C43: no step pays for a successor's start, and what was asked of it before is copied yet."""
    caplog.set_level(logging.INFO, logger=watch.__name__)
    with Rig() as rig:
        pid = rig.pid()
        os.kill(pid, signal.SIGSTOP)
        assert rig.submit([1], [1]) is not None
        until(lambda: rig.workers.states() == ("stopped",))
        assert rig.submit([2], [2]) is None
        assert rig.poll() == []
        time.sleep(settings.SILENCE_SECONDS + 0.5)  # long enough for one that is merely silent to be replaced
        assert rig.workers.states() == ("stopped",)
        os.kill(pid, signal.SIGCONT)
        assert until(rig.workers.ready) < 2.0
        assert [end.status for end in rig.wait()] == ["done"]
        assert rig.memories.holds(1, 1)
        assert rig.submit([2], [2]) is not None
        assert [end.status for end in rig.wait()] == ["done"]
        assert rig.pid() == pid
        assert rig.workers.restarts == 0
    assert caplog.messages[-1] == f"Prefetch worker 0 (pid {pid}) goes on"


def test_a_worker_that_stays_stopped_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOPPED_SECONDS", 4.0)
    with Rig() as rig:
        pid = rig.pid()
        os.kill(pid, signal.SIGSTOP)
        until(lambda: rig.workers.states() == ("stopped",))
        until(lambda: not is_running(pid))
        until(rig.workers.ready)
        assert rig.workers.restarts == 1


def test_a_short_stop_is_forgiven() -> None:
    with Rig() as rig:
        pid = rig.pid()
        for _ in range(3):
            os.kill(pid, signal.SIGSTOP)
            rig.submit([1], [1])
            time.sleep(0.5)
            assert rig.poll() == []
            os.kill(pid, signal.SIGCONT)
            assert [end.status for end in rig.wait()] == ["done"]
        assert rig.pid() == pid
        assert rig.workers.restarts == 0


def test_a_worker_that_copies_for_long_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says hello between pieces."""
    with Rig(piece_delay=0.05) as rig:
        rig.submit(list(range(60)), list(range(60)))
        (end,) = rig.wait()
        assert (end.status, end.pieces, rig.workers.restarts) == ("done", 60, 0)


def test_a_completion_on_its_way_when_the_worker_is_lost() -> None:
    """The client looks only after the worker has reported, died and been reaped: the plan is reported, once."""
    with Rig() as rig:
        generation = rig.workers.generation(0)
        sequence = rig.submit([3], [3])
        until(lambda: rig.memories.holds(3, 3))
        os.kill(rig.pid(), signal.SIGKILL)
        until(lambda: rig.workers.is_reaped(generation))
        assert [end.sequence for end in rig.wait()] == [sequence]
        until(rig.workers.ready)
        rig.submit([4], [4])
        assert [end.status for end in rig.wait()] == ["done"]
        assert rig.client.stats.stale_completions == 0


def test_a_plan_held_in_the_worker_when_it_is_killed_is_lost() -> None:
    with Rig(gate=True) as rig:
        sequence = rig.submit([1, 2], [1, 2])
        rig.let_through(1)
        until(lambda: rig.memories.holds(1, 1))
        os.kill(rig.pid(), signal.SIGKILL)
        (end,) = rig.wait()
        assert (end.sequence, end.status, end.pieces) == (sequence, "lost", 0)
        assert rig.memories.is_untouched(2)


def test_a_lost_plan_means_that_its_process_is_gone() -> None:
    """Only then may the memory be used again."""
    with Rig(gate=True) as rig:
        for _ in range(3):
            until(rig.workers.ready)
            pid, generation = rig.pid(), rig.workers.generation(0)
            rig.submit([1], [1])
            os.kill(pid, signal.SIGKILL)
            assert [end.status for end in rig.wait()] == ["lost"]
            assert not Path(f"/proc/{pid}").exists()
            assert rig.workers.is_reaped(generation)
            assert rig.workers.endpoints(generation) is None
        assert not rig.workers.is_reaped(10_000), "one that never was"


def test_a_worker_that_cannot_be_started_costs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Waits grow from try to try; no call waits for it; it comes up once it can."""
    memories = Memories()
    with RuntimeFolder(), monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent/python")
        workers = Workers(1, memories.source_fd, memories.target_fd, width=WIDTH, value_stride=SLOTS, library=None)

        def losses() -> list[str]:
            return [message for message in caplog.messages if "cannot be started" in message]

        until(lambda: len(losses()) >= 4)
        for message, seconds in zip(losses(), ("0.1", "0.2", "0.4", "0.8"), strict=False):
            assert message.endswith(f"starts in {seconds} s")
        assert workers.ready() == []
        assert workers.states() == ("lost",)
        patch.undo()
        until(workers.ready)
        workers.stop()
    memories.close()


@pytest.mark.parametrize("trouble", ["none", "stopped", "busy"])
def test_stop_is_quick_and_final(trouble: str) -> None:
    with Rig(2, piece_delay=0.5 if trouble == "busy" else 0.0) as rig:
        pids = [rig.pid(0), rig.pid(1)]
        if trouble == "stopped":
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        sequences = [rig.submit(list(range(50)), list(range(50))) for _ in range(2)]
        if trouble == "busy":
            until(lambda: rig.memories.holds(0, 0))
        start = time.monotonic()
        rig.workers.stop()
        assert time.monotonic() - start < 1.5
        assert not any(is_running(pid) for pid in pids)
        assert rig.workers.ready() == []
        assert not rig.workers.folder.exists()
        assert [end.sequence for end in rig.wait()] == sequences
        assert rig.submit([1], [1]) is None
        rig.workers.stop()
    assert rig.workers.states() == ("lost", "lost")


def test_workers_end_with_their_owner() -> None:
    """Nobody called stop: the object was dropped."""
    memories = Memories()
    with RuntimeFolder() as runtime:
        fds = memories.source_fd, memories.target_fd
        owner = [Workers(2, *fds, width=WIDTH, value_stride=SLOTS, library=None)]
        until(lambda: len(owner[0].ready()) == 2)
        assert len(worker_pids(runtime.path)) == 2
        owner.clear()
        gc.collect()
        assert worker_pids(runtime.path) == []
    memories.close()


SERVER = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so do its children
from tests.unit.prefetch_rig import *
from oasis_sglang.memory_pool.prefetch.supervisor import Workers
memories = Memories()
workers = Workers(2, memories.source_fd, memories.target_fd, width=WIDTH, value_stride=SLOTS, library=None,
                  test_piece_delay=0.01)
client = PrefetchClient(workers)
until(lambda: len(workers.ready()) == 2)
"""
BUSY = """
print(workers.folder, workers.pid(0), workers.pid(1), flush=True)
while True:
    client.submit([(0, 1, 20)], range(20), range(20), step=1, first_layer=0, end_layer=1)
    client.poll()
    time.sleep(0.001)
"""


def start_server(then: str) -> tuple[subprocess.Popen[str], Path, list[int]]:
    server = subprocess.Popen([sys.executable, "-c", SERVER + then], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    folder, *pids = server.stdout.readline().split()
    return server, Path(folder), [int(pid) for pid in pids]


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_workers_end_with_a_server_that_is_killed(stopped: bool) -> None:
    with RuntimeFolder() as runtime:
        server, folder, pids = start_server(BUSY)
        assert worker_pids(runtime.path) == sorted(pids)
        if stopped:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        server.kill()
        server.communicate()
        assert until(lambda: not any(is_running(pid) for pid in pids)) < 2.0
        assert folder.is_dir(), "nobody was left to remove it"
        again = EndpointFolder()
        assert not folder.exists()
        again.remove()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_a_server_that_is_asked_to(number: int) -> None:
    """Ctrl-C ends it through Python, which runs its exit handlers; SIGTERM just ends it."""
    with RuntimeFolder():
        server, folder, pids = start_server(BUSY)
        server.send_signal(number)
        server.communicate(timeout=60)
        until(lambda: not any(is_running(pid) for pid in pids))
        if number == signal.SIGINT:
            assert not folder.exists()
        EndpointFolder().remove()
        assert not folder.exists()


@pytest.mark.parametrize("way", ["", "raise ValueError('on purpose')", "sys.exit(3)", "os._exit(4)"])
def test_workers_end_with_a_server_that_ends_by_itself(way: str) -> None:
    with RuntimeFolder():
        say = "print(workers.folder, workers.pid(0), workers.pid(1), flush=True)\n"
        server, folder, pids = start_server(say + way.replace("raise", "sys.stderr.close()\nraise"))
        server.communicate(timeout=60)
        until(lambda: not any(is_running(pid) for pid in pids))
        assert folder.exists() == way.startswith("os._exit")
        EndpointFolder().remove()


FORK = """
import atexit
print(workers.folder, workers.pid(0), workers.pid(1), flush=True)
child = os.fork()
if child == 0:
    sys.exit(0)  # runs the exit handlers
os.waitpid(child, 0)
time.sleep(0.5)
assert workers.restarts == 0 and len(workers.ready()) == 2, workers.states()
assert client.submit([(0, 1, 1)], [1], [1], step=1, first_layer=0, end_layer=1)
until(lambda: [end.status for end in client.poll()] == ["done"])
"""


def test_a_fork_of_the_server_does_not_take_its_workers_along() -> None:
    with RuntimeFolder():
        server, folder, _ = start_server(FORK)
        server.communicate(timeout=60)
        assert server.returncode == 0
        assert not folder.exists()
