"""`oasis top`: figures worked out by hand, what is on the screen, and what it says where there is nothing to show."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from rich.console import Console

from oasis_sglang import metrics
from oasis_sglang.cli import main
from oasis_sglang.top import command
from oasis_sglang.top.frame import Frame, History
from oasis_sglang.top.render import Outage, View, _bytes, _number
from oasis_sglang.top.scrape import Scrape, ScrapeError, parse

URL = "http://127.0.0.1:30000"
MODEL = "SmolLM2-135M-Instruct"

GAUGES = {
    "num_running_reqs": 8,
    "num_queue_reqs": 3,
    "oasis_host_total_tokens": 141_200,
    "oasis_host_used_tokens": 70_600,
    "oasis_device_total_tokens": 35_296,
    "oasis_device_used_tokens": 17_648,
    "oasis_host_pool_bytes": 3.25e9,
    "oasis_device_pool_bytes": 0.81e9,
    "oasis_summary_bytes": 0.2e9,
    "oasis_working_sets": 8,
    "oasis_transfers_in_flight": 0,
}
BEFORE = {
    "oasis_selected_pages_total": 10_000,
    "oasis_missed_pages_total": 1_000,
    "oasis_dropped_pages_total": 100,
    "oasis_fetched_pages_total": 900,
    "oasis_fetched_bytes_total": 9e6,
    "oasis_stall_seconds_total": 1.0,
    "oasis_decode_steps_total": 40,
    "oasis_verify_steps_total": 80,
    "oasis_accepted_tokens_total": 160,
    "oasis_lookahead_pages_total": 800,
    "oasis_lookahead_agreed_pages_total": 700,
    "realtime_tokens_total:decode": 320,
    "realtime_tokens_total:prefill_compute": 56_000,
}
# Four seconds and 40 steps later.
AFTER = {
    "oasis_selected_pages_total": 50_000,
    "oasis_missed_pages_total": 3_000,
    "oasis_dropped_pages_total": 300,
    "oasis_fetched_pages_total": 2_500,
    "oasis_fetched_bytes_total": 25e6,
    "oasis_stall_seconds_total": 1.5,
    "oasis_decode_steps_total": 80,
    "oasis_verify_steps_total": 160,
    "oasis_accepted_tokens_total": 352,
    "oasis_lookahead_pages_total": 1_000,
    "oasis_lookahead_agreed_pages_total": 830,
    "realtime_tokens_total:decode": 640,
    "realtime_tokens_total:prefill_compute": 58_000,
}
WORKER_GAUGES = {
    "oasis_prefetch_workers": 2,
    "oasis_prefetch_workers_ready": 2,
    "oasis_prefetch_queued_plans": 5,
}
WORKERS_BEFORE = {
    "oasis_prefetch_issued_pages_total": 0,
    "oasis_prefetch_used_pages_total": 0,
    "oasis_prefetch_late_pages_total": 0,
    "oasis_prefetch_wasted_pages_total": 0,
    "oasis_prefetch_copy_seconds_total": 0,
    "oasis_prefetch_worker_restarts_total": 1,
}
WORKERS_AFTER = {
    "oasis_prefetch_issued_pages_total": 1_200,
    "oasis_prefetch_used_pages_total": 1_000,
    "oasis_prefetch_late_pages_total": 40,
    "oasis_prefetch_wasted_pages_total": 160,
    "oasis_prefetch_copy_seconds_total": 2.0,
    "oasis_prefetch_worker_restarts_total": 1,
}
NO_SPECULATION = {
    "oasis_verify_steps_total": 0,
    "oasis_accepted_tokens_total": 0,
    "oasis_lookahead_pages_total": 0,
    "oasis_lookahead_agreed_pages_total": 0,
}
PER_STEP = ("selected", "missed", "dropped")


def labels(rank: int = 0, **more: str) -> dict[str, str]:
    """As SGLang's scheduler labels its metrics."""
    ranks = {"tp_rank": str(rank), "pp_rank": "0", "moe_ep_rank": str(rank)}
    return {"model_name": MODEL, "engine_type": "unified", **ranks, **more}


def exposition(*ranks: dict[str, float]) -> str:
    """The metrics of a server whose ranks have these values, in Prometheus' text format."""
    registry = CollectorRegistry()
    made: dict[str, Any] = {}
    for rank, values in enumerate(ranks):
        for key, value in values.items():
            name, _, mode = key.partition(":")
            its = labels(rank, mode=mode) if mode else labels(rank)
            kind = Counter if name.endswith("_total") else Gauge
            if name not in made:
                made[name] = kind(f"sglang:{name}", "Multiprocess metric", list(its), registry=registry)
            metric = made[name].labels(**its)
            metric.inc(value) if kind is Counter else metric.set(value)
    return generate_latest(registry).decode()


def reading(seconds: float, *ranks: dict[str, float]) -> Scrape:
    return parse(exposition(*ranks), seconds, URL)


def frame_of(before: dict[str, float], after: dict[str, float], ranks: int = 1) -> Frame:
    history = History()
    history.add(reading(100.0, *[before] * ranks))
    return history.add(reading(104.0, *[after] * ranks))


def lines_of(view: View | Frame, width: int = 80, **options: Any) -> list[str]:
    if isinstance(view, Frame):
        view = View(URL, view, datetime(2026, 1, 2, 14, 2, 11))
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(view)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_metrics_read_are_those_exported() -> None:
    ours = {name for name in (*GAUGES, *BEFORE) if name.startswith("oasis_")}
    assert ours <= metrics.GAUGES.keys() | metrics.COUNTERS.keys()


def test_figures_from_two_readings() -> None:
    frame = frame_of(GAUGES | WORKER_GAUGES | BEFORE | WORKERS_BEFORE, GAUGES | WORKER_GAUGES | AFTER | WORKERS_AFTER)
    assert frame.now.model == MODEL
    assert frame.ranks == 1
    assert (frame.pool("device").used, frame.pool("device").total, frame.pool("device").bytes) == (17_648, 35_296, 81e7)
    assert (frame.pool("host").used, frame.pool("host").total, frame.pool("host").bytes) == (70_600, 141_200, 3.25e9)
    assert frame.tokens_per_second("decode") == 80
    assert frame.tokens_per_second("prefill_compute") == 500
    assert frame.window is not None
    assert frame.window.seconds == 4
    assert frame.window.rate_of_one("oasis_decode_steps_total") == 10
    assert frame.hit_rate == pytest.approx(0.95)
    assert [frame.per_step(f"oasis_{name}_pages_total") for name in PER_STEP] == [1000, 50, 5]
    assert frame.rate("oasis_fetched_pages_total") == 400
    assert frame.rate("oasis_fetched_bytes_total") == 4e6
    assert frame.stalled == 0.125
    assert frame.agreement == 0.83
    assert frame.accept_length == pytest.approx(2.4)
    assert frame.workers == 2
    prefetched = [f"oasis_prefetch_{name}_pages_total" for name in ("issued", "used", "late", "wasted")]
    assert [frame.per_step(name) for name in prefetched] == [30, 25, 1, 4]
    assert frame.copying == 0.25


def test_two_ranks_add_up_in_bytes_and_pages_but_not_in_tokens() -> None:
    one = frame_of(GAUGES | BEFORE, GAUGES | AFTER)
    two = frame_of(GAUGES | BEFORE, GAUGES | AFTER, ranks=2)
    assert two.ranks == 2
    assert two.pool("host").bytes == 2 * one.pool("host").bytes
    assert (two.pool("host").used, two.pool("host").total) == (one.pool("host").used, one.pool("host").total)
    assert two.tokens_per_second("decode") == one.tokens_per_second("decode")
    assert two.rate("oasis_fetched_bytes_total") == 2 * one.rate("oasis_fetched_bytes_total")  # type: ignore[operator]
    # Each of the two waited for an eighth of the time, and a step of either selected as many pages.
    for name in ("stalled", "hit_rate", "accept_length", "agreement"):
        assert getattr(two, name) == getattr(one, name)
    for name in PER_STEP:
        assert two.per_step(f"oasis_{name}_pages_total") == one.per_step(f"oasis_{name}_pages_total")
    assert two.now.one("num_running_reqs") == 8
    assert "2 ranks" in lines_of(two)[0]


def test_a_rank_that_appears_does_not_count_as_growth() -> None:
    history = History()
    history.add(reading(100.0, GAUGES | BEFORE))
    frame = history.add(reading(104.0, GAUGES | AFTER, GAUGES | AFTER))
    assert frame.rate("oasis_fetched_pages_total") == 400


def test_the_total_of_requests_is_not_confused_with_those_of_a_priority() -> None:
    registry = CollectorRegistry()
    running = Gauge("sglang:num_running_reqs", "", list(labels(priority="")), registry=registry)
    for priority, number in (("", 5), ("0", 2), ("1", 3)):
        running.labels(**labels(priority=priority)).set(number)
    Gauge("sglang:oasis_working_sets", "", list(labels()), registry=registry).labels(**labels()).set(5)
    assert parse(generate_latest(registry).decode(), 0.0, URL).one("num_running_reqs") == 5


def test_counters_that_went_back_start_anew() -> None:
    history = History()
    history.add(reading(100.0, GAUGES | AFTER))
    restarted = history.add(reading(104.0, GAUGES | BEFORE))
    assert restarted.window is None
    assert restarted.tokens_per_second("decode") is None
    assert restarted.hit_rate is None
    assert restarted.pool("host").used == 70_600
    assert "first look" in "\n".join(lines_of(restarted))
    assert history.add(reading(108.0, GAUGES | AFTER)).stalled == 0.125


def test_a_counter_that_went_away_starts_anew() -> None:
    history = History()
    history.add(reading(100.0, GAUGES | BEFORE))
    assert history.add(reading(104.0, GAUGES)).window is None


def test_rates_hold_between_publications() -> None:
    history = History()
    history.add(reading(100.0, GAUGES | BEFORE))
    tokens = {"realtime_tokens_total:decode": 400.0}
    frame = history.add(reading(102.0, GAUGES | BEFORE | tokens))
    assert frame.window is None
    assert frame.tokens_per_second("decode") == 40  # which SGLang counts at every step
    assert "none published yet" in "\n".join(lines_of(frame))

    frame = history.add(reading(104.0, GAUGES | AFTER))
    assert frame.stalled == 0.125  # since 100, when the counters got the values they had at 102

    tokens = {"realtime_tokens_total:decode": 720.0}
    frame = history.add(reading(106.0, GAUGES | AFTER | tokens))
    assert frame.stalled == 0.125
    assert frame.age == 2
    assert "over 4.0 s, 2 s ago" in "\n".join(lines_of(frame))


def test_an_idle_server_does_nothing_rather_than_what_it_did_last() -> None:
    history = History()
    history.add(reading(100.0, GAUGES | BEFORE))
    idle = GAUGES | AFTER | {"num_running_reqs": 0, "num_queue_reqs": 0}
    assert history.add(reading(104.0, idle)).stalled == 0.125
    frame = history.add(reading(105.0, idle))
    assert frame.stalled == 0
    assert frame.rate("oasis_fetched_bytes_total") == 0
    assert frame.hit_rate is None
    assert frame.per_step("oasis_selected_pages_total") is None
    assert frame.agreement == 0.83
    text = "\n".join(lines_of(frame))
    assert "none over 1.0 s" in text
    assert "–" in text


def test_a_stall_share_is_never_above_one() -> None:
    assert frame_of(GAUGES | BEFORE, GAUGES | AFTER | {"oasis_stall_seconds_total": 9.0}).stalled == 1


# -- on the screen ----------------------------------------------------------------------------------------------------

FULL = """\
oasis top  http://127.0.0.1:30000                                       14:02:11
SmolLM2-135M-Instruct

device pool   ━━━━━━━━━━━━━              50.0%  17,648 of 35,296 tokens 810.0 MB
host pool     ━━━━━━━━━━━━━              50.0% 70,600 of 141,200 tokens  3.25 GB
key summaries                                                           200.0 MB

requests           8 running       3 queued
tokens/s          80 decode      500 prefill

Decode steps  10/s over 4.0 s
hit rate       95.0%
pages/step     1,000 selected     50 missed        5 dropped
fetched/s        400 pages       4.0 MB
stalled        12.5% of the time
lookahead      83.0% agreed, since start
accept length   2.40 tokens

workers          2/2 alive         1 restarts
plans              5 queued        0 dropped       0 stale         0 bad
prefetch/step     30 issued       25 used          1 late          4 wasted
copying        25.0% of the time
"""


def full_frame() -> Frame:
    return frame_of(GAUGES | WORKER_GAUGES | BEFORE | WORKERS_BEFORE, GAUGES | WORKER_GAUGES | AFTER | WORKERS_AFTER)


def test_everything_at_80_columns() -> None:
    assert lines_of(full_frame()) == FULL.splitlines()


@pytest.mark.parametrize("width", [200, 80, 72, 71, 60, 40, 24])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = lines_of(full_frame(), width)
    assert all(len(line) <= width for line in lines)
    words = set(" ".join(lines).split())
    assert {"device", "host", "pool", "summaries", "running", "queued", "decode", "prefill", "rate", "95.0%", "missed",
            "dropped", "fetched/s", "stalled", "lookahead", "accept", "alive", "2/2", "restarts", "plans", "issued",
            "used", "late", "wasted", "17,648", "3.25", "4.0"} <= words  # fmt: skip


def test_what_a_server_does_not_have_is_said_in_words() -> None:
    lines = lines_of(frame_of(GAUGES | BEFORE | NO_SPECULATION, GAUGES | AFTER | NO_SPECULATION))
    assert "accept length no speculation" in lines
    assert "lookahead     not sampled (only with miss_policy skip)" in lines
    assert "prefetch      no workers: transfer inline" in lines
    text = "\n".join(lines)
    assert not any(word in text for word in ("alive", "plans", "issued", "copying", "agreed"))


def test_before_there_are_rates_there_are_gauges() -> None:
    lines = lines_of(History().add(reading(100.0, GAUGES | BEFORE)))
    assert "Decode steps  first look, rates follow" in lines
    assert "hit rate           –" in lines
    assert "tokens/s           – decode        – prefill" in lines
    assert "requests           8 running       3 queued" in lines


def test_worst_case_numbers_fit() -> None:
    big = dict.fromkeys(AFTER, 987_654_321_987) | {"oasis_stall_seconds_total": 9_999}
    lines = lines_of(frame_of(GAUGES | BEFORE, dict.fromkeys(GAUGES, 12_345_678) | big))
    assert all(len(line) <= 80 for line in lines)


def test_a_model_without_a_name_of_its_own_is_shown_by_the_end_of_its_path() -> None:
    frame = full_frame()
    path = "/home/someone/" + "deep/" * 20 + "model"
    (line,) = (line for line in lines_of(Frame(Scrape(0.0, path, frame.now.values))) if line.startswith("…"))
    assert len(line) == 80
    assert line.endswith("deep/model")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (0.043, "0.04"), (9.999, "10.0"), (88.96, "89.0"), (7, "7"), (1234.5, "1,234"),
     (99_999, "99,999"), (99_999.7, "100k"), (123_456, "123k"), (999_700, "1.0M"), (12_345_678, "12.3M"),
     (987_654_321_987, "987.7G")],
)  # fmt: skip
def test_numbers_fit_into_six_characters(value: float | None, text: str) -> None:
    assert _number(value) == text
    assert len(text) <= 6


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "– MB"), (0, "0 kB"), (1234, "1.2 kB"), (4e6, "4.0 MB"), (3.25e9, "3.25 GB"), (1.5e12, "1,500 GB")],
)
def test_bytes(value: float | None, text: str) -> None:
    assert " ".join(_bytes(value)) == text


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


def test_unreachable_says_since_when() -> None:
    clock = datetime(2026, 1, 2, 14, 2, 11)
    outage = Outage(clock - timedelta(seconds=41), f"nothing answers at {URL}: Connection refused")
    lines = lines_of(View(URL, full_frame(), clock, outage))
    assert " ".join(line.strip() for line in lines[2:4]) == (
        f"Unreachable since 14:01:30 (41 s): nothing answers at {URL}: Connection refused"
    )
    assert len(lines) <= 24  # of a terminal of that size
    assert any("95.0%" in line for line in lines)


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
