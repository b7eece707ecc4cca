"""A server whose pools, steps and drafts are a device's: a small random model against transformers (contracts 1, 8)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from oasis_sglang.serving import Client, greedy, oasis_flags
from oasis_sglang.speculative.draft.checkpoint import write_draft
from oasis_sglang.speculative.draft.model import DraftHead, DraftShape
from oasis_sglang.speculative.draft.target import Target
from tests.server import interpreted
from tests.server.checks import LogWatch, wait_until_idle
from tests.server.conftest import FP32, ServerFactory
from tests.unit.draft_models import VOCAB, tiny_model

pytestmark = [pytest.mark.server, pytest.mark.slow]

NEW, BUDGET = 7, 64
SHAPE = (*FP32, "--skip-tokenizer-init", "--chunked-prefill-size", "32", "--max-running-requests", "2")
DRAFTS = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path")


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_model(head_dim=16).eval()


@pytest.fixture(scope="module")
def target_folder(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    target.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def draft_folder(target: LlamaForCausalLM, target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that has learnt nothing: what it proposes is right once in a while."""
    folder, of = tmp_path_factory.mktemp("draft"), Target(target)
    torch.manual_seed(0)
    write_draft(folder, DraftHead(DraftShape.of(of, VOCAB)), of, target_folder, torch.arange(VOCAB))
    return folder


def answer(target: LlamaForCausalLM, prompt: list[int], new: int) -> list[int]:
    """Greedy and dense."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(new):
            tokens.append(int(target(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_verified_drafts_are_dense_within_the_budget(
    target: LlamaForCausalLM, target_folder: Path, draft_folder: Path, server_factory: ServerFactory, tmp_path: Path
) -> None:
    """Two at a time, with prompts in chunks, a prefix that is found again, and one sequence that is sparse."""
    random = torch.Generator().manual_seed(1)
    period = torch.randint(2, VOCAB, (9,), generator=random).tolist()
    prompts = [torch.randint(2, VOCAB, (length,), generator=random).tolist() for length in (5, 33)]
    prompts.append((period * 4)[:34])  # whose drafts can be copied
    long = torch.randint(2, VOCAB, (90,), generator=random).tolist()
    config = {"token_budget": BUDGET, "host_to_device_ratio": 2.0}
    flags = [*oasis_flags(config, 512), *SHAPE, *DRAFTS, str(draft_folder)]
    with server_factory(flags, interpreted.environment(tmp_path), str(target_folder)) as server:
        client, watch = Client(server.url), LogWatch(server)
        sampling = greedy(NEW, ignore_eos=True)
        with ThreadPoolExecutor() as pool:
            given = list(pool.map(lambda x: client.generate(x, sampling)["output_ids"], [*prompts, long]))
        dense = [answer(target, prompt, NEW) for prompt in prompts]
        assert given[:3] == dense
        # The first token comes from a prompt, which is dense whatever its length.
        assert given[3][:1] == answer(target, long, 1)
        again = client.generate(prompts[1] + dense[1], greedy(4, ignore_eos=True))
        assert again["meta_info"]["cached_tokens"] >= 32
        assert again["output_ids"] == answer(target, prompts[1] + dense[1], 4)
        state = client.oasis()
        wait_until_idle(client)
        watch.assert_clean()
    layers, heads = target.config.num_hidden_layers, target.config.num_key_value_heads
    steps_of_long = state["selected_pages_total"] / (layers * heads * BUDGET // 16)
    assert 1 <= steps_of_long <= NEW - 1
    assert state["verify_steps_total"] > 0
    assert state["copied_chains_total"] > 0
