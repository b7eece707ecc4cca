"""Where the time of a decode step goes: a sampling profiler on a running server's rank process, stacks sorted by part.

py-spy reads the stacks from outside, so the server runs as it always does but for the moments in which it is read.
Compiled code and other threads count for the Python function that waits for them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from oasis_sglang.serving import Server

RATE = 200  # stacks per second

#: Parts in order of precedence: a stack belongs to the first that one of its frames, (function, end of the file's
#: path), names.
PARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("draft", (("draft", "eagle_worker_v2.py"),)),
    ("draft extend", (("_draft_extend_for_decode", "eagle_worker_v2.py"),)),
    ("sampling, acceptance", (("eagle_sample", "eagle_utils.py"), ("sample", "model_runner.py"))),
    ("commit to the host pool", (("finish_decode", "tier.py"),)),
    ("plan of the step", (("init_forward_metadata", "attention/backend.py"),)),
    ("page selection", (("_select", "tier.py"), ("_recall", "tier.py"))),
    ("page fetches", (("load", "transfer.py"),)),
    ("attention", (("_attend", "tier.py"),)),
    ("rest of the attention backend", (("decode", "tier.py"),)),
    ("LM head", (("_get_logits", "logits_processor.py"), ("_compute_lm_head", "logits_processor.py"))),
    ("linear layers", (("linear", "platform/linear.py"), ("apply", "unquant.py"))),
    ("rest of the model", (("forward", "model_runner.py"),)),
)
REST = "scheduler"
NAMES = (*(name for name, _ in PARTS), REST)


def part_of(stack: str) -> str | None:
    """The part that a line of py-spy's raw format, frames from outermost to innermost, belongs to.

    None for threads other than the scheduler's loop.
    """
    frames = [frame.rpartition(" (") for frame in stack.split(";")]
    # "Class.method (end of the path:line)"
    named = [(name.rpartition(".")[2], place.rpartition(":")[0]) for name, _, place in frames]
    if not any(name.startswith("event_loop") for name, _ in named):
        return None
    for part, wanted in PARTS:
        if any(name == function and path.endswith(file) for name, path in named for function, file in wanted):
            return part
    return REST


def shares(raw: str) -> dict[str, float]:
    """Share of each part in py-spy's raw output, `frames count` a line."""
    counts: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        if (part := part_of(stack)) is not None:
            counts[part] += int(count)
    total = sum(counts.values())
    if not total:
        raise RuntimeError("py-spy saw no stack of the scheduler")
    return {name: counts[name] / total for name in NAMES if counts[name]}


def sampler() -> str:
    """Path of py-spy.

    Raises:
        RuntimeError: it is not installed.
    """
    beside = Path(sys.executable).with_name("py-spy")
    if found := str(beside) if beside.exists() else shutil.which("py-spy"):
        return found
    raise RuntimeError("py-spy is not installed: pip install 'oasis-sglang[bench]'")


@contextmanager
def sampled(server: Server, into: dict[str, float]) -> Iterator[None]:
    """Sample the server's rank process for the length of a block; `into` gets the share of each part."""
    assert server.process is not None
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "stacks"
        command = [
            sampler(), "record", "--pid", str(_rank_process(server.process.pid)), "--rate", str(RATE),
            "--format", "raw", "--output", str(output),
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            yield
        finally:
            process.send_signal(2)  # as Ctrl-C does: py-spy then writes what it has
            _, said = process.communicate(timeout=60)
        if not output.exists():
            raise RuntimeError(f"py-spy cannot read the server (ptrace may be forbidden, uid {os.getuid()}): {said}")
        into.update(shares(output.read_text()))


def _rank_process(launcher: int) -> int:
    for child in psutil.Process(launcher).children(recursive=True):
        if "scheduler" in " ".join(child.cmdline()):
            return child.pid
    raise RuntimeError("the server has no scheduler process")
