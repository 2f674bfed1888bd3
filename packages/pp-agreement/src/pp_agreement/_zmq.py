"""ZMQ: one PAIR link between the coordinator and each follower. The one file that imports zmq.

The window is the high-water mark of the link, on both ends; ZMQ does not tell when a peer has taken a frame, so
``outstanding`` is either 0 or the whole window. Over ``ipc://`` the link is a lifeline as well: its end of file is
operating-system evidence that the peer's process let go. Over ``tcp://`` it is none, because networks cut links, too. A
stranger that connects to the address and leaves again is no evidence: only when the last connection of a link on which a
handshake has succeeded is gone, its peer is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pp_agreement._config import Domain, within
from pp_agreement._errors import ConfigurationError, TransportError, WouldBlock
from pp_agreement._transport import Sweep

LINGER_MS = 1000
MONITORED = zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
MONITOR_EVENTS_MAX = 64
"""Looked at per link and poll."""


class ZmqTransport:
    """One member's links over ZMQ; see :class:`pp_agreement.Transport`.

    Args:
        domain: Who decides together.
        rank: This rank.
        addresses: Follower rank to the address of its link with the coordinator, which binds; ``ipc://`` or ``tcp://``.
        window: High-water mark in frames, 1..64, on each end.
        key: A shared secret, >= 16 bytes, that encrypts and authenticates the links (CURVE). Needed for ``tcp://``.

    Raises:
        ConfigurationError: An address is missing or not allowed, or a value is out of range.
    """

    name = "zmq"

    def __init__(
        self, domain: Domain, rank: int, addresses: Mapping[int, str], *, window: int = 4, key: bytes | None = None
    ) -> None:
        within("window", window, 1, 64)
        if key is not None and (not isinstance(key, bytes) or len(key) < 16):
            raise ConfigurationError("key", "want at least 16 bytes")
        self._domain = domain
        self._me = domain.index_of(rank)
        self._coordinator = domain.coordinator_index
        self._addresses: dict[int, str] = {}
        for member, name in enumerate(domain.ranks):
            if member == self._coordinator or (self._me != self._coordinator and member != self._me):
                continue
            address = addresses.get(name)
            if not isinstance(address, str) or not address.startswith(("ipc://", "tcp://")):
                raise ConfigurationError("addresses", f"rank {name}: want ipc:// or tcp://, got {address!r}")
            if address.startswith("tcp://") and key is None:
                raise ConfigurationError("key", f"is wanted for tcp ({address}, rank {name})")
            self._addresses[member] = address
        self._window = window
        self._key = key
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._monitors: dict[int, zmq.Socket[bytes]] = {}
        self._gone: set[int] = set()
        self._connected: dict[int, set[int]] = {}  # live connections of a link
        self._greeted: set[int] = set()  # links on which a handshake has succeeded
        self._opened: list[zmq.Socket[bytes]] = []  # monitors, closed with the links
        self._start = 0

    def open(self, peers: tuple[int, ...], frame_bytes_max: int) -> None:
        """See :class:`Transport`. Binds or connects; nobody is waited for."""
        binds = self._me == self._coordinator
        if not binds and peers != (self._coordinator,):
            hub = self._domain.ranks[self._coordinator]
            raise ConfigurationError(
                "peers", f"{peers}: rank {self._domain.ranks[self._me]} has links with rank {hub} only"
            )
        self._context = zmq.Context()
        for peer in peers:
            address = self._addresses[peer if binds else self._me]
            link = self._context.socket(zmq.PAIR)
            link.setsockopt(zmq.SNDHWM, self._window)
            link.setsockopt(zmq.RCVHWM, self._window)
            link.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max + 64)  # an encrypted frame is 33 bytes longer
            link.setsockopt(zmq.LINGER, 0)
            if self._key is not None:
                self._secure(link, binds)
            self._sockets[peer] = link
            self._connected[peer] = set()
            self._monitors[peer] = link.get_monitor_socket(MONITORED)
            self._opened.append(self._monitors[peer])
            try:
                if binds:
                    link.bind(address)
                else:
                    link.connect(address)
            except zmq.ZMQError as error:
                self.close(False)
                raise TransportError(f"{address}: {error}", rank=self._domain.ranks[peer]) from error

    def _secure(self, link: zmq.Socket[bytes], binds: bool) -> None:
        secret = z85.encode(hashlib.blake2b(self._key or b"", digest_size=32, person=b"pp-agreement").digest())
        public = zmq.curve_public(secret)
        link.setsockopt(zmq.CURVE_SECRETKEY, secret)
        link.setsockopt(zmq.CURVE_PUBLICKEY, public)
        if binds:
            link.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            link.setsockopt(zmq.CURVE_SERVERKEY, public)

    def outstanding(self, peer: int) -> int:
        """See :class:`Transport`: 0 or the window; 0 on a link that the peer has let go of."""
        return 0 if self.can_send(peer) or peer in self._gone else self._window

    def can_send(self, peer: int) -> bool:
        """See :class:`Transport`."""
        try:
            return bool(int(self._sockets[peer].getsockopt(zmq.EVENTS)) & zmq.POLLOUT)
        except zmq.ZMQError as error:
            raise TransportError(str(error), rank=self._domain.ranks[peer]) from error

    def send(self, peer: int, frame: bytes) -> None:
        """See :class:`Transport`."""
        try:
            self._sockets[peer].send(frame, zmq.DONTWAIT)
        except zmq.Again as error:
            raise WouldBlock(f"as many frames as fit wait for rank {self._domain.ranks[peer]}") from error
        except zmq.ZMQError as error:
            raise TransportError(str(error), rank=self._domain.ranks[peer]) from error

    def receive(self, frames_max: int) -> Sweep:
        """See :class:`Transport`."""
        frames: list[tuple[int, bytes]] = []
        empty = 0
        order = list(self._sockets)
        if not order:
            return Sweep(frames, empty)
        start = self._start % len(order)
        self._start = start + 1
        live = order[start:] + order[:start]
        while live and len(frames) < frames_max:
            for peer in tuple(live):
                if len(frames) >= frames_max:
                    break
                try:
                    frames.append((peer, self._sockets[peer].recv(zmq.DONTWAIT)))
                except zmq.Again:
                    empty |= 1 << peer
                    live.remove(peer)
                except zmq.ZMQError as error:
                    if frames:  # what was received is handed over first; the next call finds the error again
                        return Sweep(frames, 0)
                    raise TransportError(str(error), rank=self._domain.ranks[peer]) from error
        return Sweep(frames, empty)

    def deaths(self) -> tuple[tuple[int, str], ...]:
        """See :class:`Transport`: end of file on an ``ipc://`` link."""
        found = []
        for peer, monitor in tuple(self._monitors.items()):
            if self._let_go(peer, monitor):
                self._gone.add(peer)
                if self._addresses[peer if self._me == self._coordinator else self._me].startswith("ipc://"):
                    del self._monitors[peer]
                    found.append((peer, "end of file on its local socket"))
        return tuple(found)

    def _let_go(self, peer: int, monitor: zmq.Socket[bytes]) -> bool:
        connected = self._connected[peer]
        try:
            for _ in range(MONITOR_EVENTS_MAX):
                if not int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    break
                message = recv_monitor_message(monitor, zmq.DONTWAIT)
                what, descriptor = message["event"], int(message["value"])
                if what in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED):
                    connected.add(descriptor)
                    self._gone.discard(peer)
                elif what == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._greeted.add(peer)
                else:
                    connected.discard(descriptor)
                    if not connected and peer in self._greeted:
                        return True
        except zmq.ZMQError as error:
            raise TransportError(f"monitor: {error}", rank=self._domain.ranks[peer]) from error
        return False

    def close(self, clean: bool) -> None:
        """Close the links; after a clean close what was said last still leaves (bounded by a second)."""
        for link in self._sockets.values():
            link.disable_monitor()
        for monitor in self._opened:
            monitor.close(0)
        for link in self._sockets.values():
            link.close(LINGER_MS if clean else 0)
        self._sockets.clear()
        self._monitors.clear()
        if self._context is not None:
            self._context.destroy(LINGER_MS if clean else 0)  # closes monitors, too: an open one would block it
            self._context = None
