"""`--oasis-config`: what is accepted, and that every refusal names the key, the value and what works (contract 10)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasis_sglang.config import ConfigError, OasisConfig, parse_config

SETTINGS = {"token_budget": 1024, "page_size": 32, "slack_ratio": 0.25, "miss_policy": "skip", "host_size_gb": 2.5}
TEXTS = {
    "json": json.dumps(SETTINGS),
    "yaml": "token_budget: 1024\npage_size: 32\nslack_ratio: 0.25\nmiss_policy: skip\nhost_size_gb: 2.5\n",
    "yml": "{token_budget: 1024, page_size: 32, slack_ratio: 0.25, miss_policy: skip, host_size_gb: 2.5}\n",
    "toml": 'token_budget = 1024\npage_size = 32\nslack_ratio = 0.25\nmiss_policy = "skip"\nhost_size_gb = 2.5\n',
}


@pytest.mark.parametrize("source", [None, "", "  ", "{}", {}])
def test_nothing_given_is_the_defaults(source: Any) -> None:
    """A user who gives no configuration must get the documented one."""
    config = parse_config(source)
    assert config == OasisConfig()
    assert config.as_dict() == {
        "token_budget": 2048,
        "page_size": 16,
        "host_to_device_ratio": 4.0,
        "host_size_gb": None,
        "sink_tokens": 0,
        "recent_tokens": 0,
        "summary": "sketch",
        "probe": False,
        "prompt_lookup_min": 4,
        "debug_attention_mass": False,
        "slack_ratio": 0.25,
        "fetch_ratio": 1.0,
        "miss_policy": "wait",
        "predictor": "previous",
        "dense_layers": 0,
        "min_sparse_len": 0,
        "prefetch_workers": None,
        "transfer": "inline",
    }


def test_workers_take_a_part_of_the_device_pool() -> None:
    """A worker writes only to pages that no request owns."""
    assert [OasisConfig(**given).workers for given in (
        {}, {"transfer": "workers"}, {"transfer": "workers", "prefetch_workers": 3}
    )] == [0, 1, 3]  # fmt: skip
    assert OasisConfig().spare_pages(1600) == 0
    assert OasisConfig(transfer="workers").spare_pages(1200) == 100
    # 8 working sets of 162 pages, of which a step may fetch 13 each, are 1,400 pages
    assert OasisConfig(transfer="workers", fetch_ratio=0.1).spare_pages(1400) == 8 * 13
    assert OasisConfig(transfer="workers").spare_pages(7) == 1


def test_pages_derived_by_hand() -> None:
    """Pools and working sets are sized from these; an off-by-one starves a sequence of its tail page."""
    config = OasisConfig(token_budget=2048, page_size=16, sink_tokens=1, recent_tokens=33, slack_ratio=0.1)
    assert (config.budget_pages, config.sink_pages, config.recent_pages) == (128, 1, 3)
    assert config.sparse_set_pages == 128 + 13 + 2
    assert config.dense_set_pages == 129
    assert config.max_set_pages == 143
    assert config.fetch_cap_pages == 128
    assert not config.fetch_is_capped
    capped = OasisConfig(fetch_ratio=0.05)
    assert capped.fetch_cap_pages == 6
    assert capped.fetch_is_capped
    assert OasisConfig(fetch_ratio=1e-9).fetch_cap_pages == 1, "a cap of nothing would never fetch again"
    assert OasisConfig(min_sparse_len=10_000).max_set_pages == 625  # 9,999 tokens stay dense


@pytest.mark.parametrize("suffix", TEXTS)
def test_files_of_every_kind(suffix: str, tmp_path: Path) -> None:
    """`@file` must mean the same in each format, and the suffix decides which one."""
    path = tmp_path / f"oasis.{suffix}"
    path.write_text(TEXTS[suffix])
    expected = OasisConfig(token_budget=1024, page_size=32, slack_ratio=0.25, miss_policy="skip", host_size_gb=2.5)
    assert parse_config(f"@{path}") == expected
    assert parse_config(SETTINGS) == expected
    assert parse_config(json.dumps(SETTINGS)) == expected
    assert parse_config(expected) == expected


def test_a_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`@~/oasis.json` reaches us unexpanded: shells expand a tilde at the start of a word only."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "oasis.JSON").write_text(TEXTS["json"])
    assert parse_config("@~/oasis.JSON").token_budget == 1024


def test_what_is_resolved_can_be_given_again() -> None:
    """/server_info shows the configuration; an operator who copies it must get the same server."""
    config = parse_config(SETTINGS)
    assert parse_config(json.dumps(config.as_dict())) == config
    assert msgspec.json.decode(msgspec.json.encode(config), type=OasisConfig) == config


def test_unknown_keys_are_named_with_all_known_ones() -> None:
    """Contract 10: a misspelt key must not be dropped silently."""
    with pytest.raises(ConfigError) as error:
        parse_config({"token_budgets": 2048, "top_k": 1, "page_size": 16})
    message = str(error.value)
    assert "unknown fields: ['token_budgets', 'top_k']" in message
    for name in OasisConfig.__struct_fields__:
        assert name in message


@pytest.mark.parametrize(
    "text",
    ["{", "token_budget=2048", "{'token_budget': 2048}", '{"token_budget": 2048,}', "{token_budget: 2048}", "@"],
)
def test_bad_text_shows_itself_and_an_example(text: str) -> None:
    """Contract 10: shells eat quotes, so the message must show what arrived."""
    with pytest.raises(ConfigError) as error:
        parse_config(text)
    assert "--oasis-config" in str(error.value)
    if text != "@":
        assert "not valid JSON" in str(error.value)
        assert repr(text) in str(error.value)
        assert '{"token_budget": 2048}' in str(error.value)


@pytest.mark.parametrize("text", ["[]", "3", '"oasis"', "null", "true"])
def test_json_that_is_no_object(text: str) -> None:
    """Contract 10: valid JSON of the wrong shape must be refused as such, not crash later."""
    with pytest.raises(ConfigError, match="must hold an object"):
        parse_config(text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """Contract 10: a wrong path must not fall back to the defaults."""
    with pytest.raises(ConfigError, match=r"@.*absent\.json: cannot read the file \(No such file"):
        parse_config(f"@{tmp_path / 'absent.json'}")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.json: cannot read the file"):
        parse_config(f"@{tmp_path / 'folder.json'}")


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", "{"), ("a.json", "\xff"), ("a.yaml", "a: [1"), ("a.toml", "a = "), ("a.toml", "token_budget: 3")],
)
def test_a_broken_file_is_named(name: str, text: str, tmp_path: Path) -> None:
    """Contract 10: a syntax error in a file must say which file."""
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=name):
        parse_config(f"@{path}")


def test_an_unknown_file_type_lists_the_known_ones(tmp_path: Path) -> None:
    """Contract 10."""
    path = tmp_path / "oasis.ini"
    path.write_text("token_budget = 1")
    with pytest.raises(ConfigError, match=r"'\.ini'; use \.json, \.yaml or \.toml"):
        parse_config(f"@{path}")
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    with pytest.raises(ConfigError, match="must hold an object"):
        parse_config(f"@{empty}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token_budget", "2048"),
        ("token_budget", 2048.5),
        ("token_budget", None),
        ("token_budget", True),
        ("page_size", [16]),
        ("slack_ratio", "a tenth"),
        ("host_size_gb", "4GB"),
        ("sink_tokens", {}),
        ("miss_policy", 1),
    ],
)
def test_wrong_types_name_key_and_value(key: str, value: Any) -> None:
    """Contract 10: no coercion; "2048" for 2048 is a mistake somewhere in the user's tooling."""
    with pytest.raises(ConfigError) as error:
        parse_config({key: value})
    assert f"{key}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("miss_policy", ("wait", "skip")),
        ("predictor", ("previous", "draft", "none")),
        ("transfer", ("inline", "workers")),
        ("summary", ("sketch", "minmax")),
    ],
)
def test_choices_are_listed(key: str, choices: tuple[str, ...]) -> None:
    """Contract 10: a wrong word is answered with the right ones."""
    with pytest.raises(ConfigError) as error:
        parse_config({key: "best_effort"})
    assert f"{key}='best_effort'" in str(error.value)
    assert f"choose from {', '.join(choices)}" in str(error.value)
    for choice in choices:
        assert getattr(parse_config({key: choice}), key) == choice


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"page_size": 0}, "page_size=0 must be a power of two"),
        ({"page_size": -16}, "page_size=-16"),
        ({"page_size": 24}, "page_size=24"),
        ({"token_budget": 0}, "token_budget=0 is below one page"),
        ({"token_budget": 15}, "token_budget=15 is below one page .page_size=16.; use a multiple of 16"),
        ({"token_budget": 100}, "token_budget=100 is not a multiple of page_size=16; use 96 or 112"),
        ({"token_budget": 2048, "page_size": 4096}, "below one page .page_size=4096."),
        ({"sink_tokens": -1}, "sink_tokens=-1 must not be negative"),
        ({"recent_tokens": -1}, "recent_tokens=-1"),
        ({"dense_layers": -1}, "dense_layers=-1"),
        ({"min_sparse_len": -1}, "min_sparse_len=-1"),
        ({"prefetch_workers": -1}, "prefetch_workers=-1"),
        ({"prompt_lookup_min": -1}, "prompt_lookup_min=-1 must not be negative"),
        ({"prompt_lookup_min": 9}, "prompt_lookup_min=9 is too large; use at most 8"),
        ({"prefetch_workers": 2}, "prefetch_workers=2 has no effect with transfer='inline'"),
        (
            {"transfer": "workers", "prefetch_workers": 0},
            "prefetch_workers=0 leaves transfer='workers' nobody to copy; use 1",
        ),
        ({"token_budget": 64, "sink_tokens": 32, "recent_tokens": 17}, "sink_tokens=32 and recent_tokens=17 fill"),
        ({"token_budget": 16, "sink_tokens": 1}, "fill the whole token_budget=16"),
        ({"slack_ratio": -0.1}, "slack_ratio=-0.1"),
        ({"slack_ratio": 8.5}, "slack_ratio=8.5"),
        ({"slack_ratio": float("nan")}, "slack_ratio=nan"),
        ({"fetch_ratio": 0}, "fetch_ratio=0"),
        ({"fetch_ratio": 1.01}, "fetch_ratio=1.01"),
        ({"fetch_ratio": float("nan")}, "fetch_ratio=nan"),
        ({"host_size_gb": 0}, "host_size_gb=0"),
        ({"host_size_gb": float("inf")}, "host_size_gb=inf"),
        ({"host_to_device_ratio": 0.5}, "host_to_device_ratio=0.5 must lie between 1"),
        ({"host_to_device_ratio": float("nan")}, "host_to_device_ratio=nan"),
        ({"host_to_device_ratio": float("inf")}, "host_to_device_ratio=inf"),
    ],
)
def test_ranges_and_contradictions(settings: dict[str, Any], words: str) -> None:
    """Contract 10: a value out of range, or two that exclude each other, are named with what works."""
    with pytest.raises(ConfigError, match=words):
        parse_config(settings)


@given(
    page=st.sampled_from([1, 2, 16, 32, 64]),
    budget=st.integers(1, 300),
    slack=st.floats(0, 8),
    longest_dense=st.integers(0, 9000),
)
def test_a_working_set_always_has_room(page: int, budget: int, slack: float, longest_dense: int) -> None:
    """Contract 1: whatever the settings, a set holds the budget, the tail and the page that follows it, and every
    sequence that is still dense."""
    config = parse_config(
        {"page_size": page, "token_budget": budget * page, "slack_ratio": slack, "min_sparse_len": longest_dense}
    )
    assert config.max_set_pages >= config.budget_pages + 2
    assert config.max_set_pages * page >= max(longest_dense - 1, config.token_budget + page)
    assert 1 <= config.fetch_cap_pages <= config.budget_pages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prefetch_workers": 100000, "transfer": "workers"}', "prefetch_workers=100000 is too large; use at most 64"),
        ('{"host_to_device_ratio": 1e300}', "host_to_device_ratio=1e+300 must lie between 1 and 1,000,000"),
        ('{"token_budget": 1e30}', "--oasis-config: token_budget"),
        ('{"page_size": 4096}', "use a multiple of 4096, for example 4096"),
        ('{"token_budget": 16, "token_budget": 32}', "token_budget given twice"),
        ("@", "names no file"),
        ('{"token_budget": 8}', "--oasis-config: token_budget=8"),
    ],
)
def test_values_that_nothing_can_serve(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(text)
    assert message in str(error.value)
