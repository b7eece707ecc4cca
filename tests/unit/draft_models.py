"""A tiny random Llama as a target, and corpora of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oasis_sglang.speculative.draft.data import Corpus, CorpusPlan
from oasis_sglang.speculative.draft.prompts import Prompt
from oasis_sglang.speculative.draft.target import Target

VOCAB, STOP = 96, 1


def tiny_model(seed: int = 0, head_dim: int = 8) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=6 * head_dim, intermediate_size=64, num_hidden_layers=7, num_attention_heads=6,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=256, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, initializer_range=0.15, eos_token_id=STOP,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


class Letters:
    """A tokenizer: one token a character."""

    chat_template = None

    def encode(self, text: str, **_: Any) -> list[int]:
        return [2 + ord(letter) % (VOCAB - 2) for letter in text]


def tiny_corpus(folder: Path, target: Target, prompts: int = 12, new: int = 10, **changes: Any) -> Corpus:
    words = [Prompt(str(n), "abcdefghij"[: 3 + n % 5] + str(n)) for n in range(prompts)]
    plan: dict[str, Any] = {
        "seed": 0, "new_tokens": new, "prompt_tokens": 16, "batch": 4, "sampled": 0.5, "temperature": 0.7
    }  # fmt: skip
    return Corpus(
        folder, lambda: target, Letters(), "tiny", (words, [Prompt("x", "held out"), Prompt("y", "too")]),
        CorpusPlan(**(plan | changes)), [STOP],
    )  # fmt: skip
