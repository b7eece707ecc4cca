"""Entry point of group `sglang.srt.platforms`: say whether the CPU platform applies to this host.

SGLang calls `activate` in every process that touches `current_platform`, so this module imports nothing heavy.
"""

from __future__ import annotations

import os

PLATFORM_CLASS = "oasis_sglang.platform.srt_platform.OasisCpuPlatform"

# SGLang's own probes, in `sglang.srt.platforms`. Asking them, rather than torch, keeps one definition of
# "this host has an accelerator" between the two.
_PROBES = (
    "_is_cuda_available",
    "_is_rocm_available",
    "_is_sail_available",
    "_is_npu_available",
    "_is_xpu_available",
    "_is_musa_available",
    "_is_mps_available",
)


def host_has_accelerator() -> bool:
    """True when SGLang's own detection finds any device other than the CPU."""
    from importlib.util import find_spec

    from sglang.srt import platforms

    # Habana has no in-tree SRTPlatform and so no probe; SGLang recognises it by its package.
    return any(getattr(platforms, probe)() for probe in _PROBES) or find_spec("habana_frameworks") is not None


def activate() -> str | None:
    """Dotted path of the platform class, or None where SGLang can start without it."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None  # the user asked for SGLang's own CPU engine, which has kernels of its own
    return None if host_has_accelerator() else PLATFORM_CLASS
