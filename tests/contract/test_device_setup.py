"""From SGLang's configurator to the plan of a rank whose device has memory of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool import device_attention, device_setup
from oasis_sglang.memory_pool.device_bytes import DeviceLoad
from oasis_sglang.memory_pool.sizing import GIB
from oasis_sglang.platform import host

BF16 = torch.bfloat16


def configurator(said: list[str]) -> Any:
    """The part of SGLang's configurator that is read; device `meta` stands for one that is not the host."""

    def available(_: Any) -> int:
        said.append("measure")
        return 40 * GIB

    text = SimpleNamespace(rope_theta=1e4)
    return SimpleNamespace(
        device="meta",
        kv_cache_dtype=BF16,
        layer_info=SimpleNamespace(num_effective_layers=36),
        server_args=SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=None),
        model_config=SimpleNamespace(
            dtype=BF16, head_dim=128, num_attention_heads=32, context_len=32_768, hf_config=text, hf_text_config=text,
            get_num_kv_heads=lambda *_: 8,
        ),
        _profile_available_bytes=available,
    )  # fmt: skip


@pytest.mark.parametrize("flashinfer", [True, False])
def test_attention_is_chosen_before_memory_is_measured(monkeypatch: pytest.MonkeyPatch, flashinfer: bool) -> None:
    """What it is tried with must not be missing from the pools, and what it works in must be counted."""
    said: list[str] = []

    def choose(load: DeviceLoad, *given: Any) -> DeviceLoad:
        said.append("choose")
        assert given[2:] == (BF16, torch.device("meta"))
        return msgspec.structs.replace(load, flashinfer=flashinfer)

    parallel = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, launch_world_size=1)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    monkeypatch.setattr("sglang.srt.arg_groups.overrides.resolving_view", lambda x: x)
    monkeypatch.setattr(device_setup.defaults, "given", lambda *_: None)
    monkeypatch.setattr(host, "available_memory", lambda: 400 * GIB)
    monkeypatch.setattr(device_attention, "choose_attention", choose)
    asked = configurator(said)
    setup = device_setup.plan_rank(asked, OasisConfig(), SimpleNamespace(max_running_requests=100), 80.0)
    assert said == ["choose", "measure"]
    assert setup.load == DeviceLoad(
        rows=100, batch=100, query_heads=32, chain=1, context_len=32_768, flashinfer=flashinfer
    )
    plan = setup.plan
    taken = plan.device_bytes + plan.summary_bytes + plan.draft_bytes + plan.work_bytes
    assert 39.9 * GIB < taken <= 40 * GIB
    assert setup.rows == 100
