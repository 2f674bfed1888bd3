"""What an adapter offers: a private communicator with non-blocking collectives over raw bytes."""

from __future__ import annotations

from typing import Any, Protocol

#: A writable or readable contiguous buffer of bytes.
Buffer = Any


class Request(Protocol):
    """An operation under way. It keeps its buffers alive until it has completed, whoever forgets it."""

    def test(self) -> bool:
        """Whether it has completed; makes progress, never blocks.

        Raises:
            TransportError: The communicator failed.
        """


class Comm(Protocol):
    """A communicator of this package's own: nothing else may use it. Every method may raise ``TransportError``."""

    rank: int
    size: int
    #: Whether :meth:`report` exists; otherwise every exchange compares results.
    reports: bool

    def ibcast(self, buffer: Buffer, root: int) -> Request:
        """Broadcast a buffer of equal size on all ranks."""

    def iallgather(self, send: Buffer, receive: Buffer) -> Request:
        """Gather equal-sized buffers everywhere; ``receive`` has ``size`` times the bytes of ``send``."""

    def isend(self, buffer: Buffer, target: int) -> Request:
        """Send to one rank."""

    def irecv(self, buffer: Buffer, source: int) -> Request:
        """Receive from one rank."""

    def report(self, buffer: Buffer, target: int) -> Request:
        """Send a failure report outside of any exchange."""

    def poll_report(self, size: int) -> bytes | None:
        """A failure report that has arrived (``size`` bytes), or None."""

    def free(self) -> None:
        """Release the communicator (collective)."""
