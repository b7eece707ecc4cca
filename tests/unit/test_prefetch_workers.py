"""Real worker processes in service: what they copy, refuse, skip, count, and import."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from oasis_sglang.memory_pool.prefetch.messages import (
    MAX_FRAME_BYTES,
    Completion,
    Plan,
    Share,
    encode,
    pack_ids,
    pack_shares,
)
from oasis_sglang.memory_pool.prefetch.supervisor import Workers
from oasis_sglang.native.build import library_path
from tests.unit.prefetch_rig import PATIENCE, PIECES, SLOTS, WIDTH, Memories, Rig, until

LIBRARY = library_path()


@pytest.mark.parametrize(
    "library",
    [
        pytest.param(None, id="numpy"),
        pytest.param(LIBRARY, id="native", marks=pytest.mark.skipif(LIBRARY is None, reason="needs a C++ compiler")),
    ],
)
def test_what_is_planned_arrives(library: Path | None) -> None:
    chance = random.Random(2)
    with Rig(2, library=library) as rig:
        expected: dict[int, int] = {}
        plans: dict[int, int] = {}
        free = list(range(SLOTS))
        chance.shuffle(free)
        while free:
            slots = [free.pop() for _ in range(min(len(free), chance.randint(0, 30)))]
            pieces = [chance.randrange(PIECES) for _ in slots]
            cut = len(slots) // 3
            sequence = rig.submit(pieces, slots, [(1, 1, cut), (2, 5, len(slots) - cut)])
            assert sequence is not None
            plans[sequence] = len(slots)
            expected |= dict(zip(slots, pieces, strict=True))
        assert rig.client.outstanding == len(plans)
        ends = rig.wait()
        assert {end.sequence: end.pieces for end in ends} == plans
        assert {end.status for end in ends} == {"done"}
        assert all(end.bytes == end.pieces * 2 * WIDTH for end in ends)
        assert all(rig.memories.holds(slot, piece) for slot, piece in expected.items())
        stats = rig.client.stats
        assert (stats.pieces, stats.bytes) == (SLOTS, SLOTS * 2 * WIDTH)
        assert (stats.plans_submitted, stats.plans_dropped, stats.plans_lost) == (len(plans), 0, 0)
        assert 0 < stats.copy_seconds < PATIENCE
        assert rig.workers.bad_messages == stats.bad_messages == stats.stale_completions == 0
        assert rig.workers.restarts == 0


@pytest.mark.parametrize(
    ("source", "target", "pieces"),
    [
        ([0, 1, PIECES], [0, 1, 2], 3),
        ([0, 1, -1], [0, 1, 2], 3),
        ([0, 1, 2], [0, 1, SLOTS], 3),
        ([0, 1, 2], [0, 1, 2**63 - 1], 3),
        ([0, 1, 2], [0, 1], 3),
        ([0, 1], [0, 1], 3),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused_as_a_whole(source: list[int], target: list[int], pieces: int) -> None:
    with Rig() as rig:
        bad = rig.submit(source, target, [(0, 1, pieces)])
        good = rig.submit([3], [4])
        ends = rig.wait()
        assert [(end.sequence, end.status, end.pieces) for end in ends] == [(bad, "refused", 0), (good, "done", 1)]
        assert rig.memories.holds(4, 3)
        assert all(rig.memories.is_untouched(slot) for slot in range(SLOTS) if slot != 4)
        assert rig.workers.restarts == 0


def test_what_is_cancelled_is_skipped() -> None:
    """The gate holds the worker in the middle of the first of three attempts while the second is cancelled."""
    with Rig(gate=True) as rig:
        rig.submit(list(range(9)), list(range(9)), [(0, 1, 3), (1, 1, 3), (2, 1, 3)])
        later = rig.submit([50, 51], [50, 51], [(1, 1, 1), (2, 1, 1)])
        rig.let_through(2)
        until(lambda: rig.memories.holds(1, 1))
        rig.client.cancel((1, 1))
        rig.client.cancel((2, 9))  # another attempt in the same row
        time.sleep(0.2)  # the worker is awake for cancels, and the gate is shut
        assert rig.memories.is_untouched(2)
        rig.let_through(100)
        first, second = rig.wait()
        assert (first.status, first.pieces, first.bytes) == ("done", 6, 6 * 2 * WIDTH)
        assert first.cancelled == second.cancelled == {(1, 1)}
        assert (second.sequence, second.pieces) == (later, 1)
        assert all(rig.memories.holds(i, i) for i in (0, 1, 2, 6, 7, 8, 51))
        assert all(rig.memories.is_untouched(i) for i in (3, 4, 5, 50))


def test_a_completion_that_comes_after_its_attempt_was_released() -> None:
    """The copy is complete and its report is held at the gate while the attempt is cancelled."""
    with Rig(gate=True) as rig:
        sequence = rig.submit([7, 8], [1, 2], [(5, 3, 2)])
        rig.let_through(2)
        until(lambda: rig.memories.holds(2, 8))
        rig.client.cancel((5, 3))
        assert rig.poll() == []
        assert rig.client.outstanding == 1, "its memory is still lent"
        rig.let_through(1)
        (end,) = rig.wait()
        assert (end.sequence, end.status, end.pieces, end.cancelled) == (sequence, "done", 2, {(5, 3)})
        assert rig.client.stats.stale_completions == 0


def test_a_full_queue_is_counted() -> None:
    with Rig(gate=True, queue_plans=4) as rig:
        numbers = [rig.submit([i], [i]) for i in range(6)]
        assert numbers[4:] == [None, None]
        assert rig.client.stats.plans_dropped == 2
        assert rig.client.outstanding == 4
        rig.client.cancel((0, 1))  # is heard behind a full queue
        time.sleep(0.2)
        rig.let_through(100)
        assert [(end.sequence, end.status, end.pieces) for end in rig.wait()] == [(n, "done", 0) for n in numbers[:4]]
        assert rig.submit([9], [9]) is not None
        rig.wait()
        assert rig.memories.holds(9, 9)


def test_completions_wait_for_a_client_that_does_not_read() -> None:
    """More plans than fit any queue end while nobody looks; none of their reports is lost."""
    with Rig(queue_plans=64) as rig:
        for turn in range(3):
            numbers = [rig.submit([i], [i]) for i in range(64)]
            until(lambda: rig.memories.holds(63, 63))
            time.sleep(0.3)
            assert [(end.sequence, end.status) for end in rig.wait()] == [(n, "done") for n in numbers]
            for slot in range(64):
                rig.memories.wipe(slot)
            assert rig.client.stats.plans_submitted == 64 * (turn + 1)


def _junk(count: int) -> list[bytes]:
    chance = random.Random(4)
    plan = encode(Plan(1, 2, 3, 4, b"", pack_ids([1]), pack_ids([1])))
    frames = [chance.randbytes(chance.randrange(100)) for _ in range(count)]
    # damaged, of another version, of an unknown kind, too large, and a message that is meant for somebody else
    frames += [plan[:-1], plan + b"x", plan[:2] + b"\x00" + plan[3:], plan[:3] + b"\x63" + plan[4:]]
    return [*frames, plan[:4] + bytes(MAX_FRAME_BYTES), encode(Completion(1, 1, "done", 1, 1, 1.0))]


def _push(endpoint: str, frames: list[bytes]) -> zmq.Socket:
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.linger = 0
    socket.sndtimeo = int(PATIENCE * 1000)
    socket.connect(endpoint)
    for frame in frames:
        socket.send(frame)
    return socket


def test_a_completion_that_cannot_be_sent_is_kept() -> None:
    """A plan ends while no client is connected; its report is there when one comes."""
    with Rig() as rig:
        endpoints = rig.workers.endpoints(rig.workers.generation(0))
        assert endpoints is not None
        plan = Plan(10_000, 1, 0, 1, pack_shares([Share(0, 1, 1)]), pack_ids([6]), pack_ids([7]))
        socket = _push(endpoints.plans, [encode(plan)])
        until(lambda: rig.memories.holds(7, 6))
        socket.close()
        time.sleep(0.1)
        rig.submit([3], [4])
        (end,) = rig.wait()
        assert end.sequence != 10_000
        until(lambda: not rig.poll() and rig.client.stats.stale_completions == 1)


@pytest.mark.parametrize("end", ["worker", "watch"])
def test_junk_is_counted_and_harmless(end: str) -> None:
    with Rig() as rig:
        endpoints = rig.workers.endpoints(rig.workers.generation(0))
        assert endpoints is not None
        junk = _junk(5000)
        socket = _push(endpoints.plans if end == "worker" else f"ipc://{rig.workers.folder}/heartbeats", junk)
        try:
            until(lambda: rig.workers.bad_messages >= len(junk))
            assert rig.workers.bad_messages == len(junk)
        finally:
            socket.close()
        rig.submit([3], [4])
        assert [end.status for end in rig.wait()] == ["done"]
        assert rig.memories.holds(4, 3)
        assert all(rig.memories.is_untouched(slot) for slot in range(SLOTS) if slot != 4)
        assert (rig.workers.restarts, rig.client.outstanding) == (0, 0)


@pytest.mark.slow
def test_a_million_junk_frames_take_no_memory_and_no_service() -> None:
    with Rig() as rig:
        endpoints = rig.workers.endpoints(rig.workers.generation(0))
        assert endpoints is not None

        def resident() -> int:
            return int(Path(f"/proc/{rig.pid()}/statm").read_text().split()[1]) * 4096

        frames = _junk(10_000)[:-2]
        socket = _push(endpoints.plans, frames)
        before = resident()
        for _ in range(99):
            for frame in frames:
                socket.send(frame)
            rig.submit([3], [4])
            rig.poll()
        rig.wait()
        until(lambda: rig.workers.bad_messages >= 100 * len(frames))
        socket.close()
        assert rig.workers.bad_messages == 100 * len(frames) > 1_000_000
        assert resident() - before < 8 << 20
        assert {end.status for end in rig.finished} == {"done"}
        assert rig.workers.restarts == 0


def test_two_servers_on_one_host_never_meet() -> None:
    with Rig() as one, Rig() as two:
        assert one.workers.folder != two.workers.folder
        one.submit([1], [1])
        two.submit([2], [2])
        one.wait()
        two.wait()
        assert one.memories.holds(1, 1)
        assert one.memories.is_untouched(2)
        assert two.memories.holds(2, 2)
        assert two.memories.is_untouched(1)


IMPORTS = """
import sys
import oasis_sglang.memory_pool.prefetch.worker
import oasis_sglang.memory_pool.prefetch.worker_loop
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "sglang", "triton", "cuda", "transformers"}))
"""


def test_a_worker_loads_neither_torch_nor_sglang_nor_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
    monkeypatch.setenv("LD_PRELOAD", "memory_saver.so")
    with Rig(library=LIBRARY) as rig:
        rig.submit([1], [1])
        rig.wait()
        assert b"LD_PRELOAD" not in Path(f"/proc/{rig.pid()}/environ").read_bytes()
        maps = Path(f"/proc/{rig.pid()}/maps").read_text()
        assert "oasis-test" in maps, "this is the process that maps the memories"
        assert (LIBRARY is None) or (str(LIBRARY) in maps)
        assert not [
            line
            for line in maps.splitlines()
            if any(name in line for name in ("libtorch", "libc10", "libcuda", "/sglang/"))
        ]
        assert len(os.listdir(f"/proc/{rig.pid()}/task")) <= 3, "itself and two threads of ZMQ"


def test_the_worker_runs_the_package_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies in the server's working folder."""
    for name in ("zmq.py", "msgspec.py", "oasis_sglang.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with Rig() as rig:
        assert rig.workers.restarts == 0


def test_a_worker_has_the_priority_of_the_rank_process() -> None:
    """A lower one makes steps slower where their threads keep every core busy, since those wait actively."""
    with Rig() as rig:
        assert os.sched_getscheduler(rig.pid()) == os.sched_getscheduler(0)
        assert os.getpriority(os.PRIO_PROCESS, rig.pid()) == os.getpriority(os.PRIO_PROCESS, 0)


def test_ctrl_c_is_the_servers() -> None:
    with Rig() as rig:
        for _ in range(3):
            os.kill(rig.pid(), signal.SIGINT)
            time.sleep(0.05)
        rig.submit([1], [1])
        assert [end.status for end in rig.wait()] == ["done"]
        assert rig.workers.restarts == 0


def test_the_descriptors_may_be_closed_once_the_workers_have_them() -> None:
    with Rig() as rig:
        os.kill(rig.pid(), signal.SIGKILL)
        os.close(rig.memories.source_fd)
        rig.memories.source_fd = os.open("/dev/null", os.O_RDONLY)
        until(lambda: rig.workers.restarts == 1 and rig.workers.ready())
        rig.submit([5], [6])
        assert [end.status for end in rig.wait()] == ["done"]
        assert rig.memories.holds(6, 5)


@pytest.mark.parametrize(("count", "width", "stride"), [(0, WIDTH, SLOTS), (1, 7, SLOTS), (1, WIDTH, 2 * SLOTS)])
def test_a_start_that_cannot_work_is_refused(count: int, width: int, stride: int) -> None:
    memories = Memories()
    with pytest.raises(ValueError, match=r"count=0|divide|value_stride="):
        Workers(count, memories.source_fd, memories.target_fd, width=width, value_stride=stride, library=None)
    memories.close()
