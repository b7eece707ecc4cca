"""A decoder of Qwen3's kind with random weights: everything of a decode step but attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import linear, rms_norm, silu

from benchmarks.gpu_scale import Scale

EPSILON = 1e-6
ROPE_BASE = 1e6  # of Qwen3-8B
# How much of a token's input is its own; the rest is its sequence's. Queries of a text's successive tokens resemble
# each other, those of random tokens would not, and every step would want other pages.
OWN = 0.1

# (layer, q `[n, Hq, D]`, k `[n, H, D]`, v `[n, H, D]`) -> `[n, Hq, D]`
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(NamedTuple):
    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """Weights of all layers, each its own; norms' weights are ones."""

    def __init__(self, scale: Scale) -> None:
        self.scale = s = scale
        self._random = torch.Generator(s.device).manual_seed(11)
        queries, keys = s.query_heads * s.head_dim, s.kv_heads * s.head_dim
        self.layers = [
            Layer(
                self._weight(queries + 2 * keys, s.hidden),
                self._weight(s.hidden, queries),
                self._weight(2 * s.ffn, s.hidden),
                self._weight(s.hidden, s.ffn),
            )
            for _ in range(s.layers)
        ]
        self.embedding = self._weight(s.vocabulary, s.hidden)
        self.head = self._weight(s.vocabulary, s.hidden)
        self._ones = torch.ones(s.hidden, dtype=s.dtype, device=s.device)
        self._head_ones = torch.ones(s.head_dim, dtype=s.dtype, device=s.device)
        half = torch.arange(0, s.head_dim, 2, device=s.device) / s.head_dim
        self._frequencies = torch.cat((ROPE_BASE**-half, ROPE_BASE**-half))

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        x = torch.empty(rows, columns, dtype=self.scale.dtype, device=self.scale.device)
        return x.normal_(std=columns**-0.5, generator=self._random)

    @property
    def nbytes(self) -> int:
        """Read by every step: of the embedding only a few rows are."""
        weights = [*(x for layer in self.layers for x in layer), self.head]
        return sum(x.numel() * x.element_size() for x in weights)

    def bases(self, n: int) -> torch.Tensor:
        """What the inputs of each sequence's tokens have in common, `[n, hidden]`."""
        return self.embedding[torch.randint(self.scale.vocabulary, (n,), device=self.scale.device)]

    def step(
        self, tokens: torch.Tensor, positions: torch.Tensor, bases: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        """The next token of each sequence, greedily.

        Args:
            tokens: `[n]` int64; positions: `[n]` int64, of these; bases: see `bases`.
        """
        s, n = self.scale, tokens.numel()
        angles = positions.view(n, 1, 1).float() * self._frequencies
        cos, sin = angles.cos().to(s.dtype), angles.sin().to(s.dtype)
        x = torch.lerp(bases, self.embedding[tokens], OWN)
        for number, layer in enumerate(self.layers):
            heads = linear(self._norm(x), layer.qkv).view(n, s.query_heads + 2 * s.kv_heads, s.head_dim)
            qk, v = heads.split((s.query_heads + s.kv_heads, s.kv_heads), 1)
            qk = rms_norm(qk, (s.head_dim,), self._head_ones, EPSILON)
            first, second = qk.chunk(2, -1)
            qk = qk * cos + torch.cat((-second, first), -1) * sin
            q, k = qk.split((s.query_heads, s.kv_heads), 1)
            x = x + linear(attention(number, q, k, v).reshape(n, -1), layer.out)
            gate, up = linear(self._norm(x), layer.gate_up).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer.down)
        return linear(self._norm(x), self.head).argmax(-1)

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (self.scale.hidden,), self._ones, EPSILON)
