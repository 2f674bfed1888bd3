"""The first frame: one fixed size, of every rank or (``ahead_max``) of the root alone, decoded from its sender's word alone.

0  magic u32 | 4  version u8 | 5 status u8 | 6 kind u8 | 7 operation u8 | 8 sequence u64 | 16 block_bytes u64
24 chunk_bytes u64 | 32 large_count u32 | 36 rank u32 | 40 payload_bytes u32 | 44 slot u32 | 48 root u32 | 52 codec u32
56 settings u32 | 60 crc32 of the bytes before
64 payload: the whole block when it fits, else the sizes of large buffers and a streamed block's head; an error's text

A frame's header and an error's text are also the trailer of a streamed block, and what a rank says of itself after a broadcast
whose root does not wait for it.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from comm_broadcast._config import HEADER_BYTES
from comm_broadcast._errors import (
    BroadcastError,
    CallMismatchError,
    ClosedError,
    CommBroadcastError,
    RankFailure,
    RemoteProtocolError,
)

_HEADER = struct.Struct("<IBBBBQQQIIIIIII")
_CRC = struct.Struct("<I")
_WHOLE = struct.Struct("<IBBBBQQQIIIIIIII")
MAGIC = 0x4D584243
VERSION = 4


class Operation(enum.IntEnum):
    """What the sender called."""

    BROADCAST = 0
    GATHER = 1
    ALLGATHER = 2
    CLOSE = 3


class Status(enum.IntEnum):
    """What the frame says."""

    GOOD = 0
    #: The sender could not encode; its text follows.
    FAILED = 1
    #: The sender failed in an earlier exchange; its text follows.
    FAILED_EARLIER = 2
    #: From the root: what went wrong in an earlier exchange follows; all ranks raise it, and this exchange moves nothing.
    REPORT = 3


class Kind(enum.IntEnum):
    """Where the block is."""

    INLINE = 0
    FOLLOWS = 1
    SHARED = 2
    #: Follows in pieces that begin to travel before the last is written; a trailer says whether all were.
    STREAMED = 3
    #: The sender has none to give in this exchange.
    NONE = 4


_OPERATIONS = dict(enumerate(Operation))
_STATUSES = dict(enumerate(Status))
_KINDS = dict(enumerate(Kind))


class Call(NamedTuple):
    """What must be the same on all ranks of an exchange.

    Attributes:
        codec, settings: What stands for the codec's name and the settings (32 bits each).
    """

    operation: Operation = Operation.BROADCAST
    root: int = 0
    codec: int = 0
    settings: int = 0

    def text(self, first: Call) -> str:
        """For people; says what differs from another rank's."""
        different = [
            part
            for part, mine, theirs in (
                ("another codec", self.codec, first.codec),
                ("other settings", self.settings, first.settings),
            )
            if mine != theirs
        ]
        return f"{self.operation.name.lower()}({', '.join([f'root={self.root}', *different])})"


class Frame(NamedTuple):
    """A first frame's fields.

    Attributes:
        block_bytes: Size of the coalesced block (bytes).
        large_count: Buffers that travel after the block, each from where it is (count).
        rank: The sender.
        payload_bytes: Length of an error's text, or of a streamed block's head, in the frame (bytes).
        slot: Slot of the shared window.
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
    call: Call = Call()

    def pack_into(self, target: memoryview) -> None:
        """Write the header."""
        target[:HEADER_BYTES] = self.header()

    def header(self) -> bytes:
        """The header's bytes."""
        call = self.call
        data = _HEADER.pack(
            MAGIC, VERSION, self.status, self.kind, call.operation, self.sequence, self.block_bytes, self.chunk_bytes,
            self.large_count, self.rank, self.payload_bytes, self.slot, call.root, call.codec, call.settings,
        )  # fmt: skip
        return data + _CRC.pack(zlib.crc32(data))

    @staticmethod
    def unpack(source: memoryview, sequence: int, sender: int) -> Frame:
        """Read the header.

        Raises:
            RemoteProtocolError: It is damaged, of another version, or belongs to another exchange; names the sender.
        """
        (
            magic, version, status, kind, operation, got, block, chunk, large, rank, text, slot, root, codec, settings, crc,
        ) = _WHOLE.unpack_from(source, 0)  # fmt: skip
        if magic != MAGIC or crc != zlib.crc32(source[: _HEADER.size]):
            raise RemoteProtocolError(f"rank {sender}: damaged first frame (magic {magic:#x})")
        if version != VERSION:
            raise RemoteProtocolError(f"rank {sender}: frame version {version}, this is {VERSION}")
        if got != sequence:
            raise RemoteProtocolError(
                f"rank {sender}: exchange {got}, this rank is at {sequence}: the ranks are not level"
            )
        if rank == root and (status, kind) == (Status.GOOD, Kind.NONE):
            # Of a rank that gives nothing: the same bytes on all such ranks.
            rank = sender
        if status not in _STATUSES or kind not in _KINDS or operation not in _OPERATIONS or rank != sender:
            raise RemoteProtocolError(
                f"rank {sender}: status {status}, kind {kind}, operation {operation} of rank {rank} are not a frame of its"
            )
        call = Call(_OPERATIONS[operation], root, codec, settings)
        frame = Frame(got, _STATUSES[status], _KINDS[kind], block, chunk, large, rank, text, slot, call)
        if not (text or block or large) and frame.kind is Kind.NONE:
            return frame
        follows = frame.kind in (Kind.FOLLOWS, Kind.STREAMED) or large
        if frame.status is Status.GOOD and follows and chunk <= 0:
            raise RemoteProtocolError(f"rank {sender}: chunks of {chunk} bytes")
        room = len(source) - HEADER_BYTES
        head = text if frame.status is Status.GOOD and frame.kind is Kind.STREAMED else 0
        if (
            text > room
            or (frame.status is Status.GOOD and frame.kind is Kind.INLINE and block > room)
            or (head and head > min(room - 8 * large, block))
        ):
            raise RemoteProtocolError(f"rank {sender}: first frame promises more than it holds")
        return frame


def pack_failure(target: memoryview, frame: Frame, cause: str, details: str) -> None:
    """Write a frame that says what failed."""
    length = pack_text(target[HEADER_BYTES:], cause, details)
    Frame(frame.sequence, frame.status, Kind.NONE, rank=frame.rank, payload_bytes=length, call=frame.call).pack_into(
        target
    )


def failure_in(view: memoryview, frame: Frame) -> RankFailure:
    """What a frame says that failed."""
    cause, details = unpack_text(view[HEADER_BYTES : HEADER_BYTES + frame.payload_bytes])
    return RankFailure(frame.rank, cause, details, frame.status is Status.FAILED_EARLIER)


def verdict(frames: Sequence[Frame], views: Sequence[memoryview]) -> CommBroadcastError | None:
    """What all ranks make of the frames of an exchange: the error that ends it for everybody, or None: the payload moves.

    Pure, and every rank has the same frames: so all come to the same verdict. A rank that closes ends the object, whatever the
    others called; calls that differ move nothing; then all failures are told at once.
    """
    first = frames[0].call
    for frame in frames:
        if frame.status is not Status.GOOD or frame.call != first or first.operation is Operation.CLOSE:
            return problems(frames, views)[0]
    return None


def problems(
    frames: Sequence[Frame], views: Sequence[memoryview], *, earlier: bool = False
) -> list[CommBroadcastError]:
    """What went wrong on the ranks: somebody closed, which ends everything, or calls differ, and all failures at once.

    Args:
        frames, views: Of all ranks, in rank order, and their bytes.
        earlier: They are what ranks said of an exchange that is over: its failures and calls are told as such, one thing in
            each exchange, that somebody closed at last.
    """
    first = frames[0].call
    failures = tuple(
        failure_in(view, frame) for frame, view in zip(frames, views, strict=True) if frame.status is not Status.GOOD
    )
    if earlier:
        failures = tuple(RankFailure(f.rank, f.cause, f.details, True) for f in failures)
    closing = [frame.rank for frame in frames if frame.call.operation is Operation.CLOSE]
    if closing and not earlier:
        return [ClosedError(closing[0], failures)]
    found: list[CommBroadcastError] = []
    if not closing and any(frame.call != first for frame in frames):
        found.append(CallMismatchError(tuple(frame.call.text(first) for frame in frames), earlier=earlier))
    if failures:
        found.append(BroadcastError.of(failures))
    if closing:
        found.append(ClosedError(closing[0]))
    return found


def pack_report(target: memoryview, frame: Frame, error: CommBroadcastError) -> None:
    """Write the frame in which the root tells all ranks of an earlier exchange. Long texts are cut to what fits."""
    room = len(target) - HEADER_BYTES
    if isinstance(error, ClosedError):
        data = _REPORTS.encode(("closed", error.rank))
    elif isinstance(error, CallMismatchError):
        data = _fitting("calls", [[call] for call in error.calls], room)
    elif isinstance(error, BroadcastError):
        data = _fitting("failures", [[f.rank, f.cause, f.details] for f in error.failures], room)
    else:
        raise TypeError(f"not an error that ranks tell each other: {type(error).__name__}")
    target[HEADER_BYTES : HEADER_BYTES + len(data)] = data
    frame._replace(status=Status.REPORT, kind=Kind.NONE, payload_bytes=len(data)).pack_into(target)


def report_in(view: memoryview, frame: Frame) -> CommBroadcastError:
    """The error that the root tells all ranks.

    Raises:
        RemoteProtocolError: It is not one.
    """
    try:
        kind, found = msgspec.msgpack.decode(view[HEADER_BYTES : HEADER_BYTES + frame.payload_bytes])
        if kind == "closed":
            return ClosedError(found)
        if kind == "calls":
            return CallMismatchError(tuple(call for (call,) in found), earlier=True)
        return BroadcastError.of(tuple(RankFailure(rank, cause, details, True) for rank, cause, details in found))
    except (ValueError, TypeError) as error:
        raise RemoteProtocolError(f"rank {frame.rank}: not a report: {error}") from error


_REPORTS = msgspec.msgpack.Encoder()


def _fitting(kind: str, rows: list[list[Any]], room: int) -> bytes:
    """As many rows as there is room for, at least one; their texts are cut first, the last one of a row from its front."""
    limit = room
    while (
        len(data := _REPORTS.encode((kind, [[_cut(item, limit, i) for i, item in enumerate(row)] for row in rows])))
        > room
    ):
        if limit > _REPORT_TEXT_MIN:
            limit //= 2
        elif len(rows) > 1:
            rows = rows[:-1]
        else:
            rows, limit = [[item if type(item) is int else "" for item in rows[0]]], room
    return data


#: Texts of a report are cut to so many characters before ranks are left out.
_REPORT_TEXT_MIN = 16


def _cut(item: Any, limit: int, place: int) -> Any:
    """A text of at most so many bytes; a traceback (the third of a row) keeps its end."""
    if type(item) is not str:
        return item
    data = item.encode("utf-8", "replace")
    return (data[-limit:] if place == 2 else data[:limit]).decode("utf-8", "ignore")


#: Separates an error's cause from its traceback in a frame.
_SPLIT = "\0"


def pack_text(target: memoryview, cause: str, details: str) -> int:
    """Write an error's text, the traceback's end first to go; returns its length (bytes)."""
    room = len(target)
    head = cause.replace(_SPLIT, "?").encode("utf-8", "replace")[: room // 2]
    tail = details.replace(_SPLIT, "?").encode("utf-8", "replace")
    left = room - len(head) - 1
    data = head + _SPLIT.encode() + (tail if len(tail) <= left else tail[len(tail) - left :])
    target[: len(data)] = data
    return len(data)


def unpack_text(source: memoryview) -> tuple[str, str]:
    """(cause, details) of an error's text."""
    cause, _, details = bytes(source).decode("utf-8", "replace").partition(_SPLIT)
    return cause, details
