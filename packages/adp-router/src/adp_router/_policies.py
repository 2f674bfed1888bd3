"""Policies: how what has no target finds its rank. One interface; what they remember is in the memory that they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from adp_router._balance import place_balanced
from adp_router._memory import Memory
from adp_router._route import Placement
from adp_router._types import Why


class Policy(Protocol):
    """Places the rest of a batch. Equal inputs in equal order give equal results on every rank."""

    #: Whether what a rank has cached of a prompt need not be computed there.
    cached: bool

    def place(self, placement: Placement, indices: Sequence[int], memory: Memory) -> None:
        """Put or leave every request."""

    def prefers(self, placement: Placement, index: int, memory: Memory) -> int | None:
        """Position that a request without a target would rather have, when it is placed outside of the policy."""

    def observe(self, placement: Placement, index: int, position: int, memory: Memory) -> None:
        """A request was placed outside of the policy (its target, or starving); the policy may remember it."""


class Balanced:
    """Longest first to the least loaded rank."""

    cached = False

    def place(self, placement: Placement, indices: Sequence[int], memory: Memory) -> None:
        """See the class."""
        place_balanced(placement, indices)

    def prefers(self, placement: Placement, index: int, memory: Memory) -> int | None:
        """None."""
        return None

    def observe(self, placement: Placement, index: int, position: int, memory: Memory) -> None:
        """Remembers nothing."""


class RoundRobin(Balanced):
    """In the order given, to the next rank in turn that can take it."""

    def place(self, placement: Placement, indices: Sequence[int], memory: Memory) -> None:
        """See the class."""
        memory.cursor %= placement.size
        for index in indices:
            position = next_in_turn(placement, index, memory.cursor)
            if position is None:
                placement.leave(index)
                continue
            placement.put(index, position, Why.NEXT_IN_TURN)
            memory.cursor = (position + 1) % placement.size


class PrefixAffinity(Balanced):
    """To the rank where a prompt costs least: what has to be computed, and what waits there already.

    Cost at a rank: uncached tokens + weight x (its load + half of what it was given more than the rank given least). The
    last term spreads a prefix that everybody shares: once a rank was given twice the prefix more than another, computing the
    prefix there as well is the cheaper way on. A cached part below the threshold does not attract.

    Args:
        match_fraction_min: A smaller cached part than this does not attract (0-1).
        load_weight: How much a token that waits counts against one that must be computed.
    """

    cached = True

    def __init__(self, match_fraction_min: float, load_weight: float) -> None:
        self._fraction = match_fraction_min
        self._weight = load_weight

    def place(self, placement: Placement, indices: Sequence[int], memory: Memory) -> None:
        """See the class. Load grows by what has to be computed, not by what is cached."""
        lengths = placement.batch.token_counts
        surplus = [memory.surplus(state.rank) for state in placement.ranks]
        for index in sorted(indices, key=lengths.__getitem__, reverse=True):
            eligible = [p for p in range(placement.size) if placement.takes(index, p)]
            if not eligible:
                placement.leave(index)
                continue
            matches = placement.matches[index] if placement.matches is not None else ()
            most = max((matches[p] for p in eligible), default=0) if matches else 0
            if not most or most <= self._fraction * lengths[index]:
                best = min(eligible, key=placement.load_key)
                why = Why.LEAST_LOADED
            else:
                best = min(eligible, key=lambda p: (self._cost(placement, index, p, surplus), placement.load_key(p)))
                why = Why.CACHED_PREFIX
            before = placement.tokens[best]
            placement.put(index, best, why)
            surplus[best] += placement.tokens[best] - before

    def _cost(self, placement: Placement, index: int, position: int, surplus: list[int]) -> float:
        return placement.cost(index, position) + self._weight * (placement.tokens[position] + surplus[position] / 2)


class ConversationAffinity:
    """A conversation stays on the rank of its first turn while that rank has room; an overflow does not move its home.

    A home that drains, or is not among the ranks any more, is given up: the next turn gets a new one.
    """

    cached = False

    def place(self, placement: Placement, indices: Sequence[int], memory: Memory) -> None:
        """See the class. What has no home yet goes to the next rank in turn that can take it."""
        position_of = {state.rank: p for p, state in enumerate(placement.ranks)}
        memory.cursor %= placement.size
        for index in indices:
            key = self._key(placement, index)
            known = None if key is None else memory.homes.rank_of(key)
            home = None if known is None else position_of.get(known)
            moves = known is not None and (home is None or not placement.open[home])
            if key is not None and home is not None and not moves:
                memory.homes.use(key, placement.ranks[home].rank)
                # A home takes its own beyond the fair share: only its capacities count.
                if home not in placement.held and placement.fits(index, home) is None:
                    placement.put(index, home, Why.HOME)
                    continue
            self._place_away(placement, index, key, memory, overflows=home is not None and not moves, moves=moves)

    def _place_away(
        self, placement: Placement, index: int, key: str | None, memory: Memory, *, overflows: bool, moves: bool
    ) -> None:
        if overflows or moves:
            eligible = [p for p in range(placement.size) if placement.takes(index, p)]
            position = min(eligible, key=placement.load_key, default=None)
        else:
            position = next_in_turn(placement, index, memory.cursor)
        if position is None:
            placement.leave(index)
            return
        placement.put(index, position, Why.OVERFLOW if overflows else Why.REHOMED if moves else Why.NEXT_IN_TURN)
        if not overflows and not moves:
            memory.cursor = (position + 1) % placement.size
        if key is not None and not overflows:
            memory.homes.use(key, placement.ranks[position].rank)

    def prefers(self, placement: Placement, index: int, memory: Memory) -> int | None:
        """Its home."""
        key = self._key(placement, index)
        known = None if key is None else memory.homes.rank_of(key)
        if known is None:
            return None
        return next((p for p, state in enumerate(placement.ranks) if state.rank == known), None)

    def observe(self, placement: Placement, index: int, position: int, memory: Memory) -> None:
        """A placement gives a conversation its home where it has none, or one that drains; a home that is open stays."""
        key = self._key(placement, index)
        if key is None:
            return
        known = memory.homes.rank_of(key)
        stays = known is not None and any(s.rank == known and not s.draining for s in placement.ranks)
        memory.homes.use(key, known if known is not None and stays else placement.ranks[position].rank)

    @staticmethod
    def _key(placement: Placement, index: int) -> str | None:
        keys = placement.batch.conversation_ids
        return None if keys is None else keys[index]


def next_in_turn(placement: Placement, index: int, cursor: int) -> int | None:
    """The first position from a cursor on that takes a request."""
    for step in range(placement.size):
        position = (cursor + step) % placement.size
        if placement.takes(index, position):
            return position
    return None
