"""One worker process, from its start to the moment it is certainly gone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from oasis_sglang.memory_pool.prefetch.folder import EndpointFolder
from oasis_sglang.memory_pool.prefetch.settings import SILENCE_SECONDS, START_SECONDS, STOPPED_SECONDS, WorkerSettings

State = Literal["starting", "ready", "stopped", "lost"]

MODULE = "oasis_sglang.memory_pool.prefetch.worker"
PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])


class Endpoints(NamedTuple):
    """Where one generation of a worker listens."""

    plans: str
    completions: str


class Layout(NamedTuple):
    """What is the same for all workers. See `WorkerSettings`."""

    source_fd: int
    target_fd: int
    width: int
    value_stride: int
    library: str | None
    queue_plans: int
    test_gate_fd: int | None
    test_piece_delay: float


class WorkerProcess:
    """Must be started by a thread that outlives it: the kernel ends a worker with the thread that started it."""

    def __init__(self, generation: int, layout: Layout, folder: EndpointFolder, heartbeats: str, now: float) -> None:
        """Start the process. `now` is in seconds of `time.monotonic`.

        Raises:
            OSError: it cannot be started.
        """
        self.generation = generation
        self.state: State = "starting"
        self.started = self.ready_since = self.heard = self.seen_stopped = now
        self.bad_frames = 0  # as of its last hello
        self._folder = folder
        self._names = (f"plans-{generation}", f"done-{generation}")
        self.endpoints = Endpoints(*map(folder.endpoint, self._names))
        far_end, self._lifeline = os.pipe()
        settings = WorkerSettings(
            parent=os.getpid(),
            generation=generation,
            plans=self.endpoints.plans,
            completions=self.endpoints.completions,
            heartbeats=heartbeats,
            lifeline_fd=far_end,
            **layout._asdict(),
        )
        inherited = [layout.source_fd, layout.target_fd, far_end]
        if layout.test_gate_fd is not None:
            inherited.append(layout.test_gate_fd)
        try:
            self._process = subprocess.Popen(
                # -P: nothing in the server's working folder is imported
                [sys.executable, "-P", "-m", MODULE, msgspec.json.encode(settings).decode()],
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                env=_environment(),
            )
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(far_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def trouble(self, now: float) -> str | None:
        """Why the worker must be given up, or None while all is well."""
        code = self._process.poll()
        if code is not None:
            return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        if self.state == "starting" and now - self.started > START_SECONDS:
            return f"did not come up within {START_SECONDS:.0f} s"
        if self.state == "ready" and now - self.heard > SILENCE_SECONDS:
            return f"was silent for {SILENCE_SECONDS:.0f} s"
        if self.state == "stopped" and now - self.seen_stopped > SILENCE_SECONDS:
            return f"went on after a stop, and was silent for {SILENCE_SECONDS:.0f} s"
        if self.state == "stopped" and now - self.heard > STOPPED_SECONDS:
            return f"was stopped for {STOPPED_SECONDS:.0f} s"
        return None

    def look_for_stop(self, now: float) -> bool:
        """Whether a worker in service is newly found to be stopped by somebody (SIGSTOP, a debugger), which makes it
        `stopped` until it is heard again."""
        if self.state != "stopped" and (self.state != "ready" or now - self.heard <= SILENCE_SECONDS):
            return False
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if letter not in "Tt":
            return False
        self.seen_stopped = now
        newly, self.state = self.state == "ready", "stopped"
        return newly

    def kill(self) -> None:
        """Return at once; `reap` says when it is over. A stopped process dies too."""
        self._process.kill()

    def reap(self) -> bool:
        """Whether the process is gone. Once it is, its pipe and its sockets are put away."""
        if self._process.poll() is None:
            return False
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
            for name in self._names:
                self._folder.forget(name)
        return True


def _environment() -> dict[str, str]:
    """The worker imports the package that runs here, and numpy starts no thread for every core."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("LD_PRELOAD", None)  # what a server preloads, a memory saver for one, brings CUDA with it
    # Where it is installed it is found; and installed packages put first would hide parts of the standard library.
    if PACKAGE_PARENT not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        path = (PACKAGE_PARENT, environment.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    return environment
