"""The first frame: one fixed size, decoded from the sender's word alone.

0  magic u32 | 4  version u8 | 5 status u8 | 6 kind u8 | 7 flags u8 | 8 sequence u64 | 16 block_bytes u64
24 chunk_bytes u64 | 32 large_count u32 | 36 rank u32 | 40 payload_bytes u32 | 44 slot u32 | 48 about u64
56 crc32 of the bytes before | 60..63 zero
64 payload: the whole block when it fits, else the sizes of large buffers and a streamed block's head; an error's text

A frame's header and an error's text are also the trailer of a streamed block.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass

from comm_broadcast._config import HEADER_BYTES
from comm_broadcast._errors import RemoteProtocolError

_HEADER = struct.Struct("<IBBBBQQQIIIIQ")
_CRC = struct.Struct("<I")
MAGIC = 0x4D584243
VERSION = 2


class Status(enum.IntEnum):
    """What the frame says."""

    GOOD = 0
    #: The sender could not encode; its text follows.
    FAILED = 1
    #: A rank failed in an earlier exchange; its text follows.
    FAILED_EARLIER = 2


class Kind(enum.IntEnum):
    """Where the block is."""

    INLINE = 0
    FOLLOWS = 1
    SHARED = 2
    #: Follows in pieces that begin to travel before the last is written; a trailer says whether all were.
    STREAMED = 3


@dataclass(frozen=True)
class Frame:
    """A first frame's fields.

    Attributes:
        block_bytes: Size of the coalesced block (bytes).
        large_count: Buffers that travel after the block, each from where it is (count).
        rank: The rank that a failure is about.
        payload_bytes: Length of an error's text, or of a streamed block's head, in the frame (bytes).
        slot: Slot of the shared window.
        about: The exchange in which ``rank`` failed, of a failure that was not this exchange's.
    """

    sequence: int
    status: Status = Status.GOOD
    kind: Kind = Kind.INLINE
    block_bytes: int = 0
    chunk_bytes: int = 0
    large_count: int = 0
    rank: int = 0
    payload_bytes: int = 0
    slot: int = 0
    about: int = 0

    def pack_into(self, target: memoryview) -> None:
        """Write the header."""
        _HEADER.pack_into(
            target, 0, MAGIC, VERSION, self.status, self.kind, 0, self.sequence, self.block_bytes, self.chunk_bytes,
            self.large_count, self.rank, self.payload_bytes, self.slot, self.about,
        )  # fmt: skip
        _CRC.pack_into(target, _HEADER.size, zlib.crc32(target[: _HEADER.size]))

    @staticmethod
    def unpack(source: memoryview, sequence: int, sender: int) -> Frame:
        """Read the header.

        Raises:
            RemoteProtocolError: It is damaged, of another version, or belongs to another exchange; names the sender.
        """
        (crc,) = _CRC.unpack_from(source, _HEADER.size)
        magic, version, status, kind, _, got, block, chunk, large, rank, text, slot, about = _HEADER.unpack_from(
            source, 0
        )
        if magic != MAGIC or crc != zlib.crc32(source[: _HEADER.size]):
            raise RemoteProtocolError(f"rank {sender}: damaged first frame (magic {magic:#x})")
        if version != VERSION:
            raise RemoteProtocolError(f"rank {sender}: frame version {version}, this is {VERSION}")
        if got != sequence:
            raise RemoteProtocolError(
                f"rank {sender}: exchange {got}, this rank is at {sequence}: the calls do not match"
            )
        try:
            frame = Frame(got, Status(status), Kind(kind), block, chunk, large, rank, text, slot, about)
        except ValueError as error:
            raise RemoteProtocolError(f"rank {sender}: {error}") from error
        follows = frame.kind in (Kind.FOLLOWS, Kind.STREAMED) or frame.large_count
        if frame.status is Status.GOOD and follows and frame.chunk_bytes <= 0:
            raise RemoteProtocolError(f"rank {sender}: chunks of {frame.chunk_bytes} bytes")
        room = len(source) - HEADER_BYTES
        head = frame.payload_bytes if frame.status is Status.GOOD and frame.kind is Kind.STREAMED else 0
        if (
            frame.payload_bytes > room
            or (frame.status is Status.GOOD and frame.kind is Kind.INLINE and frame.block_bytes > room)
            or (head and head > min(room - 8 * frame.large_count, frame.block_bytes))
        ):
            raise RemoteProtocolError(f"rank {sender}: first frame promises more than it holds")
        return frame


#: Separates an error's cause from its traceback in a frame.
_SPLIT = "\0"


def pack_text(target: memoryview, cause: str, details: str) -> int:
    """Write an error's text, the traceback's end first to go; returns its length (bytes)."""
    room = len(target)
    head = cause.encode("utf-8", "replace")[: room // 2]
    tail = details.encode("utf-8", "replace")
    left = room - len(head) - 1
    data = head + _SPLIT.encode() + (tail if len(tail) <= left else tail[len(tail) - left :])
    target[: len(data)] = data
    return len(data)


def unpack_text(source: memoryview) -> tuple[str, str]:
    """(cause, details) of an error's text."""
    cause, _, details = bytes(source).decode("utf-8", "replace").partition(_SPLIT)
    return cause, details
