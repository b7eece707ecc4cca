"""Are the GPU kernels right, how near do they come to what the device can do, and what does sparse decoding gain by it?

    python -m benchmarks.gpu_device            on one GPU; under 8 minutes on an H200
    python -m benchmarks.gpu_device --tiny     the same code on the CPU, in Triton's interpreter; its times mean nothing

Needs torch, triton, rich and requests; neither SGLang nor a checkpoint. Three stages, each in a process of its own and
with a time of its own, whose results are written to the JSON as soon as it is over:

    checks      every kernel against its twin in torch
    bandwidth   what the kernels read and write in a second, against copies; what fetching costs a matrix product
    decode      decode steps of a model of Qwen3-8B's shape, weights, keys and values random, dense and sparse

What would not end in its stage's time is left out and says so, and so is FlashInfer where its kernels cannot be
compiled; a kernel that hangs or breaks the device costs its own figures only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import common, gpu_table
from benchmarks.gpu_stage import Stage, StageRun
from oasis_sglang.serving import Report

# What becomes of items that have no results.
UNUSUAL = ("failed", "skipped", "not_measured")
# What a stage leaves of its time the later ones may take.
STAGES = (
    Stage("checks", "benchmarks.gpu_checks", 200),
    Stage("bandwidth", "benchmarks.gpu_bandwidth", 120),
    Stage("decode", "benchmarks.gpu_decode", 460),
)
# Of all stages together; on a CPU only what keeps a hung one from staying.
SECONDS, TINY_SECONDS = 465.0, 1800.0


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file (default: a new one in results/tmp/)")
    return parser


def device() -> dict[str, Any]:
    """What the driver says of the first GPU, without a CUDA context in this process."""
    query = "name,driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit"
    command = ["nvidia-smi", "--id=0", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return {"not asked": f"{type(error).__name__}: {error}"}
    return dict(zip(query.split(","), (x.strip() for x in answer.stdout.strip().split(",")), strict=False))


def run(arguments: argparse.Namespace, report: Report, path: Path) -> None:
    """All stages, one after the other; after each of them the results so far are written."""
    end = time.monotonic() + (TINY_SECONDS if arguments.tiny else SECONDS)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    for stage in STAGES:
        with Progress(*columns, console=report.console) as progress:
            task = progress.add_task(f"{stage.name}: start", total=None)

            def announce(name: str, settled: int, total: int, task: Any = task, stage: Stage = stage) -> None:
                progress.update(task, description=f"{stage.name}: {name}", completed=settled, total=total)

            left = end - time.monotonic()
            allowed = left if arguments.tiny else min(stage.seconds, left)
            report.results[stage.name] = outcome = StageRun(stage, arguments.tiny, allowed, announce).run()
            settled = sum(len(outcome[kind]) for kind in ("results", *UNUSUAL))
            progress.update(task, description=stage.name, completed=settled, total=settled)
        report.results["ratios"] = gpu_table.ratios(report.results)
        report.write(path)
        for kind in UNUSUAL:
            for name, why in outcome[kind].items():
                text = f"{stage.name}: {name} {kind.replace('_', ' ')}: {why}"
                report.console.print(text, markup=False, soft_wrap=True)


def main() -> int:
    arguments = arguments_parser().parse_args()
    if arguments.tiny:
        os.environ["TRITON_INTERPRET"] = "1"  # settled when triton is imported, which only the stages' processes do
    report = Report("gpu_device")
    report.results = {"tiny": arguments.tiny, "times_mean_something": not arguments.tiny, "device": device()}
    run(arguments, report, common.destination(report, arguments))
    gpu_table.show(report)
    return 0 if gpu_table.passed(report.results) else 1


if __name__ == "__main__":
    sys.exit(main())
