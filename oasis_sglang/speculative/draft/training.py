"""Training of a draft head: unrolled as it will be used, against the target's distribution over its vocabulary."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oasis_sglang.speculative.draft.data import Corpus, Shard, write_atomically
from oasis_sglang.speculative.draft.evaluate import AcceptLength, accept_length
from oasis_sglang.speculative.draft.model import DraftHead, DraftShape, initialise
from oasis_sglang.speculative.draft.optimizer import Muon
from oasis_sglang.speculative.draft.target import Target

#: Later steps of an unrolling count less: they matter only where the earlier ones were right.
DECAY = 0.8


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the weights, next to the corpus."""

    seed: int = 0
    draft_vocab: int = 4096
    epochs: int = 5
    rows: int = 12  # sequences per optimizer step
    unroll: int = 3  # drafted steps per position
    learning_rate: float = 2e-3
    warmup: float = 0.05  # share of all steps
    optimizer: str = "muon"


@dataclasses.dataclass
class Progress:
    """Where training is, for whoever shows it."""

    step: int
    steps: int
    loss: float
    accuracy: list[float]  # per unrolled step, against the target's favourite within the draft vocabulary
    tokens: int  # so far, summed over epochs


def token_counts(shard: Shard, target_size: int) -> Tensor:
    """How often the continuations of a shard hold each token of the target: [target_size]."""
    columns = torch.arange(shard.tokens.shape[1])
    written = (columns >= shard.width) & (columns < shard.ends[:, None])
    return torch.bincount(shard.tokens[written], minlength=target_size)


def choose_vocabulary(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The `size` most frequent tokens and those of `always`, ascending.

    Ties go to lower ids, so the choice is the same everywhere.
    """
    rank = counts.clone()
    rank[list(always)] = counts.max() + 1
    return torch.sort(rank, descending=True, stable=True).indices[: min(size, len(counts))].sort().values


class Trainer:
    """One training run. `run` may be interrupted at any time; the next one goes on from the last saved state and ends
    with the same weights, as everything random follows from the seed and the step."""

    def __init__(
        self, target: Target, corpus: Corpus, shards: Sequence[int], settings: Settings, state: Path,
    ) -> None:  # fmt: skip
        self.target, self.corpus, self.shards, self.settings, self.state = target, corpus, list(shards), settings, state
        size = target.config.vocab_size
        counts = torch.zeros(size, dtype=torch.int64)
        self.rows: list[Sequence[Tensor]] = []
        for index in self.shards:
            shard = corpus.shard(index)
            counts += token_counts(shard, size)
            # Rows of like length make a step, so that little of it is padding.
            self.rows.append(shard.ends.argsort(stable=True).split(settings.rows))
        self.tokens = int(counts.sum())
        self.steps = settings.epochs * sum(len(parts) for parts in self.rows)
        self.vocabulary = choose_vocabulary(counts, settings.draft_vocab, corpus.stop)
        #: Share of the continuations that the draft could write.
        self.coverage = float(counts[self.vocabulary].sum()) / max(1, self.tokens)
        self.draft_ids = torch.full((size,), -1)
        self.draft_ids[self.vocabulary] = torch.arange(len(self.vocabulary))
        self.teacher = target.model.lm_head.weight[self.vocabulary].float()
        self.head = DraftHead(DraftShape.of(target, len(self.vocabulary)))
        first = corpus.shard(self.shards[0])
        valid = torch.arange(first.features.shape[1]) >= first.starts[:, None]
        initialise(self.head, target, self.vocabulary, first.features[valid][:4096], settings.seed)
        self.optimizers = make_optimizers(self.head, settings)
        self.step, self.seconds, self.seen_tokens = 0, 0.0, 0
        self.history: list[dict[str, Any]] = []
        if state.exists():
            self._restore()

    def run(
        self, report: Callable[[Progress], None] = lambda _: None, *, save_every: int = 25, evaluate_every: int = 0,
        stop_after: float = math.inf,
    ) -> bool:  # fmt: skip
        """Train to the end and return True, or for `stop_after` seconds, save and return False."""
        start = last = time.monotonic()
        for index, part in self._schedule():
            progress = self._step(index, part)
            report(progress)
            self.seconds += time.monotonic() - last
            last = time.monotonic()
            if evaluate_every and self.step % evaluate_every == 0 and self.step < self.steps:
                self.history.append({"step": self.step, "loss": progress.loss, "accept_length": self.evaluate().mean})
                last = time.monotonic()  # evaluation is not training
            stopping = time.monotonic() - start > stop_after
            if self.step % save_every == 0 or self.step == self.steps or stopping:
                self.save()
            if stopping and self.step < self.steps:
                return False
        return True

    def evaluate(self) -> AcceptLength:
        return accept_length(self.head, self.target, self.vocabulary, self.corpus.held_out())

    def save(self) -> None:
        state = {
            "head": self.head.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step, "seconds": self.seconds, "seen_tokens": self.seen_tokens, "history": self.history,
        }  # fmt: skip
        self.state.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.state, lambda path: torch.save(state, path))

    def _restore(self) -> None:
        state = torch.load(self.state, weights_only=True)
        self.head.load_state_dict(state["head"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.seen_tokens = state["step"], state["seconds"], state["seen_tokens"]
        self.history = state["history"]

    def _schedule(self) -> Iterator[tuple[int, Shard]]:
        """The remaining (step, batch) pairs: all batches of a shard follow each other, both in random order."""
        step = 0
        for epoch in range(self.settings.epochs):
            random = torch.Generator().manual_seed(self.settings.seed * 1000 + epoch)
            for place in torch.randperm(len(self.shards), generator=random).tolist():
                parts = self.rows[place]
                order = torch.randperm(len(parts), generator=random).tolist()
                if step + len(parts) <= self.step:
                    step += len(parts)
                    continue
                shard = self.corpus.shard(self.shards[place])
                for part in order:
                    if step >= self.step:
                        yield step, shard.rows(parts[part])
                    step += 1

    def _step(self, index: int, part: Shard) -> Progress:
        factor = schedule(index, self.steps, self.settings.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.learning_rate * factor
            optimizer.zero_grad()
        losses, accuracy = self.losses(part)
        loss = torch.stack([DECAY**step * value for step, value in enumerate(losses)]).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step = index + 1
        self.seen_tokens += part.new_tokens
        return Progress(self.step, self.steps, float(losses[0].detach()), accuracy, self.seen_tokens)

    def losses(self, part: Shard) -> tuple[list[Tensor], list[float]]:
        """Cross-entropy between target and draft per unrolled step, and how often both have the same favourite."""
        first = part.width - 1
        chain = self.head.unroll(
            part.features[:, :-1].float(), part.tokens, part.starts, first, self.target.embed, self.target.rotary
        )
        queries = part.features.shape[1] - 1 - first
        # final[j] decided token width + j; the first token is known before anything is drafted.
        teacher = torch.softmax(F.linear(part.final[:, 1:].float(), self.teacher), dim=-1)
        losses, accuracy = [], []
        for step in range(self.settings.unroll):
            x = next(chain)
            # Query i of step k predicts token width + i + k + 1.
            predicted = part.tokens[:, part.width + step + 1 :][:, :queries]
            places = torch.arange(part.width + step + 1, part.width + step + 1 + predicted.shape[1])
            # A token outside the draft's vocabulary cannot be drafted; nothing is to be learnt there.
            valid = (places < part.ends[:, None]) & (self.draft_ids[predicted] >= 0)
            wanted = teacher[:, step:][valid]
            logits = self.head.logits(x[:, : predicted.shape[1]][valid])
            losses.append(F.cross_entropy(logits, wanted, reduction="sum") / max(1, len(logits)))
            same = logits.detach().argmax(dim=-1) == wanted.argmax(dim=-1)
            accuracy.append(float(same.float().mean()) if len(same) else 0.0)
        return losses, accuracy


def schedule(step: int, steps: int, warmup: float) -> float:
    """Learning rate relative to its peak: linear warm-up, then a cosine down to 2%."""
    rising = max(1, round(steps * warmup))
    if step < rising:
        return (step + 1) / rising
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def make_optimizers(head: DraftHead, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the layer's matrices, AdamW for the LM head and the norms."""
    parameters = dict(head.named_parameters())
    rest = {name: value for name, value in parameters.items() if value.dim() < 2 or name == "lm_head.weight"}
    rate = settings.learning_rate
    if settings.optimizer == "adamw":
        return [torch.optim.AdamW(parameters.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)]
    matrices = [value for name, value in parameters.items() if name not in rest]
    return [
        Muon(matrices, lr=rate),
        torch.optim.AdamW(rest.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
