"""How many tokens a draft head should attend to: accept length by window, with and without the first tokens.

No server: the model answers questions about documents densely in float32 (transformers' weights), greedily, and an
EAGLE-3 head drafts along the answer, from what the target saw.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks import common
from benchmarks.lookahead_drafts import EagleDraft
from benchmarks.speculation import QUESTIONS, draft_folder
from oasis_sglang.attention.draft_window import WINDOW
from oasis_sglang.serving import Documents, Report
from oasis_sglang.speculative.draft.target import Target

PART = 512  # tokens of a prompt at once
#: (first tokens, newest tokens) that the head attends to
WINDOWS: tuple[tuple[int, int | None], ...] = (
    (16, None), (16, 2048), (16, WINDOW), (16, 512), (16, 128), (0, 2048), (0, WINDOW), (0, 512),
)  # fmt: skip


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", metavar="DIR", help="model folder (default: the demo model, built if missing)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file (default: a new one in results/tmp/)")
    parser.add_argument("--draft", metavar="DIR", help="EAGLE-3 draft (default: the one that comes with the package)")
    parser.add_argument("--drafts", type=int, default=3, help="draft tokens per step (default: %(default)s)")
    parser.add_argument("--lengths", default="600,2500,6000", help="tokens of the prompts (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=4, help="prompts of each length (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of each answer (default: %(default)s)")
    return parser


def answer(target: Target, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], torch.Tensor]:
    """Prompt and greedy answer, and the features of all tokens but the last two."""
    cache = target.new_cache(1, len(prompt) + new_tokens)
    tokens, features, done = list(prompt), [], 0
    while len(tokens) < len(prompt) + new_tokens:
        part = tokens[done : done + PART]
        positions = torch.arange(done, done + len(part)).unsqueeze(0)
        mask = torch.ones(len(part), done + len(part), dtype=torch.bool).tril(done)
        seen = target.forward(torch.tensor([part]), positions, mask.view(1, 1, *mask.shape), cache)
        features.append(seen.features[0])
        done += len(part)
        if done == len(tokens):
            tokens.append(int(target.logits(seen.final[0, -1]).argmax()))
    return tokens, torch.cat(features)


def accept_length(draft: EagleDraft, tokens: list[int], features: torch.Tensor, start: int, drafts: int) -> float:
    """Tokens per step from `start` on; steps begin as long as a whole chain can be judged."""
    position, steps = start, 0
    while position + drafts < len(tokens):
        guesses = draft.propose(tokens[:position], features[: position - 1], drafts)
        right = 0
        while right < drafts and guesses[right] == tokens[position + right]:
            right += 1
        position, steps = position + right + 1, steps + 1
    return (position - start) / steps


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.set_flush_denormal(True)
    model = common.model_path(arguments)
    folder, documents, target = draft_folder(arguments, model), Documents(model), Target.load(Path(model))
    work = [(int(length), i) for length in arguments.lengths.split(",") for i in range(arguments.documents)]
    rows: dict[tuple[int, int, int | None], list[float]] = {}
    for length, i in track(work, "answering and drafting"):
        prompt = documents.with_question(i, length, QUESTIONS[i % len(QUESTIONS)])
        tokens, features = answer(target, prompt, arguments.new_tokens)
        for first, window in WINDOWS:
            draft = EagleDraft(folder, target.model, first, window)
            found = accept_length(draft, tokens, features, length + 1, arguments.drafts)
            rows.setdefault((length, first, window), []).append(found)
    return {
        "rows": [
            {"tokens": length, "first": first, "window": window, "accept_length": sum(each) / len(each), "each": each}
            for (length, first, window), each in rows.items()
        ]
    }


def show(results: dict[str, Any], report: Report) -> None:
    lengths = sorted({row["tokens"] for row in results["rows"]})
    lines = []
    for first, window in WINDOWS:
        found = {
            r["tokens"]: r["accept_length"] for r in results["rows"] if (r["first"], r["window"]) == (first, window)
        }
        what = "all" if window is None else f"first {first}, newest {window:,}" if first else f"newest {window:,}"
        lines.append((what, *(f"{found[length]:.2f}" for length in lengths)))
    report.table(
        "Accept length, bonus token included", ("attended", *(f"{length:,} tokens" for length in lengths)), lines
    )


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("draft_window")
    with torch.inference_mode():
        report.results = run(arguments)
    show(report.results, report)
    common.write(report, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
