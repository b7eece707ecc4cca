"""What a step does on two streams, without doing it: kernels and torch operations with the memory that they touch, and
which of them are ordered.

Each stream counts its operations, and each operation knows how far either stream had come when it starts (a vector
clock). An operation is before another if the other knows of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oasis_sglang.kernels import launch as launches
from oasis_sglang.kernels.launch import Launch
from oasis_sglang.kernels.streams import Streams

COMPUTE, SIDE = 0, 1

# Arguments that a kernel writes to; it may read them too.
WRITES = {
    "place_kernel": {"slot_of", "page_of", "last_used", "chosen", "token_rows", "table", "faults"},
    "remember_kernel": {"chosen"},
    "write_kernel": {"k_lanes", "v_lanes"},
    "backup_kernel": {"host"},
    "gather_kernel": {"k_rows", "v_rows"},
    "sketch_kernel": {"logits", "tops", "masses"},
    "minmax_kernel": {"logits", "tops", "masses"},
    "share_kernel": {"scores"},
    "select_kernel": {
        *("slot_of", "page_of", "last_used", "table", "attended", "miss_host", "miss_row", "miss_slot"),
        *("miss_page", "miss_evicted", "miss_count", "missed", "scratch"),
    },
    "attend_kernel": {"out", "lse", "parts", "part_lse"},
    "merge_kernel": {"out", "lse"},
    "append_sketch_kernel": {"table", "units"},
    "append_minmax_kernel": {"table"},
}


class Span(NamedTuple):
    """Bytes that a tensor covers."""

    start: int
    end: int
    storage: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Span:
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        start = x.data_ptr()
        return cls(start, start + (last + 1) * x.element_size(), x.untyped_storage().data_ptr())

    def meets(self, other: Span) -> bool:
        return self.start < other.end and other.start < self.end


class Op(NamedTuple):
    name: str
    tag: Any  # what the test was doing
    stream: int
    number: int  # in its stream
    known: tuple[int, int]  # operations of either stream that are before it
    reads: list[Span]
    writes: list[Span]

    def after(self, other: Op) -> bool:
        return other.number < self.known[other.stream]


class StreamLog(Streams):
    """Streams that only write down what is issued on them."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tag: Any = None
        self.lent: list[int] = []
        self.kept: list[Any] = []  # so that no address is used twice: a device's allocator minds the streams
        self._stream = COMPUTE
        self._clocks = [[0, 0], [0, 0]]
        self._marks: dict[Hashable, list[int]] = {}

    def issue(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        clock = self._clocks[self._stream]
        spans = [[Span.of(x) for x in side if x.numel()] for side in (reads, writes)]
        known = (clock[0], clock[1])
        self.ops.append(Op(name, self.tag, self._stream, clock[self._stream], known, *spans))
        clock[self._stream] += 1

    def _learn(self, stream: int, clock: list[int]) -> None:
        self._clocks[stream] = [max(pair) for pair in zip(self._clocks[stream], clock, strict=True)]

    @contextlib.contextmanager
    def fork(self) -> Iterator[None]:
        self._learn(SIDE, self._clocks[COMPUTE])
        self._stream = SIDE
        yield
        self._stream = COMPUTE

    def mark(self, key: Hashable) -> None:
        self._marks[key] = list(self._clocks[SIDE])

    def wait(self, key: Hashable) -> None:
        self._learn(COMPUTE, self._marks.pop(key, [0, 0]))

    def join(self) -> None:
        self._learn(COMPUTE, self._clocks[SIDE])
        self._marks.clear()

    def lend(self, x: torch.Tensor) -> None:
        self.lent.append(x.untyped_storage().data_ptr())


class _Launches(list[Launch]):
    """Takes the place of the list that launches are recorded in."""

    def __init__(self, log: StreamLog) -> None:
        super().__init__()
        self._log = log

    def append(self, launch: Launch) -> None:
        super().append(launch)
        name = launch.kernel.__name__
        sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for argument, value in zip(launch.kernel.arg_names, launch.args, strict=False):
            if isinstance(value, torch.Tensor):
                sides[argument in WRITES[name]].append(value)
        self._log.issue(name, *sides)


class _Torch(TorchDispatchMode):
    def __init__(self, log: StreamLog) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._log.kept.append(result)
        sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        schema = func._schema.arguments
        given = {x.name: value for x, value in zip(schema, args, strict=False)} | kwargs
        for x in schema:
            values = given.get(x.name)
            for value in values if isinstance(values, (list, tuple)) else [values]:
                if isinstance(value, torch.Tensor):
                    sides[x.alias_info is not None and x.alias_info.is_write].append(value)
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        if not is_view:
            fresh = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, torch.Tensor)]
            sides[True].extend(fresh)
            self._log.issue(str(func), *sides)
        return result


@contextlib.contextmanager
def logging_to(log: StreamLog) -> Iterator[list[Launch]]:
    """Kernels are not run but written down; so are torch's operations, which do run."""
    recorded = _Launches(log)
    with launches.recording():
        launches._recorded = recorded
        with _Torch(log):
            yield recorded
