"""Linear layers for the few rows of a decode step, compiled (`native/linear.cpp`).

`F.linear` hands oneDNN a row-major weight, which its kernel re-arranges on every call: for up to 16 rows that costs as
much as reading it. The compiled product reads the plain weight once. More rows, other dtypes and processors without
bfloat16 products keep `F.linear`. float32 does too, because equality tests run in it.

A row's result does not depend on how many rows there are, so a sequence decodes to the same bits in any batch of up to
16.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

from oasis_sglang.native.build import load_library

MAX_ROWS = 16
# Inner dimensions the kernel takes in whole: one vector register of bfloat16.
_STEP = 32


def fast_library() -> ctypes.CDLL | None:
    """The compiled code where its product is faster than oneDNN's on this processor."""
    library = load_library()
    return library if library is not None and library.oasis_linear_is_fast() else None


def linear(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear`; compiled for `x` `[1 to 16, k]` and `weight` `[n, k]` in bfloat16."""
    if (
        x.dim() != 2
        or not 0 < x.shape[0] <= MAX_ROWS
        or x.dtype != torch.bfloat16
        or weight.dtype != torch.bfloat16
        or x.shape[1] % _STEP
        or not weight.is_contiguous()
    ):
        return F.linear(x, weight, bias)
    x = x.contiguous()
    rows, inner = x.shape
    out = torch.empty(rows, weight.shape[0], dtype=x.dtype)
    library.oasis_linear(rows, weight.shape[0], inner, x.data_ptr(), weight.data_ptr(), out.data_ptr())
    return out if bias is None else out.add_(bias)


class FewRowsLinearMethod(UnquantizedLinearMethod):
    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(self._library, x, layer.weight, bias)


class FewRowsEmbeddingMethod(UnquantizedEmbeddingMethod):
    """For a vocabulary-parallel layer used as LM head."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = layer.weight
        return linear(self._library, x if x.dtype == weight.dtype else x.to(weight.dtype), weight, bias)


def install(model: torch.nn.Module) -> int:
    """Give every unquantized bfloat16 linear layer and the LM head of a loaded model the compiled product; returns how
    many there were."""
    library = fast_library()
    if library is None:
        return 0
    count = 0
    for module in model.modules():
        # Exact types: a subclass brings its own kernel.
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod and _suits(module.weight):
            module.quant_method = FewRowsLinearMethod(library)
            count += 1
    head: Any = getattr(model, "lm_head", None)
    if (
        type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod
        and _suits(head.weight)
        and not _needs_stock_head(model)
    ):
        head.quant_method = FewRowsEmbeddingMethod(library)
        count += 1
    return count


def _suits(weight: Any) -> bool:
    return (
        isinstance(weight, torch.nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.dtype == torch.bfloat16
    )


def _needs_stock_head(model: torch.nn.Module) -> bool:
    """Options that change the LM head's precision, which SGLang applies only on its own path."""
    processor = getattr(model, "logits_processor", None)
    return bool(
        getattr(processor, "use_fp32_lm_head", False)
        or getattr(processor, "use_fp32_lm_head_output", False)
        or getattr(processor, "rl_on_policy_target", None) is not None
    )
