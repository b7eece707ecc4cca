"""Bringing pieces of pages from the host pool to the device pool."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from oasis_sglang.memory_pool.host_pool import HostPool
from oasis_sglang.native.build import load_library


class TransferStats:
    """Totals since start. `seconds` is time the caller spent waiting."""

    def __init__(self) -> None:
        self.pages = 0
        self.bytes = 0
        self.seconds = 0.0


class TransferEngine(Protocol):
    """Copies (page, head) pieces of one layer from host to device.

    `load` may return before the copy is done; `wait` returns when the copies of a layer have landed. Whoever frees a
    destination calls `wait` first (DESIGN: copy, then fence, then free).
    """

    stats: TransferStats

    def load(self, layer: int, host_pages: torch.Tensor, heads: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy piece i from (`host_pages[i]`, `heads[i]`) to row `rows[i]` of the pool; all `[n]` int64."""

    def wait(self, layer: int) -> None:
        """Return once every copy issued for `layer` has landed."""

    def in_flight(self) -> int:
        """Copies that have not landed; the server is idle only when this is 0."""


class InlineTransfer:
    """Copies in the calling thread: every `load` has landed when it returns."""

    def __init__(self, host: HostPool, k_pages: list[torch.Tensor], v_pages: list[torch.Tensor]) -> None:
        """
        Args:
            k_pages, v_pages: per layer `[pages, kv_heads, page_size, head_dim]`, the device pool.
        """
        g = host.geometry
        self.host = host
        self.kv_heads = g.kv_heads
        width = g.page_size * g.head_dim
        self._k = [x.view(host.store_dtype).view(-1, width) for x in k_pages]
        self._v = [x.view(host.store_dtype).view(-1, width) for x in v_pages]
        self._piece_bytes = 2 * width * g.itemsize
        self.stats = TransferStats()
        self._library = load_library() if k_pages[0].device.type == "cpu" else None

    def load(self, layer: int, host_pages: torch.Tensor, heads: torch.Tensor, rows: torch.Tensor) -> None:
        n = host_pages.numel()
        if n == 0:
            return
        start = time.perf_counter()
        k, v = self._k[layer], self._v[layer]
        if self._library is not None:
            # expanded tensors have strides that a pointer does not tell of
            host_pages, heads, rows = host_pages.contiguous(), heads.contiguous(), rows.contiguous()
            self._library.oasis_load(
                n,
                self._piece_bytes // 2,
                self.host.geometry.layers,
                layer,
                self.kv_heads,
                self.host.kv.data_ptr(),
                host_pages.data_ptr(),
                heads.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                rows.data_ptr(),
            )
        else:
            pieces = self.host.rows.index_select(0, self.host.row_ids(layer, host_pages, heads))
            k.index_copy_(0, rows, pieces[:, 0])
            v.index_copy_(0, rows, pieces[:, 1])
        self.stats.pages += n
        self.stats.bytes += n * self._piece_bytes
        self.stats.seconds += time.perf_counter() - start

    def wait(self, layer: int) -> None:
        return

    def in_flight(self) -> int:
        return 0
