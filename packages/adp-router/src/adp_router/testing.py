"""Public test tools: a lower bound on the fullest rank's load, the exact optimum of small cases, and a check of a balancer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from adp_router._types import RankState, RouteRequest


def lower_bound(initial: Sequence[int], lengths: Sequence[int]) -> float:
    """No placement has a fullest rank below this (tokens).

    The largest of: the fullest rank already, the water-filled mean, the least loaded rank plus the longest request, and the
    two shortest of the ``ranks + 1`` longest requests, which must share a rank when all start empty.
    """
    loads = sorted(initial)
    total = float(sum(lengths))
    filled = 0.0
    for count in range(1, len(loads) + 1):
        level = (sum(loads[:count]) + total) / count
        if count == len(loads) or level <= loads[count]:
            filled = max(level, loads[count - 1]) if total else loads[-1]
            break
    bound = max(float(loads[-1]), filled)
    ordered = sorted(lengths, reverse=True)
    if ordered:
        bound = max(bound, loads[0] + ordered[0])
    if len(ordered) > len(loads):
        bound = max(bound, loads[0] + ordered[len(loads) - 1] + ordered[len(loads)])
    return bound


def optimum(initial: Sequence[int], lengths: Sequence[int]) -> int:
    """The fullest rank of the best placement (tokens), by branch and bound; for about a dozen requests."""
    ordered = sorted(lengths, reverse=True)
    loads = list(initial)
    best = max([max(loads) + sum(ordered)] if ordered else [max(loads)])

    def descend(index: int) -> None:
        nonlocal best
        if index == len(ordered):
            best = min(best, max(loads))
            return
        tried: set[int] = set()
        for position, load in enumerate(loads):
            if load in tried or load + ordered[index] >= best:
                continue
            tried.add(load)
            loads[position] += ordered[index]
            descend(index + 1)
            loads[position] = load

    descend(0)
    return best


class Balancer(Protocol):
    """What stands between an engine's requests and a router: offers them, and says what the ranks hold."""

    def offer(self, request: RouteRequest) -> int | None:
        """The request's rank, or None: it was not placed, and may be offered again."""

    def ended(self, request_id: int) -> None:
        """A request that was placed has ended."""

    def states(self) -> Sequence[RankState]:
        """What the ranks hold now."""


def check_balancer(balancer: Balancer, *, count: int = 300, seed: int = 0, tokens_max: int = 2000) -> None:
    """Offer and end requests by a seed, and compare what the balancer says with what it did.

    Args:
        balancer: At rest; it is at rest again afterwards.
        count: Requests.
        seed: Of lengths, children and ends.
        tokens_max: Longest prompt offered (tokens).

    Raises:
        AssertionError: The states are not what was placed and has not ended; a rank has more than it may; a request is not
            placed though every rank is empty; or the balancer is not at rest at the end.
    """
    draw = random.Random(seed)  # noqa: S311 - a test's choice, not a secret
    before = {state.rank: state for state in balancer.states()}
    _expect(all(s.token_count == s.request_count == 0 for s in before.values()), "the balancer is not at rest", before)
    held: dict[int, tuple[int, RouteRequest]] = {}
    for request_id in range(count):
        while held and draw.random() < 0.45:
            ended = draw.choice(sorted(held))
            del held[ended]
            balancer.ended(ended)
            _compare(balancer.states(), before, held)
        request = RouteRequest(request_id, draw.randint(1, tokens_max))
        rank = balancer.offer(request)
        if rank is None:
            _expect(bool(held), "a request is not placed though every rank is empty", request)
        else:
            _expect(rank in before, "a request is placed on a rank that is not among the states", rank)
            held[request_id] = (rank, request)
        _compare(balancer.states(), before, held)
    for request_id in sorted(held):
        balancer.ended(request_id)
    _expect(
        {s.rank: s for s in balancer.states()} == before, "not at rest after everything has ended", balancer.states()
    )


def _compare(
    states: Sequence[RankState], before: dict[int, RankState], held: dict[int, tuple[int, RouteRequest]]
) -> None:
    for state in states:
        mine = [request for rank, request in held.values() if rank == state.rank]
        _expect(state.request_count == len(mine), f"rank {state.rank} holds {len(mine)} requests", state)
        tokens = sum(request.token_count for request in mine)
        _expect(state.token_count == tokens, f"rank {state.rank} holds {tokens} tokens", state)
        for free, total in ((state.free_slots, state.total_slots), (state.free_tokens, state.total_tokens)):
            _expect(
                free is None or total is None or 0 <= free <= total, f"rank {state.rank} has more than it may", state
            )
        empty = before[state.rank].free_slots
        if empty is not None:
            _expect(state.free_slots == empty - len(mine), f"rank {state.rank} had {empty} free slots", state)


def _expect(holds: bool, what: str, shown: object) -> None:
    if not holds:
        raise AssertionError(f"{what}: {shown}")
