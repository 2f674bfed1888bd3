"""Frames: sealing, opening, sizes. Pure: bytes in, bytes out; no socket, clock or environment.

One message is one ZeroMQ message of 1 + n frames. The first frame:

    mac        32  HMAC-SHA256 over everything that follows in this frame, then over every further frame, in order
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
    argument    8  by kind: a deadline in microseconds, a count of credits, an item's index
    name           method name, ASCII
    table          per array 8 bytes: its length; the top bit says that it is a frame of its own
    body           msgpack
    padding and the small arrays, each at a multiple of 8 bytes from the frame's start

Large arrays follow as frames of their own, in table order. Every length is thus under the MAC. Sizes are checked before
the MAC, the MAC before the sequence, the sequence before any decoding.

Each direction has a key of its own, derived from the shared key and both sides' nonces, so a message cannot be replayed
into another session nor reflected to its author; inside a session the sequence refuses it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import Final

MAGIC: Final = b"RL"
VERSION: Final = 1
MAC_BYTES: Final = 32
NONCE_BYTES: Final = 16
SESSION_BYTES: Final = 16
NO_SESSION: Final = bytes(SESSION_BYTES)
_HEADER: Final = struct.Struct("<2sBBBBHIHH16sQQQ")
HEADER_BYTES: Final = MAC_BYTES + _HEADER.size
_EXTERNAL: Final = 1 << 63
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

KIND_NAMES: Final = {
    HELLO: "HELLO", WELCOME: "WELCOME", REJECT: "REJECT", CALL: "CALL", STREAM: "STREAM", ONEWAY: "ONEWAY", CANCEL:
        "CANCEL",
    CREDIT: "CREDIT", BYE: "BYE", PING: "PING", RESULT: "RESULT", ERROR: "ERROR", ITEM: "ITEM", END: "END", DONE:
        "DONE",
    GOODBYE: "GOODBYE", PONG: "PONG",
}  # fmt: skip
CLIENT_KINDS: Final = frozenset({CALL, STREAM, ONEWAY, CANCEL, CREDIT, BYE, PING})
SERVER_KINDS: Final = frozenset({RESULT, ERROR, ITEM, END, DONE, GOODBYE, PONG})
_HANDSHAKE_KINDS: Final = (frozenset({HELLO}), frozenset({WELCOME, REJECT}))
_SESSION_KINDS: Final = (CLIENT_KINDS, SERVER_KINDS)

#: Flag: the body is [positional, {name: value}] instead of the positional arguments alone.
FLAG_KEYWORDS: Final = 1

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


class MacKey:
    """HMAC-SHA256 with both pads absorbed once; equal to ``hmac.digest(key, data, "sha256")`` at a third of its fixed cost."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        block = (hashlib.sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))

    def digest(self, first: bytes | memoryview, rest: Sequence[bytes | memoryview] = ()) -> bytes:
        """MAC over the concatenation of all parts."""
        inner = self._inner.copy()
        inner.update(first)
        for part in rest:
            inner.update(part)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()


def handshake_keys(key: bytes) -> tuple[MacKey, MacKey]:
    """Keys of the handshake: (client to server, server to client)."""
    return (
        MacKey(hmac.digest(key, b"rpc-local-registry handshake client->server", "sha256")),
        MacKey(hmac.digest(key, b"rpc-local-registry handshake server->client", "sha256")),
    )


def session_keys(key: bytes, client_nonce: bytes, server_nonce: bytes) -> tuple[bytes, MacKey, MacKey]:
    """(session id, client to server, server to client), fresh for each pair of nonces."""
    salt = client_nonce + server_nonce
    return (
        hmac.digest(key, b"rpc-local-registry session id" + salt, "sha256")[:SESSION_BYTES],
        MacKey(hmac.digest(key, b"rpc-local-registry session client->server" + salt, "sha256")),
        MacKey(hmac.digest(key, b"rpc-local-registry session server->client" + salt, "sha256")),
    )


class Message:
    """An opened message. ``body`` and ``buffers`` are read-only views into the received frames."""

    __slots__ = ("argument", "body", "buffers", "call_id", "flags", "kind", "name", "size_bytes")

    def __init__(
        self,
        kind: int,
        flags: int,
        call_id: int,
        argument: int,
        name: bytes,
        body: memoryview,
        buffers: list[memoryview],
        size_bytes: int,
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.call_id = call_id
        self.argument = argument
        self.name = name
        self.body = body
        self.buffers = buffers
        self.size_bytes = size_bytes


class Sealer:
    """Writes one direction of one session."""

    __slots__ = ("_direction", "_mac", "_session", "sequence")

    def __init__(self, mac: MacKey, direction: int, session: bytes) -> None:
        self._mac = mac
        self._direction = direction
        self._session = session
        #: Number of the last message sealed.
        self.sequence = 0

    def seal(
        self,
        kind: int,
        call_id: int = 0,
        argument: int = 0,
        name: bytes = b"",
        body: bytes = b"",
        buffers: Sequence[memoryview] = (),
        *,
        flags: int = 0,
        inline_bytes_max: int = 0,
    ) -> list[bytes | memoryview]:
        """Frames of the next message.

        ``buffers`` are flat byte views; those above ``inline_bytes_max`` are not copied.
        """
        if self._session != NO_SESSION:
            self.sequence += 1
        header = _HEADER.pack(
            MAGIC, VERSION, kind, self._direction, flags, len(buffers), len(body), len(name), 0, self._session,
            self.sequence, call_id, argument,
        )  # fmt: skip
        if not buffers:
            covered = b"".join((header, name, body))
            return [self._mac.digest(covered) + covered]
        table: list[int] = []
        inline: list[bytes | memoryview] = []
        external: list[bytes | memoryview] = []
        offset = HEADER_BYTES + len(name) + 8 * len(buffers) + len(body)
        for buffer in buffers:
            size = len(buffer)
            if size > inline_bytes_max:
                table.append(size | _EXTERNAL)
                external.append(buffer)
            else:
                table.append(size)
                padding = -offset & 7
                if padding:
                    inline.append(bytes(padding))
                inline.append(buffer)
                offset += padding + size
        covered = b"".join((header, name, struct.pack(f"<{len(table)}Q", *table), body, *inline))
        return [self._mac.digest(covered, external) + covered, *external]


class Opener:
    """Reads one direction of one session."""

    __slots__ = (
        "_buffers_max",
        "_direction",
        "_handshake",
        "_kinds",
        "_mac",
        "_message_bytes_max",
        "_session",
        "sequence",
    )

    def __init__(
        self, mac: MacKey, direction: int, session: bytes, *, message_bytes_max: int, buffers_max: int
    ) -> None:
        self._mac = mac
        self._direction = direction
        self._session = session
        self._handshake = session == NO_SESSION
        self._kinds = (_HANDSHAKE_KINDS if self._handshake else _SESSION_KINDS)[direction]
        self._message_bytes_max = min(message_bytes_max, HANDSHAKE_BYTES_MAX) if self._handshake else message_bytes_max
        self._buffers_max = 0 if self._handshake else buffers_max
        #: Number of the last message accepted.
        self.sequence = 0

    def open(self, frames: Sequence[bytes | memoryview]) -> Message:
        """The message, or ``Refused``; a refusal leaves this object as it was.

        Args:
            frames: All frames of one message, the first as ``bytes``.
        """
        first = frames[0]
        size = len(first)
        # Sizes, before any work that grows with them.
        if size < HEADER_BYTES:
            raise Refused("truncated", f"{size} bytes")
        total = size
        for frame in frames[1:]:
            total += len(frame)
        if total > self._message_bytes_max or len(frames) > 1 + self._buffers_max:
            raise Refused("oversized", f"{total} bytes in {len(frames)} frames")
        (magic, version, kind, direction, flags, buffer_count, body_bytes, name_bytes, reserved, session, sequence,
        call_id,
         argument) = _HEADER.unpack_from(first, MAC_BYTES)  # fmt: skip
        if magic != MAGIC:
            raise Refused("magic")
        if version != VERSION:
            raise Refused("version", str(version))
        if direction != self._direction:
            raise Refused("reflected")
        if session != self._session:
            raise Refused("session")
        view = memoryview(first)
        if not hmac.compare_digest(self._mac.digest(view[MAC_BYTES:], frames[1:]), view[:MAC_BYTES]):
            raise Refused("mac")
        if self._handshake:
            if sequence != 0:
                raise Refused("gap", "sequence in a handshake", authentic=True)
        elif sequence != self.sequence + 1:
            if sequence <= self.sequence:
                raise Refused("replayed", f"sequence {sequence} after {self.sequence}", authentic=True)
            raise Refused("gap", f"sequence {sequence} after {self.sequence}", authentic=True)
        if kind not in self._kinds:
            raise Refused("kind", str(kind), authentic=True)
        offset = HEADER_BYTES + name_bytes
        end = offset + 8 * buffer_count + body_bytes
        if reserved or name_bytes > NAME_BYTES_MAX or buffer_count > self._buffers_max or end > size:
            raise Refused("structure", "lengths", authentic=True)
        name = first[HEADER_BYTES:offset] if name_bytes else b""
        if not buffer_count:
            if end != size or len(frames) != 1:
                raise Refused("structure", "trailing bytes", authentic=True)
            self.sequence = sequence
            return Message(kind, flags, call_id, argument, bytes(name), view[offset:end], [], total)
        table = struct.unpack_from(f"<{buffer_count}Q", first, offset)
        body = view[offset + 8 * buffer_count : end]
        buffers: list[memoryview] = []
        external = 1
        for entry in table:
            length = entry & ~_EXTERNAL
            if entry & _EXTERNAL:
                if external >= len(frames) or len(frames[external]) != length:
                    raise Refused("structure", "array frame", authentic=True)
                frame = frames[external]
                buffers.append(frame if isinstance(frame, memoryview) else memoryview(frame))
                external += 1
            else:
                start = end + (-end & 7)
                end = start + length
                if end > size:
                    raise Refused("structure", "inline array", authentic=True)
                buffers.append(view[start:end])
        if end != size or external != len(frames):
            raise Refused("structure", "trailing bytes", authentic=True)
        self.sequence = sequence
        return Message(kind, flags, call_id, argument, bytes(name), body, buffers, total)
