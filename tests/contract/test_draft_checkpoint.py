"""The folders of `oasis train-draft` against the installed SGLang: every tensor must find its parameter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oasis_sglang.speculative.draft.checkpoint import write_draft
from oasis_sglang.speculative.draft.model import DraftHead, DraftShape
from oasis_sglang.speculative.draft.target import Target
from tests.unit.draft_models import tiny_model

SHIPPED = Path(__file__).parents[2] / "oasis_sglang" / "speculative" / "drafts"


def test_sglang_loads_every_tensor(tmp_path: Path) -> None:
    target = Target(tiny_model())
    torch.manual_seed(0)
    head = DraftHead(DraftShape.of(target, 64))
    vocabulary = torch.arange(64) + torch.arange(64) // 2
    target.model.config.save_pretrained(tmp_path / "target")
    folder = tmp_path / "draft"
    write_draft(folder, head, target, tmp_path / "target", vocabulary)
    command = [sys.executable, "-m", "tests.contract.draft_load", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # The embedding is the target's, shared when the server starts.
    assert found["not loaded"] == ["model.embed_tokens.weight"]
    assert found["numbers"] == found["numbers in the file"]
    assert found["qkv"]
    assert found["fc"]
    assert found["hot tokens"] == vocabulary.tolist()
    assert (found["aux"], found["feeds back"], found["rope theta"]) == (3, "before norm", 500.0)


@pytest.mark.parametrize("layers", [7, 30, 32])
def test_layer_ids_are_what_sglang_captures_unasked(layers: int) -> None:
    """`set_eagle3_layers_to_capture` with our ids, and without any, must capture the same layers."""
    from types import SimpleNamespace

    from sglang.srt.models.llama import LlamaForCausalLM

    from oasis_sglang.speculative.draft.target import captured_layers

    model = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True), config=SimpleNamespace(num_hidden_layers=layers),
        model=SimpleNamespace(),
    )  # fmt: skip
    LlamaForCausalLM.set_eagle3_layers_to_capture(model)
    unasked = model.model.layers_to_capture
    LlamaForCausalLM.set_eagle3_layers_to_capture(model, [layer - 1 for layer in captured_layers(layers)])
    assert model.model.layers_to_capture == sorted(unasked) == captured_layers(layers)


@pytest.mark.parametrize("folder", sorted(SHIPPED.glob("*/")), ids=lambda folder: folder.name)
def test_shipped_drafts_are_small_and_complete(folder: Path) -> None:
    from oasis_sglang.speculative.draft.checkpoint import problems_of

    assert problems_of(folder) == []
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 20_000_000
    training = json.loads((folder / "training.json").read_text())
    assert training["accept_length"] >= 1.8
