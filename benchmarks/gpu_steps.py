"""Decode steps of a batch: the model around an attention over pages, dense or sparse.

What a step needs to know is on the device and moves on within the step, so that steps are replays of one graph.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from benchmarks.gpu_host import HostSide
from benchmarks.gpu_model import Model
from benchmarks.gpu_scale import Scale
from oasis_sglang.attention.ops import AttentionOps, TableLayout
from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.backup import write_tokens
from oasis_sglang.kernels.device_step import DeviceDecode
from oasis_sglang.kernels.gather import gather
from oasis_sglang.memory_pool.working_set import FIRST_STEP, WorkingSets


class Steps(Protocol):
    def before(self) -> None:
        """What a step needs of the host."""

    def run(self) -> None:
        """A step's launches."""

    def figures(self, steps: int) -> dict[str, Any]:
        """What the steps so far have done besides."""


class Batch:
    """Sequences of `context` tokens each that go on by one token a step."""

    def __init__(self, model: Model, n: int, context: int) -> None:
        device = model.scale.device
        self.n = n
        self.tokens = torch.randint(model.scale.vocabulary, (n,), device=device)
        self.lengths = torch.full((n,), context + 1, device=device)  # the token that a step computes included
        self.bases = model.bases(n)

    def advance(self, following: torch.Tensor) -> None:
        self.tokens.copy_(following)
        self.lengths.add_(1)


class DenseSteps:
    """Every token attended, all K and V in device memory."""

    def __init__(self, scale: Scale, model: Model, n: int, context: int, pages: int, ops: AttentionOps) -> None:
        """
        Args:
            pages: room of each sequence.
        """
        s = self.scale = scale
        self._model, self._batch, self._ops = model, Batch(model, n, context), ops
        pool = torch.empty(
            s.layers, 2, n * pages * s.kv_heads, s.page * s.head_dim, dtype=s.dtype, device=s.device
        ).normal_()
        self._k, self._v = pool[:, 0].unbind(), pool[:, 1].unbind()
        order = torch.randperm(n * pages, device=s.device).view(n, 1, pages)
        self._table = order * s.kv_heads + torch.arange(s.kv_heads, device=s.device).view(-1, 1)

    def before(self) -> None:
        return

    def run(self) -> None:
        s, batch = self.scale, self._batch
        position = batch.lengths - 1
        page = (position // s.page).view(-1, 1, 1).expand(-1, s.kv_heads, 1)
        rows, lanes = self._table.gather(2, page).squeeze(2), position % s.page
        layout = TableLayout(batch.lengths, self._table.shape[2], s.page, 1, s.dtype)

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = self._k[layer], self._v[layer]
            write_tokens(*(x.view(-1, s.page, s.head_dim) for x in (keys, values)), rows, lanes, k, v)
            return self._ops.attend(q.unsqueeze(1), keys, values, self._table, layout, s.scale)

        batch.advance(self._model.step(batch.tokens, position, batch.bases, attention))

    def figures(self, steps: int) -> dict[str, Any]:
        return {}


class SparseSteps:
    """The project's pipeline: K and V in host memory, a working set per sequence in device memory."""

    def __init__(
        self,
        host: HostSide,
        model: Model,
        n: int,
        context: int,
        pages: int,
        config: OasisConfig,
        ops: AttentionOps,
    ) -> None:
        s = self.scale = model.scale
        self._model, self._batch, self._host = model, Batch(model, n, context), host
        width, self._pages = config.max_set_pages, host.pages_of(n, pages)
        self._sets = WorkingSets(
            layers=s.layers, kv_heads=s.kv_heads, device_pages=n * width, rows=n, set_pages=width, sequence_pages=pages,
            device=s.device,
        )  # fmt: skip
        pool = torch.zeros(s.layers, 2, 1 + n * width, s.kv_heads, s.page, s.head_dim, dtype=s.dtype, device=s.device)
        self._k, self._v = list(pool[:, 0].unbind()), list(pool[:, 1].unbind())
        self._decode = DeviceDecode(
            config, host=host.pool, sets=self._sets, summaries=host.sketches, k_pages=self._k, v_pages=self._v,
            ops=ops, query_heads=s.query_heads, batch=n,
        )  # fmt: skip
        self._rows = torch.tensor([self._admit(width) for _ in range(n)], device=s.device)
        host.written(self._pages, context)
        self._fill(width, context)
        self._slots = torch.empty_like(self._rows)
        self._find_slots()

    def _admit(self, width: int) -> int:
        attempt = self._sets.reserve(width)
        assert attempt is not None
        return attempt.row

    def _fill(self, width: int, context: int) -> None:
        """What a prompt leaves: the newest pages are there, and with `skip` the newest before the last are chosen."""
        s, decode, sets = self.scale, self._decode, self._sets
        complete = context // s.page
        held = torch.arange(complete - min(width - 1, complete), complete, device=s.device).flip(0)
        used = FIRST_STEP - 1 - torch.arange(held.numel(), device=s.device)
        n, count = self._rows.numel(), torch.full((self._rows.numel(), s.kv_heads), held.numel(), device=s.device)
        pages = self._pages[:, held].unsqueeze(1).expand(-1, s.kv_heads, -1).contiguous()
        owned = sets.pages[self._rows, : held.numel()]
        for layer in range(s.layers):
            for row in range(n):
                sets.place(layer, row, held.expand(s.kv_heads, -1), used)
            k, v = (x[layer].flatten(0, 1).flatten(1) for x in (self._k, self._v))
            rows = sets.cells.rows[layer, owned].transpose(1, 2).contiguous()
            gather(self._host.pool.kv, layer, k, v, pages, rows, count.to(torch.int32), programs=64)
        if decode.shape.ahead:
            chosen = decode.state.chosen
            chosen.copy_(held[1 : decode.shape.budget_pages + 1].to(torch.int32).expand_as(chosen))
            decode.state.chosen_tail.fill_(complete - 1)

    def _find_slots(self) -> None:
        position, page = self._batch.lengths - 1, self.scale.page
        named = self._pages.gather(1, (position // page).view(-1, 1)).squeeze(1)
        self._slots.copy_(named * page + position % page)

    def before(self) -> None:
        self._decode.prepare(self._rows, self._batch.lengths, self._slots, self._pages, graph=True)

    def run(self) -> None:
        s, batch = self.scale, self._batch

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self._decode.layer(layer, q, k, v, s.scale)

        following = self._model.step(batch.tokens, batch.lengths - 1, batch.bases, attention)
        self._decode.finish()
        batch.advance(following)
        self._find_slots()

    def figures(self, steps: int) -> dict[str, Any]:
        """Misses of one KV head of one layer in a step, and the bytes that steps bring in; raises where a step attended
        to what was not there."""
        self._decode.check()
        s = self.scale
        lists = self._rows.numel() * s.kv_heads * s.layers
        asked, fetched, missed, _ = self._decode.state.totals.tolist()
        all_steps = max(asked / self._rows.numel(), 1)
        return {
            "missed_pages_per_head": missed / all_steps / lists,
            "fetched_pages_per_head": fetched / all_steps / lists,
            "fetched_bytes_per_step": fetched / all_steps * s.piece_bytes,
        }
