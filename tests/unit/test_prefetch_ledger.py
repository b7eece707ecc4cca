"""Every plan is reported exactly once, whatever arrives in whatever order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.memory_pool.prefetch.ledger import Ledger
from oasis_sglang.memory_pool.prefetch.messages import Completion

GENERATIONS = st.integers(1, 3)
ACTIONS = st.one_of(
    st.tuples(st.just("submit"), GENERATIONS, st.integers(0, 4)),
    # sequence, generation in the message, generation of the socket: any of them may be wrong, and any may repeat
    st.tuples(st.just("complete"), st.integers(0, 12), GENERATIONS, GENERATIONS),
    st.tuples(st.just("lose"), GENERATIONS),
    st.tuples(st.just("cancel"), st.integers(0, 4)),
)


@settings(max_examples=400, deadline=None)  # the machine may be busy
@given(st.lists(ACTIONS, max_size=40))
def test_every_plan_is_reported_once(actions: list[tuple]) -> None:
    ledger = Ledger()
    under_way: dict[int, tuple[int, int]] = {}  # sequence: generation, row
    told: dict[int, set[int]] = {}  # sequence: cancelled rows
    stale = submitted = reported = 0
    for action, *values in actions:
        match action:
            case "submit":
                generation, row = values
                sequence = ledger.next_sequence()
                ledger.submit(sequence, generation, np.array([(row, 1, 10)]), 10)
                under_way[sequence], told[sequence] = (generation, row), set()
                submitted += 1
            case "complete":
                sequence, claimed, socket = values
                end = ledger.complete(Completion(claimed, sequence, "done", 10, 80, 0.5), socket)
                if sequence in under_way and under_way[sequence][0] == claimed == socket:
                    assert end is not None
                    assert (end.sequence, end.status, end.pieces) == (sequence, "done", 10)
                    assert {row for row, _ in end.cancelled} == told[sequence]
                    del under_way[sequence]
                    reported += 1
                else:
                    assert end is None
                    stale += 1
            case "lose":
                ends = ledger.lose(values[0])
                expected = {sequence for sequence, (generation, _) in under_way.items() if generation == values[0]}
                assert {end.sequence for end in ends} == expected
                assert all(end.status == "lost" for end in ends)
                reported += len(ends)
                for sequence in expected:
                    del under_way[sequence]
            case "cancel":
                (row,) = values
                tell = {
                    generation
                    for sequence, (generation, r) in under_way.items()
                    if r == row and row not in told[sequence]
                }
                assert set(ledger.cancel((row, 1))) == tell
                assert ledger.cancel((row, 2)) == []
                for sequence, (_, r) in under_way.items():
                    if r == row:
                        told[sequence].add(row)
        assert ledger.outstanding == len(under_way) == submitted - reported
        assert (ledger.submitted, ledger.reported, ledger.stale) == (submitted, reported, stale)
        for generation in (1, 2, 3):
            plans = sum(g == generation for g, _ in under_way.values())
            assert ledger.plans_of(generation) == plans
            assert ledger.pieces_of(generation) == 10 * plans
