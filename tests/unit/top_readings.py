"""Readings of a server's metrics for tests of `oasis top`."""

from __future__ import annotations

import io
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from rich.console import Console

from oasis_sglang.top.frame import Frame, History
from oasis_sglang.top.render import View
from oasis_sglang.top.scrape import Scrape, parse

URL = "http://127.0.0.1:30000"
MODEL = "SmolLM2-135M-Instruct"

GAUGES = {
    "num_running_reqs": 8,
    "num_queue_reqs": 3,
    "oasis_host_total_tokens": 141_200,
    "oasis_host_used_tokens": 70_600,
    "oasis_device_total_tokens": 35_296,
    "oasis_device_used_tokens": 17_648,
    "oasis_host_pool_bytes": 3.25e9,
    "oasis_device_pool_bytes": 0.81e9,
    "oasis_summary_bytes": 0.2e9,
    "oasis_working_sets": 8,
    "oasis_transfers_in_flight": 0,
}
BEFORE = {
    "oasis_selected_pages_total": 10_000,
    "oasis_missed_pages_total": 1_000,
    "oasis_dropped_pages_total": 100,
    "oasis_fetched_pages_total": 900,
    "oasis_fetched_bytes_total": 9e6,
    "oasis_stall_seconds_total": 1.0,
    "oasis_decode_steps_total": 40,
    "oasis_verify_steps_total": 80,
    "oasis_accepted_tokens_total": 160,
    "oasis_lookahead_pages_total": 800,
    "oasis_lookahead_agreed_pages_total": 700,
    "realtime_tokens_total:decode": 320,
    "realtime_tokens_total:prefill_compute": 56_000,
}
# Four seconds and 40 steps later.
AFTER = {
    "oasis_selected_pages_total": 50_000,
    "oasis_missed_pages_total": 3_000,
    "oasis_dropped_pages_total": 300,
    "oasis_fetched_pages_total": 2_500,
    "oasis_fetched_bytes_total": 25e6,
    "oasis_stall_seconds_total": 1.5,
    "oasis_decode_steps_total": 80,
    "oasis_verify_steps_total": 160,
    "oasis_accepted_tokens_total": 352,
    "oasis_lookahead_pages_total": 1_000,
    "oasis_lookahead_agreed_pages_total": 830,
    "realtime_tokens_total:decode": 640,
    "realtime_tokens_total:prefill_compute": 58_000,
}
WORKER_GAUGES = {
    "oasis_prefetch_workers": 2,
    "oasis_prefetch_workers_ready": 2,
    "oasis_prefetch_queued_plans": 5,
}
WORKERS_BEFORE = {
    "oasis_prefetch_issued_pages_total": 0,
    "oasis_prefetch_used_pages_total": 0,
    "oasis_prefetch_late_pages_total": 0,
    "oasis_prefetch_wasted_pages_total": 0,
    "oasis_prefetch_copy_seconds_total": 0,
    "oasis_prefetch_worker_restarts_total": 1,
}
WORKERS_AFTER = {
    "oasis_prefetch_issued_pages_total": 1_200,
    "oasis_prefetch_used_pages_total": 1_000,
    "oasis_prefetch_late_pages_total": 40,
    "oasis_prefetch_wasted_pages_total": 160,
    "oasis_prefetch_copy_seconds_total": 2.0,
    "oasis_prefetch_worker_restarts_total": 1,
}
NO_SPECULATION = {
    "oasis_verify_steps_total": 0,
    "oasis_accepted_tokens_total": 0,
    "oasis_lookahead_pages_total": 0,
    "oasis_lookahead_agreed_pages_total": 0,
}
PER_STEP = ("selected", "missed", "dropped")


def labels(rank: int = 0, **more: str) -> dict[str, str]:
    """As SGLang's scheduler labels its metrics."""
    ranks = {"tp_rank": str(rank), "pp_rank": "0", "moe_ep_rank": str(rank)}
    return {"model_name": MODEL, "engine_type": "unified", **ranks, **more}


def exposition(*ranks: dict[str, float]) -> str:
    """The metrics of a server whose ranks have these values, in Prometheus' text format."""
    registry = CollectorRegistry()
    made: dict[str, Any] = {}
    for rank, values in enumerate(ranks):
        for key, value in values.items():
            name, _, mode = key.partition(":")
            its = labels(rank, mode=mode) if mode else labels(rank)
            kind = Counter if name.endswith("_total") else Gauge
            if name not in made:
                made[name] = kind(f"sglang:{name}", "Multiprocess metric", list(its), registry=registry)
            metric = made[name].labels(**its)
            metric.inc(value) if kind is Counter else metric.set(value)
    return generate_latest(registry).decode()


def reading(seconds: float, *ranks: dict[str, float]) -> Scrape:
    return parse(exposition(*ranks), seconds, URL)


def frame_of(before: dict[str, float], after: dict[str, float], ranks: int = 1) -> Frame:
    history = History()
    history.add(reading(100.0, *[before] * ranks))
    return history.add(reading(104.0, *[after] * ranks))


def lines_of(view: View | Frame, width: int = 80, **options: Any) -> list[str]:
    if isinstance(view, Frame):
        view = View(URL, view, datetime(2026, 1, 2, 14, 2, 11))
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(view)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]
