"""The attention backend over a tier whose steps are kernels', with SGLang's forward dispatch and its graphs' calls, in
Triton's interpreter (contracts 1 and 7)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

from oasis_sglang import coordinator
from oasis_sglang.attention.device_backend import DeviceAttnBackend
from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels import flashinfer
from oasis_sglang.kernels.flashinfer import FlashInferOps
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.memory_pool.device_tier import DeviceTier
from tests.contract.rank import DIM, LAYERS, PAGE, QUERY_HEADS, SCALE, Rank, batch
from tests.contract.test_backend import Driver
from tests.unit import oracle
from tests.unit.flashinfer_model import stand_in

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("plugged")]
CONFIG = OasisConfig(token_budget=32, page_size=PAGE, host_to_device_ratio=1.0)
BATCH = 4


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    coordinator.stop()
    yield Rank(CONFIG, **{"rows": BATCH, "on_device": True, **getattr(request, "param", {})})
    coordinator.stop()


class Fields:
    """A `ForwardBatch` whose fields are None where nothing was said."""

    def __init__(self, given: dict[str, Any]) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        return None


class DeviceDriver(Driver):
    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.backend = DeviceAttnBackend(rank.runner())

    def replay(self, indices: list[int], padded: int, new: int = 1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A step as a graph does it: from SGLang's view of the batch, whose rows and lengths are padded in static
        buffers and whose slots are not, then all layers."""
        verify, n = new > 1, len(indices)
        slots = torch.cat([self.rank.give_slots(i, self.lengths[i], self.lengths[i] + new) for i in indices])
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        lengths = [self.lengths[i] + (0 if verify else 1) for i in indices] + [fill] * (padded - n)
        mode = ForwardMode.TARGET_VERIFY if verify else ForwardMode.DECODE
        live = Fields({"forward_mode": mode, "out_cache_loc": slots, "seq_lens_cpu": torch.tensor(lengths[:n])})
        buffers = SimpleNamespace(
            input_ids=torch.zeros(padded * new, dtype=torch.int64),
            positions=torch.zeros(padded * new, dtype=torch.int64),
            req_pool_indices=torch.tensor(indices + [0] * (padded - n)),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            mamba_track_indices=None,
        )
        view = build_replay_fb_view(
            forward_batch=live,
            buffers=buffers,
            bs=padded,
            raw_bs=n,
            num_tokens=padded * new,
            global_num_tokens_cpu=None,
            seq_len_fill_value=fill,
            capture_forward_mode=mode,
            is_encoder_decoder=False,
        )
        self.backend.init_forward_metadata_out_graph(view)
        return self.layers(view, padded * new)

    def layers(self, view: Any, tokens: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        self.backend.init_forward_metadata_in_graph(view)
        queries, outputs = [], []
        for layer in self.rank.layers:
            q, k, v = self.rank.tensors(tokens)
            queries.append(q.view(tokens, QUERY_HEADS, DIM))
            out = self.backend.forward(q, k, v, layer, view, save_kv_cache=True)
            outputs.append(out.view(tokens, QUERY_HEADS, DIM))
        return queries, outputs


def check(driver: DeviceDriver, indices: list[int], queries: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    host = driver.rank.tier.host
    for layer in range(LAYERS):
        for i, index in enumerate(indices):
            pages, tokens = driver.pages(index), driver.lengths[index]
            want = oracle.decode(host, layer, pages, tokens, queries[layer][i], CONFIG, SCALE)
            torch.testing.assert_close(outputs[layer][i].double(), want, rtol=1e-4, atol=1e-4)
        assert not outputs[layer][len(indices) :].any()


def test_prompts_steps_and_replays_equal_float64(rank: Rank) -> None:
    driver = DeviceDriver(rank)
    first, second = driver.admit(20), driver.admit(90)
    queries, outputs = driver.extend({first: 20, second: 60})
    k, v = oracle.sequence(rank.tier.host, 0, driver.pages(first), 20)
    torch.testing.assert_close(
        outputs[0][:20].double(), oracle.causal(queries[0][:20], k, v, 0, SCALE), rtol=1e-4, atol=1e-4
    )
    driver.extend({second: 30})
    check(driver, [second, first], *driver.decode([second, first]))
    # a graph is captured with nothing real in it
    before = rank.snapshot()
    empty = batch(ForwardMode.DECODE, [0] * BATCH, [0] * BATCH, torch.zeros(BATCH, dtype=torch.int64))
    driver.backend.init_cuda_graph_state(BATCH, BATCH)
    driver.backend.init_forward_metadata_out_graph(empty, in_capture=True)
    for _ in range(2):  # warm-up and capture
        _, outputs = driver.layers(empty, BATCH)
        assert not torch.stack(outputs).any()
    after = rank.snapshot()
    for name in ("page_of", "slot_of", "last_used", "fill", "host"):
        assert torch.equal(before[name], after[name]), name
    for _ in range(3):
        queries, outputs = driver.replay([second, first], BATCH)
        for index in (second, first):
            driver.lengths[index] += 1
        check(driver, [second, first], queries, outputs)
    check(driver, [second], *driver.decode([second]))
    state = rank.coordinator.state()
    assert state["host_tokens_written"] == 24 + 95
    assert state["selected_pages_total"] > 0
    rank.tier.check_integrity()
    rank.rows.free_rows([first, second])
    assert rank.tier.sets.owned_pages == 0


@pytest.mark.parametrize("rank", [{"chain": 3}], indirect=True)
def test_chains_are_verified_in_a_graph_and_accepted_after_it(rank: Rank) -> None:
    driver = DeviceDriver(rank)
    index = driver.admit(70)
    driver.extend({index: 61})
    for accepted in (1, 3, 2):
        driver.replay([index], 2, new=3)
        rank.coordinator.accept(torch.tensor([accepted]))
        driver.lengths[index] += accepted
        assert int(rank.tier.host.fill.sum()) == driver.lengths[index]
    state = rank.coordinator.state()
    assert (state["verify_steps_total"], state["accepted_tokens_total"]) == (3, 6)
    rank.tier.check_integrity()


def test_a_request_that_was_never_admitted_is_told(rank: Rank) -> None:
    """A step does not stop to look; the idle check does."""
    driver = DeviceDriver(rank)
    index = driver.admit(30)
    driver.extend({index: 30})
    driver.lengths[index - 1] = 5
    driver.decode([index - 1])
    with pytest.raises(RuntimeError, match="without a working set"):
        rank.tier.check_integrity()


def test_the_scheduler_waits_for_whole_steps(rank: Rank) -> None:
    """C3: with the overlap scheduler a request's pages are given back while the next step, which still has the request
    in it, runs on another stream. SGLang's default lets that happen once a graph has read its inputs."""
    backend = DeviceAttnBackend(rank.runner())
    assert AttentionBackend.shared_read_ends(backend, ForwardMode.DECODE) is SharedReadEnds.IN_REPLAY
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY
    for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):  # all that was issued is waited for
        assert backend.shared_read_ends(mode) is SharedReadEnds.UNKNOWN
    assert backend.shared_read_ends(ForwardMode.IDLE) is SharedReadEnds.UNKNOWN


def test_models_do_not_write_to_the_pool_by_slot(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, in bfloat16, Qwen3-MoE and others write K and V of new tokens where they turn them. A slot is no index
    of the buffers: it would be another request's page, or beyond the pool."""
    from sglang.srt.models import qwen3_moe, utils

    pool = SimpleNamespace(dtype=torch.bfloat16)
    monkeypatch.setattr(utils, "_is_cuda", True)
    monkeypatch.setattr(utils, "is_cp_active", lambda _: False)
    monkeypatch.setattr(utils, "get_token_to_kv_pool", lambda: pool)
    asked = SimpleNamespace(dcp_kv_mask=None)
    assert not utils.enable_fused_set_kv_buffer(asked)
    assert not qwen3_moe.enable_fused_set_kv_buffer(asked)
    coordinator.stop()
    assert utils.enable_fused_set_kv_buffer(asked)
    assert qwen3_moe.enable_fused_set_kv_buffer(asked)


def test_graphs_that_do_not_fit_are_refused(rank: Rank) -> None:
    backend = DeviceAttnBackend(rank.runner())
    assert backend.get_cuda_graph_seq_len_fill_value() == 0
    with pytest.raises(ValueError, match=r"--cuda-graph-max-bs-decode=8 .* 4 sequences with 1 tokens each"):
        backend.init_cuda_graph_state(8, 8)
    prompt = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    with pytest.raises(NotImplementedError, match="no graph of forward mode EXTEND"):
        backend.init_forward_metadata_out_graph(prompt)


def test_flashinfer_attends_in_steps_where_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the pool's plan to the steps of the backend; everything else keeps Triton's ops, which take any shape."""
    module = stand_in(monkeypatch)
    monkeypatch.setattr(flashinfer, "unsupported", lambda _: None)  # in float32 and 16 wide, as the rank computes
    coordinator.stop()
    rank = Rank(CONFIG, rows=BATCH, on_device=True, flashinfer=True)
    driver = DeviceDriver(rank)
    assert isinstance(rank.tier, DeviceTier)
    assert isinstance(rank.tier.decoder.ops, FlashInferOps)
    assert type(rank.tier.ops) is TritonOps
    first, second = driver.admit(20), driver.admit(90)
    driver.extend({first: 20, second: 60})
    check(driver, [second, first], *driver.decode([second, first]))
    for _ in range(2):
        queries, outputs = driver.replay([second, first], BATCH)
        for index in (second, first):
            driver.lengths[index] += 1
        check(driver, [second, first], queries, outputs)
    assert [plan["batch"] for plan in module.plans] == [2 * 2, BATCH * 2]  # sequences times KV heads
    rank.tier.check_integrity()
    coordinator.stop()
