"""Where on the device each (layer, page, KV head) piece of a page is.

A working set owns device pages by their ids. What such an id stands for is a *cell* per layer and KV head: a row of the
pool that holds one page's keys or values of one head. At first page p of head h is in row `p * kv_heads + h` of every
layer. Copies that run behind a step's back go to *spare* rows, which no page table names; when one has landed, its cell
and the spare row change places. So whoever copies late, or never finishes, can spoil nothing that is read.

    rows[layer, page, head]        row of the cell                 page 0, the reserved page, never moves
    spare, per layer and head      rows that belong to no cell, lent to copies in flight and given back
"""

from __future__ import annotations

import numpy as np
import torch


class Cells:
    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        device_pages: int,
        spare_pages: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            device_pages: pages that working sets can own, the reserved page not counted.
            spare_pages: pages of the pool after those, whose rows can be lent.
            device: of `rows`. Rows are lent on CPU hosts only.
        """
        first = torch.arange((1 + device_pages) * kv_heads, device=device).view(1, -1, kv_heads)
        self.rows = first.expand(layers, -1, -1).contiguous()  # [layers, 1 + device_pages, kv_heads] int64
        spare = np.arange(1 + device_pages, 1 + device_pages + spare_pages)
        stack = spare * kv_heads + np.arange(kv_heads).reshape(-1, 1)
        # Stacks of rows that are not lent: `[layers, kv_heads, spare_pages]`, the first `left` each.
        self.spare = np.broadcast_to(stack, (layers, kv_heads, spare_pages)).copy()
        self.left = np.full((layers, kv_heads), spare_pages, dtype=np.int64)
        self._kv_heads = kv_heads
        self.pool_rows = (1 + device_pages + spare_pages) * kv_heads
        #: Whether any cell is elsewhere than at first: until then all layers are alike.
        self.moved = False

    def lend(self, layer: int, heads: np.ndarray) -> np.ndarray:
        """A spare row for each of `heads` `[n]`, -1 where there is none left."""
        lent = np.full(heads.shape, -1, dtype=np.int64)
        for head in range(self._kv_heads):
            at = np.flatnonzero(heads == head)[: self.left[layer, head]]
            left = self.left[layer, head] - at.size
            lent[at] = self.spare[layer, head, left : left + at.size]
            self.left[layer, head] = left
        return lent

    def give_back(self, layer: int, heads: np.ndarray, rows: np.ndarray) -> None:
        """Rows `[n]` that were lent for `heads` and hold nothing that anyone reads."""
        for head in range(self._kv_heads):
            back = rows[heads == head]
            count = self.left[layer, head]
            self.spare[layer, head, count : count + back.size] = back
            self.left[layer, head] = count + back.size

    def adopt(self, layer: int, pages: np.ndarray, heads: np.ndarray, rows: np.ndarray) -> None:
        """Put the lent `rows` in the place of the cells (`pages`, `heads`), distinct `[n]`, whose own rows become
        spare."""
        cells = self.rows.numpy()
        old = cells[layer, pages, heads]
        cells[layer, pages, heads] = rows
        self.give_back(layer, heads, old)
        self.moved = self.moved or bool(rows.size)

    def lent(self) -> int:
        """Rows lent at this moment."""
        return self.spare.size - int(self.left.sum())

    def check_integrity(self, lent: dict[tuple[int, int], list[int]] | None = None) -> None:
        """Raise AssertionError unless every row is a cell, spare or lent, and in one place only.

        Args:
            lent: rows in the hands of copies, by (layer, head).
        """
        cells = self.rows.cpu().numpy()
        layers, _, heads = cells.shape
        for layer in range(layers):
            for head in range(heads):
                spare = self.spare[layer, head, : self.left[layer, head]].tolist()
                rows = sorted(cells[layer, :, head].tolist() + spare + (lent or {}).get((layer, head), []))
                assert rows == list(range(head, self.pool_rows, heads)), f"rows of layer {layer}, head {head} lost"
            assert cells[layer, 0].tolist() == list(range(heads)), "the reserved page has moved"
