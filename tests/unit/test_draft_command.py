"""`oasis train-draft` from end to end, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oasis_sglang.cli import main
from oasis_sglang.speculative.draft.checkpoint import problems_of
from tests.unit.draft_models import VOCAB, tiny_model


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-target"
    tiny_model().save_pretrained(folder)
    letters = {chr(31 + token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=chr(31)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=chr(31)).save_pretrained(folder)
    return folder


def command(tmp_path: Path, model: Path, **options: Any) -> list[str]:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"prompt number {number}" for number in range(30)))
    fixed: dict[str, Any] = {
        "model-path": model, "output": tmp_path / "draft", "prompts": prompts, "cache": tmp_path / "cache",
        "tokens": 80, "new-tokens": 8, "batch": 4, "draft-vocab": 64, "epochs": 2, "rows": 2,
    }  # fmt: skip
    return ["train-draft", *(str(part) for key, value in (fixed | options).items() for part in (f"--{key}", value))]


def test_from_prompts_to_a_folder(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, model_folder)) == 0
    folder = tmp_path / "draft"
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)
    assert problems_of(folder) == []
    training = json.loads((folder / "training.json").read_text())
    assert training["tokens"] >= 80
    assert training["tokens_trained"] == 2 * training["tokens"]
    assert training["held_out_prompts"] == 3
    assert 1.0 <= training["accept_length"] <= 4.0
    assert training["command"].startswith("oasis train-draft --model-path tiny-target --output draft")
    assert str(tmp_path) not in json.dumps(training)
    assert training["command"] in (folder / "README.md").read_text()

    # Once more, stopped again and again: the same corpus, the same weights.
    weights = load_file(folder / "model.safetensors")
    for state in (tmp_path / "cache").glob("training-*.pt"):
        state.unlink()
    again = command(tmp_path, model_folder, output=tmp_path / "again")
    for _ in range(100):
        assert main([*again, "--minutes", "1e-9"]) == 0
        if (tmp_path / "again" / "training.json").exists():
            break
    repeated = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(weights[name], repeated[name]) for name in weights)


def test_errors_are_told_in_a_line(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path, model_folder / "missing")) == 1
    assert "oasis train-draft:" in capsys.readouterr().err
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "corpus.json").write_text('{"target": "another"}')
    assert main(command(tmp_path, model_folder)) == 1
    assert "another --cache" in capsys.readouterr().err
