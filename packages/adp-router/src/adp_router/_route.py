"""The core: ranks' loads and what is left of their capacities while one batch of requests is placed.

Every rank of a group runs this on equal inputs and must come to the equal result, because the result is not exchanged: no
clock, no randomness, no hash order decides anything here. Ties go to fewer tokens, then fewer requests, then the rank that
stands first. Requests are indices into a batch's columns; ranks are positions in the ranks given.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeVar

from adp_router._batch import RouteBatch
from adp_router._types import LeftoverReason, RankState, Why

T = TypeVar("T")

NO_LIMIT = 1 << 62
#: Reasons from the farthest to the nearest: a request that was refused everywhere is told of the rank that came closest.
_BY_CLOSENESS = list(LeftoverReason)
_DRAINING, _NO_SLOT, _NO_BLOCKS, _NO_TOKENS, _LIMIT, _HELD = map(
    _BY_CLOSENESS.index,
    (
        LeftoverReason.ALL_DRAINING, LeftoverReason.NO_FREE_SLOT, LeftoverReason.NO_FREE_KV_BLOCKS,
        LeftoverReason.NO_FREE_TOKENS,
        LeftoverReason.COUNT_LIMIT, LeftoverReason.HELD_FOR_STARVING,
    ),
)  # fmt: skip
#: Shortest stretch without a look at the limit that pays for finding it (requests), and how many are placed with looks.
_STRETCH_MIN = 16
_CHECKED = 128
#: Bits of a position in a key of the heap, where they suffice: whole bytes are picked out of many keys at once.
_POSITION_BITS = 8
_LOWEST_BYTE = 0 if sys.byteorder == "little" else 7


class Placement:
    """Mutable books of one call.

    Args:
        batch: The requests.
        ranks: States before the call.
        count_pinned_tokens: Whether tokens of targeted requests load their rank (the seed's router ignores them).
        count_children: Whether children take slots (the seed's router counts a request as one).
    """

    def __init__(
        self, batch: RouteBatch, ranks: Sequence[RankState], *, count_pinned_tokens: bool, count_children: bool
    ) -> None:
        self.batch = batch
        self.ranks = ranks
        self.size = len(ranks)
        self.tokens = [state.token_count for state in ranks]
        self.counts = [state.request_count for state in ranks]
        self.slots = [NO_LIMIT if s.free_slots is None else s.free_slots for s in ranks]
        self.blocks = [NO_LIMIT if s.free_kv_blocks is None else s.free_kv_blocks for s in ranks]
        self.room = [NO_LIMIT if s.free_tokens is None else s.free_tokens for s in ranks]
        self.open = [not state.draining for state in ranks]
        self.limit = NO_LIMIT
        self.count_pinned_tokens = count_pinned_tokens
        self.children = batch.child_counts if count_children else None
        #: What was placed, in order, as columns: request, position, why, tokens added.
        self.log_index: list[int] = []
        self.log_position: list[int] = []
        self.log_why: list[Why] = []
        self.log_added: list[int] = []
        self.why_counts: dict[Why, int] = {}
        self.left: list[tuple[int, LeftoverReason]] = []
        #: Positions kept free for a starving request that fits nowhere yet.
        self.reserved: set[int] = set()

    def weight(self, index: int) -> int:
        """Slots that a request takes (count)."""
        return 1 if self.children is None else 1 + self.children[index]

    def need_blocks(self, index: int) -> int:
        """KV blocks that a request takes (count)."""
        column = self.batch.kv_block_counts
        return 0 if column is None else column[index]

    def fits(self, index: int, position: int) -> LeftoverReason | None:
        """Why a request cannot go there now, or None."""
        if not self.open[position]:
            return LeftoverReason.ALL_DRAINING
        if self.slots[position] < self.weight(index):
            return LeftoverReason.NO_FREE_SLOT
        if self.blocks[position] < self.need_blocks(index):
            return LeftoverReason.NO_FREE_KV_BLOCKS
        if self.room[position] < self.batch.token_counts[index]:
            return LeftoverReason.NO_FREE_TOKENS
        return None

    def takes(self, index: int, position: int) -> bool:
        """Whether a policy may put a request there: capacity, the count limit, and no reservation."""
        return (
            position not in self.reserved and self.counts[position] < self.limit and self.fits(index, position) is None
        )

    def put(self, index: int, position: int, why: Why, load: int | None = None) -> None:
        """Place a request. ``load``: tokens that it adds to the rank's load, when that is not its length."""
        length = self.batch.token_counts[index]
        added = length if load is None else load
        weight = self.weight(index)
        self.log_index.append(index)
        self.log_position.append(position)
        self.log_why.append(why)
        self.log_added.append(added)
        self.why_counts[why] = self.why_counts.get(why, 0) + 1
        self.tokens[position] += added
        self.counts[position] += weight
        self.slots[position] -= weight
        self.blocks[position] -= self.need_blocks(index)
        self.room[position] -= length

    def leave(self, index: int, reason: LeftoverReason | None = None) -> None:
        """Keep a request for a later call; without a reason: the capacity that was lacking last."""
        self.left.append((index, reason or self._reason(index)))

    # -- targets -------------------------------------------------------------------------------------------------------

    def place_targets(self, indices: list[int], position_of: dict[int, int], *, strict_may_move: bool) -> list[int]:
        """Strict targets first, then wishes, each group in the order given. Returns what still needs a rank.

        A strict request whose target cannot take it stays over; a wish (or, as the seed's router does, any) moves on. Moved
        requests keep the order in which they were tried: strict ones first.
        """
        targets = self.batch.target_ranks
        if targets is None:
            return indices
        strict = self.batch.strict
        first = [i for i in indices if strict is not None and strict[i]]
        second = [i for i in indices if strict is None or not strict[i]]
        rest: list[int] = []
        for index in first + second:
            target = targets[index]
            if target is None or target < 0:
                rest.append(index)
                continue
            position = position_of[target]
            refused = self.fits(index, position)
            if refused is None:
                self.put(index, position, Why.TARGET, None if self.count_pinned_tokens else 0)
            elif strict is not None and strict[index] and not strict_may_move:
                draining = refused is LeftoverReason.ALL_DRAINING
                self.leave(index, LeftoverReason.TARGET_DRAINING if draining else LeftoverReason.TARGET_FULL)
            else:
                rest.append(index)
        return rest

    # -- starving ------------------------------------------------------------------------------------------------------

    def place_starving(self, indices: list[int], starvation_rounds: int) -> list[int]:
        """Requests that waited too long go first, oldest first; one that fits nowhere keeps the nearest rank free."""
        waited = self.batch.waited_rounds
        if waited is None:
            return indices
        starving = sorted((i for i in indices if waited[i] >= starvation_rounds), key=lambda i: -waited[i])
        for index in starving:
            free = [p for p in range(self.size) if p not in self.reserved]
            fitting = [p for p in free if self.fits(index, p) is None]
            if fitting:
                self.put(index, min(fitting, key=lambda p: (self.tokens[p], self.counts[p], p)), Why.STARVING)
                continue
            able = [p for p in free if self.open[p]]
            if able:
                # The rank that lacks least of what it needs: it can start there soonest.
                self.reserved.add(min((self._shortage(index, p), p) for p in able)[1])
            self.leave(index)
        return [i for i in indices if waited[i] < starvation_rounds] if starving else indices

    def _shortage(self, index: int, position: int) -> tuple[int, int, int]:
        return (
            max(0, self.weight(index) - self.slots[position]),
            max(0, self.need_blocks(index) - self.blocks[position]),
            max(0, self.batch.token_counts[index] - self.room[position]),
        )

    def _reason(self, index: int) -> LeftoverReason:
        """The reason of the rank that came closest."""
        weight, need, length = self.weight(index), self.need_blocks(index), self.batch.token_counts[index]
        best = _DRAINING
        for position in range(self.size):
            if not self.open[position]:
                continue
            if self.slots[position] < weight:
                closeness = _NO_SLOT
            elif self.blocks[position] < need:
                closeness = _NO_BLOCKS
            elif self.room[position] < length:
                closeness = _NO_TOKENS
            else:
                closeness = _HELD if position in self.reserved else _LIMIT
            if closeness > best:
                best = closeness
        return _BY_CLOSENESS[best]

    def take_back(self) -> list[int]:
        """Requests that only the count limit kept out, in order of arrival; they are to be tried again."""
        again = sorted(index for index, reason in self.left if reason is LeftoverReason.COUNT_LIMIT)
        if again:
            self.left = [entry for entry in self.left if entry[1] is not LeftoverReason.COUNT_LIMIT]
        return again

    def able(self, indices: Sequence[int]) -> list[int]:
        """Positions that can take at least one of these requests now, the count limit aside."""
        if not indices:
            return []
        lengths, needs, children = self.batch.token_counts, self.batch.kv_block_counts, self.children
        weight = 1 if children is None else 1 + min(_pick(children, indices))
        # Looking for the smallest need costs a pass: only where there is such a capacity, and not all of them fit together.
        room = need = 0
        if (tightest := min(self.room)) < NO_LIMIT and sum(_pick(lengths, indices)) > tightest:
            room = min(_pick(lengths, indices))
        if needs is not None and (tightest := min(self.blocks)) < NO_LIMIT and sum(_pick(needs, indices)) > tightest:
            need = min(_pick(needs, indices))
        return [
            p
            for p in range(self.size)
            if p not in self.reserved
            and self.open[p]
            and self.slots[p] >= weight
            and self.blocks[p] >= need
            and self.room[p] >= room
            and any(self.fits(index, p) is None for index in indices)
        ]

    # -- the rest ------------------------------------------------------------------------------------------------------

    def place_balanced(self, indices: list[int]) -> None:
        """Longest first, each to the least loaded rank that can take it (longest processing time first, by a heap).

        The loop is flat on purpose: it is the whole cost of routing thousands of requests in a step.
        """
        lengths = self.batch.token_counts
        indices = sorted(indices, key=lengths.__getitem__, reverse=True)
        limit, tokens, counts = self.limit, self.tokens, self.counts
        slots, blocks, room = self.slots, self.blocks, self.room
        children, needs = self.children, self.batch.kv_block_counts
        heap = [
            (tokens[p], counts[p], p)
            for p in range(self.size)
            if counts[p] < limit and self.open[p] and p not in self.reserved and slots[p] > 0
        ]
        heapq.heapify(heap)
        if children is None and self._cannot_bind(indices, heap):
            self._place_unbound(indices, heap)
            return
        heapreplace, heappop = heapq.heapreplace, heapq.heappop
        room_min = min(map(lengths.__getitem__, indices), default=0)
        need_min = 0 if needs is None else min(map(needs.__getitem__, indices), default=0)
        done: list[int] = []
        where: list[int] = []
        aside: list[tuple[int, int, int]] = []
        for index in indices:
            length = lengths[index]
            weight = 1 if children is None else 1 + children[index]
            need = 0 if needs is None else needs[index]
            while heap:
                load, count, position = heap[0]
                if room[position] >= length and blocks[position] >= need and slots[position] >= weight:
                    break
                entry = heappop(heap)
                # What follows is shorter or thinner and may still fit there: put it back afterwards.
                if room[position] >= room_min and blocks[position] >= need_min:
                    aside.append(entry)
            else:
                self.leave(index)
                heap, aside = aside, heap
                heapq.heapify(heap)
                continue
            done.append(index)
            where.append(position)
            load += length
            count += weight
            tokens[position] = load
            counts[position] = count
            slots[position] -= weight
            blocks[position] -= need
            room[position] -= length
            if count < limit and slots[position] > 0:
                heapreplace(heap, (load, count, position))
            else:
                heappop(heap)
            if aside:
                for entry in aside:
                    heapq.heappush(heap, entry)
                aside.clear()
        self._note(done, where, gather(lengths, done))

    def _cannot_bind(self, indices: list[int], heap: list[tuple[int, int, int]]) -> bool:
        """Whether no capacity can refuse any of these, whatever goes where: all of them would fit on the tightest rank.

        For slots the count limit decides instead: no rank of the heap takes more than ``limit`` allows.
        """
        if not heap:
            return False
        open_positions = [position for _, _, position in heap]
        needs = self.batch.kv_block_counts
        lengths = self.batch.token_counts
        room = min(self.room[p] for p in open_positions)
        blocks = min(self.blocks[p] for p in open_positions)
        return (
            all(self.slots[p] >= self.limit - self.counts[p] for p in open_positions)
            and (room >= NO_LIMIT or sum(_pick(lengths, indices)) <= room)
            and (needs is None or blocks >= NO_LIMIT or sum(_pick(needs, indices)) <= blocks)
        )

    def _place_unbound(self, indices: list[int], heap: list[tuple[int, int, int]]) -> None:
        """The loop without refusals: only the count limit takes a rank out.

        A rank's (tokens, requests, position) is one integer here, and in stretches in which no rank can reach the limit it is
        not looked for: that halves the cost of thousands of requests.
        """
        limit, total = self.limit, len(indices)
        lengths = gather(self.batch.token_counts, indices)
        position_bits = max(self.size.bit_length(), _POSITION_BITS)
        one = 1 << position_bits
        shift = position_bits + (max(count for _, count, _ in heap) + total + 1).bit_length()
        token = 1 << shift
        position_mask, count_mask = one - 1, (1 << (shift - position_bits)) - 1
        keys = [(load << shift) | (count << position_bits) | position for load, count, position in heap]
        heapq.heapify(keys)
        #: The least key at each placement: its position is where that request goes.
        taken: list[int] = []
        final: list[int] = []
        heapreplace = heapq.heapreplace
        while keys and len(taken) < total:
            done = len(taken)
            spare = limit - max((key >> position_bits) & count_mask for key in keys)
            if spare >= _STRETCH_MIN:
                taken += [
                    heapreplace(keys, keys[0] + (length * token + one)) for length in lengths[done : done + spare]
                ]
            else:
                for length in lengths[done : done + _CHECKED]:
                    key = keys[0] + (length * token + one)
                    taken.append(key)
                    if (key >> position_bits) & count_mask < limit:
                        heapreplace(keys, key)
                    else:
                        heapq.heappop(keys)
                        final.append(key)
                        if not keys:
                            break
            out = [key for key in keys if (key >> position_bits) & count_mask >= limit]
            if out:
                final += out
                keys = [key for key in keys if (key >> position_bits) & count_mask < limit]
                heapq.heapify(keys)
        for key in final + keys:
            position = key & position_mask
            count = (key >> position_bits) & count_mask
            self.slots[position] -= count - self.counts[position]
            self.room[position] -= (key >> shift) - self.tokens[position]
            self.tokens[position], self.counts[position] = key >> shift, count
        where = _positions(taken, position_mask)
        self._note(indices[: len(where)], where, lengths[: len(where)])
        if len(where) < total:
            # Somebody will look at the blocks again.
            for index, position in zip(indices, where, strict=False):
                self.blocks[position] -= self.need_blocks(index)
            # No rank of the heap is left: slots ran out, or the limit was met. The same for all that remain.
            for index in indices[len(where) :]:
                self.leave(index)

    def _note(self, indices: list[int], where: Sequence[int], added: Sequence[int]) -> None:
        """Log many placements on the least loaded rank at once."""
        self.log_index += indices
        self.log_position += where
        self.log_why += [Why.LEAST_LOADED] * len(where)
        self.log_added += added
        if where:
            self.why_counts[Why.LEAST_LOADED] = self.why_counts.get(Why.LEAST_LOADED, 0) + len(where)


def gather(column: Sequence[T], indices: Sequence[int]) -> Sequence[T]:
    """A column's entries at some indices, in their order; many at once."""
    if len(indices) < 2:
        return [column[index] for index in indices]
    many: tuple[T, ...] = itemgetter(*indices)(column)
    return many


def _positions(keys: list[int], mask: int) -> Sequence[int]:
    """The lowest bits of keys; the lowest bytes are taken all at once, if keys are of 64 bits."""
    if mask == (1 << _POSITION_BITS) - 1:
        packed = array("Q")
        try:
            packed.fromlist(keys)
        except OverflowError:
            pass
        else:
            return packed.tobytes()[_LOWEST_BYTE::8]
    return [key & mask for key in keys]


def _pick(column: Sequence[int], indices: Sequence[int]) -> Iterable[int]:
    """A column's entries at some indices, in any order."""
    return column if len(indices) == len(column) else map(column.__getitem__, indices)


def fair_limit(placement: Placement, rest: Sequence[int], multiplier: float | None, *, among: Sequence[int]) -> int:
    """The cap on requests per rank: a fair share times ``multiplier``, at least the fullest open rank already, at most what the
    roomiest rank can hold. A multiplier of None: that alone.

    Args:
        among: Positions that share the rest (at least one): those that can take something; all, as the seed's router has it.
    """
    counts, slots = placement.counts, placement.slots
    everybody = len(among) == placement.size
    fullest = max((counts[p] for p in range(placement.size) if everybody or placement.open[p]), default=0)
    most = max(max(counts[p] + slots[p] for p in among), fullest)
    if multiplier is None:
        return most
    weights = sum(map(placement.weight, rest)) if placement.children else len(rest)
    total = sum(counts[p] for p in among) + weights
    fair = -(-total // len(among)) if multiplier == 1.0 else -int(-(multiplier * total) // len(among))
    return min(max(fair, fullest), most)
