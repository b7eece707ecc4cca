"""Muon against torch's own, which iterates in bfloat16, and against what it is for."""

from __future__ import annotations

import pytest
import torch

from oasis_sglang.speculative.draft.optimizer import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_equals_torchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape))
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizers = [
        Muon([ours], lr=0.01),
        torch.optim.Muon([theirs], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    ]
    start = ours.detach().clone()
    for _ in range(5):
        gradient = torch.randn(shape)
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
    # As far as bfloat16 goes: a few percent of the way.
    assert (ours - theirs).detach().norm() < 0.05 * (ours - start).detach().norm()


def test_singular_values_are_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalised(torch.randn(30, 50, generator=torch.Generator().manual_seed(0))))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3
