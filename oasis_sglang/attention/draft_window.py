"""What a draft head attends to in a long sequence: the first page and the newest tokens."""

from __future__ import annotations

from typing import overload

import torch

#: Newest tokens that a draft head attends to. A head is trained on sequences of a thousand tokens or so, and over many
#: more its attention spreads too thinly; and it needs the first page, where it puts attention that it has no use for (a
#: sink, arXiv 2309.17453). `python -m benchmarks.draft_window` measures both.
WINDOW = 1024


@overload
def pages_left_out(before: int, window: int, page_size: int) -> int: ...
@overload
def pages_left_out(before: torch.Tensor, window: int, page_size: int) -> torch.Tensor: ...
def pages_left_out(before: int | torch.Tensor, window: int, page_size: int) -> int | torch.Tensor:
    """Pages after the first that are not attended to by tokens with `before` tokens before them."""
    pages = (before - window) // page_size - 1
    return pages.clamp(min=0) if isinstance(pages, torch.Tensor) else max(pages, 0)


def widest_table(window: int | None, context_len: int, queries: int, page_size: int) -> int:
    """Most tokens, `queries` new ones among them, that what is left of a sequence of any length has.

    Args:
        window: None where nothing is left out.
        context_len: no sequence has more tokens than this.
    """
    return context_len if window is None else min(window + 2 * page_size - 1 + queries, context_len)
