"""Prefill of the ops against float64 (C30); that of a GPU host is torch's too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.attention.ops import AttentionOps
from oasis_sglang.kernels.ops import TritonOps
from tests.unit import oracle
from tests.unit.test_ops import BF16, FP32, IMPLEMENTATIONS

each_ops = pytest.mark.parametrize("ops", [*IMPLEMENTATIONS, TritonOps()], ids=["torch", "cpu", "gpu"])


@each_ops
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_prefill_equals_float64(ops: AttentionOps, data: st.DataObject) -> None:
    """C30: causal attention over prefix and chunk, grouped heads, for any split of the two."""
    heads, group = data.draw(st.integers(1, 2), "heads"), data.draw(st.integers(1, 8), "group")
    prefix, m = data.draw(st.integers(0, 70), "prefix"), data.draw(st.integers(1, 40), "new")
    bf16 = data.draw(st.booleans(), "bf16")
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 999), "seed"))
    dtype = torch.bfloat16 if bf16 else torch.float32
    q = torch.randn(m, heads * group, 16, generator=random).to(dtype)
    k, v = (torch.randn(heads, prefix + m, 16, generator=random).to(dtype) for _ in range(2))
    out = ops.prefill(q, k, v, prefix, 0.25)
    expected = oracle.causal(q, k.transpose(0, 1), v.transpose(0, 1), prefix, 0.25)
    assert out.shape == q.shape
    torch.testing.assert_close(out.double(), expected, **(BF16 if bf16 else FP32))


@each_ops
@pytest.mark.parametrize("m", [511, 515, 1024])
def test_prefix_and_new_tokens_join(ops: AttentionOps, m: int) -> None:
    """C30: attention over the prefix and over the new tokens is computed apart; the two must join for every row, with
    more rows than the attention kernel takes at once."""
    random = torch.Generator().manual_seed(1)
    q = torch.randn(m, 2, 8, generator=random)
    k, v = (torch.randn(1, 37 + m, 8, generator=random) for _ in range(2))
    out = ops.prefill(q, k, v, 37, 0.35)
    for row in sorted({0, 1, 510, m // 2, m - 1}):
        seen = 37 + row + 1
        expected = oracle.attention(q[row].double(), k[:, :seen].double(), v[:, :seen].double(), 0.35)
        torch.testing.assert_close(out[row].double(), expected, **FP32)


@each_ops
def test_a_far_stronger_side_wins_without_nan(ops: AttentionOps) -> None:
    """C24: logits of one side a thousand below the other's leave the other's values, and no NaN."""
    q = torch.ones(2, 1, 8)
    k, v = torch.full((1, 12, 8), -400.0), torch.zeros(1, 12, 8)
    k[:, :4], v[:, :4] = 400.0, 3.0  # in the prefix
    torch.testing.assert_close(ops.prefill(q, k, v, 10, 1.0), torch.full((2, 1, 8), 3.0))
    torch.testing.assert_close(ops.prefill(q, -k, v, 10, 1.0)[1], torch.zeros(1, 8))
