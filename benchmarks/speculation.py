"""What an accepted EAGLE draft gains: this backend with and without speculation, on the same prompts.

Three workloads, questions about documents: long ones asked one at a time, short ones likewise, and several at once.
Measured is pure decoding, as in `benchmarks.decode_throughput`: prompts are prefilled once and found again in the radix
cache, and the servers take turns within each round. Then a sampling profiler looks at one request's decoding on either
server and says which part of a step takes which share of it.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import common, step_parts
from oasis_sglang.serving import Answer, Client, Documents, Report, ask_all, decode_rate, greedy

QUESTIONS = (
    "Summarise the text above in a few paragraphs.",
    "What are the main points of the text above? Explain each.",
    "Explain the text above to somebody who is new to programming.",
    "Write a short article about what the text above describes.",
)
TARGET = 1.15  # of one long request: decode rate with drafts over the rate without


@dataclass(frozen=True)
class Workload:
    name: str
    label: str
    prompts: list[list[int]]
    at_once: bool


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__)
    parser.add_argument("--draft", metavar="DIR", help="EAGLE-3 draft (default: the one that comes with the package)")
    parser.add_argument("--drafts", type=int, default=3, help="draft tokens per step (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=6, help="prompts of each length (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=6000, help="tokens of a long prompt (default: %(default)s)")
    parser.add_argument("--short-tokens", type=int, default=500, help="tokens of a short one (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens each answer has (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="token budget (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="exit with 1 when the target is missed")
    return parser


def draft_folder(arguments: argparse.Namespace, model: str) -> str:
    """The folder given, or the packaged draft of this model."""
    if arguments.draft:
        return str(arguments.draft)
    from oasis_sglang.speculative.shipped import shipped_draft

    if found := shipped_draft(Path(model)):
        return str(found)
    raise SystemExit(f"no draft for {model} comes with this package: give --draft DIR (`oasis train-draft` makes one)")


def variants(arguments: argparse.Namespace, draft: str) -> list[common.Variant]:
    each = arguments.tokens + arguments.short_tokens + 2 * arguments.new_tokens + 256
    room = -(-arguments.documents * each // 1024) * 1024
    config = {"token_budget": arguments.budget, "host_to_device_ratio": 1.5}
    plain = common.oasis(arguments, "plain", "no speculation", config, room)
    chain = [
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft, "--speculative-eagle-topk", "1",
        "--speculative-num-steps", str(arguments.drafts), "--speculative-num-draft-tokens", str(arguments.drafts + 1),
    ]  # fmt: skip
    return [plain, common.Variant("drafts", f"EAGLE-3, {arguments.drafts} drafts", [*plain.flags, *chain])]


def workloads(arguments: argparse.Namespace, documents: Documents) -> list[Workload]:
    def prompts(first: int, tokens: int) -> list[list[int]]:
        return [
            documents.with_question(first + i, tokens, QUESTIONS[i % len(QUESTIONS)])
            for i in range(arguments.documents)
        ]

    count = arguments.documents
    long, short = prompts(0, arguments.tokens), prompts(count, arguments.short_tokens)
    return [
        Workload("single", f"1 × {arguments.tokens:,} tokens", long, False),
        Workload("short", f"1 × {arguments.short_tokens:,} tokens", short, False),
        Workload("batch", f"{count} × {arguments.tokens:,} tokens", long, True),
        Workload("short_batch", f"{count} × {arguments.short_tokens:,} tokens", short, True),
    ]


def rate(load: Workload, answers: list[Answer]) -> float:
    """Decoded tokens per second: of requests one after another, over their times; of some at once, while all decode."""
    if load.at_once:
        return decode_rate(answers)
    return sum(a.tokens_between(a.first, a.last) for a in answers) / sum(a.last - a.first for a in answers)


def accept_length(answers: list[Answer]) -> float | None:
    """Tokens per verification; the first token of an answer is the prefill's."""
    steps = sum(answer.meta.get("spec_verify_ct") or 0 for answer in answers)
    return sum(answer.tokens - 1 for answer in answers) / steps if steps else None


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    step_parts.sampler()
    model = common.model_path(arguments)
    draft = draft_folder(arguments, model)
    chosen = variants(arguments, draft)
    loads = workloads(arguments, Documents(model))
    sampling = greedy(arguments.new_tokens, ignore_eos=True)
    rates: dict[str, dict[str, list[float]]] = {w.name: {v.name: [] for v in chosen} for w in loads}
    accepted: dict[str, float | None] = {}
    parts: dict[str, dict[str, dict[str, float]]] = {"single": {}, "short": {}}

    def ask(client: Client, load: Workload) -> list[Answer]:
        return ask_all(client, load.prompts, sampling, concurrency=None if load.at_once else 1)

    def prepare(variant: common.Variant, client: Client) -> None:
        for load in loads:
            ask(client, load)

    for variant, client in common.taking_turns(arguments, chosen, model, report, prepare):
        for load in loads:
            answers = ask(client, load)
            rates[load.name][variant.name].append(rate(load, answers))
            if (length := accept_length(answers)) is not None:
                accepted[load.name] = length
    medians = {w: {v: statistics.median(each) for v, each in per.items()} for w, per in rates.items()}
    for variant in chosen:
        with common.started(arguments, variant, model, report.console) as (server, client):
            for load in (load for load in loads if load.name in parts):
                few = replace(load, prompts=load.prompts[:2])
                ask(client, few)
                found: dict[str, float] = {}
                with step_parts.sampled(server, found):
                    ask(client, few)
                per_step = accepted[load.name] if variant.name == "drafts" else 1.0
                step = 1000 * (per_step or 1.0) / medians[load.name][variant.name]
                parts[load.name][variant.name] = {name: share * step for name, share in found.items()}
    return {
        "workloads": {w.name: w.label for w in loads},
        # The draft by its folder's name: where it lies is of no use elsewhere.
        "variants": {
            v.name: {"label": v.label, "flags": [Path(draft).name if flag == draft else flag for flag in v.flags]}
            for v in chosen
        },
        "tokens_per_second": rates,
        "medians": medians,
        "accept_length": accepted,
        "step_ms": parts,
    }


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    median = results["medians"]["single"]
    ratio = median["drafts"] / median["plain"]
    what = f"{results['workloads']['single']}: drafts / no speculation"
    return [{"what": what, "measured": ratio, "target": f"≥ {TARGET:g}", "met": ratio >= TARGET}]


def show(results: dict[str, Any], report: Report) -> None:
    rows = []
    for load, label in results["workloads"].items():
        for name, variant in results["variants"].items():
            each, median = results["tokens_per_second"][load][name], results["medians"][load][name]
            length = results["accept_length"].get(load) if name == "drafts" else None
            ratio = median / results["medians"][load]["plain"]
            rows.append((label, variant["label"], median, f"{min(each):.1f}–{max(each):.1f}", ratio, length))
    report.table(
        "Decode throughput, prefill excluded",
        ("requests", "server", "tokens/s", "range", "× no speculation", "accept length"), rows,
        caption="Median over the rounds, and the range. Accept length counts the token that the target adds.",
    )  # fmt: skip
    for load, per in results["step_ms"].items():
        lines = []
        for name in step_parts.NAMES:
            cells: list[Any] = [name]
            for variant in results["variants"]:
                ms = per[variant].get(name)
                cells += [ms, None if ms is None else f"{ms / sum(per[variant].values()):.0%}"]
            if any(cell is not None for cell in cells[1:]):
                lines.append(tuple(cells))
        lines.append(("step", *(x for variant in results["variants"] for x in (sum(per[variant].values()), "100%"))))
        columns = [x for variant in results["variants"].values() for x in (f"{variant['label']}, ms", "share")]
        report.table(f"Parts of a step, {results['workloads'][load]}", ("part", *columns), lines)
    common.show_targets(report)


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("speculation")
    report.results = run(arguments, report)
    report.results["targets"] = targets(report.results)
    show(report.results, report)
    return common.finish(report, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
