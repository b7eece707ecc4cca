"""What attends on this machine, each with its memory and launch plans made beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from benchmarks.gpu_scale import Scale
from oasis_sglang.kernels.attend import attend, workspace_size


class Attend(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        table: torch.Tensor,
        tokens: torch.Tensor,
        page_size: int,
        scale: float,
    ) -> Callable[[], torch.Tensor]:
        """What computes the attention, with the arguments of `kernels.attend.attend`, as often as it is called."""


def triton(
    q: torch.Tensor,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    page_size: int,
    scale: float,
) -> Callable[[], torch.Tensor]:
    n, t, query_heads, dim = q.shape
    heads, columns = table.shape[1:]
    size = workspace_size(n, t, query_heads, heads, dim, columns, page_size, q.device)
    work, out = torch.empty(size, device=q.device), torch.empty_like(q)
    return lambda: attend(q, k_rows, v_rows, table, tokens, page_size, scale, out=out, work=work)


def implementations(scale: Scale) -> dict[str, Attend]:
    return {"triton": triton}
