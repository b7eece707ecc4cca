"""What `--kv-backend oasis` does not serve, refused at start: never silently dense, never silently wrong."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

from oasis_sglang.config import ConfigError, OasisConfig

logger = logging.getLogger(__name__)

# Of SGLang's choices, those that keep KV in a dtype that models compute in.
KV_DTYPES = ("auto", "bf16", "bfloat16")


class Refusal(NamedTuple):
    """`field` of ServerArgs, the values that are fine, and what to do instead."""

    field: str
    fine: tuple[Any, ...]
    instead: str


_LEAVE_OUT = "leave the flag out"

REFUSALS = (
    Refusal(
        "speculative_algorithm",
        (None, "EAGLE", "EAGLE3", "STANDALONE", "eagle", "eagle3", "standalone"),
        "use EAGLE3, EAGLE or STANDALONE",
    ),
    Refusal("speculative_eagle_topk", (None, 1), "use --speculative-eagle-topk 1: drafts are verified as a chain"),
    Refusal("speculative_adaptive", (None, False), _LEAVE_OUT),
    Refusal("speculative_use_rejection_sampling", (None, False), f"{_LEAVE_OUT}: the output follows the target anyway"),
    Refusal("speculative_use_block_verification", (None, False), _LEAVE_OUT),
    Refusal("speculative_draft_window_size", (None,), f"{_LEAVE_OUT}: the draft attends to everything"),
    Refusal("enable_multi_layer_eagle", (None, False), "use a draft with one layer"),
    Refusal("pp_size", (1,), "use --pp-size 1; a model must fit one rank"),
    Refusal("tp_size", (1,), "use --tp-size 1 with one server per model copy; more ranks are untested"),
    Refusal("dp_size", (1,), "use --dp-size 1 and start several servers"),
    Refusal("dcp_size", (1, None), "use --dcp-size 1"),
    Refusal("attn_cp_size", (1, None), "use --attn-cp-size 1"),
    Refusal("nnodes", (1,), "use --nnodes 1"),
    Refusal("is_embedding", (None, False), f"{_LEAVE_OUT}: it serves generation only"),
    Refusal("enable_lora", (None, False), "merge the adapter into the model's weights"),
    Refusal("lora_paths", (None,), "merge the adapter into the model's weights"),
    Refusal("disaggregation_mode", ("null", None), "serve prefill and decode on one server"),
    Refusal(
        "enable_hierarchical_cache", (False, None), f"{_LEAVE_OUT}: the host pool is already the home of the KV cache"
    ),
    Refusal("enable_hisparse", (False, None), _LEAVE_OUT),
    Refusal("enable_unified_cache_external_linker", (False, None), _LEAVE_OUT),
    Refusal("enable_lmcache", (False, None), _LEAVE_OUT),
    Refusal("enable_flexkv", (False, None), _LEAVE_OUT),
    Refusal("enable_unified_memory", (False, None), _LEAVE_OUT),
    Refusal("enable_kv_cache_sharding", (False, None), _LEAVE_OUT),
    Refusal("enable_page_major_kv_layout", (False, None), _LEAVE_OUT),
    Refusal("prefill_only_disable_kv_cache", (False, None), _LEAVE_OUT),
    Refusal("enable_mixed_chunk", (False, None), f"{_LEAVE_OUT}: chunked prefill works without it"),
    Refusal(
        "enable_streaming_session",
        (False, None),
        f"{_LEAVE_OUT}: a second turn reuses the first through the radix cache",
    ),
    Refusal("enable_pdmux", (False, None), _LEAVE_OUT),
    Refusal("enable_two_batch_overlap", (False, None), _LEAVE_OUT),
    Refusal("enable_memory_saver", (False, None), _LEAVE_OUT),
    Refusal("dllm_algorithm", (None,), "start without --kv-backend for diffusion language models"),
    Refusal("enable_deterministic_inference", (False, None), _LEAVE_OUT),
    Refusal("kv_canary", ("none", None, "off", False), _LEAVE_OUT),
)


# On a GPU.
GPU_REFUSALS = (Refusal("enable_torch_compile", (None, False), f"{_LEAVE_OUT}: decode steps are CUDA graphs already"),)


def _flag(field: str) -> str:
    return "--" + field.removesuffix("_size").replace("_", "-") + ("-size" if field.endswith("_size") else "")


def check_flags(server_args: Any) -> None:
    """Raise for flags that do not go with this backend.

    Raises:
        ConfigError: naming the flag, the value and what works instead.
    """
    for refusal in REFUSALS:
        value = getattr(server_args, refusal.field, None)
        if value not in refusal.fine:
            raise ConfigError(
                f"{_flag(refusal.field)}={value} does not work with --kv-backend oasis: {refusal.instead}"
            )
    _check_draft(server_args)
    tokens = getattr(server_args, "max_total_tokens", None)
    if tokens is not None and tokens < 1:
        raise ConfigError(f"--max-total-tokens={tokens} leaves no device pool: use a positive number, or leave it out")
    dtype = server_args.kv_cache_dtype
    if dtype not in KV_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype={dtype} does not work with --kv-backend oasis: use --kv-cache-dtype auto (the model's "
            "dtype) or bf16; 8- and 4-bit KV are untested and 4-bit scales would be lost"
        )


def _check_draft(server_args: Any) -> None:
    algorithm, draft = server_args.speculative_algorithm, server_args.speculative_draft_model_path
    # Anything else may be the name of a model that is still to be downloaded.
    local = str(draft or "").startswith(("/", ".", "~"))
    if algorithm is not None and (not draft or (local and not Path(draft).expanduser().is_dir())):
        raise ConfigError(
            f"--speculative-algorithm={algorithm} needs a draft model, and --speculative-draft-model-path={draft} is "
            "none: give the folder of one (`oasis train-draft` makes it)"
        )


def check_speculation(server_args: Any, config: OasisConfig) -> None:
    """Raise for chains of drafts that do not fit, and for settings that need speculation.

    Args:
        server_args: as SGLang resolved them.

    Raises:
        ConfigError: naming the flag, the value and what works instead.
    """
    if server_args.speculative_algorithm is None:
        for key, value in (("probe", config.probe), ("predictor", config.predictor == "draft")):
            if value:
                raise ConfigError(
                    f"{key}={getattr(config, key)} in --oasis-config needs drafts: give --speculative-algorithm EAGLE3 "
                    f"and --speculative-draft-model-path, or leave {key} out"
                )
        return
    chain, most = int(server_args.speculative_num_draft_tokens or 0), (config.page_size + 1) // 2
    if not 2 <= chain <= most:
        raise ConfigError(
            f"--speculative-num-draft-tokens={chain} (--speculative-num-steps={server_args.speculative_num_steps}) "
            f"does not work with --kv-backend oasis and pages of {config.page_size} tokens: use 1 to {most - 1} steps"
        )


def prompt_problem(request: Any) -> str | None:
    """What makes a request's prompt impossible to compute, or None.

    Args:
        request: SGLang's `Req`.
    """
    ids = request.origin_input_ids
    if not len(ids):
        return "The prompt has no tokens; send at least one."
    # pixels stand for themselves as ids beyond the vocabulary, until the model replaces them
    if request.vocab_size and request.multimodal_inputs is None:
        wrong = next((i for i in (min(ids), max(ids)) if not 0 <= i < request.vocab_size), None)
        if wrong is not None:
            return f"Token id {wrong} in the prompt is not in the vocabulary; ids are 0 to {request.vocab_size - 1}."
    return None


def check_kv_dtype(kv_dtype: Any, model_dtype: Any) -> None:
    """Raise where KV would be kept in another dtype than the model computes in: pools hold what attention is given.

    Args:
        kv_dtype: `--kv-cache-dtype`, or the torch dtype that SGLang made of it and of the checkpoint.
        model_dtype: torch dtype of the model.

    Raises:
        ConfigError: naming both.
    """
    name, model = str(kv_dtype).removeprefix("torch."), str(model_dtype).removeprefix("torch.")
    if name not in ("auto", model) and (name, model) != ("bf16", "bfloat16"):
        raise ConfigError(
            f"--kv-cache-dtype={name} with a model in {model} does not work with --kv-backend oasis, which keeps KV in "
            "the model's dtype: use --kv-cache-dtype auto and a checkpoint that asks for no other KV dtype, or another "
            "--dtype"
        )


def check_graphs(config: Any) -> None:
    """Raise for graphs that attention cannot be part of.

    Args:
        config: SGLang's resolved `cuda_graph_config`.

    Raises:
        ConfigError: naming the flag, the value and what works instead.
    """
    prefill, decode = config.prefill.backend, config.decode.backend
    if prefill != "disabled":
        raise ConfigError(
            f"--cuda-graph-backend-prefill={prefill} does not work with --kv-backend oasis: a prompt chunk's prefix "
            "comes from the host pool, as long as it is. Leave the flag out, or use disabled"
        )
    if decode not in ("full", "disabled"):
        raise ConfigError(
            f"--cuda-graph-backend-decode={decode} does not work with --kv-backend oasis: use full or disabled"
        )


def check_device(server_args: Any, config: OasisConfig) -> None:
    """Raise for devices without kernels, and on a GPU for what only a CPU host does.

    Args:
        server_args: as SGLang resolved them.

    Raises:
        ConfigError: naming the flag, the value and what works instead.
    """
    device = server_args.device
    if device == "cpu":
        return
    works = "Use an NVIDIA GPU (--device cuda) or a host without a GPU (--device cpu), or start without --kv-backend."
    if device != "cuda":
        raise ConfigError(f"--device={device} does not work with --kv-backend oasis: there are no kernels. {works}")
    import torch

    if torch.version.hip is not None:
        raise ConfigError(
            f"--device={device} on an AMD GPU does not work with --kv-backend oasis: its kernels were never compiled "
            f"for one. {works}"
        )
    for refusal in GPU_REFUSALS:
        value = getattr(server_args, refusal.field, None)
        if value not in refusal.fine:
            raise ConfigError(
                f"{_flag(refusal.field)}={value} does not work with --kv-backend oasis on a GPU: {refusal.instead}"
            )
    from sglang.srt.environ import envs

    if envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get():
        # Replays of a step's preparation would be about the step that was captured.
        raise ConfigError(
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH=1 does not work with --kv-backend oasis, which prepares steps on the "
            "host: unset it"
        )
    from oasis_sglang.kernels.device_step import require_supported

    try:
        require_supported(config, chain=int(server_args.speculative_num_draft_tokens or 1))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    logger.warning(
        "--kv-backend oasis has not been run on any GPU yet: its kernels were interpreted on CPUs and compiled for "
        "NVIDIA GPUs (sm_80, sm_90, sm_100), no more. Compare its answers with those of a server without --kv-backend."
    )


def check_model(model_config: Any) -> None:
    """Raise for models whose attention or cache this backend does not compute.

    Raises:
        ConfigError: naming the model's kind and what works instead.
    """
    name = ", ".join(getattr(model_config.hf_config, "architectures", None) or ["unknown"])
    works = "it serves decoder models with plain multi-head or grouped-query attention; start without --kv-backend"
    arch = model_config.attention_arch.name
    if arch != "MHA":
        raise ConfigError(
            f"--model-path: {name} uses {arch} attention, which --kv-backend oasis does not support: {works}"
        )
    text = model_config.hf_text_config
    windows = [getattr(text, key, None) for key in ("sliding_window", "sliding_window_size", "window_size")]
    window = next((w for w in windows if isinstance(w, int) and w > 0), None)
    unused = getattr(text, "use_sliding_window", None) is False
    if getattr(model_config, "is_hybrid_swa", False) or (window is not None and not unused):
        raise ConfigError(
            f"--model-path: {name} uses sliding-window attention (window {window}), which --kv-backend oasis does not "
            f"support: {works}"
        )
    if _has_state_layers(model_config):
        raise ConfigError(
            f"--model-path: {name} mixes attention with recurrent (Mamba or linear-attention) layers, which "
            f"--kv-backend oasis does not support: {works}"
        )
    if getattr(model_config, "is_encoder_decoder", False):
        raise ConfigError(
            f"--model-path: {name} is an encoder-decoder model, which --kv-backend oasis does not support: {works}"
        )
    if not getattr(model_config, "is_generation", True):
        raise ConfigError(f"--model-path: {name} does not generate text; --kv-backend oasis serves generation only")
    if model_config.head_dim != model_config.v_head_dim:
        raise ConfigError(
            f"--model-path: {name} has head dims {model_config.head_dim} for K and {model_config.v_head_dim} for V, "
            f"which --kv-backend oasis does not support: {works}"
        )


def check_layers(config: OasisConfig, layers: int) -> None:
    """
    Raises:
        ConfigError: `dense_layers` leaves no layer that attends sparsely.
    """
    if config.dense_layers >= layers:
        raise ConfigError(
            f"--oasis-config: dense_layers={config.dense_layers} leaves none of the model's {layers} layers sparse; "
            f"use at most {layers - 1}"
        )


def _has_state_layers(model_config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    text = model_config.hf_text_config
    if mambaish_config(model_config) is not None or getattr(text, "layers_block_type", None):
        return True
    kinds = getattr(text, "layer_types", None) or []
    return any("mamba" in str(k) or "linear" in str(k) for k in kinds)
