"""The draft model's KV pool: on the device, whole, in the id space of the target's slots.

A draft has one layer where the target has dozens, so its KV is small and never leaves the device: a prefix that is
found again has its draft KV in place. Pages are laid out like the target's, `[pages, kv_heads, page_size, head_dim]`,
so that the same ops attend to them.
"""

from __future__ import annotations

from typing import Any

import torch

from oasis_sglang.memory_pool.hnd_pool import HndPool


class OasisDraftPool(HndPool):
    """Slot s is lane `s % page_size` of page `s // page_size`. Page 0 is the reserved page and stays zero."""

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """`k` and `v` `[n, kv_heads, head_dim]` of tokens in slots `[n]` int64; a graph's padding has slot 0."""
        page, lane = slots // self.page_size, slots % self.page_size
        reserved = (page == 0).view(-1, 1, 1)
        for buffer, new in ((self.k_buffer, k), (self.v_buffer, v)):
            buffer[layer][page, :, lane] = new.to(self.dtype).masked_fill(reserved, 0).view(self.store_dtype)

    def read(self, layer: int, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence, `[kv_heads, tokens, head_dim]`; `pages` in order."""
        k, v = (x[layer][pages].transpose(0, 1).flatten(1, 2)[:, :tokens] for x in (self.k_buffer, self.v_buffer))
        return k, v

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool as `[pages * kv_heads, page_size * head_dim]`, K and V."""
        width = self.page_size * self.head_dim
        return self.k_buffer[layer].view(-1, width), self.v_buffer[layer].view(-1, width)

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the oasis draft pool is written through its attention backend only")

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        raise RuntimeError("the oasis draft pool does not move slots: --speculative-eagle-topk must be 1")
