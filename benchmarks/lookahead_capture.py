"""Decodes on a transformers model and keeps what the lookahead measurement needs: keys, and queries of true and drafted
tokens. A helper of `benchmarks.lookahead`.

Every step runs the newest token and, beside it, one chain of guesses per draft source in the same forward pass, as an
EAGLE verify step does. Each chain sees the sequence and itself, none sees another, and none is committed:

    sees ->      x0 .. xp   a1 a2 a3   b1 b2 b3         position
    xp             yes                                    p
    a1, a2, a3     yes        causal                      p + 1, p + 2, p + 3
    b1, b2, b3     yes                   causal           p + 1, p + 2, p + 3

Attention is dense, so all drafts are judged on the same text and the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.lookahead_drafts import DraftSource
from oasis_sglang.attention.torch_ops import TorchOps

IMPLEMENTATION = "oasis_lookahead_capture"


@dataclass
class Capture:
    """One decoded text (L layers, Hq query heads, H KV heads, D head dim)."""

    context: int  # prompt tokens
    tokens: list[int]  # prompt and decoded tokens
    keys: torch.Tensor  # [L, H, tokens, D]
    queries: torch.Tensor  # [1 + steps, L, Hq, D]: of the prompt's last token, then of every decoded one
    drafted: dict[str, torch.Tensor]  # source -> [steps, chain, L, Hq, D]
    guesses: dict[str, torch.Tensor]  # source -> [steps, chain] token ids, for the positions after the step's own
    scale: float

    @property
    def steps(self) -> int:
        return self.queries.shape[0] - 1

    def right(self, source: str) -> torch.Tensor:
        """`[steps, chain]` bool: the guess and all before it in its chain are what was decoded. Guesses past the end of
        the text count as wrong."""
        guesses = self.guesses[source]
        steps, chain = guesses.shape
        padded = torch.tensor(self.tokens[self.context :] + [-1] * (chain + 1))
        true = torch.stack([padded[i + 1 : i + 1 + chain] for i in range(steps)])
        return (guesses == true).cumprod(1).bool()


class Recorder:
    """The attention of a decoding model: holds K and V of one sequence and hands out what each pass computed."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        self.keys = torch.zeros(layers, kv_heads, capacity, head_dim)
        self.values = torch.zeros(layers, kv_heads, capacity, head_dim)
        self.queries: list[torch.Tensor] = []  # per layer [Hq, tokens, D], of the last pass
        self.scale = 0.0
        self._start = 0
        self._mask: torch.Tensor | None = None
        self._ops = TorchOps()

    def begin(self, start: int, mask: torch.Tensor | None) -> None:
        """Before a pass.

        Args:
            start: position of its first token.
            mask: `[tokens, start + tokens]` bool, True where a token is seen; None is causal.
        """
        self._start, self._mask = start, mask
        self.queries = []

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """`q` `[Hq, tokens, D]`, `k` and `v` `[H, tokens, D]`; returns `[tokens, Hq, D]`."""
        self.scale = scale
        self.queries.append(q.clone())
        end = self._start + q.shape[1]
        self.keys[layer, :, self._start : end], self.values[layer, :, self._start : end] = k, v
        keys, values = self.keys[layer, :, :end], self.values[layer, :, :end]
        if self._mask is None:
            return self._ops.prefill(q.transpose(0, 1), keys, values, self._start, scale)
        heads, group = k.shape[0], q.shape[0] // k.shape[0]
        # the group's heads become rows of one attention over their KV head
        grouped = q.reshape(1, heads, group * q.shape[1], -1)
        mask = self._mask.repeat(group, 1)
        out = scaled_dot_product_attention(grouped, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=scale)
        return out.view(q.shape).transpose(0, 1)


_recorder: Recorder | None = None


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls for attention; batches of one, queries and keys after their rotation."""
    assert _recorder is not None, "no recorder is active"
    layer: Any = module.layer_idx
    out = _recorder.attend(int(layer), query[0], key[0], value[0], float(options["scaling"]))
    return out.unsqueeze(0), None


class Target:
    """A transformers causal language model in float32 whose attention is recorded."""

    def __init__(self, model_path: str) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(IMPLEMENTATION, _attention)
        self.model = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32, attn_implementation=IMPLEMENTATION
        ).eval()
        config = self.model.config
        self.layers: int = config.num_hidden_layers
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.vocabulary: int = config.vocab_size
        self._features: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.model.model.layers):
            layer.register_forward_hook(self._keep(index))
        self._wanted: tuple[int, ...] = ()

    def _keep(self, index: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            if index in self._wanted:
                self._features[index] = (output[0] if isinstance(output, tuple) else output).reshape(-1, width)

        width = self.model.config.hidden_size
        return hook

    def _forward(
        self, recorder: Recorder, tokens: Sequence[int], positions: torch.Tensor, mask: torch.Tensor | None, asked: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[vocabulary]` after token `asked`, and features `[tokens, layers wanted * hidden]`."""
        global _recorder
        recorder.begin(int(positions[0]), mask)
        _recorder = recorder
        try:
            logits = self.model(
                torch.tensor([list(tokens)]),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.tensor([asked]),
            ).logits[0, 0]
        finally:
            _recorder = None
        wanted = [self._features[i] for i in self._wanted]
        return logits, torch.cat(wanted, dim=-1) if wanted else torch.empty(len(tokens), 0)

    @torch.inference_mode()
    def decode(
        self,
        prompt: Sequence[int],
        steps: int,
        sources: Sequence[DraftSource],
        chain: int,
        follow: Sequence[int] | None = None,
        on_step: Callable[[], None] = lambda: None,
    ) -> Capture:
        """Decode greedily, end-of-sequence tokens included, and capture every step.

        Args:
            steps: decode steps after the prompt's own.
            chain: tokens that each source guesses per step.
            follow: `[steps + 1]` tokens to take instead of the greedy ones.
        """
        context = len(prompt)
        width = 1 + len(sources) * chain
        recorder = Recorder(self.layers, self.kv_heads, self.head_dim, context + steps + width)
        self._wanted = tuple(sorted({layer for s in sources for layer in s.feature_layers}))
        tokens = list(prompt)
        logits, features = self._forward(recorder, tokens, torch.arange(context), None, context - 1)
        queries = [torch.stack([q[:, -1] for q in recorder.queries])]
        seen = torch.empty(context + steps, features.shape[-1])
        seen[:context] = features
        drafted: dict[str, list[torch.Tensor]] = {s.name: [] for s in sources}
        guesses: dict[str, list[list[int]]] = {s.name: [] for s in sources}
        chains = torch.block_diag(*[torch.ones(chain, chain).tril()] * len(sources)).bool() if sources else None
        for step in range(steps):
            tokens.append(int(logits.argmax()) if follow is None else follow[step])
            position = len(tokens) - 1
            guessed = [s.propose(tokens, seen[:position], chain) for s in sources]
            batch = [tokens[-1], *(token for part in guessed for token in part)]
            mask = torch.zeros(width, position + width, dtype=torch.bool)
            mask[:, : position + 1] = True
            if chains is not None:
                mask[1:, position + 1 :] = chains
            ahead = (torch.arange(1, chain + 1) + position).repeat(len(sources))
            positions = torch.cat((torch.tensor([position]), ahead))
            logits, features = self._forward(recorder, batch, positions, mask, 0)
            seen[position] = features[0]
            every = torch.stack(recorder.queries).transpose(1, 2)  # [L, width, Hq, D]
            queries.append(every[:, 0].clone())
            for i, source in enumerate(sources):
                at = 1 + i * chain
                drafted[source.name].append(every[:, at : at + chain].transpose(0, 1).clone())
                guesses[source.name].append(guessed[i])
            on_step()
        total = len(tokens)
        return Capture(
            context,
            tokens,
            recorder.keys[:, :, :total].clone(),
            torch.stack(queries),
            {name: torch.stack(parts) for name, parts in drafted.items()},
            {name: torch.tensor(parts) for name, parts in guesses.items()},
            recorder.scale,
        )
