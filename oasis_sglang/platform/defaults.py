"""Server flags that the CPU platform fills in. A value the user gave is never changed.

SGLang hands `SRTPlatform.apply_server_args_defaults` a recorder: reads see what resolution has decided so far, writes
become declarations of the platform. Some earlier step has already turned "not given" into a guess by then
(`handle_cpu_backends` picks `intel_amx`, which needs the CPU kernel wheel), so what the user gave is read from
`_raw_input`, the snapshot resolution takes before its first step.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from oasis_sglang.platform import host

logger = logging.getLogger(__name__)

# Share of the available memory that the KV pool may take by default, and its bound in bytes. SGLang's own default
# takes nearly all of it: wrong on a machine that also runs everything else. Filling 4 GiB takes a second, or 15 on a
# virtual machine that touches its memory for the first time.
KV_MEMORY_SHARE = 0.25
KV_MEMORY_MAX = 4 << 30

# Cap, in tokens, for a model whose KV size per token cannot be told from its configuration.
KV_TOKENS_UNKNOWN_MODEL = 65_536

# Turns an OpenMP thread spins at a barrier before it sleeps. The runtime's default (300,000) assumes that every thread
# has a core to itself; when anything else runs, the waiting thread holds the core that the awaited one needs, and a
# step grows many times longer. This many turns still cover the gap between two operators of a step, about a tenth of a
# millisecond; a hundredth of it makes an undisturbed step a quarter longer.
OMP_SPIN_COUNT = 100_000
_WAIT_SETTINGS = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"}


def given(server_args: Any, name: str) -> Any:
    """The value the user gave for a flag, or the flag's declared default."""
    raw = getattr(server_args, "_raw_input", None)
    return raw[name] if raw is not None and name in raw else getattr(server_args, name)


def apply(server_args: Any) -> None:
    """Fill in every default; called once, in the launching process, before any child starts."""
    if server_args.device != "cpu":
        return  # the user named another device: its absence is SGLang's to report
    _backends(server_args)
    _scheduling(server_args)
    _compilation(server_args)
    _kv_pool(server_args)
    set_thread_count(server_args)


def _backends(server_args: Any) -> None:
    if given(server_args, "attention_backend") is None:
        server_args.attention_backend = "torch_native"
    if given(server_args, "sampling_backend") is None:
        server_args.sampling_backend = "pytorch"


def _scheduling(server_args: Any) -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    # There is no second stream to overlap with on the CPU: host and device are the same cores.
    server_args.disable_overlap_schedule = True
    # An idle scheduler polls its sockets in a loop, which elsewhere costs nothing but here takes a compute core.
    server_args.sleep_on_idle = True

    locked: set[tuple[str, str]] = getattr(server_args, "_cuda_graph_config_locked", set())
    for phase in (Phase.DECODE, Phase.PREFILL):
        if (phase, "backend") not in locked:
            server_args.cuda_graph_config = with_phase(server_args.cuda_graph_config, phase, backend=Backend.DISABLED)


def _compilation(server_args: Any) -> None:
    # SGLang's speculation compiles a few small functions through torch, which takes ten seconds of the first request, a
    # C++ compiler, and gains nothing here. Read when torch is imported, so in time for the children.
    if not server_args.enable_torch_compile:
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def _kv_pool(server_args: Any) -> None:
    if given(server_args, "max_total_tokens") is not None or given(server_args, "mem_fraction_static") is not None:
        return
    tokens = kv_token_cap(server_args)
    server_args.max_total_tokens = tokens
    logger.info(
        "CPU platform: KV pool capped at %d tokens (a quarter of the available memory, at most %d GiB). "
        "Set --max-total-tokens or --mem-fraction-static for another size.",
        tokens,
        KV_MEMORY_MAX >> 30,
    )


def kv_memory_budget() -> int:
    """Bytes of host memory the platform gives to KV when the user sized nothing."""
    return min(int(host.available_memory() * KV_MEMORY_SHARE), KV_MEMORY_MAX)


def kv_token_cap(server_args: Any) -> int:
    """Tokens per data-parallel replica that `kv_memory_budget` holds, a multiple of 1024 so that any page size fits."""
    from sglang.srt.arg_groups.overrides import model_config_of

    # The recorder wraps a view, and ModelConfig is memoised on the record that view reads.
    config = model_config_of(getattr(server_args, "_cfg", server_args))
    try:
        per_token = kv_bytes_per_token(config, str(server_args.kv_cache_dtype))
    except (AttributeError, TypeError, ValueError):
        return KV_TOKENS_UNKNOWN_MODEL
    replicas = max(int(server_args.dp_size), 1)
    tokens = kv_memory_budget() // (per_token * replicas)
    return max(tokens // 1024 * 1024, 1024)


def kv_bytes_per_token(config: Any, kv_cache_dtype: str) -> int:
    """Bytes of K and V of one token, over all layers and KV heads of the model."""
    itemsize = 1 if kv_cache_dtype.startswith("fp8") else config.dtype.itemsize
    if kv_cache_dtype in ("bf16", "bfloat16"):
        itemsize = 2
    if config.attention_arch.name == "MLA":
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = config.get_total_num_kv_heads() * (config.head_dim + config.v_head_dim)
    size = int(config.num_attention_layers * width * itemsize)
    if size <= 0:
        raise ValueError("the model keeps no KV cache that its configuration describes")
    return size


def set_thread_count(server_args: Any) -> None:
    """Give each rank its share of the physical cores, and waits that yield, through the environment it inherits.

    OpenMP reads the environment when torch is first imported, so this is set before SGLang starts its children.
    """
    ranks = max(int(server_args.tp_size) * int(server_args.pp_size) * int(server_args.dp_size), 1)
    nodes = max(int(server_args.nnodes), 1)
    per_node = -(-ranks // nodes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(host.usable_cores() // per_node, 1)))
    if not _WAIT_SETTINGS & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(OMP_SPIN_COUNT)
