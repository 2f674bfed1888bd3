"""The executor's point-to-point link over MPI: the only file of this room that imports mpi4py.

Non-blocking throughout. A frame is one message on the frame tag (kind, sizes, header); activations follow on a tag of
their own and are received straight into the array that the engine gets. Receives are matched probes (Improbe) and Irecv,
so a rank that sends late costs the others nothing but a test.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from meta_executor.executor.links import Arrived, Float32Array
from meta_executor.executor.messages import FRAME_BYTES_MAX, FrameBody, FrameError, decode_frame, encode_frame

_FRAME_TAG = 1
_ACTIVATION_TAG = 2
#: kind, activation rows, activation columns (0, 0: none)
_PREFIX = struct.Struct("<BII")


@dataclass(slots=True)
class _Incoming:
    """A frame that is being received."""

    request: MPI.Request
    buffer: bytearray
    source: int
    activations: Float32Array | None = None
    activation_request: MPI.Request | None = None
    body: FrameBody | None = None


@dataclass(slots=True)
class _Source:
    frames: deque[_Incoming] = field(default_factory=deque)


class MpiLink:
    """Frames on a duplicate of a communicator, so that foreign traffic stays apart.

    Construction is collective (``Dup``); nothing afterwards is.

    Args:
        comm: The instance's world.
        ring: Ends the wait of a rank that a frame was sent to.
    """

    def __init__(self, comm: MPI.Intracomm, ring: Callable[[int], None] = lambda rank: None) -> None:
        self._comm = comm.Dup()
        self._ring = ring
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._sources = [_Source() for _ in range(self.size)]
        self._outgoing: deque[tuple[MPI.Request, object]] = deque()
        self._own: deque[Arrived] = deque()
        self._status = MPI.Status()
        self.frames_sent = 0
        self.bytes_sent = 0

    def send(self, target_rank: int, body: FrameBody, activations: Float32Array | None = None) -> None:
        """Start sending; ``poll`` completes it."""
        kind, data = encode_frame(body)
        if target_rank == self.rank:
            self._own.append(Arrived(self.rank, decode_frame(kind, data), activations))
            return
        rows, columns = (0, 0) if activations is None else activations.shape
        message = _PREFIX.pack(kind, rows, columns) + data
        self._outgoing.append((self._comm.Isend([message, MPI.BYTE], dest=target_rank, tag=_FRAME_TAG), message))
        self.frames_sent += 1
        self.bytes_sent += len(message)
        if activations is not None:
            block = np.ascontiguousarray(activations, dtype=np.float32)
            self._outgoing.append((self._comm.Isend([block, MPI.FLOAT], dest=target_rank, tag=_ACTIVATION_TAG), block))
            self.bytes_sent += block.nbytes
        self._ring(target_rank)

    def poll(self) -> list[Arrived]:
        """Complete sends, start receives for what was announced, return what is whole."""
        for _ in range(len(self._outgoing)):
            pair = self._outgoing.popleft()
            if not pair[0].Test():
                self._outgoing.append(pair)
        arrived: list[Arrived] = []
        while self._own:
            arrived.append(self._own.popleft())
        self._match()
        for source in self._sources:
            while source.frames and self._complete(source.frames[0]):
                incoming = source.frames.popleft()
                if incoming.body is None:
                    raise FrameError("a frame without a body was completed")
                arrived.append(Arrived(incoming.source, incoming.body, incoming.activations))
        return arrived

    def _match(self) -> None:
        status = self._status
        while (message := self._comm.Improbe(MPI.ANY_SOURCE, _FRAME_TAG, status)) is not None:
            count = status.Get_count(MPI.BYTE)
            if not _PREFIX.size <= count <= FRAME_BYTES_MAX + _PREFIX.size:
                raise FrameError(f"frame of {count} bytes from rank {status.Get_source()}")
            buffer = bytearray(count)
            request = message.Irecv([buffer, MPI.BYTE])
            source = status.Get_source()
            self._sources[source].frames.append(_Incoming(request, buffer, source))

    def _complete(self, incoming: _Incoming) -> bool:
        """Whether the oldest frame of a source is whole. Only the oldest is asked, so order is kept."""
        if incoming.body is None:
            if not incoming.request.Test():
                return False
            kind, rows, columns = _PREFIX.unpack_from(incoming.buffer)
            incoming.body = decode_frame(kind, memoryview(incoming.buffer)[_PREFIX.size :])
            if rows:
                incoming.activations = np.empty((rows, columns), np.float32)
                incoming.activation_request = self._comm.Irecv(
                    [incoming.activations, MPI.FLOAT], source=incoming.source, tag=_ACTIVATION_TAG
                )
        return incoming.activation_request is None or bool(incoming.activation_request.Test())

    @property
    def unsent_count(self) -> int:
        """Sends that MPI has not completed (count)."""
        return len(self._outgoing)

    @property
    def busy(self) -> bool:
        """Sends that MPI has not completed, or frames of which a part has come."""
        return bool(self._outgoing) or any(source.frames for source in self._sources)

    def close(self) -> None:
        """Cancel what is pending. The communicator is freed by :meth:`free` when every rank does so."""
        for source in self._sources:
            for incoming in source.frames:
                for request in (incoming.request, incoming.activation_request):
                    if request is not None and request != MPI.REQUEST_NULL:
                        request.Cancel()
            source.frames.clear()

    def free(self) -> None:
        """Free the duplicate: collective, after all ranks have left their loops."""
        self.close()
        self._comm.Free()
