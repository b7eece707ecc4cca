"""Pools larger than 2^31 elements that cost no memory."""

from __future__ import annotations

import mmap

import torch

MAP_NORESERVE = 0x4000  # of Linux; Python names it from 3.13 on


class FarPool:
    """A range of addresses for `rows` rows of `width` elements, of which only those that are touched take memory.

    Tensors over parts of it know nothing of the rest, so that a kernel which is given one and large row numbers reads
    beyond it, as it would in one huge pool; the interpreter, which copies the memory of tensors, copies little.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        self.rows, self.width, self.dtype = rows, width, dtype
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._memory = mmap.mmap(-1, rows * width * dtype.itemsize, flags=flags)

    def at(self, row: int, count: int = 1) -> torch.Tensor:
        """Rows from `row` on, `[count, width]`."""
        offset = row * self.width * self.dtype.itemsize
        flat = torch.frombuffer(self._memory, dtype=self.dtype, count=count * self.width, offset=offset)
        return flat.view(count, self.width)
