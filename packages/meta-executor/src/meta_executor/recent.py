"""The last few of something: one thread adds, any thread looks, neither waits for the other.

The ring is a list of fixed size. Adding is one assignment into it; looking copies it in one step, so a reader sees each place
either before or after an assignment and never half of one. Each item carries its number, by which a copy that was taken
between two assignments still comes out in order. No lock: the executor's loop adds, and must not be held up by a reader.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """See the module.

    Args:
        kept_max: Items kept (count), >= 1.
    """

    def __init__(self, kept_max: int) -> None:
        if kept_max < 1:
            raise ValueError(f"kept_max must be at least 1, got {kept_max}")
        self._ring: list[tuple[int, T] | None] = [None] * kept_max
        self._next = 0

    def add(self, item: T) -> None:
        """Keep it, in place of the oldest. From one thread only."""
        self._ring[self._next % len(self._ring)] = (self._next, item)
        self._next += 1

    def last(self, count_max: int | None = None) -> tuple[int, list[T]]:
        """From any thread.

        Args:
            count_max: At most so many, the newest (count); None: all that are kept.

        Returns:
            How many were ever added (count), and the newest of them, oldest first.
        """
        held = sorted((entry for entry in self._ring.copy() if entry is not None), key=lambda entry: entry[0])
        if not held:
            return 0, []
        wanted = len(held) if count_max is None else min(max(count_max, 0), len(held))
        return held[-1][0] + 1, [item for _, item in held[len(held) - wanted :]]
