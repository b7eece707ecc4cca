"""Tests of Triton kernels on a CPU: those marked `interpreter` run in a process whose Triton interprets.

Whether it does is settled when triton is imported: `tl.sum`, `tl.sort` and the like are themselves decorated then, and
ones that are to be compiled cannot be called by a kernel that is interpreted, nor the other way round. And triton is
imported by torch, so by whatever test comes first. So the marked tests of a module run together in one process of
their own, started with TRITON_INTERPRET=1; each passes, is skipped or fails here as it did there. In a run that was
itself started with the variable set they run where they are.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

MARKER = "interpreter"
SECONDS = 800


class Outcome(NamedTuple):
    kind: str  # passed, failure, error or skipped
    text: str


class _Run(NamedTuple):
    outcomes: dict[str, Outcome]  # by test name
    output: str


_runs: dict[Path, _Run] = {}


def is_elsewhere(item: pytest.Function) -> bool:
    """Whether a test must run in another process."""
    return item.get_closest_marker(MARKER) is not None and os.environ.get("TRITON_INTERPRET") != "1"


def report(item: pytest.Function) -> None:
    """Pass, skip or fail as the test did in the process of its module's tests, which the first of them starts."""
    if item.path not in _runs:
        _runs[item.path] = _run([x for x in item.session.items if x.path == item.path], item.config.rootpath)
    run = _runs[item.path]
    outcome = run.outcomes.get(item.name)
    if outcome is None:
        pytest.fail(f"the process of these tests ended without a report:\n{run.output[-4000:]}", pytrace=False)
    if outcome.kind == "skipped":
        pytest.skip(outcome.text)
    if outcome.kind != "passed":
        pytest.fail(outcome.text, pytrace=False)


def _run(items: list[pytest.Item], root: Path) -> _Run:
    with tempfile.TemporaryDirectory() as folder:
        report_path = Path(folder) / "report.xml"
        tests = [x.nodeid for x in items if x.get_closest_marker(MARKER)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report_path}", *tests]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        done = subprocess.run(
            command,
            cwd=root,
            env=environment,
            timeout=SECONDS,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        outcomes = {}
        if report_path.exists():
            for case in ElementTree.parse(report_path).iter("testcase"):
                bad = next((x for x in case if x.tag in ("failure", "error", "skipped")), None)
                text = "" if bad is None else f"{bad.get('message')}\n{bad.text or ''}"
                outcomes[case.get("name", "")] = Outcome("passed" if bad is None else bad.tag, text)
        return _Run(outcomes, done.stdout)
