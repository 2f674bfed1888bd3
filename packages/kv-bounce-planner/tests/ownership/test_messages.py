"""Bytes of control messages and notifications: golden, bounded, whole or refused."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_bounce_planner._errors import RemoteProtocolError
from kv_bounce_planner.sessions import OperationIdentity, PeerId, ReceiveRequest, TransferIdentity
from kv_bounce_planner.sessions.identity import MARKS_MAX, Mark, decode_mark, encode_mark
from kv_bounce_planner.sessions.messages import (
    FRAME_BYTES_MAX,
    MESSAGE_TYPES,
    PAYLOAD_BYTES_MAX,
    Beat,
    BounceGrant,
    BounceRefused,
    BounceWanted,
    Cancel,
    Doubt,
    Drained,
    Frame,
    Hello,
    MemoryChanged,
    ReadOffer,
    ReadOver,
    Refused,
    Sealed,
    Stranger,
    VersionMismatch,
    WriterResult,
    decode_frame,
    decode_message,
    encode_message,
)

TRANSFER = TransferIdentity(7, 1, "g1", 2, 3)
OPERATION = OperationIdentity(TRANSFER, 4, 5, b"0123456789abcdef")
SOURCE, TARGET = b"s" * 16, b"t" * 16
HEAD = b"KVS\x04" + SOURCE + TARGET
SAMPLES = [
    Hello(
        2,
        2,
        PeerId("ctx", "c1", 4),
        "ucx:tcp",
        "agent",
        b"nixlSerDes|",
        False,
        "llama@1",
        "bf16",
        32,
        b"l" * 16,
        "host",
    ),
    Refused("another model"),
    Stranger(),
    Beat(True),
    ReceiveRequest(OPERATION, "c1", 4096, b"d" * 16, True, False, "KV", "DRAM", 0, b"blocks", 512),
    BounceWanted(OPERATION, 4096, b"d" * 16),
    BounceGrant(OPERATION, 1 << 40, 4096, "VRAM", 1),
    BounceRefused(OPERATION, "no_space"),
    WriterResult(OPERATION, 1 << 40, b"report"),
    Cancel(OPERATION, "cancelled"),
    Sealed(OPERATION, ""),
    Drained(OPERATION, 3, 3, "x"),
    Doubt(OPERATION, "error"),
    MemoryChanged(b"nixlSerDes|", b"l" * 16),
    ReadOffer(OPERATION, "VRAM", 1, b"blocks"),
    ReadOver(OPERATION, True, ""),
]
GOLDEN = {
    "Cancel": "93a663616e63656c94950701a26731020304 05c41030313233343536373839616263646566a963616e63656c6c6564",
    "Sealed": "93a67365616c656494950701a26731020304 05c41030313233343536373839616263646566a0",
    "Beat": "92a462656174c3",
    "ReceiveRequest": "9ca772656365697665 94950701a2673102030405c41030313233343536373839616263646566a26331cd1000c410"
    "64646464646464646464646464646464c3c2a24b56a44452414d00c406626c6f636b73cd0200",
    "ReadOver": "94a46f76657294950701a26731020304 05c41030313233343536373839616263646566c3a0",
}


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_survives_its_bytes(message):
    """Decode of encode is the message, and encoding is canonical."""
    frame = encode_message(message, SOURCE, TARGET)
    assert decode_frame(frame) == Frame(SOURCE, TARGET, message)
    assert encode_message(decode_message(frame), SOURCE, TARGET) == frame
    assert {type(sample) for sample in SAMPLES} == set(MESSAGE_TYPES)


@pytest.mark.parametrize(
    "message", [sample for sample in SAMPLES if type(sample).__name__ in GOLDEN], ids=lambda m: type(m).__name__
)
def test_bytes_on_the_wire_are_the_golden_ones(message):
    """A change of these bytes is a new protocol version."""
    golden = HEAD + bytes.fromhex(GOLDEN[type(message).__name__].replace(" ", ""))
    assert encode_message(message, SOURCE, TARGET) == golden


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_truncated_inflated_and_foreign_frames_are_refused(message):
    """Every prefix, a trailing byte, another magic, another version."""
    frame = encode_message(message)
    for end in range(len(frame)):
        with pytest.raises(RemoteProtocolError):
            decode_message(frame[:end])
    for wrong in (frame + b"\0", b"XYZ" + frame[3:], frame[:3] + b"\x01" + frame[4:]):
        with pytest.raises(RemoteProtocolError):
            decode_message(wrong)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_changed_byte_is_refused_or_means_another_message(message):
    """Single-byte changes never decode into the same message and never raise anything else."""
    frame = encode_message(message)
    for at in range(len(frame)):
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(frame)
            changed[at] ^= flip
            try:
                other = decode_frame(bytes(changed))
            except RemoteProtocolError:
                continue
            assert other != decode_frame(frame)


def test_another_version_is_told_from_garbage():
    """So that the peer can be refused by name."""
    with pytest.raises(VersionMismatch) as caught:
        decode_frame(b"KVS\x07anything")
    assert caught.value.version == 7


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused_without_another_exception(data):
    for frame in (data, HEAD + data):
        try:
            decode_message(frame)
        except RemoteProtocolError:
            pass
    with pytest.raises(RemoteProtocolError):
        decode_mark(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("payload", b"x" * (PAYLOAD_BYTES_MAX + 1)),
        ("byte_count", -1),
        ("byte_count", 2**63),
        ("plan_digest", b"x" * 33),
        ("sender_generation", ""),
        ("sender_generation", "x" * 129),
        ("device_id", 4096),
        ("byte_count", True),
        ("role", 5),
    ],
)
def test_fields_outside_their_bounds_are_refused(field, value):
    """Bounds hold on arrival, whatever the other side's code allowed."""
    message = msgspec.structs.replace(SAMPLES[4], **{field: value})
    frame = HEAD + msgspec.msgpack.encode(message)
    with pytest.raises(RemoteProtocolError):
        decode_message(frame)
    with pytest.raises(RemoteProtocolError):
        decode_message(HEAD + b"\0" * FRAME_BYTES_MAX)


@pytest.mark.parametrize(
    "identity",
    [
        (-1, 0, "g", 0),
        (2**63, 0, "g", 0),
        (0, -1, "g", 0),
        (0, 0, "", 0),
        (0, 0, "é", 0),
        (0, 0, "x" * 65, 0),
        (True, 0, "g", 0),
        (0, 0, "g", 2**20),
    ],
)
def test_identities_are_checked_when_made_and_when_read(identity):
    """A bool is no integer, a name is short printable ASCII."""
    with pytest.raises(ValueError, match="wants"):
        TransferIdentity(*identity)


def test_mark_bytes_are_exact_and_distinct():
    """Every field is in the bytes: changing any of them changes the notification."""
    mark = Mark(OPERATION, 2, 9)
    data = encode_mark(mark)
    assert decode_mark(data) == mark
    assert (
        data.hex()
        == "4b56440307000000000000000100000002000000030004000000050000000000000030313233343536373839616263646566"
        "020000000900000001000000026731"
    )
    others = [
        Mark(OperationIdentity(msgspec.structs.replace(TRANSFER, **{field: value}), 4, 5), 2, 9)
        for field, value in {
            "request_id": 8,
            "incarnation": 2,
            "endpoint_generation": "g2",
            "rank": 3,
            "slice_index": 4,
        }.items()
    ]
    others += [
        Mark(OperationIdentity(TRANSFER, 5, 5), 2, 9),
        Mark(OperationIdentity(TRANSFER, 4, 6), 2, 9),
        Mark(msgspec.structs.replace(OPERATION, session=b"0123456789abcdeX"), 2, 9),
        Mark(OPERATION, 3, 9),
        Mark(OPERATION, 2, 10),
        Mark(OPERATION, 2, 9, 2),
    ]
    assert len({encode_mark(other) for other in [*others, mark]}) == len(others) + 1
    for at in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode_mark(data[:at])
    with pytest.raises(ValueError, match="outside"):
        encode_mark(Mark(OPERATION, 0, MARKS_MAX + 1))
    for extent in (0, 8):
        with pytest.raises(ValueError, match="outside"):
            encode_mark(Mark(OPERATION, 2, 9, extent))
    for count, extent in ((2**32 - 1, 1), (9, 0), (9, 8), (9, 2**32 - 1)):
        fields = count.to_bytes(4, "little") + extent.to_bytes(4, "little")
        with pytest.raises(RemoteProtocolError):
            decode_mark(data[:-11] + fields + data[-3:])


def test_random_operations_survive_and_have_distinct_digests():
    generator = random.Random(3)
    digests = set()
    for _ in range(500):
        operation = OperationIdentity(
            TransferIdentity(
                generator.randrange(2**63),
                generator.randrange(2**31),
                "g" * generator.randint(1, 64),
                generator.randrange(2**20),
                generator.randrange(2**16),
            ),
            generator.randrange(2**20),
            generator.randrange(2**63),
        )
        assert decode_mark(encode_mark(Mark(operation, 0, 1))).operation == operation
        digests.add(operation.digest())
    assert len(digests) == 500
