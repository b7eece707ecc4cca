"""Drafts copied from the sequence: worked out by hand, and against a search in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from oasis_sglang.speculative.prompt_lookup import LONGEST, PromptLookup


def expected(tokens: list[int], shortest: int, draft: list[int]) -> list[int]:
    """The place that agrees with the end over most tokens, the latest of these; past the end it starts over."""
    newest, best, place = len(tokens) - 1, 0, -1
    for at in range(newest):
        count = 0
        while count < min(LONGEST, at + 1) and tokens[at - count] == tokens[newest - count]:
            count += 1
        if count >= max(best, 1):
            best, place = count, at
    if best < shortest:
        return draft
    after = tokens[place + 1 :]
    return [after[i % len(after)] for i in range(len(draft))]


def test_by_hand() -> None:
    lookup = PromptLookup(rows=3, context_len=32, chain=4, shortest=2, device="cpu")
    lookup.enter(0, [1, 2, 3, 4, 5, 6, 1, 2])  # 2 3 4 … again, as the newest token is 3
    lookup.enter(1, [7, 8, 9, 1])  # nothing repeats
    lookup.enter(2, [4, 5, 4, 5, 4])  # a loop of two
    rows, lengths = torch.tensor([0, 1, 2]), torch.tensor([8, 4, 5])
    drafts = torch.tensor([[90, 91, 92]] * 3)
    chains = lookup.propose(rows, lengths, torch.tensor([3, 9, 5]), drafts, longest=20)
    assert chains.tolist() == [[4, 5, 6], [90, 91, 92], [4, 5, 4]]
    assert chains.dtype == drafts.dtype
    assert int(lookup.copied) == 2


def test_only_what_was_accepted_is_remembered() -> None:
    """Rejected drafts are overwritten, accepted ones stay, and a row's next request knows nothing of the last."""
    lookup = PromptLookup(rows=1, context_len=32, chain=3, shortest=2, device="cpu")
    row = torch.tensor([0])

    def step(length: int, newest: int, drafts: list[int]) -> list[int]:
        found = lookup.propose(row, torch.tensor([length]), torch.tensor([newest]), torch.tensor([drafts]), 30)
        return found[0].tolist()

    lookup.enter(0, [1, 2, 3])
    assert step(3, 4, [5, 6]) == [5, 6]  # 1 2 3 4, drafted 5 6; 5 is accepted, 6 is not: 8 follows
    assert step(5, 8, [9, 9]) == [9, 9]  # 1 2 3 4 5 8; nothing accepted, 4 follows
    assert step(6, 4, [9, 9]) == [9, 9]  # … 5 8 4; 5 6 were never there together
    assert step(7, 5, [0, 0]) == [8, 4]  # 1 2 3 4 5 8 4 5
    lookup.enter(0, [6, 1])
    assert step(2, 2, [9, 9]) == [9, 9]


@pytest.mark.parametrize("shortest", [1, 2, 4, 8])
def test_random_sequences(shortest: int) -> None:
    """400 steps of four requests that come, decode from an alphabet of three tokens and leave."""
    choose = random.Random(shortest)
    lookup = PromptLookup(rows=4, context_len=64, chain=4, shortest=shortest, device="cpu")
    texts: dict[int, list[int]] = {}
    copied = 0
    for _ in range(400):
        for row in range(4):
            if row not in texts or len(texts[row]) > 50:
                texts[row] = [choose.randrange(3) for _ in range(choose.randrange(1, 30))]
                lookup.enter(row, texts[row][:])
                texts[row].append(choose.randrange(3))
        rows = choose.sample(range(4), choose.randint(1, 4))
        drafts = [[choose.randrange(3) for _ in range(3)] for _ in rows]
        lengths = [len(texts[row]) - 1 for row in rows]
        chains = lookup.propose(
            torch.tensor(rows),
            torch.tensor(lengths),
            torch.tensor([texts[row][-1] for row in rows]),
            torch.tensor(drafts),
            longest=max(lengths) + choose.randint(1, 20),
        ).tolist()
        assert chains == [expected(texts[row], shortest, d) for row, d in zip(rows, drafts, strict=True)]
        copied += sum(chain != d for chain, d in zip(chains, drafts, strict=True))
        for row, chain in zip(rows, chains, strict=True):
            texts[row] += [*chain[: choose.randint(0, 3)], choose.randrange(3)]
    assert copied > 5
    assert int(lookup.copied) >= copied


def test_sequence_as_long_as_the_context() -> None:
    lookup = PromptLookup(rows=1, context_len=8, chain=4, shortest=1, device="cpu")
    lookup.enter(0, [1, 2, 3, 1, 2, 3, 1])
    one = torch.tensor([0])
    chains = lookup.propose(one, torch.tensor([7]), torch.tensor([2]), torch.tensor([[0, 0, 0]]), longest=1000)
    assert chains.tolist() == [[3, 1, 2]]


def test_bytes() -> None:
    assert PromptLookup(rows=3, context_len=100, chain=4, shortest=4, device="cpu").nbytes == 4 * 104 * 4


def test_a_step_never_looks_at_data() -> None:
    """On the device `meta` there is nothing to look at."""
    meta = torch.device("meta")
    lookup = PromptLookup(4, 100, 4, 4, meta)
    lookup.enter(1, [5] * 30)
    rows, lengths, newest = (torch.zeros(2, dtype=torch.int64, device=meta) for _ in range(3))
    drafts = torch.zeros(2, 3, dtype=torch.int64, device=meta)
    assert lookup.propose(rows, lengths, newest, drafts, 40).shape == (2, 3)
