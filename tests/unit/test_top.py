"""`oasis top`: what it says with a server and without, and while one goes and comes back."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from oasis_sglang.cli import main
from oasis_sglang.top import command
from oasis_sglang.top.scrape import Scrape, ScrapeError, parse
from tests.unit.top_readings import (
    AFTER,
    BEFORE,
    GAUGES,
    URL,
    exposition,
)

# -- with a server ----------------------------------------------------------------------------------------------------


class Http(ThreadingHTTPServer):
    daemon_threads = False  # so that closing the server waits for its answers

    def handle_error(self, *_: Any) -> None:
        """A client that went away is none, and must not be heard of in the output."""


class Server:
    """A local HTTP server. Answers GET requests with what `pages` holds: path -> (status, content type, body).

    A list of bodies is used up to its last one, which stays; a function makes one.
    """

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, str, str | list[str] | Callable[[], str]]] = {}
        self.asked: list[str] = []
        self._start(0)

    def _start(self, port: int) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                status, kind, body = server.pages.get(self.path, (404, "application/json", '{"detail":"Not Found"}'))
                if isinstance(body, list):
                    body = body.pop(0) if len(body) > 1 else body[0]
                content = (body() if callable(body) else body).encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = Http(("127.0.0.1", port), Handler)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metrics(self, *bodies: str) -> None:
        self.pages["/metrics"] = (200, "text/plain; version=0.0.4; charset=utf-8", list(bodies))

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def start_again(self) -> None:
        self._start(self.port)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


def top(server: Server, *more: str) -> int:
    return main(["top", "--url", server.url, "--interval", "0.1", *more])


def test_once(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    server.metrics(exposition(GAUGES | BEFORE), exposition(GAUGES | AFTER))
    assert top(server, "--once") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert server.asked == ["/metrics", "/metrics"]
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "hit rate       95.0%" in out
    assert "\x1b" not in out


def test_a_slash_at_the_end_of_the_url_does_not_matter(server: Server) -> None:
    server.metrics(exposition(GAUGES | BEFORE))
    assert main(["top", "--url", f"{server.url}/", "--interval", "0.1", "--once"]) == 0
    assert server.asked == ["/metrics", "/metrics"]


def error_of(capsys: pytest.CaptureFixture[str], url: str) -> str:
    """What the command says in its one line on standard error, which is the same for one frame and for the view."""
    for arguments in (["--once"], []):
        assert main(["top", "--url", url, "--interval", "0.1", *arguments]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("oasis top: ")
        assert err.count("\n") == 1
    return err


def test_error_server_down(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.stop()
    assert error_of(capsys, server.url) == f"oasis top: nothing answers at {server.url}: Connection refused\n"
    server.start_again()


def test_error_no_answer(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oasis_sglang.top.scrape.TIMEOUT", 0.05)
    server.pages["/metrics"] = (200, "text/plain", lambda: time.sleep(0.3) or "")
    assert "did not answer within 0.05 s" in error_of(capsys, server.url)


@pytest.mark.parametrize(
    "body", ["<!DOCTYPE html>\n<html>{</html>", '{"object": "list"}', "hello", "{", "a b c", "x{y=1} 2", "{}", "{,} 1"]
)
def test_error_not_metrics(server: Server, capsys: pytest.CaptureFixture[str], body: str) -> None:
    server.pages["/metrics"] = (200, "text/html", body)
    assert f"{server.url} is no SGLang server" in error_of(capsys, server.url)


def test_error_metrics_of_another_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.metrics(exposition(GAUGES | BEFORE).replace("sglang:", "vllm:"))
    assert "is no SGLang server: it has metrics, but none of SGLang's" in error_of(capsys, server.url)


def test_error_no_sglang_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not look like a SGLang server: /metrics answers HTTP 404" in error_of(capsys, server.url)
    assert server.asked[:2] == ["/metrics", "/model_info"]


def test_error_without_enable_metrics(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.pages["/model_info"] = (200, "application/json", json.dumps({"model_path": "/models/m"}))
    assert error_of(capsys, server.url).endswith("has no metrics: start it with --enable-metrics\n")


def test_error_server_fails(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.pages["/metrics"] = (500, "text/plain", "Internal Server Error")
    assert "answers HTTP 500" in error_of(capsys, server.url)


def test_error_without_oasis(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.metrics(exposition({"num_running_reqs": 0, "num_queue_reqs": 0, "token_usage": 0, "gen_throughput": 0}))
    assert error_of(capsys, server.url).endswith("has no oasis metrics: was it started with --kv-backend oasis?\n")


def test_error_nothing_published(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.metrics(exposition({"max_total_num_tokens": 35_296, "page_size": 16}))
    assert "has published nothing yet; it does with its first request" in error_of(capsys, server.url)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "localhost:30000"], "must begin with http:// or https://"),
        (["--interval", "0"], "must be 0.1 to 3,600 seconds"),
        (["--interval", "nan"], "must be 0.1 to 3,600 seconds"),
        (["--interval", "soon"], "must be 0.1 to 3,600 seconds"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["top", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# -- the live view ----------------------------------------------------------------------------------------------------


class Script:
    """Stands in for `time.sleep`: does the next thing, and interrupts when nothing is left."""

    def __init__(self, *things: Callable[[], None] | None) -> None:
        self.things = list(things)

    def __call__(self, _: float) -> None:
        if not self.things:
            raise KeyboardInterrupt
        if thing := self.things.pop(0):
            thing()


def test_the_view_outlives_the_server(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def idle() -> None:
        server.metrics(exposition(GAUGES | AFTER | {"num_running_reqs": 0}))

    def restart() -> None:
        server.metrics(exposition(GAUGES | BEFORE), exposition(GAUGES | AFTER))
        server.start_again()

    server.metrics(exposition(GAUGES | AFTER))
    monkeypatch.setattr(command.time, "sleep", Script(idle, server.stop, None, restart, None))
    assert main(["top", "--url", server.url]) == 0
    frames = capsys.readouterr().out.split("oasis top  ")[1:]
    assert len(frames) == 6
    assert ["Unreachable since" in frame for frame in frames] == [False, False, True, True, False, False]
    assert "Connection refused" in frames[2]
    assert "first look" in frames[0]
    assert "first look" not in frames[2]  # the last frame stays
    assert "first look" in frames[4]  # the server counts from 0
    assert "hit rate       95.0%" in frames[5]


def test_on_a_terminal_the_last_frame_stays(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.metrics(exposition(GAUGES | BEFORE), exposition(GAUGES | AFTER))
    monkeypatch.setattr(command.time, "sleep", Script(None))
    file = io.StringIO()
    console = Console(file=file, width=80, height=30, force_terminal=True, color_system=None, _environ={})
    command._watch(console, server.url, 1.0)
    text = file.getvalue()
    assert text.count("oasis top  ") >= 2
    assert "95.0%" in text.rpartition("oasis top  ")[2]
    assert text.index("\x1b[?25l") < text.rindex("\x1b[?25h")  # the cursor is back


def test_interrupted_while_the_server_takes_its_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> Scrape:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "scrape", interrupt)
    assert main(["top", "--url", server.url]) == 0
    assert main(["top", "--url", server.url, "--once"]) == 130


def test_an_empty_page_is_not_that_of_a_sglang_server() -> None:
    with pytest.raises(ScrapeError):
        parse("", 0.0, URL)
