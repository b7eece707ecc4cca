"""The private folder of a server's sockets, and removing the folders of servers that crashed.

A folder is named `oasis-<uid>-<pid>-<start>-<random>`, where `start` is when the process started, in clock ticks since
boot: a process id is used again, the pair is not. Its owner also holds a lock in it, since a process in another
container that shares the folder above looks as if it were gone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

# `sockaddr_un` has 108 bytes, one of them for the end.
MAX_SOCKET_PATH = 107
# Longest name that a socket gets in the folder.
MAX_SOCKET_NAME = 24
# Between making a folder and locking it a server needs microseconds.
UNLOCKED_SECONDS = 60.0

_NAME = re.compile(r"oasis-(?P<uid>\d+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}")


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])  # field 22; the name in brackets may hold anything


def bases() -> list[Path]:
    """Where folders may lie, best first."""
    places = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    return list(dict.fromkeys(Path(place) for place in places if place and os.path.isabs(place)))


class EndpointFolder:
    """A folder that only this user can enter. Making one removes what crashed servers of this user left."""

    def __init__(self) -> None:
        """
        Raises:
            OSError: no folder can be made anywhere.
        """
        pid = os.getpid()
        name = f"oasis-{os.getuid()}-{pid}-{process_start(pid)}-{secrets.token_hex(4)}"
        for base in bases():
            remove_leftovers(base)
        self.path = _make(name)
        self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def endpoint(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def forget(self, name: str) -> None:
        """Remove the socket that a killed worker left."""
        (self.path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder; a second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _make(name: str) -> Path:
    refusals = []
    for base in bases():
        path = base / name
        if len(os.fsencode(path)) + 1 + MAX_SOCKET_NAME > MAX_SOCKET_PATH:
            refusals.append(f"{base}: too long for a socket's path")
            continue
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            refusals.append(f"{base}: {error.strerror}")
            continue
        return path
    raise OSError(f"no folder for the sockets of the prefetch workers: {'; '.join(refusals)}")


def remove_leftovers(base: Path) -> list[Path]:
    """Remove this user's folders in `base` whose server is gone; returns them."""
    removed: list[Path] = []
    try:
        names = sorted(os.listdir(base))
    except OSError:
        return removed
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or int(match["uid"]) != os.getuid():
            continue
        path = base / name
        if process_start(int(match["pid"])) != int(match["start"]) and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            logger.info("removed %s, left by a server that is gone", path)
            removed.append(path)
    return removed


def _is_abandoned(path: Path) -> bool:
    """Whether this user's folder has no owner that holds its lock."""
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return time.time() - status.st_mtime > UNLOCKED_SECONDS
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
