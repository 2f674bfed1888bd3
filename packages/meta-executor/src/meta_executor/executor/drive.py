"""Runs a rank's loop until it leaves: iterations, and waits between them when nothing moved.

A wait ends by notification wherever somebody can notify: the engine's thread at the end of a step, the threads that take in
requests and control frames, and other ranks of this host when they have sent a frame (:mod:`meta_executor.executor.bell`).
What cannot notify (a write by NIXL, a round of the agreement, ranks of other hosts) is polled, ever less often up to a cap.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from meta_executor.executor.loop import RankLoop

#: Longest wait where every end is told (s): ranks of other hosts, which cannot ring, are found by then.
IDLE_CAP_S = 0.025
#: First wait of a row of polls (s); each next one is twice as long, up to what the loop allows.
FIRST_WAIT_S = 0.00005


class Bell(Protocol):
    """How a loop waits: :class:`meta_executor.executor.bell.RankBell`, or a fake."""

    def wait(self, timeout_s: float) -> bool:
        """Wait for a notification, at most so long. Whether there was one, at once if it came before."""
        ...


def drive(
    loop: RankLoop,
    bell: Bell,
    *,
    clock: Callable[[], float] = time.monotonic,
    every_s: float = 1.0,
    periodically: Callable[[float], None] = lambda now_s: None,
) -> None:
    """Iterate until the loop has left or has met a fault.

    Args:
        loop: The rank.
        bell: How to wait; its notification ends a wait at once.
        clock: Monotonic time (s).
        every_s: How often ``periodically`` is called (s).
        periodically: For counters that somebody looks at; gets the time.
    """
    next_s = 0.0
    wait_s = IDLE_CAP_S
    rung = False
    while not loop.left and not loop.fault:
        now_s = clock()
        moved = loop.iterate(now_s)
        cap_s = loop.poll_cap_s
        if moved:
            # All that follows is told, or is polled from the start of a row.
            wait_s = IDLE_CAP_S if cap_s is None else FIRST_WAIT_S
        else:
            # A ring that brought nothing announced what is not whole yet: look again soon.
            wait_s = FIRST_WAIT_S if rung else min(2 * wait_s, IDLE_CAP_S)
            rung = bell.wait(wait_s if cap_s is None else min(wait_s, cap_s))
        if now_s >= next_s:
            next_s = now_s + every_s
            periodically(now_s)
