"""How good the lookahead is, sampled: agreement with what the next query would have chosen, and attention mass held."""

from __future__ import annotations

from typing import NamedTuple

import torch

# One layer of one step in this many is looked at, the layers in turn.
EVERY = 64


class LookaheadStats:
    """Totals since start.

    Attributes:
        pages: pages compared, per KV head and sequence. agreed: those that the true query chose too.
        mass: attention mass held by the attended pages and the tail, summed over `queries` (query heads).
    """

    def __init__(self) -> None:
        self.pages = 0
        self.agreed = 0
        self.mass = 0.0
        self.queries = 0

    @property
    def agreement(self) -> float | None:
        return self.agreed / self.pages if self.pages else None

    @property
    def mean_mass(self) -> float | None:
        return self.mass / self.queries if self.queries else None

    def count_agreement(self, predicted: torch.Tensor, true: torch.Tensor) -> None:
        """`[n, kv_heads, K]` pages each."""
        self.pages += true.numel()
        self.agreed += int((true.unsqueeze(-1) == predicted.unsqueeze(-2)).any(-1).sum())

    def count_mass(self, keys: KeysOfSequence, attended: torch.Tensor, scale: float) -> None:
        """Args:
        attended: `[kv_heads, K]` pages of the sequence.
        """
        heads, page = keys.full.shape[0], keys.full.shape[2]
        every = torch.cat((keys.full.flatten(1, 2), keys.tail), dim=1).float()  # [H, tokens, D]
        q = keys.query.float().view(heads, -1, keys.query.shape[-1])
        weight = torch.softmax(torch.einsum("hgd,htd->hgt", q, every) * scale, dim=-1)
        pages = keys.full.shape[1]
        held = weight[..., : pages * page].unflatten(-1, (pages, page)).sum(-1)
        held = held.gather(-1, attended.unsqueeze(1).expand(-1, q.shape[1], -1)).sum(-1)
        self.mass += float((held + weight[..., pages * page :].sum(-1)).sum())
        self.queries += held.numel()


class KeysOfSequence(NamedTuple):
    """One query of a sequence and all keys that it could attend to."""

    query: torch.Tensor  # [Hq, D]
    full: torch.Tensor  # [kv_heads, pages, page_size, D] complete pages
    tail: torch.Tensor  # [kv_heads, tokens, D] the local tail, the query's own token included


def samples(step: int, layer: int, layers: int) -> bool:
    """Whether to look at this layer of this step."""
    return step % EVERY == 0 and step // EVERY % layers == layer
