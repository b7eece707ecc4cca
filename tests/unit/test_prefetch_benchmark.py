"""The prefetch benchmark counts what decode steps cost, and nothing else."""

from __future__ import annotations

import pytest

from benchmarks.prefetch import fetching
from benchmarks.turns import speedup


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


def test_speedup_is_that_of_the_middle_pair() -> None:
    """By hand: 1.1, 0.9 and 1.05, with a mean of 3.05 / 3 and deviations of 0.0833, -0.1167 and 0.0333 from it."""
    result = speedup([(110, 100), (90, 100), (210, 200)])
    assert result["median"] == pytest.approx(1.05)
    deviation = ((0.08333**2 + 0.11667**2 + 0.03333**2) / 2) ** 0.5
    assert result["standard_error"] == pytest.approx(deviation * (3.14159265 / 2 / 3) ** 0.5, rel=1e-3)
