"""Prefetch workers under a real server: they may die, stop or lag, and only speed changes (contract 5)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from oasis_sglang.memory_pool.prefetch.process import MODULE
from oasis_sglang.serving import Answer, Client, Documents, Server, ask_all, greedy, oasis_flags
from tests.server.checks import ALARMS, Background, LogWatch, metrics, post, until, wait_until_idle
from tests.server.conftest import FP32, SELF_DRAFT, ServerFactory

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1500)]

BUDGET: dict[str, Any] = {"token_budget": 256, "host_to_device_ratio": 2.0}
SHAPE = (*FP32, "--context-length", "2048")
DEVICE = 4096
KILLS = 20
NEW = 40


@pytest.fixture(scope="module")
def prompts(documents: Documents) -> list[list[int]]:
    return [documents.text(70 + i, 500 + 120 * i) for i in range(4)]


@pytest.fixture(scope="module")
def exact(server_factory: ServerFactory, prompts: list[list[int]]) -> list[Answer]:
    """What top-K attention makes of the prompts, with neither drafts nor workers."""
    with server_factory([*oasis_flags(BUDGET, DEVICE), *SHAPE]) as server:
        return ask_all(Client(server.url), prompts, greedy(NEW, ignore_eos=True))


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A folder with a short path, which sockets need."""
    with tempfile.TemporaryDirectory(prefix="oasis-test-") as folder:
        yield Path(folder)


def workers_of(pid: int) -> list[int]:
    """Prefetch workers below a server, by its launcher's process id; stopped ones too."""
    found = subprocess.run(["pgrep", "-f", MODULE], capture_output=True, text=True, check=False).stdout.split()
    family = {pid}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    for _ in range(8):
        family |= {child for child, parent in parents.items() if parent in family}
    return [int(each) for each in found if int(each) in family]


def signalled(client: Client, sign: signal.Signals) -> int:
    """Send a signal to the worker in service, and return its process id."""
    until(lambda: client.oasis()["prefetch_workers_ready"] == 1, "a worker in service")
    pid = int(client.oasis()["prefetch_worker_pids"][0])
    os.kill(pid, sign)
    return pid


def test_killed_and_stopped_workers_change_no_token(
    server_factory: ServerFactory, model_path: str, prompts: list[list[int]], exact: list[Answer]
) -> None:
    """C43: with `wait` drafts only warm the device, so twenty dead workers and one stopped cost no token."""
    config = BUDGET | {"transfer": "workers", "probe": True, "predictor": "draft"}
    flags = [*oasis_flags(config, DEVICE), *SHAPE, *SELF_DRAFT, model_path]
    chance = random.Random(0)
    with server_factory(flags) as server:
        client = Client(server.url)
        watch = LogWatch(server)
        rounds = 0
        killed: list[int] = []
        while len(killed) < KILLS or rounds < 2:
            running = [Background(client, prompt, greedy(NEW, ignore_eos=True)) for prompt in prompts]
            while not all(request.done for request in running):
                if len(killed) < KILLS:
                    killed.append(signalled(client, signal.SIGKILL))
                    time.sleep(chance.uniform(0, 0.5))
                else:
                    time.sleep(0.1)
                assert requests.get(f"{client.url}/health", timeout=60).status_code == 200
            for request, truth in zip(running, exact, strict=True):
                assert request.join().output_ids == truth.output_ids
            rounds += 1
        assert len(set(killed)) == KILLS
        until(lambda: client.oasis()["prefetch_workers_ready"] == 1, "the last worker's return")
        state = client.oasis()
        assert state["prefetch_worker_restarts_total"] == KILLS
        assert state["prefetch_used_pages_total"] > 0
        assert state["accepted_tokens_total"] == state["verify_steps_total"] > 0  # a probe commits one token a step

        running = [Background(client, prompt, greedy(NEW, ignore_eos=True)) for prompt in prompts]
        for request in running:
            request.wait_for_tokens(3)
        stopped = signalled(client, signal.SIGSTOP)
        until(lambda: client.oasis()["prefetch_workers_ready"] == 0, "the stop being noticed")
        os.kill(stopped, signal.SIGCONT)
        until(lambda: client.oasis()["prefetch_workers_ready"] == 1, "the worker going on", 2)
        for request, truth in zip(running, exact, strict=True):
            assert request.join().output_ids == truth.output_ids
        assert client.oasis()["prefetch_worker_restarts_total"] == KILLS

        stopped = signalled(client, signal.SIGSTOP)
        answers = ask_all(client, prompts, greedy(NEW, ignore_eos=True))
        assert [a.output_ids for a in answers] == [a.output_ids for a in exact]
        until(lambda: client.oasis()["prefetch_worker_restarts_total"] == KILLS + 1, "the stopped one's successor")
        assert not Path(f"/proc/{stopped}").exists()
        assert watch.text().count("Its pages are fetched when they are needed") == KILLS + 1
        assert not ALARMS.search(watch.text())
        wait_until_idle(client)


def test_skip_goes_on_without_its_worker(server_factory: ServerFactory, prompts: list[list[int]]) -> None:
    """C1, C43: while the only worker is stopped steps attend to what is resident; flush and abort wait for nothing
    that never ends; and what operators see says so."""
    config = BUDGET | {"transfer": "workers", "miss_policy": "skip", "fetch_ratio": 0.2}
    with server_factory([*oasis_flags(config, DEVICE), *SHAPE, "--enable-metrics"]) as server:
        client = Client(server.url)
        ask_all(client, prompts, greedy(NEW, ignore_eos=True))
        state = client.oasis()
        assert state["prefetch_used_pages_total"] > 0.5 * state["prefetch_issued_pages_total"] > 0
        top = subprocess.run(
            [sys.executable, "-m", "oasis_sglang.cli", "top", "--url", client.url, "--once"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert top.returncode == 0, top.stderr
        assert "1/1 alive" in top.stdout
        shown = metrics(client)
        assert shown["sglang:oasis_prefetch_workers"] == shown["sglang:oasis_prefetch_workers_ready"] == 1
        assert 0 < shown["sglang:oasis_prefetch_issued_pages_total"] <= state["prefetch_issued_pages_total"]

        running = [Background(client, prompt, greedy(400, ignore_eos=True)) for prompt in prompts]
        for request in running:
            request.wait_for_tokens(3)
        signalled(client, signal.SIGSTOP)
        for request in running:
            request.wait_for_tokens(request.answer.tokens + 10)
        late = client.oasis()
        assert late["prefetch_late_pages_total"] + late["prefetch_dropped_pages_total"] > 0
        client.abort(everything=True)
        for request in running:
            request.join()
        assert post(client, "/flush_cache?timeout=60", timeout=90).status_code == 200
        state = wait_until_idle(client)
        assert state["prefetch_queued_plans"] == 0
        until(lambda: client.oasis()["prefetch_workers_ready"] == 1, "the successor")


@pytest.mark.parametrize("stop_first", [False, True])
def test_a_killed_server_leaves_nothing_behind(
    server_factory: ServerFactory, prompts: list[list[int]], runtime: Path, stop_first: bool
) -> None:
    """C44: kill -9 at some moment under load, with the worker stopped before too: no process stays, and the next start
    clears the folder of the sockets."""
    config = BUDGET | {"transfer": "workers", "miss_policy": "skip"}
    environment = {"XDG_RUNTIME_DIR": str(runtime)}
    flags = [*oasis_flags(config, DEVICE), *SHAPE]
    with server_factory(flags, environment) as server:
        client = Client(server.url)
        for prompt in prompts:
            Background(client, prompt, greedy(400, ignore_eos=True)).wait_for_tokens(2)
        (folder,) = runtime.iterdir()
        time.sleep(random.uniform(0, 2))
        if stop_first:
            signalled(client, signal.SIGSTOP)
        assert server.process is not None
        workers = workers_of(server.process.pid)
        assert workers
        kill_everything_but(server, workers)
        until(lambda: not [pid for pid in workers if Path(f"/proc/{pid}").exists()], "the workers' end", 10)
    with server_factory(flags, environment) as server:
        Client(server.url).generate(prompts[0], greedy(4))
        folders = list(runtime.iterdir())
        assert len(folders) == 1
        assert folders[0] != folder


def kill_everything_but(server: Server, workers: list[int]) -> None:
    """kill -9 of every process of a server except its workers, which have to end by themselves."""
    assert server.process is not None
    group = os.getpgid(server.process.pid)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in workers:
            continue
        try:
            if os.getpgid(int(entry.name)) == group:
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue
