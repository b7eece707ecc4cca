"""Generate the sources that FlashInfer would compile for `FlashInferOps`, and compile some of them.

    python -m tests.contract.flashinfer_build DTYPE KV_DTYPE HEAD_DIM SOURCE...

Sources are named without ending. Prints the object files; nothing is linked or loaded, and no GPU is needed.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch


class Found(Exception):
    """Carries what would have been built."""


def spec_of(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int) -> Any:
    """What FlashInfer's planning builds when it meets this shape for the first time."""
    from flashinfer.jit.core import JitSpecNvcc
    from flashinfer.prefill import get_batch_prefill_module

    def stop(spec: Any) -> None:
        raise Found(spec)

    JitSpecNvcc.build_and_load = stop
    try:
        # No position encoding, window, soft cap or products in half precision; see `_plan_impl`.
        get_batch_prefill_module(
            "fa2", dtype, kv_dtype, dtype, torch.int32, head_dim, head_dim, 0, False, False, False
        )  # fmt: skip
    except Found as found:
        return found.args[0]
    raise RuntimeError("FlashInfer builds its batch prefill module in another way")


def main() -> None:
    dtype, kv_dtype, head_dim, *sources = sys.argv[1:]
    spec = spec_of(getattr(torch, dtype), getattr(torch, kv_dtype), int(head_dim))
    spec.write_ninja()
    ninja = ["ninja", "-C", str(spec.ninja_path.parent)]  # its log is written where it runs
    listed = subprocess.run(
        [*ninja, "-t", "targets", "rule", "cuda_compile"], check=True, capture_output=True, text=True
    )
    objects = [x for x in listed.stdout.split() if any(x.endswith(f"_{source}.cuda.o") for source in sources)]
    if len(objects) != len(sources):
        raise SystemExit(f"FlashInfer has no sources {sources} among {listed}")
    subprocess.run([*ninja, "-j", "1", *objects], check=True, stdout=sys.stderr)
    print("\n".join(objects))


if __name__ == "__main__":
    main()
