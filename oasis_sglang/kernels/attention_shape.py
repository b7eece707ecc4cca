"""What a decode step asks of attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionShape(NamedTuple):
    """The largest step that attention has to serve, and what it attends to."""

    query_heads: int  # Hq
    kv_heads: int  # H
    head_dim: int  # D
    page_size: int  # P
    columns: int  # N of the widest page table
    tokens: int  # lanes of it that hold tokens in a sparse step
    batch: int  # most sequences, padding included
    queries: int  # most query tokens of a sequence
    dtype: torch.dtype  # of the queries
    kv_dtype: torch.dtype  # of K and V in the pool

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.query_heads // self.kv_heads
