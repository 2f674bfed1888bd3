"""Waiting while there is nothing to do, without burning a core and without missing a wake-up.

The steps are 0 (give the processor away), 50 µs, doubling, at most 10 ms. Progress resets them. A notification ends a wait
at once; one that came before the wait began ends it too, because a counter is compared under the lock, never a flag that
somebody may have cleared. One consumer waits; any thread notifies.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from endpoint_lifecycle._record import check_field

FIRST_S = 50e-6
CAP_S = 0.010


class BackoffSchedule:
    """The pure schedule of waits.

    Args:
        first_s: First wait that is not 0, in (0, cap_s].
        cap_s: Longest wait, at most 0.010: an idle loop looks at what cannot notify it that often.
    """

    __slots__ = ("_next_s", "cap_s", "first_s")

    def __init__(self, first_s: float = FIRST_S, cap_s: float = CAP_S) -> None:
        check_field(0 < cap_s <= CAP_S, "cap_s", f"must be in (0, {CAP_S}]")
        check_field(0 < first_s <= cap_s, "first_s", "must be in (0, cap_s]")
        self.first_s = first_s
        self.cap_s = cap_s
        self._next_s = 0.0

    def next_s(self) -> float:
        """The wait to make now; the following one is longer."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self.cap_s) if wait_s else self.first_s
        return wait_s

    def reset(self) -> None:
        """There was progress: begin anew."""
        self._next_s = 0.0


@dataclass(frozen=True, slots=True)
class BackoffStatistics:
    """Counters of one backoff: waits made, how many a notification ended, notifications received."""

    waits: int
    notified: int
    notifications: int


class IdleBackoff:
    """Backoff for a thread's loop.

        while running:
            if loop.step():
                backoff.reset()
            else:
                backoff.wait()

    Whoever gives the loop work calls ``notify()`` after the work can be seen. ``wait`` itself fits where a library asks for
    a ``wait(timeout_s)`` callable.
    """

    def __init__(self, first_s: float = FIRST_S, cap_s: float = CAP_S) -> None:
        self._schedule = BackoffSchedule(first_s, cap_s)
        self._condition = threading.Condition(threading.Lock())
        self._notifications = 0
        self._seen = 0
        self._waits = 0
        self._notified = 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next step of the schedule, or until notified.

        Args:
            timeout_s: Wait at most so long this time (a round is open: 0.0005); None: the schedule alone.

        Returns:
            True when a notification ended it (the schedule begins anew), False when the time did.
        """
        wait_s = self._schedule.next_s()
        if timeout_s is not None and timeout_s < wait_s:
            wait_s = max(timeout_s, 0.0)
        self._waits += 1
        if wait_s == 0.0:
            time.sleep(0)
        with self._condition:
            if self._seen == self._notifications and wait_s > 0.0:
                self._condition.wait(wait_s)
            if self._seen == self._notifications:
                return False
            self._seen = self._notifications
            self._notified += 1
        self._schedule.reset()
        return True

    def notify(self) -> None:
        """End the present wait, or the next one. From any thread, any number of times."""
        with self._condition:
            self._notifications += 1
            self._condition.notify()

    def reset(self) -> None:
        """The loop made progress: wait briefly again. Called by the waiting thread."""
        self._schedule.reset()

    def statistics(self) -> BackoffStatistics:
        """Counters so far."""
        with self._condition:
            return BackoffStatistics(self._waits, self._notified, self._notifications)
