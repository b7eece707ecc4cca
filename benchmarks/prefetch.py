"""Do worker processes take the fetching off the rank process, and does decoding gain by it?

Two servers with `miss_policy: skip` and a fetch cap, one of which copies inline and the other lets workers prefetch,
decode the same long documents, a few seconds each in turn. Reported: milliseconds per step and how much faster workers
are (median over the pairs of turns, with its standard error), and what fetching costs the rank process per decode step,
measured inside it: for `inline` the copies, for `workers` the planning, the sending and the landing.

A worker needs a core, which a rank process that computes with all of them lacks: `--threads` leaves it some.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

from benchmarks import common
from benchmarks.decode_throughput import DEVICE_KV_TARGET
from benchmarks.turns import Decoding, speedup, take_turns
from oasis_sglang.serving import Client, Documents, Report, ask_all, greedy

LEAST_SAVED = 0.60


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__)
    parser.add_argument("--documents", type=int, default=8, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=320, help="tokens each answer has (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="answers of each server (default: %(default)s)")
    parser.add_argument("--turn", type=float, default=4.0, help="seconds of a turn (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="token budget (default: %(default)s)")
    parser.add_argument("--fetch-ratio", type=float, default=0.1, help="fetch cap (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="compute threads of both servers (default: one per core)")
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
    chosen = variants(arguments)
    pairs: list[tuple[float, float]] = []
    costs: dict[str, list[dict[str, float]]] = {v.name: [] for v in chosen}

    def prepare(_: common.Variant, client: Client) -> None:
        ask_all(client, prompts, greedy(4, ignore_eos=True))

    with common.standing_by(arguments, chosen, model, report, prepare) as (servers, progress):
        for _ in progress.track(range(arguments.rounds), description="decode in turns"):
            both = [Decoding(server, prompts, arguments.new_tokens) for server in servers]
            pairs += take_turns(both[0], both[1], arguments.turn)
            for variant, decoding in zip(chosen, both, strict=True):
                costs[variant.name].append(fetching(decoding.before, decoding.finish()))
    return {
        "workload": f"{arguments.documents} × {arguments.tokens:,} tokens",
        "threads": os.environ.get("OMP_NUM_THREADS", "one per core"),
        "variants": {v.name: {"label": v.label, "flags": v.flags} for v in chosen},
        "ms_per_step_of_turns": {v.name: [pair[i] for pair in pairs] for i, v in enumerate(chosen)},
        "workers_to_inline": speedup(pairs),
        "fetching": costs,
        "medians": {
            v.name: {
                "ms_per_step": statistics.median(pair[i] for pair in pairs),
                **{key: statistics.median(cost[key] for cost in costs[v.name]) for key in costs[v.name][0]},
            }
            for i, v in enumerate(chosen)
        },
    }


def show(results: dict[str, Any], arguments: argparse.Namespace, report: Report) -> None:
    medians = results["medians"]
    report.table(
        f"Prefetch, {results['workload']}, budget {arguments.budget:,}, fetch ratio {arguments.fetch_ratio:g}",
        ("transfer", "ms/step", "rank: fetch ms/step", "pieces/step", "late", "dropped", "workers: ms/step"),
        [
            (
                variant["label"], medians[name]["ms_per_step"], medians[name]["rank_ms_per_step"],
                medians[name]["pieces_per_step"], medians[name]["late_per_step"], medians[name]["dropped_per_step"],
                medians[name]["worker_ms_per_step"],
            )
            for name, variant in results["variants"].items()
        ],
        caption="Medians over turns or rounds. Rank: what fetching costs the rank process.",
    )  # fmt: skip
    inline, workers = medians["inline"], medians["workers"]
    saved = 1 - workers["rank_ms_per_step"] / inline["rank_ms_per_step"]
    gained, error = results["workers_to_inline"]["median"], results["workers_to_inline"]["standard_error"]
    report.table(
        "Targets", ("what", "measured", "target", "met"),
        [
            (f"tokens per second: workers / inline (± {error:.3f})", gained, "≥ 1", gained >= 1),
            ("rank process: fetching saved", saved, f"≥ {LEAST_SAVED:g}", saved >= LEAST_SAVED),
        ],
    )  # fmt: skip


def main() -> int:
    arguments = arguments_parser().parse_args()
    if arguments.threads:
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # the servers inherit it
    report = Report("prefetch")
    report.results = run(arguments, report)
    show(report.results, arguments, report)
    common.write(report, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
