"""mpi4py: non-blocking collectives on a communicator of our own, reports by point to point, a window shared by one node."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from comm_broadcast._comm import Buffer, Request, Window
from comm_broadcast._errors import BroadcastConfigError

_DATA_TAG = 1
_REPORT_TAG = 2


class _MpiRequest:
    """A request that keeps its buffer alive."""

    __slots__ = ("_buffer", "_request")

    def __init__(self, request: MPI.Request, buffer: object) -> None:
        self._request = request
        self._buffer = buffer

    def test(self) -> bool:
        """See :class:`Request`."""
        return bool(self._request.Test())


class _MpiWindow:
    """Two slots in the root's shared memory, and a line of its own for each rank's counter."""

    _LINE = 64

    def __init__(self, comm: MPI.Intracomm, slot_bytes: int, root: int) -> None:
        local = 2 * slot_bytes + self._LINE * comm.size if comm.rank == root else 0
        self._window = MPI.Win.Allocate_shared(local, 1, comm=comm)
        memory, _ = self._window.Shared_query(root)
        buffer: Any = memory
        self._memory = memoryview(buffer).cast("B")
        self._slot_bytes = slot_bytes
        lines = np.frombuffer(self._memory[2 * slot_bytes :], dtype=np.int64).reshape(comm.size, -1)
        self._counters = lines[:, 0]
        self._rank = comm.rank
        # Passive access for the window's life: loads and stores, ordered by sync.
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self._counters[self._rank] = 0
        self._window.Sync()
        comm.Barrier()

    def slot(self, index: int) -> memoryview:
        """See :class:`Window`."""
        self._window.Sync()
        return self._memory[index * self._slot_bytes : (index + 1) * self._slot_bytes]

    def acknowledge(self, sequence: int) -> None:
        """See :class:`Window`."""
        self._counters[self._rank] = sequence
        self._window.Sync()

    def acknowledged(self) -> int:
        """See :class:`Window`."""
        self._window.Sync()
        return int(self._counters.min())

    def free(self) -> None:
        """See :class:`Window`."""
        self._counters = None  # type: ignore[assignment]
        self._window.Unlock_all()
        self._window.Free()


class MpiComm:
    """A duplicate of an mpi4py communicator. Construction and :meth:`free` are collective.

    Args:
        comm: The communicator to duplicate; traffic on it is not touched.
    """

    reports = True

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self.rank = self._comm.rank
        self.size = self._comm.size

    def ibcast(self, buffer: Buffer, root: int) -> Request:
        """See :class:`Comm`."""
        return _MpiRequest(self._comm.Ibcast([buffer, MPI.BYTE], root=root), buffer)

    def iallgather(self, send: Buffer, receive: Buffer) -> Request:
        """See :class:`Comm`."""
        request = self._comm.Iallgather([send, MPI.BYTE], [receive, len(send), MPI.BYTE])
        return _MpiRequest(request, (send, receive))

    def isend(self, buffer: Buffer, target: int) -> Request:
        """See :class:`Comm`."""
        return _MpiRequest(self._comm.Isend([buffer, MPI.BYTE], dest=target, tag=_DATA_TAG), buffer)

    def irecv(self, buffer: Buffer, source: int) -> Request:
        """See :class:`Comm`."""
        return _MpiRequest(self._comm.Irecv([buffer, MPI.BYTE], source=source, tag=_DATA_TAG), buffer)

    def report(self, buffer: Buffer, target: int) -> Request:
        """See :class:`Comm`."""
        return _MpiRequest(self._comm.Isend([buffer, MPI.BYTE], dest=target, tag=_REPORT_TAG), buffer)

    def poll_report(self, size: int) -> bytes | None:
        """See :class:`Comm`."""
        if not self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=_REPORT_TAG):
            return None
        buffer = bytearray(size)
        self._comm.Recv([buffer, MPI.BYTE], source=MPI.ANY_SOURCE, tag=_REPORT_TAG)
        return bytes(buffer)

    def shared_window(self, slot_bytes: int) -> Window:
        """See :class:`Comm`.

        Raises:
            BroadcastConfigError: The ranks are not all on one node.
        """
        node: Any = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        together = node.size == self.size
        node.Free()
        if not together:
            raise BroadcastConfigError("shared_slot_bytes: the ranks are not all on one node")
        return _MpiWindow(self._comm, slot_bytes, 0)

    def free(self) -> None:
        """See :class:`Comm`."""
        self._comm.Free()
