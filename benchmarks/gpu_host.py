"""The host's part of sparse decoding: the host pool, full of random K and V, and the key sketches of its pages."""

from __future__ import annotations

import torch

from benchmarks.gpu_scale import Scale
from oasis_sglang.kernels.summaries import build_sketches
from oasis_sglang.memory_pool.host_pool import HostPool
from oasis_sglang.memory_pool.sizing import PoolGeometry
from oasis_sglang.memory_pool.sketch import KeySketches, slow_half

# Pages that are made and copied at once.
CHUNK = 128
# Of the memory that the host has free; what is pinned cannot be taken back from it.
SHARE = 0.7


def available_bytes() -> int:
    """Memory of this machine that can be had."""
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


class HostSide:
    def __init__(self, scale: Scale, pages: int) -> None:
        geometry = PoolGeometry(
            layers=scale.layers,
            kv_heads=scale.kv_heads,
            head_dim=scale.head_dim,
            itemsize=scale.dtype.itemsize,
            page_size=scale.page,
            sketch=slow_half(scale.head_dim),
        )
        self.scale = scale
        self.pool = HostPool(pages, geometry, scale.dtype, scale.device)
        self.sketches = KeySketches(self.pool, scale.device)
        self._fill()

    def _fill(self) -> None:
        s, kv = self.scale, self.pool.kv
        for first in range(1, kv.shape[0], CHUNK):
            block = torch.empty(kv[first : first + CHUNK].shape, dtype=s.dtype, device=s.device).normal_()
            pages = torch.arange(first, first + block.shape[0], device=s.device)
            for layer in range(s.layers):
                build_sketches(self.sketches.table[layer], self.sketches.dims, pages, block[:, layer, :, 0], s.page)
            kv[first : first + CHUNK].copy_(block)

    def pages_of(self, n: int, pages: int) -> torch.Tensor:
        """Pages of n sequences that each have room for so many, `[n, pages]`, in no order."""
        order = torch.randperm(self.pool.pages, device=self.scale.device)[: n * pages] + 1
        return order.view(n, pages)

    def written(self, pages: torch.Tensor, tokens: int) -> None:
        """Say that the pages `[n, any]` of sequences hold their first `tokens` tokens, and nothing else anything."""
        page = self.scale.page
        self.pool.fill.zero_()
        held = (tokens - page * torch.arange(pages.shape[1], device=pages.device)).clamp(0, page)
        self.pool.fill[pages] = held.to(torch.int32).expand_as(pages)
