"""Pages on their way to the device behind the steps' backs.

    step t, layer l     the lookahead chooses pages for step t + 1; the maps say at once that they are there, and who
                        was evicted for them
    some layers on      a plan for the workers: copy the pages of these layers to spare rows
    between             a plan is done: its rows change places with the evicted pages' cells (`Cells.adopt`)
    step t + 1, layer l what has not landed is late: the maps go back to the evicted page, which is still in its cell,
                        and the step attends to that in its place

So a step never waits, every page that it attends to is whole, and a worker that stops in the midst of a copy holds rows
that nobody reads, until it is certain that it is gone.

What a step does per layer is as good as nothing: between two layers the processor forgets everything that Python needs,
so what it does per plan costs once what per layer would cost ten times.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from oasis_sglang.attention.selector import Selection
from oasis_sglang.memory_pool.pieces import (
    EVICTED,
    HEAD,
    LENT,
    ROW,
    SLOT,
    SOURCE,
    TARGET,
    WAITING,
    LayerMisses,
    Pieces,
    Shape,
    current,
    piece_steps,
)
from oasis_sglang.memory_pool.working_set import NONE, WorkingSets

if TYPE_CHECKING:
    from oasis_sglang.memory_pool.prefetch.client import PrefetchClient

P = ParamSpec("P")
R = TypeVar("R")

#: Layers whose pieces are sent together: a message costs the step as much as a hundred pieces.
LAYERS_PER_PLAN = 15
#: Most pieces of a plan, well below what a frame holds (`messages.MAX_FRAME_BYTES`).
PIECES_PER_PLAN = 8008


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
        self._shape = Shape(layers, kv_heads, pool_rows)
        self.steps = piece_steps(sets, self._shape)
        self._gathered: list[LayerMisses] = []  # not sent yet
        self._unused: list[Pieces] = []
        self._plans: dict[int, Pieces] = {}
        #: Those with pieces that the maps count on and that have not landed.
        self._waiting: list[Pieces] = []
        self._page_of, self._slot_of = sets.page_of.numpy(), sets.slot_of.numpy()
        self._owned = sets.pages.numpy()
        self._step = 0
        self.stats = PrefetchStats()

    # -- sending --------------------------------------------------------------------------------------------------

    def plan(self, layer: int, rows: torch.Tensor, picked: Selection, step: int) -> None:
        """Have a selection's misses brought in; the maps say that they are there already.

        They are kept for the next plan, and only its sending is timed: between two layers that keeping takes less time
        than reading a clock. Those that cannot be sent for, because there is no spare row, are undone when the layer
        comes up again.

        Args:
            rows: `[n]` working-set rows of the selection's sequences.
        """
        self._step = step
        if self._gathered and not 0 <= layer - self._gathered[0].layer < LAYERS_PER_PLAN:
            self.flush()
        self._gathered.append(LayerMisses(layer, rows, picked.misses))
        if len(self._gathered) >= LAYERS_PER_PLAN:
            self.flush()

    @_timed
    def flush(self) -> None:
        """Send what has been gathered. Pieces that no worker takes count as late when their layer comes up."""
        gathered, self._gathered = self._gathered, []
        plan, room = [], PIECES_PER_PLAN
        for layer, rows, misses in gathered:
            while misses.shape[1] > room:
                plan.append(LayerMisses(layer, rows, misses[:, :room]))
                self._submit(plan)
                plan, misses, room = [], misses[:, room:], PIECES_PER_PLAN
            if misses.shape[1]:
                plan.append(LayerMisses(layer, rows, misses))
                room -= misses.shape[1]
        if plan:
            self._submit(plan)

    def _submit(self, plan: list[LayerMisses]) -> None:
        pieces = self._unused.pop() if self._unused else Pieces(PIECES_PER_PLAN, LAYERS_PER_PLAN)
        self.steps.lend(pieces, plan)
        pieces.fill(plan[0].layer, len(plan))
        self._waiting.append(pieces)
        self.stats.dropped += pieces.short
        sequence = None
        if pieces.used:
            sequence = self.client.submit(
                pieces.shares.copy(),
                pieces.data[SOURCE, : pieces.used],
                pieces.data[TARGET, : pieces.used],
                step=self._step,
                first_layer=plan[0].layer,
                end_layer=plan[-1].layer + 1,
            )
        if sequence is not None:
            self.stats.issued += pieces.used
            self._plans[sequence] = pieces
            return
        self.stats.dropped += pieces.used
        self.steps.adopt(pieces, done=False)
        pieces.ended = True

    # -- landing --------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Put in their places what has been copied since the last call."""
        for end in self.client.poll():
            pieces = self._plans.pop(end.sequence, None)
            if pieces is None:
                continue
            done = end.status == "done"
            kept = self.steps.adopt(pieces, done)
            self._sets.cells.moved = self._sets.cells.moved or kept > 0
            self.stats.used += kept
            if done:  # else what is waiting for it goes without when its layer comes up
                self.stats.wasted += pieces.used - kept
                pieces.land()
            pieces.ended = True
            self._let_go(pieces)

    def land(self, layer: int) -> Late | None:
        """Before a step uses a layer's maps: whatever has not landed for it is late, and undone."""
        for pieces in self._waiting:
            if pieces.waiting >> layer & 1:
                return self._catch_up(layer)
        return None

    @_timed
    def _catch_up(self, layer: int) -> Late | None:
        # Pieces without a spare row wait for nothing, but a plan that has ended may give some back.
        if self._plans and any(
            pieces.waiting >> layer & 1 and (pieces.without >> layer & 1 or not pieces.ended)
            for pieces in self._waiting
        ):
            self.poll()
        late = []
        for pieces in [pieces for pieces in self._waiting if pieces.waiting >> layer & 1]:
            late += pieces.give_up(layer)
            self._let_go(pieces)
        if not late:
            return None
        data = np.concatenate(late, axis=1)
        self.stats.late += int(data[WAITING].sum())
        return self._undo(layer, data)

    def _let_go(self, pieces: Pieces) -> None:
        """Forget a plan once no layer waits for it, and use its buffer again once it has ended too."""
        if pieces.waiting:
            return
        if pieces in self._waiting:
            self._waiting.remove(pieces)
        if pieces.ended:
            pieces.reset()
            self._unused.append(pieces)

    def in_flight(self) -> int:
        """Plans under way. What they copy for requests that have left is let go of as they end."""
        self.poll()
        return len(self._plans) + bool(self._gathered)

    def cancel(self, row: int, generation: int) -> None:
        """An attempt has been released: what is on its way for it need not be copied."""
        self.client.cancel((row, generation))

    # -- undoing --------------------------------------------------------------------------------------------------

    def _undo(self, layer: int, data: np.ndarray) -> Late:
        data = data[:, current(self._sets, layer, data)]
        empty = data[EVICTED] == NONE
        row, _, head, slot, page, evicted, *_ = data[:, ~empty]
        self._slot_of[layer, row, head, page] = NONE
        self._page_of[layer, row, head, slot] = evicted
        self._slot_of[layer, row, head, evicted] = slot
        lost = data[:, empty]
        device = self._owned[lost[ROW], lost[SLOT]]
        cells = self._sets.cells.rows.numpy()[layer, device, lost[HEAD]]
        host = lost[SOURCE] // (self._shape.layers * self._shape.kv_heads)
        return Late(row, head, page, evicted, host, lost[HEAD], cells)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every spare row is accounted for."""
        lent: dict[tuple[int, int], list[int]] = {}
        for pieces in self._plans.values():
            for layer, start, end, *_ in pieces.of_layers:
                for head, row in pieces.data[[HEAD, LENT], start:end].T.tolist():
                    lent.setdefault((layer, head), []).append(row)
        self._sets.cells.check_integrity(lent)
