"""The handshake and the two ends of a session. Pure: frames in, frames out; nonces are arguments.

    client                                                server
      HELLO(nonce, versions, name, terms) ─────────────▶    HMAC under the handshake key, nonce never seen
      HMAC, own nonce echoed  ◀─────────  WELCOME(both nonces, version, terms, code) or REJECT(versions)
      PING (first message of the session) ─────────────▶   session confirmed
      CALL / STREAM / ONEWAY / CANCEL / CREDIT … ⇄ RESULT / ERROR / OPENED / ITEM / END / DONE
      BYE ─────────────────────────────────────────────▶   answered by GOODBYE; either side may begin

The terms hold every number that both sides use; a number that is not among them is one side's alone. The session's keys are
derived from the digest of HELLO and WELCOME as they were sent, so both ends saw the same terms and the same choice of code,
or neither understands the other.

A replayed HELLO is refused by its nonce; even unseen it would only open a half session whose keys depend on a fresh
server nonce, so nothing recorded earlier fits into it. A peer without the key is never answered.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Annotated, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

from rpc_local_registry import _wire as wire
from rpc_local_registry._errors import RpcProtocolMismatch
from rpc_local_registry._mac import choose

VERSION_MIN: Final = 1
VERSION_MAX: Final = 1
NAME_CHARS_MAX: Final = 128
#: Bytes of a clock's identity at most.
_CLOCK_BYTES_MAX: Final = 64

_Count = Annotated[int, Meta(ge=0, le=1 << 48)]
_Positive = Annotated[int, Meta(ge=1, le=1 << 48)]
_Nonce = Annotated[bytes, Meta(min_length=wire.NONCE_BYTES, max_length=wire.NONCE_BYTES)]
_Name = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
_Costs = Annotated[dict[Annotated[str, Meta(max_length=64)], _Positive], Meta(max_length=16)]
_Clock = Annotated[bytes, Meta(max_length=_CLOCK_BYTES_MAX)]


class ClientTerms(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a client wants and allows; the server keeps to it."""

    #: Largest message that it takes, all frames, bytes.
    message_bytes_max: _Positive
    #: Most arrays in one message.
    buffers_max: _Count
    #: Items of one stream on their way to its consumer.
    stream_items: _Positive
    #: Bytes of one stream on their way to its consumer; one item may go beyond it.
    stream_bytes: _Positive
    #: Bytes of answers that may wait unread for the whole session; calls beyond it are refused, twice of it ends it.
    unread_bytes_max: _Positive
    #: Codes that it can compute, with their cost in nanoseconds.
    macs: _Costs
    #: Identity of its monotonic clock; empty if unknown.
    clock: _Clock


class ServerTerms(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a server allows; the client keeps to it."""

    message_bytes_max: _Positive
    buffers_max: _Count
    #: Unanswered calls of one session.
    pending_calls_max: _Positive
    #: Bytes of unanswered calls of one session.
    pending_bytes_max: _Positive
    macs: _Costs
    clock: _Clock


class Hello(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A client's opening."""

    nonce: _Nonce
    version_min: int
    version_max: int
    name: _Name
    terms: ClientTerms


class Welcome(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A server's acceptance."""

    client_nonce: bytes
    server_nonce: _Nonce
    version: int
    name: str
    terms: ServerTerms
    #: The code of the session.
    mac: str


class Reject(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A server's refusal of an authentic client."""

    client_nonce: bytes
    text: str


_hello_decode: Final = msgspec.msgpack.Decoder(Hello).decode
_welcome_decode: Final = msgspec.msgpack.Decoder(Welcome).decode
_reject_decode: Final = msgspec.msgpack.Decoder(Reject).decode
_encode: Final = msgspec.msgpack.Encoder().encode
_Terms = TypeVar("_Terms", ClientTerms, ServerTerms)


@dataclasses.dataclass
class Session(Generic[_Terms]):
    """One side's end of an open session."""

    session_id: bytes
    peer_name: str
    sealer: wire.Sealer
    opener: wire.Opener
    #: What the other side wants and allows.
    peer: _Terms
    mac_name: str
    #: Whether both sides read the same monotonic clock.
    shared_clock: bool


def _transcript(hello: Sequence[bytes | memoryview], welcome: Sequence[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256(len(hello[0]).to_bytes(8, "little"))
    for frame in (*hello, *welcome):
        digest.update(frame)
    return digest.digest()


def _shared_clock(ours: bytes, theirs: bytes) -> bool:
    return bool(ours) and ours == theirs


class ClientHandshake:
    """The client's half; one per attempt, with a nonce of its own."""

    def __init__(
        self,
        key: bytes,
        nonce: bytes,
        name: str,
        terms: ClientTerms,
        *,
        versions: tuple[int, int] = (VERSION_MIN, VERSION_MAX),
    ) -> None:
        self._key = key
        self._nonce = nonce
        self._versions = versions
        self._terms = terms
        to_server, to_client = wire.handshake_keys(key)
        self._opener = wire.Opener(
            to_client, wire.TO_CLIENT, wire.NO_SESSION, message_bytes_max=terms.message_bytes_max, buffers_max=0
        )
        body = _encode(Hello(nonce, *versions, name[:NAME_CHARS_MAX], terms))
        sealer = wire.Sealer(to_server, wire.TO_SERVER, wire.NO_SESSION)
        self._hello = sealer.seal(wire.HELLO, payload=wire.prepare(b"", body))

    def hello(self) -> list[bytes | memoryview]:
        """Frames to send first."""
        return self._hello

    def answer(self, frames: Sequence[bytes | memoryview]) -> Session[ServerTerms]:
        """The session, from the server's answer.

        Raises:
            _wire.Refused: Not an authentic answer to this very hello; wait for another.
            RpcProtocolMismatch: The server shares the key but no version or code.
        """
        message = self._opener.open(frames)
        try:
            if message.kind == wire.REJECT:
                reject = _reject_decode(message.body)
                if reject.client_nonce != self._nonce:
                    raise wire.Refused("replayed", "it answers another hello than this session's", authentic=True)
                raise RpcProtocolMismatch(
                    f"{reject.text}; this client speaks versions {self._versions[0]} to {self._versions[1]} with "
                    f"{', '.join(self._terms.macs)}"
                )
            welcome = _welcome_decode(message.body)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise wire.Refused("structure", str(error), authentic=True) from error
        if welcome.client_nonce != self._nonce:
            raise wire.Refused("replayed", "it answers another hello than this session's", authentic=True)
        if not self._versions[0] <= welcome.version <= self._versions[1] or welcome.mac not in self._terms.macs:
            raise wire.Refused("structure", "welcome", authentic=True)
        session_id, to_server, to_client = wire.session_keys(self._key, _transcript(self._hello, frames), welcome.mac)
        return Session(
            session_id,
            welcome.name,
            wire.Sealer(to_server, wire.TO_SERVER, session_id),
            wire.Opener(
                to_client,
                wire.TO_CLIENT,
                session_id,
                message_bytes_max=self._terms.message_bytes_max,
                buffers_max=self._terms.buffers_max,
            ),
            welcome.terms,
            welcome.mac,
            _shared_clock(self._terms.clock, welcome.terms.clock),
        )


class ServerHandshake:
    """The server's half, for all clients; remembers nonces."""

    #: Nonces remembered; beyond it the oldest are forgotten, which costs nothing but a half session for a very late
    #: replay.
    NONCES_MAX: Final = 65536

    def __init__(self, key: bytes, name: str, terms: ServerTerms) -> None:
        self._key = key
        self._name = name[:NAME_CHARS_MAX]
        self._terms = terms
        to_server, to_client = wire.handshake_keys(key)
        self._sealer = wire.Sealer(to_client, wire.TO_CLIENT, wire.NO_SESSION)
        self._opener = wire.Opener(
            to_server, wire.TO_SERVER, wire.NO_SESSION, message_bytes_max=terms.message_bytes_max, buffers_max=0
        )
        self._nonces: dict[bytes, None] = {}

    def answer(
        self, frames: Sequence[bytes | memoryview], server_nonce: bytes
    ) -> tuple[list[bytes | memoryview], Session[ClientTerms] | None]:
        """(frames to send back, session or None when versions or codes do not meet).

        Raises:
            _wire.Refused: No authentic, fresh hello. Nothing is to be sent.
        """
        message = self._opener.open(frames)
        try:
            hello = _hello_decode(message.body)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise wire.Refused("structure", str(error), authentic=True) from error
        if hello.nonce in self._nonces:
            raise wire.Refused("replayed", "hello", authentic=True)
        self._nonces[hello.nonce] = None
        if len(self._nonces) > self.NONCES_MAX:
            del self._nonces[next(iter(self._nonces))]
        terms = self._terms
        version = min(VERSION_MAX, hello.version_max)
        if version < max(VERSION_MIN, hello.version_min):
            return self._reject(hello, f"the server speaks versions {VERSION_MIN} to {VERSION_MAX}"), None
        mac_name = choose(terms.macs, hello.terms.macs)
        if mac_name is None:
            return self._reject(hello, f"the server authenticates with {', '.join(terms.macs)}"), None
        welcome = Welcome(hello.nonce, server_nonce, version, self._name, terms, mac_name)
        answer = self._sealer.seal(wire.WELCOME, payload=wire.prepare(b"", _encode(welcome)))
        session_id, to_server, to_client = wire.session_keys(self._key, _transcript(frames, answer), mac_name)
        session = Session(
            session_id,
            hello.name,
            wire.Sealer(to_client, wire.TO_CLIENT, session_id),
            wire.Opener(
                to_server,
                wire.TO_SERVER,
                session_id,
                message_bytes_max=terms.message_bytes_max,
                buffers_max=terms.buffers_max,
            ),
            hello.terms,
            mac_name,
            _shared_clock(terms.clock, hello.terms.clock),
        )
        return answer, session

    def _reject(self, hello: Hello, text: str) -> list[bytes | memoryview]:
        return self._sealer.seal(wire.REJECT, payload=wire.prepare(b"", _encode(Reject(hello.nonce, text))))
