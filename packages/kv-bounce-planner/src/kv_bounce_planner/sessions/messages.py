"""Control messages between a receiver and its writers, and their bytes.

A frame is three magic bytes, one version byte, the numbers of the session that wrote it and of the one that it is meant for
(16 bytes each; zeros where that is not known yet: only a Hello may have them), and a msgpack array whose first element names
the kind. Every field is bounded; a frame that is not exactly one well-formed message of a known version is refused whole.

| message | from | says |
|---|---|---|
| Hello | both | versions, transport agent, model and layout: the first frame to a peer |
| Refused | both | this peer is not talked to, and why |
| Stranger | both | a frame was meant for another session than the one that lives here now |
| Beat | both | alive; with ``asks`` the other side answers with one |
| ReceiveRequest | receiver | the destination may be written by exactly this operation, once what it asks for is computed |
| BounceWanted | sender | what it moves is computed; asks for a bounce region |
| BounceGrant | receiver | the region bound to this operation: from here on no fallback |
| BounceRefused | receiver | write in place instead |
| WriterResult | sender | the report of what a bounce write packed |
| Cancel | receiver | begin nothing more, and answer with what is physically true |
| Sealed | sender | never posted (or never lent), and never will be |
| Drained | sender | sealed, and every write that was posted has completed |
| Doubt | who moves the bytes | begun, and its end is unknown |
| ReadOffer | sender | pull: the source is lent, may be read by exactly this operation |
| ReadOver | receiver | pull: nothing of it is being read or ever will be; whether everything was read |
| Cancel | sender | pull: the loan is recalled; begin no more reads, and answer with ReadOver when that is true |
| MemoryChanged | both | that agent has other memory than its introduction said |
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from kv_bounce_planner._errors import RemoteProtocolError
from kv_bounce_planner.sessions.identity import (
    MARKS_MAX,
    NAME_BYTES_MAX,
    NO_SESSION,
    SESSION_BYTES,
    OperationIdentity,
    PeerId,
)

PROTOCOL_VERSION: Final = 4
MAGIC: Final = b"KVS"
#: Bounds, in bytes. A payload is a block table (8 bytes a block): 1 MiB names 131,072 blocks.
PAYLOAD_BYTES_MAX: Final = 1 << 20
#: How far a source can be computed, in the host's count.
AFTER_MAX: Final = 2**31 - 1
METADATA_BYTES_MAX: Final = 4 << 20
REPORT_BYTES_MAX: Final = 16 << 20
HEAD_BYTES: Final = 4 + 2 * SESSION_BYTES
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
    model: _Text = ""
    dtype: _Text = ""
    layer_total: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    layout: _Digest = b""
    host: _Text = ""


class MemoryChanged(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="memory"):
    """Memory was registered (or given back) since the Hello; comes before the first message that names such memory."""

    agent_metadata: Annotated[bytes, msgspec.Meta(max_length=METADATA_BYTES_MAX)]
    layout: _Digest


class Refused(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="refused"):
    reason: _Text


class Stranger(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="stranger"):
    pass


class Beat(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="beat"):
    asks: bool


class ReceiveRequest(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="receive"):
    """The receiver's destination, exposed to one writer; or with ``pulls`` nothing is exposed, and a loan is asked for.

    ``payload`` belongs to the planner, not to this layer. ``after``: how far the source must be computed first; 0: wholly.
    """

    operation: OperationIdentity
    sender_generation: _Name
    byte_count: _Bytes63
    plan_digest: _Digest
    bounce_offered: bool
    pulls: bool
    role: _Name
    memory_kind: _Name
    device_id: Annotated[int, msgspec.Meta(ge=0, le=4095)]
    payload: Annotated[bytes, msgspec.Meta(max_length=PAYLOAD_BYTES_MAX)]
    after: Annotated[int, msgspec.Meta(ge=0, le=AFTER_MAX)] = 0


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


class ReadOffer(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="offer"):
    """Where the source is: ``payload`` is what the receiver's planner needs (the sender's block table)."""

    operation: OperationIdentity
    memory_kind: _Name
    device_id: Annotated[int, msgspec.Meta(ge=0, le=4095)]
    payload: Annotated[bytes, msgspec.Meta(max_length=PAYLOAD_BYTES_MAX)]


class ReadOver(_Message, frozen=True, array_like=True, forbid_unknown_fields=True, tag="over"):
    operation: OperationIdentity
    complete: bool
    reason: _Text


Message = (
    Hello
    | Refused
    | Stranger
    | Beat
    | ReceiveRequest
    | BounceWanted
    | BounceGrant
    | BounceRefused
    | WriterResult
    | Cancel
    | Sealed
    | Drained
    | Doubt
    | MemoryChanged
    | ReadOffer
    | ReadOver
)
MESSAGE_TYPES: Final = (
    Hello,
    Refused,
    Stranger,
    Beat,
    ReceiveRequest,
    BounceWanted,
    BounceGrant,
    BounceRefused,
    WriterResult,
    Cancel,
    Sealed,
    Drained,
    Doubt,
    MemoryChanged,
    ReadOffer,
    ReadOver,
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class VersionMismatch(RemoteProtocolError):
    """A frame of this protocol in another version."""

    def __init__(self, version: int) -> None:
        super().__init__(f"control frame has version {version}, this side speaks {PROTOCOL_VERSION}")
        self.version = version


class Frame(msgspec.Struct, frozen=True):
    """One frame, taken apart: who wrote it, which session it is meant for, what it says."""

    source: bytes
    target: bytes
    message: Message


def encode_message(message: Message, source: bytes = NO_SESSION, target: bytes = NO_SESSION) -> bytes:
    """One message as one frame.

    Args:
        message: What it says.
        source, target: Numbers of the writing session and of the one that it is meant for.

    Raises:
        ValueError: The frame would exceed ``FRAME_BYTES_MAX``.
    """
    frame = MAGIC + bytes((PROTOCOL_VERSION,)) + source + target + _encoder.encode(message)
    if len(frame) > FRAME_BYTES_MAX:
        raise ValueError(f"message of {len(frame)} bytes exceeds the bound of {FRAME_BYTES_MAX}")
    return frame


def decode_frame(frame: bytes | memoryview) -> Frame:
    """Take one frame apart.

    Raises:
        VersionMismatch: Another version of this protocol.
        RemoteProtocolError: Wrong magic, kind, bounds or structure. Nothing was applied.
    """
    if len(frame) > FRAME_BYTES_MAX or len(frame) < 5:
        raise RemoteProtocolError(f"control frame of {len(frame)} bytes is outside 5..{FRAME_BYTES_MAX}")
    if bytes(frame[:3]) != MAGIC:
        raise RemoteProtocolError("control frame has the wrong magic")
    if frame[3] != PROTOCOL_VERSION:
        raise VersionMismatch(frame[3])
    source, target = bytes(frame[4:20]), bytes(frame[20:HEAD_BYTES])
    body = frame[HEAD_BYTES:]
    try:
        message: Message = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"control frame is malformed: {error}") from error
    if _encoder.encode(message) != bytes(body):
        raise RemoteProtocolError("control frame is not canonical")
    return Frame(source, target, message)


def decode_message(frame: bytes | memoryview) -> Message:
    """What one frame says; for tools and tests. Raises as :func:`decode_frame`."""
    return decode_frame(frame).message
