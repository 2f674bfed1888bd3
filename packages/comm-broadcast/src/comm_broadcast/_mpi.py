"""mpi4py: non-blocking collectives on a communicator of our own, reports by point to point."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from comm_broadcast._comm import Buffer, Request
from comm_broadcast._errors import TransportError

_DATA_TAG = 1
_REPORT_TAG = 2


class _MpiRequest:
    """A request that keeps its buffers alive."""

    __slots__ = ("_buffers", "_operation", "_rank", "_request")

    def __init__(self, request: MPI.Request, buffers: object, operation: str, rank: int) -> None:
        self._request = request
        self._buffers = buffers
        self._operation = operation
        self._rank = rank
        _IN_FLIGHT.add(self)

    def test(self) -> bool:
        """See :class:`Request`."""
        try:
            done = self._request.Test()
        except MPI.Exception as error:
            raise TransportError(self._operation, self._rank, error) from error
        if done:
            _IN_FLIGHT.discard(self)
        return bool(done)


#: Requests whose buffers MPI may still read or write: they outlive whoever started them.
_IN_FLIGHT: set[_MpiRequest] = set()


class MpiComm:
    """A duplicate of an mpi4py communicator; traffic on the original is not touched.

    Construction and :meth:`free` are collective: start-up and teardown, never in between.

    Args:
        comm: The communicator to duplicate.

    Raises:
        TransportError: MPI refused.
    """

    reports = True

    def __init__(self, comm: MPI.Intracomm) -> None:
        try:
            self._comm = comm.Dup()
        except MPI.Exception as error:
            raise TransportError("Dup", comm.rank, error) from error
        self.rank = self._comm.rank
        self.size = self._comm.size

    def _post(self, operation: str, start: Callable[[], MPI.Request], buffers: object) -> Request:
        try:
            return _MpiRequest(start(), buffers, operation, self.rank)
        except MPI.Exception as error:
            raise TransportError(operation, self.rank, error) from error

    def ibcast(self, buffer: Buffer, root: int) -> Request:
        """See :class:`Comm`."""
        return self._post("Ibcast", lambda: self._comm.Ibcast([buffer, MPI.BYTE], root=root), buffer)

    def iallgather(self, send: Buffer, receive: Buffer) -> Request:
        """See :class:`Comm`."""
        return self._post(
            "Iallgather",
            lambda: self._comm.Iallgather([send, MPI.BYTE], [receive, len(send), MPI.BYTE]),
            (send, receive),
        )

    def isend(self, buffer: Buffer, target: int) -> Request:
        """See :class:`Comm`."""
        return self._post("Isend", lambda: self._comm.Isend([buffer, MPI.BYTE], dest=target, tag=_DATA_TAG), buffer)

    def irecv(self, buffer: Buffer, source: int) -> Request:
        """See :class:`Comm`."""
        return self._post("Irecv", lambda: self._comm.Irecv([buffer, MPI.BYTE], source=source, tag=_DATA_TAG), buffer)

    def report(self, buffer: Buffer, target: int) -> Request:
        """See :class:`Comm`."""
        return self._post("Isend", lambda: self._comm.Isend([buffer, MPI.BYTE], dest=target, tag=_REPORT_TAG), buffer)

    def poll_report(self, size: int) -> bytes | None:
        """See :class:`Comm`."""
        try:
            if not self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=_REPORT_TAG):
                return None
            buffer = bytearray(size)
            self._comm.Recv([buffer, MPI.BYTE], source=MPI.ANY_SOURCE, tag=_REPORT_TAG)
        except MPI.Exception as error:
            raise TransportError("Recv", self.rank, error) from error
        return bytes(buffer)

    def free(self) -> None:
        """See :class:`Comm`."""
        try:
            self._comm.Free()
        except MPI.Exception as error:
            raise TransportError("Free", self.rank, error) from error
