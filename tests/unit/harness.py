"""A tier without SGLang: sequences with slots from a page list, random queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oasis_sglang.attention.native_ops import create_cpu_ops
from oasis_sglang.attention.ops import AttentionOps
from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.extend import ExtendSequence
from oasis_sglang.memory_pool.sizing import PoolGeometry
from oasis_sglang.memory_pool.sketch import every_dim, slow_half
from oasis_sglang.memory_pool.tier import KVTier
from oasis_sglang.memory_pool.working_set import Attempt


class Sequence:
    def __init__(self, attempt: Attempt, pages: list[int]) -> None:
        self.attempt = attempt
        self.pages = pages
        self.tokens = 0


class Harness:
    """Drives a `KVTier` the way a scheduler would. Pools start out poisoned with NaN, the reserved page aside."""

    def __init__(
        self,
        config: OasisConfig,
        *,
        layers: int = 2,
        kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 8,
        host_pages: int = 64,
        device_pages: int = 48,
        rows: int = 4,
        context_len: int = 512,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        chain: int = 1,
        probe: bool = False,
        spare_pages: int = 0,
        kind: Callable[..., KVTier] = KVTier,
        ops: AttentionOps | None = None,
    ) -> None:
        self.config = config.validate()
        page = config.page_size
        self.geometry = PoolGeometry(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            itemsize=dtype.itemsize,
            page_size=page,
            sketch=(slow_half(head_dim) if head_dim % 16 == 0 else every_dim(head_dim))
            if config.summary == "sketch"
            else (),
        )
        self.dtype = dtype
        self.query_heads = kv_heads * group
        self.scale = head_dim**-0.5
        # [layers, K and V, pages, ...] in one piece, as workers map it
        pool = torch.full((layers, 2, device_pages + spare_pages + 1, kv_heads, page, head_dim), torch.nan, dtype=dtype)
        self.pool = pool
        self.k_pages, self.v_pages = list(pool[:, 0].unbind()), list(pool[:, 1].unbind())
        for x in (*self.k_pages, *self.v_pages):
            x[0] = 0
        self.tier = kind(
            config,
            self.geometry,
            dtype,
            host_pages=host_pages,
            k_pages=self.k_pages,
            v_pages=self.v_pages,
            rows=rows,
            context_len=context_len,
            ops=create_cpu_ops() if ops is None else ops,
            chain=chain,
            probe=probe,
            spare_pages=spare_pages,
        )
        self.tier.host.kv[1:].fill_(torch.nan)
        table = self.tier.summaries.table[:, kv_heads:]
        table.fill_(255 if table.dtype == torch.uint8 else torch.nan)  # a sketch's scales are NaN then
        self.free = list(range(host_pages, 0, -1))
        self.random = torch.Generator().manual_seed(seed)

    def noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def admit(self, final_tokens: int) -> Sequence | None:
        attempt = self.tier.reserve(final_tokens)
        return None if attempt is None else Sequence(attempt, [])

    def _grow(self, sequence: Sequence, tokens: int) -> torch.Tensor:
        page = self.config.page_size
        while len(sequence.pages) * page < sequence.tokens + tokens:
            sequence.pages.append(self.free.pop())
        positions = range(sequence.tokens, sequence.tokens + tokens)
        return torch.tensor([sequence.pages[t // page] * page + t % page for t in positions])

    def extend(
        self, sequence: Sequence, tokens: int, prompt: int | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Add prompt tokens, those past `prompt` as after a retraction; returns queries and outputs per layer."""
        slots = self._grow(sequence, tokens)
        pages = torch.tensor(sequence.pages)
        part = ExtendSequence(sequence.attempt.row, sequence.tokens, tokens, slots, pages, prompt)
        queries, outputs = [], []
        for layer in range(self.geometry.layers):
            q = self.noise(tokens, self.query_heads, self.geometry.head_dim)
            k = self.noise(tokens, self.geometry.kv_heads, self.geometry.head_dim)
            v = self.noise(tokens, self.geometry.kv_heads, self.geometry.head_dim)
            queries.append(q)
            outputs.append(self.tier.extend(layer, part, q, k, v, self.scale))
        self.tier.finish_extend([part])
        sequence.tokens += tokens
        return queries, outputs

    def decode(self, sequences: list[Sequence]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """One step of a batch; returns queries and outputs per layer, `[n, Hq, D]`."""
        slots = torch.cat([self._grow(s, 1) for s in sequences])
        for s in sequences:
            s.tokens += 1
        longest = max(len(s.pages) for s in sequences)
        table = torch.tensor([s.pages + [0] * (longest - len(s.pages)) for s in sequences])
        rows = torch.tensor([s.attempt.row for s in sequences])
        plan = self.tier.plan_decode(rows, torch.tensor([s.tokens for s in sequences]), slots, table)
        queries, outputs = [], []
        n = len(sequences)
        for layer in range(self.geometry.layers):
            q = self.noise(n, self.query_heads, self.geometry.head_dim)
            k = self.noise(n, self.geometry.kv_heads, self.geometry.head_dim)
            v = self.noise(n, self.geometry.kv_heads, self.geometry.head_dim)
            queries.append(q)
            outputs.append(self.tier.decode(plan, layer, q, k, v, self.scale))
        self.tier.finish_decode(plan)
        return queries, outputs

    def verify(self, sequences: list[Sequence], accepted: list[int]) -> list[tuple[torch.Tensor, ...]]:
        """One step over a chain of drafts of which `accepted` are kept; per layer q, k, v and outputs `[n, t, ...]`."""
        n, t = len(sequences), self.tier.chain
        slots = torch.cat([self._grow(s, t) for s in sequences])
        longest = max(len(s.pages) for s in sequences)
        table = torch.tensor([s.pages + [0] * (longest - len(s.pages)) for s in sequences])
        rows = torch.tensor([s.attempt.row for s in sequences])
        plan = self.tier.plan_decode(rows, torch.tensor([s.tokens + t for s in sequences]), slots, table, t)
        seen = []
        for layer in range(self.geometry.layers):
            q = self.noise(n * t, self.query_heads, self.geometry.head_dim)
            k = self.noise(n * t, self.geometry.kv_heads, self.geometry.head_dim)
            v = self.noise(n * t, self.geometry.kv_heads, self.geometry.head_dim)
            out = self.tier.decode(plan, layer, q, k, v, self.scale)
            seen.append(tuple(x.view(n, t, *x.shape[1:]) for x in (q, k, v, out)))
        self.tier.finish_decode(plan, torch.tensor(accepted))
        for s, kept in zip(sequences, accepted, strict=True):
            s.tokens += kept
        return seen

    def drop(self, sequence: Sequence) -> None:
        """The request leaves: its device pages and slots are free for others."""
        self.tier.release(sequence.attempt)
        pages = torch.tensor(sequence.pages, dtype=torch.int64)
        self.tier.invalidate(pages)
        self.free.extend(sequence.pages)
