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
# NONE, its spare row or -1, whether the maps still count on it, its ids in the source and in the target of the copy.
ROW, GENERATION, HEAD, SLOT, PAGE, EVICTED, LENT, WAITING, SOURCE, TARGET, FIELDS = range(11)


class LayerMisses(NamedTuple):
    """What a layer's selection misses."""

    layer: int
    rows: torch.Tensor  # [n] working-set rows of the selection's sequences, int64
    misses: torch.Tensor  # [7, m], see `Selection`


class Pieces:
    """`data` `[FIELDS, capacity]` int64: the pieces to copy, layer after layer, fill the first `used` columns; those
    that got no spare row fill the last ones, backwards."""

    def __init__(self, capacity: int) -> None:
        self.data = np.empty((FIELDS, capacity), dtype=np.int64)
        self._shares, self._runs = np.empty((capacity, 3), dtype=np.int64), np.zeros(1, dtype=np.int64)
        # asking numpy each time takes longer than what is done there
        self.capacity, self.address = capacity, self.data.ctypes.data
        self.shares_address, self.runs_address = self._shares.ctypes.data, self._runs.ctypes.data
        self.reset()

    def reset(self) -> None:
        self.used = 0
        self._runs[0] = 0
        self.spans: list[Span] = []  # to copy
        self.without: list[Span] = []  # without a spare row
        self.bounds = array("q")  # layer, start and end of each of `spans`
        self.unseen = 0  # spans that have neither landed nor been undone
        self.ended = False  # the plan is over, or was never sent

    def fill(self, of_layers: Sequence[LayerMisses], lent: Sequence[int]) -> None:
        """Note whose columns are whose, after `PieceSteps.lend`."""
        back = self.capacity
        for (layer, _, misses), count in zip(of_layers, lent, strict=True):
            if count:
                self.spans.append(Span(self, layer, self.used, self.used + count, True))
                self.bounds.extend((layer, self.used, self.used + count))
                self.used += count
            if without := misses.shape[1] - count:
                self.without.append(Span(self, layer, back - without, back, False))
                back -= without
        self.unseen = len(self.spans) + len(self.without)

    @property
    def shares(self) -> np.ndarray:
        """`[n, 3]` int64: row, generation and length of each run of pieces of one attempt."""
        return self._shares[: self._runs[0]]

    def count(self, row: int, generation: int) -> None:
        """One more piece of an attempt."""
        last = self._runs[0] - 1
        if last < 0 or tuple(self._shares[last, :2]) != (row, generation):
            last = self._runs[0]
            self._shares[last] = row, generation, 0
            self._runs[0] += 1
        self._shares[last, 2] += 1


class Span(NamedTuple):
    """The pieces of one layer: columns `start` to `end`."""

    pieces: Pieces
    layer: int
    start: int
    end: int
    sent: bool  # they have a spare row each, to be copied to

    @property
    def data(self) -> np.ndarray:
        return self.pieces.data[:, self.start : self.end]


class PieceSteps(Protocol):
    def lend(self, pieces: Pieces, of_layers: Sequence[LayerMisses]) -> Sequence[int]:
        """Fill in the pieces of some layers' misses, as many as there is room for at most. How many of each layer got a
        spare row."""

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

    def lend(self, pieces: Pieces, of_layers: Sequence[LayerMisses]) -> Sequence[int]:
        counts, first, last = [], 0, pieces.capacity
        for layer, rows, misses in of_layers:
            host, head, _, sequence, slot, page, evicted = misses.numpy()
            row, lent = rows.numpy()[sequence], self._sets.cells.lend(layer, head)
            source = (host * self._shape.layers + layer) * self._shape.kv_heads + head
            target = 2 * layer * self._shape.pool_rows + lent
            data = np.stack((
                row, self._sets.generations[row], head, slot, page, evicted, lent, np.ones_like(row), source, target,
            ))  # fmt: skip
            sent, without = data[:, lent >= 0], data[:, lent < 0]
            pieces.data[:, first : first + sent.shape[1]] = sent
            pieces.data[:, last - without.shape[1] : last] = without[:, ::-1]
            first, last = first + sent.shape[1], last - without.shape[1]
            for row_of, generation in sent[: GENERATION + 1].T.tolist():
                pieces.count(row_of, generation)
            counts.append(sent.shape[1])
        return counts

    def adopt(self, pieces: Pieces, done: bool) -> int:
        sets, kept = self._sets, 0
        for span in pieces.spans:
            layer, data = span.layer, span.data
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

    def lend(self, pieces: Pieces, of_layers: Sequence[LayerMisses]) -> Sequence[int]:
        table = array("q")  # `LayerMisses` of step.cpp
        for layer, rows, misses in of_layers:
            table.extend((layer, misses.shape[1], misses.stride(0), rows.data_ptr(), misses.data_ptr(), 0))
        self._lend(
            self._places,
            len(of_layers),
            table.buffer_info()[0],
            pieces.capacity,
            pieces.address,
            pieces.runs_address,
            pieces.shares_address,
        )
        return table[5::6]

    def adopt(self, pieces: Pieces, done: bool) -> int:
        bounds = pieces.bounds.buffer_info()[0]
        return int(self._adopt(self._places, len(pieces.spans), bounds, pieces.capacity, pieces.address, int(done)))
