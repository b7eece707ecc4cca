"""What a demo model folder must hold: a manifest of its files, and the shape of the network in them.

Reads JSON and safetensors headers only, so that checking a model needs neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MANIFEST_NAME = "oasis-manifest.json"

#: Every name a model folder may hold. A folder with anything else in it was not written by us alone.
KNOWN_FILES = frozenset(
    {
        MANIFEST_NAME,
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
)

#: config.json of SmolLM2-135M-Instruct, as far as it decides what the network computes.
EXPECTED_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "head_dim": 64,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}


def file_sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, source: Mapping[str, Any]) -> None:
    """Record every file of `folder`, and what it was built from, in the folder's manifest."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST_NAME
    }
    text = json.dumps({"source": dict(source), "files": files}, indent=2) + "\n"
    (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")


def check_manifest(folder: Path, source: Mapping[str, Any]) -> list[str]:
    """What is wrong with `folder` according to its manifest; empty if every file is as it was written.

    A model built from another `source` (an older recipe, another package version) counts as wrong.
    """
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        recorded = {str(name): (int(e["bytes"]), str(e["sha256"])) for name, e in manifest["files"].items()}
        built_from = dict(manifest["source"])
    except FileNotFoundError:
        return [f"{MANIFEST_NAME} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST_NAME} cannot be read ({type(error).__name__}: {error})"]
    if built_from != dict(source):
        return ["it was built by another recipe or from another source"]
    return [problem for name, entry in recorded.items() if (problem := _check_file(folder / name, *entry))]


def _check_file(path: Path, size: int, sha256: str) -> str | None:
    """One line if the file differs from its record. The size is compared first: it costs nothing."""
    try:
        actual = path.stat().st_size
        if actual != size:
            return f"{path.name} has {actual} bytes instead of {size}"
        if file_sha256(path) != sha256:
            return f"{path.name} has the right size but other content"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None


def check_network(folder: Path) -> list[str]:
    """What differs from SmolLM2-135M-Instruct in the configuration and the tensors of `folder`."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = safetensors_header(folder / "model.safetensors")
    except (OSError, ValueError, struct.error) as error:
        return [f"the model cannot be read ({type(error).__name__}: {error})"]
    problems = [
        f"config.json: {key} is {config.get(key)!r} instead of {value!r}"
        for key, value in EXPECTED_CONFIG.items()
        if config.get(key) != value
    ]
    if "quantization_config" in config:
        problems.append("config.json: quantization_config is there, though the weights are not quantized")
    return problems + _check_tensors(tensors)


def _check_tensors(tensors: Mapping[str, Any]) -> list[str]:
    """What differs from the expected names, shapes and types of the tensors."""
    expected = expected_tensors()
    problems = [f"model.safetensors: {name} is missing" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"model.safetensors: {name} is unexpected" for name in sorted(tensors.keys() - expected.keys())]
    for name in sorted(expected.keys() & tensors.keys()):
        got = (tensors[name]["dtype"], tuple(tensors[name]["shape"]))
        if got != ("BF16", expected[name]):
            problems.append(f"model.safetensors: {name} is {got} instead of {('BF16', expected[name])}")
    return problems


def expected_tensors() -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor that EXPECTED_CONFIG implies; the tied LM head is not stored."""
    hidden, inner = EXPECTED_CONFIG["hidden_size"], EXPECTED_CONFIG["intermediate_size"]
    query = EXPECTED_CONFIG["num_attention_heads"] * EXPECTED_CONFIG["head_dim"]
    kv = EXPECTED_CONFIG["num_key_value_heads"] * EXPECTED_CONFIG["head_dim"]
    layer = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_proj": (query, hidden),
        "self_attn.v_proj": (kv, hidden),
    }
    shapes = {
        f"model.layers.{i}.{part}.weight": shape
        for i in range(EXPECTED_CONFIG["num_hidden_layers"])
        for part, shape in layer.items()
    }
    return {
        "model.embed_tokens.weight": (EXPECTED_CONFIG["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        **shapes,
    }


def safetensors_header(path: Path) -> dict[str, Any]:
    """The tensor records of a safetensors file: its first eight bytes are the length of a JSON header."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} has a header longer than the file")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header
