"""Training: seeded, resumable, and what it learns; the corpus; the folder that is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oasis_sglang.speculative.draft.checkpoint import problems_of, read_draft, write_draft
from oasis_sglang.speculative.draft.prompts import HELD_OUT, builtin_prompts, file_prompts
from oasis_sglang.speculative.draft.target import Target
from oasis_sglang.speculative.draft.training import Settings, Trainer, choose_vocabulary, schedule
from tests.unit.draft_models import STOP, VOCAB, tiny_corpus, tiny_model

SETTINGS = Settings(draft_vocab=64, epochs=2, rows=2, learning_rate=3e-3)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model())


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.head.state_dict().items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_resumed_equals_uninterrupted_and_seeds_decide(target: Target, tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path / "corpus", target)
    whole = Trainer(target, corpus, [0, 1, 2], SETTINGS, tmp_path / "whole.pt")
    assert whole.run()
    assert whole.step == whole.steps == 12

    class Killed(Exception):
        pass

    def kill(at: int):  # type: ignore[no-untyped-def]
        def report(progress) -> None:  # type: ignore[no-untyped-def]
            if progress.step == at:
                raise Killed

        return report

    for at in (4, 9):  # within a shard and in the second epoch; state is saved every second step
        trainer = Trainer(target, corpus, [0, 1, 2], SETTINGS, tmp_path / "killed.pt")
        with pytest.raises(Killed):
            trainer.run(kill(at), save_every=2)
    resumed = Trainer(target, corpus, [0, 1, 2], SETTINGS, tmp_path / "killed.pt")
    assert resumed.step == 8
    assert not resumed.run(stop_after=0.0)
    assert resumed.step == 9
    resumed = Trainer(target, corpus, [0, 1, 2], SETTINGS, tmp_path / "killed.pt")
    assert resumed.run()
    assert equal(weights(whole), weights(resumed))
    assert resumed.seen_tokens == whole.seen_tokens

    again = Trainer(target, tiny_corpus(tmp_path / "again", target), [0, 1, 2], SETTINGS, tmp_path / "again.pt")
    again.run()
    assert equal(weights(whole), weights(again))
    other = Trainer(target, corpus, [0, 1, 2], Settings(draft_vocab=64, epochs=2, rows=2, seed=1), tmp_path / "o.pt")
    other.run()
    assert not equal(weights(whole), weights(other))


def test_training_learns(target: Target, tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path, target, prompts=8, new=16, sampled=0.0)
    settings = Settings(draft_vocab=VOCAB, epochs=25, rows=4, learning_rate=5e-3)
    trainer = Trainer(target, corpus, [0, 1], settings, tmp_path / "state.pt")
    seen = []
    trainer.run(lambda progress: seen.append((progress.loss, progress.accuracy)), evaluate_every=20)
    assert seen[-1][0] < seen[0][0]
    assert min(seen[-1][1]) > 0.7  # what it was trained on, at every step of the chain
    assert max(seen[0][1]) < 0.6
    assert [entry["step"] for entry in trainer.history] == [20, 40]


def test_losses_ignore_padding(target: Target, tmp_path: Path) -> None:
    """A row weighs the same beside a longer one: neither padding nor what lies behind its end counts."""
    corpus = tiny_corpus(tmp_path, target)
    trainer = Trainer(target, corpus, [0], SETTINGS, tmp_path / "state.pt")
    shard = corpus.shard(0)
    counts = [trainer.losses(shard.rows(torch.tensor([row])))[0] for row in range(4)]
    places = [(shard.width + 1 + step, trainer.draft_ids[shard.tokens] >= 0) for step in range(3)]
    together = trainer.losses(shard)[0]
    for step, (first, known) in enumerate(places):
        columns = torch.arange(shard.tokens.shape[1])
        sizes = [int((known[row] & (columns >= first) & (columns < shard.ends[row])).sum()) for row in range(4)]
        mean = sum(size * loss[step].item() for size, loss in zip(sizes, counts, strict=True)) / sum(sizes)
        assert together[step].item() == pytest.approx(mean, rel=1e-4)


def test_corpus_is_reused_and_others_are_refused(target: Target, tmp_path: Path) -> None:
    first = tiny_corpus(tmp_path, target).shard(1)
    corpus = tiny_corpus(tmp_path, target)
    corpus._target = lambda: pytest.fail("the shard is on the disk")  # type: ignore[assignment]
    assert torch.equal(corpus.shard(1).tokens, first.tokens)
    assert corpus.seconds([1]) > 0
    with pytest.raises(ValueError, match="seed"):
        tiny_corpus(tmp_path, target, seed=1)


def test_vocabulary_is_what_is_frequent() -> None:
    counts = torch.zeros(10, dtype=torch.int64)
    counts[[7, 3, 5]] = torch.tensor([4, 9, 4])
    assert choose_vocabulary(counts, 3, [STOP]).tolist() == [1, 3, 5]
    assert choose_vocabulary(counts, 99, [STOP]).tolist() == list(range(10))


def test_schedule() -> None:
    assert schedule(0, 100, 0.1) == pytest.approx(0.1)
    assert schedule(10, 100, 0.1) == pytest.approx(1.0)
    assert schedule(99, 100, 0.1) == pytest.approx(0.02, abs=0.001)


def test_builtin_prompts_are_seeded_and_disjoint() -> None:
    train, held_out = builtin_prompts(600, seed=3)
    assert (train, held_out) == builtin_prompts(600, seed=3)
    assert train != builtin_prompts(600, seed=4)[0]
    assert len(train) == 600
    assert len(held_out) == HELD_OUT
    subjects = {prompt.subject for prompt in held_out}
    assert not any(prompt.concerns(subjects) for prompt in train)


def test_prompt_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo\none\nthree\n")
    train, held_out = file_prompts(lines, 100, 0)
    assert sorted(prompt.text for prompt in train + held_out) == ["one", "three", "two"]
    assert len(held_out) == 1
    objects = tmp_path / "prompts.jsonl"
    objects.write_text('{"prompt": "a\\nb"}\n"c"\n')
    assert {prompt.text for part in file_prompts(objects, 100, 0) for prompt in part} == {"a\nb", "c"}
    objects.write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=":1: expected"):
        file_prompts(objects, 100, 0)


def test_checkpoint_round_trip_and_check(target: Target, tmp_path: Path) -> None:
    trainer = Trainer(target, tiny_corpus(tmp_path / "corpus", target), [0], SETTINGS, tmp_path / "state.pt")
    folder, model = tmp_path / "draft", tmp_path / "target"
    target.model.config.save_pretrained(model)
    write_draft(folder, trainer.head, target, model, trainer.vocabulary)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 64
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500.0}
    assert config["vocab_size"] == VOCAB
    assert not config["tie_word_embeddings"]
    assert "dtype" not in config

    head, vocabulary = read_draft(folder, target)
    assert torch.equal(vocabulary, trainer.vocabulary)
    folded = trainer.head.fc.weight * trainer.head.feature_scale
    torch.testing.assert_close(head.fc.weight, folded, rtol=0.01, atol=0.0)

    tensors = load_file(folder / "model.safetensors")
    tensors["midlayer.mlp.gate.weight"] = tensors.pop("midlayer.mlp.gate_proj.weight")
    tensors["norm.weight"] = tensors["norm.weight"][:-1]
    save_file(tensors, folder / "model.safetensors")
    assert problems_of(folder) == [
        "midlayer.mlp.gate_proj.weight is missing",
        "midlayer.mlp.gate.weight is not known to SGLang",
        "norm.weight has the shape (47,), not (48,)",
    ]
