"""Evidence that a peer's process ended, for hosts that did not start it: a pidfd on the same machine (Linux >= 5.3).

A process is named by kernel, process namespace, number and start time, so that neither another machine's nor a later process
of the same number is taken for it.
"""

from __future__ import annotations

import os
import select
from pathlib import Path
from types import TracebackType
from typing import Annotated

import msgspec

from kv_bounce_planner.sessions.identity import PeerId


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """One process, for ever; travels in a request of the host's.

    Args:
        kernel: Boot identifier of the machine.
        namespace: Inode of the process namespace that ``pid`` counts in.
        pid: Process number there.
        started: Start time since boot, clock ticks.
    """

    kernel: str
    namespace: int
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    started: int

    @staticmethod
    def own() -> ProcessIdentity:
        """This process."""
        pid = os.getpid()
        started = _started(pid)
        if started is None:
            raise OSError(f"/proc does not show process {pid}, which is this one")
        return ProcessIdentity(*_here(), pid, started)

    @property
    def is_local(self) -> bool:
        """Whether its number means the same process here."""
        return (self.kernel, self.namespace) == _here()


def _here() -> tuple[str, int]:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> int | None:
    """Start time of the process that has this number now; None if none has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[19])  # the name before it may hold spaces and brackets


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class ProcessWatch:
    """Says which peers' processes have ended: what ``peer_died(peer, PeerEvidence.PROCESS_REAPED)`` wants to be told.

    One thread uses it.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._peers: dict[int, PeerId] = {}
        self._ended: list[PeerId] = []
        self._known: set[PeerId] = set()

    def watch(self, peer: PeerId, process: ProcessIdentity) -> bool:
        """Watch a peer from now on; again for one that is watched already changes nothing.

        Returns:
            False if the process is not on this machine, in another process namespace, or hidden from us by ``/proc``: nothing
            will be told of it.

        Raises:
            OSError: It cannot be watched (no descriptor is left). Nothing changed.
        """
        if not process.is_local:
            return False
        if peer in self._known:
            return True
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self._known.add(peer)
            self._ended.append(peer)
            return True
        try:
            started = _started(process.pid)
            ended = _has_ended(descriptor)  # looked at last: until then the number was this process's
        except BaseException:
            os.close(descriptor)
            raise
        if started is None and not ended:  # it lives, and /proc hides whose number it is
            os.close(descriptor)
            return False
        self._known.add(peer)
        if started != process.started:  # no process, or a later one of that number
            os.close(descriptor)
            self._ended.append(peer)
            return True
        self._peers[descriptor] = peer
        self._poll.register(descriptor, select.POLLIN)
        return True

    def ended(self) -> tuple[PeerId, ...]:
        """Peers whose process has ended since the last call; each is told once and then forgotten. Never blocks."""
        found, self._ended = self._ended, []
        if self._peers:
            for descriptor, _ in self._poll.poll(0):
                found.append(self._drop(descriptor))
        self._known.difference_update(found)
        return tuple(found)

    def _drop(self, descriptor: int) -> PeerId:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        return self._peers.pop(descriptor)

    def close(self) -> None:
        """Watch nobody any more."""
        for descriptor in tuple(self._peers):
            self._drop(descriptor)
        self._known.clear()

    def __enter__(self) -> ProcessWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
