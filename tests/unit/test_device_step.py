"""Decode steps on a device, in Triton's interpreter, against a plain restatement of them (contracts 1, 2 and 7)."""

from __future__ import annotations

from typing import Any

import pytest

from oasis_sglang.config import OasisConfig
from tests.unit.device_rig import DeviceRig

pytestmark = pytest.mark.interpreter

BUDGET = 64


def config(**more: Any) -> OasisConfig:
    return OasisConfig(**{"page_size": 16, "token_budget": BUDGET, "slack_ratio": 0.5, **more}).validate()


CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "wait": ({}, 1, {}),
    "wait without slack": ({"slack_ratio": 0.0, "sink_tokens": 16, "recent_tokens": 16}, 1, {}),
    "wait by bounds, chain of 3": ({"summary": "minmax"}, 3, {}),
    "wait, chain of 4": ({"slack_ratio": 0.0}, 4, {}),
    "wait, probe": ({}, 2, {"probe": True}),
    "wait, capped": ({"fetch_ratio": 0.25}, 2, {}),
    "skip": ({"miss_policy": "skip"}, 1, {}),
    "skip, capped": ({"miss_policy": "skip", "fetch_ratio": 0.3, "slack_ratio": 0.0}, 1, {}),
    "skip by drafts": ({"miss_policy": "skip", "predictor": "draft", "summary": "minmax"}, 4, {}),
    "skip by the last accepted": ({"miss_policy": "skip", "slack_ratio": 0.0}, 3, {}),
    "skip without refresh": ({"miss_policy": "skip", "predictor": "none", "slack_ratio": 0.0}, 2, {}),
    "sparse from a length on": ({"min_sparse_len": 103, "miss_policy": "skip"}, 2, {}),
    "dense up to a length": ({"min_sparse_len": 103}, 1, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_their_description(name: str) -> None:
    """Sequences that stay dense, cross the budget, or are sparse from the start, over page boundaries, with every
    number of accepted tokens; one leaves, and another takes its row."""
    settings, chain, more = CASES[name]
    rig = DeviceRig(config(**settings), chain=chain, layers=1, seed=len(name), **more)
    # 76 crosses the budget of 4 pages and a tail at 81; 99 becomes long enough for 103, if that is asked for.
    sequences = [rig.start(prompt, 40) for prompt in (13, 76, 158 if "min_sparse_len" not in settings else 99)]
    for number in range(6):
        kept = [1 + (number + i) % chain for i in range(3)] if chain > 1 else None
        rig.step(sequences, chain, kept, graph=number % 3 == 2)
    rig.leave(sequences.pop(0))
    sequences.insert(1, rig.start(190, 40))
    for _ in range(2):
        rig.step(sequences, chain, None if chain == 1 else [chain] * 3)


def test_several_layers_have_maps_of_their_own() -> None:
    rig = DeviceRig(config(miss_policy="skip"), layers=3, seed=5)
    sequences = [rig.start(prompt, 20) for prompt in (95, 141)]
    for _ in range(4):
        rig.step(sequences, 1)


def test_a_chain_may_be_longer_than_the_batch() -> None:
    """`--max-running-requests 2` with three drafts: numbers of a chain's tokens were taken from those of sequences."""
    rig = DeviceRig(config(), batch=2, chain=4, layers=1, seed=9)
    sequences = [rig.start(prompt, 40) for prompt in (13, 95)]
    for number in range(3):
        rig.step(sequences, 4, [1 + number, 4], graph=number == 1)
