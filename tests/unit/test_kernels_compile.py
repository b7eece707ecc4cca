"""Kernels compile for every target without a GPU, and their launches need no device data on the host."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from oasis_sglang.kernels import launch as module
from oasis_sglang.kernels.compile import Compiled, trouble_of
from oasis_sglang.kernels.launch import INTERPRETED, dot_dtype, launch, multiprocessors, recording, split_count
from oasis_sglang.kernels.variants import pairwise, variants

CPU = torch.device("cpu")


def compile_variants(*args: str) -> subprocess.CompletedProcess[str]:
    """`python -m oasis_sglang.kernels.compile`, in a process whose Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "oasis_sglang.kernels.compile", *args]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=800)


def test_a_representative_set_compiles() -> None:
    """One variant of attention, joined parts included, for every target; what it takes is printed, spills fail."""
    done = compile_variants("--only", "attend bfloat16 D=128 P=16 G=4 t=1 n=1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "_kernel" in line]
    found = {(row[-7], row[-6]) for row in rows}
    assert found == {(name, f"sm_{n}") for name in ("attend_kernel", "merge_kernel") for n in (80, 90, 100)}
    for row in rows:
        registers, shared, spilled, size = (int(x) for x in row[-5:-1])
        assert 0 < registers <= 255
        assert shared > 0
        assert spilled == 0
        assert size > 0
    assert "6 variants, 0 bad" in done.stdout


@pytest.mark.slow
def test_attention_spills_nothing_at_head_dim_128() -> None:
    """In every variant, for every target."""
    done = compile_variants("--all", "--only", r"^attend_kernel .* D=128 ")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if " attend_kernel " in line]
    # Four dtypes, 16, 32 or (not in float32) 64 query rows, sequences whole or cut; and some with logarithms.
    kinds = Counter(row[-6] for row in rows if "logs" not in row)
    assert kinds == {"sm_80": 22, "sm_90": 22, "sm_100": 22}
    assert {row[-3] for row in rows} == {"0"}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_every_kernel_compiles(target: str) -> None:
    """In every two values of dtype, shape and batch that can meet."""
    done = compile_variants("--target", target, "--pairwise")
    assert done.returncode == 0, done.stdout + done.stderr


def test_pairs_of_values_meet() -> None:
    axes = ((1, 2, 3), "ab", (True, False))
    rows = pairwise(*axes)
    assert len(rows) < 12
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(axes[i], axes[j]))


def test_too_much_shared_memory_is_trouble() -> None:
    fits = Compiled("attend D=64 ", "attend_kernel", "sm_80", 100, 163 << 10, 8, 1, 1.0)
    assert trouble_of(fits) == ""
    assert "a block has 166912" in trouble_of(fits._replace(shared_bytes=(163 << 10) + 1))
    assert trouble_of(fits._replace(name="attend D=128 ")) == "spills registers"
    assert trouble_of(fits._replace(error="no")) == "no"


def test_launches_need_no_device_data() -> None:
    """Tensors that hold no data launch every kernel: nothing on the host depends on what is in them, so that a graph
    can hold all of it; 8-bit pools are read as bytes where the device does not convert them."""
    kernels: dict[tuple[int, int], set[str]] = {}
    for capability in ((8, 0), (9, 0)):
        found = list(variants(capability))
        kernels[capability] = {x.kernel.__name__ for _, x in found}
        eight_bit = [
            x for name, x in found if name.startswith("attend float8") and x.kernel.__name__ == "attend_kernel"
        ]
        want = torch.uint8 if capability == (8, 0) else torch.float8_e4m3fn
        assert {x.args[1].dtype for x in eight_bit} == {want}
    assert kernels[8, 0] == kernels[9, 0]
    assert len(kernels[9, 0]) == 15


def test_kernels_are_not_started_without_programs() -> None:
    """CUDA refuses an empty grid."""
    launch(None, (4, 0, 1))
    with recording() as launches:
        launch(None, (4, 0, 1), 5, SIZE=3)
    assert launches == [module.Launch(None, (4, 0, 1), (5,), {"SIZE": 3}, {"num_warps": 4, "num_stages": 2})]
    assert module._recorded is None


@pytest.mark.parametrize(
    ("programs", "work", "splits"),
    [(8, 4096, 16), (8, 100, 1), (8, 511, 1), (8, 512, 2), (264, 4096, 1), (100, 4096, 4), (1, 1 << 20, 64)],
)
def test_work_is_split_by_capacity(programs: int, work: int, splits: int) -> None:
    """Enough programs to fill the device twice, none of them with less work than it is worth."""
    assert multiprocessors(CPU) == 132
    assert split_count(programs, work, 256, 64, CPU) == splits


def test_products_are_of_the_dtype_itself() -> None:
    assert str(dot_dtype(torch.float16)) == "fp16"
    assert str(dot_dtype(torch.bfloat16)) == ("fp32" if INTERPRETED else "bf16")
