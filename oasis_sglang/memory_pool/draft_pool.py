"""The draft model's KV pool: on the device, whole, in the id space of the target's slots.

A draft has one layer where the target has dozens, so its KV is small and never leaves the device: a prefix that is
found again has its draft KV in place. Pages are laid out like the target's, `[pages, kv_heads, page_size, head_dim]`,
so that the same ops attend to them.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from oasis_sglang.memory_pool.host_pool import RESERVED_PAGES


class OasisDraftPool(MHATokenToKVPool):
    """Slot s is lane `s % page_size` of page `s // page_size`. Page 0 is the reserved page and stays zero."""

    def __init__(self, size: int, **kwargs: Any) -> None:
        kwargs["enable_kv_cache_copy"] = False  # only trees move slots, and they are refused
        super().__init__(size, **kwargs)

    def _create_buffers(self) -> None:
        shape = (self.size // self.page_size + RESERVED_PAGES, self.head_num, self.page_size, self.head_dim)
        self.k_scale_buffer = self.v_scale_buffer = None
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self.k_buffer = [torch.zeros(shape, dtype=self.store_dtype, device=self.device) for _ in range(self.layer_num)]
        self.v_buffer = [torch.zeros(shape, dtype=self.store_dtype, device=self.device) for _ in range(self.layer_num)]
        self._kv_buffer_descs: list[Any] = []
        self._init_data_ptrs_and_strides()

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.k_buffer, *self.v_buffer))

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """`k` and `v` `[n, kv_heads, head_dim]` of tokens in slots `[n]` int64."""
        page, lane = slots // self.page_size, slots % self.page_size
        self.k_buffer[layer][page, :, lane] = k.to(self.dtype).view(self.store_dtype)
        self.v_buffer[layer][page, :, lane] = v.to(self.dtype).view(self.store_dtype)

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
