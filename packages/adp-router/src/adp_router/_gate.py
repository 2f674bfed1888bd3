"""The gate: prefill waits a little until every attention-DP rank has some, because a step takes as long as its fullest rank.

Its counters advance only in steps in which work is really held back, so a lone prefill waits at most ``wait_steps_max`` steps,
and never for work that nobody has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adp_router._check import plain_integer
from adp_router._config import take
from adp_router._errors import RankStateError
from adp_router._text import shown


@dataclass(frozen=True)
class GateConfig:
    """Settings.

    Attributes:
        wait_steps_max: Longest wait for ranks without prefill (steps, >= 0; 0: the gate is always open).
        batching_steps: Longest wait for fuller batches once every rank has prefill (steps, >= 0).
    """

    wait_steps_max: int = 50
    batching_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("wait_steps_max", "batching_steps"):
            take(self, name, plain_integer, "an integer of at least 0", lambda value: value >= 0)


@dataclass(frozen=True)
class GateRank:
    """One rank's state before a step (counts): prefill ready to run, sequences decoding, room for more of them."""

    prefill_count: int
    decode_count: int
    decode_room: int


@dataclass(frozen=True)
class GateStatistics:
    """Counts since construction (steps)."""

    released: int
    held: int
    timed_out: int


class DpGate:
    """Decides per step, equally on every rank, whether prefill may run. Feed it equal states in equal order."""

    def __init__(self, config: GateConfig | None = None) -> None:
        self.config = config or GateConfig()
        self._waited = 0
        self._batched = 0
        self._released = self._held = self._timed_out = 0

    def step(self, ranks: Sequence[GateRank]) -> bool:
        """True: prefill may run in this step. With no prefill anywhere nothing is held and nothing is counted.

        Raises:
            RankStateError: A count that is not an integer; names position, field and value. Nothing was counted.
        """
        for position, rank in enumerate(ranks):
            for name in ("prefill_count", "decode_count", "decode_room"):
                if plain_integer(getattr(rank, name, None)) is None:
                    raise RankStateError(
                        f"ranks[{position}].{name}: want an integer, got {shown(getattr(rank, name, rank))}"
                    )
        if not any(rank.prefill_count for rank in ranks):
            return True
        everyone = all(rank.prefill_count > 0 for rank in ranks)
        # A rank without room for a new decode cannot use its prefill; one without decodes is idle while others wait.
        usable = everyone and all(rank.decode_room > 0 for rank in ranks)
        idle = any(rank.decode_count == 0 for rank in ranks)
        if usable:
            self._waited = 0
            if idle or self._batched >= self.config.batching_steps:
                return self._release()
            self._batched += 1
            self._held += 1
            return False
        if idle or self._waited >= self.config.wait_steps_max:
            if not idle:
                self._timed_out += 1
            return self._release()
        self._waited += 1
        self._held += 1
        return False

    def _release(self) -> bool:
        self._waited = self._batched = 0
        self._released += 1
        return True

    def statistics(self) -> GateStatistics:
        """A frozen snapshot."""
        return GateStatistics(self._released, self._held, self._timed_out)
