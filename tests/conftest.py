"""Rules that hold for every test."""

from __future__ import annotations

import pytest


def _why_no_gpu() -> str | None:
    """The reason GPU tests cannot run here, or None where they can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU on this machine"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is none. torch is imported only if such a test was collected."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := _why_no_gpu()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))
