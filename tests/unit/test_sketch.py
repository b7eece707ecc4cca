"""Which dimensions of a key its sketch keeps, and that the benchmarks' scorer scores by sketches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.lookahead_simulation import PageScorer
from oasis_sglang.memory_pool.sketch import dims_of, every_dim, slow_half


def _config(architecture: str | None, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(architectures=[architecture] if architecture else None, **more)


def test_the_slow_half_only_where_heads_are_known_to_rotate_whole() -> None:
    llama = _config("LlamaForCausalLM")
    assert dims_of(llama, llama, 64) == slow_half(64) == (*range(16, 32), *range(48, 64))
    whole = _config("Qwen3ForCausalLM", partial_rotary_factor=1.0)
    assert dims_of(whole, whole, 128) == slow_half(128)


@pytest.mark.parametrize(
    ("architecture", "partial", "head_dim"),
    [
        ("PhiForCausalLM", 0.5, 64),  # rotates half of each head
        ("LlamaForCausalLM", 0.5, 64),
        ("GPTJForCausalLM", None, 64),  # pairs neighbours
        (None, None, 64),
        ("LlamaForCausalLM", None, 72),  # a half of which does not divide into groups of eight
    ],
)
def test_every_dimension_otherwise(architecture: str | None, partial: float | None, head_dim: int) -> None:
    config = _config(architecture, partial_rotary_factor=partial)
    assert dims_of(config, config, head_dim) == every_dim(head_dim)


def test_page_scores_are_best_tokens_of_rounded_keys() -> None:
    torch.manual_seed(0)
    page, layers, heads, group, dim, tokens = 16, 2, 3, 2, 16, 5 * 16 + 7
    keys, q = torch.randn(layers, heads, tokens, dim), torch.randn(layers, heads * group, dim)
    kept = list(slow_half(dim))
    scores = PageScorer(keys, page, 0.5, slow_half(dim)).score(q, 4)
    assert scores.shape == (layers, heads, 5)
    assert bool((scores[..., 4:] == -torch.inf).all())
    part = keys[..., kept]
    step = part.abs().amax(-1, keepdim=True) / 7
    rounded = (part / step).round() * step
    asked = q[..., kept].unflatten(1, (heads, group))
    products = torch.einsum("lhgd,lhtd->lhgt", asked, rounded)[..., : 4 * page] * 0.5
    weight = products.unflatten(-1, (4, page)).amax(-1).softmax(-1).mean(2)
    # the query is rounded to 8 bits
    torch.testing.assert_close(scores[..., :4].float(), weight, atol=0.02, rtol=0.05)
