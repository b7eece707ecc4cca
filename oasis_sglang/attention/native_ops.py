"""The torch ops with compiled copies: what a CPU host runs where there is a compiler."""

from __future__ import annotations

import ctypes

import torch

from oasis_sglang.attention.ops import AttentionOps, TableLayout
from oasis_sglang.attention.torch_ops import TorchOps
from oasis_sglang.native.build import load_library


class NativeOps(TorchOps):
    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def write_tokens(
        self,
        k_lanes: torch.Tensor,
        v_lanes: torch.Tensor,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        n, heads, dim = k.shape
        size = k.element_size()
        if k.stride()[1:] != (dim, 1) or v.stride()[1:] != (dim, 1):
            k, v = k.contiguous(), v.contiguous()
        self._library.oasis_write_tokens(
            n,
            heads,
            dim * size,
            k_lanes.shape[1],
            rows.data_ptr(),
            offsets.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0) * size,
            v.stride(0) * size,
            k_lanes.data_ptr(),
            v_lanes.data_ptr(),
        )

    def _gather_pages(
        self, k_rows: torch.Tensor, v_rows: torch.Tensor, table: torch.Tensor, layout: TableLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n, heads, columns = table.shape
        count, width, size = table.numel(), k_rows.shape[1], k_rows.element_size()
        k, v = self._buffer("k", k_rows, count), self._buffer("v", v_rows, count)
        self._library.oasis_gather(
            n,
            heads,
            columns,
            width * size,
            layout.page_size,
            table.data_ptr(),
            layout.tokens.data_ptr(),
            k_rows.data_ptr(),
            v_rows.data_ptr(),
            k_rows.stride(0) * size,
            k.data_ptr(),
            v.data_ptr(),
        )
        return k, v


def create_cpu_ops() -> AttentionOps:
    """The compiled ops where they can be built, else the torch ones."""
    library = load_library()
    return TorchOps() if library is None else NativeOps(library)
