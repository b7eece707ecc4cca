"""The loop behind `oasis top`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from rich.console import Console
from rich.live import Live

from oasis_sglang.top.frame import History
from oasis_sglang.top.render import Outage, View
from oasis_sglang.top.scrape import ScrapeError, scrape


def run(url: str, interval: float, once: bool) -> int:
    """Show frames until interrupted, or a single one.

    Args:
        url: the server's address, without a slash at its end.
        interval: seconds from one reading of the metrics to the next.

    Returns:
        The exit code: 0, or 1 with a message on standard error where there is nothing to show.
    """
    console = Console(highlight=False)
    try:
        (_once if once else _watch)(console, url, interval)
    except ScrapeError as error:
        print(f"oasis top: {error}", file=sys.stderr)
        return 1
    return 0


def _once(console: Console, url: str, interval: float) -> None:
    history = History()
    history.add(scrape(url))
    time.sleep(interval)
    console.print(View(url, history.add(scrape(url)), datetime.now()))


def _watch(console: Console, url: str, interval: float) -> None:
    """
    Raises:
        ScrapeError: there are no metrics to begin with. Later on the view stays and says so.
    """
    try:
        history, outage, started = History(), None, time.monotonic()
        frame = history.add(scrape(url))
        with _screen(console) as show:
            while True:
                show(View(url, frame, datetime.now(), outage))
                time.sleep(max(started + interval - time.monotonic(), 0.0))
                started = time.monotonic()
                try:
                    frame, outage = history.add(scrape(url)), None
                except ScrapeError as error:
                    outage = Outage(outage.since if outage else datetime.now(), str(error))
                    history = History()  # whatever answers next may count from 0
    except KeyboardInterrupt:  # the way to leave
        return


@contextmanager
def _screen(console: Console) -> Iterator[Callable[[View], None]]:
    """Where frames go: each over the last one on a terminal, one after the other elsewhere."""
    if not console.is_interactive:
        yield lambda view: console.print(view, "")
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda view: live.update(view, refresh=True)
