"""Key summaries: what the device keeps of every page's keys to score it against a query."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oasis_sglang.memory_pool.host_pool import RESERVED_PAGES, HostPool

if TYPE_CHECKING:
    from oasis_sglang.attention.ops import AttentionOps


class KeySummaries:
    """Largest and smallest key per page, layer and KV head (Quest, arXiv 2406.10774).

    `table[layer]` is `[pages * kv_heads, 2 * head_dim]`: the largest value of each dimension, then the smallest. A
    page's summary is written with the page and means nothing before its first token; 1/page_size of the page's bytes.
    """

    def __init__(self, host: HostPool, device: torch.device | str = "cpu") -> None:
        g = host.geometry
        self.geometry = g
        rows = (host.pages + RESERVED_PAGES) * g.kv_heads
        self.table = torch.zeros(g.layers, rows, 2 * g.head_dim, dtype=host.dtype, device=device)
        self._heads = torch.arange(g.kv_heads, device=device)

    @property
    def nbytes(self) -> int:
        return self.table.numel() * self.table.element_size()

    def row_ids(self, pages: torch.Tensor) -> torch.Tensor:
        """Rows of `table[layer]` for pages `[...]` and every KV head: `[..., kv_heads]`."""
        return pages.unsqueeze(-1) * self.geometry.kv_heads + self._heads

    def score(
        self, ops: AttentionOps, layer: int, q: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`AttentionOps.score_pages` on one layer's table."""
        return ops.score_pages(q, self.table[layer], rows, pages, scale)

    def append_step(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Account for one new token per sequence, all layers at once.

        Args:
            slots: `[n]` int64, each on a page of its own.
            keys: `[layers, n, kv_heads, head_dim]`.
        """
        g = self.geometry
        rows = self.row_ids(slots // g.page_size)
        old = self.table[:, rows]  # [layers, n, kv_heads, 2 * head_dim]
        first = (slots % g.page_size == 0).view(1, -1, 1, 1)
        high = torch.where(first, keys, torch.maximum(old[..., : g.head_dim], keys))
        low = torch.where(first, keys, torch.minimum(old[..., g.head_dim :], keys))
        self.table[:, rows] = torch.cat((high, low), dim=-1)

    def rebuild(self, layer: int, pages: torch.Tensor, keys: torch.Tensor, last_tokens: int) -> None:
        """Summarise pages of one sequence anew.

        Args:
            pages: `[n]` in sequence order.
            keys: `[n, kv_heads, page_size, head_dim]`; all pages full but the last, which holds `last_tokens`.
        """
        page = self.geometry.page_size
        high, low = keys.amax(2), keys.amin(2)
        if last_tokens < page:
            high[-1] = keys[-1, :, :last_tokens].amax(1)
            low[-1] = keys[-1, :, :last_tokens].amin(1)
        self.table[layer, self.row_ids(pages)] = torch.cat((high, low), dim=-1)
