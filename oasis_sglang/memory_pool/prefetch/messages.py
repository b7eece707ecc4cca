"""What the rank process and its prefetch workers say to each other.

A frame is two bytes of magic, the version, the kind of message, and the message's fields in MessagePack:

    byte   0    1    2        3      4 ...
         [ O ][ P ][version][kind][ fields, an array ]

Arrays travel as the bytes of little-endian int64: numpy takes them as they are, where a list would make
an object of every number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
import numpy as np

VERSION = 1
MAGIC = b"OP"
HEADER_BYTES = 4
# Room for 260,000 pieces; who plans more sends more plans.
MAX_FRAME_BYTES = 4 << 20

Reason = Literal["malformed", "old_version", "unknown"]
Status = Literal["done", "refused", "failed"]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

IDS = np.dtype("<i8")


class BadMessage(Exception):
    """A frame that is no message; `reason` says in which way."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class Share(NamedTuple):
    """The part of a plan that belongs to one attempt: its next `pieces` pieces."""

    row: int
    generation: int
    pieces: int


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Plan(_Message, frozen=True):
    """Copy `source[i]` to `target[i]` for every i.

    Attributes:
        sequence: number of the plan, unique in the life of a client.
        step, first_layer, end_layer: what the pieces are for; the worker only carries them.
        attempts: `[n, 3]` int64, the `Share` of each attempt, in the order of the pieces.
        source: `[pieces]` int64, ids of pieces in the source.
        target: `[pieces]` int64, ids of halves in the target: where K goes. V goes `value_stride` halves further on.
    """

    sequence: Count
    step: Count
    first_layer: Count
    end_layer: Count
    attempts: bytes
    source: bytes
    target: bytes


class Cancel(_Message, frozen=True):
    """Skip what is not copied yet of an attempt, in the plans sent before this message."""

    row: Count
    generation: Count


class Completion(_Message, frozen=True):
    """A plan has ended.

    Attributes:
        generation: of the worker.
        status: `done`: every piece is in place, but for those of cancelled attempts; `refused`: the plan cannot be
            right and nothing was copied; `failed`: a copy went wrong, any of the pieces may be missing.
        pieces, bytes: what was copied.
        seconds: spent copying.
    """

    generation: Count
    sequence: Count
    status: Status
    pieces: Count
    bytes: Count
    seconds: Seconds


class Hello(_Message, frozen=True):
    """A worker's heartbeat.

    Attributes:
        generation: of the worker.
        plans_waiting: received and not ended.
        plans_done: ended since its start, whatever their status.
        bad_frames: received since its start.
    """

    pid: Count
    generation: Count
    plans_waiting: Count
    plans_done: Count
    bad_frames: Count


class Stop(_Message, frozen=True):
    """Leave everything and end."""


Message = Plan | Cancel | Completion | Hello | Stop

_KINDS: tuple[type[Message], ...] = (Plan, Cancel, Completion, Hello, Stop)
_HEADERS = {kind: MAGIC + bytes((VERSION, code)) for code, kind in enumerate(_KINDS)}
_DECODERS = [msgspec.msgpack.Decoder(kind) for kind in _KINDS]
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """The frame of a message.

    Raises:
        ValueError: it is larger than `MAX_FRAME_BYTES`.
    """
    frame = bytearray()
    encode_into(frame, message)
    return bytes(frame)


def encode_into(frame: bytearray, message: Message) -> None:
    """Have a buffer hold the frame of a message and nothing else; who uses it again saves copies and allocations.

    Raises:
        ValueError: it is larger than `MAX_FRAME_BYTES`.
    """
    frame[:HEADER_BYTES] = _HEADERS[type(message)]
    _encoder.encode_into(message, frame, HEADER_BYTES)
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES} can be sent")


def decode(frame: bytes) -> Message:
    """The message of a frame.

    Raises:
        BadMessage: `malformed` (not one of ours, damaged, or too large), `old_version` (of another release) or
            `unknown` (a kind of message that there is not).
    """
    if not HEADER_BYTES <= len(frame) <= MAX_FRAME_BYTES or frame[:2] != MAGIC:
        raise BadMessage("malformed")
    if frame[2] != VERSION:
        raise BadMessage("old_version")
    if frame[3] >= len(_DECODERS):
        raise BadMessage("unknown")
    try:
        return _DECODERS[frame[3]].decode(memoryview(frame)[HEADER_BYTES:])
    except (msgspec.DecodeError, RecursionError, MemoryError):
        raise BadMessage("malformed") from None


def pack_ids(ids: object) -> bytes:
    """The bytes of `[n]` integers: a sequence, an array, or a tensor in host memory."""
    return np.ascontiguousarray(ids, dtype=IDS).tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """`[n]` int64 over the bytes, read-only.

    Raises:
        ValueError: not a whole number of ids.
    """
    return np.frombuffer(data, dtype=IDS)


def pack_shares(shares: Sequence[Share]) -> bytes:
    return np.array(shares, dtype=IDS).tobytes()


def unpack_shares(data: bytes) -> list[Share]:
    """
    Raises:
        ValueError: not a whole number of shares.
    """
    return [Share(*share) for share in np.frombuffer(data, dtype=IDS).reshape(-1, 3).tolist()]
