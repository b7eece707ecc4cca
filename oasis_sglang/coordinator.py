"""Where SGLang's scheduler and the tier meet in a rank process: sizing, admission, the life of requests, state.

One KV pool per rank process, so this module is the one place that holds it. Nothing here runs unless `--kv-backend
oasis` was given: without it `active()` is None and every hook returns at once.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.sizing import PoolGeometry, PoolPlan
from oasis_sglang.speculative.prompt_lookup import PromptLookup

if TYPE_CHECKING:
    from oasis_sglang.attention.page_table import DecodePlan
    from oasis_sglang.memory_pool.device_bytes import DeviceLoad
    from oasis_sglang.memory_pool.device_tier import DevicePlan
    from oasis_sglang.memory_pool.prefetch.supervisor import Workers
    from oasis_sglang.memory_pool.tier import KVTier
    from oasis_sglang.memory_pool.working_set import Attempt

logger = logging.getLogger(__name__)


class Setup(NamedTuple):
    """What the pool is built from."""

    config: OasisConfig
    geometry: PoolGeometry
    plan: PoolPlan
    rows: int
    context_len: int
    chain: int = 1  # tokens per sequence and step: with speculation the last accepted one and its drafts
    load: DeviceLoad | None = None  # what a device with memory of its own serves; None on a CPU host
    prompt_lookup_min: int = 0  # tokens that must repeat for drafts to be copied; 0: none are


class Coordinator:
    """Ties request rows of SGLang (`req_pool_idx`) to attempts on the device."""

    def __init__(self, tier: KVTier, setup: Setup, workers: Workers | None = None) -> None:
        self.tier = tier
        self.workers = workers
        self.setup = setup
        self._attempts: dict[int, Attempt] = {}
        self._prompts: dict[int, int] = {}  # tokens that the request of a row came with
        self._row_of = torch.full((1,), -1, dtype=torch.int64, device=tier.heads.device)
        self._verifying: DecodePlan | DevicePlan | None = None
        self._lookup: PromptLookup | None = None
        if setup.prompt_lookup_min:
            self._lookup = PromptLookup(
                setup.rows, setup.context_len, setup.chain, setup.prompt_lookup_min, tier.heads.device
            )

    # -- admission ------------------------------------------------------------------------------------------------

    def pages_needed(self, req: Any) -> int:
        """Device pages a request will need before it ends: its input and the output to come, or a full working set."""
        output = max(int(req.sampling_params.max_new_tokens or 0), len(req.output_ids))
        return self.tier.pages_for(len(req.origin_input_ids) + output + 1)

    def has_room(self, req: Any, promised: list[Any]) -> bool:
        """Whether a request may join those that this scheduling pass has already let in.

        Args:
            promised: requests admitted in this pass; those without a row have not taken their pages yet.
        """
        waiting = [r for r in promised if r.kv.req_pool_idx is None]
        pages = self.pages_needed(req) + sum(self.pages_needed(r) for r in waiting)
        return pages <= self.tier.sets.free_pages and len(waiting) < self.tier.sets.free_rows

    # -- life of a request ----------------------------------------------------------------------------------------

    def enter(self, reqs: list[Any]) -> None:
        """Requests have got their rows in `req_to_token`: take device pages for those that are new."""
        for req in reqs:
            index = req.kv.req_pool_idx
            if index in self._attempts:
                continue
            attempt = self.tier.reserve(
                len(req.origin_input_ids) + max(int(req.sampling_params.max_new_tokens or 0), len(req.output_ids)) + 1
            )
            if attempt is None:
                raise RuntimeError(
                    f"request {req.rid} was scheduled with {self.tier.sets.free_pages} device pages free, it needs "
                    f"{self.pages_needed(req)}"
                )
            self._attempts[index] = attempt
            self._prompts[index] = len(req.origin_input_ids)
            self._remember(index, attempt.row)
            if self._lookup is not None:
                self._lookup.enter(attempt.row, [*req.origin_input_ids, *req.output_ids])

    def leave(self, indices: list[int]) -> None:
        """Rows were given back (finished, aborted or retracted): so are the device pages."""
        for index in indices:
            attempt = self._attempts.pop(index, None)
            if attempt is not None:
                self.tier.release(attempt)
                self._prompts.pop(index)
                self._remember(index, -1)

    def leave_all(self) -> None:
        self.leave(list(self._attempts))

    def _remember(self, index: int, row: int) -> None:
        if index >= self._row_of.numel():
            grown = torch.full((2 * index + 1,), -1, dtype=torch.int64, device=self._row_of.device)
            grown[: self._row_of.numel()] = self._row_of
            self._row_of = grown
        self._row_of[index] = row

    def rows(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """Working-set rows of running requests.

        Raises:
            RuntimeError: a request that was never admitted to the device.
        """
        rows = self.known_rows(req_pool_indices)
        if bool((rows < 0).any()):
            raise RuntimeError(
                f"requests in rows {req_pool_indices[rows < 0].tolist()} run without having been admitted to the device"
            )
        return rows

    def known_rows(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """The same without a look at the result: -1 for requests that were never admitted."""
        known = req_pool_indices < self._row_of.numel()
        return self._row_of[req_pool_indices.masked_fill(~known, 0)].masked_fill(~known, -1)

    def prompts(self, req_pool_indices: torch.Tensor) -> list[int]:
        """Tokens that running requests came with: what else they extend by was decoded before a retraction."""
        return [self._prompts[index] for index in req_pool_indices.tolist()]

    # -- speculation ----------------------------------------------------------------------------------------------

    def drafts(self, batch: Any, newest: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """The chains to verify, for those that the draft model proposes.

        Args:
            batch: SGLang's `ScheduleBatch`.
            newest: `[n]` the last accepted token of each request.
            drafts: `[n, k]`.
        """
        if self._lookup is None:
            return drafts
        # What the host knows may be two steps behind.
        longest = max(len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs) + 3 * self.setup.chain
        rows = self.known_rows(batch.req_pool_indices)
        return self._lookup.propose(rows, batch.seq_lens.to(torch.int64), newest, drafts, longest)

    def verifying(self, plan: DecodePlan | DevicePlan) -> None:
        """A chain of drafts went through the target: nothing of it is committed before `accept`."""
        self._verifying = plan

    def accept(self, accepted: torch.Tensor) -> None:
        """Commit the accepted tokens of the step that was verified.

        Args:
            accepted: `[n]` tokens kept per sequence, at least 1.
        """
        plan, self._verifying = self._verifying, None
        if plan is None:
            raise RuntimeError("drafts were accepted that were not verified")
        self.tier.finish_decode(plan, accepted.to(torch.int64))  # type: ignore[arg-type]

    # -- slots ----------------------------------------------------------------------------------------------------

    def pages_freed(self, pages: torch.Tensor) -> None:
        self.tier.invalidate(pages)

    def pool_cleared(self) -> None:
        """SGLang's allocator starts anew (`/flush_cache`)."""
        self.tier.clear()

    # -- state ----------------------------------------------------------------------------------------------------

    def idle(self) -> bool:
        if self.tier.in_flight() == 0:
            return True
        if self.workers is not None:  # no step is disturbed now
            self.workers.replace_stopped()
        return False

    def check_idle(self) -> None:
        """Raise unless nothing is held; called when SGLang checks for leaks."""
        self.tier.check_integrity()
        sets = self.tier.sets
        if sets.requests or sets.owned_pages:
            raise RuntimeError(
                f"oasis leak: {sets.requests} working sets and {sets.owned_pages} device pages are held while idle"
            )

    def state(self) -> dict[str, Any]:
        """What `/server_info` shows and the metrics are made of."""
        tier, plan, page = self.tier, self.setup.plan, self.setup.geometry.page_size
        tier.read_stats()
        stats, transfer = tier.stats, tier.transfer.stats
        return {
            "config": self.setup.config.as_dict(),
            "host_tokens_total": plan.host_tokens,
            "host_tokens_written": int(tier.host.fill.sum()),
            "host_pool_bytes": plan.host_bytes,
            "device_tokens_total": plan.device_tokens,
            "device_tokens_used": tier.sets.owned_pages * page,
            "device_pool_bytes": plan.device_bytes,
            "summary_bytes": tier.summaries.nbytes,
            "working_sets": tier.sets.requests,
            "working_sets_total": self.setup.rows,
            "decode_steps_total": stats.decode_steps,
            "sparse_sequences_total": stats.sparse_sequences,
            "dense_sequences_total": stats.dense_sequences,
            "selected_pages_total": stats.selected,
            "hits_total": stats.selected - stats.missed,
            "misses_total": stats.missed,
            "dropped_misses_total": stats.dropped,
            "fetched_pages_total": transfer.pages,
            "fetched_bytes_total": transfer.bytes,
            "stall_seconds_total": transfer.seconds,
            "extend_fetched_pages_total": stats.extend_pages,
            "extend_stall_seconds_total": stats.extend_seconds,
            "load_back_tokens_total": stats.load_back_tokens,
            "lookahead_pages_total": tier.lookahead.pages,
            "lookahead_agreed_pages_total": tier.lookahead.agreed,
            "lookahead_agreement": tier.lookahead.agreement,
            "attention_mass": tier.lookahead.mean_mass,
            "verify_steps_total": stats.verify_steps,
            "accepted_tokens_total": stats.accepted_tokens,
            "copied_chains_total": int(self._lookup.copied) if self._lookup is not None else 0,
            "stale_releases_total": tier.sets.stale_releases,
            "transfers_in_flight": tier.in_flight(),
            **self._prefetch_state(),
        }

    def _prefetch_state(self) -> dict[str, Any]:
        prefetcher, workers = self.tier.prefetcher, self.workers
        if prefetcher is None or workers is None:
            return {}
        pages, plans = prefetcher.stats, prefetcher.client.stats
        return {
            "prefetch_issued_pages_total": pages.issued,
            "prefetch_used_pages_total": pages.used,
            "prefetch_late_pages_total": pages.late,
            "prefetch_wasted_pages_total": pages.wasted,
            "prefetch_dropped_pages_total": pages.dropped,
            "prefetch_rank_seconds_total": pages.seconds,
            "prefetch_dropped_plans_total": plans.plans_dropped,
            "prefetch_stale_completions_total": plans.stale_completions,
            "prefetch_bad_messages_total": plans.bad_messages + workers.bad_messages,
            "prefetch_copied_bytes_total": plans.bytes,
            "prefetch_copy_seconds_total": plans.copy_seconds,
            "prefetch_worker_restarts_total": workers.restarts,
            "prefetch_queued_plans": prefetcher.client.outstanding,
            "prefetch_workers": workers.count,
            "prefetch_workers_ready": len(workers.ready()),
            "prefetch_worker_pids": [workers.pid(i) for i in range(workers.count)],
        }


_setup: Setup | None = None
_active: Coordinator | None = None


def prepare(setup: Setup) -> None:
    """The configurator has planned the pools; the pool that it builds next takes the plan."""
    global _setup
    _setup = setup


def take_setup() -> Setup:
    global _setup
    if _setup is None:
        raise RuntimeError("a KV pool was built before its size was planned")
    setup, _setup = _setup, None
    return setup


def start(tier: KVTier, setup: Setup, workers: Workers | None = None) -> Coordinator:
    global _active
    _active = Coordinator(tier, setup, workers)
    logger.info(setup.plan.describe())
    return _active


def active() -> Coordinator | None:
    return _active


def stop() -> None:
    """Forget the pool; for tests."""
    global _active, _setup
    _active = _setup = None
