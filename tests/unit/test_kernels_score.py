"""Scoring kernels against the torch ops, which are themselves held against float64."""

from __future__ import annotations

import random

import pytest
import torch

from oasis_sglang.attention.torch_ops import TorchOps
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.kernels.score import _Scoring, score_minmax, score_sketches, splits_of, workspace_size
from oasis_sglang.memory_pool.host_pool import HostPool
from oasis_sglang.memory_pool.sizing import PoolGeometry
from oasis_sglang.memory_pool.sketch import KeySketches, every_dim, slow_half
from oasis_sglang.memory_pool.summaries import KeySummaries
from tests.unit.far import FarPool

pytestmark = pytest.mark.interpreter


class Case:
    """Summaries of random pages in a table that is otherwise poisoned, and queries of sequences that name them."""

    def __init__(self, seed: int, *, dtype: torch.dtype | None = None, columns: int = 40) -> None:
        draw = random.Random(seed)
        self.page = (16, 32, 64, 8)[seed % 4]
        dim = (64, 80, 128, 96, 256)[seed % 5]
        self.heads, group, t, n = draw.randint(1, 2), 1 + seed % 8, 1 + (seed * 3) % 8, 2
        dtype = dtype or (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        kept = every_dim(dim) if seed % 2 else slow_half(dim)
        g = PoolGeometry(
            layers=1, kv_heads=self.heads, head_dim=dim, itemsize=dtype.itemsize, page_size=self.page, sketch=kept
        )
        host = HostPool(30, g, dtype)
        noise = torch.Generator().manual_seed(seed)
        keys = torch.randn(30, self.heads, self.page, dim, generator=noise).to(dtype)
        self.sketches, self.bounds = KeySketches(host), KeySummaries(host)
        for summaries, poison in ((self.sketches, 255), (self.bounds, torch.nan)):
            summaries.table.fill_(poison)
            summaries.rebuild(0, torch.arange(1, 28), keys[:27], self.page)
        self.counts = torch.tensor([draw.choice([1, columns, draw.randint(1, columns)]) for _ in range(n)])
        # pages that do not count are poisoned, or no pages at all
        self.pages = torch.randint(1, 28, (n, columns), generator=noise)
        beyond = torch.arange(columns) >= self.counts.view(-1, 1)
        self.safe = self.pages.masked_fill(beyond, 29)
        self.pages = self.pages.masked_fill(beyond, -(1 << 40))
        self.q = torch.randn(n, t, self.heads * group, dim, generator=noise).to(dtype)
        self.scale = dim**-0.5

    def expected(self, kind: str) -> torch.Tensor:
        summaries = self.sketches if kind == "sketch" else self.bounds
        rows = summaries.row_ids(self.safe).transpose(1, 2)
        each = [summaries.score(TorchOps(), 0, x, rows, self.counts, self.scale) for x in self.q.unbind(1)]
        return torch.stack(each).amax(0)

    def got(self, kind: str, **more: torch.Tensor) -> torch.Tensor:
        if kind == "sketch":
            table, dims = self.sketches.table[0], self.sketches.dims
            return score_sketches(
                self.q, dims, table, self.pages, self.counts, self.heads, self.page, self.scale, **more
            )
        return score_minmax(self.q, self.bounds.table[0], self.pages, self.counts, self.heads, self.scale, **more)


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    counts = want > -torch.inf
    torch.testing.assert_close(got[counts], want[counts], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("kind", ["sketch", "minmax"])
@pytest.mark.parametrize("seed", range(8))
def test_scores_are_those_of_torch(seed: int, kind: str) -> None:
    """Any group, number of query tokens and dtype; the largest over tokens of the mean over the group."""
    case = Case(seed)
    check(case.got(kind), case.expected(kind))


@pytest.mark.parametrize("kind", ["sketch", "minmax"])
def test_parts_are_joined(kind: str) -> None:
    """Sequences cut into parts, of which the last are empty for the short one, in a workspace that was used before."""
    case = Case(0, columns=150)
    case.counts[1] = 3
    case.pages, case.safe = (x.masked_fill(torch.arange(150) >= case.counts.view(-1, 1), y) for x, y in (
        (case.pages, -(1 << 40)), (case.safe, 29)
    ))  # fmt: skip
    n, t, query_heads, _ = case.q.shape
    assert splits_of(n, case.heads, 150, case.q.device) > 1
    work = torch.full((workspace_size(n, t, query_heads, case.heads, 150, case.q.device),), torch.nan)
    out = torch.full((n, case.heads, 150), torch.nan)
    assert case.got(kind, out=out, work=work) is out
    check(out, case.expected(kind))


@pytest.mark.parametrize("seed", [0, 3])
def test_sketches_give_the_logits_of_torch_to_the_bit(seed: int) -> None:
    """Products are exact integers and their factors come in one order, so every implementation chooses the same."""
    case = Case(seed, dtype=torch.bfloat16)
    n, t, query_heads, _ = case.q.shape
    size = workspace_size(n, t, query_heads, case.heads, 40, case.q.device)
    work = torch.zeros(size)
    case.got("sketch", work=work)
    logits = _Scoring(case.q, case.pages, case.heads, None, work).parts[0].view(n, case.heads, t, -1, 40)
    rows = case.sketches.row_ids(case.safe).transpose(1, 2)
    seen: list[torch.Tensor] = []
    for i in range(t):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("oasis_sglang.attention.torch_ops._share", lambda score, pages: seen.append(score.clone()))
            case.sketches.score(TorchOps(), 0, case.q[:, i], rows, case.counts, case.scale)
    want = torch.stack(seen, 2)
    counts = (torch.arange(40) < case.counts.view(-1, 1)).view(n, 1, 1, 1, 40).expand_as(want)
    assert torch.equal(logits[counts], want[counts])


@pytest.mark.parametrize("kind", ["sketch", "minmax"])
def test_a_query_that_is_not_a_number_spoils_its_own_sequence_only(kind: str) -> None:
    case = Case(4, dtype=torch.float32)
    clean = case.got(kind)
    case.q[0] = torch.nan
    got = case.got(kind)
    assert torch.equal(got[1], clean[1])
    assert not bool(got.isnan().any())
    case.q[0] = 0  # all pages are as good then
    check(case.got(kind), case.expected(kind))


def test_the_protocol_takes_rows() -> None:
    """`AttentionOps` names rows of the table instead of host pages, in any order."""
    case = Case(2, dtype=torch.float32)
    q = case.q[:, 0]
    for summaries in (case.sketches, case.bounds):
        rows = summaries.row_ids(case.safe).transpose(1, 2).flip(1)
        got = summaries.score(TritonOps(), 0, q, rows, case.counts, case.scale)
        check(got, summaries.score(TorchOps(), 0, q, rows, case.counts, case.scale))


def test_tables_beyond_two_gib() -> None:
    """C37: the tables of a large host pool are larger than 2^31 bytes, and 2^31 elements."""
    case = Case(0, dtype=torch.bfloat16)
    for kind in ("sketch", "minmax"):
        want = case.got(kind)
        near = case.sketches.table[0] if kind == "sketch" else case.bounds.table[0]
        first = (1 << 32) // near.shape[1] // case.heads + 1
        pool = FarPool((first + 31) * case.heads, near.shape[1], near.dtype)
        pool.at(first * case.heads, near.shape[0])[:] = near
        pages = case.safe + first
        if kind == "sketch":
            got = score_sketches(
                case.q, case.sketches.dims, pool.at(0), pages, case.counts, case.heads, case.page, case.scale
            )
        else:
            got = score_minmax(case.q, pool.at(0), pages, case.counts, case.heads, case.scale)
        assert torch.equal(got, want)


def test_other_dtypes_are_refused() -> None:
    case = Case(0, dtype=torch.float32)
    case.q = case.q.half()
    with pytest.raises(ValueError, match=r"summaries of torch.float32 do not go with queries of torch.float16"):
        case.got("minmax")
