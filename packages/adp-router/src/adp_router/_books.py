"""What each rank holds, kept by what was placed there and what has ended: the ranks' states of the next call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from adp_router._batch import RouteBatch
from adp_router._check import check_ranks
from adp_router._errors import RankStateError, RouteBatchError
from adp_router._plain import plain_integer
from adp_router._result import RoutingResult
from adp_router._router import Router
from adp_router._types import RankState, RouteRequest

_CAPACITIES = (("free_slots", "total_slots"), ("free_kv_blocks", "total_kv_blocks"), ("free_tokens", "total_tokens"))


class _Load(NamedTuple):
    tokens: int = 0
    sequences: int = 0
    kv_blocks: int = 0


class _Held(NamedTuple):
    position: int
    load: _Load


def _sum(a: _Load, b: _Load, sign: int = 1) -> _Load:
    return _Load(a.tokens + sign * b.tokens, a.sequences + sign * b.sequences, a.kv_blocks + sign * b.kv_blocks)


class RankBooks:
    """Keeps the ranks' states where they do not report them, or report them late: adds at placement, subtracts at the end.

    An interrupt inside a call leaves the books as before it or as after it. One thread at a time.

    Args:
        ranks: Every rank as it is when it holds nothing. ``total_slots``, ``total_kv_blocks`` and ``total_tokens`` limit what
            it holds at once; what is free follows from them.

    Raises:
        RankStateError: As ``Router.route``; or a rank that holds something, or that says what is free.
    """

    def __init__(self, ranks: Sequence[RankState]) -> None:
        self._empty, self._position_of, _ = check_ranks(ranks)
        for position, state in enumerate(self._empty):
            given = {name: getattr(state, name) for name, _ in _CAPACITIES if getattr(state, name) is not None}
            given |= {n: getattr(state, n) for n in ("token_count", "request_count") if getattr(state, n)}
            if given:
                name, value = next(iter(given.items()))
                raise RankStateError(
                    f"ranks[{position}].{name}: want a rank that holds nothing, by its totals; got {value}"
                )
        self._held: dict[int, _Held] = {}
        #: By position; None while it does not stand for what is held: an interrupt came between.
        self._loads: tuple[_Load, ...] | None = (_Load(),) * len(self._empty)

    def __len__(self) -> int:
        """Requests held (count)."""
        return len(self._held)

    def states(self) -> tuple[RankState, ...]:
        """The ranks now, in the order given, for ``Router.route``."""
        return tuple(
            replace(
                state,
                token_count=load.tokens,
                request_count=load.sequences,
                free_slots=None if state.total_slots is None else state.total_slots - load.sequences,
                free_kv_blocks=None if state.total_kv_blocks is None else state.total_kv_blocks - load.kv_blocks,
                free_tokens=None if state.total_tokens is None else state.total_tokens - load.tokens,
            )
            for state, load in zip(self._empty, self._loads_now(), strict=True)
        )

    def route(self, router: Router, requests: Sequence[RouteRequest] | RouteBatch) -> RoutingResult:
        """Place a batch by what the books say, and enter it.

        Raises:
            RouteBatchError: As ``Router.route``; or a request that is held already. Nothing was routed.
        """
        batch = requests if isinstance(requests, RouteBatch) else RouteBatch.of(requests)
        for given in batch.request_ids:
            entry = None if (request_id := plain_integer(given)) is None else self._held.get(request_id)
            if entry is not None:
                rank = self._empty[entry.position].rank
                raise RouteBatchError(f"request_id: {request_id} is held by rank {rank} already")
        result = router.route(batch, self.states())
        log = result.log
        weights = [1] * len(log.request_ids) if log.weights is None else log.weights
        blocks = [0] * len(log.request_ids) if log.block_counts is None else log.block_counts
        entries = {
            log.request_ids[index]: _Held(position, _Load(log.token_counts[index], weights[index], blocks[index]))
            for position, index in zip(log.position, log.index, strict=True)
        }
        loads = list(self._loads_now())
        for entry in entries.values():
            loads[entry.position] = _sum(loads[entry.position], entry.load)
        after = tuple(loads)
        self._loads = None
        self._held.update(entries)
        self._loads = after
        return result

    def ended(self, request_id: int) -> int:
        """A request has ended, in whatever way; its rank.

        Raises:
            KeyError: No rank holds it. Nothing changed.
        """
        entry = self._held[request_id]
        loads = list(self._loads_now())
        loads[entry.position] = _sum(loads[entry.position], entry.load, -1)
        after = tuple(loads)
        self._loads = None
        del self._held[request_id]
        self._loads = after
        return self._empty[entry.position].rank

    def drain(self, rank: int, draining: bool = True) -> None:
        """The rank takes nothing new (or, with False, does so again); what it holds stays until it ends.

        Raises:
            KeyError: No such rank.
        """
        position = self._position_of[rank]
        states = list(self._empty)
        states[position] = replace(states[position], draining=draining)
        self._empty = tuple(states)

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Ids of what a rank holds, in the order of placement: when it is lost, these are to be ended, and offered again.

        Raises:
            KeyError: No such rank.
        """
        position = self._position_of[rank]
        return tuple(request_id for request_id, entry in self._held.items() if entry.position == position)

    def _loads_now(self) -> tuple[_Load, ...]:
        if self._loads is None:
            loads = [_Load()] * len(self._empty)
            for entry in self._held.values():
                loads[entry.position] = _sum(loads[entry.position], entry.load)
            self._loads = tuple(loads)
        return self._loads
