"""Point-to-point frames between the ranks of one instance.

A link never blocks: ``send`` queues, ``poll`` moves what can move. Frames between two ranks arrive in the order they were
sent. What bounds the queues is the executor: steps in flight are limited, new work is limited by admission.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meta_executor.executor.messages import FrameBody, decode_frame, encode_frame

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A frame that has arrived; ``activations`` is float32 (tokens, hidden) when the sender attached them."""

    source_rank: int
    body: FrameBody
    activations: Float32Array | None


class Link(Protocol):
    """One rank's way to the others."""

    rank: int
    size: int

    def send(self, target_rank: int, body: FrameBody, activations: Float32Array | None = None) -> None:
        """Queue a frame. The arrays must not be changed afterwards."""
        ...

    def poll(self) -> list[Arrived]:
        """Move queued frames and return what has arrived, in order per source. Never blocks."""
        ...

    @property
    def unsent_count(self) -> int:
        """Frames that the network has not taken yet (count)."""
        ...

    @property
    def busy(self) -> bool:
        """Frames are on their way in or out that only polling completes."""
        ...

    def close(self) -> None:
        """Cancel receives and forget what was not sent. Idempotent."""
        ...


class LocalWorld:
    """Ranks of one process, for tests and for a world of one: frames go through queues, encoded as on the wire."""

    def __init__(self, size: int) -> None:
        self._queues: dict[tuple[int, int], deque[tuple[int, bytes, Float32Array | None]]] = {
            (source, target): deque() for source in range(size) for target in range(size)
        }
        self.size = size
        #: Set True by a test to keep frames of (source, target) in the queue.
        self.held: set[tuple[int, int]] = set()
        #: Sent so far by (source, target), activations left out: count, bytes.
        self.sent: dict[tuple[int, int], tuple[int, int]] = {}

    def link(self, rank: int) -> LocalLink:
        """The link of one rank."""
        return LocalLink(self, rank)


class LocalLink:
    """See :class:`LocalWorld`."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size

    def send(self, target_rank: int, body: FrameBody, activations: Float32Array | None = None) -> None:
        """Queue a frame."""
        kind, data = encode_frame(body)
        self._world._queues[self.rank, target_rank].append((kind, data, activations))
        count, size = self._world.sent.get((self.rank, target_rank), (0, 0))
        self._world.sent[self.rank, target_rank] = (count + 1, size + len(data))

    def poll(self) -> list[Arrived]:
        """What the others sent."""
        arrived = []
        for source in range(self.size):
            if (source, self.rank) in self._world.held:
                continue
            queue = self._world._queues[source, self.rank]
            while queue:
                kind, data, activations = queue.popleft()
                arrived.append(Arrived(source, decode_frame(kind, data), activations))
        return arrived

    @property
    def unsent_count(self) -> int:
        """Always 0: a queue takes everything."""
        return 0

    @property
    def busy(self) -> bool:
        """Never: what was queued is there."""
        return False

    def close(self) -> None:
        """Nothing to release."""
