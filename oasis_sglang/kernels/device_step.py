"""A decode step where working sets, maps and pools are on the device: what `KVTier.decode` does, without the host.

    prepare   the step's few inputs -> static buffers                               host, between graphs
    layer l   (skip: wait for what the last step fetched for l)                     graph
              place tokens and pages, new K, V -> tail pages
              wait: score, select, misses <- host pool, attention
              skip: attention | beside it: score, select, misses <- host pool for the next step
    finish    accepted K, V -> host pool (beside compute), key summaries            graph, or when a chain was verified

Nothing between `prepare` and the end looks at device data on the host, and every shape follows from the sizes of the
batch: a CUDA graph can hold it. A graph ends with its side work joined; without one, what a step fetches may still be
on its way when the next step begins, and each layer waits for its own part alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oasis_sglang.attention.ops import AttentionOps, TableLayout
from oasis_sglang.attention.page_table import sparse_mask
from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.attend import MAX_QUERIES
from oasis_sglang.kernels.backup import backup, write_tokens
from oasis_sglang.kernels.gather import gather
from oasis_sglang.kernels.place import place, remember
from oasis_sglang.kernels.score import score_minmax, score_sketches
from oasis_sglang.kernels.select import select
from oasis_sglang.kernels.step_state import StepShape, StepState
from oasis_sglang.kernels.streams import Streams, streams_for
from oasis_sglang.kernels.summaries import append_minmax, append_sketches
from oasis_sglang.memory_pool.sketch import KeySketches
from oasis_sglang.memory_pool.working_set import FIRST_STEP

if TYPE_CHECKING:
    from oasis_sglang.memory_pool.host_pool import HostPool
    from oasis_sglang.memory_pool.summaries import KeySummaries
    from oasis_sglang.memory_pool.working_set import WorkingSets

#: With the turn of a step's buffers, the key under which its copies to the host pool can be waited for, the last work
#: that it leaves; layers have their numbers.
SAVED = "saved"


class DeviceDecode:
    """Decode steps of batches up to a size, one at a time: `prepare`, `layer` for each layer in order, `finish`.

    Attributes:
        step: of the step that runs, or ran last; what is placed in a working set between steps counts as used then.
        state: all memory of steps.
    """

    def __init__(
        self,
        config: OasisConfig,
        *,
        host: HostPool,
        sets: WorkingSets,
        summaries: KeySummaries | KeySketches,
        k_pages: list[torch.Tensor],
        v_pages: list[torch.Tensor],
        ops: AttentionOps,
        query_heads: int,
        batch: int,
        chain: int = 1,
        probe: bool = False,
        streams: Streams | None = None,
    ) -> None:
        """
        Args:
            host: the host pool, pinned where the device is a GPU; its marks of what is written on the device.
            sets, summaries: on the device.
            k_pages, v_pages: the device pool, per layer `[pages, kv_heads, page_size, head_dim]`, contiguous; page 0 is
                the reserved page and stays zero.
            ops: `attend` of these is used; it must not look at device data on the host.
            query_heads: Hq.
            batch: most sequences in a step, padding included.
            chain: most new tokens of a sequence in a step.
            probe: under `wait` only the first token of a chain chooses pages.
            streams: None for those of the device.

        Raises:
            ValueError: see `require_supported`.
        """
        g, device = host.geometry, k_pages[0].device
        require_supported(config, chain)
        self.config, self.geometry = config, g
        self.host, self.sets, self.summaries, self.ops = host, sets, summaries, ops
        self.batch, self.chain, self.probe = batch, chain, probe
        self.streams = streams_for(device) if streams is None else streams
        self.shape = StepShape.of(
            config,
            g,
            query_heads=query_heads,
            batch=batch,
            chain=chain,
            rows=sets.pages.shape[0],
            sequence_pages=sets.sequence_pages,
        )
        self.state = StepState(self.shape, host.dtype, device)
        self.step = FIRST_STEP
        self._ahead = self.shape.ahead
        self._keep = self._ahead and config.predictor == "none"
        width = g.page_size * g.head_dim
        self._k_lanes = [x.view(-1, g.page_size, g.head_dim) for x in k_pages]
        self._v_lanes = [x.view(-1, g.page_size, g.head_dim) for x in v_pages]
        self._k_rows = [x.view(-1, width) for x in k_pages]
        self._v_rows = [x.view(-1, width) for x in v_pages]
        self._scales = [1.0] * g.layers
        self._turn, self._graph = 0, False
        self._n, self._t = 0, 1
        self._in = self.state.inputs[0].part(0, 1)
        self._layout: TableLayout | None = None

    # -- a step ---------------------------------------------------------------------------------------------------

    def prepare(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
        page_table: torch.Tensor,
        new: int = 1,
        *,
        padded: int | None = None,
        graph: bool = False,
    ) -> None:
        """Begin a step: copy what it is about to the static buffers. Never waits for the device.

        Args:
            rows: `[n]` distinct working-set rows; negative for a sequence that is padding.
            seq_lens: `[n]` lengths, new tokens included; 0 for padding.
            slots: `[n * new]` of the new tokens, sequence by sequence.
            page_table: `[n, columns]` host pages of each sequence in order; anything past its end.
                All four are integers, on the host or on the device.
            new: t, tokens per sequence.
            padded: sequences that the step computes, at least n; those past n are padding. None: n.
            graph: the layers that follow are captured in a graph, or a graph is replayed in their place.

        Raises:
            ValueError: more than there is memory for.
        """
        n, columns = page_table.shape
        size = n if padded is None else padded
        if not (n <= size <= self.batch and 1 <= new <= self.chain and columns <= self.shape.sequence_pages):
            raise ValueError(
                f"a step of {size} sequences ({n} real) with {new} new tokens and {columns} pages does not fit "
                f"{self.batch} sequences with {self.chain} new tokens and {self.shape.sequence_pages} pages"
            )
        self._graph = graph
        if graph:  # its addresses are fixed, and it knows nothing of work outside
            self.streams.join()
        self._turn = 0 if graph else 1 - self._turn
        self.streams.wait((SAVED, self._turn))  # the step before the last one used the same buffers
        if not self._ahead:  # compute itself fetches, and what the last step completed may be among it
            self.streams.wait((SAVED, 1 - self._turn))
        self._n, self._t = size, new
        self._in = to = self.state.inputs[self._turn].part(size, new)
        self.step += 1
        to.step.fill_(self.step)
        put(to.rows[:n], rows)
        put(to.seq_lens[:n], seq_lens)
        put(to.slots[: n * new], slots)
        put(to.host_pages[:n, :columns], page_table)
        if size > n:
            to.rows[n:].fill_(-1)
            to.seq_lens[n:].zero_()
            to.slots[n * new :].zero_()
        columns = self.shape.table_columns
        self._layout = TableLayout(to.tokens, columns, self.geometry.page_size, new, self.host.dtype)

    def layer(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """One layer of the step; all of them, in order.

        Args:
            q: `[n * t, Hq, D]`. k, v: `[n * t, H, D]`. Of each the last dimension is contiguous.

        Returns:
            `[n * t, Hq, D]`; zero for padding.
        """
        state, now, n, t = self.state, self._in, self._n, self._t
        if layer == 0:
            self._begin()
        self.streams.wait(layer)
        place(
            layer,
            now.rows,
            now.sparse_rows,
            now.pages,
            now.offsets,
            self.sets,
            now.step,
            state.token_rows[: n * t],
            state.table[:n],
            state.faults,
            self.config.budget_pages,
            chosen=state.chosen[layer] if self._ahead else None,
            chosen_tail=state.chosen_tail if self._ahead else None,
            keep=self._keep,
        )
        rows, lanes = state.token_rows[: n * t], now.offsets.view(-1)
        write_tokens(self._k_lanes[layer], self._v_lanes[layer], rows, lanes, k, v)
        new_k, new_v = state.new_tokens(self._turn, n, t)
        new_k[layer].copy_(k)
        new_v[layer].copy_(v)
        query = q.view(n, t, *q.shape[1:])
        if not self._ahead:
            self._choose(layer, query[:, :1] if self.probe else query, scale, state.table[:n])
            self._fetch(layer)
        assert self._layout is not None
        out = self.ops.attend(query, self._k_rows[layer], self._v_rows[layer], state.table[:n], self._layout, scale)
        if self._ahead:
            self._look_ahead(layer, query, scale)
        if layer == self.geometry.layers - 1:
            self._end()
        return out.flatten(0, 1)

    def finish(self, accepted: torch.Tensor | None = None) -> None:
        """Commit the step's tokens to the host pool and the summaries, and count them as written.

        Args:
            accepted: `[n]`, or fewer where the last sequences are padding: how many of each sequence's new tokens are
                kept, at least 1, on the host or on the device; None: all, and only then may this be part of a graph.
        """
        state, now, n, t = self.state, self._in, self._n, self._t
        if accepted is None:
            torch.mul(now.rows >= 0, t, out=now.accepted)
        else:
            now.accepted.zero_()
            put(now.accepted[: accepted.numel()], accepted)
            now.accepted.mul_(now.rows >= 0)
        new_k, new_v = state.new_tokens(self._turn, n, t)
        if isinstance(self.summaries, KeySketches):
            table, dims = self.summaries.table, self.summaries.dims
            append_sketches(table, dims, now.slots, now.accepted, new_k, self.geometry.page_size)
        else:
            append_minmax(self.summaries.table, now.slots, now.accepted, new_k, self.geometry.page_size)
        kept = (state.order[:t] < now.accepted.unsqueeze(1)).flatten()
        self.host.mark_written(now.slots, kept)
        with self.streams.fork():
            if self.shape.late and t > 1:
                self._look_ahead_late()
            backup(self.host.kv, now.slots, now.accepted, new_k, new_v)
            counts = state.counts[:, :, :n].sum((0, 2, 3))
            state.totals[0] += (now.asking_rows >= 0).sum()
            state.totals[1:3] += counts
            if accepted is not None:
                state.totals[3] += now.accepted.sum()
            self.streams.mark((SAVED, self._turn))
        if self._graph and accepted is None:
            self.streams.join()

    # -- its parts ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """What follows from the inputs and is the same for every layer."""
        now, t, page = self._in, self._t, self.geometry.page_size
        live = now.rows >= 0
        # A chain of drafts is sparse or dense as a whole: by its first token, which is certain.
        first = now.seq_lens - (t - 1)
        position = (first - 1).clamp_min(0).unsqueeze(1) + self.state.order[:t]
        torch.div(position, page, rounding_mode="floor", out=now.pages)
        torch.remainder(position, page, out=now.offsets)
        now.tail.copy_(now.pages[:, 0])
        sparse = asking = sparse_mask(first, self.config) & live
        if self._ahead:
            # A sequence chooses ahead as soon as its next step may be sparse.
            asking = sparse_mask(first + t, self.config) & live
            if self._keep:
                asking = asking & ~sparse
        now.sparse_rows.copy_(now.rows.masked_fill(~sparse, -1))
        now.asking_rows.copy_(now.rows.masked_fill(~asking, -1))
        torch.mul(now.tail, asking, out=now.candidates)
        attended = self.config.token_budget + now.offsets[:, 0] + t
        now.tokens.copy_(torch.where(sparse, attended, now.seq_lens).masked_fill(~live, 0))
        # Every page before the tail was completed by an extend or by a step: to look at the last one is enough.
        before = now.host_pages.gather(1, (now.tail - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
        short = (self.host.fill[before.masked_fill(~live, 0)] < page) & (now.tail > 0) & live
        strays = (now.seq_lens > 0) & ~live  # tokens of a sequence that has no working set
        self.state.faults.add_((short | strays).sum())

    def _end(self) -> None:
        """After the last layer."""
        if self._ahead:
            tail = self.state.chosen_tail
            rows = torch.maximum(self._in.sparse_rows, self._in.asking_rows)
            tail.scatter_(0, rows.masked_fill(rows < 0, tail.numel() - 1), self._in.tail)
        if self._graph:  # a graph ends with all its work joined
            self.streams.join()

    def _look_ahead(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """Beside compute: choose and fetch what the next step attends to in this layer."""
        if self.shape.late and self._t > 1:
            self._scales[layer] = scale
            self.state.step_queries(self._n, self._t)[layer].copy_(query)
            return
        self.streams.lend(query)
        with self.streams.fork():
            self._choose_ahead(layer, query, scale)

    def _look_ahead_late(self) -> None:
        """The same for all layers, by the last accepted token of each chain."""
        queries = self.state.step_queries(self._n, self._t)
        last = (self._in.accepted - 1).clamp_min(0)
        for layer in range(self.geometry.layers):
            query = queries[layer, self.state.order[: self._n], last].unsqueeze(1)
            self._choose_ahead(layer, query, self._scales[layer])

    def _choose_ahead(self, layer: int, query: torch.Tensor, scale: float) -> None:
        self._choose(layer, query, scale, self.state.unread_table[: self._n])
        remember(self.state.attended[: self._n], self._in.asking_rows, self.state.chosen[layer])
        self._fetch(layer)
        self.streams.mark(layer)

    def _choose(self, layer: int, query: torch.Tensor, scale: float, table: torch.Tensor) -> None:
        """Score pages by the queries `[n, any, Hq, D]`, take the best, and make room for those that are missing."""
        state, now, n, g = self.state, self._in, self._n, self.geometry
        scores, work = state.step_scores(n), state.score_work
        if isinstance(self.summaries, KeySketches):
            score_sketches(
                query,
                self.summaries.dims,
                self.summaries.table[layer],
                now.host_pages,
                now.candidates,
                g.kv_heads,
                g.page_size,
                scale,
                out=scores,
                work=work,
            )
        else:
            bounds = self.summaries.table[layer]
            score_minmax(query, bounds, now.host_pages, now.candidates, g.kv_heads, scale, out=scores, work=work)
        select(
            scores,
            now.tail,
            now.asking_rows,
            now.host_pages,
            layer,
            self.sets,
            self.config,
            now.step,
            table,
            state.order[:n],
            out=state.step_selected(layer, n),
            work=state.select_work,
        )

    def _fetch(self, layer: int) -> None:
        """Bring in what the last choice missed."""
        picked = self.state.step_selected(layer, self._n)
        k, v = self._k_rows[layer], self._v_rows[layer]
        gather(self.host.kv, layer, k, v, picked.host, picked.row, picked.count)

    # -- between steps --------------------------------------------------------------------------------------------

    def fence(self) -> None:
        """Order everything that compute does from now on after all copies: before pages are given to others."""
        self.streams.join()

    def check(self) -> None:
        """Raise if a step had a sequence without a working set, or pages that were not on the device or not written.
        Waits for the device.

        Raises:
            RuntimeError: and every further call does too.
        """
        if faults := int(self.state.faults):
            raise RuntimeError(
                f"{faults} times a sequence was decoded without a working set, or with pages that were not on the "
                "device or not written"
            )


def put(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy to a static buffer without waiting: from the host through pinned memory, which is kept until it is read."""
    if to.device.type == "cuda" and source.device.type == "cpu":
        source = source.to(to.dtype).pin_memory()
    to.copy_(source, non_blocking=True)


def require_supported(config: OasisConfig, chain: int) -> None:
    """Raise for what only a CPU host does.

    Raises:
        ValueError: naming the setting, its value and what works.
    """
    most = min(MAX_QUERIES, config.page_size)
    reasons = {
        f"--oasis-config: dense_layers={config.dense_layers} works on CPU hosts only; use dense_layers=0": (
            config.dense_layers > 0
        ),
        "--oasis-config: debug_attention_mass=true works on CPU hosts only; leave it out": config.debug_attention_mass,
        "--oasis-config: transfer='workers' works on CPU hosts only; use transfer='inline'": config.workers > 0,
        f"--speculative-num-draft-tokens={chain} does not work on a GPU with pages of {config.page_size} tokens; use "
        f"{most} or fewer": chain > most,
    }
    found = [reason for reason, present in reasons.items() if present]
    if found:
        raise ValueError("; ".join(found))
