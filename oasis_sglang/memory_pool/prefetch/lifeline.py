"""How a worker ends with its parent, however that ends.

Three ways, because each has a gap. The kernel's parent-death signal reaches a stopped worker too, but not one whose
parent died before it asked for the signal. A worker with another parent than it was started by knows that this has
happened. The pipe's other end closes with the parent even where the worker cannot see the parent's process id.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit if `parent` is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def parent_is_gone(parent: int, lifeline_fd: int) -> bool:
    """Whether the parent has ended. Nothing is ever written to the lifeline, so anything readable is its end."""
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    return bool(poll.poll(0)) or os.getppid() != parent
