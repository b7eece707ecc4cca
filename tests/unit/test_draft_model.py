"""The draft's arithmetic: the target's features, SGLang's layer written out one token at a time, and accept lengths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from oasis_sglang.speculative.draft.data import Shard, generate
from oasis_sglang.speculative.draft.evaluate import accept_length, draft_chains, walk
from oasis_sglang.speculative.draft.model import DraftHead, DraftShape, initialise
from oasis_sglang.speculative.draft.target import Target, TargetError, captured_layers
from tests.unit.draft_models import STOP, VOCAB, tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model())


@pytest.fixture(scope="module")
def shard(target: Target) -> Shard:
    prompts = [[5, 9, 11, 40, 7], [8, 30], [3, 3, 60, 61]]
    return generate(target, prompts, 12, [0.0] * 3, [STOP], torch.Generator())


@pytest.fixture
def head(target: Target, shard: Shard) -> DraftHead:
    head = DraftHead(DraftShape.of(target, 40))
    vocabulary = torch.arange(40) * 2
    initialise(head, target, vocabulary, shard.features.flatten(0, 1), seed=1)
    with torch.no_grad():
        for parameter in head.parameters():  # norms other than 1, so that a swapped one shows
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return head


def test_captured_layers_are_sglangs_defaults() -> None:
    assert captured_layers(30) == [2, 15, 27]
    assert captured_layers(32) == [2, 16, 29]


def test_generation_and_features_equal_transformers(target: Target, shard: Shard) -> None:
    for row in range(len(shard.tokens)):
        start, end = int(shard.starts[row]), int(shard.ends[row])
        ids = shard.tokens[row, start:end]
        with torch.no_grad():
            truth = target.model(ids[None, :-1], output_hidden_states=True)
        features = torch.cat([truth.hidden_states[layer] for layer in target.captured], dim=-1)[0]
        torch.testing.assert_close(shard.features[row, start : end - 1].float(), features, rtol=0.01, atol=0.01)
        written = end - shard.width
        torch.testing.assert_close(
            shard.final[row, :written].float(), truth.hidden_states[-1][0, -written:], rtol=0.01, atol=0.01
        )
        assert ids[-written:].tolist() == truth.logits[0, -written:].argmax(-1).tolist()


def test_rows_keeps_what_rows_hold(shard: Shard) -> None:
    part = shard.rows(torch.tensor([1]))
    end = int(shard.ends[1])
    assert int(part.starts[0]) == 0
    assert part.width == 2
    assert int(part.ends[0]) == end - 3
    assert part.tokens[0].tolist() == shard.tokens[1, 3:end].tolist()
    assert torch.equal(part.features[0], shard.features[1, 3 : end - 1])
    assert torch.equal(part.final, shard.final[1:2, : end - shard.width])


class SGLangLayer:
    """`LlamaForCausalLMEagle3` for one request, from its source: one token a call, a list as the KV cache."""

    def __init__(self, head: DraftHead, target: Target) -> None:
        self.weights = dict(head.state_dict())
        self.weights["fc.weight"] = self.weights["fc.weight"] * head.feature_scale
        self.shape, self.target = head.shape, target

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + self.shape.eps) * self.weights[name]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        half = self.shape.head_dim // 2
        angles = position * 500.0 ** (-torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def forward(self, token: int, hidden: Tensor, position: int, cache: list[tuple[Tensor, Tensor]]) -> Any:
        """(logits, aux hidden state) of one token; `hidden` is three features wide, or an aux hidden state."""
        weights, shape = self.weights, self.shape
        embeds = self.target.model.model.embed_tokens.weight[token]
        if hidden.shape != embeds.shape:
            hidden = weights["fc.weight"] @ hidden
        residual = hidden
        x = torch.cat((
            self.norm(embeds, "midlayer.input_layernorm.weight"), self.norm(hidden, "midlayer.hidden_norm.weight")
        ))  # fmt: skip
        query, key, value = (
            (weights[f"midlayer.self_attn.{name}_proj.weight"] @ x).view(-1, shape.head_dim) for name in "qkv"
        )
        cache.append((self.rotated(key, position), value))
        query = self.rotated(query, position)
        out = []
        for index in range(shape.heads):
            group = index // (shape.heads // shape.kv_heads)
            keys = torch.stack([entry[0][group] for entry in cache])
            values = torch.stack([entry[1][group] for entry in cache])
            out.append(torch.softmax(keys @ query[index] / math.sqrt(shape.head_dim), 0) @ values)
        residual = residual + weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(out)
        x = self.norm(residual, "midlayer.post_attention_layernorm.weight")
        gate, up, down = (weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        residual = residual + down @ (F.silu(gate @ x) * (up @ x))
        return weights["lm_head.weight"] @ self.norm(residual, "norm.weight"), residual


@torch.no_grad()
def test_chains_equal_sglangs_drafting(target: Target, shard: Shard, head: DraftHead) -> None:
    """Draft-extend over the accepted tokens with target features, then two decode steps on own features."""
    vocabulary = torch.arange(40) * 2
    head.feature_scale.mul_(torch.linspace(0.5, 2.0, len(head.feature_scale)))
    chains = draft_chains(head, target, vocabulary, shard, steps=3)
    layer = SGLangLayer(head, target)
    chain = head.unroll(shard.features[:, :-1].float(), shard.tokens, shard.starts, shard.width - 1, target.embed,
                        target.rotary)  # fmt: skip
    ours = [next(chain)]
    ours += [chain.send(chains[:, :, step]) for step in range(2)]
    for row in (0, 1):
        start = int(shard.starts[row])
        for place in (0, 3, 6):
            newest = shard.width + place  # the token that verification made, not yet read by the target
            cache: list[tuple[Tensor, Tensor]] = []
            logits = hidden = torch.empty(0)
            for column in range(start, newest):
                feature = shard.features[row, column].float()
                logits, hidden = layer.forward(int(shard.tokens[row, column + 1]), feature, column - start, cache)
            for step in range(3):
                torch.testing.assert_close(ours[step][row, place], hidden, rtol=1e-3, atol=1e-4)
                token = int(vocabulary[logits.argmax()])
                assert token == int(chains[row, place, step])
                logits, hidden = layer.forward(token, hidden, newest - start + step, cache)


def test_walk_by_hand() -> None:
    continuation = torch.tensor([10, 11, 12, 13, 14, 15, 16, 17, 18])
    chains = torch.tensor(
        [
            [11, 12, 99],  # two right: 11, 12, and 13 from the target; the next step starts at 13
            [0, 0, 0],
            [0, 0, 0],
            [14, 15, 16],  # all right: 14, 15, 16 and the bonus 17
            [0, 0, 0],
            [0, 0, 0],
            [0, 0, 0],
            [18, 0, 0],  # cut short by the end, not counted
        ]
    )
    assert walk(continuation, chains) == [2, 3]
    chains[0] = torch.tensor([99, 12, 13])  # wrong at once: what follows is worth nothing
    chains[1] = torch.tensor([99, 99, 99])
    chains[2] = torch.tensor([13, 99, 15])
    assert walk(continuation, chains) == [0, 0, 1, 0, 0]


def test_a_draft_equal_to_the_target_is_always_accepted(target: Target, shard: Shard) -> None:
    """A head that ignores its input and knows the continuation: an accept length of four."""

    class Oracle(DraftHead):
        calls = 0

        def logits(self, x: Tensor) -> Tensor:
            wanted = F.pad(shard.tokens[:, shard.width + 1 + self.calls :], (0, 3))[:, : x.shape[1]]
            self.calls += 1
            return F.one_hot(wanted, VOCAB).float()

    oracle = Oracle(DraftShape.of(target, VOCAB))
    result = accept_length(oracle, target, torch.arange(VOCAB), shard)
    assert result.mean == 4.0
    assert result.by_step == (1.0, 1.0, 1.0)
    assert result.verify_steps > 3


def test_other_models_are_refused() -> None:
    model = tiny_model()
    model.config.model_type = "gpt2"
    with pytest.raises(TargetError, match="gpt2"):
        Target(model)
