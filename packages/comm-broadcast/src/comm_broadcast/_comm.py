"""What an adapter offers: a private communicator with non-blocking collectives over raw bytes.

An exception can come between any two bytecodes: an interrupt, a signal handler's. So that none leaves an operation under way
that nobody knows of, an adapter *lists* each operation in the very act that starts it (one call into C, or one that can be
repeated without effect), and whoever uses it looks at the list before it starts an operation: what is listed was started.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sized
from typing import Any, Protocol

from comm_broadcast._errors import TransportError

#: A writable or readable contiguous buffer of bytes.
Buffer = Any


class Comm(Protocol):
    """A communicator of this package's own: nothing else may use it. Every method may raise ``TransportError``.

    The adapter keeps the buffers of an operation alive until it has completed, whoever forgets it. Several operations may be
    under way; all ranks start the collective ones in the same order.
    """

    rank: int
    size: int

    @property
    def posted(self) -> Sized:
        """One item per operation started since :meth:`forget`, in order."""

    def ibcast(self, buffer: Buffer, root: int) -> None:
        """Start to broadcast a buffer of equal size on all ranks."""

    def iallgather(self, send: Buffer, receive: Buffer) -> None:
        """Start to gather equal-sized buffers everywhere; ``receive`` has ``size`` times the bytes of ``send``."""

    def igather(self, send: Buffer, receive: Buffer | None, root: int) -> None:
        """Start to gather equal-sized buffers at the root, whose ``receive`` has ``size`` times the bytes of ``send``.

        A rank's part must reach the root whether or not the ranks between make progress: no tree.
        """

    def isend(self, buffer: Buffer, target: int) -> None:
        """Start to send to one rank."""

    def irecv(self, buffer: Buffer, source: int) -> None:
        """Start to receive from one rank."""

    def test(self, index: int) -> bool:
        """Whether the listed operation has completed; makes progress, never blocks, may be asked again."""

    def forget(self, keep: int) -> None:
        """Unlist all but the last ``keep`` operations: they have completed. A second time changes nothing."""

    def free(self) -> None:
        """Release the communicator (collective); a second call does nothing."""


class Run:
    """One pass over a script of operations. What an earlier, interrupted pass has started is not started again."""

    __slots__ = ("comm", "count")

    def __init__(self, comm: Comm, earlier: int = 0) -> None:
        self.comm = comm
        #: Operations before the next one: those listed by earlier scripts, and this pass's so far.
        self.count = earlier

    @property
    def is_ahead(self) -> bool:
        """Whether the next operation was started by an earlier pass already."""
        return len(self.comm.posted) > self.count

    def start(self, call: Callable[..., None], *arguments: Any) -> int:
        """Start the next operation; its index."""
        index = self.count
        if len(self.comm.posted) <= index:
            call(*arguments)
            if len(self.comm.posted) <= index:
                raise TransportError(
                    getattr(call, "__name__", "operation"), self.comm.rank, "the adapter does not list what it starts"
                )
        self.count = index + 1
        return index

    def wait(self, index: int) -> Generator[None, None, None]:
        """Yield until the operation has completed."""
        while not self.comm.test(index):
            yield
