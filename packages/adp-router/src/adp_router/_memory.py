"""What a router remembers between calls. It evolves from inputs alone, so it is equal on every rank of a group.

Who was given how much (ties go to whoever was given least, so that requests that come one at a time rotate); which rank is kept
free for which starving request (a choice made anew in every call would keep none free); what each rank could take when it was
seen idle (one that could not take a request then will not take it by being kept free); whose turn it is, the homes of
conversations, and counts.

A call works on a draft, and the router takes the draft over by one assignment when the call is done: whatever ends a call in
between, an interrupt too, leaves the memory as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from adp_router._homes import Homes
from adp_router._result import RoutingResult
from adp_router._types import LeftoverReason, RankState, Why


@dataclass(slots=True)
class Totals:
    """Counts since construction."""

    calls: int = 0
    placed: int = 0
    left_over: int = 0
    refused: int = 0
    by_rank: dict[int, int] = field(default_factory=dict)
    by_reason: dict[Why, int] = field(default_factory=dict)
    by_leftover: dict[LeftoverReason, int] = field(default_factory=dict)

    def draft(self) -> Totals:
        """A copy that can be added to."""
        return Totals(
            self.calls, self.placed, self.left_over, self.refused,
            self.by_rank.copy(), self.by_reason.copy(), self.by_leftover.copy(),
        )  # fmt: skip

    def add(self, result: RoutingResult, why_counts: dict[Why, int], placed: Sequence[int]) -> None:
        """Count a call; ``placed``: requests by position."""
        self.calls += 1
        self.placed += sum(why_counts.values())
        self.left_over += len(result.leftovers)
        self.refused += len(result.errors)
        for state, count in zip(result.log.ranks, placed, strict=True):
            self.by_rank[state.rank] = self.by_rank.get(state.rank, 0) + count
        for why, count in why_counts.items():
            self.by_reason[why] = self.by_reason.get(why, 0) + count
        for left in result.leftovers:
            self.by_leftover[left.reason] = self.by_leftover.get(left.reason, 0) + 1


@dataclass(slots=True)
class Memory:
    """See the module.

    Attributes:
        given: By rank: tokens and requests placed there more than on the rank that was given least.
        held: By request id: the rank that is kept free for it.
        idle: By rank: slots, KV blocks and tokens that were free when it was last seen idle, the largest of each.
        cursor: Position whose turn it is, for policies with turns.
        homes: Of conversations.
        totals: Counts; not in the digest.
    """

    given: dict[int, tuple[int, int]] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    idle: dict[int, tuple[int | None, int | None, int | None]] = field(default_factory=dict)
    cursor: int = 0
    homes: Homes = field(default_factory=Homes)
    totals: Totals = field(default_factory=Totals)

    def draft(self) -> Memory:
        """What a call works on; nothing of it is seen here."""
        # The dictionaries are replaced by whoever changes them, never written to.
        return Memory(self.given, self.held, self.idle, self.cursor, self.homes.draft(), self.totals.draft())

    def digest_part(self) -> bytes:
        """Bytes that are equal where the memory is; at a cost that does not grow with the number of conversations."""
        parts = (sorted(self.given.items()), sorted(self.held.items()), sorted(self.idle.items()))
        return repr((*parts, self.cursor, *self.homes.digest_part())).encode()

    def turns(self, ranks: Sequence[RankState]) -> list[int]:
        """Where each position stands among ranks of equal load: who was given least, then the one that stands first."""
        nothing = (0, 0)
        order = sorted(range(len(ranks)), key=lambda p: (self.given.get(ranks[p].rank, nothing), p))
        turns = [0] * len(ranks)
        for turn, position in enumerate(order):
            turns[position] = turn
        return turns

    def surplus(self, rank: int) -> int:
        """Tokens that a rank was given more than the one that was given least."""
        return self.given.get(rank, (0, 0))[0]

    def see_idle(self, ranks: Iterable[RankState]) -> None:
        """Learn from ranks that hold nothing; those that are gone are forgotten."""
        seen = {}
        for state in ranks:
            before = self.idle.get(state.rank)
            if state.request_count == 0 and state.token_count == 0:
                now = (state.free_slots, state.free_kv_blocks, state.free_tokens)
                if now == (None, None, None):
                    continue
                if before is not None:
                    now = tuple(_larger(a, b) for a, b in zip(before, now, strict=True))  # type: ignore[assignment]
                seen[state.rank] = now
            elif before is not None:
                seen[state.rank] = before
        self.idle = seen

    def give(self, ranks: Sequence[RankState], tokens: Sequence[int], requests: Sequence[int]) -> None:
        """Add what was placed, by position. A rank that drains or is new is level with the one that was given least."""
        totals = {}
        for position, state in enumerate(ranks):
            if state.draining:
                continue
            before = self.given.get(state.rank, (0, 0))
            totals[state.rank] = (before[0] + tokens[position], before[1] + requests[position])
        if not totals:
            return
        least_tokens = min(entry[0] for entry in totals.values())
        least_requests = min(entry[1] for entry in totals.values())
        level = ((rank, (a - least_tokens, b - least_requests)) for rank, (a, b) in totals.items())
        self.given = {rank: entry for rank, entry in level if entry != (0, 0)}


def _larger(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)
