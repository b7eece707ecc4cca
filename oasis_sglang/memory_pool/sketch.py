"""Key sketches: every key in 4 bits a dimension, from which the pages a query needs are told nearly as well as from the
keys themselves.

Rotary embeddings turn the first pairs of dimensions with every token or two and the last hardly at all. What a query
looks for far back is in the slow ones, so a sketch of these, half of all, chooses as well as one of all.

A row holds one (page, KV head): blocks of 16 tokens, each of `d / 8` groups of 64 bytes, d being the dimensions kept,
and then 16 scales in float16. Byte `4 t + j` of group g is dimension `4 g + j` of token t in its low half, and
dimension `d / 2 + 4 g + j` in its high half, so that one vector instruction takes four dimensions of 16 tokens. A code
c stands for `(c - 8) * scale`, the scale being a seventh of the key's largest component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from oasis_sglang.memory_pool.host_pool import RESERVED_PAGES, HostPool

if TYPE_CHECKING:
    from oasis_sglang.attention.ops import AttentionOps

LANES = 16  # tokens per block
LARGEST = 7  # code range: -7 to 7, stored as 1 to 15
SCALE_BYTES = 2 * LANES
# Models that rotate whole heads, dimension i with dimension i + half ("neox style"): their sketches need only the half
# that turns slowly. For any other model a sketch keeps every dimension, in twice the bytes.
WHOLE_ROTARY = {
    *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM"),
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "OlmoForCausalLM", "Olmo2ForCausalLM", "GraniteForCausalLM"),
}


class KeySketches:
    """`table` `[layers, rows, bytes]` uint8 for every host page and KV head; a sidecar of the host pool."""

    def __init__(self, host: HostPool, device: torch.device | str = "cpu") -> None:
        g = host.geometry
        kept = len(g.sketch)
        if not kept or kept % 8:
            raise ValueError(
                f"summary=sketch keeps a multiple of 8 dimensions, not {kept} of this model's {g.head_dim}; use "
                "summary=minmax"
            )
        self.geometry = g
        self.dims = torch.tensor(g.sketch, device=device)
        self.blocks = -(-g.page_size // LANES)
        self.code_bytes = LANES * kept // 2
        rows = (host.pages + RESERVED_PAGES) * g.kv_heads
        width = self.blocks * (self.code_bytes + SCALE_BYTES)
        self.table = torch.zeros(g.layers, rows, width, dtype=torch.uint8, device=device)
        self._heads = torch.arange(g.kv_heads, device=device)
        block = self.table.view(g.layers, rows, self.blocks, -1)
        self._codes = block[..., : self.code_bytes].unflatten(-1, (kept // 8, LANES, 4))
        self._scales = block[..., self.code_bytes :].view(torch.float16)

    @property
    def nbytes(self) -> int:
        return self.table.numel()

    def row_ids(self, pages: torch.Tensor) -> torch.Tensor:
        """Rows of `table[layer]` for pages `[...]` and every KV head: `[..., kv_heads]`."""
        return pages.unsqueeze(-1) * self.geometry.kv_heads + self._heads

    def score(
        self, ops: AttentionOps, layer: int, q: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`AttentionOps.score_sketches` on one layer's table."""
        return ops.score_sketches(q[..., self.dims], self.table[layer], rows, pages, scale, self.geometry.page_size)

    def append_step(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Sketch one new token per sequence, all layers at once.

        Args:
            slots: `[n]` int64, distinct.
            keys: `[layers, n, kv_heads, head_dim]`.
        """
        page = self.geometry.page_size
        codes, scales = encode(keys[..., self.dims])
        groups = codes.unflatten(-1, (2, -1, 4))  # [layers, n, H, halves, groups, 4]
        packed = groups[..., 0, :, :] | groups[..., 1, :, :] << 4
        rows = self.row_ids(slots // page)  # [n, H]
        lane = (slots % page).view(-1, 1)
        block, lane = lane // LANES, lane % LANES
        self._codes[:, rows, block, :, lane] = packed.permute(1, 2, 0, 3, 4)
        self._scales[:, rows, block, lane] = scales

    def rebuild(self, layer: int, pages: torch.Tensor, keys: torch.Tensor, last_tokens: int) -> None:
        """Sketch pages of one sequence anew.

        Args:
            pages: `[n]` in sequence order.
            keys: `[n, kv_heads, page_size, head_dim]`; all pages full but the last, which holds `last_tokens`.
        """
        g = self.geometry
        if last_tokens < g.page_size:
            keys = keys.clone()
            keys[-1, :, last_tokens:] = 0
        codes, scales = encode(keys[..., self.dims])
        missing = self.blocks * LANES - g.page_size
        if missing:
            codes = torch.nn.functional.pad(codes, (0, 0, 0, missing), value=8)
            scales = torch.nn.functional.pad(scales, (0, missing))
        groups = codes.view(*codes.shape[:2], self.blocks, LANES, 2, self.dims.numel() // 8, 4)
        packed = (groups[..., 0, :, :] | groups[..., 1, :, :] << 4).transpose(3, 4)  # [n, H, blocks, groups, 16, 4]
        rows = self.row_ids(pages)
        self._codes[layer, rows] = packed
        self._scales[layer, rows] = scales.view(*scales.shape[:2], self.blocks, LANES)


def dims_of(config: Any, text_config: Any, head_dim: int) -> tuple[int, ...]:
    """Dimensions of a key that sketches keep.

    Args:
        config, text_config: of transformers; the latter is `config` itself for a model of text alone.
    """
    architectures = set(getattr(config, "architectures", None) or ())
    partial = getattr(text_config, "partial_rotary_factor", None)
    if architectures <= WHOLE_ROTARY and architectures and partial in (None, 1, 1.0) and head_dim % 16 == 0:
        return slow_half(head_dim)
    return every_dim(head_dim)


def every_dim(head_dim: int) -> tuple[int, ...]:
    return tuple(range(head_dim))


def slow_half(head_dim: int) -> tuple[int, ...]:
    """The dimensions whose rotary frequencies are the lower half, where dimension i turns with `i + head_dim / 2`."""
    quarter = head_dim // 4
    return (*range(quarter, 2 * quarter), *range(3 * quarter, 4 * quarter))


def encode(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[..., d]` uint8 and scales `[...]` float16 of the kept dimensions `[..., d]` of keys."""
    wide = keys.float()
    scales = (wide.abs().amax(-1) / LARGEST).to(torch.float16)
    step = scales.float().unsqueeze(-1)
    codes = torch.where(step > 0, wide / step, 0).round().clamp(-LARGEST, LARGEST) + 8
    return codes.to(torch.uint8), scales


def decode(rows: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes less 8 `[..., blocks * 16, kept]` and scales `[..., blocks * 16]`, float32, of rows `[..., bytes]`."""
    code_bytes = LANES * kept // 2
    block = rows.unflatten(-1, (-1, code_bytes + SCALE_BYTES))
    packed = block[..., :code_bytes].unflatten(-1, (kept // 8, LANES, 4)).transpose(-3, -2)  # [..., 16, groups, 4]
    codes = torch.stack((packed & 15, packed >> 4), dim=-3).flatten(-3)  # [..., blocks, 16, kept]
    scales = block[..., code_bytes:].contiguous().view(torch.float16)
    return codes.flatten(-3, -2).float() - 8, scales.flatten(-2).float()
