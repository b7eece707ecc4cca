"""The folder that SGLang 0.5.23 loads as an EAGLE-3 draft: `--speculative-draft-model-path`.

SGLang skips tensors whose names it does not know, without a word, and would then draft from random weights. So names
and shapes are checked against `expected_tensors` when a folder is written, and that table against SGLang by a test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from oasis_sglang.speculative.draft.data import write_atomically
from oasis_sglang.speculative.draft.model import DraftHead, DraftShape
from oasis_sglang.speculative.draft.target import Target

WEIGHTS = "model.safetensors"


def draft_config(target: Target, target_config: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """`config.json` of a draft: the target's own, one layer deep, with what makes it an EAGLE-3 draft."""
    config = {key: value for key, value in target_config.items() if not key.startswith(("_", "quantization"))}
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "head_dim": target.head_dim,
        "num_hidden_layers": 1,
        "draft_vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            # SGLang counts the outputs of layers here and adds one, `captured` counts the inputs.
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in target.captured],
            "use_aux_hidden_state": True,
        },
    }
    config.pop("dtype", None)  # the newer name of torch_dtype
    return config


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a draft's tensors. The embedding is not among them: SGLang shares the target's."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim, vocabulary = config["head_dim"], config["draft_vocab_size"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    features = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    return {
        "fc.weight": (hidden, features * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
        "d2t": (vocabulary,),
    }


def problems_of(folder: Path) -> list[str]:
    """Where a draft folder differs from what SGLang expects; empty if it does not."""
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
        offsets = file.get_tensor("d2t") if "d2t" in found else None
    expected = expected_tensors(config)
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not known to SGLang" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has the shape {found[name]}, not {expected[name]}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
    if offsets is not None:
        ids = offsets + torch.arange(len(offsets))
        if offsets.dtype != torch.int64 or bool((ids < 0).any()) or bool((ids >= config["vocab_size"]).any()):
            problems.append("d2t does not hold int64 offsets from draft ids to ids of the target")
    return problems


def write_draft(folder: Path, head: DraftHead, target: Target, target_folder: Path, vocabulary: Tensor) -> None:
    """Write `config.json` and `model.safetensors`. `vocabulary` [draft size] holds ids of the target, ascending."""
    folder.mkdir(parents=True, exist_ok=True)
    config = draft_config(target, json.loads((target_folder / "config.json").read_text()), len(vocabulary))
    tensors = {name: value.detach().float() for name, value in head.state_dict().items() if name != "feature_scale"}
    tensors["fc.weight"] = tensors["fc.weight"] * head.feature_scale
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    tensors["d2t"] = vocabulary - torch.arange(len(vocabulary))
    write_atomically(folder / WEIGHTS, lambda path: save_file(tensors, path, {"format": "pt"}))
    (folder / WEIGHTS).chmod(0o644)  # safetensors writes 0600
    text = json.dumps(config, indent=2) + "\n"
    write_atomically(folder / "config.json", lambda path: path.write_text(text))
    if problems := problems_of(folder):
        raise RuntimeError(f"{folder} is not what SGLang expects: {'; '.join(problems)}")


def read_draft(folder: Path, target: Target) -> tuple[DraftHead, Tensor]:
    """A written draft, in float32, and its vocabulary as ids of the target."""
    tensors = load_file(folder / WEIGHTS)
    offsets = tensors.pop("d2t")
    head = DraftHead(DraftShape.of(target, len(offsets)))
    weights = {name: value.float() for name, value in tensors.items()}
    head.load_state_dict(weights | {"feature_scale": head.feature_scale})
    return head.eval(), offsets + torch.arange(len(offsets))
