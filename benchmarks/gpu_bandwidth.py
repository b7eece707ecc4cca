"""Bytes per second of the kernels of a decode step, against what the device copies in the same time, and what copies
from the host cost a matrix product beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_copies import Copies
from benchmarks.gpu_implementations import Attend, chosen, implementations
from benchmarks.gpu_scale import Scale, scale_of
from benchmarks.gpu_stage import Item
from benchmarks.gpu_timer import Timer
from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.backup import backup, write_tokens
from oasis_sglang.kernels.gather import gather
from oasis_sglang.kernels.score import score_minmax, score_sketches
from oasis_sglang.kernels.score import workspace_size as score_work
from oasis_sglang.kernels.select import Selected, select
from oasis_sglang.kernels.select import workspace_size as select_work
from oasis_sglang.kernels.summaries import append_minmax, append_sketches
from oasis_sglang.memory_pool.sketch import LANES, SCALE_BYTES
from oasis_sglang.memory_pool.working_set import WorkingSets

# Misses per KV head: about what a step has, and a whole budget's.
FEW, PROGRAMS = 8, (4, 8, 16, 32, 64)


def items(tiny: bool) -> list[Item]:
    scale = scale_of(tiny)
    bench = Bandwidth(scale)
    batches = (1, 2) if tiny else (1, 8, 32, 128)
    found = [Item("copies", 6.0, bench.copies), Item("attention chosen", 20.0, partial(chosen, scale))]
    for name, attend in implementations(scale).items():
        for n in batches:
            found.append(Item(f"attend {name} n={n}", 4.0, partial(bench.attend, attend, n, scale.budget)))
        found.append(Item(f"attend {name} whole", 5.0, partial(bench.attend, attend, 2, scale.context)))
    for count in (FEW, scale.budget // scale.page):
        for programs in PROGRAMS[-1:] if tiny else PROGRAMS:
            name = f"gather {count} of each head by {programs} programs"
            found.append(Item(name, 3.0, partial(bench.gather, count, programs)))
    for kind in ("sketch", "minmax"):
        found.append(Item(f"score {kind}", 5.0, partial(bench.score, kind)))
    found.append(Item("select", 6.0, bench.select))
    found.append(Item("write", 3.0, bench.write))
    found.append(Item("backup", 4.0, bench.backup))
    found.extend(Item(f"append {kind}", 4.0, partial(bench.append, kind)) for kind in ("sketch", "minmax"))
    for kind in ("multiprocessors", "memory"):
        for programs in PROGRAMS[-1:] if tiny else (8, 16, 32):
            name = f"product of {kind} beside {programs} programs"
            found.append(Item(name, 4.0, partial(bench.beside, kind, programs)))
    return found


class Bandwidth:
    """Every kernel at `Scale`'s worked shape; data are random, and larger than any cache."""

    def __init__(self, scale: Scale) -> None:
        self.scale, self.timer, self.ceilings = scale, Timer(scale), Copies(scale)

    def copies(self) -> dict[str, Any]:
        return {
            "device_bytes_per_second": self.ceilings.device,
            "from_host_bytes_per_second": self.ceilings.from_host,
            "to_host_bytes_per_second": self.ceilings.to_host,
        }

    # -- what is measured -----------------------------------------------------------------------------------------

    def _figures(self, nbytes: float, seconds: float, ceiling: float, **more: Any) -> dict[str, Any]:
        rate = nbytes / seconds
        return {"bytes": nbytes, "seconds": seconds, "bytes_per_second": rate, "of_copy": rate / ceiling, **more}

    def _in_turns(self, nbytes: int, calls: Callable[[int], Callable[[], object]]) -> float:
        """Seconds of one call, each on data of its own that no earlier one has left in a cache.

        Args:
            nbytes: that a call reads. calls: makes the call number i, data included.
        """
        made = [calls(i) for i in range(min(-(-self.scale.cycle_bytes // nbytes), 64))]

        def run() -> None:
            for call in made:
                call()

        return self.timer.seconds(run) / len(made)

    def _noise(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype or self.scale.dtype, device=self.scale.device)

    def _indices(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(1, below, shape, device=self.scale.device)

    def attend(self, attend: Attend, n: int, tokens: int) -> dict[str, Any]:
        """One query token of each of n sequences over as many tokens per KV head, on pages of random order."""
        s = self.scale
        columns = tokens // s.page + 1
        pieces = n * s.kv_heads * columns
        nbytes = n * s.kv_heads * tokens * 2 * s.head_dim * s.dtype.itemsize
        lengths = torch.full((n,), tokens, device=s.device)

        def call(_: int) -> Callable[[], object]:
            k, v = (self._noise(pieces, s.page * s.head_dim) for _ in range(2))
            table = torch.randperm(pieces, device=s.device).view(n, s.kv_heads, columns)
            q = self._noise(n, 1, s.query_heads, s.head_dim)
            return attend(q, k, v, table, lengths, s.page, s.scale)

        seconds = self._in_turns(nbytes, call)
        return self._figures(nbytes, seconds, self.ceilings.device, sequences=n, tokens=tokens)

    def _gathering(self, count: int, programs: int) -> tuple[Callable[[], object], int]:
        """A gather of `count` pieces of every sequence and head from random places, and its bytes."""
        s = self.scale
        pages = max(s.copy_bytes // 4 // (s.kv_heads * s.piece_bytes), 2)
        on_gpu = s.device.type == "cuda"
        host = torch.zeros(pages, 1, s.kv_heads, 2, s.page, s.head_dim, dtype=s.dtype, pin_memory=on_gpu)
        lists = (s.sequences, s.kv_heads, count)
        pieces = s.sequences * s.kv_heads * count
        k, v = (self._noise(pieces, s.page * s.head_dim) for _ in range(2))
        named, rows = self._indices(pages, *lists), torch.randperm(pieces, device=s.device).view(lists)
        counts = torch.full(lists[:2], count, dtype=torch.int32, device=s.device)
        return lambda: gather(host, 0, k, v, named, rows, counts, programs=programs), pieces * s.piece_bytes

    def gather(self, count: int, programs: int) -> dict[str, Any]:
        call, nbytes = self._gathering(count, programs)
        return self._figures(nbytes, self.timer.seconds(call), self.ceilings.from_host, programs=programs)

    def beside(self, kind: str, programs: int) -> dict[str, Any]:
        """A product alone, and while pieces are gathered on another stream."""
        s = self.scale
        call, nbytes = self._gathering(s.budget // s.page, programs)
        product, times = self._product(kind)

        def products() -> None:
            for _ in range(times):
                product()

        self.timer.elapsed(products)
        call()
        alone = min(self.timer.elapsed(products) for _ in range(3))
        gathering = self.timer.elapsed(call)
        if s.device.type != "cuda":
            return {"alone_seconds": alone, "beside_seconds": alone, "slower": 0.0, "covered": True}
        side = torch.cuda.Stream(priority=-1)
        copies = max(int(2 * alone / gathering), 1) + 1  # so that they outlast the products
        ended, both = torch.cuda.Event(enable_timing=True), []
        for _ in range(3):
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                for _ in range(copies):
                    call()
                ended.record()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            products()
            last.record()
            torch.cuda.synchronize()
            both.append((first.elapsed_time(last) / 1000, last.elapsed_time(ended) > 0))
        beside, covered = min(both)
        return {
            "alone_seconds": alone,
            "beside_seconds": beside,
            "slower": beside / alone - 1,
            "covered": covered,
            "programs": programs,
            "gather_alone_bytes_per_second": nbytes / gathering,
        }

    def _product(self, kind: str) -> tuple[Callable[[], object], int]:
        """A product that the multiprocessors limit, or a decode step's, which memory does; and how often to do it."""
        s = self.scale
        if kind == "multiprocessors":
            a, b = (self._noise(s.product, s.product) for _ in range(2))
            return lambda: a @ b, 4
        x, weights = self._noise(s.sequences, s.hidden), self._noise(2 * s.ffn, s.hidden)
        return lambda: torch.nn.functional.linear(x, weights), 100

    def score(self, kind: str) -> dict[str, Any]:
        s = self.scale
        columns = s.context // s.page
        pages = s.sequences * columns + 1
        kept = s.head_dim // 2
        width = -(-s.page // LANES) * (LANES * kept // 2 + SCALE_BYTES) if kind == "sketch" else 2 * s.head_dim
        size = 1 if kind == "sketch" else s.dtype.itemsize
        nbytes = s.sequences * columns * s.kv_heads * width * size
        counts = torch.full((s.sequences,), columns, device=s.device)
        needed = score_work(s.sequences, 1, s.query_heads, s.kv_heads, columns, s.device)
        work = torch.empty(needed, device=s.device)
        out = torch.empty(s.sequences, s.kv_heads, columns, device=s.device)
        dims = torch.arange(kept, device=s.device)

        def call(_: int) -> Callable[[], object]:
            q = self._noise(s.sequences, 1, s.query_heads, s.head_dim)
            named = (torch.randperm(pages - 1, device=s.device) + 1).view(s.sequences, columns)
            if kind == "minmax":
                bounds = self._noise(pages * s.kv_heads, width)
                return lambda: score_minmax(q, bounds, named, counts, s.kv_heads, s.scale, out=out, work=work)
            codes = torch.randint(256, (pages * s.kv_heads, width), dtype=torch.uint8, device=s.device)
            codes.view(pages * s.kv_heads, -1, LANES * kept // 2 + SCALE_BYTES)[..., LANES * kept // 2 :] = 32
            return lambda: score_sketches(
                q, dims, codes, named, counts, s.kv_heads, s.page, s.scale, out=out, work=work
            )

        return self._figures(nbytes, self._in_turns(nbytes, call), self.ceilings.device, pages=columns)

    def select(self) -> dict[str, Any]:
        """Steps one after the other over scores that change altogether: more misses than steps have."""
        s = self.scale
        config = OasisConfig(page_size=s.page, token_budget=s.budget, fetch_ratio=0.05)
        columns, n, width = s.context // s.page, s.sequences, config.max_set_pages
        sets = WorkingSets(
            layers=1, kv_heads=s.kv_heads, device_pages=n * width, rows=n, set_pages=width, sequence_pages=columns + 1,
            device=s.device,
        )  # fmt: skip
        held = torch.cat((torch.arange(min(width - 1, columns)), torch.tensor([columns]))).to(s.device)
        rows = [attempt.row for _ in range(n) if (attempt := sets.reserve(width)) is not None]
        for row in rows:
            sets.place(0, row, held.expand(s.kv_heads, -1), torch.zeros_like(held))
        tail, host_pages = torch.full((n,), columns, device=s.device), self._indices(1 << 20, n, columns + 1)
        step, at = torch.full((1,), 1 << 20, dtype=torch.int32, device=s.device), torch.tensor(rows, device=s.device)
        table = torch.zeros(n, s.kv_heads, config.budget_pages + 1, dtype=torch.int64, device=s.device)
        out = Selected.allocate(n, s.kv_heads, config.budget_pages, config.fetch_cap_pages, s.device)
        work = torch.empty(select_work(n, s.kv_heads, config), dtype=torch.int64, device=s.device)

        def call(_: int) -> Callable[[], object]:
            scores = torch.rand(n, s.kv_heads, columns, device=s.device)

            def run() -> None:
                step.add_(1)
                select(scores, tail, at, host_pages, 0, sets, config, step, table, at, out=out, work=work)

            return run

        nbytes = n * s.kv_heads * columns * 4
        seconds = self._in_turns(nbytes * (1 if s.tiny else 64), call)
        return self._figures(nbytes, seconds, self.ceilings.device, missed_per_head=float(out.missed.float().mean()))

    def write(self) -> dict[str, Any]:
        s = self.scale
        pieces = 64 * s.sequences * s.kv_heads
        k, v = (self._noise(pieces, s.page, s.head_dim) for _ in range(2))
        rows = torch.randperm(pieces, device=s.device)[: s.sequences * s.kv_heads].view(s.sequences, s.kv_heads)
        offsets = torch.randint(0, s.page, (s.sequences,), device=s.device)
        new = self._noise(s.sequences, s.kv_heads, s.head_dim)
        seconds = self.timer.seconds(lambda: write_tokens(k, v, rows, offsets, new, new))
        return self._figures(4 * new.numel() * new.element_size(), seconds, self.ceilings.device)

    def _new_tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots on pages of their own, how many are accepted, and K of one token of every sequence in all layers."""
        s = self.scale
        slots = (torch.randperm(s.sequences, device=s.device) + 1) * s.page + 3
        accepted = torch.ones(s.sequences, dtype=torch.int64, device=s.device)
        return slots, accepted, self._noise(s.layers, s.sequences, s.kv_heads, s.head_dim)

    def backup(self) -> dict[str, Any]:
        s = self.scale
        slots, accepted, new = self._new_tokens()
        on_gpu = s.device.type == "cuda"
        shape = (s.sequences + 1, s.layers, s.kv_heads, 2, s.page, s.head_dim)
        host = torch.zeros(shape, dtype=s.dtype, pin_memory=on_gpu)
        seconds = self.timer.seconds(lambda: backup(host, slots, accepted, new, new))
        return self._figures(2 * new.numel() * new.element_size(), seconds, self.ceilings.to_host)

    def append(self, kind: str) -> dict[str, Any]:
        s = self.scale
        slots, accepted, new = self._new_tokens()
        rows, kept = (s.sequences + 1) * s.kv_heads, s.head_dim // 2
        if kind == "minmax":
            bounds = self._noise(s.layers, rows, 2 * s.head_dim)
            seconds = self.timer.seconds(lambda: append_minmax(bounds, slots, accepted, new, s.page))
            nbytes = 5 * new.numel() * new.element_size()  # bounds are read and written
            return self._figures(nbytes, seconds, self.ceilings.device)
        width = -(-s.page // LANES) * (LANES * kept // 2 + SCALE_BYTES)
        codes = torch.zeros(s.layers, rows, width, dtype=torch.uint8, device=s.device)
        dims = torch.arange(kept, device=s.device)
        seconds = self.timer.seconds(lambda: append_sketches(codes, dims, slots, accepted, new, s.page))
        nbytes = new.numel() // 2 * new.element_size() + new.numel() // s.head_dim * (kept // 2 + 2)
        return self._figures(nbytes, seconds, self.ceilings.device)
