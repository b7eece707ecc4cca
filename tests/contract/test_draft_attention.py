"""Attention of a draft head: the sequence's first page and its newest tokens, against plain torch (contract 8)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oasis_sglang.attention.draft_backend import DraftAttnBackend
from oasis_sglang.attention.native_ops import create_cpu_ops
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


def backend(pool: Pool, pages: list[list[int]], window: int | None) -> DraftAttnBackend:
    made = DraftAttnBackend.__new__(DraftAttnBackend)
    made.token_to_kv_pool, made.ops = pool, create_cpu_ops()
    made.page_size, made.heads, made.step, made.window = PAGE, HEADS, 0, window
    table = torch.zeros(len(pages), max(map(len, pages)) * PAGE + PAGE, dtype=torch.int32)
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


@pytest.mark.parametrize("window", [WINDOW, None])
@pytest.mark.parametrize("name", ["decode", "draft extend", "extend"])
def test_first_page_and_newest_tokens(name: str, window: int | None) -> None:
    lengths, new = [3, 30, 41, 64], 1 if name == "decode" else 3
    random = torch.Generator().manual_seed(1)
    order = (torch.randperm(60, generator=random) + 1).tolist()
    pages = [[order.pop() for _ in range(-(-length // PAGE))] for length in lengths]
    pool = Pool(61)
    made = backend(pool, pages, window)
    n = len(lengths)
    slots = torch.cat([
        torch.tensor([each[t // PAGE] * PAGE + t % PAGE for t in range(length - new, length)])
        for each, length in zip(pages, lengths, strict=True)
    ])  # fmt: skip
    batch: Any = SimpleNamespace(
        forward_mode=mode(name),
        batch_size=n,
        input_ids=torch.zeros(n * new),
        req_pool_indices=torch.arange(n),
        seq_lens=torch.tensor(lengths) - (new if name == "decode" else 0),  # a draft step adds its own token
        extend_prefix_lens=torch.tensor(lengths) - new,
        extend_seq_lens=torch.full((n,), new),
        out_cache_loc=slots,
    )
    made.init_forward_metadata(batch)
    q, k, v = (torch.randn(n * new, heads * DIM, generator=random) for heads in (HEADS * GROUP, HEADS, HEADS))
    layer: Any = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS * GROUP, head_dim=DIM, scaling=SCALE)
    out = made.forward_extend(q, k, v, layer, batch).view(n, new, -1)
    for i, length in enumerate(lengths):
        # The oldest new token's window, from the start of its page.
        first_seen = max((length - new - WINDOW) // PAGE * PAGE, 0) if window else 0
        right = expected(pool, pages[i], q.view(n, new, -1, DIM)[i], length, first_seen)
        torch.testing.assert_close(out[i], right, rtol=1e-4, atol=1e-5)
