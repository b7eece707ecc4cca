"""What steps on a device must do, one (layer, sequence, KV head) after the other, in plain Python over float64."""

from __future__ import annotations

from typing import NamedTuple

import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.working_set import NONE, WorkingSets
from tests.unit import oracle


class Asked(NamedTuple):
    """Queries `[any, Hq, D]` of a sequence in a layer that choose pages among the first `candidates`."""

    queries: torch.Tensor
    candidates: int


class HeadSet:
    """Slots of one KV head of one sequence in one layer."""

    def __init__(self, sets: WorkingSets, layer: int, row: int, head: int) -> None:
        width = sets.owned(row)
        self.pages = sets.page_of[layer, row, head, :width].tolist()
        self.used = sets.last_used[layer, row, head, :width].tolist()

    def start(self, page: int, step: int, may_start: bool) -> None:
        if page not in self.pages:
            assert may_start, f"page {page} is nowhere"
            oldest = min(range(len(self.used)), key=lambda w: (self.used[w], w))
            slot = page if page < len(self.pages) else oldest
            self.pages[slot] = page
        self.used[self.pages.index(page)] = step

    def choose(self, weights: torch.Tensor, tail: int, step: int, config: OasisConfig) -> list[int]:
        """The best pages that are there after at most a cap of them were brought in, best first."""
        ranked = sorted(range(len(weights)), key=lambda p: (-float(weights[p]), p))
        wanted = ranked[: config.budget_pages]
        for page in (*wanted, tail):
            if page in self.pages:
                self.used[self.pages.index(page)] = step
        missing = [p for p in wanted if p not in self.pages]
        leaving = sorted((u, w) for w, u in enumerate(self.used) if u < step)
        for page, (_, slot) in zip(missing[: config.fetch_cap_pages], leaving, strict=False):
            self.pages[slot], self.used[slot] = page, step
        if any(p not in self.pages for p in wanted):
            wanted = [p for p in ranked if p in self.pages][: config.budget_pages]
            for page in wanted:
                self.used[self.pages.index(page)] = step
        return wanted


class Follower:
    """One sequence through all its steps: keeps its own record of tokens, and of what is where.

    Args:
        record: K and V per layer, `[tokens, H, D]` float64.
        chosen: per layer and head what the prompt chose for the first step (`skip`), and the tail page then.
    """

    def __init__(
        self,
        config: OasisConfig,
        sets: WorkingSets,
        row: int,
        record: list[tuple[torch.Tensor, torch.Tensor]],
        scale: float,
        probe: bool,
    ) -> None:
        self.config, self.sets, self.row, self.record, self.scale = config, sets, row, record, scale
        self.probe = probe
        layers, heads = sets.page_of.shape[0], sets.page_of.shape[2]
        self.heads = [[HeadSet(sets, layer, row, head) for head in range(heads)] for layer in range(layers)]
        self.chosen: list[list[list[int]]] = [[[] for _ in range(heads)] for _ in range(layers)]
        self.chosen_tail = -1
        self._asked: dict[int, Asked] = {}

    @property
    def tokens(self) -> int:
        return self.record[0][0].shape[0]

    def is_sparse(self, length: int) -> bool:
        pages = (length - 1) // self.config.page_size
        return length >= self.config.min_sparse_len and pages > self.config.budget_pages

    def layer(
        self, layer: int, step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Outputs `[t, Hq, D]` for new tokens q `[t, Hq, D]`, k and v `[t, H, D]`, and each head's older pages."""
        config, page, t, before = self.config, self.config.page_size, q.shape[0], self.tokens
        first, last = before // page, (before + t - 1) // page
        sparse = self.is_sparse(before + 1)
        keys, values = (torch.cat((old, new.double())) for old, new in zip(self.record[layer], (k, v), strict=True))
        attended = []
        for head, held in enumerate(self.heads[layer]):
            for number in dict.fromkeys((first, last)):
                held.start(number, step, before % page == 0 or number != first)
            if not sparse:
                assert held.pages[: last + 1] == list(range(last + 1))
                attended.append(list(range(first)))
            elif config.miss_policy == "wait":
                asking = q[:1] if self.probe else q
                weights = oracle.page_weights(asking.double(), keys, first, config, self.scale)
                attended.append(held.choose(weights[head], first, step, config))
            else:
                pages = list(self.chosen[layer][head])
                if self.chosen_tail != first:
                    pages[-1] = first - 1
                if config.predictor == "none":
                    self.chosen[layer][head] = pages
                    for number in pages:
                        held.used[held.pages.index(number)] = step
                assert all(number in held.pages for number in pages)
                attended.append(pages)
        out = self._attend(q, keys, values, attended, first * page)
        if config.miss_policy == "skip" and self.is_sparse(before + 1 + t):
            if config.predictor == "previous" and t > 1:
                self._asked[layer] = Asked(q, first)
            elif config.predictor != "none" or not sparse:
                self._choose_ahead(layer, Asked(q, first), keys, step)
        return out, attended

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attended: list[list[int]], tail: int
    ) -> torch.Tensor:
        page, before, outs = self.config.page_size, keys.shape[0] - q.shape[0], []
        for j in range(q.shape[0]):
            ks, vs = [], []
            for head, pages in enumerate(attended):
                lanes = [x for p in pages for x in range(p * page, (p + 1) * page)]
                lanes += range(tail, before + j + 1)
                ks.append(keys[lanes, head])
                vs.append(values[lanes, head])
            outs.append(oracle.attention(q[j].double(), torch.stack(ks), torch.stack(vs), self.scale))
        return torch.stack(outs)

    def _choose_ahead(self, layer: int, asked: Asked, keys: torch.Tensor, step: int) -> None:
        weights = oracle.page_weights(asked.queries.double(), keys, asked.candidates, self.config, self.scale)
        for head, held in enumerate(self.heads[layer]):
            self.chosen[layer][head] = held.choose(weights[head], asked.candidates, step, self.config)

    def finish(self, step: int, t: int, new: list[tuple[torch.Tensor, torch.Tensor]], accepted: int) -> None:
        """The first `accepted` of the step's t new tokens `[t, H, D]` per layer are kept."""
        for layer, asked in self._asked.items():
            last = asked._replace(queries=asked.queries[accepted - 1 : accepted])
            self._choose_ahead(layer, last, self.record[layer][0], step)
        self._asked.clear()
        if self.config.miss_policy == "skip" and self.is_sparse(self.tokens + 1 + t):
            self.chosen_tail = self.tokens // self.config.page_size
        for layer, (k, v) in enumerate(new):
            old = self.record[layer]
            self.record[layer] = tuple(  # type: ignore[assignment]
                torch.cat((x, y[:accepted].double())) for x, y in zip(old, (k, v), strict=True)
            )

    def check_maps(self) -> None:
        """The working sets hold what they should, slot by slot, and know when it was last used."""
        for layer, heads in enumerate(self.heads):
            for head, held in enumerate(heads):
                width = len(held.pages)
                assert self.sets.page_of[layer, self.row, head, :width].tolist() == held.pages
                assert self.sets.last_used[layer, self.row, head, :width].tolist() == held.used
                inverse = self.sets.slot_of[layer, self.row, head].tolist()
                assert {p: w for w, p in enumerate(held.pages) if p != NONE} == {
                    p: w for p, w in enumerate(inverse) if w != NONE
                }
