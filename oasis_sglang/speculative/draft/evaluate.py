"""Accept length: tokens per verify step of speculative decoding, counted without a server."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from oasis_sglang.speculative.draft.data import Shard
from oasis_sglang.speculative.draft.model import DraftHead
from oasis_sglang.speculative.draft.target import Target


@dataclasses.dataclass(frozen=True)
class AcceptLength:
    """`mean` counts the accepted drafts and the bonus token. `by_step[k]` is the share of verify steps that accepted
    at least k+1 drafts."""

    mean: float
    by_step: tuple[float, ...]
    verify_steps: int


@torch.no_grad()
def draft_chains(head: DraftHead, target: Target, vocabulary: Tensor, shard: Shard, steps: int) -> Tensor:
    """[batch, n, steps]: what would be drafted at each place of the continuations, greedily, on its own outputs.

    Entry j is the draft made when token `width + j` is the newest known and the target has not read it yet. Chains do
    not depend on each other: before a chain starts, SGLang computes the draft's cache anew from target features.
    """
    first = shard.width - 1
    chain = head.unroll(
        shard.features[:, :-1].float(), shard.tokens, shard.starts, first, target.embed, target.rotary
    )  # fmt: skip
    drafted: list[Tensor] = []
    x = next(chain)
    while True:
        drafted.append(vocabulary[head.logits(x).argmax(dim=-1)])
        if len(drafted) == steps:
            return torch.stack(drafted, dim=-1)
        x = chain.send(drafted[-1])


def walk(continuation: Tensor, chains: Tensor) -> list[int]:
    """Accepted drafts of each verify step over one greedy `continuation` [length]; chains [length or less, steps].

    Decoding starts with the first token known, as prefill leaves it. A step at token j accepts as many of chains[j] as
    equal the tokens after j, and goes on behind the target's own next token. Steps cut short by the end do not count.
    """
    steps = chains.shape[1]
    accepted = []
    place = 0
    while place + steps < len(continuation):
        equal = chains[place] == continuation[place + 1 : place + 1 + steps]
        accepted.append(int(equal.long().cumprod(0).sum()))
        place += accepted[-1] + 1
    return accepted


def accept_length(
    head: DraftHead, target: Target, vocabulary: Tensor, shard: Shard, steps: int = 3, rows: int = 10
) -> AcceptLength:
    """Mean over the verify steps of all rows of `shard`, which must have been continued greedily."""
    accepted: list[int] = []
    for start in range(0, len(shard.tokens), rows):
        part = shard.rows(torch.arange(start, min(start + rows, len(shard.tokens))))
        chains = draft_chains(head, target, vocabulary, part, steps)
        for row, end in enumerate(part.ends.tolist()):
            accepted += walk(part.tokens[row, part.width : end], chains[row])
    if not accepted:
        return AcceptLength(1.0, (0.0,) * steps, 0)
    share = tuple(sum(count > step for count in accepted) / len(accepted) for step in range(steps))
    return AcceptLength(1.0 + sum(share), share, len(accepted))
