"""Sparse decode and chain verification by FlashInfer's paged attention (arXiv 2501.01005).

KV heads fold into the page axis: the pool is `[pages * H, 1, page_size, D]` (layout HND) with one KV head, and every
(sequence, KV head) a request with its own page list and the query heads of its group.

    plan      once per (sequences, query tokens), from shapes alone                 before a graph is captured
    measure   lengths -> indptr, last_page_len                                      device, once a step
    run       page table -> indices; attention                                      device, each layer

FlashInfer plans on the host: how to cut requests into parts that fill the device. It would have to know their lengths
for that, and those are on the device. So the plan is for page tables that are full, and the kernel, which reads the
true lengths, finds nothing to do in parts that lie past a request's end. That holds for the tensor-core kernel (`fa2`)
only, and there for cut requests with one query token, and for uncut ones with any number: where more query tokens are
cut, the kernel numbers partial results by the true count of parts and the merge by the planned one. The CUDA-core
decode kernel subtracts a part's start from a length that it does not reach.
"""

from __future__ import annotations

from typing import Any

import torch

from oasis_sglang.attention.ops import TableLayout
from oasis_sglang.kernels.attend import MAX_QUERIES
from oasis_sglang.kernels.attention_shape import AttentionShape
from oasis_sglang.kernels.launch import multiprocessors
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.kernels.page_lists import PageListBuffers, page_list_bytes

# What its kernels are made for: dimensions whose partial results the merge knows, queries of two bytes, and a group
# that is one tile of query rows.
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
MAX_GROUP = 16
# Requests are cut into parts until there are this many blocks for each multiprocessor.
BLOCKS_PER_MULTIPROCESSOR = 2
# Bytes of partial results: float32 of two tiles of 16 query rows per block that fills the device, 10 MiB for 160
# multiprocessors and D = 256.
FLOAT_WORK = 16 << 20


def unsupported(shape: AttentionShape) -> str | None:
    """Why FlashInfer does not serve this shape, or None."""
    kv_dtypes = (shape.dtype, torch.float8_e4m3fn)
    reasons = {
        f"head_dim={shape.head_dim}, it has {', '.join(map(str, HEAD_DIMS))}": shape.head_dim not in HEAD_DIMS,
        f"{shape.group} query heads per KV head, it takes up to {MAX_GROUP}": shape.group > MAX_GROUP,
        f"{shape.queries} query tokens, it is used for up to {MAX_QUERIES}": shape.queries > MAX_QUERIES,
        f"queries of {shape.dtype}, it takes bfloat16 and float16": shape.dtype not in DTYPES,
        f"K and V of {shape.kv_dtype}, it takes {shape.dtype} and float8_e4m3fn": shape.kv_dtype not in kv_dtypes,
    }
    found = [reason for reason, present in reasons.items() if present]
    return "; ".join(found) if found else None


class FlashInferOps(TritonOps):
    """`TritonOps` whose `attend` is FlashInfer's."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        """
        Args:
            shape: the largest step; all of its heads, dimensions, page size and dtypes are those of every step.

        Raises:
            ValueError: a shape that FlashInfer does not serve.
        """
        super().__init__()
        if (reason := unsupported(shape)) is not None:
            raise ValueError(f"FlashInfer does not serve {reason}; TritonOps does")
        self.shape, self._device = shape, device
        self.lists = PageListBuffers(
            batch=shape.batch,
            kv_heads=shape.kv_heads,
            columns=shape.columns,
            page_size=shape.page_size,
            device=device,
        )
        self._float_work = torch.zeros(FLOAT_WORK, dtype=torch.uint8, device=device)
        self._planned: dict[tuple[int, int], Any] = {}
        # The step that was measured last, and where the pool of its first layer is.
        self._layout: TableLayout | None = None
        self._first_pool = 0

    def plan(self, sequences: int, queries: int) -> Any:
        """FlashInfer's wrapper for steps of this many sequences and query tokens, made and planned at first use: its
        kernels are compiled then where they have never been, and host memory is copied.

        Raises:
            ValueError: more than there is memory for.
            RuntimeError: a graph that is being captured meets a shape for the first time.
        """
        wrapper = self._planned.get((sequences, queries))
        if wrapper is not None:
            return wrapper
        s = self.shape
        if not 1 <= queries <= s.queries:
            raise ValueError(f"{queries} query tokens per sequence; this was made for 1 to {s.queries}")
        lists = self.lists.part(sequences)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a graph of {sequences} sequences with {queries} query tokens is captured, which were never planned; "
                "run such a step before, or call FlashInferOps.plan"
            )
        from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._float_work,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=lists.indptr,
            paged_kv_indices_buffer=lists.indices,
            paged_kv_last_page_len_buffer=lists.last_page_len,
            backend="fa2",
        )
        requests = sequences * s.kv_heads
        # A wrapper is made with 8 MiB for its plan on either side, and there is one for each size of batch.
        int_work = torch.zeros(int_work_size(requests, queries, self._device), dtype=torch.uint8, device=self._device)
        wrapper.reset_workspace_buffer(self._float_work, int_work)
        wrapper.plan(
            torch.arange(requests + 1, dtype=torch.int32) * s.columns,
            lists.indices,
            torch.full((requests,), s.page_size, dtype=torch.int32),
            s.group,
            1,
            s.head_dim,
            s.page_size,
            q_data_type=s.dtype,
            kv_data_type=s.kv_dtype,
            sm_scale=1.0,  # `run` multiplies it by the step's
            disable_split_kv=queries > 1 or requests >= blocks(self._device),
            q_len_per_req=queries,
        )
        self._planned[sequences, queries] = wrapper
        self._layout = None  # planning wrote to the lists
        return wrapper

    def attend(
        self,
        q: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        table: torch.Tensor,
        layout: TableLayout,
        scale: float,
    ) -> torch.Tensor:
        """As in `AttentionOps`.

        Raises:
            ValueError: another shape than this was made for, or more than there is memory for.
        """
        s = self.shape
        n, t, query_heads, dim = q.shape
        heads, columns = table.shape[1:]
        if (query_heads, heads, dim, layout.page_size) != (s.query_heads, s.kv_heads, s.head_dim, s.page_size):
            raise ValueError(
                f"{query_heads} query heads, {heads} KV heads of {dim} and pages of {layout.page_size}; this was made "
                f"for {s.query_heads}, {s.kv_heads} of {s.head_dim} and {s.page_size}"
            )
        wrapper = self.plan(n, t)
        # A pass through the layers begins with a new step, or again with its first layer: what a graph is captured of
        # has run before with the same step, and must hold the measuring too.
        pool = k_rows.data_ptr()
        if layout is not self._layout or pool == self._first_pool:
            self.lists.measure(layout.tokens, columns)
            self._layout, self._first_pool = layout, pool
        self.lists.name_pages(table, k_rows.shape[0])
        pages = tuple(x.view(-1, 1, s.page_size, dim) for x in (k_rows, v_rows))
        queries = q.view(n, t, heads, s.group, dim).transpose(1, 2).reshape(-1, s.group, dim)
        out = wrapper.run(queries, pages, q_scale=scale)
        return out.view(n, heads, t, s.group, dim).transpose(1, 2).reshape(n, t, query_heads, dim)


def blocks(device: torch.device) -> int:
    """Blocks that fill the device, up to which FlashInfer cuts requests."""
    return BLOCKS_PER_MULTIPROCESSOR * multiprocessors(device)


def int_work_size(requests: int, queries: int, device: torch.device) -> int:
    """Bytes of a plan, at least: four arrays of a number for each block that is launched, two of one for each request,
    one of one for each query token. No more than two blocks are launched per request, or those that fill the device."""
    launched = max(2 * requests, blocks(device))
    return 16 * launched + 8 * requests + 4 * requests * queries + 1024


def memory_bytes(batch: int, queries: int, kv_heads: int, columns: int, device: torch.device) -> int:
    """Of `FlashInferOps` on the device, once every number of sequences was planned with one query token and with the
    most: page lists, partial results, and for each plan what it is and where its queries lie (`qo_indptr`).

    Args:
        batch, queries, kv_heads, columns: as in `AttentionShape`.
    """
    plans = sum(
        int_work_size(n * kv_heads, t, device) + 4 * (n * kv_heads + 1)
        for n in range(1, batch + 1)
        for t in {1, queries}
    )
    return page_list_bytes(batch * kv_heads, columns) + FLOAT_WORK + plans
