"""The two shared memories of a worker, and copying pieces from one to the other.

source   piece i at byte i * 2 * width:         [ K of 0 | V of 0 | K of 1 | V of 1 | ... ]
target   half t at byte t * width:              [ half 0 | half 1 | ... ]
         id t: K goes to half t, V to half t + value_stride
"""

from __future__ import annotations

import ctypes
import logging
import os

import numpy as np

from oasis_sglang.memory_pool.huge_pages import map_file

logger = logging.getLogger(__name__)


def check_layout(source_fd: int, target_fd: int, *, width: int, value_stride: int) -> None:
    """
    Raises:
        ValueError: a memory holds no whole number of pieces or halves, or the stride lies outside the target.
    """
    source_bytes, target_bytes = os.fstat(source_fd).st_size, os.fstat(target_fd).st_size
    if width < 1 or not source_bytes or source_bytes % (2 * width) or not target_bytes or target_bytes % width:
        raise ValueError(
            f"a source of {source_bytes} and a target of {target_bytes} bytes do not divide into halves of {width}"
        )
    if not 0 < value_stride < target_bytes // width:
        raise ValueError(f"value_stride={value_stride} lies outside a target of {target_bytes // width} halves")


class PieceCopy:
    """Maps the source for reading and the target for writing, and copies pieces in the calling thread."""

    def __init__(
        self, source_fd: int, target_fd: int, *, width: int, value_stride: int, library: str | None = None
    ) -> None:
        """
        Args:
            width: bytes of a half.
            value_stride: halves from a piece's K to its V in the target.
            library: path of the compiled library. One that cannot be loaded costs speed only.

        Raises:
            ValueError: see `check_layout`.
        """
        check_layout(source_fd, target_fd, width=width, value_stride=value_stride)
        self.width = width
        self.value_stride = value_stride
        source = map_file(source_fd, os.fstat(source_fd).st_size, writable=False)
        target = map_file(target_fd, os.fstat(target_fd).st_size)
        self._source = np.frombuffer(memoryview(source), dtype=np.uint8).reshape(-1, 2, width)
        self._target = np.frombuffer(memoryview(target), dtype=np.uint8).reshape(-1, width)
        self._addresses = self._source.ctypes.data, self._target.ctypes.data
        self._function = _load(library) if library else None

    @property
    def piece_bytes(self) -> int:
        return 2 * self.width

    def fits(self, source: np.ndarray, target: np.ndarray) -> bool:
        """Whether `[n]` ids of pieces and `[n]` ids of halves all lie in their memories."""
        if not len(source):
            return True
        last_key = len(self._target) - self.value_stride - 1  # compared with ids as they are: a sum could wrap around
        return bool(
            source.min() >= 0 and source.max() < len(self._source) and target.min() >= 0 and target.max() <= last_key
        )

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy piece `source[i]` to half `target[i]`; `[n]` contiguous int64 that `fits` has accepted."""
        if self._function is None:
            self._target[target] = self._source[source, 0]
            self._target[target + self.value_stride] = self._source[source, 1]
            return
        self._function(
            len(source),
            self.width,
            self.value_stride,
            self._addresses[0],
            source.ctypes.data,
            self._addresses[1],
            target.ctypes.data,
        )


def _load(path: str):
    try:
        function = ctypes.CDLL(path).oasis_copy_pieces
    except (OSError, AttributeError) as error:
        logger.warning("Pages are copied with numpy, which is slower: %s", error)
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    function.restype, function.argtypes = None, (*[number] * 3, *[address] * 4)
    return function
