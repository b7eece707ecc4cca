"""Decode throughput and device memory: dense SGLang, this backend, and this backend run dense.

Three workloads: several long documents at once, one alone, and several that fit into the budget. What is measured is
pure decoding: tokens per second from the moment every request has its first token until the first of them ends.
Prefill is left out: each server prefills every prompt once, untimed, and later rounds reuse that through the radix
cache.

The servers are started one after another and stopped in place (SIGSTOP) while another is measured, so that all take
turns within each round and slow drifts of the machine hit all of them alike. Reported are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks import common
from oasis_sglang.serving import Client, Documents, Report, ask_all, decode_rate, greedy

# What this backend has to reach: (workload, variant, variant compared with, smallest ratio of medians).
TARGETS = (
    ("long", "oasis", "dense", 4.0),
    ("long", "oasis", "oasis_dense", 1.8),
    ("single", "oasis", "dense", 1.4),
    ("short", "oasis", "dense", 0.95),
)
DEVICE_KV_TARGET = 0.40


@dataclass(frozen=True)
class Workload:
    name: str
    label: str
    prompts: list[list[int]]


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__)
    parser.add_argument("--documents", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of a long prompt (default: %(default)s)")
    parser.add_argument("--short-tokens", type=int, default=1000, help="tokens of a short one (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens each answer has (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="token budget of the oasis server")
    parser.add_argument("--device-tokens", type=int, help="device pool of the oasis server (default: 40 %% of dense)")
    parser.add_argument("--variants", default="dense,oasis,oasis_dense", help="which to run (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    return parser


def variants(arguments: argparse.Namespace) -> list[common.Variant]:
    total = arguments.documents * (arguments.tokens + arguments.new_tokens)
    room = total + arguments.documents * (arguments.short_tokens + arguments.new_tokens) + 1024
    # The oasis host pool must keep every prompt of every workload, as the dense pool does.
    device = arguments.device_tokens or int(DEVICE_KV_TARGET * total) // 64 * 64 - 64  # the reserved page counts
    everything = {
        "dense": common.dense(room),
        "oasis": common.oasis(
            arguments, "oasis", f"oasis, budget {arguments.budget:,}",
            {"token_budget": arguments.budget, "host_to_device_ratio": round(room / device + 0.05, 2)}, device,
        ),
        "oasis_dense": common.oasis(
            arguments, "oasis_dense", "oasis, run dense", {"token_budget": 8192, "host_to_device_ratio": 1.1}, room
        ),
    }  # fmt: skip
    return [everything[name] for name in arguments.variants.split(",")]


def workloads(arguments: argparse.Namespace, documents: Documents) -> list[Workload]:
    count = arguments.documents
    long = [documents.text(i, arguments.tokens) for i in range(count)]
    short = [documents.text(count + i, arguments.short_tokens) for i in range(count)]
    return [
        Workload("long", f"{count} × {arguments.tokens:,} tokens", long),
        Workload("single", f"1 × {arguments.tokens:,} tokens", long[:1]),
        Workload("short", f"{count} × {arguments.short_tokens:,} tokens", short),
    ]


def device_kv_bytes(client: Client, used_tokens: int) -> dict[str, float]:
    """KV on the device: all of the pool for oasis, the tokens in use for dense (its pool is as large as asked)."""
    state = client.oasis()
    if not state:
        return {"kv": used_tokens * client.kv_bytes_per_token(), "summaries": 0}
    return {"kv": state["device_pool_bytes"], "summaries": state["summary_bytes"]}


def measure(client: Client, load: Workload, sampling: dict[str, Any], tries: int = 3) -> float:
    """Decode rate of one workload; again if the requests reached the server too far apart to decode together."""
    for _ in range(tries):
        if rate := decode_rate(ask_all(client, load.prompts, sampling)):
            return rate
    raise RuntimeError(f"{load.label}: never all decoding at the same time; raise --new-tokens or the pool sizes")


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = common.model_path(arguments)
    chosen = variants(arguments)
    loads = workloads(arguments, Documents(model))
    sampling = greedy(arguments.new_tokens, ignore_eos=True)
    used = arguments.documents * (arguments.tokens + arguments.new_tokens)
    rates: dict[str, dict[str, list[float]]] = {w.name: {v.name: [] for v in chosen} for w in loads}
    memory: dict[str, dict[str, float]] = {}
    states: dict[str, dict[str, Any]] = {}

    def prepare(variant: common.Variant, client: Client) -> None:
        for load in loads:
            ask_all(client, load.prompts, sampling)
        memory[variant.name] = device_kv_bytes(client, used)

    for variant, client in common.taking_turns(arguments, chosen, model, report, prepare):
        for load in loads:
            rates[load.name][variant.name].append(measure(client, load, sampling))
        states[variant.name] = client.oasis()
    return {
        "workloads": {w.name: w.label for w in loads},
        "variants": {v.name: {"label": v.label, "flags": v.flags} for v in chosen},
        "tokens_per_second": rates,
        "medians": {w: {v: statistics.median(each) for v, each in per.items()} for w, per in rates.items()},
        "device_bytes": memory,
        "oasis_state": states,
    }


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Each target whose two sides were measured, with what was reached."""
    medians, memory = results["medians"], results["device_bytes"]
    rows = []
    for load, ours, other, least in TARGETS:
        if {ours, other} <= medians[load].keys():
            ratio = medians[load][ours] / medians[load][other]
            what = f"{results['workloads'][load]}: oasis / {results['variants'][other]['label']}"
            rows.append({"what": what, "measured": ratio, "target": f"≥ {least:g}", "met": ratio >= least})
    if {"dense", "oasis"} <= memory.keys():
        dense, ours = memory["dense"]["kv"], memory["oasis"]
        share = ours["kv"] / dense
        rows.append({
            "what": "device KV bytes: oasis / dense", "measured": share,
            "target": f"≤ {DEVICE_KV_TARGET:g}", "met": share <= DEVICE_KV_TARGET,
        })  # fmt: skip
        rows.append({
            "what": "the same with key summaries", "measured": (ours["kv"] + ours["summaries"]) / dense,
            "target": None, "met": None,
        })  # fmt: skip
    return rows


def show(results: dict[str, Any], report: Report) -> None:
    rows = []
    for load, label in results["workloads"].items():
        for name, variant in results["variants"].items():
            each = results["tokens_per_second"][load][name]
            median = results["medians"][load][name]
            base = results["medians"][load].get("dense")
            spread = f"{min(each):.1f}–{max(each):.1f}"
            rows.append((label, variant["label"], median, spread, median / base if base else None))
    report.table(
        "Decode throughput, prefill excluded", ("requests", "server", "tokens/s", "range", "× dense"), rows,
        caption="Median over the rounds, and the range.",
    )  # fmt: skip
    memory = [
        (results["variants"][name]["label"], each["kv"] / 1e6, each["summaries"] / 1e6)
        for name, each in results["device_bytes"].items()
    ]
    report.table("Device memory", ("server", "KV (MB)", "key summaries (MB)"), memory)
    common.show_targets(report)


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("decode_throughput")
    report.results = run(arguments, report)
    report.results["targets"] = targets(report.results)
    show(report.results, report)
    return common.finish(report, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
