"""Kernels that copy and summarise against the host pool, the key summaries and `TorchOps`, to the byte."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check_pages import host_pool
from benchmarks.gpu_scale import Scale
from benchmarks.gpu_stage import Item
from benchmarks.gpu_verdict import equal
from oasis_sglang.attention.torch_ops import TorchOps
from oasis_sglang.kernels.backup import backup, write_tokens
from oasis_sglang.kernels.gather import gather
from oasis_sglang.kernels.summaries import append_minmax, append_sketches, build_minmax, build_sketches
from oasis_sglang.memory_pool.sketch import KeySketches
from oasis_sglang.memory_pool.summaries import KeySummaries

PAGES, LAYERS = 24, 2
PROGRAMS = (1, 16, 64)


def items(scale: Scale) -> list[Item]:
    return [
        *(Item(f"gather by {count} programs", 4.0, partial(check_gather, scale, count)) for count in PROGRAMS),
        Item("write_tokens", 4.0, partial(check_write, scale)),
        *(Item(f"backup t={t}", 4.0, partial(check_backup, scale, t)) for t in (1, 4)),
        Item("build summaries", 6.0, partial(check_build, scale)),
        *(Item(f"append summaries t={t}", 6.0, partial(check_append, scale, t)) for t in (1, 5)),
    ]


def on_host(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    """A copy in host memory that the device can reach."""
    return x.clone().pin_memory() if scale.device.type == "cuda" else x.clone()


def noise(scale: Scale, seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(scale.dtype)


def check_gather(scale: Scale, programs: int) -> dict[str, Any]:
    """Lists of which some are empty and some full; what is past their ends is no page and no row."""
    random = torch.Generator().manual_seed(1)
    host = host_pool(scale, PAGES, layers=LAYERS)
    host.kv.copy_(noise(scale, 2, *host.kv.shape))
    n, heads, cap = 3, scale.kv_heads, 5
    count = torch.randint(0, cap + 1, (n, heads), generator=random, dtype=torch.int32)
    count[0], count[1] = 0, cap
    past = torch.arange(cap) >= count.unsqueeze(-1)
    pages = torch.randint(1, PAGES + 1, (n, heads, cap), generator=random).masked_fill(past, -1)
    rows = torch.randperm(2 * past.numel(), generator=random)[: past.numel()].view(past.shape).masked_fill(past, -1)
    width = scale.page * scale.head_dim
    pools = [noise(scale, 3 + side, 2 * past.numel(), width) for side in (0, 1)]
    got = [x.clone().to(scale.device) for x in pools]
    sequence, head, nth = (~past).nonzero(as_tuple=True)
    pieces = host.rows[host.row_ids(1, pages[sequence, head, nth], head)]
    for side in (0, 1):
        pools[side][rows[sequence, head, nth]] = pieces[:, side]
    lists = (x.to(scale.device) for x in (pages, rows, count))
    gather(on_host(host.kv, scale), 1, *got, *lists, programs=programs)
    shape = f"{sequence.numel()} pieces of {scale.piece_bytes} bytes"
    return equal(["gather"], shape, {"K": (got[0], pools[0]), "V": (got[1], pools[1])})


def check_write(scale: Scale) -> dict[str, Any]:
    """From views of a fused projection, and nothing for a row that is no one's."""
    n, heads, dim, rows_of_pool = 4, scale.kv_heads, scale.head_dim, 64
    random = torch.Generator().manual_seed(4)
    rows = torch.randperm(rows_of_pool, generator=random)[: n * heads].view(n, heads)
    offsets = torch.randint(0, scale.page, (n,), generator=random)
    fused = noise(scale, 5, n, 2 * heads, dim)
    lanes = [noise(scale, 6 + side, rows_of_pool, scale.page, dim) for side in (0, 1)]
    got = [x.clone().to(scale.device) for x in lanes]
    TorchOps().write_tokens(*lanes, rows[:-1], offsets[:-1], fused[:-1, :heads], fused[:-1, heads:])
    rows[-1] = -1
    at = fused.to(scale.device)
    write_tokens(*got, rows.to(scale.device), offsets.to(scale.device), at[:, :heads], at[:, heads:])
    return equal(["write_tokens"], f"n={n}", {"K": (got[0], lanes[0]), "V": (got[1], lanes[1])})


class Chains:
    """Sequences of `t` new tokens each, from inside a page on or at its end, of which some are kept."""

    def __init__(self, scale: Scale, t: int) -> None:
        page = scale.page
        self.accepted = torch.tensor([t, 0, 1, max(t - 1, 1)])
        starts = torch.tensor([2 * page - 2, 5 * page, 7 * page + 3, 9 * page - 1])
        self.slots = (starts.view(-1, 1) + torch.arange(t)).flatten()
        self.kept = (torch.arange(t) < self.accepted.view(-1, 1)).flatten()
        shape = (LAYERS, 4 * t, scale.kv_heads, scale.head_dim)
        self.k, self.v = noise(scale, 7, *shape), noise(scale, 8, *shape)


def check_backup(scale: Scale, t: int) -> dict[str, Any]:
    host, chains = host_pool(scale, PAGES, layers=LAYERS), Chains(scale, t)
    got = on_host(host.kv, scale)
    host.write_step(chains.slots[chains.kept], chains.k[:, chains.kept], chains.v[:, chains.kept])
    backup(got, *(x.to(scale.device) for x in (chains.slots, chains.accepted, chains.k, chains.v)))
    if scale.device.type == "cuda":
        torch.cuda.synchronize()
    return equal(["backup"], f"n=4 t={t} layers={LAYERS}", {"host pool": (got, host.kv)})


class Summaries:
    """Both kinds over one host pool, random before anything is written, and copies of their tables on the device."""

    def __init__(self, scale: Scale) -> None:
        host = host_pool(scale, PAGES, layers=LAYERS)
        self.bounds, self.sketches = KeySummaries(host), KeySketches(host)
        self.bounds.table.copy_(noise(scale, 9, *self.bounds.table.shape))
        self.sketches.table.random_(256, generator=torch.Generator().manual_seed(10))
        self.got_bounds = self.bounds.table.clone().to(scale.device)
        self.got_codes = self.sketches.table.clone().to(scale.device)
        self.dims = self.sketches.dims.to(scale.device)

    @property
    def pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"minmax": (self.got_bounds, self.bounds.table), "sketch": (self.got_codes, self.sketches.table)}


def check_build(scale: Scale) -> dict[str, Any]:
    """Whole pages and a last one that is partly filled, over lanes that hold no numbers."""
    made, last = Summaries(scale), scale.page // 2 + 1
    pages = torch.tensor([7, 3, 11])
    keys = noise(scale, 11, 3, scale.kv_heads, scale.page, scale.head_dim)
    keys[0, :, 1] = 0  # a key of zeros has no scale
    keys[-1, :, last:] = torch.nan
    for summaries in (made.bounds, made.sketches):
        summaries.rebuild(1, pages, keys, last)
    at_pages, at_keys = pages.to(scale.device), keys.to(scale.device)
    build_minmax(made.got_bounds[1], at_pages, at_keys, last)
    build_sketches(made.got_codes[1], made.dims, at_pages, at_keys, last)
    return equal(["build_minmax", "build_sketches"], f"pages=3 kept={made.dims.numel()}", made.pairs)


def check_append(scale: Scale, t: int) -> dict[str, Any]:
    made, chains = Summaries(scale), Chains(scale, t)
    for j in range(t):  # the torch twins take one token per page at a time
        at = (chains.accepted > j).nonzero()[:, 0] * t + j
        for summaries in (made.bounds, made.sketches):
            summaries.append_step(chains.slots[at], chains.k[:, at])
    slots, accepted, keys = (x.to(scale.device) for x in (chains.slots, chains.accepted, chains.k))
    append_minmax(made.got_bounds, slots, accepted, keys, scale.page)
    append_sketches(made.got_codes, made.dims, slots, accepted, keys, scale.page)
    return equal(["append_minmax", "append_sketches"], f"n=4 t={t} layers={LAYERS}", made.pairs)
