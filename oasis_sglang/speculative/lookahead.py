"""From page scores to the pages a step attends to, and where the scores' query comes from."""

from __future__ import annotations

import torch

from oasis_sglang.config import OasisConfig


def favoured(scores: torch.Tensor, candidates: torch.Tensor, config: OasisConfig) -> torch.Tensor:
    """Scores in which sink pages (the first) and recent pages (the last candidates) come before all others.

    Args:
        scores: `[n, kv_heads, columns]`; columns past `candidates` hold -inf.
        candidates: `[n]` complete pages before the local tail.
    """
    column = torch.arange(scores.shape[-1], device=scores.device)
    if config.sink_pages:
        scores = scores.masked_fill(column < config.sink_pages, torch.inf)
    if config.recent_pages:
        bound = candidates.view(-1, 1, 1)
        recent = (column >= bound - config.recent_pages) & (column < bound)
        scores = scores.masked_fill(recent, torch.inf)
    return scores


def select_pages(scores: torch.Tensor, candidates: torch.Tensor, config: OasisConfig) -> torch.Tensor:
    """The budget's pages of each sequence and KV head, best first; sink and recent pages count in it.

    Args:
        scores: `[n, kv_heads, columns]`; columns past `candidates` hold -inf.
        candidates: `[n]` complete pages before the local tail, each more than the budget's pages.

    Returns:
        `[n, kv_heads, budget_pages]` int64 logical pages.
    """
    return favoured(scores, candidates, config).topk(config.budget_pages, dim=-1).indices


def select_resident(scores: torch.Tensor, resident: torch.Tensor, count: int) -> torch.Tensor:
    """The best `count` pages among those on the device.

    Args:
        scores: `[n, kv_heads, columns]` as `favoured` gives them, -inf past the candidates.
        resident: `[n, kv_heads, columns]` bool.
    """
    # Below every score of a candidate, above the -inf of what is none: a page that is not resident is never taken as
    # long as `count` candidates are.
    return torch.where(resident, scores, -torch.inf).topk(count, dim=-1).indices
