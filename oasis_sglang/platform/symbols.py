"""Symbols of SGLang that the CPU platform rests on, in the form of the project's hook table.

None is patched: the platform API, the registries and the quantization-method protocol reach everything that is needed.
"""

from __future__ import annotations

from oasis_sglang.hooks import Hook, Kind

_PLATFORM = "sglang.srt.platforms.interface.SRTPlatform"
_LAYERS = "sglang.srt.layers"

CPU_HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_PLATFORM}.apply_server_args_defaults",
        Kind.SUBCLASS,
        ("self", "server_args"),
        "fills in the flags that a CPU needs",
    ),
    Hook(f"{_PLATFORM}.init_backend", Kind.SUBCLASS, ("self",), "registers the CPU operators in each worker"),
    Hook(f"{_PLATFORM}.post_load_model", Kind.SUBCLASS, ("self", "model"), "gives linear layers the compiled product"),
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
        "multiplies few rows in compiled code",
    ),
    Hook(
        f"{_LAYERS}.quantization.unquant.UnquantizedEmbeddingMethod.apply",
        Kind.SUBCLASS,
        ("self", "layer", "x", "bias"),
        "the same for the LM head",
    ),
)
