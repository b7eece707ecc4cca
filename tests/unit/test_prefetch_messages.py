"""Frames: what is encoded comes back, and nothing else is ever taken for a message."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasis_sglang.memory_pool.prefetch.messages import (
    HEADER_BYTES,
    MAGIC,
    MAX_FRAME_BYTES,
    VERSION,
    BadMessage,
    Cancel,
    Completion,
    Hello,
    Message,
    Plan,
    Share,
    Stop,
    decode,
    encode,
    pack_ids,
    pack_shares,
    unpack_ids,
    unpack_shares,
)

counts = st.integers(0, 2**63 - 1)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Plan, counts, counts, counts, counts, st.binary(), st.binary(), st.binary()),
    st.builds(Cancel, counts, counts),
    st.builds(
        Completion,
        counts,
        counts,
        st.sampled_from(["done", "refused", "failed"]),
        counts,
        counts,
        st.floats(0, allow_nan=False, allow_infinity=False, allow_subnormal=False),
    ),
    st.builds(Hello, counts, counts, counts, counts, counts),
    st.just(Stop()),
)


def reason_of(frame: bytes) -> str:
    with pytest.raises(BadMessage) as caught:
        decode(frame)
    return caught.value.reason


@settings(deadline=None)  # the machine may be busy
@given(messages)
def test_every_message_comes_back(message: Message) -> None:
    assert decode(encode(message)) == message


@settings(deadline=None)  # the machine may be busy
@given(messages)
def test_a_frame_of_another_version_or_kind_says_so(message: Message) -> None:
    frame = encode(message)
    assert frame[: len(MAGIC)] == MAGIC
    assert reason_of(frame[:2] + bytes((VERSION - 1,)) + frame[3:]) == "old_version"
    assert reason_of(frame[:3] + b"\xf0" + frame[4:]) == "unknown"
    assert reason_of(b"X" + frame[1:]) == "malformed"
    assert reason_of(frame + b"\x00") == "malformed"


@settings(deadline=None)  # the machine may be busy
@given(messages, st.data())
def test_a_cut_frame_is_malformed(message: Message, data: st.DataObject) -> None:
    frame = encode(message)
    assert reason_of(frame[: data.draw(st.integers(0, len(frame) - 1))]) == "malformed"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",  # nil
        b"\x90",  # too few fields
        b"\x93\x01\x02\x03",  # too many fields
        b"\x92\x01\xff",  # negative
        b"\x92\x01\xcf" + b"\xff" * 8,  # beyond int64
        b"\x92\x01\xcb\x3f\xf0" + b"\x00" * 6,  # a float
        b"\x92\x01\xa11",  # text
        b"\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\x92\x01\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,  # nested deeper than any stack
    ],
)
def test_a_body_that_does_not_fit_its_kind_is_malformed(body: bytes) -> None:
    head = encode(Cancel(1, 2))[:HEADER_BYTES]
    assert decode(head + b"\x92\x01\x02") == Cancel(1, 2)
    assert reason_of(head + body) == "malformed"


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_times_that_cannot_be_are_malformed(seconds: float) -> None:
    assert reason_of(encode(Completion(1, 2, "done", 3, 4, seconds))) == "malformed"


def test_frames_are_bounded_on_both_sides() -> None:
    """A frame near the bound passes; one beyond it is neither made nor taken."""
    plan = Plan(1, 2, 3, 4, b"", b"", bytes(MAX_FRAME_BYTES - 64))
    assert decode(encode(plan)) == plan
    with pytest.raises(ValueError, match=str(MAX_FRAME_BYTES)):
        encode(Plan(1, 2, 3, 4, b"", b"", bytes(MAX_FRAME_BYTES)))
    assert reason_of(encode(Stop())[:HEADER_BYTES] + bytes(MAX_FRAME_BYTES)) == "malformed"


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert unpack_ids(pack_ids(np.array(ids, dtype=np.int64))).tolist() == ids
    assert unpack_ids(pack_ids(torch.tensor(ids, dtype=torch.int64))).tolist() == ids


def test_ids_of_a_strided_tensor_come_back() -> None:
    assert unpack_ids(pack_ids(torch.arange(10)[::3])).tolist() == [0, 3, 6, 9]
    assert unpack_ids(pack_ids(torch.arange(4, dtype=torch.int32))).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(bytes(9))


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.builds(Share, counts, counts, counts)))
def test_shares_come_back(shares: list[Share]) -> None:
    assert unpack_shares(pack_shares(shares)) == shares


def test_ragged_shares_raise() -> None:
    for size in (8, 16, 25):
        with pytest.raises(ValueError, match=r"multiple|reshape"):
            unpack_shares(bytes(size))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _examples() -> list[bytes]:
    ids = pack_ids(range(20))
    return [
        encode(message)
        for message in (
            Plan(1, 2, 3, 4, pack_shares([Share(1, 2, 20)]), ids, ids),
            Cancel(5, 6),
            Completion(1, 2, "done", 20, 4000, 0.25),
            Hello(1, 2, 3, 4, 5),
            Stop(),
        )
    ]


def _fuzz(frames: int) -> None:
    """Random bytes, random bodies behind a good header, and good frames with a few bytes changed, cut or added."""
    chance = random.Random(7)
    good = _examples()
    outcomes: Counter[str] = Counter()
    before = 0
    for number in range(frames):
        match number % 3:
            case 0:
                frame = chance.randbytes(chance.randrange(64))
            case 1:
                frame = chance.choice(good)[:HEADER_BYTES] + chance.randbytes(chance.randrange(64))
            case _:
                changed = bytearray(chance.choice(good))
                for _ in range(chance.randint(1, 4)):
                    at = chance.randrange(len(changed) + 1)
                    changed[at : at + chance.randrange(3)] = chance.randbytes(chance.randrange(3))
                frame = bytes(changed)
        try:
            message = decode(frame)
        except BadMessage as error:
            outcomes[error.reason] += 1
        else:
            outcomes["good"] += 1
            assert decode(encode(message)) == message
        if number == frames // 10:
            before = _resident_bytes()
    assert outcomes.total() == frames
    assert set(outcomes) == {"malformed", "old_version", "unknown", "good"}
    assert outcomes["malformed"] > frames // 2
    assert _resident_bytes() - before < 8 << 20


def test_damaged_frames_are_counted_and_harmless() -> None:
    _fuzz(200_000)


@pytest.mark.slow
def test_a_million_damaged_frames_are_counted_and_harmless() -> None:
    _fuzz(1_000_000)
