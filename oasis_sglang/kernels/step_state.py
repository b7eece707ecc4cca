"""The memory of decode steps on a device: allocated once for the largest batch, at the same addresses in every step."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels import attend, score
from oasis_sglang.kernels.attention_shape import AttentionShape
from oasis_sglang.kernels.launch import pow2
from oasis_sglang.kernels.select import Selected
from oasis_sglang.memory_pool.sizing import PoolGeometry


class StepShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory of steps is sized by."""

    geometry: PoolGeometry
    query_heads: int
    batch: int  # most sequences in a step
    chain: int  # most new tokens per sequence
    rows: int  # working sets
    sequence_pages: int  # pages of the longest sequence
    budget_pages: int
    cap: int  # misses admitted per KV head, at most
    table_columns: int
    ahead: bool  # pages are chosen for the next step, not for this one
    late: bool  # by queries that are known when the step is over

    @classmethod
    def of(
        cls,
        config: OasisConfig,
        geometry: PoolGeometry,
        *,
        query_heads: int,
        batch: int,
        chain: int,
        rows: int,
        sequence_pages: int,
    ) -> StepShape:
        ahead = config.miss_policy == "skip"
        return cls(
            geometry=geometry,
            query_heads=query_heads,
            batch=batch,
            chain=chain,
            rows=rows,
            sequence_pages=sequence_pages,
            budget_pages=config.budget_pages,
            cap=min(config.fetch_cap_pages, config.budget_pages),
            # Either kind of sequence fits; a chain may reach one page further.
            table_columns=max(config.budget_pages + 1, config.dense_set_pages) + (chain > 1),
            ahead=ahead,
            late=ahead and config.predictor == "previous" and chain > 1,
        )

    def score_work(self, device: torch.device) -> int:
        """float32 that scoring needs for any batch: the fewer sequences, the more parts each is cut into."""
        heads = self.geometry.kv_heads
        return max(
            score.workspace_size(n, self.chain, self.query_heads, heads, self.sequence_pages, device)
            for n in range(1, self.batch + 1)
        )

    def attend_work(self, device: torch.device) -> int:
        """float32 that attention needs for any batch."""
        g, columns = self.geometry, self.table_columns
        return max(
            attend.workspace_size(n, self.chain, self.query_heads, g.kv_heads, g.head_dim, columns, g.page_size, device)
            for n in range(1, self.batch + 1)
        )

    def attention(self, dtype: torch.dtype) -> AttentionShape:
        """What the largest step asks of attention: budget and tail of a sparse sequence, and what its chain adds.

        Args:
            dtype: of queries, K and V.
        """
        g = self.geometry
        return AttentionShape(
            query_heads=self.query_heads,
            kv_heads=g.kv_heads,
            head_dim=g.head_dim,
            page_size=g.page_size,
            columns=self.table_columns,
            tokens=(self.budget_pages + 1) * g.page_size + self.chain - 1,
            batch=self.batch,
            queries=self.chain,
            dtype=dtype,
            kv_dtype=dtype,
        )


class StepInputs(NamedTuple):
    """What differs from step to step, n being the sequences of a step with t new tokens each, padded ones included.

    The side stream reads it while the next step may be under way, so there are two of it that take turns.
    """

    rows: torch.Tensor  # [n] int64 working-set rows, -1 for a padded sequence
    seq_lens: torch.Tensor  # [n] int64 new tokens included, 0 for a padded sequence
    slots: torch.Tensor  # [n * t] int64 slots of the new tokens in the host pool
    accepted: torch.Tensor  # [n] int64 new tokens that are kept
    host_pages: torch.Tensor  # [n, sequence_pages] int64 host pages in order; anything past a sequence's end
    step: torch.Tensor  # [1] int32
    # From here on it follows from the above, and the device computes it.
    pages: torch.Tensor  # [n, t] int64 page of each new token
    offsets: torch.Tensor  # [n, t] int64 its lane
    tail: torch.Tensor  # [n] int64 page of the first new token
    tokens: torch.Tensor  # [n] int64 lanes of the page table that hold tokens
    sparse_rows: torch.Tensor  # [n] int64 `rows` of sparse sequences, else -1
    asking_rows: torch.Tensor  # [n] int64 `rows` of sequences that choose pages in this step, else -1
    candidates: torch.Tensor  # [n] int64 pages that they choose from, else 0

    @classmethod
    def allocate(cls, shape: StepShape, device: torch.device) -> StepInputs:
        n, t = shape.batch, shape.chain

        def whole(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        step = torch.zeros(1, dtype=torch.int32, device=device)
        host_pages = whole(n, shape.sequence_pages)
        return cls(
            whole(n), whole(n), whole(n * t), whole(n), host_pages, step, whole(n * t), whole(n * t),
            whole(n), whole(n), whole(n), whole(n), whole(n),
        )  # fmt: skip

    def part(self, n: int, t: int) -> StepInputs:
        """The same for a step of n sequences with t tokens each."""
        tokens = [x[: n * t] for x in (self.slots, self.pages, self.offsets)]
        return StepInputs(
            self.rows[:n], self.seq_lens[:n], tokens[0], self.accepted[:n], self.host_pages[:n], self.step,
            tokens[1].view(n, t), tokens[2].view(n, t), self.tail[:n], self.tokens[:n], self.sparse_rows[:n],
            self.asking_rows[:n], self.candidates[:n],
        )  # fmt: skip


class StepState:
    """What a step computes with, and what it leaves for the next one."""

    def __init__(self, shape: StepShape, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            dtype: of K and V.
        """
        self.shape = shape
        g, n, t, k = shape.geometry, shape.batch, shape.chain, shape.budget_pages
        heads, layers = g.kv_heads, g.layers
        self.inputs = (StepInputs.allocate(shape, device), StepInputs.allocate(shape, device))
        self.order = torch.arange(max(n, t), device=device)
        self.token_rows = torch.zeros(n * t, heads, dtype=torch.int64, device=device)
        self.table = torch.zeros(n, heads, shape.table_columns, dtype=torch.int64, device=device)
        # A step's tokens may still be on their way to the host pool when the next step writes its own.
        turns, tokens = 1 + shape.ahead, layers * n * t * heads * g.head_dim
        self.new_kv = torch.zeros(turns, 2, tokens, dtype=dtype, device=device)
        self.scores = torch.zeros(n * heads * shape.sequence_pages, dtype=torch.float32, device=device)
        self.score_work = torch.zeros(shape.score_work(device), dtype=torch.float32, device=device)
        self.select_work = torch.zeros(n * heads * pow2(k), dtype=torch.int64, device=device)
        self.attended = torch.zeros(n, heads, k, dtype=torch.int64, device=device)
        self.misses = torch.zeros(5, n, heads, shape.cap, dtype=torch.int64, device=device)
        #: Misses admitted and misses of the last selection, per layer.
        self.counts = torch.zeros(layers, 2, n, heads, dtype=torch.int32, device=device)
        #: Since start: sequences that chose pages, misses admitted and misses of all layers and KV heads, and accepted
        #: tokens of chains.
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)
        #: Lines of page tables that named pages which were not on the device.
        self.faults = torch.zeros(1, dtype=torch.int32, device=device)
        if not shape.ahead:
            return
        # Selection writes a page table that nobody reads; the next step's is made when that knows its sequences.
        self.unread_table = torch.zeros(n, heads, k + 1, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(layers, shape.rows, heads, k, dtype=torch.int32, device=device)
        self.chosen_tail = torch.zeros(shape.rows + 1, dtype=torch.int64, device=device)  # the last is no one's
        if shape.late:
            size = layers * n * t * shape.query_heads * g.head_dim
            self.queries = torch.zeros(size, dtype=dtype, device=device)

    def new_tokens(self, turn: int, n: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a step's new tokens, `[layers, n * t, H, D]`."""
        g = self.shape.geometry
        size = g.layers * n * t * g.kv_heads * g.head_dim
        k, v = self.new_kv[turn % self.new_kv.shape[0], :, :size].view(2, g.layers, n * t, g.kv_heads, g.head_dim)
        return k, v

    def step_queries(self, n: int, t: int) -> torch.Tensor:
        """Queries of a step, `[layers, n, t, Hq, D]`."""
        g, heads = self.shape.geometry, self.shape.query_heads
        return self.queries[: g.layers * n * t * heads * g.head_dim].view(g.layers, n, t, heads, g.head_dim)

    def step_scores(self, n: int) -> torch.Tensor:
        """Scores `[n, H, sequence_pages]`."""
        heads, columns = self.shape.geometry.kv_heads, self.shape.sequence_pages
        return self.scores[: n * heads * columns].view(n, heads, columns)

    def step_selected(self, layer: int, n: int) -> Selected:
        host, row, slot, page, evicted = self.misses[:, :n].unbind()
        count, missed = self.counts[layer, :, :n].unbind()
        return Selected(self.attended[:n], host, row, slot, page, evicted, count, missed)
