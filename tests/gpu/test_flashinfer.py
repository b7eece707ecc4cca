"""FlashInfer's kernels themselves, as `FlashInferOps` plans them, against float64 and from graphs."""

from __future__ import annotations

import random

import pytest
import torch

from oasis_sglang.attention.ops import TableLayout
from oasis_sglang.kernels.attention_shape import AttentionShape
from oasis_sglang.kernels.choose import choose_ops, graph_seconds
from oasis_sglang.kernels.flashinfer import FlashInferOps
from oasis_sglang.kernels.ops import TritonOps
from tests.unit.test_ops import BF16, Case

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# One head dim: each is compiled for about a minute when its kernels are met for the first time.
DIM = 128


def drawn(seed: int) -> Case:
    """Lengths of which most leave planned parts empty, NaN in all that holds no token, one empty sequence."""
    draw = random.Random(seed)
    t, page = 1 + seed % 8, (16, 32, 64)[seed % 3]
    lengths = [0, *(draw.choice([t, draw.randint(t, 5 * page), 60 * page]) for _ in range(1 + seed % 6))]
    case = Case(
        lengths,
        heads=draw.randint(1, 8),
        group=1 + (seed * 3) % 8,
        dim=DIM,
        page=page,
        queries=t,
        columns=draw.choice([60, 160]),
        dtype=torch.bfloat16,
        seed=seed,
    )
    case.q[0] = torch.nan  # what padding computes with may be anything
    return case


def attend(ops: FlashInferOps, case: Case) -> torch.Tensor:
    layout = TableLayout(case.tokens.to(CUDA), case.columns, case.page, case.queries, case.q.dtype)
    q, k, v, table = (x.to(CUDA) for x in (case.q, case.k, case.v, case.table))
    return ops.attend(q, k, v, table, layout, case.scale)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(48))
def test_attention_equals_float64(seed: int) -> None:
    case = drawn(seed)
    out = attend(FlashInferOps(case.shape(), CUDA), case).cpu()
    torch.testing.assert_close(out.double(), case.expected(), **BF16)
    assert not bool(out[0].any())


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 4])
def test_a_graph_follows_lengths_and_tables(queries: int) -> None:
    """Captured with one step, replayed with others: all that is planned on the host is the same for them."""
    cases = [
        Case(x, heads=4, group=4, dim=DIM, queries=queries, columns=130, dtype=torch.bfloat16, seed=1)
        for x in ([2000, 0, 700], [queries, 2080, 33], [0, 2080, 2080])
    ]
    ops = FlashInferOps(cases[0].shape(), CUDA)
    rows = max(x.k.shape[0] for x in cases)
    pools = [torch.zeros(rows, cases[0].k.shape[1], dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    tokens, table, q = cases[0].tokens.to(CUDA), cases[0].table.to(CUDA), cases[0].q.to(CUDA)
    layout = TableLayout(tokens, 130, 16, queries, torch.bfloat16)

    def run() -> torch.Tensor:
        return ops.attend(q, *pools, table, layout, cases[0].scale)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for case in cases:
        for pool, x in zip(pools, (case.k, case.v), strict=True):
            pool[: x.shape[0]].copy_(x)
        tokens.copy_(case.tokens)
        table.copy_(case.table)
        q.copy_(case.q)
        graph.replay()
        torch.testing.assert_close(out.cpu().double(), case.expected(), **BF16)


@pytest.mark.slow
def test_a_shape_that_was_never_planned_is_not_captured() -> None:
    case = Case([40], dim=DIM, dtype=torch.bfloat16)
    ops = FlashInferOps(case.shape(), CUDA)
    with pytest.raises(RuntimeError, match="which were never planned"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ops.plan(1, 1)


@pytest.mark.slow
def test_the_choice_is_made() -> None:
    shape = AttentionShape(
        query_heads=32, kv_heads=8, head_dim=DIM, page_size=16, columns=130, tokens=2064, batch=16, queries=1,
        dtype=torch.bfloat16, kv_dtype=torch.bfloat16,
    )  # fmt: skip
    choice = choose_ops(TritonOps(), shape, CUDA)
    assert "a layer takes" in choice.reason
    assert graph_seconds(lambda: torch.zeros(1 << 20, device=CUDA)) > 0
