"""Memory that other processes can map."""

from __future__ import annotations

import ctypes
import os

import torch

from oasis_sglang.memory_pool.huge_pages import collapse, map_file


class SharedMemory:
    """An anonymous file (`memfd_create`), mapped.

    Worker processes map it through its descriptor, it needs no room in `/dev/shm` (64 MB in many containers), and it
    disappears with the last process that maps it, however that process ends. Pages of memory are taken when first
    written; until then they read as zeros.
    """

    def __init__(self, fd: int, memory: ctypes.Array[ctypes.c_char]) -> None:
        self._fd = fd
        self._map = memory
        self._pinned = False

    @classmethod
    def create(cls, name: str, nbytes: int) -> SharedMemory:
        """
        Args:
            name: what `/proc/<pid>/maps` shows; need not be unique.

        Raises:
            OSError: no memory or no descriptor to be had.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            return cls(fd, map_file(fd, nbytes))
        except BaseException:
            os.close(fd)
            raise

    @property
    def fd(self) -> int:
        """Descriptor, for processes that map it; closed on exec unless it is passed on."""
        return self._fd

    @property
    def nbytes(self) -> int:
        return len(self._map)

    def use_huge_pages(self) -> None:
        """Where the kernel can; see `huge_pages.collapse`. All of the memory is taken at once then. For new memory."""
        collapse(self._map)

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it as one flat tensor."""
        return torch.frombuffer(self._map, dtype=dtype)

    def pin(self) -> None:
        """Lock the memory and give CUDA devices access to it, at the addresses that the host has.

        Raises:
            RuntimeError: it cannot be locked (limits of the process or of its container).
        """
        flags = 3  # portable, mapped
        torch.cuda.check_error(
            torch.cuda.cudart().cudaHostRegister(self.tensor(torch.uint8).data_ptr(), self.nbytes, flags)
        )
        self._pinned = True

    def close(self) -> None:
        """Give the memory back, once the last tensor over it is gone too."""
        if self._pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.tensor(torch.uint8).data_ptr()))
        del self._map  # unmapped with the last tensor over it
        os.close(self._fd)
