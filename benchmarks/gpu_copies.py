"""The fastest that this device copies: within its memory, and from and to the host's."""

from __future__ import annotations

import functools

import torch

from benchmarks.gpu_scale import Scale
from benchmarks.gpu_timer import Timer


class Copies:
    """Bytes per second, measured when they are first asked for. Within the device what is read and what is written
    both count."""

    def __init__(self, scale: Scale) -> None:
        self._scale, self._timer = scale, Timer(scale)

    @functools.cached_property
    def device(self) -> float:
        x = torch.randint(256, (self._scale.copy_bytes,), dtype=torch.uint8, device=self._scale.device)
        y = torch.empty_like(x)
        return 2 * x.numel() / self._timer.seconds(lambda: y.copy_(x))

    @functools.cached_property
    def from_host(self) -> float:
        host, device = self._host_and_device
        return host.numel() / self._timer.seconds(lambda: device.copy_(host, non_blocking=True))

    @functools.cached_property
    def to_host(self) -> float:
        host, device = self._host_and_device
        return host.numel() / self._timer.seconds(lambda: host.copy_(device, non_blocking=True))

    @property
    def _host_and_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        on_gpu = self._scale.device.type == "cuda"
        host = torch.zeros(self._scale.copy_bytes // 4, dtype=torch.uint8, pin_memory=on_gpu)
        return host, torch.randint_like(host, 256, device=self._scale.device)
