"""`oasis top`: figures worked out by hand, and how they look on the screen."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from oasis_sglang import metrics
from oasis_sglang.top.frame import Frame, History
from oasis_sglang.top.render import Outage, View, _bytes, _number
from oasis_sglang.top.scrape import Scrape, parse
from tests.unit.top_readings import (
    AFTER,
    BEFORE,
    GAUGES,
    MODEL,
    NO_SPECULATION,
    PER_STEP,
    URL,
    WORKER_GAUGES,
    WORKERS_AFTER,
    WORKERS_BEFORE,
    frame_of,
    labels,
    lines_of,
    reading,
)

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


def test_unreachable_says_since_when() -> None:
    clock = datetime(2026, 1, 2, 14, 2, 11)
    outage = Outage(clock - timedelta(seconds=41), f"nothing answers at {URL}: Connection refused")
    lines = lines_of(View(URL, full_frame(), clock, outage))
    assert " ".join(line.strip() for line in lines[2:4]) == (
        f"Unreachable since 14:01:30 (41 s): nothing answers at {URL}: Connection refused"
    )
    assert len(lines) <= 24  # of a terminal of that size
    assert any("95.0%" in line for line in lines)
