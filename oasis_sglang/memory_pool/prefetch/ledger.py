"""Plans that are under way, each reported exactly once. Knows no sockets."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from oasis_sglang.memory_pool.prefetch.messages import Completion, Status

AttemptKey = tuple[int, int]


class Finished(NamedTuple):
    """A plan that has ended: its target memory is no longer lent.

    Attributes:
        status: `done`, `refused` or `failed` as in `Completion`; `lost`: its worker is gone, and any of its pieces may
            be missing or half written.
        cancelled: (row, generation) of attempts cancelled while the plan was under way: their pieces may be missing
            from a `done` plan too.
        pieces, bytes, seconds: what was copied, and how long copying took; 0 for `lost`.
    """

    sequence: int
    status: Status | Literal["lost"]
    cancelled: frozenset[AttemptKey]
    pieces: int
    bytes: int
    seconds: float


class _Entry:
    def __init__(self, generation: int, attempts: np.ndarray, pieces: int) -> None:
        self.generation = generation
        self.attempts = attempts
        self.pieces = pieces
        self.cancelled: set[AttemptKey] = set()

    def concerns(self, attempt: AttemptKey) -> bool:
        return attempt not in self.cancelled and bool((self.attempts[:, :2] == attempt).all(axis=1).any())


class Ledger:
    """At any time `outstanding` = submitted - reported."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._by_generation: dict[int, dict[int, _Entry]] = {}
        self._last = 0
        self.submitted = 0
        self.reported = 0
        self.stale = 0

    @property
    def outstanding(self) -> int:
        return len(self._entries)

    def plans_of(self, generation: int) -> int:
        return len(self._by_generation.get(generation, ()))

    def pieces_of(self, generation: int) -> int:
        return sum(entry.pieces for entry in self._by_generation.get(generation, {}).values())

    def next_sequence(self) -> int:
        self._last += 1
        return self._last

    def submit(self, sequence: int, generation: int, attempts: np.ndarray, pieces: int) -> None:
        """`attempts` `[n, 3]`: row, generation and pieces of each `Share`; `pieces` is their sum."""
        entry = _Entry(generation, attempts, pieces)
        self._entries[sequence] = self._by_generation.setdefault(generation, {})[sequence] = entry
        self.submitted += 1

    def cancel(self, attempt: AttemptKey) -> list[int]:
        """Mark an attempt as cancelled; the generations that have plans for it and do not know yet."""
        tell = []
        for generation, entries in self._by_generation.items():
            concerned = [entry for entry in entries.values() if entry.concerns(attempt)]
            for entry in concerned:
                entry.cancelled.add(attempt)
            if concerned:
                tell.append(generation)
        return tell

    def complete(self, message: Completion, generation: int) -> Finished | None:
        """Report a completion that came over the socket of `generation`; None when there is no such plan of it (any
        more): it is late, repeated or made up, and counted as stale."""
        entry = self._entries.get(message.sequence)
        if entry is None or not entry.generation == message.generation == generation:
            self.stale += 1
            return None
        self._take(message.sequence)
        return Finished(
            message.sequence,
            message.status,
            frozenset(entry.cancelled),
            message.pieces,
            message.bytes,
            message.seconds,
        )

    def lose(self, generation: int) -> list[Finished]:
        """Report every plan of a generation that is gone."""
        return [
            Finished(sequence, "lost", frozenset(entry.cancelled), 0, 0, 0.0)
            for sequence in list(self._by_generation.get(generation, ()))
            for entry in (self._take(sequence),)
        ]

    def _take(self, sequence: int) -> _Entry:
        entry = self._entries.pop(sequence)
        of_generation = self._by_generation[entry.generation]
        del of_generation[sequence]
        if not of_generation:
            del self._by_generation[entry.generation]
        self.reported += 1
        return entry
