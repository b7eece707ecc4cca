"""The `SRTPlatform` for hosts with nothing but CPUs and plain torch."""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from oasis_sglang.platform import defaults, host, spec_ops

SPECULATIVE_ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")


class OasisCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU through torch's own operators: no Triton, no graphs, no `sgl_kernel`.

    `PlatformEnum.OOT` rather than `CPU`: SGLang's CPU paths assume the CPU kernel wheel, its out-of-tree paths assume
    nothing.
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()  # every field false

    def get_device(self, device_id: int | None = 0) -> str:
        """A string, as the interface declares: SGLang splits an index off it when it resolves `--device`."""
        return "cpu"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Bytes, within the tightest cgroup limit."""
        return int(self.get_current_memory_usage()) + host.available_memory()

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        return host.available_memory(), self.get_device_total_memory(device_id)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        defaults.apply(server_args)

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in SPECULATIVE_ALGORITHMS

    def get_speculative_cache_locs_fn(self) -> Any:
        return spec_ops.cache_locs

    def init_backend(self) -> None:
        """Runs when a worker imports its model runner."""
        # A worker started without the launcher's environment (an embedded engine, a test) still gets a sane count.
        if not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(host.usable_cores())
        if fast_paths_enabled():
            # Here and below: these import SGLang's layers, which are being imported when the platform is chosen.
            from oasis_sglang.platform import native_ops

            native_ops.register(self.get_dispatch_key_name())
        spec_ops.fill_missing()

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Runs once per model, target and draft, when its weights are in place."""
        if fast_paths_enabled():
            from oasis_sglang.platform import linear

            linear.install(model)


def fast_paths_enabled() -> bool:
    """`OASIS_CPU_FAST_PATHS=0` leaves every operator as SGLang ships it, to compare against or to rule this out."""
    return os.environ.get("OASIS_CPU_FAST_PATHS", "1") != "0"
