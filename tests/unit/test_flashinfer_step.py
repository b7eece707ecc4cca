"""Steps on a device whose attention is FlashInfer's, its kernel restated: `DeviceDecode` gives it what it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels import flashinfer
from oasis_sglang.kernels.flashinfer import FlashInferOps
from tests.unit.device_rig import DeviceRig
from tests.unit.flashinfer_model import stand_in

pytestmark = pytest.mark.interpreter


def rig_of(settings: dict[str, Any], chain: int) -> DeviceRig:
    config = OasisConfig(page_size=16, token_budget=64, slack_ratio=0.5, **settings).validate()
    rig = DeviceRig(config, chain=chain, layers=2, seed=3)
    rig.device.ops = FlashInferOps(rig.device.shape.attention(torch.float32), torch.device("cpu"))
    return rig


@pytest.mark.parametrize(
    ("settings", "chain"),
    [({}, 1), ({"miss_policy": "skip"}, 1), ({}, 4), ({"miss_policy": "skip", "predictor": "draft"}, 3)],
)
def test_steps_are_those_of_their_description(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], chain: int
) -> None:
    """Sequences that stay dense, cross the budget, or are sparse from the start; one is padding, with NaN queries."""
    module = stand_in(monkeypatch)
    monkeypatch.setattr(flashinfer, "unsupported", lambda _: None)  # in float32 and 16 wide, as the rig compares
    rig = rig_of(settings, chain)
    sequences = [rig.start(prompt, 40) for prompt in (13, 76, 158)]
    for number in range(5):
        kept = [1 + (number + i) % chain for i in range(3)] if chain > 1 else None
        rig.step(sequences, chain, kept)
    assert len(module.plans) == 1
