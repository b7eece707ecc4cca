"""`AttentionOps` of a GPU host."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from oasis_sglang.attention.ops import TableLayout
from oasis_sglang.kernels.attend import attend
from oasis_sglang.kernels.backup import write_tokens
from oasis_sglang.kernels.score import score_minmax, score_sketches


class TritonOps:
    """The ops by Triton kernels; prefill, which has whole K and V at hand, by torch's attention."""

    def __init__(self, work: torch.Tensor | None = None) -> None:
        """
        Args:
            work: float32 for attention to work in, as many as the largest batch needs (`StepShape.attend_work`); None
                for fresh ones in each call.
        """
        self._work = work
        self._every_dim: dict[tuple[int, torch.device], torch.Tensor] = {}

    def write_tokens(
        self,
        k_lanes: torch.Tensor,
        v_lanes: torch.Tensor,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        write_tokens(k_lanes, v_lanes, rows, offsets, k, v)

    def attend(
        self,
        q: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        table: torch.Tensor,
        layout: TableLayout,
        scale: float,
    ) -> torch.Tensor:
        return attend(q, k_rows, v_rows, table, layout.tokens, layout.page_size, scale, work=self._work)

    def score_pages(
        self, q: torch.Tensor, summaries: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return score_minmax(q.unsqueeze(1), summaries, rows, pages, rows.shape[1], scale)

    def score_sketches(
        self,
        q: torch.Tensor,
        sketches: torch.Tensor,
        rows: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
        page_size: int,
    ) -> torch.Tensor:
        dims = self._every_dim.setdefault((q.shape[-1], q.device), torch.arange(q.shape[-1], device=q.device))
        return score_sketches(q.unsqueeze(1), dims, sketches, rows, pages, rows.shape[1], page_size, scale)

    def prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int, scale: float) -> torch.Tensor:
        queries = q.transpose(0, 1).unsqueeze(0)
        keys, values = k.unsqueeze(0), v.unsqueeze(0)
        if prefix == 0:
            out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        else:
            # New token j sees the prefix and the new tokens up to itself. A mask would keep torch from its flash
            # kernel, and what is left then writes all scores to memory (32 heads, 8,192 tokens after 32,768: 43 GB).
            mask = causal_lower_right(q.shape[0], prefix + q.shape[0])
            out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
