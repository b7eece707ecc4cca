"""One rank's pools without a scheduler: SGLang's real row pool and allocator, our pool and coordinator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from oasis_sglang import coordinator
from oasis_sglang.attention.backend import OasisAttnBackend
from oasis_sglang.config import OasisConfig
from oasis_sglang.coordinator import Setup
from oasis_sglang.memory_pool.device_bytes import DeviceLoad
from oasis_sglang.memory_pool.device_pool import OasisKVPool
from oasis_sglang.memory_pool.sizing import GIB, PoolGeometry, plan_pools
from oasis_sglang.memory_pool.sketch import slow_half

LAYERS, KV_HEADS, QUERY_HEADS, DIM, PAGE = 2, 2, 4, 16, 16
SCALE = DIM**-0.5


class RowState:
    """The part of SGLang's `Req.kv` that the row pool and the coordinator read."""

    def __init__(self) -> None:
        self.req_pool_idx: int | None = None
        self.kv_allocated_len = 0

    @property
    def holds_kv(self) -> bool:
        return self.req_pool_idx is not None


def request(prompt: int, max_new_tokens: int = 8, output: int = 0) -> Any:
    return SimpleNamespace(
        rid=f"request-{prompt}",
        origin_input_ids=[1] * prompt,
        output_ids=[1] * output,
        sampling_params=SimpleNamespace(max_new_tokens=max_new_tokens),
        kv=RowState(),
    )


class Rank:
    def __init__(
        self,
        config: OasisConfig,
        *,
        device_tokens: int = 1600,
        rows: int = 8,
        need_sort: bool = False,
        chain: int = 1,
        on_device: bool = False,
        flashinfer: bool = False,
    ) -> None:
        """
        Args:
            on_device: steps are done by kernels, as where a device has memory of its own.
            flashinfer: FlashInfer was chosen to attend in them.
        """
        geometry = PoolGeometry(
            layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, itemsize=4, page_size=PAGE, sketch=slow_half(DIM)
        )
        plan = plan_pools(
            config,
            geometry,
            context_len=512,
            max_total_tokens=device_tokens,
            memory_budget=GIB,
            available_memory=4 * GIB,
            local_ranks=1,
            chain=chain,
        )
        load = DeviceLoad(
            rows=rows, batch=rows, query_heads=QUERY_HEADS, chain=chain, context_len=512, flashinfer=flashinfer
        )
        self.setup = Setup(config, geometry, plan, rows, 512, chain, load if on_device else None)
        coordinator.prepare(self.setup)
        self.pool = make_pool(plan.host_tokens)
        active = coordinator.active()
        assert active is not None
        self.coordinator = active
        self.tier = self.pool.tier
        self.rows = ReqToTokenPool(rows, 512, "cpu", False)
        self.allocator = PagedTokenToKVPoolAllocator(
            plan.host_tokens, PAGE, torch.float32, "cpu", self.pool, need_sort=need_sort
        )
        self.layers = [
            RadixAttention(QUERY_HEADS, DIM, SCALE, num_kv_heads=KV_HEADS, layer_id=i) for i in range(LAYERS)
        ]
        self.random = torch.Generator().manual_seed(0)

    def runner(self) -> Any:
        return SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.rows,
            device="cpu",
            model=torch.nn.ModuleList(self.layers),
        )

    def backend(self) -> OasisAttnBackend:
        return OasisAttnBackend(self.runner())

    def give_slots(self, index: int, start: int, end: int) -> torch.Tensor:
        """Slots for tokens `[start, end)` of a row, page by page as SGLang's allocator hands them out."""
        table = self.rows.req_to_token
        for position in range(-(-start // PAGE) * PAGE, end, PAGE):
            fresh = self.allocator.alloc(PAGE)
            assert fresh is not None
            table[index, position : position + PAGE] = fresh.to(torch.int32)
        return table[index, start:end].to(torch.int64)

    def tensors(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (torch.randn(tokens, h, DIM, generator=self.random) for h in (QUERY_HEADS, KV_HEADS, KV_HEADS))
        return q.flatten(1), k, v

    def snapshot(self) -> dict[str, Any]:
        sets = self.tier.sets
        maps = {name: x.clone() for name, x in vars(sets).items() if isinstance(x, torch.Tensor)}
        pools = {"fill": self.tier.host.fill.clone(), "host": self.tier.host.kv.clone(), "step": self.tier.step}
        buffers = {f"{i}": x.clone() for i, x in enumerate((*self.pool.k_buffer, *self.pool.v_buffer))}
        return {**maps, **pools, **buffers, "state": self.coordinator.state()}


def make_pool(size: int, **changes: Any) -> OasisKVPool:
    shape = {"head_num": KV_HEADS, "head_dim": DIM, "layer_num": LAYERS, "page_size": PAGE, "dtype": torch.float32}
    return OasisKVPool(size, **{**shape, **changes}, device="cpu", enable_memory_saver=False)


def batch(mode: ForwardMode, indices: list[int], lengths: list[int], slots: torch.Tensor, **more: Any) -> Any:
    """The fields of a `ForwardBatch` that an attention backend reads."""
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(indices),
        req_pool_indices=torch.tensor(indices, dtype=torch.int64),
        seq_lens=torch.tensor(lengths, dtype=torch.int64),
        out_cache_loc=slots,
        **{name: torch.tensor(values, dtype=torch.int64) for name, values in more.items()},
    )


def same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(
        torch.equal(value, after[name]) if isinstance(value, torch.Tensor) else value == after[name]
        for name, value in before.items()
    )
