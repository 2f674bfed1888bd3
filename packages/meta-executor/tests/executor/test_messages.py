"""Frames: round trips, and bytes that are none."""

from __future__ import annotations

import contextlib
import random

import msgspec
import numpy as np
import pytest

from meta_executor.engine.base import SamplingParams
from meta_executor.executor.messages import (
    Admit,
    Drain,
    FrameError,
    FrameKind,
    Leave,
    Part,
    Peer,
    Result,
    Schedule,
    Status,
    Stop,
    Work,
    decode_frame,
    encode_frame,
    pack_blocks,
    unpack_blocks,
)
from meta_executor.executor.ownership import Outcome
from meta_executor.executor.request import Answers, Notice, Request, join_answers, make_answers


def request(request_id: int = 7) -> Request:
    return Request(
        request_id=request_id,
        token_ids=np.array([1, 70000, 3], np.int32),
        sampling=SamplingParams(9, 0.7, 0.8, 4, True, (1, 2)),
        schedule_style="generation_first",
        first_token=6,
        peer="ctx/g",
        conversation_id="c",
        deadline_s=2.5,
    )


def plain(value: object) -> object:
    """Arrays as lists, structs and tuples as they are: what can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, msgspec.Struct):
        return type(value).__name__, [plain(getattr(value, name)) for name in value.__struct_fields__]
    return [plain(one) for one in value] if isinstance(value, tuple) else value


BODIES = [
    Work(
        (
            Admit(request(), 1, 1),
            Stop(7, Outcome.CANCELLED, "gone", "CANCELLED", 12),
            Peer("ctx/g", b"{}", ("ipc:///a", "ipc:///b")),
            Drain(9, 3.5),
            Leave(True),
        )
    ),
    Schedule(3, (Part(7, 0, 4, True, True, pack_blocks([5, 6]), 1),), ""),
    Result(3, ((7, 99),), ""),
    make_answers([(7, 1), (8, 2)], [Notice(7, "length", "", "", 3, 1)]),
    Status(2, b"{}", ((7, "x"),), True),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: type(b).__name__)
def test_round_trip(body: object) -> None:
    """What was encoded comes back equal, with its kind."""
    kind, data = encode_frame(body)
    assert plain(decode_frame(kind, data)) == plain(body)


@pytest.mark.parametrize("body", BODIES, ids=lambda b: type(b).__name__)
def test_no_other_bytes_are_taken_for_a_frame_or_crash(body: object) -> None:
    """Truncations and single changed bytes: a FrameError, or another well-formed frame; nothing else is raised."""
    kind, data = encode_frame(body)
    chance = random.Random(1)
    for _ in range(500):
        broken = bytearray(data)
        if chance.random() < 0.5:
            del broken[chance.randrange(len(broken)) :]
        else:
            broken[chance.randrange(len(broken))] ^= 1 << chance.randrange(8)
        # Any other exception fails the test: only FrameError may leave the decoder.
        with contextlib.suppress(FrameError):
            decode_frame(kind, bytes(broken))


def test_an_unknown_kind_is_refused() -> None:
    """Kind 9 is none."""
    with pytest.raises(FrameError, match="kind 9"):
        decode_frame(9, b"\x90")
    assert FrameKind.WORK == 1


def test_a_request_crosses_unchanged() -> None:
    """One frame, the same request; its token ids are a read-only int32 view into what came."""
    sent = request(5)
    (admit,) = decode_frame(*encode_frame(Work((Admit(sent, 2, -1),)))).items
    assert plain(admit.request) == plain(sent)
    assert admit.request.token_ids.dtype == np.int32 and not admit.request.token_ids.flags.writeable
    assert unpack_blocks(pack_blocks([3, 2**40])) == [3, 2**40]


def test_hand_overs_are_joined_in_order() -> None:
    """Tokens and notices of several become one; each request's tokens keep their order."""
    whole = join_answers([make_answers([(1, 5), (2, 6)]), make_answers([(1, 7)], [Notice(1, "stop")])])
    assert list(whole.pairs()) == [(1, 5), (2, 6), (1, 7)] and whole.notices == (Notice(1, "stop"),)
    assert len(whole) == 3 and whole and not make_answers() and make_answers(notices=[Notice(3)])
    assert isinstance(whole, Answers)
