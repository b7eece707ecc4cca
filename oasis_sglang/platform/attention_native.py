"""SGLang's `torch_native` attention with the per-step work taken out of the per-layer loop.

The stock decode reads every request's length and row of slots from tensors again in every layer: a dozen small calls
per request and layer, more than the attention itself on short contexts. Here both are read once per forward pass. The
attention call and its inputs are unchanged, so the result is bit-equal.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

# Longest context, in tokens, that one thread serves. Below it, handing half of one request's attention to a second
# thread takes longer than doing it.
ONE_THREAD_TOKENS = 128


class CpuTorchNativeAttnBackend(TorchNativeAttnBackend):
    def __init__(self, model_runner: Any):
        super().__init__(model_runner)
        # (req_pool_indices, seq_lens, one tensor of KV slots per request) of the forward pass in progress. The two
        # tensors identify the pass; holding them keeps their identity from being re-used.
        self._slots: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]] | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._slots = None

    def _request_slots(
        self, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
    ) -> list[torch.Tensor]:
        memo = self._slots
        if memo is None or memo[0] is not req_pool_indices or memo[1] is not seq_lens:
            slots = [
                req_to_token[request, :length]
                for request, length in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
            ]
            memo = self._slots = (req_pool_indices, seq_lens, slots)
        return memo[2]

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """`query`, `output`: `[requests, heads, head_size]`; `k_cache`, `v_cache`: `[slots, kv_heads, head_size]`."""
        if encoder_lens is not None or sliding_window_size is not None or k_cache.dtype != query.dtype:
            return super()._run_sdpa_forward_decode(
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                encoder_lens,
                scaling=scaling,
                enable_gqa=enable_gqa,
                causal=causal,
                is_cross_attn=is_cross_attn,
                sliding_window_size=sliding_window_size,
            )
        # [requests, 1, heads, 1, head_size]: one request is then a batch of one.
        queries = query[:, None, :, None, :].unbind(0)
        all_slots = self._request_slots(req_to_token, req_pool_indices, seq_lens)
        threads = torch.get_num_threads()
        short = threads > 1 and all(slots.shape[0] <= ONE_THREAD_TOKENS for slots in all_slots)
        rows = []
        if short:
            torch.set_num_threads(1)
        try:
            for one, slots in zip(queries, all_slots, strict=True):
                rows.append(
                    scaled_dot_product_attention(
                        one,
                        k_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0),
                        v_cache.index_select(0, slots).transpose(0, 1).unsqueeze(0),
                        enable_gqa=enable_gqa,
                        scale=scaling,
                        is_causal=causal,
                    )
                )
        finally:
            if short:
                torch.set_num_threads(threads)
        output.copy_(torch.cat(rows).squeeze(2))
        return output


def register() -> None:
    """Take the place of SGLang's class under the name users know, `torch_native`."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("torch_native")(CpuTorchNativeAttnBackend)
