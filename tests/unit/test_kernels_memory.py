"""Kernels that move and summarise: copies to the device pool and the host pool, key summaries, to the byte."""

from __future__ import annotations

import random

import pytest
import torch

from oasis_sglang.attention.torch_ops import TorchOps
from oasis_sglang.kernels.backup import backup, same_bytes, write_tokens
from oasis_sglang.kernels.gather import gather
from oasis_sglang.kernels.summaries import append_minmax, append_sketches, build_minmax, build_sketches
from oasis_sglang.memory_pool.host_pool import HostPool
from oasis_sglang.memory_pool.sizing import PoolGeometry
from oasis_sglang.memory_pool.sketch import KeySketches, every_dim, slow_half
from oasis_sglang.memory_pool.summaries import KeySummaries
from tests.unit.far import FarPool

pytestmark = pytest.mark.interpreter

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn)


def noise(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def host_pool(seed: int, dtype: torch.dtype, *, page: int, dim: int, heads: int, layers: int = 2) -> HostPool:
    """Of random bytes."""
    g = PoolGeometry(
        layers=layers,
        kv_heads=heads,
        head_dim=dim,
        itemsize=dtype.itemsize,
        page_size=page,
        sketch=slow_half(dim) if dim % 16 == 0 and seed % 2 else every_dim(dim),
    )
    host = HostPool(20, g, dtype)
    host.kv.copy_(same_bytes(noise(seed, *host.kv.shape, dtype=dtype)))
    return host


class Misses:
    """Lists of which some are empty and some full; what is past their ends is no page and no row."""

    def __init__(self, seed: int, heads: int, cap: int, rows: int) -> None:
        draw, sequences = random.Random(seed), 3
        self.count = torch.tensor(
            [[draw.choice([0, cap, draw.randint(0, cap)]) for _ in range(heads)] for _ in range(sequences)],
            dtype=torch.int32,
        )
        shape = (sequences, heads, cap)
        past = torch.arange(cap) >= self.count.unsqueeze(-1)
        self.pages = torch.randint(1, 20, shape, generator=torch.Generator().manual_seed(seed)).masked_fill(past, -1)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[: past.numel()]
        self.rows = order.view(shape).masked_fill(past, -1)
        self.sequence, self.head, self.nth = (~past).nonzero(as_tuple=True)


@pytest.mark.parametrize("seed", range(6))
def test_pieces_arrive_in_their_rows(seed: int) -> None:
    """As many programs as pieces, fewer or more; every byte of the pool that is not named stays."""
    dtype, page, dim, heads = DTYPES[seed % 4], (16, 32, 64)[seed % 3], (64, 80, 96, 128)[seed % 4], 1 + seed % 3
    host = host_pool(seed, dtype, page=page, dim=dim, heads=heads)
    misses = Misses(seed, heads, cap=(4, 1, 3)[seed % 3], rows=60)
    k, v = (noise(seed + i, 60, page * dim, dtype=dtype) for i in (1, 2))
    want = [same_bytes(x).clone() for x in (k, v)]
    pieces = host.rows[host.row_ids(1, misses.pages, torch.arange(heads).view(1, -1, 1)).clamp_min(0)]
    at = misses.sequence, misses.head, misses.nth
    for side in (0, 1):
        want[side][misses.rows[at]] = pieces[at][:, side]
    gather(host.kv, 1, k, v, misses.pages, misses.rows, misses.count, programs=(1, 3, 40)[seed % 3])
    assert torch.equal(same_bytes(k), want[0])
    assert torch.equal(same_bytes(v), want[1])


def test_no_pieces() -> None:
    host = host_pool(0, torch.bfloat16, page=16, dim=64, heads=2)
    k = noise(1, 8, 16 * 64, dtype=torch.bfloat16)
    before = k.clone()
    for cap in (0, 3):
        lists = torch.full((2, 2, cap), -1)
        gather(host.kv, 0, k, k, lists, lists, torch.zeros(2, 2, dtype=torch.int32))
    assert torch.equal(k, before)


def test_pools_that_do_not_fit_are_refused() -> None:
    host = host_pool(0, torch.bfloat16, page=16, dim=64, heads=2)
    lists, count = torch.zeros(1, 2, 1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32)
    short = torch.zeros(4, 16 * 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"rows of 512 torch\.bfloat16 do not take pieces of 2048 bytes"):
        gather(host.kv, 0, short, short, lists, lists, count)
    wide = torch.zeros(4, 16 * 64, dtype=torch.bfloat16).expand(4, -1)[::2]
    with pytest.raises(ValueError, match="must be contiguous"):
        gather(host.kv, 0, wide, wide, lists, lists, count)


def test_pools_beyond_two_gib_elements() -> None:
    """C37: host pools and device pools of any size, read, written and summarised at their far ends."""
    page, dim, heads, dtype = 16, 64, 2, torch.bfloat16
    width = page * dim
    first = (1 << 32) // width
    far_host, far_k = FarPool(first + 40, width, dtype), FarPool(first + 40, width, dtype)
    small = noise(3, 4, heads, 2, width, dtype=dtype)
    far_host.at(first // 4 * 4, 16)[:] = small.view(16, width)
    misses = torch.tensor([[[first // 4 + 2], [first // 4 + 1]]])
    rows = torch.tensor([[[first + 5], [first + 8]]])
    # a pool of one page tells the kernel its shape; the pages that the lists name are beyond it
    host = far_host.at(0, 4).view(1, 1, heads, 2, page, dim)
    gather(host, 0, far_k.at(0), far_k.at(0), misses, rows, torch.ones(1, 2, dtype=torch.int32))
    assert torch.equal(far_k.at(first + 5)[0], small[2, 0, 1])
    assert torch.equal(far_k.at(first + 8)[0], small[1, 1, 1])

    new = noise(4, 1, heads, dim, dtype=dtype)
    lanes = far_k.at(0).view(1, page, dim)
    write_tokens(lanes, lanes, torch.tensor([[first + 1, first + 2]]), torch.tensor([3]), new, new)
    assert torch.equal(far_k.at(first + 2).view(page, dim)[3], new[0, 1])
    backup(host, torch.tensor([first // 4 * page + 5]), torch.tensor([1]), new.unsqueeze(0), new.unsqueeze(0))
    assert torch.equal(far_host.at(first // 4 * 4, 4).view(heads, 2, page, dim)[:, 1, 5], new[0])

    far_table = FarPool((1 << 31) // (2 * dim) + 64, 2 * dim, dtype)
    last = (1 << 31) // (2 * dim) // heads + 4
    keys = noise(5, 1, heads, page, dim, dtype=dtype)
    build_minmax(far_table.at(0), torch.tensor([last]), keys, page)
    assert torch.equal(far_table.at(last * heads, heads), torch.cat((keys[0].amax(1), keys[0].amin(1)), -1))


@pytest.mark.parametrize("seed", range(4))
def test_new_tokens_land_in_their_lanes(seed: int) -> None:
    """As `TorchOps.write_tokens` from views of a fused projection, and nothing for rows that are no one's."""
    dtype, dim, heads = DTYPES[seed], (64, 80, 128, 96)[seed], 1 + seed
    k_lanes, v_lanes = (noise(i, 40, 16, dim, dtype=dtype) for i in (1, 2))
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[: 3 * heads].view(3, heads)
    offsets = torch.tensor([0, 15, 7])
    k, v = noise(3, 3, 2 * heads, dim, dtype=dtype).split(heads, 1)
    want = [same_bytes(x).clone() for x in (k_lanes, v_lanes)]
    TorchOps().write_tokens(*want, rows[:2], offsets[:2], same_bytes(k)[:2], same_bytes(v)[:2])
    rows[2] = -1
    write_tokens(k_lanes, v_lanes, rows, offsets, k, v)
    for lanes, expected in zip((k_lanes, v_lanes), want, strict=True):
        assert torch.equal(same_bytes(lanes), expected)


@pytest.mark.parametrize("seed", range(4))
def test_accepted_tokens_reach_the_host_pool(seed: int) -> None:
    """As `HostPool.write_step` of just these; pages are crossed, and an empty row writes nothing."""
    dtype, page, t = DTYPES[seed], (16, 32, 64, 16)[seed], (1, 3, 8, 5)[seed]
    host = host_pool(seed, dtype, page=page, dim=64, heads=2)
    accepted = torch.tensor([t, 0, 1, max(t - 1, 1)])
    starts = torch.tensor([2 * page - 2, 5 * page, 7 * page + 3, 9 * page - 1])
    slots = (starts.view(-1, 1) + torch.arange(t)).flatten()
    k, v = (noise(i, 2, 4 * t, 2, 64, dtype=dtype) for i in (3, 4))
    kept = (torch.arange(t) < accepted.view(-1, 1)).flatten()
    before = host.kv.clone()
    host.write_step(slots[kept], same_bytes(k)[:, kept], same_bytes(v)[:, kept])
    want = host.kv.clone()
    host.kv.copy_(before)
    backup(host.kv, slots, accepted, same_bytes(k), v)
    assert torch.equal(host.kv, want)


@pytest.mark.parametrize("seed", range(6))
def test_summaries_are_those_of_torch_to_the_byte(seed: int) -> None:
    """Whole pages, the last one partly filled over poisoned lanes, and then chains of tokens one page after another."""
    dtype, page, dim, heads = (
        DTYPES[seed % 3],
        (16, 32, 64, 8)[seed % 4],
        (64, 80, 128, 96, 256)[seed % 5],
        1 + seed % 2,
    )
    host = host_pool(seed, dtype, page=page, dim=dim, heads=heads)
    pages = torch.tensor([7, 3, 11])
    keys = noise(seed, 3, heads, page, dim, dtype=dtype)
    keys[0, :, 1] = 0  # a key of zeros has no scale
    last = (page, 1, page // 2 + 1)[seed % 3]
    keys[-1, :, last:] = torch.nan
    t = 1 + (seed * 3) % 8
    accepted = torch.tensor([t, 0, max(t // 2, 1)])
    starts = torch.tensor([11 * page + last - 1 if last == page else 11 * page + last, 15 * page, 4 * page])
    slots = (starts.view(-1, 1) + torch.arange(t)).flatten()
    new = noise(seed + 9, 2, 3 * t, heads, dim, dtype=dtype)
    minmax, sketches = KeySummaries(host), KeySketches(host)
    minmax.table.copy_(noise(1, *minmax.table.shape, dtype=dtype))
    sketches.table.random_(256, generator=torch.Generator().manual_seed(1))
    bounds, codes = minmax.table.clone(), sketches.table.clone()

    for summaries in (minmax, sketches):
        summaries.rebuild(1, pages, keys, last)
    build_minmax(bounds[1], pages, keys, last)
    build_sketches(codes[1], sketches.dims, pages, keys, last)
    assert torch.equal(bounds.view(torch.uint8), minmax.table.view(torch.uint8))
    assert torch.equal(codes, sketches.table)

    for j in range(t):  # the torch twins take one token per page at a time
        at = (accepted > j).nonzero()[:, 0] * t + j
        for summaries in (minmax, sketches):
            summaries.append_step(slots[at], new[:, at])
    append_minmax(bounds, slots, accepted, new, page)
    append_sketches(codes, sketches.dims, slots, accepted, new, page)
    assert torch.equal(bounds.view(torch.uint8), minmax.table.view(torch.uint8))
    assert torch.equal(codes, sketches.table)


def test_keys_on_the_boundary_between_codes() -> None:
    """Halves round to even, as torch rounds them; scales round to float16 before keys are divided by them."""
    host = host_pool(0, torch.float32, page=16, dim=64, heads=1)
    sketches = KeySketches(host)
    keys = (torch.arange(16 * 64).view(1, 1, 16, 64) % 29 - 14) / 2.0
    keys[..., 8:, :] *= 0.3337
    codes = sketches.table.clone()
    sketches.rebuild(0, torch.tensor([2]), keys, 16)
    build_sketches(codes[0], sketches.dims, torch.tensor([2]), keys, 16)
    assert torch.equal(codes, sketches.table)
