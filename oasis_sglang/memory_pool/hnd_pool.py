"""A SGLang KV pool whose buffers are pages, heads outside: `[pages, kv_heads, page_size, head_dim]` per layer."""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from oasis_sglang.memory_pool.host_pool import RESERVED_PAGES


class HndPool(MHATokenToKVPool):
    """Page 0 is the reserved page, as in SGLang's pools, and stays zero."""

    def __init__(self, size: int, **kwargs: Any) -> None:
        kwargs["enable_kv_cache_copy"] = False  # its kernels would index the buffers by slot
        super().__init__(size, **kwargs)

    def buffer_tokens(self) -> int:
        """Tokens that the buffers hold, the reserved page aside."""
        return int(self.size)

    def _storage(self, nbytes: int) -> torch.Tensor:
        """Zeros `[nbytes]` uint8 for all buffers together."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def _create_buffers(self) -> None:
        pages = self.buffer_tokens() // self.page_size + RESERVED_PAGES
        shape = (self.layer_num, 2, pages, self.head_num, self.page_size, self.head_dim)
        storage = self._storage(math.prod(shape) * self.store_dtype.itemsize).view(self.store_dtype).view(shape)
        self.k_scale_buffer = self.v_scale_buffer = None
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        self.k_buffer, self.v_buffer = list(storage[:, 0].unbind()), list(storage[:, 1].unbind())
        self._kv_buffer_descs: list[Any] = []
        self._init_data_ptrs_and_strides()
