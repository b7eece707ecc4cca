"""The attention backend over our pool, with SGLang's real forward dispatch (C19, C30, C47, contract 7)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from oasis_sglang import coordinator
from oasis_sglang.config import OasisConfig
from tests.contract.rank import DIM, LAYERS, PAGE, QUERY_HEADS, SCALE, Rank, batch, request, same
from tests.unit import oracle

pytestmark = pytest.mark.usefixtures("plugged")
CONFIG = OasisConfig(token_budget=64, page_size=PAGE, host_to_device_ratio=1.0)


@pytest.fixture
def rank() -> Iterator[Rank]:
    coordinator.stop()
    yield Rank(CONFIG)
    coordinator.stop()


class Driver:
    """Runs prompts and steps through the backend the way a model does: metadata once, then layer by layer."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.backend = rank, rank.backend()
        self.lengths: dict[int, int] = {}

    def admit(self, prompt: int) -> int:
        req = request(prompt, 64)
        assert self.rank.rows.alloc([req]) is not None
        req.kv.kv_allocated_len = prompt
        self.lengths[req.kv.req_pool_idx] = 0
        return int(req.kv.req_pool_idx)

    def pages(self, index: int) -> list[int]:
        return (self.rank.rows.req_to_token[index, : self.lengths[index] : PAGE] // PAGE).tolist()

    def _forward(self, forward_batch: Any, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self.backend.init_forward_metadata(forward_batch)
        queries, outputs = [], []
        for layer in self.rank.layers:
            q, k, v = self.rank.tensors(tokens)
            queries.append(q.view(tokens, QUERY_HEADS, DIM))
            out = self.backend.forward(q, k, v, layer, forward_batch, save_kv_cache=True)
            outputs.append(out.view(tokens, QUERY_HEADS, DIM))
        return queries, outputs

    def extend(self, chunks: dict[int, int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """One batch of prompt chunks, `{row: new tokens}`."""
        prefixes = [self.lengths[i] for i in chunks]
        slots = torch.cat([self.rank.give_slots(i, self.lengths[i], self.lengths[i] + n) for i, n in chunks.items()])
        for i, n in chunks.items():
            self.lengths[i] += n
        totals = [self.lengths[i] for i in chunks]
        counts = {"extend_seq_lens": list(chunks.values()), "extend_prefix_lens": prefixes}
        return self._forward(batch(ForwardMode.EXTEND, list(chunks), totals, slots, **counts), sum(chunks.values()))

    def decode(self, indices: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        slots = torch.cat([self.rank.give_slots(i, self.lengths[i], self.lengths[i] + 1) for i in indices])
        for i in indices:
            self.lengths[i] += 1
        lengths = [self.lengths[i] for i in indices]
        return self._forward(batch(ForwardMode.DECODE, indices, lengths, slots), len(indices))


def test_prompts_and_steps_equal_float64(rank: Rank) -> None:
    """C30: mixed prompts in one batch, chunks, and decode beyond the budget, through SGLang's own call path."""
    driver = Driver(rank)
    first, second = driver.admit(30), driver.admit(200)
    host = rank.tier.host
    queries, outputs = driver.extend({first: 30, second: 150})
    for layer in range(LAYERS):
        for index, at in ((first, slice(0, 30)), (second, slice(30, 180))):
            k, v = oracle.sequence(host, layer, driver.pages(index), driver.lengths[index])
            expected = oracle.causal(queries[layer][at], k, v, 0, SCALE)
            torch.testing.assert_close(outputs[layer][at].double(), expected, rtol=1e-4, atol=1e-4)
    queries, outputs = driver.extend({second: 50})
    k, v = oracle.sequence(host, 1, driver.pages(second), 200)
    expected = oracle.causal(queries[1], k, v, 150, SCALE)
    torch.testing.assert_close(outputs[1].double(), expected, rtol=1e-4, atol=1e-4)
    for _ in range(40):
        queries, outputs = driver.decode([second, first])
        for layer in range(LAYERS):
            for i, index in enumerate((second, first)):
                pages, tokens = driver.pages(index), driver.lengths[index]
                want = oracle.decode(host, layer, pages, tokens, queries[layer][i], CONFIG, SCALE)
                torch.testing.assert_close(outputs[layer][i].double(), want, rtol=1e-4, atol=1e-4)
    assert rank.coordinator.state()["host_tokens_written"] == 240 + 70
    rank.tier.check_integrity()


@pytest.mark.parametrize("mode", [ForwardMode.IDLE, ForwardMode.DECODE, ForwardMode.EXTEND])
def test_an_empty_batch_changes_nothing(rank: Rank, mode: ForwardMode) -> None:
    """C47: an idle rank of a data-parallel group runs the model on nothing: no exception, and no state moves."""
    driver = Driver(rank)
    index = driver.admit(100)
    driver.extend({index: 90})
    driver.decode([index])
    before = rank.snapshot()
    nothing = batch(mode, [], [], torch.empty(0, dtype=torch.int64), extend_seq_lens=[], extend_prefix_lens=[])
    _, outputs = driver._forward(nothing, 0)
    assert all(out.shape == (0, QUERY_HEADS, DIM) for out in outputs)
    assert same(before, rank.snapshot())
    driver.decode([index])


def test_a_request_that_was_never_admitted(rank: Rank) -> None:
    """C19: SGLang paths that skip admission decoded wrong text in silence; ours raises before attention."""
    driver = Driver(rank)
    index = driver.admit(40)
    driver.extend({index: 40})
    before = rank.snapshot()
    for other in (index + 1, index - 1, 7):
        for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
            stray = batch(mode, [index, other], [41, 41], torch.tensor([9, 9]), extend_seq_lens=[1, 1])
            with pytest.raises(RuntimeError, match=rf"requests in rows \[{other}\] run without having been admitted"):
                driver.backend.init_forward_metadata(stray)
    assert same(before, rank.snapshot())
    rank.rows.free_rows([index])
    with pytest.raises(RuntimeError, match="without having been admitted"):
        driver.decode([index])


def test_a_prefix_that_was_freed_is_not_read(rank: Rank) -> None:
    """C38, contract 7: a radix hit on pages that were freed must raise, not attend to their next owner."""
    driver = Driver(rank)
    index = driver.admit(100)
    driver.extend({index: 60})
    rank.allocator.free(rank.rows.req_to_token[index, 16:32].to(torch.int64))
    with pytest.raises(RuntimeError, match="tokens of KV were asked of host pages"):
        driver.extend({index: 20})


@pytest.mark.parametrize("mode", [ForwardMode.MIXED])
def test_modes_that_are_not_served(rank: Rank, mode: ForwardMode) -> None:
    """Contract 10: a forward mode that nothing was built for is an error, never dense by accident."""
    driver = Driver(rank)
    index = driver.admit(40)
    stray = batch(mode, [index], [1], torch.tensor([16]), extend_seq_lens=[1], extend_prefix_lens=[0])
    with pytest.raises(NotImplementedError, match=f"forward mode {mode.name}"):
        driver.backend.init_forward_metadata(stray)


def test_layers_that_share_kv_are_not_served(rank: Rank) -> None:
    """Contract 10: models whose layers read another layer's KV hand over none of their own."""
    driver = Driver(rank)
    driver.backend.init_forward_metadata(batch(ForwardMode.IDLE, [], [], torch.empty(0)))
    q, k, v = rank.tensors(1)
    for keys, save in ((None, True), (k, False)):
        with pytest.raises(NotImplementedError, match="layer 0 attends without writing its own K and V"):
            driver.backend.forward_decode(q, keys, v, rank.layers[0], SimpleNamespace(), save_kv_cache=save)


def test_the_backend_needs_our_pool(rank: Rank) -> None:
    """`--attention-backend oasis` alone is a valid choice for SGLang's parser; it must not run over another pool."""
    runner = rank.runner()
    runner.token_to_kv_pool = SimpleNamespace()
    from oasis_sglang.attention.backend import OasisAttnBackend

    with pytest.raises(RuntimeError, match="Give --kv-backend oasis instead of --attention-backend oasis"):
        OasisAttnBackend(runner)
    coordinator.stop()
    with pytest.raises(RuntimeError, match="serves only the pool of --kv-backend oasis"):
        OasisAttnBackend(rank.runner())


def test_registered_under_its_name() -> None:
    """C50: the registry is what `--attention-backend` looks into."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from oasis_sglang.arguments import ATTENTION_BACKEND
    from oasis_sglang.attention.backend import BACKEND_NAME

    assert ATTENTION_BACKEND == BACKEND_NAME
    assert ATTENTION_BACKENDS[ATTENTION_BACKEND].__module__ == "oasis_sglang.plugin"
