"""How large everything is: Qwen3-8B's shape on a GPU, or a tiny one for the CPU, where the same code runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oasis_sglang.kernels.variants import USUAL, Shape


@dataclass(frozen=True)
class Scale:
    """Sizes in tokens where nothing else is said; `attend_cases` as in `kernels.variants`.

    Attributes:
        sequences, context: of the worked shape that single kernels are timed at.
        cycle_bytes: what is read in turns where a kernel is timed, so that no cache holds it.
        repeats: timed runs of each measurement; the median counts.
        product: rows of the square matrices of the product that needs the multiprocessors.
        batches: contexts and how many sequences of them are decoded at once, the most telling first.
        spare_bytes: device memory that a batch must leave free.
    """

    tiny: bool
    device: torch.device
    dtype: torch.dtype
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    page: int
    budget: int
    sequences: int
    context: int
    copy_bytes: int
    cycle_bytes: int
    repeats: int
    product: int
    attend_cases: tuple[Shape, ...]
    check_pages: int
    batches: tuple[tuple[int, int], ...]
    spare_bytes: int

    @property
    def scale(self) -> float:
        """What q.k is multiplied with."""
        return self.head_dim**-0.5

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.layers * self.kv_heads * 2 * self.head_dim * self.dtype.itemsize

    @property
    def piece_bytes(self) -> int:
        """K and V of one page of one head in one layer."""
        return 2 * self.page * self.head_dim * self.dtype.itemsize


def scale_of(tiny: bool) -> Scale:
    """Raises RuntimeError where there is no GPU to run at full size."""
    if tiny:
        return Scale(
            tiny=True,
            device=torch.device("cpu"),
            dtype=torch.float32,
            layers=2,
            hidden=64,
            query_heads=4,
            kv_heads=2,
            head_dim=16,
            ffn=96,
            vocabulary=128,
            page=16,
            budget=64,
            sequences=2,
            context=192,
            copy_bytes=1 << 16,
            cycle_bytes=1,
            repeats=1,
            product=64,
            attend_cases=((torch.float32, 16, 16, 2, 1, 3), (torch.bfloat16, 64, 16, 2, 2, 2)),
            check_pages=24,
            batches=((192, 2), (128, 1)),
            spare_bytes=0,
        )
    if not torch.cuda.is_available():
        raise RuntimeError("no NVIDIA GPU on this machine; --tiny runs the same code on the CPU")
    return Scale(
        tiny=False,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        layers=36,
        hidden=4096,
        query_heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=12288,
        vocabulary=151936,
        page=16,
        budget=2048,
        sequences=32,
        context=32768,
        copy_bytes=4 << 30,
        cycle_bytes=1 << 30,
        repeats=20,
        product=8192,
        attend_cases=USUAL,
        check_pages=512,
        batches=((32768, 16), (65536, 8), (16384, 32), (32768, 4), (65536, 1), (16384, 8), (32768, 1)),
        spare_bytes=8 << 30,
    )
