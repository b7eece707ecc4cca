"""What a kernel check found."""

from __future__ import annotations

import math
from typing import Any

import torch

from oasis_sglang.kernels.backup import same_bytes


def near(functions: list[str], shape: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> dict[str, Any]:
    """The largest error against the largest value; what is not a number, or infinite where it should not be, fails."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    finite = want.isfinite()
    same = torch.equal(got[~finite], want[~finite])
    most = float(want[finite].abs().amax()) if bool(finite.any()) else 0.0
    error = float((got[finite] - want[finite]).abs().amax()) / max(most, 1e-30) if bool(finite.any()) else 0.0
    return {
        "functions": functions,
        "shape": shape,
        "measure": "largest error / largest value",
        "error": error,
        "bound": bound,
        "passed": same and not math.isnan(error) and error <= bound,
    }


def equal(functions: list[str], shape: str, pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    """Tensors got and wanted, by what they are, that must be alike to the byte."""
    wrong = {name: _bytes_that_differ(got, want) for name, (got, want) in pairs.items()}
    return {
        "functions": functions,
        "shape": shape,
        "measure": "bytes that differ",
        "error": sum(wrong.values()),
        "bound": 0,
        "passed": not any(wrong.values()),
        "wrong": [name for name, count in wrong.items() if count],
    }


def _bytes_that_differ(got: torch.Tensor, want: torch.Tensor) -> int:
    got, want = (same_bytes(x.detach().cpu().contiguous()).flatten().view(torch.uint8) for x in (got, want))
    return int((got != want).sum()) if got.numel() == want.numel() else max(got.numel(), want.numel())


def both(*verdicts: dict[str, Any]) -> dict[str, Any]:
    """The worst of several about one call."""
    return max(verdicts, key=lambda x: (not x["passed"], x["error"] / x["bound"] if x["bound"] else x["error"]))
