"""Page lists, read back, name the tokens that the torch op attends to; fixed memory, clear limits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from oasis_sglang.attention.ops import TableLayout
from oasis_sglang.kernels.page_lists import INT32_MAX, PageListBuffers, PageLists

CPU = torch.device("cpu")
BATCH, COLUMNS = 5, 9

Token = tuple[int, int]  # pool row and lane


def buffers(page: int, heads: int) -> PageListBuffers:
    return PageListBuffers(batch=BATCH, kv_heads=heads, columns=COLUMNS, page_size=page, device=CPU)


def addresses(buffer: PageListBuffers) -> list[int]:
    return [x.data_ptr() for x in buffer.part(BATCH)]


def read_back(lists: PageLists, request: int, page: int) -> list[Token]:
    """Tokens of a request by FlashInfer's own rule: its pages in order, of the last one the lanes that are counted."""
    start, end = lists.indptr[request : request + 2].tolist()
    if start == end:
        return []
    rows = lists.indices[start:end].tolist()
    length = (len(rows) - 1) * page + int(lists.last_page_len[request])
    return [(rows[at // page], at % page) for at in range(length)]


def attended(table: np.ndarray, visible: np.ndarray, page: int) -> list[Token]:
    """Tokens that one query token sees: `table` `[N]` of its KV head, `visible` `[lanes]` of the torch op's mask."""
    return [(int(table[lane // page]), lane % page) for lane in np.flatnonzero(visible).tolist()]


def test_a_thousand_states_name_what_the_torch_op_attends_to() -> None:
    """Any lengths, empty ones too, page tables wider than their pages, chains that cross into the next page; whatever
    the last step left in the buffers."""
    draw, rows = random.Random(0), np.random.default_rng(0)
    made = {(page, heads): buffers(page, heads) for page in (16, 32, 64) for heads in (1, 2, 3)}
    before = {key: addresses(x) for key, x in made.items()}
    crossed = empty = 0
    for _ in range(1000):
        page, heads = draw.choice(list(made))
        n, t, columns = draw.randint(1, BATCH), draw.randint(1, 8), draw.randint(1, COLUMNS)
        most = columns * page
        just_over = max(draw.randrange(columns) * page + draw.randint(1, t), t)
        tokens = [draw.choice([0, t, most, just_over, draw.randint(t, most)]) for _ in range(n)]
        table = rows.integers(0, INT32_MAX, (n, heads, columns), endpoint=True)
        layout = TableLayout(torch.tensor(tokens), columns, page, t, torch.float32)
        buffer = made[page, heads]
        buffer.measure(layout.tokens, columns)
        buffer.name_pages(torch.from_numpy(table), INT32_MAX + 1)
        lists = buffer.part(n)
        visible = torch.isfinite(layout.mask[:, 0]).numpy()  # [n, t, lanes]
        for i in range(n):
            crossed += (tokens[i] - 1) // page != (tokens[i] - t) // page
            empty += tokens[i] == 0
            for head in range(heads):
                named = read_back(lists, i * heads + head, page)
                if tokens[i] == 0:
                    assert named == []
                    continue
                for j in range(t):  # causal over the list: query token j does not see the last t - 1 - j
                    assert named[: len(named) - (t - 1 - j)] == attended(table[i, head], visible[i, j], page)
        end = int(lists.indptr[-1])
        assert not bool(lists.indices[end : n * heads * columns].any())
        assert all(x.dtype == torch.int32 for x in lists)
    assert crossed > 300
    assert empty > 300
    assert before == {key: addresses(x) for key, x in made.items()}


def test_small_steps_are_the_first_part_of_the_memory() -> None:
    buffer = buffers(16, 2)
    for n in (1, 3, BATCH):
        lists = buffer.part(n)
        assert [x.data_ptr() for x in lists] == addresses(buffer)
        assert [x.numel() for x in lists] == [2 * n + 1, 2 * n * COLUMNS, 2 * n]


def test_more_than_there_is_memory_for_is_refused() -> None:
    buffer = buffers(16, 2)
    with pytest.raises(ValueError, match="a step of 6 sequences; page lists have memory for 1 to 5"):
        buffer.measure(torch.ones(6, dtype=torch.int64), COLUMNS)
    with pytest.raises(ValueError, match="a page table of 10 columns; page lists have memory for 1 to 9"):
        buffer.measure(torch.ones(5, dtype=torch.int64), 10)


def test_numbers_beyond_32_bits_are_refused() -> None:
    """C37: a row number or a lane that int32 cannot hold must not wrap."""
    with pytest.raises(ValueError, match="FlashInfer numbers up to 2147483647, which is 31 sequences of that size"):
        PageListBuffers(batch=32, kv_heads=8, columns=1 << 19, page_size=16, device=torch.device("meta"))
    buffer = buffers(16, 2)
    buffer.measure(torch.tensor([20]), 2)
    with pytest.raises(ValueError, match="a pool of 2147483649 rows"):
        buffer.name_pages(torch.ones(1, 2, 2, dtype=torch.int64), INT32_MAX + 2)


def test_tables_that_are_not_laid_out_as_said() -> None:
    buffer = buffers(16, 2)
    buffer.measure(torch.tensor([20]), 2)
    with pytest.raises(ValueError, match=r"must be contiguous int64, not torch\.int32"):
        buffer.name_pages(torch.ones(1, 2, 2, dtype=torch.int32), 100)
    with pytest.raises(ValueError, match="must be contiguous int64"):
        buffer.name_pages(torch.ones(1, 2, 4, dtype=torch.int64)[..., ::2], 100)


def test_the_host_never_looks_at_device_data() -> None:
    """On `meta` every such look raises."""
    meta = torch.device("meta")
    buffer = PageListBuffers(batch=BATCH, kv_heads=2, columns=COLUMNS, page_size=16, device=meta)
    buffer.measure(torch.zeros(3, dtype=torch.int64, device=meta), COLUMNS)
    buffer.name_pages(torch.zeros(3, 2, COLUMNS, dtype=torch.int64, device=meta), 100)
