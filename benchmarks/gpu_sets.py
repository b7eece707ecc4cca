"""Working sets on another device."""

from __future__ import annotations

import copy

import torch

from oasis_sglang.memory_pool.working_set import WorkingSets


def on_device(sets: WorkingSets, device: torch.device) -> WorkingSets:
    """The same working sets there, apart from these."""
    twin = copy.copy(sets)
    twin.cells = copy.copy(sets.cells)
    twin.cells.rows = sets.cells.rows.clone().to(device)
    for name in ("pages", "width", "page_of", "slot_of", "last_used"):
        setattr(twin, name, getattr(sets, name).clone().to(device))
    return twin
