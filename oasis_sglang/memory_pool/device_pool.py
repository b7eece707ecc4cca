"""The device pages as a SGLang KV pool: what SGLang sees is the host pool's capacity, what is allocated is ours."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from oasis_sglang import coordinator
from oasis_sglang.attention.native_ops import create_cpu_ops
from oasis_sglang.attention.ops import AttentionOps
from oasis_sglang.memory_pool.hnd_pool import HndPool
from oasis_sglang.memory_pool.prefetch.client import PrefetchClient
from oasis_sglang.memory_pool.prefetch.supervisor import Workers
from oasis_sglang.memory_pool.shared_memory import SharedMemory
from oasis_sglang.memory_pool.tier import KVTier
from oasis_sglang.native.build import library_path

logger = logging.getLogger(__name__)


class OasisKVPool(HndPool):
    """One id space: a slot in `req_to_token` and in the radix tree is an index of the host pool, so `size` is the
    host pool's. The buffers are the device pool, `[pages, kv_heads, page_size, head_dim]` per layer, a bounded cache
    of it that the `KVTier` manages. Page 0 is the reserved page, as in SGLang's pools.

    Nothing may index the buffers by slot: `set_kv_buffer` and its kin raise.
    """

    def __init__(self, size: int, **kwargs: Any) -> None:
        setup = coordinator.take_setup()
        self.setup = setup
        self._shared: SharedMemory | None = None
        if size != setup.plan.host_tokens:
            raise RuntimeError(f"SGLang built a KV pool of {size} tokens, planned were {setup.plan.host_tokens}")
        super().__init__(size, **kwargs)
        geometry = setup.geometry
        if (self.head_num, self.head_dim, self.layer_num) != (geometry.kv_heads, geometry.head_dim, geometry.layers):
            raise RuntimeError("the KV pool's geometry differs from the planned one")
        self.tier = self._create_tier(size // self.page_size)
        self.workers = self._start_workers() if setup.config.workers else None
        coordinator.start(self.tier, setup, self.workers)

    def _create_tier(self, host_pages: int) -> KVTier:
        setup = self.setup
        kind: Callable[..., KVTier] = KVTier
        if setup.load is None:
            ops: AttentionOps = create_cpu_ops()
        else:
            from oasis_sglang.kernels.ops import TritonOps
            from oasis_sglang.memory_pool.device_attention import create_attention
            from oasis_sglang.memory_pool.device_tier import DeviceTier

            load, device = setup.load, self.k_buffer[0].device
            ops = TritonOps()
            kind = functools.partial(
                DeviceTier,
                query_heads=load.query_heads,
                batch=load.batch,
                decode_ops=create_attention(load, setup.config, setup.geometry, self.dtype, device),
            )
        return kind(
            setup.config,
            setup.geometry,
            self.dtype,
            host_pages=host_pages,
            k_pages=self.k_buffer,
            v_pages=self.v_buffer,
            rows=setup.rows,
            context_len=setup.context_len,
            ops=ops,
            chain=setup.chain,
            probe=setup.config.probe,
            spare_pages=setup.plan.spare_pages,
        )

    def _start_workers(self) -> Workers:
        """Worker processes between the host pool and this one."""
        g, config = self.setup.geometry, self.setup.config
        if config.miss_policy == "wait" and not (config.probe and config.predictor == "draft"):
            logger.warning(
                "transfer='workers' finds nothing to do with miss_policy='wait' unless drafts look ahead (probe=true, "
                "predictor='draft'): every page is fetched when it is selected. Use miss_policy='skip', or "
                "transfer='inline', which leaves %d more pages of the device pool to requests.",
                self.setup.plan.spare_pages,
            )
        assert self._shared is not None
        workers = Workers(
            self.setup.config.workers,
            self.tier.host.fd,
            self._shared.fd,
            width=g.page_size * g.head_dim * g.itemsize,
            value_stride=self.tier.sets.cells.pool_rows,
            library=library_path(),
        )
        self.tier.prefetch_by(PrefetchClient(workers))
        return workers

    def _storage(self, nbytes: int) -> torch.Tensor:
        if torch.device(self.device).type != "cpu":
            return super()._storage(nbytes)
        self._shared = SharedMemory.create("oasis-device-pool", nbytes)
        self._shared.use_huge_pages()
        return self._shared.tensor(torch.uint8)

    def buffer_tokens(self) -> int:
        return self.setup.plan.device_tokens

    def _finalize_allocation_log(self, num_tokens: int) -> None:
        super()._finalize_allocation_log(self.setup.plan.device_tokens)

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the oasis KV pool is written through its attention backend only")

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        raise RuntimeError("the oasis KV pool does not move slots")
