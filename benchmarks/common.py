"""What the benchmarks share: arguments, the servers they compare, where results go."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from oasis_sglang.serving import Client, Report, Server, oasis_flags

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Variant:
    """One way to start the server; `name` is its key in the JSON, `label` its row in the table."""

    name: str
    label: str
    flags: list[str] = field(default_factory=list)

    @property
    def is_oasis(self) -> bool:
        return "oasis" in self.flags


def parser(description: str) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    result = argparse.ArgumentParser(
        description=description.strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--model-path", metavar="DIR", help="model folder (default: the demo model, built if missing)")
    result.add_argument("--output", type=Path, metavar="FILE", help="JSON file (default: a new one in results/tmp/)")
    result.add_argument("--dtype", default="auto", help="--dtype of every server (default: %(default)s)")
    # A folder for each benchmark: two that run at once must not write over each other's logs, which some check.
    logs = RESULTS / "tmp" / "logs" / Path(sys.argv[0]).stem
    result.add_argument("--log-dir", type=Path, default=logs, help="where servers write their logs")
    result.add_argument("--server-flags", default="", metavar="'...'", help="more flags for every server")
    result.add_argument("--oasis-config", default="", metavar="key=value,...", help="more keys for every oasis server")
    return result


def model_path(arguments: argparse.Namespace) -> str:
    """The folder given, `OASIS_TEST_MODEL`, or the demo model."""
    if given := arguments.model_path or os.environ.get("OASIS_TEST_MODEL"):
        return str(given)
    from oasis_sglang.model import ensure_model

    return str(ensure_model().path)


def dense(tokens: int, label: str = "dense SGLang (torch_native)") -> Variant:
    """Stock SGLang, with a KV pool that holds `tokens`."""
    return Variant("dense", label, ["--max-total-tokens", str(tokens)])


def oasis(
    arguments: argparse.Namespace, name: str, label: str, config: Mapping[str, Any], device_tokens: int
) -> Variant:
    """The backend with `config`, overridden by the command line's `--oasis-config`."""
    return Variant(name, label, oasis_flags({**config, **_pairs(arguments.oasis_config)}, device_tokens))


def _pairs(text: str) -> dict[str, Any]:
    """`a=1,b=skip` as a mapping; numbers become numbers."""
    result: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        try:
            result[key.strip()] = float(value) if "." in value else int(value)
        except ValueError:
            result[key.strip()] = value.strip()
    return result


def server(arguments: argparse.Namespace, variant: Variant, model: str, more: list[str] | None = None) -> Server:
    """A server of this variant, not started."""
    flags = [*variant.flags, "--dtype", arguments.dtype, *(more or []), *shlex.split(arguments.server_flags)]
    return Server(model, flags, log_path=arguments.log_dir / f"{variant.name}.log")


@contextmanager
def started(
    arguments: argparse.Namespace, variant: Variant, model: str, console: Console, more: list[str] | None = None
) -> Iterator[tuple[Server, Client]]:
    """A running server of this variant and its client."""
    instance = server(arguments, variant, model, more)
    with console.status(f"Starting {variant.label}; log in {instance.log_path}"):
        instance.start()
    try:
        yield instance, Client(instance.url)
    finally:
        instance.stop()


@contextmanager
def standing_by(
    arguments: argparse.Namespace,
    chosen: Sequence[Variant],
    model: str,
    report: Report,
    prepare: Callable[[Variant, Client], None],
) -> Iterator[tuple[list[Server], Progress]]:
    """A server per variant, each prepared and then standing still (SIGSTOP), and a progress display."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with ExitStack() as stack, Progress(*columns, console=report.console) as progress:
        servers: list[Server] = []
        for variant in chosen:
            task = progress.add_task(f"{variant.label}: start, prefill every prompt once")
            servers.append(stack.enter_context(server(arguments, variant, model)))
            prepare(variant, Client(servers[-1].url))
            servers[-1].pause()
            progress.stop_task(task)
        yield servers, progress


def taking_turns(
    arguments: argparse.Namespace,
    chosen: Sequence[Variant],
    model: str,
    report: Report,
    prepare: Callable[[Variant, Client], None],
) -> Iterator[tuple[Variant, Client]]:
    """Start a server per variant, prepare each, then let them run one at a time, all in every round of
    `arguments.rounds`; the others stand still, so that slow drifts of the machine hit all alike. Another one goes first
    in every round: none always follows the same one."""
    with standing_by(arguments, chosen, model, report, prepare) as (servers, progress):
        task = progress.add_task("rounds", total=arguments.rounds)
        for number in range(arguments.rounds):
            for position in range(len(chosen)):
                at = (position + number) % len(chosen)
                progress.update(task, description=f"round {number + 1} of {arguments.rounds}: {chosen[at].label}")
                with servers[at].running():
                    yield chosen[at], Client(servers[at].url)
            progress.advance(task)


def destination(report: Report, arguments: argparse.Namespace) -> Path:
    """The file that the command line names, or a new one in results/tmp/."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return arguments.output or RESULTS / "tmp" / f"{report.name}-{stamp}.json"


def write(report: Report, arguments: argparse.Namespace) -> Path:
    """Write the report to its destination."""
    return report.write(destination(report, arguments))


def show_targets(report: Report) -> None:
    """A table of `report.results["targets"]`."""
    rows = [(row["what"], row["measured"], row["target"], row["met"]) for row in report.results["targets"]]
    report.table("Targets", ("what", "measured", "target", "met"), rows)


def finish(report: Report, arguments: argparse.Namespace) -> int:
    """Write the report; the exit code is 1 where `--check` was given and a target is missed."""
    write(report, arguments)
    missed = any(row["met"] is False for row in report.results["targets"])
    return 1 if arguments.check and missed else 0
