"""Frames: whole, byte by byte, and by a million mutations (``tools/fuzz.py``)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp_agreement import AgreementConfig, Domain, RemoteProtocolError
from pp_agreement._codec import Codec, frame_length
from pp_agreement._config import FRAME_BYTES, RECORD_BYTES
from pp_agreement._events import Frame
from pp_agreement.testing import mutate

DOMAIN = Domain(9, (4, 2, 7), epoch=3)
CONFIG = AgreementConfig(frame_bytes_max=1024)
SENDER = Codec(DOMAIN, 4, 1024)
READER = Codec(DOMAIN, 7, 1024)

u8, u32, u64 = st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
records = st.lists(st.tuples(u8, u8, u8, u8, u32, u64, u64), max_size=CONFIG.records_per_frame_max).map(tuple)
frames = st.builds(Frame, st.integers(1, 2**64 - 1), u32, records, u64, st.just(0))


@given(frames)
def test_round_trip(frame):
    data = SENDER.encode(2, frame)
    assert len(data) == FRAME_BYTES + RECORD_BYTES * len(frame.records) <= 1024
    assert READER.decode(0, data)[:4] == frame[:4]
    assert frame_length(data + b"\0" * 17) == len(data)


def test_an_interrupt_while_encoding_leaves_no_records_beside_the_bytes_of_others():
    """What was made before it is still sent, in its own words."""

    class Interrupted(Codec):
        armed = False

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if self.armed:
                raise KeyboardInterrupt

    first, second = (Frame(1, 0, ((1, 0, 0, 0, 0, number, 1),)) for number in (5, 6))
    codec = Interrupted(DOMAIN, 4, 1024)
    codec.encode(1, first)
    Interrupted.armed = True
    with pytest.raises(KeyboardInterrupt):
        codec.encode(1, second)
    Interrupted.armed = False
    assert READER.decode(0, codec.encode(2, first)).records == first.records


def test_every_single_byte_matters():
    data = SENDER.encode(2, Frame(1, 0, ((1, 0, 0, 0, 0, 5, 1),)))
    for position in range(len(data)):
        for bit in range(8):
            wrong = bytearray(data)
            wrong[position] ^= 1 << bit
            with pytest.raises(RemoteProtocolError):
                READER.decode(0, wrong)


def test_every_length_but_its_own_is_refused():
    data = SENDER.encode(2, Frame(1, 0, ((1, 0, 0, 0, 0, 5, 1),) * 3))
    for length in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            READER.decode(0, data[:length])
    with pytest.raises(RemoteProtocolError):
        READER.decode(0, data + b"\0")


def test_foreign_frames_are_told_apart():
    frame = Frame(1, 0, ())
    for codec, target, named in (
        (Codec(Domain(8, (4, 2, 7), epoch=3), 4, 1024), 2, "domain 8"),
        (Codec(Domain(9, (4, 2, 7), epoch=2), 4, 1024), 2, "epoch 2"),
        (Codec(DOMAIN, 2, 1024), 2, "from rank 2"),
        (SENDER, 1, "to rank 2"),
    ):
        with pytest.raises(RemoteProtocolError, match=named):
            READER.decode(0, codec.encode(target, frame))


def test_a_frame_longer_than_the_bound_is_refused():
    big = Codec(DOMAIN, 4, 4096).encode(2, Frame(1, 0, ((1, 0, 0, 0, 0, 0, 0),) * 100))
    with pytest.raises(RemoteProtocolError, match="100 records"):
        READER.decode(0, big)


@given(st.binary(max_size=300))
def test_noise_is_never_a_frame(data):
    with pytest.raises(RemoteProtocolError):
        READER.decode(0, data)


@given(frames, st.randoms(use_true_random=False))
@settings(max_examples=300)
def test_a_mutation_is_refused_or_changes_nothing(frame, draw):
    data = SENDER.encode(2, frame)
    wrong = mutate(draw, data)
    try:
        decoded = READER.decode(0, wrong)
    except RemoteProtocolError:
        return
    assert wrong == data and decoded[:4] == frame[:4]
