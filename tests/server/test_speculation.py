"""Speculative decoding: whatever the drafts say, the text is the target's (contracts 1, 8 and 11)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oasis_sglang.serving import Client, Server, ask_all, greedy, oasis_flags
from tests.server.conftest import FP32, SELF_DRAFT, ServerFactory
from tests.server.tiny import Tiny
from tests.server.truth import NEW_TOKENS, SHORT, Truth, assert_same
from tests.unit.draft_models import VOCAB

pytestmark = [pytest.mark.server, pytest.mark.slow]


DRAFTS = 3


@pytest.fixture(scope="module")
def memoryless_model(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose attention adds nothing, with the demo model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder: Path = tmp_path_factory.mktemp("memoryless")
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    model.save_pretrained(folder)
    return str(folder)


def test_a_draft_that_is_the_target(self_draft: Server, truth: Truth) -> None:
    """Dense SGLang's text, token by token; and each draft is accepted that dense SGLang would have made.

    SGLang shows a draft model the sequence from its second token on, so even the target itself does not guess
    everything: `without_first` is what it would.
    """
    client = Client(self_draft.url)
    answers = ask_all(client, truth.prompts, greedy(NEW_TOKENS, ignore_eos=True))
    assert_same(truth.prompts, answers, truth.answers)
    for at in SHORT:
        right, position, steps = truth.without_first[at], 1, 0
        while position < NEW_TOKENS:
            accepted = 0
            while accepted < DRAFTS and position + accepted < NEW_TOKENS and right[position + accepted]:
                accepted += 1
            position, steps = position + accepted + 1, steps + 1
        assert answers[at].meta["spec_verify_ct"] == steps


def test_a_draft_that_must_be_right_is_accepted_to_the_last_token(
    server_factory: ServerFactory, memoryless_model: str
) -> None:
    """A target whose next token depends on the last one alone, and itself as the draft."""
    flags = [*oasis_flags({}, 2720), *FP32, "--context-length", "2048", *SELF_DRAFT, memoryless_model]
    with server_factory(flags, model_path=memoryless_model) as server:
        client = Client(server.url)
        for steps, new in ((1, 5), (4, 17), (16, 65)):
            answer = client.stream([7, 11, 13, 17], greedy(new, ignore_eos=True))
            assert answer.tokens == new
            assert answer.meta["spec_verify_ct"] == steps
            assert answer.meta["spec_num_correct_drafts"] == answer.meta["spec_num_proposed_drafts"] == DRAFTS * steps


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 8])
def test_max_new_tokens_inside_accepted_tokens(self_draft: Server, truth: Truth, length: int) -> None:
    client = Client(self_draft.url)
    answer = client.stream(truth.prompts[13], greedy(length, ignore_eos=True))
    assert answer.output_ids == truth.answers[13].output_ids[:length]
    assert answer.meta["finish_reason"] == {"type": "length", "length": length}


def test_stop_string_inside_accepted_tokens(self_draft: Server, truth: Truth) -> None:
    client = Client(self_draft.url)
    text = truth.answers[13].text
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    answer = client.generate(truth.prompts[13], greedy(NEW_TOKENS, ignore_eos=True) | {"stop": [stop]})
    assert answer["text"] == text[: text.index(stop)]
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


def test_a_second_turn(self_draft: Server, truth: Truth) -> None:
    """Drafts still agree after the prefix came from the cache: its draft KV is in place."""
    client = Client(self_draft.url)
    prompt = truth.prompts[16]
    first = client.stream(prompt, greedy(NEW_TOKENS, ignore_eos=True))
    again = client.stream(prompt, greedy(NEW_TOKENS, ignore_eos=True))
    assert first.cached_tokens == 0
    assert again.cached_tokens >= len(prompt) - 17
    assert again.output_ids == first.output_ids == truth.answers[16].output_ids
    assert again.meta["spec_accept_length"] >= 0.9 * first.meta["spec_accept_length"]


def test_an_eagle_head_of_the_first_generation(server_factory: ServerFactory, tmp_path: Path) -> None:
    """`EAGLE`: the text is the target's, whatever a head that has learnt nothing proposes."""
    tiny, random = Tiny(tmp_path), torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, VOCAB, (length,), generator=random).tolist() for length in (5, 33, 60)]
    flags = [*oasis_flags({"token_budget": 128, "host_to_device_ratio": 2.0}, 1024), *FP32, "--skip-tokenizer-init"]
    flags += ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(tiny.eagle())]
    with server_factory(flags, model_path=str(tiny.folder)) as server:
        client = Client(server.url)
        for prompt in prompts:
            given = client.generate(prompt, greedy(32, ignore_eos=True))
            assert given["output_ids"] == tiny.answer(prompt, 32)
        state = client.oasis()
    assert state["accepted_tokens_total"] > state["verify_steps_total"] > 0
