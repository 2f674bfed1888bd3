"""The gate: prefill waits a little until every attention-DP rank has some, because a step takes as long as its fullest rank.

Its counters advance only in steps in which work is really held back, so a lone prefill waits at most ``wait_steps_max`` steps,
and never for work that nobody has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adp_router._config import take
from adp_router._errors import RankStateError, RouterConfigError
from adp_router._plain import plain_integer
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
        if config is not None and not isinstance(config, GateConfig):
            raise RouterConfigError(f"config must be a GateConfig, got {shown(config)}")
        self.config = config or GateConfig()
        self._state = _State()

    def step(self, ranks: Sequence[GateRank]) -> bool:
        """True: prefill may run in this step. With no prefill anywhere nothing is held and nothing is counted.

        What a step counts is taken over by one assignment at its end: a step that raises has changed nothing.

        Raises:
            RankStateError: Not a sequence, or a count that is not an integer or is negative (only ``decode_room`` may be,
                where a rank is over its limit); names position, field and value. Nothing was counted.
        """
        counts = _counts(ranks)
        if not any(prefill for prefill, _, _ in counts):
            return True
        everyone = all(prefill > 0 for prefill, _, _ in counts)
        # A rank without room for a new decode cannot use its prefill; one without decodes is idle while others wait.
        usable = everyone and all(room > 0 for _, _, room in counts)
        idle = any(decode == 0 for _, decode, _ in counts)
        state = self._state
        if usable:
            opens = idle or state.batched >= self.config.batching_steps
            after = state._replace(waited=0, batched=state.batched + 1)
        else:
            opens = idle or state.waited >= self.config.wait_steps_max
            after = state._replace(waited=state.waited + 1)
        if opens:
            self._state = state._replace(
                waited=0, batched=0, released=state.released + 1, timed_out=state.timed_out + (not usable and not idle)
            )
        else:
            self._state = after._replace(held=state.held + 1)
        return opens

    def statistics(self) -> GateStatistics:
        """A frozen snapshot."""
        return GateStatistics(self._state.released, self._state.held, self._state.timed_out)


class _State(NamedTuple):
    """Steps: waited and batched since the gate opened; counts since construction."""

    waited: int = 0
    batched: int = 0
    released: int = 0
    held: int = 0
    timed_out: int = 0


def _counts(ranks: Sequence[GateRank]) -> list[tuple[int, int, int]]:
    """Plain counts per rank; everything is read once, for a generator and an engine's property can be."""
    try:
        given = list(ranks)
    except Exception as error:
        raise RankStateError(f"ranks: want a sequence of GateRank, got {shown(ranks)}") from error
    return [
        (_count(p, r, "prefill_count"), _count(p, r, "decode_count"), _count(p, r, "decode_room"))
        for p, r in enumerate(given)
    ]


def _count(position: int, rank: GateRank, name: str) -> int:
    value = getattr(rank, name, rank)
    count = plain_integer(value)
    if count is None:
        raise RankStateError(f"ranks[{position}].{name}: want an integer, got {shown(value)}")
    if count < 0 and name != "decode_room":
        raise RankStateError(f"ranks[{position}].{name}: must not be negative, got {shown(count)}")
    return count
