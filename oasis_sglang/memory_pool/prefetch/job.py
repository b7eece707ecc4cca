"""A plan under way in a worker: what is left of it, attempt by attempt."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from oasis_sglang.memory_pool.prefetch.messages import Cancel, Completion, Plan, Status, unpack_ids, unpack_shares
from oasis_sglang.memory_pool.prefetch.piece_copy import PieceCopy


class Refused(Exception):
    """A plan that cannot be right; the message says why."""


class _Part(NamedTuple):
    """Pieces `start` to `end` of the plan belong to this attempt."""

    row: int
    generation: int
    start: int
    end: int


class Job:
    """Copies a plan in runs of pieces."""

    def __init__(self, plan: Plan, memory: PieceCopy) -> None:
        """
        Raises:
            Refused: an id lies outside its memory, or the arrays do not belong together.
        """
        self.plan = plan
        self._memory = memory
        try:
            self._source, self._target = unpack_ids(plan.source), unpack_ids(plan.target)
            shares = unpack_shares(plan.attempts)
        except ValueError as error:
            raise Refused(f"ragged arrays: {error}") from None
        self._parts = []
        at = 0
        for share in shares:
            if share.pieces < 0:
                raise Refused(f"an attempt has {share.pieces} pieces")
            self._parts.append(_Part(share.row, share.generation, at, at + share.pieces))
            at += share.pieces
        if not at == len(self._source) == len(self._target):
            raise Refused(f"{at} pieces, {len(self._source)} sources, {len(self._target)} targets")
        if not memory.fits(self._source, self._target):
            raise Refused("an id lies outside its memory")
        self._parts.reverse()  # the next one last
        self._at = 0
        self._copied = 0
        self._seconds = 0.0

    def next_run(self, limit: int) -> range:
        """The next pieces to copy, at most `limit` of them; empty when nothing is left."""
        while self._parts and self._parts[-1].end <= self._at:
            self._parts.pop()
        run = range(0)
        for part in reversed(self._parts):
            start = max(part.start, self._at)
            if run and start != run.stop:  # what lies between was cancelled
                break
            run = range(run.start if run else start, part.end)
            if len(run) >= limit:
                break
        return run[:limit]

    def copy(self, run: range) -> None:
        """Copy a run that `next_run` gave."""
        start = time.perf_counter()
        pieces: np.ndarray = self._source[run.start : run.stop]
        self._memory.copy(pieces, self._target[run.start : run.stop])
        self._seconds += time.perf_counter() - start
        self._copied += len(run)
        self._at = run.stop

    def cancel(self, attempt: Cancel) -> None:
        """Leave out what is not copied yet of an attempt."""
        self._parts = [p for p in self._parts if (p.row, p.generation) != (attempt.row, attempt.generation)]

    def completion(self, generation: int, status: Status) -> Completion:
        bytes_copied = self._copied * self._memory.piece_bytes
        return Completion(generation, self.plan.sequence, status, self._copied, bytes_copied, self._seconds)
