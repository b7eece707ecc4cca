"""Page scores of every lookahead, and the attention that pages get, from captured texts. A helper of
`benchmarks.lookahead`.

Shapes: C contexts, L layers, R = C * L rows, H KV heads, D head dim. Step i decodes the token at position context + i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.lookahead_capture import Capture
from benchmarks.lookahead_simulation import PageScorer, merge, page_mass

ORACLE = "oracle"
RANDOM = "random"


@dataclass
class Lookahead:
    """Scores that one kind of lookahead gives before each step."""

    name: str
    draft_tokens: int | None
    own: bool  # with a draft: the query of the step's own token is merged in
    scores: torch.Tensor | None  # [steps, R, H, columns]
    right: torch.Tensor | None = None  # [steps, R] bool: the first guess was what was decoded

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
class Chain:
    """One context decoded by steps that accept right guesses: every step verifies its own token and the guesses after
    it, and the next goes on behind the last accepted one."""

    source: str
    draft_tokens: int
    positions: list[int]  # [steps + 1] of the first token of each step
    tokens: list[int]  # [steps + 1] that each step commits
    start: torch.Tensor  # [L, H, columns] scores by the prompt's last query
    whole: torch.Tensor  # [steps + 1, L, H, columns] by every query of the step, accepted or not
    last: torch.Tensor  # [steps, L, H, columns] by the last accepted one
    mass: torch.Tensor  # [steps, L, H, columns] attention of the next step, mean over the tokens it commits


@dataclass
class Measured:
    """What the simulations need, rows context by context."""

    layers: int
    start: torch.Tensor  # [R, H, columns] scores by the prompt's last query
    true: torch.Tensor  # [steps, R, H, columns] scores by the next step's query, of the pages that a lookahead sees
    own: torch.Tensor  # [steps, R, H, columns] the same, of all that the next step can choose from
    mass: torch.Tensor  # [steps, R, H, columns] attention of the next step
    lookaheads: list[Lookahead]
    chains: list[Chain]


class Tables:
    """All scores and masses of one captured text."""

    def __init__(self, capture: Capture, page_size: int, sketch: tuple[int, ...] = ()) -> None:
        self.capture, self.page = capture, page_size
        self.columns = (capture.context + capture.steps) // page_size + 1
        self._scorer = PageScorer(capture.keys, page_size, capture.scale, sketch)

    def tail(self, step: int) -> int:
        """The page of the token that step `step` decodes; those before it can be chosen."""
        return (self.capture.context + step) // self.page

    def score(self, queries: torch.Tensor, tail: int) -> torch.Tensor:
        """`[L, H, columns]` by `queries` `[L, Hq, D]`; -inf from page `tail` on."""
        scores = self._scorer.score(queries, tail)[..., : self.columns]
        return torch.nn.functional.pad(scores, (0, self.columns - scores.shape[-1]), value=-torch.inf)

    def true_query(self, step: int) -> torch.Tensor:
        """`[L, Hq, D]` of the token that step `step` decodes; step -1 is the prompt's last token."""
        return self.capture.queries[step + 1]

    def start(self) -> torch.Tensor:
        return self.score(self.true_query(-1), self.tail(-1))

    def of_steps(self, steps: int, ahead: int, seen_ahead: int = 0) -> torch.Tensor:
        """`[steps, L, H, columns]` by the true query `ahead` steps later, of the pages complete `seen_ahead` later."""
        return torch.stack([self.score(self.true_query(i + ahead), self.tail(i + seen_ahead)) for i in range(steps)])

    def of_draft(self, steps: int, name: str, position: int) -> torch.Tensor:
        """`[steps, L, H, columns]` by the query of each step's draft position, counted from 0."""
        if name == ORACLE:  # the very query of the token to come
            return self.of_steps(steps, position + 1)
        drafted = self.capture.drafted[name]
        return torch.stack([self.score(drafted[i, position], self.tail(i)) for i in range(steps)])

    def mass(self) -> torch.Tensor:
        """`[captured steps - 1, L, H, columns]` of the step after each."""
        rows = []
        for step in range(self.capture.steps - 1):
            seen = self.capture.context + step + 2
            mass = page_mass(self.capture.keys[:, :, :seen], self.true_query(step + 1), self.page, self.capture.scale)
            rows.append(torch.nn.functional.pad(mass, (0, self.columns - mass.shape[-1])))
        return torch.stack(rows)

    def chain(self, source: str, drafts: int, whole: torch.Tensor, previous: torch.Tensor, mass: torch.Tensor) -> Chain:
        """Walk the text as speculation with this source would.

        Args:
            whole: `[steps, L, H, columns]` scores by a step's own query and its drafts'.
            previous: `[steps, L, H, columns]` by a step's own. mass: as `mass` returns.
        """
        steps = whole.shape[0]
        right = None if source == ORACLE else self.capture.right(source)[:, :drafts].sum(1).tolist()
        at, accepted = [0], []
        while at[-1] < steps:
            accepted.append(drafts if right is None else right[at[-1]])
            at.append(at[-1] + accepted[-1] + 1)
        at = at[: len(accepted)]  # the last one is only looked at
        last = []
        for step, kept in zip(at[:-1], accepted[:-1], strict=True):
            newest = step + kept
            same = newest < steps and self.tail(newest) == self.tail(step)
            last.append(previous[newest] if same else self.score(self.true_query(newest), self.tail(step)))
        return Chain(
            source,
            drafts,
            [self.capture.context + step for step in at],
            [kept + 1 for kept in accepted],
            self.start(),
            whole[at],
            torch.stack(last),
            # row t - 1 of `mass` is that of the token of step t
            torch.stack([mass[i - 1 : i + kept].mean(0) for i, kept in zip(at[1:], accepted[1:], strict=True)]),
        )


def measure(
    captures: Sequence[Capture],
    steps: int,
    draft_tokens: Sequence[int],
    page_size: int,
    sketch: tuple[int, ...] = (),
) -> Measured:
    """Each capture has at least as many more steps than `steps` as there are draft tokens."""
    layers = captures[0].queries.shape[1]
    parts: dict[tuple[str, int | None, bool], list[torch.Tensor]] = {}
    start, own, mass, chains = [], [], [], []
    right: dict[str, list[torch.Tensor]] = {}
    for capture in captures:
        tables = Tables(capture, page_size, sketch)
        start.append(tables.start())
        own.append(tables.of_steps(steps, 1, seen_ahead=1))
        every_mass = tables.mass()
        mass.append(every_mass[:steps])
        previous = tables.of_steps(steps, 0)
        parts.setdefault(("previous", None, False), []).append(previous)
        for name in (*capture.drafted, ORACLE):
            scores = [tables.of_draft(steps, name, position) for position in range(max(draft_tokens))]
            for count in draft_tokens:
                parts.setdefault((name, count, False), []).append(merge(scores[:count]))
                whole = merge([previous, *scores[:count]])
                parts.setdefault((name, count, True), []).append(whole)
                if name != RANDOM and count == max(draft_tokens):
                    chains.append(tables.chain(name, count, whole, previous, every_mass))
            if name != ORACLE:
                first = capture.right(name)[:steps, :1]
                right.setdefault(name, []).append(first.expand(-1, layers))
    lookaheads = [Lookahead("none", None, False, None)]
    for (kind, positions, with_own), each in parts.items():
        guessed = torch.cat(right[kind], dim=1) if kind in right else None
        lookaheads.append(Lookahead(kind, positions, with_own, torch.cat(each, dim=1), guessed))
    true = next(x.scores for x in lookaheads if x.label == f"{ORACLE} (1)")
    assert true is not None
    return Measured(layers, torch.cat(start), true, torch.cat(own, dim=1), torch.cat(mass, dim=1), lookaheads, chains)
