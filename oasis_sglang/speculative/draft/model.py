"""The EAGLE-3 draft head, as SGLang 0.5.23 computes it (`LlamaForCausalLMEagle3`), and its unrolling for training.

The feature of position t, seen by the target, is paired with the embedding of token t+1 at rotary position t, and
predicts token t+2. The next draft step takes the layer's own output, before the final norm, in place of the feature,
one rotary position further. Names of parameters are those of the checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oasis_sglang.speculative.draft.target import Target, grouped_attention, rotate

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class DraftShape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int  # of the draft
    features: int  # captured layers
    eps: float

    @classmethod
    def of(cls, target: Target, vocabulary: int) -> DraftShape:
        config = target.config
        return cls(
            config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads,
            target.head_dim, vocabulary, len(target.captured), config.rms_norm_eps,
        )  # fmt: skip


class Attention(nn.Module):
    """Projections of the draft layer; queries, keys and values come from embedding and feature, side by side."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)


class MLP(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The draft's one decoder layer. Positions along [batch, tokens] throughout."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)  # of embeddings
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.eps)  # of features
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def inputs(self, embeds: Tensor, x: Tensor) -> Tensor:
        """[batch, tokens, 2 × hidden], what the projections read."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(x)), dim=-1)

    def keys_values(self, inputs: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, kv_heads, tokens, head_dim] each."""
        keys, values = self._heads(self.self_attn.k_proj(inputs)), self._heads(self.self_attn.v_proj(inputs))
        return rotate(keys, cos, sin), values

    def forward(
        self, inputs: Tensor, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> Tensor:
        """The layer's output with both residuals, before the final norm: [batch, tokens, hidden].

        The first residual is the feature itself, unnormalised.
        """
        query = rotate(self._heads(self.self_attn.q_proj(inputs)), cos, sin)
        attended = grouped_attention(query, keys, values, mask)
        x = x + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class DraftHead(nn.Module):
    """Everything of a draft that is trained. `feature_scale` is folded into `fc` when a checkpoint is written."""

    feature_scale: Tensor

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.features * shape.hidden, shape.hidden, bias=False)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        # The residual stream grows tenfold from the low to the high feature; scaled alike, all learn at one rate.
        self.register_buffer("feature_scale", torch.ones(shape.features * shape.hidden))

    def logits(self, x: Tensor) -> Tensor:
        """Over the draft's vocabulary, of a layer's output."""
        return self.lm_head(self.norm(x))

    def unroll(
        self, features: Tensor, tokens: Tensor, starts: Tensor, first: int, embed: Callable[[Tensor], Tensor],
        rotary: Rotary,
    ) -> Generator[Tensor, Tensor | None, None]:  # fmt: skip
        """Draft from every position at once: yields the output [batch, queries, hidden] of step 0, 1, ... without end.

        features [batch, n, features × hidden] and tokens [batch, more than n] are of whole sequences, `starts` their
        first columns. Queries are columns `first` to n-1. At step k, query t attends to what the target saw up to t
        and to its own k drafted steps, and reads token t+1+k from `tokens`, unless the caller sends a tensor
        [batch, queries] of other tokens into the generator.
        """
        columns = torch.arange(features.shape[1])
        positions = (columns[None] - starts[:, None]).clamp(min=0)
        queries = len(columns) - first
        x = self.fc(features * self.feature_scale)
        inputs = self.midlayer.inputs(embed(tokens[:, 1 : len(columns) + 1]), x)
        cos, sin = _per_head(rotary(positions))
        keys, values = self.midlayer.keys_values(inputs, cos, sin)
        seen = (columns[first:, None] >= columns[None]) & (columns[None, None] >= starts[:, None, None])
        # A query in the padding attends to itself: nothing to attend to would be NaN.
        mask = (seen | torch.eye(len(columns), dtype=torch.bool)[first:])[:, None]
        own = torch.eye(queries, dtype=torch.bool).expand(len(tokens), 1, -1, -1)
        x, inputs, cos, sin = x[:, first:], inputs[:, first:], cos[:, :, first:], sin[:, :, first:]
        step = 0
        while True:
            x = self.midlayer(inputs, x, cos, sin, keys, values, mask)
            drafted = yield x
            step += 1
            if drafted is None:
                # Beyond the end there is nothing to read; such queries are masked from whatever is computed of them.
                drafted = F.pad(tokens[:, first + 1 + step :], (0, queries))[:, :queries]
            inputs = self.midlayer.inputs(embed(drafted), x)
            cos, sin = _per_head(rotary(positions[:, first:] + step))
            more_keys, more_values = self.midlayer.keys_values(inputs, cos, sin)
            keys, values = torch.cat((keys, more_keys), dim=2), torch.cat((values, more_values), dim=2)
            mask = torch.cat((mask, own), dim=-1)


@torch.no_grad()
def initialise(head: DraftHead, target: Target, vocabulary: Tensor, features: Tensor, seed: int) -> None:
    """Start from the target's last layer, which already turns its high feature into logits.

    The embedding half of the projections and the lower features start small and random. `features`
    [rows, features × hidden] is a sample that sets the scale: the residual stream is brought to unit size, and what the
    layer adds to it in proportion, because optimizers take steps of one size in all weights.
    """
    random = torch.Generator().manual_seed(seed)
    model: Any = target.model
    last, hidden = model.model.layers[-1], head.shape.hidden
    chunks = features.float().view(len(features), head.shape.features, hidden)
    # The median over rows: the first token's feature is hundreds of times larger than the others'.
    scale = chunks.pow(2).mean(dim=-1).sqrt().median(dim=0).values.clamp(min=1e-6)
    head.feature_scale.copy_((1 / scale).repeat_interleave(hidden))
    head.fc.weight.normal_(0.0, 0.002, generator=random)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.midlayer.self_attn, name).weight
        weight.normal_(0.0, 0.02, generator=random)
        weight[:, hidden:] = getattr(last.self_attn, name).weight.float()
    head.midlayer.self_attn.o_proj.weight.copy_(last.self_attn.o_proj.weight / scale[-1])
    head.midlayer.mlp.gate_proj.weight.copy_(last.mlp.gate_proj.weight)
    head.midlayer.mlp.up_proj.weight.copy_(last.mlp.up_proj.weight)
    head.midlayer.mlp.down_proj.weight.copy_(last.mlp.down_proj.weight / scale[-1])
    head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(model.model.norm.weight)
    head.lm_head.weight.copy_(model.lm_head.weight[vocabulary])


def _per_head(cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return cos_sin[0][:, None], cos_sin[1][:, None]
