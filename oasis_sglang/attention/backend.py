"""The SGLang attention backend: hands each layer's queries, keys and values to the tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from oasis_sglang import coordinator, metrics
from oasis_sglang.attention.page_table import DecodePlan
from oasis_sglang.memory_pool.extend import ExtendSequence

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from oasis_sglang.memory_pool.device_tier import DevicePlan

BACKEND_NAME = "oasis"


class OasisAttnBackend(AttentionBackend):
    """Dense prefill and sparse decode over the tiered KV cache. Needs the pool that `--kv-backend oasis` builds."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        active = coordinator.active()
        pool = model_runner.token_to_kv_pool
        if active is None or getattr(pool, "tier", None) is not active.tier:
            raise RuntimeError(
                f"--attention-backend {BACKEND_NAME} serves only the pool of --kv-backend oasis, got "
                f"{type(pool).__name__}. Give --kv-backend oasis instead of --attention-backend {BACKEND_NAME}."
            )
        self.token_to_kv_pool = pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.device = model_runner.device
        self.coordinator = active
        self.tier = active.tier
        self.page_size = active.setup.geometry.page_size
        self.last_layer = active.setup.geometry.layers - 1
        self.first_layer = pool.start_layer
        self._plan: DecodePlan | DevicePlan | None = None
        self._sequences: list[ExtendSequence] = []
        require_plain_attention(model_runner.model)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._plan, self._sequences = None, []
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            return
        if mode.is_decode():
            self._plan = self._plan_decode(forward_batch, 1)
        elif mode.is_target_verify():
            self._plan = self._plan_decode(forward_batch, forward_batch.input_ids.numel() // forward_batch.batch_size)
        elif mode.is_extend() and not mode.is_mixed():
            self._sequences = self._plan_extend(forward_batch)
        else:
            raise NotImplementedError(f"the oasis backend does not run forward mode {mode.name}")

    def _plan_decode(self, batch: ForwardBatch, new: int) -> DecodePlan | DevicePlan:
        metrics.refresh()
        indices = batch.req_pool_indices
        rows = self.coordinator.rows(indices)
        seq_lens = batch.seq_lens.to(torch.int64)
        if new > 1:
            seq_lens = seq_lens + new  # a decode step's length counts its new token, a verification's no draft
        longest = -(-int(seq_lens.max()) // self.page_size) * self.page_size
        table = self.req_to_token_pool.req_to_token[indices, : longest : self.page_size] // self.page_size
        return self.tier.plan_decode(rows, seq_lens, batch.out_cache_loc.to(torch.int64), table.to(torch.int64), new)

    def _plan_extend(self, batch: ForwardBatch) -> list[ExtendSequence]:
        indices = batch.req_pool_indices
        rows = self.coordinator.rows(indices).tolist()
        lengths = batch.extend_seq_lens.tolist()
        prefixes = batch.extend_prefix_lens.tolist()
        prompts = self.coordinator.prompts(indices)
        slots = batch.out_cache_loc.to(torch.int64).split(lengths)
        table = self.req_to_token_pool.req_to_token
        sequences = []
        for i, row in enumerate(rows):
            total = prefixes[i] + lengths[i]
            pages = table[indices[i], : total : self.page_size].to(torch.int64) // self.page_size
            sequences.append(ExtendSequence(row, prefixes[i], lengths[i], slots[i], pages, prompts[i]))
        return sequences

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self._plan is not None:  # the verification of a chain
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        index = self._layer_index(layer, k, save_kv_cache)
        out = torch.empty_like(q)
        queries = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        result = out.view(-1, layer.tp_q_head_num, layer.head_dim)
        start = 0
        for sequence in self._sequences:
            at = slice(start, start + sequence.new)
            result[at] = self.tier.extend(index, sequence, queries[at], k[at], v[at], layer.scaling)
            start += sequence.new
        if index == self.last_layer:
            self.tier.finish_extend(self._sequences)
        return out

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        index = self._layer_index(layer, k, save_kv_cache)
        if self._plan is None:
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.head_dim)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out = self.tier.decode(self._plan, index, queries, k, v, layer.scaling)
        if index == self.last_layer:
            if self._plan.new == 1:
                self.tier.finish_decode(self._plan)
            else:
                self.coordinator.verifying(self._plan)
        return out.reshape(q.shape[0], -1)

    def _layer_index(self, layer: RadixAttention, k: torch.Tensor | None, save_kv_cache: bool) -> int:
        if k is None or not save_kv_cache:
            raise NotImplementedError(f"layer {layer.layer_id} attends without writing its own K and V")
        return layer.layer_id - self.first_layer

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


def require_plain_attention(model: torch.nn.Module) -> None:
    """Raise for attention layers that the ops do not compute: found in the built model, where configs cannot lie.

    Raises:
        ValueError: naming the layer, what it needs and what works instead.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, RadixAttention):
            continue
        window = layer.sliding_window_size
        found = {
            "a sliding window": window is not None and window > -1,
            "logit soft-capping": bool(layer.logit_cap),
            "cross attention": layer.is_cross_attention,
            "bidirectional attention": layer.attn_type != AttentionType.DECODER,
            "different head dims for K and V": layer.qk_head_dim != layer.v_head_dim,
        }
        reasons = [reason for reason, present in found.items() if present]
        if reasons:
            raise ValueError(
                f"--kv-backend oasis does not support {', '.join(reasons)} (layer {name}). It serves decoder models "
                "with plain multi-head or grouped-query attention; for this model start without --kv-backend."
            )
