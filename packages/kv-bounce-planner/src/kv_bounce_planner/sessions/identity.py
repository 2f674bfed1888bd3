"""Who, which request, which write: the names that every message, notification and record carries.

A name is never reused: a session object draws a random number of its own (128 bits) when it is made, every operation carries
it, and ``operation`` rises within it. So however a session was made again (in this process or another, under a restored
name, or two at once), what outlived its subject is recognised by comparison, never guessed from timing.
"""

from __future__ import annotations

import hashlib
import secrets
import struct

import msgspec

from kv_bounce_planner._errors import RemoteProtocolError

REQUEST_ID_MAX = 2**63 - 1
INCARNATION_MAX = 2**31 - 1
RANK_MAX = 2**20 - 1
SLICE_MAX = 2**16 - 1
OPERATION_MAX = 2**63 - 1
NAME_BYTES_MAX = 64
#: Grains of one operation, at most: a post covers whole grains, and its notification names them.
MARKS_MAX = 2**20

SESSION_BYTES = 16
#: Stands for "no session": a frame before the other side's number is known, an operation that no session drew.
NO_SESSION = bytes(SESSION_BYTES)

_MARK_HEAD = struct.Struct("<4sQIIHIQ16sIIIB")
_MARK_MAGIC = b"KVD\x03"


def draw_session() -> bytes:
    """A number for a session object that no other one has, here or anywhere."""
    return secrets.token_bytes(SESSION_BYTES)


def _check_name(field: str, value: str) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= NAME_BYTES_MAX or not value.isascii():
        raise ValueError(f"{field} wants 1..{NAME_BYTES_MAX} printable ASCII characters, got {value!r}")
    if not value.isprintable():
        raise ValueError(f"{field} wants printable characters, got {value!r}")


def _check_int(field: str, value: int, maximum: int) -> None:
    if type(value) is not int or not 0 <= value <= maximum:
        raise ValueError(f"{field} wants an integer in 0..{maximum}, got {value!r}")


class PeerId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One rank's process, for one lifetime.

    Args:
        instance_id: The instance that the rank belongs to.
        generation: Opaque and random per lifetime: a restarted process is another peer.
        rank: Rank within the instance.
    """

    instance_id: str
    generation: str
    rank: int

    def __post_init__(self) -> None:
        _check_name("instance_id", self.instance_id)
        _check_name("generation", self.generation)
        _check_int("rank", self.rank, RANK_MAX)

    @property
    def instance(self) -> tuple[str, str]:
        """The peer's instance and lifetime: what one transport agent is kept for."""
        return (self.instance_id, self.generation)

    def __str__(self) -> str:
        return f"{self.instance_id}/{self.generation}/{self.rank}"


class RequestKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One prefill: the request and the number of its attempt that both instances know (0 if there is no other)."""

    request_id: int
    incarnation: int = 0

    def __post_init__(self) -> None:
        _check_int("request_id", self.request_id, REQUEST_ID_MAX)
        _check_int("incarnation", self.incarnation, INCARNATION_MAX)


class TransferIdentity(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One receive at one receiver rank: request, incarnation, the receiver's generation and rank, slice.

    A transfer is named by its first slice; each of its operations names the slice that it is of.
    """

    request_id: int
    incarnation: int
    endpoint_generation: str
    rank: int
    slice_index: int = 0

    def __post_init__(self) -> None:
        _check_int("request_id", self.request_id, REQUEST_ID_MAX)
        _check_int("incarnation", self.incarnation, INCARNATION_MAX)
        _check_name("endpoint_generation", self.endpoint_generation)
        _check_int("rank", self.rank, RANK_MAX)
        _check_int("slice_index", self.slice_index, SLICE_MAX)

    @property
    def request(self) -> RequestKey:
        return RequestKey(self.request_id, self.incarnation)

    def of_slice(self, slice_index: int) -> TransferIdentity:
        """The same receive, another slice of it."""
        return TransferIdentity(self.request_id, self.incarnation, self.endpoint_generation, self.rank, slice_index)


class OperationIdentity(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One writer's obligation towards one transfer.

    Args:
        transfer: The transfer.
        writer_rank: The writer's rank in its instance.
        operation: Drawn by the receiving session, ascending, never drawn again by it.
        session: The receiving session's own random number, 16 bytes: no two session objects share one.
    """

    transfer: TransferIdentity
    writer_rank: int
    operation: int
    session: bytes = NO_SESSION

    def __post_init__(self) -> None:
        _check_int("writer_rank", self.writer_rank, RANK_MAX)
        _check_int("operation", self.operation, OPERATION_MAX)
        if type(self.session) is not bytes or len(self.session) != SESSION_BYTES:
            raise ValueError(f"session wants {SESSION_BYTES} bytes, got {self.session!r}")

    @property
    def request(self) -> RequestKey:
        return self.transfer.request

    def digest(self) -> bytes:
        """16 bytes that stand for this operation inside a writer's report."""
        return hashlib.blake2b(encode_mark(Mark(self, 0, 1)), digest_size=16, person=b"kv-operation").digest()


class Mark(msgspec.Struct, frozen=True, array_like=True, order=True):
    """ "Grains ``index`` to ``index + extent - 1`` of ``count`` of this operation have landed": bound to one posted write.

    The number of grains is fixed when a write begins; how many of them one post covers is decided at each post.
    """

    operation: OperationIdentity
    index: int
    count: int
    extent: int = 1


def encode_mark(mark: Mark) -> bytes:
    """The notification's bytes; canonical, so equality of bytes is equality of marks. At most 127 bytes."""
    operation, transfer = mark.operation, mark.operation.transfer
    generation = transfer.endpoint_generation.encode()
    if not 0 <= mark.index < mark.index + mark.extent <= mark.count <= MARKS_MAX:
        raise ValueError(f"mark {mark.index} + {mark.extent} of {mark.count} is outside 0..{MARKS_MAX}")
    head = _MARK_HEAD.pack(
        _MARK_MAGIC,
        transfer.request_id,
        transfer.incarnation,
        transfer.rank,
        transfer.slice_index,
        operation.writer_rank,
        operation.operation,
        operation.session,
        mark.index,
        mark.count,
        mark.extent,
        len(generation),
    )
    return head + generation


def decode_mark(data: bytes) -> Mark:
    """Read a notification.

    Raises:
        RemoteProtocolError: Not the canonical bytes of a mark. Nothing follows from it; in particular no proof.
    """
    if len(data) < _MARK_HEAD.size or len(data) > _MARK_HEAD.size + NAME_BYTES_MAX:
        raise RemoteProtocolError(f"notification of {len(data)} bytes is not a completion mark")
    magic, request_id, incarnation, rank, slice_index, writer_rank, operation, session, index, count, extent, length = (
        _MARK_HEAD.unpack_from(data)
    )
    generation = data[_MARK_HEAD.size :]
    if magic != _MARK_MAGIC or len(generation) != length:
        raise RemoteProtocolError("notification is not a completion mark: magic or length differ")
    try:
        mark = Mark(
            OperationIdentity(
                TransferIdentity(request_id, incarnation, generation.decode("ascii"), rank, slice_index),
                writer_rank,
                operation,
                session,
            ),
            index,
            count,
            extent,
        )
        # Fixed fields, the rest is the name's own bytes: what is left to check is what ``encode_mark`` refuses to write.
        if not 0 <= index < index + extent <= count <= MARKS_MAX:
            raise ValueError(f"grains {index} + {extent} of {count}")
    except (ValueError, UnicodeDecodeError) as error:
        raise RemoteProtocolError(f"notification is not a completion mark: {error}") from error
    return mark
