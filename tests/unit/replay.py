"""A harness in which every sequence brings its own queries, keys and values, whatever else is in its batch."""

from __future__ import annotations

from typing import Any

import torch

from oasis_sglang.config import OasisConfig
from tests.unit.harness import Harness, Sequence


class Replay(Harness):
    """Each sequence draws from a generator of its own, so that its inputs are the same in every run and batch."""

    def __init__(self, config: OasisConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self._generators: dict[Sequence, torch.Generator] = {}
        self._drawing: list[torch.Generator] | torch.Generator = self.random

    def noise(self, *shape: int) -> torch.Tensor:
        if isinstance(self._drawing, torch.Generator):
            return torch.randn(*shape, generator=self._drawing).to(self.dtype)
        return torch.stack([torch.randn(*shape[1:], generator=g) for g in self._drawing]).to(self.dtype)

    def start(self, name: int, prompt: int, final_tokens: int) -> tuple[Sequence, list[torch.Tensor]]:
        """Admit the sequence `name` and run its prompt; returns it and the prompt's outputs per layer."""
        sequence = self.admit(final_tokens)
        assert sequence is not None
        self._generators[sequence] = torch.Generator().manual_seed(name)
        self._drawing = self._generators[sequence]
        _, outputs = self.extend(sequence, prompt)
        return sequence, outputs

    def steps(self, sequences: list[Sequence], count: int) -> list[torch.Tensor]:
        """`count` decode steps; per sequence `[count, layers, Hq, D]`."""
        self._drawing = [self._generators[s] for s in sequences]
        rows = [torch.stack(self.decode(sequences)[1]) for _ in range(count)]  # each [layers, n, Hq, D]
        return list(torch.stack(rows).unbind(2))
