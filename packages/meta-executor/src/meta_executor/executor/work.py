"""How new work reaches every rank, in one order.

Down a pipeline it goes point to point, each rank forwarding at once (:class:`ChainWork`). Over an attention-DP group rank 0
broadcasts it with a non-blocking handle (:class:`BroadcastWork`): each rank keeps one receive posted and tests it, so a rank
that is late costs the others nothing. Both deliver to rank 0 itself through the same queue, never by a re-entrant call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from comm_broadcast import BroadcastConfig, Broadcaster, Handle
from meta_executor.executor.links import Link
from meta_executor.executor.messages import Admit, Leave, Work, WorkItem
from meta_executor.executor.request import decoder, encoder

#: Items of one broadcast (count): bounds how long the others are kept from their loop.
ITEMS_PER_BROADCAST_MAX = 256
#: Rank 0 waits for nobody: a rank that is late by a few steps holds up neither it nor the others.
BROADCAST_CONFIG = BroadcastConfig(ahead_max=4)


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


class BroadcastRecord(msgspec.Struct, frozen=True):
    """One item of a broadcast: its fields, and a request's token ids as a vector of their own (int32, shape (tokens,))."""

    item: bytes
    token_ids: np.ndarray


class BroadcastWork:
    """Non-blocking broadcasts from rank 0.

    Args:
        broadcaster: ``comm_broadcast.Broadcaster`` with root 0, ``TokenBatchCodec(BroadcastRecord)`` and
            ``BROADCAST_CONFIG``; None for one rank.
        rank: This rank.
        ring: Rank 0: ends the others' waits, because a broadcast has begun.
    """

    def __init__(self, broadcaster: Broadcaster | None, rank: int, ring: Callable[[], None] = lambda: None) -> None:
        self._broadcaster = broadcaster
        self._rank = rank
        self._ring = ring
        self._outbox: deque[WorkItem] = deque()
        self._items: deque[WorkItem] = deque()
        self._handle: Handle[list[BroadcastRecord]] | None = None
        self._leaving = False
        self._under_way = False

    def publish(self, items: Items[WorkItem]) -> None:
        """Decide: rank 0 takes its own items now, the others when the broadcast has come."""
        self._items.extend(items)
        if self._broadcaster is not None:
            self._outbox.extend(items)
            self._advance(self._broadcaster)

    def deliver(self, body: Work) -> None:
        """Work never comes over the link here."""
        raise RuntimeError("new work came point to point in an attention-DP group")

    def take(self) -> list[WorkItem]:
        """Complete what has arrived, start what is next."""
        if self._broadcaster is not None:
            while self._advance(self._broadcaster):
                pass
        items = list(self._items)
        self._items.clear()
        return items

    def _advance(self, broadcaster: Broadcaster) -> bool:
        if self._handle is None:
            if self._rank == 0:
                if not self._outbox:
                    self._under_way = not broadcaster.progress()
                    return False
                count = min(len(self._outbox), ITEMS_PER_BROADCAST_MAX)
                batch = [_record_of(self._outbox.popleft()) for _ in range(count)]
                self._handle = broadcaster.start_broadcast(batch)
                self._ring()
            elif self._leaving:
                return False
            else:
                # Posted before it is needed: testing it is all that a late root costs this rank.
                self._handle = broadcaster.start_broadcast(None)
        if not self._handle.test():
            return False
        records = self._handle.result()
        self._handle = None
        if self._rank != 0:
            for record in records:
                item = _item_of(record)
                self._items.append(item)
                self._leaving |= isinstance(item, Leave)
        return True

    @property
    def busy(self) -> bool:
        """A broadcast of rank 0 has not come to all ranks yet."""
        return self._rank == 0 and (self._handle is not None or bool(self._outbox) or self._under_way)

    def close(self) -> None:
        """Close the broadcaster: collective, after the Leave item."""
        if self._broadcaster is not None:
            self._broadcaster.close()


_ITEM_ENCODER = encoder()
_ITEM_DECODER: msgspec.msgpack.Decoder[WorkItem] = decoder(WorkItem)  # type: ignore[arg-type]
_NO_TOKENS: npt.NDArray[np.int32] = np.empty(0, np.int32)


def _record_of(item: WorkItem) -> BroadcastRecord:
    if isinstance(item, Admit):
        bare = msgspec.structs.replace(item.request, token_ids=_NO_TOKENS)
        return BroadcastRecord(
            _ITEM_ENCODER.encode(msgspec.structs.replace(item, request=bare)), item.request.token_ids
        )
    return BroadcastRecord(_ITEM_ENCODER.encode(item), _NO_TOKENS)


def _item_of(record: BroadcastRecord) -> WorkItem:
    item = _ITEM_DECODER.decode(record.item)
    if isinstance(item, Admit):
        # The broadcast's block is used again once no view of it lives; the request lives longer, so it gets its own copy.
        request = msgspec.structs.replace(item.request, token_ids=record.token_ids.copy())
        return msgspec.structs.replace(item, request=request)
    return item
