"""What a GPU host keeps on its device beside the weights, in bytes: every tensor that `DeviceTier` allocates, and what
drafts need.

per device page      K and V, and what says where it is
per host page        key summaries, the mark of what is written, the draft model's KV
whatever the pools   maps of working sets, buffers and workspaces of steps, one layer of the longest sequence, and the
                     tokens of sequences where drafts are copied from them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.sizing import DeviceMemory, PoolGeometry, sequence_pages

if TYPE_CHECKING:
    import torch

    from oasis_sglang.kernels.step_state import StepShape

INT32, INT64, FLOAT32 = 4, 8, 4


class DeviceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a device serves, the pools' sizes aside.

    Attributes:
        rows: most requests at once. batch: most sequences in a decode step, padding included.
        query_heads: of this rank. chain: most new tokens of a sequence in a step.
        flashinfer: decode steps attend with FlashInfer's kernels, not with Triton's.
        copies: drafts are copied from the sequences (`PromptLookup`).
    """

    rows: int
    batch: int
    query_heads: int
    chain: int
    context_len: int
    flashinfer: bool = False
    copies: bool = False

    def shape(self, config: OasisConfig, geometry: PoolGeometry) -> StepShape:
        from oasis_sglang.kernels.step_state import StepShape

        return StepShape.of(
            config,
            geometry,
            query_heads=self.query_heads,
            batch=self.batch,
            chain=self.chain,
            rows=self.rows,
            sequence_pages=sequence_pages(self.context_len, geometry.page_size),
        )


def device_page_bytes(geometry: PoolGeometry) -> int:
    """Of one page of the device pool: K and V, and its cells."""
    return geometry.page_size * geometry.token_bytes + geometry.layers * geometry.kv_heads * INT64


def host_page_bytes(geometry: PoolGeometry, draft_token_bytes: int) -> int:
    """On the device, of one page of the host pool."""
    return geometry.summary_page_bytes + INT32 + geometry.page_size * draft_token_bytes


def map_bytes(config: OasisConfig, geometry: PoolGeometry, load: DeviceLoad) -> int:
    """Of the maps of working sets, the cells aside."""
    width = config.max_set_pages + (load.chain > 1)
    longest = sequence_pages(load.context_len, geometry.page_size)
    lanes = geometry.layers * load.rows * geometry.kv_heads
    return load.rows * (width + 1) * INT64 + lanes * (2 * width + longest) * INT32


def attention_bytes(shape: StepShape, flashinfer: bool, device: torch.device) -> int:
    """Of what attention in decode steps works in."""
    if not flashinfer:
        return shape.attend_work(device) * FLOAT32
    from oasis_sglang.kernels.flashinfer import memory_bytes

    return memory_bytes(shape.batch, shape.chain, shape.geometry.kv_heads, shape.table_columns, device)


def step_bytes(shape: StepShape, device: torch.device) -> int:
    """Of the buffers and workspaces of steps, attention's aside."""
    g, n, t, k = shape.geometry, shape.batch, shape.chain, shape.budget_pages
    heads, layers, columns = g.kv_heads, g.layers, shape.sequence_pages
    inputs = 2 * (n * (8 + columns + 3 * t) * INT64 + INT32)
    tables = max(n, t) * INT64 + n * t * heads * INT64 + n * heads * shape.table_columns * INT64
    tokens = (1 + shape.ahead) * 2 * layers * n * t * heads * g.head_dim * g.itemsize
    scoring = (n * heads * columns + shape.score_work(device)) * FLOAT32
    power = 1 << max(k - 1, 0).bit_length()
    choosing = n * heads * (power + k + 5 * shape.cap) * INT64 + layers * 2 * n * heads * INT32
    counts = 4 * INT64 + INT32
    total = inputs + tables + tokens + scoring + choosing + counts
    if shape.ahead:
        total += n * heads * (k + 1) * INT64 + layers * shape.rows * heads * k * INT32 + (shape.rows + 1) * INT64
    if shape.late:
        total += layers * n * t * shape.query_heads * g.head_dim * g.itemsize
    return total


def staging_bytes(geometry: PoolGeometry, context_len: int) -> int:
    """Of one layer's K and V of the longest sequence."""
    pages = sequence_pages(context_len, geometry.page_size)
    return 2 * geometry.kv_heads * pages * geometry.page_size * geometry.head_dim * geometry.itemsize


def lookup_bytes(load: DeviceLoad) -> int:
    """Of `PromptLookup`: the tokens of every request, a row for padding and the count of copied chains."""
    return (load.rows + 1) * (load.context_len + load.chain) * INT32 + INT64


def device_memory(
    config: OasisConfig,
    geometry: PoolGeometry,
    load: DeviceLoad,
    *,
    available: int,
    draft_token_bytes: int,
    device: torch.device,
) -> DeviceMemory:
    """
    Args:
        available: bytes of the device that are free for all of it.
    """
    constants = (2 * geometry.kv_heads + len(geometry.sketch)) * INT64  # head numbers, dimensions of sketches
    shape = load.shape(config, geometry)
    work = (
        map_bytes(config, geometry, load)
        + step_bytes(shape, device)
        + attention_bytes(shape, load.flashinfer, device)
        + staging_bytes(geometry, load.context_len)
        + lookup_bytes(load) * load.copies
        + constants
    )
    return DeviceMemory(
        available=available,
        work=work,
        page=device_page_bytes(geometry),
        host_page=host_page_bytes(geometry, draft_token_bytes),
    )
