"""Drafts copied from the sequence itself, where it says again what it has said before.

Prompt lookup decoding (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding): if the newest tokens stood
together earlier, what followed them there is a good guess of what follows now. Answers about long documents quote them,
and there the guess is right where a draft model of one layer is not. So it takes the place of that model's chain
wherever enough tokens repeat. Verification does not care where a draft comes from: the text stays the target's.

Everything is kept and computed on the device in fixed shapes, so that a step waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Of two earlier places the one is copied from whose tokens agree further back, up to this many.
LONGEST = 8


class PromptLookup:
    """The tokens of running requests, and drafts from them.

    Attributes:
        copied: `[]` int64, chains that were copied.
    """

    def __init__(self, rows: int, context_len: int, chain: int, shortest: int, device: torch.device | str) -> None:
        """
        Args:
            rows: working-set rows.
            context_len: most tokens of a sequence.
            chain: tokens per sequence and step, the last accepted one and its drafts.
            shortest: tokens that must repeat, 1 to `LONGEST`.
        """
        self.shortest = shortest
        self.copied = torch.zeros((), dtype=torch.int64, device=device)
        # of the last row: padding, whose row is -1
        self._tokens = torch.zeros(rows + 1, context_len + chain, dtype=torch.int32, device=device)
        self._entered: dict[int, Sequence[int]] = {}

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes

    def enter(self, row: int, tokens: Sequence[int]) -> None:
        """A request begins in this row with these tokens. They are taken to the device with the next drafts, in the
        order of that stream: a step that is still under way may write to the row for the request before."""
        self._entered[row] = tokens

    def propose(
        self, rows: torch.Tensor, lengths: torch.Tensor, newest: torch.Tensor, drafts: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """The chains to verify: copied ones where enough tokens repeat, the draft model's elsewhere.

        Args:
            rows: `[n]` working-set rows.
            lengths: `[n]` int64 tokens of each sequence before its newest.
            newest: `[n]` the last token accepted, which the target has not seen yet.
            drafts: `[n, k]` the draft model's chains.
            longest: no sequence has more tokens than this, the newest included; known on the host.

        Returns:
            `[n, k]`, dtype of `drafts`.
        """
        self._take_entered()
        columns = torch.arange(drafts.shape[1] + 1, device=drafts.device)
        self._tokens[rows, lengths] = newest.to(torch.int32)
        tokens = self._tokens[rows, : min(longest, self._tokens.shape[1])]
        repeated, place = self._latest(tokens, lengths)
        # A sequence that ends in a loop goes on in it: past its end, what is copied starts over.
        after = place.unsqueeze(1) + 1 + columns[:-1] % (lengths - place).clamp(min=1).unsqueeze(1)
        found = (repeated >= self.shortest).unsqueeze(1)
        chains = torch.where(found, tokens.gather(1, after.clamp(max=tokens.shape[1] - 1)).to(drafts.dtype), drafts)
        self._tokens[rows.unsqueeze(1), lengths.unsqueeze(1) + columns[1:]] = chains.to(torch.int32)
        self.copied += found.sum()
        return chains

    def _take_entered(self) -> None:
        for row, tokens in self._entered.items():
            kept = torch.tensor(tokens[: self._tokens.shape[1]], dtype=torch.int32)
            if self._tokens.is_cuda:
                kept = kept.pin_memory()
            self._tokens[row, : kept.numel()].copy_(kept, non_blocking=True)
        self._entered.clear()

    @staticmethod
    def _latest(tokens: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each sequence's end stood before.

        Args:
            tokens: `[n, width]`, the newest token of each at `lengths`.

        Returns:
            `[n]` how many tokens up to the newest stand there too (`LONGEST` at most), and `[n]` the place of the last
            of them: of the places with most such tokens the latest.
        """
        n, width = tokens.shape
        ages = torch.arange(LONGEST, device=tokens.device)
        newest = tokens.gather(1, (lengths.unsqueeze(1) - ages).clamp(min=0))
        same = torch.ones(n, width, dtype=torch.bool, device=tokens.device)
        count = torch.zeros(n, width, dtype=torch.uint8, device=tokens.device)
        for age in range(min(LONGEST, width)):
            same[:, :age] = False
            same[:, age:] &= tokens[:, : width - age] == newest[:, age : age + 1]
            count += same
        places = torch.arange(width, device=tokens.device)
        earlier = places < lengths.unsqueeze(1)
        best = (count.to(torch.int64) * width + places).masked_fill(~earlier, 0).max(dim=1).values
        return best // width, best % width
