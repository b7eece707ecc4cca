"""One reading of a server's `/metrics`, and messages that help where there is none."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import requests
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT = 10.0  # seconds; a busy server on few cores takes its time even for this
PREFIX = "sglang:"
RUNNING = "num_running_reqs"
QUEUED = "num_queue_reqs"
TOKENS = "realtime_tokens_total"  # advances at every step, unlike everything else that a scheduler publishes

Rank = tuple[str, ...]


class ScrapeError(RuntimeError):
    """The server gave no metrics to show. The message says why, and what helps."""


@dataclass(frozen=True)
class Scrape:
    """The metrics that `oasis top` reads, without their prefix.

    Attributes:
        time: seconds of `time.monotonic`.
        values: metric -> rank -> value. A mode of `realtime_tokens_total` follows a colon.
    """

    time: float
    model: str = ""
    values: dict[str, dict[Rank, float]] = field(default_factory=dict)

    def total(self, name: str) -> float:
        """Sum over ranks; 0 for a metric that the server does not have."""
        return sum(self.values.get(name, {}).values())

    def one(self, name: str) -> float:
        """The first rank's value, for what every rank counts alike; 0 for a metric that the server does not have."""
        ranks = self.values.get(name)
        return ranks[min(ranks)] if ranks else 0.0

    def counters(self, prefix: str = "") -> dict[tuple[str, Rank], float]:
        return {
            (name, rank): value
            for name, ranks in self.values.items()
            if name.startswith(prefix) and name.partition(":")[0].endswith("_total")
            for rank, value in ranks.items()
        }


def scrape(url: str) -> Scrape:
    """Read the server's metrics now.

    Args:
        url: the server's address, without `/metrics`.

    Raises:
        ScrapeError: it is down, no SGLang server, or one without metrics or without oasis.
    """
    try:
        response = requests.get(f"{url}/metrics", timeout=TIMEOUT)
    except requests.Timeout:
        raise ScrapeError(f"{url} did not answer within {TIMEOUT:g} s") from None
    except requests.RequestException as error:
        raise ScrapeError(f"nothing answers at {url}: {_reason(error)}") from None
    now = time.monotonic()
    if response.status_code != 200:
        raise ScrapeError(_no_metrics(url, response.status_code))
    try:
        return parse(response.text, now, url)
    except (ValueError, IndexError):  # the parser raises either, depending on what it stumbles over
        raise ScrapeError(f"{url} is no SGLang server: its /metrics are not in Prometheus' format") from None


def parse(text: str, now: float, url: str) -> Scrape:
    """
    Args:
        text: Prometheus' text format.
        now: seconds of `time.monotonic` when it arrived.
        url: the server, for messages.

    Raises:
        ScrapeError: these are not the metrics of a SGLang server with oasis.
        ValueError, IndexError: this is not Prometheus' format.
    """
    values: dict[str, dict[Rank, float]] = defaultdict(lambda: defaultdict(float))
    model = ""
    sglang = False
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        sglang = True
        for sample in family.samples:
            name, labels = sample.name.removeprefix(PREFIX), sample.labels
            # With priority scheduling SGLang repeats some gauges per priority; the total has an empty label.
            if not (name.startswith("oasis_") or name in (RUNNING, QUEUED, TOKENS)) or labels.get("priority"):
                continue
            model = labels.get("model_name", model)
            if "mode" in labels:
                name = f"{name}:{labels['mode']}"
            values[name][tuple(labels.get(key, "") for key in ("dp_rank", "pp_rank", "tp_rank"))] += sample.value
    if not sglang:
        raise ScrapeError(f"{url} is no SGLang server: it has metrics, but none of SGLang's")
    if not any(name.startswith("oasis_") for name in values):
        if RUNNING in values:
            raise ScrapeError(
                f"the SGLang server at {url} has no oasis metrics: was it started with --kv-backend oasis?"
            )
        # A scheduler publishes with its first batch, or after half a minute without one.
        raise ScrapeError(f"the SGLang server at {url} has published nothing yet; it does with its first request")
    return Scrape(now, model, {name: dict(ranks) for name, ranks in values.items()})


def _no_metrics(url: str, status: int) -> str:
    """Why `/metrics` answers with `status`: a SGLang server tells itself by `/model_info`."""
    try:
        info = requests.get(f"{url}/model_info", timeout=TIMEOUT).json()
    except (requests.RequestException, ValueError):
        info = None
    if status == 404 and isinstance(info, dict) and "model_path" in info:
        return f"the SGLang server at {url} has no metrics: start it with --enable-metrics"
    return (
        f"{url} does not look like a SGLang server: /metrics answers HTTP {status}. "
        "A SGLang server needs --enable-metrics"
    )


def _reason(error: BaseException) -> str:
    """What is at the bottom of a chain of exceptions, in the system's words where it has some."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
