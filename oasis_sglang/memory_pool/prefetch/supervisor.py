"""The worker processes of one rank: started, watched, replaced, and ended with the rank."""

from __future__ import annotations

import weakref
from pathlib import Path

from oasis_sglang.memory_pool.prefetch.piece_copy import check_layout
from oasis_sglang.memory_pool.prefetch.process import Endpoints, Layout, State
from oasis_sglang.memory_pool.prefetch.settings import QUEUE_PLANS
from oasis_sglang.memory_pool.prefetch.watch import Watch


class Workers:
    """Worker processes between two shared memories. Any thread may call any method.

    A worker has a new generation after every restart; generations are never used twice, not even by different workers,
    and neither are their endpoints, so nothing that was meant for one process ever reaches another.

    The workers end with this object, with the interpreter, and with the process, however that ends.
    """

    def __init__(
        self,
        count: int,
        source_fd: int,
        target_fd: int,
        *,
        width: int,
        value_stride: int,
        library: Path | None,
        queue_plans: int = QUEUE_PLANS,
        test_gate_fd: int | None = None,
        test_piece_delay: float = 0.0,
    ) -> None:
        """Return before the workers are ready, which takes them some tenths of a second.

        Args:
            source_fd, target_fd: shared memories to copy from and to, see `piece_copy.py`. Duplicates are kept.
            width: bytes of a half: K or V of one piece.
            value_stride: halves from a piece's K to its V in the target.
            library: of `oasis_sglang.native.build.library_path`; without it numpy copies.
            queue_plans: plans that one worker may have waiting.
            test_gate_fd, test_piece_delay: only for tests, see `WorkerSettings`.

        Raises:
            ValueError: the memories do not divide into pieces and halves, or there is no worker.
            OSError: no folder for the sockets can be made.
        """
        if count < 1:
            raise ValueError(f"count={count} must be at least 1")
        check_layout(source_fd, target_fd, width=width, value_stride=value_stride)
        self.count = count
        self.queue_plans = queue_plans
        layout = Layout(
            source_fd=source_fd,
            target_fd=target_fd,
            width=width,
            value_stride=value_stride,
            library=str(library) if library else None,
            queue_plans=queue_plans,
            test_gate_fd=test_gate_fd,
            test_piece_delay=test_piece_delay,
        )
        # The watch and its thread do not know this object, so that it can be collected.
        self._watch = Watch(count, layout)
        self._finalizer = weakref.finalize(self, self._watch.stop)  # runs at the interpreter's end at the latest

    @property
    def folder(self) -> Path:
        """Of the sockets."""
        return self._watch.folder.path

    @property
    def restarts(self) -> int:
        """Processes started in place of lost ones."""
        return self._watch.view.restarts

    @property
    def bad_messages(self) -> int:
        """Frames that were no heartbeat, and those that were no order to a worker as its heartbeats report them."""
        return self._watch.view.bad_messages

    def states(self) -> tuple[State, ...]:
        return self._watch.view.states

    def ready(self) -> list[tuple[int, int]]:
        """Worker and generation of those that can take plans."""
        view = self._watch.view
        return [(i, view.generations[i]) for i, state in enumerate(view.states) if state == "ready"]

    def generation(self, index: int) -> int:
        """The newest generation of a worker; 0 before its first start."""
        return self._watch.view.generations[index]

    def pid(self, index: int) -> int | None:
        """Process of a worker; None while it has none."""
        return self._watch.view.pids[index]

    def endpoints(self, generation: int) -> Endpoints | None:
        """Where a generation listens; None once it is reaped."""
        return self._watch.view.endpoints.get(generation)

    def is_reaped(self, generation: int) -> bool:
        """Whether the process is certainly gone. Only then may memory that it was lent be used for anything else."""
        view = self._watch.view
        return generation <= view.newest and generation not in view.endpoints

    def replace_stopped(self) -> None:
        """Wait no longer for workers that somebody stopped (SIGSTOP): what they were lent is wanted back."""
        self._watch.replace_stopped()

    def stop(self) -> None:
        """End the workers and remove their folder. Takes a second at most; a second call does nothing."""
        self._finalizer()
