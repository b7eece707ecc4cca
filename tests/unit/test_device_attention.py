"""What decode steps attend with: asked at the shape of the largest step, and made as it was chosen."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from oasis_sglang.attention.ops import AttentionOps
from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.attention_shape import AttentionShape
from oasis_sglang.kernels.choose import Choice
from oasis_sglang.kernels.flashinfer import FlashInferOps
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.memory_pool import device_attention
from oasis_sglang.memory_pool.device_attention import choose_attention, create_attention
from oasis_sglang.memory_pool.device_bytes import DeviceLoad
from oasis_sglang.memory_pool.sizing import PoolGeometry

CPU, BF16 = torch.device("cpu"), torch.bfloat16
GEOMETRY = PoolGeometry(layers=36, kv_heads=8, head_dim=128, itemsize=2, page_size=16)
LOAD = DeviceLoad(rows=32, batch=32, query_heads=32, chain=1, context_len=32_768)
# Budget of 2,048 tokens: 128 pages and the tail. A chain of 4 may end on one page more, and its first token on the
# last lane of the tail.
SHAPE = AttentionShape(
    query_heads=32, kv_heads=8, head_dim=128, page_size=16, columns=129, tokens=2064, batch=32, queries=1, dtype=BF16,
    kv_dtype=BF16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("load", "settings", "change"),
    [
        ({}, {}, {}),
        ({"chain": 4}, {}, {"columns": 130, "queries": 4, "tokens": 2067}),
        ({"batch": 5}, {"min_sparse_len": 4096}, {"batch": 5, "columns": 256}),
    ],
)
@pytest.mark.parametrize("flashinfer", [True, False])
def test_the_largest_step_is_tried(
    monkeypatch: pytest.MonkeyPatch,
    flashinfer: bool,
    load: dict[str, Any],
    settings: dict[str, Any],
    change: dict[str, Any],
) -> None:
    asked: list[AttentionShape] = []

    def choose(triton: AttentionOps, shape: AttentionShape, device: torch.device) -> Choice:
        assert type(triton) is TritonOps
        assert device == CPU
        asked.append(shape)
        return Choice(FlashInferOps(shape, device) if flashinfer else triton, "")

    monkeypatch.setattr(device_attention, "choose_ops", choose)
    given, config = msgspec.structs.replace(LOAD, **load), OasisConfig(**settings).validate()
    chosen = choose_attention(given, config, GEOMETRY, BF16, CPU)
    assert asked == [SHAPE._replace(**change)]
    assert chosen == msgspec.structs.replace(given, flashinfer=flashinfer)
    ops = create_attention(chosen, config, GEOMETRY, BF16, CPU)
    assert type(ops) is (FlashInferOps if flashinfer else TritonOps)
    if isinstance(ops, FlashInferOps):
        assert ops.shape == asked[0]
