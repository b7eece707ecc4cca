"""Real servers for tests, one alive at a time: two would share the cores and double every wait."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from oasis_sglang.serving import Answer, Client, Documents, Server, ask_all, oasis_flags

# Small enough that a few long prompts do not fit on the device, large enough for one whole sequence.
CONFIG = {"token_budget": 1024, "host_to_device_ratio": 4.0}
DEVICE_TOKENS = 12_000
DENSE_TOKENS = 48_000

ServerFactory = Callable[..., contextlib.AbstractContextManager[Server]]
DenseOutputs = Callable[..., list[Answer]]


class _OneAtATime:
    """Keeps the shared server between tests, and stops it when a test needs the machine for another one."""

    def __init__(self, model_path: str) -> None:
        self.model_path = model_path
        self.shared: Server | None = None

    def server(self, args: Sequence[str], env: Mapping[str, str] | None) -> Server:
        return Server(self.model_path, args, env=env)

    def get_shared(self) -> Server:
        if self.shared is None or self.shared.process is None or self.shared.process.poll() is not None:
            self.stop_shared()
            server = self.server([*oasis_flags(CONFIG, DEVICE_TOKENS), "--enable-metrics"], None)
            server.start()
            self.shared = server
        return self.shared

    def stop_shared(self) -> None:
        if self.shared is not None:
            self.shared.stop()
            self.shared = None


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
    servers.stop_shared()


@pytest.fixture(scope="session")
def server_factory(_servers: _OneAtATime) -> ServerFactory:
    """`with server_factory(args, env) as server:` starts a server of its own; the shared one is stopped before."""

    @contextlib.contextmanager
    def start(args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Iterator[Server]:
        _servers.stop_shared()
        with _servers.server(args, env) as server:
            yield server

    return start


@pytest.fixture
def oasis_server(_servers: _OneAtATime) -> Server:
    """The shared oasis server, with an empty cache. Not session-scoped: it may have to start again in between."""
    server = _servers.get_shared()
    Client(server.url).flush_cache()
    return server


@pytest.fixture
def client(oasis_server: Server) -> Client:
    """A client of the shared oasis server."""
    return Client(oasis_server.url)


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
