"""The order of a step's work on two streams (contract 3): copies wait for compute in both directions, a layer's
attention for its own copies alone, and nothing touches what the other stream may be using. Kernels are written down,
not run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oasis_sglang.config import OasisConfig
from tests.unit.device_rig import DeviceRig
from tests.unit.stream_log import COMPUTE, SIDE, Op, StreamLog, logging_to

LAYERS, STEPS = 3, 4


class Logged:
    """Steps of a batch with a dense and a sparse sequence; what is in the tensors does not matter."""

    def __init__(self, policy: Any, predictor: Any = "previous", chain: int = 1, graph: bool = False) -> None:
        config = OasisConfig(page_size=16, token_budget=64, miss_policy=policy, predictor=predictor)
        self.log = StreamLog()
        rig = self.rig = DeviceRig(config, chain=chain, layers=LAYERS, streams=self.log)
        sequences = [rig.start(prompt, 24) for prompt in (20, 140)]
        self.inputs: list[torch.Tensor] = []
        h = rig.harness
        with logging_to(self.log):
            for step in range(STEPS):
                self.log.tag = (step, "inputs")
                rows = torch.tensor([s.attempt.row for s in sequences])
                lengths = torch.tensor([s.tokens + chain for s in sequences])
                slots = torch.zeros(2 * chain, dtype=torch.int64)
                table = torch.ones(2, 12, dtype=torch.int64)
                self.log.tag = (step, "prepare")
                rig.device.prepare(rows, lengths, slots, table, chain, graph=graph)
                for layer in range(LAYERS):
                    self.log.tag = (step, layer)
                    q, k, v = (torch.zeros(2 * chain, x, 16) for x in (h.query_heads, 2, 2))
                    self.inputs += [q, k, v]  # kept, so that no address is used twice
                    self.inputs.append(rig.device.layer(layer, q, k, v, h.scale))
                self.log.tag = (step, "finish")
                rig.device.finish(None if chain == 1 else torch.full((2,), chain))
        self.ops = self.log.ops

    def find(self, name: str, tag: Any) -> Op:
        (op,) = [x for x in self.ops if x.name == name and x.tag == tag]
        return op

    def races(self) -> list[str]:
        """Pairs of operations on different streams that touch the same bytes, one of them writing, in no order."""
        sides = [[x for x in self.ops if x.stream == stream] for stream in (COMPUTE, SIDE)]
        table = self.rig.tier.summaries.table
        start = table.data_ptr()
        end = start + table.numel() * table.element_size()
        found = []
        for a in sides[COMPUTE]:
            for b in sides[SIDE]:
                if a.after(b) or b.after(a):
                    continue
                for x in (*a.writes, *a.reads):
                    for y in (*b.writes, *b.reads):
                        # Tokens are added to the summaries of pages that nobody scores before the next step.
                        ours = start <= x.start < end
                        if x.meets(y) and (x in a.writes or y in b.writes) and not ours:
                            found.append(f"{a.tag} {a.name} and {b.tag} {b.name}")
        return found


CASES = [
    ("wait", "previous", 1),
    ("wait", "draft", 3),
    ("skip", "previous", 1),
    ("skip", "draft", 2),
    ("skip", "previous", 2),
    ("skip", "none", 2),
]


@pytest.mark.parametrize(("policy", "predictor", "chain"), CASES)
@pytest.mark.parametrize("graph", [False, True])
def test_no_memory_is_used_by_both_streams_at_once(policy: str, predictor: str, chain: int, graph: bool) -> None:
    logged = Logged(policy, predictor, chain, graph)
    assert {x.stream for x in logged.ops} == {COMPUTE, SIDE}
    assert logged.races() == []


def test_attention_waits_for_the_copies_of_its_own_layer_only() -> None:
    """Item 3 of the contracts, and the point of it all: while the last step's copies for later layers are on their way,
    the first layers run."""
    logged = Logged("skip")
    for step in range(STEPS - 1):
        for layer in range(LAYERS):
            fetched = logged.find("gather_kernel", (step, layer))
            assert fetched.stream == SIDE
            attending = logged.find("attend_kernel", (step + 1, layer))
            assert attending.after(fetched)
            assert logged.find("write_kernel", (step + 1, layer)).after(fetched)
            if layer:
                assert not logged.find("attend_kernel", (step + 1, layer - 1)).after(fetched)


def test_copies_wait_for_attention() -> None:
    """C13: a page is overwritten only after the attention that reads it; choosing reads the step's queries."""
    logged = Logged("skip")
    for step in range(STEPS):
        for layer in range(LAYERS):
            attending = logged.find("attend_kernel", (step, layer))
            for name in ("select_kernel", "gather_kernel"):
                assert logged.find(name, (step, layer)).after(attending)


@pytest.mark.parametrize("policy", ["wait", "skip"])
def test_new_tokens_reach_the_host_beside_compute(policy: str) -> None:
    """C12: after all layers wrote them, and before the buffers that they are in are used again."""
    logged = Logged(policy)
    for step in range(STEPS):
        saved = logged.find("backup_kernel", (step, "finish"))
        assert saved.stream == SIDE
        assert saved.after(logged.find("write_kernel", (step, LAYERS - 1)))
        later = [x for x in logged.ops if x.tag == (step + 2, "prepare")]
        assert all(x.after(saved) for x in later)


def test_the_last_accepted_token_chooses_when_it_is_known() -> None:
    """All layers look ahead when the chain was verified, and each can still be waited for alone."""
    logged = Logged("skip", "previous", 3)
    fetches = [x for x in logged.ops if x.name == "gather_kernel" and x.tag == (0, "finish")]
    assert len(fetches) == LAYERS
    for layer, fetched in enumerate(fetches):
        assert logged.find("attend_kernel", (1, layer)).after(fetched)
        assert layer == 0 or not logged.find("attend_kernel", (1, layer - 1)).after(fetched)


@pytest.mark.parametrize(("policy", "predictor", "chain"), CASES)
def test_a_graph_ends_with_its_work_joined(policy: str, predictor: str, chain: int) -> None:
    """No edge may leave a graph: what follows is after all of it."""
    logged = Logged(policy, predictor, chain, graph=True)
    for step in range(STEPS - 1):
        inside = [x for x in logged.ops if x.tag[0] == step and (chain == 1 or x.tag[1] != "finish")]
        after = [x for x in logged.ops if x.tag[0] == step + 1 and x.tag[1] != "inputs"]
        assert inside
        assert all(y.after(x) for x in inside for y in after)


def test_queries_are_lent_to_the_side_stream() -> None:
    """Their memory is compute's, which would give it to the next layer while they are still read."""
    logged = Logged("skip")
    own = {x.untyped_storage().data_ptr() for x in logged.inputs}
    read = {span.storage for op in logged.ops if op.stream == SIDE for span in (*op.reads, *op.writes)}
    assert read & own == set(logged.log.lent) != set()


def test_pages_are_given_back_after_all_copies() -> None:
    """Copy, then fence, then free: what compute does after the fence is after everything."""
    logged = Logged("skip")
    with logging_to(logged.log):
        logged.rig.device.fence()
        logged.log.tag = "free"
        logged.rig.tier.sets.pages.fill_(0)
    freed = logged.ops[-1]
    assert freed.tag == "free"
    assert all(freed.after(x) for x in logged.ops[:-1] if x.stream == SIDE)


def test_the_log_finds_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same steps with a layer's wait left out."""

    wait = StreamLog.wait
    monkeypatch.setattr(StreamLog, "wait", lambda self, key: None if key == 1 else wait(self, key))
    found = Logged("skip").races()
    assert any("(1, 1) place_kernel and (0, 1) select_kernel" in x for x in found)
    assert any("(1, 1) attend_kernel and (0, 1) gather_kernel" in x for x in found)
