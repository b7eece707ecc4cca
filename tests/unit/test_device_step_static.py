"""What a CUDA graph asks of a step: the host never looks at device data, and a replay would do the same launches at the
same addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.device_step import DeviceDecode
from oasis_sglang.kernels.launch import Launch, recording
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.kernels.streams import Streams
from oasis_sglang.memory_pool.host_pool import HostPool
from oasis_sglang.memory_pool.sizing import PoolGeometry
from oasis_sglang.memory_pool.sketch import KeySketches, slow_half
from oasis_sglang.memory_pool.summaries import KeySummaries
from oasis_sglang.memory_pool.working_set import WorkingSets

LAYERS, HEADS, QUERY_HEADS, DIM, PAGE, BATCH = 2, 2, 4, 64, 16, 4

CASES: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({"summary": "minmax", "fetch_ratio": 0.3}, 4),
    ({"miss_policy": "skip"}, 1),
    ({"miss_policy": "skip"}, 3),
    ({"miss_policy": "skip", "predictor": "draft", "summary": "minmax"}, 2),
    ({"miss_policy": "skip", "predictor": "none", "min_sparse_len": 200}, 2),
]


class Step:
    """A `DeviceDecode` with pools of its own, which hold no data on the device `meta`."""

    def __init__(self, settings: dict[str, Any], chain: int, device: str) -> None:
        config = OasisConfig(page_size=PAGE, token_budget=64, **settings).validate()
        sketch = slow_half(DIM) if config.summary == "sketch" else ()
        geometry = PoolGeometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, itemsize=2, page_size=PAGE, sketch=sketch)
        self.device, self.chain = device, chain
        self.host = HostPool(40, geometry, torch.bfloat16, device)
        kind = KeySketches if config.summary == "sketch" else KeySummaries
        self.summaries = kind(self.host, device)
        width = config.max_set_pages + (chain > 1)
        self.sets = WorkingSets(
            layers=LAYERS,
            kv_heads=HEADS,
            device_pages=60,
            rows=BATCH,
            set_pages=width,
            sequence_pages=30,
            device=device,
        )
        pool = torch.zeros(LAYERS, 2, 61, HEADS, PAGE, DIM, dtype=torch.bfloat16, device=device)
        self.pool = pool
        self.decode = DeviceDecode(
            config,
            host=self.host,
            sets=self.sets,
            summaries=self.summaries,
            k_pages=list(pool[:, 0]),
            v_pages=list(pool[:, 1]),
            ops=TritonOps(),
            query_heads=QUERY_HEADS,
            batch=BATCH,
            chain=chain,
            streams=Streams(),
        )
        self.new = [
            torch.zeros(BATCH * chain, heads, DIM, dtype=torch.bfloat16, device=device)
            for heads in (QUERY_HEADS, HEADS, HEADS)
        ]

    def run(self, rows: list[int], lengths: list[int], accepted: torch.Tensor | None) -> list[Launch]:
        """A step as a graph would hold it, with inputs that are on the device."""
        given = [torch.tensor(x, device=self.device) for x in (rows, lengths, [7] * len(rows) * self.chain)]
        table = torch.ones(len(rows), 20, dtype=torch.int64, device=self.device)
        with recording() as launches:
            self.decode.prepare(*given, table, self.chain, padded=BATCH, graph=True)
            for layer in range(LAYERS):
                out = self.decode.layer(layer, *self.new, 0.1)
                assert out.shape == (BATCH * self.chain, QUERY_HEADS, DIM)
            self.decode.finish(accepted)
        return launches

    def own(self) -> list[torch.Tensor]:
        """All memory that a step uses, its inputs and outputs aside."""
        state = [x for x in vars(self.decode.state).values() if isinstance(x, torch.Tensor)]
        inputs = [x for turn in self.decode.state.inputs for x in turn]
        maps = [x for x in vars(self.sets).values() if isinstance(x, torch.Tensor)]
        summaries = [x for x in vars(self.summaries).values() if isinstance(x, torch.Tensor)]
        return [*state, *inputs, *maps, *summaries, self.sets.cells.rows, self.host.kv, self.host.fill, self.pool]


@pytest.mark.parametrize(("settings", "chain"), CASES)
def test_the_host_never_looks_at_device_data(settings: dict[str, Any], chain: int) -> None:
    """On `meta` every such look raises: `item`, `tolist`, `nonzero`, a branch on a tensor, a copy to the host."""
    step = Step(settings, chain, "meta")
    accepted = None if chain == 1 else torch.zeros(BATCH, dtype=torch.int64, device="meta")
    names = {x.kernel.__name__ for x in step.run([0, 1, 2], [50, 120, 300], accepted)}
    score = {"minmax_kernel" if settings.get("summary") == "minmax" else "sketch_kernel", "share_kernel"}
    assert names >= {"place_kernel", "write_kernel", "select_kernel", "gather_kernel", "backup_kernel", *score}
    assert ("remember_kernel" in names) == (settings.get("miss_policy") == "skip")


def test_meta_would_tell() -> None:
    x = torch.zeros(3, device="meta")
    for look in (lambda: x[0].item(), lambda: x.nonzero(), lambda: bool(x[0] > 0), lambda: x.cpu(), lambda: x.tolist()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            look()


def fingerprint(launch: Launch, own: set[int]) -> tuple[Any, ...]:
    """All that a graph fixes: grid, numbers, shapes, and addresses of what is not made anew in each step."""
    args = []
    for x in launch.args:
        if isinstance(x, torch.Tensor):
            address = x.data_ptr() if x.untyped_storage().data_ptr() in own else None
            args.append((address, tuple(x.shape), x.stride(), x.dtype))
        else:
            args.append(x)
    return (launch.kernel.__name__, launch.grid, *args, *sorted(launch.constants.items()), *launch.options.items())


@pytest.mark.parametrize(("settings", "chain"), CASES)
def test_replays_do_the_same_at_the_same_addresses(settings: dict[str, Any], chain: int) -> None:
    """Whatever sequences there are, dense or sparse, and however many are padding. Only what attention returns and
    works in, which a graph takes from its own pool, is made anew."""
    step = Step(settings, chain, "cpu")
    for _ in range(BATCH):
        assert step.sets.reserve(step.sets.set_pages)
    own = {x.untyped_storage().data_ptr() for x in (*step.own(), *step.new)}
    before = [x.data_ptr() for x in step.own()]
    accepted = None if chain == 1 else torch.ones(BATCH, dtype=torch.int64)
    runs = [
        step.run(rows, lengths, accepted)
        for rows, lengths in (([0, 1, 2], [50, 120, 300]), ([3], [17]), ([2, 0, 3, 1], [310, 280, 18, 66]))
    ]
    prints = [[fingerprint(x, own) for x in launches] for launches in runs]
    assert prints[0] == prints[1] == prints[2]
    assert before == [x.data_ptr() for x in step.own()]
    for launch in runs[0]:
        for name, x in zip(launch.kernel.arg_names, launch.args, strict=False):
            if isinstance(x, torch.Tensor) and x.numel() and x.untyped_storage().data_ptr() not in own:
                late = launch.kernel.__name__ in ("sketch_kernel", "minmax_kernel") and name == "q"
                fresh = launch.kernel.__name__ in ("attend_kernel", "merge_kernel")
                assert late or (fresh and name in ("out", "parts", "part_lse")), (launch.kernel.__name__, name)


@pytest.mark.parametrize(
    ("rows", "columns", "padded", "new"),
    [(5, 4, None, 1), (2, 31, None, 1), (3, 4, 2, 1), (1, 4, None, 3), (1, 4, 5, 1)],
)
def test_more_than_there_is_memory_for_is_refused(rows: int, columns: int, padded: int | None, new: int) -> None:
    step = Step({}, 2, "meta")
    given = [torch.zeros(size, dtype=torch.int64) for size in (rows, rows, rows * new)]
    with pytest.raises(ValueError, match=r"does not fit 4 sequences with 2 new tokens and 30 pages"):
        step.decode.prepare(*given, torch.zeros(rows, columns, dtype=torch.int64), new, padded=padded)


@pytest.mark.parametrize(
    ("settings", "chain", "name"),
    [
        ({"dense_layers": 1}, 1, "dense_layers=1 works on CPU hosts only"),
        ({"debug_attention_mass": True}, 1, "debug_attention_mass"),
        ({"transfer": "workers"}, 1, "transfer='workers'"),
        ({}, 9, "num-draft-tokens=9 does not work on a GPU .* use 8 or fewer"),
    ],
)
def test_what_only_a_cpu_host_does_is_refused(settings: dict[str, Any], chain: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Step(settings, chain, "meta")
