"""Linear layers over weights that oneDNN has re-ordered once, at load, into the layout its kernels read.

`F.linear` hands oneDNN a row-major weight, and the kernel re-arranges it again on every call. For the few rows of a
decode step that costs as much as the product itself. The operators below are the ones torch's own compiler emits for
constant weights; the result is bit-equal to `F.linear`, since the same kernel runs on the same numbers.

Only 16-bit weights are packed: float32 goes through MKL in `F.linear` and through oneDNN when packed, and the two round
differently, while float32 is what equality tests run in.

The packed copy hangs on the `Parameter` it was made from. Layers that share a parameter (tied embeddings, a draft
model that borrows the target's head) so share the copy, and a layer whose parameter was replaced falls back to
`F.linear` instead of using a stale one. SGLang brackets every weight update with `restore_weights_before_loading` and
`process_weights_after_loading`; the copy is dropped at the first and made anew at the second.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

from oasis_sglang.platform import host

logger = logging.getLogger(__name__)

# Share of the available memory the second copy of the weights may take; above it the model runs unpacked.
PACK_MEMORY_SHARE = 0.25

# Rows the layout is tuned for. oneDNN picks the same layout for every small batch, and any batch may use it.
_HINT_ROWS = 8

_ATTRIBUTE = "_oasis_packed"
_linear_packed = torch.ops.mkldnn._linear_pointwise.default
_reorder = torch.ops.mkldnn._reorder_linear_weight


def can_pack(weight: Any) -> bool:
    """Whether oneDNN has a kernel for this weight on this CPU."""
    if not isinstance(weight, torch.nn.Parameter) or weight.device.type != "cpu" or weight.dim() != 2:
        return False
    if not weight.numel() or not weight.is_contiguous():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False


def pack(weight: Any) -> None:
    """Attach a packed copy of the parameter's current values to it."""
    setattr(weight, _ATTRIBUTE, _reorder(weight.detach(), _HINT_ROWS))


def unpack(weight: Any) -> bool:
    """Drop the packed copy; True when there was one."""
    return weight.__dict__.pop(_ATTRIBUTE, None) is not None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`F.linear`, through the packed copy of `weight` where it has one and `x` suits it."""
    packed = weight.__dict__.get(_ATTRIBUTE)
    if packed is None or x.dtype != weight.dtype or not x.numel():
        return F.linear(x, weight, bias)
    return _linear_packed(x, packed, bias, "none", [], "")


class _Packed:
    """The part of a quantization method that keeps the packed copy in step with the weight."""

    def restore_weights_before_loading(self, layer: torch.nn.Module) -> None:
        # Remembered, because only weights that fitted in memory the first time are packed again. Never unset: a layer
        # that shares its parameter may find the copy already dropped.
        if unpack(layer.weight):
            layer._oasis_repack = True

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # Loaders exist that skip the `restore` half: what still has a copy is packed anew too.
        if unpack(layer.weight) or getattr(layer, "_oasis_repack", False):
            pack(layer.weight)


class PackedLinearMethod(_Packed, UnquantizedLinearMethod):
    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, layer.weight, bias)


class PackedEmbeddingMethod(_Packed, UnquantizedEmbeddingMethod):
    """For a vocabulary-parallel layer used as LM head. A tied one still embeds from the plain weight."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = layer.weight
        return linear(x if x.dtype == weight.dtype else x.to(weight.dtype), weight, bias)


def pack_model(model: torch.nn.Module) -> int:
    """Pack every unquantized linear layer and the LM head of a loaded model; returns the bytes of the copies."""
    methods: list[tuple[torch.nn.Module, type]] = []
    for module in model.modules():
        # Exact types: a subclass brings its own kernel.
        if type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod and can_pack(module.weight):
            methods.append((module, PackedLinearMethod))
    head: Any = getattr(model, "lm_head", None)
    if (
        type(getattr(head, "quant_method", None)) is UnquantizedEmbeddingMethod
        and can_pack(head.weight)
        and not _needs_stock_head(model)
    ):
        methods.append((head, PackedEmbeddingMethod))

    weights = {id(module.weight): module.weight for module, _ in methods}
    size = sum(weight.nbytes for weight in weights.values())
    budget = host.available_memory() * PACK_MEMORY_SHARE
    if size > budget:
        logger.info(
            "CPU platform: weights stay unpacked: a copy takes %.1f GiB, %.1f GiB may be used.",
            size / 2**30,
            budget / 2**30,
        )
        return 0
    for weight in weights.values():
        pack(weight)
    for module, method in methods:
        module.quant_method = method()
    return size


def _needs_stock_head(model: torch.nn.Module) -> bool:
    """Options that change the LM head's precision, which SGLang applies only on its own path."""
    processor = getattr(model, "logits_processor", None)
    return bool(
        getattr(processor, "use_fp32_lm_head", False)
        or getattr(processor, "use_fp32_lm_head_output", False)
        or getattr(processor, "rl_on_policy_target", None) is not None
    )
