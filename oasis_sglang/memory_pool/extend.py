"""What a tier does with a prompt chunk, layer by layer: dense attention over prefix and chunk, and the working set that
the first decode step will find."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from oasis_sglang.attention.ops import TableLayout
from oasis_sglang.attention.page_table import sparse_mask
from oasis_sglang.speculative.lookahead import select_pages

if TYPE_CHECKING:
    from oasis_sglang.memory_pool.tier import KVTier

# Queries replayed at once: each gathers a budget of its own.
REPLAY_QUERIES = 16


class ExtendSequence(NamedTuple):
    """One sequence of a prompt chunk: tokens `[prefix, prefix + new)` are computed now."""

    row: int
    prefix: int
    new: int
    slots: torch.Tensor  # [new] int64
    pages: torch.Tensor  # [ceil((prefix + new) / page_size)] host pages, in sequence order
    # Tokens that the request came with. Any after them were decoded before it was retracted; None: there are none.
    prompt: int | None = None


class Extend:
    def __init__(self, tier: KVTier) -> None:
        self._tier = tier

    def run(
        self, layer: int, sequence: ExtendSequence, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer of one sequence's prompt chunk; `q` `[new, Hq, D]`, `k` and `v` `[new, H, D]`; returns like `q`."""
        tier = self._tier
        prefix, page = sequence.prefix, tier.geometry.page_size
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        if prefix:
            old = tier.host.read_sequence(layer, sequence.pages[: -(-prefix // page)], prefix)
            keys, values = torch.cat((old[0], keys), dim=1), torch.cat((old[1], values), dim=1)
            if layer == 0:
                tier.stats.load_back_tokens += prefix
        out = tier.ops.prefill(q, keys, values, prefix, scale)

        tier.host.write_layer(layer, sequence.slots, k, v)
        touched = sequence.pages[prefix // page :]
        total = prefix + sequence.new
        last = total - (sequence.pages.numel() - 1) * page
        tier.summaries.rebuild(layer, touched, tier.host.read_keys(layer, touched), last)
        self._replay(layer, sequence, q, out, scale)
        self._settle(layer, sequence, q[-1:], scale)
        return out

    def _replay(self, layer: int, sequence: ExtendSequence, q: torch.Tensor, out: torch.Tensor, scale: float) -> None:
        """Attend for tokens that were decoded before a retraction as decode did, from the host pool: dense attention
        would give them other keys and values in the next layers, and the request another text."""
        tier = self._tier
        prefix, page, heads = sequence.prefix, tier.geometry.page_size, tier.geometry.kv_heads
        total = prefix + sequence.new
        first = total if sequence.prompt is None else max(prefix, sequence.prompt)
        if first >= total or layer < tier.config.dense_layers:
            return
        lengths = torch.arange(first, total) + 1
        host_rows = tier.host.rows.view(tier.host.dtype)
        every_page = tier.summaries.row_ids(sequence.pages).T
        for part in lengths[sparse_mask(lengths, tier.config)].split(REPLAY_QUERIES):
            at, tail, n = part - 1 - prefix, (part - 1) // page, part.numel()
            if not n:
                continue
            rows = every_page.expand(n, heads, -1)
            scores = tier.summaries.score(tier.ops, layer, q[at], rows, tail, scale)
            chosen = select_pages(scores, tail, tier.config)
            attended = torch.cat((chosen, tail.view(n, 1, 1).expand(n, heads, 1)), dim=-1)
            table = tier.host.row_ids(layer, sequence.pages[attended], tier.heads.view(1, -1, 1))
            tokens = part - tail * page + tier.config.budget_pages * page
            layout = TableLayout(tokens, attended.shape[-1], page, 1, q.dtype)
            query = q[at].unsqueeze(1)
            out[at] = tier.ops.attend(query, host_rows[:, 0], host_rows[:, 1], table, layout, scale).squeeze(1)

    def _settle(self, layer: int, sequence: ExtendSequence, q: torch.Tensor, scale: float) -> None:
        """Bring the row's working set in: the whole sequence while it fits, else the pages its last query asks for."""
        tier = self._tier
        row, count = sequence.row, sequence.pages.numel()
        width = int(tier.sets.width[row])
        heads = tier.geometry.kv_heads
        total = torch.tensor([sequence.prefix + sequence.new])
        scores = chosen = None
        tier.was_sparse[row] = bool(sparse_mask(total, tier.config))
        if tier.was_sparse[row]:
            candidates = torch.tensor([count - 1])
            rows = tier.summaries.row_ids(sequence.pages[:-1]).T.unsqueeze(0)
            scores = tier.summaries.score(tier.ops, layer, q, rows, candidates, scale)
            chosen = select_pages(scores, candidates, tier.config)
            if tier.config.miss_policy == "skip":
                tier.chosen[layer, row] = chosen[0].to(torch.int32)
                tier.chosen_tail[row] = count - 1
        if count <= width:
            pages = torch.arange(count).expand(heads, count)
            used = (torch.arange(count) + (tier.step - count)).expand(heads, count)
            if chosen is not None:
                # The next step attends to these, so the page it may have to start must not take the place of one.
                used = used.scatter(-1, chosen[0], tier.step)
        else:
            if scores is None or chosen is None:
                raise RuntimeError(f"a dense sequence of {count} pages has a working set of {width}")
            # The budget's pages first, then by score what else there is room for, and the tail.
            budget, room = chosen.shape[-1], width - 1
            first = torch.arange(2 * budget, budget, -1, dtype=scores.dtype).expand_as(chosen)
            best = scores.scatter(-1, chosen, first).topk(room, dim=-1).indices[0]
            pages = torch.cat((best, torch.full((heads, 1), count - 1)), dim=1)
            used = torch.cat((torch.arange(-1, -room - 1, -1), torch.zeros(1, dtype=torch.int64))) + tier.step
        tier.sets.place(layer, row, pages, used)
        slots = pages.shape[1]
        head = tier.heads.view(-1, 1).expand(heads, slots)
        rows = tier.sets.cells.rows[layer, tier.sets.pages[row, :slots]].T
        tier.transfer.load(layer, sequence.pages[pages].reshape(-1), head.reshape(-1), rows.reshape(-1))
