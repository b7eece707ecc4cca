"""Symbols of SGLang that the CPU platform rests on, in the form of the project's hook table.

For plain decoding none is patched: the platform API, the registries and the quantization-method protocol reach
everything that is needed. Speculation calls kernels by name, so those are (`CHAIN_HOOKS`, on hosts with this platform).
"""

from __future__ import annotations

from oasis_sglang.hooks import Hook, Kind

_PLATFORM = "sglang.srt.platforms.interface.SRTPlatform"
_LAYERS = "sglang.srt.layers"
_SPEC = "sglang.kernels.ops.speculative"
_ALLOCATION = "sglang.srt.mem_cache.allocation"

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

CHAIN_HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_SPEC}.spec_tree.build_tree_kernel_efficient_func",
        Kind.AROUND,
        (
            *("parent_list", "top_scores_index", "seq_lens", "tree_mask", "positions", "retrieve_index"),
            *("retrieve_next_token", "retrieve_next_sibling", "topk", "spec_steps", "num_verify_tokens"),
            "tree_mask_mode",
        ),
        "builds a chain of drafts in torch",
    ),
    Hook(
        f"{_SPEC}.spec_tree.verify_tree_greedy_func",
        Kind.AROUND,
        (
            *("predicts", "accept_index", "accept_token_num", "candidates", "retrieve_index", "retrieve_next_token"),
            *("retrieve_next_sibling", "target_predict", "topk"),
        ),
        "accepts drafts in torch",
    ),
    Hook(
        f"{_SPEC}.eagle.fill_bonus_tokens_func",
        Kind.AROUND,
        ("accept_tokens", "accept_lens", "bonus_tokens", "accept_stride", "batch_size"),
        "picks the last accepted token in torch",
    ),
    Hook(
        f"{_SPEC}.cache_locs.assign_draft_cache_locs_contiguous_func",
        Kind.AROUND,
        ("req_pool_indices", "req_to_token", "seq_lens", "out_cache_loc", "topk", "num_cols", "positions", "mrope"),
        "slots of drafts, in torch",
    ),
    Hook(
        f"{_ALLOCATION}.assign_req_to_token_pool_func",
        Kind.AROUND,
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
        "records slots reserved for drafts, in torch",
    ),
    Hook(
        f"{_ALLOCATION}.get_last_loc",
        Kind.AROUND,
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        "a backend of another name than torch_native is sent to Triton",
    ),
    Hook(f"{_ALLOCATION}.get_last_loc_torch", Kind.CALL, None, "what it is sent to instead"),
    Hook(f"{_PLATFORM}.get_speculative_cache_locs_fn", Kind.SUBCLASS, ("self",), "slots that a verification writes"),
    Hook(
        f"{_PLATFORM}.supports_speculative_algorithm", Kind.SUBCLASS, ("self", "algorithm"), "allows EAGLE and EAGLE3"
    ),
    Hook("sglang.srt.speculative.eagle_utils.tree_speculative_sampling_target_only", Kind.FILL, None, "sampling"),
    Hook("sglang.srt.speculative.eagle_utils.top_k_renorm_prob", Kind.FILL, None, "sampling with top_k"),
    Hook("sglang.srt.speculative.eagle_utils.top_p_renorm_prob", Kind.FILL, None, "sampling with top_p"),
)
