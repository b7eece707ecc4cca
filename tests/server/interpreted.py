"""An SGLang plugin for tests: a CPU host is served as a device with memory of its own, by Triton's interpreter.

So all of a server that a GPU host has, but for streams and graphs, runs on a host that has none.
"""

from __future__ import annotations

import os
from pathlib import Path

from oasis_sglang.memory_pool import device_setup

NAME = "oasis-interpreted-kernels"


def register() -> None:
    """Called by SGLang in every process that loads plugins."""
    device_setup.is_host = lambda _: False


def environment(folder: Path) -> dict[str, str]:
    """What a server is to be started with; `folder` gets the plugin's entry point, so that SGLang finds it."""
    about = folder / f"{NAME.replace('-', '_')}-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = {__name__}:register\n")
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path.rstrip(os.pathsep), "TRITON_INTERPRET": "1"}
