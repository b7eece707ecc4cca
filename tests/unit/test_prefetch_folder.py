"""The folder of the sockets: private, short enough, gone after a crash, and never taken from a living server."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from oasis_sglang.memory_pool.prefetch import folder as module
from oasis_sglang.memory_pool.prefetch.folder import MAX_SOCKET_NAME, EndpointFolder, process_start, remove_leftovers
from tests.unit.prefetch_rig import RuntimeFolder


@pytest.fixture
def base():
    with RuntimeFolder() as runtime:
        yield runtime.path


def a_dead_process() -> tuple[int, int]:
    """Process id and start of a process that is gone."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process_start(child.pid)
    assert start is not None
    child.communicate()
    assert process_start(child.pid) != start
    return child.pid, start


def leave(base: Path, pid: int, start: int, *, uid: int | None = None, lock: bool = True) -> Path:
    path = base / f"oasis-{os.getuid() if uid is None else uid}-{pid}-{start}-0123abcd"
    path.mkdir(mode=0o700)
    (path / "plans-1").touch()
    if lock:
        (path / "lock").touch()
    return path


def drop(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def test_the_folder_is_private_and_removed(base: Path) -> None:
    folder = EndpointFolder()
    assert folder.path.parent == base
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    start = process_start(os.getpid())
    assert folder.path.name.startswith(f"oasis-{os.getuid()}-{os.getpid()}-{start}-")
    assert folder.endpoint("plans-1") == f"ipc://{folder.path}/plans-1"
    folder.forget("plans-1")  # was never there
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_two_servers_never_meet(base: Path) -> None:
    folders = [EndpointFolder() for _ in range(5)]
    assert len({folder.path for folder in folders}) == 5
    assert all(folder.path.is_dir() for folder in folders), "the next start left the living alone"
    for folder in folders:
        folder.remove()


def test_a_base_that_is_too_long_is_passed_over(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses socket paths beyond 107 bytes."""
    long = base / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    folder = EndpointFolder()
    assert long not in folder.path.parents
    assert len(str(folder.path / ("p" * MAX_SOCKET_NAME))) <= 107
    folder.remove()
    long.rmdir()


def test_no_base_at_all_says_why(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "bases", lambda: [base / "missing", base / ("y" * 90)])
    with pytest.raises(OSError, match=r"missing: No such file.*yyy: too long"):
        EndpointFolder()


def test_folders_of_crashed_servers_are_removed(base: Path) -> None:
    gone = leave(base, *a_dead_process())
    reused = leave(base, os.getpid(), 17)  # the process id is in use again, by a process that started later
    folder = EndpointFolder()
    assert not gone.exists()
    assert not reused.exists()
    folder.remove()


def test_folders_of_others_are_left_alone(base: Path) -> None:
    pid, start = a_dead_process()
    mine = process_start(os.getpid())
    assert mine is not None
    living = leave(base, os.getpid(), mine)
    foreign = leave(base, pid, start, uid=os.getuid() + 1)
    other = base / "oasis-1-2-3"
    other.mkdir()
    target = base / "elsewhere"
    target.mkdir()
    (target / "file").touch()
    link = base / f"oasis-{os.getuid()}-{pid}-{start}-00000000"
    link.symlink_to(target)
    assert remove_leftovers(base) == []
    assert (target / "file").exists()
    link.unlink()
    for path in (living, foreign, other, target):
        drop(path)


def test_a_locked_folder_is_somebodys(base: Path) -> None:
    """A server in another container that shares this folder: its process id means nothing here, its lock does."""
    path = leave(base, *a_dead_process())
    with open(path / "lock", "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_leftovers(base) == []
    assert remove_leftovers(base) == [path]


def test_a_folder_without_a_lock_is_removed_when_it_is_old(base: Path) -> None:
    """Its server may be about to lock it."""
    path = leave(base, *a_dead_process(), lock=False)
    assert remove_leftovers(base) == []
    os.utime(path, (0, 0))
    assert remove_leftovers(base) == [path]


def test_a_base_that_is_missing_is_no_error(base: Path) -> None:
    assert remove_leftovers(base / "missing") == []


def test_the_start_of_a_process_with_an_odd_name(tmp_path: Path) -> None:
    """The name in /proc/<pid>/stat may hold spaces and brackets."""
    odd = tmp_path / "a) R (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "60"])
    try:
        plain = subprocess.Popen(["/bin/sleep", "60"])
        try:
            first, second = process_start(child.pid), process_start(plain.pid)
            assert first is not None
            assert second is not None
            assert 0 <= second - first < 6000
        finally:
            plain.kill()
            plain.wait()
    finally:
        child.kill()
        child.wait()
    assert process_start(child.pid) is None
