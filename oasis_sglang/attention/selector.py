"""Page selection of one layer: score pages, take the budget's best, swap in what is missing."""

from __future__ import annotations

import ctypes
from typing import ClassVar, NamedTuple, Protocol

import torch

from oasis_sglang.attention.ops import AttentionOps
from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.sketch import KeySketches
from oasis_sglang.memory_pool.summaries import KeySummaries
from oasis_sglang.memory_pool.working_set import NONE, WorkingSets
from oasis_sglang.native.build import load_library
from oasis_sglang.speculative.lookahead import favoured, select_pages, select_resident


class Selection(NamedTuple):
    """What a refresh decided (n sequences, H KV heads, K budget pages, m misses admitted).

    The maps of the working sets already say that the misses are there; whoever attends loads them first.
    """

    attended: torch.Tensor  # [n, H, K] int64 logical pages, all of them in the maps, the least wanted last
    # [7, m] int64, sequence by sequence: host page, KV head, row of the device pool, which of the n, slot of its
    # working set, logical page, and the logical page that was there, NONE where the slot was empty.
    misses: torch.Tensor
    missed: int  # misses, those that the cap left out included

    @property
    def loads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[m]` host pages, heads and device rows: what `TransferEngine.load` takes."""
        return self.misses[0], self.misses[1], self.misses[2]


class PageSelector(Protocol):
    def refresh(
        self,
        layer: int,
        q: torch.Tensor,
        rows: torch.Tensor,
        tail: torch.Tensor,
        host_pages: torch.Tensor,
        step: int,
        scale: float,
        table: torch.Tensor,
        at: torch.Tensor,
    ) -> Selection:
        """
        Args:
            q: `[n, t, Hq, D]` the queries that ask; a page counts for what the one that wants it most says.
            rows: `[n]` distinct working-set rows, int64.
            tail: `[n]` the page each sequence writes to, int64; the pages before it are candidates, more than K.
            host_pages: `[n, columns]` int64 host pages of each sequence in order.
            table: `[any, H, more than K]` int64 page table; rows `at` `[n]` of it get the pool rows of the attended
                pages, then of the tail.
        """


class TorchSelector:
    """In torch operations, for any device torch runs on; the oracle of the compiled one."""

    def __init__(
        self, config: OasisConfig, ops: AttentionOps, summaries: KeySummaries | KeySketches, sets: WorkingSets
    ) -> None:
        self.config, self.ops, self.summaries, self.sets = config, ops, summaries, sets

    def refresh(
        self,
        layer: int,
        q: torch.Tensor,
        rows: torch.Tensor,
        tail: torch.Tensor,
        host_pages: torch.Tensor,
        step: int,
        scale: float,
        table: torch.Tensor,
        at: torch.Tensor,
    ) -> Selection:
        config, sets = self.config, self.sets
        columns = int(tail.max())
        summary_rows = self.summaries.row_ids(host_pages[:, :columns]).transpose(1, 2)
        each = [self.summaries.score(self.ops, layer, x, summary_rows, tail, scale) for x in q.unbind(1)]
        scores = torch.stack(each).amax(0)
        wanted = select_pages(scores, tail, config)
        misses = sets.swap_in(layer, rows, wanted, tail, config.fetch_cap_pages, step)
        device = sets.pages[rows[misses.request], misses.slot]
        attended = wanted
        if misses.left_out:
            resident = sets.slot_of[layer, rows][..., :columns] != NONE
            attended = select_resident(favoured(scores, tail, config), resident, wanted.shape[-1])
            sets.touch(layer, rows, sets.slot_of[layer, rows].gather(-1, attended).long(), step)
        sets.fill_table(layer, rows, attended, tail, table, at)
        columns_of_misses = (
            host_pages[misses.request, misses.page], misses.head, sets.cells.rows[layer, device, misses.head],
            misses.request, misses.slot, misses.page, misses.evicted,
        )  # fmt: skip
        return Selection(attended, torch.stack(columns_of_misses), misses.page.numel() + misses.left_out)


_POINTER = ctypes.c_void_p
_INT = ctypes.c_int64


class _Args(ctypes.Structure):
    """`Args` of step.cpp."""

    _fields_ = (
        *((name, _INT) for name in ("sequences", "queries", "kv_heads", "group", "head_dim", "columns")),
        *((name, _INT) for name in ("budget", "sink", "recent", "cap", "sequence_pages", "set_pages", "step")),
        *((name, _INT) for name in ("page_size", "sketch")),
        ("sketch_dims", _POINTER),
        ("scale", ctypes.c_float),
        *((name, _POINTER) for name in ("q", "summaries", "host_pages", "tail", "rows", "owned", "cells")),
        *((name, _POINTER) for name in ("slot_of", "page_of", "last_used")),
        *((name, _POINTER) for name in ("attended", "table", "at")),
        ("table_columns", _INT),
        *((name, _POINTER) for name in ("misses", "missed", "admitted")),
        ("miss_stride", _INT),
    )


class NativeSelector:
    """Compiled, for tensors in host memory: reads summaries in place and touches only what changes."""

    DTYPES: ClassVar = {torch.float32: 0, torch.bfloat16: 1}

    def __init__(
        self, config: OasisConfig, library: ctypes.CDLL, summaries: KeySummaries | KeySketches, sets: WorkingSets
    ) -> None:
        self._library, self._summaries, self._sets = library, summaries, sets
        self._budget = config.budget_pages
        geometry = summaries.geometry
        lanes = sets.pages.shape[0] * geometry.kv_heads
        self._misses = torch.empty(7, lanes * self._budget, dtype=torch.int64)
        self._counts = torch.empty(2, lanes, dtype=torch.int64)
        self._args = _Args(
            kv_heads=geometry.kv_heads,
            head_dim=geometry.head_dim,
            budget=self._budget,
            sink=config.sink_pages,
            recent=config.recent_pages,
            cap=config.fetch_cap_pages,
            sequence_pages=sets.sequence_pages,
            set_pages=sets.set_pages,
            page_size=geometry.page_size,
            sketch=summaries.dims.numel() if isinstance(summaries, KeySketches) else 0,
            sketch_dims=summaries.dims.data_ptr() if isinstance(summaries, KeySketches) else None,
            owned=sets.pages.data_ptr(),
            misses=self._misses.data_ptr(),
            miss_stride=self._misses.shape[1],
            missed=self._counts[0].data_ptr(),
            admitted=self._counts[1].data_ptr(),
        )

    def refresh(
        self,
        layer: int,
        q: torch.Tensor,
        rows: torch.Tensor,
        tail: torch.Tensor,
        host_pages: torch.Tensor,
        step: int,
        scale: float,
        table: torch.Tensor,
        at: torch.Tensor,
    ) -> Selection:
        args, sets = self._args, self._sets
        n, heads = rows.numel(), args.kv_heads
        q, host_pages = q.contiguous(), host_pages.contiguous()
        attended = torch.empty(n, heads, self._budget, dtype=torch.int64)
        args.sequences, args.queries, args.group = n, q.shape[1], q.shape[2] // heads
        args.columns = host_pages.shape[1]
        args.step, args.scale = step, scale
        args.q, args.summaries = q.data_ptr(), self._summaries.table[layer].data_ptr()
        args.host_pages, args.tail, args.rows = host_pages.data_ptr(), tail.data_ptr(), rows.data_ptr()
        args.cells = sets.cells.rows[layer].data_ptr()
        args.slot_of, args.page_of = sets.slot_of[layer].data_ptr(), sets.page_of[layer].data_ptr()
        args.last_used, args.attended = sets.last_used[layer].data_ptr(), attended.data_ptr()
        args.table, args.at, args.table_columns = table.data_ptr(), at.data_ptr(), table.shape[-1]
        count = self._library.oasis_refresh(ctypes.byref(args), self.DTYPES[q.dtype])
        missed = int(self._counts[0, : n * heads].sum())
        misses = torch.empty(7, count, dtype=torch.int64)  # of its own: a step gathers those of several layers
        self._library.oasis_take_misses(ctypes.byref(args), count, misses.data_ptr())
        return Selection(attended, misses, missed)


def create_selector(
    config: OasisConfig,
    ops: AttentionOps,
    summaries: KeySummaries | KeySketches,
    sets: WorkingSets,
    dtype: torch.dtype,
) -> PageSelector:
    """The compiled selector where it can run, else the torch one."""
    on_host = summaries.table.device.type == "cpu" and dtype in NativeSelector.DTYPES
    library = load_library() if on_host else None
    if library is None:
        return TorchSelector(config, ops, summaries, sets)
    return NativeSelector(config, library, summaries, sets)
