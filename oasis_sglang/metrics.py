"""What an operator sees: Prometheus metrics, and parts at the end of SGLang's decode log line."""

from __future__ import annotations

import logging
import time
from typing import Any

from oasis_sglang import coordinator

# name -> (key of `Coordinator.state()`, documentation). Every rank reports its own pools: sum ranks for bytes and
# pages, read one rank for tokens.
GAUGES = {
    "oasis_host_total_tokens": ("host_tokens_total", "Capacity of the host KV pool, in tokens."),
    "oasis_host_used_tokens": (
        "host_tokens_written",
        "Tokens whose KV the host pool holds, for running requests and the radix cache.",
    ),
    "oasis_device_total_tokens": ("device_tokens_total", "Capacity of the device KV pool, in tokens."),
    "oasis_device_used_tokens": (
        "device_tokens_used",
        "Device pool tokens owned by running requests, whether or not they hold data yet.",
    ),
    "oasis_host_pool_bytes": ("host_pool_bytes", "Size of this rank's host KV pool."),
    "oasis_device_pool_bytes": ("device_pool_bytes", "Size of this rank's device KV pool, summaries not counted."),
    "oasis_summary_bytes": ("summary_bytes", "Size of this rank's key summaries."),
    "oasis_working_sets": ("working_sets", "Requests that own device pages."),
    "oasis_transfers_in_flight": ("transfers_in_flight", "Copies between the pools that have not landed."),
}
# With `transfer: workers` alone.
WORKER_GAUGES = {
    "oasis_prefetch_queued_plans": ("prefetch_queued_plans", "Prefetch plans under way or waiting in workers."),
    "oasis_prefetch_workers": ("prefetch_workers", "Prefetch workers of this rank, as configured."),
    "oasis_prefetch_workers_ready": ("prefetch_workers_ready", "Those that take plans now."),
}
WORKER_COUNTERS = {
    "oasis_prefetch_issued_pages_total": ("prefetch_issued_pages_total", "Page pieces planned for workers to copy."),
    "oasis_prefetch_used_pages_total": ("prefetch_used_pages_total", "Those that landed in time."),
    "oasis_prefetch_late_pages_total": ("prefetch_late_pages_total", "Those that a step had to do without."),
    "oasis_prefetch_wasted_pages_total": (
        "prefetch_wasted_pages_total",
        "Those copied after all, late or for a request that had left.",
    ),
    "oasis_prefetch_dropped_pages_total": (
        "prefetch_dropped_pages_total",
        "Page pieces that were not planned: no worker took the plan, or no spare page was left.",
    ),
    "oasis_prefetch_rank_seconds_total": (
        "prefetch_rank_seconds_total",
        "Seconds the rank process spent on planning and on what landed.",
    ),
    "oasis_prefetch_dropped_plans_total": ("prefetch_dropped_plans_total", "Plans that no worker took."),
    "oasis_prefetch_stale_completions_total": (
        "prefetch_stale_completions_total",
        "Completions of plans that were over already; ignored.",
    ),
    "oasis_prefetch_bad_messages_total": ("prefetch_bad_messages_total", "Frames that were no message; ignored."),
    "oasis_prefetch_worker_restarts_total": (
        "prefetch_worker_restarts_total",
        "Workers that replaced lost ones.",
    ),
    "oasis_prefetch_copied_bytes_total": ("prefetch_copied_bytes_total", "Bytes that workers copied."),
    "oasis_prefetch_copy_seconds_total": ("prefetch_copy_seconds_total", "Seconds they took, summed over workers."),
}
COUNTERS = {
    "oasis_selected_pages_total": (
        "selected_pages_total",
        "Pages selected for attention by sparse decode steps, per layer and KV head; the local tail is not counted.",
    ),
    "oasis_missed_pages_total": ("misses_total", "Selected pages that were not on the device."),
    "oasis_dropped_pages_total": ("dropped_misses_total", "Missed pages that the fetch cap left out of the step."),
    "oasis_fetched_pages_total": (
        "fetched_pages_total",
        "Page pieces (one page, layer and KV head) copied from host to device, working sets after prefill included.",
    ),
    "oasis_fetched_bytes_total": ("fetched_bytes_total", "Bytes of those copies."),
    "oasis_stall_seconds_total": (
        "stall_seconds_total",
        "Seconds the rank process spent waiting for copies to the device.",
    ),
    "oasis_load_back_tokens_total": ("load_back_tokens_total", "Prefix tokens that extends read from the host pool."),
    "oasis_decode_steps_total": ("decode_steps_total", "Decode steps."),
    "oasis_sparse_sequences_total": ("sparse_sequences_total", "Sequences decoded sparsely, summed over steps."),
    "oasis_dense_sequences_total": ("dense_sequences_total", "Sequences decoded densely, summed over steps."),
    "oasis_verify_steps_total": ("verify_steps_total", "Chains of drafts verified, summed over sequences."),
    "oasis_accepted_tokens_total": (
        "accepted_tokens_total",
        "Tokens that verified chains led to, the one after the last accepted draft included.",
    ),
    "oasis_copied_chains_total": (
        "copied_chains_total",
        "Chains of drafts that were copied from earlier in the sequence, of those verified.",
    ),
    "oasis_lookahead_pages_total": (
        "lookahead_pages_total",
        "Pages chosen ahead (miss_policy skip) that were compared, in a sample, with those the query itself chooses.",
    ),
    "oasis_lookahead_agreed_pages_total": ("lookahead_agreed_pages_total", "Those that the query chose too."),
    "oasis_stale_releases_total": ("stale_releases_total", "Releases of working sets that were already released."),
}

REFRESH_SECONDS = 0.5

DECODE_LOGGER = "sglang.srt.managers.scheduler_components.metrics_reporter"


class Exporter:
    """Sets the metrics from the coordinator's state. Counters advance by what the totals grew."""

    def __init__(self, labels: dict[str, str], *, workers: bool = False) -> None:
        # prometheus_client reads its multi-process settings when it is imported, which SGLang prepares first.
        from prometheus_client import Counter, Gauge

        names = list(labels)
        self._gauges = {
            key: Gauge(f"sglang:{name}", text, names, multiprocess_mode="mostrecent").labels(**labels)
            for name, (key, text) in (GAUGES | (WORKER_GAUGES if workers else {})).items()
        }
        self._counters = {
            key: Counter(f"sglang:{name}", text, names).labels(**labels)
            for name, (key, text) in (COUNTERS | (WORKER_COUNTERS if workers else {})).items()
        }
        self._seen: dict[str, float] = dict.fromkeys(self._counters, 0)
        self.updated = 0.0

    def update(self, state: dict[str, Any]) -> None:
        self.updated = time.monotonic()
        for key, gauge in self._gauges.items():
            gauge.set(state[key])
        for key, counter in self._counters.items():
            counter.inc(state[key] - self._seen[key])
            self._seen[key] = state[key]


_exporter: Exporter | None = None


def publish(labels: dict[str, str]) -> None:
    """Bring the metrics up to date; called whenever SGLang publishes its own."""
    global _exporter
    active = coordinator.active()
    if active is None:
        return
    if _exporter is None:
        _exporter = Exporter(labels, workers=active.workers is not None)
    _exporter.update(active.state())


def refresh() -> None:
    """Bring the metrics up to date between SGLang's own times, which may be 40 steps apart; called at every step."""
    active = coordinator.active()
    if active is not None and _exporter is not None and time.monotonic() - _exporter.updated >= REFRESH_SECONDS:
        _exporter.update(active.state())


class DecodeLogParts(logging.Filter):
    """Appends `, #key: value` parts to SGLang's decode log line. A filter on its logger, because the line is put
    together and logged in one long method: its form stays SGLang's, and ours come last."""

    def __init__(self) -> None:
        super().__init__()
        self._last = (0, 0)

    def filter(self, record: logging.LogRecord) -> bool:
        active = coordinator.active()
        if active is not None and isinstance(record.msg, str) and record.msg.startswith("Decode batch"):
            record.msg += self.parts(active.state())
        return True

    def parts(self, state: dict[str, Any]) -> str:
        selected, missed = state["selected_pages_total"] - self._last[0], state["misses_total"] - self._last[1]
        self._last = (state["selected_pages_total"], state["misses_total"])
        rate = f"{1 - missed / selected:.3f}" if selected else "n/a"
        used, total = state["device_tokens_used"], state["device_tokens_total"]
        return (
            f", #device token: {used}, device token usage: {used / total:.2f}, "
            f"#host token: {state['host_tokens_written']}, oasis hit rate: {rate}, "
            f"#fetched page: {state['fetched_pages_total']}"
        )


def install_log_parts() -> None:
    logger = logging.getLogger(DECODE_LOGGER)
    if not any(isinstance(f, DecodeLogParts) for f in logger.filters):
        logger.addFilter(DecodeLogParts())
