"""The ops of a CPU host, in plain torch and with compiled copies, against float64 (C22-C24, C37, contract 7)."""

from __future__ import annotations

import mmap
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.attention.native_ops import create_cpu_ops
from oasis_sglang.attention.ops import AttentionOps, TableLayout
from oasis_sglang.attention.torch_ops import TorchOps
from oasis_sglang.kernels.attention_shape import AttentionShape
from tests.unit import oracle

# the second is the first again where there is no compiler
IMPLEMENTATIONS: list[AttentionOps] = [TorchOps(), create_cpu_ops()]
each_ops = pytest.mark.parametrize("ops", IMPLEMENTATIONS, ids=["torch", "cpu"])
# bf16 keeps 8 bits of mantissa: outputs are means of values of order 1
BF16 = {"rtol": 2e-2, "atol": 2e-2}
FP32 = {"rtol": 1e-5, "atol": 1e-5}


class Case:
    """Sequences with page tables over a poisoned pool. Row 0 to `heads` is the reserved page, which is zero."""

    def __init__(
        self,
        tokens: list[int],
        *,
        heads: int = 2,
        group: int = 2,
        dim: int = 8,
        page: int = 16,
        queries: int = 1,
        dtype: torch.dtype = torch.float32,
        columns: int | None = None,
        duplicates: bool = False,
        seed: int = 0,
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        self.page, self.dim, self.heads, self.queries = page, dim, heads, queries
        counts = [-(-n // page) for n in tokens]
        self.columns = columns or max(*counts, 1)
        pages = 1 + sum(counts) * heads + 3
        shape = (pages * heads, page * dim)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
        self.k[:heads] = self.v[:heads] = 0
        self.table = torch.zeros(len(tokens), heads, self.columns, dtype=torch.int64)
        order = (torch.randperm(pages - 1, generator=random) + 1).tolist()
        for i, count in enumerate(counts):
            for head in range(heads):
                for column in range(count):
                    # a full page may be named twice: two sequences that share a prefix, or one page wanted twice
                    full = column < tokens[i] // page
                    if duplicates and full and column and int(torch.randint(3, (1,), generator=random)) == 0:
                        self.table[i, head, column] = self.table[i, head, column - 1]
                        continue
                    row = order.pop() * heads + head
                    self.table[i, head, column] = row
                    valid = min(tokens[i] - column * page, page) * dim
                    for x in (self.k, self.v):
                        x[row, :valid] = torch.randn(valid, generator=random).to(dtype)
        self.q = torch.randn(len(tokens), queries, heads * group, dim, generator=random).to(dtype)
        self.tokens = torch.tensor(tokens)
        self.scale = dim**-0.5

    def layout(self) -> TableLayout:
        return TableLayout(self.tokens, self.columns, self.page, self.queries, self.q.dtype)

    def shape(self, **more: Any) -> AttentionShape:
        """Of a step that is no larger than this."""
        n, t, query_heads, dim = self.q.shape
        return AttentionShape(
            query_heads=query_heads,
            kv_heads=self.heads,
            head_dim=dim,
            page_size=self.page,
            columns=self.columns,
            tokens=self.columns * self.page,
            batch=n,
            queries=t,
            dtype=self.q.dtype,
            kv_dtype=self.k.dtype,
        )._replace(**more)

    def attend(self, ops: AttentionOps) -> torch.Tensor:
        return ops.attend(self.q, self.k, self.v, self.table, self.layout(), self.scale)

    def expected(self) -> torch.Tensor:
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        for i, total in enumerate(self.tokens.tolist()):
            for j in range(self.queries if total else 0):
                seen = total - (self.queries - 1 - j)
                k, v = (
                    torch.stack([x[self.table[i, h]].reshape(-1, self.dim)[:seen] for h in range(self.heads)]).double()
                    for x in (self.k, self.v)
                )
                out[i, j] = oracle.attention(self.q[i, j].double(), k, v, self.scale)
        return out


@each_ops
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_attend_equals_float64(ops: AttentionOps, data: st.DataObject) -> None:
    """Contract 7, C22, C23: any lengths, empty ones too, pages in any order and repeated, NaN everywhere else."""
    queries = data.draw(st.integers(1, 5), "query tokens")
    page = data.draw(st.sampled_from([16, 32, 64]), "page")
    length = st.just(0) | st.integers(queries, 5 * page)
    tokens = data.draw(st.lists(length, min_size=1, max_size=4), "tokens")
    bf16 = data.draw(st.booleans(), "bf16")
    case = Case(
        tokens,
        heads=data.draw(st.integers(1, 3), "heads"),
        group=data.draw(st.integers(1, 8), "group"),
        dim=data.draw(st.sampled_from([8, 64, 96]), "dim"),
        page=page,
        queries=queries,
        dtype=torch.bfloat16 if bf16 else torch.float32,
        columns=data.draw(st.sampled_from([5, 9]), "columns"),
        duplicates=data.draw(st.booleans(), "duplicates"),
        seed=data.draw(st.integers(0, 999), "seed"),
    )
    torch.testing.assert_close(case.attend(ops).double(), case.expected(), **(BF16 if bf16 else FP32))


@each_ops
def test_empty_sequences_are_zero(ops: AttentionOps) -> None:
    """C22: padded rows of a batch give zeros, not NaN and not the mean of a page that belongs to nobody."""
    case = Case([0, 5, 0])
    out = case.attend(ops)
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    torch.testing.assert_close(out[1].double(), case.expected()[1], **FP32)
    alone = Case([0], queries=3).attend(ops)
    assert torch.equal(alone, torch.zeros_like(alone))


@each_ops
def test_an_empty_sequence_that_names_a_poisoned_page(ops: AttentionOps) -> None:
    """C22, C23: even a padded row whose table is stale must not spread NaN."""
    case = Case([0, 20])
    case.table[0, :, 0] = case.k.shape[0] - 1
    case.k[-1] = case.v[-1] = torch.nan
    out = case.attend(ops)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert bool(torch.isfinite(out).all())


@each_ops
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_lanes_past_the_end_are_selected_out(ops: AttentionOps, poison: float) -> None:
    """C23, contract 7: adding -inf to a score does not remove NaN, and 0 * inf in V is NaN: lanes must be emptied."""
    case = Case([21, 33], queries=2)
    clean = case.attend(ops)
    case.k = torch.where(case.k.isnan(), poison, case.k)
    case.v = torch.where(case.v.isnan(), poison, case.v)
    assert torch.equal(case.attend(ops), clean)


@each_ops
def test_the_gather_buffer_of_a_larger_step_leaves_no_trace(ops: AttentionOps) -> None:
    """Contract 7: buffers are kept between calls; a small step after a large one must not see its tokens."""
    small = Case([18], seed=3)
    fresh = small.attend(TorchOps() if type(ops) is TorchOps else create_cpu_ops())
    Case([150, 160, 40], seed=4).attend(ops)
    assert torch.equal(small.attend(ops), fresh)


def test_compiled_copies_change_no_bit() -> None:
    """Contract 1: a host with a compiler and one without give the same text."""
    for dtype in (torch.float32, torch.bfloat16):
        for queries in (1, 3):
            case = Case([5, 0, 130, 64], page=32, dim=64, group=3, queries=queries, dtype=dtype, seed=9)
            assert torch.equal(case.attend(IMPLEMENTATIONS[0]), case.attend(IMPLEMENTATIONS[1]))


@each_ops
def test_new_tokens_land_in_their_lanes(ops: AttentionOps) -> None:
    """A decode step writes one lane of one page per sequence and head, and no other byte of the pool."""
    random = torch.Generator().manual_seed(2)
    k_lanes, v_lanes = (torch.randn(12, 16, 8, generator=random) for _ in range(2))
    before = k_lanes.clone(), v_lanes.clone()
    rows = torch.tensor([[4, 5], [10, 11], [6, 7]])
    offsets = torch.tensor([0, 15, 7])
    # as a model's fused projection hands them over: a view of a wider tensor
    k, v = torch.randn(3, 2 * 2 * 8, generator=random).view(3, 4, 8).split(2, 1)
    ops.write_tokens(k_lanes, v_lanes, rows, offsets, k, v)
    for lanes, old, new in ((k_lanes, before[0], k), (v_lanes, before[1], v)):
        for i in range(3):
            for head in range(2):
                assert torch.equal(lanes[rows[i, head], offsets[i]], new[i, head])
                old[rows[i, head], offsets[i]] = new[i, head]
        assert torch.equal(lanes, old)


def test_more_tokens_than_columns_is_an_error() -> None:
    """A table that is too narrow would silently attend to a shortened sequence."""
    with pytest.raises(ValueError, match="33 tokens do not fit 2 columns of 16"):
        TableLayout(torch.tensor([33]), 2, 16, 1, torch.float32)


@each_ops
@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 511, 512, 513])
def test_a_zero_query_gives_the_mean_of_valid_values(ops: AttentionOps, tokens: int) -> None:
    """C24: lanes that leak into the softmax at a tile's edge shift the mean."""
    case = Case([tokens], page=16)
    case.q.zero_()
    mean = torch.stack([case.v[case.table[0, h]].reshape(-1, case.dim)[:tokens].double().mean(0) for h in range(2)])
    torch.testing.assert_close(case.attend(ops)[0, 0].double(), mean.repeat_interleave(2, 0), **FP32)


@each_ops
def test_very_negative_logits_are_not_taken_as_empty(ops: AttentionOps) -> None:
    """C24: scores of -6e4 for every token are as good as any others; only their differences count."""
    case = Case([40], dim=8)
    case.q[:] = 1000.0
    valid = ~case.k.isnan()
    case.k[valid] = case.k[valid] * 1e-3 - 22.0
    scores = case.k[case.table[0, 0]].reshape(-1, 8)[:40].sum(-1) * 1000 * case.scale
    assert float(scores.max()) < -5e4
    out = case.attend(ops)
    assert bool(out.any())
    torch.testing.assert_close(out.double(), case.expected(), rtol=2e-2, atol=2e-2)


@each_ops
def test_rows_beyond_two_gib_elements(ops: AttentionOps) -> None:
    """C37: `row * page_size * head_dim` beyond 2^31 must not wrap. The pool is a sparse file, so it costs no memory."""
    page, dim, heads = 16, 64, 2
    width = page * dim
    rows = (1 << 31) // width + 4096
    fd = os.memfd_create("sparse-pool")
    try:
        os.ftruncate(fd, rows * width * 2)
        pool = torch.frombuffer(mmap.mmap(fd, rows * width * 2), dtype=torch.bfloat16).view(rows, width)
    finally:
        os.close(fd)
    small = Case([40, 16], heads=heads, dim=dim, page=page, dtype=torch.bfloat16)
    # the same pages once more, at the far end of the huge pool
    far = small.table + (rows - small.k.shape[0]) // heads * heads
    used = small.table.unique()
    pool[used + int(far[0, 0, 0] - small.table[0, 0, 0])] = small.k[used].nan_to_num(0)
    assert int(far.min()) * width > 1 << 31
    out = ops.attend(small.q, pool, pool, far, small.layout(), small.scale)
    reference = ops.attend(small.q, small.k, small.k, small.table, small.layout(), small.scale)
    assert torch.equal(out, reference)
    summaries = pool.view(-1, 2 * dim)
    index = far * (width // (2 * dim))
    assert int(index.min()) * 2 * dim > 1 << 31
    pages = torch.tensor([3, 1])
    got = ops.score_pages(small.q[:, 0], summaries, index, pages, small.scale)
    near = small.k.nan_to_num(0).view(-1, 2 * dim)
    want = ops.score_pages(small.q[:, 0], near, small.table * (width // (2 * dim)), pages, small.scale)
    assert torch.equal(got, want)


@each_ops
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_score_pages_equals_quests_bound(ops: AttentionOps, data: st.DataObject) -> None:
    """The bound of each page's best token, softmaxed over the pages that count, mean over the group; the rest -inf."""
    n = data.draw(st.integers(1, 3), "sequences")
    heads = data.draw(st.integers(1, 3), "heads")
    group = data.draw(st.integers(1, 8), "group")
    columns = data.draw(st.integers(1, 9), "columns")
    dim = 16
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 999), "seed"))
    pages = torch.tensor(data.draw(st.lists(st.integers(1, columns), min_size=n, max_size=n), "pages"))
    keys = torch.randn(40, 16, dim, generator=random)
    summaries = torch.cat((keys.amax(1), keys.amin(1)), dim=-1)
    rows = torch.randint(40, (n, heads, columns), generator=random)
    past = (torch.arange(columns) >= pages.view(-1, 1)).unsqueeze(1)
    # pages that do not count may hold anything
    summaries = torch.cat((summaries, torch.full((1, 2 * dim), torch.nan)))
    rows = rows.masked_fill(past, 40)
    q = torch.randn(n, heads * group, dim, generator=random)
    scale = dim**-0.5
    got = ops.score_pages(q, summaries, rows, pages, scale)
    assert got.dtype == torch.float32
    assert bool((got.masked_select(past.expand_as(got)) == -torch.inf).all())
    for i in range(n):
        for head in range(heads):
            weight = torch.zeros(int(pages[i]), dtype=torch.float64)
            for j in range(group):
                query = q[i, head * group + j].double()
                high, low = summaries[rows[i, head, : int(pages[i])]].double().split(dim, -1)
                bound = torch.maximum(query * high, query * low).sum(-1) * scale
                exact = (keys[rows[i, head, : int(pages[i])]].double() @ query * scale).amax(-1)
                assert bool((bound >= exact - 1e-9).all()), "Quest's score bounds every token of the page"
                weight += torch.softmax(bound, 0) / group
            torch.testing.assert_close(got[i, head, : int(pages[i])].double(), weight, rtol=1e-4, atol=1e-6)
