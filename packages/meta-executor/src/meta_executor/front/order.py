"""The order of context legs: as requests arrive, or, for trials, each group of them turned round.

In generation-first the two instances see requests independently and may see them in different orders. A deployment gets that
from its network; a trial gets it from here, as unlike as it can be: of every ``group`` context legs the last goes first. A
group that does not fill up goes after ``patience_s``.
"""

from __future__ import annotations

import asyncio


class LegOrder:
    """Hands out turns to send a leg.

    Args:
        group: Legs that are turned round together (count, >= 1); 1 keeps the order of arrival.
        patience_s: Longest time that a leg waits for its group to fill up (s).
    """

    def __init__(self, group: int, patience_s: float = 0.5) -> None:
        self._group = group
        self._patience_s = patience_s
        self._waiting: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def turn(self) -> None:
        """Returns when this leg may be sent. A cancelled wait gives its place up."""
        if self._group <= 1:
            return
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.append(mine)
        if len(self._waiting) >= self._group:
            self._release()
        elif self._timer is None:
            self._timer = loop.call_later(self._patience_s, self._release)
        await mine

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for future in reversed(waiting):
            if not future.done():
                future.set_result(None)
