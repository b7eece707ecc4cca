"""`benchmarks.key_summaries`: its replay of a model is the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.key_summaries import PAGE, RULES, Replay, fast_half
from oasis_sglang.memory_pool.sketch import slow_half


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, LlamaForCausalLM]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    made = LlamaForCausalLM(config).eval()
    made.save_pretrained(folder)
    return str(folder), made


TEXT = torch.randint(0, 97, (230,), generator=torch.Generator().manual_seed(1)).tolist()
CONTEXT = 100


@pytest.fixture(scope="module")
def replay(model: tuple[str, LlamaForCausalLM]) -> Replay:
    with torch.inference_mode():
        return Replay(model[0], TEXT, CONTEXT)


@pytest.mark.parametrize("rule", [None, *RULES])
def test_with_room_for_every_page_it_is_the_model(
    model: tuple[str, LlamaForCausalLM], replay: Replay, rule: str | None
) -> None:
    with torch.inference_mode():
        logits = model[1](torch.tensor([TEXT])).logits[0, CONTEXT - 1 : -1]
        right = logits.log_softmax(-1).gather(-1, torch.tensor(TEXT[CONTEXT:]).view(-1, 1)).squeeze(1)
        ours = replay.logprobs(RULES[rule][1] if rule else None, len(TEXT) // PAGE * PAGE)
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)


def test_with_less_it_is_not(replay: Replay) -> None:
    with torch.inference_mode():
        dense, sparse = replay.logprobs(None), replay.logprobs(RULES["minmax"][1], PAGE)
    assert not torch.allclose(dense, sparse, atol=1e-3)


def test_halves() -> None:
    assert slow_half(16) == (4, 5, 6, 7, 12, 13, 14, 15)
    assert fast_half(16) == (0, 1, 2, 3, 8, 9, 10, 11)
