"""What attends on this machine, each with its memory and launch plans made beforehand; and what a server would take."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.gpu_scale import Scale
from benchmarks.gpu_stage import NotMeasured
from oasis_sglang.attention.ops import AttentionOps, TableLayout
from oasis_sglang.kernels.attend import attend, workspace_size
from oasis_sglang.kernels.attention_shape import AttentionShape
from oasis_sglang.kernels.choose import Choice, choose_ops, why_no_flashinfer
from oasis_sglang.kernels.flashinfer import FlashInferOps
from oasis_sglang.kernels.ops import TritonOps

TRITON, FLASHINFER = "triton", "flashinfer"
NO_COMPILER = "FlashInfer needs nvcc: not measured"


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


def has_compiler() -> bool:
    """Whether nvcc is where FlashInfer looks for it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = shutil.which("nvcc") if home is None else None
    return found is not None or os.access(os.path.join(home or "/usr/local/cuda", "bin", "nvcc"), os.X_OK)


class FlashInfer:
    """Calls with the same lengths are layers of one step, which measures its lengths once. Raises NotMeasured where its
    kernels would have to be compiled and cannot be."""

    def __init__(self) -> None:
        self._shape: AttentionShape | None = None
        self._tokens = torch.empty(0)

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
        n, t, query_heads, dim = q.shape
        heads, columns = table.shape[1:]
        shape = AttentionShape(
            query_heads=query_heads,
            kv_heads=heads,
            head_dim=dim,
            page_size=page_size,
            columns=columns,
            tokens=columns * page_size,
            batch=n,
            queries=t,
            dtype=q.dtype,
            kv_dtype=k_rows.dtype,
        )
        if shape != self._shape:
            ops = FlashInferOps(shape, q.device)
            try:
                ops.plan(n, t)
            except Exception as error:  # its builds fail with whatever they run into
                # Without a compiler what an earlier start or a package left compiled serves all the same.
                if has_compiler() or "nvcc" not in str(error):
                    raise
                raise NotMeasured(NO_COMPILER) from error
            self._shape, self._ops = shape, ops
        if tokens is not self._tokens:
            self._tokens = tokens
            self._layout = TableLayout(tokens, columns, page_size, t, q.dtype)
        return functools.partial(self._ops.attend, q, k_rows, v_rows, table, self._layout, scale)


def implementations(scale: Scale) -> dict[str, Attend]:
    """By name; FlashInfer where the device is NVIDIA's and it can be imported."""
    on_nvidia = scale.device.type == "cuda" and torch.version.hip is None
    rivals: dict[str, Attend] = {FLASHINFER: FlashInfer()} if on_nvidia and why_no_flashinfer() is None else {}
    return {TRITON: triton, **rivals}


def chosen(scale: Scale) -> dict[str, Any]:
    """What a server would take for the worked shape's steps, and why."""
    shape = AttentionShape(
        query_heads=scale.query_heads,
        kv_heads=scale.kv_heads,
        head_dim=scale.head_dim,
        page_size=scale.page,
        columns=scale.budget // scale.page + 1,
        tokens=scale.budget + scale.page,
        batch=scale.sequences,
        queries=1,
        dtype=scale.dtype,
        kv_dtype=scale.dtype,
    )
    choice = choose_ops(TritonOps(), shape, scale.device)
    found = {"chosen": name_of(choice.ops), "reason": choice.reason}
    if choice.seconds is not None:
        found["flashinfer_seconds"], found["triton_seconds"] = choice.seconds
    return found


def name_of(ops: AttentionOps) -> str:
    return FLASHINFER if isinstance(ops, FlashInferOps) else TRITON


# Ways of decoding that follow each other have the same shape.
@functools.lru_cache(maxsize=1)
def choice_for(shape: AttentionShape, device: torch.device) -> Choice:
    """What a server takes whose largest step this is, with its memory."""
    size = workspace_size(
        shape.batch,
        shape.queries,
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        shape.columns,
        shape.page_size,
        device,
    )
    return choose_ops(TritonOps(torch.zeros(size, device=device)), shape, device)
