"""The handshake and the two ends of a session. Pure: frames in, frames out; nonces are arguments.

    client                                                server
      HELLO(nonce, versions, name)      ───────────────▶    MAC under the handshake key, nonce never seen
      MAC, own nonce echoed             ◀───────────────  WELCOME(both nonces, version, limits) or REJECT(versions)
      PING (first message of the session) ─────────────▶   session confirmed
      CALL / STREAM / ONEWAY / CANCEL / CREDIT … ⇄ RESULT / ERROR / ITEM / END / DONE
      BYE ─────────────────────────────────────────────▶   answered by GOODBYE; either side may begin

A replayed HELLO is refused by its nonce; even unseen it would only open a half session whose keys depend on a fresh
server nonce, so nothing recorded earlier fits into it. A peer without the key is never answered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import msgspec

from rpc_local_registry import _wire as wire
from rpc_local_registry._errors import RpcProtocolMismatch

VERSION_MIN: Final = 1
VERSION_MAX: Final = 1
NAME_CHARS_MAX: Final = 128


class Hello(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A client's opening."""

    nonce: bytes
    version_min: int
    version_max: int
    name: str
    message_bytes_max: int
    buffers_max: int


class Welcome(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A server's acceptance, with the limits that the client keeps to."""

    client_nonce: bytes
    server_nonce: bytes
    version: int
    name: str
    message_bytes_max: int
    buffers_max: int


class Reject(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A server's refusal of an authentic client."""

    client_nonce: bytes
    version_min: int
    version_max: int
    text: str


_hello_decode: Final = msgspec.msgpack.Decoder(Hello).decode
_welcome_decode: Final = msgspec.msgpack.Decoder(Welcome).decode
_reject_decode: Final = msgspec.msgpack.Decoder(Reject).decode
_encode: Final = msgspec.msgpack.Encoder().encode


@dataclasses.dataclass
class Session:
    """One side's end of an open session."""

    session_id: bytes
    peer_name: str
    sealer: wire.Sealer
    opener: wire.Opener
    #: Largest message that the peer takes, bytes.
    peer_message_bytes_max: int
    peer_buffers_max: int


class ClientHandshake:
    """The client's half; one per attempt, with a nonce of its own."""

    def __init__(
        self,
        key: bytes,
        nonce: bytes,
        name: str,
        *,
        message_bytes_max: int,
        buffers_max: int,
        versions: tuple[int, int] = (VERSION_MIN, VERSION_MAX),
    ) -> None:
        self._key = key
        self._nonce = nonce
        self._name = name
        self._versions = versions
        self._message_bytes_max = message_bytes_max
        self._buffers_max = buffers_max
        to_server, to_client = wire.handshake_keys(key)
        self._sealer = wire.Sealer(to_server, wire.TO_SERVER, wire.NO_SESSION)
        self._opener = wire.Opener(
            to_client, wire.TO_CLIENT, wire.NO_SESSION, message_bytes_max=message_bytes_max, buffers_max=0
        )

    def hello(self) -> list[bytes | memoryview]:
        """Frames to send first."""
        name = self._name[:NAME_CHARS_MAX]
        body = _encode(Hello(self._nonce, *self._versions, name, self._message_bytes_max, self._buffers_max))
        return self._sealer.seal(wire.HELLO, body=body)

    def answer(self, frames: Sequence[bytes | memoryview]) -> Session:
        """The session, from the server's answer.

        Raises:
            _wire.Refused: Not an authentic answer to this very hello; wait for another.
            RpcProtocolMismatch: The server shares the key but no version.
        """
        message = self._opener.open(frames)
        try:
            if message.kind == wire.REJECT:
                reject = _reject_decode(message.body)
                if reject.client_nonce != self._nonce:
                    raise wire.Refused("replayed", "answer to another hello", authentic=True)
                raise RpcProtocolMismatch(
                    f"{reject.text}: server speaks versions {reject.version_min} to {reject.version_max}, this client "
                    f"{self._versions[0]} to {self._versions[1]}"
                )
            welcome = _welcome_decode(message.body)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise wire.Refused("structure", str(error), authentic=True) from error
        if welcome.client_nonce != self._nonce:
            raise wire.Refused("replayed", "answer to another hello", authentic=True)
        if (
            len(welcome.server_nonce) != wire.NONCE_BYTES
            or not self._versions[0] <= welcome.version <= self._versions[1]
        ):
            raise wire.Refused("structure", "welcome", authentic=True)
        session_id, to_server, to_client = wire.session_keys(self._key, self._nonce, welcome.server_nonce)
        return Session(
            session_id,
            welcome.name,
            wire.Sealer(to_server, wire.TO_SERVER, session_id),
            wire.Opener(
                to_client,
                wire.TO_CLIENT,
                session_id,
                message_bytes_max=self._message_bytes_max,
                buffers_max=self._buffers_max,
            ),
            welcome.message_bytes_max,
            welcome.buffers_max,
        )


class ServerHandshake:
    """The server's half, for all clients; remembers nonces."""

    #: Nonces remembered; beyond it the oldest are forgotten, which costs nothing but a half session for a very late
    #: replay.
    NONCES_MAX: Final = 65536

    def __init__(self, key: bytes, name: str, *, message_bytes_max: int, buffers_max: int) -> None:
        self._key = key
        self._name = name[:NAME_CHARS_MAX]
        self._message_bytes_max = message_bytes_max
        self._buffers_max = buffers_max
        to_server, to_client = wire.handshake_keys(key)
        self._sealer = wire.Sealer(to_client, wire.TO_CLIENT, wire.NO_SESSION)
        self._opener = wire.Opener(
            to_server, wire.TO_SERVER, wire.NO_SESSION, message_bytes_max=message_bytes_max, buffers_max=0
        )
        self._nonces: dict[bytes, None] = {}

    def answer(
        self, frames: Sequence[bytes | memoryview], server_nonce: bytes
    ) -> tuple[list[bytes | memoryview], Session | None]:
        """(frames to send back, session or None when the versions do not meet).

        Raises:
            _wire.Refused: No authentic, fresh hello. Nothing is to be sent.
        """
        message = self._opener.open(frames)
        try:
            hello = _hello_decode(message.body)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise wire.Refused("structure", str(error), authentic=True) from error
        if len(hello.nonce) != wire.NONCE_BYTES or len(hello.name) > NAME_CHARS_MAX:
            raise wire.Refused("structure", "hello", authentic=True)
        if hello.nonce in self._nonces:
            raise wire.Refused("replayed", "hello", authentic=True)
        self._nonces[hello.nonce] = None
        if len(self._nonces) > self.NONCES_MAX:
            del self._nonces[next(iter(self._nonces))]
        version = min(VERSION_MAX, hello.version_max)
        if version < max(VERSION_MIN, hello.version_min):
            reject = Reject(hello.nonce, VERSION_MIN, VERSION_MAX, "no common protocol version")
            return self._sealer.seal(wire.REJECT, body=_encode(reject)), None
        welcome = Welcome(hello.nonce, server_nonce, version, self._name, self._message_bytes_max, self._buffers_max)
        session_id, to_server, to_client = wire.session_keys(self._key, hello.nonce, server_nonce)
        session = Session(
            session_id,
            hello.name,
            wire.Sealer(to_client, wire.TO_CLIENT, session_id),
            wire.Opener(
                to_server,
                wire.TO_SERVER,
                session_id,
                message_bytes_max=self._message_bytes_max,
                buffers_max=self._buffers_max,
            ),
            hello.message_bytes_max,
            hello.buffers_max,
        )
        return self._sealer.seal(wire.WELCOME, body=_encode(welcome)), session
