"""How often does 16-bit text differ, and where? Greedy answers of three servers, one request at a time and all at once.

In float32 the three say the same, token for token (tests/server). In bfloat16 sums are rounded by how many rows are
computed together, and a verification computes other numbers of rows than a plain step. That matters where the best
tokens are nearly tied: for each first difference this prints how far the token said instead was behind the best,
beside how far the second best is behind elsewhere.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.speculation import draft_folder
from oasis_sglang.serving import Documents, Report, ask_all, greedy

LENGTHS = (20, 24, 31, 37, 48, 55, 60, 64, 97, 111, 128, 150, 190, 240, 300, 400, 512, 700, 1500, 1543)
QUESTION = "Which of these sentences matters most, and why?"
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 4}


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__ or "")
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--draft", metavar="DIR", help="EAGLE-3 draft (default: the one that comes with the package)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of each answer (default: %(default)s)")
    return parser


def prompts(documents: Documents) -> list[list[int]]:
    """Running text and questions in turn, all within the budget."""
    return [
        documents.with_question(at, length, QUESTION) if at % 2 and length >= 60 else documents.text(at, length)
        for at, length in enumerate(LENGTHS)
    ]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)


def compare(reference: Sequence[dict[str, Any]], answers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """The first difference of each answer from the reference: its place, and how much less likely than the best token
    the one said instead was there (None: it was not among the best).

    Args:
        reference: per prompt, SGLang's `output_ids` and, in `meta_info`, `output_top_logprobs`.
    """
    found = []
    for said, answer in zip(reference, answers, strict=True):
        at = first_difference(answer, said["output_ids"])
        if at is not None:
            best = said["meta_info"]["output_top_logprobs"][at]
            behind = next((best[0][0] - logprob for logprob, token, *_ in best if token == answer[at]), None)
            found.append({"at": at, "behind": behind})
    return found


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = common.model_path(arguments)
    draft = draft_folder(arguments, model)
    plain = common.oasis(arguments, "plain", "oasis", {}, 12_000)
    drafts = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft]
    variants = [
        plain, common.Variant("drafts", "oasis, EAGLE-3 drafts", [*plain.flags, *drafts]), common.dense(24_000)
    ]  # fmt: skip
    asked = prompts(Documents(model))
    sampling = greedy(arguments.new_tokens, ignore_eos=True)
    reference: list[dict[str, Any]] = []
    rows = []
    for variant in variants:
        with common.started(arguments, variant, model, report.console) as (_, client):
            if not reference:
                reference = [client.generate(prompt, sampling, **LOGPROBS) for prompt in asked]
            for label, concurrency in (("one at a time", 1), ("all at once", None)):
                client.flush_cache()
                answers = [a.output_ids for a in ask_all(client, asked, sampling, concurrency=concurrency)]
                rows.append({"server": variant.label, "asked": label, "differences": compare(reference, answers)})
    margins = [
        best[0] - second[0]
        for said in reference
        for best, second in (row[:2] for row in said["meta_info"]["output_top_logprobs"])
    ]
    return {"prompts": len(asked), "median_nats": statistics.median(margins), "runs": rows}


def show(results: dict[str, Any], report: Report) -> None:
    rows = []
    for run in results["runs"]:
        found = run["differences"]
        behind = [each["behind"] for each in found if each["behind"] is not None]
        rows.append((
            run["server"], run["asked"], f"{results['prompts'] - len(found)} of {results['prompts']}",
            statistics.median(behind) if behind else None, max(behind, default=None), len(found) - len(behind),
        ))  # fmt: skip
    report.table(
        "Greedy answers in bfloat16 against oasis without drafts, one at a time",
        ("server", "asked", "same", "nats behind: median", "most", "further"), rows,
        caption="Nats behind: at the first difference, how much less likely than the best token the one said instead "
        f"was; over all tokens of the reference the second best is {results['median_nats']:.2f} behind (median). "
        "Further: not among the best four.",
    )  # fmt: skip


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("text_differences")
    report.results = run(arguments, report)
    show(report.results, report)
    common.write(report, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
