"""Where a step's tokens and pages are, against what `WorkingSets` does on a CPU host."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_scale import Scale
from benchmarks.gpu_sets import on_device
from benchmarks.gpu_stage import Item
from benchmarks.gpu_verdict import equal
from oasis_sglang.kernels.place import place, remember
from oasis_sglang.memory_pool.working_set import NONE, WorkingSets

STEP = 1 << 20


def items(scale: Scale) -> list[Item]:
    found = [Item(f"place t={t}", 4.0, partial(check_place, scale, t)) for t in (1, 3)]
    return [*found, Item("remember", 3.0, partial(check_remember, scale))]


class PlaceCase:
    """A dense sequence, two sparse ones, and a padded row. New tokens begin a page of one sparse sequence, and of the
    other where there are several; all of them go on where the last step ended."""

    def __init__(self, scale: Scale, t: int) -> None:
        random = torch.Generator().manual_seed(7)
        page, heads = scale.page, scale.kv_heads
        self.t, self.budget = t, scale.budget // page
        width = self.budget + self.budget // 4 + 3
        longest = 3 * self.budget
        self.sets = WorkingSets(
            layers=1, kv_heads=heads, device_pages=4 * width, rows=4, set_pages=width, sequence_pages=longest + 2
        )
        attempts = [self.sets.reserve(width) for _ in range(3)]
        rows = [attempt.row for attempt in attempts if attempt is not None]
        self.rows, self.sparse_rows = torch.tensor([*rows, NONE]), torch.tensor([NONE, *rows[1:], NONE])
        firsts = torch.tensor([(self.budget - 1) * page - 2 * t, longest * page, 2 * self.budget * page + page - 2, 0])
        positions = firsts.view(-1, 1) + torch.arange(t)
        self.pages, self.offsets = positions // page, positions % page
        # What the last step chose is the most wanted of what is held, and its tail was used then.
        self.chosen = torch.zeros(4, heads, self.budget, dtype=torch.int32)
        self.chosen_tail = torch.zeros(5, dtype=torch.int64)
        for row, first in zip(rows[1:], firsts[1:3].tolist(), strict=True):
            tail = (first - 1) // page
            each = [torch.randperm(tail, generator=random)[: width - 1] for _ in range(heads)]
            held = torch.stack([torch.cat((torch.tensor([tail]), pages)) for pages in each])
            self.sets.place(0, row, held, STEP - 1 - torch.arange(width))
            self.chosen[row] = held[:, 1 : self.budget + 1]
            self.chosen_tail[row] = tail
        whole = torch.arange(int(self.pages[0, -1]) + 1).expand(heads, -1)
        self.sets.place(0, rows[0], whole, torch.arange(whole.shape[1]))
        order = torch.randperm(4 * width, generator=random) + 1
        self.sets.cells.rows[0, 1:] = self.sets.cells.rows[0, order]
        self.columns = self.budget + 1 + (t > 1)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token rows and page table; the maps change."""
        sets, live = self.sets, self.rows[:3]
        for column in range(0, self.t, max(self.t - 1, 1)):
            pages = self.pages[:3, column]
            missing = sets.slot_of[0, live, 0].gather(1, pages.view(-1, 1)).squeeze(1) == NONE
            sets.start_page(live[missing], pages[missing], STEP)
            sets.touch_page(live, pages, STEP)
        slots = sets.slot_of[0, live].gather(2, self.pages[:3].unsqueeze(1).expand(-1, sets.slot_of.shape[2], -1))
        owned = sets.pages[live].unsqueeze(1).expand(-1, slots.shape[1], -1).gather(2, slots.long())
        head = torch.arange(slots.shape[1]).view(-1, 1)
        at = sets.cells.rows[0, owned, head].transpose(1, 2)  # [3, t, H]
        token_rows = torch.cat((at, torch.full((1, *at.shape[1:]), NONE)))
        table = torch.zeros(4, slots.shape[1], self.columns, dtype=torch.int64)
        count = int(self.pages[0, -1]) + 1
        table[0, :, :count] = sets.cells.rows[0, sets.pages[live[0], :count]].T
        sparse, tail = live[1:], self.pages[1:3, 0]
        wanted = self.chosen[sparse].long()
        fresh = self.chosen_tail[sparse] != tail
        wanted[fresh, :, -1] = tail[fresh].view(-1, 1) - 1
        sets.fill_table(0, sparse, wanted, tail, table, torch.tensor([1, 2]))
        if self.t > 1:
            spills = (self.pages[1:3, -1] != tail).view(-1, 1)
            table[1:3, :, -1] = at[1:, -1].masked_fill(~spills, 0)
        return token_rows.flatten(0, 1), table


def check_place(scale: Scale, t: int) -> dict[str, Any]:
    case = PlaceCase(scale, t)
    sets, heads = on_device(case.sets, scale.device), scale.kv_heads
    step = torch.tensor([STEP], dtype=torch.int32, device=scale.device)
    token_rows = torch.full((4 * t, heads), -7, device=scale.device)
    table = torch.full((4, heads, case.columns), -7, device=scale.device)
    faults = torch.zeros(1, dtype=torch.int32, device=scale.device)
    inputs = (x.to(scale.device) for x in (case.rows, case.sparse_rows, case.pages, case.offsets))
    chosen, tails = case.chosen.to(scale.device), case.chosen_tail.to(scale.device)
    place(0, *inputs, sets, step, token_rows, table, faults, case.budget, chosen=chosen, chosen_tail=tails)
    want_rows, want_table = case.expected()
    pairs = {name: (getattr(sets, name), getattr(case.sets, name)) for name in ("slot_of", "page_of", "last_used")}
    pairs |= {"token rows": (token_rows, want_rows), "table": (table, want_table), "faults": (faults, faults * 0)}
    return equal(["place"], f"n=4 t={t} K={case.budget}", pairs)


def check_remember(scale: Scale) -> dict[str, Any]:
    heads, budget = scale.kv_heads, scale.budget // scale.page
    attended = torch.randint(0, 1 << 20, (3, heads, budget), generator=torch.Generator().manual_seed(8))
    rows = torch.tensor([2, NONE, 0])
    want = torch.full((4, heads, budget), -7, dtype=torch.int32)
    got = want.clone().to(scale.device)
    want[rows[[0, 2]]] = attended[[0, 2]].to(torch.int32)
    remember(attended.to(scale.device), rows.to(scale.device), got)
    return equal(["remember"], f"n=3 K={budget}", {"chosen": (got, want)})
