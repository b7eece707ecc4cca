"""`benchmarks.lookahead --draft`: an EAGLE-3 head guesses token by token what its training code says it would."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import lookahead_capture
from benchmarks.lookahead_drafts import EagleDraft
from oasis_sglang.speculative.draft.checkpoint import write_draft
from oasis_sglang.speculative.draft.model import DraftHead, DraftShape
from oasis_sglang.speculative.draft.target import Target

VOCABULARY = torch.arange(0, 97, 2)  # the draft knows every other token


@torch.inference_mode()
def test_guesses_equal_those_of_the_training_code(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.5, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    recorded = lookahead_capture.Target(str(tmp_path / "target"))
    target = Target(recorded.model)
    head = DraftHead(DraftShape.of(target, len(VOCABULARY)))
    for weight in head.parameters():
        weight.copy_(torch.randn_like(weight).to(torch.bfloat16) * 0.3)
    head.feature_scale.fill_(0.5)
    write_draft(tmp_path / "draft", head, target, tmp_path / "target", VOCABULARY)

    prompt, steps, count = list(range(5, 25)), 12, 3
    draft = EagleDraft(tmp_path / "draft", recorded.model)
    seen: list[torch.Tensor] = []
    propose = draft.propose

    def keep(tokens: list[int], features: torch.Tensor, count: int) -> list[int]:
        seen[:] = [features.clone()]
        return propose(tokens, features, count)

    draft.propose = keep  # type: ignore[method-assign, assignment]
    capture = recorded.decode(prompt, steps, [draft], count)

    chain = head.unroll(
        seen[0].unsqueeze(0), torch.tensor([capture.tokens]), torch.tensor([0]), len(prompt) - 1, target.embed,
        target.rotary,
    )  # fmt: skip
    x, drafted = next(chain), []
    for _ in range(count):
        drafted.append(VOCABULARY[head.logits(x).argmax(dim=-1)])
        x = chain.send(drafted[-1])
    expected = torch.stack(drafted, dim=-1)[0]
    assert expected.unique().numel() > 3, "a head that always says the same would prove little"
    assert torch.equal(capture.guesses["eagle"], expected)
