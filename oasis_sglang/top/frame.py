"""What `oasis top` shows, worked out from the scrapes so far."""

from __future__ import annotations

from dataclasses import dataclass

from oasis_sglang.top.scrape import RUNNING, TOKENS, Scrape


@dataclass(frozen=True)
class Window:
    """What counters grew by from one scrape to a later one. Every method sums over ranks unless it says otherwise."""

    start: Scrape
    end: Scrape

    @property
    def seconds(self) -> float:
        return self.end.time - self.start.time

    def grown(self, name: str) -> float:
        # A rank that was not there at the start did not grow: its total is older than the window.
        before, after = self.start.values.get(name, {}), self.end.values.get(name, {})
        return sum(value - before[rank] for rank, value in after.items() if rank in before)

    def rate(self, name: str) -> float:
        """Per second."""
        return self.grown(name) / self.seconds

    def rate_of_one(self, name: str) -> float:
        """Per second, of the first rank only. A counter that the window saw appear started at 0."""
        return (self.end.one(name) - self.start.one(name)) / self.seconds


@dataclass(frozen=True)
class Pool:
    """Tokens of one rank, bytes of all."""

    used: float
    total: float
    bytes: float


@dataclass(frozen=True)
class Frame:
    """One state of the view. What it cannot know (yet) is None.

    Attributes:
        now: the latest scrape; gauges are read from it.
        tokens: from the scrape before it to this one.
        window: between the last two publications of the counters; see `History`.
    """

    now: Scrape
    tokens: Window | None = None
    window: Window | None = None

    @property
    def ranks(self) -> int:
        return len(self.now.values.get("oasis_device_total_tokens", {}))

    @property
    def workers(self) -> int:
        """Prefetch workers that the server was configured with; 0 where transfer is inline."""
        return int(self.now.total("oasis_prefetch_workers"))

    @property
    def speculates(self) -> bool:
        return self.now.total("oasis_verify_steps_total") > 0

    @property
    def agreement(self) -> float | None:
        """Share of the pages chosen ahead that the query itself chose, since the server's start: samples are rare."""
        pages = self.now.total("oasis_lookahead_pages_total")
        return self.now.total("oasis_lookahead_agreed_pages_total") / pages if pages else None

    def pool(self, name: str) -> Pool:
        """The `device` or the `host` pool."""
        return Pool(
            used=self.now.one(f"oasis_{name}_used_tokens"),
            total=self.now.one(f"oasis_{name}_total_tokens"),
            bytes=self.now.total(f"oasis_{name}_pool_bytes"),
        )

    # -- rates ----------------------------------------------------------------------------------------------------

    @property
    def age(self) -> float:
        """Seconds since the counters were last seen to be published."""
        return self.now.time - self.window.end.time if self.window else 0.0

    def tokens_per_second(self, mode: str) -> float | None:
        """`decode` or `prefill_compute`."""
        return self.tokens.rate_of_one(f"{TOKENS}:{mode}") if self.tokens else None

    def rate(self, name: str) -> float | None:
        """Per second."""
        return self.window.rate(name) if self.window else None

    def per_step(self, name: str) -> float | None:
        """Per decode step of a rank: pages and steps are both summed over ranks."""
        return self._share(name, "oasis_decode_steps_total")

    @property
    def hit_rate(self) -> float | None:
        missed = self._share("oasis_missed_pages_total", "oasis_selected_pages_total")
        return None if missed is None else 1 - missed

    @property
    def accept_length(self) -> float | None:
        """Tokens that a verified chain of drafts led to, mean."""
        return self._share("oasis_accepted_tokens_total", "oasis_verify_steps_total")

    @property
    def stalled(self) -> float | None:
        """Share of the time that a rank waited for copies to the device."""
        return self._time_share("oasis_stall_seconds_total", self.ranks)

    @property
    def copying(self) -> float | None:
        """Share of the time that a prefetch worker was copying."""
        return self._time_share("oasis_prefetch_copy_seconds_total", self.workers)

    def _share(self, part: str, whole: str) -> float | None:
        """Growth of `part` per growth of `whole`; None where the latter did not grow."""
        grown = self.window.grown(whole) if self.window else 0
        return self.window.grown(part) / grown if self.window and grown else None

    def _time_share(self, name: str, processes: int) -> float | None:
        if self.window is None or not processes:
            return None
        # What is published in a window may have begun a little before it.
        return min(self.window.rate(name) / processes, 1.0)


class History:
    """The scrapes that rates need.

    SGLang publishes a scheduler's metrics at every prefill, at every 40th decode step (`--decode-log-interval`) and
    when it goes idle; the oasis counters follow twice a second while steps run. A scrape in between shows no growth,
    and the next one all of it at once. So rates are taken from publication to publication and hold until the next one,
    as long as something runs.
    """

    def __init__(self) -> None:
        self._last: Scrape | None = None
        self._published: Scrape | None = None  # the scrape that first showed the counters as they are
        self._window: Window | None = None

    def add(self, scrape: Scrape) -> Frame:
        """Take a new scrape. Where counters went back, the server was restarted: it counts as the first one then."""
        last, self._last = self._last, scrape
        if last is None or self._published is None or _went_back(last, scrape):
            self._published, self._window = scrape, None
            return Frame(scrape)
        idle = scrape.one(RUNNING) == 0 and scrape.counters(TOKENS) == last.counters(TOKENS)
        if idle or scrape.counters("oasis_") != self._published.counters("oasis_"):
            self._window, self._published = Window(self._published, scrape), scrape
        return Frame(scrape, Window(last, scrape), self._window)


def _went_back(before: Scrape, after: Scrape) -> bool:
    now = after.counters()
    return any(now.get(key, 0.0) < value for key, value in before.counters().items())
