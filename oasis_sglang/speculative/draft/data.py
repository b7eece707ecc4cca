"""Training data: the target's own continuations, and what it saw while writing them.

A corpus is a folder of shards that one command fills and later commands go on filling or reuse:

    corpus.json           what was asked of whom; another target or seed is refused
    shard-00000.safetensors ...  one batch of prompts each, in order
    held-out.safetensors  the prompts that are never trained on, continued greedily
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from oasis_sglang.speculative.draft.prompts import Prompt
from oasis_sglang.speculative.draft.target import Target

#: Raise it whenever shards are written differently, so that older ones are not read.
FORMAT = 1


@dataclasses.dataclass
class Shard:
    """A batch of sequences as they were generated: prompts end together, continuations start together.

    Every continuation begins at column `width`. Row i is valid from `starts[i]` (padding on the left) to `ends[i]`.
    The target never read the last column, so features have one column less than tokens.
    """

    tokens: Tensor  # [batch, width + new], int64
    starts: Tensor  # [batch]
    ends: Tensor  # [batch]
    features: Tensor  # [batch, width + new - 1, 3 × hidden], bfloat16
    final: Tensor  # [batch, new, hidden], bfloat16; column j decides token width + j
    width: int

    @property
    def new_tokens(self) -> int:
        return int((self.ends - self.width).sum())

    def rows(self, index: Tensor) -> Shard:
        """Some of the rows, without the columns that only others need."""
        starts, ends = self.starts[index], self.ends[index]
        first, last = int(starts.min()), int(ends.max())
        return Shard(
            self.tokens[index, first:last], starts - first, ends - first, self.features[index, first : last - 1],
            self.final[index, : last - self.width], self.width - first,
        )  # fmt: skip

    def save(self, path: Path, seconds: float = 0.0) -> None:
        tensors = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "width"}
        metadata = {"seconds": f"{seconds:.3f}"}
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))

    @classmethod
    def load(cls, path: Path) -> Shard:
        tensors = load_file(path)
        return cls(**tensors, width=tensors["tokens"].shape[1] - tensors["final"].shape[1])


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a file beside `path`, then rename it: whoever is killed leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def encode(tokenizer: Any, prompt: Prompt, limit: int) -> list[int]:
    """Token ids of a prompt, ready to be continued; a longer one loses its beginning."""
    if prompt.chat and tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt.text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt.text)
    return list(ids)[-limit:]


@torch.no_grad()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    new: int,
    temperatures: Sequence[float],
    stop: Sequence[int],
    generator: torch.Generator,
) -> Shard:
    """Continue `prompts` by up to `new` tokens each; temperature 0 is greedy. A row ends with a token of `stop`."""
    batch, width = len(prompts), max(len(prompt) for prompt in prompts)
    starts = torch.tensor([width - len(prompt) for prompt in prompts])
    tokens = torch.zeros(batch, width + new, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) : width] = torch.tensor(prompt)
    heat = torch.tensor(temperatures)[:, None]
    ends = torch.full((batch,), width + new)
    hidden, dtype = target.config.hidden_size, torch.bfloat16
    features = torch.zeros(batch, width + new - 1, hidden * len(target.captured), dtype=dtype)
    final = torch.zeros(batch, new, hidden, dtype=dtype)
    stops = torch.tensor(sorted(stop))

    cache = target.new_cache(batch, width + new)
    columns = torch.arange(width + new)
    valid = columns[None] >= starts[:, None]  # [batch, width + new]
    causal = columns[:width, None] >= columns[None, :width]
    # A padding column attends to itself, or its softmax would be 0/0 and NaN would spread to nothing but alarm.
    mask = ((causal & valid[:, None, :width]) | torch.eye(width, dtype=torch.bool))[:, None]
    positions = (columns[None] - starts[:, None]).clamp(min=0)
    seen = target.forward(tokens[:, :width], positions[:, :width], mask, cache)
    features[:, :width] = seen.features
    rows = torch.arange(batch)  # those that go on, as indices into the whole batch
    for step in range(new):
        column = width + step
        final[rows, step] = seen.final[:, -1].to(dtype)
        logits = target.logits(seen.final[:, -1])
        chosen = logits.argmax(dim=-1)
        hot = heat[rows] > 0
        if bool(hot.any()):
            probabilities = torch.softmax(logits.float() / heat[rows].clamp(min=1e-3), dim=-1)
            sampled = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
            chosen = torch.where(hot[:, 0], sampled, chosen)
        tokens[rows, column] = chosen
        stopped = torch.isin(chosen, stops)
        ends[rows[stopped]] = column + 1
        if step == new - 1 or bool(stopped.all()):
            break
        if bool(stopped.any()):
            going = (~stopped).nonzero()[:, 0]
            rows, chosen = rows[going], chosen[going]
            cache.keep_rows(going)
        mask = valid[rows, None, None, : column + 1]
        seen = target.forward(chosen[:, None], positions[rows, column, None], mask, cache)
        features[rows, column] = seen.features[:, 0].to(dtype)
    longest = int(ends.max())
    return Shard(
        tokens[:, :longest].clone(), starts, ends, features[:, : longest - 1].clone(),
        final[:, : longest - width].clone(), width,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CorpusPlan:
    """What decides the contents of a corpus."""

    seed: int
    new_tokens: int  # most tokens per continuation
    prompt_tokens: int  # most tokens per prompt
    batch: int  # prompts per shard
    sampled: float  # share of continuations that are sampled
    temperature: float  # of those
    dtype: str = "float32"  # the target's arithmetic


class Corpus:
    """The shards of one target and one list of prompts, made when they are asked for."""

    def __init__(
        self, folder: Path, target: Callable[[], Target], tokenizer: Any, fingerprint: str,
        prompts: tuple[list[Prompt], list[Prompt]], plan: CorpusPlan, stop: Sequence[int],
    ) -> None:  # fmt: skip
        """`target` is called when something has to be generated, and not if all shards are there."""
        self.folder, self.plan, self.stop, self.tokenizer, self._target = folder, plan, stop, tokenizer, target
        train, self.held_out_prompts = prompts
        # Prompts of like length share a batch, so that few columns are padding; batches are then put in random order,
        # so that any number of first shards is a fair sample. Sorting within spans keeps lists of any length alike.
        encoded = [encode(tokenizer, prompt, plan.prompt_tokens) for prompt in train]
        order = torch.Generator().manual_seed(plan.seed)
        self.batches: list[list[list[int]]] = []
        span = plan.batch * 16
        for first in range(0, len(encoded), span):
            part = sorted(encoded[first : first + span], key=len)
            batches = [part[start : start + plan.batch] for start in range(0, len(part), plan.batch)]
            self.batches += [batches[index] for index in torch.randperm(len(batches), generator=order)]
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(json.dumps([[p.text for p in part] for part in prompts]).encode()).hexdigest()
        self.identity = {"format": FORMAT, "target": fingerprint, "prompts": digest, **dataclasses.asdict(plan)}
        self._claim()

    def _claim(self) -> None:
        path = self.folder / "corpus.json"
        if path.exists():
            found = json.loads(path.read_text())
            if found != self.identity:
                different = sorted(key for key in self.identity if found.get(key) != self.identity[key])
                raise ValueError(
                    f"{self.folder} holds a corpus made with another {', '.join(different)}; choose another --cache, "
                    "or delete it"
                )
            return
        write_atomically(path, lambda temporary: temporary.write_text(json.dumps(self.identity, indent=1) + "\n"))

    def path(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}.safetensors"

    def shard(self, index: int) -> Shard:
        """Shard `index`, from the disk or from the target. Its random numbers follow from its index."""
        path = self.path(index)
        if not path.exists():
            batch = self.batches[index]
            random = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + index)
            hot = torch.rand(len(batch), generator=random) < self.plan.sampled
            heat = [self.plan.temperature if row else 0.0 for row in hot.tolist()]
            start = time.monotonic()
            shard = generate(self._target(), batch, self.plan.new_tokens, heat, self.stop, random)
            shard.save(path, seconds=time.monotonic() - start)
        return Shard.load(path)

    def seconds(self, shards: Sequence[int]) -> float:
        """How long the target took to write them, whenever that was."""
        total = 0.0
        for index in shards:
            with safe_open(self.path(index), framework="pt") as file:
                total += float(file.metadata()["seconds"])
        return total

    def held_out(self) -> Shard:
        """The held-out prompts with the target's greedy continuations."""
        path = self.folder / "held-out.safetensors"
        if not path.exists():
            batch = [encode(self.tokenizer, prompt, self.plan.prompt_tokens) for prompt in self.held_out_prompts]
            greedy = [0.0] * len(batch)
            generate(self._target(), batch, self.plan.new_tokens, greedy, self.stop, torch.Generator()).save(path)
        return Shard.load(path)
