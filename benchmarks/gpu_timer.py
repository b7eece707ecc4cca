"""Seconds that work on a device takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu_scale import Scale


class Timer:
    """Medians over `Scale.repeats` runs, by the device's own clock; on a CPU one run by the wall clock."""

    def __init__(self, scale: Scale) -> None:
        self._repeats = scale.repeats
        self._on_gpu = scale.device.type == "cuda"

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one call of `run`, whose launches are captured once and replayed, so that no time of the host counts.

        `run` is called a few times before, which compiles its kernels.
        """
        if not self._on_gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        graph = captured(run)
        return statistics.median(self.elapsed(graph.replay) for _ in range(self._repeats))

    def elapsed(self, run: Callable[[], object]) -> float:
        """Of a single call, from when the device has nothing else to do."""
        if not self._on_gpu:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1000


def captured(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches; it and `before` are called a few times first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            before()
            run()
    torch.cuda.current_stream().wait_stream(stream)
    before()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph
