"""`benchmarks.step_parts`: stacks as py-spy writes them, sorted by hand."""

from __future__ import annotations

import pytest

from benchmarks.step_parts import shares

LOOP = "run_scheduler_process (scheduler.py:1);Scheduler.event_loop_normal (scheduler.py:2)"
WORKER = "eagle_worker_v2.py"
VERIFY = f"{LOOP};verify ({WORKER}:3);ModelRunner.forward (model_runner.py:4)"
LAYER = f"{VERIFY};LlamaDecoderLayer.forward (llama.py:5)"
BACKEND = f"{LAYER};OasisAttnBackend.forward_extend (/p/oasis_sglang/attention/backend.py:6)"
TIER = f"{BACKEND};KVTier.decode (/p/oasis_sglang/memory_pool/tier.py:7)"


def test_each_stack_counts_once() -> None:
    raw = "\n".join([
        f"{LOOP};EagleDraftWorker.draft ({WORKER}:8);forward (llama_eagle3.py:9);linear (/p/platform/linear.py:1) 5",
        f"{LOOP};EagleDraftWorker._draft_extend_for_decode ({WORKER}:8) 6",
        f"{LAYER};apply (/p/oasis_sglang/platform/linear.py:1);linear (/p/oasis_sglang/platform/linear.py:2) 20",
        f"{LAYER} 4",
        f"{TIER};_refresh (/p/oasis_sglang/memory_pool/tier.py:3);_select (/p/oasis_sglang/memory_pool/tier.py:4) 10",
        f"{TIER};_attend (/p/oasis_sglang/memory_pool/tier.py:9) 30",
        f"{TIER} 5",
        f"{VERIFY};init_forward_metadata (/p/oasis_sglang/attention/backend.py:5) 5",
        f"{LOOP};process_batch_result (sglang/srt/managers/scheduler.py:77) 15",
        "thread (0x1);run (threading.py:982) 1000",
    ])  # fmt: skip
    assert shares(raw) == {
        "draft": 0.05, "draft extend": 0.06, "linear layers": 0.2, "rest of the model": 0.04, "page selection": 0.1,
        "attention": 0.3, "rest of the attention backend": 0.05, "plan of the step": 0.05, "scheduler": 0.15,
    }  # fmt: skip


def test_no_stack_of_the_scheduler() -> None:
    with pytest.raises(RuntimeError, match="no stack of the scheduler"):
        shares("thread (0x1);run (threading.py:982) 1000")
