"""Kernels compile for every target without a GPU, and their launches need no device data on the host."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from typing import Literal

import pytest
import torch
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import native_specialize_impl

from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels import launch as module
from oasis_sglang.kernels.compile import Compiled, source_of, trouble_of
from oasis_sglang.kernels.device_step import DeviceDecode
from oasis_sglang.kernels.launch import INTERPRETED, dot_dtype, launch, multiprocessors, recording, split_count
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.kernels.variants import pairwise, variants
from oasis_sglang.memory_pool.host_pool import HostPool
from oasis_sglang.memory_pool.sizing import PoolGeometry
from oasis_sglang.memory_pool.sketch import KeySketches, slow_half
from oasis_sglang.memory_pool.working_set import WorkingSets

CPU = torch.device("cpu")
compiled = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")


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


@compiled
def test_sources_are_what_triton_compiles() -> None:
    """Which arguments are constants, and which are known to be multiples of 16, by Triton's own launcher."""
    odd = torch.zeros(9)[1:]
    given = [x for _, x in variants((9, 0))]
    plain = next(x for x in given if x.kernel.__name__ == "share_kernel")
    given += [plain._replace(args=(odd, *plain.args[1:])), plain._replace(args=(*plain.args[:5], 17, *plain.args[6:]))]
    for launched in given:
        source = source_of(launched)
        for index, (parameter, arg) in enumerate(zip(launched.kernel.params, launched.args, strict=False)):
            general, any_place = parameter.do_not_specialize, parameter.do_not_specialize_on_alignment
            kind, mark = native_specialize_impl(CUDABackend, arg, False, not general, not any_place)
            assert source.signature[parameter.name] == kind
            assert ((index,) in source.attributes) == (mark == "D"), parameter.name
            assert (parameter.name in source.constants) == (kind == "constexpr")


def sources_of_steps(heads: int, rows: int, chain: int, policy: Literal["skip", "wait"]) -> Counter[str]:
    """Distinct sources by kernel of decode steps of many sizes, in all layers, on memory as a server has it."""
    layers, group, dim, pages, batch = 20, 4, 64, 515, 48
    config = OasisConfig(token_budget=2048, fetch_ratio=0.05, miss_policy=policy)
    sketch = slow_half(dim)
    geometry = PoolGeometry(layers=layers, kv_heads=heads, head_dim=dim, itemsize=2, page_size=16, sketch=sketch)
    host, width = HostPool(8, geometry, torch.bfloat16, CPU), config.max_set_pages
    sets = WorkingSets(
        layers=layers, kv_heads=heads, device_pages=width, rows=rows, set_pages=width, sequence_pages=pages, device=CPU
    )
    k, v = torch.zeros(2, layers, 1 + width, heads, 16, dim, dtype=torch.bfloat16)
    decode = DeviceDecode(
        config, host=host, sets=sets, summaries=KeySketches(host, CPU), k_pages=list(k), v_pages=list(v),
        ops=TritonOps(), query_heads=heads * group, batch=batch, chain=chain,
    )  # fmt: skip
    with recording() as launches:
        for n, new in itertools.product((1, 2, 3, 8, 16, 31, 48), {1, chain}):
            table = torch.zeros(n, pages, dtype=torch.int64)
            decode.prepare(torch.full((n,), -1), table[:, 0], torch.zeros(n * new, dtype=torch.int64), table, new)
            qkv = torch.zeros(n * new, heads * (group + 2), dim, dtype=torch.bfloat16)
            for layer in range(layers):
                decode.layer(layer, *qkv.split([heads * group, heads, heads], 1), 1.0)
            decode.finish(None if new == 1 else table[:, 0] + 1)
    return Counter(kernel for kernel, _ in {(x.kernel.__name__, repr(source_of(x))) for x in launches})


@compiled
@pytest.mark.parametrize(("heads", "rows"), [(8, 48), (1, 49)])
@pytest.mark.parametrize(("chain", "policy"), [(1, "skip"), (4, "wait")])
def test_steps_of_all_sizes_are_the_same_kernels(
    heads: int, rows: int, chain: int, policy: Literal["skip", "wait"]
) -> None:
    """How many sequences, which layer and where its maps lie compile nothing again, but what is cut into parts."""
    found = sources_of_steps(heads, rows, chain, policy)
    # Whole sequences and cut ones; lists of more pieces than a block has threads; each number of parts; chains.
    more = {"attend_kernel": 2, "gather_kernel": 3, "share_kernel": 7, "place_kernel": 2 if chain > 1 else 1}
    assert {kernel: count for kernel, count in found.items() if count > more.get(kernel, 1)} == {}
    assert set(found) >= {"append_sketch_kernel", "backup_kernel", "merge_kernel", "sketch_kernel", "select_kernel"}


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
