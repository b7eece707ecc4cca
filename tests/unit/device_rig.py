"""Steps on a device, on CPU tensors: prompts by the tier of a CPU host, decode steps by `DeviceDecode`."""

from __future__ import annotations

import random

import torch

from oasis_sglang.attention.ops import AttentionOps
from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.device_step import DeviceDecode
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.kernels.streams import Streams
from tests.unit import oracle
from tests.unit.device_oracle import Follower
from tests.unit.harness import Harness, Sequence


class DeviceRig:
    """Pools and summaries start out poisoned with NaN; batches are padded to `batch`."""

    def __init__(
        self,
        config: OasisConfig,
        *,
        batch: int = 4,
        chain: int = 1,
        probe: bool = False,
        layers: int = 2,
        ops: AttentionOps | None = None,
        streams: Streams | None = None,
        seed: int = 0,
        head_dim: int = 16,
    ) -> None:
        self.harness = Harness(
            config, head_dim=head_dim, device_pages=48, rows=4, layers=layers, chain=chain, probe=probe, seed=seed
        )
        self.tier, self.config = self.harness.tier, config
        self.device = DeviceDecode(
            config,
            host=self.tier.host,
            sets=self.tier.sets,
            summaries=self.tier.summaries,
            k_pages=self.harness.k_pages,
            v_pages=self.harness.v_pages,
            ops=TritonOps() if ops is None else ops,
            query_heads=self.harness.query_heads,
            batch=batch,
            chain=chain,
            probe=probe,
            streams=streams,
        )
        if config.miss_policy == "skip":
            self.tier.chosen, self.tier.chosen_tail = self.device.state.chosen, self.device.state.chosen_tail
        self.followers: dict[int, Follower] = {}
        self.draw = random.Random(seed)

    def start(self, prompt: int, more: int) -> Sequence:
        """A sequence of `prompt` tokens that will get at most `more`."""
        harness, tier = self.harness, self.tier
        s = harness.admit(prompt + more)
        assert s is not None
        tier.step = self.device.step
        harness.extend(s, prompt)
        row = s.attempt.row
        record = [oracle.sequence(tier.host, layer, s.pages, s.tokens) for layer in range(harness.geometry.layers)]
        follower = Follower(self.config, tier.sets, row, record, harness.scale, tier.probe)
        if self.config.miss_policy == "skip":
            assert bool(tier.was_sparse[row]) == follower.is_sparse(prompt + 1), "nothing is chosen ahead here"
            if tier.was_sparse[row]:
                follower.chosen = tier.chosen[:, row].tolist()
                follower.chosen_tail = int(tier.chosen_tail[row])
        self.followers[row] = follower
        return s

    def leave(self, s: Sequence) -> None:
        self.device.fence()
        self.harness.drop(s)
        del self.followers[s.attempt.row]

    def step(self, sequences: list[Sequence], new: int, accepted: list[int] | None = None, graph: bool = False) -> None:
        """One step, compared with what it should compute and leave behind."""
        harness, device, tier = self.harness, self.device, self.tier
        n, heads, dim = len(sequences), harness.geometry.kv_heads, harness.geometry.head_dim
        slots = torch.cat([harness._grow(s, new) for s in sequences])
        longest = max(len(s.pages) for s in sequences)
        table = torch.tensor([s.pages + [-7] * (longest - len(s.pages)) for s in sequences])
        rows = torch.tensor([s.attempt.row for s in sequences])
        lengths = torch.tensor([s.tokens + new for s in sequences])
        device.prepare(rows, lengths, slots, table, new, padded=device.batch, graph=graph)
        followers = [self.followers[s.attempt.row] for s in sequences]
        written = []
        for layer in range(harness.geometry.layers):
            q, k, v = (harness.noise(device.batch, new, x, dim) for x in (harness.query_heads, heads, heads))
            for x in (q, k, v):
                x[n:] = torch.nan  # what padded sequences compute with may be anything
            out = device.layer(layer, *(x.flatten(0, 1) for x in (q, k, v)), harness.scale).view_as(q)
            assert not out[n:].any()
            for i, follower in enumerate(followers):
                right, attended = follower.layer(layer, device.step, q[i], k[i], v[i])
                torch.testing.assert_close(out[i].double(), right, rtol=1e-4, atol=1e-4)
                if self.config.miss_policy == "wait" and not self.config.fetch_is_capped:
                    asking, keys = q[i, :1] if tier.probe else q[i], follower.record[layer][0]
                    exact = oracle.top_pages(asking.double(), keys, follower.tokens + 1, self.config, harness.scale)
                    assert [sorted(x) for x in attended] == exact
            written.append((k, v))
        kept = [new] * n if accepted is None else accepted
        device.finish(None if accepted is None else torch.tensor(accepted))
        for i, (s, follower) in enumerate(zip(sequences, followers, strict=True)):
            follower.finish(device.step, new, [(k[i], v[i]) for k, v in written], kept[i])
            s.tokens += kept[i]
        self.check(sequences)

    def check(self, sequences: list[Sequence]) -> None:
        """Maps, host pool, marks of what is written and summaries."""
        harness, tier, page = self.harness, self.tier, self.config.page_size
        self.device.check()
        tier.check_integrity()
        assert int(tier.host.fill[0]) == 0
        for s in sequences:
            follower = self.followers[s.attempt.row]
            follower.check_maps()
            fill = tier.host.fill[s.pages].tolist()
            assert fill == [min(max(s.tokens - p * page, 0), page) for p in range(len(s.pages))]
            for layer, record in enumerate(follower.record):
                for held, right in zip(oracle.sequence(tier.host, layer, s.pages, s.tokens), record, strict=True):
                    assert torch.equal(held, right)
                self._check_summary(s, layer, record[0], (s.tokens - 1) // page)
        assert all(bool(x[0].eq(0).all()) for x in (*harness.k_pages, *harness.v_pages))

    def _check_summary(self, s: Sequence, layer: int, keys: torch.Tensor, number: int) -> None:
        """Of the page that the newest token is on."""
        from oasis_sglang.memory_pool import sketch

        page, summaries = self.config.page_size, self.tier.summaries
        block = keys[number * page : (number + 1) * page].transpose(0, 1)
        row = summaries.table[layer, summaries.row_ids(torch.tensor(s.pages[number]))]
        if self.config.summary == "minmax":
            assert torch.equal(row.double(), torch.cat((block.amax(1), block.amin(1)), dim=-1))
            return
        codes, steps = oracle.quantised(block)
        held, scales = sketch.decode(row, codes.shape[-1])
        assert torch.equal(held[:, : block.shape[1]].double(), codes)
        assert torch.equal(scales[:, : block.shape[1]].double(), steps.squeeze(-1))
