"""The target as its draft sees it: a plain forward of a Llama-family model that also returns what EAGLE-3 captures."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TargetError(RuntimeError):
    """The target cannot be used; the message says why."""


def captured_layers(layers: int) -> list[int]:
    """SGLang's default: the inputs of these layers are the low, middle and high features.

    `eagle_aux_hidden_state_layer_ids` counts outputs instead, so a checkpoint says one less for each.
    """
    return sorted({max(0, min(layer, layers - 1)) for layer in (2, layers // 2, layers - 3)})


def fingerprint(folder: Path) -> str:
    """SHA-256 over the weights and the configuration of a model folder."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TargetError(f"{folder} holds no safetensors weights; --model-path takes the folder of a model")
    for path in [folder / "config.json", *files]:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


@dataclasses.dataclass
class Seen:
    """What one forward of the target returns, for every position given to it."""

    features: Tensor  # [batch, tokens, 3 × hidden], inputs of the captured layers
    final: Tensor  # [batch, tokens, hidden], after the final norm; the LM head makes the logits of it


class KVCache:
    """Keys and values of one batch, in place: growing by concatenation would copy the whole cache every step."""

    def __init__(self, layers: int, batch: int, kv_heads: int, capacity: int, dim: int, dtype: torch.dtype) -> None:
        self.buffers = [torch.empty(2, batch, kv_heads, capacity, dim, dtype=dtype) for _ in range(layers)]
        self.length = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [batch, kv_heads, new, dim] behind what is there; return everything so far."""
        end = self.length + keys.shape[2]
        self.buffers[layer][0, :, :, self.length : end] = keys
        self.buffers[layer][1, :, :, self.length : end] = values
        return self.buffers[layer][0, :, :, :end], self.buffers[layer][1, :, :, :end]

    def keep_rows(self, rows: Tensor) -> None:
        self.buffers = [buffer[:, rows] for buffer in self.buffers]


class Target:
    """A frozen Llama-family model. The weights are transformers', the forward is ours: it folds the query heads that
    share a KV head into the query length, which saves the copies that transformers makes of the cache, and it keeps
    only the hidden states that are wanted."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.config: Any = self.model.config
        if self.config.model_type != "llama":
            raise TargetError(f"the target's model_type is {self.config.model_type!r}; only llama is supported")
        if getattr(self.config, "attention_bias", False) or getattr(self.config, "mlp_bias", False):
            raise TargetError("targets with attention or MLP biases are not supported: SGLang's draft has none")
        if self.config.num_hidden_layers < 6:
            raise TargetError(f"the target has {self.config.num_hidden_layers} layers; three features need at least 6")
        self.captured = captured_layers(self.config.num_hidden_layers)
        self.head_dim = int(
            getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        )

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype = torch.float32) -> Target:
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=dtype))

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.model.model.embed_tokens.weight)

    def logits(self, final: Tensor) -> Tensor:
        return F.linear(final, self.model.lm_head.weight)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, [batch, tokens, head_dim], of `positions` [batch, tokens], scaled as the config says."""
        return self.model.model.rotary_emb(self.model.model.embed_tokens.weight[:1], positions)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        config = self.config
        dtype = self.model.dtype
        return KVCache(config.num_hidden_layers, batch, config.num_key_value_heads, capacity, self.head_dim, dtype)

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: KVCache) -> Seen:
        """Append `ids` [batch, tokens] to `cache`. `mask` [batch, 1, tokens, all keys] is True where attended."""
        batch, tokens = ids.shape
        eps = self.config.rms_norm_eps
        x = self.embed(ids)
        cos, sin = (part[:, None] for part in self.rotary(positions))
        features = []
        for index, layer in enumerate(self.model.model.layers):
            if index in self.captured:
                features.append(x)
            attention = layer.self_attn
            y = _norm(x, layer.input_layernorm.weight, eps)
            query, key, value = (
                projection(y).view(batch, tokens, -1, self.head_dim).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            keys, values = cache.append(index, rotate(key, cos, sin), value)
            y = grouped_attention(rotate(query, cos, sin), keys, values, mask)
            x = x + attention.o_proj(y.transpose(1, 2).reshape(batch, tokens, -1))
            y = _norm(x, layer.post_attention_layernorm.weight, eps)
            x = x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
        cache.length += tokens
        return Seen(torch.cat(features, dim=-1), _norm(x, self.model.model.norm.weight, eps))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, a head's two halves as pairs: x [batch, heads, tokens, dim], cos and sin broadcast to it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def grouped_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of query heads [batch, heads, tokens, dim] over [batch, kv_heads, keys, dim], without repeating those.

    `mask` is [batch, 1, tokens, keys]. The heads of a group become further queries of their KV head.
    """
    batch, heads, tokens, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    folded = query.reshape(batch, kv_heads, group * tokens, dim)
    folded_mask = mask.expand(-1, group, -1, -1).reshape(mask.shape[0], 1, group * tokens, mask.shape[-1])
    return F.scaled_dot_product_attention(folded, keys, values, attn_mask=folded_mask).view(batch, heads, tokens, dim)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
