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
`random`, and with `--draft` an EAGLE-3 head. `draft (3)` has three positions; `draft (3) + own` adds the query of the
token just decoded, which a verify step computes too.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import common
from benchmarks.lookahead_capture import Capture, Target
from benchmarks.lookahead_drafts import DraftSource, EagleDraft, NgramDraft, RandomDraft
from benchmarks.lookahead_simulation import Outcome, PageScorer, agreement, merge, page_mass, simulate
from oasis_sglang.config import OasisConfig
from oasis_sglang.serving import Documents, Report

INSTRUCTION = "Read the following text, then answer the question at its end.\n\n"
QUESTIONS = (
    "Which statements, methods and rules does this text describe? Explain each of them in detail.",
    "Write a tutorial for beginners about what this text describes, with examples.",
    "Summarise every section of this text, one after the other, and say what is most important in each.",
    "What can go wrong when one does what this text describes, and how is it avoided? Give many cases.",
)
ORACLE = "oracle"
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
        "--follow-text", action="store_true",
        help="decode the running text of the documents instead of the model's own answer to a question",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of random drafts (default: %(default)s)")
    return parser


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part.strip()]


@dataclass
class Lookahead:
    """Scores that one kind of lookahead gives before each step, for every row (a layer of a context)."""

    name: str
    draft_tokens: int | None
    own: bool  # with a draft: the query of the step's own token is merged in
    scores: torch.Tensor | None  # [steps, rows, H, columns]
    right: torch.Tensor | None = None  # [steps, rows] bool: the first guess was what was decoded

    @property
    def label(self) -> str:
        if self.draft_tokens is None:
            return self.name
        return f"{self.name} ({self.draft_tokens}){' + own' if self.own else ''}"

    @property
    def key(self) -> dict[str, Any]:
        """Its columns in the JSON."""
        return {"lookahead": self.name, "draft_tokens": self.draft_tokens, "own": self.own, "label": self.label}


@dataclass
class Measured:
    """What the simulations need, rows of all contexts together (R rows, H KV heads)."""

    layers: int
    start: torch.Tensor  # [R, H, columns] scores by the prompt's last query
    true: torch.Tensor  # [steps, R, H, columns] scores by the next step's query, of the pages that a lookahead sees
    own: torch.Tensor  # [steps, R, H, columns] the same, of all that the next step can choose from
    mass: torch.Tensor  # [steps, R, H, columns] attention of the next step
    lookaheads: list[Lookahead]


class Tables:
    """All scores and masses of one captured text."""

    def __init__(self, capture: Capture, steps: int, page_size: int) -> None:
        self.capture, self.page = capture, page_size
        self.columns = (capture.context + steps) // page_size + 1
        self.steps = range(steps)
        self._scorer = PageScorer(capture.keys, page_size, capture.scale)

    def tail(self, step: int) -> int:
        """The page that step `step` writes to; those before it can be chosen."""
        return (self.capture.context + step) // self.page

    def score(self, queries: torch.Tensor, candidates: int) -> torch.Tensor:
        scores = self._scorer.score(queries, candidates)[..., : self.columns]
        return torch.nn.functional.pad(scores, (0, self.columns - scores.shape[-1]), value=-torch.inf)

    def true_query(self, step: int) -> torch.Tensor:
        """`[L, Hq, D]` of the token that step `step` decodes; step -1 is the prompt's last token."""
        return self.capture.queries[step + 1]

    def scores(self, queries: Sequence[torch.Tensor], behind: int = 0) -> torch.Tensor:
        """`[steps, L, H, columns]` by `queries[step]`, of the pages complete `behind` steps later."""
        return torch.stack([self.score(queries[step], self.tail(step + behind)) for step in self.steps])

    def mass(self) -> torch.Tensor:
        """`[steps, L, H, columns]` of the step after each."""
        rows = []
        for step in self.steps:
            seen = self.capture.context + step + 2
            mass = page_mass(self.capture.keys[:, :, :seen], self.true_query(step + 1), self.page, self.capture.scale)
            rows.append(torch.nn.functional.pad(mass, (0, self.columns - mass.shape[-1])))
        return torch.stack(rows)

    def drafts(self, name: str, positions: int) -> list[torch.Tensor]:
        """Scores by the queries at each of the first `positions` draft positions."""
        if name == ORACLE:  # the very queries of the tokens to come
            at = [[self.true_query(step + 1 + j) for step in self.steps] for j in range(positions)]
        else:
            at = [[self.capture.drafted[name][step, j] for step in self.steps] for j in range(positions)]
        return [self.scores(queries) for queries in at]


def measure(captures: Sequence[Capture], steps: int, draft_tokens: Sequence[int], page_size: int) -> Measured:
    layers = captures[0].queries.shape[1]
    parts: dict[tuple[str, int | None, bool], list[torch.Tensor]] = {}
    start, own, mass = [], [], []
    right: dict[str, list[torch.Tensor]] = {}
    for capture in captures:
        tables = Tables(capture, steps, page_size)
        start.append(tables.score(tables.true_query(-1), (capture.context - 1) // page_size))
        own.append(tables.scores([tables.true_query(step + 1) for step in range(steps)], behind=1))
        mass.append(tables.mass())
        previous = tables.scores([tables.true_query(step) for step in range(steps)])
        parts.setdefault(("previous", None, False), []).append(previous)
        for name in (*capture.drafted, ORACLE):
            scores = tables.drafts(name, max(draft_tokens))
            for count in draft_tokens:
                parts.setdefault((name, count, False), []).append(merge(scores[:count]))
                parts.setdefault((name, count, True), []).append(merge([previous, *scores[:count]]))
            if name != ORACLE:
                first = capture.right(name)[:steps, :1]
                right.setdefault(name, []).append(first.expand(-1, layers))
    lookaheads = [Lookahead("none", None, False, None)]
    for (name, positions, with_own), scores in parts.items():
        guessed = torch.cat(right[name], dim=1) if name in right else None
        lookaheads.append(Lookahead(name, positions, with_own, torch.cat(scores, dim=1), guessed))
    true = next(x.scores for x in lookaheads if x.label == f"{ORACLE} (1)")
    assert true is not None
    return Measured(layers, torch.cat(start), true, torch.cat(own, dim=1), torch.cat(mass, dim=1), lookaheads)


def by_layer(values: torch.Tensor, layers: int) -> list[float]:
    """Mean per layer of `[steps, rows, H]`, rows context by context."""
    steps, _, heads = values.shape
    return [round(x, 5) for x in values.view(steps, -1, layers, heads).mean((0, 1, 3)).tolist()]


def summary(values: torch.Tensor, layers: int) -> dict[str, Any]:
    each = by_layer(values, layers)
    return {"mean": round(values.mean().item(), 5), "lowest_layer": min(each), "by_layer": each}


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


def configurations(arguments: argparse.Namespace, never: bool) -> Iterator[OasisConfig]:
    """All of the grid. Without a refresh nothing is fetched, and neither cap nor slack has anything to do."""
    for budget in map(int, numbers(arguments.budgets)):
        for slack in [0.0] if never else numbers(arguments.slack_ratios):
            for fetch in [1.0] if never else numbers(arguments.fetch_ratios):
                yield OasisConfig(
                    token_budget=budget, page_size=arguments.page_size, slack_ratio=slack, fetch_ratio=fetch,
                    miss_policy="skip", predictor="none" if never else "previous",
                )  # fmt: skip


def simulations(arguments: argparse.Namespace, measured: Measured, report: Report) -> Iterator[dict[str, Any]]:
    work = [(x, config) for x in measured.lookaheads for config in configurations(arguments, x.scores is None)]

    @torch.inference_mode()
    def one(lookahead: Lookahead, config: OasisConfig) -> Outcome:
        return simulate(config, arguments.tokens, measured.start, lookahead.scores, measured.mass)

    # The tensors of a step are small: simulations side by side on one thread each are faster than one on all threads.
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=lambda: torch.set_num_threads(1)) as pool,
        Progress(*COLUMNS, TimeRemainingColumn(), console=report.console) as progress,
    ):
        task = progress.add_task("Simulating residency", total=len(work))
        for (lookahead, config), outcome in zip(work, pool.map(one, *zip(*work, strict=True)), strict=True):
            yield {
                **lookahead.key,
                "budget": config.token_budget,
                "fetch_ratio": config.fetch_ratio,
                "fetch_cap_pages": config.fetch_cap_pages,
                "slack_ratio": config.slack_ratio,
                "fetched_pages": round(outcome.fetched, 3),
                "by_quarter": [round(part.mean().item(), 5) for part in outcome.mass.chunk(4)],
                **summary(outcome.mass, measured.layers),
            }
            progress.advance(task)


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
    if name == "random":
        return RandomDraft(target.vocabulary, arguments.seed)
    if name == "ngram":
        return NgramDraft()
    if name == "draft":
        return EagleDraft(arguments.draft, target.model)
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


def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    torch.manual_seed(arguments.seed)
    draft_tokens = sorted({1, *map(int, numbers(arguments.draft_tokens))})
    budgets = list(map(int, numbers(arguments.budgets)))
    texts, kept = [], []
    documents = Documents(common.model_path(arguments))
    sources = ["random", "ngram", *(["draft"] if arguments.draft else [])]
    for capture, question in captures(arguments, report, sources):
        texts.append(decoded_text(capture, question, documents))
        kept.append(capture)
    with report.console.status("Scoring pages"), torch.inference_mode():
        measured = measure(kept, arguments.steps, draft_tokens, arguments.page_size)
    del kept
    with torch.inference_mode():
        return {
            "contexts": texts,
            "ceilings": list(ceilings(measured, budgets, arguments.page_size, arguments.tokens)),
            "agreement": list(agreements(measured, budgets, arguments.page_size)),
            "attention_mass": list(simulations(arguments, measured, report)),
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


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("lookahead")
    report.results = run(arguments, report)
    show(report.results, arguments, report)
    common.write(report, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
