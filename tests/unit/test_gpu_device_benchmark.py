"""`benchmarks.gpu_device`: all of it on the CPU, its stages, and that no kernel is left unchecked."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_bandwidth, gpu_checks, gpu_decode, gpu_implementations, gpu_stage, gpu_table
from benchmarks.gpu_scale import scale_of
from benchmarks.gpu_stage import Item, NotMeasured, Stage, StageRun
from oasis_sglang import kernels
from oasis_sglang.kernels.attention_shape import AttentionShape
from oasis_sglang.kernels.choose import Choice
from oasis_sglang.kernels.ops import TritonOps
from tests.unit.flashinfer_model import stand_in

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("gpu") / "out.json"
    command = [sys.executable, "-m", "benchmarks.gpu_device", "--tiny", "--output", str(output)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "GPU kernels: CPU, tiny shapes" in done.stdout
    assert "mean nothing" in done.stdout
    content = json.loads(output.read_text())
    assert content["benchmark"] == "gpu_device"
    return content["results"]


def launching_functions() -> set[str]:
    """Public functions of the kernels' modules that launch a kernel themselves."""
    found = set()
    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            own = function.__module__ == module.__name__ and not name.startswith("_")
            if own and name != "launch" and "launch" in function.__code__.co_names:
                found.add(name)
    return found


def test_every_kernel_function_is_checked_and_right(results: dict[str, Any]) -> None:
    checks = results["checks"]
    assert checks["failed"] == checks["skipped"] == {}
    assert [name for name, x in checks["results"].items() if not x["passed"]] == []
    launching = launching_functions()
    assert {"attend", "select", "gather", "place"} <= launching
    assert {name for x in checks["results"].values() for name in x["functions"]} == launching


def test_every_figure_is_there(results: dict[str, Any]) -> None:
    assert results["tiny"]
    assert not results["times_mean_something"]
    bandwidth, decode = results["bandwidth"], results["decode"]
    for stage in (bandwidth, decode):
        assert stage["failed"] == stage["skipped"] == {}
    assert set(bandwidth["results"]["copies"]) == {
        "device_bytes_per_second", "from_host_bytes_per_second", "to_host_bytes_per_second",
    }  # fmt: skip
    kernel = [x for x in bandwidth["results"].values() if "of_copy" in x]
    assert len(kernel) > 8
    assert all(x["bytes"] > 0 and x["seconds"] > 0 for x in kernel)
    assert sum("slower" in x for x in bandwidth["results"].values()) == 2
    assert bandwidth["results"]["attention chosen"]["chosen"] == "triton"
    kinds = [(x["context"], x["sequences"], x["kind"]) for x in decode["results"].values() if x["kind"] != "setting"]
    assert kinds == [(c, n, kind) for c, n in ((192, 2), (128, 1)) for kind in ("dense", "skip", "wait")]
    assert all(x["attention"] == "triton" for x in decode["results"].values() if x["kind"] != "setting")
    sparse = [x for x in decode["results"].values() if x["kind"] in ("skip", "wait")]
    assert all(x["missed_pages_per_head"] >= x["fetched_pages_per_head"] >= 0 for x in sparse)
    assert any(x["fetched_pages_per_head"] > 0 for x in sparse)


def test_ratios_are_of_what_they_name(results: dict[str, Any]) -> None:
    rows = {row["what"]: row for row in results["ratios"]}
    assert rows["kernel checks passed / all"]["ratio"] == 1
    decode = results["decode"]["results"]
    skip, dense = decode["192 × 2 skip"], decode["192 × 2 dense"]
    row = rows["decode 192 × 2: skip, cap 5 % by triton / dense by triton"]
    assert row["ratio"] == pytest.approx(skip["tokens_per_second"] / dense["tokens_per_second"])
    assert row["unit"] == "tokens/s"
    gather = next(x for name, x in results["bandwidth"]["results"].items() if name.startswith("gather"))
    row = next(row for what, row in rows.items() if what.startswith("gather"))
    assert row["ratio"] == pytest.approx(gather["of_copy"])


def test_no_check_is_no_pass() -> None:
    assert not gpu_table.passed({})
    stage = {"results": {"a": {"passed": True}}, "failed": {}, "skipped": {}}
    assert gpu_table.passed({"checks": stage})
    assert not gpu_table.passed({"checks": stage | {"skipped": {"b": "no time"}}})
    assert not gpu_table.passed({"checks": stage | {"results": {"a": {"passed": False}}}})
    assert not gpu_table.passed({"checks": stage, "decode": {"failed": {"c": "trouble"}}})


def items(tiny: bool) -> list[Item]:
    """A stage of this module: what goes wrong in one."""

    def wrong() -> dict[str, Any]:
        raise ValueError("nothing to see")

    def gone() -> dict[str, Any]:
        os._exit(3)

    def hangs() -> dict[str, Any]:
        time.sleep(1000)
        return {}

    return [
        Item("first", 0.0, lambda: {"tiny": tiny, "process": os.getpid()}),
        Item("wrong", 0.0, wrong),
        Item("long", 1e6, dict),
        Item("gone", 0.0, gone),
        Item("no room", 0.0, lambda: {"skipped": "there is no room"}),
        Item("last", 0.0, lambda: {"process": os.getpid()}),
        *([Item("hangs", 0.0, hangs), Item("after", 0.0, dict)] if tiny else []),
    ]


def test_trouble_in_one_item_costs_that_item_only() -> None:
    told: list[tuple[str, int, int]] = []
    run = StageRun(Stage("any", __name__, 0), False, 600, lambda *x: told.append(x))
    outcome = run.run()
    first, last = outcome["results"]["first"], outcome["results"]["last"]
    assert set(outcome["results"]) == {"first", "last"}
    assert first["process"] not in (last["process"], os.getpid())
    assert "ValueError: nothing to see" in outcome["failed"]["wrong"]
    assert outcome["failed"]["gone"] == "its process ended"
    assert "takes about 1000000 s" in outcome["skipped"]["long"]
    assert outcome["skipped"]["no room"] == "there is no room"
    assert told[0] == ("first", 0, 6)
    assert told[-1] == ("last", 5, 6)


def test_an_item_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before it is kept, what comes after it is left out."""
    run = StageRun(Stage("any", __name__, 0), True, 600, lambda *_: None)

    def receive(worker: Any, seconds: float) -> Any:
        return original(worker, 2.0 if "last" in run.outcome["results"] else seconds)

    original = importlib.import_module("benchmarks.gpu_stage").Worker.receive
    monkeypatch.setattr("benchmarks.gpu_stage.Worker.receive", receive)
    monkeypatch.setattr(StageRun, "_left", property(lambda self: 0.0 if "hangs" in self._settled else 600.0))
    outcome = run.run()
    assert "was stopped" in outcome["failed"]["hangs"]
    assert "left" in outcome["skipped"]["after"]
    assert {"first", "last"} <= set(outcome["results"])


def test_a_stage_that_cannot_start_says_so() -> None:
    outcome = StageRun(Stage("any", "no_such_module", 0), True, 600, lambda *_: None).run()
    assert "No module named 'no_such_module'" in outcome["failed"]["start"]
    assert not gpu_table.passed({"checks": outcome, "bandwidth": outcome})


def test_what_an_item_leaves_running_is_its_own_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches come back before they have run: an error that nobody waited for belongs to the item, with its words, and
    so does the loss of the device."""
    sent: list[Any] = []
    asked = iter(["first", None])
    connection = SimpleNamespace(send=sent.append, recv=lambda: next(asked))
    freed: list[int] = []

    def wait() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu_stage, "_wait", wait)
    monkeypatch.setattr(gpu_stage, "_free", lambda: freed.append(1))
    gpu_stage.serve(connection, __name__, True)
    _, (figures, trouble, lost) = sent
    assert figures is not None
    assert "RuntimeError: an illegal memory access was encountered\n" in trouble
    assert "and the device is lost to its process: an illegal memory access was encountered\n" in trouble
    assert lost
    assert not freed


def test_what_a_server_would_take_is_in_the_table() -> None:
    """Beside a run's own figures of both, so that the two can be compared."""
    copy = {"bytes_per_second": 2e12, "of_copy": 0.5}
    found = {
        "attention chosen": {
            "chosen": "flashinfer", "reason": "FlashInfer: faster", "flashinfer_seconds": 4e-5, "triton_seconds": 8e-5,
        },
        "attend triton n=1": copy,
        "attend flashinfer n=1": copy,
    }  # fmt: skip
    rows = gpu_table.ratios({"bandwidth": {"results": found, "failed": {}, "skipped": {}}})
    assert [row["what"] for row in rows] == [
        "a layer's attention, flashinfer chosen: flashinfer / triton",
        "attend triton n=1 / copy",
        "attend flashinfer n=1, chosen / copy",
    ]
    assert (rows[0]["measured"], rows[0]["ratio"]) == (pytest.approx(40.0), pytest.approx(0.5))


def test_flashinfer_is_measured_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NVIDIA devices where it can be imported, checked at shapes that it serves, and timed wherever Triton is."""
    tiny = scale_of(True)
    assert list(gpu_implementations.implementations(tiny)) == ["triton"]
    scale = dataclasses.replace(tiny, device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=128)
    monkeypatch.setattr(gpu_implementations, "why_no_flashinfer", lambda: None)
    assert list(gpu_implementations.implementations(scale)) == ["triton", "flashinfer"]
    for module in (gpu_checks, gpu_bandwidth):
        monkeypatch.setattr(module, "scale_of", lambda _: scale)
    checks = [item.name for item in gpu_checks.items(False) if "flashinfer" in item.name]
    assert checks == [
        f"attend flashinfer bfloat16 D=128 P=16 G=2 t={t} n={n}" for t, n in ((1, 2), (1, 3), (4, 3), (8, 2))
    ]
    timed = [item.name for item in gpu_bandwidth.items(False)]
    assert "attention chosen" in timed
    assert {x.replace("triton", "flashinfer") for x in timed if "attend triton" in x} <= set(timed)
    monkeypatch.setattr(gpu_implementations, "why_no_flashinfer", lambda: "it is not installed")
    assert list(gpu_implementations.implementations(scale)) == ["triton"]


def test_flashinfer_answers_as_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself, with FlashInfer's kernel restated: one shape after the other."""
    stand_in(monkeypatch)
    tiny = dataclasses.replace(scale_of(True), dtype=torch.bfloat16, head_dim=64)
    other = gpu_implementations.FlashInfer()
    for case in ((torch.bfloat16, 64, 16, 2, 1, 3), (torch.bfloat16, 64, 16, 2, 4, 3)):
        verdict = gpu_checks.check_implementation(tiny, case, "flashinfer", other)
        assert verdict["passed"], verdict
        assert verdict["functions"] == []


def small_case() -> tuple[Any, tuple[Any, ...]]:
    return dataclasses.replace(scale_of(True), dtype=torch.bfloat16, head_dim=64), (torch.bfloat16, 64, 16, 2, 1, 3)


@pytest.mark.parametrize(
    ("text", "compiler", "measured"),
    [
        ("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", False, False),
        ("Ninja build failed. /bin/sh: 1: /usr/local/cuda/bin/nvcc: not found", False, False),
        ("Ninja build failed. nvcc fatal: Unsupported gpu architecture", True, True),
        ("an illegal memory access was encountered", False, True),
    ],
)
def test_no_compiler_is_a_note(
    text: str, compiler: bool, measured: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only where FlashInfer asks for nvcc and there is none; what else goes wrong has failed."""
    (tmp_path / "bin").mkdir()
    if compiler:
        (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))

    def plan(*_: Any) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(gpu_implementations.FlashInferOps, "plan", plan)
    scale, case = small_case()
    other = gpu_implementations.FlashInfer()
    with pytest.raises(RuntimeError if measured else NotMeasured) as caught:
        gpu_checks.check_implementation(scale, case, "flashinfer", other)
    assert str(caught.value) == (text if measured else "FlashInfer needs nvcc: not measured")


def test_what_is_not_measured_is_said_and_no_failure() -> None:
    def absent() -> dict[str, Any]:
        raise NotMeasured("FlashInfer needs nvcc: not measured")

    sent: list[Any] = []
    asked = iter(["absent", None])
    connection = SimpleNamespace(send=sent.append, recv=lambda: next(asked))
    name = "tests.unit.not_measured_stage"
    sys.modules[name] = SimpleNamespace(items=lambda _: [Item("absent", 0.0, absent)])  # type: ignore[assignment]
    try:
        gpu_stage.serve(connection, name, True)
    finally:
        del sys.modules[name]
    assert sent[1][1:] == ("", False)
    run = StageRun(Stage("any", name, 0), True, 600, lambda *_: None)
    run._waiting = [("absent", 0.0)]
    run._worker = SimpleNamespace(run=lambda *_: sent[1])  # type: ignore[assignment]
    run._next()
    assert run.outcome["not_measured"] == {"absent": "FlashInfer needs nvcc: not measured"}
    assert run.outcome["failed"] == run.outcome["skipped"] == {}
    right = {"results": {"attend": {"passed": True}}}
    assert gpu_table.passed({"checks": run.outcome | right, "bandwidth": run.outcome})
    wrong = {"results": {"attend": {"passed": True}, "attend flashinfer": {"passed": False}}}
    assert not gpu_table.passed({"checks": run.outcome | wrong})

    captions: list[str] = []
    found = {"tiny": False, "times_mean_something": True, "device": {}, "ratios": [], "checks": run.outcome | right}
    report = SimpleNamespace(results=found, table=lambda *x: captions.append(x[-1]))
    gpu_table.show(report)  # type: ignore[arg-type]
    assert captions == ["FlashInfer needs nvcc: not measured."]


@pytest.mark.interpreter
def test_decode_steps_attend_with_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and sparse, with what their own shapes get, and the results say which."""
    shapes: list[AttentionShape] = []

    class Other(TritonOps):
        calls = 0

        def attend(self, *args: Any) -> torch.Tensor:
            Other.calls += 1
            return super().attend(*args)

    def choose(triton: Any, shape: AttentionShape, device: torch.device) -> Choice:
        shapes.append(shape)
        return Choice(Other(), "Triton: it is the only one")

    monkeypatch.setattr(gpu_implementations, "choose_ops", choose)
    gpu_implementations.choice_for.cache_clear()
    bench = gpu_decode.Decode(scale_of(True))
    skip, wait = (functools.partial(bench.sparse, kind=kind) for kind in ("skip", "wait"))
    for run in (bench.dense, skip, wait):
        Other.calls = 0
        figures = run(192, 2)
        assert Other.calls == 3 * bench.scale.layers  # one step to settle, one alone, one among all
        assert (figures["attention"], figures["attention_reason"]) == ("triton", "Triton: it is the only one")
    gpu_implementations.choice_for.cache_clear()
    # The ways of decoding have one shape: the budget, a page; all pages are dense.
    assert [(x.batch, x.columns, x.tokens) for x in shapes] == [(2, 18, 288), (2, 5, 80)]


def test_without_msgspec() -> None:
    """A lent machine may have torch and triton and little else."""
    code = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'msgspec' else real(name, *a)\n"
        "from benchmarks import gpu_bare; gpu_bare.stand_in()\n"
        "from oasis_sglang.config import OasisConfig\n"
        "from oasis_sglang.memory_pool.sizing import PoolGeometry\n"
        "import oasis_sglang.kernels.device_step, msgspec; assert msgspec.Struct is gpu_bare.Struct\n"
        "config = OasisConfig(token_budget=512, fetch_ratio=0.05).validate(); assert config.budget_pages == 32\n"
        "g = PoolGeometry(layers=2, kv_heads=2, head_dim=16, itemsize=2, page_size=16); assert g.token_bytes == 256\n"
        "try: config.page_size = 3\n"
        "except AttributeError: print('frozen')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert done.stdout == "frozen\n", done.stderr
