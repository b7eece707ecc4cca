"""The prefetch benchmark counts what decode steps cost, and nothing else."""

from __future__ import annotations

import pytest

from benchmarks.prefetch import fetching


def test_working_sets_that_extends_bring_in_are_left_out() -> None:
    """By hand: in 10 steps 400 pieces and 20 ms, besides 1,000 pieces and 50 ms of extends."""
    before = {"decode_steps_total": 5, "fetched_pages_total": 7, "stall_seconds_total": 1.0}
    extend = {"extend_fetched_pages_total": 1000, "extend_stall_seconds_total": 0.05}
    inline = {"decode_steps_total": 15, "fetched_pages_total": 1407, "stall_seconds_total": 1.07, **extend}
    cost = fetching(before, inline)
    assert (cost["pieces_per_step"], cost["rank_ms_per_step"]) == pytest.approx((40, 2.0))
    workers = {
        "decode_steps_total": 15, "fetched_pages_total": 1007, "stall_seconds_total": 1.05, **extend,
        "prefetch_issued_pages_total": 380, "prefetch_dropped_pages_total": 20, "prefetch_rank_seconds_total": 0.008,
        "prefetch_copy_seconds_total": 0.03,
    }  # fmt: skip
    cost = fetching(before, workers)
    assert (cost["pieces_per_step"], cost["rank_ms_per_step"]) == pytest.approx((38, 0.8))
    assert (cost["dropped_per_step"], cost["worker_ms_per_step"]) == pytest.approx((2, 3.0))
