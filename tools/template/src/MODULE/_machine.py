"""The core: counts what arrives, within a bound."""

from __future__ import annotations

from dataclasses import dataclass

from MODULE._errors import LocalProtocolError
from MODULE._events import Added, ReportCount


@dataclass(frozen=True)
class Statistics:
    """What happened so far (counts)."""

    total: int
    events: int


class Counter:
    """Counts items.

    Args:
        count_max: Most items that may be counted (count, >= 1).

    Raises:
        LocalProtocolError: ``count_max`` is below 1.
    """

    def __init__(self, *, count_max: int) -> None:
        if count_max < 1:
            raise LocalProtocolError(f"count_max must be at least 1, got {count_max}")
        self._count_max = count_max
        self._total = 0
        self._events = 0

    def step(self, event: Added, now_s: float) -> tuple[ReportCount, ...]:
        """Take one event in; the effects are to be performed in order.

        Raises:
            LocalProtocolError: ``event.count`` is below 1 or goes beyond ``count_max``. Nothing is changed.
        """
        if event.count < 1:
            raise LocalProtocolError(f"count must be at least 1, got {event.count}")
        if self._total + event.count > self._count_max:
            raise LocalProtocolError(f"count {event.count} on top of {self._total} goes beyond {self._count_max}")
        self._total += event.count
        self._events += 1
        return (ReportCount(self._total),)

    def statistics(self) -> Statistics:
        """A frozen snapshot."""
        return Statistics(self._total, self._events)
