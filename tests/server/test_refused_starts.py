"""Contract 10: starts that cannot work end, through the real command and the real model, with what to do instead."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from oasis_sglang.serving import oasis_flags

pytestmark = [pytest.mark.server, pytest.mark.slow]

# name -> (flags, what the output must say)
STARTS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "budget-below-one-page": (
        oasis_flags({"token_budget": 8}, 4096),
        ("token_budget=8 is below one page (page_size=16)", "use a multiple of 16, for example 2048"),
    ),
    "page-size-mismatch": (
        [*oasis_flags({"page_size": 32}, 4096), "--page-size", "16"],
        ("--page-size 16 and page_size=32 in --oasis-config differ", "use --page-size 32"),
    ),
    "host-pool-below-one-sequence": (
        oasis_flags({"token_budget": 1024, "host_to_device_ratio": 2.0}, 4096),
        ("host pool of 8192 tokens", "smaller than one sequence of 8192 tokens", "--context-length 8160 or less"),
    ),
    "device-pool-below-one-working-set": (
        oasis_flags({"token_budget": 2048, "host_to_device_ratio": 8.0}, 2048),
        ("device pool of 2048 tokens (--max-total-tokens=2048) cannot hold", "working set of 2608 tokens"),
    ),
}


@pytest.fixture(scope="module")
def starts(model_path: str, no_server: None) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All of them at once: each spends most of its time in imports."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model_path, "--port"]
    running = {
        name: subprocess.Popen(
            [*command, str(31900 + at), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for at, (name, (flags, _)) in enumerate(STARTS.items())
    }
    yield running
    for process in running.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("name", STARTS)
def test_refused(name: str, starts: dict[str, subprocess.Popen[str]]) -> None:
    output, _ = starts[name].communicate(timeout=900)
    assert starts[name].returncode != 0
    for words in STARTS[name][1]:
        assert words in output, output[-3000:]
    assert "The server is fired up" not in output
