"""Do worker processes take the fetching off the rank process, and does decoding gain by it?

Two servers with `miss_policy: skip` and a fetch cap, one of which copies inline and the other lets workers prefetch,
decode the same long documents in turns. Reported: tokens per second (medians over the rounds, prefill left out), and
what fetching costs the rank process per decode step, measured inside it: for `inline` the copies, for `workers` the
planning, the sending and the landing.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks import common
from benchmarks.decode_throughput import DEVICE_KV_TARGET, Workload, measure
from oasis_sglang.serving import Client, Documents, Report, ask_all, greedy

LEAST_SAVED = 0.60


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__)
    parser.add_argument("--documents", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens each answer has (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="token budget (default: %(default)s)")
    parser.add_argument("--fetch-ratio", type=float, default=0.1, help="fetch cap (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="worker processes (default: %(default)s)")
    return parser


def variants(arguments: argparse.Namespace) -> list[common.Variant]:
    total = arguments.documents * (arguments.tokens + arguments.new_tokens)
    device = int(DEVICE_KV_TARGET * total) // 64 * 64
    settings: dict[str, Any] = {
        "token_budget": arguments.budget, "fetch_ratio": arguments.fetch_ratio, "miss_policy": "skip",
        "host_to_device_ratio": round((total + 1024) / device + 0.05, 2),
    }  # fmt: skip
    workers = settings | {"transfer": "workers", "prefetch_workers": arguments.workers}
    return [
        common.oasis(arguments, "inline", "inline", settings, device),
        common.oasis(arguments, "workers", f"{arguments.workers} worker(s)", workers, device),
    ]


def fetching(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """What a round's decode steps cost, from two states of `/server_info`. The working sets that extends bring in are
    no part of it: they are copied inline in both variants, and are a third of what an inline round copies."""

    def grown(key: str) -> float:
        return float(after.get(key, 0)) - float(before.get(key, 0))

    steps = grown("decode_steps_total")
    seconds = grown("stall_seconds_total") - grown("extend_stall_seconds_total") + grown("prefetch_rank_seconds_total")
    pieces = grown("fetched_pages_total") - grown("extend_fetched_pages_total") + grown("prefetch_issued_pages_total")
    return {
        "rank_ms_per_step": 1000 * seconds / steps,
        "pieces_per_step": pieces / steps,
        "late_per_step": grown("prefetch_late_pages_total") / steps,
        "dropped_per_step": grown("prefetch_dropped_pages_total") / steps,
        "worker_ms_per_step": 1000 * grown("prefetch_copy_seconds_total") / steps,
    }


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = common.model_path(arguments)
    documents = Documents(model)
    prompts = [documents.text(i, arguments.tokens) for i in range(arguments.documents)]
    load = Workload("long", f"{arguments.documents} × {arguments.tokens:,} tokens", prompts)
    sampling = greedy(arguments.new_tokens, ignore_eos=True)
    chosen = variants(arguments)
    rates: dict[str, list[float]] = {v.name: [] for v in chosen}
    costs: dict[str, list[dict[str, float]]] = {v.name: [] for v in chosen}

    def prepare(_: common.Variant, client: Client) -> None:
        ask_all(client, prompts, sampling)

    for variant, client in common.taking_turns(arguments, chosen, model, report, prepare):
        before = client.oasis()
        rates[variant.name].append(measure(client, load, sampling))
        costs[variant.name].append(fetching(before, client.oasis()))
    return {
        "workload": load.label,
        "variants": {v.name: {"label": v.label, "flags": v.flags} for v in chosen},
        "tokens_per_second": rates,
        "fetching": costs,
        "medians": {
            name: {
                "tokens_per_second": statistics.median(rates[name]),
                **{key: statistics.median(cost[key] for cost in costs[name]) for key in costs[name][0]},
            }
            for name in rates
        },
    }


def show(results: dict[str, Any], arguments: argparse.Namespace, report: Report) -> None:
    medians = results["medians"]
    report.table(
        f"Prefetch, {results['workload']}, budget {arguments.budget:,}, fetch ratio {arguments.fetch_ratio:g}",
        ("transfer", "tokens/s", "rank: fetch ms/step", "pieces/step", "late", "dropped", "workers: ms/step"),
        [
            (
                variant["label"], medians[name]["tokens_per_second"], medians[name]["rank_ms_per_step"],
                medians[name]["pieces_per_step"], medians[name]["late_per_step"], medians[name]["dropped_per_step"],
                medians[name]["worker_ms_per_step"],
            )
            for name, variant in results["variants"].items()
        ],
        caption="Medians over the rounds. Rank: what fetching costs the rank process.",
    )  # fmt: skip
    inline, workers = medians["inline"], medians["workers"]
    saved = 1 - workers["rank_ms_per_step"] / inline["rank_ms_per_step"]
    gain = workers["tokens_per_second"] / inline["tokens_per_second"]
    report.table(
        "Targets", ("what", "measured", "target", "met"),
        [
            ("tokens per second: workers / inline", gain, "≥ 1", gain >= 1),
            ("rank process: fetching saved", saved, f"≥ {LEAST_SAVED:g}", saved >= LEAST_SAVED),
        ],
    )  # fmt: skip


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("prefetch")
    report.results = run(arguments, report)
    show(report.results, arguments, report)
    common.write(report, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
