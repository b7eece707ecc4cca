"""Pages on their way to the device behind the steps' backs.

    step t, layer l     the lookahead chooses pages for step t + 1; the maps say at once that they are there, and who
                        was evicted for them
                        -> a plan for the workers: copy them to spare rows
    between             a plan is done: its rows change places with the evicted pages' cells (`Cells.adopt`)
    step t + 1, layer l what has not landed is late: the maps go back to the evicted page, which is still in its cell,
                        and the step attends to that in its place

So a step never waits, every page that it attends to is whole, and a worker that stops in the midst of a copy holds rows
that nobody reads, until it is certain that it is gone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
import torch

from oasis_sglang.attention.selector import Selection
from oasis_sglang.memory_pool.working_set import NONE, WorkingSets

P = ParamSpec("P")
R = TypeVar("R")

#: Layers whose plans are sent together: a message costs as much as copying a dozen pieces.
LAYERS_PER_PLAN = 3


class End(Protocol):
    """What became of a plan."""

    @property
    def sequence(self) -> int: ...

    @property
    def status(self) -> str: ...


class Client(Protocol):
    """`PrefetchClient`, as far as it is used here."""

    @property
    def stats(self) -> Any: ...

    @property
    def outstanding(self) -> int: ...

    def submit(
        self,
        attempts: Sequence[tuple[int, int, int]],
        source_ids: object,
        target_ids: object,
        *,
        step: int,
        first_layer: int,
        end_layer: int,
    ) -> int | None: ...

    def poll(self) -> Sequence[End]: ...

    def cancel(self, attempt: tuple[int, int]) -> None: ...


class PrefetchStats:
    """Totals since start, in page pieces."""

    def __init__(self) -> None:
        self.issued = 0
        self.used = 0  # adopted in time
        self.late = 0  # the step went on without them
        self.wasted = 0  # copied, but late, or for a request that had left
        self.dropped = 0  # no worker or no spare row could be had
        self.seconds = 0.0  # of the rank process, in all of this


class Late(NamedTuple):
    """Pieces `[n]` of one layer that did not come in time, and what takes their place."""

    rows: np.ndarray  # of working sets
    heads: np.ndarray
    pages: np.ndarray  # logical
    instead: np.ndarray  # logical, resident
    # Of those `[m]` that came to an empty slot, so that nothing can take their place: host pages, heads and cells.
    host: np.ndarray
    host_heads: np.ndarray
    pool_rows: np.ndarray


class _Pieces(NamedTuple):
    """One layer of a plan; parallel `[n]` int64."""

    layer: int
    rows: np.ndarray
    generations: np.ndarray
    heads: np.ndarray
    slots: np.ndarray
    pages: np.ndarray
    evicted: np.ndarray
    host: np.ndarray
    lent: np.ndarray  # spare rows
    waiting: np.ndarray  # bool: the maps still count on it

    def part(self, which: np.ndarray) -> _Pieces:
        return _Pieces(self.layer, *(x[which] for x in self[1:]))


def _timed(method: Callable[Concatenate[Prefetcher, P], R]) -> Callable[Concatenate[Prefetcher, P], R]:
    """Counts the time that a step spends in a method."""

    @functools.wraps(method)
    def timed(self: Prefetcher, *args: P.args, **kwargs: P.kwargs) -> R:
        start = time.perf_counter()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.stats.seconds += time.perf_counter() - start

    return timed


class Prefetcher:
    """For one thread, the one that runs the steps."""

    def __init__(self, client: Client, sets: WorkingSets, *, layers: int, kv_heads: int, pool_rows: int) -> None:
        """
        Args:
            pool_rows: rows of one layer's K (or V) in the memory that the workers write to, `[layers, 2, rows, ...]`.
        """
        self.client, self._sets = client, sets
        self._layers, self._kv_heads, self._pool_rows = layers, kv_heads, pool_rows
        self._gathered: list[_Pieces] = []  # not sent yet
        self._plans: dict[int, list[_Pieces]] = {}
        self._of_layer: list[list[_Pieces]] = [[] for _ in range(layers)]
        self._page_of, self._slot_of = sets.page_of.numpy(), sets.slot_of.numpy()
        self._owned = sets.pages.numpy()
        self._step = 0
        self.stats = PrefetchStats()

    # -- sending --------------------------------------------------------------------------------------------------

    @_timed
    def plan(self, layer: int, rows: torch.Tensor, picked: Selection, step: int) -> Late | None:
        """Have a selection's misses brought in; the maps say that they are there already.

        Args:
            rows: `[n]` working-set rows of the selection's sequences.

        Returns:
            Those that cannot be sent for, undone.
        """
        self._step = step
        count = picked.miss_page.numel()
        if not count:
            return None
        mine = rows.numpy()[picked.miss_sequence.numpy()]
        heads = picked.miss_head.numpy().copy()
        pieces = _Pieces(
            layer,
            mine,
            self._sets.generations[mine],
            heads,
            picked.miss_slot.numpy().copy(),
            picked.miss_page.numpy().copy(),
            picked.miss_evicted.numpy().copy(),
            picked.miss_host.numpy().copy(),
            self._sets.cells.lend(layer, heads),
            np.ones(count, dtype=bool),
        )
        without = pieces.lent < 0
        late = None
        if without.any():
            self.stats.dropped += int(without.sum())
            late = self._undo(pieces.part(without))
            pieces = pieces.part(~without)
        if pieces.rows.size:
            self._gathered.append(pieces)
            self._of_layer[layer].append(pieces)
            if len(self._gathered) >= LAYERS_PER_PLAN:
                self._send()
        return late

    @_timed
    def flush(self) -> None:
        """Send what has been gathered. Pieces that no worker takes count as late when their layer comes up."""
        self._send()

    def _send(self) -> None:
        gathered, self._gathered = self._gathered, []
        if not gathered:
            return
        attempts: list[tuple[int, int, int]] = []
        for x in gathered:
            starts = np.flatnonzero(np.diff(x.rows, prepend=-1))
            counts = np.diff(np.append(starts, x.rows.size))
            parts = (x.rows[starts].tolist(), x.generations[starts].tolist(), counts.tolist())
            attempts += zip(*parts, strict=True)
        source = np.concatenate([(x.host * self._layers + x.layer) * self._kv_heads + x.heads for x in gathered])
        target = np.concatenate([x.lent + 2 * x.layer * self._pool_rows for x in gathered])
        layers = [x.layer for x in gathered]
        sequence = self.client.submit(
            attempts, source, target, step=self._step, first_layer=min(layers), end_layer=max(layers) + 1
        )
        if sequence is None:
            self.stats.dropped += source.size
            for x in gathered:
                self._sets.cells.give_back(x.layer, x.heads, x.lent)
                x.lent[:] = -1
        else:
            self.stats.issued += source.size
            self._plans[sequence] = gathered

    # -- landing --------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Put in their places what has been copied since the last call."""
        for end in self.client.poll():
            for pieces in self._plans.pop(end.sequence, ()):
                keep = pieces.waiting & self._current(pieces) if end.status == "done" else np.zeros_like(pieces.waiting)
                device = self._owned[pieces.rows[keep], pieces.slots[keep]]
                self._sets.cells.adopt(pieces.layer, device, pieces.heads[keep], pieces.lent[keep])
                self._sets.cells.give_back(pieces.layer, pieces.heads[~keep], pieces.lent[~keep])
                self.stats.used += int(keep.sum())
                pieces.lent[:] = -1
                if end.status == "done":  # else what is waiting for it goes without when its layer comes up
                    self.stats.wasted += int((~keep).sum())
                    self._of_layer[pieces.layer] = [x for x in self._of_layer[pieces.layer] if x is not pieces]

    @_timed
    def land(self, layer: int) -> Late | None:
        """Before a step uses a layer's maps: whatever has not landed for it is late, and undone."""
        if not self._of_layer[layer]:
            return None
        self.poll()
        waiting, self._of_layer[layer] = self._of_layer[layer], []
        parts = [pieces.part(pieces.waiting) for pieces in waiting]
        for pieces in waiting:
            pieces.waiting[:] = False
        if not sum(part.rows.size for part in parts):
            return None
        joined = _Pieces(layer, *(np.concatenate(each) for each in zip(*(part[1:] for part in parts), strict=True)))
        self.stats.late += joined.rows.size
        return self._undo(joined)

    def in_flight(self) -> int:
        """Plans under way. What they copy for requests that have left is let go of as they end."""
        self.poll()
        return len(self._plans) + len(self._gathered)

    def cancel(self, row: int, generation: int) -> None:
        """An attempt has been released: what is on its way for it need not be copied."""
        self.client.cancel((row, generation))

    # -- undoing --------------------------------------------------------------------------------------------------

    def _current(self, pieces: _Pieces) -> np.ndarray:
        """Whether the maps still say what they said when these were planned."""
        same = self._page_of[pieces.layer, pieces.rows, pieces.heads, pieces.slots] == pieces.pages
        return same & (self._sets.generations[pieces.rows] == pieces.generations)

    def _undo(self, pieces: _Pieces) -> Late:
        pieces = pieces.part(self._current(pieces))
        empty = pieces.evicted == NONE
        back = pieces.part(~empty)
        layer = pieces.layer
        self._slot_of[layer, back.rows, back.heads, back.pages] = NONE
        self._page_of[layer, back.rows, back.heads, back.slots] = back.evicted
        self._slot_of[layer, back.rows, back.heads, back.evicted] = back.slots
        lost = pieces.part(empty)
        device = self._owned[lost.rows, lost.slots]
        cells = self._sets.cells.rows.numpy()[layer, device, lost.heads]
        return Late(back.rows, back.heads, back.pages, back.evicted, lost.host, lost.heads, cells)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every spare row is accounted for."""
        lent: dict[tuple[int, int], list[int]] = {}
        for pieces in [*self._gathered, *(x for plan in self._plans.values() for x in plan)]:
            for head, row in zip(pieces.heads.tolist(), pieces.lent.tolist(), strict=True):
                lent.setdefault((pieces.layer, head), []).append(row)
        self._sets.cells.check_integrity(lent)
