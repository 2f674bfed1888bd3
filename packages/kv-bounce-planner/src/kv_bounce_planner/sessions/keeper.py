"""A host's duties towards the peers of a session, done in one place: dial, watch, tell who died, retire who is gone for good.

Theory. A session concludes nothing from silence, so whoever hosts it has to bring the evidence, and to ask for the proof that
a transport's class gives when an agent is destroyed. Both are the same for every host. A process that ended is told and its
instance retired. A peer whose link stayed away longer than ``SessionConfig.link_timeout_s`` is retired, too: what was open with
it is in doubt by then, and only its agent's end can still prove anything. Whoever comes back is dialled and introduced anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from kv_bounce_planner._errors import TransportError
from kv_bounce_planner.sessions.events import LinkLost, LinkRestored, PeerEvidence, PeerIntroduced, SessionEvent
from kv_bounce_planner.sessions.identity import PeerId
from kv_bounce_planner.sessions.processes import ProcessIdentity, ProcessWatch
from kv_bounce_planner.sessions.receiver import Receiver
from kv_bounce_planner.sessions.sender import Sender


class Dials(Protocol):
    """A control channel on which one side dials, as ``ZmqControlChannel`` is."""

    def connect(self, peer: PeerId, address: str) -> None:
        """Open the link to a peer that listens."""


class PeerKeeper:
    """Polls a session and keeps its peers; to be used by the one thread that polls.

    Args:
        session: Poll it through ``poll`` here, and nowhere else.
        channel: Where peers are dialled; None where this side only listens.
        clock: Monotonic seconds.
    """

    def __init__(
        self, session: Sender | Receiver, channel: Dials | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._session, self._channel, self._clock = session, channel, clock
        self._watch = ProcessWatch()
        self._dead: deque[PeerId] = deque()  # whose death the session was not told of
        self._met: set[PeerId] = set()
        self._lost_until_s: dict[PeerId, float] = {}
        self._retiring: dict[PeerId, None] = {}
        #: Retirements that a foreign error held up and that are tried again (count).
        self.retirements_repeated = 0

    def meet(self, peer: PeerId, address: str, process: ProcessIdentity | None = None) -> None:
        """Dial a peer, once in its life here, and watch its process where it can be watched.

        Raises:
            ChannelError: The address is not one.
        """
        if self._channel is not None and peer not in self._met:
            self._channel.connect(peer, address)
            self._met.add(peer)
        if process is not None:
            self.watch(peer, process)

    def watch(self, peer: PeerId, process: ProcessIdentity) -> bool:
        """Watch a peer's process: False if it cannot be seen from here."""
        return self._watch.watch(peer, process)

    def poll(self) -> tuple[SessionEvent, ...]:
        """Deaths first, then one poll of the session: everything that it tells."""
        self._dead.extend(self._watch.ended())
        while self._dead:
            peer = self._dead[0]
            self._session.peer_died(peer, PeerEvidence.PROCESS_REAPED)
            self._retiring[peer] = None
            self._dead.popleft()  # last: it is told once, and an interrupt keeps it here
        now_s = self._clock()
        self._retiring.update(dict.fromkeys(peer for peer, until_s in self._lost_until_s.items() if now_s >= until_s))
        for instance in dict.fromkeys(peer.instance for peer in self._retiring):
            linked = {*self._session.peers(), *self._retiring}  # whose links end with their agent
            try:
                self._session.retire_peer(*instance)
            except TransportError:  # nothing was proven, and the next poll tries again
                self.retirements_repeated += 1
                continue
            self._forget(each for each in linked if each.instance == instance)
        told = self._session.poll()
        for event in told:
            if isinstance(event, LinkLost):
                self._lost_until_s[event.peer] = now_s + self._session.config.link_timeout_s
            elif isinstance(event, LinkRestored | PeerIntroduced):
                self._lost_until_s.pop(event.peer, None)
        return told

    def _forget(self, peers: Iterable[PeerId]) -> None:
        """All ranks of an instance are retired together: whoever of them is met again is dialled anew."""
        for peer in peers:
            self._met.discard(peer)
            self._lost_until_s.pop(peer, None)
            self._retiring.pop(peer, None)

    def close(self) -> None:
        """Watch nobody any more."""
        self._watch.close()
