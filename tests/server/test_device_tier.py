"""A server whose pools, steps and drafts are a device's: a small random model against transformers (contracts 1, 8)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from oasis_sglang.serving import Client, greedy, oasis_flags
from tests.server import interpreted
from tests.server.checks import LogWatch, wait_until_idle
from tests.server.conftest import FP32, ServerFactory
from tests.server.tiny import Tiny
from tests.unit.draft_models import VOCAB

pytestmark = [pytest.mark.server, pytest.mark.slow]

NEW, BUDGET = 7, 64
SHAPE = (*FP32, "--skip-tokenizer-init", "--chunked-prefill-size", "32", "--max-running-requests", "2")


def test_verified_drafts_are_dense_within_the_budget(server_factory: ServerFactory, tmp_path: Path) -> None:
    """Two at a time, with prompts in chunks, a prefix that is found again, and one sequence that is sparse."""
    tiny, random = Tiny(tmp_path), torch.Generator().manual_seed(1)
    period = torch.randint(2, VOCAB, (9,), generator=random).tolist()
    prompts = [torch.randint(2, VOCAB, (length,), generator=random).tolist() for length in (5, 33)]
    prompts.append((period * 4)[:34])  # whose drafts can be copied
    long = torch.randint(2, VOCAB, (90,), generator=random).tolist()
    flags = [*oasis_flags({"token_budget": BUDGET, "host_to_device_ratio": 2.0}, 512), *SHAPE]
    flags += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(tiny.eagle3())]
    with server_factory(flags, interpreted.environment(tmp_path), str(tiny.folder)) as server:
        client, watch = Client(server.url), LogWatch(server)
        sampling = greedy(NEW, ignore_eos=True)
        with ThreadPoolExecutor() as pool:
            given = list(pool.map(lambda x: client.generate(x, sampling)["output_ids"], [*prompts, long]))
        dense = [tiny.answer(prompt, NEW) for prompt in prompts]
        assert given[:3] == dense
        # The first token comes from a prompt, which is dense whatever its length.
        assert given[3][:1] == tiny.answer(long, 1)
        again = client.generate(prompts[1] + dense[1], greedy(4, ignore_eos=True))
        assert again["meta_info"]["cached_tokens"] >= 32
        assert again["output_ids"] == tiny.answer(prompts[1] + dense[1], 4)
        state = client.oasis()
        wait_until_idle(client)
        watch.assert_clean()
    layers, heads = tiny.model.config.num_hidden_layers, tiny.model.config.num_key_value_heads
    steps_of_long = state["selected_pages_total"] / (layers * heads * BUDGET // 16)
    assert 1 <= steps_of_long <= NEW - 1
    assert state["verify_steps_total"] > 0
    assert state["copied_chains_total"] > 0
