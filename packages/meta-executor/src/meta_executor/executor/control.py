"""The control channel between generation and context ranks, over rpc-local-registry: authenticated, first in, first out.

Each context rank serves one endpoint; each generation rank calls all of them. Requests and cancels go as one-way calls of one
client (one FIFO for both, so a cancel cannot overtake its request), answers come back on one stream per receiver. The fast
path stays off here: peers are other processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kv_bounce_planner.sessions import ChannelError, PeerId, WouldBlock
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


class ControlEndpoint:
    """What a context rank serves. Methods run on the server's I/O thread and only append."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.inbox: deque[tuple[PeerId, bytes]] = deque()
        self.sources: dict[PeerId, StreamSource[bytes]] = {}

    @rpc_method(non_blocking=True)
    def deliver(self, peer: PeerId, frame: bytes) -> None:
        """Take a receiver's frame in."""
        self.inbox.append((peer, frame))
        self._wake()

    @rpc_method(streaming=True, non_blocking=True)
    def frames(self, peer: PeerId) -> StreamSource[bytes]:
        """The stream of answers to one receiver. A receiver that calls again (a new process is a new peer) gets a new one."""
        source: StreamSource[bytes] = StreamSource(ANSWERS_MAX)
        before = self.sources.get(peer)
        self.sources[peer] = source
        if before is not None:
            before.close()
        self._wake()
        return source


class SenderControl:
    """A context rank's end: ``kv_bounce_planner.ControlChannel``.

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

    @property
    def address(self) -> str:
        """What peers call, once it listens."""
        return str(self._server.address)

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
        inbox = self._endpoint.inbox
        return [inbox.popleft() for _ in range(min(frames_max, len(inbox)))]

    def close(self) -> None:
        """Stop listening. Idempotent."""
        for source in self._endpoint.sources.values():
            source.close()
        self._server.shutdown()


class ReceiverControl:
    """A generation rank's end: calls every context rank that it was connected to."""

    def __init__(self, self_id: PeerId, key: bytes, wake: Callable[[], None]) -> None:
        self._self_id = self_id
        self._key = key
        self._wake = wake
        self._clients: dict[PeerId, RpcClient] = {}
        self._inbox: deque[tuple[PeerId, bytes]] = deque()
        self._lost: deque[PeerId] = deque()
        self._ended: set[PeerId] = set()  # a link that ended takes nothing more, even before its socket knows
        self._closed = False

    def connect(self, peer: PeerId, address: str) -> None:
        """Know a peer, and ask for its answers. Blocks on nothing: the link is made by its I/O thread."""
        if peer in self._clients:
            return
        client = RpcClient(
            address, self._key, fast_path=False, interface=ControlEndpoint, name=f"kv-{self._self_id.rank}"
        )
        self._clients[peer] = client
        frames = client.frames(self._self_id).remote_streaming()
        frames.deliver_to(
            lambda frame: self._received(peer, frame),
            lambda error: self._link_ended(peer, client),
        )

    def disconnect(self, instance_id: str, generation: str) -> None:
        """Forget the ranks of an instance."""
        for peer in [p for p in self._clients if p.instance == (instance_id, generation)]:
            self._clients.pop(peer).close()
            self._ended.discard(peer)

    def _received(self, peer: PeerId, frame: bytes) -> None:
        self._inbox.append((peer, frame))
        self._wake()

    def _link_ended(self, peer: PeerId, client: RpcClient) -> None:
        """However it ended: it proves nothing about memory, so it is reported here and judged elsewhere."""
        if not self._closed and self._clients.get(peer) is client:
            self._ended.add(peer)
            self._lost.append(peer)
            self._wake()

    def send(self, peer: PeerId, frame: bytes) -> None:
        """Queue a frame.

        Raises:
            WouldBlock: Too much is on its way; nothing was queued.
            ChannelError: No such peer, or its link has failed.
        """
        client = self._clients.get(peer)
        if client is None:
            raise ChannelError(f"{peer} was never connected")
        if peer in self._ended:
            raise ChannelError(f"link to {peer} has ended")
        try:
            client.deliver(self._self_id, frame).remote_oneway()
        except RpcBackpressure:
            raise WouldBlock from None
        except RpcError as error:
            raise ChannelError(f"link to {peer}: {error}") from error

    def poll(self, frames_max: int) -> Sequence[tuple[PeerId, bytes]]:
        """What senders answered."""
        return [self._inbox.popleft() for _ in range(min(frames_max, len(self._inbox)))]

    def take_lost(self) -> list[PeerId]:
        """Peers whose link has ended since the last call, each after the last frame that came over it was polled."""
        lost: list[PeerId] = []
        unread = {peer for peer, _ in tuple(self._inbox)}
        for _ in range(len(self._lost)):
            peer = self._lost.popleft()
            (self._lost if peer in unread else lost).append(peer)
        return lost

    def close(self) -> None:
        """Close every link. Idempotent."""
        self._closed = True
        for client in self._clients.values():
            client.close()
