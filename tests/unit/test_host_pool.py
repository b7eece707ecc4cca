"""The host pool and the copies out of it: what is written is what is read, byte for byte (C34, C38, contract 7)."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.memory_pool.host_pool import RESERVED_PAGES, HostPool
from oasis_sglang.memory_pool.sizing import PoolGeometry
from oasis_sglang.memory_pool.summaries import KeySummaries
from oasis_sglang.memory_pool.transfer import InlineTransfer

LAYERS, HEADS, DIM, PAGE = 2, 3, 4, 8


def geometry(dtype: torch.dtype = torch.float32, page: int = PAGE) -> PoolGeometry:
    return PoolGeometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, itemsize=dtype.itemsize, page_size=page)


def pool(pages: int = 12, dtype: torch.dtype = torch.float32) -> HostPool:
    return HostPool(pages, geometry(dtype), dtype)


def slots_of(pages: list[int], start: int, end: int) -> torch.Tensor:
    return torch.tensor([pages[t // PAGE] * PAGE + t % PAGE for t in range(start, end)], dtype=torch.int64)


def noise(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=80, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=8, unique=True).map(sorted),
    order=st.permutations(range(1, 13)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
)
def test_any_split_of_a_sequence_reads_back(cuts: list[int], order: list[int], dtype: torch.dtype) -> None:
    """C30: chunks start and end anywhere, aligned or in the middle of a page; pages are in any order."""
    host = pool(dtype=dtype)
    total = cuts[-1]
    pages = order[: -(-total // PAGE)]
    k, v = noise(total, dtype, 1), noise(total, dtype, 2)
    for start, end in zip([0, *cuts], cuts, strict=False):
        slots = slots_of(pages, start, end)
        for layer in range(LAYERS):
            host.write_layer(layer, slots, k[start:end], v[start:end])
        host.mark_written(slots)
    for layer in range(LAYERS):
        got_k, got_v = host.read_sequence(layer, torch.tensor(pages), total)
        assert got_k.dtype == dtype
        assert torch.equal(got_k.view(host.store_dtype), k.transpose(0, 1).view(host.store_dtype))
        assert torch.equal(got_v.view(host.store_dtype), v.transpose(0, 1).view(host.store_dtype))
    untouched = [p for p in range(13) if p not in pages]
    assert not host.kv[untouched].any(), "a page of someone else was written"
    assert int(host.fill.sum()) == total


def test_a_step_writes_one_token_of_each_sequence() -> None:
    """A decode step commits all layers of several sequences at once; each must land in its own slot."""
    host = pool()
    slots = torch.tensor([1 * PAGE + 3, 5 * PAGE, 12 * PAGE + PAGE - 1])
    k = torch.stack([noise(3, seed=s) for s in range(LAYERS)])
    v = torch.stack([noise(3, seed=s + 9) for s in range(LAYERS)])
    host.write_step(slots, k, v)
    for layer in range(LAYERS):
        for i, slot in enumerate(slots.tolist()):
            assert torch.equal(host.kv[slot // PAGE, layer, :, 0, slot % PAGE], k[layer, i])
            assert torch.equal(host.kv[slot // PAGE, layer, :, 1, slot % PAGE], v[layer, i])
    assert int((host.kv != 0).any(-1).sum()) == LAYERS * HEADS * 2 * 3
    assert host.fill[[1, 5, 12]].tolist() == [4, 1, PAGE]


def test_fill_counts_what_was_written_and_forgets_what_was_freed() -> None:
    """Contract 7: reads are guarded by this count, so it must neither run ahead nor survive a page's owner."""
    host = pool()
    host.mark_written(slots_of([3, 7, 2], 0, 2 * PAGE + 5))
    assert host.fill[[3, 7, 2]].tolist() == [PAGE, PAGE, 5]
    host.mark_written(slots_of([3, 7, 2], 2, 4))
    assert host.fill[3] == PAGE, "a repeated chunk does not shrink a page"
    host.invalidate(torch.tensor([7]))
    assert host.fill[[3, 7, 2]].tolist() == [PAGE, 0, 5]
    host.clear()
    assert int(host.fill.sum()) == 0


@pytest.mark.parametrize(("fill", "tokens"), [([8, 8, 4], 21), ([8, 7, 4], 20), ([0], 1), ([8, 0], 9), ([7, 8], 16)])
def test_reading_more_than_was_written_raises(fill: list[int], tokens: int) -> None:
    """Contract 7, C19: never read an unwritten slot; the message shows pages and counts."""
    host = pool()
    pages = torch.arange(1, len(fill) + 1)
    host.fill[pages] = torch.tensor(fill, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=rf"{tokens} tokens of KV .* \[1.*which hold \[{fill[0]}"):
        host.read_sequence(0, pages, tokens)
    host.fill[pages] = PAGE
    host.require(pages, tokens)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_scrambled_device_pages_come_back_byte_for_byte(dtype: torch.dtype) -> None:
    """C34: offload, scramble the device, load: bytes are equal, those of NaN patterns included; and only the named
    pieces of the named layer change."""
    host = pool(dtype=dtype)
    random = torch.Generator().manual_seed(5)
    raw = torch.randint(256, (5 * PAGE, HEADS, DIM * dtype.itemsize), generator=random, dtype=torch.uint8)
    k = raw.view(dtype)
    v = raw.flip(0).contiguous().view(dtype)
    pages = [4, 9, 1, 12, 6]
    for layer in range(LAYERS):
        host.write_layer(layer, slots_of(pages, 0, 5 * PAGE), k, v)
    device = [
        [torch.randint(256, (9, HEADS, PAGE, DIM * dtype.itemsize), dtype=torch.uint8, generator=random).view(dtype)]
        for _ in range(2 * LAYERS)
    ]
    k_pages, v_pages = [x[0] for x in device[:LAYERS]], [x[0] for x in device[LAYERS:]]
    before = [x.view(torch.uint8).clone() for x in (*k_pages, *v_pages)]
    transfer = InlineTransfer(host, k_pages, v_pages)
    named = [(4, 0, 8), (4, 2, 8), (1, 1, 3), (6, 0, 1)]  # host page, head, device page
    host_pages, heads, device_pages = (torch.tensor(column) for column in zip(*named, strict=True))
    transfer.load(1, host_pages, heads, device_pages * HEADS + heads)
    transfer.wait(1)
    assert transfer.in_flight() == 0
    for host_page, head, device_page in named:
        tokens = slice(pages.index(host_page) * PAGE, (pages.index(host_page) + 1) * PAGE)
        assert torch.equal(k_pages[1][device_page, head].view(torch.uint8), k[tokens, head].view(torch.uint8))
        assert torch.equal(v_pages[1][device_page, head].view(torch.uint8), v[tokens, head].view(torch.uint8))
    after = [x.view(torch.uint8) for x in (*k_pages, *v_pages)]
    for layer in (0, 1):
        for old, new in ((before[layer], after[layer]), (before[2 + layer], after[2 + layer])):
            changed = {(p, h) for p in range(9) for h in range(HEADS) if not torch.equal(old[p, h], new[p, h])}
            assert changed == ({(d, h) for _, h, d in named} if layer == 1 else set())
    assert transfer.stats.pages == len(named)
    assert transfer.stats.bytes == len(named) * 2 * PAGE * DIM * dtype.itemsize


def test_a_wrong_dtype_is_refused() -> None:
    """C34: sizes are checked in the storage dtype; a mismatch would read half or twice of every page."""
    with pytest.raises(ValueError, match="2 bytes, the geometry says 4"):
        HostPool(4, geometry(torch.float32), torch.bfloat16)


READER = """
import mmap, sys
with open(f"/proc/self/fd/{sys.argv[1]}", "r+b") as file, mmap.mmap(file.fileno(), int(sys.argv[2])) as shared:
    at = int(sys.argv[3])
    print(shared[at : at + 4].hex())
    shared[at : at + 4] = bytes.fromhex("0000a040")  # 5.0
"""


def test_another_process_sees_and_writes_the_same_memory() -> None:
    """Prefetch workers map the pool by its descriptor; a private copy would hand them stale pages."""
    host = pool()
    host.kv[7, 1, 2, 0, 3, 1] = 2.5
    offset = (host.kv[7, 1, 2, 0, 3, 1].data_ptr() - host.kv.data_ptr(),)
    command = [sys.executable, "-c", READER, *map(str, (host.fd, host.nbytes, *offset))]
    done = subprocess.run(command, pass_fds=[host.fd], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "00002040"
    assert float(host.kv[7, 1, 2, 0, 3, 1]) == 5.0


def _resident_shared() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("RssShmem"))
    return int(line.split()[1]) * 1024


def test_memory_is_taken_when_written_and_returned_on_close() -> None:
    """C48: a server that restarts its pool must not keep the last one; an unused pool costs nothing."""
    gc.collect()  # pools of earlier tests
    before, open_before = _resident_shared(), len(os.listdir("/proc/self/fd"))
    host = HostPool(2000, geometry(page=64), torch.float32)
    assert host.nbytes == (2000 + RESERVED_PAGES) * 64 * LAYERS * HEADS * 2 * DIM * 4
    assert _resident_shared() - before < 4 * mmap.PAGESIZE
    host.kv.fill_(1.0)
    assert _resident_shared() - before > host.nbytes * 0.9
    host.close()
    gc.collect()
    assert _resident_shared() - before < 64 * mmap.PAGESIZE
    assert len(os.listdir("/proc/self/fd")) == open_before


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_summaries_equal_those_of_the_page(data: st.DataObject) -> None:
    """C38: after any order of chunks, steps and re-use of pages, a page's summary is that of the keys it holds."""
    host = pool(pages=6)
    summaries = KeySummaries(host)
    summaries.table.fill_(torch.nan)
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 999), "seed"))
    for _ in range(data.draw(st.integers(1, 3), "owners")):
        pages = data.draw(st.permutations(range(1, 7)), "pages")
        tokens = 0
        while tokens < 6 * PAGE and data.draw(st.booleans() | st.just(True), "more"):
            step = data.draw(st.booleans(), "step")
            n = 1 if step else data.draw(st.integers(1, 6 * PAGE - tokens), "chunk")
            k = torch.randn(LAYERS, n, HEADS, DIM, generator=random)
            slots = slots_of(pages, tokens, tokens + n)
            if step:
                host.write_step(slots, k, k)
                summaries.append_step(slots, k)
            else:
                touched = torch.tensor(pages[tokens // PAGE : -(-(tokens + n) // PAGE)])
                last = tokens + n - (-(-(tokens + n) // PAGE) - 1) * PAGE
                for layer in range(LAYERS):
                    host.write_layer(layer, slots, k[layer], k[layer])
                    summaries.rebuild(layer, touched, host.read_keys(layer, touched), last)
            tokens += n
            for index in range(-(-tokens // PAGE)):
                held = min(tokens - index * PAGE, PAGE)
                keys = host.kv[pages[index], :, :, 0, :held]  # [layers, heads, held, dim]
                rows = summaries.row_ids(torch.tensor(pages[index]))
                assert torch.equal(summaries.table[:, rows], torch.cat((keys.amax(2), keys.amin(2)), dim=-1))
        host.invalidate(torch.tensor(pages))
