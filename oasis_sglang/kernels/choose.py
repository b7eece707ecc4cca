"""Which ops attend on a GPU: on an NVIDIA device FlashInfer's where they serve the running shape, answer as the Triton
kernels do, and are the faster there; Triton's everywhere else. Tried once, at start."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from oasis_sglang.attention.ops import AttentionOps, TableLayout
from oasis_sglang.kernels.attention_shape import AttentionShape
from oasis_sglang.kernels.flashinfer import FlashInferOps, unsupported

logger = logging.getLogger(__name__)

Seconds = Callable[[Callable[[], object]], float]

# K and V that both read: enough that little of a layer is left in the cache (50 MB on an H100) when it comes again.
POOL_BYTES = 512 << 20
# Calls on different memory that are timed together: a step measures its lengths once, not for each layer.
LAYERS = 8
PASSES = 5
# Largest difference of the outputs against the largest output, both of which are rounded to two bytes.
AGREEMENT = 2e-2


class Choice(NamedTuple):
    """`seconds` of a layer by FlashInfer and by Triton, where both were timed."""

    ops: AttentionOps
    reason: str
    seconds: tuple[float, float] | None = None


class Trial(NamedTuple):
    """One step with random K, V, queries, lengths and page tables. The last sequence is empty, unless it is the only
    one."""

    q: torch.Tensor
    pools: list[tuple[torch.Tensor, torch.Tensor]]  # K and V rows of each layer
    table: torch.Tensor
    layout: TableLayout
    scale: float

    @classmethod
    def draw(cls, shape: AttentionShape, device: torch.device) -> Trial:
        random = torch.Generator(device).manual_seed(0)
        n, t, heads, width = shape.batch, shape.queries, shape.kv_heads, shape.page_size * shape.head_dim

        def normal(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(size, generator=random, device=device, dtype=shape.dtype).to(dtype)

        most = n * heads * shape.columns
        rows = min(most, POOL_BYTES // (2 * width * shape.kv_dtype.itemsize))
        k, v = (normal(rows + LAYERS, width, dtype=shape.kv_dtype) for _ in range(2))
        # Every layer is the same rows, moved on by one.
        pools = [(k[at : at + rows], v[at : at + rows]) for at in range(LAYERS)]
        table = torch.randint(rows, (n, heads, shape.columns), generator=random, device=device)
        least = max(shape.tokens - shape.page_size, t)
        tokens = torch.randint(least, shape.tokens + 1, (n,), generator=random, device=device)
        q = normal(n, t, shape.query_heads, shape.head_dim, dtype=shape.dtype)
        if n > 1:  # padding, which may compute with anything
            tokens[-1], q[-1] = 0, torch.nan
        layout = TableLayout(tokens, shape.columns, shape.page_size, t, shape.dtype)
        return cls(q, pools, table, layout, shape.head_dim**-0.5)

    def run(self, ops: AttentionOps) -> torch.Tensor:
        """All layers; the output of the last one."""
        for k, v in self.pools:
            out = ops.attend(self.q, k, v, self.table, self.layout, self.scale)
        return out


def why_no_flashinfer() -> str | None:
    """Why FlashInfer cannot be imported, or None."""
    try:
        import flashinfer.decode  # noqa: F401
    except Exception as error:  # it loads libraries of the device on import, which fail in their own ways
        return f"FlashInfer cannot be imported ({type(error).__name__}: {error})"
    return None


def graph_seconds(run: Callable[[], object]) -> float:
    """Of one call of `run`, by the device's clock, from a graph: the host's time does not count, as it does not in a
    server's steps. The fastest of `PASSES`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(PASSES):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1000)
    return min(times)


def choose_ops(
    triton: AttentionOps,
    shape: AttentionShape,
    device: torch.device,
    *,
    hip: bool = torch.version.hip is not None,
    why_not: Callable[[], str | None] = why_no_flashinfer,
    build: Callable[[AttentionShape, torch.device], AttentionOps] = FlashInferOps,
    seconds: Seconds = graph_seconds,
) -> Choice:
    """The ops to attend with in steps of up to this shape.

    Args:
        triton: what serves where FlashInfer does not.
        hip: whether the device is AMD's.
        why_not: a reason why FlashInfer cannot be used at all, or None.
        build, seconds: make FlashInfer's ops, and time a call.
    """
    if hip:
        return _chosen(triton, "Triton: the device is AMD's")
    reason = unsupported(shape)
    if reason is not None:
        return _chosen(triton, f"Triton: FlashInfer does not serve {reason}")
    if (missing := why_not()) is not None:
        return _chosen(triton, f"Triton: {missing}")
    logger.info("trying FlashInfer's attention; at the first start its kernels are compiled")
    trial = Trial.draw(shape, device)
    want = trial.run(triton).float()
    try:
        rival = build(shape, device)
        off = float((trial.run(rival).float() - want).abs().amax() / want.abs().amax())
        if not off <= AGREEMENT:
            logger.warning("FlashInfer's answer at %s differs from Triton's by %.3g of the largest value", shape, off)
            return _chosen(triton, "Triton: FlashInfer answers otherwise")
        theirs = seconds(functools.partial(trial.run, rival)) / LAYERS
    except Exception as error:  # no compiler for its kernels, or a device that they do not run on
        logger.warning("FlashInfer failed at %s", shape, exc_info=True)
        return _chosen(triton, f"Triton: FlashInfer failed ({type(error).__name__}: {error})")
    ours = seconds(functools.partial(trial.run, triton)) / LAYERS
    name = "FlashInfer" if theirs < ours else "Triton"
    times = f"{theirs * 1e6:.1f} µs with FlashInfer, {ours * 1e6:.1f} µs with Triton"
    return _chosen(rival if theirs < ours else triton, f"{name}: a layer takes {times}", (theirs, ours))


def _chosen(ops: AttentionOps, reason: str, seconds: tuple[float, float] | None = None) -> Choice:
    logger.info("attention by %s", reason)
    return Choice(ops, reason, seconds)
