"""Policies: how what has no target finds its rank. One interface; state, where there is any, evolves from inputs only."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Protocol

from adp_router._route import Placement
from adp_router._types import Why


class Policy(Protocol):
    """Places the rest of a batch. Equal inputs in equal order give equal results on every rank."""

    def place(self, placement: Placement, indices: list[int]) -> None:
        """Put or leave every request."""

    def observe_target(self, conversation_id: str, rank: int) -> None:
        """A targeted request of a conversation was placed; a policy with memory may learn from it."""

    def state_digest(self) -> bytes:
        """Bytes that are equal where the policy's memory is."""


class Balanced:
    """Longest first to the least loaded rank."""

    def place(self, placement: Placement, indices: list[int]) -> None:
        """See the class."""
        placement.place_balanced(indices)

    def observe_target(self, conversation_id: str, rank: int) -> None:
        """Remembers nothing."""

    def state_digest(self) -> bytes:
        """Empty: there is no state."""
        return b""


class RoundRobin:
    """In the order given, to the next rank in turn that can take it."""

    def __init__(self) -> None:
        self._cursor = 0

    def place(self, placement: Placement, indices: list[int]) -> None:
        """See the class."""
        size = placement.size
        for index in indices:
            for step in range(size):
                position = (self._cursor + step) % size
                if placement.takes(index, position):
                    placement.put(index, position, Why.NEXT_IN_TURN)
                    self._cursor = (position + 1) % size
                    break
            else:
                placement.leave(index)

    def observe_target(self, conversation_id: str, rank: int) -> None:
        """Targets do not take a turn."""

    def state_digest(self) -> bytes:
        """The cursor."""
        return self._cursor.to_bytes(8, "little")


class PrefixAffinity:
    """To the rank that has most of the prompt cached, weighed against its load.

    Args:
        match_fraction_min: A smaller cached part than this does not attract (0–1).
        load_weight: How much a rank's share of the load counts against what is cached there.
    """

    def __init__(self, match_fraction_min: float, load_weight: float) -> None:
        self._fraction = match_fraction_min
        self._weight = load_weight

    def place(self, placement: Placement, indices: list[int]) -> None:
        """See the class. Load grows by what has to be computed, not by what is cached."""
        batch, size = placement.batch, placement.size
        lengths, all_matches = batch.token_counts, batch.prefix_matches
        nothing = (0,) * size
        for index in sorted(indices, key=lengths.__getitem__, reverse=True):
            eligible = [p for p in range(size) if placement.takes(index, p)]
            if not eligible:
                placement.leave(index)
                continue
            length = lengths[index]
            matches = (all_matches[index] if all_matches is not None else ()) or nothing
            attract = max(matches[p] for p in eligible) > self._fraction * max(length, 1)
            total = max(sum(placement.tokens[p] for p in eligible), length, 1)
            scored = []
            for p in eligible:
                load = placement.tokens[p]
                cost = length - (matches[p] if attract else 0) + self._weight * load / total * length
                scored.append((cost, load, placement.counts[p], _tie(batch.request_ids[index], p), p))
            best = min(scored)[-1]
            why = Why.CACHED_PREFIX if attract and matches[best] else Why.LEAST_LOADED
            placement.put(index, best, why, max(length - matches[best], 0))

    def observe_target(self, conversation_id: str, rank: int) -> None:
        """Remembers nothing."""

    def state_digest(self) -> bytes:
        """Empty: there is no state."""
        return b""


class ConversationAffinity:
    """A conversation stays on the rank of its first turn while that rank has room; an overflow does not move its home.

    Args:
        conversations_max: Homes remembered; the least recently used goes first (count).
    """

    def __init__(self, conversations_max: int) -> None:
        self._max = conversations_max
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._cursor = 0

    def place(self, placement: Placement, indices: list[int]) -> None:
        """See the class. What has no home yet goes to the next rank in turn that can take it."""
        size = placement.size
        position_of = {state.rank: p for p, state in enumerate(placement.ranks)}
        keys = placement.batch.conversation_ids
        for index in indices:
            key = None if keys is None else keys[index]
            home = None
            if key is not None and key in self._homes:
                home = position_of.get(self._homes[key])
                self._homes.move_to_end(key)
            # A home takes its own beyond the fair share: only its capacities count.
            if home is not None and home not in placement.reserved and placement.fits(index, home) is None:
                placement.put(index, home, Why.HOME)
                continue
            eligible = [p for p in range(size) if placement.takes(index, p)]
            if not eligible:
                placement.leave(index)
            elif home is not None:
                position = min(eligible, key=lambda p: (placement.tokens[p], placement.counts[p], p))
                placement.put(index, position, Why.OVERFLOW)
            else:
                position = min(eligible, key=lambda p: (p - self._cursor) % size)
                placement.put(index, position, Why.NEXT_IN_TURN)
                self._cursor = (position + 1) % size
                if key is not None:
                    self._remember(key, placement.ranks[position].rank)

    def observe_target(self, conversation_id: str, rank: int) -> None:
        """A target gives a new conversation its home; a home that exists stays."""
        if conversation_id not in self._homes:
            self._remember(conversation_id, rank)

    def _remember(self, key: str, rank: int) -> None:
        self._homes[key] = rank
        while len(self._homes) > self._max:
            self._homes.popitem(last=False)

    def home_of(self, conversation_id: str) -> int | None:
        """The rank that a conversation is at home on."""
        return self._homes.get(conversation_id)

    def state_digest(self) -> bytes:
        """Homes in order of use, and the cursor."""
        text = "\0".join(f"{key}\1{rank}" for key, rank in self._homes.items())
        return hashlib.blake2b(f"{self._cursor}\0{text}".encode(), digest_size=16).digest()


def _tie(request_id: int, position: int) -> bytes:
    """Spreads ties, the same way in every process."""
    return hashlib.blake2b(f"{request_id}:{position}".encode(), digest_size=8).digest()
