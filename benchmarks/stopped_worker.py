"""What does a step lose while its prefetch worker stands still?

One server with `miss_policy: skip` decodes long documents twice: undisturbed, and with its worker stopped (SIGSTOP) for
half a minute in the midst of it, then let go on (SIGCONT). Reported for that time, and for as long a time in the
undisturbed run: the time between two tokens of a request (median and 99th percentile) and what prefetching costs the
rank process; and how soon after SIGCONT the worker was in service, and whether every request was served. Under `skip` a
step does without pages that are late, so it should not be slower.
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

FIRST_STEPS = 8  # before the stop
LOOK_EVERY = 0.05  # seconds


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__)
    parser.add_argument("--documents", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the stop lasts (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=280, help="tokens each answer has (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="token budget (default: %(default)s)")
    parser.add_argument("--fetch-ratio", type=float, default=0.1, help="fetch cap (default: %(default)s)")
    parser.set_defaults(workers=1)
    return parser


class Span(threading.Thread):
    """Some time within a run, in which the worker stands still if it is to."""

    def __init__(self, client: Client, seconds: float, *, stopped: bool) -> None:
        super().__init__(daemon=True)
        self._client, self._seconds, self._stopped = client, seconds, stopped
        self.start_time = self.end_time = 0.0  # of `time.perf_counter`
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] = {}
        self.return_seconds: float | None = None  # from SIGCONT to the first look that found it in service

    def run(self) -> None:
        first = self._client.oasis()["decode_steps_total"]
        while (self.before or self._client.oasis())["decode_steps_total"] < first + FIRST_STEPS:
            time.sleep(LOOK_EVERY)
        self.before = self._client.oasis()
        pid = int(self.before["prefetch_worker_pids"][0])
        if self._stopped:
            os.kill(pid, signal.SIGSTOP)
        self.start_time = time.perf_counter()
        time.sleep(self._seconds)
        self.after = self._client.oasis()
        self.end_time = time.perf_counter()
        if self._stopped:
            os.kill(pid, signal.SIGCONT)
            while not self._client.oasis()["prefetch_workers_ready"]:
                time.sleep(LOOK_EVERY)
            self.return_seconds = time.perf_counter() - self.end_time

    def gaps(self, answer: Answer) -> list[float]:
        """Milliseconds between two tokens of one request."""
        times = [when for when, _ in answer.arrivals if self.start_time <= when <= self.end_time]
        return [1000 * (b - a) for a, b in itertools.pairwise(times)]

    def grown(self, key: str) -> float:
        return float(self.after[key]) - float(self.before[key])


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = common.model_path(arguments)
    documents = Documents(model)
    prompts = [documents.text(i, arguments.tokens) for i in range(arguments.documents)]
    variant = next(v for v in variants(arguments) if v.name == "workers")
    results: dict[str, Any] = {"flags": variant.flags}
    with common.started(arguments, variant, model, report.console) as (_, client):
        ask_all(client, prompts, greedy(4, ignore_eos=True))
        for name, stopped in (("undisturbed", False), ("stopped", True)):
            span = Span(client, arguments.seconds, stopped=stopped)
            span.start()
            answers = ask_all(client, prompts, greedy(arguments.new_tokens, ignore_eos=True))
            span.join()
            between = span.gaps(answers[0])
            steps = span.grown("decode_steps_total")
            results[name] = {
                "ms_median": statistics.median(between),
                "ms_p99": statistics.quantiles(between, n=100)[98],
                "gaps_ms": between,
                "rank_ms_per_step": 1000 * span.grown("prefetch_rank_seconds_total") / steps,
                "served": sum(answer.tokens == arguments.new_tokens for answer in answers),
                "seconds_to_return": span.return_seconds,
                **{
                    key: span.grown(f"prefetch_{key}_total")
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
            name, each["ms_median"], each["ms_p99"], each["rank_ms_per_step"], each["served"],
            None if back is None else f"{back:.2f}", int(each["used_pages"]),
            int(each["late_pages"] + each["dropped_pages"]),
        ))  # fmt: skip
    report.table(
        f"{arguments.documents} × {arguments.tokens:,} tokens, {arguments.seconds:g} s, one worker",
        ("worker", "ms/step", "p99", "rank: ms/step", "served", "return (s)", "pages used", "late or dropped"), rows,
        caption="Rank: what prefetching costs the rank process. Return: from SIGCONT to being in service.",
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
