"""How the kernels are launched, and recorded where there is no device to launch them on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

#: Whether Triton interprets kernels on the CPU (TRITON_INTERPRET=1 when it was imported).
INTERPRETED = bool(triton.knobs.runtime.interpret)

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}
# For loops that load an index and then what it names: Triton divides the stages between the two, and from five on the
# data have two buffers, so that one is filled while the other is used.
INDIRECT_STAGES = 5
# Threads of a block of 4 warps: tensors of fewer elements keep no fewer of them busy, so these are worth no kernel of
# their own.
THREADS = 128
# Where no device says how many it has: an H100's or H200's.
MULTIPROCESSORS = 132


class Launch(NamedTuple):
    """One recorded launch."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]  # constexpr arguments
    options: dict[str, int]  # num_warps, num_stages, and maxnreg where it is given


_recorded: list[Launch] | None = None
_capability = (9, 0)  # of the device that is recorded for


@contextlib.contextmanager
def recording(capability: tuple[int, int] = (9, 0)) -> Iterator[list[Launch]]:
    """Collect the launches for a device of this compute capability instead of making them; tensors may then be on the
    device `meta`, which holds no data."""
    global _recorded, _capability
    before = _recorded, _capability
    _recorded, _capability = [], capability
    try:
        yield _recorded
    finally:
        _recorded, _capability = before


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    num_warps: int = 4,
    num_stages: int = 2,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """Run `kernel` on `grid`; one with no programs is not started, since CUDA refuses it.

    Args:
        registers: that a thread may have; None lets the compiler spill some for more blocks on a multiprocessor.
    """
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if registers is not None:
        options["maxnreg"] = registers
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, args, constants, options))
    elif all(grid):
        kernel[grid](*args, **constants, **options)


def pow2(n: int) -> int:
    """The smallest power of two that is at least `n`, at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def page_bits(page_size: int) -> int:
    """By how much lanes are shifted to number their pages.

    Raises:
        ValueError: pages that are no power of two.
    """
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"pages of {page_size} tokens; powers of two work")
    return page_size.bit_length() - 1


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """What a tile of `dtype` is multiplied in: itself. The interpreter keeps bfloat16 as integers and multiplies those,
    so it is given float32, in which every product of two bfloat16 is exact."""
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else TRITON_DTYPES[dtype]


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def converts_fp8(device: torch.device) -> bool:
    """Whether the device converts float8_e4m3fn itself; the interpreter does."""
    if _recorded is not None:
        return _capability >= (8, 9)
    return device.type != "cuda" or _device_converts_fp8(device)


@functools.lru_cache
def _device_converts_fp8(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)


def split_count(programs: int, work: int, least: int, most: int, device: torch.device) -> int:
    """Into how many parts to split each of `programs` pieces of `work` so that they fill the device twice: a power of
    two, at most `most`, with at least `least` of the work in each. From shapes alone, so that a graph can hold it."""
    wanted = ceil_div(2 * multiprocessors(device), max(programs, 1))
    return min(pow2(min(wanted, most)), max(pow2(work // least + 1) // 2, 1))


def require_rows(name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless the last dimension of `x` is contiguous."""
    if x.stride(-1) != 1:
        raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension; it must be 1 (call .contiguous())")


def workspace(given: torch.Tensor | None, size: int, device: torch.device) -> torch.Tensor:
    """`size` float32 of the workspace that was given, or fresh ones.

    Raises:
        ValueError: the workspace is too small or of another dtype.
    """
    if given is None:
        return torch.empty(size, dtype=torch.float32, device=device)
    if given.dtype != torch.float32 or given.numel() < size or not given.is_contiguous():
        raise ValueError(f"a workspace of {size} contiguous float32 is needed, not {given.numel()} {given.dtype}")
    return given.view(-1)[:size]
