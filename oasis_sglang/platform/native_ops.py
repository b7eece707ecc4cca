"""Cheaper plain-torch forms of the small operators between the matrix products.

Each product streams more weight than the caches hold, so the next torch call finds its own code evicted and costs ten
microseconds whatever its size. The form with the fewest and most alike calls wins. (SiLU has no better one.)

Registered through `BaseFusedOp.register_oot_forward`; an instance that asks for anything unusual gets SGLang's own
`forward_native`. Rope is bit-equal to it in every dtype. RMSNorm is used for 16-bit inputs only: its float32 sum runs
in another order, which the rounding to 16 bits hides nearly always. float32 models keep SGLang's.
"""

from __future__ import annotations

from typing import Any

import torch

_HALF_TYPES = (torch.bfloat16, torch.float16)


def rms_norm(
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: torch.nn.Module | None = None,
) -> Any:
    """RMSNorm, with the residual added first when there is one. Statistics in float32."""
    if (
        x.dtype not in _HALF_TYPES
        or post_residual_addition is not None
        or self.variance_size_override is not None
        or self.cast_x_before_out_mul
        or self.fp32_residual
        or self.override_orig_dtype is not None
        or x.shape[-1] != self.hidden_size
    ):
        return self.forward_native(x, residual, post_residual_addition, quant_linear)
    wide = x.float()
    if residual is not None:
        residual = wide.add_(residual).to(x.dtype)
    # 1 / sqrt(mean(x^2) + eps), from the norm in one call.
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = scale.mul_(scale).mul_(1.0 / self.hidden_size).add_(self.variance_epsilon).rsqrt_()
    out = wide.mul_(scale).mul_(self.weight).to(x.dtype)
    return out if residual is None else (out, residual)


def rope_table(self: Any, dtype: torch.dtype) -> torch.Tensor:
    """`[positions, 2, 1, head_size]`: cosines, and sines with the first half negated, each spread over a whole head.

    With it a rotation is `x * cos + swap_halves(x) * sin`. Rebuilt when SGLang replaces its own cache (longer context,
    other dtype), which it does by assigning a new tensor.
    """
    cache = self.cos_sin_cache
    memo = self.__dict__.get("_oasis_rope_table")
    if memo is None or memo[0] is not cache or memo[1].dtype != dtype:
        cos, sin = cache.to(dtype).chunk(2, dim=-1)
        table = torch.cat((cos, cos, -sin, sin), dim=-1).view(cache.shape[0], 2, 1, 2 * cos.shape[-1])
        memo = (cache, table)
        self.__dict__["_oasis_rope_table"] = memo
    return memo[1]


def rotary_embedding(
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key; neither input is written, both results are contiguous."""
    head = self.head_size
    if (
        not self.is_neox_style
        or self.rotary_dim != head
        or fused_set_kv_buffer_arg is not None
        or query.dim() != 2
        or key.dim() != 2
        or key.dtype != query.dtype
        or hasattr(self, "sin_cos_cache")
    ):
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    if offsets is not None:
        positions = positions + offsets
    cos, sin = rope_table(self, query.dtype).index_select(0, positions.flatten()).unbind(1)
    rows, half = query.shape[0], head // 2
    rotated = []
    for heads in (query.view(rows, -1, head), key.view(rows, -1, head)):
        rotated.append((heads * cos).add_(heads.roll(half, -1).mul_(sin)).view(rows, -1))
    return rotated[0], rotated[1]


def register(dispatch_key: str) -> None:
    """Make the platform's dispatch key select these. Dispatch goes by exact class; other subclasses keep their own."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import DynamicNTKScalingRotaryEmbedding, Llama3RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, dispatch_key)
    for rope in (
        RotaryEmbedding,
        LinearScalingRotaryEmbedding,
        DynamicNTKScalingRotaryEmbedding,
        Llama3RotaryEmbedding,
        YaRNScalingRotaryEmbedding,
    ):
        # These differ from the base in the table of angles only; one that rotates in its own way is left alone.
        if rope.forward_native is RotaryEmbedding.forward_native:
            BaseFusedOp.register_oot_forward(rope, rotary_embedding, dispatch_key)
