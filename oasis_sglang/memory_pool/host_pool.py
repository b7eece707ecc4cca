"""The host pool: the home of every token's K and V, in shared memory, indexed by slot."""

from __future__ import annotations

import torch

from oasis_sglang.memory_pool.shared_memory import SharedMemory
from oasis_sglang.memory_pool.sizing import PoolGeometry

# Page 0 is SGLang's padding page: its allocator never hands it out and padded rows read it.
RESERVED_PAGES = 1


class HostPool:
    """K and V of every slot, `[pages, layers, kv_heads, 2, page_size, head_dim]`.

    K and V of one (page, layer, head) are one contiguous piece, so that bringing it to the device is a single copy.
    A slot is the index SGLang's allocator hands out; its page is `slot // page_size`.

    The memory is a `SharedMemory`, so that worker processes can map it. Where the device is a GPU it is pinned, and
    kernels read and write it where it is.
    """

    def __init__(
        self, pages: int, geometry: PoolGeometry, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """
        Args:
            pages: pages that slots can name, without the reserved page.
            dtype: dtype of K and V; 8-bit floats are stored as their bytes.
            device: whose kernels use the pool; the marks of what is written are there.
        """
        if dtype.itemsize != geometry.itemsize:
            raise ValueError(f"dtype {dtype} has {dtype.itemsize} bytes, the geometry says {geometry.itemsize}")
        self.geometry = geometry
        self.pages = pages
        self.dtype = dtype
        # torch has no index_put for 8-bit floats, and copies need no arithmetic
        self.store_dtype = torch.uint8 if dtype.itemsize == 1 else dtype
        g = geometry
        shape = (pages + RESERVED_PAGES, g.layers, g.kv_heads, 2, g.page_size, g.head_dim)
        self.nbytes = (pages + RESERVED_PAGES) * g.page_size * g.token_bytes
        self._memory = SharedMemory.create("oasis-host-pool", self.nbytes)
        self.kv = self._memory.tensor(self.store_dtype).view(shape)
        if torch.device(device).type == "cuda":
            self._memory.pin()
        # Tokens written per page, so that nothing reads a page beyond what its owner wrote.
        self.fill = torch.zeros(pages + RESERVED_PAGES, dtype=torch.int32, device=device)

    @property
    def fd(self) -> int:
        """Descriptor of the shared memory, for processes that map it."""
        return self._memory.fd

    @property
    def rows(self) -> torch.Tensor:
        """Pieces `[pages * layers * kv_heads, 2, page_size * head_dim]`; see `row_ids`."""
        g = self.geometry
        return self.kv.view(-1, 2, g.page_size * g.head_dim)

    def row_ids(self, layer: int, pages: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """Index into `rows` of (page, layer, head); `pages` and `heads` broadcast."""
        g = self.geometry
        return (pages * g.layers + layer) * g.kv_heads + heads

    def write_layer(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store consecutive tokens of one sequence.

        Args:
            slots: `[n]` int64, in sequence order.
            k, v: `[n, kv_heads, head_dim]`.
        """
        page = self.geometry.page_size
        n = slots.numel()
        head = min(n, int(-int(slots[0]) % page))  # up to the first page boundary
        whole = (n - head) // page * page
        kv = self.kv[:, layer]
        if whole:
            ids = slots[head : head + whole : page] // page
            for side, x in ((0, k), (1, v)):
                block = x[head : head + whole].view(self.store_dtype).view(-1, page, *x.shape[1:])
                kv[:, :, side].index_copy_(0, ids, block.transpose(1, 2))
        for start, end in ((0, head), (head + whole, n)):
            if start < end:
                ids, offsets = slots[start:end] // page, slots[start:end] % page
                for side, x in ((0, k), (1, v)):
                    kv[ids, :, side, offsets] = x[start:end].view(self.store_dtype)

    def write_step(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store one token for each of several sequences, all layers at once, and count it.

        Args:
            slots: `[n]` int64.
            k, v: `[layers, n, kv_heads, head_dim]`.
        """
        page = self.geometry.page_size
        ids, offsets = slots // page, slots % page
        for side, x in ((0, k), (1, v)):
            self.kv[ids, :, :, side, offsets] = x.view(self.store_dtype).transpose(0, 1)
        self.mark_written(slots)

    def mark_written(self, slots: torch.Tensor, kept: torch.Tensor | None = None) -> None:
        """Record that tokens up to and including each slot of its page hold data in every layer.

        Args:
            slots: `[n]` int64, where the marks are.
            kept: `[n]` bool which of them count; None: all.
        """
        page = self.geometry.page_size
        ids, tokens = slots // page, (slots % page + 1).to(torch.int32)
        if kept is not None:
            ids, tokens = ids * kept, tokens * kept
        self.fill.scatter_reduce_(0, ids, tokens, "amax")

    def read_keys(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """Keys of whole pages, `[n, kv_heads, page_size, head_dim]`."""
        return self.kv[:, layer, :, 0].index_select(0, pages).view(self.dtype)

    def read_sequence(self, layer: int, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence's first `tokens` tokens, each `[kv_heads, tokens, head_dim]`.

        Raises:
            RuntimeError: a page holds fewer tokens than the sequence needs of it.
        """
        page = self.geometry.page_size
        self.require(pages, tokens)
        g = self.geometry
        block = self.kv[:, layer].index_select(0, pages).view(self.dtype)  # [n, heads, 2, page, dim]
        k, v = (
            block[:, :, side].transpose(0, 1).reshape(g.kv_heads, pages.numel() * page, g.head_dim)[:, :tokens]
            for side in (0, 1)
        )
        return k, v

    def require(self, pages: torch.Tensor, tokens: int) -> None:
        """Raise unless `pages`, in sequence order, hold `tokens` tokens."""
        page = self.geometry.page_size
        fill = self.fill[pages]
        short = fill[:-1] < page if pages.numel() > 1 else fill[:0].bool()
        if bool(short.any()) or int(fill[-1]) < tokens - (pages.numel() - 1) * page:
            raise RuntimeError(
                f"{tokens} tokens of KV were asked of host pages {pages.tolist()[:8]}, which hold "
                f"{fill.tolist()[:8]} tokens"
            )

    def invalidate(self, pages: torch.Tensor) -> None:
        """Forget what freed pages hold."""
        self.fill[pages] = 0

    def clear(self) -> None:
        self.fill.zero_()

    def close(self) -> None:
        """Give the memory back, once the last tensor over it is gone too."""
        del self.kv
        self._memory.close()
