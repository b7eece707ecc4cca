"""What a worker is told at its start, and the times and bounds that the rank process and its workers agree on."""

from __future__ import annotations

import msgspec

# How often a worker says hello, also while it copies.
HEARTBEAT_SECONDS = 0.25
# A worker that was silent for this long is replaced. Eight heartbeats: a busy machine can hold one up for a while.
SILENCE_SECONDS = 2.0
# Unless somebody stopped it (SIGSTOP, a debugger): a successor's start takes half a second of a core from the steps,
# and one that is let go on is back at once.
STOPPED_SECONDS = 60.0
# The first hello comes after the imports, which take seconds on a busy machine.
START_SECONDS = 30.0
# Plans that one worker may have waiting: more would only come late.
QUEUE_PLANS = 64


class WorkerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The one argument of a worker process, as JSON. Descriptors are inherited.

    Attributes:
        parent: process that the worker lives and dies with.
        generation: number of this process among all workers of the parent, in every message it sends.
        plans, completions: endpoints that the worker binds.
        heartbeats: endpoint that the parent binds.
        source_fd, target_fd: shared memory to copy from and to.
        lifeline_fd: end of a pipe whose other end only the parent has.
        width: bytes of a half (K or V of one piece).
        value_stride: halves from a piece's K to its V in the target.
        library: path of the compiled library; without it numpy copies.
        queue_plans: plans that may wait.
        test_gate_fd: for tests: end of a pipe, every byte in it lets one piece or one completion through.
        test_piece_delay: for tests: seconds that every piece takes longer.
    """

    parent: int
    generation: int
    plans: str
    completions: str
    heartbeats: str
    source_fd: int
    target_fd: int
    lifeline_fd: int
    width: int
    value_stride: int
    library: str | None = None
    queue_plans: int = QUEUE_PLANS
    test_gate_fd: int | None = None
    test_piece_delay: float = 0.0
