"""Mappings that can have huge pages hold what their file holds."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from oasis_sglang.memory_pool.huge_pages import HUGE_PAGE_BYTES, collapse, map_file

NBYTES = 3 * HUGE_PAGE_BYTES + 12_345


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test-huge-pages")
    os.ftruncate(fd, NBYTES)
    yield fd
    os.close(fd)


def test_a_mapping_starts_where_a_huge_page_can(fd: int) -> None:
    mappings = [map_file(fd, NBYTES) for _ in range(3)]
    assert [ctypes.addressof(mapping) % HUGE_PAGE_BYTES for mapping in mappings] == [0, 0, 0]
    os.pwrite(fd, b"first", 0)
    os.pwrite(fd, b"last", NBYTES - 4)
    for mapping in mappings:
        assert (mapping[:5], mapping[NBYTES - 4 :]) == (b"first", b"last")


def test_it_takes_no_more_room_than_the_file(fd: int) -> None:
    mapping = map_file(fd, NBYTES, writable=False)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "test-huge-pages" in line]
    start = ctypes.addressof(mapping)
    assert [(line[0], line[1]) for line in lines] == [(f"{start:x}-{start + 3 * HUGE_PAGE_BYTES + 4 * 4096:x}", "r--s")]
    del mapping
    assert "test-huge-pages" not in Path("/proc/self/maps").read_text()


def test_huge_pages_change_no_byte(fd: int) -> None:
    mapping = map_file(fd, NBYTES)
    if not collapse(mapping):
        pytest.skip("this kernel puts no file into huge pages (Linux 6.1 and later do)")
    assert not any(mapping.raw)
    mapping[2 * HUGE_PAGE_BYTES + 7] = b"x"
    assert os.pread(fd, 1, 2 * HUGE_PAGE_BYTES + 7) == b"x"
    smaps = Path("/proc/self/smaps").read_text().partition("test-huge-pages")[2]
    assert f"ShmemPmdMapped: {3 * HUGE_PAGE_BYTES >> 10:8} kB" in smaps


def test_what_has_no_room_for_one_stays_as_it_is(fd: int) -> None:
    mapping = map_file(fd, HUGE_PAGE_BYTES - 1)
    assert not collapse(mapping)
    assert not any(mapping.raw)


def test_what_cannot_be_mapped_is_an_error(fd: int) -> None:
    before = Path("/proc/self/maps").read_text().count("\n")
    for number, nbytes in ((fd, 0), (fd, 1 << 62), (1 << 20, 4096)):
        with pytest.raises(OSError, match=r"mapped|memory|descriptor"):
            map_file(number, nbytes)
    assert Path("/proc/self/maps").read_text().count("\n") == before
