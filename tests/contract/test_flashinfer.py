"""The installed FlashInfer's wrapper, planned and run through its own Python, with its kernel restated in torch."""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from oasis_sglang.kernels.attention_shape import AttentionShape
from oasis_sglang.kernels.flashinfer import FlashInferOps, blocks
from tests.unit.flashinfer_model import MULTIPROCESSORS, Module, stand_in
from tests.unit.test_ops import BF16, Case

decode = pytest.importorskip("flashinfer.decode")

CPU = torch.device("cpu")
WRAPPER = decode.BatchDecodeWithPagedKVCacheWrapper


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    return stand_in(monkeypatch)


def case_of(tokens: list[int], **more: Any) -> Case:
    return Case(tokens, **{"dim": 64, "dtype": torch.bfloat16, **more})


def drawn(seed: int) -> Case:
    """Every page size, group and number of query tokens comes up; tables are wider than what they hold."""
    draw = random.Random(seed)
    t, page = 1 + seed % 8, (16, 32, 64)[seed % 3]
    lengths = [draw.choice([0, t, page + 1 + t // 2, draw.randint(t, 5 * page), 11 * page]) for _ in range(3)]
    case = case_of(
        lengths,
        heads=draw.randint(1, 2),
        group=1 + (seed * 3) % 8,
        page=page,
        queries=t,
        columns=draw.choice([11, 40]),
        dtype=(torch.bfloat16, torch.float16)[draw.randrange(2)],
        duplicates=draw.random() < 0.5,
        seed=seed,
    )
    case.q[case.tokens == 0] = torch.nan  # what padding computes with may be anything
    return case


@pytest.mark.parametrize("seed", range(48))
def test_attention_equals_float64(module: Module, seed: int) -> None:
    """Through plans of full tables, and kernels that read shorter lengths: parts that lie past the end, lanes and pages
    that hold NaN, empty sequences, chains that cross into the next page."""
    case = drawn(seed)
    ops = FlashInferOps(case.shape(), CPU)
    out = case.attend(ops)
    torch.testing.assert_close(out.double(), case.expected(), **BF16)
    assert not bool(out[case.tokens == 0].any())
    (planned,) = module.plans
    assert planned["no_split"] == (case.queries > 1)
    assert planned["kv_lens"].tolist() == [case.columns * case.page] * (3 * case.heads)


def test_few_sequences_are_cut_and_many_are_not(module: Module) -> None:
    assert blocks(CPU) == 2 * MULTIPROCESSORS
    few, many = case_of([700], columns=64, group=4), case_of([16] * 132, columns=1)
    for case, cut in ((few, True), (many, False)):
        torch.testing.assert_close(case.attend(FlashInferOps(case.shape(), CPU)).double(), case.expected(), **BF16)
        assert module.plans[-1]["no_split"] is not cut


@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("queries", [1, 2, 8])
def test_plans_fit_their_memory(module: Module, group: int, dim: int, queries: int) -> None:
    """Batches that are cut into many parts, just still cut, and not cut; the stand-in measures what a plan takes."""
    shape = AttentionShape(
        query_heads=8 * group, kv_heads=8, head_dim=dim, page_size=16, columns=161, tokens=2064, batch=256,
        queries=queries, dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
    )  # fmt: skip
    ops = FlashInferOps(shape, CPU)
    for batch in (1, 7, 32, 33, 256):
        ops.plan(batch, queries)
    assert [x["batch"] for x in module.plans] == [8, 56, 256, 264, 2048]
    assert [x["no_split"] for x in module.plans] == [queries > 1] * 3 + [True] * 2


def test_planned_once_for_every_layer_and_step(module: Module) -> None:
    """Steps of other lengths and layers of other tables change nothing that the host has planned, and no address."""
    cases = [case_of([21, 0, 33], columns=5, seed=1), case_of([3, 70, 1], columns=5, seed=2)]
    ops = FlashInferOps(cases[0].shape(), CPU)
    wrapper = ops.plan(3, 1)
    held = [
        wrapper._paged_kv_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._paged_kv_last_page_len_buf,
        wrapper._qo_indptr_buf, wrapper._int_workspace_buffer, wrapper._float_workspace_buffer,
    ]  # fmt: skip
    before = [x.data_ptr() for x in held]
    for case in (*cases, cases[0]):
        layout = case.layout()
        for _ in range(2):  # layers: of one step, with pools of their own
            k, v = case.k.clone(), case.v.clone()
            out = ops.attend(case.q, k, v, case.table, layout, case.scale)
            torch.testing.assert_close(out.double(), case.expected(), **BF16)
    assert len(module.plans) == 1
    assert ops.plan(3, 1) is wrapper
    assert before == [x.data_ptr() for x in held]
    assert [x.data_ptr() for x in ops.lists.part(3)] == before[:3]


def test_a_second_pass_of_the_same_step_measures_again(module: Module) -> None:
    """What a graph is captured of has run before: the captured pass must hold the measuring too."""
    case = case_of([21, 40], columns=5)
    ops, layout = FlashInferOps(case.shape(), CPU), case.layout()
    pools = [(case.k.clone(), case.v.clone()) for _ in range(2)]
    measured = []
    measure = ops.lists.measure
    ops.lists.measure = lambda *args: (measured.append(len(measured)), measure(*args))[1]  # type: ignore[method-assign]
    for _ in range(3):
        for k, v in pools:
            ops.attend(case.q, k, v, case.table, layout, case.scale)
    assert len(measured) == 3


def test_a_smaller_step_and_another_number_of_query_tokens(module: Module) -> None:
    big = case_of([20, 5, 64], queries=4, columns=6, group=3)
    ops = FlashInferOps(big.shape(), CPU)
    for case in (big, case_of([33, 64], columns=4, group=3), case_of([9], queries=2, columns=6, group=3), big):
        torch.testing.assert_close(case.attend(ops).double(), case.expected(), **BF16)
    assert [x["uniform"] for x in module.plans] == [4, 0, 2]


def test_queries_that_are_a_view_and_pools_of_strided_rows(module: Module) -> None:
    case = case_of([21, 33], queries=2, group=2)
    fused = torch.randn(2, 2, 8, 64).to(torch.bfloat16)
    fused[:, :, 2:6] = case.q
    pool = torch.stack((case.k, case.v), dim=1)
    ops = FlashInferOps(case.shape(), CPU)
    out = ops.attend(fused[:, :, 2:6], pool[:, 0], pool[:, 1], case.table, case.layout(), case.scale)
    torch.testing.assert_close(out.double(), case.expected(), **BF16)


def test_steps_of_another_shape_are_refused(module: Module) -> None:
    case = case_of([21, 33], queries=2)
    ops = FlashInferOps(case.shape(batch=1), CPU)
    with pytest.raises(ValueError, match="a step of 2 sequences; page lists have memory for 1 to 1"):
        case.attend(ops)
    ops = FlashInferOps(case.shape(queries=1), CPU)
    with pytest.raises(ValueError, match="2 query tokens per sequence; this was made for 1 to 1"):
        case.attend(ops)
    ops = FlashInferOps(case.shape(columns=2), CPU)
    with pytest.raises(ValueError, match="a page table of 3 columns; page lists have memory for 1 to 2"):
        case.attend(ops)
    ops = FlashInferOps(case.shape(head_dim=128), CPU)
    with pytest.raises(ValueError, match="2 KV heads of 64 and pages of 16; this was made for 4, 2 of 128 and 16"):
        case.attend(ops)
    ops = FlashInferOps(case.shape(dtype=torch.float16, kv_dtype=torch.float16), CPU)
    with pytest.raises(ValueError, match="dtype"):
        case.attend(ops)


def test_the_wrapper_has_what_is_used() -> None:
    """Names and defaults that calls rely on."""
    made = inspect.signature(WRAPPER.__init__).parameters
    assert list(made)[1:3] == ["float_workspace_buffer", "kv_layout"]
    assert {
        "use_cuda_graph", "use_tensor_cores", "paged_kv_indptr_buffer", "paged_kv_indices_buffer",
        "paged_kv_last_page_len_buffer", "backend",
    } <= set(made)  # fmt: skip
    reset = inspect.signature(WRAPPER.reset_workspace_buffer).parameters
    assert list(reset)[1:] == ["float_workspace_buffer", "int_workspace_buffer"]
    planned = inspect.signature(WRAPPER.plan).parameters
    assert list(planned)[1:8] == [
        "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim", "page_size",
    ]  # fmt: skip
    known = inspect.signature(WRAPPER._plan_impl).parameters
    assert {"q_data_type", "kv_data_type", "sm_scale", "disable_split_kv", "q_len_per_req"} <= set(known)
    assert known["window_left"].default == -1
    assert known["pos_encoding_mode"].default == "NONE"
    run = inspect.signature(inspect.unwrap(WRAPPER.run)).parameters
    assert list(run)[1:3] == ["q", "paged_kv_cache"]
    assert run["q_scale"].default is None


@pytest.mark.parametrize(
    ("header", "rule"),
    [
        # Parts of a request are cut off where it ends.
        ("prefill", "min(kv_tile_idx * max_chunk_size + kv_start_idx, kv_len)"),
        ("prefill", "min((kv_tile_idx + 1) * max_chunk_size + kv_start_idx, kv_len)"),
        # Nothing is read past the last page list.
        ("prefill", "paged_kv.protective_get_k_offset("),
        # Where a partial result goes; for the only query token of a request that does not depend on its length.
        ("prefill", "lse[(o_indptr[request_idx] + qo_idx * num_kv_chunks + kv_tile_idx) *"),
        # A request without pages has no length.
        ("../page", "if (indptr[batch_idx + 1] == indptr[batch_idx]) { return 0; }"),
        # A part that saw nothing has no weight, and what saw nothing at all is zero.
        ("state", "float d_rcp = (d > 0.f) ? __fdividef(1.f, d) : 0.f;"),
        ("state", "math::ptx_exp2(max(other_m - m, -math::inf))"),
        ("variant_helper", "(m != -math::inf) ? math::ptx_rcp(d) : 0.f"),
    ],
)
def test_the_kernel_keeps_the_rules_that_plans_of_full_tables_rely_on(header: str, rule: str) -> None:
    """If this fails after an upgrade, read BatchPrefillWithPagedKVCacheDevice and the plan in scheduler.cuh again, and
    restate them in `flashinfer_model.py`."""
    folder = Path(decode.__file__).parent / "data/include/flashinfer/attention"
    text = " ".join((folder / f"{header}.cuh").read_text().split())
    assert rule in text
