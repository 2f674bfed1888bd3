"""Longest first, each to the least loaded rank that can take it (longest processing time first, by a heap).

The loops are flat on purpose: they are the whole cost of routing thousands of requests in a step. Where no capacity and no
limit can bind for a stretch of requests, they are placed without a look at either; the loop that looks at all takes the rest.
"""

from __future__ import annotations

import heapq
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import add, sub
from typing import Any

from adp_router._route import Placement, gather, smallest

#: Shortest stretch without a look at the limits that pays for finding it (requests).
_STRETCH_MIN = 16
#: Lengths that are looked at to see whether few occur; from eight times as many requests on (count).
_LOOKED_AT = 256
#: Keys that are kept at a time (requests): they stay in the processor's cache.
_PIECE = 512
#: Ranks for which the rounds are written out (count).
_EIGHT = 8
_EIGHT_DOUBLES = struct.Struct("8d")
#: Bits of a turn in a key of the heap: the lowest byte is picked out of many keys at once.
_TURN_BITS = 8
_LOWEST_BYTE = 0 if sys.byteorder == "little" else 7
#: From here to twice this every integer is a double, and the lowest byte of the double is the integer's; so too when divided
#: by a power of two.
_DOUBLE_INTEGERS = 1 << 52


def place_balanced(placement: Placement, indices: Sequence[int]) -> None:
    """Put or leave every request. Ties: fewer tokens, fewer requests, whose turn it is."""
    able = placement.unheld()
    many = len(indices) >= _STRETCH_MIN and placement.children is None
    free = many and placement.all_fit_together(indices, able)
    order, lengths = _longest_first(placement.batch.token_counts, indices)
    by_turn = sorted(range(placement.size), key=placement.turn.__getitem__)
    done = 0
    while free and done < len(order):
        positions = _with_room(placement, able)
        stretch, in_rounds = _stretch(placement, lengths, done, positions)
        if stretch < _STRETCH_MIN:
            break
        some = lengths[done : done + stretch]
        where = _place_stretch(placement, some, placement.sums(indices)[0], positions, by_turn, in_rounds=in_rounds)
        placement.note_least_loaded(order[done : done + stretch], where)
        done += stretch
    if done < len(order):
        _place_bound(placement, order[done:], _with_room(placement, able), by_turn)


def _longest_first(column: Sequence[int], indices: Sequence[int]) -> tuple[list[int], Sequence[float]]:
    """Requests by falling length, those of equal length in their order; and their lengths, as doubles where that costs nothing.

    Where lengths occur again and again the requests are grouped by length, which takes two thirds of comparing them. Some of
    them tell; where these are not like the others that costs time, and nothing else.
    """
    if len(indices) >= 8 * _LOOKED_AT and 2 * len({*gather(column, indices[:_LOOKED_AT])}) <= _LOOKED_AT:
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for index, length in zip(indices, gather(column, indices), strict=True):
            groups[length].append(index)
        longest_first = sorted(groups, reverse=True)
        grouped = [groups[length] for length in longest_first]
        exact: list[float] = [*map(float, longest_first)] if longest_first[0] < _DOUBLE_INTEGERS else [*longest_first]
        return [*chain.from_iterable(grouped)], [*chain.from_iterable(map(repeat, exact, map(len, grouped)))]
    order = sorted(indices, key=column.__getitem__, reverse=True)
    return order, gather(column, order)


def _with_room(placement: Placement, able: list[int]) -> list[int]:
    """Positions of the heap: those that can take something yet."""
    return [p for p in able if placement.counts[p] < placement.limits[p] and placement.slots[p] > 0]


def _stretch(placement: Placement, lengths: Sequence[float], done: int, positions: list[int]) -> tuple[int, bool]:
    """How many of the next requests can be placed before any rank could reach its limit or the end of its slots.

    At least as many as the nearest rank may take. Where loads, and the lengths of each round, differ by less than the lengths
    to come, each rank takes one in each round, and a round leaves loads that differ by no more than before or than its lengths
    do: all ranks may take as many as the nearest. Lengths that differ by less than a factor of two are such without a look at
    each round. Rounds are whole, unless they are the last: half a round leaves loads that differ by a length.

    Returns:
        The number, and whether they go in such rounds.
    """
    if not positions:
        return 0, False
    size = len(positions)
    nearest = min(min(placement.limits[p] - placement.counts[p], placement.slots[p]) for p in positions)
    tokens = gather(placement.tokens, positions)
    spread = max(tokens) - min(tokens)
    shortest = max(spread, lengths[done] // 2)
    if spread < shortest and lengths[-1] <= shortest:
        unlike = max(map(sub, lengths[done::size], lengths[done + size - 1 :: size]), default=0)
        shortest = max(spread, min(unlike, shortest))
    # Lengths fall: the first that is not above the shortest, by bisection.
    low, high = done, len(lengths)
    while low < high:
        middle = (low + high) // 2
        if lengths[middle] > shortest:
            low = middle + 1
        else:
            high = middle
    in_rounds = min(nearest * size, low - done)
    if done + in_rounds < len(lengths):
        in_rounds -= in_rounds % size
    return (in_rounds, True) if in_rounds >= nearest else (min(nearest, len(lengths) - done), False)


def _place_stretch(
    placement: Placement,
    lengths: Sequence[float],
    sum_max: int,
    positions: list[int],
    by_turn: list[int],
    *,
    in_rounds: bool,
) -> Sequence[int]:
    """Positions for requests that nothing refuses; keeps the books, but for room and blocks: all together fit everywhere.

    A rank's (tokens, requests, turn) is one number, its key: where all fit a double exactly, a double with the requests and the
    turn behind the point, so that a length is added as it is; else an integer.

    Args:
        sum_max: The lengths add up to this at most (tokens).
        in_rounds: Whether each rank takes one in each round.
    """
    tokens, counts = placement.tokens, placement.counts
    least = min(gather(tokens, positions))
    turn_bits = max(_TURN_BITS, placement.size.bit_length())
    low_bits = turn_bits + (max(gather(counts, positions)) + len(lengths)).bit_length()
    turn_mask, low_mask = (1 << turn_bits) - 1, (1 << low_bits) - 1
    highest = max(gather(tokens, positions)) - least + sum_max + 1
    numbers = [(tokens[p] - least << low_bits) + (counts[p] << turn_bits) + placement.turn[p] for p in positions]
    take = _take_in_rounds if in_rounds else _take_by_heap
    noted: list[Any] = []
    where: Sequence[int]
    if turn_bits == _TURN_BITS and (highest << low_bits) < _DOUBLE_INTEGERS:
        scale, offset = 1 << low_bits, _DOUBLE_INTEGERS
        keys = take([(offset + number) / scale for number in numbers], lengths, (1 << turn_bits) / scale, noted)
        where = b"".join(noted)[_LOWEST_BYTE::8].translate(bytes(by_turn).ljust(256, b"\0"))
    else:
        scale, offset = 1, 0
        keys = take([*numbers], [int(length) << low_bits for length in lengths], 1 << turn_bits, noted)
        where = [by_turn[int(key) & turn_mask] for key in chain.from_iterable(noted)]
    for key in keys:
        number = int(key * scale) - offset
        position = by_turn[number & turn_mask]
        load, count = (number >> low_bits) + least, (number & low_mask) >> turn_bits
        placement.slots[position] -= count - counts[position]
        tokens[position], counts[position] = load, count
    return where


def _take_by_heap(keys: list[float], lengths: Sequence[float], one: float, noted: list[Any]) -> list[float]:
    """Each length goes to the least key; returns the keys afterwards.

    Args:
        one: What a request adds to a key beside its length.
        noted: Gets the least keys, in the order of the lengths: the turn in each is where that request goes.
    """
    heapq.heapify(keys)
    heapreplace = heapq.heapreplace
    for start in range(0, len(lengths), _PIECE):
        noted.append(
            _packed([heapreplace(keys, keys[0] + (length + one)) for length in lengths[start : start + _PIECE]])
        )
    return keys


def _take_in_rounds(keys: list[float], lengths: Sequence[float], one: float, noted: list[Any]) -> list[float]:
    """The same, where each key takes one length in each round: the keys in their order, without a heap.

    All of them grow by the same number of requests, which is added at the end.
    """
    size = len(keys)
    rounds, rest = divmod(len(lengths), size)
    if size == _EIGHT:
        keys = _add_to_eight(keys, lengths, noted)
    else:
        for some in zip(*[iter(lengths)] * size, strict=False):
            keys.sort()
            noted.append(_packed(keys))
            keys = [*map(add, keys, some)]
    keys = sorted(key + rounds * one for key in keys)
    if rest:
        noted.append(_packed(keys[:rest]))
    for place, length in enumerate(lengths[len(lengths) - rest :]):
        keys[place] += length + one
    return keys


def _add_to_eight(keys: list[float], lengths: Sequence[float], noted: list[Any]) -> list[float]:
    """The rounds of eight ranks, as many as a host usually has: additions written out cost a third of additions by ``map``.

    Rounds of equal lengths leave the keys in their order, so they are added and noted together with the next that is not one.
    """
    pack: Callable[..., Any] = _EIGHT_DOUBLES.pack if type(keys[0]) is float else _as_they_are
    keys = sorted(keys)
    rounds = 1
    grown: float = 0
    for l0, l1, l2, l3, l4, l5, l6, l7 in zip(*[iter(lengths)] * _EIGHT, strict=False):
        if l0 == l7:
            rounds += 1
            grown += l0
            continue
        k0, k1, k2, k3, k4, k5, k6, k7 = keys
        noted.append(pack(k0, k1, k2, k3, k4, k5, k6, k7) * rounds)
        keys = [k0 + l0, k1 + l1, k2 + l2, k3 + l3, k4 + l4, k5 + l5, k6 + l6, k7 + l7]
        keys.sort()
        if rounds > 1:
            keys = [key + grown for key in keys]
            rounds, grown = 1, 0
    noted.append(pack(*keys) * (rounds - 1))
    return [key + grown for key in keys]


def _packed(keys: list[float]) -> bytes | list[float]:
    """Doubles as bytes, of which those with the turns are picked afterwards; integers as they are."""
    return struct.pack(f"{len(keys)}d", *keys) if type(keys[0]) is float else keys


def _as_they_are(*keys: float) -> tuple[float, ...]:
    return keys


def _place_bound(placement: Placement, indices: Sequence[int], positions: list[int], by_turn: list[int]) -> None:
    """The loop with every capacity looked at."""
    tokens, counts, limits = placement.tokens, placement.counts, placement.limits
    slots, blocks, room = placement.slots, placement.blocks, placement.room
    lengths, needs, children = placement.batch.token_counts, placement.batch.kv_block_counts, placement.children
    heap = [(tokens[p], counts[p], placement.turn[p]) for p in positions]
    heapq.heapify(heap)
    heapreplace, heappop = heapq.heapreplace, heapq.heappop
    room_min, need_min = smallest(lengths, indices), smallest(needs, indices)
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
    placement.note_least_loaded(done, where)
