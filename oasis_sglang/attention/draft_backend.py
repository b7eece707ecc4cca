"""Attention of the draft model: dense, over its own pool on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from oasis_sglang import coordinator
from oasis_sglang.attention.draft_window import WINDOW, pages_left_out, widest_table
from oasis_sglang.attention.ops import TableLayout
from oasis_sglang.memory_pool.draft_pool import OasisDraftPool

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class DraftAttnBackend(AttentionBackend):
    """Prompt chunks, the chain of a verified step (`DRAFT_EXTEND_V2`), or one draft token per sequence.

    A head (EAGLE) attends to a sequence's first page and its newest `WINDOW` tokens, a language model of its own
    (STANDALONE) to everything. On a device with memory of its own the host does not know how long sequences are: tables
    are as wide as they can be, and a graph can hold all of a step. A graph's padding is told by a length of 0.

    Args:
        step: position in the chain of the draft token that this backend decodes: `step` drafts were written before it.
    """

    def __init__(self, model_runner: ModelRunner, step: int = 0) -> None:
        super().__init__()
        active = coordinator.active()
        pool = model_runner.token_to_kv_pool
        if active is None or not isinstance(pool, OasisDraftPool):
            raise RuntimeError(f"the draft model's KV pool is a {type(pool).__name__}, expected an OasisDraftPool")
        self.token_to_kv_pool = pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.device = model_runner.device
        self.ops = active.tier.ops
        self.page_size = pool.page_size
        self.heads = pool.head_num
        self.step = step
        self.window = None if model_runner.spec_algorithm.is_standalone() else WINDOW
        self.on_host = active.setup.load is None
        self._table = torch.empty(0)
        self._layout: TableLayout | None = None
        self._sequences: list[tuple[int, int, torch.Tensor]] = []  # (prefix, new, pages) of prompt chunks

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self._layout, self._sequences = None, []
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            return
        if mode.is_decode() or mode.is_draft_extend_v2():
            self.init_forward_metadata_in_graph(forward_batch)
        elif mode.is_extend():
            self._sequences = self._plan_prompts(forward_batch)
        else:
            raise NotImplementedError(f"the draft attention backend does not run forward mode {mode.name}")

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Plan a draft token per sequence, or the chain of a verified step; on a device without a look at the data."""
        queries, lengths = 1, forward_batch.seq_lens.to(torch.int64)
        if forward_batch.forward_mode.is_decode():
            lengths = (lengths + self.step + 1).masked_fill(lengths == 0, 0)
        else:
            queries = forward_batch.input_ids.numel() // forward_batch.batch_size
        self.plan(forward_batch.req_pool_indices, lengths, queries)

    def _plan_prompts(self, forward_batch: ForwardBatch) -> list[tuple[int, int, torch.Tensor]]:
        page, table = self.page_size, self.req_to_token_pool.req_to_token
        rows, sequences = forward_batch.req_pool_indices, []
        lengths = zip(forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, strict=True)
        for i, (prefix, new) in enumerate(lengths):
            pages = table[rows[i : i + 1], : prefix + new : page][0].to(torch.int64) // page
            left_out = 0 if self.window is None else pages_left_out(prefix, self.window, page)
            pages = torch.cat((pages[:1], pages[1 + left_out :]))
            sequences.append((prefix - left_out * page, new, pages))
        return sequences

    def plan(self, rows: torch.Tensor, tokens: torch.Tensor, queries: int) -> None:
        """The page table of a batch: `tokens` `[n]` each, the `queries` last of them new; 0 for padding."""
        page, table, device = self.page_size, self.req_to_token_pool.req_to_token, tokens.device
        left_out = torch.zeros_like(tokens)
        if self.window is not None:
            left_out = pages_left_out(tokens - queries, self.window, page)
        tokens = tokens - left_out * page
        widest = int(tokens.max()) if self.on_host else widest_table(self.window, table.shape[1], queries, page)
        columns = -(-widest // page)
        column = torch.arange(columns, device=device)
        at = (column + left_out.view(-1, 1)).masked_fill(column == 0, 0) * page
        inside = column * page < tokens.view(-1, 1)
        slots = table[rows.view(-1, 1), at.masked_fill(~inside, 0)].to(torch.int64)
        pages = (slots // page).masked_fill(~inside, 0)
        heads = torch.arange(self.heads, device=device)
        self._table = (pages.unsqueeze(1) * self.heads + heads.view(1, -1, 1)).masked_fill(pages.unsqueeze(1) == 0, 0)
        self._layout = TableLayout(tokens, columns, page, queries, self.token_to_kv_pool.dtype)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.forward_extend(*args, **kwargs)

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
        pool, index = self.token_to_kv_pool, layer.layer_id - self.token_to_kv_pool.start_layer
        queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        keys, values = (x.view(-1, self.heads, layer.head_dim) for x in (k, v))
        slots = forward_batch.out_cache_loc.to(torch.int64)
        pool.write(index, slots, keys, values)
        if self._layout is not None:
            t = self._layout.queries
            batch = queries.view(-1, t, *queries.shape[1:])
            out = self.ops.attend(batch, *pool.rows(index), self._table, self._layout, layer.scaling)
            return out.reshape(q.shape[0], -1)
        out = torch.empty_like(queries)
        start = 0
        for prefix, new, pages in self._sequences:
            at = slice(start, start + new)
            old = pool.read(index, pages, prefix + new)
            out[at] = self.ops.prefill(queries[at], old[0], old[1], prefix, layer.scaling)
            start += new
        return out.reshape(q.shape[0], -1)

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0


class MultiStepDraftBackend:
    """One backend per draft token after the first, as SGLang's EAGLE worker wants them."""

    def __init__(self, model_runner: ModelRunner, topk: int, steps: int) -> None:
        if topk != 1:
            raise ValueError(f"--speculative-eagle-topk={topk} does not work with --kv-backend oasis; use 1")
        self.attn_backends = [DraftAttnBackend(model_runner, step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    # -- graphs -------------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: what a graph needs is allocated as it is captured."""

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Nothing: the graph plans for itself."""

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)
