"""Pool sizes: from flags and configuration, checked against the machine's memory (C31)."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.sizing import GIB, RESERVE_MAX, RESERVE_SHARE, PoolGeometry, PoolPlan, plan_pools
from oasis_sglang.memory_pool.sketch import slow_half

# SmolLM2-135M: 30 layers, 3 KV heads of 64, bf16
SMALL = PoolGeometry(layers=30, kv_heads=3, head_dim=64, itemsize=2, page_size=16)
# Llama-3-8B on one of four ranks: 32 layers, 2 of 8 KV heads of 128, bf16
QUARTER = PoolGeometry(layers=32, kv_heads=2, head_dim=128, itemsize=2, page_size=16)


def plan(config: OasisConfig, geometry: PoolGeometry = SMALL, **given: Any) -> PoolPlan:
    arguments = {
        "context_len": 8192,
        "max_total_tokens": None,
        "memory_budget": 4 * GIB,
        "available_memory": 64 * GIB,
        "local_ranks": 1,
    }
    return plan_pools(config, geometry, **{**arguments, **given})


def test_bytes_by_hand() -> None:
    """C31: every size is counted in these; a forgotten factor of two (K and V) allocates twice what was checked."""
    assert SMALL.token_bytes == 30 * 3 * 64 * 2 * 2 == 23_040
    assert SMALL.summary_page_bytes == 23_040  # one page's smallest and largest key weigh as one token
    # a sketch of 32 dimensions: 16 tokens of 16 bytes and a 2-byte scale, per layer and KV head
    sketched = msgspec.structs.replace(SMALL, sketch=slow_half(64))
    assert sketched.summary_page_bytes == 30 * 3 * 16 * 18
    assert msgspec.structs.replace(sketched, page_size=8).summary_page_bytes == sketched.summary_page_bytes
    assert QUARTER.token_bytes == 32 * 2 * 128 * 2 * 2 == 32_768
    sizes = plan(OasisConfig(), max_total_tokens=24_000)
    assert sizes.device_tokens == 24_000
    assert sizes.host_tokens == 96_000
    assert sizes.device_bytes == (24_000 + 16) * 23_040, "SGLang's padding page is memory too"
    assert sizes.host_bytes == (96_000 + 16) * 23_040
    assert sizes.summary_bytes == (6_000 + 1) * 23_040


def test_spare_pages_come_out_of_the_device_pool() -> None:
    """Copies in flight land in a twelfth of it; what is left must still hold a working set, which the error says."""
    config = OasisConfig(transfer="workers")
    sizes = plan(config, max_total_tokens=24_000)
    assert (sizes.device_tokens, sizes.spare_pages) == (24_000, 125)
    with pytest.raises(ValueError, match="cannot hold one request's working set") as error:
        plan(config, max_total_tokens=2_640)
    least = int(re.findall(r"--max-total-tokens (\d+) or more", str(error.value))[0])
    assert plan(config, max_total_tokens=least).device_tokens == least
    with pytest.raises(ValueError, match="cannot hold"):
        plan(config, max_total_tokens=least - 32)
    assert plan(OasisConfig(), max_total_tokens=2_640).spare_pages == 0


@pytest.mark.parametrize("host_size_gb", [4.0, 14.0])
def test_four_ranks_within_the_limit(host_size_gb: float) -> None:
    """C31: sizes are per rank; together, all ranks of the machine stay within its memory less the reserve."""
    sizes = plan(OasisConfig(host_size_gb=host_size_gb), QUARTER, available_memory=64 * GIB, local_ranks=4)
    assert sizes.host_bytes == pytest.approx(host_size_gb * 1e9, rel=1e-3)
    assert sizes.host_bytes * 4 <= 64 * GIB * (1 - RESERVE_SHARE)
    assert f"{sizes.host_bytes / 1e9:.2f} GB per rank" in sizes.describe()
    assert f"{sizes.host_bytes * 4 / 1e9:.2f} GB in all (4 local ranks)" in sizes.describe()


def test_four_ranks_beyond_the_limit() -> None:
    """C31: 16 GB fit once in 64 GiB but not four times; both numbers are named."""
    config = OasisConfig(host_size_gb=16.0)
    assert plan(config, QUARTER, local_ranks=1).local_ranks == 1
    with pytest.raises(ValueError, match="host_size_gb or host_to_device_ratio") as error:
        plan(config, QUARTER, local_ranks=4)
    needed = 4 * (math.floor(16e9 / QUARTER.token_bytes) // 16 * 16 + 16) * QUARTER.token_bytes / GIB
    available = 64 * (1 - RESERVE_SHARE)
    message = str(error.value)
    assert f"The host pools need {needed:.2f} GiB" in message
    assert f"{available:.2f} GiB are available" in message
    assert "4 local ranks" in message


def test_a_drafts_kv_counts() -> None:
    """C31: a draft keeps its KV of every host token on the device, beside the pools."""
    layer = SMALL.token_bytes // SMALL.layers
    given = {"max_total_tokens": 24_000, "chain": 4, "device_is_host": True}
    sizes = plan(OasisConfig(), draft_token_bytes=layer, **given)
    assert sizes.draft_bytes == (96_000 + 16) * 768
    assert "draft KV 0.07 GB" in sizes.describe()
    assert "draft KV" not in plan(OasisConfig(), max_total_tokens=24_000).describe()
    # a draft as large as the target doubles the host pool's bytes; the pools alone fit
    available = int((sizes.host_bytes + sizes.device_bytes + sizes.summary_bytes) * 1.2)
    assert plan(OasisConfig(), available_memory=available, **given).draft_bytes == 0
    with pytest.raises(ValueError, match="draft KV need"):
        plan(OasisConfig(), available_memory=available, draft_token_bytes=SMALL.token_bytes, **given)
    # where the user sized nothing, all of it stays within the budget, reserved pages aside
    own = plan(OasisConfig(), chain=4, draft_token_bytes=SMALL.token_bytes)
    assert 0.9 * 4 * GIB < own.host_bytes + own.device_bytes + own.summary_bytes + own.draft_bytes < 4.01 * GIB


def test_every_pool_counts_where_the_device_is_the_host() -> None:
    """C31: on a CPU host the device pool and the summaries take the same memory; host pools alone would fit here."""
    config = OasisConfig(host_size_gb=30.0, host_to_device_ratio=1.0)
    assert plan(config, device_is_host=False).host_tokens > 0
    with pytest.raises(ValueError, match="host and device pools, key summaries and draft KV need") as error:
        plan(config, device_is_host=True)
    host = math.floor(30e9 / SMALL.token_bytes) // 16 * 16
    total = (2 * (host + 16) + host // 16 + 1) * SMALL.token_bytes
    assert f"{total / GIB:.2f} GiB per rank" in str(error.value)
    assert "57.60 GiB are available" in str(error.value)


def test_the_reserve_is_bounded() -> None:
    """C31: a tenth of a terabyte kept back would waste it."""
    config = OasisConfig(host_size_gb=900e-3 * 1.024 * 1000)  # 921.6 GB
    with pytest.raises(ValueError, match=r"10\.00 GiB kept in reserve"):
        plan(config, available_memory=int(921.6e9) + RESERVE_MAX - GIB)
    assert plan(config, available_memory=int(921.6e9) + RESERVE_MAX + GIB).host_tokens > 0


def test_host_pool_smaller_than_one_sequence() -> None:
    """Contract 10: otherwise the longest allowed prompt would wait for ever (C28); following the advice must work."""
    with pytest.raises(ValueError, match="smaller than one sequence of 8192 tokens") as error:
        plan(OasisConfig(host_size_gb=0.1, host_to_device_ratio=1.0), max_total_tokens=4096)
    advice = re.search(r"host_size_gb=([\d.]+)", str(error.value))
    assert advice is not None
    assert "4336 tokens" in str(error.value)
    sizes = plan(OasisConfig(host_size_gb=float(advice[1])), max_total_tokens=4096)
    assert sizes.host_tokens >= 8192 + 2 * 16
    with pytest.raises(ValueError, match=r"larger host_to_device_ratio \(now 1\.5\).* --context-length 6112 or less"):
        plan(OasisConfig(host_to_device_ratio=1.5), max_total_tokens=4096)
    assert plan(OasisConfig(host_to_device_ratio=1.5), max_total_tokens=4096, context_len=6112).host_tokens == 6144
    with pytest.raises(ValueError, match="with 2 spare pages, 6160 tokens"):
        plan(OasisConfig(host_to_device_ratio=1.5), max_total_tokens=4096, context_len=6113)


def test_device_pool_below_one_working_set() -> None:
    """Contract 10: such a server would admit nothing; the smallest pool that works is named, and works."""
    config = OasisConfig(host_to_device_ratio=8)
    need = (config.max_set_pages + 1) * 16
    with pytest.raises(ValueError, match=f"device pool of 2032 tokens .* of {need} tokens") as error:
        plan(config, max_total_tokens=2040)
    assert "token_budget=2048" in str(error.value)
    assert f"--max-total-tokens {need}" in str(error.value)
    assert plan(config, max_total_tokens=need).device_tokens == need
    with pytest.raises(ValueError, match="cannot hold one request's"):
        plan(config, max_total_tokens=need - 1)


def test_a_dense_sequence_counts_in_the_working_set() -> None:
    """C20: a large min_sparse_len keeps long sequences whole on the device, so the pool must hold one."""
    config = OasisConfig(min_sparse_len=6000, host_to_device_ratio=2)
    with pytest.raises(ValueError, match="min_sparse_len=6000"):
        plan(config, max_total_tokens=5000)
    assert plan(config, max_total_tokens=6016).device_tokens == 6016


def test_no_flags_at_all() -> None:
    """A first start without any size must serve: the context length on the host, two working sets on the device."""
    sizes = plan(OasisConfig())
    total = sizes.host_bytes + sizes.device_bytes + sizes.summary_bytes
    assert total == pytest.approx(4 * GIB, rel=0.01), "the default takes what it was given, summaries included"
    assert sizes.host_tokens == pytest.approx(4 * sizes.device_tokens, rel=0.01)
    tiny = plan(OasisConfig(), memory_budget=GIB // 64)
    assert tiny.host_tokens >= 8192 + 2 * 16
    assert tiny.device_tokens >= 2 * OasisConfig().max_set_pages * 16


def test_host_size_has_precedence_over_the_ratio() -> None:
    """A user who names GB must get them, whatever the ratio says."""
    sizes = plan(OasisConfig(host_size_gb=1.0, host_to_device_ratio=10.0), max_total_tokens=24_000)
    assert sizes.device_tokens == 24_000
    assert sizes.host_tokens == int(1e9 / 23_040) // 16 * 16
    derived = plan(OasisConfig(host_size_gb=2.304, host_to_device_ratio=10.0))
    assert derived.host_tokens == 100_000
    assert derived.device_tokens == 10_000, "no device size given: the ratio sizes it from the host's"


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_every_plan_keeps_its_promises(data: st.DataObject) -> None:
    """C31: whatever is asked for, either a ValueError or whole pages, one sequence, one working set, within memory."""
    page = data.draw(st.sampled_from([16, 32, 64]), "page")
    config = OasisConfig(
        page_size=page,
        token_budget=data.draw(st.integers(1, 64), "budget") * page,
        host_size_gb=data.draw(st.none() | st.floats(0.01, 100), "gb"),
        host_to_device_ratio=data.draw(st.floats(1, 64), "ratio"),
        min_sparse_len=data.draw(st.integers(0, 5000), "min sparse"),
    )
    geometry = PoolGeometry(
        layers=data.draw(st.integers(1, 80), "layers"),
        kv_heads=data.draw(st.integers(1, 8), "heads"),
        head_dim=64,
        itemsize=data.draw(st.sampled_from([1, 2, 4]), "itemsize"),
        page_size=page,
    )
    context = data.draw(st.integers(1, 131_072), "context")
    memory = data.draw(st.integers(1, 512), "GiB") * GIB
    ranks = data.draw(st.integers(1, 8), "ranks")
    asked = data.draw(st.none() | st.integers(1, 200_000), "max_total_tokens")
    try:
        sizes = plan(
            config,
            geometry,
            context_len=context,
            max_total_tokens=asked,
            memory_budget=memory // 8,
            available_memory=memory,
            local_ranks=ranks,
        )
    except ValueError as error:
        problem = str(error)
    else:
        problem = ""
    if problem:
        assert len(re.findall(r"\d+", problem)) >= 2
        return
    assert sizes.host_tokens % page == sizes.device_tokens % page == 0
    assert sizes.host_tokens >= context + 2 * page
    assert sizes.device_tokens // page > config.max_set_pages
    assert asked is None or asked - page < sizes.device_tokens <= asked
    assert sizes.host_bytes * ranks <= memory - min(math.floor(memory * RESERVE_SHARE), RESERVE_MAX)
    assert sizes.host_bytes >= sizes.host_tokens * geometry.token_bytes
