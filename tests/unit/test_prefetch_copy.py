"""Copies inside a worker: compiled and numpy agree with bytes moved by hand, and no id reaches past a memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.memory_pool.prefetch.job import Job, Refused
from oasis_sglang.memory_pool.prefetch.messages import Cancel, Plan, Share, pack_ids, pack_shares
from oasis_sglang.memory_pool.prefetch.piece_copy import PieceCopy
from oasis_sglang.native.build import library_path
from tests.unit.prefetch_rig import PIECES, SLOTS, WIDTH, Memories

LIBRARY = library_path()
ENGINES = [
    pytest.param(None, id="numpy"),
    pytest.param(LIBRARY, id="native", marks=pytest.mark.skipif(LIBRARY is None, reason="needs a C++ compiler")),
]


@pytest.fixture
def memories():
    memories = Memories()
    yield memories
    memories.close()


def copier(memories: Memories, library=None) -> PieceCopy:
    return PieceCopy(
        memories.source_fd,
        memories.target_fd,
        width=memories.width,
        value_stride=memories.slots,
        library=str(library) if library else None,
    )


def plan(source, target, shares) -> Plan:
    return Plan(
        1,
        2,
        3,
        4,
        shares if isinstance(shares, bytes) else pack_shares(shares),
        source if isinstance(source, bytes) else pack_ids(source),
        target if isinstance(target, bytes) else pack_ids(target),
    )


@pytest.mark.parametrize("library", ENGINES)
def test_copies_equal_bytes_moved_by_hand(memories: Memories, library) -> None:
    chance = random.Random(3)
    memory = copier(memories, library)
    for count in (0, 1, 7, SLOTS):
        before = memories.target.copy()
        source, slots = chance.choices(range(PIECES), k=count), chance.sample(range(SLOTS), count)
        ids = np.array(source, dtype=np.int64), np.array(slots, dtype=np.int64)
        assert memory.fits(*ids)
        memory.copy(*ids)
        assert all(memories.holds(slot, piece) for slot, piece in zip(slots, source, strict=True))
        for slot in set(range(SLOTS)) - set(slots):
            for half in (slot, SLOTS + slot):
                assert (memories.half(half) == before[half * WIDTH : (half + 1) * WIDTH]).all()


@pytest.mark.parametrize("library", ENGINES)
@pytest.mark.parametrize("width", [64, 2048])
def test_halves_of_whole_cache_lines(width: int, library) -> None:
    """Those of a real model; they take another way through the compiled code than odd ones."""
    memories = Memories(pieces=50, slots=40, width=width)
    try:
        chance = random.Random(4)
        source, slots = chance.choices(range(50), k=30), chance.sample(range(40), 30)
        copier(memories, library).copy(np.array(source), np.array(slots))
        assert all(memories.holds(slot, piece) for slot, piece in zip(slots, source, strict=True))
        assert all(memories.is_untouched(slot) for slot in set(range(40)) - set(slots))
    finally:
        memories.close()


def test_a_library_that_cannot_be_loaded_costs_speed_only(memories: Memories, tmp_path, caplog) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("not a library")
    memory = copier(memories, broken)
    assert "slower" in caplog.text
    memory.copy(np.array([5]), np.array([9]))
    assert memories.holds(9, 5)


BIG = 2**63 - 1
OUTSIDE = [
    ([-1], [0]),
    ([PIECES], [0]),
    ([BIG], [0]),
    ([-(2**63)], [0]),
    ([0], [-1]),
    ([0], [SLOTS]),  # its V would lie past the end
    ([0], [BIG]),
    ([0], [BIG - SLOTS + 1]),  # plus the stride it wraps around to a negative
    ([0, 1, PIECES], [0, 1, 2]),
    ([0, 1, 2], [0, SLOTS, 2]),
]


@pytest.mark.parametrize(("source", "target"), OUTSIDE)
def test_a_plan_with_an_id_out_of_range_is_refused(memories: Memories, source, target) -> None:
    with pytest.raises(Refused, match="outside"):
        Job(plan(source, target, [Share(0, 1, len(source))]), copier(memories))


@pytest.mark.parametrize(
    ("source", "target", "shares"),
    [
        ([0, 1], [0], [Share(0, 1, 2)]),
        ([0], [0, 1], [Share(0, 1, 1)]),
        ([0], [0], [Share(0, 1, 2)]),
        ([0, 1], [0, 1], [Share(0, 1, 1)]),
        ([0, 1], [0, 1], [Share(0, 1, 3), Share(0, 2, -1)]),
        ([0], [0], []),
        (bytes(9), [0], [Share(0, 1, 1)]),
        ([0], bytes(7), [Share(0, 1, 1)]),
        ([0], [0], bytes(16)),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(memories: Memories, source, target, shares) -> None:
    with pytest.raises(Refused):
        Job(plan(source, target, shares), copier(memories))


@pytest.mark.parametrize(("width", "stride"), [(0, 1), (7, 1), (WIDTH, 0), (WIDTH, 2 * SLOTS), (WIDTH, -1)])
def test_a_layout_that_does_not_divide_is_refused(memories: Memories, width: int, stride: int) -> None:
    with pytest.raises(ValueError, match=r"divide|stride"):
        PieceCopy(memories.source_fd, memories.target_fd, width=width, value_stride=stride)


def test_a_run_goes_on_over_attempts_but_not_over_cancelled_ones(memories: Memories) -> None:
    """A step's plan has a few pieces of each attempt and layer in turn: runs of those alone would be all overhead."""
    job = Job(plan(range(20), range(20), [Share(row, 1, 4) for row in (0, 1, 2, 0, 1)]), copier(memories))
    assert job.next_run(100) == range(20)
    assert job.next_run(6) == range(6)
    job.copy(range(6))
    assert job.next_run(100) == range(6, 20)
    job.cancel(Cancel(2, 1))
    assert job.next_run(100) == range(6, 8)
    job.copy(range(6, 8))
    assert job.next_run(100) == range(12, 20)
    job.copy(range(12, 20))
    assert not job.next_run(100)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_a_job_copies_all_but_the_cancelled(data: st.DataObject) -> None:
    """Whatever the runs are, and whenever attempts are cancelled: what was not yet copied of them stays untouched,
    everything else arrives, and nothing is copied twice."""
    memories = Memories(pieces=40, slots=40, width=8)
    try:
        sizes = data.draw(st.lists(st.integers(0, 9), max_size=4), "sizes")
        count = sum(sizes)
        shares = [Share(row, 7, size) for row, size in enumerate(sizes)]
        owner = [row for row, size in enumerate(sizes) for _ in range(size)]
        job = Job(plan(range(count), range(count), shares), copier(memories))
        copied: set[int] = set()
        cancelled: dict[int, set[int]] = {}  # row: what had been copied of it by then
        for _ in range(200):
            if sizes and data.draw(st.booleans(), "cancel"):
                row = data.draw(st.integers(0, len(sizes) - 1), "row")
                job.cancel(Cancel(row, data.draw(st.sampled_from([7, 8]), "generation")))
                # another generation of the row is somebody else
                if not any(job_part.row == row for job_part in job._parts):
                    cancelled.setdefault(row, {i for i in copied if owner[i] == row})
            run = job.next_run(data.draw(st.integers(1, 12), "limit"))
            if not run:
                break
            assert not copied & set(run)
            job.copy(run)
            copied |= set(run)
        for index in range(count):
            kept = cancelled.get(owner[index])
            if kept is None or index in kept:
                assert index in copied
                assert memories.holds(index, index)
            else:
                assert memories.is_untouched(index)
        completion = job.completion(3, "done")
        assert (completion.generation, completion.pieces, completion.bytes) == (3, len(copied), len(copied) * 16)
    finally:
        memories.close()
