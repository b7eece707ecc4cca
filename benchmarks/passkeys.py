"""Does the backend find what dense attention finds? Distinct passkeys in long contexts, answer by answer.

Every prompt hides a number of its own in a text of its own, in words that the demo model understands; dense SGLang
answers each once, then the backend answers all of them in several rounds, many at a time, on a device pool that holds
only a few of the contexts. Reported: how many answers equal dense's for the same prompt, how many hold the number, and
whether all rounds are identical. Later rounds are served from the radix cache; before the last one it is flushed, so
that both ways are compared.

In float32: 16-bit types round differently when a prompt is cut into other chunks or shares its batch with others, and
where a small model does not know the answer, it hangs on nearly tied tokens, dense SGLang's too.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import common
from oasis_sglang.demo import INSTRUCTION, PLACES, fact, question
from oasis_sglang.serving import Answer, Client, Documents, Report, ask_all, greedy


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__)
    parser.set_defaults(dtype="float32")
    parser.add_argument("--prompts", type=int, default=64, help="prompts, each with its own key (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=20, help="longest answer (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=16, help="prompts at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the oasis server (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="token budget (default: %(default)s)")
    parser.add_argument("--device-tokens", type=int, default=24_000, help="device pool (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of keys and depths (default: %(default)s)")
    parser.add_argument("--required", type=int, default=62, help="answers that must equal dense's")
    parser.add_argument("--check", action="store_true", help="exit with 1 when that is missed or rounds differ")
    return parser


def passkey_prompts(arguments: argparse.Namespace, documents: Documents) -> tuple[list[list[int]], list[str]]:
    """Prompts and their keys: distinct five-digit numbers at depths spread over the text."""
    chance = random.Random(arguments.seed)
    keys = [str(key) for key in chance.sample(range(10_000, 100_000), arguments.prompts)]
    prompts = []
    for index, key in enumerate(keys):
        where, depth = PLACES[index % len(PLACES)], chance.uniform(0.05, 0.95)
        planted = fact(where, key)
        prompts.append(documents.with_question(index, arguments.tokens, question(where), planted, depth, INSTRUCTION))
    return prompts, keys


def one_round(
    arguments: argparse.Namespace, client: Client, prompts: list[list[int]], label: str, report: Report
) -> list[Answer]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    done: set[int] = set()
    with Progress(*columns, console=report.console) as progress:
        task = progress.add_task(label, total=len(prompts))

        def seen(index: int, answer: Answer) -> None:
            if answer.meta.get("finish_reason"):
                done.add(index)
                progress.update(task, completed=len(done))

        return ask_all(client, prompts, greedy(arguments.new_tokens), arguments.concurrency, on_chunk=seen)


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = common.model_path(arguments)
    prompts, keys = passkey_prompts(arguments, Documents(model))
    room = arguments.prompts * (arguments.tokens + arguments.new_tokens + 32)
    # Dense needs room for the running requests only; the oasis host pool keeps all prompts for the cached rounds.
    dense = common.dense(arguments.concurrency * (arguments.tokens + arguments.new_tokens + 32))
    ours = common.oasis(
        arguments, "oasis", f"oasis, budget {arguments.budget:,}",
        {"token_budget": arguments.budget, "host_to_device_ratio": round(room / arguments.device_tokens + 0.1, 2)},
        arguments.device_tokens,
    )  # fmt: skip
    with common.started(arguments, dense, model, report.console) as (_, client):
        expected = [answer.text for answer in one_round(arguments, client, prompts, "dense", report)]
    rounds = []
    with common.started(arguments, ours, model, report.console) as (_, client):
        for number in range(arguments.rounds):
            flushed = number > 0 and number == arguments.rounds - 1
            if flushed:
                client.flush_cache()
            answers = one_round(arguments, client, prompts, f"oasis, round {number + 1}", report)
            texts = [answer.text for answer in answers]
            equal = sum(a == b for a, b in zip(texts, expected, strict=True))
            report.console.print(f"{equal} of {len(prompts)} answers equal dense's", highlight=False)
            rounds.append({
                "flushed_before": flushed,
                "cached_tokens": sum(answer.cached_tokens for answer in answers),
                "retractions": sum(answer.meta.get("num_retractions") or 0 for answer in answers),
                "equal_to_dense": equal,
                "key_found": found(texts, keys),
                "answers": texts,
            })  # fmt: skip
        state = client.oasis()
    return {
        "prompts": len(prompts),
        "keys": keys,
        "dense": {"key_found": found(expected, keys), "answers": expected},
        "rounds": rounds,
        "rounds_identical": all(each["answers"] == rounds[0]["answers"] for each in rounds),
        "flags": ours.flags,
        "oasis_state": state,
    }


def found(answers: list[str], keys: list[str]) -> int:
    return sum(key in answer for answer, key in zip(answers, keys, strict=True))


def show(results: dict[str, Any], report: Report) -> None:
    rows: list[tuple[Any, ...]] = [("dense SGLang", None, None, results["dense"]["key_found"])]
    for number, each in enumerate(results["rounds"], start=1):
        name = f"oasis, round {number}" + (" (cache flushed before)" if each["flushed_before"] else "")
        rows.append((name, each["cached_tokens"], each["equal_to_dense"], each["key_found"]))
    report.table(
        f"{results['prompts']} passkeys", ("server", "cached tokens", "answers equal to dense's", "key found"), rows,
        caption=f"All rounds identical: {'yes' if results['rounds_identical'] else 'no'}",
    )  # fmt: skip
    for index, (key, expected) in enumerate(zip(results["keys"], results["dense"]["answers"], strict=True)):
        given = [each["answers"][index] for each in results["rounds"]]
        if set(given) != {expected}:
            line = f"prompt {index}, key {key}: dense {expected!r}, rounds {given!r}"
            report.console.print(line, markup=False, soft_wrap=True)


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("passkeys")
    report.results = run(arguments, report)
    show(report.results, report)
    common.write(report, arguments)
    good = report.results["rounds_identical"] and all(
        each["equal_to_dense"] >= arguments.required for each in report.results["rounds"]
    )
    return 1 if arguments.check and not good else 0


if __name__ == "__main__":
    raise SystemExit(main())
