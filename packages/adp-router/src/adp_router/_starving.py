"""Liveness: every request that fits somewhere is placed within a bound (docs/design.md states and proves it).

Requests that were left over long enough go before everything else of a call, targets included, in one order of seniority:
longest wait first, then order of arrival. The order among waiting requests never changes and nobody who comes later gets ahead,
so each becomes the most senior in the end. One that fits nowhere now keeps one rank free, and keeps the same one until it is
placed, so that rank empties; it is not kept free for what it could not take when empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adp_router._memory import Memory
from adp_router._route import NO_LIMIT, Placement, largest
from adp_router._types import Exclusion, LeftoverReason, RankState, Why


def split_impossible(
    placement: Placement, indices: Sequence[int], position_of: dict[int, int]
) -> tuple[Sequence[int], dict[int, str]]:
    """Requests that some rank could take if it were empty, and what the others need and cannot get anywhere."""
    if _all_fit_each(placement, indices):
        return indices, {}
    possible, impossible = [], {}
    for index in indices:
        candidates = _candidates(placement, index, position_of)
        if any(_exceeds(placement, index, p, _totals(placement.ranks[p])) is None for p in candidates):
            possible.append(index)
        else:
            impossible[index] = _need_text(placement, index, candidates)
    return possible, impossible


def _all_fit_each(placement: Placement, indices: Sequence[int]) -> bool:
    """Whether each of these fits each rank when it is empty: all together do, or the most that any of them needs does."""
    totals = [_totals(state) for state in placement.ranks]
    slots, blocks, tokens = ([n for n in column if n is not None] for column in zip(*totals, strict=True))
    if not (slots or blocks or tokens):
        return True
    batch = placement.batch
    token_sum, block_sum = placement.sums(indices)
    return (
        min(slots, default=NO_LIMIT) >= 1 + largest(placement.children, indices)
        and _suffices(min(blocks, default=NO_LIMIT), block_sum, batch.kv_block_counts, indices)
        and _suffices(min(tokens, default=NO_LIMIT), token_sum, batch.token_counts, indices)
    )


def _suffices(least: int, total: int, column: Sequence[int] | None, indices: Sequence[int]) -> bool:
    """The sum is known already; to find the largest entry takes a pass."""
    return least >= total or least >= largest(column, indices)


def place_starving(
    placement: Placement,
    indices: Sequence[int],
    position_of: dict[int, int],
    memory: Memory,
    starvation_rounds: int,
    prefers: Callable[[int], int | None],
) -> tuple[Sequence[int], dict[int, int]]:
    """Place the starving or keep a rank free for each; at most half of the ranks, at least one, are kept free.

    Args:
        prefers: Position that a request without a target would rather have.

    Returns:
        The requests that are not starving, and the ranks kept free, by request id.
    """
    waited = placement.batch.waited_rounds
    if waited is None:
        return indices, {}
    starving = sorted((i for i in indices if waited[i] >= starvation_rounds), key=lambda i: -waited[i])
    held: dict[int, int] = {}
    for index in starving:
        candidates = _candidates(placement, index, position_of)
        fitting = [p for p in candidates if p not in placement.held and placement.fits(index, p) is None]
        if fitting:
            wanted = _wanted(placement, index, position_of, prefers)
            placement.put(index, wanted if wanted in fitting else min(fitting, key=placement.load_key), Why.STARVING)
            continue
        if len(held) < max(1, placement.size // 2):
            position = _rank_to_hold(placement, index, candidates, memory)
            if position is not None:
                placement.held.add(position)
                held[placement.batch.request_ids[index]] = placement.ranks[position].rank
        placement.leave(index, _strict_reason(placement, index, candidates))
    return [i for i in indices if waited[i] < starvation_rounds] if starving else indices, held


def place_targets(placement: Placement, indices: Sequence[int], position_of: dict[int, int]) -> Sequence[int]:
    """Strict targets first, then wishes, each group in the order given. Returns what still needs a rank.

    A strict request whose target cannot take it stays over; a wish (or, as the seed's router does, any) moves on. Moved
    requests keep the order in which they were tried: strict ones first.
    """
    targets, strict = placement.batch.target_ranks, placement.batch.strict
    if targets is None:
        return indices
    first = [i for i in indices if strict is not None and strict[i]]
    second = [i for i in indices if strict is None or not strict[i]]
    rest: list[int] = []
    for index in first + second:
        target = targets[index]
        if target is None:
            rest.append(index)
            continue
        position = position_of[target]
        if position not in placement.held and placement.fits(index, position) is None:
            placement.put(index, position, Why.TARGET)
        elif strict is not None and strict[index] and not placement.as_seed:
            placement.leave(index, _strict_reason(placement, index, [position]))
        else:
            rest.append(index)
    return rest


def _is_strict(placement: Placement, index: int) -> bool:
    return placement.batch.strict is not None and placement.batch.strict[index]


def _candidates(placement: Placement, index: int, position_of: dict[int, int]) -> list[int]:
    """Positions that a request may ever go to."""
    targets = placement.batch.target_ranks
    target = None if targets is None else targets[index]
    if target is not None and _is_strict(placement, index):
        return [position_of[target]]
    return list(range(placement.size))


def _wanted(
    placement: Placement, index: int, position_of: dict[int, int], prefers: Callable[[int], int | None]
) -> int | None:
    targets = placement.batch.target_ranks
    target = None if targets is None else targets[index]
    return prefers(index) if target is None else position_of[target]


def _strict_reason(placement: Placement, index: int, candidates: list[int]) -> LeftoverReason | None:
    """The reason of a strict request's target; None: the general one."""
    if not _is_strict(placement, index):
        return None
    position = candidates[0]
    if placement.fits(index, position) is Exclusion.DRAINING:
        return LeftoverReason.TARGET_DRAINING
    if position in placement.held and placement.fits(index, position) is None:
        return LeftoverReason.HELD_FOR_STARVING
    return LeftoverReason.TARGET_FULL


def _rank_to_hold(placement: Placement, index: int, candidates: list[int], memory: Memory) -> int | None:
    """The rank that was kept free for it before, else the one that lacks least of what it needs: it can start there soonest."""
    able = [
        p
        for p in candidates
        if p not in placement.held
        and placement.open[p]
        and _exceeds(placement, index, p, _totals(placement.ranks[p])) is None
        and _exceeds(placement, index, p, memory.idle.get(placement.ranks[p].rank, (None, None, None))) is None
    ]
    before = memory.held.get(placement.batch.request_ids[index])
    for position in able:
        if placement.ranks[position].rank == before:
            return position
    return min(able, key=lambda p: (_shortage(placement, index, p), p), default=None)


def _shortage(placement: Placement, index: int, position: int) -> tuple[int, int, int]:
    return (
        max(0, placement.weight(index) - placement.slots[position]),
        max(0, placement.need_blocks(index) - placement.blocks[position]),
        max(0, placement.cost(index, position) - placement.room[position]),
    )


def _totals(state: RankState) -> tuple[int | None, int | None, int | None]:
    return state.total_slots, state.total_kv_blocks, state.total_tokens


def _needs(placement: Placement, index: int, position: int) -> tuple[tuple[str, int], ...]:
    return (
        ("slots", placement.weight(index)),
        ("KV blocks", placement.need_blocks(index)),
        ("tokens", placement.cost(index, position)),
    )


def _exceeds(
    placement: Placement, index: int, position: int, totals: tuple[int | None, int | None, int | None]
) -> str | None:
    """The capacity that a request needs more of than there is on an empty rank, or None."""
    for (name, need), total in zip(_needs(placement, index, position), totals, strict=True):
        if total is not None and need > total:
            return name
    return None


def _need_text(placement: Placement, index: int, candidates: list[int]) -> str:
    """What it needs and what the rank has that comes closest, in words."""
    best = candidates[0]
    name = ""
    for position in candidates:
        found = _exceeds(placement, index, position, _totals(placement.ranks[position]))
        if found is not None and (not name or _lack(placement, index, position) < _lack(placement, index, best)):
            best, name = position, found
    need = dict(_needs(placement, index, best))[name]
    total = dict(zip(("slots", "KV blocks", "tokens"), _totals(placement.ranks[best]), strict=True))[name]
    where = (
        f"its target, rank {placement.ranks[best].rank},"
        if len(candidates) == 1
        else f"the nearest, rank {placement.ranks[best].rank},"
    )
    return f"needs {need} {name}; {where} has {total} in all"


def _lack(placement: Placement, index: int, position: int) -> tuple[int, ...]:
    totals = _totals(placement.ranks[position])
    return tuple(
        max(0, need - total) if total is not None else 0
        for (_, need), total in zip(_needs(placement, index, position), totals, strict=True)
    )
