"""Decode steps of a model of Qwen3-8B's shape: all of the context attended, against the project's pipeline.

Dense steps keep all K and V in device memory and attend over page tables that name everything. Both attend with what a
server would take for steps of their shape, FlashInfer's kernels or Triton's, and the results say which.
Sparse ones are `DeviceDecode`'s, in two ways: `skip` with the paper's cap of 5 % fetches up to that much every step
for the next one; `wait` fetches all that the step misses before it attends. Weights, keys and values are random: what
a step misses follows from how alike successive queries are made (`gpu_model.OWN`), not from text, and is reported.
"""

from __future__ import annotations

import functools
import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_host import SHARE, HostSide, available_bytes
from benchmarks.gpu_implementations import choice_for, name_of
from benchmarks.gpu_model import Model
from benchmarks.gpu_scale import Scale, scale_of
from benchmarks.gpu_stage import Item
from benchmarks.gpu_steps import DenseSteps, SparseSteps, Steps
from benchmarks.gpu_timer import Timer, captured
from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.attention_shape import AttentionShape
from oasis_sglang.kernels.choose import Choice
from oasis_sglang.kernels.step_state import StepShape

# Labels, and what each way sets.
SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "skip": ("skip, cap 5 %", {"miss_policy": "skip", "fetch_ratio": 0.05}),
    "wait": ("wait", {"miss_policy": "wait"}),
}
# Steps before those that are timed, and these: in both a page is begun by every sequence at least once.
SETTLE, STEPS = 8, 32


def items(tiny: bool) -> list[Item]:
    scale = scale_of(tiny)
    bench = Decode(scale)
    found = [Item("model and host pool", 45.0, bench.setting)]
    for context, n in scale.batches:
        found.append(Item(f"{context} × {n} dense", 10.0, partial(bench.dense, context, n)))
        for kind in SPARSE:
            found.append(Item(f"{context} × {n} {kind}", 16.0, partial(bench.sparse, context, n, kind)))
    return found


def attention_of(choice: Choice) -> dict[str, Any]:
    """What attends in the steps that are measured, and why."""
    return {"attention": name_of(choice.ops), "attention_reason": choice.reason}


class Decode:
    def __init__(self, scale: Scale) -> None:
        self.scale, self.timer = scale, Timer(scale)

    @functools.cached_property
    def model(self) -> Model:
        return Model(self.scale)

    @functools.cached_property
    def host(self) -> HostSide:
        """As many pages as the largest batch needs, or as the host's memory has room for."""
        room = int(available_bytes() * SHARE) // (self.scale.token_bytes * self.scale.page)
        return HostSide(self.scale, min(max(n * self._pages(context) for context, n in self.scale.batches), room))

    def _pages(self, context: int) -> int:
        """Room of a sequence: its context and the tokens that steps add, those of warm-ups included."""
        return (context + SETTLE + 2 * STEPS) // self.scale.page + 2

    def setting(self) -> dict[str, Any]:
        scale = self.scale
        return {
            "kind": "setting",
            "context": 0,
            "sequences": 0,
            "weights": f"random, {scale.layers} layers, each its own",
            "weight_bytes": self.model.nbytes,
            "host_pool_bytes": self.host.pool.nbytes,
            "key_summary_bytes": self.host.sketches.nbytes,
        }

    def dense(self, context: int, n: int) -> dict[str, Any]:
        scale, pages = self.scale, self._pages(context)
        nbytes = n * pages * scale.page * scale.token_bytes
        found = {"kind": "dense", "label": "dense", "context": context, "sequences": n, "kv_bytes": nbytes}
        model = self.model
        if scale.device.type == "cuda" and nbytes + scale.spare_bytes > torch.cuda.mem_get_info()[0]:
            return found | {"skipped": f"its K and V take {nbytes / 1e9:.0f} GB of device memory"}
        shape = AttentionShape(
            query_heads=scale.query_heads, kv_heads=scale.kv_heads, head_dim=scale.head_dim, page_size=scale.page,
            columns=pages, tokens=pages * scale.page, batch=n, queries=1, dtype=scale.dtype, kv_dtype=scale.dtype,
        )  # fmt: skip
        choice = choice_for(shape, scale.device)
        steps = DenseSteps(scale, model, n, context, pages, choice.ops)
        return found | attention_of(choice) | self._measure(steps, n)

    def sparse(self, context: int, n: int, kind: str) -> dict[str, Any]:
        scale, pages = self.scale, self._pages(context)
        label, keys = SPARSE[kind]
        config = OasisConfig(page_size=scale.page, token_budget=scale.budget, **keys)
        nbytes = n * config.max_set_pages * scale.page * scale.token_bytes
        found = {"kind": kind, "label": label, "context": context, "sequences": n, "kv_bytes": nbytes}
        if n * pages > self.host.pool.pages:
            needed = n * pages * scale.page * scale.token_bytes
            return found | {"skipped": f"its K and V take {needed / 1e9:.0f} GB of host memory"}
        step = StepShape.of(
            config, self.host.pool.geometry, query_heads=scale.query_heads, batch=n, chain=1, rows=n,
            sequence_pages=pages,
        )  # fmt: skip
        choice = choice_for(step.attention(scale.dtype), scale.device)
        steps = SparseSteps(self.host, self.model, n, context, pages, config, choice.ops)
        return found | attention_of(choice) | self._measure(steps, n)

    def _measure(self, steps: Steps, n: int) -> dict[str, Any]:
        on_gpu = self.scale.device.type == "cuda"
        run = captured(steps.run, steps.before).replay if on_gpu else steps.run
        count = 1 if self.scale.tiny else STEPS

        def one() -> None:
            steps.before()
            run()

        for _ in range(1 if self.scale.tiny else SETTLE):
            one()
        each = [self.timer.elapsed(one) for _ in range(count)]

        def all_of_them() -> None:
            for _ in range(count):
                one()

        seconds = self.timer.elapsed(all_of_them) / count
        return {
            "step_seconds": seconds,
            "step_seconds_alone": statistics.median(each),
            "tokens_per_second": n / seconds,
            **steps.figures(count),
        }
