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


def table_columns(dense_pages: int, any_sparse: bool, config: OasisConfig) -> int:
    """Columns of a step's page table: wide enough for every sequence, and one of few widths.

    Args:
        dense_pages: most pages of a dense sequence in the batch.
    """
    sparse_columns = config.budget_pages + 1
    multiple = max(LANES // config.page_size, 1)
    columns = -(-max(dense_pages, 1) // multiple) * multiple
    if dense_pages <= sparse_columns and (any_sparse or columns > sparse_columns):
        return sparse_columns
    return columns


class DecodePlan:
    """One decode step of a batch: made once, read by every layer.

    Attributes (n sequences, m of them sparse):
        rows: `[n]` working-set rows. slots: `[n]` where the new tokens go in the host pool.
        seq_lens: `[n]`, new token included. tail_page, tail_offset: `[n]` page and lane of the new token.
        sparse: `[m]` indices of sparse sequences; `sparse_rows` `[m]`, `sparse_tail` `[m]`, `sparse_host_pages`
            `[m, pages]` are theirs.
        tail_rows: `[layers, n, kv_heads]` pool row of the tail page.
        table: `[n, kv_heads, columns]` pool rows; dense parts are the same for every layer, sparse parts are not.
        layout: of `table`. host_layout: of the table over the host pool that dense layers read.
    """

    def __init__(self, rows: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor, config: OasisConfig) -> None:
        position = seq_lens - 1
        self.rows = rows
        self.slots = slots
        self.seq_lens = seq_lens
        self.tail_page = position // config.page_size
        self.tail_offset = position % config.page_size
        mask = sparse_mask(seq_lens, config)
        self.sparse = mask.nonzero(as_tuple=True)[0]
        self.dense = (~mask).nonzero(as_tuple=True)[0]
        self.starting = (self.tail_offset == 0).nonzero(as_tuple=True)[0]
        self.sparse_rows = rows[self.sparse]
        self.sparse_tail = self.tail_page[self.sparse]
        dense_pages = int(self.tail_page[self.dense].max()) + 1 if self.dense.numel() else 0
        self.columns = table_columns(dense_pages, self.sparse.numel() > 0, config)
        # lanes that hold tokens: all of a dense sequence; budget and tail of a sparse one
        self.tokens = torch.where(mask, config.token_budget + self.tail_offset + 1, seq_lens)
        # `m` positions in `sparse` of sequences that were dense one token ago
        was = sparse_mask(seq_lens[self.sparse] - 1, config)
        self.crossing = (~was).nonzero(as_tuple=True)[0]
        # filled by the tier, which knows the pools
        empty = rows.new_empty(0)
        self.sparse_host_pages = empty
        self.tail_rows = empty
        self.table = empty
        self.layout: TableLayout | None = None
        self.host_layout: TableLayout | None = None
