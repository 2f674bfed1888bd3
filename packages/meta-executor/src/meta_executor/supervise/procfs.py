"""Processes by identity, not by number: a pid that was reused is never signalled."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have this process killed when the thread that started it ends. For the child, between fork and exec."""
    if _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        os._exit(127)


def _stat(pid: int) -> list[str]:
    """What the system says of a process, from its state on; empty when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether ``pid`` is ``ancestor`` or was started by it, directly or not, and still hangs below it.

    A process whose parent ended hangs below init, or below whoever adopts orphans (a container's init, a session's
    ``systemd --user``, a tool): that one is not of our making, whatever number the orphan reads as its parent's.
    """
    while pid > 0 and pid != ancestor:
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0
    return pid == ancestor


def descendants(root: int) -> list[ProcessIdentity]:
    """The living processes that hang below one, the nearest first."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, below = [], [root]
    for pid in below:
        below += children.get(pid, [])
        identity = ProcessIdentity.of(pid) if pid != root else None
        if identity is not None:
            found.append(identity)
    return found


@dataclass(frozen=True)
class ProcessIdentity:
    """A process and when it was started (clock ticks since boot): the pair is unique until the next boot."""

    pid: int
    start_ticks: int

    @staticmethod
    def of(pid: int) -> ProcessIdentity | None:
        """The identity of a living process (a zombie counts as dead), or None."""
        fields = _stat(pid)
        if not fields or fields[0] in ("Z", "X"):
            return None
        return ProcessIdentity(pid, int(fields[19]))

    def alive(self) -> bool:
        """Whether this very process still runs."""
        return ProcessIdentity.of(self.pid) == self

    def kill(self, signal_number: int = signal.SIGKILL) -> bool:
        """Signal it if it is still the same process. Returns whether it was signalled."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # The identity is checked after the handle is open: from here on the number cannot be reused unseen.
            if not self.alive():
                return False
            signal.pidfd_send_signal(handle, signal_number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until it has ended (a zombie has). Returns whether it did within the time."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive():
                return True
            return bool(select.select([handle], [], [], timeout_s)[0])
        finally:
            os.close(handle)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (bytes), 0 when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
