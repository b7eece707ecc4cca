"""Real worker processes between our pools as SGLang builds them."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_sglang import coordinator
from oasis_sglang.config import OasisConfig
from tests.contract.rank import LAYERS, PAGE, SCALE, Rank
from tests.contract.test_backend import Driver
from tests.unit import oracle

pytestmark = pytest.mark.usefixtures("plugged")
BUDGET: dict[str, Any] = {"token_budget": 64, "page_size": PAGE, "host_to_device_ratio": 1.0, "transfer": "workers"}


@pytest.fixture
def make_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    runtime = Path(tempfile.mkdtemp(prefix="oasis-test-"))  # sockets need a short path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    coordinator.stop()
    made: list[Rank] = []

    def make(**changes: Any) -> Rank:
        made.append(Rank(OasisConfig(**BUDGET | changes)))
        return made[-1]

    yield make
    for rank in made:
        assert rank.pool.workers is not None
        assert rank.pool.workers.folder.parent == runtime
        rank.pool.workers.stop()
    coordinator.stop()
    runtime.rmdir()  # the folder of the sockets is gone


def ready(rank: Rank) -> int:
    """Process id of the worker, once it is in service."""
    workers = rank.pool.workers
    assert workers is not None
    deadline = time.monotonic() + 60
    while not workers.ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pid = workers.pid(0)
    assert pid is not None
    return pid


def attended(rank: Rank) -> dict[int, torch.Tensor]:
    """Pages of the first sparse sequence, by layer, as the page table is filled with them."""
    seen: dict[int, torch.Tensor] = {}
    fill = rank.tier.sets.fill_table

    def spy(layer: int, rows: Any, pages: torch.Tensor, *rest: Any) -> None:
        seen[layer] = pages[0].clone()
        fill(layer, rows, pages, *rest)

    rank.tier.sets.fill_table = spy  # type: ignore[method-assign]
    return seen


def check_step(rank: Rank, driver: Driver, row: int, seen: dict[int, torch.Tensor]) -> None:
    """One step; attention is that over the pages which the step says it attends to, read from the host pool."""
    queries, outputs = driver.decode([row])
    length = driver.lengths[row]
    tail = (length - 1) // PAGE
    for layer in range(LAYERS):
        k, v = oracle.sequence(rank.tier.host, layer, driver.pages(row), length)
        ks, vs = [], []
        for head, pages in enumerate(seen[layer].tolist()):
            lanes = [t for p in [*pages, tail] for t in range(p * PAGE, min((p + 1) * PAGE, length))]
            ks.append(k[lanes, head])
            vs.append(v[lanes, head])
        expected = oracle.attention(queries[layer][0].double(), torch.stack(ks), torch.stack(vs), SCALE)
        torch.testing.assert_close(outputs[layer][0].double(), expected, atol=1e-5, rtol=1e-4)


def test_a_worker_brings_pages_and_its_end_costs_none_of_them(make_rank: Callable[..., Rank]) -> None:
    """Contract 5: copied by a process, stopped, killed, replaced: every step attends to whole pages."""
    rank = make_rank(miss_policy="skip")
    driver, seen = Driver(rank), attended(rank)
    row = driver.admit(300)
    driver.extend({row: 300})
    pid = ready(rank)
    stats = rank.tier.prefetcher.stats  # type: ignore[union-attr]
    for _ in range(12):
        check_step(rank, driver, row, seen)
        time.sleep(0.05)  # a step of a real model takes longer
    assert stats.used > 0
    used = stats.used
    os.kill(pid, signal.SIGSTOP)
    for _ in range(4):
        check_step(rank, driver, row, seen)
        time.sleep(0.05)
    assert stats.late > 0
    os.kill(pid, signal.SIGKILL)
    while ready(rank) == pid:
        time.sleep(0.01)
    for _ in range(12):
        check_step(rank, driver, row, seen)
        time.sleep(0.05)
    assert stats.used > used
    rank.tier.check_integrity()
    state = rank.coordinator.state()
    assert state["prefetch_worker_restarts_total"] == 1
    assert state["prefetch_workers"] == state["prefetch_workers_ready"] == 1


def test_idle_workers_are_told_of(make_rank: Callable[..., Rank], caplog: pytest.LogCaptureFixture) -> None:
    """An operator who set `transfer: workers` and left `wait` is told that this prefetches nothing."""
    with caplog.at_level(logging.WARNING):
        make_rank(miss_policy="wait")
    assert "finds nothing to do with miss_policy='wait'" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make_rank(miss_policy="wait", probe=True, predictor="draft")
    assert "finds nothing to do" not in caplog.text
