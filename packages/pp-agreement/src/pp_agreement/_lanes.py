"""Lanes: several domains beside one another on one transport, for instance one per attention-DP rank or virtual pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pp_agreement._codec import frame_domain
from pp_agreement._config import Domain, within
from pp_agreement._errors import ConfigurationError, TransportError, WouldBlock
from pp_agreement._transport import Sweep, Transport


class Lanes:
    """One rank's lanes on one transport, the *carrier*: one look at it serves all of them.

    A lane is the transport of one domain; its frames say so, and everything that the interface promises holds per lane: order,
    a window of its own, an empty ring. A frame of no lane reaches every lane that speaks with its sender, and stops it.

    Poll all lanes. One that is not polled takes up to ``inbox_frames_max`` frames per peer; then nothing more is received for
    any of them, so that memory stays bounded.

    Args:
        carrier: Transport of ``world``; not open yet. It links every pair that a lane links, as MPI does (ZMQ links one
            coordinator with the others: lanes over it share that one). Its window is best ``window`` times the lanes that
            two ranks share; with less, lanes wait for one another.
        world: All ranks that the lanes reach; its roles are not used.
        rank: This rank.
        domains: The lanes of this rank, in any order: subsets of ``world`` in orders of their own, with distinct ids.
        window: Outstanding frames per lane and peer, 1..64.
        frame_bytes_max: Longest frame of any lane, 256..1 MiB.
        inbox_frames_max: Frames of a lane and peer that may wait here to be taken, >= 1.

    Raises:
        ConfigurationError: A domain has no room here, or a value is out of range; ``field`` names it.
    """

    def __init__(
        self,
        carrier: Transport,
        world: Domain,
        rank: int,
        domains: Iterable[Domain],
        *,
        window: int = 2,
        frame_bytes_max: int = 16_384,
        inbox_frames_max: int = 64,
    ) -> None:
        within("window", window, 1, 64)
        within("frame_bytes_max", frame_bytes_max, 256, 1 << 20)
        within("inbox_frames_max", inbox_frames_max, 1, 1 << 20)
        self._carrier = carrier
        self._world = world
        self._me = world.index_of(rank)
        self.window = window
        self.frame_bytes_max = frame_bytes_max
        self.inbox_frames_max = inbox_frames_max
        self._lanes: dict[int, LaneTransport] = {}
        for domain in domains:
            if domain.domain_id in self._lanes:
                raise ConfigurationError("domains", f"two of them have the id {domain.domain_id}")
            foreign = [r for r in domain.ranks if r not in world.ranks]
            if foreign:
                raise ConfigurationError(
                    "domains", f"rank {foreign[0]} of domain {domain.domain_id} is not in {world.ranks}"
                )
            self._lanes[domain.domain_id] = LaneTransport(self, domain, world, rank)
        self._under_way: dict[int, deque[LaneTransport]] = {}  # per peer: whose frames the carrier has, oldest first
        self._deaths: list[tuple[int, str]] = []
        self._broken: TransportError | None = None
        self._opened = False
        self._closed: bool | None = None

    def transport(self, domain: Domain) -> LaneTransport:
        """The lane of a domain.

        Raises:
            ConfigurationError: It is not one of ``domains``.
        """
        lane = self._lanes.get(domain.domain_id)
        if lane is None or _wire(lane.domain) != _wire(domain):
            raise ConfigurationError("domain", f"domain {domain.domain_id} {domain.ranks} is not a lane of this rank")
        return lane

    def open(self) -> None:
        """Open the carrier; the first lane that is opened does it. A rank without a lane calls it, where opening is collective.

        Raises:
            TransportError: See the carrier's.
        """
        if self._opened:
            return
        self._opened = True
        peers = sorted({peer for lane in self._lanes.values() for peer in lane.carrier_peers})
        self._under_way = {peer: deque() for peer in peers}
        self._carrier.open(tuple(peers), self.frame_bytes_max)

    def close(self, clean: bool = True) -> None:
        """Let go of the carrier; the last lane that is closed does it, cleanly when all of them were."""
        if self._closed is None:
            self._closed = clean
            self._carrier.close(clean)

    # -- for the lanes ----------------------------------------------------------------------------------------------

    def outstanding(self, lane: LaneTransport, peer: int) -> int:
        """Frames of one lane that a peer has not received yet."""
        sent = self._under_way[peer]
        if not sent:
            return 0
        count = self._carrier.outstanding(peer)
        while len(sent) > count:
            sent.popleft()
        return sent.count(lane)

    def can_send(self, lane: LaneTransport, peer: int) -> bool:
        """Whether the lane has a slot of its own, and the carrier one at all."""
        return self.outstanding(lane, peer) < self.window and self._carrier.can_send(peer)

    def send(self, lane: LaneTransport, peer: int, frame: bytes) -> None:
        """See :class:`Transport`."""
        if not self.can_send(lane, peer):
            raise WouldBlock(f"{self.window} frames of this lane are outstanding")
        self._carrier.send(peer, frame)
        self._under_way[peer].append(lane)

    def look(self, frames_max: int) -> None:
        """One look at the carrier, for all lanes."""
        if self._broken is not None:
            raise TransportError(str(self._broken), rank=self._broken.rank) from self._broken
        if any(lane.is_full for lane in self._lanes.values()):
            return
        try:
            frames, empty = self._carrier.receive(frames_max)
            for peer, data in frames:
                named = self._lanes.get(frame_domain(data))
                for lane in self._lanes.values() if named is None or peer not in named.carrier_peers else (named,):
                    lane.put(peer, data)
            for lane in self._lanes.values():
                lane.looked(empty)
        except TransportError as error:
            self._broken = error
            raise
        except BaseException as error:  # with frames of any lane in hand: their senders would be blamed for the gap
            self._broken = TransportError(f"a look for all lanes was broken off: {error!r}")
            raise

    def deaths(self, since: int) -> tuple[list[tuple[int, str]], int]:
        """Evidence that one lane has not seen: (member of the world, evidence), and where it goes on."""
        self._deaths.extend(self._carrier.deaths())
        return self._deaths[since:], len(self._deaths)

    def left(self) -> None:
        """One lane was closed."""
        lanes = self._lanes.values()
        if self._opened and all(lane.closed is not None for lane in lanes):
            self.close(all(lane.closed for lane in lanes))


def _wire(domain: Domain) -> tuple[object, ...]:
    return domain.ranks, domain.epoch, domain.coordinator_index


class LaneTransport:
    """One domain's streams on a shared carrier; see :class:`Lanes` and :class:`Transport`."""

    def __init__(self, lanes: Lanes, domain: Domain, world: Domain, rank: int) -> None:
        self.name = f"lane over {lanes._carrier.name}"
        self.domain = domain
        self._lanes = lanes
        self._of_world = [world.index_of(r) for r in domain.ranks]  # by member of this domain
        self._of_lane = {member: i for i, member in enumerate(self._of_world)}
        me, hub = domain.index_of(rank), domain.coordinator_index
        spoken_to = [i for i in range(domain.size) if i != me] if me == hub else [hub]
        self.carrier_peers = frozenset(self._of_world[i] for i in spoken_to)
        self._inboxes: dict[int, deque[bytes]] = {
            peer: deque() for peer in spoken_to
        }  # also before this lane is opened
        self._empty = 0
        self._fresh = False  # a look was made since this lane last took
        self._deaths_seen = 0
        self._start = 0
        self.closed: bool | None = None

    # -- for the lanes ----------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether nothing more can wait here."""
        limit = self._lanes.inbox_frames_max
        return any(len(inbox) >= limit for inbox in self._inboxes.values())

    def put(self, peer: int, data: bytes) -> None:
        """A frame of this lane has come; once it is closed, nobody wants it."""
        inbox = self._inboxes.get(self._of_lane.get(peer, -1))
        if inbox is not None:
            inbox.append(data)

    def looked(self, empty: int) -> None:
        """The carrier was looked at: what it found empty is, as far as nothing waits here."""
        self._fresh = True
        self._empty = sum(1 << i for i in self._inboxes if empty >> self._of_world[i] & 1)

    # -- the interface ----------------------------------------------------------------------------------------------

    def open(self, peers: tuple[int, ...], frame_bytes_max: int) -> None:
        """See :class:`Transport`."""
        if frame_bytes_max > self._lanes.frame_bytes_max:
            raise ConfigurationError(
                "frame_bytes_max", f"{frame_bytes_max} of a domain exceeds {self._lanes.frame_bytes_max} of the lanes"
            )
        if not set(peers) <= set(self._inboxes):
            raise ConfigurationError("peers", f"{peers} are more than {tuple(self._inboxes)}, whom domain's roles link")
        self._lanes.open()

    def outstanding(self, peer: int) -> int:
        """See :class:`Transport`."""
        return self._lanes.outstanding(self, self._of_world[peer])

    def can_send(self, peer: int) -> bool:
        """See :class:`Transport`."""
        return self._lanes.can_send(self, self._of_world[peer])

    def send(self, peer: int, frame: bytes) -> None:
        """See :class:`Transport`."""
        self._lanes.send(self, self._of_world[peer], frame)

    def receive(self, frames_max: int) -> Sweep:
        """See :class:`Transport`. Looks at the carrier unless another lane has since this one was last here."""
        if not self._fresh:
            self._lanes.look(frames_max)
        fresh, self._fresh = self._fresh, False
        frames: list[tuple[int, bytes]] = []
        order = list(self._inboxes)
        if order:
            self._start = (self._start + 1) % len(order)
            order = order[self._start :] + order[: self._start]
        live = [peer for peer in order if self._inboxes[peer]]
        while live and len(frames) < frames_max:
            for peer in tuple(live):
                if len(frames) >= frames_max:
                    break
                frames.append((peer, self._inboxes[peer].popleft()))
                if not self._inboxes[peer]:
                    live.remove(peer)
        waiting = sum(1 << peer for peer in live)
        return Sweep(frames, self._empty & ~waiting if fresh else 0)

    def deaths(self) -> tuple[tuple[int, str], ...]:
        """See :class:`Transport`."""
        found, self._deaths_seen = self._lanes.deaths(self._deaths_seen)
        return tuple((self._of_lane[member], evidence) for member, evidence in found if member in self._of_lane)

    def close(self, clean: bool) -> None:
        """See :class:`Transport`."""
        if self.closed is None:
            self.closed = clean
            self._inboxes = {}
            self._lanes.left()
