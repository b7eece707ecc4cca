"""Working sets against a model of plain dictionaries, whatever the order of operations (contract 4, C10)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from oasis_sglang.memory_pool.working_set import NONE, PINNED, Attempt, WorkingSets

LAYERS, HEADS, ROWS, SET_PAGES, DEVICE_PAGES, SEQUENCE_PAGES = 2, 2, 3, 5, 11, 12


def make(**changes: int) -> WorkingSets:
    sizes = {
        "layers": LAYERS,
        "kv_heads": HEADS,
        "device_pages": DEVICE_PAGES,
        "rows": ROWS,
        "set_pages": SET_PAGES,
        "sequence_pages": SEQUENCE_PAGES,
    }
    return WorkingSets(**{**sizes, **changes})


def snapshot(sets: WorkingSets) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else repr(value) for name, value in vars(sets).items()
    }


def assert_unchanged(sets: WorkingSets, before: dict[str, Any], except_for: str = "") -> None:
    for name, value in snapshot(sets).items():
        if name != except_for:
            same = torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name]
            assert same, name


class Slots:
    """The model of one (layer, row, head): slot -> page, and slot -> last use; an absent slot is empty."""

    def __init__(self) -> None:
        self.page: dict[int, int] = {}
        self.used: dict[int, int] = {}

    def slot(self, page: int) -> int | None:
        return next((s for s, p in self.page.items() if p == page), None)

    def use_of(self, slot: int) -> int:
        return self.used.get(slot, NONE)

    def put(self, slot: int, page: int, step: int) -> None:
        self.page[slot], self.used[slot] = page, step


class WorkingSetMachine(RuleBasedStateMachine):
    """Model and implementation side by side. Where several slots are equally old, any of them may be the victim: the
    model takes the one that was chosen, after checking that none was older."""

    live = Bundle("live")
    past = Bundle("past")

    def __init__(self) -> None:
        super().__init__()
        self.sets = make()
        self.owned: dict[Attempt, list[int]] = {}
        self.slots: dict[tuple[int, int, int], Slots] = {}
        self.stale = 0
        self.step = 100

    # -- helpers --------------------------------------------------------------------------------------------------

    def _width(self, row: int) -> int:
        return next(len(pages) for attempt, pages in self.owned.items() if attempt.row == row)

    def _of_row(self, row: int) -> list[Slots]:
        return [slots for (_, r, _), slots in self.slots.items() if r == row]

    def _empty(self, row: int) -> None:
        for layer in range(LAYERS):
            for head in range(HEADS):
                self.slots[layer, row, head] = Slots()

    def _actual(self, layer: int, row: int, head: int, page: int) -> int:
        return int(self.sets.slot_of[layer, row, head, page])

    # -- rules ----------------------------------------------------------------------------------------------------

    @rule(target=live, pages=st.integers(1, SET_PAGES))
    def reserve(self, pages: int) -> Attempt | None:
        """C10: a reserve that fails changes nothing; one that succeeds takes exactly what was asked."""
        before = snapshot(self.sets)
        room = DEVICE_PAGES - sum(map(len, self.owned.values()))
        attempt = self.sets.reserve(pages)
        if pages > room or len(self.owned) == ROWS:
            assert attempt is None
            assert_unchanged(self.sets, before)
            return None
        assert attempt is not None
        mine = self.sets.pages[attempt.row, :pages].tolist()
        taken = {page for owned in self.owned.values() for page in owned}
        assert len(set(mine)) == pages
        assert not taken & set(mine)
        assert attempt.row not in {a.row for a in self.owned}
        self.owned[attempt] = mine
        self._empty(attempt.row)
        return attempt

    @rule(target=past, attempt=consumes(live))
    def release(self, attempt: Attempt | None) -> Attempt | None:
        if attempt is not None:
            self.sets.release(attempt)
            del self.owned[attempt]
            self._empty(attempt.row)
        return attempt

    @rule(attempt=past)
    def release_again(self, attempt: Attempt | None) -> None:
        """Contract 4: a late or second release is counted and changes nothing, though the row has a new owner."""
        if attempt is None:
            return
        before = snapshot(self.sets)
        assert not self.sets.holds(attempt)
        self.sets.release(attempt)
        self.stale += 1
        assert_unchanged(self.sets, before, except_for="stale_releases")

    @rule(attempt=live)
    def forget(self, attempt: Attempt | None) -> None:
        if attempt is not None:
            self.sets.forget(attempt.row)
            self._empty(attempt.row)

    @rule(attempt=live, layer=st.integers(0, LAYERS - 1), data=st.data())
    def place(self, attempt: Attempt | None, layer: int, data: st.DataObject) -> None:
        if attempt is None:
            return
        n = data.draw(st.integers(1, self._width(attempt.row)), "pages placed")
        pages = [data.draw(st.permutations(range(SEQUENCE_PAGES)), "order")[:n] for _ in range(HEADS)]
        used = data.draw(st.lists(st.integers(0, self.step), min_size=n, max_size=n), "last used")
        self.sets.place(layer, attempt.row, torch.tensor(pages), torch.tensor(used))
        for head in range(HEADS):
            slots = self.slots[layer, attempt.row, head] = Slots()
            for i in range(n):
                slots.put(i, pages[head][i], used[i])

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def start_page(self, data: st.DataObject) -> None:
        """The new page takes its own slot while the sequence fits, else an empty or the oldest slot."""
        rows, pages = [], []
        for row in sorted(a.row for a in self.owned):
            free = [p for p in range(SEQUENCE_PAGES) if all(s.slot(p) is None for s in self._of_row(row))]
            if free and data.draw(st.booleans(), f"row {row}"):
                rows.append(row)
                pages.append(data.draw(st.sampled_from(free), "page"))
        if not rows:
            return
        self.step += 1
        self.sets.start_page(torch.tensor(rows), torch.tensor(pages), self.step)
        for row, page in zip(rows, pages, strict=True):
            width = self._width(row)
            for (layer, r, head), slots in self.slots.items():
                if r != row:
                    continue
                slot = self._actual(layer, row, head, page)
                if page < width:
                    assert slot == page
                else:
                    assert slots.use_of(slot) == min(slots.use_of(s) for s in range(width))
                slots.put(slot, page, self.step)

    @rule(attempt=live, layer=st.integers(0, LAYERS - 1), data=st.data())
    def touch(self, attempt: Attempt | None, layer: int, data: st.DataObject) -> None:
        if attempt is None:
            return
        self.step += 1
        width = self._width(attempt.row)
        m = data.draw(st.integers(1, width), "slots")
        chosen = [data.draw(st.permutations(range(width)), "which")[:m] for _ in range(HEADS)]
        self.sets.touch(layer, torch.tensor([attempt.row]), torch.tensor([chosen]), self.step)
        for head in range(HEADS):
            for slot in chosen[head]:
                self.slots[layer, attempt.row, head].used[slot] = self.step

    @rule(layer=st.integers(0, LAYERS - 1), cap=st.integers(1, SET_PAGES), data=st.data())
    def swap_in(self, layer: int, cap: int, data: st.DataObject) -> None:
        """Misses come in up to the cap, most wanted first; their victims are the least recently used slots, never the
        tail and never a page wanted in this step."""
        rows, tails = [], []
        for row in sorted(a.row for a in self.owned):
            heads = [set(self.slots[layer, row, h].page.values()) for h in range(HEADS)]
            everywhere = sorted(set.intersection(*heads))
            if everywhere and self._width(row) > 1:
                rows.append(row)
                tails.append(data.draw(st.sampled_from(everywhere), "tail"))
        if not rows:
            return
        k = data.draw(st.integers(1, min(map(self._width, rows)) - 1), "wanted per head")
        wanted = [
            [
                [p for p in data.draw(st.permutations(range(SEQUENCE_PAGES)), "wanted") if p != tail][:k]
                for _ in range(HEADS)
            ]
            for tail in tails
        ]
        self.step += 1
        misses = self.sets.swap_in(layer, torch.tensor(rows), torch.tensor(wanted), torch.tensor(tails), cap, self.step)
        came = {
            (rows[i], h, p): s
            for i, h, p, s in zip(*(x.tolist() for x in misses[:4]), strict=True)  # type: ignore[arg-type]
        }
        assert len(came) == misses.page.numel(), "a page came in twice"
        left_out = 0
        for i, row in enumerate(rows):
            for head in range(HEADS):
                left_out += self._swap_one(layer, row, head, wanted[i][head], tails[i], cap, came)
        assert not came, "pages came in that nobody wanted"
        assert misses.left_out == left_out

    def _swap_one(
        self,
        layer: int,
        row: int,
        head: int,
        wanted: list[int],
        tail: int,
        cap: int,
        came: dict[tuple[int, int, int], int],
    ) -> int:
        slots = self.slots[layer, row, head]
        missing = [p for p in wanted if slots.slot(p) is None]
        for page in (*wanted, tail):
            if (slot := slots.slot(page)) is not None:
                slots.used[slot] = self.step
        for page in missing[:cap]:
            victim = came.pop((row, head, page))
            oldest = min(slots.use_of(s) for s in range(self._width(row)) if slots.use_of(s) != self.step)
            assert slots.use_of(victim) == oldest, "an older page was spared"
            slots.put(victim, page, self.step)
        return len(missing[cap:])

    # -- after every rule -----------------------------------------------------------------------------------------

    @invariant()
    def equals_the_model(self) -> None:
        sets = self.sets
        sets.check_integrity()
        assert sets.requests == len(self.owned)
        assert sets.owned_pages == sum(map(len, self.owned.values()))
        assert sets.free_pages == DEVICE_PAGES - sets.owned_pages
        assert sets.free_rows == ROWS - len(self.owned)
        assert sets.stale_releases == self.stale
        for attempt, pages in self.owned.items():
            assert sets.holds(attempt)
            assert sets.pages[attempt.row].tolist() == pages + [0] * (SET_PAGES - len(pages))
        for (layer, row, head), slots in self.slots.items():
            owned = [a for a in self.owned if a.row == row]
            width = self._width(row) if owned else 0
            expected = [slots.page.get(s, NONE) for s in range(SET_PAGES)]
            assert sets.page_of[layer, row, head].tolist() == expected
            used = [slots.use_of(s) if s < width else PINNED for s in range(SET_PAGES)]
            assert sets.last_used[layer, row, head].tolist() == used


TestWorkingSets = WorkingSetMachine.TestCase
TestWorkingSets.settings = settings(
    max_examples=80, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
