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


def sequence_pages(context_len: int, page_size: int) -> int:
    """Pages of the longest sequence, with one more that its last step may begin."""
    return -(-(context_len + page_size) // page_size)


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A device with memory of its own, in bytes; `device_bytes.py` counts them."""

    available: int  # for all that follows
    work: int  # what does not depend on the sizes of the pools: maps, buffers and workspaces
    page: int  # for each page of the device pool
    host_page: int  # for each page of the host pool

    def taken(self, host_tokens: int, device_tokens: int, page_size: int) -> int:
        """By pools of these sizes, their reserved pages included."""
        pages, host_pages = device_tokens // page_size + 1, host_tokens // page_size + 1
        return self.work + pages * self.page + host_pages * self.host_page

    def device_tokens(self, ratio: float, page_size: int) -> int:
        """The largest device pool that there is room for, with a host pool `ratio` times its size."""
        room = self.available - self.work - self.page - self.host_page
        return max(int(room / (self.page + ratio * self.host_page)), 0) * page_size


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
    work_bytes: int = 0  # of the maps, buffers and workspaces of a device with memory of its own

    def describe(self) -> str:
        """The line printed at start: GB per rank and in all."""
        return (
            f"Oasis host KV pool: {self.host_tokens} tokens, {self.host_bytes / 1e9:.2f} GB per rank, "
            f"{self.host_bytes * self.local_ranks / 1e9:.2f} GB in all ({self.local_ranks} local rank"
            f"{'s' if self.local_ranks > 1 else ''}); device KV pool: {self.device_tokens} tokens, "
            f"{self.device_bytes / 1e9:.2f} GB, key summaries {self.summary_bytes / 1e9:.2f} GB"
            + (f", draft KV {self.draft_bytes / 1e9:.2f} GB" if self.draft_bytes else "")
            + (f", maps and workspaces {self.work_bytes / 1e9:.2f} GB" if self.work_bytes else "")
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
    on_device: DeviceMemory | None = None,
) -> PoolPlan:
    """Size the host and the device pool of one rank.

    Args:
        max_total_tokens: what the user gave for `--max-total-tokens`: the device pool, as in dense SGLang.
        memory_budget: bytes all pools of this rank may take where the user sized neither pool and the device has no
            memory of its own.
        available_memory: bytes free on this machine (cgroup included) for the host pools of all its ranks.
        local_ranks: ranks that take a host pool from this machine's memory.
        device_is_host: the device pool and the key summaries take this machine's memory too (a CPU host).
        chain: tokens per sequence and step; more than 1 with speculation.
        draft_token_bytes: bytes of a draft model's KV of one token; all of it is on the device.
        on_device: the memory of a device that has its own; it is filled where the user sized neither pool.

    Raises:
        ValueError: a pool that cannot hold one sequence, or pools that the machine's memory cannot hold.
    """
    page, token = config.page_size, geometry.token_bytes
    set_pages = config.max_set_pages + (chain > 1)
    # SGLang reserves slots for two chains ahead.
    ahead = -(-2 * chain // page) * page if chain > 1 else 0
    ratio = config.host_to_device_ratio
    reserve = min(int(available_memory * RESERVE_SHARE), RESERVE_MAX)
    if max_total_tokens is not None:
        device = max_total_tokens
    elif config.host_size_gb is not None:
        device = int(config.host_size_gb * 1e9 / token / ratio)
    elif on_device is not None:
        device = on_device.device_tokens(ratio, page)
    else:
        # host + host / ratio + summaries and a draft's KV of every host page
        per_host_token = token * (1 + 1 / ratio) + geometry.summary_page_bytes / page + draft_token_bytes
        device = int(memory_budget / per_host_token / ratio)
        # A small default must still serve: one working set, where the user asked for no size at all.
        device = max(device, 2 * (set_pages + 1) * page)
    host = int(config.host_size_gb * 1e9 / token) if config.host_size_gb is not None else int(device * ratio)
    sequence = -(-context_len // page) * page + SPARE_PAGES * page + ahead
    if max_total_tokens is None and config.host_size_gb is None:
        if on_device is not None:  # which may be larger than the machine's memory divided by the ratio
            host = min(host, (available_memory - reserve) // local_ranks // token - page)
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
    if on_device is not None and (taken := on_device.taken(host, device, page)) > on_device.available:
        raise ValueError(
            f"The device pool of {device} tokens, summaries and draft KV of {host} host tokens, maps and workspaces "
            f"need {taken / GIB:.2f} GiB on the device, {on_device.available / GIB:.2f} GiB are available. Lower "
            "--max-total-tokens or host_size_gb, --max-running-requests or --context-length."
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
    if on_device is not None:
        rest = on_device.taken(host, device, page) - plan.device_bytes - plan.summary_bytes - plan.draft_bytes
        plan = msgspec.structs.replace(plan, work_bytes=rest)
    per_rank, what = plan.host_bytes, "host pools need"
    if device_is_host:
        per_rank, what = (
            per_rank + plan.device_bytes + plan.summary_bytes + plan.draft_bytes,
            "host and device pools, key summaries and draft KV need",
        )
    if per_rank * local_ranks > available_memory - reserve:
        raise ValueError(
            f"The {what} {per_rank * local_ranks / GIB:.2f} GiB ({per_rank / GIB:.2f} GiB per rank, "
            f"{local_ranks} local ranks), but {(available_memory - reserve) / GIB:.2f} GiB are available "
            f"({available_memory / GIB:.2f} GiB free here or in this cgroup, {reserve / GIB:.2f} GiB kept in reserve). "
            "Lower host_size_gb or host_to_device_ratio, or --max-total-tokens."
        )
    return plan
