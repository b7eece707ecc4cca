"""Compile the kernels for NVIDIA devices on any machine, and print what each takes.

    python -m oasis_sglang.kernels.compile --target sm_90 [--target sm_80 ...] [--pairwise | --all] [--only attend]

Ends with 1 when a kernel does not compile, takes more shared memory than the device has for a block, or when attention
at head dim 128 spills registers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from oasis_sglang.kernels.launch import Launch
from oasis_sglang.kernels.variants import Extent, variants

# Bytes of shared memory that a block may have (CUDA C++ Programming Guide, technical specifications).
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10}
TARGETS = tuple(SHARED_BYTES)
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
ALIGNED = [["tt.divisibility", 16]]


class Source(NamedTuple):
    """What is compiled, in a form that another process can be sent: the kernel by its module and name."""

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, int]


class Compiled(NamedTuple):
    """What a kernel takes. Spills in bytes of local memory per thread."""

    name: str
    kernel: str
    target: str
    registers: int
    shared_bytes: int
    spilled: int
    cubin_bytes: int
    seconds: float
    error: str = ""


def source_of(launch: Launch) -> Source:
    """What Triton would compile for this launch: pointers and integers that are multiples of 16 are known as such, and
    1 is a constant, where the kernel does not ask for a general one."""
    signature: dict[str, str] = {}
    constants = dict(launch.constants)
    attributes: dict[tuple[int, ...], Any] = {}
    for index, (parameter, arg) in enumerate(zip(launch.kernel.params, launch.args, strict=False)):
        name, special = parameter.name, not parameter.do_not_specialize
        if arg is None or (special and isinstance(arg, int) and arg == 1):
            constants[name] = arg
            continue
        if isinstance(arg, torch.Tensor):
            signature[name], at = POINTERS[arg.dtype], arg.data_ptr()
        elif isinstance(arg, int):
            signature[name], at = "i32" if -(2**31) <= arg < 2**31 else "i64", arg
        else:
            signature[name], at = "fp32", 1
        if special and not parameter.do_not_specialize_on_alignment and at % 16 == 0:
            attributes[index,] = ALIGNED
    signature = {name: signature.get(name, "constexpr") for name in launch.kernel.arg_names}
    return Source(
        launch.kernel.fn.__module__, launch.kernel.fn.__name__, signature, constants, attributes, launch.options
    )


def compile_one(job: tuple[str, str, Source]) -> Compiled:
    """Compile for a target such as `sm_90`; what fails is told in `error`."""
    name, target, source = job
    kernel = getattr(sys.modules.get(source.module) or __import__(source.module, fromlist=["_"]), source.kernel)
    log, start = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(log):
            ast = ASTSource(kernel, source.signature, source.constants, source.attributes)
            binary = triton.compile(ast, target=GPUTarget("cuda", int(target[3:]), 32), options=source.options)
    except Exception as error:
        error_text = f"{type(error).__name__}: {error}"
        return Compiled(name, source.kernel, target, 0, 0, 0, 0, time.perf_counter() - start, error_text)
    text = log.getvalue()  # of ptxas -v
    registers = max((int(x) for x in re.findall(r"Used (\d+) registers", text)), default=0)
    spilled = sum(int(x) for x in re.findall(r"(\d+) bytes spill (?:stores|loads)", text))
    seconds = time.perf_counter() - start
    shared, size = binary.metadata.shared, len(binary.asm["cubin"])
    return Compiled(name, source.kernel, target, registers, shared, spilled, size, seconds)


def jobs_of(target: str, extent: Extent = "usual", only: str = "") -> Iterator[tuple[str, str, Source]]:
    """What there is to compile for a target, each kernel variant once."""
    number = int(target[3:])
    seen = set()
    for name, launch in variants((number // 10, number % 10), extent):
        source = source_of(launch)
        if re.search(only, f"{source.kernel} {name}") and (key := repr(source)) not in seen:
            seen.add(key)
            yield name, target, source


def _start_worker(folder: str) -> None:
    triton.knobs.cache.dir = folder
    # A cached kernel would not tell what it takes.
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True


def compile_all(jobs: list[tuple[str, str, Source]], processes: int) -> Iterator[Compiled]:
    """Compile in up to `processes` processes; results come in no order."""
    with tempfile.TemporaryDirectory(prefix="oasis-kernels-") as folder:
        if processes <= 1:
            knobs = triton.knobs
            with knobs.cache.scope(), knobs.compilation.scope(), knobs.nvidia.scope():
                _start_worker(folder)
                yield from map(compile_one, jobs)
            return
        context = multiprocessing.get_context("spawn")
        with context.Pool(processes, _start_worker, (folder,)) as pool:
            yield from pool.imap_unordered(compile_one, jobs)


def trouble_of(result: Compiled) -> str:
    """Why a variant cannot be used as it is; nothing where it can."""
    if result.error:
        return result.error
    if result.shared_bytes > (most := SHARED_BYTES[result.target]):
        return f"takes {result.shared_bytes} bytes of shared memory, a block has {most}"
    must_not = result.kernel == "attend_kernel" and " D=128 " in result.name
    return "spills registers" if must_not and result.spilled else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m oasis_sglang.kernels.compile", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all of them")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--pairwise", action="store_true", help="every two values that can meet meet; minutes a target")
    extent.add_argument("--all", action="store_true", help="every supported combination; minutes a target")
    parser.add_argument("--only", default="", help="variants in whose kernel and name this is found")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: all cores)")
    args = parser.parse_args(argv)
    chosen: Extent = "all" if args.all else "pairwise" if args.pairwise else "usual"
    start = time.perf_counter()
    jobs = [job for target in args.target or TARGETS for job in jobs_of(target, chosen, args.only)]
    print(f"{'variant':48} {'kernel':22} {'target':7} {'regs':>5} {'shared':>7} {'spills':>7} {'cubin':>7} {'s':>5}")
    bad: list[str] = []
    for result in compile_all(jobs, args.jobs):
        print(
            f"{result.name:48} {result.kernel:22} {result.target:7} {result.registers:5} {result.shared_bytes:7} "
            f"{result.spilled:7} {result.cubin_bytes:7} {result.seconds:5.1f}",
            flush=True,
        )
        if trouble := trouble_of(result):
            bad.append(f"{result.name} {result.kernel} {result.target}: {trouble}")
    for line in bad:
        print(line, file=sys.stderr)
    print(f"{len(jobs)} variants, {len(bad)} bad, {time.perf_counter() - start:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
