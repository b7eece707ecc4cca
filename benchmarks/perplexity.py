"""Perplexity of text that follows a long context, every token through the decode path.

The server prefills the context and then *decodes* the text: a custom logit processor forces the true token at every
step, and the model's own log-probability of it is reported. Dense SGLang is compared with several budgets.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from benchmarks import common
from oasis_sglang.serving import Answer, Client, Documents, Report

STREAM_EVERY = 50  # tokens per chunk: a chunk repeats all log-probabilities so far, so one per token would be quadratic
SEGMENT = 1000


class ForceTokens(CustomLogitProcessor):
    """Makes the sampler take the request's next true token, and returns the model's log-probability of it.

    SGLang reports log-probabilities of the logits as processors leave them. So two tokens stay possible: the true one
    at logit 0, and a decoy below it by 1 minus its true log-probability. The distance between the two reported
    log-probabilities then carries the value. The server receives this class by value (it runs as `__main__`), so it
    uses nothing else from this file.
    """

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        import torch

        # Half precision would round the value that the decoy carries.
        assert logits.dtype == torch.float32, f"logits are {logits.dtype}, not float32"
        for row, params in enumerate(custom_param_list or []):
            token = params["tokens"][len(params["__req__"].output_ids)]
            own = torch.log_softmax(logits[row], dim=-1)[token].clone()
            logits[row].fill_(float("-inf"))
            logits[row, token] = 0.0
            logits[row, token - 1 if token else 1] = own - 1.0
        return logits


def own_logprobs(answer: Answer, tokens: list[int]) -> list[float]:
    """The model's log-probabilities of the forced tokens, decoded from what `ForceTokens` left."""
    if answer.output_ids != tokens:
        raise RuntimeError("the server did not follow the forced tokens")
    result = []
    for best, decoy in answer.meta["output_top_logprobs"]:
        result.append(decoy[0] - best[0] + 1.0)
    return result


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__)
    parser.add_argument("--context", type=int, default=4000, help="tokens before the text (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="document to take (default: %(default)s)")
    parser.add_argument("--budgets", default="2048,1024,512", help="token budgets (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=0.01, help="largest increase at the first budget")
    parser.add_argument("--check", action="store_true", help="exit with 1 when that is exceeded")
    return parser


def measure(arguments: argparse.Namespace, client: Client, text: list[int], label: str, report: Report) -> list[float]:
    # The forward pass of a prefill predicts one token. It ends one token early, so that every one of `tokens`
    # predictions is made by a decode step.
    split = arguments.context - 1
    forced = text[split:]
    sampling = {
        "temperature": 0, "max_new_tokens": len(forced), "ignore_eos": True, "stream_interval": STREAM_EVERY,
        "custom_params": {"tokens": forced},
    }  # fmt: skip
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=report.console) as progress:
        task = progress.add_task(label, total=len(forced))
        answer = client.stream(
            text[:split], sampling,
            on_chunk=lambda partial: progress.update(task, completed=partial.tokens),
            return_logprob=True, top_logprobs_num=2, custom_logit_processor=ForceTokens.to_str(),
        )  # fmt: skip
    return own_logprobs(answer, forced)[1:]


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = common.model_path(arguments)
    text = Documents(model).text(arguments.start, arguments.context + arguments.tokens)
    room = len(text) + 1024
    variants = [common.dense(room)]
    for budget in map(int, filter(None, arguments.budgets.split(","))):
        config = {"token_budget": budget, "host_to_device_ratio": 1.5}
        variants.append(common.oasis(arguments, f"oasis_{budget}", f"oasis, budget {budget:,}", config, room))
    flags = ["--enable-custom-logit-processor", "--disable-overlap-schedule"]  # overlap runs ahead of `output_ids`
    logprobs: dict[str, list[float]] = {}
    states = {}
    for variant in variants:
        with common.started(arguments, variant, model, report.console, flags) as (_, client):
            logprobs[variant.name] = measure(arguments, client, text, variant.label, report)
            states[variant.name] = client.oasis()
    rows = {}
    for variant in variants:
        own, base = logprobs[variant.name], logprobs["dense"]
        rows[variant.name] = {
            "label": variant.label,
            "flags": variant.flags,
            "perplexity": perplexity(own),
            "relative_to_dense": perplexity(own) / perplexity(base) - 1,
            "mean_absolute_difference": sum(abs(a - b) for a, b in zip(own, base, strict=True)) / len(own),
            "segments": [perplexity(own[i : i + SEGMENT]) for i in range(0, len(own), SEGMENT)],
        }
    return {"servers": rows, "oasis_state": states, "logprobs": logprobs}


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def show(results: dict[str, Any], arguments: argparse.Namespace, report: Report) -> None:
    rows = [
        (row["label"], f"{row['perplexity']:.4f}", f"{row['relative_to_dense']:+.2%}",
         f"{row['mean_absolute_difference']:.4f}", " ".join(f"{value:.2f}" for value in row["segments"]))
        for row in results["servers"].values()
    ]  # fmt: skip
    report.table(
        f"Perplexity of {arguments.tokens:,} tokens after {arguments.context:,}, decoded one by one",
        ("server", "perplexity", "against dense", "mean |Δ log p|", f"per {SEGMENT:,} tokens"), rows,
    )  # fmt: skip


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("perplexity")
    report.results = run(arguments, report)
    show(report.results, arguments, report)
    common.write(report, arguments)
    compared = list(report.results["servers"].values())[1:2]
    exceeded = any(row["relative_to_dense"] > arguments.limit for row in compared)
    return 1 if arguments.check and exceeded else 0


if __name__ == "__main__":
    raise SystemExit(main())
