"""A small random model for servers, the drafts to it, and what transformers makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from oasis_sglang.speculative.draft.checkpoint import write_draft
from oasis_sglang.speculative.draft.model import DraftHead, DraftShape
from oasis_sglang.speculative.draft.target import Target
from tests.unit.draft_models import VOCAB, tiny_model


class Tiny:
    """A target in `folder`. Heads have learnt nothing: what they propose is right once in a while."""

    def __init__(self, parent: Path) -> None:
        self.model: LlamaForCausalLM = tiny_model(head_dim=16).eval()
        self.folder = parent / "target"
        self.model.save_pretrained(self.folder)
        self._parent = parent

    def answer(self, prompt: list[int], new: int) -> list[int]:
        """Greedy and dense."""
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(new):
                tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    def eagle3(self) -> Path:
        folder, target = self._parent / "eagle3", Target(self.model)
        torch.manual_seed(0)
        write_draft(folder, DraftHead(DraftShape.of(target, VOCAB)), target, self.folder, torch.arange(VOCAB))
        return folder

    def eagle(self) -> Path:
        """A head of the first generation, which sees the target's last hidden state only."""
        folder, c = self._parent / "eagle", self.model.config
        folder.mkdir()
        # SGLang shares embedding and LM head with the target, and stumbles where the head's own are one tensor.
        config = json.loads((self.folder / "config.json").read_text()) | {
            "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "tie_word_embeddings": False,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        hidden, kv = c.hidden_size, c.num_key_value_heads * c.head_dim
        shapes = {
            "fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,),
            **{f"layers.0.self_attn.{x}_proj.weight": (kv if x in "kv" else hidden, hidden) for x in "qkvo"},
            **{f"layers.0.mlp.{x}_proj.weight": (c.intermediate_size, hidden) for x in ("gate", "up")},
            "layers.0.mlp.down_proj.weight": (hidden, c.intermediate_size),
            "layers.0.post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
        random = torch.Generator().manual_seed(0)
        tensors = {name: 0.15 * torch.randn(shape, generator=random) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder
