"""What the tier must compute, worked out anew in float64 from the host pool alone."""

from __future__ import annotations

import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool.host_pool import HostPool


def sequence(host: HostPool, layer: int, pages: list[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence, `[tokens, H, D]` float64."""
    blocks = host.kv[pages, layer].double()  # [pages, H, 2, page, D]
    k, v = (blocks[:, :, side].transpose(1, 2).flatten(0, 1)[:tokens] for side in (0, 1))
    return k, v


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One query token `[Hq, D]` over `k`, `v` `[n, D]` per KV head: `[H, n, D]`."""
    heads = k.shape[0]
    group = q.shape[0] // heads
    keys, values = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    weight = torch.softmax(torch.einsum("hd,hnd->hn", q, keys) * scale, dim=-1)
    return torch.einsum("hn,hnd->hd", weight, values)


def quest(q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Upper bound of q.k per page from its largest and smallest key; `q` `[D]`, `pages` `[n, page, D]`."""
    high, low = pages.max(1).values, pages.min(1).values
    return torch.maximum(q * high, q * low).sum(-1)


def kept_dims(head_dim: int) -> list[int]:
    """Dimensions that the harness's sketches keep: the slower half of each rotary half, or all."""
    if head_dim % 16:
        return list(range(head_dim))
    half = head_dim // 2
    return [i for i in range(head_dim) if i % half >= half // 2]


def quantised(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """4-bit codes, -7 to 7, of the kept dimensions of keys `[..., D]`, and their float16 step `[..., 1]`."""
    kept = keys[..., kept_dims(keys.shape[-1])]
    step = (kept.abs().amax(-1, keepdim=True).float() / 7).half().double()
    return (kept / step).nan_to_num(0).round().clamp(-7, 7), step


def sketched(q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Largest q.k per page, from keys in 4 bits and the query in 8."""
    codes, step = quantised(pages)
    kept = q[kept_dims(q.shape[-1])]
    unit = kept.abs().max() / 127
    rounded = (kept / unit).round() if unit > 0 else torch.zeros_like(kept)
    return ((codes * rounded).sum(-1) * unit * step.squeeze(-1)).amax(1)


def page_weights(
    queries: torch.Tensor, k: torch.Tensor, candidates: int, config: OasisConfig, scale: float
) -> torch.Tensor:
    """How much each candidate page may matter, `[H, candidates]`; infinite for sink and recent pages.

    Args:
        queries: `[t, Hq, D]`; a page counts for the query that wants it most. k: `[tokens, H, D]`.
    """
    page, heads = config.page_size, k.shape[1]
    group = queries.shape[1] // heads
    bounds = sketched if config.summary == "sketch" else quest
    weights = torch.zeros(heads, candidates, dtype=torch.float64)
    for head in range(heads):
        block = k[: candidates * page, head].view(candidates, page, -1)
        for q in queries:
            own = torch.zeros(candidates, dtype=torch.float64)
            for j in range(head * group, (head + 1) * group):
                own += torch.softmax(bounds(q[j], block) * scale, 0) / group
            weights[head] = torch.maximum(weights[head], own)
    forced = [p for p in range(candidates) if p < config.sink_pages or p >= candidates - config.recent_pages]
    weights[:, forced] = torch.inf
    return weights


def top_pages(
    queries: torch.Tensor, k: torch.Tensor, tokens: int, config: OasisConfig, scale: float
) -> list[list[int]]:
    """Pages each KV head attends to besides the tail: all candidates, or the best `budget_pages` by Quest's bound.

    Args:
        queries: `[t, Hq, D]`, or `[Hq, D]` for one; a page counts for the query that wants it most.
    """
    queries = queries.view(-1, *queries.shape[-2:])
    candidates = (tokens - 1) // config.page_size
    if candidates <= config.budget_pages or tokens < config.min_sparse_len:
        return [list(range(candidates))] * k.shape[1]
    weights = page_weights(queries, k, candidates, config, scale)
    return [sorted(weight.topk(config.budget_pages).indices.tolist()) for weight in weights]


def decode(
    host: HostPool,
    layer: int,
    pages: list[int],
    tokens: int,
    q: torch.Tensor,
    config: OasisConfig,
    scale: float,
    *,
    dense: bool = False,
) -> torch.Tensor:
    """Exact top-K attention of the newest token `[Hq, D]`, whose K and V the host pool holds already."""
    page = config.page_size
    k, v = sequence(host, layer, pages, tokens)
    q = q.double()
    tail = (tokens - 1) // page
    chosen = [list(range(tail))] * k.shape[1] if dense else top_pages(q, k, tokens, config, scale)
    ks, vs = [], []
    for head, head_pages in enumerate(chosen):
        lanes = [t for p in [*head_pages, tail] for t in range(p * page, min((p + 1) * page, tokens))]
        ks.append(k[lanes, head])
        vs.append(v[lanes, head])
    return attention(q, torch.stack(ks), torch.stack(vs), scale)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int, scale: float) -> torch.Tensor:
    """Dense causal attention of `q` `[m, Hq, D]` over `k`, `v` `[prefix + m, H, D]`."""
    rows = [
        attention(
            q[i].double(),
            k[: prefix + i + 1].double().transpose(0, 1),
            v[: prefix + i + 1].double().transpose(0, 1),
            scale,
        )
        for i in range(q.shape[0])
    ]
    return torch.stack(rows)
