"""FlashInfer 0.7.2's `fa2` module for paged attention, restated in float64 from `attention/scheduler.cuh` (plan) and
`attention/prefill.cuh` (run): which block does which part of which request, where its partial result goes, and what is
joined. Plans see the host's lengths, runs the device's, as there."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch

MULTIPROCESSORS = 132
CAUSAL = 1  # of MaskMode
HND = 1  # of TensorLayout


class Plan(NamedTuple):
    cut: bool
    chunk: int  # tokens of a part
    parts: list[int]  # of each request
    queries: list[int]


class Module:
    """What `get_batch_prefill_module` returns; keeps its last plan's inputs."""

    def __init__(self) -> None:
        self.plans: list[dict[str, Any]] = []

    def workspace_size(self, *args: Any) -> tuple[int, int]:
        raise NotImplementedError

    def plan(self, *args: Any) -> Plan:
        names = (
            "float_work", "int_work", "pinned", "qo_indptr", "kv_indptr", "kv_lens", "rows", "batch", "query_heads",
            "kv_heads", "page", "graph", "dim_qk", "dim_vo", "causal", "window_left", "fixed_split", "no_split",
            "colocated", "uniform",
        )  # fmt: skip
        assert len(args) == len(names)
        given = dict(zip(names, args, strict=True))
        self.plans.append(given)
        assert given["float_work"].dtype == given["int_work"].dtype == torch.uint8
        assert given["pinned"].numel() == given["int_work"].numel()
        for name in ("qo_indptr", "kv_indptr", "kv_lens"):
            assert given[name].device.type == "cpu"
            assert given[name].dtype == torch.int32
        assert given["graph"]
        assert (given["kv_heads"], given["window_left"], given["fixed_split"]) == (1, -1, -1)
        queries, pages = (given[name].diff().tolist() for name in ("qo_indptr", "kv_indptr"))
        # One tile of query rows per request: no more than its 128 rows are planned here.
        assert max(queries) * given["query_heads"] <= 128
        chunk = max(128 // given["page"], 1)
        if given["no_split"]:
            chunk = max(pages)
        while sum(-(-max(n, 1) // chunk) for n in pages) > MULTIPROCESSORS * 2 and chunk < max(pages):
            chunk += 1
        parts = [-(-max(n, 1) // chunk) for n in pages]
        self._check_work(given, parts)
        return Plan(not given["no_split"], chunk * given["page"], parts, queries)

    def _check_work(self, given: dict[str, Any], parts: list[int]) -> None:
        """The plan's arrays and partial results fit what it was given."""
        group, uniform, batch, rows = (given[x] for x in ("query_heads", "uniform", "batch", "rows"))
        packed = (uniform or rows - batch + 1) * group
        tile = 128 if packed > 64 and given["dim_vo"] < 256 else 64 if packed > 16 else 16
        tiles = batch * -(-packed // tile) if uniform else -(-rows * group // tile) + batch - 1
        launched = max(MULTIPROCESSORS * 2, tiles)
        assert sum(parts) <= launched
        sizes = [4 * launched] * 3 + [4 * (batch + 1), 4, 4, launched]
        if not given["no_split"]:
            sizes.append(4 * (rows + 1))
            # Partial results are two bytes wide where they are written, but planned as float32.
            partial = group * -(-launched * tile // group)
            assert partial * (given["dim_vo"] + 1) * 4 + 16 <= given["float_work"].numel()
        assert sum(-(-x // 16) * 16 for x in sizes) <= given["int_work"].numel()

    def paged_run(self, *args: Any) -> None:
        plan, q, k, v, qo_indptr, kv_indptr, indices, last, out, lse, mask, layout, window = args[2:15]
        scale = args[15 + 1 + 7]
        assert (lse, layout, window) == (None, HND, -1)
        assert k.stride() == v.stride()
        assert k.shape[1] == 1
        page, group, dim = k.shape[2], q.shape[1], q.shape[2]
        first = [0]  # of each request's partial results
        for parts, t in zip(plan.parts, plan.queries, strict=True):
            first.append(first[-1] + parts * t)
        partial = torch.full((first[-1], group, dim), torch.nan, dtype=torch.float64)
        logs = torch.full((first[-1], group), torch.nan, dtype=torch.float64)
        for r, (parts, t) in enumerate(zip(plan.parts, plan.queries, strict=True)):
            start, end = kv_indptr[r : r + 2].tolist()
            length = (end - start - 1) * page + int(last[r]) if end > start else 0
            true_parts = -(-max(length, 1) // plan.chunk)
            assert qo_indptr[r : r + 2].diff().item() == t
            for part in range(parts):
                begin, stop = (
                    min(x * plan.chunk, length) if plan.cut else y for x, y in ((part, 0), (part + 1, length))
                )
                lanes = range(begin, stop)
                at = [(int(indices[start + lane // page]), lane % page) for lane in lanes]
                keys, values = (
                    torch.stack([x[row, 0, lane] for row, lane in at]).double() if at else torch.zeros(0, dim).double()
                    for x in (k, v)
                )
                for j in range(t):
                    seen = max(min(length - (t - 1 - j) if mask == CAUSAL else length, stop) - begin, 0)
                    score = q[int(qo_indptr[r]) + j].double() @ keys[:seen].T * scale
                    to = first[r] + (j * true_parts + part if plan.cut else j)
                    if seen == 0:
                        partial[to], logs[to] = 0, -math.inf
                    else:
                        partial[to], logs[to] = score.softmax(-1) @ values[:seen], score.logsumexp(-1)
        at = 0
        for r, (parts, t) in enumerate(zip(plan.parts, plan.queries, strict=True)):
            for j in range(t):
                # Where no part saw anything, nothing has a weight.
                weight = logs[at : at + parts].softmax(0).nan_to_num(0).unsqueeze(-1)
                out[int(qo_indptr[r]) + j] = (weight * partial[at : at + parts]).sum(0).to(out.dtype)
                at += parts


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Let FlashInfer's wrappers run the restated kernel, on a machine that neither pins memory nor has a device to ask
    for its capability."""
    decode = pytest.importorskip("flashinfer.decode")
    module, empty = Module(), torch.empty
    monkeypatch.setattr(decode, "get_batch_prefill_module", lambda *_: module)
    monkeypatch.setattr(decode, "device_support_pdl", lambda _: True)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))
    return module
