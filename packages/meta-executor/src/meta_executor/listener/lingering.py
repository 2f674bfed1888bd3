"""Connections that were refused and may still read why: so many, each for a while, and nobody is let in without such a place.

A client whose data meets a closed socket never sees why it was refused, so a refused connection stays open until its client has
left. That takes a descriptor. Where all places are taken, who comes next waits in the kernel's queue, where it takes none. Who
does not leave has its place for a short time only while others wait for it, so that a flood delays others and keeps nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

#: After a refusal a client may read it for this long (s); for the second while others wait for its place.
LINGER_S, LINGER_LEAST_S = 2.0, 0.2


class Lingering:
    """The places of one listener.

    Args:
        most: So many connections may linger at once (count).
    """

    def __init__(self, most: int) -> None:
        self.most = most
        #: How to end each, and since when it has lingered (s), oldest first.
        self._places: dict[Callable[[], None], float] = {}
        self._left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, end: Callable[[], None], now_s: float) -> bool:
        """A refused connection takes a place until :meth:`leave`. False: there is none.

        Args:
            end: Ends the connection at once; called where its place is wanted by another.
            now_s: Time of the loop (s).
        """
        if not self.room(now_s):
            return False
        self._places[end] = now_s
        return True

    def leave(self, end: Callable[[], None]) -> None:
        """It has gone, by itself or because it was ended. Idempotent."""
        if self._places.pop(end, None) is not None:
            self._left.set()

    def room(self, now_s: float) -> bool:
        """Whether there is a place; one whose connection has had its time is taken from it."""
        if len(self._places) < self.most:
            return True
        end, since_s = next(iter(self._places.items()))
        if now_s < since_s + LINGER_LEAST_S:
            return False
        del self._places[end]
        end()
        return True

    async def place(self) -> None:
        """Wait until there is a place. Each place is waited for so long that its connection has had its time, at most."""
        loop = asyncio.get_running_loop()
        while not self.room(loop.time()):
            self._left.clear()
            oldest_s = next(iter(self._places.values()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(oldest_s + LINGER_LEAST_S):
                    await self._left.wait()
