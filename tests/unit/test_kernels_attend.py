"""The attention kernel against float64: shapes, dtypes, empty rows, poisoned memory, far rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from oasis_sglang.attention.ops import TableLayout
from oasis_sglang.kernels import attend as module
from oasis_sglang.kernels.attend import attend, splits_of, workspace_size
from oasis_sglang.kernels.ops import TritonOps
from tests.unit import oracle
from tests.unit.far import FarPool
from tests.unit.test_ops import Case

pytestmark = pytest.mark.interpreter

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}
FP8 = torch.float8_e4m3fn


def run(case: Case, **more: Any) -> torch.Tensor:
    return attend(case.q, case.k, case.v, case.table, case.tokens, case.page, case.scale, **more)


def check(case: Case, got: torch.Tensor, want: torch.Tensor | None = None) -> None:
    """The largest error is small against the largest value, and there is no NaN."""
    want = case.expected() if want is None else want
    assert not bool(got.isnan().any())
    error = (got.double() - want).abs().amax() / want.abs().amax().clamp_min(1e-30)
    assert float(error) < BOUNDS[case.q.dtype]
    empty = case.tokens == 0
    assert not bool(got[empty].any())


def drawn(seed: int) -> Case:
    """A case of the grid. Every head dim, page size, group and number of query tokens comes up."""
    draw = random.Random(seed)
    t, page = 1 + seed % 8, (16, 32, 64)[seed % 3]
    lengths = [draw.choice([0, t, draw.randint(t, 3 * page), draw.randint(t, 5 * page)]) for _ in range(2)]
    return Case(
        [*lengths, draw.randint(t, 4 * page)],
        heads=draw.randint(1, 2),
        group=1 + (seed * 3) % 8,
        dim=(64, 80, 96, 128, 256)[seed % 5],
        page=page,
        queries=t,
        dtype=(torch.float32, torch.bfloat16, torch.float16)[draw.randrange(3)],
        columns=draw.choice([5, 9]),
        duplicates=draw.random() < 0.5,
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(120))
def test_attention_equals_float64(seed: int) -> None:
    """Pages in any order and repeated, rows that are empty, NaN in all lanes and pages that hold no token."""
    case = drawn(seed)
    check(case, run(case))


@pytest.mark.parametrize(("dtype", "queries"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_parts_are_joined(dtype: torch.dtype, queries: int) -> None:
    """Sequences long enough to be cut, one that fills a single part, and an empty one; with all of the room given."""
    case = Case([1030, 0, 20], queries=queries, dim=64, group=2, heads=1, dtype=dtype, columns=129, duplicates=True)
    n, t, query_heads, dim = case.q.shape
    assert splits_of(n, 1, 129, 16, case.q.device) > 1
    size = workspace_size(n, t, query_heads, 1, dim, 129, 16, case.q.device)
    work = torch.full((size + 3,), torch.nan)
    lse = torch.full((n, t, query_heads), torch.nan)
    out = torch.full_like(case.q, torch.nan)
    assert run(case, out=out, lse=lse, work=work) is out
    check(case, out)
    for i, total in enumerate(case.tokens.tolist()):
        for j in range(t):
            for head in range(query_heads):
                if total == 0:
                    assert lse[i, j, head] == -torch.inf
                    continue
                keys = case.k[case.table[i, head // 2]].reshape(-1, dim)[: total - (t - 1 - j)].double()
                want = torch.logsumexp(keys @ case.q[i, j, head].double() * case.scale, 0)
                assert abs(float(lse[i, j, head]) - float(want)) < BOUNDS[dtype] * 10


@pytest.mark.parametrize("columns", [5, 64])
@pytest.mark.parametrize(("dtype", "group"), [(torch.float32, 5), (torch.bfloat16, 9)])
def test_more_query_rows_than_a_program_takes(dtype: torch.dtype, group: int, columns: int) -> None:
    """Of float32 a program takes 32, of other dtypes 64, and the last one is not full; sequences whole and cut."""
    case = Case([60, 0, 9], queries=8, group=group, dim=64, heads=1 if columns > 5 else 2, dtype=dtype, columns=columns)
    assert (splits_of(3, case.table.shape[1], columns, case.page, case.q.device) > 1) == (columns > 5)
    check(case, run(case))


@pytest.mark.parametrize("converts", [True, False])
def test_eight_bit_pools(converts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """float8_e4m3fn with scales, converted by the device or, where it cannot, bit by bit; denormal values too."""
    monkeypatch.setattr(module, "converts_fp8", lambda device: converts)
    case = Case([70, 0, 40], queries=2, group=3, dim=96, page=32, columns=3)
    small = torch.rand(case.k.shape, generator=torch.Generator().manual_seed(1)) < 0.2
    case.k, case.v = (torch.where(small, x * 1e-3, x).to(FP8) for x in (case.k, case.v))
    case.q = case.q.half()
    got = run(case, k_scale=0.5, v_scale=2.0)
    case.k, case.v = case.k.float() * 0.5, case.v.float() * 2
    check(case, got)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_what_no_token_is_in_changes_no_bit(poison: float) -> None:
    """Contract 7: lanes past a sequence's tokens, pages that the table does not name, and columns past its pages."""
    case = Case([21, 33, 0], queries=2, columns=4)
    clean = run(case)
    for x in (case.k, case.v):
        x[x.isnan()] = poison
    for i, total in enumerate(case.tokens.tolist()):
        case.table[i, :, -(-total // case.page) :] = -(1 << 40)
    assert torch.equal(run(case), clean)


def test_very_negative_logits_are_not_taken_as_empty() -> None:
    case = Case([40], dim=16)
    case.q[:] = 1000.0
    valid = ~case.k.isnan()
    case.k[valid] = case.k[valid] * 1e-3 - 22.0
    out = run(case)
    assert bool(out.any())
    torch.testing.assert_close(out.double(), case.expected(), rtol=2e-2, atol=2e-2)


def test_queries_that_are_a_view_and_strided_rows() -> None:
    """Queries come out of a fused projection; rows of a host pool hold K and V in turn."""
    case = Case([21, 33], queries=2, group=2)
    fused = torch.randn(2, 2, 8, 8)
    fused[:, :, 2:6] = case.q
    pool = torch.stack((case.k, case.v), dim=1)
    got = attend(fused[:, :, 2:6], pool[:, 0], pool[:, 1], case.table, case.tokens, 16, case.scale)
    assert torch.equal(got, run(case))


def test_rows_beyond_two_gib_elements() -> None:
    """C37: `row * page_size * head_dim` beyond 2^31 must not wrap."""
    case = Case([40, 16], dim=64, dtype=torch.bfloat16)
    rows, width = case.k.shape
    first = (1 << 32) // width + 1
    pool = FarPool(first + rows, width, torch.bfloat16)
    pool.at(first, rows)[:] = case.k
    got = attend(case.q, pool.at(0), pool.at(0), case.table + first, case.tokens, 16, case.scale)
    case.v = case.k
    assert torch.equal(got, run(case))


def test_ops_answer_as_torch_does() -> None:
    """The protocol's calls reach the kernels, and prefill, with and without a prefix, equals float64."""
    ops, case = TritonOps(), Case([21, 33], queries=2)
    layout = TableLayout(case.tokens, case.columns, 16, 2, torch.float32)
    assert torch.equal(ops.attend(case.q, case.k, case.v, case.table, layout, case.scale), run(case))
    q, k, v = torch.randn(5, 4, 16), torch.randn(2, 12, 16), torch.randn(2, 12, 16)
    for prefix in (0, 7):
        keys, values = k[:, : prefix + 5], v[:, : prefix + 5]
        got = ops.prefill(q, keys, values, prefix, 0.25)
        for j in range(5):
            seen = prefix + j + 1
            want = oracle.attention(q[j].double(), keys[:, :seen].double(), values[:, :seen].double(), 0.25)
            torch.testing.assert_close(got[j].double(), want, rtol=1e-5, atol=1e-5)


def test_what_does_not_go_together_is_refused() -> None:
    case = Case([21], dim=16)
    with pytest.raises(ValueError, match="9 query tokens per sequence; 1 to 8 work"):
        attend(case.q.expand(1, 9, 4, 16), case.k, case.v, case.table, case.tokens, 16, 1.0)
    with pytest.raises(ValueError, match=r"must both be torch\.float16"):
        attend(case.q.half(), case.k, case.v, case.table, case.tokens, 16, 1.0)
    with pytest.raises(ValueError, match="q has stride 4 in its last dimension; it must be 1"):
        attend(case.q.mT.contiguous().mT, case.k, case.v, case.table, case.tokens, 16, 1.0)
