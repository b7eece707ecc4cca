"""`--oasis-config`: the keys, their defaults, and how text, files and mappings become an `OasisConfig`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

MissPolicy = Literal["wait", "skip"]
SummaryName = Literal["sketch", "minmax"]
PredictorName = Literal["previous", "draft", "none"]
TransferName = Literal["inline", "workers"]

# At most one page in so many of the device pool is spare where workers copy.
SPARE_DIVISOR = 12


# What no host could use, and computing with it could overflow.
LARGEST = {
    "token_budget": 1 << 30,
    "page_size": 1 << 20,
    "min_sparse_len": 1 << 30,
    "prefetch_workers": 64,
    "prompt_lookup_min": 8,
}


class ConfigError(ValueError):
    """A value in `--oasis-config` that cannot be used; the message names the key, the value and what works."""


class OasisConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Resolved settings of the backend. Token counts are per KV head and per layer.

    Attributes:
        token_budget: K, tokens attended beyond the local tail; a multiple of `page_size`.
        page_size: tokens per page; must agree with `--page-size`.
        host_to_device_ratio: host pool tokens per device pool token, where `host_size_gb` is not given.
        host_size_gb: host pool size in GB (1e9 bytes) per rank; overrides the ratio.
        sink_tokens: first tokens of a sequence that are always attended; part of the budget.
        recent_tokens: newest tokens before the local tail that are always attended; part of the budget.
        slack_ratio: resident pages kept beyond the budget, as a share of it: they save transfers, not attended.
        fetch_ratio: most pages fetched per KV head and step, as a share of the budget; 1.0 is no cap.
        miss_policy: `wait` fetches every selected page before attending (exact top-K); `skip` attends to what is
            resident and lets misses arrive for the next step.
        predictor: where `skip` takes the query that chooses the next step's pages from: `draft` (every token of the
            chain of drafts that is verified), `previous` (the last token accepted) or `none` (never refresh; for
            ablations). `draft` needs speculation.
        summary: what the device keeps of every page's keys to choose by: `sketch` (each key, or the half of it that
            matters, in 4 bits a dimension: nearly the choice of the keys themselves) or `minmax` (largest and smallest
            key of a page, Quest).
        probe: with speculation, never accept a draft: it only looks ahead, as in the OasisKV paper.
        prompt_lookup_min: with an EAGLE draft, tokens that must have stood together earlier in the sequence for what
            followed them there to take the place of the draft's guesses; 0: never.
        dense_layers: the first layers that attend to the whole sequence, read from the host pool.
        min_sparse_len: sequences shorter than this stay dense whatever the budget.
        debug_attention_mass: with `skip`, now and then measure the attention mass that the attended pages hold; slow.
        transfer: `inline` copies in the rank process; `workers` lets worker processes bring in what the lookahead
            chooses, while the rank process computes.
        prefetch_workers: worker processes per rank; where not given 1 with `transfer: workers`, none with `inline`.
    """

    token_budget: int = 2048
    page_size: int = 16
    host_to_device_ratio: float = 4.0
    host_size_gb: float | None = None
    sink_tokens: int = 0
    recent_tokens: int = 0
    slack_ratio: float = 0.25
    fetch_ratio: float = 1.0
    miss_policy: MissPolicy = "wait"
    predictor: PredictorName = "previous"
    dense_layers: int = 0
    min_sparse_len: int = 0
    summary: SummaryName = "sketch"
    probe: bool = False
    prompt_lookup_min: int = 4
    debug_attention_mass: bool = False
    prefetch_workers: int | None = None
    transfer: TransferName = "inline"

    @property
    def budget_pages(self) -> int:
        """K in pages."""
        return self.token_budget // self.page_size

    @property
    def sink_pages(self) -> int:
        return math.ceil(self.sink_tokens / self.page_size)

    @property
    def recent_pages(self) -> int:
        return math.ceil(self.recent_tokens / self.page_size)

    @property
    def fetch_cap_pages(self) -> int:
        """C: pages one KV head may fetch per step."""
        return max(1, round(self.fetch_ratio * self.budget_pages))

    @property
    def fetch_is_capped(self) -> bool:
        return self.fetch_cap_pages < self.budget_pages

    @property
    def workers(self) -> int:
        """Worker processes per rank."""
        if self.prefetch_workers is None:
            return int(self.transfer == "workers")
        return self.prefetch_workers

    def spare_pages(self, device_pages: int) -> int:
        """Pages of the device pool that are kept for copies in flight: as many as a step can fetch for all the working
        sets that there is room for beside them, so that a fetch is never dropped for want of one. Where the cap allows
        more than `SPARE_DIVISOR` does, few steps come near it, and the rest serves better as slack."""
        if not self.workers:
            return 0
        cap = self.fetch_cap_pages
        enough = -(-device_pages * cap // (self.max_set_pages + cap))
        return max(min(enough, device_pages // SPARE_DIVISOR), 1)

    @property
    def sparse_set_pages(self) -> int:
        """Device pages of a sparse sequence: budget, slack, the local tail, and one to start the next tail in."""
        return self.budget_pages + math.ceil(self.slack_ratio * self.budget_pages) + 2

    @property
    def dense_set_pages(self) -> int:
        """Most device pages of a sequence that is still dense."""
        longest = max(self.min_sparse_len - 1, self.token_budget + self.page_size)
        return math.ceil(longest / self.page_size)

    @property
    def max_set_pages(self) -> int:
        """W: most device pages one sequence can hold."""
        return max(self.sparse_set_pages, self.dense_set_pages)

    def validate(self) -> OasisConfig:
        """Raise `ConfigError` for values that contradict each other; return self."""
        page = self.page_size
        if page < 1 or page & (page - 1):
            raise ConfigError(f"page_size={page} must be a power of two, for example 16, 32 or 64")
        if self.token_budget < page:
            raise ConfigError(
                f"token_budget={self.token_budget} is below one page (page_size={page}); use a multiple of {page}, "
                f"for example {max(page, 2048)}"
            )
        if self.token_budget % page:
            lower = self.token_budget // page * page
            raise ConfigError(
                f"token_budget={self.token_budget} is not a multiple of page_size={page}; use {lower} or {lower + page}"
            )
        for name in (
            "sink_tokens",
            "recent_tokens",
            "dense_layers",
            "min_sparse_len",
            "prefetch_workers",
            "prompt_lookup_min",
        ):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative")
        for name, most in LARGEST.items():
            if (getattr(self, name) or 0) > most:
                raise ConfigError(f"{name}={getattr(self, name)} is too large; use at most {most:,}")
        if self.sink_pages + self.recent_pages >= self.budget_pages:
            raise ConfigError(
                f"sink_tokens={self.sink_tokens} and recent_tokens={self.recent_tokens} fill the whole "
                f"token_budget={self.token_budget}; leave at least one page ({page} tokens) for selected pages"
            )
        if not 0 <= self.slack_ratio <= 8 or not math.isfinite(self.slack_ratio):
            raise ConfigError(f"slack_ratio={self.slack_ratio} must lie between 0 and 8, for example 0.25")
        if not 0 < self.fetch_ratio <= 1:
            raise ConfigError(f"fetch_ratio={self.fetch_ratio} must lie in (0, 1]; 1.0 is no cap, the paper uses 0.05")
        if self.host_size_gb is not None and not (self.host_size_gb > 0 and math.isfinite(self.host_size_gb)):
            raise ConfigError(f"host_size_gb={self.host_size_gb} must be a positive number of GB per rank")
        if not 1 <= self.host_to_device_ratio <= 1e6:
            raise ConfigError(
                f"host_to_device_ratio={self.host_to_device_ratio} must lie between 1 and 1,000,000: the host pool is "
                "the home of every token, the device pool a cache of it"
            )
        if self.transfer == "inline" and self.prefetch_workers:
            raise ConfigError(
                f"prefetch_workers={self.prefetch_workers} has no effect with transfer='inline'; use prefetch_workers=0"
            )
        if self.transfer == "workers" and self.prefetch_workers == 0:
            raise ConfigError(
                "prefetch_workers=0 leaves transfer='workers' nobody to copy; use 1, or transfer='inline'"
            )
        return self

    def as_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


def parse_config(source: str | dict[str, Any] | OasisConfig | None) -> OasisConfig:
    """Settings from a JSON object, `@file.{json,yaml,yml,toml}`, a mapping, or nothing (the defaults).

    Raises:
        ConfigError: bad JSON, a missing or unreadable file, an unknown key, a value of the wrong type or range.
    """
    try:
        return _parse(source).validate()
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("--oasis-config") else f"--oasis-config: {text}") from None


def _parse(source: str | dict[str, Any] | OasisConfig | None) -> OasisConfig:
    if isinstance(source, OasisConfig):
        return source
    if source is None or (isinstance(source, str) and not source.strip()):
        return OasisConfig()
    fields = _read(source) if isinstance(source, str) else source
    if not isinstance(fields, dict):
        raise ConfigError(
            f"--oasis-config must hold an object of keys and values, got {type(fields).__name__}; "
            """for example '{"token_budget": 2048}'"""
        )
    known = OasisConfig.__struct_fields__
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ConfigError(f"--oasis-config: unknown fields: {unknown}; known fields: {', '.join(known)}")
    try:
        return msgspec.convert(fields, OasisConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--oasis-config: {_explain(str(error), fields)}") from None


def _explain(message: str, fields: dict[str, Any]) -> str:
    """msgspec's message, with the key's value and, for a choice, what may stand there."""
    key = message.rsplit("$.", 1)[-1].rstrip("`") if "$." in message else None
    if key not in fields:
        return message
    choices = {
        "miss_policy": MissPolicy, "predictor": PredictorName, "summary": SummaryName, "transfer": TransferName,
    }  # fmt: skip
    hint = f"; choose from {', '.join(get_args(choices[key]))}" if key in choices else ""
    return f"{key}={fields[key]!r}: {message}{hint}"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different."""
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"--oasis-config: {', '.join(twice)} given twice; give each key once")
    return dict(pairs)


def _read(text: str) -> Any:
    if not text.startswith("@"):
        try:
            return json.loads(text, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"--oasis-config is not valid JSON ({error}); got {text!r}. "
                """Give an object such as '{"token_budget": 2048}' or a file as @oasis.json, .yaml or .toml"""
            ) from None
    if text == "@":
        raise ConfigError("--oasis-config @ names no file; give @oasis.json, .yaml or .toml")
    path = Path(text[1:]).expanduser()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--oasis-config @{path}: cannot read the file ({error.strerror or error})") from None
    try:
        match path.suffix.lower():
            case ".json":
                return msgspec.json.decode(raw)
            case ".yaml" | ".yml":
                return msgspec.yaml.decode(raw)
            case ".toml":
                return msgspec.toml.decode(raw)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--oasis-config @{path}: {error}") from None
    raise ConfigError(f"--oasis-config @{path}: unknown file type {path.suffix!r}; use .json, .yaml or .toml")
