"""Memory that other processes map: what one writes the other reads, and it is given back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from oasis_sglang.memory_pool.shared_memory import SharedMemory


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_tensors_of_any_type_share_the_bytes() -> None:
    memory = SharedMemory.create("test", 64)
    assert memory.nbytes == os.fstat(memory.fd).st_size == 64
    words, octets = memory.tensor(torch.int32), memory.tensor(torch.uint8)
    assert not octets.any()
    words[3] = 0x01020304
    assert octets[12:16].tolist() == [4, 3, 2, 1]
    assert os.pread(memory.fd, 4, 12) == bytes((4, 3, 2, 1))
    os.pwrite(memory.fd, b"\x07", 63)
    assert int(octets[63]) == 7


def test_it_is_not_inherited_unless_passed_on() -> None:
    memory = SharedMemory.create("test", 8)
    assert not os.get_inheritable(memory.fd)
    memory.close()


def test_it_goes_with_its_last_tensor() -> None:
    """torch does not keep a mapping from being closed: a tensor left over must not point at nothing."""
    name = f"closed-{os.getpid()}"
    before = open_files()
    memory = SharedMemory.create(name, 4096)
    tensor = memory.tensor(torch.uint8)
    memory.close()
    tensor[0] = 1
    assert name in Path("/proc/self/maps").read_text()
    del tensor
    assert name not in Path("/proc/self/maps").read_text()
    assert open_files() == before


def test_a_size_that_cannot_be_leaves_nothing_open() -> None:
    before = open_files()
    for nbytes in (0, -1, 1 << 62):
        with pytest.raises((OSError, ValueError)):
            SharedMemory.create("test", nbytes)
    assert open_files() == before
