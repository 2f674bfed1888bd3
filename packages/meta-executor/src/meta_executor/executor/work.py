"""How new work reaches every rank, in one order.

Down a pipeline it goes point to point, each rank forwarding at once (:class:`ChainWork`). Over an attention-DP group rank 0
broadcasts it with a non-blocking handle (:class:`BroadcastWork`): each rank keeps one receive posted and tests it, so a rank
that is late costs the others nothing. Both deliver to rank 0 itself through the same queue, never by a re-entrant call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from typing import Any, Protocol

from meta_executor.executor.links import Link
from meta_executor.executor.messages import FrameKind, Leave, Work, WorkItem, decode_frame, encode_frame

#: Items of one broadcast (count): bounds how long the others are kept from their loop.
ITEMS_PER_BROADCAST_MAX = 256


class WorkChannel(Protocol):
    """One rank's end."""

    def publish(self, items: Items[WorkItem]) -> None:
        """Rank 0: decide these, in this order."""
        ...

    def deliver(self, body: Work) -> None:
        """A frame of new work has come over the link."""
        ...

    def take(self) -> list[WorkItem]:
        """What was decided since the last call, in order. Never blocks."""
        ...

    @property
    def busy(self) -> bool:
        """Items are on their way from this rank."""
        ...

    def close(self) -> None:
        """Nothing more will come. Never blocks."""
        ...


class ChainWork:
    """Point to point down the ranks."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._items: deque[WorkItem] = deque()

    def publish(self, items: Items[WorkItem]) -> None:
        """Decide and send."""
        if items:
            self.deliver(Work(tuple(items)))

    def deliver(self, body: Work) -> None:
        """Forward at once, then take in."""
        if self._link.rank + 1 < self._link.size:
            self._link.send(self._link.rank + 1, body)
        self._items.extend(body.items)

    def take(self) -> list[WorkItem]:
        """What has come."""
        items = list(self._items)
        self._items.clear()
        return items

    @property
    def busy(self) -> bool:
        """Frames leave at once."""
        return False

    def close(self) -> None:
        """Nothing to release."""


class BroadcastWork:
    """Non-blocking broadcasts from rank 0.

    Args:
        broadcaster: ``comm_broadcast.Broadcaster`` (or one with the same ``start_broadcast``) with root 0.
        rank: This rank.
        size: Ranks of the group.
    """

    def __init__(self, broadcaster: Any, rank: int, size: int) -> None:
        self._broadcaster = broadcaster
        self._rank = rank
        self._size = size
        self._outbox: deque[WorkItem] = deque()
        self._items: deque[WorkItem] = deque()
        self._handle: Any = None
        self._leaving = False

    def publish(self, items: Items[WorkItem]) -> None:
        """Decide; the next :meth:`take` starts the broadcast."""
        if self._size == 1:
            self._items.extend(items)
        else:
            self._outbox.extend(items)

    def deliver(self, body: Work) -> None:
        """Work never comes over the link here."""
        raise RuntimeError("new work came point to point in an attention-DP group")

    def take(self) -> list[WorkItem]:
        """Complete what has arrived, start what is next."""
        if self._size > 1:
            while self._advance():
                pass
        items = list(self._items)
        self._items.clear()
        return items

    def _advance(self) -> bool:
        if self._handle is None:
            if self._rank != 0:
                if self._leaving:
                    return False
                self._handle = self._broadcaster.start_broadcast(None)
            elif self._outbox:
                count = min(len(self._outbox), ITEMS_PER_BROADCAST_MAX)
                batch = tuple(self._outbox.popleft() for _ in range(count))
                # Rank 0 takes its own items when it decides them; the others follow.
                self._items.extend(batch)
                self._handle = self._broadcaster.start_broadcast(encode_frame(Work(batch))[1])
            else:
                return False
        if not self._handle.test():
            return False
        data = self._handle.result()
        self._handle = None
        if self._rank != 0:
            body = decode_frame(FrameKind.WORK, data)
            if not isinstance(body, Work):
                raise TypeError("a broadcast that is no new work")
            self._items.extend(body.items)
            self._leaving = any(isinstance(item, Leave) for item in body.items)
        return True

    @property
    def busy(self) -> bool:
        """A broadcast of rank 0 is not complete yet."""
        return self._rank == 0 and (self._handle is not None or bool(self._outbox))

    def close(self) -> None:
        """Every broadcast was completed by the Leave item."""
