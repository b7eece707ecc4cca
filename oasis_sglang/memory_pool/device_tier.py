"""The tier of a host whose device has memory of its own: maps, summaries and steps are there, the host pool is pinned,
and kernels copy between the two."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from oasis_sglang.attention.ops import AttentionOps
from oasis_sglang.kernels.backup import backup
from oasis_sglang.kernels.device_step import DeviceDecode
from oasis_sglang.kernels.gather import gather
from oasis_sglang.kernels.streams import Streams
from oasis_sglang.kernels.summaries import build_minmax, build_sketches
from oasis_sglang.memory_pool.extend import Extend, ExtendSequence
from oasis_sglang.memory_pool.host_pool import HostPool
from oasis_sglang.memory_pool.sketch import KeySketches
from oasis_sglang.memory_pool.tier import KVTier
from oasis_sglang.memory_pool.transfer import TransferStats


class DevicePlan(NamedTuple):
    """A decode step of `rows` `[n]` that has been prepared, with `new` tokens each."""

    rows: torch.Tensor
    new: int


class DeviceTier(KVTier):
    """A `KVTier` whose decode steps are those of `DeviceDecode`. Everything is issued on one stream, in order; what
    steps do beside it is fenced before pages change hands."""

    def __init__(
        self,
        *args: Any,
        query_heads: int,
        batch: int,
        decode_ops: AttentionOps | None = None,
        streams: Streams | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            query_heads: of this rank. batch: most sequences in a decode step, padding included.
            decode_ops: what decode steps attend with, made for their shapes; None for `ops`, with which extends do.
            streams: None for those of the device.
            args, kwargs: of `KVTier`; the device pool is contiguous.

        Raises:
            ValueError: what only a CPU host does (see `DeviceDecode`).
        """
        self._query_heads, self._batch, self._streams = query_heads, batch, streams
        self._decode_ops = decode_ops
        super().__init__(*args, **kwargs)

    def _init_steps(self, k_pages: list[torch.Tensor], v_pages: list[torch.Tensor]) -> None:
        self.transfer = GatherTransfer(self.host, self._k_rows, self._v_rows)
        self.decoder = DeviceDecode(
            self.config,
            host=self.host,
            sets=self.sets,
            summaries=self.summaries,
            k_pages=k_pages,
            v_pages=v_pages,
            ops=self.ops if self._decode_ops is None else self._decode_ops,
            query_heads=self._query_heads,
            batch=self._batch,
            chain=self.chain,
            probe=self.probe,
            streams=self._streams,
        )
        self.chooses_early = self.config.miss_policy == "skip"
        if self.chooses_early:
            self.chosen, self.chosen_tail = self.decoder.state.chosen, self.decoder.state.chosen_tail
        g = self.geometry
        # K and V of one layer of the longest sequence, `[2, H, pages, page_size, D]`: what an extend attends to.
        shape = (2, g.kv_heads, self.sets.sequence_pages, g.page_size, g.head_dim)
        self.staging = torch.zeros(shape, dtype=self.host.dtype, device=k_pages[0].device)
        self._extend = DeviceExtend(self)

    def _fence(self) -> None:
        self.decoder.fence()

    # -- decode ---------------------------------------------------------------------------------------------------

    def plan_decode(  # type: ignore[override]
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        page_table: torch.Tensor,
        new: int = 1,
        *,
        padded: int | None = None,
        graph: bool = False,
    ) -> DevicePlan:
        """Start a decode step: `DeviceDecode.prepare`."""
        self.decoder.prepare(rows, seq_lens, slots, page_table, new, padded=padded, graph=graph)
        self.step = self.decoder.step
        self.stats.decode_steps += 1
        return DevicePlan(rows, new)

    def decode(  # type: ignore[override]
        self, plan: DevicePlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer of the step that was planned last: `DeviceDecode.layer`."""
        return self.decoder.layer(layer, q, k, v, scale)

    def finish_decode(self, plan: DevicePlan, accepted: torch.Tensor | None = None) -> None:  # type: ignore[override]
        """After the last layer: `DeviceDecode.finish`."""
        self.decoder.finish(accepted)
        if accepted is not None:
            self.stats.verify_steps += accepted.numel()

    # -- state ----------------------------------------------------------------------------------------------------

    def read_stats(self) -> None:
        """Bring `stats` up to date with what the device has counted. Waits for the device."""
        asked, admitted, missed, accepted = self.decoder.state.totals.tolist()
        g, stats = self.geometry, self.stats
        stats.accepted_tokens = accepted
        stats.selected = asked * g.kv_heads * self.config.budget_pages * g.layers
        stats.missed, stats.dropped = missed, missed - admitted

    def in_flight(self) -> int:
        """Nothing: copies that run beside compute are waited for on the device, by whoever touches their pages next."""
        return 0

    def check_integrity(self) -> None:
        self._fence()  # what a step does beside compute may still change the maps
        super().check_integrity()
        self.decoder.check()


class DeviceExtend(Extend):
    """Prompt chunks whose prefix, storing and summaries go through kernels. One layer's K and V are in `staging` while
    it runs."""

    _tier: DeviceTier

    def _whole(
        self, layer: int, sequence: ExtendSequence, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tier, g = self._tier, self._tier.geometry
        prefix, total = sequence.prefix, sequence.prefix + sequence.new
        staging = tier.staging
        if prefix:
            pages = sequence.pages[: -(-prefix // g.page_size)]
            if layer == 0:  # waits for the device
                tier.host.require(pages, prefix)
            n = pages.numel()
            # Row of the staging memory of each page and head, head by head.
            places = torch.arange(n, device=pages.device) + (tier.heads * staging.shape[2]).view(-1, 1)
            k_rows, v_rows = staging.view(2, -1, g.page_size * g.head_dim).unbind()
            copy_pieces(tier.host, layer, k_rows, v_rows, pages.expand(g.kv_heads, n), places)
        lanes = staging.flatten(2, 3)  # [2, H, tokens, D]
        lanes[0, :, prefix:total] = k.transpose(0, 1)
        lanes[1, :, prefix:total] = v.transpose(0, 1)
        return lanes[0, :, :total], lanes[1, :, :total]

    def _store(self, layer: int, sequence: ExtendSequence, k: torch.Tensor, v: torch.Tensor) -> None:
        tier, page = self._tier, self._tier.geometry.page_size
        new_k, new_v = k.contiguous().unsqueeze(0), v.contiguous().unsqueeze(0)
        every = torch.ones(sequence.new, dtype=torch.int64, device=k.device)
        backup(tier.host.kv, sequence.slots, every, new_k, new_v, layer)
        first = sequence.prefix // page
        touched = sequence.pages[first:]
        keys = tier.staging[0, :, first : sequence.pages.numel()].transpose(0, 1)
        last, summaries = sequence.last_tokens(page), tier.summaries
        if isinstance(summaries, KeySketches):
            build_sketches(summaries.table[layer], summaries.dims, touched, keys, last)
        else:
            build_minmax(summaries.table[layer], touched, keys, last)


class GatherTransfer:
    """Copies pieces with the kernel that steps use, in the order of the stream."""

    def __init__(self, host: HostPool, k_rows: list[torch.Tensor], v_rows: list[torch.Tensor]) -> None:
        """
        Args:
            k_rows, v_rows: per layer `[R, page_size * head_dim]`, the device pool.
        """
        self._host, self._k, self._v = host, k_rows, v_rows
        self.stats = TransferStats()

    def load(self, layer: int, host_pages: torch.Tensor, heads: torch.Tensor, rows: torch.Tensor) -> None:
        """As in `TransferEngine`; the pieces come head by head, as many of each."""
        g = self._host.geometry
        pages, to = host_pages.view(g.kv_heads, -1), rows.view(g.kv_heads, -1)
        copy_pieces(self._host, layer, self._k[layer], self._v[layer], pages, to)
        self.stats.pages += host_pages.numel()
        self.stats.bytes += host_pages.numel() * 2 * g.page_size * g.head_dim * g.itemsize

    def wait(self, layer: int) -> None:
        return

    def in_flight(self) -> int:
        return 0


def copy_pieces(
    host: HostPool,
    layer: int,
    k_rows: torch.Tensor,
    v_rows: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Copy one layer's pieces of host pages `[H, m]` to rows `[H, m]`, of each KV head its own."""
    heads, m = pages.shape
    count = torch.full((1, heads), m, dtype=torch.int32, device=pages.device)
    gather(host.kv, layer, k_rows, v_rows, pages.contiguous().unsqueeze(0), rows.contiguous().unsqueeze(0), count)
