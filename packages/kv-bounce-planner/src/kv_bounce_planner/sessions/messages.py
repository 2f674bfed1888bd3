"""Control messages between a receiver and its writers, and their bytes.

A frame is three magic bytes, one version byte and a msgpack array whose first element names the kind. Every field is
bounded; a frame that is not exactly one well-formed message of a known version is refused whole.

| message | from | says |
|---|---|---|
| Hello | both | versions, the sender's transport agent: the first frame to a peer |
| ReceiveRequest | receiver | the destination may be written, by exactly this operation |
| BounceWanted | sender | prefill is over; asks for a bounce region |
| BounceGrant | receiver | the region bound to this operation: from here on no fallback |
| BounceRefused | receiver | write in place instead |
| WriterResult | sender | the report of what a bounce write packed |
| Cancel | receiver | begin nothing more, and answer with what is physically true |
| Sealed | sender | never posted, and never will be |
| Drained | sender | sealed, and every write that was posted has completed |
| Doubt | sender | posted, and its end is unknown |
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kv_bounce_planner._errors import RemoteProtocolError
from kv_bounce_planner.sessions.identity import MARKS_MAX, NAME_BYTES_MAX, OperationIdentity, PeerId

PROTOCOL_VERSION: Final = 1
MAGIC: Final = b"KVS"
#: Bounds, in bytes. A payload is a block table (8 bytes a block): 1 MiB names 131,072 blocks.
PAYLOAD_BYTES_MAX: Final = 1 << 20
METADATA_BYTES_MAX: Final = 4 << 20
REPORT_BYTES_MAX: Final = 16 << 20
FRAME_BYTES_MAX: Final = REPORT_BYTES_MAX + (1 << 16)
TEXT_BYTES_MAX: Final = 512

_Text = Annotated[str, msgspec.Meta(max_length=TEXT_BYTES_MAX)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=2 * NAME_BYTES_MAX)]
_Digest = Annotated[bytes, msgspec.Meta(max_length=32)]
_Bytes63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MARKS_MAX)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Hello(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="hello"):
    """First frame to a peer. The metadata is the transport's own serialised record, never a pickle."""

    version_min: Annotated[int, msgspec.Meta(ge=1, le=255)]
    version_max: Annotated[int, msgspec.Meta(ge=1, le=255)]
    peer: PeerId
    transport_key: _Name
    agent_name: _Name
    agent_metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)]
    is_reply: bool


class ReceiveRequest(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="receive"):
    """The receiver's destination, exposed to one writer. ``payload`` belongs to the planner, not to this layer."""

    operation: OperationIdentity
    sender_generation: _Name
    byte_count: _Bytes63
    plan_digest: _Digest
    bounce_offered: bool
    role: _Name
    memory_kind: _Name
    device_id: Annotated[int, msgspec.Meta(ge=0, le=4095)]
    payload: Annotated[bytes, msgspec.Meta(max_length=PAYLOAD_BYTES_MAX)]


class BounceWanted(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="want"):
    operation: OperationIdentity
    byte_count: _Bytes63
    plan_digest: _Digest


class BounceGrant(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="grant"):
    operation: OperationIdentity
    base_address: _Bytes63
    byte_count: _Bytes63
    memory_kind: _Name
    device_id: Annotated[int, msgspec.Meta(ge=0, le=4095)]


class BounceRefused(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="refuse"):
    operation: OperationIdentity
    reason: _Text


class WriterResult(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="result"):
    operation: OperationIdentity
    base_address: _Bytes63
    report: Annotated[bytes, msgspec.Meta(max_length=REPORT_BYTES_MAX)]


class Cancel(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="cancel"):
    operation: OperationIdentity
    reason: _Text


class Sealed(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="sealed"):
    operation: OperationIdentity
    reason: _Text


class Drained(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="drained"):
    operation: OperationIdentity
    posted: _Count
    completed: _Count
    reason: _Text


class Doubt(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="doubt"):
    operation: OperationIdentity
    reason: _Text


Message = (
    Hello
    | ReceiveRequest
    | BounceWanted
    | BounceGrant
    | BounceRefused
    | WriterResult
    | Cancel
    | Sealed
    | Drained
    | Doubt
)
MESSAGE_TYPES: Final = (
    Hello,
    ReceiveRequest,
    BounceWanted,
    BounceGrant,
    BounceRefused,
    WriterResult,
    Cancel,
    Sealed,
    Drained,
    Doubt,
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """One message as one frame.

    Raises:
        ValueError: The frame would exceed ``FRAME_BYTES_MAX``.
    """
    frame = MAGIC + bytes((PROTOCOL_VERSION,)) + _encoder.encode(message)
    if len(frame) > FRAME_BYTES_MAX:
        raise ValueError(f"message of {len(frame)} bytes exceeds the bound of {FRAME_BYTES_MAX}")
    return frame


def decode_message(frame: bytes | memoryview) -> Message:
    """One frame as one message.

    Raises:
        RemoteProtocolError: Wrong magic, version, kind, bounds or structure. Nothing was applied.
    """
    if len(frame) > FRAME_BYTES_MAX or len(frame) < 5:
        raise RemoteProtocolError(f"control frame of {len(frame)} bytes is outside 5..{FRAME_BYTES_MAX}")
    if bytes(frame[:3]) != MAGIC:
        raise RemoteProtocolError("control frame has the wrong magic")
    if frame[3] != PROTOCOL_VERSION:
        raise RemoteProtocolError(f"control frame has version {frame[3]}, this side speaks {PROTOCOL_VERSION}")
    try:
        message: Message = _decoder.decode(frame[4:])
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"control frame is malformed: {error}") from error
    if _encoder.encode(message) != bytes(frame[4:]):
        raise RemoteProtocolError("control frame is not canonical")
    return message
