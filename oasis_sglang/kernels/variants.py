"""Every variant of every kernel that is launched, found by launching them on tensors that hold no data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from oasis_sglang.kernels import attend
from oasis_sglang.kernels.launch import Launch, recording

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
DEVICE = "meta"
HEADS, BATCH, COLUMNS = 8, 4, 130

Call = Callable[[], Any]


def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def attend_call(kv: torch.dtype, dim: int, page: int, group: int, t: int, columns: int, batch: int) -> Call:
    def call() -> None:
        dtype = BF16 if kv == FP8 else kv
        q = empty(batch, t, HEADS * group, dim, dtype=dtype)
        pool = empty(4096, page * dim, dtype=kv)
        attend.attend(q, pool, pool, empty(batch, HEADS, columns), empty(batch), page, 1.0)

    return call


def attend_calls(everything: bool) -> Iterator[tuple[str, Call]]:
    if everything:
        grid = itertools.product((BF16, FP16, FP32, FP8), (64, 80, 96, 128, 256), (16, 32, 64), (1, 4, 8), (1, 4, 8))
    else:
        grid = iter(
            [
                (BF16, 128, 16, 4, 1),
                (BF16, 128, 16, 8, 8),
                (BF16, 128, 64, 4, 4),
                (FP16, 128, 32, 4, 4),
                (FP32, 128, 16, 4, 4),
                (FP8, 128, 16, 4, 4),
                (BF16, 64, 16, 3, 1),
                (BF16, 80, 16, 1, 1),
                (FP8, 96, 32, 8, 2),
                (BF16, 256, 16, 2, 4),
            ]
        )
    for kv, dim, page, group, t in grid:
        # a batch of one is split most, a large one not at all
        for columns, batch in ((COLUMNS * 8, 1), (COLUMNS, 128)) if everything else ((COLUMNS, BATCH),):
            name = f"attend {str(kv)[6:]} D={dim} P={page} G={group} t={t} n={batch}"
            yield name, attend_call(kv, dim, page, group, t, columns, batch)


def variants(capability: tuple[int, int], everything: bool = False) -> Iterator[tuple[str, Launch]]:
    """Launches for a device of this compute capability, each with the name of the call that makes it.

    Args:
        everything: every combination that is supported; else a representative part of them.
    """
    for name, call in attend_calls(everything):
        with recording(capability) as launches:
            call()
        for launch in launches:
            yield name, launch
