"""Longest first, each to the least loaded rank that can take it (longest processing time first, by a heap).

The loops are flat on purpose: they are the whole cost of routing thousands of requests in a step.
"""

from __future__ import annotations

import heapq
import sys
from array import array
from collections.abc import Sequence

from adp_router._route import NO_LIMIT, Placement, gather, pick

#: Shortest stretch without a look at the limit that pays for finding it (requests), and how many are placed with looks.
_STRETCH_MIN = 16
_CHECKED = 128
#: Bits of a turn in a key of the heap, where they suffice: whole bytes are picked out of many keys at once.
_TURN_BITS = 8
_LOWEST_BYTE = 0 if sys.byteorder == "little" else 7


def place_balanced(placement: Placement, indices: list[int]) -> None:
    """Put or leave every request. Ties: fewer tokens, fewer requests, whose turn it is."""
    lengths = placement.batch.token_counts
    indices = sorted(indices, key=lengths.__getitem__, reverse=True)
    open_positions = [
        p
        for p in range(placement.size)
        if placement.counts[p] < placement.limits[p]
        and placement.open[p]
        and p not in placement.held
        and placement.slots[p] > 0
    ]
    by_turn = [0] * placement.size
    for position, turn in enumerate(placement.turn):
        by_turn[turn] = position
    if placement.children is None and _cannot_bind(placement, indices, open_positions):
        _place_unbound(placement, indices, open_positions, by_turn)
    else:
        _place_bound(placement, indices, open_positions, by_turn)


def _cannot_bind(placement: Placement, indices: list[int], open_positions: list[int]) -> bool:
    """Whether no capacity can refuse any of these, whatever goes where: all of them would fit on the tightest rank.

    For slots the count limit decides instead: no rank of the heap takes more than that allows.
    """
    if not open_positions:
        return False
    needs, lengths = placement.batch.kv_block_counts, placement.batch.token_counts
    room = min(placement.room[p] for p in open_positions)
    blocks = min(placement.blocks[p] for p in open_positions)
    return (
        all(placement.slots[p] >= min(placement.limits[p] - placement.counts[p], len(indices)) for p in open_positions)
        and (room >= NO_LIMIT or sum(pick(lengths, indices)) <= room)
        and (needs is None or blocks >= NO_LIMIT or sum(pick(needs, indices)) <= blocks)
    )


def _place_bound(placement: Placement, indices: list[int], open_positions: list[int], by_turn: list[int]) -> None:
    """The loop with every capacity looked at."""
    tokens, counts, limits = placement.tokens, placement.counts, placement.limits
    slots, blocks, room = placement.slots, placement.blocks, placement.room
    lengths, needs, children = placement.batch.token_counts, placement.batch.kv_block_counts, placement.children
    heap = [(tokens[p], counts[p], placement.turn[p]) for p in open_positions]
    heapq.heapify(heap)
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
            load, count, turn = heap[0]
            position = by_turn[turn]
            if room[position] >= length and blocks[position] >= need and slots[position] >= weight:
                break
            entry = heappop(heap)
            # What follows is shorter or thinner and may still fit there: put it back afterwards.
            if room[position] >= room_min and blocks[position] >= need_min:
                aside.append(entry)
        else:
            placement.leave(index)
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
        if count < limits[position] and slots[position] > 0:
            heapreplace(heap, (load, count, turn))
        else:
            heappop(heap)
        if aside:
            for entry in aside:
                heapq.heappush(heap, entry)
            aside.clear()
    placement.note_least_loaded(done, where, gather(lengths, done))


def _place_unbound(placement: Placement, indices: list[int], open_positions: list[int], by_turn: list[int]) -> None:
    """The loop without refusals: only the count limit takes a rank out.

    A rank's (tokens, requests, turn) is one integer here, and in stretches in which no rank can reach its limit it is not
    looked for: that halves the cost of thousands of requests.
    """
    total = len(indices)
    lengths = gather(placement.batch.token_counts, indices)
    turn_bits = max(placement.size.bit_length(), _TURN_BITS)
    one = 1 << turn_bits
    turn_mask = one - 1
    shift = turn_bits + (max(placement.counts[p] for p in open_positions) + total + 1).bit_length()
    count_mask = (1 << (shift - turn_bits)) - 1
    token = 1 << shift
    #: Of a key: sequences that its rank may still take.
    limit_of_turn = [placement.limits[p] for p in by_turn]

    def spare(key: int) -> int:
        return limit_of_turn[key & turn_mask] - ((key >> turn_bits) & count_mask)

    keys = [
        (placement.tokens[p] << shift) | (placement.counts[p] << turn_bits) | placement.turn[p] for p in open_positions
    ]
    heapq.heapify(keys)
    #: The least key at each placement: its turn is where that request goes.
    taken: list[int] = []
    final: list[int] = []
    heapreplace = heapq.heapreplace
    while keys and len(taken) < total:
        done = len(taken)
        stretch = min(map(spare, keys))
        if stretch >= _STRETCH_MIN:
            taken += [heapreplace(keys, keys[0] + (length * token + one)) for length in lengths[done : done + stretch]]
        else:
            for length in lengths[done : done + _CHECKED]:
                key = keys[0] + (length * token + one)
                taken.append(key)
                if limit_of_turn[key & turn_mask] > (key >> turn_bits) & count_mask:
                    heapreplace(keys, key)
                else:
                    heapq.heappop(keys)
                    final.append(key)
                    if not keys:
                        break
        out = [key for key in keys if spare(key) <= 0]
        if out:
            final += out
            keys = [key for key in keys if spare(key) > 0]
            heapq.heapify(keys)
    for key in final + keys:
        position, count = by_turn[key & turn_mask], (key >> turn_bits) & count_mask
        placement.slots[position] -= count - placement.counts[position]
        placement.room[position] -= (key >> shift) - placement.tokens[position]
        placement.tokens[position], placement.counts[position] = key >> shift, count
    where = _positions(taken, turn_mask, by_turn)
    placement.note_least_loaded(indices[: len(where)], where, lengths[: len(where)])
    if len(where) < total:
        # Somebody will look at the blocks again.
        for index, position in zip(indices, where, strict=False):
            placement.blocks[position] -= placement.need_blocks(index)
        # No rank of the heap is left: slots ran out, or the limit was met. The same for all that remain.
        for index in indices[len(where) :]:
            placement.leave(index)


def _positions(keys: list[int], mask: int, by_turn: list[int]) -> Sequence[int]:
    """Positions by the lowest bits of keys; the lowest bytes are taken all at once, if keys are of 64 bits."""
    if mask == (1 << _TURN_BITS) - 1:
        packed = array("Q")
        try:
            packed.fromlist(keys)
        except OverflowError:
            pass
        else:
            turns = packed.tobytes()[_LOWEST_BYTE::8]
            return turns.translate(bytes(by_turn).ljust(256, b"\0"))
    return [by_turn[key & mask] for key in keys]
