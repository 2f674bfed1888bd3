"""Frames: round trips, and bytes that are none."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

from meta_executor.executor.messages import (
    Admit,
    Answer,
    Answers,
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
from meta_executor.executor.ownership import Request

BODIES = [
    Work(
        (
            Admit(7, 1, True, b"\1\0\0\0", 3, 0.5, 0.9, 11, (2, 5), None, "ctx/g", 1),
            Stop(7, "CANCELLED", "gone", "CANCELLED", 12),
            Peer("ctx/g", b"{}", ("ipc:///a", "ipc:///b")),
            Drain(9, 3.5),
            Leave(True),
        )
    ),
    Schedule(3, (Part(7, 0, 4, True, True, pack_blocks([5, 6]), 1),), ""),
    Result(3, ((7, 99),), ""),
    Answers((Answer(7, (1, 2), "length", "", "", 3, 1),)),
    Status(2, b"{}", ((7, "INTERNAL", "x"),), True, ""),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda b: type(b).__name__)
def test_round_trip(body: object) -> None:
    """What was encoded comes back equal, with its kind."""
    kind, data = encode_frame(body)
    assert decode_frame(kind, data) == body


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
    """Admit.of and Admit.request are inverse; the token ids are a read-only int32 view."""
    tokens = np.array([1, 70000, 3], np.int32)
    request = Request(5, 2, "context", "generation_first", tokens, 9, 0.7, 0.8, 4, (1, 2), None, "p", -1)
    (admit,) = decode_frame(*encode_frame(Work((Admit.of(request),)))).items
    again = admit.request("context")
    assert again.token_ids.tolist() == tokens.tolist() and again.token_ids.dtype == np.int32
    assert not again.token_ids.flags.writeable
    for name in (
        "request_id",
        "incarnation",
        "schedule_style",
        "max_tokens",
        "seed",
        "stop_token_ids",
        "peer",
        "top_p",
    ):
        assert getattr(again, name) == getattr(request, name)
    assert unpack_blocks(pack_blocks([3, 2**40])) == [3, 2**40]
