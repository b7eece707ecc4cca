"""Configurations of small models on disk, as the real resolution reads them. No weights: none is ever loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "head_dim": 16,
    "torch_dtype": "bfloat16",
}

ACCEPTED: dict[str, dict[str, Any]] = {
    "Llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "SmolLM2": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 144,
        "tie_word_embeddings": True,
    },
    "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "Qwen2, window not used": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 4,
    },
    "Mistral without a window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": None,
    },
    "multi-head": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 4},
}

# name -> (configuration, words of the refusal)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Gemma-2": (
        {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 512},
        "sliding-window attention",
    ),
    "Gemma-3": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "sliding_window": 512,
            "sliding_window_pattern": 2,
        },
        "sliding-window attention",
    ),
    "gpt-oss": (
        {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        "sliding-window attention",
    ),
    "Mistral": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 1024},
        "sliding-window attention",
    ),
    "Qwen2 with its window": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "sliding_window": 1024,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
        "sliding-window attention",
    ),
    "DeepSeek-V2": (
        {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        "MLA attention",
    ),
    "Qwen3-Next": (
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
        },
        "recurrent",
    ),
    "Falcon-H1": (
        {
            "architectures": ["FalconH1ForCausalLM"],
            "model_type": "falcon_h1",
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
        },
        "recurrent",
    ),
    "Nemotron-H": (
        {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M-M*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
        },
        "recurrent",
    ),
    "Mamba-2": (
        {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "expand": 2,
        },
        "",
    ),
    "Whisper": (
        {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_target_positions": 448,
            "max_source_positions": 1500,
        },
        "encoder-decoder",
    ),
    "Qwen2 embedding": (
        {"architectures": ["Qwen2ForSequenceClassification"], "model_type": "qwen2"},
        "does not generate text",
    ),
    "BERT": (
        {"architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512},
        "does not generate text",
    ),
}


def write(folder: Path, settings: dict[str, Any]) -> str:
    """A model folder with this configuration; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_PLAIN, **settings}))
    return str(folder)
