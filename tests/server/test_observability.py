"""What operators see: the decode log line, metrics, `/server_info`; nothing of it where we are not asked for."""

from __future__ import annotations

import re

import pytest

from oasis_sglang.serving import Client, Server, greedy
from tests.server.checks import LogWatch, metrics
from tests.server.truth import NEW_TOKENS, Truth

pytestmark = [pytest.mark.server, pytest.mark.slow]

DECODE_LINE = re.compile(
    r"Decode batch, #running-req: \d+, #token: \d+, token usage: \d\.\d\d, cpu graph: \w+, "
    r"gen throughput \(token/s\): [\d.]+, #queue-req: \d+"
    r", #device token: \d+, device token usage: \d\.\d\d, #host token: \d+, oasis hit rate: (n/a|\d\.\d+), "
    r"#fetched page: \d+$"
)
# metric -> key of the state in /server_info
UNITS = {
    "host_total_tokens": "host_tokens_total",
    "device_total_tokens": "device_tokens_total",
    "host_pool_bytes": "host_pool_bytes",
    "device_pool_bytes": "device_pool_bytes",
    "summary_bytes": "summary_bytes",
    "decode_steps_total": "decode_steps_total",
    "fetched_pages_total": "fetched_pages_total",
    "fetched_bytes_total": "fetched_bytes_total",
    "stall_seconds_total": "stall_seconds_total",
    "load_back_tokens_total": "load_back_tokens_total",
    "selected_pages_total": "selected_pages_total",
    "missed_pages_total": "misses_total",
    "stale_releases_total": "stale_releases_total",
}


def test_nothing_without_the_flag(truth: Truth) -> None:
    """A server that was not asked for this backend shows no trace of it, though the package is installed."""
    assert "oasis" not in truth.info["internal_states"][0]
    assert truth.info["attention_backend"] == "torch_native"
    assert truth.metrics["sglang:num_running_reqs"] == 0
    assert not [name for name in truth.metrics if "oasis" in name]


def test_decode_log_line(within_budget: Server, truth: Truth) -> None:
    """Users scrape this line: SGLang's form stays as it is, ours are `, key: value` parts at its end."""
    watch = LogWatch(within_budget)
    Client(within_budget.url).generate(truth.prompts[5], greedy(20, ignore_eos=True))
    lines = [line for line in watch.text().splitlines() if "Decode batch" in line]
    assert lines
    for line in lines:
        assert DECODE_LINE.search(line), line


def test_metrics_and_server_info(within_budget: Server, truth: Truth) -> None:
    """What an operator sees agrees in both places, with units in the names; counters advance by what was done."""
    client = Client(within_budget.url)
    before = client.oasis()
    client.generate(truth.prompts[13], greedy(NEW_TOKENS, ignore_eos=True))
    client.generate(truth.prompts[13], greedy(NEW_TOKENS, ignore_eos=True))
    state, shown = client.oasis(), metrics(client)
    assert state["config"]["token_budget"] == 2048
    assert state["config"]["miss_policy"] == "wait"
    assert (state["device_tokens_total"], state["host_tokens_total"]) == (2720, 10880)
    assert state["decode_steps_total"] - before["decode_steps_total"] == 2 * (NEW_TOKENS - 1)
    assert state["dense_sequences_total"] - before["dense_sequences_total"] == 2 * (NEW_TOKENS - 1)
    assert state["load_back_tokens_total"] - before["load_back_tokens_total"] == 224
    # 240 + 63 tokens stay in the radix cache: whole pages of them
    assert state["host_tokens_written"] >= 288
    ours = {name.removeprefix("sglang:oasis_"): value for name, value in shown.items() if "oasis" in name}
    assert UNITS.keys() <= ours.keys()
    for name, key in UNITS.items():
        assert ours[name] <= state[key], f"{name}: published when SGLang publishes, never ahead"
    for name in ("host_total_tokens", "device_total_tokens", "host_pool_bytes", "device_pool_bytes", "summary_bytes"):
        assert ours[name] == state[UNITS[name]]
    assert ours["decode_steps_total"] > before["decode_steps_total"]
    assert ours["fetched_bytes_total"] > before["fetched_bytes_total"]
