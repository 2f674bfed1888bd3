"""Ends a rank's wait: by a call in the same process, or by another rank of the same host.

Each rank listens on a datagram socket in the run's folder, next to an eventfd for its own threads. A rank that has sent a
frame rings its target; a ring that finds the target's queue full is lost, and need not come, because then it wakes anyway.
Ranks of other hosts cannot be rung: their frames are found by polling.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path

from pp_agreement import Sweep, Transport


class RingingTransport:
    """The agreement's transport, which rings a member that a frame was sent to.

    Args:
        inner: Carries the frames.
        ring: Ends the wait of a member.
    """

    def __init__(self, inner: Transport, ring: Callable[[int], None]) -> None:
        self._inner = inner
        self._ring = ring
        self.name = inner.name

    def open(self, peers: tuple[int, ...], frame_bytes_max: int) -> None:
        """As the inner one's."""
        self._inner.open(peers, frame_bytes_max)

    def outstanding(self, peer: int) -> int:
        """As the inner one's."""
        return self._inner.outstanding(peer)

    def can_send(self, peer: int) -> bool:
        """As the inner one's."""
        return self._inner.can_send(peer)

    def send(self, peer: int, frame: bytes) -> None:
        """As the inner one's; then the member is rung."""
        self._inner.send(peer, frame)
        self._ring(peer)

    def receive(self, frames_max: int) -> Sweep:
        """As the inner one's."""
        return self._inner.receive(frames_max)

    def deaths(self) -> tuple[tuple[int, str], ...]:
        """As the inner one's."""
        return self._inner.deaths()

    def close(self, clean: bool) -> None:
        """As the inner one's."""
        self._inner.close(clean)


class RankBell:
    """One rank's bell.

    Args:
        path_of: Where the rank of a number listens.
        rank: This rank.
    """

    def __init__(self, path_of: Callable[[int], Path], rank: int) -> None:
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._path = path_of(rank)
        self._path.unlink(missing_ok=True)
        self._socket.bind(str(self._path))
        self._paths = path_of
        self._targets: dict[int, str] = {}
        self._closed = False

    def notify(self) -> None:
        """End the wait, from any thread; one that is not waiting will not wait next time."""
        if not self._closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._event, 1)

    def ring(self, target_rank: int) -> None:
        """End another rank's wait, where it can be reached."""
        target = self._targets.get(target_rank)
        if target is None:
            path = self._paths(target_rank)
            target = self._targets[target_rank] = str(path) if path.exists() else ""
        if not target:
            return
        try:
            self._socket.sendto(b"\0", target)
        except BlockingIOError:
            pass  # its queue is full of rings: it wakes
        except OSError:
            self._targets[target_rank] = ""  # it has left; whoever judges deaths says so

    def wait(self, timeout_s: float) -> bool:
        """Wait for a notification or a ring, at most so long. Whether there was one."""
        # select, because poll and epoll round up to whole milliseconds.
        ready, _, _ = select.select([self._event, self._socket.fileno()], [], [], max(timeout_s, 0.0))
        if self._event in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event)
        if self._socket.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._socket.recv(1)
        return bool(ready)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if not self._closed:
            self._closed = True
            self._socket.close()
            os.close(self._event)
            self._path.unlink(missing_ok=True)
