"""Working sets: which logical page each device page holds, per request, layer and KV head.

    request row r owns W physical pages, the same ids in every layer and for every KV head:

        pages[r]                 w:   0    1    2   ...  W-1
                                    [ 17,  4,  90,  ...,  -- ]      page of the device pool (where it is: `Cells`)
        page_of[layer, r, h]     w:   0    1    2   ...  W-1
                                    [  5, 31,  -1,  ...,  12 ]      logical page it holds for head h, -1 none
        slot_of[layer, r, h]     p:   0    1  ...   5   ...  12
                                    [ -1, -1, ...,  0, ..., W-1]    the inverse

A logical page is a page's position in its sequence. While a sequence fits, slot p holds page p for every head.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from oasis_sglang.memory_pool.cells import Cells

NONE = -1
# Larger than any step, so that a slot marked with it is never the least recently used.
PINNED = torch.iinfo(torch.int32).max
# Steps order the pages of a working set by use. They start high so that those of a prompt, which are dated back by
# their rank, stay above the mark of an empty slot.
FIRST_STEP = 1 << 24


class Attempt(NamedTuple):
    """Handle of one stay of a request on the device. A row's next request has another generation."""

    row: int
    generation: int


class Misses(NamedTuple):
    """Pages to bring in, as parallel `[n]` int64 tensors; the maps already say they are there."""

    request: torch.Tensor  # index into the `rows` that `swap_in` was given
    head: torch.Tensor
    page: torch.Tensor  # logical
    slot: torch.Tensor
    evicted: torch.Tensor  # logical page that was in the slot, or NONE
    left_out: int  # misses beyond the cap


class WorkingSets:
    """Device pages and what they hold. Holds no KV itself."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        device_pages: int,
        rows: int,
        set_pages: int,
        sequence_pages: int,
        spare_pages: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            device_pages: pages that can be owned; id 0 is the reserved page and not one of them.
            spare_pages: pages of the pool after those, for copies in flight (`Cells`).
            rows: most requests on the device at once.
            set_pages: W, most pages one request can own.
            sequence_pages: pages of the longest sequence.
            device: of the maps; who owns what is known on the host too.
        """
        self.device_pages = device_pages
        self.set_pages = set_pages
        self.sequence_pages = sequence_pages
        self.cells = Cells(
            layers=layers, kv_heads=kv_heads, device_pages=device_pages, spare_pages=spare_pages, device=device
        )
        self.pages = torch.zeros(rows, set_pages, dtype=torch.int64, device=device)
        self.width = torch.zeros(rows, dtype=torch.int64, device=device)
        slots, logical = (layers, rows, kv_heads, set_pages), (layers, rows, kv_heads, sequence_pages)
        self.page_of = torch.full(slots, NONE, dtype=torch.int32, device=device)
        self.slot_of = torch.full(logical, NONE, dtype=torch.int32, device=device)
        self.last_used = torch.full(slots, PINNED, dtype=torch.int32, device=device)
        self._free_pages = list(range(device_pages, 0, -1))
        self._free_rows = list(range(rows - 1, -1, -1))
        self.generations = np.zeros(rows, dtype=np.int64)  # of each row's newest attempt
        self._owned: dict[int, list[int]] = {}  # row -> its pages
        self.stale_releases = 0

    # -- ownership ------------------------------------------------------------------------------------------------

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def owned_pages(self) -> int:
        return self.device_pages - len(self._free_pages)

    @property
    def requests(self) -> int:
        return len(self._owned)

    def reserve(self, pages: int) -> Attempt | None:
        """Own `pages` device pages in a row of their own, or None when there are not enough."""
        if not 0 < pages <= self.set_pages:
            raise ValueError(f"{pages} pages asked for, a working set holds 1 to {self.set_pages}")
        if pages > len(self._free_pages) or not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._owned[row] = [self._free_pages.pop() for _ in range(pages)]
        self.pages[row, :pages] = torch.tensor(self._owned[row])
        self.pages[row, pages:] = 0
        self.width[row] = pages
        self.last_used[:, row, :, :pages] = NONE
        self.generations[row] += 1
        return Attempt(row, int(self.generations[row]))

    def holds(self, attempt: Attempt) -> bool:
        return attempt.row in self._owned and int(self.generations[attempt.row]) == attempt.generation

    def release(self, attempt: Attempt) -> None:
        """Give an attempt's pages back. A second release, or one of a past attempt, is counted and ignored."""
        if not self.holds(attempt):
            self.stale_releases += 1
            return
        row = attempt.row
        self._free_pages.extend(self._owned.pop(row))
        self._free_rows.append(row)
        self.forget(row)
        self.last_used[:, row] = PINNED
        self.pages[row] = 0
        self.width[row] = 0

    def forget(self, row: int) -> None:
        """Empty every slot of a row; its pages stay owned."""
        self.page_of[:, row] = NONE
        self.slot_of[:, row] = NONE
        self.last_used[:, row, :, : self.owned(row)] = NONE

    def owned(self, row: int) -> int:
        """Device pages that a row owns, known without asking the device."""
        return len(self._owned.get(row, ()))

    # -- contents -------------------------------------------------------------------------------------------------

    def place(self, layer: int, row: int, pages: torch.Tensor, last_used: torch.Tensor) -> None:
        """Set what one layer of a row holds: slot i of head h holds `pages[h, i]`; other slots become empty.

        Args:
            pages: `[kv_heads, n]` logical pages, distinct per head.
            last_used: `[n]` or `[kv_heads, n]` steps.
        """
        n = pages.shape[1]
        width = self.owned(row)
        if n > width:
            raise RuntimeError(f"{n} pages placed in a working set of {width}")
        self.page_of[layer, row] = NONE
        self.slot_of[layer, row] = NONE
        self.page_of[layer, row, :, :n] = pages.to(torch.int32)
        slots = torch.arange(n, dtype=torch.int32, device=pages.device).expand_as(pages)
        self.slot_of[layer, row].scatter_(1, pages, slots)
        self.last_used[layer, row, :, :width] = NONE
        self.last_used[layer, row, :, :n] = last_used.to(torch.int32)

    def start_page(self, rows: torch.Tensor, pages: torch.Tensor, step: int) -> None:
        """Give a new, empty logical page a slot in every layer and head of each row: slot i for page i while the
        sequence fits, else an empty or the least recently used one.

        Args:
            rows: `[n]` distinct rows.
            pages: `[n]` the page that starts in each.
        """
        used = self.last_used[:, rows]  # [layers, n, heads, W]; slots a row does not own are PINNED
        fits = (pages < self.width[rows]).view(1, -1, 1, 1)
        slot = torch.where(fits, pages.view(1, -1, 1, 1), used.argmin(-1, keepdim=True))
        held = self.page_of[:, rows]
        evicted = held.gather(-1, slot)
        inverse = self.slot_of[:, rows]
        _clear(inverse, evicted)
        target = pages.view(1, -1, 1, 1).expand_as(slot)
        inverse.scatter_(-1, target, slot.to(torch.int32))
        held.scatter_(-1, slot, target.to(torch.int32))
        used.scatter_(-1, slot, step)
        self.slot_of[:, rows], self.page_of[:, rows], self.last_used[:, rows] = inverse, held, used

    def touch(self, layer: int, rows: torch.Tensor, slots: torch.Tensor, step: int) -> None:
        """Mark slots `[n, heads, m]` as used at `step`."""
        used = self.last_used[layer, rows]
        self.last_used[layer, rows] = used.scatter_(-1, slots, step)

    def touch_page(self, rows: torch.Tensor, pages: torch.Tensor, step: int) -> None:
        """Mark resident page `pages[i]` of row `rows[i]` as used at `step` in every layer and head."""
        slot = self.slot_of[:, rows].gather(-1, pages.view(1, -1, 1, 1).expand(*self.slot_of[:, rows].shape[:3], 1))
        used = self.last_used[:, rows]
        self.last_used[:, rows] = used.scatter_(-1, slot.long(), step)

    def swap_in(
        self, layer: int, rows: torch.Tensor, wanted: torch.Tensor, tail: torch.Tensor, cap: int, step: int
    ) -> Misses:
        """Make room for the wanted pages that are not resident, evicting the least recently used others.

        Args:
            wanted: `[n, heads, k]` logical pages, most wanted first.
            tail: `[n]` the page each row is writing to, never evicted.
            cap: most pages brought in per head; what exceeds it, or the slots not used in this step, stays out.

        Returns:
            The misses admitted. Wanted and resident slots are marked used at `step`.
        """
        slot_of = self.slot_of[layer, rows]
        slots = slot_of.gather(-1, wanted).long()
        missing = slots == NONE
        used = self.last_used[layer, rows]
        # amax: a miss, clamped to slot 0, leaves that slot's value alone
        stamp = torch.where(missing, NONE, step).to(torch.int32)
        used.scatter_reduce_(-1, slots.clamp_min(0), stamp, "amax")
        tail_slot = slot_of.gather(-1, tail.view(-1, 1, 1).expand(-1, slot_of.shape[1], 1)).long()
        used.scatter_(-1, tail_slot, step)
        rank = missing.cumsum(-1) - 1
        # what this step uses is never evicted, even where that leaves misses out
        room = (used < step).sum(-1, keepdim=True).clamp_max(cap)
        admitted = missing & (rank < room)
        most = int(admitted.sum(-1).max()) if admitted.numel() else 0
        if most:
            # slots used in this very step (wanted or tail) must not be victims
            order = torch.where(used == step, PINNED, used).topk(most, dim=-1, largest=False).indices
            request, head, column = admitted.nonzero(as_tuple=True)
            page = wanted[request, head, column]
            slot = order[request, head, rank[request, head, column]]
            row = rows[request]
            evicted = self.page_of[layer, row, head, slot].long()
            leaving = evicted != NONE
            self.slot_of[layer, row[leaving], head[leaving], evicted[leaving]] = NONE
            self.page_of[layer, row, head, slot] = page.to(torch.int32)
            self.slot_of[layer, row, head, page] = slot.to(torch.int32)
            used[request, head, slot] = step
        else:
            request = head = page = slot = evicted = torch.empty(0, dtype=torch.int64)
        self.last_used[layer, rows] = used
        left_out = int(missing.sum()) - page.numel()
        return Misses(request, head, page, slot, evicted, left_out)

    def fill_table(
        self,
        layer: int,
        rows: torch.Tensor,
        pages: torch.Tensor,
        tail: torch.Tensor,
        table: torch.Tensor,
        at: torch.Tensor,
    ) -> None:
        """Write where resident pages are into a page table.

        Args:
            pages: `[n, heads, k]` logical pages. tail: `[n]`.
            table: `[any, heads, more than k]`; row `at[i]` gets the pool rows of `pages[i]`, then of the tail.
        """
        n, heads, count = pages.shape
        wanted = torch.cat((pages, tail.view(n, 1, 1).expand(n, heads, 1)), dim=-1)
        slots = self.slot_of[layer, rows].gather(-1, wanted).long()
        owned = self.pages[rows].unsqueeze(1).expand(n, heads, -1).gather(-1, slots)
        head = torch.arange(heads, device=pages.device).view(1, -1, 1)
        table[at, :, : count + 1] = self.cells.rows[layer, owned, head]

    # -- invariants -----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless ownership and both maps agree. For tests and idle checks."""
        owned = [page for pages in self._owned.values() for page in pages]
        everything = sorted(owned + self._free_pages)
        assert everything == list(range(1, self.device_pages + 1)), "device pages lost, duplicated or foreign"
        assert len(self._free_rows) + len(self._owned) == self.pages.shape[0], "rows lost"
        for row in range(self.pages.shape[0]):
            width = self.owned(row)
            assert int(self.width[row]) == width
            assert self.pages[row, :width].tolist() == self._owned.get(row, []), f"row {row} names pages of others"
            assert (self.pages[row, width:] == 0).all(), f"row {row} names pages beyond its width"
            assert (self.page_of[:, row, :, width:] == NONE).all(), f"row {row} holds pages in slots it does not own"
        layer, row, head, slot = (self.page_of != NONE).nonzero(as_tuple=True)
        page = self.page_of[layer, row, head, slot].long()
        assert (self.slot_of[layer, row, head, page] == slot).all(), "slot_of is not the inverse of page_of"
        assert int((self.slot_of != NONE).sum()) == layer.numel(), "slot_of names slots that page_of calls empty"


def _clear(inverse: torch.Tensor, pages: torch.Tensor) -> None:
    """Set `inverse[..., page] = NONE` for the pages that are not NONE."""
    index = pages.clamp_min(0).long()
    keep = inverse.gather(-1, index)
    inverse.scatter_(-1, index, torch.where(pages == NONE, keep, NONE))
