"""The core: ranks' loads and what is left of their capacities while one batch of requests is placed.

Every rank of a group runs this on equal inputs and must come to the equal result, because the result is not exchanged: no
clock, no randomness, no hash order decides anything here. Ties go to fewer tokens, then fewer requests, then the rank whose
turn it is. Requests are indices into a batch's columns; ranks are positions in the ranks given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableSequence, Sequence
from operator import itemgetter
from typing import TypeVar

from adp_router._batch import RouteBatch
from adp_router._result import RouteLog, Span
from adp_router._types import Exclusion, LeftoverReason, RankState, Why

T = TypeVar("T")

#: Positions below this are logged as bytes, in which a rank's own are found at once.
_BYTE_END = 256
#: Above every sum of counts that a call could hold.
NO_LIMIT = 1 << 200
_REASON = {
    Exclusion.DRAINING: LeftoverReason.ALL_DRAINING,
    Exclusion.NO_FREE_SLOT: LeftoverReason.NO_FREE_SLOT,
    Exclusion.NO_FREE_KV_BLOCKS: LeftoverReason.NO_FREE_KV_BLOCKS,
    Exclusion.NO_FREE_TOKENS: LeftoverReason.NO_FREE_TOKENS,
    Exclusion.COUNT_LIMIT: LeftoverReason.COUNT_LIMIT,
    Exclusion.HELD_FOR_STARVING: LeftoverReason.HELD_FOR_STARVING,
}
#: From the farthest to the nearest: a request that was refused everywhere is told of the rank that came closest.
_CLOSENESS = {exclusion: place for place, exclusion in enumerate(Exclusion)}


class Placement:
    """Mutable books of one call; ``log`` freezes them.

    Args:
        batch: The requests, checked.
        ranks: States before the call, checked.
        turn: Where each position stands among ranks of equal load.
        as_seed: Count as the seed's router does: tokens of targeted requests load nobody, children take no slots.
        cached: Whether what a rank has cached of a prompt need not be computed there.
    """

    def __init__(
        self,
        batch: RouteBatch,
        ranks: tuple[RankState, ...],
        turn: Sequence[int],
        *,
        as_seed: bool = False,
        cached: bool = False,
    ) -> None:
        self.batch = batch
        self.ranks = ranks
        self.size = len(ranks)
        self.turn = turn
        self.tokens = [state.token_count for state in ranks]
        self.start = [state.request_count for state in ranks]
        self.counts = list(self.start)
        self.slots = [NO_LIMIT if s.free_slots is None else s.free_slots for s in ranks]
        self.blocks = [NO_LIMIT if s.free_kv_blocks is None else s.free_kv_blocks for s in ranks]
        self.room = [NO_LIMIT if s.free_tokens is None else s.free_tokens for s in ranks]
        self.open = [not state.draining for state in ranks]
        #: Sequences at which the count limit takes a rank out, by position; set by ``limit_to``.
        self.limits = [NO_LIMIT] * self.size
        self.as_seed = as_seed
        self.children: Sequence[int] | None = None if as_seed else batch.child_counts
        self.matches = batch.prefix_matches if cached else None
        #: What was placed, in order, as columns: request, position, why.
        self.log_index: list[int] = []
        self.log_position: MutableSequence[int] = bytearray() if self.size <= _BYTE_END else []
        self.log_why: list[Why] = []
        #: Tokens that a rank's load grew by, where these are not the request's, by place in the log.
        self.log_added: dict[int, int] = {}
        self.why_counts: dict[Why, int] = {}
        self.left: list[tuple[int, LeftoverReason]] = []
        #: Positions kept free for a starving request that fits nowhere yet.
        self.held: set[int] = set()
        self._spans: list[Span] = []
        #: Requests last summed up, with their tokens and blocks.
        self._summed: tuple[Sequence[int], int, int] | None = None

    def weight(self, index: int) -> int:
        """Slots that a request takes (count)."""
        return 1 if self.children is None else 1 + self.children[index]

    def need_blocks(self, index: int) -> int:
        """KV blocks that a request takes (count)."""
        column = self.batch.kv_block_counts
        return 0 if column is None else column[index]

    def cost(self, index: int, position: int) -> int:
        """Tokens that a rank would have to compute for a request (count)."""
        length = self.batch.token_counts[index]
        if self.matches is None or not self.matches[index]:
            return length
        return max(length - self.matches[index][position], 0)

    def fits(self, index: int, position: int) -> Exclusion | None:
        """Which capacity a request lacks there now, or None."""
        if not self.open[position]:
            return Exclusion.DRAINING
        if self.slots[position] < self.weight(index):
            return Exclusion.NO_FREE_SLOT
        if self.blocks[position] < self.need_blocks(index):
            return Exclusion.NO_FREE_KV_BLOCKS
        if self.room[position] < self.cost(index, position):
            return Exclusion.NO_FREE_TOKENS
        return None

    def takes(self, index: int, position: int) -> bool:
        """Whether a policy may put a request there: capacity, the count limit, and not kept free for another."""
        return (
            position not in self.held
            and self.counts[position] < self.limits[position]
            and self.fits(index, position) is None
        )

    def load_key(self, position: int) -> tuple[int, int, int]:
        """The order of ranks by load."""
        return self.tokens[position], self.counts[position], self.turn[position]

    def put(self, index: int, position: int, why: Why) -> None:
        """Place a request."""
        cost, weight = self.cost(index, position), self.weight(index)
        added = 0 if self.as_seed and why is Why.TARGET else cost
        if added != self.batch.token_counts[index]:
            self.log_added[len(self.log_index)] = added
        self.log_index.append(index)
        self.log_position.append(position)
        self.log_why.append(why)
        self.why_counts[why] = self.why_counts.get(why, 0) + 1
        self.tokens[position] += added
        self.counts[position] += weight
        self.slots[position] -= weight
        self.blocks[position] -= self.need_blocks(index)
        self.room[position] -= cost

    def note_least_loaded(self, indices: Sequence[int], positions: Sequence[int]) -> None:
        """Log many placements on the least loaded rank at once; the books are the caller's to keep."""
        self.log_index += indices
        self.log_position.extend(positions)
        self.log_why += [Why.LEAST_LOADED] * len(positions)
        if positions:
            self.why_counts[Why.LEAST_LOADED] = self.why_counts.get(Why.LEAST_LOADED, 0) + len(positions)

    def leave(self, index: int, reason: LeftoverReason | None = None) -> None:
        """Keep a request for a later call; without a reason: what the rank lacked that came closest."""
        self.left.append((index, reason or self._reason(index)))

    def _reason(self, index: int) -> LeftoverReason:
        best = Exclusion.DRAINING
        for position in range(self.size):
            lacking = self.fits(index, position)
            if lacking is None:
                lacking = Exclusion.HELD_FOR_STARVING if position in self.held else Exclusion.COUNT_LIMIT
            if _CLOSENESS[lacking] > _CLOSENESS[best]:
                best = lacking
        return _REASON[best]

    def placed_counts(self) -> list[int]:
        """Requests placed by position (count)."""
        if self.children is None:
            return [count - before for count, before in zip(self.counts, self.start, strict=True)]
        found = Counter(self.log_position)
        return [found[p] for p in range(self.size)]

    def take_back(self) -> list[int]:
        """Requests that only the count limit kept out, in order of arrival; they are to be tried again."""
        again = sorted(index for index, reason in self.left if reason is LeftoverReason.COUNT_LIMIT)
        if again:
            self.left = [entry for entry in self.left if entry[1] is not LeftoverReason.COUNT_LIMIT]
        return again

    def unheld(self) -> list[int]:
        """Positions that are open and not kept free for anybody."""
        return [p for p in range(self.size) if self.open[p] and p not in self.held]

    def sums(self, indices: Sequence[int]) -> tuple[int, int]:
        """Tokens and KV blocks of these requests (count); those of the same sequence as last time are remembered."""
        if self._summed is None or self._summed[0] is not indices:
            needs = self.batch.kv_block_counts
            tokens = sum(pick(self.batch.token_counts, indices))
            self._summed = indices, tokens, 0 if needs is None else sum(pick(needs, indices))
        return self._summed[1:]

    def all_fit_together(self, indices: Sequence[int], positions: Sequence[int]) -> bool:
        """Whether no room for tokens or blocks can refuse any of these, whatever goes where: together they fit the tightest."""
        tokens, blocks = self.sums(indices)
        return bool(positions) and all(self.room[p] >= tokens and self.blocks[p] >= blocks for p in positions)

    def able(self, indices: Sequence[int]) -> list[int]:
        """Positions that can take at least one of these requests now, the count limit aside."""
        positions = self.unheld()
        if not indices:
            return []
        if self.children is None and self.all_fit_together(indices, positions):
            return [p for p in positions if self.slots[p] > 0]
        weight = 1 + smallest(self.children, indices)
        need = smallest(self.batch.kv_block_counts, indices)
        room = smallest(self.batch.token_counts, indices) if self.matches is None else 0
        return [
            p
            for p in positions
            if self.slots[p] >= weight
            and self.blocks[p] >= need
            and self.room[p] >= room
            and any(self.fits(index, p) is None for index in indices)
        ]

    # -- limits --------------------------------------------------------------------------------------------------------

    def limit_to(self, limits: list[int]) -> None:
        """From here on a rank takes requests up to these counts."""
        self.limits = limits
        self._spans.append(Span(len(self.log_index), tuple(limits), frozenset(self.held)))

    def log(self) -> RouteLog:
        """The books, frozen, with copies of what the caller could change."""
        batch = self.batch
        return RouteLog(
            ranks=self.ranks,
            turn=tuple(self.turn),
            request_ids=tuple(batch.request_ids),
            token_counts=tuple(batch.token_counts),
            weights=None if self.children is None else tuple(1 + n for n in self.children),
            block_counts=None if batch.kv_block_counts is None else tuple(batch.kv_block_counts),
            matches=None if self.matches is None else tuple(self.matches),
            index=tuple(self.log_index),
            position=_frozen(self.log_position),
            why=tuple(self.log_why),
            added=tuple(self.log_added.items()),
            spans=tuple(self._spans),
        )


def _frozen(positions: MutableSequence[int]) -> Sequence[int]:
    return bytes(positions) if isinstance(positions, bytearray) else tuple(positions)


def fair_limits(placement: Placement, rest: Sequence[int], multiplier: float | None, among: Sequence[int]) -> list[int]:
    """Sequences at which a rank has had enough, by position: a fair share of what this call brings, and as many as others.

    The seed's router knows only the second: there one long request hides behind two short ones, because the rank that holds
    fewer is the only one below the limit. From ranks that hold equally many requests both are the same number. A multiplier of
    None: no limit.

    Args:
        among: Positions that share the rest (at least one): those that can take something.
    """
    if multiplier is None:
        return [NO_LIMIT] * placement.size
    counts, start = placement.counts, placement.start
    arrived = [count - before for count, before in zip(counts, start, strict=True)]
    weights = sum(map(placement.weight, rest)) if placement.children is not None else len(rest)
    share = max(_share(sum(arrived[p] for p in among) + weights, len(among), multiplier), *arrived)
    level = _share(sum(counts[p] for p in among) + weights, len(among), multiplier)
    level = max(level, *(counts[p] for p in range(placement.size) if placement.open[p]), 0)
    return [max(level, before + share) for before in start]


def seed_limits(placement: Placement, rest: Sequence[int]) -> list[int]:
    """The seed's limit: a fair share of all that the ranks hold and are to take, at least what the fullest holds."""
    counts = placement.counts
    most = max(count + slots for count, slots in zip(counts, placement.slots, strict=True))
    fair = max(_share(sum(counts) + len(rest), placement.size, 1.0), max(counts))
    return [min(fair, max(most, max(counts)))] * placement.size


def _share(total: int, size: int, multiplier: float) -> int:
    """A multiple of a fair share, rounded up; no limit where it is beyond all counts (or beyond what a float can hold)."""
    if multiplier == 1.0:
        return -(-total // size)
    return -int(-(multiplier * total) // size) if multiplier * total < NO_LIMIT else NO_LIMIT


def gather(column: Sequence[T], indices: Sequence[int]) -> Sequence[T]:
    """A column's entries at some indices, in their order; many at once."""
    if len(indices) < 2:
        return [column[index] for index in indices]
    many: tuple[T, ...] = itemgetter(*indices)(column)
    return many


def smallest(column: Sequence[int] | None, indices: Sequence[int]) -> int:
    """The smallest entry at some indices; 0 where nothing is said."""
    return 0 if column is None else min(pick(column, indices), default=0)


def largest(column: Sequence[int] | None, indices: Sequence[int]) -> int:
    """The largest entry at some indices; 0 where nothing is said."""
    return 0 if column is None else max(pick(column, indices), default=0)


def pick(column: Sequence[int], indices: Sequence[int]) -> Iterable[int]:
    """A column's entries at some indices, in any order."""
    return column if len(indices) == len(column) else map(column.__getitem__, indices)
