"""Which pages a lookahead keeps on the device, and how much attention they hold. A helper of `benchmarks.lookahead`.

Nothing is attended here: page scores, selection, swaps and eviction are the project's own functions, called as the tier
calls them, on queries and keys that were captured before. A *row* is one layer of one text and has its own working set.

    step i (first token at positions[i]):   recall what step i - 1 chose -> attended by step i
                                            refresh by the scores of step i's lookahead -> chosen for step i + 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from oasis_sglang.attention.torch_ops import TorchOps, score_codes
from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.host_pool import HostPool
from oasis_sglang.memory_pool.sizing import PoolGeometry
from oasis_sglang.memory_pool.sketch import KeySketches, decode
from oasis_sglang.memory_pool.summaries import KeySummaries
from oasis_sglang.memory_pool.working_set import NONE, WorkingSets
from oasis_sglang.speculative.lookahead import select_pages, select_resident

# As in the tier: high, so that pages dated back by their rank stay above the mark of an empty slot.
FIRST_STEP = 1 << 24


class PageScorer:
    """Scores all complete pages of a text, for all its layers at once, with the project's key summaries."""

    def __init__(self, keys: torch.Tensor, page_size: int, scale: float, sketch: tuple[int, ...] = ()) -> None:
        """
        Args:
            keys: `[L, H, tokens, D]` float32.
            sketch: dimensions that key sketches keep; none: largest and smallest keys instead.
        """
        layers, heads, tokens, dim = keys.shape
        self.layers, self.pages, self.scale, self._page_size = layers, tokens // page_size, scale, page_size
        self._ops = TorchOps()
        # Layers stand in for sequences: page p of layer l is "host page" 1 + l * pages + p.
        geometry = PoolGeometry(
            layers=1, kv_heads=heads, head_dim=dim, itemsize=4, page_size=page_size, sketch=sketch
        )  # fmt: skip
        host = HostPool(layers * self.pages, geometry, torch.float32)
        self._summaries = summaries = KeySketches(host) if sketch else KeySummaries(host)
        host.close()  # only its shape was needed
        ids = 1 + torch.arange(layers * self.pages)
        blocks = keys[:, :, : self.pages * page_size].view(layers, heads, self.pages, page_size, dim)
        summaries.rebuild(0, ids, blocks.transpose(1, 2).flatten(0, 1), page_size)
        self._rows = summaries.row_ids(ids.view(layers, self.pages)).transpose(1, 2)  # [L, H, pages]
        self._dims = list(sketch)
        # Decoded once for all steps: that takes longer than to score.
        self._codes = decode(summaries.table[0][self._rows], len(sketch)) if sketch else None

    def score(self, queries: torch.Tensor, candidates: int) -> torch.Tensor:
        """`[L, H, pages]` scores by `queries` `[L, Hq, D]`; -inf from page `candidates` on."""
        limit = torch.full((self.layers,), candidates)
        if self._codes is not None:
            return score_codes(queries[..., self._dims], *self._codes, limit, self.scale, self._page_size)
        return self._summaries.score(self._ops, 0, queries, self._rows, limit, self.scale)


def page_mass(keys: torch.Tensor, queries: torch.Tensor, page_size: int, scale: float) -> torch.Tensor:
    """The softmax mass that a query gives to each page, mean over the query heads of a KV head.

    Args:
        keys: `[L, H, tokens, D]`, all that the query sees.
        queries: `[L, Hq, D]`.

    Returns:
        `[L, H, pages]`, the incomplete last page included.
    """
    layers, heads, tokens, dim = keys.shape
    weight = torch.matmul(queries.view(layers, heads, -1, dim), keys.transpose(2, 3)).mul_(scale).softmax(-1).mean(2)
    padded = torch.nn.functional.pad(weight, (0, -tokens % page_size))
    return padded.view(layers, heads, -1, page_size).sum(-1)


class Residency:
    """Working sets of rows that decode in step, under the `skip` policy of one configuration."""

    def __init__(self, config: OasisConfig, rows: int, kv_heads: int, columns: int) -> None:
        """
        Args:
            columns: most pages of a sequence, its tail included.
        """
        self.config = config.validate()
        width = config.max_set_pages
        self.sets = WorkingSets(
            layers=1,
            kv_heads=kv_heads,
            device_pages=rows * width,
            rows=rows,
            set_pages=width,
            sequence_pages=columns + 1,
        )
        attempts = [self.sets.reserve(min(columns, width)) for _ in range(rows)]
        self.rows = torch.tensor([a.row for a in attempts if a is not None])
        self.step = FIRST_STEP
        self.chosen = torch.empty(0, dtype=torch.int64)  # [rows, H, K], best first
        self.fetched = 0  # pages, since `settle`
        self._tail = 0

    def settle(self, scores: torch.Tensor, tail: int) -> None:
        """After the prompt: its last query chooses, and the best of the other pages fill the slack.

        Args:
            scores: `[rows, H, columns]`.
        """
        n, heads = scores.shape[:2]
        self._tail = tail
        candidates = torch.full((n,), tail)
        self.chosen = select_pages(scores, candidates, self.config)
        width = int(self.sets.width[self.rows[0]])
        if tail + 1 <= width:
            pages = torch.arange(tail + 1).expand(n, heads, -1)
            used = (torch.arange(tail + 1) + self.step - tail - 1).expand(n, heads, -1)
            used = used.scatter(-1, self.chosen, self.step)
        else:
            budget = self.config.budget_pages
            first = torch.arange(2 * budget, budget, -1, dtype=scores.dtype).expand_as(self.chosen)
            best = scores.scatter(-1, self.chosen, first).topk(width - 1, dim=-1).indices
            pages = torch.cat((best, torch.full((n, heads, 1), tail)), dim=-1)
            used = torch.cat((torch.arange(-1, -width, -1), torch.zeros(1, dtype=torch.int64))) + self.step
            used = used.expand(n, heads, -1)
        for i, row in enumerate(self.rows.tolist()):
            self.sets.place(0, row, pages[i], used[i])

    def recall(self, position: int) -> torch.Tensor:
        """Start the step whose first token is at `position`: the pages it attends to besides its tail,
        `[rows, H, K]`."""
        self.step += 1
        tail = position // self.config.page_size
        wanted = self.chosen
        if tail != self._tail:
            self.sets.start_page(self.rows, torch.full_like(self.rows, tail), self.step)
            # The page just completed was no candidate: it takes the place of the least wanted.
            wanted = wanted.clone()
            wanted[..., -1] = tail - 1
            self._tail = tail
        if self.config.predictor == "none":
            self.chosen = wanted
            self.sets.touch(0, self.rows, self.sets.slot_of[0, self.rows].gather(-1, wanted).long(), self.step)
        return wanted

    def refresh(self, scores: torch.Tensor, wanted: torch.Tensor, position: int) -> None:
        """End that step: fetch what the lookahead wants, up to the cap, and choose the next step's pages among what is
        resident then.

        Args:
            scores: `[rows, H, columns]`, -inf past the candidates.
            wanted: `[rows, H, K]` what `select_pages` says of them.
        """
        sets, tails = self.sets, torch.full_like(self.rows, position // self.config.page_size)
        misses = sets.swap_in(0, self.rows, wanted, tails, self.config.fetch_cap_pages, self.step)
        self.fetched += misses.page.numel()
        self.chosen = wanted
        if misses.left_out:
            slots = sets.slot_of[0, self.rows]
            resident = slots[..., : scores.shape[-1]] != NONE
            self.chosen = select_resident(scores, resident, wanted.shape[-1])
            sets.touch(0, self.rows, slots.gather(-1, self.chosen).long(), self.step)


class Outcome(NamedTuple):
    mass: torch.Tensor  # [steps, rows, H] of the next step's attention, held by what it attends to
    fetched: float  # pages per row, KV head and step


def select(lookahead: torch.Tensor, positions: Sequence[int], config: OasisConfig) -> torch.Tensor:
    """The pages that each step's lookahead wants, `[steps, rows, H, K]`; the same for every cap and slack.

    Args:
        lookahead: `[steps, rows, H, columns]` scores. positions: of each step's first token, at least `steps`.
    """
    tails = [torch.full(lookahead.shape[1:2], position // config.page_size) for position in positions]
    return torch.stack([select_pages(scores, tail, config) for scores, tail in zip(lookahead, tails, strict=False)])


def simulate(
    config: OasisConfig,
    positions: Sequence[int],
    start: torch.Tensor,
    lookahead: torch.Tensor | None,
    wanted: torch.Tensor | None,
    mass: torch.Tensor,
) -> Outcome:
    """Decode on a lookahead's say.

    Args:
        positions: `[steps + 1]` of the first token of each step, a page apart at most.
        start: `[rows, H, columns]` scores by the prompt's last query.
        lookahead: `[steps, rows, H, columns]` scores that each step's lookahead gives, and `wanted` what `select` makes
            of them; None: never refresh.
        mass: `[steps, rows, H, columns]` attention of the step after, per page.
    """
    steps, rows, heads, columns = mass.shape
    residency = Residency(config, rows, heads, columns)
    residency.settle(start, (positions[0] - 1) // config.page_size)
    held = []
    for step, position in enumerate(positions):
        pages = residency.recall(position)
        if step:
            held.append(attended_mass(mass[step - 1], pages, position // config.page_size))
        if lookahead is not None and wanted is not None and step < steps:
            residency.refresh(lookahead[step], wanted[step], position)
    return Outcome(torch.stack(held), residency.fetched / (steps * rows * heads))


def attended_mass(mass: torch.Tensor, pages: torch.Tensor, tail: int) -> torch.Tensor:
    """`[rows, H]` mass of `pages` `[rows, H, K]`, the tail page and any that new tokens reach after it; `mass`
    `[rows, H, columns]`."""
    return mass.gather(-1, pages).sum(-1) + mass[..., tail:].sum(-1)


def agreement(predicted: torch.Tensor, true: torch.Tensor, budget: int) -> torch.Tensor:
    """Share of the true top `budget` pages that the prediction names too.

    Args:
        predicted, true: scores `[..., columns]`.
    """
    one, other = (
        torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(budget, dim=-1).indices, True)
        for scores in (predicted, true)
    )
    return (one & other).sum(-1) / budget


def merge(scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Scores of several draft positions as one: each page's maximum."""
    return torch.stack(list(scores)).amax(0)
