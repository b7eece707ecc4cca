"""The kernels that FlashInfer compiles for us at first use compile with CUDA 13 for an H100, on any machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flashinfer")

# Decode runs the kernel without a mask, verification the causal one; `batch_prefill` plans, and starts both.
VARIANTS = [
    ("bfloat16", "bfloat16", 128, ["batch_prefill_paged_kernel_mask_0", "batch_prefill_paged_kernel_mask_1"]),
    ("bfloat16", "bfloat16", 128, ["batch_prefill"]),
    ("bfloat16", "float8_e4m3fn", 128, ["batch_prefill_paged_kernel_mask_0"]),
    ("float16", "float16", 64, ["batch_prefill_paged_kernel_mask_1"]),
]


def cuda_13() -> Path:
    """Folder of a CUDA 13 toolkit; skips where there is none."""
    found = shutil.which("nvcc")
    named = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", Path(found).resolve().parents[1] if found else None]
    for home in (Path(x) for x in named if x):
        if (home / "bin/nvcc").exists() and (home / "include/cuda_runtime.h").exists():
            told = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
            if "release 13." in told:
                return home
    pytest.skip("no nvcc of CUDA 13 with its headers, neither in CUDA_HOME nor in /usr/local/cuda nor on PATH")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "kv_dtype", "dim", "sources"), VARIANTS)
def test_it_compiles_for_sm_90a(tmp_path: Path, dtype: str, kv_dtype: str, dim: int, sources: list[str]) -> None:
    home = cuda_13()
    if shutil.which("ninja") is None:
        pytest.skip("no ninja on PATH")
    environment = {
        **os.environ,
        "CUDA_HOME": str(home),
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
    }
    command = [sys.executable, "-m", "tests.contract.flashinfer_build", dtype, kv_dtype, str(dim), *sources]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    objects = [Path(x) for x in done.stdout.split()]
    assert len(objects) == len(sources)
    for path in objects:
        assert path.stat().st_size > 100_000
        assert "-gencode=arch=compute_90a,code=sm_90a" in (path.parent / "build.ninja").read_text()
