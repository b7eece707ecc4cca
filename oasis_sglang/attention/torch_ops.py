"""The ops in plain torch: what a CPU host runs, and the oracle for every other implementation."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from oasis_sglang.attention.ops import TableLayout
from oasis_sglang.memory_pool import sketch


class TorchOps:
    """Gather buffers are kept between calls: a fresh 25 MB tensor per layer costs more than the attention itself."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def write_tokens(
        self,
        k_lanes: torch.Tensor,
        v_lanes: torch.Tensor,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        at = rows, offsets.view(-1, 1)
        k_lanes[at], v_lanes[at] = k, v

    def _gather(self, name: str, source: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """`source[index]` as `[index.numel(), width]` in a buffer that lives until the next call of this name."""
        out = self._buffer(name, source, index.numel())
        return torch.index_select(source, 0, index.reshape(-1), out=out)

    def _buffer(self, name: str, source: torch.Tensor, rows: int) -> torch.Tensor:
        size = rows * source.shape[1]
        buffer = self._buffers.get((name, source.dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=source.dtype, device=source.device)
            self._buffers[name, source.dtype] = buffer
        return buffer[:size].view(rows, source.shape[1])

    def _gather_pages(
        self, k_rows: torch.Tensor, v_rows: torch.Tensor, table: torch.Tensor, layout: TableLayout
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a page table, `[n * H * N, P * D]`, in the gather buffers."""
        n, heads, columns = table.shape
        k, v = self._gather("k", k_rows, table), self._gather("v", v_rows, table)
        # 0 * NaN is NaN: lanes that hold no token are emptied, not only masked
        sequence, lane = layout.unwritten
        if sequence.numel():
            for x in (k, v):
                x.view(n, heads, columns * layout.page_size, -1)[sequence, :, lane] = 0
        return k, v

    def attend(
        self,
        q: torch.Tensor,
        k_rows: torch.Tensor,
        v_rows: torch.Tensor,
        table: torch.Tensor,
        layout: TableLayout,
        scale: float,
    ) -> torch.Tensor:
        n, t, query_heads, dim = q.shape
        heads, columns = table.shape[1:]
        group = query_heads // heads
        # the group's query tokens become rows of one attention over the head's pages
        grouped = q.view(n, t, heads, group, dim).permute(0, 2, 1, 3, 4).reshape(n, heads, t * group, dim)
        mask = layout.mask if t == 1 else layout.mask.repeat_interleave(group, dim=2)
        k, v = (
            x.view(n, heads, columns * layout.page_size, dim) for x in self._gather_pages(k_rows, v_rows, table, layout)
        )
        out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
        out = out.view(n, heads, t, group, dim).permute(0, 2, 1, 3, 4).reshape(n, t, query_heads, dim)
        if layout.has_empty:
            out[layout.empty] = 0
        return out

    def score_pages(
        self, q: torch.Tensor, summaries: torch.Tensor, rows: torch.Tensor, pages: torch.Tensor, scale: float
    ) -> torch.Tensor:
        n, query_heads, dim = q.shape
        heads, columns = rows.shape[1:]
        bounds = self._gather("summary", summaries, rows).view(n * heads, columns, 2 * dim)
        # max(q * high, q * low) summed over dimensions is q+ . high + q- . low
        split = torch.cat((q.clamp_min(0), q.clamp_max(0)), dim=-1).view(n * heads, query_heads // heads, 2 * dim)
        # float32: rounded to bfloat16, bounds around 10 would differ by less than they are rounded by
        score = torch.bmm(split.float(), bounds.transpose(1, 2).float()).view(n, heads, -1, columns) * scale
        return _share(score, pages)

    def score_sketches(
        self,
        q: torch.Tensor,
        sketches: torch.Tensor,
        rows: torch.Tensor,
        pages: torch.Tensor,
        scale: float,
        page_size: int,
    ) -> torch.Tensor:
        return score_codes(q, *sketch.decode(sketches[rows], q.shape[-1]), pages, scale, page_size)

    def prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int, scale: float) -> torch.Tensor:
        # float32: without matrix units for 16-bit types a CPU computes it half as fast again, and more exactly.
        group = q.shape[1] // k.shape[0]
        queries, keys, values = (x.float() for x in (q.transpose(0, 1), k, v))
        own = [x[:, prefix:].repeat_interleave(group, dim=0) for x in (keys, values)]
        out, lse = _flash(queries, own[0], own[1], scale, causal=True)
        if prefix:
            # All new tokens see the whole prefix, so that part needs no mask, and the group's heads are just more rows.
            heads, dim = k.shape[0], k.shape[2]
            rows = queries.reshape(heads, -1, dim)
            before, before_lse = _flash(rows, keys[:, :prefix], values[:, :prefix], scale, causal=False)
            # two softmaxes over disjoint keys join by their sums
            share = torch.sigmoid(before_lse.reshape(lse.shape) - lse).unsqueeze(-1)
            out = torch.lerp(out, before.reshape(out.shape), share)
        return out.transpose(0, 1).to(q.dtype)


def score_codes(
    q: torch.Tensor, codes: torch.Tensor, units: torch.Tensor, pages: torch.Tensor, scale: float, page_size: int
) -> torch.Tensor:
    """`AttentionOps.score_sketches` of what `sketch.decode` gives: `[n, H, N, tokens, d]` and `[n, H, N, tokens]`."""
    n, query_heads, dim = q.shape
    heads, columns = codes.shape[1:3]
    query = q.float().view(n, heads, query_heads // heads, dim)
    unit = query.abs().amax(-1, keepdim=True) / 127
    rounded = torch.where(unit > 0, query / unit, 0).round().clamp(-127, 127)
    products = torch.einsum("hgd,hxd->hgx", rounded.flatten(0, 1), codes.flatten(2, 3).flatten(0, 1))
    logits = products.view(n, heads, -1, columns, codes.shape[3]) * (unit * scale).unsqueeze(-1) * units.unsqueeze(2)
    return _share(logits[..., :page_size].amax(-1), pages)


def _share(score: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Page scores `[n, H, G, N]`, of which the first `pages` `[n]` count, softmaxed, mean over G; -inf beyond."""
    n, columns = score.shape[0], score.shape[-1]
    beyond = torch.arange(columns, device=score.device) >= pages.view(-1, 1)
    score.masked_fill_(beyond.view(n, 1, 1, columns), -torch.inf)
    weight = score.softmax(-1).mean(2)
    return weight.masked_fill_(beyond.unsqueeze(1), -torch.inf)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's CPU flash attention, `[heads, tokens, dim]`, with the log of each row's softmax sum `[heads, tokens]`."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), 0.0, causal, scale=scale
    )
    return out[0], lse[0]
