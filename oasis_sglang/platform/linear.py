"""Linear layers of bfloat16 models on processors that multiply bfloat16 with vectors, not with tiles (AMX).

- **Few rows** (a decode step, up to 16): `F.linear` hands oneDNN a row-major weight, which its kernel re-arranges on
  every call; that costs as much as reading it. The compiled product (`native/linear.cpp`) reads the plain weight once.
  A row's result does not depend on how many rows there are, so a sequence decodes to the same bits in any such batch.
- **Many rows** (a prefill, 512 and more): such a processor multiplies float32 twice as fast as bfloat16 (274 against
  141 GFLOP/s where it was measured), so the operands are widened for the call. Sums are float32 either way.

Everything else, float32 models included, is `F.linear` as SGLang calls it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

from oasis_sglang.native.build import load_library

FEW_ROWS = 16
# From here on the operands are widened; below, widening the weight costs what the faster product gains.
MANY_ROWS = 512
# Inner dimensions the kernel takes in whole: one vector register of bfloat16.
_STEP = 32


def fast_library() -> ctypes.CDLL | None:
    """The compiled code where this module's ways are faster than oneDNN's on this processor."""
    library = load_library()
    if library is None or not library.oasis_linear_is_fast() or torch.cpu._is_amx_tile_supported():
        return None
    return library


def linear(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear` of `x` `[rows, k]` and `weight` `[n, k]`, by the way that is fastest for this many rows."""
    if x.dim() != 2 or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    rows, inner = x.shape
    if rows >= MANY_ROWS:
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if not 0 < rows <= FEW_ROWS or inner % _STEP:
        return F.linear(x, weight, bias)
    x = x.contiguous()
    out = torch.empty(rows, weight.shape[0], dtype=x.dtype)
    library.oasis_linear(rows, weight.shape[0], inner, x.data_ptr(), weight.data_ptr(), out.data_ptr())
    return out if bias is None else out.add_(bias)


class VectorLinearMethod(UnquantizedLinearMethod):
    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(self._library, x, layer.weight, bias)


class VectorEmbeddingMethod(UnquantizedEmbeddingMethod):
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
            module.quant_method = VectorLinearMethod(library)
            count += 1
    head: Any = getattr(model, "lm_head", None)
    if (
        type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod
        and _suits(head.weight)
        and not _needs_stock_head(model)
    ):
        head.quant_method = VectorEmbeddingMethod(library)
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
