"""Real worker processes between two small memories, and what must be true of them after every test."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from unittest import mock

import numpy as np

from oasis_sglang.memory_pool.prefetch.client import PrefetchClient
from oasis_sglang.memory_pool.prefetch.ledger import Finished
from oasis_sglang.memory_pool.prefetch.process import MODULE
from oasis_sglang.memory_pool.prefetch.supervisor import Workers

WIDTH = 96
PIECES = 300
SLOTS = 200  # of the target, each K and V; all K come first, so this is also the value stride
CANARY = 0xEE
# Longest wait for something that must happen, on a machine that may be busy with anything.
PATIENCE = 60.0


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> float:
    """Wait for a condition; the seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "waited in vain"
        time.sleep(0.005)
    return time.monotonic() - start


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def worker_pids(folder: Path) -> list[int]:
    """Running workers whose sockets are in a folder, or in one below it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if MODULE in command and f"{folder}/" in command and is_running(int(entry.name)):
            found.append(int(entry.name))
    return found


class RuntimeFolder:
    """A place of its own for the folders of sockets, which must be empty at the end, with no process left over."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="oasis-test-", dir="/tmp"))
        self._patch = mock.patch.dict(os.environ, XDG_RUNTIME_DIR=str(self.path))

    def __enter__(self) -> RuntimeFolder:
        self._patch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._patch.stop()
        left, files = worker_pids(self.path), list(self.path.iterdir())
        for pid in left:
            os.kill(pid, 9)
        shutil.rmtree(self.path)
        if error is None:
            assert not left, "workers were left over"
            assert not files, "a folder of sockets was left over"


class Memories:
    """A source of random bytes and a target of canaries."""

    def __init__(self, pieces: int = PIECES, slots: int = SLOTS, width: int = WIDTH) -> None:
        self.source_fd, self.source = self._map(pieces * 2 * width)
        self.target_fd, self.target = self._map(slots * 2 * width)
        self.pieces, self.slots, self.width = pieces, slots, width
        self.source[:] = np.random.default_rng(1).integers(0, 256, len(self.source), dtype=np.uint8)
        self.target[:] = CANARY

    @staticmethod
    def _map(nbytes: int) -> tuple[int, np.ndarray]:
        fd = os.memfd_create("oasis-test", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return fd, np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)

    def half(self, index: int) -> np.ndarray:
        return self.target[index * self.width : (index + 1) * self.width]

    def halves_of(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V of a target slot."""
        return self.half(slot), self.half(self.slots + slot)

    def holds(self, slot: int, piece: int) -> bool:
        """Whether a target slot holds a piece of the source: by hand, byte by byte."""
        k, v = self.halves_of(slot)
        at = piece * 2 * self.width
        return (
            k.tobytes() == self.source[at : at + self.width].tobytes()
            and v.tobytes() == self.source[at + self.width : at + 2 * self.width].tobytes()
        )

    def is_untouched(self, slot: int) -> bool:
        return all(bool((half == CANARY).all()) for half in self.halves_of(slot))

    def wipe(self, slot: int) -> None:
        for half in self.halves_of(slot):
            half[:] = CANARY

    def close(self) -> None:
        os.close(self.source_fd)
        os.close(self.target_fd)


class Rig:
    """Workers and their client over `Memories`, as a context."""

    def __init__(
        self,
        count: int = 1,
        *,
        gate: bool = False,
        library: Path | None = None,
        queue_plans: int = 64,
        piece_delay: float = 0.0,
    ) -> None:
        self.runtime = RuntimeFolder()
        self.memories = Memories()
        self._gate: tuple[int, int] | None = None
        if gate:
            self._gate = os.pipe()
            os.set_blocking(self._gate[0], False)
        self._options = {
            "count": count,
            "library": library,
            "queue_plans": queue_plans,
            "test_gate_fd": self._gate[0] if self._gate else None,
            "test_piece_delay": piece_delay,
        }

    def __enter__(self) -> Rig:
        self.runtime.__enter__()
        memories = self.memories
        self.workers = Workers(
            source_fd=memories.source_fd,
            target_fd=memories.target_fd,
            width=memories.width,
            value_stride=memories.slots,
            **self._options,
        )
        self.client = PrefetchClient(self.workers)
        self.finished: list[Finished] = []
        until(lambda: len(self.workers.ready()) == self._options["count"])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.workers.stop()
        self.poll()
        outstanding = self.client.outstanding
        self.client.close()
        self.memories.close()
        for fd in self._gate or ():
            os.close(fd)
        self.runtime.__exit__(kind, error, trace)
        if error is None:
            assert outstanding == 0, "with all workers gone, every plan has been reported"
            numbers = [end.sequence for end in self.finished]
            assert len(set(numbers)) == len(numbers), "a plan was reported twice"

    def pid(self, index: int = 0) -> int:
        pid = self.workers.pid(index)
        assert pid is not None
        return pid

    def let_through(self, steps: int) -> None:
        """Open the gate for this many pieces and completions."""
        assert self._gate
        os.write(self._gate[1], bytes(steps))

    def gate_is_used_up(self) -> bool:
        """Whether the worker took every step that it was given."""
        assert self._gate
        try:
            byte = os.read(self._gate[0], 1)
        except BlockingIOError:
            return True
        os.write(self._gate[1], byte)
        return False

    def submit(self, source: list[int], target: list[int], attempts: list[tuple[int, int, int]] | None = None):
        return self.client.submit(
            attempts if attempts is not None else [(0, 1, len(source))],
            source,
            target,
            step=1,
            first_layer=0,
            end_layer=1,
        )

    def poll(self) -> list[Finished]:
        ends = self.client.poll()
        self.finished += ends
        return ends

    def wait(self, plans: int | None = None, seconds: float = PATIENCE) -> list[Finished]:
        """The ends of this many plans (all outstanding ones), in order of their sequence."""
        ends: list[Finished] = []
        plans = self.client.outstanding if plans is None else plans

        def enough() -> bool:
            ends.extend(self.poll())
            return len(ends) >= plans

        until(enough, seconds)
        return sorted(ends)
