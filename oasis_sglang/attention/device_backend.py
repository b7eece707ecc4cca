"""The attention backend where steps are the device's: no step waits for it, and CUDA graphs can hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.attention.verify_mask import VerifyMask, maybe_create_verify_mask

from oasis_sglang import metrics
from oasis_sglang.attention.backend import OasisAttnBackend
from oasis_sglang.memory_pool.device_tier import DevicePlan, DeviceTier

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner


class DeviceAttnBackend(OasisAttnBackend):
    """A graph's padding is told by a length of 0."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        if not isinstance(self.tier, DeviceTier):
            raise RuntimeError(f"the tier is a {type(self.tier).__name__}, expected a DeviceTier")
        decoder = self.tier.decoder
        self._verify_mask = maybe_create_verify_mask(
            is_draft_runner=False,
            skip_prefill=False,
            max_bs=decoder.batch,
            max_context_len=0,
            num_draft_tokens=decoder.chain if decoder.chain > 1 else None,
            device=self.device,
            is_read=False,
        )

    @property
    def verify_mask(self) -> VerifyMask | None:
        """Said to be unread, since a chain is causal. Where nothing is said SGLang makes a mask over all of every
        sequence in each step, with sizes that it waits for."""
        return self._verify_mask

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Nothing: a step's plan does not depend on what its drafts are."""

    def _plan_decode(
        self, batch: ForwardBatch, new: int, *, graph: bool = False, in_capture: bool = False
    ) -> DevicePlan:
        tier, page = cast(DeviceTier, self.tier), self.page_size
        metrics.refresh()
        indices, lengths = batch.req_pool_indices, batch.seq_lens
        size, slots = indices.numel(), batch.out_cache_loc
        # Nothing of a capture's batch is real. Of a replay's, rows and lengths are padded, and slots are not.
        real = 0 if in_capture else min(size, slots.numel() // new)
        indices, lengths = indices[:real], lengths[:real]
        there = lengths > 0
        rows = self.coordinator.known_rows(indices).masked_fill(~there, -1)
        if new > 1:
            lengths = (lengths + new) * there  # a decode step's length counts its new token, a verification's no draft
        most = tier.sets.sequence_pages * page
        longest = getattr(batch, "seq_lens_cpu", None)
        if longest is not None and longest.numel():  # the host knows how much of the table it needs
            most = min(most, -(-(int(longest.max()) + new) // page) * page)
        table = self.req_to_token_pool.req_to_token[indices, :most:page] // page
        plan = tier.plan_decode(rows, lengths, slots[: real * new], table, new, padded=size, graph=graph)
        if new > 1 and not in_capture:
            self.coordinator.verifying(plan)  # here, since a replay runs none of the layers' code
        return plan

    def shared_read_ends(self, fm: ForwardMode) -> SharedReadEnds:
        """The overlap scheduler may free and reuse working sets only behind the step that runs: its layers read and
        write their maps to the end. A step that is a graph ends with its replay, of everything else all is awaited."""
        return SharedReadEnds.POST_REPLAY if fm.is_decode() else SharedReadEnds.UNKNOWN

    # -- graphs -------------------------------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Everything is allocated already.

        Raises:
            ValueError: graphs of larger batches than steps have memory for.
        """
        decoder = cast(DeviceTier, self.tier).decoder
        if max_bs > decoder.batch or max_num_tokens > decoder.batch * decoder.chain:
            raise ValueError(
                f"--cuda-graph-max-bs-decode={max_bs} ({max_num_tokens} tokens) is more than --kv-backend oasis has "
                f"memory for: {decoder.batch} sequences with {decoder.chain} tokens each. Lower it, or raise "
                "--max-running-requests."
            )

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """What a capture or a replay is about; the rest of the step is in the graph."""
        self._plan, self._sequences = None, []
        mode = forward_batch.forward_mode
        if not (mode.is_decode() or mode.is_target_verify()):
            raise NotImplementedError(f"the oasis backend has no graph of forward mode {mode.name}")
        new = 1
        if mode.is_target_verify():
            new = forward_batch.input_ids.numel() // forward_batch.batch_size
        self._plan = self._plan_decode(forward_batch, new, graph=True, in_capture=in_capture)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0
