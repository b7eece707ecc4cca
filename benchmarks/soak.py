"""Many random requests on small pools; afterwards nothing may be left: no slot, no page, no memory, no error.

Requests differ in length, answer, sampling and fate: most finish, some clients go away (before the first token or in
the middle), some are aborted by id, now and then the cache is flushed under load. The pools are small, so that
requests wait, are retracted and resumed. Everything is drawn from the seed; only the interleaving differs from run to
run. The exit code is 0 when every check holds.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import common
from oasis_sglang.serving import Answer, Client, Documents, Report, RequestFailed, Server, ask_all, greedy

FATES = {"finish": 70, "leave": 12, "leave_before_first": 6, "abort": 12}
TROUBLE = re.compile(r"Traceback \(most recent|\bleak|\b\w*(?:Error|Exception)\b|\bCRITICAL\b", re.IGNORECASE)
# SGLang's own way to end a request whose client is gone is to raise through its web framework.
EXPECTED = re.compile(r"is disconnected from the client side")
# Counters of `/server_info` that must be zero once the cache is flushed.
MUST_BE_ZERO = ("host_tokens_written", "device_tokens_used", "working_sets", "transfers_in_flight")
SAMPLE_EVERY = 2.0  # seconds
RETRACT_EVERY = 40  # steps


@dataclass(frozen=True)
class Work:
    """One request, decided in advance."""

    rid: str
    prompt: list[int]
    sampling: dict[str, Any]
    streamed: bool
    fate: str
    after_tokens: int  # when a `leave` or `abort` happens
    flush: bool  # whether to ask for a flush just before


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__)
    parser.add_argument("--requests", type=int, default=300, help="random requests (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=12, help="at once (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=7500, help="longest prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=int, default=512, help="token budget (default: %(default)s)")
    parser.add_argument("--device-tokens", type=int, default=12_000, help="device pool (default: %(default)s)")
    parser.add_argument("--host-ratio", type=float, default=1.0, help="host pool / device pool (default: %(default)s)")
    parser.add_argument("--dense", action="store_true", help="soak stock SGLang instead, to tell its faults from ours")
    parser.add_argument("--rss-limit", type=float, default=0.05, help="growth of memory that counts as flat")
    return parser


def plan(arguments: argparse.Namespace, documents: Documents) -> list[Work]:
    chance = random.Random(arguments.seed)
    works = []
    for number in range(arguments.requests):
        # Log-uniform: every magnitude of lengths is as likely, and the soak stays affordable.
        length = max(1, round(arguments.longest ** chance.random()))
        length = chance.choice((length, length, chance.randint(1, arguments.longest)))
        # Few texts: many prompts share a prefix with an earlier one and hit the radix cache.
        prompt = documents.text(chance.randrange(12), length)
        sampling: dict[str, Any] = greedy(chance.choice((1, 4, 16, 64, 256)), ignore_eos=chance.random() < 0.7)
        if chance.random() < 0.3:
            sampling |= {"temperature": 0.8, "top_p": 0.9}
        if chance.random() < 0.2:
            sampling["stop"] = [" the", "\n\n"]
        fate = chance.choices(list(FATES), list(FATES.values()))[0]
        works.append(
            Work(
                rid=f"soak-{arguments.seed}-{number}",
                prompt=prompt,
                sampling=sampling,
                streamed=fate == "leave" or chance.random() < 0.6,
                fate=fate,
                after_tokens=chance.randint(1, 40),
                flush=chance.random() < 0.05,
            )
        )
    return works


def perform(client: Client, work: Work) -> str:
    """Send one request and let it meet its fate; returns what became of it."""
    if work.flush:
        try:
            client.flush_cache(wait=None)
        except RequestFailed as error:
            if error.status != 400:  # 400: busy, and that is a proper answer
                raise
    try:
        if work.fate == "leave_before_first":
            # The read times out before a long prefill ends: a client that goes away while it waits.
            impatient = Client(client.url, timeout=0.2 + work.after_tokens / 40)
            impatient.generate(work.prompt, work.sampling, rid=work.rid)
            return "finished"
        if work.fate == "abort":
            threading.Timer(work.after_tokens / 10, client.abort, (work.rid,)).start()
        if not work.streamed:
            meta = client.generate(work.prompt, work.sampling, rid=work.rid)["meta_info"]
        else:
            meta = client.stream(work.prompt, work.sampling, on_chunk=_stay_until(work), rid=work.rid).meta
    except requests.Timeout:
        return "left"
    except RequestFailed as error:
        # An aborted request that had not started is answered with an error status.
        if work.fate == "abort" and "abort" in str(error).lower():
            return "aborted"
        raise
    reason = (meta.get("finish_reason") or {}).get("type", "left")
    return {"abort": "aborted", "left": "left"}.get(reason, "finished")


def _stay_until(work: Work) -> Callable[[Answer], bool]:
    return lambda answer: work.fate != "leave" or answer.tokens < work.after_tokens


class MemoryWatch(threading.Thread):
    """Samples the server's resident memory until stopped."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.samples: list[tuple[float, int]] = []
        self._ended = threading.Event()

    def run(self) -> None:
        start = time.monotonic()
        while not self._ended.wait(SAMPLE_EVERY):
            self.samples.append((time.monotonic() - start, self.server.resident_bytes()))

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def growth(self) -> dict[str, float]:
        """Line through the second half of the samples: what start-up and warm caches added is behind it by then.

        Scratch memory of a long prefill comes and goes, so each point is the lowest of a stretch of samples.
        """
        half = self.samples[len(self.samples) // 2 :]
        stretch = max(len(half) // 20, 1)
        lows = [min(half[i : i + stretch], key=lambda sample: sample[1]) for i in range(0, len(half), stretch)]
        if len(lows) < 3:
            return {"bytes_per_hour": 0.0, "share": 0.0}
        slope, start = statistics.linear_regression(*zip(*lows, strict=True))
        begin, end = lows[0][0], lows[-1][0]
        return {"bytes_per_hour": slope * 3600, "share": slope * (end - begin) / (start + slope * begin)}


def trouble_in(log: str) -> list[str]:
    """Lines of a running server's log that speak of an error, without tracebacks that end in an expected one."""
    _, ready, after = log.partition("The server is fired up")  # start-up lists optional imports that failed
    log = after if ready else log
    found: list[str] = []
    pending: list[str] = []  # of a traceback not yet known to be expected
    for line in log.splitlines():
        if EXPECTED.search(line):
            pending = []
        elif "Traceback (most recent" in line:
            found += pending
            pending = [line]
        elif TROUBLE.search(line) and "server_args=" not in line:
            (pending if pending and not line.startswith("[") else found).append(line)
    return found + pending


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = common.model_path(arguments)
    documents = Documents(model)
    works = plan(arguments, documents)
    variant = common.dense(round(arguments.device_tokens * arguments.host_ratio)) if arguments.dense else common.oasis(
        arguments, "oasis", f"oasis, budget {arguments.budget:,}",
        {"token_budget": arguments.budget, "host_to_device_ratio": arguments.host_ratio}, arguments.device_tokens,
    )  # fmt: skip
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Admitting requests as if answers were short lets the pool run out in mid-flight. That is too rare to count on, so
    # SGLang's own switch adds a retraction every so many steps; its variables reach the server with the environment.
    os.environ |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(RETRACT_EVERY)}
    flags = ["--schedule-conservativeness", "0.05"]
    with common.started(arguments, variant, model, report.console, flags) as (server, client):
        probe = [documents.text(0, 900)]
        before = ask_all(client, probe, greedy(16))[0].output_ids
        watch = MemoryWatch(server)
        watch.start()
        with Progress(*columns, console=report.console) as progress, ThreadPoolExecutor(arguments.concurrency) as pool:
            task = progress.add_task(variant.label, total=len(works))

            def one(work: Work) -> None:
                try:
                    outcomes[perform(client, work)] += 1
                except Exception as error:
                    failures.append(f"{work.rid} ({len(work.prompt)} tokens, {work.fate}): {error}")
                progress.advance(task)

            list(pool.map(one, works))
        time.sleep(1 + max(work.after_tokens for work in works) / 10)  # the last timers of aborts
        client.flush_cache(wait=300)  # fails unless the server becomes idle, by its own account
        time.sleep(3)  # SGLang's leak check runs once the scheduler has been idle for a moment
        watch.stop()
        state = client.oasis()
        used = client.loads()[0]["num_used_tokens"]
        after = ask_all(client, probe, greedy(16))[0].output_ids
        log = server.log()
    growth = watch.growth()
    retractions = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log)))
    checks = {
        "requests were retracted and resumed": retractions > 0,
        "every request was served, aborted or left": not failures,
        "slots in use after the flush: 0": used == 0,
        **{f"{name}: 0": state.get(name) == 0 for name in MUST_BE_ZERO if state},
        "the log is free of errors and leaks": not trouble_in(log),
        f"memory grows by less than {arguments.rss_limit:.0%}": growth["share"] < arguments.rss_limit,
        "the same answer before and after": before == after,
    }
    return {
        "server": {"label": variant.label, "flags": variant.flags},
        "outcomes": dict(outcomes),
        "retractions_logged": retractions,
        "failures": failures,
        "trouble": trouble_in(log),
        "memory": {**growth, "samples": watch.samples},
        "oasis_state": state,
        "checks": checks,
    }


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("soak")
    report.results = run(arguments, report)
    results = report.results
    report.table("Checks", ("what", "holds"), list(results["checks"].items()))
    counts = {**results["outcomes"], "retractions": results["retractions_logged"]}
    report.table("What happened", ("outcome", "requests"), list(counts.items()))
    report.console.print(f"Memory: {results['memory']['bytes_per_hour'] / 1e6:+.0f} MB per hour in the second half")
    for line in (results["failures"] + results["trouble"])[:20]:
        report.console.print(line, markup=False, soft_wrap=True)
    common.write(report, arguments)
    return 0 if all(results["checks"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
