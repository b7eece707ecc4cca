"""Results as a table for people and as JSON for programs, each with what is needed to repeat them."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("oasis-sglang", "sglang", "torch", "transformers")


def command_line() -> str:
    """This run's command in a form that can be pasted: `python -m` where it was started so."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = ["-m", spec.name.removesuffix(".__main__")] if spec is not None else [sys.argv[0]]
    return shlex.join(["python", *program, *sys.argv[1:]])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    try:
        describe = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return describe.stdout.strip()


def environment() -> dict[str, Any]:
    """Where and on what a result was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in PACKAGES},
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


class Report:
    """Collects one run's results; prints tables as they come, writes one JSON file at the end."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.name = name
        self.console = console or Console()
        # Taken at the start: the load average should be what the run met, not what it made.
        self.environment = environment()
        self.results: dict[str, Any] = {}

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> None:
        """Print a table; the first column is text, the others are right-aligned."""
        table = Table(title=title, caption=caption or None, title_justify="left", caption_justify="left")
        for position, column in enumerate(columns):
            table.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(_cell(value) for value in row))
        self.console.print(table)

    def write(self, path: str | os.PathLike[str]) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "benchmark": self.name,
            "command": command_line(),
            "environment": self.environment,
            "results": self.results,
        }
        path.write_text(json.dumps(content, indent=2, default=str) + "\n")
        self.console.print(f"Written to {path}. Repeat with: {command_line()}", markup=False, soft_wrap=True)
        return path


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:,.1f}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
