"""torch.distributed: the same exchanges over a process group of CPU tensors (gloo)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from comm_broadcast._comm import Buffer, Request
from comm_broadcast._errors import LocalProtocolError, TransportError


class _Work:
    """A group's work; it and its buffers stay until it has completed."""

    def __init__(self, work: Any, operation: str, rank: int, *buffers: object) -> None:
        self._work = work
        self._operation = operation
        self._rank = rank
        self._buffers = buffers
        _IN_FLIGHT.add(self)

    def test(self) -> bool:
        """See :class:`Request`."""
        try:
            # gloo's point-to-point work is complete only to those who wait for it: these transfers, which follow a frame
            # that both ends have, block here for the time they take.
            if self._operation not in _POINT_TO_POINT and not self._work.is_completed():
                return False
            self._work.wait()
        except RuntimeError as error:
            _IN_FLIGHT.discard(self)
            raise TransportError(self._operation, self._rank, error) from error
        _IN_FLIGHT.discard(self)
        return True


_IN_FLIGHT: set[_Work] = set()
_POINT_TO_POINT = ("isend", "irecv")


class _Done:
    def test(self) -> bool:
        """Nothing to wait for."""
        return True


def _tensor(buffer: Buffer) -> torch.Tensor:
    view = memoryview(buffer)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8)


class TorchComm:
    """A process group. It has no channel for failure reports, so every exchange compares results (``agree``).

    Args:
        group: A group of its own for this object; None: a new group over the world (collective).
    """

    reports = False

    def __init__(self, group: Any = None) -> None:
        self._own = group is None
        self._group = dist.new_group(backend="gloo") if group is None else group
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        self._global = [dist.get_global_rank(self._group, r) for r in range(self.size)]

    def _post(self, operation: str, start: Callable[[], Any], *buffers: object) -> Request:
        try:
            return _Work(start(), operation, self.rank, *buffers)
        except RuntimeError as error:
            raise TransportError(operation, self.rank, error) from error

    def ibcast(self, buffer: Buffer, root: int) -> Request:
        """See :class:`Comm`. Ranks are the group's; torch wants the world's."""
        if memoryview(buffer).nbytes == 0:
            return _Done()
        tensor = _tensor(buffer)
        source = self._global[root]
        return self._post(
            "broadcast", lambda: dist.broadcast(tensor, src=source, group=self._group, async_op=True), tensor, buffer
        )

    def iallgather(self, send: Buffer, receive: Buffer) -> Request:
        """See :class:`Comm`."""
        whole = _tensor(receive)
        parts = list(whole.chunk(self.size))
        source = _tensor(send)
        return self._post(
            "all_gather",
            lambda: dist.all_gather(parts, source, group=self._group, async_op=True),
            source,
            whole,
            receive,
        )

    def isend(self, buffer: Buffer, target: int) -> Request:
        """See :class:`Comm`."""
        tensor = _tensor(buffer)
        return self._post("isend", lambda: dist.isend(tensor, dst=self._global[target], group=self._group), tensor)

    def irecv(self, buffer: Buffer, source: int) -> Request:
        """See :class:`Comm`."""
        tensor = _tensor(buffer)
        return self._post(
            "irecv", lambda: dist.irecv(tensor, src=self._global[source], group=self._group), tensor, buffer
        )

    def report(self, buffer: Buffer, target: int) -> Request:
        """There is no such channel."""
        raise LocalProtocolError("TorchComm has no reports")

    def poll_report(self, size: int) -> bytes | None:
        """There is no such channel."""
        return None

    def free(self) -> None:
        """Destroy the group if it was made here."""
        if self._own:
            dist.destroy_process_group(self._group)
