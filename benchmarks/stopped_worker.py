"""What does a step lose while its prefetch worker stands still?

One server with `miss_policy: skip` decodes long documents twice: undisturbed, and with its worker stopped by SIGSTOP
whenever it is in service, its successors too. Reported: the time between two tokens of a request (median and 99th
percentile), how long the server was without a worker, and whether every request was served. Under `skip` a step does
without pages that are late, so it should not be slower.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import threading
import time
from typing import Any

from benchmarks import common
from benchmarks.prefetch import variants
from oasis_sglang.serving import Answer, Client, Documents, Report, ask_all, greedy

LOOK_EVERY = 0.5  # seconds


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__)
    parser.add_argument("--documents", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=280, help="tokens each answer has (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="token budget (default: %(default)s)")
    parser.add_argument("--fetch-ratio", type=float, default=0.1, help="fetch cap (default: %(default)s)")
    parser.set_defaults(workers=1)
    return parser


class Look(threading.Thread):
    """Asks the server for its state again and again, and stops the worker that it finds in service, if told to."""

    def __init__(self, client: Client, *, stop_workers: bool) -> None:
        super().__init__(daemon=True)
        self._client, self._stop_workers = client, stop_workers
        self._over = threading.Event()
        self.stopped: list[int] = []
        self.returns: list[float] = []  # seconds from a stop to the first look that found a successor in service

    def run(self) -> None:
        since = 0.0
        while not self._over.wait(LOOK_EVERY):
            state = self._client.oasis()
            if not state.get("prefetch_workers_ready"):
                continue
            pid = int(state["prefetch_worker_pids"][0])
            if self.stopped and pid == self.stopped[-1]:
                continue
            if self.stopped and since:
                self.returns.append(time.monotonic() - since)
            if self._stop_workers:
                os.kill(pid, signal.SIGSTOP)
                self.stopped.append(pid)
                since = time.monotonic()

    def end(self) -> None:
        self._over.set()
        self.join()


def gaps(answers: list[Answer]) -> list[float]:
    """Milliseconds between two tokens of one request, while all were decoding."""
    start, end = max(answer.first for answer in answers), min(answer.last for answer in answers)
    times = [when for when, _ in answers[0].arrivals if start <= when <= end]
    return [1000 * (b - a) for a, b in itertools.pairwise(times)]


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = common.model_path(arguments)
    documents = Documents(model)
    prompts = [documents.text(i, arguments.tokens) for i in range(arguments.documents)]
    variant = next(v for v in variants(arguments) if v.name == "workers")
    results: dict[str, Any] = {"flags": variant.flags}
    with common.started(arguments, variant, model, report.console) as (_, client):
        ask_all(client, prompts, greedy(4, ignore_eos=True))
        for name, disturbed in (("undisturbed", False), ("stopped", True)):
            look = Look(client, stop_workers=disturbed)
            before = client.oasis()
            look.start()
            answers = ask_all(client, prompts, greedy(arguments.new_tokens, ignore_eos=True))
            look.end()
            after = client.oasis()
            between = gaps(answers)
            results[name] = {
                "ms_median": statistics.median(between),
                "ms_p99": statistics.quantiles(between, n=100)[98],
                "gaps_ms": between,
                "served": sum(answer.tokens == arguments.new_tokens for answer in answers),
                "workers_stopped": len(look.stopped),
                "seconds_to_return": look.returns,
                **{
                    key: after[f"prefetch_{key}_total"] - before[f"prefetch_{key}_total"]
                    for key in ("used_pages", "late_pages", "dropped_pages", "worker_restarts")
                },
            }
    return results


def show(results: dict[str, Any], arguments: argparse.Namespace, report: Report) -> None:
    rows = []
    for name in ("undisturbed", "stopped"):
        each = results[name]
        back = each["seconds_to_return"]
        rows.append((
            name, each["ms_median"], each["ms_p99"], each["served"], each["workers_stopped"],
            f"{max(back):.1f}" if back else None, each["used_pages"], each["late_pages"] + each["dropped_pages"],
        ))  # fmt: skip
    report.table(
        f"{arguments.documents} × {arguments.tokens:,} tokens, {arguments.new_tokens} steps, one worker",
        ("worker", "ms/step", "p99", "served", "stops", "longest return (s)", "pages used", "late or dropped"), rows,
        caption="A stopped worker is noticed by its silence and replaced; it stands still for as long as that takes.",
    )  # fmt: skip


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("stopped_worker")
    report.results = run(arguments, report)
    show(report.results, arguments, report)
    common.write(report, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
