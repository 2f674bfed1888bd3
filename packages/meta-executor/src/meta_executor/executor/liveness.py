"""How long the other ranks of an instance have been silent, as this rank can tell.

Every rank says something at least every ``BEAT_S``. Silence is counted in this rank's own looks, at most ``LOOK_MAX_S`` each:
one that stood still itself does not take its own pause for the others' silence. What silence means is for the caller:
health follows it soon, a verdict late.
"""

from __future__ import annotations

from collections.abc import Iterable

#: A rank that has nothing to say says that, so often (s).
BEAT_S = 2.0
#: An instance with a rank that was not heard for so long does not call itself well (s).
SILENT_S = 6.0
#: Most that one look adds (s).
LOOK_MAX_S = 1.0


class Liveness:
    """See the module.

    Args:
        others: The other ranks.
    """

    def __init__(self, others: Iterable[int]) -> None:
        self._silent_s = dict.fromkeys(others, 0.0)
        self._looked_s: float | None = None

    def look(self, now_s: float, heard: set[int]) -> None:
        """Who was heard since the last look."""
        passed_s = 0.0 if self._looked_s is None else min(max(now_s - self._looked_s, 0.0), LOOK_MAX_S)
        self._looked_s = now_s
        for rank in self._silent_s:
            self._silent_s[rank] = 0.0 if rank in heard else self._silent_s[rank] + passed_s

    def longest(self) -> tuple[int, float]:
        """Who has been silent for longest, and for how long (s); (-1, 0) for a rank alone."""
        return max(self._silent_s.items(), key=lambda item: item[1], default=(-1, 0.0))
