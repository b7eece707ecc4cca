"""A frame as lines for a terminal of any width. At 80 columns they fit into its 24 rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from oasis_sglang.top.frame import Frame

LABEL = 14  # width of the first column, the space after it included
CELL = 16  # width of a number and what it counts, likewise
BARS_FROM = 72  # narrower terminals get the pools without their bars


@dataclass(frozen=True)
class Outage:
    """The server gives no metrics, since `since` (local time), because of `reason`."""

    since: datetime
    reason: str


@dataclass(frozen=True)
class View:
    """What is on the screen at `clock` (local time): the last frame, and that it is old where there is an outage."""

    url: str
    frame: Frame
    clock: datetime
    outage: Outage | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _Lines(options.max_width)
        _head(lines, self)
        _pools(lines, self.frame)
        _requests(lines, self.frame)
        _steps(lines, self.frame)
        _prefetch(lines, self.frame)
        yield from lines.parts


class _Lines:
    """Rows of a label and what belongs to it, wrapped into what is left of `width`."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.parts: list[RenderableType] = []

    def add(self, *parts: RenderableType) -> None:
        self.parts += parts

    def row(self, label: str, value: RenderableType, style: str = "") -> None:
        grid = Table.grid(expand=True)
        grid.add_column(width=LABEL, style="cyan")
        grid.add_column(ratio=1, style=style)
        grid.add_row(label, value)
        self.add(grid)

    def numbers(self, label: str, *cells: tuple[str, str], style: str = "") -> None:
        """A row of numbers, each with what it counts, in columns that stand still when digits change."""
        texts = [f"{number:>6} {unit}".ljust(CELL) for number, unit in cells]
        a_line = max((self.width - LABEL) // CELL, 1)
        lines = ["".join(texts[i : i + a_line]).rstrip() for i in range(0, len(texts), a_line)]
        self.row(label, Text("\n".join(lines)), style)


def _head(lines: _Lines, view: View) -> None:
    head = Table.grid(expand=True)
    head.add_column(ratio=1, overflow="fold")
    head.add_column(justify="right", no_wrap=True, style="dim")
    ranks = f"  {view.frame.ranks} ranks" if view.frame.ranks > 1 else ""
    head.add_row(Text.assemble(("oasis top", "bold"), f"  {view.url}{ranks}"), f"{view.clock:%H:%M:%S}")
    # A model that was given no other name is called by its whole path: the end of it tells most.
    model = view.frame.now.model
    if len(model) > lines.width:
        model = "…" + model[1 - lines.width :]
    lines.add(head, Text(model, style="dim"))
    if view.outage:
        seconds = (view.clock - view.outage.since).total_seconds()
        since = f"Unreachable since {view.outage.since:%H:%M:%S} ({seconds:.0f} s): "
        lines.add(Text(since + view.outage.reason, style="bold red"))


def _pools(lines: _Lines, frame: Frame) -> None:
    bars = Table.grid(expand=True, padding=(0, 1, 0, 0))
    bars.add_column(width=LABEL - 1, style="cyan")
    bars.add_column(ratio=1)
    for _ in range(3):
        bars.add_column(justify="right", no_wrap=True)
    wide = lines.width >= BARS_FROM
    lines.add(Text())
    for name in ("device", "host"):
        pool = frame.pool(name)
        cells = (
            _percent(pool.used / pool.total if pool.total else 0.0),
            f"{pool.used:,.0f} of {pool.total:,.0f} tokens",
            " ".join(_bytes(pool.bytes)),
        )
        if wide:
            bar = ProgressBar(total=pool.total, completed=pool.used, complete_style="green", finished_style="green")
            bars.add_row(f"{name} pool", bar, *cells)
        else:
            lines.row(f"{name} pool", ", ".join(cells))
    summaries = " ".join(_bytes(frame.now.total("oasis_summary_bytes")))
    if wide:
        bars.add_row("key summaries", "", "", "", summaries)
        lines.add(bars)
    else:
        lines.row("key summaries", summaries)


def _requests(lines: _Lines, frame: Frame) -> None:
    lines.add(Text())
    lines.numbers(
        "requests",
        (f"{frame.now.one('num_running_reqs'):,.0f}", "running"),
        (f"{frame.now.one('num_queue_reqs'):,.0f}", "queued"),
    )
    lines.numbers(
        "tokens/s",
        (_number(frame.tokens_per_second("decode")), "decode"),
        (_number(frame.tokens_per_second("prefill_compute")), "prefill"),
    )


def _steps(lines: _Lines, frame: Frame) -> None:
    lines.add(Text(), Text.assemble(("Decode steps", "bold"), (f"  {_period(frame)}", "dim")))
    lines.numbers("hit rate", (_percent(frame.hit_rate), ""))
    lines.numbers("pages/step", *_per_step(frame, "oasis_{}_pages_total", ("selected", "missed", "dropped")))
    lines.numbers(
        "fetched/s",
        (_number(frame.rate("oasis_fetched_pages_total")), "pages"),
        _bytes(frame.rate("oasis_fetched_bytes_total")),
    )
    lines.numbers("stalled", (_percent(frame.stalled), "of the time"))
    if frame.agreement is None:
        lines.row("lookahead", "not sampled (only with miss_policy skip)")
    else:
        lines.numbers("lookahead", (_percent(frame.agreement), "agreed, since start"))
    if frame.speculates:
        lines.numbers("accept length", (_number(frame.accept_length), "tokens"))
    else:
        lines.row("accept length", "no speculation")


def _period(frame: Frame) -> str:
    """How many steps a second, and what time the rates are from."""
    window = frame.window
    if frame.tokens is None:
        return "first look, rates follow"
    if window is None:
        return "none published yet: SGLang does so every 40 steps"
    period = f"over {window.seconds:.1f} s" + ("" if frame.age < 1 else f", {frame.age:.0f} s ago")
    rate = window.rate_of_one("oasis_decode_steps_total")
    return f"{_number(rate)}/s {period}" if rate else f"none {period}"


def _prefetch(lines: _Lines, frame: Frame) -> None:
    lines.add(Text())
    workers, now = frame.workers, frame.now
    if not workers:
        lines.row("prefetch", "no workers: transfer inline")
        return
    ready = now.total("oasis_prefetch_workers_ready")
    lines.numbers(
        "workers",
        (f"{ready:.0f}/{workers}", "alive"),
        (_number(now.total("oasis_prefetch_worker_restarts_total")), "restarts"),
        style="bold red" if ready < workers else "",
    )
    lines.numbers(
        "plans",
        (_number(now.total("oasis_prefetch_queued_plans")), "queued"),
        (_number(now.total("oasis_prefetch_dropped_plans_total")), "dropped"),
        (_number(now.total("oasis_prefetch_stale_completions_total")), "stale"),
        (_number(now.total("oasis_prefetch_bad_messages_total")), "bad"),
    )
    lines.numbers(
        "prefetch/step", *_per_step(frame, "oasis_prefetch_{}_pages_total", ("issued", "used", "late", "wasted"))
    )
    lines.numbers("copying", (_percent(frame.copying), "of the time"))


def _per_step(frame: Frame, metric: str, words: Sequence[str]) -> list[tuple[str, str]]:
    return [(_number(frame.per_step(metric.format(word))), word) for word in words]


def _number(value: float | None) -> str:
    """In at most six characters; whole numbers below 1e5 as they are."""
    if value is None:
        return "–"
    if value == int(value) and value < 1e5:
        return f"{value:,.0f}"
    for limit, unit, text in (
        (9.995, 1, "{:.2f}"),
        (99.95, 1, "{:.1f}"),
        (99_999.5, 1, "{:,.0f}"),
        (999_500, 1e3, "{:.0f}k"),
        (999.95e6, 1e6, "{:.1f}M"),
    ):
        if value < limit:
            return text.format(value / unit)
    return f"{value / 1e9:.1f}G"


def _bytes(value: float | None) -> tuple[str, str]:
    """A number and its unit; GB are 1e9 bytes."""
    if value is None:
        return "–", "MB"
    if value >= 1e9:
        return f"{value / 1e9:.2f}" if value < 99.995e9 else f"{value / 1e9:,.0f}", "GB"
    if value >= 1e6:
        return f"{value / 1e6:.1f}", "MB"
    return f"{value / 1e3:.1f}" if value else "0", "kB"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
