"""Real servers for tests, one alive at a time: two would share the cores and double every wait.

Tests are ordered by the server they use, so that each is started once. After every test the server must be as it was:
nothing held, nothing alarming in the log.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from oasis_sglang.serving import Answer, Client, Documents, Server, ask_all, oasis_flags
from tests.server.checks import LogWatch, wait_until_idle
from tests.server.truth import Truth, gather

# Small enough that a few long prompts do not fit on the device, large enough for one whole sequence.
CONFIG = {"token_budget": 1024, "host_to_device_ratio": 4.0}
DEVICE_TOKENS = 12_000
DENSE_TOKENS = 48_000
# The first test that needs a server waits for its start, and for all of dense SGLang's answers.
TEST_TIMEOUT = 1200

FP32 = ("--dtype", "float32")
SHARED = (*oasis_flags(CONFIG, DEVICE_TOKENS), "--enable-metrics")
# The defaults: what fits 2,048 tokens must come out as from dense SGLang. The device holds hardly more than one set.
WITHIN_BUDGET = (*oasis_flags({}, 2720), *FP32, "--enable-metrics", "--decode-log-interval", "8")
# Eight pages of budget, a host pool that holds little more than one sequence, small chunks, and a retraction every few
# steps whenever more than one request decodes.
SMALL_POOLS = (
    *oasis_flags({"token_budget": 128, "host_to_device_ratio": 1.5}, 1408),
    *FP32, "--context-length", "2048", "--chunked-prefill-size", "64",
)  # fmt: skip
# A draft that is the target itself: every draft is right.
SELF_DRAFT = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path")
# As a file for `--config`: no radix cache, and more requests admitted than the host pool can hold to their end.
NO_RADIX: dict[str, Any] = {
    "kv-backend": "oasis",
    "oasis-config": {"token_budget": 256, "host_to_device_ratio": 1.0, "recent_tokens": 32},
    "max-total-tokens": 2080,
    "context-length": 2048,
    "dtype": "float32",
    "disable-radix-cache": True,
    "schedule-conservativeness": 0.1,
}
RETRACTIONS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "12"}

ServerFactory = Callable[..., contextlib.AbstractContextManager[Server]]
DenseOutputs = Callable[..., list[Answer]]

# In the order in which their servers run; a test belongs to the first that it asks for.
SERVER_FIXTURES = ("dense_outputs", "oasis_server", "within_budget", "small_pools", "no_radix", "self_draft", "truth")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    places = [at for at, item in enumerate(items) if here in item.path.parents]

    def turn(item: pytest.Item) -> int:
        asked = getattr(item, "fixturenames", ())
        return next((at for at, name in enumerate(SERVER_FIXTURES) if name in asked), len(SERVER_FIXTURES))

    ordered = sorted((items[at] for at in places), key=turn)
    for at, item in zip(places, ordered, strict=True):
        items[at] = item
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT))


class ServeCommand(Server):
    """`sglang serve` instead of `python -m sglang.launch_server`."""

    @property
    def command(self) -> list[str]:
        return [str(Path(sys.executable).with_name("sglang")), "serve", *super().command[3:]]


class _OneAtATime:
    """Keeps the last server that was asked for, and stops it when a test needs the machine for another one."""

    def __init__(self, model_path: str) -> None:
        self.model_path = model_path
        self.asked: tuple[Any, ...] = ()
        self.current: Server | None = None

    def server(
        self,
        args: Sequence[str],
        env: Mapping[str, str] | None,
        kind: type[Server] = Server,
        model_path: str | None = None,
    ) -> Server:
        return kind(model_path or self.model_path, args, env=env)

    def get(self, args: Sequence[str], env: Mapping[str, str] | None = None, kind: type[Server] = Server) -> Server:
        """The running server if it was started like this, else one that is."""
        asked = (tuple(args), tuple(sorted((env or {}).items())), kind)
        running = self.current is not None and self.current.process is not None and self.current.process.poll() is None
        if self.current is None or not running or asked != self.asked:
            self.stop()
            server = self.server(args, env, kind)
            server.start()
            self.current, self.asked = server, asked
        return self.current

    def stop(self) -> None:
        if self.current is not None:
            self.current.stop()
            self.current = None


@pytest.fixture(scope="session")
def model_path() -> str:
    """`OASIS_TEST_MODEL`, or the demo model, built if it is missing."""
    if given := os.environ.get("OASIS_TEST_MODEL"):
        return given
    from oasis_sglang.model import ensure_model

    return str(ensure_model().path)


@pytest.fixture(scope="session")
def documents(model_path: str) -> Documents:
    return Documents(model_path)


@pytest.fixture(scope="session")
def _servers(model_path: str) -> Iterator[_OneAtATime]:
    servers = _OneAtATime(model_path)
    yield servers
    servers.stop()


@pytest.fixture(scope="session")
def server_factory(_servers: _OneAtATime) -> ServerFactory:
    """`with server_factory(args, env) as server:` starts a server of its own; the shared one is stopped before."""

    @contextlib.contextmanager
    def start(
        args: Sequence[str] = (), env: Mapping[str, str] | None = None, model_path: str | None = None
    ) -> Iterator[Server]:
        _servers.stop()
        with _servers.server(args, env, model_path=model_path) as server:
            yield server

    return start


@pytest.fixture(scope="module")
def no_server(_servers: _OneAtATime) -> None:
    """The machine for a module that starts processes of its own."""
    _servers.stop()


def _ready(server: Server) -> Iterator[Server]:
    """Hand a server with an empty cache to one test, and see that the test left nothing behind."""
    client = Client(server.url)
    client.flush_cache()
    watch = LogWatch(server)
    yield server
    wait_until_idle(client)
    watch.assert_clean()


@pytest.fixture
def oasis_server(_servers: _OneAtATime) -> Iterator[Server]:
    """The shared oasis server, in the model's own dtype. Not session-scoped: it may have to start again in between."""
    yield from _ready(_servers.get(SHARED))


@pytest.fixture
def within_budget(truth: Truth, _servers: _OneAtATime) -> Iterator[Server]:
    """A server in fp32 with the default settings. `truth` comes first: it needs the machine for dense SGLang."""
    yield from _ready(_servers.get(WITHIN_BUDGET))


@pytest.fixture
def small_pools(truth: Truth, _servers: _OneAtATime) -> Iterator[Server]:
    """A server in fp32 whose requests outgrow their budget and are retracted all the time."""
    yield from _ready(_servers.get(SMALL_POOLS, RETRACTIONS))


@pytest.fixture
def self_draft(truth: Truth, _servers: _OneAtATime, model_path: str) -> Iterator[Server]:
    """A server in fp32 with the default settings whose draft is the target."""
    yield from _ready(_servers.get([*WITHIN_BUDGET, *SELF_DRAFT, model_path]))


@pytest.fixture(scope="session")
def no_radix_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "serve.yaml"
    path.write_text(yaml.safe_dump(NO_RADIX))
    return path


@pytest.fixture
def no_radix(truth: Truth, _servers: _OneAtATime, no_radix_file: Path) -> Iterator[Server]:
    """A server in fp32 without a radix cache, started by `sglang serve --config`."""
    yield from _ready(_servers.get(["--config", str(no_radix_file)], kind=ServeCommand))


@pytest.fixture
def client(oasis_server: Server) -> Client:
    """A client of the shared oasis server."""
    return Client(oasis_server.url)


@pytest.fixture(scope="session")
def truth(server_factory: ServerFactory, documents: Documents) -> Truth:
    """What dense SGLang in fp32 answers to everything that the tests compare with; one start of a dense server."""
    with server_factory([*FP32, "--max-total-tokens", "12000", "--enable-metrics"]) as server:
        return gather(Client(server.url), documents)


@pytest.fixture(scope="session")
def dense_outputs(server_factory: ServerFactory) -> DenseOutputs:
    """`dense_outputs(prompts, sampling, args=())`: what stock SGLang answers, remembered for the session.

    Prompts that are not remembered cost one start of a dense server, and the shared one is stopped for it: ask for
    everything a test module needs in one call.
    """
    remembered: dict[str, Answer] = {}

    def key(prompt: str | Sequence[int], *rest: Any) -> str:
        return json.dumps([prompt if isinstance(prompt, str) else list(prompt), *rest], sort_keys=True)

    def outputs(
        prompts: Sequence[str | Sequence[int]],
        sampling: Mapping[str, Any],
        args: Sequence[str] = (),
        concurrency: int | None = None,
        **fields: Any,
    ) -> list[Answer]:
        keys = [key(prompt, dict(sampling), list(args), fields) for prompt in prompts]
        missing = [at for at, each in enumerate(keys) if each not in remembered]
        if missing:
            flags = ["--max-total-tokens", str(DENSE_TOKENS), *args]
            with server_factory(flags) as server:
                chosen = [prompts[at] for at in missing]
                answers = ask_all(Client(server.url), chosen, sampling, concurrency, **fields)
            remembered.update((keys[at], answer) for at, answer in zip(missing, answers, strict=True))
        return [remembered[each] for each in keys]

    return outputs
