"""torch.distributed: the same exchanges over a process group of CPU tensors (gloo)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from comm_broadcast._comm import Buffer, Request, Window
from comm_broadcast._errors import BroadcastConfigError, LocalProtocolError


class _Work:
    def __init__(self, work: Any, *buffers: object) -> None:
        self._work = work
        self._buffers = buffers

    def test(self) -> bool:
        """See :class:`Request`. An error of the group is raised here."""
        if not self._work.is_completed():
            return False
        self._work.wait()
        return True


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

    def ibcast(self, buffer: Buffer, root: int) -> Request:
        """See :class:`Comm`. Ranks are the group's; torch wants the world's."""
        if memoryview(buffer).nbytes == 0:
            return _Done()
        tensor = _tensor(buffer)
        return _Work(dist.broadcast(tensor, src=self._global[root], group=self._group, async_op=True), tensor, buffer)

    def iallgather(self, send: Buffer, receive: Buffer) -> Request:
        """See :class:`Comm`."""
        whole = _tensor(receive)
        parts = list(whole.chunk(self.size))
        source = _tensor(send)
        return _Work(dist.all_gather(parts, source, group=self._group, async_op=True), source, whole, receive)

    def isend(self, buffer: Buffer, target: int) -> Request:
        """See :class:`Comm`."""
        tensor = _tensor(buffer)
        return _Work(dist.isend(tensor, dst=self._global[target], group=self._group), tensor)

    def irecv(self, buffer: Buffer, source: int) -> Request:
        """See :class:`Comm`."""
        tensor = _tensor(buffer)
        return _Work(dist.irecv(tensor, src=self._global[source], group=self._group), tensor, buffer)

    def report(self, buffer: Buffer, target: int) -> Request:
        """There is no such channel."""
        raise LocalProtocolError("TorchComm has no reports")

    def poll_report(self, size: int) -> bytes | None:
        """There is no such channel."""
        return None

    def shared_window(self, slot_bytes: int) -> Window:
        """There is no such memory.

        Raises:
            BroadcastConfigError: Always.
        """
        raise BroadcastConfigError(f"shared_slot_bytes: torch.distributed has no shared windows, got {slot_bytes}")

    def free(self) -> None:
        """Destroy the group if it was made here."""
        if self._own:
            dist.destroy_process_group(self._group)
