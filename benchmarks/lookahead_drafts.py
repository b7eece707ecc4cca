"""Where guessed tokens come from. A helper of `benchmarks.lookahead`."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from oasis_sglang.attention.draft_window import WINDOW
from oasis_sglang.config import OasisConfig
from oasis_sglang.speculative.prompt_lookup import PromptLookup


class DraftSource(Protocol):
    name: str
    feature_layers: tuple[int, ...]  # target layers whose outputs it reads

    def propose(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> list[int]:
        """Guess the next `count` tokens.

        Args:
            tokens: the sequence so far. The last one was just decided and the target has not run it yet.
            features: `[len(tokens) - 1, layers * hidden]` outputs of the `feature_layers` of all sources, in ascending
                order of layers, for the tokens before it.
        """


class RandomDraft:
    """Tokens drawn from the whole vocabulary: as wrong as a draft can be."""

    name = "random"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(seed)

    def propose(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(count)]


class NgramDraft:
    """Prompt lookup: what followed the latest earlier occurrence of the longest suffix, up to `longest` tokens."""

    name = "ngram"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, longest: int = 4) -> None:
        self._longest = longest

    def propose(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> list[int]:
        sequence = list(tokens)
        found: list[int] = []
        for size in range(min(self._longest, len(sequence) - 1), 0, -1):
            suffix = sequence[-size:]
            for start in range(len(sequence) - size - 1, -1, -1):
                if sequence[start : start + size] == suffix:
                    found = sequence[start + size : start + size + count]
                    break
            if found:
                break
        # A match near the end runs out of tokens, and a new token has no match: the last one stands in.
        return found + [(found or sequence)[-1]] * (count - len(found))


class EagleDraft:
    """An EAGLE-3 head, greedily. As in SGLang, a step starts from what the target saw and forgets earlier drafts."""

    name = "eagle"

    def __init__(
        self, folder: str | Path, model: torch.nn.Module, first: int = 16, window: int | None = WINDOW
    ) -> None:
        """
        Args:
            model: the target, a transformers causal language model.
            first, window: how many of the first and of the newest tokens the head attends to, by default as this
                backend's; `window` None: all.
        """
        from oasis_sglang.speculative.draft.checkpoint import read_draft
        from oasis_sglang.speculative.draft.target import Target

        folder = Path(folder)
        self._first, self._window = first, window
        eagle = json.loads((folder / "config.json").read_text())["eagle_config"]
        self.feature_layers: tuple[int, ...] = tuple(eagle["eagle_aux_hidden_state_layer_ids"])
        self._target = Target(model)
        self._head, self._vocabulary = read_draft(folder, self._target)
        # of the pairs (feature of token t, embedding of token t + 1) so far, [1, kv_heads, t, head_dim]
        self._keys = self._values = torch.empty(1, self._head.shape.kv_heads, 0, self._head.shape.head_dim)

    def propose(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> list[int]:
        layer: Any = self._head.midlayer
        done, pairs = self._keys.shape[2], features.shape[0]
        x = self._head.fc(features[done:].unsqueeze(0) * self._head.feature_scale)
        inputs = layer.inputs(self._target.embed(torch.tensor([tokens[done + 1 :]])), x)
        cos, sin = self._rotary(torch.arange(done, pairs))
        self._keys, self._values = self._grown(self._keys, self._values, inputs, cos, sin)
        keys, values = self._seen(self._keys), self._seen(self._values)
        x, inputs, cos, sin = x[:, -1:], inputs[:, -1:], cos[:, :, -1:], sin[:, :, -1:]
        drafted: list[int] = []
        while True:
            everything = torch.ones(1, 1, 1, keys.shape[2], dtype=torch.bool)
            x = layer(inputs, x, cos, sin, keys, values, everything)
            drafted.append(int(self._vocabulary[self._head.logits(x)[0, 0].argmax()]))
            if len(drafted) == count:
                return drafted
            inputs = layer.inputs(self._target.embed(torch.tensor([drafted[-1:]])), x)
            cos, sin = self._rotary(torch.tensor([pairs + len(drafted) - 1]))
            keys, values = self._grown(keys, values, inputs, cos, sin)

    def _seen(self, states: torch.Tensor) -> torch.Tensor:
        if self._window is None or states.shape[2] <= self._first + self._window:
            return states
        return torch.cat((states[:, :, : self._first], states[:, :, -self._window :]), dim=2)

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._target.rotary(positions.unsqueeze(0))
        return cos[:, None], sin[:, None]

    def _grown(
        self, keys: torch.Tensor, values: torch.Tensor, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self._head.midlayer
        new_keys, new_values = layer.keys_values(inputs, cos, sin)
        return torch.cat((keys, new_keys), dim=2), torch.cat((values, new_values), dim=2)


class CopyingDraft:
    """What a server with an EAGLE draft verifies: its guesses, and copies where the text repeats."""

    name = "draft"

    def __init__(self, head: EagleDraft) -> None:
        self._head = head
        self.feature_layers = head.feature_layers

    def propose(self, tokens: Sequence[int], features: torch.Tensor, count: int) -> list[int]:
        guesses = self._head.propose(tokens, features, count)
        before = len(tokens) - 1
        lookup = PromptLookup(1, len(tokens), count + 1, OasisConfig().prompt_lookup_min, "cpu")
        lookup.enter(0, tokens[:-1])
        row, lengths, newest = torch.tensor([0]), torch.tensor([before]), torch.tensor(tokens[-1:])
        return lookup.propose(row, lengths, newest, torch.tensor([guesses]), len(tokens))[0].tolist()
