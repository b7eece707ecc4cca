"""The CPU platform: when it applies, the flags it fills in, and operators that must equal SGLang's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oasis_sglang.platform import cpu, defaults, host

# ---- when it applies ----


def test_entry_point_imports_nothing_heavy():
    code = "import sys, oasis_sglang.platform.cpu; sys.exit('torch' in sys.modules or 'sglang' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_leaves_the_host_to_the_cpu_engine_when_asked(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setattr(cpu, "host_has_accelerator", lambda: pytest.fail("no need to probe"))
    assert cpu.activate() is None


@pytest.mark.parametrize(("accelerator", "expected"), [(True, None), (False, cpu.PLATFORM_CLASS)])
def test_applies_only_without_an_accelerator(monkeypatch, accelerator, expected):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(cpu, "host_has_accelerator", lambda: accelerator)
    assert cpu.activate() == expected


def test_every_probe_exists_in_sglang():
    platforms = pytest.importorskip("sglang.srt.platforms")
    assert [name for name in cpu._PROBES if not callable(getattr(platforms, name, None))] == []


# ---- cores and memory ----


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _proc(root: Path, text: str) -> Path:
    path = root / "proc_cgroup"
    path.write_text(text)
    return path


def test_cpu_quota_v2_is_the_tightest_of_all_parents(tmp_path):
    _tree(tmp_path, {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"})
    assert host.cpu_quota(tmp_path, _proc(tmp_path, "0::/a/b\n")) == 1.5


def test_cpu_quota_v1(tmp_path):
    _tree(tmp_path, {"cpu/job/cpu.cfs_quota_us": "300000", "cpu/job/cpu.cfs_period_us": "100000"})
    assert host.cpu_quota(tmp_path, _proc(tmp_path, "4:cpu:/job\n")) == 3.0
    _tree(tmp_path, {"cpu/job/cpu.cfs_quota_us": "-1"})
    assert host.cpu_quota(tmp_path, _proc(tmp_path, "4:cpu:/job\n")) is None


def test_a_cgroup_path_the_container_cannot_see_falls_back_to_its_root(tmp_path):
    _tree(tmp_path, {"cpu.max": "200000 100000"})
    assert host.cpu_quota(tmp_path, _proc(tmp_path, "0::/only/on/the/host\n")) == 2.0


def test_hyper_threads_share_a_core(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for logical, core in enumerate((0, 1, 0, 1)):
        _tree(
            tmp_path,
            {f"cpu{logical}/topology/core_id": str(core), f"cpu{logical}/topology/physical_package_id": "0"},
        )
    none = _proc(tmp_path, "0::/\n")
    assert host.usable_cores(tmp_path, none, tmp_path) == 2
    _tree(tmp_path, {"cpu.max": "50000 100000"})
    assert host.usable_cores(tmp_path, none, tmp_path) == 1, "never below one"


def test_cgroup_memory_counts_cache_as_free(tmp_path):
    _tree(
        tmp_path,
        {"j/memory.max": "1000", "j/memory.current": "700", "j/memory.stat": "anon 300\ninactive_file 200\n"},
    )
    assert host.cgroup_free_memory(tmp_path, _proc(tmp_path, "0::/j\n")) == 500


def test_cgroup_memory_v1_without_a_limit(tmp_path):
    _tree(tmp_path, {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "1"})
    assert host.cgroup_free_memory(tmp_path, _proc(tmp_path, "4:memory:/\n")) is None


# ---- flags ----


def _model_config(**changes: Any) -> SimpleNamespace:
    import torch

    fields: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "attention_arch": SimpleNamespace(name="MHA"),
        "num_attention_layers": 30,
        "head_dim": 64,
        "v_head_dim": 64,
        "get_total_num_kv_heads": lambda: 3,
    }
    return SimpleNamespace(**(fields | changes))


def test_kv_bytes_per_token():
    import torch

    assert defaults.kv_bytes_per_token(_model_config(), "auto") == 30 * 3 * 128 * 2
    assert defaults.kv_bytes_per_token(_model_config(), "fp8_e5m2") == 30 * 3 * 128
    assert defaults.kv_bytes_per_token(_model_config(dtype=torch.float32), "bfloat16") == 30 * 3 * 128 * 2
    mla = _model_config(attention_arch=SimpleNamespace(name="MLA"), kv_lora_rank=512, qk_rope_head_dim=64)
    assert defaults.kv_bytes_per_token(mla, "auto") == 30 * 576 * 2


def _server_args(raw: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    cuda_graph_config = pytest.importorskip("sglang.srt.model_executor.cuda_graph_config")
    resolved = {
        "device": "cpu",
        "attention_backend": "intel_amx",  # what SGLang's own step has put there by then
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": False,
        "enable_torch_compile": False,
        "sleep_on_idle": False,
        "cuda_graph_config": cuda_graph_config.default_cuda_graph_config(),
        "max_total_tokens": None,
        "mem_fraction_static": None,
        "kv_cache_dtype": "auto",
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
    }
    given = dict.fromkeys(("attention_backend", "sampling_backend", "max_total_tokens"))
    return SimpleNamespace(_raw_input=given | (raw or {}), **(resolved | changes))


@pytest.fixture
def clean_environment(monkeypatch):
    """Without thread settings, and with whatever the test sets undone."""
    for name in ("OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE", *defaults._WAIT_SETTINGS):
        monkeypatch.setenv(name, "")  # recorded, so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(defaults, "kv_token_cap", lambda server_args: 4096)
    monkeypatch.setattr(host, "usable_cores", lambda: 6)


def test_defaults(clean_environment):
    args = _server_args()
    defaults.apply(args)
    assert args.attention_backend == "torch_native"
    assert args.sampling_backend == "pytorch"
    assert args.disable_overlap_schedule
    assert args.sleep_on_idle
    assert args.cuda_graph_config.decode.backend == args.cuda_graph_config.prefill.backend == "disabled"
    assert args.max_total_tokens == 4096
    assert os.environ["OMP_NUM_THREADS"] == "6"
    assert os.environ["GOMP_SPINCOUNT"] == str(defaults.OMP_SPIN_COUNT)
    assert os.environ["TORCH_COMPILE_DISABLE"] == "1"


def test_compilation_that_was_asked_for_stays(clean_environment):
    defaults.apply(_server_args(enable_torch_compile=True))
    assert "TORCH_COMPILE_DISABLE" not in os.environ


def test_given_flags_win(clean_environment, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    args = _server_args(
        {"attention_backend": "flex_attention", "max_total_tokens": 99},
        attention_backend="flex_attention",
        max_total_tokens=99,
        _cuda_graph_config_locked={("decode", "backend")},
    )
    decode = args.cuda_graph_config.decode.backend
    defaults.apply(args)
    assert (args.attention_backend, args.max_total_tokens) == ("flex_attention", 99)
    assert args.cuda_graph_config.decode.backend == decode
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "GOMP_SPINCOUNT" not in os.environ


def test_a_given_memory_fraction_leaves_the_pool_to_sglang(clean_environment):
    args = _server_args({"mem_fraction_static": 0.5})
    defaults.apply(args)
    assert args.max_total_tokens is None


def test_ranks_share_the_cores(clean_environment):
    defaults.apply(_server_args(tp_size=2, dp_size=2, nnodes=2))
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_another_device_is_left_alone(clean_environment):
    args = _server_args(device="cuda")
    defaults.apply(args)
    assert args.attention_backend == "intel_amx"


def test_token_cap_follows_the_budget(monkeypatch):
    overrides = pytest.importorskip("sglang.srt.arg_groups.overrides")
    monkeypatch.setattr(overrides, "model_config_of", lambda args: _model_config())
    monkeypatch.setattr(host, "available_memory", lambda: 4 << 30)
    per_token = 30 * 3 * 128 * 2
    cap = defaults.kv_token_cap(_server_args())
    assert cap % 1024 == 0
    assert (1 << 30) - 1024 * per_token < cap * per_token <= 1 << 30
    monkeypatch.setattr(host, "available_memory", lambda: 1 << 50)
    assert defaults.kv_memory_budget() == defaults.KV_MEMORY_MAX
    monkeypatch.setattr(overrides, "model_config_of", lambda args: SimpleNamespace())
    assert defaults.kv_token_cap(_server_args()) == defaults.KV_TOKENS_UNKNOWN_MODEL


# ---- operators: each against SGLang's own ----


@pytest.fixture(scope="module")
def sglang_layers():
    pytest.importorskip("sglang")
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    return SimpleNamespace(RMSNorm=RMSNorm, RotaryEmbedding=RotaryEmbedding)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(sglang_layers, dtype, with_residual):
    import torch

    from oasis_sglang.platform import native_ops

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    norm = sglang_layers.RMSNorm(96, eps=1e-5)
    norm.weight = torch.nn.Parameter(torch.rand(96).to(kind), requires_grad=False)
    x, residual = torch.randn(5, 96).to(kind), torch.randn(5, 96).to(kind)
    before = x.clone(), residual.clone()
    arguments = (x, residual) if with_residual else (x,)
    expected, actual = norm.forward_native(*arguments), native_ops.rms_norm(norm, *arguments)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1]), "inputs are not written"
    if with_residual:
        assert torch.equal(actual[1], expected[1])
        actual, expected = actual[0], expected[0]
    if dtype == "float32":
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("neox", [True, False])
def test_rope(sglang_layers, dtype, neox):
    import torch

    from oasis_sglang.platform import native_ops

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    rope = sglang_layers.RotaryEmbedding(16, 16, 128, 10_000, neox, kind)
    query, key, _ = torch.randn(7, 16 * 6).to(kind).split([64, 16, 16], dim=-1)
    positions = torch.randint(0, 128, (7,))
    for _ in range(2):
        for actual, expected in zip(
            native_ops.rotary_embedding(rope, positions, query, key),
            rope.forward_native(positions, query, key),
            strict=True,
        ):
            assert torch.equal(actual, expected)
            assert actual.is_contiguous()
        rope._ensure_cos_sin_cache_length(4096)  # a new table must be picked up
        positions = positions + 3000


def test_rope_leaves_partial_rotation_to_sglang(sglang_layers):
    import torch

    from oasis_sglang.platform import native_ops

    rope = sglang_layers.RotaryEmbedding(16, 8, 128, 10_000, True, torch.float32)
    query, key, positions = torch.randn(3, 32), torch.randn(3, 16), torch.arange(3)
    for actual, expected in zip(
        native_ops.rotary_embedding(rope, positions, query, key),
        rope.forward_native(positions, query, key),
        strict=True,
    ):
        assert torch.equal(actual, expected)


def test_symbols_are_as_expected():
    pytest.importorskip("sglang")
    from oasis_sglang.hooks import inspect_hook
    from oasis_sglang.platform.symbols import CPU_HOOKS

    assert [finding for hook in CPU_HOOKS if (finding := inspect_hook(hook)).problem] == []
