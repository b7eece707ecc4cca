"""The page pieces of one plan on their way to the device, and what a step does with them: compiled, because a step has
no time to lose, with the same in numpy for hosts without a compiler.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from oasis_sglang.memory_pool.working_set import WorkingSets
from oasis_sglang.native.build import load_library

# Of each piece: working-set row and generation of its attempt, KV head, slot, logical page, the page evicted for it or
# NONE, its spare row or -1, whether the maps still count on its copy, the copy's ids in the source and in the target.
ROW, GENERATION, HEAD, SLOT, PAGE, EVICTED, LENT, WAITING, SOURCE, TARGET, FIELDS = range(11)


class LayerMisses(NamedTuple):
    """What a layer's selection misses."""

    layer: int
    rows: torch.Tensor  # [n] working-set rows of the selection's sequences, int64
    misses: torch.Tensor  # [7, m], see `Selection`


class Bounds(NamedTuple):
    """Columns of one layer: pieces to copy, `start` to `end`, and without a spare row, `first_without` to
    `end_without`."""

    layer: int
    start: int
    end: int
    first_without: int
    end_without: int


class Totals(NamedTuple):
    """Of one plan: pieces to copy, pieces that got no spare row, runs of pieces of one attempt, and two sets of layers,
    as bits counted from the plan's first layer: those with pieces, and those with pieces without a spare row."""

    used: int
    short: int
    runs: int
    waiting: int
    without: int


class Pieces:
    """`data` `[FIELDS, capacity]` int64: the pieces to copy, layer after layer, fill the first `used` columns; those
    that got no spare row fill the last ones, backwards."""

    def __init__(self, capacity: int, layers: int) -> None:
        """
        Args:
            layers: most layers from the first of a plan to its last, 63 at most.
        """
        self.data = np.empty((FIELDS, capacity), dtype=np.int64)
        self.bounds = np.empty((layers, len(Bounds._fields)), dtype=np.int64)  # `Bounds` of each layer
        self.totals = np.empty(len(Totals._fields), dtype=np.int64)
        self.all_shares = np.empty((capacity, 3), dtype=np.int64)
        # asking numpy each time takes longer than what is done there
        self.capacity, self.address = capacity, self.data.ctypes.data
        self.bounds_address, self.totals_address = self.bounds.ctypes.data, self.totals.ctypes.data
        self.shares_address = self.all_shares.ctypes.data
        self.reset()

    def reset(self) -> None:
        self.layers = self.used = self.short = self.runs = 0
        # Layers as bits, since every layer of a step asks: those that count on pieces, and those of them that count on
        # pieces without a spare row.
        self.waiting = self.without = 0
        self.ended = False  # the plan is over, or was never sent
        self.landed = False  # it is done, and its pieces are in their places

    def fill(self, first_layer: int, layers: int) -> None:
        """Note what `totals` and the first `layers` rows of `bounds` say."""
        self.layers = layers
        self.used, self.short, self.runs, waiting, without = self.totals.tolist()
        self.waiting, self.without = waiting << first_layer, without << first_layer

    @property
    def of_layers(self) -> list[Bounds]:
        """Whose columns are whose, in the order of the layers."""
        return list(map(Bounds._make, self.bounds[: self.layers].tolist()))

    def land(self) -> None:
        """The plan is done: only what got no spare row is still waited for."""
        self.landed = True
        self.waiting &= self.without

    def give_up(self, layer: int) -> list[np.ndarray]:
        """What a layer still waits for, as pieces `[FIELDS, n]`: with a spare row each or without any. It no longer
        does."""
        self.waiting &= ~(1 << layer)
        given_up = []
        for bounds in self.of_layers:
            if bounds.layer != layer:
                continue
            if not self.landed:
                sent = self.data[:, bounds.start : bounds.end]
                given_up.append(sent.copy())
                sent[WAITING] = 0
            given_up.append(self.data[:, bounds.first_without : bounds.end_without].copy())
        return given_up

    @property
    def shares(self) -> np.ndarray:
        """`[n, 3]` int64: row, generation and length of each run of pieces of one attempt."""
        return self.all_shares[: self.runs]


class PieceSteps(Protocol):
    def lend(self, pieces: Pieces, of_layers: Sequence[LayerMisses]) -> None:
        """Fill in the pieces of the misses of some layers, in ascending order and as many as there is room for at most,
        with the plan's shares, bounds and totals."""

    def adopt(self, pieces: Pieces, done: bool) -> int:
        """Take back the spare rows of a plan that has ended: in exchange for cells where the copies are good (`done`)
        and still wanted. How many these are."""


class Shape(NamedTuple):
    layers: int
    kv_heads: int
    #: Rows of one layer's K (or V) in the memory that the copies go to, `[layers, 2, rows, ...]`.
    pool_rows: int


def piece_steps(sets: WorkingSets, shape: Shape) -> PieceSteps:
    library = load_library() if sets.page_of.device.type == "cpu" else None
    return NumpySteps(sets, shape) if library is None else NativeSteps(sets, shape, library)


class NumpySteps:
    def __init__(self, sets: WorkingSets, shape: Shape) -> None:
        self._sets, self._shape = sets, shape
        self._owned = sets.pages.numpy()

    def lend(self, pieces: Pieces, of_layers: Sequence[LayerMisses]) -> None:
        first, last, waiting, without_row = 0, pieces.capacity, 0, 0
        for at, (layer, rows, misses) in enumerate(of_layers):
            host, head, _, sequence, slot, page, evicted = misses.numpy()
            row, lent = rows.numpy()[sequence], self._sets.cells.lend(layer, head)
            source = (host * self._shape.layers + layer) * self._shape.kv_heads + head
            target = 2 * layer * self._shape.pool_rows + lent
            data = np.stack((
                row, self._sets.generations[row], head, slot, page, evicted, lent, lent >= 0, source, target,
            ))  # fmt: skip
            sent, without = data[:, lent >= 0], data[:, lent < 0]
            bounds = Bounds(layer, first, first + sent.shape[1], last - without.shape[1], last)
            pieces.bounds[at] = bounds
            pieces.data[:, bounds.start : bounds.end] = sent
            pieces.data[:, bounds.first_without : bounds.end_without] = without[:, ::-1]
            first, last = bounds.end, bounds.first_without
            bit = 1 << (layer - of_layers[0].layer)
            waiting |= bit * bool(lent.size)
            without_row |= bit * bool(without.size)
        attempts = pieces.data[: GENERATION + 1, :first]
        starts = np.flatnonzero(np.r_[first > 0, (attempts[:, 1:] != attempts[:, :-1]).any(axis=0)])
        pieces.all_shares[: starts.size, :2] = attempts[:, starts].T
        pieces.all_shares[: starts.size, 2] = np.diff(starts, append=first)
        pieces.totals[:] = Totals(first, pieces.capacity - last, starts.size, waiting, without_row)

    def adopt(self, pieces: Pieces, done: bool) -> int:
        sets, kept = self._sets, 0
        for layer, start, end, *_ in pieces.of_layers:
            data = pieces.data[:, start:end]
            keep = (data[WAITING] == 1) & current(sets, layer, data) & done
            device = self._owned[data[ROW, keep], data[SLOT, keep]]
            sets.cells.adopt(layer, device, data[HEAD, keep], data[LENT, keep])
            sets.cells.give_back(layer, data[HEAD, ~keep], data[LENT, ~keep])
            data[LENT] = -1
            if done:
                data[WAITING] = 0
            kept += int(keep.sum())
        return kept


def current(sets: WorkingSets, layer: int, data: np.ndarray) -> np.ndarray:
    """`[n]` whether the maps still say what they said when the pieces `[FIELDS, n]` were planned."""
    row, generation, head, slot, page = data[: PAGE + 1]
    return (sets.page_of.numpy()[layer, row, head, slot] == page) & (sets.generations[row] == generation)


class _Places(ctypes.Structure):
    """`Places` of step.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "heads", "rows", "set_pages", "pages", "spare_pages")),
        ("pool_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("generations", "owned", "page_of", "cells", "spare", "left")),
    )


class NativeSteps:
    """Looks up once where the arrays lie that never move: asking each time takes longer than the work."""

    def __init__(self, sets: WorkingSets, shape: Shape, library: ctypes.CDLL) -> None:
        self._lend, self._adopt = library.oasis_lend, library.oasis_adopt
        cells = sets.cells
        places = _Places(
            layers=shape.layers,
            heads=shape.kv_heads,
            rows=sets.pages.shape[0],
            set_pages=sets.set_pages,
            pages=cells.rows.shape[1],
            spare_pages=cells.spare.shape[2],
            pool_rows=shape.pool_rows,
            generations=sets.generations.ctypes.data,
            owned=sets.pages.data_ptr(),
            page_of=sets.page_of.data_ptr(),
            cells=cells.rows.data_ptr(),
            spare=cells.spare.ctypes.data,
            left=cells.left.ctypes.data,
        )
        self._arrays = sets, places  # the pointers are good as long as these are there
        self._places = ctypes.addressof(places)

    def lend(self, pieces: Pieces, of_layers: Sequence[LayerMisses]) -> None:
        table = array("q")  # `LayerMisses` of step.cpp
        for layer, rows, misses in of_layers:
            table.extend((layer, misses.shape[1], misses.stride(0), rows.data_ptr(), misses.data_ptr()))
        self._lend(
            self._places,
            len(of_layers),
            table.buffer_info()[0],
            pieces.capacity,
            pieces.address,
            pieces.bounds_address,
            pieces.totals_address,
            pieces.shares_address,
        )

    def adopt(self, pieces: Pieces, done: bool) -> int:
        return int(
            self._adopt(self._places, pieces.layers, pieces.bounds_address, pieces.capacity, pieces.address, int(done))
        )
