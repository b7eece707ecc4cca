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
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from oasis_sglang.attention.selector import Selection
from oasis_sglang.memory_pool.working_set import NONE, WorkingSets
from oasis_sglang.native.build import load_library

if TYPE_CHECKING:
    from oasis_sglang.memory_pool.prefetch.client import PrefetchClient

P = ParamSpec("P")
R = TypeVar("R")

#: Layers whose plans are sent together: a message costs as much as copying a dozen pieces.
LAYERS_PER_PLAN = 5
#: Most pieces of a plan, well below what a frame holds (`messages.MAX_FRAME_BYTES`).
PIECES_PER_PLAN = 100_000


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


# Of each piece: working-set row and generation of its attempt, KV head, slot, logical page, the page evicted for it or
# NONE, its host page, its spare row or -1, and whether the maps still count on it.
ROW, GENERATION, HEAD, SLOT, PAGE, EVICTED, HOST, LENT, WAITING = range(9)


class _Pieces(NamedTuple):
    """One layer of a plan; `data` is `[9, n]` int64."""

    layer: int
    data: np.ndarray

    def part(self, which: np.ndarray) -> _Pieces:
        return _Pieces(self.layer, self.data[:, which])


class _Addresses:
    """Where the arrays lie that compiled code works on. They never move, and asking each time takes longer than the
    work."""

    def __init__(self, sets: WorkingSets) -> None:
        self._sets = sets  # keeps them alive
        self.generations = sets.generations.ctypes.data
        self._page_of, self._page_of_layer = sets.page_of.data_ptr(), sets.page_of[0].nbytes
        self._owned = sets.pages.data_ptr()
        self._cells, self._cells_layer = sets.cells.rows.data_ptr(), sets.cells.rows[0].nbytes
        self._spare, self._spare_layer = sets.cells.spare.ctypes.data, sets.cells.spare[0].nbytes
        self._left, self._left_layer = sets.cells.left.ctypes.data, sets.cells.left[0].nbytes

    def maps(self, layer: int) -> tuple[int, int, int]:
        """`page_of`, `pages` and cells."""
        return self._page_of + layer * self._page_of_layer, self._owned, self._cells + layer * self._cells_layer

    def stacks(self, layer: int) -> tuple[int, int]:
        """`Cells.spare` and `Cells.left`."""
        return self._spare + layer * self._spare_layer, self._left + layer * self._left_layer


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

    def __init__(
        self, client: PrefetchClient, sets: WorkingSets, *, layers: int, kv_heads: int, pool_rows: int
    ) -> None:
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
        self._library = load_library() if sets.page_of.device.type == "cpu" else None
        self._addresses = _Addresses(sets)
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
        pieces = _Pieces(layer, np.empty((WAITING + 1, count), dtype=np.int64))
        lent = self._lend(pieces, rows, picked)
        late = None
        if lent < count:  # those without a spare row are the last
            self.stats.dropped += count - lent
            late = self._undo(_Pieces(layer, pieces.data[:, lent:]))
        for start in range(0, lent, PIECES_PER_PLAN):
            part = _Pieces(layer, np.ascontiguousarray(pieces.data[:, start : min(start + PIECES_PER_PLAN, lent)]))
            if sum(x.data.shape[1] for x in self._gathered) + part.data.shape[1] > PIECES_PER_PLAN:
                self._send()
            self._gathered.append(part)
            self._of_layer[layer].append(part)
            if len(self._gathered) >= LAYERS_PER_PLAN:
                self._send()
        return late

    def _lend(self, pieces: _Pieces, rows: torch.Tensor, picked: Selection) -> int:
        """Fill in a selection's misses, first those that get a spare row; how many these are."""
        cells, layer, data = self._sets.cells, pieces.layer, pieces.data
        misses = (
            picked.miss_sequence, picked.miss_head, picked.miss_slot, picked.miss_page, picked.miss_evicted,
            picked.miss_host,
        )  # fmt: skip
        if self._library is not None:
            columns = [x.contiguous() for x in (rows, *misses)]
            return int(
                self._library.oasis_lend(
                    data.shape[1],
                    self._kv_heads,
                    cells.spare.shape[2],
                    self._addresses.generations,
                    *(x.data_ptr() for x in columns),
                    *self._addresses.stacks(layer),
                    data.ctypes.data,
                )
            )
        sequence, *rest = (x.numpy() for x in misses)
        data[ROW] = rows.numpy()[sequence]
        data[GENERATION] = self._sets.generations[data[ROW]]
        data[HEAD : HOST + 1] = rest
        data[LENT], data[WAITING] = cells.lend(layer, data[HEAD]), 1
        without = data[LENT] < 0
        data[:] = np.concatenate((data[:, ~without], data[:, without]), axis=1)
        return data.shape[1] - int(without.sum())

    @_timed
    def flush(self) -> None:
        """Send what has been gathered. Pieces that no worker takes count as late when their layer comes up."""
        self._send()

    def _send(self) -> None:
        gathered, self._gathered = self._gathered, []
        if not gathered:
            return
        layers = [x.layer for x in gathered]
        source = np.concatenate(
            [(x.data[HOST] * self._layers + x.layer) * self._kv_heads + x.data[HEAD] for x in gathered]
        )
        target = np.concatenate([x.data[LENT] + 2 * x.layer * self._pool_rows for x in gathered])
        row, generation = np.concatenate([x.data[: GENERATION + 1] for x in gathered], axis=1)
        start = np.flatnonzero(np.diff(row, prepend=-1))  # an attempt comes once per layer
        pieces = np.diff(start, append=row.size)
        attempts = list(zip(row[start].tolist(), generation[start].tolist(), pieces.tolist(), strict=True))
        sequence = self.client.submit(
            attempts, source, target, step=self._step, first_layer=min(layers), end_layer=max(layers) + 1
        )
        if sequence is None:
            self.stats.dropped += source.size
            for x in gathered:
                self._sets.cells.give_back(x.layer, x.data[HEAD], x.data[LENT])
                x.data[LENT] = -1
        else:
            self.stats.issued += source.size
            self._plans[sequence] = gathered

    # -- landing --------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Put in their places what has been copied since the last call."""
        for end in self.client.poll():
            done = end.status == "done"
            for pieces in self._plans.pop(end.sequence, ()):
                kept = self._adopt(pieces, done)
                self._sets.cells.moved = self._sets.cells.moved or kept > 0
                self.stats.used += kept
                if done:  # else what is waiting for it goes without when its layer comes up
                    self.stats.wasted += pieces.data.shape[1] - kept
                    self._of_layer[pieces.layer] = [x for x in self._of_layer[pieces.layer] if x is not pieces]

    def _adopt(self, pieces: _Pieces, done: bool) -> int:
        """Take back the spare rows of a plan that has ended: in exchange for cells where the copies are good and still
        wanted. How many these are."""
        sets, layer, data = self._sets, pieces.layer, pieces.data
        if self._library is not None:
            return int(
                self._library.oasis_adopt(
                    data.shape[1],
                    self._kv_heads,
                    sets.set_pages,
                    sets.cells.spare.shape[2],
                    int(done),
                    self._addresses.generations,
                    *self._addresses.maps(layer),
                    *self._addresses.stacks(layer),
                    data.ctypes.data,
                )
            )
        keep = (data[WAITING] == 1) & self._current(pieces) & done
        device = self._owned[data[ROW, keep], data[SLOT, keep]]
        sets.cells.adopt(layer, device, data[HEAD, keep], data[LENT, keep])
        sets.cells.give_back(layer, data[HEAD, ~keep], data[LENT, ~keep])
        data[LENT] = -1
        if done:
            data[WAITING] = 0
        return int(keep.sum())

    @_timed
    def land(self, layer: int) -> Late | None:
        """Before a step uses a layer's maps: whatever has not landed for it is late, and undone."""
        if not self._of_layer[layer]:
            return None
        self.poll()
        pieces, self._of_layer[layer] = self._of_layer[layer], []
        if not pieces:
            return None
        late = _Pieces(layer, np.concatenate([x.data[:, x.data[WAITING] == 1] for x in pieces], axis=1))
        for x in pieces:
            x.data[WAITING] = 0
        self.stats.late += late.data.shape[1]
        return self._undo(late) if late.data.size else None

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
        row, slot, head, page = (pieces.data[x] for x in (ROW, SLOT, HEAD, PAGE))
        same = self._page_of[pieces.layer, row, head, slot] == page
        return same & (self._sets.generations[row] == pieces.data[GENERATION])

    def _undo(self, pieces: _Pieces) -> Late:
        layer, data = pieces.layer, pieces.data[:, self._current(pieces)]
        empty = data[EVICTED] == NONE
        row, _, head, slot, page, evicted, *_ = data[:, ~empty]
        self._slot_of[layer, row, head, page] = NONE
        self._page_of[layer, row, head, slot] = evicted
        self._slot_of[layer, row, head, evicted] = slot
        lost = data[:, empty]
        device = self._owned[lost[ROW], lost[SLOT]]
        cells = self._sets.cells.rows.numpy()[layer, device, lost[HEAD]]
        return Late(row, head, page, evicted, lost[HOST], lost[HEAD], cells)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every spare row is accounted for."""
        lent: dict[tuple[int, int], list[int]] = {}
        for pieces in [*self._gathered, *(x for plan in self._plans.values() for x in plan)]:
            for head, row in pieces.data[[HEAD, LENT]].T.tolist():
                lent.setdefault((pieces.layer, head), []).append(row)
        self._sets.cells.check_integrity(lent)
