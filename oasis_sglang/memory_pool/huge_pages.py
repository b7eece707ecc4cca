"""Files mapped so that the processor can translate 2 MiB of them at a time.

Page pieces of a few kilobytes lie all over a pool, and with 4 KiB pages of memory nearly each costs a walk through the
page tables. A mapping can have huge pages only where address and offset in the file are multiples of 2 MiB.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; neither Python nor older C libraries name it
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(fd: int, nbytes: int, *, writable: bool = True) -> ctypes.Array[ctypes.c_char]:
    """The first `nbytes` of a file, mapped to a multiple of 2 MiB until the last object that uses the buffer is gone.

    Raises:
        OSError: it cannot be mapped.
    """
    if nbytes <= 0:
        raise OSError(f"{nbytes} bytes cannot be mapped")
    # Room enough to hold such an address; the file is then mapped over a part of it.
    room = _mmap(None, nbytes + HUGE_PAGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-room // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = -(-(start + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    room_end = -(-(room + nbytes + HUGE_PAGE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _mmap(start, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(room, room_end - room)
        raise
    for unused, length in ((room, start - room), (end, room_end - end)):
        if length:
            _libc.munmap(unused, length)
    buffer = (ctypes.c_char * nbytes).from_address(start)
    weakref.finalize(buffer, _libc.munmap, start, end - start).atexit = False
    return buffer


def collapse(buffer: ctypes.Array[ctypes.c_char]) -> bool:
    """Have the kernel put a new, writable mapping into huge pages, all of it at once, which takes less time than
    filling it bit by bit. False where it cannot (older than Linux 6.1, no room in one piece, smaller than such a page):
    nothing is lost then but speed."""
    whole = len(buffer) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    for start in range(0, whole, HUGE_PAGE_BYTES):
        buffer[start] = b"\0"  # it takes no range of which nothing is there
    return whole > 0 and _libc.madvise(ctypes.addressof(buffer), whole, _MADV_COLLAPSE) == 0


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return int(result)
