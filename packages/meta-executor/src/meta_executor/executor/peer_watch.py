"""Which peers' processes have ended. A link that is away proves nothing; the operating system may, of processes of this host.

Kept by both transceivers: the end of a process that executes writes, or reads what was lent to it, is a proof that sessions
ask for, and of an instance without any process nothing need be kept.
"""

from __future__ import annotations

from collections.abc import Callable

from kv_bounce_planner.planning import KVTransferError
from kv_bounce_planner.sessions import PeerId

#: How often the process of a peer whose link is away is looked for (s).
LOOK_EVERY_S = 0.1


class PeerWatch:
    """See the module.

    Args:
        is_gone: Whether the operating system says that a process (``host/pid/start``) has ended; False of other hosts'.
        log: Gets lines for the log.
    """

    def __init__(self, is_gone: Callable[[str], bool], log: Callable[[str], None] = lambda text: None) -> None:
        self._log = log
        self._is_gone = is_gone
        self._processes: dict[PeerId, str] = {}
        self._away: set[PeerId] = set()
        self._next_s = 0.0
        #: Instances of which no process is left, until they are forgotten.
        self.gone: set[tuple[str, str]] = set()

    def know(self, peer: PeerId, process: str) -> None:
        """A peer, and its process where that is known."""
        if process:
            self._processes[peer] = process

    def away(self, peer: PeerId, reason: str) -> None:
        """Its link is away: look for its process."""
        self._away.add(peer)
        self._log(f"the control link to {peer} is away: {reason}")

    def back(self, peer: PeerId) -> None:
        """Its link is there again."""
        self._away.discard(peer)
        self._log(f"the control link to {peer} is back")

    @property
    def away_count(self) -> int:
        """Peers whose link is away (count)."""
        return len(self._away)

    @property
    def looking(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self.gone) or any(peer in self._processes for peer in self._away)

    def ended(self, now_s: float) -> list[PeerId]:
        """Peers whose process was found to have ended since the last look; an instance without any other is ``gone``."""
        if now_s < self._next_s or not self._away:
            return []
        self._next_s = now_s + LOOK_EVERY_S
        found = [peer for peer in self._away if peer in self._processes and self._is_gone(self._processes[peer])]
        for peer in found:
            self._away.discard(peer)
            del self._processes[peer]
            if all(other.instance != peer.instance for other in self._processes):
                self.gone.add(peer.instance)
        return sorted(found)

    def retire_gone(self, retire: Callable[[str, str], None]) -> None:
        """Instances that are gone are retired and forgotten; one whose agent cannot be destroyed now is tried again.

        Args:
            retire: Of an instance and its generation.
        """
        for instance in list(self.gone):
            try:
                retire(*instance)
            except KVTransferError as error:
                self._log(f"the agent of {instance[0]} could not be destroyed, tried again: {error}")
            else:
                self.forget(instance)

    def forget(self, instance: tuple[str, str]) -> None:
        """Nothing stays of an instance."""
        self.gone.discard(instance)
        for peer in [peer for peer in (*self._processes, *self._away) if peer.instance == instance]:
            self._processes.pop(peer, None)
            self._away.discard(peer)
