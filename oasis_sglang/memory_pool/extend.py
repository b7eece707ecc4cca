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

    def last_tokens(self, page_size: int) -> int:
        """Tokens on the last page."""
        return self.prefix + self.new - (self.pages.numel() - 1) * page_size


class Extend:
    def __init__(self, tier: KVTier) -> None:
        self._tier = tier

    def run(
        self, layer: int, sequence: ExtendSequence, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One layer of one sequence's prompt chunk; `q` `[new, Hq, D]`, `k` and `v` `[new, H, D]`; returns like `q`."""
        tier = self._tier
        if layer == 0:
            tier.stats.load_back_tokens += sequence.prefix
        keys, values = self._whole(layer, sequence, k, v)
        out = tier.ops.prefill(q, keys, values, sequence.prefix, scale)
        self._store(layer, sequence, k, v)
        self._replay(layer, sequence, q, out, scale)
        self._settle(layer, sequence, q[-1:], scale)
        return out

    def _whole(
        self, layer: int, sequence: ExtendSequence, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of prefix and new tokens, `[H, prefix + new, D]`."""
        prefix, host = sequence.prefix, self._tier.host
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        if prefix:
            old = host.read_sequence(layer, sequence.pages[: -(-prefix // host.geometry.page_size)], prefix)
            keys, values = torch.cat((old[0], keys), dim=1), torch.cat((old[1], values), dim=1)
        return keys, values

    def _store(self, layer: int, sequence: ExtendSequence, k: torch.Tensor, v: torch.Tensor) -> None:
        """New tokens go to the host pool, and into the summaries of the pages that they are on."""
        tier, page = self._tier, self._tier.geometry.page_size
        tier.host.write_layer(layer, sequence.slots, k, v)
        touched = sequence.pages[sequence.prefix // page :]
        tier.summaries.rebuild(layer, touched, tier.host.read_keys(layer, touched), sequence.last_tokens(page))

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
        device = q.device
        host_rows = tier.host.rows.view(tier.host.dtype)
        every_page = tier.summaries.row_ids(sequence.pages).T
        for part in lengths[sparse_mask(lengths, tier.config)].split(REPLAY_QUERIES):
            n = part.numel()
            if not n:
                continue
            part = part.to(device)
            at, tail = part - 1 - prefix, (part - 1) // page
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
        width = tier.sets.owned(row)
        heads, device = tier.geometry.kv_heads, q.device
        total = torch.tensor([sequence.prefix + sequence.new])
        scores = chosen = None
        tier.was_sparse[row] = bool(sparse_mask(total + int(tier.chooses_early), tier.config))
        if tier.was_sparse[row]:
            candidates = torch.tensor([count - 1], device=device)
            rows = tier.summaries.row_ids(sequence.pages[:-1]).T.unsqueeze(0)
            scores = tier.summaries.score(tier.ops, layer, q, rows, candidates, scale)
            chosen = select_pages(scores, candidates, tier.config)
            if tier.config.miss_policy == "skip":
                tier.chosen[layer, row] = chosen[0].to(torch.int32)
                tier.chosen_tail[row] = count - 1
        if count <= width:
            order = torch.arange(count, device=device)
            pages = order.expand(heads, count)
            used = (order + (tier.step - count)).expand(heads, count)
            if chosen is not None:
                # The next step attends to these, so the page it may have to start must not take the place of one.
                used = used.scatter(-1, chosen[0], tier.step)
        else:
            if scores is None or chosen is None:
                raise RuntimeError(f"a dense sequence of {count} pages has a working set of {width}")
            # The budget's pages first, then by score what else there is room for, and the tail.
            budget, room = chosen.shape[-1], width - 1
            first = torch.arange(2 * budget, budget, -1, dtype=scores.dtype, device=device).expand_as(chosen)
            best = scores.scatter(-1, chosen, first).topk(room, dim=-1).indices[0]
            pages = torch.cat((best, torch.full((heads, 1), count - 1, device=device)), dim=1)
            used = torch.arange(-1, -room - 2, -1, device=device) + tier.step
            used[-1] = tier.step
        tier.sets.place(layer, row, pages, used)
        slots = pages.shape[1]
        head = tier.heads.view(-1, 1).expand(heads, slots)
        rows = tier.sets.cells.rows[layer, tier.sets.pages[row, :slots]].T
        loaded = tier.transfer.stats
        before = loaded.pages, loaded.seconds
        tier.transfer.load(layer, sequence.pages[pages].reshape(-1), head.reshape(-1), rows.reshape(-1))
        tier.stats.extend_pages += loaded.pages - before[0]
        tier.stats.extend_seconds += loaded.seconds - before[1]
