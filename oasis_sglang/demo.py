"""`python -m oasis_sglang.demo`: the same questions about long documents, asked of dense SGLang and of this backend.

Both servers run on this machine, one after the other, with the same model. Each document hides one fact; all
questions are asked at once, so that every document's KV cache is needed at the same time. The backend gets a device
pool that cannot hold them. Then each writes one summary alone, and the backend once more with the EAGLE-3 draft that
comes with this package.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from oasis_sglang.serving import (
    Answer,
    Client,
    Documents,
    Report,
    Server,
    ServerFailed,
    ask_all,
    decode_rate,
    greedy,
    oasis_flags,
)
from oasis_sglang.speculative.shipped import shipped_draft

PLACES = ("harbour", "museum", "library", "station", "garden", "castle", "bakery", "school")
INSTRUCTION = "Read the following text, then answer the question at its end.\n\n"
SUMMARISE = "Summarise the text above in a few paragraphs."
SUMMARY_TOKENS = 128
DRAFTING = "oasis, EAGLE-3 drafts"
CODES = (48213, 70564, 19387, 62950, 35718, 84026, 27491, 91635)


@dataclass
class Side:
    """What one server did."""

    name: str
    answers: list[Answer]
    texts: list[str]
    correct: int
    rate: float
    device_bytes: float
    host_bytes: float
    hit_rate: float | None
    state: dict[str, Any]
    summary: Answer

    @property
    def ttft(self) -> float:
        return sum(answer.ttft for answer in self.answers) / len(self.answers)

    @property
    def seconds(self) -> float:
        return max(answer.last for answer in self.answers) - min(answer.sent for answer in self.answers)


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m oasis_sglang.demo", description=__doc__)
    parser.add_argument("--model-path", metavar="DIR", help="model folder (default: the demo model, built if missing)")
    parser.add_argument("--documents", type=int, default=8, help="documents, one question each (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of each document (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of each answer (default: %(default)s)")
    parser.add_argument("--device-tokens", type=int, default=24_000, help="device pool of oasis (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="token budget of oasis (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    return parser


def place(index: int) -> str:
    name = PLACES[index % len(PLACES)]
    return name if index < len(PLACES) else f"{name} {index // len(PLACES) + 1}"


def code(index: int) -> str:
    return str(CODES[index % len(CODES)] + 1000 * (index // len(CODES)) % 9000)


def fact(where: str, number: str) -> str:
    """Twice, because the demo model is small and overlooks things that are said once."""
    return f"Remember this: the door code of the {where} is {number}. The door code of the {where} is {number}."


def question(where: str) -> str:
    return f"What is the door code of the {where}? Answer with the number only."


def build_prompts(arguments: argparse.Namespace, documents: Documents) -> list[list[int]]:
    """One document a question; the fact stands at another depth in each, from the first lines to the last."""
    return [
        documents.with_question(
            index, arguments.tokens, question(place(index)), fact(place(index), code(index)),
            (index + 0.5) / arguments.documents, INSTRUCTION,
        )
        for index in range(arguments.documents)
    ]  # fmt: skip


def until_end(documents: Documents, answer: Answer) -> str:
    """The answer's text up to where the model ended it: it was made to write on, so that all are equally long."""
    ids = answer.output_ids
    end = documents.tokenizer.eos_token_id
    return documents.decode(ids[: ids.index(end)] if end in ids else ids).strip()


def summary_prompt(arguments: argparse.Namespace, documents: Documents) -> list[int]:
    """The first document again, so that a server that has read it need not read it once more."""
    depth = 0.5 / arguments.documents
    return documents.with_question(0, arguments.tokens, SUMMARISE, fact(place(0), code(0)), depth, INSTRUCTION)


def write_summary(client: Client, prompt: list[int], progress: Progress, task: Any, name: str) -> Answer:
    def seen(answer: Answer) -> None:
        progress.update(task, description=f"{name}: writing a summary alone", completed=answer.tokens)

    progress.update(task, description=f"{name}: reading one document", total=SUMMARY_TOKENS, completed=0)
    return client.stream(prompt, greedy(SUMMARY_TOKENS, ignore_eos=True), on_chunk=seen)


def progress_on(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(SpinnerColumn(), *columns, console=console)


def draft_summary(name: str, server: Server, prompt: list[int], console: Console) -> Answer:
    """One summary by a server of its own."""
    with progress_on(console) as progress:
        task = progress.add_task(f"{name}: starting the server", total=None)
        with server:
            answer = write_summary(Client(server.url), prompt, progress, task, name)
            progress.update(task, description=f"{name}: stopping the server")
        progress.update(task, description=f"{name}: done")
    return answer


def ask(
    name: str, server: Server, prompts: list[list[int]], summary: list[int], documents: Documents, new_tokens: int,
    console: Console,
) -> Side:  # fmt: skip
    """Start the server, ask everything at once, then for one summary, collect what it did, stop it."""
    total = len(prompts)
    with progress_on(console) as progress:
        task = progress.add_task(f"{name}: starting the server", total=None)
        with server:
            client = Client(server.url)
            progress.update(task, description=f"{name}: reading the documents", total=total * new_tokens, completed=0)
            tokens = [0] * total

            def seen(index: int, answer: Answer) -> None:
                tokens[index] = answer.tokens
                reading = tokens.count(0)
                doing = f"reading, {total - reading} of {total} documents done" if reading else "writing the answers"
                progress.update(task, description=f"{name}: {doing}", completed=sum(tokens))

            answers = ask_all(client, prompts, greedy(new_tokens, ignore_eos=True), on_chunk=seen)
            per_token = client.kv_bytes_per_token()
            state = client.oasis()
            alone = write_summary(client, summary, progress, task, name)
            progress.update(task, description=f"{name}: stopping the server")
        progress.update(task, description=f"{name}: done")
    texts = [until_end(documents, answer) for answer in answers]
    in_use = sum(len(prompt) + new_tokens for prompt in prompts)
    looked_up = state.get("hits_total", 0) + state.get("misses_total", 0)
    return Side(
        name=name,
        answers=answers,
        texts=texts,
        correct=sum(code(index) in text for index, text in enumerate(texts)),
        rate=decode_rate(answers),
        device_bytes=state["device_pool_bytes"] + state["summary_bytes"] if state else in_use * per_token,
        host_bytes=state["host_pool_bytes"] * state["host_tokens_written"] / state["host_tokens_total"]
        if state
        else 0.0,
        hit_rate=state["hits_total"] / looked_up if looked_up else None,
        state=state,
        summary=alone,
    )


def show(dense: Side, oasis: Side, drafted: Answer | None, report: Report, arguments: argparse.Namespace) -> None:
    answers = enumerate(zip(dense.texts, oasis.texts, strict=True))
    rows = [(question(place(index)), short(theirs), short(ours)) for index, (theirs, ours) in answers]
    report.table("Answers", ("question", dense.name, oasis.name), rows)
    report.table(
        f"{len(dense.texts)} documents of {arguments.tokens:,} tokens, all asked at once",
        ("", dense.name, oasis.name, "oasis / dense"),
        [
            ("correct answers", dense.correct, oasis.correct, None),
            ("time to first token, mean (s)", dense.ttft, oasis.ttft, times(oasis.ttft, dense.ttft)),
            ("all questions answered after (s)", dense.seconds, oasis.seconds, times(oasis.seconds, dense.seconds)),
            ("writing the answers (tokens/s)", dense.rate, oasis.rate, times(oasis.rate, dense.rate)),
            ("KV cache on the device (MB)", dense.device_bytes / 1e6, oasis.device_bytes / 1e6,
             times(oasis.device_bytes, dense.device_bytes)),
            ("KV cache in host memory (MB)", dense.host_bytes / 1e6, oasis.host_bytes / 1e6, None),
            ("wanted pages already on the device", None,
             None if oasis.hit_rate is None else f"{oasis.hit_rate:.1%}", None),
        ],
    )  # fmt: skip
    base = decode_rate([dense.summary])
    summaries = {dense.name: dense.summary, oasis.name: oasis.summary} | (
        {DRAFTING: drafted} if drafted is not None else {}
    )
    report.table(
        f"One summary of a document of {arguments.tokens:,} tokens, nothing else running",
        ("", "tokens/s", "× dense", "tokens per step"),
        [
            (name, decode_rate([answer]), times(decode_rate([answer]), base), accept_length(answer))
            for name, answer in summaries.items()
        ],
    )  # fmt: skip
    report.console.print(explanation(dense, oasis, arguments), markup=False)


def accept_length(answer: Answer) -> float:
    """Tokens per decode step; the first token is the prefill's."""
    return (answer.tokens - 1) / (answer.meta.get("spec_verify_ct") or answer.tokens - 1)


def short(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def times(value: float, base: float) -> str | None:
    return f"{value / base:.2f}×" if base and value else None


def explanation(dense: Side, oasis: Side, arguments: argparse.Namespace) -> str:
    same = sum(a == b for a, b in zip(dense.texts, oasis.texts, strict=True))
    return (
        f"Dense SGLang keeps every token's keys and values on the device and reads all of them for every new token. "
        f"oasis keeps them in host memory and on the device only the pages that attention is about to use: at most "
        f"{arguments.budget:,} tokens per attention head and what is being read in. Here that took "
        f"{oasis.device_bytes / dense.device_bytes:.0%} of dense's device memory, and the answers were written at "
        f"{oasis.rate:.1f} instead of {dense.rate:.1f} tokens per second; {same} of {len(dense.texts)} are word for "
        f"word the same.\n"
        + ("" if oasis.state.get("device") == "cuda" else
           "There is no GPU here, so the \"device\" is a second, bounded pool in this machine's memory; "
           "everything else works as it does with one.\n")
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_parser().parse_args(argv)
    console = Console()
    report = Report("demo", console)
    try:
        model = arguments.model_path or str(default_model(console))
        documents = Documents(model)
        prompts = build_prompts(arguments, documents)
        total = arguments.documents * (arguments.tokens + arguments.new_tokens + 16)
        ratio = max(round(total / arguments.device_tokens + 0.05, 2), 4.0)  # 4 is the backend's own default
        flags = oasis_flags({"token_budget": arguments.budget, "host_to_device_ratio": ratio}, arguments.device_tokens)
        console.print(
            f"{arguments.documents} documents of {arguments.tokens:,} tokens hide one fact each. Dense SGLang gets "
            f"room for all {total:,} tokens on the device, oasis for {arguments.device_tokens:,}. "
            "On two CPU cores this takes several minutes, most of them reading.\n"
        )
        servers = {
            "dense SGLang": Server(model, ["--max-total-tokens", str(total)]),
            "oasis": Server(model, flags),
        }
        summary = summary_prompt(arguments, documents)
        dense, oasis = (
            ask(name, server, prompts, summary, documents, arguments.new_tokens, console)
            for name, server in servers.items()
        )
        draft = shipped_draft(Path(model))
        drafted = None
        if draft is not None:
            chain = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]
            drafted = draft_summary(DRAFTING, Server(model, [*flags, *chain]), summary, console)
        else:
            console.print(f"No draft for {model} comes with this package, so nothing is drafted.", markup=False)
    except ServerFailed as error:
        console.print(f"The demo stopped: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; the servers are stopped.")
        return 130
    show(dense, oasis, drafted, report, arguments)
    if arguments.json:
        report.results = {side.name: as_json(side) for side in (dense, oasis)}
        if drafted is not None:
            report.results[DRAFTING] = summary_json(drafted)
        report.write(arguments.json)
    return 0


def default_model(console: Console) -> Path:
    from oasis_sglang.model import ensure_model

    with console.status("Verifying the demo model") as status:
        return ensure_model(report=lambda step: status.update(step)).path


def summary_json(answer: Answer) -> dict[str, Any]:
    return {"summary_tokens_per_second": decode_rate([answer]), "summary_tokens_per_step": accept_length(answer)}


def as_json(side: Side) -> dict[str, Any]:
    return {
        "answers": side.texts,
        "correct": side.correct,
        "ttft_seconds": [answer.ttft for answer in side.answers],
        "seconds": side.seconds,
        "decode_tokens_per_second": side.rate,
        "device_kv_bytes": side.device_bytes,
        "host_kv_bytes": side.host_bytes,
        "hit_rate": side.hit_rate,
        "oasis_state": side.state,
        **summary_json(side.summary),
    }


if __name__ == "__main__":
    sys.exit(main())
