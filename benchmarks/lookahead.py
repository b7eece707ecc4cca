"""Does a draft token's query know the next step's pages better than the previous token's, and does it matter?

No server: the model decodes long contexts densely in float32 (transformers), every query and key is kept, and the
project's page scores, selection, fetch cap and eviction then run on them for every configuration. Per layer and KV
head, at the next step's true query:

    agreement       share of its own top-K pages that the lookahead's query picks too
    attention mass  softmax mass, over all tokens, of the pages it attends to: with `skip`, what earlier lookaheads
                    brought to the device within the fetch cap, and the local tail

Lookaheads: `previous`, the query of the token just decoded; `none`, the pages that the prompt's last query chose; and
drafts, the target's queries of the tokens guessed for the next positions, a page counting for what the position that
wants it most says. Guesses come from `oracle` (the true tokens), `ngram` (what followed the same tokens earlier),
`random`, and with `--draft` `eagle` (an EAGLE-3 head) and `draft` (the head, and copies where the text repeats, as in
the server). `draft (3)` has three positions; `draft (3) + own` adds the query of the
token just decoded, which a verify step computes too. Drafts only look ahead, one token is decoded per step, as in
the OasisKV paper; a last table has steps that accept right guesses and go on behind them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import common
from benchmarks.lookahead_capture import Capture, Target
from benchmarks.lookahead_drafts import CopyingDraft, DraftSource, EagleDraft, NgramDraft, RandomDraft
from benchmarks.lookahead_measure import RANDOM, Lookahead, Measured, measure
from benchmarks.lookahead_simulation import agreement, attended_mass, select, simulate
from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.sketch import dims_of
from oasis_sglang.serving import Documents, Report

INSTRUCTION = "Read the following text, then answer the question at its end.\n\n"
QUESTIONS = (
    "Which statements, methods and rules does this text describe? Explain each of them in detail.",
    "Write a tutorial for beginners about what this text describes, with examples.",
    "Summarise every section of this text, one after the other, and say what is most important in each.",
    "What can go wrong when one does what this text describes, and how is it avoided? Give many cases.",
)
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def arguments_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.strip(), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", metavar="DIR", help="model folder (default: the demo model, built if missing)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file (default: a new one in results/tmp/)")
    parser.add_argument("--draft", metavar="DIR", help="EAGLE-3 head to guess tokens with, besides the references")
    parser.add_argument("--contexts", type=int, default=3, help="texts to decode (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=7000, help="tokens of a context (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=128, help="decode steps to measure (default: %(default)s)")
    parser.add_argument("--draft-tokens", default="1,3", help="draft positions per step (default: %(default)s)")
    parser.add_argument("--budgets", default="512,1024,2048", help="token budgets (default: %(default)s)")
    parser.add_argument("--fetch-ratios", default="0.01,0.02,0.05,0.1,1", help="fetch caps (default: %(default)s)")
    parser.add_argument("--slack-ratios", default="0,1,2", help="resident pages beyond it (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=16, help="(default: %(default)s)")
    parser.add_argument(
        "--summary", choices=("sketch", "minmax"), default="sketch", help="how pages are scored (default: %(default)s)"
    )
    parser.add_argument(
        "--follow-text", action="store_true",
        help="decode the running text of the documents instead of the model's own answer to a question",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of random drafts (default: %(default)s)")
    return parser


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part.strip()]


def summary(values: torch.Tensor, layers: int) -> dict[str, Any]:
    """Mean of `[steps, rows, H]`, rows context by context, in all and per layer. Those of the layers are one string: as
    a list they would be most of the lines of the JSON."""
    steps, _, heads = values.shape
    each = values.view(steps, -1, layers, heads).mean((0, 1, 3)).tolist()
    return {
        "mean": round(values.mean().item(), 5),
        "lowest_layer": round(min(each), 5),
        "by_layer": " ".join(f"{x:.4f}" for x in each),
    }


def agreements(measured: Measured, budgets: Sequence[int], page_size: int) -> Iterator[dict[str, Any]]:
    for lookahead in measured.lookaheads:
        for budget in budgets:
            scores = lookahead.scores
            if scores is None:
                scores = measured.start.expand_as(measured.true)
            values = agreement(scores, measured.true, budget // page_size)
            row = {
                **lookahead.key,
                "budget": budget,
                **summary(values, measured.layers),
            }
            if lookahead.right is not None:
                hits = lookahead.right
                row["guess_right"] = round(hits.float().mean().item(), 5)
                row["mean_guess_right"] = round(values[hits].mean().item(), 5) if bool(hits.any()) else None
                row["mean_guess_wrong"] = round(values[~hits].mean().item(), 5) if not bool(hits.all()) else None
            yield row


def ceilings(measured: Measured, budgets: Sequence[int], page_size: int, context: int) -> Iterator[dict[str, Any]]:
    """Mass that the next query's own choice would hold, by the page scores (`wait`) and by its true attention."""
    steps = measured.mass.shape[0]
    tails = [(context + step + 1) // page_size for step in range(steps)]
    at = torch.tensor(tails).view(-1, 1, 1, 1).expand(*measured.mass.shape[:3], 1)
    tail_mass = measured.mass.gather(-1, at).squeeze(-1)
    candidates = measured.mass.scatter(-1, at, -1.0)
    for budget in budgets:
        pages = measured.own.topk(budget // page_size, dim=-1).indices
        own = measured.mass.gather(-1, pages).sum(-1) + tail_mass
        best = candidates.topk(budget // page_size, dim=-1).values.sum(-1) + tail_mass
        yield {
            "budget": budget,
            "own_top_k": summary(own, measured.layers),
            "best_pages": summary(best, measured.layers),
            "local_tail": summary(tail_mass, measured.layers),
        }


class Simulations:
    """The grid: every lookahead, budget, slack and cap."""

    def __init__(self, arguments: argparse.Namespace, measured: Measured) -> None:
        self.arguments, self.measured = arguments, measured
        self._first = range(arguments.tokens, arguments.tokens + arguments.steps + 1)

    def _configs(self, budget: int) -> Iterator[OasisConfig]:
        for slack in numbers(self.arguments.slack_ratios):
            for fetch in numbers(self.arguments.fetch_ratios):
                yield OasisConfig(
                    token_budget=budget, page_size=self.arguments.page_size, slack_ratio=slack, fetch_ratio=fetch,
                    miss_policy="skip",
                )  # fmt: skip

    def one_by_one(self, lookahead: Lookahead, budget: int) -> Iterator[dict[str, Any]]:
        """A token per step; drafts only look ahead."""
        measured, scores = self.measured, lookahead.scores
        if scores is None:  # then nothing is fetched, and neither cap nor slack has anything to do
            never = OasisConfig(
                token_budget=budget, page_size=self.arguments.page_size, slack_ratio=0.0, miss_policy="skip",
                predictor="none",
            )  # fmt: skip
            work = [(never, simulate(never, self._first, measured.start, None, None, measured.mass))]
        else:
            configs = list(self._configs(budget))
            wanted = select(scores, self._first, configs[0])
            work = [(c, simulate(c, self._first, measured.start, scores, wanted, measured.mass)) for c in configs]
        for config, outcome in work:
            quarters = [round(part.mean().item(), 5) for part in outcome.mass.chunk(4)]
            yield {**lookahead.key, **_settings(config), "fetched_pages": round(outcome.fetched, 3),
                   "by_quarter": quarters, **summary(outcome.mass, measured.layers)}  # fmt: skip

    def accepting(self, source: str, budget: int) -> Iterator[dict[str, Any]]:
        """Steps that accept right guesses. All tokens count alike, however many of them a step commits."""
        chains = [chain for chain in self.measured.chains if chain.source == source]
        configs = list(self._configs(budget))
        weights = [torch.tensor(chain.tokens[1:]) for chain in chains]
        steps = sum(each.numel() for each in weights)
        tokens = sum(int(each.sum()) for each in weights)
        key = {"source": source, "draft_tokens": chains[0].draft_tokens, "accept_length": round(tokens / steps, 3)}
        now = []
        for chain, weight in zip(chains, weights, strict=True):
            pages = select(chain.whole[1:], chain.positions[1:], configs[0])
            tails = [position // self.arguments.page_size for position in chain.positions[1:]]
            held = [attended_mass(m, p, tail) for m, p, tail in zip(chain.mass, pages, tails, strict=True)]
            now.append(torch.stack(held).repeat_interleave(weight, dim=0))
        yield {**key, "predictor": None, "budget": budget, **summary(torch.cat(now), self.measured.layers)}
        for predictor in ("draft", "previous"):
            scores = [chain.whole[:-1] if predictor == "draft" else chain.last for chain in chains]
            wanted = [select(x, chain.positions, configs[0]) for x, chain in zip(scores, chains, strict=True)]
            for config in configs:
                outcomes = [
                    simulate(config, chain.positions, chain.start, x, w, chain.mass)
                    for chain, x, w in zip(chains, scores, wanted, strict=True)
                ]
                mass = torch.cat([o.mass.repeat_interleave(w, dim=0) for o, w in zip(outcomes, weights, strict=True)])
                fetched = sum(o.fetched * o.mass.shape[0] for o in outcomes) / steps
                yield {**key, "predictor": predictor, **_settings(config), "fetched_pages": round(fetched, 3),
                       **summary(mass, self.measured.layers)}  # fmt: skip

    def run(self, report: Report) -> dict[str, list[dict[str, Any]]]:
        budgets = list(map(int, numbers(self.arguments.budgets)))
        sources = dict.fromkeys(chain.source for chain in self.measured.chains)
        work = [
            *(("attention_mass", self.one_by_one, x, budget) for x in self.measured.lookaheads for budget in budgets),
            *(("accepting", self.accepting, x, budget) for x in sources for budget in budgets),
        ]

        @torch.inference_mode()
        def one(job: tuple[str, Callable[..., Iterator[dict[str, Any]]], Any, int]) -> list[dict[str, Any]]:
            _, function, what, budget = job
            return list(function(what, budget))

        results: dict[str, list[dict[str, Any]]] = {"attention_mass": [], "accepting": []}
        # The tensors of a step are small: simulations side by side on one thread each are faster than one on all.
        with (
            ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=lambda: torch.set_num_threads(1)) as pool,
            Progress(*COLUMNS, TimeRemainingColumn(), console=report.console) as progress,
        ):
            task = progress.add_task("Simulating residency", total=len(work))
            for job, rows in zip(work, pool.map(one, work), strict=True):
                results[job[0]] += rows
                progress.advance(task)
        return results


def _settings(config: OasisConfig) -> dict[str, Any]:
    return {
        "budget": config.token_budget,
        "fetch_ratio": config.fetch_ratio,
        "fetch_cap_pages": config.fetch_cap_pages,
        "slack_ratio": config.slack_ratio,
    }


def captures(arguments: argparse.Namespace, report: Report, sources: Sequence[str]) -> Iterator[tuple[Capture, str]]:
    """The decoded texts, each with the question it answers."""
    model = common.model_path(arguments)
    documents = Documents(model)
    target = Target(model)
    chain = max(map(int, numbers(arguments.draft_tokens)))
    steps = arguments.steps + chain  # the oracle looks beyond the last step
    with Progress(*COLUMNS, console=report.console) as progress:
        for index in range(arguments.contexts):
            question = "" if arguments.follow_text else QUESTIONS[index % len(QUESTIONS)]
            follow = None
            if arguments.follow_text:
                text = documents.text(index, arguments.tokens + steps)
                prompt, follow = text[: arguments.tokens], text[arguments.tokens :]
            else:
                prompt = documents.with_question(index, arguments.tokens, question, instruction=INSTRUCTION)
            task = progress.add_task(f"Decoding context {index + 1}", total=steps)
            drafts = [source(name, arguments, target) for name in sources]

            def advance(task: Any = task) -> None:
                progress.advance(task)

            yield target.decode(prompt, steps, drafts, chain, follow, advance), question


def source(name: str, arguments: argparse.Namespace, target: Target) -> DraftSource:
    if name == RANDOM:
        return RandomDraft(target.vocabulary, arguments.seed)
    if name == "ngram":
        return NgramDraft()
    if name in ("eagle", "draft"):
        head = EagleDraft(arguments.draft, target.model)
        return CopyingDraft(head) if name == "draft" else head
    raise ValueError(f"no draft source is called {name!r}")


def decoded_text(capture: Capture, question: str, documents: Documents) -> dict[str, Any]:
    decoded = capture.tokens[capture.context :]
    grams = list(zip(*(decoded[i:] for i in range(4)), strict=False))
    return {
        "question": question,
        "decoded": documents.decode(decoded),
        "distinct_4grams": round(len(set(grams)) / max(len(grams), 1), 3),
        # share of steps whose first 1, 2, ... guesses are what was decoded
        "guesses_right": {
            name: [round(x, 4) for x in capture.right(name).float().mean(0).tolist()] for name in capture.guesses
        },
    }


def sketch(arguments: argparse.Namespace) -> tuple[int, ...]:
    """Dimensions that key sketches keep of the model's keys, none with `--summary minmax`."""
    from transformers import AutoConfig

    if arguments.summary == "minmax":
        return ()
    config = AutoConfig.from_pretrained(common.model_path(arguments))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dims_of(config, config, head_dim)


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    torch.manual_seed(arguments.seed)
    draft_tokens = sorted({1, *map(int, numbers(arguments.draft_tokens))})
    budgets = list(map(int, numbers(arguments.budgets)))
    texts, kept = [], []
    documents = Documents(common.model_path(arguments))
    sources = [RANDOM, "ngram", *(["eagle", "draft"] if arguments.draft else [])]
    for capture, question in captures(arguments, report, sources):
        texts.append(decoded_text(capture, question, documents))
        kept.append(capture)
    with report.console.status("Scoring pages"), torch.inference_mode():
        measured = measure(kept, arguments.steps, draft_tokens, arguments.page_size, sketch(arguments))
    del kept
    with torch.inference_mode():
        return {
            "contexts": texts,
            "ceilings": list(ceilings(measured, budgets, arguments.page_size, arguments.tokens)),
            "agreement": list(agreements(measured, budgets, arguments.page_size)),
            **Simulations(arguments, measured).run(report),
        }


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def show(results: dict[str, Any], arguments: argparse.Namespace, report: Report) -> None:
    budgets = list(map(int, numbers(arguments.budgets)))
    labels = list(dict.fromkeys(row["label"] for row in results["agreement"]))
    rows: list[tuple[Any, ...]] = []
    for name in labels:
        mine = {row["budget"]: row for row in results["agreement"] if row["label"] == name}
        last = mine[budgets[-1]]
        rows.append((
            name, *(percent(mine[b]["mean"]) for b in budgets), percent(last["lowest_layer"]),
            percent(last.get("guess_right")), percent(last.get("mean_guess_right")),
            percent(last.get("mean_guess_wrong")),
        ))  # fmt: skip
    report.table(
        f"Agreement with the next step's own top-K, {arguments.contexts} contexts of {arguments.tokens:,} tokens, "
        f"{arguments.steps} steps",
        ("lookahead", *(f"budget {b:,}" for b in budgets), f"lowest layer ({budgets[-1]:,})", "first guess right",
         "agreement when right", "when wrong"), rows,
    )  # fmt: skip
    for ceiling in results["ceilings"]:
        budget = ceiling["budget"]
        grid = [row for row in results["attention_mass"] if row["budget"] == budget]
        slacks = sorted({row["slack_ratio"] for row in grid})
        fetches = sorted({row["fetch_ratio"] for row in grid})
        rows = []
        for name in labels:
            mine_at = {(row["slack_ratio"], row["fetch_ratio"]): row for row in grid if row["label"] == name}
            if len(mine_at) == 1:
                only = next(iter(mine_at.values()))
                rows.append((name, None, *[percent(only["mean"])] * len(fetches), f"{only['fetched_pages']:.1f}"))
                continue
            for slack in slacks:
                cells = [mine_at[slack, fetch] for fetch in fetches]
                fetched = " ".join(f"{cell['fetched_pages']:.1f}" for cell in cells)
                rows.append((name, f"{slack:g}", *(percent(cell["mean"]) for cell in cells), fetched))
        report.table(
            f"Attention mass held by what the next step attends to, budget {budget:,}",
            ("lookahead", "slack", *(f"cap {fetch:g}" for fetch in fetches), "fetched"), rows,
            caption="Fetched: pages per KV head and step, cap by cap. "
            f"Its own top-K: {percent(ceiling['own_top_k']['mean'])}; the best pages there are: "
            f"{percent(ceiling['best_pages']['mean'])}; the local tail alone: {percent(ceiling['local_tail']['mean'])}",
        )  # fmt: skip


def show_accepting(results: dict[str, Any], report: Report) -> None:
    for ceiling in results["ceilings"]:
        budget = ceiling["budget"]
        grid = [row for row in results["accepting"] if row["budget"] == budget]
        fetches = sorted({row["fetch_ratio"] for row in grid if row["predictor"]})
        rows = []
        for kind in dict.fromkeys((row["source"], row["predictor"], row.get("slack_ratio")) for row in grid):
            cells = [row for row in grid if (row["source"], row["predictor"], row.get("slack_ratio")) == kind]
            cells.sort(key=lambda row: row.get("fetch_ratio", 0))
            source, predictor, slack = kind
            length = cells[0]["accept_length"]
            if predictor is None:
                same = [percent(cells[0]["mean"])] * len(fetches)
                rows.append((f"{source}, {length:.2f} tokens a step", "wait", None, *same, None))
                continue
            fetched = " ".join(f"{cell['fetched_pages']:.1f}" for cell in cells)
            rows.append(("", predictor, f"{slack:g}", *(percent(cell["mean"]) for cell in cells), fetched))
        report.table(
            f"The same where right guesses are accepted, {results['accepting'][0]['draft_tokens']} draft tokens, "
            f"budget {budget:,}",
            ("guesses", "predictor", "slack", *(f"cap {fetch:g}" for fetch in fetches), "fetched"), rows,
            caption="wait: what the step's own queries choose. draft: all queries of the step before. previous: the "
            "query of the last token accepted.",
        )  # fmt: skip


def main() -> int:
    parser = arguments_parser()
    arguments = parser.parse_args()
    if max(numbers(arguments.budgets)) > arguments.tokens - 2 * arguments.page_size:
        parser.error(f"--tokens {arguments.tokens} leaves a budget of {arguments.budgets} nothing to choose")
    report = Report("lookahead")
    report.results = run(arguments, report)
    show(report.results, arguments, report)
    show_accepting(report.results, report)
    common.write(report, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
