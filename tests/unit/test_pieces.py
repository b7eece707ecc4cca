"""Filling in pieces: the compiled steps against the numpy ones, and what becomes of each layer's pieces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oasis_sglang.memory_pool.pieces import (
    EVICTED,
    LENT,
    PAGE,
    TARGET,
    WAITING,
    LayerMisses,
    NativeSteps,
    NumpySteps,
    Pieces,
    PieceSteps,
    Shape,
)
from oasis_sglang.memory_pool.working_set import WorkingSets
from oasis_sglang.native.build import load_library

LAYERS, HEADS = 4, 2


def working_sets(spare_pages: int) -> WorkingSets:
    return WorkingSets(
        layers=LAYERS, kv_heads=HEADS, device_pages=12, spare_pages=spare_pages, rows=3, set_pages=5, sequence_pages=9
    )


def fill(spare_pages: int, compiled: bool) -> tuple[Pieces, PieceSteps, WorkingSets]:
    """One plan: six misses of layer 1, none of layer 2, three of layer 3, of which each head has `spare_pages` rows."""
    sets = working_sets(spare_pages)
    rows = torch.tensor([attempt.row for _ in range(2) if (attempt := sets.reserve(5))])
    shape = Shape(LAYERS, HEADS, sets.cells.pool_rows)
    library = load_library()
    steps: PieceSteps = NumpySteps(sets, shape)
    if compiled:
        if library is None:
            pytest.skip("no compiler")
        steps = NativeSteps(sets, shape, library)
    plan = []
    for layer, count in ((1, 6), (2, 0), (3, 3)):
        i = torch.arange(count)
        misses = torch.stack((20 + i, i % HEADS, i, i * 2 // max(count, 1), i % 5, 3 + i % 6, i % 3 - 1))
        plan.append(LayerMisses(layer, rows, misses))
        for host, head, _, sequence, slot, page, _ in misses.T.tolist():
            assert host >= 20
            sets.page_of[layer, rows[sequence], head, slot] = page
    pieces = Pieces(32, len(plan))
    steps.lend(pieces, plan)
    pieces.fill(plan[0].layer, len(plan))
    return pieces, steps, sets


@pytest.mark.parametrize("spare_pages", [0, 1, 2, 9])
def test_the_compiled_steps_fill_in_what_numpy_does(spare_pages: int) -> None:
    """But for which of a head's spare rows a piece gets."""
    (mine, _, _), (theirs, _, _) = fill(spare_pages, True), fill(spare_pages, False)
    assert mine.of_layers == theirs.of_layers
    assert (mine.used, mine.waiting, mine.without) == (theirs.used, theirs.waiting, theirs.without)
    assert mine.shares.tolist() == theirs.shares.tolist()
    fields = [f for f in range(len(mine.data)) if f not in (LENT, TARGET)]
    for _, start, end, first, last in mine.of_layers:
        assert np.array_equal(mine.data[fields, start:end], theirs.data[fields, start:end])
        got_none = [f for f in range(len(mine.data)) if f != TARGET]
        assert np.array_equal(mine.data[got_none, first:last], theirs.data[got_none, first:last])
        assert (mine.data[LENT, first:last] == -1).all()
        assert (mine.data[LENT, start:end] >= 0).all()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_layer_waits_until_its_pieces_landed_or_are_given_up(compiled: bool) -> None:
    pieces, steps, sets = fill(2, compiled)  # two rows for the three misses of a head of layer 1
    assert [bounds.layer for bounds in pieces.of_layers] == [1, 2, 3]
    assert (pieces.used, pieces.waiting, pieces.without) == (7, 0b1010, 0b0010)
    sent, without = pieces.give_up(1)
    assert sent.shape[1] == 4
    assert without.shape[1] == 2
    assert (sent[WAITING] == 1).all()
    assert (without[WAITING] == 0).all()
    assert pieces.waiting == 0b1000
    assert sorted([*sent[PAGE], *without[PAGE]]) == [3, 4, 5, 6, 7, 8]
    assert sorted([*sent[EVICTED], *without[EVICTED]]) == [-1, -1, 0, 0, 1, 1]
    assert steps.adopt(pieces, True) == 3, "layer 3's alone: nobody counts on layer 1's any more"
    pieces.land()
    assert pieces.waiting == 0
    sets.cells.check_integrity()


def test_a_landed_plan_is_waited_for_where_rows_were_short() -> None:
    pieces, steps, _ = fill(2, False)
    assert steps.adopt(pieces, True) == 7
    pieces.land()
    assert pieces.waiting == 0b0010
    (without,) = pieces.give_up(1)
    assert without.shape[1] == 2
    assert pieces.waiting == 0
