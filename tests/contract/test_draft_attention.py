"""Attention of a draft head: the sequence's first page and its newest tokens, against plain torch (contract 8)."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.speculative import eagle_draft_cuda_graph_runner

from oasis_sglang.attention.draft_backend import DraftAttnBackend, MultiStepDraftBackend
from oasis_sglang.attention.draft_window import pages_left_out, widest_table
from oasis_sglang.attention.native_ops import create_cpu_ops
from oasis_sglang.kernels.launch import recording
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.memory_pool.draft_pool import OasisDraftPool

PAGE, HEADS, GROUP, DIM, WINDOW = 4, 2, 3, 16, 24
SCALE = DIM**-0.5


class Pool(OasisDraftPool):
    """One layer on the CPU, without SGLang's memory accounting."""

    def __init__(self, pages: int) -> None:
        self.page_size, self.head_num, self.head_dim, self.start_layer = PAGE, HEADS, DIM, 0
        self.dtype = self.store_dtype = torch.float32
        random = torch.Generator().manual_seed(0)
        self.k_buffer, self.v_buffer = (
            [torch.randn(pages, HEADS, PAGE, DIM, generator=random)] for _ in range(2)
        )  # fmt: skip
        for buffer in (self.k_buffer, self.v_buffer):
            buffer[0][0] = 0  # the reserved page


def backend(pool: Pool, pages: list[list[int]], window: int | None, *, on_host: bool = True) -> DraftAttnBackend:
    made = DraftAttnBackend.__new__(DraftAttnBackend)
    made.token_to_kv_pool, made.ops = pool, create_cpu_ops() if on_host else TritonOps()
    made.page_size, made.heads, made.step, made.window, made.on_host = PAGE, HEADS, 0, window, on_host
    table = torch.zeros(len(pages) + 1, max(map(len, pages)) * PAGE + PAGE, dtype=torch.int32)
    for row, each in enumerate(pages):
        for at, page in enumerate(each):
            table[row, at * PAGE : (at + 1) * PAGE] = page * PAGE + torch.arange(PAGE)
    made.req_to_token_pool = SimpleNamespace(req_to_token=table)  # type: ignore[assignment]
    return made


def mode(name: str) -> Any:
    return SimpleNamespace(
        is_idle=lambda: False,
        is_decode=lambda: name == "decode",
        is_draft_extend_v2=lambda: name == "draft extend",
        is_extend=lambda: name != "decode",
    )


def expected(pool: Pool, pages: list[int], q: torch.Tensor, tokens: int, first_seen: int) -> torch.Tensor:
    """`q` `[t, Hq, D]`, the last t of `tokens`, over the first page and everything from `first_seen` on."""
    k, v = pool.read(0, torch.tensor(pages), tokens)
    outs = []
    for j in range(q.shape[0]):
        end = tokens - q.shape[0] + 1 + j
        seen = [x for x in range(end) if x < PAGE or x >= first_seen]
        scores = torch.einsum("hgd,hkd->hgk", q[j].view(HEADS, GROUP, DIM), k[:, seen]) * SCALE
        outs.append(torch.einsum("hgk,hkd->hgd", scores.softmax(-1), v[:, seen]).reshape(-1))
    return torch.stack(outs)


LENGTHS = [3, 30, 41, 64]


def check(name: str, window: int | None, *, on_host: bool, padding: int = 0) -> None:
    """All sequences of a batch against plain torch; `padding` more are a graph's, which plans within itself."""
    n, new = len(LENGTHS), 1 if name == "decode" else 3
    random = torch.Generator().manual_seed(1)
    order = (torch.randperm(60, generator=random) + 1).tolist()
    pages = [[order.pop() for _ in range(-(-length // PAGE))] for length in LENGTHS]
    pool = Pool(61)
    made = backend(pool, pages, window, on_host=on_host)
    slots = [
        torch.tensor([each[t // PAGE] * PAGE + t % PAGE for t in range(length - new, length)])
        for each, length in zip(pages, LENGTHS, strict=True)
    ]
    lengths = torch.tensor(LENGTHS) - (new if name == "decode" else 0)  # a draft step adds its own token
    batch: Any = SimpleNamespace(
        forward_mode=mode(name),
        batch_size=n + padding,
        input_ids=torch.zeros((n + padding) * new),
        req_pool_indices=torch.tensor([*range(n), *[n] * padding]),  # whose row of the table is empty
        seq_lens=torch.cat((lengths, torch.zeros(padding, dtype=torch.int64))),
        extend_prefix_lens_cpu=[length - new for length in LENGTHS],
        extend_seq_lens_cpu=[new] * n,
        out_cache_loc=torch.cat((*slots, torch.zeros(padding * new, dtype=torch.int64))),
    )
    if padding:
        made.init_forward_metadata_in_graph(batch)
    else:
        made.init_forward_metadata(batch)
    widths = (HEADS * GROUP * DIM, HEADS * DIM, HEADS * DIM)
    q, k, v = (torch.randn((n + padding) * new, width, generator=random) for width in widths)
    for x in (q, k, v):
        x[n * new :] = torch.nan
    layer: Any = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS * GROUP, head_dim=DIM, scaling=SCALE)
    out = made.forward_extend(q, k, v, layer, batch).view(n + padding, new, -1)
    for i, length in enumerate(LENGTHS):
        # The oldest new token's window, from the start of its page.
        first_seen = max((length - new - WINDOW) // PAGE * PAGE, 0) if window else 0
        right = expected(pool, pages[i], q.view(n + padding, new, -1, DIM)[i], length, first_seen)
        torch.testing.assert_close(out[i], right, rtol=1e-4, atol=1e-5)
    assert not out[n:].any()
    assert not any(buffer[0][0].any() for buffer in (pool.k_buffer, pool.v_buffer))


@pytest.mark.parametrize("window", [WINDOW, None])
@pytest.mark.parametrize("name", ["decode", "draft extend", "extend"])
def test_first_page_and_newest_tokens(name: str, window: int | None) -> None:
    check(name, window, on_host=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("window", [WINDOW, None])
@pytest.mark.parametrize(("name", "padding"), [("decode", 0), ("decode", 2), ("draft extend", 2), ("extend", 0)])
def test_on_a_device(name: str, padding: int, window: int | None) -> None:
    check(name, window, on_host=False, padding=padding)


@pytest.mark.parametrize("window", [WINDOW, None])
def test_a_step_on_a_device_never_looks_at_data(window: int | None) -> None:
    """Contract 7: what a graph of the draft's chain captures does not depend on lengths, and nothing waits for them. On
    the device `meta` there is nothing to look at."""
    meta = torch.device("meta")
    pool = Pool(61)
    for buffer in (pool.k_buffer, pool.v_buffer):
        buffer[0] = buffer[0].to(meta)
    steps = MultiStepDraftBackend.__new__(MultiStepDraftBackend)
    steps.attn_backends = [backend(pool, [[1, 2, 3, 4] * 16], window, on_host=False) for _ in range(2)]
    batch: Any = SimpleNamespace(
        forward_mode=mode("decode"),
        batch_size=4,
        req_pool_indices=torch.zeros(4, dtype=torch.int64, device=meta),
        seq_lens=torch.zeros(4, dtype=torch.int64, device=meta),
        out_cache_loc=torch.zeros(4, dtype=torch.int64, device=meta),
    )
    for step, made in enumerate(steps.attn_backends):
        made.step = step
        made.req_to_token_pool.req_to_token = made.req_to_token_pool.req_to_token.to(meta)
    layer: Any = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS * GROUP, head_dim=DIM, scaling=SCALE)
    q, k, v = (torch.zeros(4, heads * DIM, device=meta) for heads in (HEADS * GROUP, HEADS, HEADS))
    with recording() as launches:
        steps.init_cuda_graph_state(4, 4)
        steps.init_forward_metadata_out_graph(batch, in_capture=True)
        steps.init_forward_metadata_in_graph(batch)
        for made in steps.attn_backends:
            assert made.forward_decode(q, k, v, layer, batch).shape == q.shape
    assert launches
    # the window, the page that its start cuts, the first page and the new token; or all that the table has room for
    columns = -(-(WINDOW + 2 * PAGE) // PAGE) if window else 64 + 1
    assert steps.attn_backends[0]._table.shape == (4, HEADS, columns)


@given(
    before=st.integers(0, 5000),
    queries=st.integers(1, 8),
    window=st.sampled_from([0, 1, 24, 1024]),
    page=st.sampled_from([1, 4, 16, 64]),
)
def test_tables_of_a_device_are_wide_enough(before: int, queries: int, window: int, page: int) -> None:
    left = before + queries - pages_left_out(before, window, page) * page
    assert left <= widest_table(window, 5008, queries, page) <= widest_table(None, 5008, queries, page)


def test_sglangs_graph_of_drafts_asks_for_nothing_else() -> None:
    """It is made on CUDA alone, so no test here can run it."""
    source = inspect.getsource(eagle_draft_cuda_graph_runner)
    asked = set(re.findall(r"self\.draft_attn_backend\.(\w+)", source))
    assert "init_forward_metadata_in_graph" in asked
    assert asked <= {*dir(MultiStepDraftBackend), "attn_backends"}
    of_steps = set(re.findall(r"attn_backends\[\s*0\s*\]\s*\.(\w+)", source))
    assert of_steps == {"get_cuda_graph_seq_len_fill_value"}
    assert DraftAttnBackend.get_cuda_graph_seq_len_fill_value is not AttentionBackend.get_cuda_graph_seq_len_fill_value
