"""How many tokens the two pools hold: from flags and configuration, checked against the memory that is there."""

from __future__ import annotations

import math

import msgspec

from oasis_sglang.config import SPARE_DIVISOR, OasisConfig

GIB = 1 << 30
# Left alone for everything else on the machine; SGLang's own host-pool sizing keeps back 10 GiB, which would refuse a
# small host outright, so take a tenth and never more than that.
RESERVE_SHARE = 0.1
RESERVE_MAX = 10 * GIB
# SGLang admits a request only where its input, its output to come and a page more than that are free. Without these
# pages beyond the context length, the longest prompts that it accepts would wait for ever.
SPARE_PAGES = 2


class PoolGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one rank's KV. `itemsize` in bytes; `sketch` are the dimensions of a key that its sketch keeps, none
    where key summaries are the largest and smallest key of a page."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: int
    page_size: int
    sketch: tuple[int, ...] = ()

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers and this rank's KV heads."""
        return self.layers * self.kv_heads * 2 * self.head_dim * self.itemsize

    @property
    def summary_page_bytes(self) -> int:
        """Bytes of one page's key summaries over all layers and KV heads: a minimum and a maximum key, or every key in
        half a byte per dimension with a 2-byte scale, in blocks of 16 tokens."""
        if self.sketch:
            return self.layers * self.kv_heads * -(-self.page_size // 16) * 16 * (len(self.sketch) // 2 + 2)
        return self.layers * self.kv_heads * 2 * self.head_dim * self.itemsize


class PoolPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of one rank's pools; token counts are multiples of the page size and exclude the reserved page."""

    host_tokens: int
    device_tokens: int
    host_bytes: int
    device_bytes: int
    summary_bytes: int
    draft_bytes: int
    spare_pages: int  # of the device pool, for copies in flight
    local_ranks: int

    def describe(self) -> str:
        """The line printed at start: GB per rank and in all."""
        return (
            f"Oasis host KV pool: {self.host_tokens} tokens, {self.host_bytes / 1e9:.2f} GB per rank, "
            f"{self.host_bytes * self.local_ranks / 1e9:.2f} GB in all ({self.local_ranks} local rank"
            f"{'s' if self.local_ranks > 1 else ''}); device KV pool: {self.device_tokens} tokens, "
            f"{self.device_bytes / 1e9:.2f} GB, key summaries {self.summary_bytes / 1e9:.2f} GB"
            + (f", draft KV {self.draft_bytes / 1e9:.2f} GB" if self.draft_bytes else "")
        )


def plan_pools(
    config: OasisConfig,
    geometry: PoolGeometry,
    *,
    context_len: int,
    max_total_tokens: int | None,
    memory_budget: int,
    available_memory: int,
    local_ranks: int,
    device_is_host: bool = False,
    chain: int = 1,
    draft_token_bytes: int = 0,
) -> PoolPlan:
    """Size the host and the device pool of one rank.

    Args:
        max_total_tokens: what the user gave for `--max-total-tokens`: the device pool, as in dense SGLang.
        memory_budget: bytes all pools of this rank may take where the user sized neither pool.
        available_memory: bytes free on this machine (cgroup included) for the host pools of all its ranks.
        local_ranks: ranks that take a host pool from this machine's memory.
        device_is_host: the device pool and the key summaries take this machine's memory too (a CPU host).
        chain: tokens per sequence and step; more than 1 with speculation.
        draft_token_bytes: bytes of a draft model's KV of one token; all of it is on the device.

    Raises:
        ValueError: a pool that cannot hold one sequence, or pools that the machine's memory cannot hold.
    """
    page, token = config.page_size, geometry.token_bytes
    set_pages = config.max_set_pages + (chain > 1)
    # SGLang reserves slots for two chains ahead.
    ahead = -(-2 * chain // page) * page if chain > 1 else 0
    ratio = config.host_to_device_ratio
    if max_total_tokens is not None:
        device = max_total_tokens
    elif config.host_size_gb is not None:
        device = int(config.host_size_gb * 1e9 / token / ratio)
    else:
        # host + host / ratio + summaries and a draft's KV of every host page
        per_host_token = token * (1 + 1 / ratio) + geometry.summary_page_bytes / page + draft_token_bytes
        device = int(memory_budget / per_host_token / ratio)
        # A small default must still serve: one working set, where the user asked for no size at all.
        device = max(device, 2 * (set_pages + 1) * page)
    host = int(config.host_size_gb * 1e9 / token) if config.host_size_gb is not None else int(device * ratio)
    sequence = -(-context_len // page) * page + SPARE_PAGES * page + ahead
    if max_total_tokens is None and config.host_size_gb is None:
        host = max(host, sequence)
    device, host = device // page * page, host // page * page

    spare = config.spare_pages(device // page)
    need = set_pages + 1
    need += config.spare_pages(need * SPARE_DIVISOR // (SPARE_DIVISOR - 1) + 1) if spare else 0
    if device // page < need:
        raise ValueError(
            f"The device pool of {device} tokens (--max-total-tokens={max_total_tokens}) cannot hold one request's "
            f"working set of {need * page} tokens (token_budget={config.token_budget}, "
            f"slack_ratio={config.slack_ratio}, min_sparse_len={config.min_sparse_len}). Use --max-total-tokens "
            f"{need * page} or more, or a smaller token_budget."
        )
    if host < sequence:
        shorter = host - SPARE_PAGES * page - ahead
        raise ValueError(
            f"The host pool of {host} tokens ({host * token / 1e9:.2f} GB per rank) is smaller than one sequence of "
            f"{context_len} tokens (context length) with {SPARE_PAGES} spare pages, {sequence} tokens. Use "
            f"host_size_gb={math.ceil(sequence * token / 1e7) / 100} or more, a larger host_to_device_ratio "
            f"(now {ratio})" + (f", or --context-length {shorter} or less." if shorter > 0 else ".")
        )
    plan = PoolPlan(
        host_tokens=host,
        device_tokens=device,
        host_bytes=(host + page) * token,
        device_bytes=(device + page) * token,
        summary_bytes=(host // page + 1) * geometry.summary_page_bytes,
        draft_bytes=(host + page) * draft_token_bytes,
        spare_pages=spare,
        local_ranks=local_ranks,
    )
    per_rank, what = plan.host_bytes, "host pools need"
    if device_is_host:
        per_rank, what = (
            per_rank + plan.device_bytes + plan.summary_bytes + plan.draft_bytes,
            "host and device pools, key summaries and draft KV need",
        )
    reserve = min(int(available_memory * RESERVE_SHARE), RESERVE_MAX)
    if per_rank * local_ranks > available_memory - reserve:
        raise ValueError(
            f"The {what} {per_rank * local_ranks / GIB:.2f} GiB ({per_rank / GIB:.2f} GiB per rank, "
            f"{local_ranks} local ranks), but {(available_memory - reserve) / GIB:.2f} GiB are available "
            f"({available_memory / GIB:.2f} GiB free here or in this cgroup, {reserve / GIB:.2f} GiB kept in reserve). "
            "Lower host_size_gb or host_to_device_ratio, or --max-total-tokens."
        )
    return plan
