"""The client against a worker that the test plays itself, so that every order of events is certain."""

from __future__ import annotations

import gc
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
import zmq

from oasis_sglang.memory_pool.prefetch.client import PrefetchClient
from oasis_sglang.memory_pool.prefetch.ledger import Finished
from oasis_sglang.memory_pool.prefetch.messages import (
    MAX_FRAME_BYTES,
    Cancel,
    Completion,
    Hello,
    Message,
    Plan,
    Stop,
    decode,
    encode,
    pack_ids,
    pack_shares,
    unpack_shares,
)
from oasis_sglang.memory_pool.prefetch.process import Endpoints
from oasis_sglang.memory_pool.prefetch.sockets import try_send
from tests.unit.prefetch_rig import PATIENCE, RuntimeFolder, until


class PlayedWorker:
    """The worker's ends of the sockets."""

    def __init__(self, context: zmq.Context, folder: Path, generation: int) -> None:
        self.generation = generation
        self.endpoints = Endpoints(f"ipc://{folder}/plans-{generation}", f"ipc://{folder}/done-{generation}")
        self._plans, self._completions = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._plans.rcvtimeo = self._completions.sndtimeo = int(PATIENCE * 1000)
        self._plans.bind(self.endpoints.plans)
        self._completions.bind(self.endpoints.completions)

    def receive(self) -> Message:
        return decode(self._plans.recv())

    def send(self, frame: bytes) -> None:
        self._completions.send(frame)

    def try_send(self, frame: bytes) -> bool:
        return try_send(self._completions, frame)

    def complete(self, sequence: int, *, generation: int | None = None, pieces: int = 1) -> None:
        generation = self.generation if generation is None else generation
        self.send(encode(Completion(generation, sequence, "done", pieces, 8 * pieces, 0.25)))

    def has_mail(self) -> bool:
        return bool(self._plans.poll(50))


class PlayedWorkers:
    """What the client asks of `Workers`."""

    def __init__(self, folder: Path, queue_plans: int = 8) -> None:
        self.queue_plans = queue_plans
        self._folder = folder
        self._context = zmq.Context()
        self._alive: dict[int, PlayedWorker] = {}
        self._ready: list[int] = []
        self._newest = 0

    def start(self) -> PlayedWorker:
        self._newest += 1
        self._alive[self._newest] = PlayedWorker(self._context, self._folder, self._newest)
        self._ready.append(self._newest)
        return self._alive[self._newest]

    def lose(self, worker: PlayedWorker) -> None:
        """Its process takes no more plans, but is not certainly gone."""
        self._ready.remove(worker.generation)

    def reap(self, worker: PlayedWorker) -> None:
        del self._alive[worker.generation]

    def ready(self) -> list[tuple[int, int]]:
        return list(enumerate(self._ready))

    def endpoints(self, generation: int) -> Endpoints | None:
        worker = self._alive.get(generation)
        return worker.endpoints if worker else None

    def is_reaped(self, generation: int) -> bool:
        return generation <= self._newest and generation not in self._alive

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def workers():
    with RuntimeFolder() as runtime:
        folder = runtime.path / "played"
        folder.mkdir()
        workers = PlayedWorkers(folder)
        yield workers
        workers.close()
        shutil.rmtree(folder)


@pytest.fixture
def client(workers: PlayedWorkers):
    client = PrefetchClient(workers)
    yield client
    client.close()


def test_zmqs_thread_interrupts_no_step(workers: PlayedWorkers, client: PrefetchClient) -> None:
    """Waking a thread of the usual priority costs a busy rank process most of what a plan may cost."""
    workers.start()
    assert client.submit([(0, 1, 1)], [0], [0], step=1, first_layer=0, end_layer=1) is not None
    policies = [os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")]
    assert os.SCHED_BATCH in policies
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def submit(client: PrefetchClient, row: int = 0, pieces: int = 1) -> int | None:
    ids = range(pieces)
    return client.submit([(row, 1, pieces)], ids, ids, step=3, first_layer=4, end_layer=6)


def submitted(client: PrefetchClient, row: int = 0, pieces: int = 1) -> int:
    sequence = submit(client, row, pieces)
    assert sequence is not None
    return sequence


def poll_until(client: PrefetchClient, ends: int = 1) -> list[Finished]:
    found: list[Finished] = []

    def enough() -> bool:
        found.extend(client.poll())
        return len(found) >= ends

    until(enough)
    return found


def test_a_plan_goes_out_and_its_end_comes_back(workers: PlayedWorkers, client: PrefetchClient) -> None:
    worker = workers.start()
    sequence = client.submit([(4, 7, 2), (5, 1, 1)], [9, 8, 7], [1, 2, 3], step=3, first_layer=4, end_layer=6)
    assert sequence is not None
    plan = worker.receive()
    shares = pack_shares([*unpack_shares(plan.attempts)]) if isinstance(plan, Plan) else b""
    assert plan == Plan(sequence, 3, 4, 6, shares, pack_ids([9, 8, 7]), pack_ids([1, 2, 3]))
    assert unpack_shares(shares) == [(4, 7, 2), (5, 1, 1)]
    assert client.poll() == []
    worker.complete(sequence, pieces=3)
    assert poll_until(client) == [Finished(sequence, "done", frozenset(), 3, 24, 0.25)]
    stats = client.stats
    assert (stats.plans_submitted, stats.pieces, stats.bytes, stats.copy_seconds) == (1, 3, 24, 0.25)
    assert client.outstanding == 0


def test_no_worker_is_a_drop(workers: PlayedWorkers, client: PrefetchClient) -> None:
    assert submit(client) is None
    assert (client.stats.plans_dropped, client.stats.plans_submitted, client.outstanding) == (1, 0, 0)
    workers.lose(workers.start())
    assert submit(client) is None
    worker = workers.start()
    workers.reap(worker)  # between two looks at it
    assert submit(client) is None
    assert client.stats.plans_dropped == 3


def test_the_least_loaded_worker_gets_the_plan(workers: PlayedWorkers, client: PrefetchClient) -> None:
    first, second = workers.start(), workers.start()
    submitted(client, pieces=10)
    light = submitted(client, pieces=3)
    submitted(client, pieces=3)
    submitted(client, pieces=1)
    assert [first.receive().sequence] == [1]
    assert [second.receive().sequence for _ in range(3)] == [light, 3, 4]
    second.complete(light)
    poll_until(client)
    submitted(client, pieces=1)
    assert second.receive().sequence == 5
    assert not first.has_mail()


def test_a_full_queue_is_a_drop_and_the_other_worker_gets_the_plan(
    workers: PlayedWorkers, client: PrefetchClient
) -> None:
    first = workers.start()
    for _ in range(workers.queue_plans):
        submitted(client)
    assert submit(client) is None
    assert client.stats.plans_dropped == 1
    second = workers.start()
    number = submitted(client)
    assert second.receive().sequence == number
    assert [first.receive().sequence for _ in range(workers.queue_plans)] == list(range(1, workers.queue_plans + 1))


def test_a_plan_that_no_frame_holds_raises(workers: PlayedWorkers, client: PrefetchClient) -> None:
    workers.start()
    with pytest.raises(ValueError, match="can be sent"):
        submit(client, pieces=MAX_FRAME_BYTES // 16)
    assert client.outstanding == 0
    submitted(client)


def test_an_attempt_is_cancelled_once_where_it_has_plans(workers: PlayedWorkers, client: PrefetchClient) -> None:
    first, second, third = workers.start(), workers.start(), workers.start()
    a, b, c = (submitted(client, row) for row in (1, 1, 2))
    for worker in (first, second, third):
        worker.receive()
    client.cancel((1, 1))
    client.cancel((1, 1))
    client.cancel((1, 2))
    assert first.receive() == second.receive() == Cancel(1, 1)
    assert not any(worker.has_mail() for worker in (first, second, third))
    for worker, sequence in ((first, a), (second, b), (third, c)):
        worker.complete(sequence, pieces=0)
    ends = {end.sequence: end.cancelled for end in poll_until(client, 3)}
    assert ends == {a: {(1, 1)}, b: {(1, 1)}, c: frozenset()}


def test_a_completion_after_its_attempt_was_released(workers: PlayedWorkers, client: PrefetchClient) -> None:
    """The plan is still reported: its target memory was lent all the while."""
    worker = workers.start()
    sequence = submitted(client, row=3)
    client.cancel((3, 1))
    assert client.poll() == []
    assert client.outstanding == 1
    worker.complete(sequence)
    (end,) = poll_until(client)
    assert (end.sequence, end.status, end.cancelled) == (sequence, "done", {(3, 1)})


def test_a_completion_of_a_worker_declared_lost_counts_until_it_is_reaped(
    workers: PlayedWorkers, client: PrefetchClient
) -> None:
    """Lost is not gone: the process may still write, so its plans stay lent, and a completion is as good as any."""
    worker = workers.start()
    first, second = submitted(client), submitted(client)
    workers.lose(worker)
    assert client.poll() == []
    worker.complete(first)
    assert [(end.sequence, end.status) for end in poll_until(client)] == [(first, "done")]
    assert client.outstanding == 1
    workers.reap(worker)
    assert [(end.sequence, end.status) for end in client.poll()] == [(second, "lost")]
    assert (client.outstanding, client.stats.plans_lost, client.stats.stale_completions) == (0, 1, 0)


def test_a_completion_after_its_worker_was_reaped_is_stale(workers: PlayedWorkers, client: PrefetchClient) -> None:
    """The dead worker's socket is closed; whatever repeats its words over a living one's is counted and ignored."""
    worker = workers.start()
    sequence = submitted(client)
    workers.lose(worker)
    workers.reap(worker)
    assert [(end.sequence, end.status) for end in client.poll()] == [(sequence, "lost")]
    successor = workers.start()
    living = submitted(client)
    successor.complete(sequence, generation=worker.generation)
    successor.complete(sequence)
    successor.complete(living, generation=worker.generation)
    successor.complete(10_000)
    until(lambda: not client.poll() and client.stats.stale_completions == 4)
    assert client.outstanding == 1
    successor.complete(living)
    successor.complete(living)
    assert [end.sequence for end in poll_until(client)] == [living]
    until(lambda: not client.poll() and client.stats.stale_completions == 5)


def test_a_worker_cannot_complete_the_plan_of_another(workers: PlayedWorkers, client: PrefetchClient) -> None:
    first, second = workers.start(), workers.start()
    a, b = submitted(client), submitted(client)
    second.complete(a, generation=first.generation)
    second.complete(a)
    until(lambda: not client.poll() and client.stats.stale_completions == 2)
    assert client.outstanding == 2
    first.complete(a)
    second.complete(b)
    assert {end.sequence for end in poll_until(client, 2)} == {a, b}


def test_junk_is_counted_and_harmless(workers: PlayedWorkers, client: PrefetchClient) -> None:
    worker = workers.start()
    sequence = submitted(client)
    chance = random.Random(1)
    good = encode(Completion(worker.generation, sequence, "done", 1, 8, 0.25))
    junk = [chance.randbytes(chance.randrange(80)) for _ in range(3000)]
    junk += [good[:2] + b"\x00" + good[3:], good[:3] + b"\xff", good + b"!", good[:-1], bytes(MAX_FRAME_BYTES + 1)]
    junk += [encode(message) for message in (Stop(), Hello(1, 2, 3, 4, 5), Cancel(1, 2))]
    for frame in junk:
        until(lambda frame=frame: not client.poll() and worker.try_send(frame))
    until(lambda: not client.poll() and client.stats.bad_messages == len(junk))
    assert (client.outstanding, client.stats.stale_completions) == (1, 0)
    worker.send(good)
    assert [end.sequence for end in poll_until(client)] == [sequence]


def test_sockets_go_with_their_generation(workers: PlayedWorkers, client: PrefetchClient) -> None:
    """A rank process that lives through many restarts holds no more descriptors than at first."""

    def once() -> None:
        worker = workers.start()
        sequence = submitted(client)
        worker.receive()
        workers.lose(worker)
        workers.reap(worker)
        assert [end.sequence for end in client.poll()] == [sequence]

    once()
    seen = []
    for _ in range(10):
        once()
        seen.append(len(os.listdir("/proc/self/fd")))
    # the played worker's own sockets stay: two listeners and what they hold
    growth = (seen[-1] - seen[0]) / 9
    assert growth <= 8
    assert client._links == {}


def test_no_call_waits(workers: PlayedWorkers, client: PrefetchClient) -> None:
    """The worker never reads, as if it were stopped."""
    workers.start()
    slowest = 0.0
    for number in range(3000):
        start = time.perf_counter()
        submit(client, row=number % 5)
        client.cancel((number % 5, 1))
        client.poll()
        slowest = max(slowest, time.perf_counter() - start)
    assert slowest < 1.0
    stats = client.stats
    assert stats.plans_submitted == workers.queue_plans
    assert stats.plans_submitted + stats.plans_dropped == 3000


@pytest.mark.slow
def test_a_million_junk_frames_take_no_memory(workers: PlayedWorkers, client: PrefetchClient) -> None:
    workers.queue_plans = 1000
    worker = workers.start()
    sequence = submitted(client)
    chance = random.Random(2)
    frames = [chance.randbytes(chance.randrange(100)) for _ in range(1000)]

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    for turn in range(1000):
        if turn == 100:
            before = resident()
        for frame in frames:
            if not worker.try_send(frame):
                until(lambda frame=frame: not client.poll() and worker.try_send(frame))
    until(lambda: not client.poll() and client.stats.bad_messages == 1_000_000)
    assert resident() - before < 8 << 20
    worker.complete(sequence)
    assert [end.sequence for end in poll_until(client)] == [sequence]


def test_a_client_that_nobody_closes_goes_without_a_wait(workers: PlayedWorkers) -> None:
    """Client and sockets are one garbage cycle, as after a step that raised. The collector must not wait in ZMQ for
    sockets that it is about to free: in a thread, so that a hang fails this test and no other."""
    workers.start()
    client = PrefetchClient(workers)
    assert submit(client) is not None
    cycle = [client]
    cycle.append(cycle)  # type: ignore[arg-type]
    del client, cycle
    collected = threading.Thread(target=gc.collect, daemon=True)
    collected.start()
    collected.join(10)
    assert not collected.is_alive()
