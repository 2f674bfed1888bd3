"""Runs a rank's loop until it leaves: iterations, and waits between them when nothing moved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from meta_executor.executor.loop import RankLoop

#: Longest wait with nothing open, and with a step, a round or a transfer of ours open (s).
IDLE_CAP_S = 0.010
BUSY_CAP_S = 0.0005


class Backoff(Protocol):
    """``endpoint_lifecycle.IdleBackoff``, or a fake."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a notification, ever longer, at most so long."""
        ...

    def reset(self) -> None:
        """Something moved."""
        ...


def drive(
    loop: RankLoop,
    backoff: Backoff,
    *,
    clock: Callable[[], float] = time.monotonic,
    every_s: float = 1.0,
    periodically: Callable[[float], None] = lambda now_s: None,
) -> None:
    """Iterate until the loop has left or has met a fault.

    Args:
        loop: The rank.
        backoff: How to wait; its notification ends a wait at once.
        clock: Monotonic time (s).
        every_s: How often ``periodically`` is called (s).
        periodically: For counters that somebody looks at; gets the time.
    """
    next_s = 0.0
    while not loop.left and not loop.fault:
        now_s = clock()
        if loop.iterate(now_s):
            backoff.reset()
        else:
            backoff.wait(BUSY_CAP_S if loop.busy else IDLE_CAP_S)
        if now_s >= next_s:
            next_s = now_s + every_s
            periodically(now_s)
