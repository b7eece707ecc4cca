"""A stage of a benchmark on a GPU, in a process of its own and within a time of its own.

A kernel may hang, or write where it must not, and then nothing in its process can be trusted any more. So the process
that shows and writes the results never touches the device: a stage's items run in a child, one at a time, each when it
is told to; the figures of those that ended are kept, whatever becomes of the others.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks import gpu_bare

# What a process needs until its first item can run: imports, and the device's own start.
START_SECONDS = 15.0


class NotMeasured(Exception):
    """Raised by an item: what it needs besides the device is not on this machine. Costs nothing but its figures."""


class Item(NamedTuple):
    """One measurement: about how long it takes on an H200, compiling included, and what gives its figures."""

    name: str
    seconds: float
    run: Callable[[], dict[str, Any]]


class Stage(NamedTuple):
    """`module` has `items(tiny)`, which lists the stage's items."""

    name: str
    module: str
    seconds: float


def serve(connection: Connection, module: str, tiny: bool) -> None:
    """The child: list the items, or say why not, then run those that are asked for until there is nothing more to
    ask."""
    gpu_bare.stand_in()
    try:
        items = {item.name: item for item in importlib.import_module(module).items(tiny)}
    except Exception:
        connection.send(traceback.format_exc(limit=-5))
        return
    connection.send([(item.name, item.seconds) for item in items.values()])
    while (name := connection.recv()) is not None:
        figures, trouble, lost = None, "", ""
        try:
            figures = items[name].run()
            _wait()  # what it left running would fail in the next item
        except NotMeasured as error:
            figures = {"not_measured": str(error)}
        except Exception:
            trouble, lost = traceback.format_exc(limit=-5), _why_lost()
        connection.send((figures, f"{trouble}{lost}", bool(lost)))
        if not lost:
            _free()


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _why_lost() -> str:
    """After an access to memory that is not there, every later call fails too: with what, or nothing."""
    try:
        _wait()
    except RuntimeError as error:
        return f"and the device is lost to its process: {error}\n"
    return ""


def _free() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


class Worker:
    """The child as its parent sees it."""

    def __init__(self, stage: Stage, tiny: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, stage.module, tiny), daemon=True)
        self._process.start()
        theirs.close()

    def receive(self, seconds: float) -> Any:
        """The child's next message.

        Raises:
            TimeoutError: none came in time. EOFError: the child has ended.
        """
        if not self._connection.poll(max(seconds, 0.0)):
            raise TimeoutError
        return self._connection.recv()

    def run(self, name: str, seconds: float) -> tuple[Any, str, bool]:
        """An item's figures, or what went wrong, and whether the device is lost to this process."""
        self._connection.send(name)
        return self.receive(seconds)

    def stop(self) -> None:
        """End it at once: it holds nothing that is not in a message already sent."""
        self._process.kill()
        self._process.join()
        self._connection.close()


class StageRun:
    """A stage in progress. `outcome` has `results` by item, `failed`, `skipped` and `not_measured` with the reason, and
    `seconds`."""

    def __init__(self, stage: Stage, tiny: bool, seconds: float, announce: Callable[[str, int, int], None]) -> None:
        """
        Args:
            seconds: until the stage must be over.
            announce: told each item before it runs, how many are settled and how many there are.
        """
        self._stage, self._tiny, self._announce = stage, tiny, announce
        self._start = time.monotonic()
        self._end = self._start + seconds
        self._worker: Worker | None = None
        self._waiting: list[tuple[str, float]] = []
        self._settled: set[str] = set()
        self.outcome: dict[str, Any] = {"results": {}, "failed": {}, "skipped": {}, "not_measured": {}}

    @property
    def _left(self) -> float:
        return self._end - time.monotonic()

    def run(self) -> dict[str, Any]:
        try:
            if self._open():
                while self._waiting:
                    self._next()
        finally:
            self._close()
        self.outcome["seconds"] = time.monotonic() - self._start
        return self.outcome

    def _open(self) -> bool:
        """Start a child and learn what there is to do; whether it came up."""
        self._worker = Worker(self._stage, self._tiny)
        try:
            listed = self._worker.receive(self._left)
        except (EOFError, TimeoutError) as error:
            why = "did not start in time" if isinstance(error, TimeoutError) else "ended at its start; see above"
            listed = f"the stage's process {why}"
        if isinstance(listed, str):
            self.outcome["failed"]["start"] = listed
            self._waiting = []
            return False
        self._waiting = [item for item in listed if item[0] not in self._settled]
        return True

    def _close(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _next(self) -> None:
        name, seconds = self._waiting[0]
        needed = seconds if self._worker is not None else seconds + START_SECONDS
        if needed > self._left:
            self._settle(name, "skipped", f"takes about {needed:.0f} s, and {max(self._left, 0):.0f} s are left")
            return
        if self._worker is None:
            self._open()
            return
        self._announce(name, len(self._settled), len(self._settled) + len(self._waiting))
        try:
            figures, trouble, lost = self._worker.run(name, self._left)
        except TimeoutError:
            trouble, lost = "did not end within the stage's time, and was stopped", True
        except (EOFError, OSError):
            trouble, lost = "its process ended", True
        if trouble:
            self._settle(name, "failed", trouble)
        elif "not_measured" in figures:
            self._settle(name, "not_measured", figures["not_measured"])
        elif "skipped" in figures:  # there was no room for it
            self._settle(name, "skipped", figures["skipped"])
        else:
            self._settle(name, "results", figures)
        if lost:
            self._close()

    def _settle(self, name: str, kind: str, what: Any) -> None:
        self.outcome[kind][name] = what
        self._settled.add(name)
        self._waiting = [item for item in self._waiting if item[0] != name]
