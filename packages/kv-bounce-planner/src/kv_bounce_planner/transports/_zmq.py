"""A ControlChannel over ZeroMQ. The one file that imports zmq.

Theory. Each peer binds a ROUTER if others are to reach it; who wants to talk connects one DEALER per peer, and answers
come back on the link that the question came on. So a pair of peers has one link and one order. ZeroMQ may drop frames
when a link breaks and comes back; sequence numbers turn that into an error instead of a silent gap.

Every frame carries an HMAC-SHA256 over session, sequence number, sender, receiver and content, with a key per direction
derived from the shared one. A session is a random number per sender and link: frames of another session, of the wrong
direction, replayed or out of order are refused, and a gap closes the link for good (its peer is in doubt).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import zmq

from kv_bounce_planner._errors import ChannelError, WouldBlock
from kv_bounce_planner.sessions.identity import PeerId
from kv_bounce_planner.sessions.messages import FRAME_BYTES_MAX

_MAGIC: Final = b"KVZ\x01"
_HEAD: Final = struct.Struct("<4s16sQ")
_TAG_BYTES: Final = 32
KEY_BYTES_MIN: Final = 16
#: Frames that may wait in each direction of one link before WouldBlock (count).
QUEUE_FRAMES_MAX: Final = 4096
#: Links from peers that never authenticated are not kept at all; authenticated ones are bounded.
LINKS_MAX: Final = 65536


class _Link:
    __slots__ = ("broken", "received", "remote_session", "route", "sent", "session", "socket")

    def __init__(self, socket: Any, route: bytes | None) -> None:
        self.socket = socket
        self.route = route  # ROUTER's name of the link; None on a DEALER
        self.session = secrets.token_bytes(16)
        self.remote_session = b""
        self.sent = 0
        self.received = 0
        self.broken = ""


class ZmqControlChannel:
    """Authenticated frames between peers, first in first out per peer.

    Args:
        self_id: This process.
        key: Shared by all peers, at least 16 bytes.
        bind: Address to listen on (``tcp://host:*``, ``ipc://path``), or None to connect only.
        context: A zmq context to share; by default its own.

    Not thread-safe: one thread polls and sends. A link that failed stays failed (ChannelError); a restarted peer is another
    ``PeerId`` and gets a link of its own.
    """

    def __init__(self, self_id: PeerId, key: bytes, bind: str | None = None, *, context: Any = None) -> None:
        if len(key) < KEY_BYTES_MIN:
            raise ValueError(f"key wants at least {KEY_BYTES_MIN} bytes, got {len(key)}")
        self.self_id = self_id
        self._key = bytes(key)
        self._keys: dict[tuple[PeerId, PeerId], bytes] = {}
        self._own_context = context is None
        self._context = context if context is not None else zmq.Context(1)
        self._router: Any = None
        self.address: str | None = None
        self._links: dict[PeerId, _Link] = {}
        self._dealers: dict[PeerId, _Link] = {}
        self._closed = False
        self.refused: dict[str, int] = {}
        if bind is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._options(self._router)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.bind(bind)
            self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def _options(self, socket: Any) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES_MAX)
        socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MAX + 4096)

    def connect(self, peer: PeerId, address: str) -> None:
        """Open the link to a peer that listens. Frames sent before it answers wait in order.

        Raises:
            ChannelError: There is a link to this peer already, or the address is not one.
        """
        if self._closed:
            raise ChannelError("the channel is closed")
        if peer in self._links:
            raise ChannelError(f"{peer} has a link already")
        socket = self._context.socket(zmq.DEALER)
        self._options(socket)
        socket.setsockopt(zmq.RECONNECT_STOP, zmq.RECONNECT_STOP_AFTER_DISCONNECT)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ChannelError(f"cannot connect to {peer} at {address}: {error}") from error
        link = _Link(socket, None)
        self._links[peer] = link
        self._dealers[peer] = link

    def send(self, peer: PeerId, frame: bytes) -> None:
        if self._closed:
            raise ChannelError("the channel is closed")
        link = self._links.get(peer)
        if link is None:
            raise ChannelError(f"no link to {peer}")
        if link.broken:
            raise ChannelError(f"the link to {peer} failed: {link.broken}")
        if len(frame) > FRAME_BYTES_MAX:
            raise ChannelError(f"frame of {len(frame)} bytes exceeds {FRAME_BYTES_MAX}")
        head = _HEAD.pack(_MAGIC, link.session, link.sent)
        names = msgspec.msgpack.encode((self.self_id, peer))
        parts = [head, names, frame, self._tag(self.self_id, peer, head, names, frame)]
        if link.route is not None:
            parts.insert(0, link.route)
        try:
            link.socket.send_multipart(parts, zmq.DONTWAIT)
        except zmq.Again:
            raise WouldBlock from None
        except zmq.ZMQError as error:
            link.broken = str(error)
            raise ChannelError(f"sending to {peer} failed: {error}") from error
        link.sent += 1

    def poll(self, frames_max: int) -> Sequence[tuple[PeerId, bytes]]:
        frames: list[tuple[PeerId, bytes]] = []
        if self._closed:
            return frames
        if self._router is not None:
            while len(frames) < frames_max:
                parts = self._take(self._router)
                if parts is None:
                    break
                taken = self._accept(parts[1:], None, parts[0]) if len(parts) == 5 else self._refuse("structure")
                if taken is not None:
                    frames.append(taken)
        for peer, link in self._dealers.items():
            while len(frames) < frames_max and not link.broken:
                parts = self._take(link.socket)
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
        for link in self._dealers.values():
            link.socket.close()
        if self._router is not None:
            self._router.close()
        if self._own_context:
            self._context.term()

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

    def _refuse(self, why: str) -> tuple[PeerId, bytes] | None:
        self.refused[why] = self.refused.get(why, 0) + 1
        return None

    def _accept(self, parts: list[bytes], dialled: PeerId | None, route: bytes | None) -> tuple[PeerId, bytes] | None:
        """Check one frame; what fails is counted and dropped, and changes nothing unless it was authentic."""
        head, names, frame, tag = parts
        if len(head) != _HEAD.size or len(names) > 1024 or len(frame) > FRAME_BYTES_MAX or len(tag) != _TAG_BYTES:
            return self._refuse("structure")
        magic, session, sequence = _HEAD.unpack(head)
        if magic != _MAGIC:
            return self._refuse("version")
        try:
            source, target = msgspec.msgpack.decode(names, type=tuple[PeerId, PeerId])
        except (msgspec.MsgspecError, ValueError):
            return self._refuse("structure")
        if target != self.self_id or (dialled is not None and source != dialled):
            return self._refuse("address")
        if not hmac.compare_digest(self._tag(source, target, head, names, frame), tag):
            return self._refuse("authentication")
        link = self._links.get(source)
        if link is None:
            if len(self._links) >= LINKS_MAX:
                return self._refuse("capacity")
            if sequence != 0:
                return self._refuse("sequence")
            link = _Link(self._router, route)
            self._links[source] = link
        elif link.broken:
            return self._refuse("broken link")
        if not link.remote_session:
            if sequence != 0:
                return self._refuse("sequence")
            link.remote_session = session
        if session != link.remote_session or (route is not None and route != link.route):
            return self._refuse("session")
        if sequence < link.received:
            return self._refuse("replay")
        if sequence > link.received:
            link.broken = f"frames {link.received}..{sequence - 1} were lost"
            return self._refuse("gap")
        link.received += 1
        return source, frame

    def _tag(self, source: PeerId, target: PeerId, head: bytes, names: bytes, frame: bytes) -> bytes:
        key = self._keys.get((source, target))
        if key is None:
            key = hmac.digest(self._key, b"kv-control" + msgspec.msgpack.encode((source, target)), "sha256")
            if len(self._keys) < 2 * LINKS_MAX:
                self._keys[(source, target)] = key
        mac = hmac.new(key, digestmod=hashlib.sha256)
        mac.update(head)
        mac.update(len(names).to_bytes(4, "little"))
        mac.update(names)
        mac.update(frame)
        return mac.digest()
