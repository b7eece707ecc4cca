"""Contract 10, C35, C36: what is not served is refused at start, by name, with what works instead."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from oasis_sglang import arguments, validate
from oasis_sglang.config import ConfigError, OasisConfig
from oasis_sglang.validate import REFUSALS, Refusal
from tests.contract import models

# For fields whose refused value cannot be told from their type or choices.
VALUES: dict[str, str] = {
    "speculative_algorithm": "NGRAM",
    "lora_paths": "name=/adapter",
    "disaggregation_mode": "prefill",
    "dllm_algorithm": "LowConfidence",
    "kv_canary": "raise",
}
Resolve = Callable[..., Any]


@pytest.fixture(scope="module")
def actions(plugged: None) -> dict[str, argparse.Action]:
    """SGLang's own flags, by the field they set."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {action.dest: action for action in parser._actions}


@pytest.fixture
def resolve(plugged: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """`resolve(settings, *flags)`: SGLang's own resolution for a model with this configuration."""
    from sglang.srt.server_args import prepare_server_args

    monkeypatch.delenv(arguments.CONFIG_ENV, raising=False)

    def run(settings: dict[str, Any], *flags: str) -> Any:
        path = models.write(tmp_path / "model", settings)
        common = ["--kv-backend", "oasis", "--log-level", "error", "--max-total-tokens", "4096"]
        record = prepare_server_args(["--model-path", path, *common, *flags])
        record.resolve_once()
        return record

    return run


# -- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.field)
def test_every_flag_of_the_table(refusal: Refusal, actions: dict[str, argparse.Action], resolve: Resolve) -> None:
    """Contract 10: given on the command line, each is refused with a flag that SGLang has, its value and a way out."""
    action = actions[refusal.field]
    flag = validate._flag(refusal.field)
    assert flag in action.option_strings, "the message must name a flag that exists"
    takes_value = not isinstance(action, argparse._StoreTrueAction)
    value = VALUES.get(refusal.field, "2")
    with pytest.raises(ConfigError) as error:
        resolve(models.ACCEPTED["Llama"], *([flag, value] if takes_value else [flag]))
    message = str(error.value)
    assert re.match(rf"{flag}=\S.* does not work with --kv-backend oasis: {re.escape(refusal.instead)}$", message)
    assert (value if takes_value else "True") in message or refusal.field == "lora_paths"
    known = {option for a in actions.values() for option in a.option_strings}
    for named in re.findall(r"--[a-z-]+", message):
        assert named in known, f"{named} is no flag of SGLang"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--oasis-config", '{"probe": true}'],
            "probe=True in --oasis-config needs drafts: give --spec",
        ),
        (["--oasis-config", '{"predictor": "draft"}'], "predictor=draft in --oasis-config needs drafts"),
    ],
)
def test_what_needs_speculation(flags: list[str], message: str, resolve: Resolve) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(models.ACCEPTED["Llama"], *flags)


@pytest.mark.parametrize("draft", [[], ["--speculative-draft-model-path", "/nowhere/at/all"]])
def test_speculation_without_a_draft(draft: list[str], resolve: Resolve) -> None:
    """Named before a model is loaded."""
    with pytest.raises(ConfigError, match=r"--speculative-draft-model-path=.* is none: give the folder"):
        resolve(models.ACCEPTED["Llama"], "--speculative-algorithm", "EAGLE", *draft)


@pytest.mark.parametrize("tokens", ["0", "-5"])
def test_no_device_pool(tokens: str, resolve: Resolve) -> None:
    with pytest.raises(ConfigError, match=f"--max-total-tokens={tokens} leaves no device pool"):
        resolve(models.ACCEPTED["Llama"], "--max-total-tokens", tokens)


def test_no_sparse_layer() -> None:
    with pytest.raises(
        ConfigError, match="dense_layers=30 leaves none of the model's 30 layers sparse; use at most 29"
    ):
        validate.check_layers(OasisConfig(dense_layers=30), 30)
    validate.check_layers(OasisConfig(dense_layers=29), 30)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "The prompt has no tokens; send at least one."),
        ([1, 100, 2], "Token id 100 in the prompt is not in the vocabulary; ids are 0 to 99."),
        ([1, -5, 2], "Token id -5 in the prompt is not in the vocabulary; ids are 0 to 99."),
        ([0, 99], None),
    ],
)
def test_prompts_that_would_end_the_scheduler(ids: list[int], message: str | None) -> None:
    request = SimpleNamespace(origin_input_ids=array("q", ids), vocab_size=100, multimodal_inputs=None)
    assert validate.prompt_problem(request) == message


@pytest.mark.parametrize(("steps", "page", "most"), [(8, 16, 7), (0, 16, 7), (16, 32, 15)])
def test_chains_that_do_not_fit_a_page(steps: int, page: int, most: int) -> None:
    """The window of one chain and the next must not reach over two page boundaries."""
    args = SimpleNamespace(
        speculative_algorithm="EAGLE3", speculative_num_steps=steps, speculative_num_draft_tokens=steps + 1
    )
    with pytest.raises(ConfigError, match=rf"num-steps={steps}\) does not work .*: use 1 to {most} steps"):
        validate.check_speculation(args, OasisConfig(page_size=page))
    args.speculative_num_draft_tokens = most + 1
    validate.check_speculation(args, OasisConfig(page_size=page))


def test_drafts_are_a_chain_where_nothing_was_said() -> None:
    """SGLang picks trees for some models; what the user gave stays."""
    for given, expected in (
        ({}, (3, 1, 4)),
        ({"speculative_num_steps": 5}, (5, 1, 6)),
        ({"speculative_num_draft_tokens": 3}, (2, 1, 3)),
    ):
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        args = SimpleNamespace(**(dict.fromkeys(names) | given))
        arguments._default_chain(args)
        assert tuple(getattr(args, name) for name in names) == expected


def test_the_table_names_fields_and_their_defaults() -> None:
    """Contract 10: a row whose field SGLang renamed refuses nothing; one whose default is refused serves nobody."""
    from sglang.srt.server_args import ServerArgs

    defaults = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
    for refusal in REFUSALS:
        assert refusal.field in defaults
        assert defaults[refusal.field] in refusal.fine
    assert len({refusal.field for refusal in REFUSALS}) == len(REFUSALS)


def test_flags_that_are_allowed(resolve: Resolve) -> None:
    """Contract 10: refusing too much is a fault too; these work."""
    for flags in (
        ["--disable-radix-cache"],
        ["--chunked-prefill-size", "256"],
        ["--kv-cache-dtype", "bf16"],
        ["--schedule-policy", "fcfs"],
        ["--enable-metrics"],
        ["--max-running-requests", "4"],
    ):
        resolve(models.ACCEPTED["Llama"], *flags)


# -- KV dtypes --------------------------------------------------------------------------------------------------------


def test_kv_dtypes_are_choices_of_sglang(actions: dict[str, argparse.Action], resolve: Resolve) -> None:
    """C34: every choice of SGLang is either served or refused by us, and we name none that its parser rejects."""
    choices = list(actions["kv_cache_dtype"].choices or ())
    assert set(validate.KV_DTYPES) <= set(choices)
    refused = sorted(set(choices) - set(validate.KV_DTYPES))
    assert {"fp8_e4m3", "fp8_e5m2"} <= set(refused)
    assert any("fp4" in choice for choice in refused)
    for choice in choices:
        if choice in validate.KV_DTYPES:
            resolve(models.ACCEPTED["Llama"], "--kv-cache-dtype", choice)
            continue
        with pytest.raises(ConfigError, match=f"--kv-cache-dtype={choice} .* use --kv-cache-dtype auto") as error:
            resolve(models.ACCEPTED["Llama"], "--kv-cache-dtype", choice)
        assert "bf16" in str(error.value)


def test_fp4_by_its_other_name(resolve: Resolve, tmp_path: Path) -> None:
    """C34: `fp4_e2m1` is no choice of this SGLang's parser; an engine that is given it is refused all the same."""
    from sglang.srt.entrypoints.engine import Engine

    with pytest.raises(SystemExit):
        resolve(models.ACCEPTED["Llama"], "--kv-cache-dtype", "fp4_e2m1")
    path = models.write(tmp_path, models.ACCEPTED["Llama"])
    record = Engine.server_args_class(model_path=path, kv_backend="oasis", kv_cache_dtype="fp4_e2m1")
    with pytest.raises(ConfigError, match="--kv-cache-dtype=fp4_e2m1"):
        record.resolve_once()


def test_kv_in_another_dtype_than_the_model(resolve: Resolve) -> None:
    """C34: bf16 KV under a float32 model would store half of every key; so would a checkpoint that asks for 8-bit KV
    without a flag."""
    resolve(models.ACCEPTED["Llama"], "--kv-cache-dtype", "bf16", "--dtype", "bfloat16")
    resolve(models.ACCEPTED["Llama"], "--dtype", "float32")
    with pytest.raises(
        ConfigError, match=r"--kv-cache-dtype=bf16 with a model in float32 .* use --kv-cache-dtype auto"
    ):
        resolve(models.ACCEPTED["Llama"], "--kv-cache-dtype", "bf16", "--dtype", "float32")
    validate.check_kv_dtype(torch.float32, torch.float32)
    with pytest.raises(ConfigError, match="float8_e4m3fn with a model in bfloat16"):
        validate.check_kv_dtype(torch.float8_e4m3fn, torch.bfloat16)


# -- models and devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.REFUSED)
def test_models_that_are_refused(name: str, resolve: Resolve) -> None:
    """C35, C36: windows, MLA, recurrent layers, encoders and embeddings end the start, though SGLang itself may stumble
    over them first; the message says what the model is and what to do."""
    settings, kind = models.REFUSED[name]
    with pytest.raises(ConfigError) as error:
        resolve(settings)
    message = str(error.value)
    assert message.startswith(f"--model-path: {settings['architectures'][0]} ")
    assert kind in message
    assert "start without --kv-backend" in message or "serves generation only" in message


@pytest.mark.parametrize("name", models.ACCEPTED)
def test_models_that_are_served(name: str, resolve: Resolve) -> None:
    """C35: plain multi-head and grouped-query decoders pass, a window that the configuration turns off included."""
    assert resolve(models.ACCEPTED[name]).resolved_dict()["attention_backend"] == "oasis"


def test_an_embedding_server(resolve: Resolve) -> None:
    """C35: `--is-embedding` makes any decoder one that does not generate: the flag is named, not the model."""
    with pytest.raises(ConfigError, match=r"--is-embedding=True does not work .* leave the flag out"):
        resolve(models.ACCEPTED["Qwen3"], "--is-embedding")


def on(device: str | None, **more: Any) -> Any:
    return SimpleNamespace(device=device, **more)


@pytest.mark.parametrize("device", ["xpu", "npu", "cuda:0", None])
def test_devices_without_kernels(device: str | None) -> None:
    """Contract 10: kernels are for CPU hosts and NVIDIA GPUs; anything else is said, not tried."""
    with pytest.raises(ConfigError, match=f"--device={device} .* no kernels. Use an NVIDIA GPU"):
        validate.check_device(on(device), OasisConfig())
    validate.check_device(on("cpu", speculative_algorithm="EAGLE3"), OasisConfig(dense_layers=1))


@pytest.mark.parametrize("algorithm", [None, "EAGLE3"])
def test_an_nvidia_gpu_is_let_through_with_a_warning(
    algorithm: str | None, resolve: Resolve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The way from pools to graphs is there, and no GPU has gone it: whoever is the first must know."""
    flags: list[str] = []
    if algorithm is not None:
        draft = models.write(tmp_path / "draft", models.ACCEPTED["Llama"])
        flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", draft]
        flags += ["--oasis-config", '{"probe": true, "predictor": "draft"}']
    said: list[str] = []
    monkeypatch.setattr(validate.logger, "warning", said.append)
    resolve(models.ACCEPTED["Llama"], "--device", "cuda", *flags)
    resolve(models.ACCEPTED["Llama"])
    (line,) = said
    assert line.startswith("--kv-backend oasis has not been run on any GPU yet")


def test_graphs_of_preparations(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step is about comes from the host, which a graph would not ask again: silently wrong."""
    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    resolve(models.ACCEPTED["Llama"])
    with pytest.raises(ConfigError, match=r"SGLANG_ENABLE_METADATA_GLUE_GRAPH=1 does not work .* unset it"):
        resolve(models.ACCEPTED["Llama"], "--device", "cuda")


def test_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match=r"--device=cuda on an AMD GPU does not work .* never compiled"):
        validate.check_device(on("cuda"), OasisConfig())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [
                *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "DRAFT"),
                *("--speculative-num-steps", "11", "--oasis-config", '{"page_size": 64}'),
            ],
            "--speculative-num-draft-tokens=12 does not work on a GPU with pages of 64 tokens; use 8 or fewer",
        ),
        (["--enable-torch-compile"], "--enable-torch-compile=True does not work with --kv-backend oasis on a GPU"),
        (["--oasis-config", '{"dense_layers": 1}'], "--oasis-config: dense_layers=1 works on CPU hosts only; use"),
        (
            ["--oasis-config", '{"miss_policy": "skip", "debug_attention_mass": true}'],
            "--oasis-config: debug_attention_mass=true works on CPU hosts only; leave it out",
        ),
        (
            ["--oasis-config", '{"transfer": "workers"}'],
            "--oasis-config: transfer='workers' works on CPU hosts only; use transfer='inline'",
        ),
    ],
)
def test_what_a_gpu_does_not_do_yet(flags: list[str], message: str, resolve: Resolve, tmp_path: Path) -> None:
    """Contract 10: refused before a model is loaded, though a CPU host serves it."""
    draft = models.write(tmp_path / "draft", models.ACCEPTED["Llama"])
    given = [draft if x == "DRAFT" else x for x in flags]
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(models.ACCEPTED["Llama"], "--device", "cuda", *given)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cuda-graph-backend-prefill", "full"], "--cuda-graph-backend-prefill=full does not work"),
        (["--cuda-graph-config", '{"prefill": {"backend": "breakable"}}'], "--cuda-graph-backend-prefill=breakable"),
        (["--cuda-graph-backend-decode", "breakable"], "--cuda-graph-backend-decode=breakable does not work"),
    ],
)
def test_graphs_that_attention_cannot_be_part_of(flags: list[str], message: str, resolve: Resolve) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(models.ACCEPTED["Llama"], "--device", "cuda", *flags)


def test_failures_of_sglang_stay_its_own(resolve: Resolve, tmp_path: Path) -> None:
    """A model folder that is no model, for example, keeps the message that SGLang gives for it."""
    from sglang.srt.server_args import prepare_server_args

    record = prepare_server_args(["--kv-backend", "oasis", "--model-path", str(tmp_path), "--log-level", "error"])
    with pytest.raises(Exception, match=re.escape(str(tmp_path))) as error:
        record.resolve_once()
    assert not isinstance(error.value, ConfigError)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, None),
        ({"sliding_window_size": 128}, "a sliding window"),
        ({"logit_cap": 30.0}, "logit soft-capping"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"v_head_dim": 8}, "different head dims for K and V"),
        ({"attn_type": "encoder_only"}, "bidirectional attention"),
    ],
)
def test_layers_of_the_built_model(settings: dict[str, Any], words: str | None) -> None:
    """C35: a configuration may not tell; the layers that were built do."""
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

    from oasis_sglang.attention.backend import require_plain_attention

    if "attn_type" in settings:
        settings = {"attn_type": AttentionType(settings["attn_type"])}
    model = torch.nn.Module()
    model.plain = RadixAttention(4, 16, 0.25, num_kv_heads=2, layer_id=0)
    model.other = RadixAttention(4, 16, 0.25, num_kv_heads=2, layer_id=1, **settings)
    if words is None:
        require_plain_attention(model)
        return
    with pytest.raises(ValueError, match=rf"{words} \(layer other\).* start without --kv-backend"):
        require_plain_attention(model)


# -- the whole way ----------------------------------------------------------------------------------------------------


def test_the_real_launcher_ends_with_the_message(tmp_path: Path) -> None:
    """Contract 10: a plugin's errors are logged and passed over by SGLang's loader; this one must end the process."""
    path = models.write(tmp_path / "model", models.ACCEPTED["Llama"])
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", path, "--kv-backend", "oasis"]
    done = subprocess.run(
        [*command, "--oasis-config", '{"token_budget": 100, "page_size": 16}'],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    assert "token_budget=100 is not a multiple of page_size=16; use 96 or 112" in done.stderr
