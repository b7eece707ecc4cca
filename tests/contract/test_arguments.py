"""`--kv-backend` and `--oasis-config` through SGLang's own parser and record, and on to the processes that serve."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oasis_sglang import arguments
from oasis_sglang.config import ConfigError, OasisConfig
from tests.contract import models

# Sizes that resolution would otherwise take from the machine or from chance.
FIXED = ["--max-total-tokens", "4096", "--random-seed", "7", "--port", "31000", "--log-level", "error"]
Prepare = Callable[..., Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return models.write(tmp_path_factory.mktemp("model"), models.ACCEPTED["Llama"])


@pytest.fixture(scope="module", autouse=True)
def stock(model: str) -> dict[str, Any]:
    """Fields and resolution of a command line by a SGLang that does not know us; made before the hooks are applied."""
    from sglang.srt.server_args import prepare_server_args

    record = prepare_server_args(["--model-path", model, *FIXED])
    fields = msgspec.structs.asdict(record)
    record.resolve_once()
    return {"fields": fields, "resolved": record.resolved_dict()}


@pytest.fixture
def prepare(plugged: None, model: str, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """`prepare(*flags)`: the record of a command line."""
    from sglang.srt.server_args import prepare_server_args

    monkeypatch.delenv(arguments.CONFIG_ENV, raising=False)
    return lambda *flags: prepare_server_args(["--model-path", model, *FIXED, *flags])


def test_without_the_flag_nothing_changes(prepare: Prepare, stock: dict[str, Any]) -> None:
    """A machine where the package is installed but not asked for must serve exactly as before."""
    record = prepare()
    assert msgspec.structs.asdict(record) == stock["fields"]
    record.resolve_once()
    assert record.resolved_dict() == stock["resolved"]
    assert arguments.attached(record) is None


def test_flags_and_json(prepare: Prepare) -> None:
    """The flag alone means the defaults; JSON changes what it names."""
    assert arguments.attached(prepare("--kv-backend", "oasis")) == OasisConfig()
    config = arguments.attached(prepare("--kv-backend=oasis", '--oasis-config={"token_budget": 512}'))
    assert config == OasisConfig(token_budget=512)


def test_only_our_fields_differ_with_the_flag(prepare: Prepare, stock: dict[str, Any]) -> None:
    """Resolution with the flag changes the attention backend, the page size and graphs of prompt chunks, and nothing
    behind the user's back."""
    record = prepare("--kv-backend", "oasis")
    assert msgspec.structs.asdict(record) == stock["fields"], "the command line is kept as it was given"
    record.resolve_once()
    resolved = record.resolved_dict()
    changed = {name for name, value in resolved.items() if value != stock["resolved"][name]}
    assert (resolved["attention_backend"], resolved["page_size"]) == ("oasis", 16)
    backends = {"attention_backend", "prefill_attention_backend", "decode_attention_backend"}
    assert changed <= {*backends, "page_size", "disable_prefill_cuda_graph"}


def test_a_gpu_keeps_decode_graphs_and_overlap(prepare: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what SGLang does on CUDA, only graphs of prompt chunks go, and with them the sizing of pools after graphs were
    captured, which would be of SGLang's pool."""
    from sglang.srt.arg_groups.overrides import post_capture_kv_sizing_planned
    from sglang.srt.model_executor import cuda_graph_config

    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: "breakable")  # as CUDA has it
    flags = ["--device", "cuda", "--mem-fraction-static", "0.8"]
    stock = prepare(*flags, "--attention-backend", "triton")
    stock.resolve_once()
    assert stock.resolved_dict()["cuda_graph_config"]["prefill"]["backend"] == "breakable"
    record = prepare("--kv-backend", "oasis", *flags)
    record.resolve_once()
    ours, theirs = record.resolved_dict(), stock.resolved_dict()
    assert ours["cuda_graph_config"]["prefill"]["backend"] == "disabled"
    assert ours["cuda_graph_config"]["decode"] == theirs["cuda_graph_config"]["decode"]
    assert ours["cuda_graph_config"]["decode"]["backend"] == "full"
    assert ours["disable_overlap_schedule"] is theirs["disable_overlap_schedule"] is False
    assert not post_capture_kv_sizing_planned(record)
    without = prepare("--kv-backend", "oasis", "--disable-cuda-graph", "--disable-overlap-schedule", *flags)
    without.resolve_once()
    assert without.resolved_dict()["cuda_graph_config"]["decode"]["backend"] == "disabled"
    assert without.resolved_dict()["disable_overlap_schedule"]


@pytest.mark.parametrize("value", ['{"token_budget": 512}', {"token_budget": 512}], ids=["text", "mapping"])
def test_config_file_of_sglang(prepare: Prepare, tmp_path: Path, value: Any) -> None:
    """`--config file.yaml` holds any flag; a mapping is how people write structured options there."""
    path = tmp_path / "server.yaml"
    path.write_text(f"kv-backend: oasis\noasis-config: {json.dumps(value)}\n")
    assert arguments.attached(prepare("--config", str(path))) == OasisConfig(token_budget=512)


def test_a_file_for_the_config(prepare: Prepare, tmp_path: Path) -> None:
    """`@file` is read once, in the launcher: rank processes get the settings, not the path."""
    path = tmp_path / "oasis.toml"
    path.write_text("token_budget = 256\n")
    record = prepare("--kv-backend", "oasis", "--oasis-config", f"@{path}")
    path.unlink()
    assert arguments.attached(pickle.loads(pickle.dumps(record))) == OasisConfig(token_budget=256)


def test_the_choice_travels_to_rank_processes(prepare: Prepare) -> None:
    """SGLang pickles the record to its children; a lost choice would serve dense there. A second resolution in the
    child must change nothing."""
    record = prepare("--kv-backend", "oasis", "--oasis-config", '{"token_budget": 512, "page_size": 32}')
    record.resolve_once()
    child = pickle.loads(pickle.dumps(record))
    assert arguments.attached(child) == OasisConfig(token_budget=512, page_size=32)
    child.resolve_once()
    assert child.resolved_dict() == record.resolved_dict()
    assert child.resolved_dict()["page_size"] == 32


def test_the_launch_command_shows_our_flags(prepare: Prepare) -> None:
    """/server_info prints the launch command; whoever repeats it must get the same server."""
    record = prepare("--kv-backend", "oasis")
    assert "--kv-backend oasis" in record.launch_command


def test_help_lists_the_flags(plugged: None) -> None:
    """`--help` is where users look first."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    text = parser.format_help()
    assert "--kv-backend {oasis}" in text
    assert "--oasis-config JSON|@FILE" in text


# -- refused ----------------------------------------------------------------------------------------------------------


def test_an_unknown_backend(prepare: Prepare, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract 10: argparse names the flag and its choices, and exits with 2."""
    with pytest.raises(SystemExit) as error:
        prepare("--kv-backend", "oases")
    assert error.value.code == 2
    assert "--kv-backend: invalid choice: 'oases' (choose from" in capsys.readouterr().err


def test_a_config_without_the_backend(prepare: Prepare) -> None:
    """Contract 10: settings that would be ignored silently are a mistake."""
    with pytest.raises(ConfigError, match=r"--oasis-config '\{\}' needs --kv-backend oasis"):
        prepare("--oasis-config", "{}")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not valid JSON"),
        ('{"budget": 1}', r"unknown fields: \['budget'\]"),
        ("@gone.json", "cannot read the file"),
    ],
)
def test_a_bad_config_stops_at_the_command_line(prepare: Prepare, config: str, words: str) -> None:
    """Contract 10: before a model is looked at, let alone loaded."""
    with pytest.raises(ConfigError, match=words):
        prepare("--kv-backend", "oasis", "--oasis-config", config)


def test_page_sizes_must_agree(prepare: Prepare) -> None:
    """Contract 10: two page sizes cannot both hold; the message shows both ways out."""
    prepare("--kv-backend", "oasis", "--page-size", "16").resolve_once()
    with pytest.raises(ConfigError, match=r"--page-size 64 and page_size=16 .* use --page-size 16 or") as error:
        prepare("--kv-backend", "oasis", "--page-size", "64").resolve_once()
    advice = str(error.value).split("--oasis-config '")[1].rstrip("'")
    record = prepare("--kv-backend", "oasis", "--page-size", "64", "--oasis-config", advice)
    record.resolve_once()
    assert record.resolved_dict()["page_size"] == 64


@pytest.mark.parametrize("flag", ["--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"])
def test_another_attention_backend(prepare: Prepare, flag: str) -> None:
    """Contract 10: the user's choice is neither overridden nor followed into a pool it cannot read."""
    with pytest.raises(ConfigError, match=f"{flag} torch_native does not work with --kv-backend oasis"):
        prepare("--kv-backend", "oasis", flag, "torch_native").resolve_once()


def test_our_attention_backend_without_our_pool(prepare: Prepare) -> None:
    """The name is a valid choice of SGLang's flag, but only the pool makes it work; asking for both is fine."""
    record = prepare("--kv-backend", "oasis", "--attention-backend", "oasis")
    record.resolve_once()
    assert record.resolved_dict()["attention_backend"] == "oasis"


# -- Engine and environment -------------------------------------------------------------------------------------------


def engine_args(**kwargs: Any) -> Any:
    """What `sglang.Engine(**kwargs)` makes of its arguments, without an engine."""
    from sglang.srt.entrypoints.engine import Engine

    return Engine.server_args_class(**kwargs)


@pytest.mark.usefixtures("plugged")
def test_engine_takes_the_flags_as_arguments(model: str) -> None:
    """`Engine(kv_backend="oasis")` would raise, since the record is closed; its settings may be a mapping."""
    sizes = {"max_total_tokens": 4096, "log_level": "error"}
    record = engine_args(model_path=model, kv_backend="oasis", oasis_config={"token_budget": 512}, **sizes)
    assert arguments.attached(record) == OasisConfig(token_budget=512)
    record.resolve_once()
    assert record.resolved_dict()["attention_backend"] == "oasis"
    assert arguments.attached(pickle.loads(pickle.dumps(record))) == OasisConfig(token_budget=512)
    with pytest.raises(ConfigError, match="kv_backend='oases' is unknown; use kv_backend='oasis'"):
        engine_args(model_path=model, kv_backend="oases")
    with pytest.raises(ConfigError, match="needs kv_backend='oasis'"):
        engine_args(model_path=model, oasis_config="{}")
    with pytest.raises(ConfigError, match="unknown fields"):
        engine_args(model_path=model, kv_backend="oasis", oasis_config={"budget": 1})


@pytest.mark.usefixtures("plugged")
def test_engine_without_the_flags_is_stock(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs of the same environment build engines too."""
    from sglang.srt.server_args import ServerArgs

    monkeypatch.delenv(arguments.CONFIG_ENV, raising=False)
    record = engine_args(model_path=model)
    assert type(record) is ServerArgs
    assert record == ServerArgs(model_path=model)
    with pytest.raises(TypeError, match="no_such_flag"):
        engine_args(model_path=model, no_such_flag=1)


@pytest.mark.usefixtures("plugged")
def test_the_environment_serves_programs_without_a_command_line(
    model: str, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`SGLANG_OASIS_CONFIG` reaches records that were built in code; a command line that did not ask is not overridden,
    and arguments win over it."""
    monkeypatch.setenv(arguments.CONFIG_ENV, '{"token_budget": 256}')
    record = engine_args(model_path=model, max_total_tokens=4096, log_level="error")
    record.resolve_once()
    assert arguments.attached(record) == OasisConfig(token_budget=256)
    assert record.resolved_dict()["attention_backend"] == "oasis"
    given = engine_args(model_path=model, kv_backend="oasis", oasis_config={"token_budget": 512})
    assert arguments.settle(given) == OasisConfig(token_budget=512)
    command_line = prepare()
    command_line.resolve_once()
    assert arguments.attached(command_line) is None
    assert command_line.resolved_dict()["attention_backend"] != "oasis"
    monkeypatch.setenv(arguments.CONFIG_ENV, "{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        engine_args(model_path=model).resolve_once()
