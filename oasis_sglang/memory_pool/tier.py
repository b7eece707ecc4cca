"""The tiered KV cache of one rank: host pool, device pool, summaries and working sets, and what a forward pass does
with them. Knows torch, not SGLang.

    extend (a prompt chunk)                         decode (one token per sequence, or a chain of drafts)

    per layer:                                      before: place the tail page, build the plan
      prefix K, V  <- host pool                     per layer:
      attention, dense *                              new K, V -> tail page on the device
      new K, V     -> host pool, summaries            select pages, fetch misses (`wait`)
      working set  <- host pool, by the last query    attention over the page table
    after: count the tokens written                   select and fetch for the next step (`skip`)
                                                    after: K, V of accepted tokens -> host pool, summaries
    * tokens that were decoded before a retraction: sparse, as decode was
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from oasis_sglang.attention.ops import AttentionOps, TableLayout
from oasis_sglang.attention.page_table import DecodePlan
from oasis_sglang.attention.selector import Selection, create_selector
from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.extend import Extend, ExtendSequence
from oasis_sglang.memory_pool.host_pool import HostPool
from oasis_sglang.memory_pool.prefetcher import Late, Prefetcher
from oasis_sglang.memory_pool.sizing import PoolGeometry, sequence_pages
from oasis_sglang.memory_pool.sketch import KeySketches
from oasis_sglang.memory_pool.summaries import KeySummaries
from oasis_sglang.memory_pool.transfer import InlineTransfer, TransferEngine
from oasis_sglang.memory_pool.working_set import FIRST_STEP, NONE, Attempt, WorkingSets
from oasis_sglang.speculative.lookahead import select_pages
from oasis_sglang.speculative.sampler import KeysOfSequence, LookaheadStats, samples

if TYPE_CHECKING:
    from oasis_sglang.memory_pool.prefetch.client import PrefetchClient


class TierStats:
    """Totals since start, in pages per KV head and layer unless named otherwise."""

    def __init__(self) -> None:
        self.selected = 0
        self.missed = 0
        self.dropped = 0  # misses that the fetch cap left out
        self.decode_steps = 0
        self.sparse_sequences = 0  # sequences decoded sparsely, summed over steps
        self.dense_sequences = 0
        self.verify_steps = 0  # chains verified, and their tokens that were kept
        self.accepted_tokens = 0
        self.load_back_tokens = 0  # prefix tokens read from the host pool by extends
        # What of `TransferStats` were working sets that extends brought in, which no decode step waited for.
        self.extend_pages = 0
        self.extend_seconds = 0.0


class KVTier:
    def __init__(
        self,
        config: OasisConfig,
        geometry: PoolGeometry,
        dtype: torch.dtype,
        *,
        host_pages: int,
        k_pages: list[torch.Tensor],
        v_pages: list[torch.Tensor],
        rows: int,
        context_len: int,
        ops: AttentionOps,
        chain: int = 1,
        probe: bool = False,
        spare_pages: int = 0,
    ) -> None:
        """
        Args:
            spare_pages: pages of the device pool that are kept for copies in flight (see `prefetch_by`).
            chain: tokens that a step computes per sequence: 1, or with speculation the last accepted and its drafts.
            probe: drafts are never accepted; under `wait` they do not choose pages either.
            k_pages, v_pages: the device pool, per layer `[1 + pages, kv_heads, page_size, head_dim]`; page 0 is the
                reserved page and stays zero.
            rows: most requests on the device at once.
            context_len: tokens of the longest sequence.
        """
        self.config = config
        self.geometry = geometry
        self.ops = ops
        self.chain = chain
        self.probe = probe
        device = k_pages[0].device
        self.host = HostPool(host_pages, geometry, dtype, device)
        summaries = KeySketches if config.summary == "sketch" else KeySummaries
        self.summaries: KeySketches | KeySummaries = summaries(self.host, device)
        self.sets = WorkingSets(
            layers=geometry.layers,
            kv_heads=geometry.kv_heads,
            device_pages=k_pages[0].shape[0] - 1 - spare_pages,
            spare_pages=spare_pages,
            rows=rows,
            set_pages=self.set_pages,
            sequence_pages=sequence_pages(context_len, geometry.page_size),
            device=device,
        )
        width = geometry.page_size * geometry.head_dim
        self._k_lanes = [x.view(-1, geometry.page_size, geometry.head_dim) for x in k_pages]
        self._v_lanes = [x.view(-1, geometry.page_size, geometry.head_dim) for x in v_pages]
        self._k_rows = [x.view(-1, width) for x in k_pages]
        self._v_rows = [x.view(-1, width) for x in v_pages]
        self.heads = torch.arange(geometry.kv_heads, device=device)
        self.was_sparse = torch.zeros(rows, dtype=torch.bool)
        self.prefetcher: Prefetcher | None = None
        self.step = FIRST_STEP
        self.stats = TierStats()
        self.lookahead = LookaheadStats()
        self._init_steps(k_pages, v_pages)

    def _init_steps(self, k_pages: list[torch.Tensor], v_pages: list[torch.Tensor]) -> None:
        """What extends and decode steps work with, where the host computes."""
        config, g, dtype = self.config, self.geometry, self.host.dtype
        rows = self.sets.pages.shape[0]
        self.transfer: TransferEngine = InlineTransfer(self.host, k_pages, v_pages)
        self.selector = create_selector(config, self.ops, self.summaries, self.sets, dtype)
        # `skip`: the pages chosen for each row's next step
        chosen = (g.layers, rows, g.kv_heads, config.budget_pages)
        self.chosen = torch.zeros(chosen if config.miss_policy == "skip" else (0,), dtype=torch.int32)
        self.chosen_tail = torch.zeros(rows, dtype=torch.int64)  # the tail page when they were chosen
        #: Whether sequences whose next step is sparse choose its pages now, too.
        self.chooses_early = False
        step = (g.layers, rows * self.chain, g.kv_heads, g.head_dim)
        self._new_k, self._new_v = torch.empty(step, dtype=dtype), torch.empty(step, dtype=dtype)
        # (layer, queries, scale) of a chain, until it is known which token was the last accepted
        self._queries: list[tuple[int, torch.Tensor, float]] = []
        self._extend = Extend(self)

    def prefetch_by(self, client: PrefetchClient) -> None:
        """Let worker processes bring in what the lookahead chooses."""
        g = self.geometry
        rows = self.sets.cells.pool_rows
        self.prefetcher = Prefetcher(client, self.sets, layers=g.layers, kv_heads=g.kv_heads, pool_rows=rows)

    # -- residency ------------------------------------------------------------------------------------------------

    @property
    def set_pages(self) -> int:
        """W: most device pages of one sequence. A chain of drafts may reach into one page more."""
        return self.config.max_set_pages + (self.chain > 1)

    def pages_for(self, tokens: int) -> int:
        """Device pages a request needs that will be `tokens` long at its end."""
        return min(-(-(tokens + self.chain - 1) // self.geometry.page_size), self.set_pages)

    def reserve(self, tokens: int) -> Attempt | None:
        """Own what a request of `tokens` tokens, output included, needs on the device; None when there is no room."""
        return self.sets.reserve(self.pages_for(tokens))

    def release(self, attempt: Attempt) -> None:
        """Let go of an attempt's device pages; idempotent."""
        if self.sets.holds(attempt):
            self._fence()  # copy, then fence, then free
            if self.prefetcher is not None:  # it writes to rows that no page table names, so nothing need be waited for
                self.prefetcher.cancel(*attempt)
        self.sets.release(attempt)

    def _fence(self) -> None:
        for layer in range(self.geometry.layers):
            self.transfer.wait(layer)

    def invalidate(self, host_pages: torch.Tensor) -> None:
        """Forget what freed host pages hold."""
        self.host.invalidate(host_pages)

    def clear(self) -> None:
        self.host.clear()

    # -- extend ---------------------------------------------------------------------------------------------------

    def extend(
        self, layer: int, sequence: ExtendSequence, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer of one sequence's prompt chunk; `q` `[new, Hq, D]`, `k` and `v` `[new, H, D]`; returns like `q`."""
        return self._extend.run(layer, sequence, q, k, v, scale)

    def finish_extend(self, sequences: list[ExtendSequence]) -> None:
        """After the last layer: the chunk's tokens count as written."""
        for sequence in sequences:
            self.host.mark_written(sequence.slots)

    # -- decode ---------------------------------------------------------------------------------------------------

    def plan_decode(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor, page_table: torch.Tensor, new: int = 1
    ) -> DecodePlan:
        """Start a decode step.

        Args:
            rows: `[n]` working-set rows. seq_lens: `[n]` lengths, new tokens included.
            slots: `[n * new]` of the new tokens, sequence by sequence.
            page_table: `[n, columns]` host pages of each sequence in order; anything past its length.
            new: tokens per sequence, at most `chain`.
        """
        self.step += 1
        plan = DecodePlan(rows, seq_lens, slots, self.config, new)
        self.stats.decode_steps += 1
        self.stats.sparse_sequences += plan.sparse.numel()
        self.stats.dense_sequences += plan.dense.numel()
        if plan.sparse.numel():
            plan.crossing = (~self.was_sparse[plan.sparse_rows]).nonzero(as_tuple=True)[0]
        self.was_sparse[rows] = False
        self.was_sparse[plan.sparse_rows] = True
        self._start_pages(plan)
        self._find_tokens(plan)
        n, heads = rows.numel(), self.geometry.kv_heads
        plan.table = torch.zeros(n, heads, plan.columns, dtype=torch.int64)
        if plan.dense.numel():
            self._find_dense(plan)
        plan.layout = TableLayout(plan.tokens, plan.columns, self.geometry.page_size, new, self._new_k.dtype)
        if plan.sparse.numel():
            last = plan.pages[plan.sparse, -1]
            most = int(last.max()) + 1
            plan.sparse_host_pages = page_table[plan.sparse, :most]
            plan.sparse_host_pages = plan.sparse_host_pages.masked_fill(torch.arange(most) > last.view(-1, 1), 0)
            self._require_written(plan)
        return plan

    def _start_pages(self, plan: DecodePlan) -> None:
        """Give the pages that new tokens reach for the first time their places."""
        if plan.new == 1:
            starting = (plan.offsets[:, 0] == 0).nonzero(as_tuple=True)[0]
            if starting.numel():
                self.sets.start_page(plan.rows[starting], plan.tail_page[starting], self.step)
            return
        # A chain that was cut short may have started its last page already. Chains only move forward, so such a page
        # is in every chain until it is full, and must not be evicted until then.
        for pages in (plan.tail_page, plan.pages[:, -1]):
            missing = self.sets.slot_of[0, plan.rows, 0].gather(-1, pages.view(-1, 1)).squeeze(-1) == NONE
            starting = missing & ((plan.offsets[:, 0] == 0) | (pages != plan.tail_page))
            if bool(starting.any()):
                self.sets.start_page(plan.rows[starting], pages[starting], self.step)
            self.sets.touch_page(plan.rows, pages, self.step)

    def _find_tokens(self, plan: DecodePlan) -> None:
        """Where the new tokens go on the device."""
        n, heads, layers = plan.rows.numel(), self.geometry.kv_heads, self.geometry.layers
        wanted = plan.pages.view(1, n, 1, -1).expand(layers, n, heads, plan.new)
        slot = self.sets.slot_of[:, plan.rows].gather(-1, wanted).long()
        if bool((slot == NONE).any()):
            raise RuntimeError("a sequence was decoded whose newest page is not on the device")
        owned = self.sets.pages[plan.rows].view(1, n, 1, -1).expand(layers, n, heads, -1)
        pages = owned.gather(-1, slot)  # [layers, n, heads, new]
        layer = torch.arange(layers).view(-1, 1, 1, 1)
        plan.token_rows = self.sets.cells.rows[layer, pages, self.heads.view(-1, 1)].transpose(2, 3).contiguous()
        if plan.new > 1 and plan.sparse.numel():
            spills = plan.pages[plan.sparse, -1] != plan.sparse_tail
            plan.spill_rows = plan.token_rows[:, plan.sparse, -1].masked_fill(~spills.view(1, -1, 1), 0)

    def _find_dense(self, plan: DecodePlan) -> None:
        """A dense sequence holds page i in slot i for every layer and head."""
        pages = self.sets.pages[plan.rows[plan.dense]]
        needed = (plan.pages[plan.dense, -1] + 1).view(-1, 1)
        if bool((needed.squeeze(1) > self.sets.width[plan.rows[plan.dense]]).any()):
            raise RuntimeError("a dense sequence has outgrown its working set")
        held = pages[:, : min(plan.columns, pages.shape[1])]
        plan.dense_pages = held.masked_fill(torch.arange(held.shape[1]) >= needed, 0)

    def _rows_of(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Pool rows `[n, kv_heads, columns]` of device pages `[n, columns]`."""
        return self.sets.cells.rows[layer, pages].transpose(1, 2)

    def _require_written(self, plan: DecodePlan) -> None:
        """No page is scored or fetched before its owner wrote it."""
        page = self.geometry.page_size
        fill = self.host.fill[plan.sparse_host_pages]
        column = torch.arange(fill.shape[1])
        if bool(((fill < page) & (column < plan.sparse_tail.view(-1, 1))).any()):
            raise RuntimeError("a sequence was decoded whose pages the host pool does not hold")

    def decode(
        self, plan: DecodePlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer of a decode step; `q` `[n * t, Hq, D]`, `k` and `v` `[n * t, H, D]`; returns like `q`."""
        tokens = q.shape[0]
        self.transfer.wait(layer)
        if self.prefetcher is not None:
            self._go_without(layer, self.prefetcher.land(layer))
        if plan.dense.numel() and (layer == 0 or self.sets.cells.moved):
            plan.table[plan.dense, :, : plan.dense_pages.shape[1]] = self._rows_of(layer, plan.dense_pages)
        rows = plan.token_rows[layer].flatten(0, 1)
        self.ops.write_tokens(self._k_lanes[layer], self._v_lanes[layer], rows, plan.offsets.flatten(), k, v)
        self._new_k[layer, :tokens], self._new_v[layer, :tokens] = k, v
        q = q.view(plan.rows.numel(), plan.new, *q.shape[1:])
        if plan.sparse.numel() == 0:
            return self._attend(plan, layer, q, scale).flatten(0, 1)
        if layer < self.config.dense_layers:
            return self._decode_from_host(plan, layer, q, k, v, scale).flatten(0, 1)
        wait, predictor = self.config.miss_policy == "wait", self.config.predictor
        if wait:
            self._refresh(plan, layer, q[:, :1] if self.probe else q, scale)
            self.transfer.wait(layer)
        else:
            wanted = self._recall(plan, layer, q, scale)
            if samples(self.step, layer, self.geometry.layers):
                self._sample(plan, layer, q, wanted, scale)
            self.sets.fill_table(layer, plan.sparse_rows, wanted, plan.sparse_tail, plan.table, plan.sparse)
        if plan.new > 1:
            plan.table[plan.sparse, :, plan.sparse_pages - 1] = plan.spill_rows[layer]
        out = self._attend(plan, layer, q, scale)
        if not wait and predictor == "previous" and plan.new > 1:
            self._queries.append((layer, q, scale))
        elif not wait and predictor != "none":
            self._look_ahead(plan, layer, q, scale)
        elif wait and predictor == "draft" and self.probe and plan.new > 1 and self.prefetcher is not None:
            # The next step's token is the first draft, if that is right. The step itself needs nothing of this.
            picked = self._select(plan, layer, q[:, 1:2], scale, counted=False)
            self.prefetcher.plan(layer, plan.sparse_rows, picked, self.step)
        return out.flatten(0, 1)

    def _look_ahead(self, plan: DecodePlan, layer: int, q: torch.Tensor, scale: float) -> None:
        """`skip`: choose and fetch the next step's pages by the queries `[n, any, Hq, D]`."""
        picked = self._select(plan, layer, q, scale)
        self.chosen[layer, plan.sparse_rows] = picked.attended.to(torch.int32)
        if self.prefetcher is None:
            self.transfer.load(layer, *picked.loads)
        else:
            self.prefetcher.plan(layer, plan.sparse_rows, picked, self.step)
        if layer == self.geometry.layers - 1:
            self.chosen_tail[plan.sparse_rows] = plan.sparse_tail

    def finish_decode(self, plan: DecodePlan, accepted: torch.Tensor | None = None) -> None:
        """After the last layer: commit the step's tokens to the host pool and the summaries.

        Args:
            accepted: `[n]` how many of each sequence's new tokens are kept, at least 1; None: all.
        """
        n, t = plan.rows.numel(), plan.new
        if accepted is None:
            accepted = torch.full((n,), t)
        else:
            self.stats.verify_steps += n
            self.stats.accepted_tokens += int(accepted.sum())
        kept = torch.arange(t) < accepted.view(-1, 1)
        index = kept.flatten().nonzero(as_tuple=True)[0]
        self.host.write_step(plan.slots[index], self._new_k[:, index], self._new_v[:, index])
        for position in range(int(accepted.max())):  # summaries take one token per page at a time
            index = kept[:, position].nonzero(as_tuple=True)[0] * t + position
            self.summaries.append_step(plan.slots[index], self._new_k[:, index])
        last, sequences = accepted - 1, torch.arange(n)
        queries, self._queries = self._queries, []
        for layer, q, scale in queries:
            self._look_ahead(plan, layer, q[sequences, last].unsqueeze(1), scale)
        if self.prefetcher is not None:
            self.prefetcher.flush()

    def _attend(self, plan: DecodePlan, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        assert plan.layout is not None
        return self.ops.attend(q, self._k_rows[layer], self._v_rows[layer], plan.table, plan.layout, scale)

    def _select(
        self,
        plan: DecodePlan,
        layer: int,
        q: torch.Tensor,
        scale: float,
        which: torch.Tensor | None = None,
        counted: bool = True,
    ) -> Selection:
        """Score pages by the queries, and make room for misses up to the cap. The maps and `plan.table` say that they
        are there already.

        Args:
            q: `[n, any, Hq, D]`.
            which: positions in `plan.sparse` to do this for; None for all. The others' working sets stay as they are.
        """
        part = slice(None) if which is None else which
        picked = self.selector.refresh(
            layer,
            q[plan.sparse[part]],
            plan.sparse_rows[part],
            plan.sparse_tail[part],
            plan.sparse_host_pages[part],
            self.step,
            scale,
            plan.table,
            plan.sparse[part],
        )
        if counted:
            self.stats.selected += picked.attended.numel()
            self.stats.missed += picked.missed
            self.stats.dropped += picked.missed - picked.misses.shape[1]
        return picked

    def _refresh(
        self, plan: DecodePlan, layer: int, q: torch.Tensor, scale: float, which: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Select, fetch the misses, and return the pages to attend, all resident."""
        picked = self._select(plan, layer, q, scale, which)
        self.transfer.load(layer, *picked.loads)
        return picked.attended

    def _go_without(self, layer: int, late: Late | None) -> None:
        """Put what is resident in the place of chosen pages that did not come in time."""
        if late is None:
            return
        if late.host.size:
            self.transfer.load(layer, *(torch.from_numpy(x) for x in (late.host, late.host_heads, late.pool_rows)))
        if not self.chosen.numel():  # `wait` chooses anew
            return
        chosen = self.chosen[layer].numpy()
        match = chosen[late.rows, late.heads] == late.pages.reshape(-1, 1)
        piece, column = match.nonzero()
        chosen[late.rows[piece], late.heads[piece], column] = late.instead[piece]

    def _recall(self, plan: DecodePlan, layer: int, q: torch.Tensor, scale: float) -> torch.Tensor:
        """`skip`: the pages chosen at the end of the last step.

        A page that was the tail then was no candidate, so it takes the place of the least wanted. A sequence that was
        dense until now has nothing chosen, and everything resident: it chooses by its current query. Without a
        predictor the choice stays.
        """
        wanted = self.chosen[layer, plan.sparse_rows].long()
        fresh = plan.sparse_tail != self.chosen_tail[plan.sparse_rows]
        wanted[fresh, :, -1] = plan.sparse_tail[fresh].view(-1, 1) - 1
        if plan.crossing.numel():
            wanted[plan.crossing] = self._refresh(plan, layer, q, scale, plan.crossing)
        if self.config.predictor == "none":
            # nothing else keeps these pages from being evicted, or remembers what took a page's place
            self.chosen[layer, plan.sparse_rows] = wanted.to(torch.int32)
            self.sets.touch(layer, plan.sparse_rows, self._slots(layer, plan.sparse_rows, wanted), self.step)
            if layer == self.geometry.layers - 1:
                self.chosen_tail[plan.sparse_rows] = plan.sparse_tail
        return wanted

    def _sample(self, plan: DecodePlan, layer: int, q: torch.Tensor, attended: torch.Tensor, scale: float) -> None:
        """Compare the pages `[m, H, K]` that were chosen ahead with what the first new token's query chooses."""
        asking, tail = q[plan.sparse, 0], plan.sparse_tail
        rows = self.summaries.row_ids(plan.sparse_host_pages).transpose(1, 2)
        scores = self.summaries.score(self.ops, layer, asking, rows, tail, scale)
        self.lookahead.count_agreement(attended, select_pages(scores, tail, self.config))
        if not self.config.debug_attention_mass:
            return
        lanes = self._k_lanes[layer][plan.token_rows[layer, plan.sparse, 0]]  # [m, H, page, D]
        for i, sequence in enumerate(plan.sparse.tolist()):
            full = self.host.read_keys(layer, plan.sparse_host_pages[i, : tail[i]]).transpose(0, 1)
            new = lanes[i, :, : int(plan.offsets[sequence, 0]) + 1]
            self.lookahead.count_mass(KeysOfSequence(asking[i], full, new), attended[i], scale)

    def _slots(self, layer: int, rows: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        return self.sets.slot_of[layer, rows].gather(-1, pages).long()

    def _decode_from_host(
        self, plan: DecodePlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """A dense layer of sparse sequences: attend to everything, read from the host pool."""
        out = torch.empty_like(q)
        if plan.dense.numel():
            out[plan.dense] = self._attend(plan, layer, q, scale)[plan.dense]
        page, sparse = self.geometry.page_size, plan.sparse
        slots = plan.slots.view(-1, plan.new)[sparse].flatten()
        for side, x in ((0, k), (1, v)):
            new = x.view(-1, plan.new, *x.shape[1:])[sparse].flatten(0, 1)
            self.host.kv[slots // page, layer, :, side, slots % page] = new.view(self.host.store_dtype)
        host_rows = self.host.rows.view(self.host.dtype)
        table = self.host.row_ids(layer, plan.sparse_host_pages.unsqueeze(1), self.heads.view(1, -1, 1))
        table = table.masked_fill(plan.sparse_host_pages.unsqueeze(1) == 0, 0)
        if plan.host_layout is None:
            plan.host_layout = TableLayout(plan.seq_lens[sparse], table.shape[-1], page, plan.new, q.dtype)
        out[sparse] = self.ops.attend(q[sparse], host_rows[:, 0], host_rows[:, 1], table, plan.host_layout, scale)
        return out

    # -- state ----------------------------------------------------------------------------------------------------

    def read_stats(self) -> None:
        """Bring `stats` up to date, where not all of it is counted by the host."""

    def in_flight(self) -> int:
        return self.transfer.in_flight() + (self.prefetcher.in_flight() if self.prefetcher is not None else 0)

    def check_integrity(self) -> None:
        self.sets.check_integrity()
        if self.prefetcher is not None:
            self.prefetcher.check_integrity()
        else:
            self.sets.cells.check_integrity()
        assert not self._k_lanes[0][: self.geometry.kv_heads].any(), "the reserved page was written"
