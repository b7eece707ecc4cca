"""Muon: momentum whose matrices are brought near orthogonality before they are applied (arXiv 2502.16982)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

#: Newton-Schulz coefficients of the original implementation: steep at zero, so that five iterations do.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """For matrices only. `torch.optim.Muon` iterates in bfloat16, several times slower than float32 on most CPUs."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                average = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalised(torch.lerp(parameter.grad, average, group["momentum"]))
                # As large as AdamW's updates usually are, so that one learning rate serves both.
                parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)


def orthogonalised(matrix: Tensor) -> Tensor:
    """`matrix` with its singular values brought near 1 (between about 0.7 and 1.2)."""
    first, third, fifth = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = first * x + torch.addmm(square, square, square, beta=third, alpha=fifth) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
