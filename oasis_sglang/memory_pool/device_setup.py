"""From SGLang's resolved settings to the setup of one rank's pools."""

from __future__ import annotations

from typing import Any

import torch

from oasis_sglang import validate
from oasis_sglang.config import OasisConfig
from oasis_sglang.coordinator import Setup
from oasis_sglang.memory_pool.device_bytes import DeviceLoad, device_memory
from oasis_sglang.memory_pool.sizing import PoolGeometry, plan_pools
from oasis_sglang.memory_pool.sketch import dims_of
from oasis_sglang.platform import defaults, host

# Most requests on the device where --max-running-requests is not given: bounds the maps, which grow with it.
DEFAULT_ROWS = 256


def plan_rank(configurator: Any, config: OasisConfig, resolved: Any, free_before_weights: Any) -> Setup:
    """
    Args:
        configurator: SGLang's `KVCacheConfigurator` of this rank.
        resolved: the `MemoryPoolConfig` that stock SGLang would use.
        free_before_weights: GB of the device that were free before the model was loaded.

    Raises:
        ValueError: the pools do not fit (see `plan_pools`), or KV is not in the model's dtype.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel

    model, server_args = configurator.model_config, configurator.server_args
    validate.check_kv_dtype(configurator.kv_cache_dtype, model.dtype)  # a checkpoint may ask for 8-bit KV of its own
    parallel = get_parallel()
    geometry = PoolGeometry(
        layers=configurator.layer_info.num_effective_layers,
        kv_heads=model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size),
        head_dim=model.head_dim,
        itemsize=configurator.kv_cache_dtype.itemsize,
        page_size=config.page_size,
        sketch=dims_of(model.hf_config, model.hf_text_config, model.head_dim) if config.summary == "sketch" else (),
    )
    chain = int(resolving_view(server_args).speculative_num_draft_tokens or 1)
    chain = chain if server_args.speculative_algorithm else 1
    # A draft model that is an LM of its own guesses better than a copy.
    eagle = (server_args.speculative_algorithm or "").upper().startswith("EAGLE")
    lookup = config.prompt_lookup_min if eagle else 0
    on_host = is_host(configurator.device)
    draft = draft_token_bytes(configurator) if chain > 1 else 0
    given_rows = defaults.given(server_args, "max_running_requests")
    most = resolved.max_running_requests
    most = most if given_rows is not None else min(most, DEFAULT_ROWS)
    load = on_device = None
    if not on_host:
        heads = model.num_attention_heads // parallel.attn_tp_size
        load = DeviceLoad(
            rows=most, batch=most, query_heads=heads, chain=chain, context_len=model.context_len, copies=lookup > 0
        )
        # Here: it brings in triton. Before memory is measured: what it was tried with is free again then.
        from oasis_sglang.memory_pool.device_attention import choose_attention

        device = torch.device(configurator.device)
        load = choose_attention(load, config, geometry, configurator.kv_cache_dtype, device)
        on_device = device_memory(
            config,
            geometry,
            load,
            available=configurator._profile_available_bytes(free_before_weights),
            draft_token_bytes=draft,
            device=device,
        )
    plan = plan_pools(
        config,
        geometry,
        context_len=model.context_len,
        max_total_tokens=defaults.given(server_args, "max_total_tokens"),
        memory_budget=defaults.kv_memory_budget(),
        available_memory=host.available_memory(),
        local_ranks=parallel.launch_world_size,
        device_is_host=on_host,
        chain=chain,
        draft_token_bytes=draft,
        on_device=on_device,
    )
    rows = min(plan.device_tokens // config.page_size, most)
    return Setup(config, geometry, plan, rows, model.context_len, chain, load, lookup)


def is_host(device: Any) -> bool:
    """Whether a device's memory is the host's."""
    return str(device).startswith("cpu")


def draft_token_bytes(configurator: Any) -> int:
    """Bytes that the draft model's KV takes per token on this rank."""
    from sglang.srt.runtime_context import get_parallel

    draft, layers = configurator.spec_aux_config.draft_model_config, configurator.spec_aux_config.draft_kv_num_layers
    if draft is None or not layers:
        return 0
    parallel = get_parallel()
    heads = draft.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
    return int(layers * heads * (draft.head_dim + draft.v_head_dim) * configurator.kv_cache_dtype.itemsize)
