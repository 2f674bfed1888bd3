"""Frames: sealing, opening, sizes. Pure: bytes in, bytes out; no socket, clock or environment.

One message is one ZeroMQ message of 1 + n frames. The first frame:

    mac        32  over everything that follows in this frame, then over every further frame, in order; HMAC-SHA256 in
                   the handshake, then the code that the handshake chose
    magic       2  b"RL"
    version     1
    kind        1
    direction   1  0 client to server, 1 server to client
    flags       1
    buffers     2  count of arrays
    body_bytes  4
    name_bytes  2
    reserved    2  zero
    session    16  zero in the handshake
    sequence    8  0 in the handshake, then 1, 2, 3, … per direction, without a gap
    call_id     8
    argument    8  by kind: a deadline in microseconds, credits, an item's index
    name           method name, ASCII
    table          per array 8 bytes: its length; the top bit says that it is a frame of its own
    body           msgpack
    padding and the small arrays, each at a multiple of 8 bytes from the frame's start

Large arrays follow as frames of their own, in table order. Every length is thus under the MAC. Sizes are checked before
the MAC, the MAC before the sequence, the sequence before any decoding.

Each direction has a key of its own, derived from the shared key and the whole handshake as it was spoken, so a message
cannot be replayed into another session nor reflected to its author, and nobody can talk two peers into a weaker code
than they would have chosen; inside a session the sequence refuses a replay.

``prepare`` is done in the caller's thread: it copies what must not change any more. ``Sealer`` adds number and tag later,
in the thread that sends.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence
from typing import Final

import msgspec

from rpc_local_registry._mac import MACS, HmacSha256, Mac

MAGIC: Final = b"RL"
VERSION: Final = 1
MAC_BYTES: Final = 32
NONCE_BYTES: Final = 16
SESSION_BYTES: Final = 16
NO_SESSION: Final = bytes(SESSION_BYTES)
_HEADER: Final = struct.Struct("<2sBBBBHIHH16sQQQ")
_pack: Final = _HEADER.pack
_unpack_from: Final = _HEADER.unpack_from
HEADER_BYTES: Final = MAC_BYTES + _HEADER.size
_EXTERNAL: Final = 1 << 63
_LENGTH: Final = struct.Struct("<Q")
_pack_length: Final = _LENGTH.pack
_unpack_length: Final = _LENGTH.unpack_from
#: Longer first frames are read through a view, bytes.
_VIEWED_BYTES_MIN: Final = 512
_PADDING: Final = tuple(bytes(size) for size in range(8))
NAME_BYTES_MAX: Final = 255
#: Handshake messages are small whatever the configuration says.
HANDSHAKE_BYTES_MAX: Final = 65536

TO_SERVER: Final = 0
TO_CLIENT: Final = 1

HELLO: Final = 1
WELCOME: Final = 2
REJECT: Final = 3
CALL: Final = 16
STREAM: Final = 17
ONEWAY: Final = 18
CANCEL: Final = 19
CREDIT: Final = 20
BYE: Final = 21
PING: Final = 22
RESULT: Final = 32
ERROR: Final = 33
ITEM: Final = 34
END: Final = 35
DONE: Final = 36
GOODBYE: Final = 37
PONG: Final = 38
OPENED: Final = 39

KIND_NAMES: Final = {
    HELLO: "HELLO", WELCOME: "WELCOME", REJECT: "REJECT", CALL: "CALL", STREAM: "STREAM", ONEWAY: "ONEWAY", CANCEL:
        "CANCEL",
    CREDIT: "CREDIT", BYE: "BYE", PING: "PING", RESULT: "RESULT", ERROR: "ERROR", ITEM: "ITEM", END: "END", DONE:
        "DONE",
    GOODBYE: "GOODBYE", PONG: "PONG", OPENED: "OPENED",
}  # fmt: skip
CLIENT_KINDS: Final = frozenset({CALL, STREAM, ONEWAY, CANCEL, CREDIT, BYE, PING})
SERVER_KINDS: Final = frozenset({RESULT, ERROR, ITEM, END, DONE, GOODBYE, PONG, OPENED})
_HANDSHAKE_KINDS: Final = (frozenset({HELLO}), frozenset({WELCOME, REJECT}))
_SESSION_KINDS: Final = (CLIENT_KINDS, SERVER_KINDS)

_ANSWERS: Final = (RESULT, ERROR)
_CALL_ID_OFFSET: Final = MAC_BYTES + 40

#: Flag: the body is [positional, {name: value}] instead of the positional arguments alone.
FLAG_KEYWORDS: Final = 1
#: Flag: the deadline is a time on the monotonic clock that both sides share (same boot of the same machine), not a span.
FLAG_SHARED_CLOCK: Final = 2

#: A credit's bytes stand in the lower bits of its argument, its items above them.
_CREDIT_BYTES_BITS: Final = 40

#: Why a message can be refused; each is a counter.
REFUSALS: Final = (
    "truncated", "oversized", "magic", "version", "reflected", "kind", "session", "mac", "replayed", "gap", "structure",
    "unknown_peer",
)  # fmt: skip


class Refused(Exception):
    """A message was not accepted.

    ``reason`` is one of ``REFUSALS``; ``authentic`` says whether its MAC had been right.
    """

    def __init__(self, reason: str, detail: str = "", *, authentic: bool = False) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.authentic = authentic


def is_hello(first: bytes | memoryview) -> bool:
    """Whether a first frame claims to be a HELLO; nothing of it is checked."""
    return len(first) >= HEADER_BYTES and first[MAC_BYTES + 3] == HELLO


def is_answer(first: bytes | memoryview, call_id: int) -> bool:
    """Whether a first frame claims to be the answer to a call; nothing of it is checked."""
    return (
        len(first) >= HEADER_BYTES
        and first[MAC_BYTES + 3] in _ANSWERS
        and _unpack_length(first, _CALL_ID_OFFSET)[0] == call_id
    )


def pack_credit(items: int, size_bytes: int) -> int:
    """Argument of CREDIT: the consumer took so many items and bytes."""
    return items << _CREDIT_BYTES_BITS | size_bytes


def unpack_credit(argument: int) -> tuple[int, int]:
    """(items, bytes) of a CREDIT's argument."""
    return argument >> _CREDIT_BYTES_BITS, argument & ((1 << _CREDIT_BYTES_BITS) - 1)


def handshake_keys(key: bytes) -> tuple[Mac, Mac]:
    """Keys of the handshake: (client to server, server to client)."""
    return (
        HmacSha256(hmac.digest(key, b"rpc-local-registry handshake client->server", "sha256")),
        HmacSha256(hmac.digest(key, b"rpc-local-registry handshake server->client", "sha256")),
    )


def session_keys(key: bytes, transcript: bytes, mac_name: str) -> tuple[bytes, Mac, Mac]:
    """(session id, client to server, server to client), fresh for each handshake.

    Args:
        transcript: Digest of HELLO and WELCOME as they were sent, both nonces and both sides' terms among them.
        mac_name: The code that WELCOME chose.
    """
    make = MACS[mac_name]
    return (
        hmac.digest(key, b"rpc-local-registry session id" + transcript, "sha256")[:SESSION_BYTES],
        make(hmac.digest(key, b"rpc-local-registry session client->server" + transcript, "sha256")),
        make(hmac.digest(key, b"rpc-local-registry session server->client" + transcript, "sha256")),
    )


class Payload(msgspec.Struct, frozen=True, gc=False):
    """Everything of a message that its author decides; nothing in it changes any more.

    A Struct, as is ``Message``: one is made for each message, at a fifth of what a class of Python costs.
    """

    #: Name, table, body and small arrays, as they follow the header.
    tail: bytes
    name_bytes: int
    body_bytes: int
    buffer_count: int
    #: Large arrays, each a frame of its own.
    external: Sequence[bytes | memoryview]
    #: The whole message, all frames.
    size_bytes: int


NOTHING: Final = Payload(b"", 0, 0, 0, (), HEADER_BYTES)


def prepare(name: bytes, body: bytes, buffers: Sequence[bytes | memoryview] = (), inline_bytes_max: int = 0) -> Payload:
    """Lay a message out. Small arrays are copied; large ones stay as they are given (bytes, or memory that was lent)."""
    if not buffers:
        tail = name + body
        return Payload(tail, len(name), len(body), 0, (), HEADER_BYTES + len(tail))
    if len(buffers) == 1 and len(buffers[0]) <= inline_bytes_max:
        # By far the most common: one prompt's tokens.
        size = len(buffers[0])
        padding = -(HEADER_BYTES + len(name) + 8 + len(body)) & 7
        tail = b"".join((name, _pack_length(size), body, _PADDING[padding], buffers[0]))
        return Payload(tail, len(name), len(body), 1, (), HEADER_BYTES + len(tail))
    table: list[int] = []
    inline: list[bytes | memoryview] = []
    external: list[bytes | memoryview] = []
    offset = HEADER_BYTES + len(name) + 8 * len(buffers) + len(body)
    external_bytes = 0
    for buffer in buffers:
        size = len(buffer)
        if size > inline_bytes_max:
            table.append(size | _EXTERNAL)
            external.append(buffer)
            external_bytes += size
        else:
            table.append(size)
            padding = -offset & 7
            inline.append(_PADDING[padding])
            inline.append(buffer)
            offset += padding + size
    tail = b"".join((name, struct.pack(f"<{len(table)}Q", *table), body, *inline))
    return Payload(tail, len(name), len(body), len(buffers), external, HEADER_BYTES + len(tail) + external_bytes)


class Message(msgspec.Struct, frozen=True, gc=False):
    """An opened message. ``body`` and ``buffers`` are read-only: copies of short ones, views into the received frames else."""

    kind: int
    flags: int
    call_id: int
    argument: int
    name: bytes
    body: bytes | memoryview
    buffers: Sequence[memoryview]
    size_bytes: int


class Sealer:
    """Writes one direction of one session."""

    __slots__ = ("_direction", "_session", "_step", "_tag", "sequence")

    def __init__(self, mac: Mac, direction: int, session: bytes) -> None:
        self._tag = mac.tag
        self._direction = direction
        self._session = session
        self._step = 0 if session == NO_SESSION else 1
        #: Number of the last message sealed.
        self.sequence = 0

    def seal(
        self, kind: int, call_id: int = 0, argument: int = 0, payload: Payload = NOTHING, flags: int = 0
    ) -> list[bytes | memoryview]:
        """Frames of the next message."""
        self.sequence = number = self.sequence + self._step
        return self.frames(number, kind, call_id, argument, payload, flags)

    def frames(
        self, number: int, kind: int, call_id: int, argument: int, payload: Payload, flags: int
    ) -> list[bytes | memoryview]:
        """Frames of message ``number``; nothing changes here. Two different messages of one number must never be sent."""
        covered = (
            _pack(
                MAGIC, VERSION, kind, self._direction, flags, payload.buffer_count, payload.body_bytes,
                payload.name_bytes, 0, self._session, number, call_id, argument,
            )
            + payload.tail
        )  # fmt: skip
        external = payload.external
        if external:
            return [self._tag(number, covered, external) + covered, *external]
        return [self._tag(number, covered) + covered]


class Opener:
    """Reads one direction of one session."""

    __slots__ = (
        "_buffers_max",
        "_direction",
        "_handshake",
        "_kinds",
        "_may_miss",
        "_message_bytes_max",
        "_session",
        "_tag",
        "sequence",
    )

    def __init__(self, mac: Mac, direction: int, session: bytes, *, message_bytes_max: int, buffers_max: int) -> None:
        self._tag = mac.tag
        self._direction = direction
        self._session = session
        self._handshake = session == NO_SESSION
        self._kinds = (_HANDSHAKE_KINDS if self._handshake else _SESSION_KINDS)[direction]
        self._message_bytes_max = HANDSHAKE_BYTES_MAX if self._handshake else message_bytes_max
        self._buffers_max = 0 if self._handshake else buffers_max
        self._may_miss = False
        #: Number of the last message accepted.
        self.sequence = 0

    def may_miss_one(self) -> None:
        """One message was perhaps received and dropped here, by an interrupt: the next one may be the one after it."""
        self._may_miss = True

    def open(self, frames: Sequence[bytes | memoryview]) -> Message:
        """The message, or ``Refused``; a refusal leaves this object as it was.

        Args:
            frames: All frames of one message, the first as ``bytes``.
        """
        first = frames[0]
        size = total = len(first)
        # Sizes, before any work that grows with them.
        if size < HEADER_BYTES:
            raise Refused("truncated", f"{size} bytes")
        count = len(frames)
        rest: Sequence[bytes | memoryview] = ()
        if count > 1:
            rest = frames[1:]
            for frame in rest:
                total += len(frame)
        if total > self._message_bytes_max or count > 1 + self._buffers_max:
            raise Refused("oversized", f"{total} bytes in {count} frames")
        (magic, version, kind, direction, flags, buffer_count, body_bytes, name_bytes, reserved, session, sequence,
        call_id,
         argument) = _unpack_from(first, MAC_BYTES)  # fmt: skip
        if magic != MAGIC:
            raise Refused("magic")
        if version != VERSION:
            raise Refused("version", str(version))
        if direction != self._direction:
            raise Refused("reflected")
        if session != self._session:
            raise Refused("session")
        # Of a short message a copy costs less than a view.
        data = first if size <= _VIEWED_BYTES_MIN else memoryview(first)
        if not hmac.compare_digest(self._tag(sequence, data[MAC_BYTES:], rest), first[:MAC_BYTES]):
            raise Refused("mac")
        if self._handshake:
            if sequence != 0:
                raise Refused("gap", "a handshake has no sequence number", authentic=True)
        elif sequence != self.sequence + 1:
            if sequence <= self.sequence:
                raise Refused("replayed", f"sequence {sequence} after {self.sequence}", authentic=True)
            if not self._may_miss or sequence != self.sequence + 2:
                raise Refused("gap", f"sequence {sequence} after {self.sequence}", authentic=True)
        if kind not in self._kinds:
            raise Refused("kind", str(kind), authentic=True)
        offset = HEADER_BYTES + name_bytes
        end = offset + 8 * buffer_count + body_bytes
        if reserved or name_bytes > NAME_BYTES_MAX or buffer_count > self._buffers_max or end > size:
            raise Refused("structure", "its lengths do not fit together", authentic=True)
        name = bytes(first[HEADER_BYTES:offset]) if name_bytes else b""
        if not buffer_count:
            if end != size or count != 1:
                raise Refused("structure", "bytes are left over", authentic=True)
            self._may_miss = False
            self.sequence = sequence
            return Message(kind, flags, call_id, argument, name, data[offset:end], (), total)
        if buffer_count == 1:
            table: tuple[int, ...] = _unpack_length(first, offset)
        else:
            table = struct.unpack_from(f"<{buffer_count}Q", first, offset)
        view = memoryview(first)
        body = view[offset + 8 * buffer_count : end]
        buffers: list[memoryview] = []
        external = 1
        for entry in table:
            length = entry & ~_EXTERNAL
            if entry & _EXTERNAL:
                if external >= len(frames) or len(frames[external]) != length:
                    raise Refused("structure", "an array's frame is missing or of another size", authentic=True)
                frame = frames[external]
                buffers.append(frame if isinstance(frame, memoryview) else memoryview(frame))
                external += 1
            else:
                start = end + (-end & 7)
                end = start + length
                if end > size:
                    raise Refused("structure", "an array reaches beyond the message", authentic=True)
                buffers.append(view[start:end])
        if end != size or external != len(frames):
            raise Refused("structure", "bytes are left over", authentic=True)
        self._may_miss = False
        self.sequence = sequence
        return Message(kind, flags, call_id, argument, name, body, buffers, total)
