"""Operating-system evidence of death: pidfd, which becomes readable when the process has ended."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from types import TracebackType


class PidWatch:
    """Watches the processes of other ranks on this host (Linux >= 5.3).

    Args:
        pids: Rank to process id. A process that is gone already counts as dead at once.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._gone: list[tuple[int, str]] = []
        self._all: list[tuple[int, str]] = []
        for rank, pid in pids.items():
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone.append((rank, f"process {pid} does not exist"))
                continue
            self._ranks[descriptor] = rank
            self._poll.register(descriptor, select.POLLIN)

    def dead(self) -> tuple[tuple[int, str], ...]:
        """Newly dead ranks with their evidence; each is told once, so only one may ask. Never blocks."""
        found, self._gone = self._gone, []
        if self._ranks:
            for descriptor, _events in self._poll.poll(0):
                rank = self._ranks.pop(descriptor)
                self._poll.unregister(descriptor)
                os.close(descriptor)
                found.append((rank, "pidfd: the process has ended"))
        self._all.extend(found)
        return tuple(found)

    def all_dead(self) -> tuple[tuple[int, str], ...]:
        """All dead ranks so far: several domains of a process share one watch by it. Never blocks."""
        self.dead()
        return tuple(self._all)

    def close(self) -> None:
        """Stop watching."""
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks.clear()

    def __enter__(self) -> PidWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
