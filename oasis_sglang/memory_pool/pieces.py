"""The page pieces of one plan on their way to the device, and what a step does with them: compiled, because a step does
it layer by layer and has no time to lose, with the same in numpy for hosts without a compiler.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import numpy as np
import torch

from oasis_sglang.attention.selector import Selection
from oasis_sglang.memory_pool.working_set import WorkingSets
from oasis_sglang.native.build import load_library

# Of each piece: working-set row and generation of its attempt, KV head, slot, logical page, the page evicted for it or
# NONE, its spare row or -1, whether the maps still count on it, its ids in the source and in the target of the copy.
ROW, GENERATION, HEAD, SLOT, PAGE, EVICTED, LENT, WAITING, SOURCE, TARGET, FIELDS = range(11)


class Pieces:
    """`data` `[FIELDS, capacity]` int64, of which the first `used` columns count, layer after layer."""

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
        self.spans: list[Span] = []
        self.unseen = 0  # spans that no step has looked at
        self.ended = False  # the plan is over, or was never sent
        self.done = False  # copied: no piece waits any more

    def add(self, span: Span) -> None:
        self.spans.append(span)
        self.used = span.end
        self.unseen += 1

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

    @property
    def room(self) -> int:
        return self.capacity - self.used


class Span(NamedTuple):
    """The pieces of one layer: columns `start` to `end`."""

    pieces: Pieces
    layer: int
    start: int
    end: int

    @property
    def data(self) -> np.ndarray:
        return self.pieces.data[:, self.start : self.end]


class PieceSteps(Protocol):
    def lend(self, pieces: Pieces, layer: int, rows: torch.Tensor, picked: Selection, first: int, count: int) -> int:
        """Fill in columns from `pieces.used` on for misses `first` to `first + count` of a selection, those first that
        get a spare row; how many these are. `rows` are the working-set rows of the selection's sequences."""

    def adopt(self, span: Span, done: bool) -> int:
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
        self._page_of, self._owned = sets.page_of.numpy(), sets.pages.numpy()

    def lend(self, pieces: Pieces, layer: int, rows: torch.Tensor, picked: Selection, first: int, count: int) -> int:
        host, head, _, sequence, slot, page, evicted = picked.misses[:, first : first + count].numpy()
        data = pieces.data[:, pieces.used : pieces.used + count]
        row = rows.numpy()[sequence]
        lent = self._sets.cells.lend(layer, head)
        data[:SOURCE] = (
            row, self._sets.generations[row], head, slot, page, evicted, lent, np.ones_like(row),
        )  # fmt: skip
        data[SOURCE] = (host * self._shape.layers + layer) * self._shape.kv_heads + head
        data[TARGET] = 2 * layer * self._shape.pool_rows + lent
        data[:] = np.concatenate((data[:, lent >= 0], data[:, lent < 0]), axis=1)
        count = int((lent >= 0).sum())
        for row_of, generation in data[: GENERATION + 1, :count].T.tolist():
            pieces.count(row_of, generation)
        return count

    def adopt(self, span: Span, done: bool) -> int:
        sets, layer, data = self._sets, span.layer, span.data
        keep = (data[WAITING] == 1) & current(sets, layer, data) & done
        device = self._owned[data[ROW, keep], data[SLOT, keep]]
        sets.cells.adopt(layer, device, data[HEAD, keep], data[LENT, keep])
        sets.cells.give_back(layer, data[HEAD, ~keep], data[LENT, ~keep])
        data[LENT] = -1
        if done:
            data[WAITING] = 0
        return int(keep.sum())


def current(sets: WorkingSets, layer: int, data: np.ndarray) -> np.ndarray:
    """`[n]` whether the maps still say what they said when the pieces `[FIELDS, n]` were planned."""
    row, generation, head, slot, page = data[: PAGE + 1]
    return (sets.page_of.numpy()[layer, row, head, slot] == page) & (sets.generations[row] == generation)


class _LendArgs(ctypes.Structure):
    """`LendArgs` of step.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("capacity", "layers", "layer", "heads", "spare_pages", "base")),
        *((name, ctypes.c_void_p) for name in ("generations", "spare", "left", "rows", "misses")),
        *((name, ctypes.c_int64) for name in ("stride", "count")),
        *((name, ctypes.c_void_p) for name in ("pieces", "runs", "shares")),
    )


class NativeSteps:
    """Looks up once where the arrays lie that never move: asking each time takes longer than the work."""

    def __init__(self, sets: WorkingSets, shape: Shape, library: ctypes.CDLL) -> None:
        self._sets, self._shape = sets, shape
        self._lend, self._adopt = library.oasis_lend, library.oasis_adopt
        self._generations = sets.generations.ctypes.data
        self._spare_pages = sets.cells.spare.shape[2]
        of_layer = (sets.page_of, sets.cells.rows, sets.cells.spare, sets.cells.left)
        starts = [x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data for x in of_layer]
        sizes = [x[0].nbytes for x in of_layer]
        # of each layer: `page_of`, cells, `Cells.spare`, `Cells.left`
        self._at = [
            [start + layer * size for start, size in zip(starts, sizes, strict=True)] for layer in range(shape.layers)
        ]
        self._lend_args = [
            _LendArgs(
                layers=shape.layers,
                layer=layer,
                heads=shape.kv_heads,
                spare_pages=self._spare_pages,
                base=2 * layer * shape.pool_rows,
                generations=self._generations,
                spare=spare,
                left=left,
            )
            for layer, (_, _, spare, left) in enumerate(self._at)
        ]
        self._owned = sets.pages.data_ptr()

    def lend(self, pieces: Pieces, layer: int, rows: torch.Tensor, picked: Selection, first: int, count: int) -> int:
        args, misses = self._lend_args[layer], picked.misses
        args.capacity, args.pieces = pieces.capacity, pieces.address + 8 * pieces.used
        args.rows, args.misses = rows.data_ptr(), misses.data_ptr() + 8 * first
        args.stride, args.count = misses.stride(0), count
        args.runs, args.shares = pieces.runs_address, pieces.shares_address
        return int(self._lend(ctypes.byref(args)))

    def adopt(self, span: Span, done: bool) -> int:
        page_of, cells, spare, left = self._at[span.layer]
        return int(
            self._adopt(
                span.end - span.start,
                span.pieces.capacity,
                self._shape.kv_heads,
                self._sets.set_pages,
                self._spare_pages,
                int(done),
                self._generations,
                page_of,
                self._owned,
                cells,
                spare,
                left,
                span.pieces.address + 8 * span.start,
            )
        )
