"""Compiling the C++ sources for this machine. Without a compiler the torch code does the same work, more slowly."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = tuple(Path(__file__).with_name(name) for name in ("step.cpp", "linear.cpp"))
# -march=native: the library never leaves this machine, and its name carries the processor's flags. The math flags let
# the compiler vectorise sums over dimensions. Not -ffast-math: linked into a library it makes the whole process flush
# denormals, and it takes away the infinities that mark forced pages.
FLAGS = (
    "-O3",
    "-march=native",
    "-fassociative-math",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-std=c++17",
    "-fopenmp",
    "-shared",
    "-fPIC",
)
# Set to 0 to run the torch code instead.
SWITCH = "OASIS_NATIVE"


def cache_dir() -> Path:
    base = os.environ.get("OASIS_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "oasis-sglang"
    )
    return Path(base) / "native"


def _fingerprint(compiler: str) -> str:
    flags = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith(("flags", "Features", "model name")):
            flags += line
            if line.startswith(("flags", "Features")):
                break
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (*(source.read_text() for source in SOURCES), " ".join(FLAGS), version, platform.machine(), flags)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def compile_library() -> Path:
    """Path of the library for this machine, compiled unless it is there already.

    Raises:
        RuntimeError: no compiler, or it failed.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        raise RuntimeError("no C++ compiler (g++) was found")
    target = cache_dir() / f"oasis-{_fingerprint(compiler)}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed into place when complete, so that two servers starting at once both find a whole file.
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    try:
        run = subprocess.run(
            [compiler, *FLAGS, *map(str, SOURCES), "-o", name], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"{compiler} failed: {run.stderr.strip()[-500:]}")
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)
    return target


@functools.cache
def library_path() -> Path | None:
    """Where the library lies, for processes that load it themselves; None where there is none (logged once)."""
    if os.environ.get(SWITCH, "1") == "0":
        return None
    try:
        return compile_library()
    except (OSError, RuntimeError) as error:
        logger.warning("Oasis runs decode steps in torch alone, which is slower: %s", error)
        return None


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """The library, or None where it is switched off or cannot be built (logged once)."""
    path = library_path()
    if path is None:
        return None
    # torch must come first: the library's OpenMP then is torch's, with one pool of threads for both.
    import torch  # noqa: F401

    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("Oasis runs decode steps in torch alone, which is slower: %s", error)
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.oasis_refresh.restype = number
    library.oasis_refresh.argtypes = (address, ctypes.c_int32)
    library.oasis_linear_is_fast.restype = ctypes.c_int32
    library.oasis_adopt.restype = number
    library.oasis_adopt.argtypes = (address, number, address, number, address, number)
    for name, arguments in (
        ("oasis_take_misses", (address, number, address)),
        ("oasis_lend", (address, number, address, number, *[address] * 4)),
        ("oasis_linear", (*[number] * 3, *[address] * 3)),
        ("oasis_load", (*[number] * 5, *[address] * 6)),
        ("oasis_gather", (*[number] * 5, *[address] * 4, number, *[address] * 2)),
        ("oasis_write_tokens", (*[number] * 4, *[address] * 4, *[number] * 2, *[address] * 2)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments
    return library
