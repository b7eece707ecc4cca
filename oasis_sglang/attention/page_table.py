"""Which sequences of a batch attend sparsely, and the index tensors of one decode step."""

from __future__ import annotations

import torch

from oasis_sglang.attention.ops import TableLayout
from oasis_sglang.config import OasisConfig

# Page tables are this many lanes wide or a multiple of it, so that a sequence meets the same blocks of the attention
# kernel (512 keys in torch's CPU flash attention) whatever else is in its batch, and its output the same bits.
LANES = 512


def sparse_mask(seq_lens: torch.Tensor, config: OasisConfig) -> torch.Tensor:
    """The one place that decides sparse or dense: `[n]` bool from current lengths, the new token included.

    A sequence is sparse when it is at least `min_sparse_len` long and has more complete pages before its local tail
    than the budget; with fewer, everything is selected and dense is the same.
    """
    candidates = (seq_lens - 1) // config.page_size
    return (seq_lens >= config.min_sparse_len) & (candidates > config.budget_pages)


def table_columns(dense_pages: int, sparse_pages: int, any_sparse: bool, config: OasisConfig) -> int:
    """Columns of a step's page table: wide enough for every sequence, and one of few widths.

    Args:
        dense_pages: most pages of a dense sequence in the batch. sparse_pages: pages of a sparse one.
    """
    multiple = max(LANES // config.page_size, 1)
    columns = -(-max(dense_pages, 1) // multiple) * multiple
    if dense_pages <= sparse_pages and (any_sparse or columns > sparse_pages):
        return sparse_pages
    return columns


class DecodePlan:
    """One decode step of a batch: made once, read by every layer. Every sequence gets t new tokens: one, or the chain
    of drafts that is verified.

    Attributes (n sequences, m of them sparse):
        rows: `[n]` working-set rows. slots: `[n * t]` where the new tokens go in the host pool.
        seq_lens: `[n]`, new tokens included; `first` `[n]`, the first of them included.
        tail_page: `[n]` page of the first new token; `pages` and `offsets` `[n, t]`, page and lane of each.
        sparse: `[m]` indices of sparse sequences; `sparse_rows` `[m]`, `sparse_tail` `[m]`, `sparse_host_pages`
            `[m, pages]` are theirs.
        crossing: positions in `sparse` of sequences that were dense in their last step.
        token_rows: `[layers, n, t, kv_heads]` pool rows of the new tokens' pages.
        spill_rows: `[layers, m, kv_heads]` with t > 1, pool rows of the page after `sparse_tail` where new tokens reach
            it, else of the reserved page.
        dense_pages: `[n - m, pages]` device pages of dense sequences, 0 past their ends.
        table: `[n, kv_heads, columns]` pool rows of the layer that runs.
        layout: of `table`. host_layout: of the table over the host pool that dense layers read.
    """

    def __init__(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor, config: OasisConfig, new: int = 1
    ) -> None:
        self.rows = rows
        self.slots = slots
        self.new = new
        self.seq_lens = seq_lens
        self.first = seq_lens - (new - 1)
        position = (self.first - 1).view(-1, 1) + torch.arange(new)
        self.pages = position // config.page_size
        self.offsets = position % config.page_size
        self.tail_page = self.pages[:, 0]
        # A chain of drafts is sparse or dense as a whole: by its first token, which is certain.
        mask = sparse_mask(self.first, config)
        self.sparse = mask.nonzero(as_tuple=True)[0]
        self.dense = (~mask).nonzero(as_tuple=True)[0]
        self.sparse_rows = rows[self.sparse]
        self.sparse_tail = self.tail_page[self.sparse]
        dense_pages = int(self.pages[self.dense].max()) + 1 if self.dense.numel() else 0
        self.sparse_pages = config.budget_pages + (1 if new == 1 else 2)
        self.columns = table_columns(dense_pages, self.sparse_pages, self.sparse.numel() > 0, config)
        # lanes that hold tokens: all of a dense sequence; budget and tail of a sparse one
        self.tokens = torch.where(mask, config.token_budget + self.offsets[:, 0] + new, seq_lens)
        # filled by the tier, which knows the pools
        empty = rows.new_empty(0)
        self.crossing = empty
        self.sparse_host_pages = empty
        self.dense_pages = empty
        self.token_rows = empty
        self.spill_rows = empty
        self.table = empty
        self.layout: TableLayout | None = None
        self.host_layout: TableLayout | None = None
