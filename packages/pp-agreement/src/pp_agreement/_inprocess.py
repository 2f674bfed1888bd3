"""A transport between agreements of one process: tests, examples, simulations, threads-as-ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pp_agreement._config import Domain, within
from pp_agreement._errors import TransportError, WouldBlock
from pp_agreement._transport import Sweep


class InProcessNetwork:
    """Links between the members of one domain, with the faults a test may want.

    Args:
        domain: Whose members are linked.
        window: Outstanding frames per stream, >= 1.
        clock: Seconds; needed for ``delay_s`` only.
        delay_s: Called per frame with (source, target) indexes, gives its delay in seconds, >= 0. FIFO is kept.
    """

    def __init__(
        self,
        domain: Domain,
        window: int = 4,
        *,
        clock: Callable[[], float] | None = None,
        delay_s: Callable[[int, int], float] | None = None,
    ) -> None:
        within("window", window, 1, 1 << 20)
        self.domain = domain
        self.window = window
        self.clock = clock or (lambda: 0.0)
        self.delay_s = delay_s
        self.links: dict[tuple[int, int], deque[tuple[float, bytes]]] = {
            (a, b): deque() for a in range(domain.size) for b in range(domain.size) if a != b
        }
        self.held: set[tuple[int, int]] = set()
        self.refusing: set[tuple[int, int]] = set()
        self.broken: set[tuple[int, int]] = set()
        self.dead: dict[int, str] = {}
        #: Sent so far (count, bytes).
        self.frames = 0
        self.frame_bytes = 0
        self.delivered: dict[tuple[int, int], bytes] = {}

    def transport(self, rank: int) -> InProcessTransport:
        """The transport of one member."""
        return InProcessTransport(self, self.domain.index_of(rank))

    def hold(self, source_rank: int, target_rank: int) -> None:
        """Let nothing arrive on a link; frames stay outstanding."""
        self.held.add((self.domain.index_of(source_rank), self.domain.index_of(target_rank)))

    def release(self, source_rank: int, target_rank: int) -> None:
        """Undo ``hold``, ``refuse``."""
        link = (self.domain.index_of(source_rank), self.domain.index_of(target_rank))
        self.held.discard(link)
        self.refusing.discard(link)

    def refuse(self, source_rank: int, target_rank: int) -> None:
        """Offer no send slot on a link (backpressure)."""
        self.refusing.add((self.domain.index_of(source_rank), self.domain.index_of(target_rank)))

    def break_link(self, source_rank: int, target_rank: int) -> None:
        """Sends on a link fail for good."""
        self.broken.add((self.domain.index_of(source_rank), self.domain.index_of(target_rank)))

    def kill(self, rank: int, evidence: str = "killed") -> None:
        """The member is gone; the others can see evidence of it."""
        self.dead[self.domain.index_of(rank)] = evidence

    def replay(self, source_rank: int, target_rank: int) -> bool:
        """Deliver the last frame of a link once more; False: there was none yet."""
        link = (self.domain.index_of(source_rank), self.domain.index_of(target_rank))
        if link not in self.delivered:
            return False
        self.links[link].append((self.clock(), self.delivered[link]))
        return True

    def inject(self, source_rank: int, target_rank: int, frame: bytes) -> None:
        """Put bytes on a link as if ``source_rank`` had sent them."""
        link = (self.domain.index_of(source_rank), self.domain.index_of(target_rank))
        self.links[link].append((self.clock(), frame))


class InProcessTransport:
    """One member's end; see :class:`InProcessNetwork`."""

    name = "in-process"

    def __init__(self, network: InProcessNetwork, me: int) -> None:
        self._network = network
        self._me = me
        self._peers: tuple[int, ...] = ()
        self._start = 0
        self._seen_dead: set[int] = set()
        self._last_arrival: dict[int, float] = {}
        self.closed: bool | None = None

    def open(self, peers: tuple[int, ...], frame_bytes_max: int) -> None:
        """See :class:`Transport`."""
        self._peers = peers

    def outstanding(self, peer: int) -> int:
        """See :class:`Transport`."""
        return len(self._network.links[self._me, peer])

    def can_send(self, peer: int) -> bool:
        """See :class:`Transport`."""
        network = self._network
        link = (self._me, peer)
        return link not in network.refusing and len(network.links[link]) < network.window

    def send(self, peer: int, frame: bytes) -> None:
        """See :class:`Transport`."""
        network = self._network
        link = (self._me, peer)
        if link in network.broken:
            raise TransportError("link is broken", rank=network.domain.ranks[peer])
        if not self.can_send(peer):
            raise WouldBlock(f"{len(network.links[link])} frames are outstanding")
        due_s = network.clock()
        if network.delay_s is not None:
            due_s = max(due_s + network.delay_s(self._me, peer), self._last_arrival.get(peer, 0.0))
            self._last_arrival[peer] = due_s
        network.links[link].append((due_s, frame))
        network.frames += 1
        network.frame_bytes += len(frame)

    def receive(self, frames_max: int) -> Sweep:
        """See :class:`Transport`."""
        network = self._network
        now_s = network.clock()
        frames: list[tuple[int, bytes]] = []
        empty = 0
        count = len(self._peers)
        live = [self._peers[(self._start + i) % count] for i in range(count)] if count else []
        self._start += 1
        while live and len(frames) < frames_max:
            for peer in tuple(live):
                if len(frames) >= frames_max:
                    break
                link = (peer, self._me)
                queue = network.links[link]
                if queue and link not in network.held and queue[0][0] <= now_s:
                    data = queue.popleft()[1]
                    network.delivered[link] = data
                    frames.append((peer, data))
                else:
                    empty |= 1 << peer
                    live.remove(peer)
        return Sweep(frames, empty)

    def deaths(self) -> tuple[tuple[int, str], ...]:
        """See :class:`Transport`."""
        if not self._network.dead:
            return ()
        new = tuple((m, e) for m, e in self._network.dead.items() if m not in self._seen_dead and m != self._me)
        self._seen_dead.update(m for m, _e in new)
        return new

    def close(self, clean: bool) -> None:
        """See :class:`Transport`."""
        self.closed = clean
