"""A ControlChannel over ZeroMQ. The one file that imports zmq.

Theory. Each peer binds a ROUTER if others are to reach it; who wants to talk connects one DEALER per peer, and answers come
back on the link that the question came on. So a pair of peers has one link and one order.

Nobody without the shared key is listened to: each connection begins with a CURVE handshake whose server key is derived from
the shared one and is never sent, so who does not have it ends there, before ZeroMQ gathers the first part of a message (a
message of parts without end would otherwise fill the memory, which no option of ZeroMQ bounds). It also hides what is said.

Which peer of those with the key speaks, CURVE does not say. Every frame carries an HMAC-SHA256 over link number, sequence
number, sender, receiver and content, with a key per direction derived from the shared one. A link number is random, one per
direction and link; a number that was used before is never accepted again, so frames of an earlier link, of the wrong
direction, replayed or out of order are refused.

ZeroMQ would reconnect by itself and drop frames silently. Here a link ends with its connection: a monitor (or a send that has
no route, or a gap in the sequence) ends it, the end is an event (``link_events``), and the dialling side makes a new link with
new numbers until ``disconnect``. The listening side takes a new link of a known peer in place of the earlier one, and says so.
Whether the same life is on its other end is not for the channel to say: sessions show each other their numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kv_bounce_planner._errors import ChannelError, WouldBlock
from kv_bounce_planner.sessions.identity import PeerId
from kv_bounce_planner.sessions.messages import FRAME_BYTES_MAX
from kv_bounce_planner.transports.interface import LinkEvent

_MAGIC: Final = b"KVZ\x02"
#: A frame that says: another session dialled under your name, this link is over. It ends redialling.
_TAKEN: Final = b"KVZ taken"
_HEAD: Final = struct.Struct("<4s16sQ")
_TAG_BYTES: Final = 32
KEY_BYTES_MIN: Final = 16
#: Frames that may wait in each direction of one link before WouldBlock (count).
QUEUE_FRAMES_MAX: Final = 4096
#: Links from peers that never authenticated are not kept at all; authenticated ones are bounded.
LINKS_MAX: Final = 65536
#: Link numbers of a peer that are remembered (count): a peer that made more links than this is refused.
NUMBERS_MAX: Final = 4096
#: Between two attempts to dial again (seconds): the first, and the longest.
REDIAL_FIRST_S: Final = 0.05
REDIAL_LAST_S: Final = 2.0
#: ZeroMQ's own heartbeats (milliseconds): a connection whose other end does not answer is closed.
HEARTBEAT_MS: Final = 1000
HEARTBEAT_TIMEOUT_MS: Final = 5000
#: A connection that has not shown the key by then is closed (milliseconds).
HANDSHAKE_MS: Final = 10_000
_HANDSHAKE_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
#: Failed handshakes that one look at the listening socket counts (count); the others wait for the next.
_FAILURES_PER_LOOK: Final = 256


class _Link:
    __slots__ = ("broken", "incoming", "number", "outgoing", "received", "remote_number", "route", "sent", "socket")

    def __init__(self, socket: Any, route: bytes | None, keys: tuple[bytes, bytes]) -> None:
        self.socket = socket
        self.outgoing, self.incoming = keys  # one key per direction
        self.route = route  # ROUTER's name of the link; None on a DEALER
        self.number = secrets.token_bytes(16)
        self.remote_number = b""
        self.sent = 0
        self.received = 0
        self.broken = ""


class _Dialled:
    """A peer that this side dials: its address, its socket, and when to try again."""

    __slots__ = ("address", "again_at_s", "link", "monitor", "taken", "wait_s")

    def __init__(self, address: str) -> None:
        self.address = address
        self.link: _Link | None = None
        self.monitor: Any = None
        self.again_at_s = 0.0
        self.wait_s = REDIAL_FIRST_S
        self.taken = False


class ZmqControlChannel:
    """Authenticated frames between peers, first in first out per peer: a ``LinkedChannel``.

    Args:
        self_id: This process.
        key: Shared by all peers, at least 16 bytes.
        bind: Address to listen on (``tcp://host:*``, ``ipc://path``), or None to connect only. An ipc file is removed by
            ``close``.
        context: A zmq context to share; by default its own. A ZAP handler of that context is asked about every connection.
        clock: Monotonic seconds, for dialling again.

    ``refused`` counts what was not taken, by reason; ``handshake``: connections of who does not have the key.

    Not thread-safe: one thread polls and sends.

    Raises:
        ChannelError: This ZeroMQ has no CURVE.
    """

    def __init__(
        self,
        self_id: PeerId,
        key: bytes,
        bind: str | None = None,
        *,
        context: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(key) < KEY_BYTES_MIN:
            raise ValueError(f"key wants at least {KEY_BYTES_MIN} bytes, got {len(key)}")
        if not zmq.has("curve"):
            raise ChannelError(f"ZeroMQ {zmq.zmq_version()} was built without CURVE, which links are made with")
        self.self_id = self_id
        self._key = bytes(key)
        self._curve_secret = z85.encode(hmac.digest(self._key, b"kv-control curve", "sha256"))
        self._curve_public = zmq.curve_public(self._curve_secret)
        self._clock = clock
        self._own_context = context is None
        self._context = context if context is not None else zmq.Context(1)
        self._router: Any = None
        self._arrivals: Any = None  # tells of connections to the router that failed
        self.address: str | None = None
        self._links: dict[PeerId, _Link] = {}
        self._dialled: dict[PeerId, _Dialled] = {}
        self._numbers: dict[PeerId, OrderedDict[bytes, None]] = {}
        self._events: deque[LinkEvent] = deque()
        self._closed = False
        self.refused: dict[str, int] = {}
        if bind is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._options(self._router)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.CURVE_SERVER, 1)
            self._arrivals = self._router.get_monitor_socket(_HANDSHAKE_FAILED)
            self._arrivals.setsockopt(zmq.LINGER, 0)
            self._router.bind(bind)
            self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def _options(self, socket: Any) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES_MAX)
        socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX + 4096)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._curve_secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._curve_public)

    # -- links

    def connect(self, peer: PeerId, address: str) -> None:
        """Open the link to a peer that listens. Frames sent before it answers wait in order.

        Raises:
            ChannelError: There is a link to this peer already, or the address is not one.
        """
        if self._closed:
            raise ChannelError("the channel is closed")
        if peer in self._links or peer in self._dialled:
            raise ChannelError(f"{peer} has a link already")
        dialled = _Dialled(address)
        self._dial(peer, dialled)
        self._dialled[peer] = dialled

    def _dial(self, peer: PeerId, dialled: _Dialled) -> None:
        socket = self._context.socket(zmq.DEALER)
        self._options(socket)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._curve_public)
        try:
            monitor = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED
                | _HANDSHAKE_FAILED
                | zmq.EVENT_DISCONNECTED
                | zmq.EVENT_CONNECT_RETRIED
                | zmq.EVENT_CLOSED
            )
            monitor.setsockopt(zmq.LINGER, 0)
            socket.connect(dialled.address)
        except zmq.ZMQError as error:
            socket.disable_monitor()
            socket.close()
            raise ChannelError(f"cannot connect to {peer} at {dialled.address}: {error}") from error
        dialled.monitor = monitor
        dialled.link = self._links[peer] = _Link(socket, None, self._keys_with(peer))

    def disconnect(self, peer: PeerId) -> None:
        """Close the link to a peer for good and forget it."""
        dialled = self._dialled.pop(peer, None)
        if dialled is not None:
            self._hang_up(dialled)
        self._links.pop(peer, None)
        self._numbers.pop(peer, None)

    def reset(self, peer: PeerId) -> None:
        """Give up a link that seems dead; where this side dials, it dials again."""
        link = self._links.get(peer)
        if link is not None and not link.broken:
            self._break(peer, link, "given up")

    def link_events(self) -> Sequence[LinkEvent]:
        """What happened to links since the last call."""
        self._watch()
        events = tuple(self._events)
        self._events.clear()
        return events

    def _break(self, peer: PeerId, link: _Link, reason: str) -> None:
        if link.broken:
            return
        link.broken = reason
        if self._links.get(peer) is link:
            del self._links[peer]
        dialled = self._dialled.get(peer)
        if dialled is not None and dialled.link is link:
            self._hang_up(dialled)
            dialled.again_at_s = self._clock() + dialled.wait_s
        self._events.append(LinkEvent(peer, False, reason))

    def _hang_up(self, dialled: _Dialled) -> None:
        if dialled.link is None:
            return
        socket, dialled.link = dialled.link.socket, None
        with contextlib.suppress(zmq.ZMQError):
            socket.disable_monitor()
        if dialled.monitor is not None:
            dialled.monitor.close()
            dialled.monitor = None
        socket.close()

    def _watch(self) -> None:
        """Look at every dialled connection, and dial again where its time has come."""
        for peer, dialled in list(self._dialled.items()):
            if dialled.link is None:
                if not dialled.taken and self._clock() >= dialled.again_at_s:
                    self._redial(peer, dialled)
                continue
            while dialled.link is not None:
                try:
                    event = recv_monitor_message(dialled.monitor, zmq.DONTWAIT)
                except zmq.Again:
                    break
                if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    dialled.wait_s = REDIAL_FIRST_S
                    continue
                self._drain_dealer(peer, dialled)
                if dialled.link is not None:
                    failed = event["event"] & _HANDSHAKE_FAILED
                    reason = "the connection broke in its handshake: if it does so again, the two keys differ"
                    self._break(peer, dialled.link, reason if failed else "the connection broke")

    def _drain_dealer(self, peer: PeerId, dialled: _Dialled) -> None:
        """The other side's last word, if it was that another session has taken this name."""
        link = dialled.link
        while link is not None:
            parts = self._take(link.socket)
            if parts is None:
                return
            if len(parts) == 4:
                self._accept(parts, peer, None)
            link = dialled.link

    def _redial(self, peer: PeerId, dialled: _Dialled) -> None:
        dialled.wait_s = min(2 * dialled.wait_s, REDIAL_LAST_S)
        try:
            self._dial(peer, dialled)
        except ChannelError:
            dialled.again_at_s = self._clock() + dialled.wait_s
            return
        self._events.append(LinkEvent(peer, True))

    # -- frames

    def send(self, peer: PeerId, frame: bytes) -> None:
        if self._closed:
            raise ChannelError("the channel is closed")
        link = self._links.get(peer)
        if link is None:
            raise ChannelError(f"no link to {peer}")
        if len(frame) > FRAME_BYTES_MAX:
            raise ChannelError(f"frame of {len(frame)} bytes exceeds {FRAME_BYTES_MAX}")
        try:
            self._put(peer, link, frame)
        except zmq.Again:
            raise WouldBlock from None
        except zmq.ZMQError as error:
            self._break(peer, link, f"sending failed: {error}")
            raise ChannelError(f"sending to {peer} failed: {error}") from error

    def _put(self, peer: PeerId, link: _Link, frame: bytes) -> None:
        head = _HEAD.pack(_MAGIC, link.number, link.sent)
        names = msgspec.msgpack.encode((self.self_id, peer))
        parts = [head, names, frame, _tag(link.outgoing, head, names, frame)]
        if link.route is not None:
            parts.insert(0, link.route)
        link.socket.send_multipart(parts, zmq.DONTWAIT)
        link.sent += 1

    def poll(self, frames_max: int) -> Sequence[tuple[PeerId, bytes]]:
        frames: list[tuple[PeerId, bytes]] = []
        if self._closed:
            return frames
        if self._router is not None:
            self._count_failures()
            while len(frames) < frames_max:
                parts = self._take(self._router)
                if parts is None:
                    break
                taken = self._accept(parts[1:], None, parts[0]) if len(parts) == 5 else self._refuse("structure")
                if taken is not None:
                    frames.append(taken)
                if self._events:
                    return frames  # what follows belongs to another link: the event comes first
        for peer, dialled in list(self._dialled.items()):
            while len(frames) < frames_max and dialled.link is not None:
                parts = self._take(dialled.link.socket)
                if parts is None:
                    break
                taken = self._accept(parts, peer, None) if len(parts) == 4 else self._refuse("structure")
                if taken is not None:
                    frames.append(taken)
        return frames

    def close(self) -> None:
        """Close every link. Frames that were taken and not sent are lost."""
        if self._closed:
            return
        self._closed = True
        for dialled in self._dialled.values():
            self._hang_up(dialled)
        if self._router is not None:
            self._router.disable_monitor()
            self._arrivals.close()
            self._router.close()
        if self._own_context:
            self._context.term()
        if self.address is not None and self.address.startswith("ipc://") and not self.address.startswith("ipc://@"):
            with contextlib.suppress(OSError):
                os.unlink(self.address.removeprefix("ipc://"))

    def __enter__(self) -> ZmqControlChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, socket: Any) -> list[bytes] | None:
        try:
            parts: list[bytes] = socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        return parts

    def _count_failures(self) -> None:
        """Connections to the router whose handshake failed."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_FAILURES_PER_LOOK):
                recv_monitor_message(self._arrivals, zmq.DONTWAIT)
                self._refuse("handshake")

    def _refuse(self, why: str) -> tuple[PeerId, bytes] | None:
        self.refused[why] = self.refused.get(why, 0) + 1
        return None

    def _accept(self, parts: list[bytes], dialled: PeerId | None, route: bytes | None) -> tuple[PeerId, bytes] | None:
        """Check one frame; what fails is counted and dropped, and changes nothing unless it was authentic."""
        head, names, frame, tag = parts
        if len(head) != _HEAD.size or len(names) > 1024 or len(frame) > FRAME_BYTES_MAX or len(tag) != _TAG_BYTES:
            return self._refuse("structure")
        magic, number, sequence = _HEAD.unpack(head)
        if magic != _MAGIC:
            return self._refuse("version")
        try:
            source, target = msgspec.msgpack.decode(names, type=tuple[PeerId, PeerId])
        except (msgspec.MsgspecError, ValueError):
            return self._refuse("structure")
        if target != self.self_id or (dialled is not None and source != dialled):
            return self._refuse("address")
        present = self._links.get(source)
        key = present.incoming if present is not None else self._key_of(source, target)
        if not hmac.compare_digest(_tag(key, head, names, frame), tag):
            return self._refuse("authentication")
        link = self._link_of(source, number, sequence, route)
        if link is None:
            return None
        if sequence < link.received:
            return self._refuse("replay")
        if sequence > link.received:
            self._break(source, link, f"frames {link.received}..{sequence - 1} were lost")
            return self._refuse("gap")
        link.received += 1
        if frame == _TAKEN:
            taken = self._dialled.get(source)
            if taken is not None:
                taken.taken = True
            self._break(source, link, "another session has dialled under this name")
            return None
        return source, frame

    def _link_of(self, source: PeerId, number: bytes, sequence: int, route: bytes | None) -> _Link | None:
        """The link that an authentic frame came on; a new one begins with frame 0 and a number never seen before."""
        link = self._links.get(source)
        if link is not None and link.remote_number == number and route == link.route:
            return link
        seen = self._numbers.get(source, ())
        if number in seen or sequence != 0 or (link is not None and link.route is None and link.remote_number):
            self._refuse("replay" if number in seen else "sequence")
            return None
        if len(seen) >= NUMBERS_MAX or (not seen and len(self._numbers) >= LINKS_MAX):
            self._refuse("capacity")
            return None
        # Only now: a late frame of a peer that was disconnected leaves no record of it.
        self._numbers.setdefault(source, OrderedDict())[number] = None
        if link is not None and link.route is None:
            link.remote_number = number  # the first answer on a link that this side dialled
            return link
        if link is not None:
            self._supersede(source, link)
        elif source not in self._dialled and len(self._links) >= LINKS_MAX:
            self._refuse("capacity")
            return None
        link = _Link(self._router, route, self._keys_with(source))
        link.remote_number = number
        self._links[source] = link
        return link

    def _supersede(self, peer: PeerId, link: _Link) -> None:
        """A new link of a peer that had one: its old connection is gone, or somebody lives beside it and is told."""
        with contextlib.suppress(zmq.ZMQError):
            self._put(peer, link, _TAKEN)
        self._break(peer, link, "the peer has dialled again")

    def _key_of(self, source: PeerId, target: PeerId) -> bytes:
        return hmac.digest(self._key, b"kv-control" + msgspec.msgpack.encode((source, target)), "sha256")

    def _keys_with(self, peer: PeerId) -> tuple[bytes, bytes]:
        return self._key_of(self.self_id, peer), self._key_of(peer, self.self_id)


def _tag(key: bytes, head: bytes, names: bytes, frame: bytes) -> bytes:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    mac.update(head)
    mac.update(len(names).to_bytes(4, "little"))
    mac.update(names)
    mac.update(frame)
    return mac.digest()
