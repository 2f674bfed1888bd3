"""What an adapter offers: a private communicator with non-blocking collectives over raw bytes."""

from __future__ import annotations

from typing import Any, Protocol

#: A writable or readable contiguous buffer of bytes.
Buffer = Any


class Request(Protocol):
    """An operation under way."""

    def test(self) -> bool:
        """Whether it has completed; makes progress, never blocks."""


class Window(Protocol):
    """Memory that the ranks of one node share: slots that the root writes, and one counter per rank."""

    def slot(self, index: int) -> memoryview:
        """A slot's bytes."""

    def acknowledge(self, sequence: int) -> None:
        """This rank will not look at slots of exchanges before ``sequence`` any more."""

    def acknowledged(self) -> int:
        """The lowest sequence that every rank has acknowledged."""

    def free(self) -> None:
        """Release it (collective)."""


class Comm(Protocol):
    """A communicator of this package's own: nothing else may use it."""

    rank: int
    size: int
    #: Whether :meth:`report` exists; otherwise every broadcast compares results.
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

    def shared_window(self, slot_bytes: int) -> Window:
        """Allocate a shared window with two slots (collective)."""

    def free(self) -> None:
        """Release the communicator (collective)."""
