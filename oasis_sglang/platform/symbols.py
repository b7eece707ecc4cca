"""Symbols of SGLang that the CPU platform rests on, in the form of the project's hook table.

None is patched: the platform API, the registries and the quantization-method protocol reach everything that is needed.
"""

from __future__ import annotations

from oasis_sglang.hooks import Hook, Kind

_PLATFORM = "sglang.srt.platforms.interface.SRTPlatform"
_LAYERS = "sglang.srt.layers"
_METHOD = f"{_LAYERS}.quantization.base_config.QuantizeMethodBase"

CPU_HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_PLATFORM}.apply_server_args_defaults",
        Kind.SUBCLASS,
        ("self", "server_args"),
        "fills in the flags that a CPU needs",
    ),
    Hook(f"{_PLATFORM}.init_backend", Kind.SUBCLASS, ("self",), "registers the CPU operators in each worker"),
    Hook(f"{_PLATFORM}.post_load_model", Kind.SUBCLASS, ("self", "model"), "packs the loaded weights"),
    Hook(
        "sglang.kernels.fused_op.BaseFusedOp.register_oot_forward",
        Kind.CALL,
        ("cls", "op_cls", "fn", "platform_key"),
        "selects our RMSNorm and rope",
    ),
    Hook(
        f"{_LAYERS}.layernorm.RMSNorm.forward_native",
        Kind.CALL,
        ("self", "x", "residual", "post_residual_addition", "quant_linear"),
        "our form takes the same arguments and falls back to it",
    ),
    Hook(
        f"{_LAYERS}.rotary_embedding.base.RotaryEmbedding.forward_native",
        Kind.CALL,
        ("self", "positions", "query", "key", "offsets", "fused_set_kv_buffer_arg"),
        "our form takes the same arguments and falls back to it",
    ),
    Hook(
        f"{_LAYERS}.quantization.unquant.UnquantizedLinearMethod.apply",
        Kind.SUBCLASS,
        ("self", "layer", "x", "bias"),
        "multiplies by the packed weight",
    ),
    Hook(
        f"{_LAYERS}.quantization.unquant.UnquantizedEmbeddingMethod.apply",
        Kind.SUBCLASS,
        ("self", "layer", "x", "bias"),
        "the same for the LM head",
    ),
    Hook(
        f"{_METHOD}.restore_weights_before_loading",
        Kind.SUBCLASS,
        ("self", "layer"),
        "a weight update drops the packed copy",
    ),
    Hook(f"{_METHOD}.process_weights_after_loading", Kind.SUBCLASS, ("self", "layer"), "and packs the new weights"),
    Hook(
        f"{_LAYERS}.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode",
        Kind.SUBCLASS,
        (
            "self",
            "query",
            "output",
            "k_cache",
            "v_cache",
            "req_to_token",
            "req_pool_indices",
            "seq_lens",
            "encoder_lens",
            "scaling",
            "enable_gqa",
            "causal",
            "is_cross_attn",
            "sliding_window_size",
        ),
        "the dense decode, with lengths and slots read once per pass",
    ),
)
