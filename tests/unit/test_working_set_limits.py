"""Working sets at their limits: nothing left, impossible sizes, damage (contract 4, C10)."""

from __future__ import annotations

import pytest
import torch

from tests.unit.test_working_set import HEADS, SET_PAGES, assert_unchanged, make, snapshot


def test_running_out_of_rows_and_pages() -> None:
    """C10: when rows or pages run out, reserve says so and nothing is half taken; released ones serve the next."""
    sets = make(rows=2, device_pages=20)
    first, second = sets.reserve(5), sets.reserve(5)
    before = snapshot(sets)
    assert sets.reserve(1) is None
    assert_unchanged(sets, before)
    assert first is not None
    assert second is not None
    sets.release(first)
    again = sets.reserve(5)
    assert again is not None
    assert again.row == first.row
    assert again != first, "a row's next owner must not be taken for its last"
    pages = make(rows=9, device_pages=7)
    assert pages.reserve(5) is not None
    before = snapshot(pages)
    assert pages.reserve(3) is None
    assert_unchanged(pages, before)
    assert pages.reserve(2) is not None
    assert pages.free_pages == 0


@pytest.mark.parametrize("pages", [0, -1, SET_PAGES + 1])
def test_impossible_sizes_are_errors(pages: int) -> None:
    """A size that no free pages can ever satisfy must not look like "try again later" (C28)."""
    with pytest.raises(ValueError, match=f"{pages} pages asked for, a working set holds 1 to {SET_PAGES}"):
        make().reserve(pages)


def test_placing_more_than_owned_raises() -> None:
    """Contract 4: slots past the width name the reserved page; writing there would corrupt every padded read."""
    sets = make()
    attempt = sets.reserve(2)
    assert attempt is not None
    with pytest.raises(RuntimeError, match="3 pages placed in a working set of 2"):
        sets.place(0, attempt.row, torch.arange(3).expand(HEADS, 3), torch.zeros(3))
    sets.check_integrity()


def test_integrity_check_sees_damage() -> None:
    """The idle check is only worth something if it fails when pages are lost, shared or mapped two ways."""
    for damage in ("lost", "shared", "inverse", "foreign slot", "row"):
        sets = make()
        attempt = sets.reserve(3)
        assert attempt is not None
        sets.place(0, attempt.row, torch.arange(3).expand(HEADS, 3), torch.zeros(3))
        sets.check_integrity()
        match damage:
            case "lost":
                sets._free_pages.pop()
            case "shared":
                sets._free_pages[0] = int(sets.pages[attempt.row, 0])
            case "inverse":
                sets.slot_of[0, attempt.row, 0, 1] = 0
            case "foreign slot":
                sets.page_of[0, attempt.row, 0, 4] = 7
            case "row":
                sets._free_rows.pop()
        with pytest.raises(AssertionError):
            sets.check_integrity()
