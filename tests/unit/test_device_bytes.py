"""What is counted for a device with memory of its own, against what is allocated there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.flashinfer import FlashInferOps
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.kernels.streams import Streams
from oasis_sglang.memory_pool.device_attention import create_attention
from oasis_sglang.memory_pool.device_bytes import DeviceLoad, device_memory, staging_bytes
from oasis_sglang.memory_pool.device_tier import DeviceTier
from oasis_sglang.memory_pool.sizing import GIB, DeviceMemory, PoolGeometry, plan_pools
from oasis_sglang.memory_pool.sketch import every_dim, slow_half
from oasis_sglang.speculative.prompt_lookup import PromptLookup
from tests.unit.flashinfer_model import stand_in

CPU = torch.device("cpu")


def tensors(x: Any, seen: set[int], depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor that an object of ours or a plan of FlashInfer's holds on the device, however deep."""
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from tensors(y, seen)
    elif isinstance(x, dict):
        for y in x.values():
            yield from tensors(y, seen)
    elif type(x).__module__.startswith(("oasis_sglang", "flashinfer")) and hasattr(x, "__dict__"):
        for name, y in vars(x).items():
            if not name.startswith("_pin_memory"):  # of the host
                yield from tensors(y, seen)


CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    ({"summary": "minmax", "slack_ratio": 0.0}, {"page_size": 32, "head_dim": 80}, {"chain": 4, "batch": 7}),
    ({"miss_policy": "skip", "fetch_ratio": 0.1}, {"layers": 3, "kv_heads": 8, "head_dim": 128}, {"batch": 33}),
    ({"miss_policy": "skip", "min_sparse_len": 700}, {"kv_heads": 1}, {"chain": 3, "rows": 9, "batch": 12}),
    ({"miss_policy": "skip", "predictor": "draft"}, {"itemsize": 4}, {"chain": 2, "context_len": 999, "copies": True}),
    ({}, {"head_dim": 80, "itemsize": 2}, {"batch": 1, "rows": 1}),
    ({}, {"head_dim": 128, "kv_heads": 4}, {"batch": 40, "flashinfer": True}),
    ({"miss_policy": "skip"}, {"page_size": 32}, {"chain": 4, "batch": 7, "flashinfer": True}),
]


@pytest.mark.parametrize(("settings", "shape", "load"), CASES)
def test_bytes_are_those_that_are_allocated(
    settings: dict[str, Any], shape: dict[str, Any], load: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C31: a pool too many and the server dies of it at its first long prompt, or at its largest batch."""
    if load.get("flashinfer"):
        stand_in(monkeypatch)
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 64, "itemsize": 2, "page_size": 16, **shape}
    config = OasisConfig(page_size=sizes["page_size"], token_budget=256, **settings).validate()
    dim = sizes["head_dim"]
    dims = (slow_half(dim) if dim % 16 == 0 and dim != 80 else every_dim(dim)) if config.summary == "sketch" else ()
    geometry = PoolGeometry(**sizes, sketch=dims)
    given = DeviceLoad(**{"rows": 5, "batch": 5, "query_heads": 8, "chain": 1, "context_len": 2000, **load})
    host_pages, device_pages = 300, 90
    dtype = torch.float32 if geometry.itemsize == 4 else torch.bfloat16
    pool = torch.zeros(geometry.layers, 2, 1 + device_pages, geometry.kv_heads, geometry.page_size, dim, dtype=dtype)
    tier = DeviceTier(
        config,
        geometry,
        dtype,
        host_pages=host_pages,
        k_pages=list(pool[:, 0]),
        v_pages=list(pool[:, 1]),
        rows=given.rows,
        context_len=given.context_len,
        ops=TritonOps(),
        chain=given.chain,
        query_heads=given.query_heads,
        batch=given.batch,
        decode_ops=create_attention(given, config, geometry, dtype, CPU),
        streams=Streams(),
    )
    if isinstance(tier.decoder.ops, FlashInferOps):  # every batch that a server may run has been met
        for n in range(1, given.batch + 1):
            for t in {1, given.chain}:
                tier.decoder.ops.plan(n, t)
    lookup = PromptLookup(given.rows, given.context_len, given.chain, 4, CPU) if given.copies else None
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors([tier, lookup], set())}
    on_host = {x.untyped_storage().data_ptr() for x in (tier.host.kv, tier.was_sparse)}
    allocated = sum(size for address, size in storages.items() if address and address not in on_host)
    counted = device_memory(config, geometry, given, available=0, draft_token_bytes=0, device=CPU)
    page = geometry.page_size
    assert counted.taken(host_pages * page, device_pages * page, page) == allocated


def test_draft_kv_is_counted_with_the_host_pool() -> None:
    geometry = PoolGeometry(layers=2, kv_heads=2, head_dim=64, itemsize=2, page_size=16)
    load = DeviceLoad(rows=4, batch=4, query_heads=4, chain=3, context_len=500)
    config = OasisConfig(summary="minmax", token_budget=128)
    without, with_draft = (
        device_memory(config, geometry, load, available=0, draft_token_bytes=x, device=CPU) for x in (0, 512)
    )
    assert with_draft.taken(1600, 320, 16) - without.taken(1600, 320, 16) == 512 * 16 * 101


def test_staging_by_hand() -> None:
    """K and V of 8 heads of 128 in two bytes, 131,072 tokens and a page."""
    geometry = PoolGeometry(layers=36, kv_heads=8, head_dim=128, itemsize=2, page_size=16)
    assert staging_bytes(geometry, 131_072) == 2 * 8 * 131_088 * 128 * 2


QWEN = PoolGeometry(layers=36, kv_heads=8, head_dim=128, itemsize=2, page_size=16, sketch=slow_half(128))
LOAD = DeviceLoad(rows=128, batch=128, query_heads=32, chain=1, context_len=32_768)


def memory(available: int) -> DeviceMemory:
    return device_memory(OasisConfig(), QWEN, LOAD, available=available, draft_token_bytes=0, device=CPU)


def plan(on_device: DeviceMemory, **given: Any) -> Any:
    arguments = {"context_len": 32_768, "max_total_tokens": None, "memory_budget": 0, "available_memory": 1 << 40}
    return plan_pools(OasisConfig(), QWEN, local_ranks=1, on_device=on_device, **{**arguments, **given})


def test_a_device_is_filled_and_not_more() -> None:
    """Where nothing was sized: one more page and its share of host pages would not fit."""
    there = memory(100 * GIB)
    sizes = plan(there)
    taken = sizes.device_bytes + sizes.summary_bytes + sizes.draft_bytes + sizes.work_bytes
    assert taken == there.taken(sizes.host_tokens, sizes.device_tokens, 16) <= 100 * GIB
    assert taken > 100 * GIB - 2 * (there.page + 4 * there.host_page)
    assert sizes.host_tokens == pytest.approx(4 * sizes.device_tokens, rel=1e-3)
    assert f"maps and workspaces {sizes.work_bytes / 1e9:.2f} GB" in sizes.describe()


def test_a_small_machine_bounds_the_default_host_pool() -> None:
    """A device may be larger than a quarter of the machine's memory; sizes that the user gave are not bent."""
    sizes = plan(memory(100 * GIB), available_memory=128 * GIB)
    assert 117 * GIB < sizes.host_bytes <= 118 * GIB
    with pytest.raises(ValueError, match=r"but 118\.00 GiB are available"):
        plan(memory(100 * GIB), available_memory=128 * GIB, max_total_tokens=300_000)


def test_pools_that_do_not_fit_the_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"GiB on the device, 20\.00 GiB are available\. Lower --max-total-tokens"):
        plan(memory(20 * GIB), max_total_tokens=200_000)
    with pytest.raises(ValueError, match="cannot hold one request's working set"):
        plan(memory(0))
