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
from meta_executor.executor.recording import LoopRecorder
from meta_executor.executor.transceiver import MOVING_CAP_S

#: Longest wait where every end is told (s); and with ranks of other hosts, which cannot ring.
IDLE_CAP_S = 0.5
SCATTERED_CAP_S = 0.01
#: First wait of a row of polls while bytes move (s); each next one is twice as long, up to what the loop allows.
FIRST_WAIT_S = 0.00005
#: After a ring that brought nothing (s).
AGAIN_S = 0.001


#: Edges of the histograms of turns (s).
TURN_EDGES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


class Turns:
    """How long a loop's iterations took: while one runs, nothing else of its rank does."""

    def __init__(self) -> None:
        self.count = 0
        #: Turns that took longer than each of ``TURN_EDGES_S`` (count).
        self.longer = [0] * len(TURN_EDGES_S)
        #: Turns that took the processor longer: on a machine without a free core the rest is somebody else's.
        self.worked_longer = [0] * len(TURN_EDGES_S)

    def add(self, duration_s: float, worked_s: float) -> None:
        """One more: by the clock, and of the thread's processor time."""
        self.count += 1
        for index, edge_s in enumerate(TURN_EDGES_S):
            if duration_s <= edge_s:
                return
            self.longer[index] += 1
            self.worked_longer[index] += worked_s > edge_s


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
    worked: Callable[[], float] = time.thread_time,
    idle_s: float = IDLE_CAP_S,
    every_s: float = 1.0,
    periodically: Callable[[float], None] = lambda now_s: None,
    turns: Turns | None = None,
    recorder: LoopRecorder | None = None,
) -> None:
    """Iterate until the loop has left or has met a fault.

    Args:
        loop: The rank.
        bell: How to wait; its notification ends a wait at once.
        clock: Monotonic time (s).
        worked: Processor time of this thread (s).
        idle_s: Longest wait with nothing open.
        every_s: How often ``periodically`` is called (s).
        periodically: For counters that somebody looks at; gets the time.
        turns: Counts the iterations.
        recorder: Iterates the loop and notes what each phase took, for trials.
    """
    iterate = loop.iterate if recorder is None else recorder.iterate
    turns = turns or Turns()
    next_s = 0.0
    row_s = FIRST_WAIT_S
    rung = False
    #: Something has moved since the counters were last looked at.
    unseen = True
    while not loop.left and not loop.fault:
        now_s, worked_s = clock(), worked()
        moved = iterate(now_s)
        turns.add(clock() - now_s, worked() - worked_s)
        unseen = unseen or moved
        # Before the wait, which may be long: who asks a rank that has just come to rest gets its last counters.
        if now_s >= next_s:
            next_s = now_s + every_s
            unseen = False
            periodically(now_s)
        if moved:
            row_s = FIRST_WAIT_S
            continue
        cap_s = loop.poll_cap_s
        wait_s = idle_s if cap_s is None else min(cap_s, idle_s)
        if unseen:
            wait_s = min(wait_s, max(next_s - now_s, 0.0))
        if wait_s <= MOVING_CAP_S:
            wait_s = min(row_s, wait_s)
            row_s *= 2
        elif rung:
            # What announced itself is not whole yet (a long broadcast): look once more soon.
            wait_s = min(AGAIN_S, wait_s)
        rung = bell.wait(wait_s)
