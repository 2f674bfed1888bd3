"""The control channel between generation and context ranks, over rpc-local-registry: authenticated, first in, first out.

Each context rank serves one endpoint; each generation rank calls all of them. Requests and cancels go as one-way calls of one
client (one FIFO for both, so a cancel cannot overtake its request), answers come back on one stream per receiver. The fast
path stays off here: peers are other processes.

A link may break while both of its ends live: a process stood still for longer than the transport waits, a network was away.
Both ends are told of it (``kv_bounce_planner``'s ``LinkedChannel``), and the calling end dials until the link is back or
nobody wants it any more. A call names the rank that it is meant for, because the address of a rank that has ended may be
another's by now. What a break means for memory is judged elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kv_bounce_planner.sessions import ChannelError, PeerId, WouldBlock
from kv_bounce_planner.transports.interface import LinkEvent
from rpc_local_registry import (
    RpcBackpressure,
    RpcClient,
    RpcError,
    RpcServer,
    StreamSource,
    rpc_method,
)

#: Answers that may wait for one receiver (count); beyond it the sender keeps them and tries again.
ANSWERS_MAX = 65_536
#: Between two attempts to make a link again: the first wait, and the longest (s).
REDIAL_FIRST_S = 0.05
REDIAL_LAST_S = 2.0
#: The first item of every stream of answers: the link is there.
_OPENED = b"open"

_Key = TypeVar("_Key")


class _Order(Generic[_Key]):
    """Frames and the changes of links between them, in the order in which they came.

    A change is told only after every frame before it was polled in an earlier turn: what a peer said before its link broke
    has been heard when the break is.

    Args:
        wake: Wakes the loop that polls, from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._items: deque[tuple[_Key, bytes | LinkEvent]] = deque()
        self._handed = False

    def add(self, key: _Key, item: bytes | LinkEvent) -> None:
        """One more (any thread)."""
        self._items.append((key, item))
        self._wake()

    def frames(self, count_max: int) -> list[tuple[_Key, bytes]]:
        """Frames up to the next change, at most so many."""
        taken: list[tuple[_Key, bytes]] = []
        items = self._items
        while items and len(taken) < count_max:
            key, item = items[0]
            if isinstance(item, LinkEvent):
                break
            items.popleft()
            taken.append((key, item))
        self._handed = bool(taken)
        return taken

    def changes(self) -> list[tuple[_Key, LinkEvent]]:
        """Changes before the next frame; none in a turn that took frames."""
        items = self._items
        taken: list[tuple[_Key, LinkEvent]] = []
        if not items:
            return taken
        if self._handed:
            self._wake()  # the loop may be about to wait
            return taken
        while items:
            key, item = items[0]
            if not isinstance(item, LinkEvent):
                self._wake()
                break
            items.popleft()
            taken.append((key, item))
        return taken


class ControlEndpoint:
    """What a context rank serves. Methods run on the server's I/O thread and only append."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.order: _Order[PeerId] = _Order(wake)
        self.sources: dict[PeerId, StreamSource[bytes]] = {}
        #: Each receiver's process, as it says (``host/pid/start``).
        self.processes: dict[PeerId, str] = {}
        #: Which rank of which lifetime this is, once that is agreed on; until then nobody is served.
        self.self_id: PeerId | None = None
        self._away: set[PeerId] = set()

    @rpc_method(non_blocking=True)
    def deliver(self, peer: PeerId, frame: bytes) -> None:
        """Take a receiver's frame in."""
        self.order.add(peer, frame)

    @rpc_method(streaming=True, non_blocking=True)
    def frames(self, peer: PeerId, wanted: PeerId, process: str) -> StreamSource[bytes]:
        """The stream of answers to one receiver; called again, that receiver's link was made again.

        Raises:
            LookupError: Another rank is wanted, or one of an earlier lifetime.
        """
        if wanted != self.self_id:
            raise LookupError(f"{wanted} is not here any more" if self.self_id else "not ready")
        source: StreamSource[bytes] = StreamSource(ANSWERS_MAX, on_cancel=lambda: self._left(peer, source))
        source.push(_OPENED)
        before = self.sources.get(peer)
        self.sources[peer] = source
        self.processes[peer] = process
        if before is not None:
            before.close()
            self.went_away(peer, "it was made again")
            self._away.discard(peer)
            self.order.add(peer, LinkEvent(peer, True))
        return source

    def _left(self, peer: PeerId, source: StreamSource[bytes]) -> None:
        if self.sources.get(peer) is source:
            self.went_away(peer, "its stream has ended")

    def went_away(self, peer: PeerId, reason: str) -> None:
        """A link has broken; told once."""
        if peer not in self._away:
            self._away.add(peer)
            self.order.add(peer, LinkEvent(peer, False, reason))

    def forget(self, peer: PeerId) -> None:
        """Nothing stays of a receiver."""
        source = self.sources.pop(peer, None)
        self.processes.pop(peer, None)
        self._away.discard(peer)
        if source is not None:
            source.close()


class SenderControl:
    """A context rank's end: ``kv_bounce_planner``'s ``LinkedChannel``.

    Args:
        address: Where to listen.
        key: The run's key.
        wake: Wakes the rank's loop, from the I/O thread.
    """

    def __init__(self, address: str, key: bytes, wake: Callable[[], None]) -> None:
        self._endpoint = ControlEndpoint(wake)
        self._server = RpcServer(self._endpoint, address, key, name="kv-control")

    def start(self) -> None:
        """Listen."""
        self._server.start()

    def serve_as(self, self_id: PeerId) -> None:
        """Take calls that are meant for this rank of this lifetime."""
        self._endpoint.self_id = self_id

    @property
    def address(self) -> str:
        """What peers call, once it listens."""
        return str(self._server.address)

    def process_of(self, peer: PeerId) -> str:
        """A receiver's process, by its own word; "" where it has not called."""
        return self._endpoint.processes.get(peer, "")

    def send(self, peer: PeerId, frame: bytes) -> None:
        """Queue an answer.

        Raises:
            WouldBlock: The receiver has not opened its stream yet, or does not read; nothing was queued.
            ChannelError: Its stream has ended.
        """
        source = self._endpoint.sources.get(peer)
        if source is None:
            raise WouldBlock
        try:
            taken = source.push(frame)
        except RpcBackpressure:
            raise WouldBlock from None
        if not taken:
            raise ChannelError(f"the stream to {peer} has ended")

    def poll(self, frames_max: int) -> Sequence[tuple[PeerId, bytes]]:
        """What receivers sent."""
        return self._endpoint.order.frames(frames_max)

    def link_events(self) -> Sequence[LinkEvent]:
        """Links that broke, or were made again by their receivers."""
        return [event for _, event in self._endpoint.order.changes()]

    def reset(self, peer: PeerId) -> None:
        """Give a link up; its receiver dials again."""
        source = self._endpoint.sources.get(peer)
        if source is not None:
            source.close()
            self._endpoint.went_away(peer, "given up")

    def disconnect(self, peer: PeerId) -> None:
        """Nothing stays of a receiver."""
        self._endpoint.forget(peer)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for source in list(self._endpoint.sources.values()):
            source.close()
        self._server.shutdown()


class _Link:
    """One attempt to have a link, and the link if it came to be."""

    __slots__ = ("client", "opened", "peer", "returns")

    def __init__(self, peer: PeerId, client: RpcClient, *, returns: bool) -> None:
        self.peer = peer
        self.client = client
        self.opened = False
        #: A break was told before: that it is there is news.
        self.returns = returns


class _Dialled:
    """A peer that is wanted, and the link to it that there is."""

    __slots__ = ("address", "again_at_s", "away", "link", "wait_s")

    def __init__(self, address: str) -> None:
        self.address = address
        self.link: _Link | None = None
        #: A break was told, and not yet that the link is back.
        self.away = False
        self.again_at_s = 0.0
        self.wait_s = REDIAL_FIRST_S


class ReceiverControl:
    """A generation rank's end: calls every context rank that it was connected to. A ``LinkedChannel``.

    Args:
        self_id: This rank.
        key: The run's key.
        wake: Wakes the rank's loop, from I/O threads.
        process: Which process this is (``host/pid/start``), for those who may have to know whether it still runs.
        clock: Monotonic time (s).
    """

    def __init__(
        self,
        self_id: PeerId,
        key: bytes,
        wake: Callable[[], None],
        *,
        process: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._self_id = self_id
        self._key = key
        self._process = process
        self._clock = clock
        self._wake = wake
        self._order: _Order[_Link] = _Order(wake)
        self._dialled: dict[PeerId, _Dialled] = {}
        #: Peers without a link, to be dialled again.
        self._away: set[PeerId] = set()
        self._closed = False

    def connect(self, peer: PeerId, address: str) -> None:
        """Know a peer, and ask for its answers. Blocks on nothing: the link is made by its I/O thread."""
        if peer not in self._dialled and not self._closed:
            self._dialled[peer] = dialled = _Dialled(address)
            self._dial(peer, dialled)

    def _dial(self, peer: PeerId, dialled: _Dialled) -> None:
        client = RpcClient(
            dialled.address, self._key, fast_path=False, interface=ControlEndpoint, name=f"kv-{self._self_id.rank}"
        )
        dialled.link = link = _Link(peer, client, returns=dialled.away)
        self._away.discard(peer)
        frames = client.frames(self._self_id, peer, self._process).remote_streaming()
        frames.deliver_to(lambda frame: self._received(link, frame), lambda error: self._link_ended(link, error))

    def _received(self, link: _Link, frame: bytes) -> None:
        if link.opened:
            self._order.add(link, frame)
        else:
            link.opened = True
            if link.returns:
                self._order.add(link, LinkEvent(link.peer, True))
            else:
                self._wake()  # what could not be sent yet can be

    def _link_ended(self, link: _Link, error: RpcError | None) -> None:
        self._order.add(link, LinkEvent(link.peer, False, str(error or "its stream has ended")))

    def send(self, peer: PeerId, frame: bytes) -> None:
        """Queue a frame.

        Raises:
            WouldBlock: Too much is on its way, or the link is being made; nothing was queued.
            ChannelError: No such peer, or its link has broken.
        """
        dialled = self._dialled.get(peer)
        if dialled is None:
            raise ChannelError(f"{peer} was never connected")
        link = dialled.link
        if link is None or self._closed:
            raise ChannelError(f"link to {peer} has ended")
        if not link.opened:
            raise WouldBlock
        try:
            link.client.deliver(self._self_id, frame).remote_oneway()
        except RpcBackpressure:
            raise WouldBlock from None
        except RpcError as error:
            raise ChannelError(f"link to {peer}: {error}") from error

    def poll(self, frames_max: int) -> Sequence[tuple[PeerId, bytes]]:
        """What senders answered, over links that are still theirs."""
        return [(link.peer, frame) for link, frame in self._order.frames(frames_max) if self._is_present(link)]

    def link_events(self) -> Sequence[LinkEvent]:
        """Links that broke, or are back; those whose time has come are dialled again."""
        events = [told for link, event in self._order.changes() for told in self._changed(link, event)]
        if self._away and not self._closed:
            now_s = self._clock()
            for peer in list(self._away):
                dialled = self._dialled[peer]
                if now_s >= dialled.again_at_s:
                    self._dial(peer, dialled)
        return events

    def _changed(self, link: _Link, event: LinkEvent) -> list[LinkEvent]:
        dialled = self._dialled.get(link.peer)
        if dialled is None or dialled.link is not link:
            return []
        if event.up:
            dialled.away, dialled.wait_s = False, REDIAL_FIRST_S
            return [event]
        self._hang_up(dialled)
        dialled.again_at_s = self._clock() + dialled.wait_s
        dialled.wait_s = min(2.0 * dialled.wait_s, REDIAL_LAST_S)
        self._away.add(link.peer)
        was_away, dialled.away = dialled.away, True
        return [] if was_away else [event]

    def _is_present(self, link: _Link) -> bool:
        dialled = self._dialled.get(link.peer)
        return dialled is not None and dialled.link is link

    @staticmethod
    def _hang_up(dialled: _Dialled) -> None:
        """Close what there is of a link. Its end may take as long as a peer that does not answer: the loop does not wait."""
        link, dialled.link = dialled.link, None
        if link is not None:
            threading.Thread(target=link.client.close, name="kv-hang-up", daemon=True).start()

    def reset(self, peer: PeerId) -> None:
        """Give a link up that seems dead, and dial again."""
        dialled = self._dialled.get(peer)
        if dialled is not None and dialled.link is not None:
            self._order.add(dialled.link, LinkEvent(peer, False, "given up"))

    def disconnect(self, peer: PeerId) -> None:
        """Close the link to a peer for good."""
        self._away.discard(peer)
        dialled = self._dialled.pop(peer, None)
        if dialled is not None:
            self._hang_up(dialled)

    def close(self) -> None:
        """Close every link. Idempotent."""
        self._closed = True
        for dialled in self._dialled.values():
            if dialled.link is not None:
                dialled.link.client.close()
