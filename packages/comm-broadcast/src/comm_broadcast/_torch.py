"""torch.distributed: the same exchanges over a process group of CPU tensors (gloo); torch is imported when one is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from comm_broadcast._comm import Buffer
from comm_broadcast._errors import MissingLibraryError, TransportError

#: Lists of works whose buffers torch may still read or write: they outlive whoever started them.
_IN_FLIGHT: list[list[Any]] = []
_TAG = 1


class _Nothing:
    """The work of an operation over no bytes."""

    def is_completed(self) -> bool:
        """It has."""
        return True

    def wait(self) -> None:
        """It need not."""


class TorchComm:
    """A process group.

    gloo completes a transfer between two ranks only for whoever waits for it, so what follows the first frames of a gather
    blocks for the time it takes, at most the time-out that the group was made with.

    Args:
        group: A group of its own for this object; None: a new group over the world (collective).

    Raises:
        MissingLibraryError: torch is missing.
    """

    def __init__(self, group: Any = None) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
            self._dist: Any = importlib.import_module("torch.distributed")
        except ImportError as error:
            raise MissingLibraryError(f"TorchComm needs torch: pip install 'comm-broadcast[torch]': {error}") from error
        self._own = group is None
        self._group: Any = self._dist.new_group(backend="gloo") if group is None else group
        self.rank: int = self._dist.get_rank(self._group)
        self.size: int = self._dist.get_world_size(self._group)
        self.posted: list[Any] = []
        self._blocking: set[int] = set()
        _IN_FLIGHT.append(self.posted)

    def _tensor(self, buffer: Buffer) -> Any:
        view = memoryview(buffer)
        return self._torch.frombuffer(memoryview(bytearray(view)) if view.readonly else view, dtype=self._torch.uint8)

    def _post(self, operation: str, start: Callable[..., Any], *arguments: Iterable[Any]) -> None:
        try:
            # torch's call and the listing of its work are one call into C: no interrupt comes between them.
            self.posted.extend(map(start, *arguments))
        except RuntimeError as error:
            raise TransportError(operation, self.rank, error) from error

    def ibcast(self, buffer: Buffer, root: int) -> None:
        """See :class:`Comm`. Ranks are the group's."""
        if memoryview(buffer).nbytes == 0:
            self.posted.append(_Nothing())
            return
        options = self._dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._post("broadcast", self._group.broadcast, ([self._tensor(buffer)],), (options,))

    def iallgather(self, send: Buffer, receive: Buffer) -> None:
        """See :class:`Comm`."""
        parts = list(self._tensor(receive).chunk(self.size))
        self._post("all_gather", self._group.allgather, ([parts],), ([self._tensor(send)],))

    def igather(self, send: Buffer, receive: Buffer | None, root: int) -> None:
        """See :class:`Comm`."""
        options = self._dist.GatherOptions()
        options.rootRank = root
        parts = [] if receive is None else [list(self._tensor(receive).chunk(self.size))]
        self._post("gather", self._group.gather, (parts,), ([self._tensor(send)],), (options,))

    def isend(self, buffer: Buffer, target: int) -> None:
        """See :class:`Comm`."""
        self._blocking.add(len(self.posted))
        self._post("send", self._group.send, ([self._tensor(buffer)],), (target,), (_TAG,))

    def irecv(self, buffer: Buffer, source: int) -> None:
        """See :class:`Comm`."""
        self._blocking.add(len(self.posted))
        self._post("recv", self._group.recv, ([self._tensor(buffer)],), (source,), (_TAG,))

    def test(self, index: int) -> bool:
        """See :class:`Comm`."""
        work = self.posted[index]
        try:
            if index not in self._blocking and not work.is_completed():
                return False
            work.wait()
        except RuntimeError as error:
            raise TransportError("wait", self.rank, error) from error
        # It is asked again after an interrupt, and gloo's transfers can be waited for once.
        self.posted[index] = _Nothing()
        return True

    def forget(self, keep: int) -> None:
        """See :class:`Comm`. What is kept are collectives: no transfer between two ranks."""
        self._blocking.clear()
        del self.posted[: len(self.posted) - keep]

    def free(self) -> None:
        """Destroy the group if it was made here."""
        if self._own:
            self._own = False
            self._dist.destroy_process_group(self._group)
        _IN_FLIGHT[:] = [listed for listed in _IN_FLIGHT if listed is not self.posted]
