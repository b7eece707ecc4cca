"""Chains of drafts in torch: shapes worked out by hand, and the distribution of what is sampled (contract 8, C25)."""

from __future__ import annotations

import pytest
import torch

from oasis_sglang.platform import spec_ops


def chain(full_mask: bool) -> tuple[torch.Tensor, ...]:
    lengths = torch.tensor([5, 2])
    size = 3 * (5 + 3) + 3 * (2 + 3) if full_mask else 2 * 3 * 3
    mask = torch.ones(size, dtype=torch.bool)
    positions, index, following = torch.empty(6, dtype=torch.long), torch.full((2, 3), -1), torch.full((2, 3), -1)
    spec_ops.build_chain(lengths, mask, positions, index, following, 1, full_mask)
    return mask, positions, index, following


def test_a_chain_is_a_tree_with_one_branch() -> None:
    mask, positions, index, following = chain(full_mask=False)
    assert positions.tolist() == [5, 6, 7, 2, 3, 4]
    assert index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert following.tolist() == [[1, 2, -1], [1, 2, -1]]
    assert mask.view(2, 3, 3).int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]] * 2


def test_the_full_mask_lists_the_prefix_too() -> None:
    mask = chain(full_mask=True)[0].int()
    first, second = mask[: 3 * 8].view(3, 8), mask[3 * 8 :].view(3, 5)
    assert first.tolist() == [[1] * 5 + tail for tail in ([1, 0, 0], [1, 1, 0], [1, 1, 1])]
    assert second.tolist() == [[1] * 2 + tail for tail in ([1, 0, 0], [1, 1, 0], [1, 1, 1])]


def test_trees_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="topk=4"):
        spec_ops.build_chain(*(torch.empty(0),) * 5, topk=4, full_mask=False)


def outputs(bs: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros(bs * n, dtype=torch.int32), torch.full((bs, n), -1, dtype=torch.int32), torch.empty(bs).int()


def test_greedy_acceptance() -> None:
    predicts, index, accepted = outputs(4, 4)
    candidates = torch.tensor([[9, 1, 2, 3], [9, 1, 5, 3], [9, 7, 2, 3], [9, 1, 2, 8]])
    says = torch.tensor([[1, 2, 3, 4]]).expand(4, 4)
    spec_ops.verify_greedy(predicts, index, accepted, candidates, says)
    assert accepted.tolist() == [3, 1, 0, 2]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1], [12, 13, 14, -1]]
    assert predicts.view(4, 4).tolist() == [[1, 2, 3, 4], [1, 2, 0, 0], [1, 0, 0, 0], [1, 2, 3, 0]]
    bonus = torch.empty(4, dtype=torch.int32)
    spec_ops.last_accepted(predicts[index.long()], accepted + 1, bonus)
    assert bonus.tolist() == [4, 2, 1, 3]


def test_slots_are_written_and_read() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([3, 0]), torch.tensor([5, 3])
    spec_ops.write_slots(rows, table, start, end, torch.tensor([71, 72, 81, 82, 83]))
    assert table[2, 3:5].tolist() == [71, 72]
    assert table[0, :3].tolist() == [81, 82, 83]
    assert int(table.sum()) == 71 + 72 + 81 + 82 + 83
    assert spec_ops.read_slots(rows, table, torch.tensor([3, 0]), 2).tolist() == [71, 72, 81, 82]


def test_renormalised_probabilities() -> None:
    probs = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    top_k = spec_ops.top_k_renorm(probs, torch.tensor([2, 1 << 30]))
    torch.testing.assert_close(top_k, torch.tensor([[4 / 7, 3 / 7, 0, 0], [0.1, 0.2, 0.3, 0.4]]))
    top_p = spec_ops.top_p_renorm(probs, torch.tensor([0.65, 0.3]))
    torch.testing.assert_close(top_p, torch.tensor([[4 / 7, 3 / 7, 0, 0], [0, 0, 0, 1.0]]))


def sample(probs: torch.Tensor, drafts: list[int], runs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`runs` verifications of one chain whose target has the distributions `probs` `[n, vocab]`: the tokens that each
    leads to, `[runs, n]` with -1 past its end, and how many drafts it accepted."""
    n = len(drafts) + 1
    generator = torch.Generator().manual_seed(0)
    predicts, index, accepted = outputs(runs, n)
    spec_ops.verify_sampled(
        predicts,
        index,
        accepted,
        torch.tensor([[0, *drafts]]).expand(runs, n),
        torch.rand(runs, n, generator=generator),
        torch.rand(runs, generator=generator),
        probs.expand(runs, *probs.shape).clone(),
        1.0,
        1.0,
    )
    path = index >= 0
    assert torch.equal(path.sum(1) - 1, accepted.long())
    return torch.where(path, predicts.view(runs, n), -1), accepted


def test_sampled_output_follows_the_target() -> None:
    """Whatever was drafted, the first token has the target's first distribution, and the second its second: 40,000
    draws, each frequency within five standard deviations."""
    probs = torch.tensor([[0.5, 0.2, 0.25, 0.05], [0.1, 0.6, 0.0, 0.3], [0.25, 0.25, 0.25, 0.25]])
    runs = 40_000
    for drafts in ([0, 1], [3, 2], [2, 3]):
        tokens, accepted = sample(probs, drafts, runs)
        first = torch.bincount(tokens[:, 0], minlength=4) / runs
        assert bool((first - probs[0]).abs().lt(5 * (probs[0] * (1 - probs[0]) / runs).sqrt() + 1e-9).all())
        went_on = tokens[tokens[:, 0] == drafts[0], 1]
        share = torch.bincount(went_on, minlength=4) / went_on.numel()
        assert bool((share - probs[1]).abs().lt(5 * (probs[1] * (1 - probs[1]) / went_on.numel()).sqrt() + 1e-9).all())
        assert bool((tokens[tokens[:, 0] != drafts[0], 1] == -1).all()), "a chain ends where a draft is rejected"
        # accepted drafts: with the first's probability, and then the second's
        expected = probs[0, drafts[0]] * (1 + probs[1, drafts[1]])
        assert abs(float(accepted.float().mean() - expected)) < 0.02


def test_a_coin_of_nearly_one_draws_a_possible_token() -> None:
    predicts, index, accepted = outputs(1, 2)
    probs = torch.tensor([[[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]])
    coin = torch.tensor([1 - 2**-24])
    spec_ops.verify_sampled(
        predicts, index, accepted, torch.tensor([[0, 2]]), torch.full((1, 2), 0.99), coin, probs, 1.0, 1.0
    )
    assert predicts[0] == 1
