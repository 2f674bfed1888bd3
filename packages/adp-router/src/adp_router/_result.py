"""What came of a call: a frozen log, from which decisions and their rules are worked out when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

from adp_router._plain import plain_integer
from adp_router._text import shown
from adp_router._types import Exclusion, Leftover, RankState, RequestError, Rule, Why

#: Parts of the router that choose by load; for these the log can say which less loaded ranks were passed over.
_BY_LOAD = frozenset({Why.LEAST_LOADED, Why.STARVING, Why.OVERFLOW, Why.REHOMED})
_RULE_OF_EXCLUSION = {Exclusion.COUNT_LIMIT: Rule.IN_SHARE, Exclusion.HELD_FOR_STARVING: Rule.NOT_HELD}
_RULE_OF_WHY = {Why.TARGET: Rule.TARGET, Why.NEXT_IN_TURN: Rule.NEXT_IN_TURN, Why.HOME: Rule.HOME}


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A rank with less load than the one chosen, and why it was not taken."""

    rank: int
    load_tokens: int
    load_requests: int
    exclusion: Exclusion


@dataclass(frozen=True, slots=True)
class Decision:
    """One placement, with what was known at that moment.

    Attributes:
        why: Which part of the router placed it.
        rule: What decided between the ranks.
        token_count: Length of its prompt (tokens).
        load_tokens: Tokens on the rank before it (count).
        load_requests: Sequences on the rank before it (count).
        passed_over: Ranks with fewer tokens that could not take it, least loaded first.
    """

    request_id: int
    rank: int
    why: Why
    rule: Rule
    token_count: int
    load_tokens: int
    load_requests: int
    passed_over: tuple[PassedOver, ...] = ()

    def __str__(self) -> str:
        two = self.why in (Why.STARVING, Why.OVERFLOW, Why.REHOMED)
        part = f"{self.why.value}: {self.rule.value}" if two else self.rule.value
        line = (
            f"request {shown(self.request_id)} ({self.token_count} tokens) -> rank {self.rank}: {part} "
            f"({self.load_tokens} tokens in {self.load_requests} requests before it)"
        )
        for other in self.passed_over:
            line += (
                f"; rank {other.rank} ({other.load_tokens} tokens in {other.load_requests}): {other.exclusion.value}"
            )
        return line


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the log with the same limits.

    Attributes:
        start: Its first placement.
        limits: Sequences per rank, by position, at which the count limit takes a rank out.
        held: Positions kept free for requests that waited longer.
    """

    start: int
    limits: tuple[int, ...]
    held: frozenset[int]


@dataclass(frozen=True, slots=True)
class RouteLog:
    """Everything that happened in one call, by position of rank and index of request; nobody changes it afterwards.

    Attributes:
        ranks: States before the call.
        turn: Where each position stands among equals.
        request_ids, token_counts, weights, block_counts, matches: Of every request of the call; None: 0 each (weights: 1).
        index, position, why: One entry per placement, in order. Positions are bytes where there are at most 256 ranks.
        added: (Place in those columns, tokens) where a rank's load did not grow by the request's own tokens.
        spans: Limits, by stretch.
    """

    ranks: tuple[RankState, ...]
    turn: tuple[int, ...]
    request_ids: tuple[int, ...]
    token_counts: tuple[int, ...]
    weights: tuple[int, ...] | None
    block_counts: tuple[int, ...] | None
    matches: tuple[tuple[int, ...], ...] | None
    index: tuple[int, ...]
    position: Sequence[int]
    why: tuple[Why, ...]
    added: tuple[tuple[int, int], ...]
    spans: tuple[Span, ...]

    def decisions(self) -> Iterator[Decision]:
        """Replays the call."""
        replay = _Replay(self)
        spans = iter(self.spans)
        upcoming = next(spans, None)
        added = dict(self.added)
        for number, index in enumerate(self.index):
            while upcoming is not None and upcoming.start <= number:
                replay.span, upcoming = upcoming, next(spans, None)
            tokens = added.get(number, self.token_counts[index])
            yield replay.step(index, self.position[number], self.why[number], tokens)


class _Replay:
    """The ranks as they were at each placement."""

    def __init__(self, log: RouteLog) -> None:
        self._log = log
        self.span = Span(0, (), frozenset())
        self._tokens = [s.token_count for s in log.ranks]
        self._counts = [s.request_count for s in log.ranks]
        self._slots = [s.free_slots for s in log.ranks]
        self._blocks = [s.free_kv_blocks for s in log.ranks]
        self._room = [s.free_tokens for s in log.ranks]

    def step(self, index: int, position: int, why: Why, added: int) -> Decision:
        log = self._log
        rule, passed = self._rule(index, position, why)
        decision = Decision(
            log.request_ids[index], log.ranks[position].rank, why, rule, log.token_counts[index],
            self._tokens[position], self._counts[position], passed,
        )  # fmt: skip
        weight, need = self._weight(index), self._need(index)
        self._tokens[position] += added
        self._counts[position] += weight
        for column, amount in ((self._slots, weight), (self._blocks, need), (self._room, self._cost(index, position))):
            free = column[position]
            column[position] = None if free is None else free - amount
        return decision

    def _rule(self, index: int, position: int, why: Why) -> tuple[Rule, tuple[PassedOver, ...]]:
        if why in _RULE_OF_WHY:
            return _RULE_OF_WHY[why], ()
        if why is Why.CACHED_PREFIX:
            matches = self._log.matches
            best = (
                max((m for p, m in enumerate(matches[index]) if self._excluded(index, p) is None), default=0)
                if matches
                else 0
            )
            mine = matches[index][position] if matches and matches[index] else 0
            return (Rule.CACHED_PREFIX if mine >= best else Rule.CACHE_OUTWEIGHED), ()
        load, count = self._tokens[position], self._counts[position]
        passed: list[tuple[int, int, int, PassedOver]] = []
        equals: list[int] = []
        for other in range(len(self._tokens)):
            if other == position or self._tokens[other] > load:
                continue
            exclusion = self._excluded(index, other, limited=why is not Why.STARVING)
            if exclusion is None:
                equals.append(self._counts[other])
            elif self._tokens[other] < load:
                seen = PassedOver(self._log.ranks[other].rank, self._tokens[other], self._counts[other], exclusion)
                passed.append((self._tokens[other], self._counts[other], other, seen))
        passed.sort(key=lambda entry: entry[:3])
        found = tuple(entry[3] for entry in passed)
        if found:
            return _RULE_OF_EXCLUSION.get(found[0].exclusion, Rule.WITH_ROOM), found
        if not equals:
            return Rule.LEAST_LOADED, ()
        return (Rule.ITS_TURN if min(equals) == count else Rule.FEWEST_REQUESTS), ()

    def _excluded(self, index: int, position: int, *, limited: bool = True) -> Exclusion | None:
        """Why a rank could not take it: what a rank lacks for good before what the rules of this call refuse."""
        if self._log.ranks[position].draining:
            return Exclusion.DRAINING
        for column, amount, exclusion in (
            (self._slots, self._weight(index), Exclusion.NO_FREE_SLOT),
            (self._blocks, self._need(index), Exclusion.NO_FREE_KV_BLOCKS),
            (self._room, self._cost(index, position), Exclusion.NO_FREE_TOKENS),
        ):
            free = column[position]
            if free is not None and free < amount:
                return exclusion
        if position in self.span.held:
            return Exclusion.HELD_FOR_STARVING
        if limited and self.span.limits and self._counts[position] >= self.span.limits[position]:
            return Exclusion.COUNT_LIMIT
        return None

    def _weight(self, index: int) -> int:
        return 1 if self._log.weights is None else self._log.weights[index]

    def _need(self, index: int) -> int:
        return 0 if self._log.block_counts is None else self._log.block_counts[index]

    def _cost(self, index: int, position: int) -> int:
        length, matches = self._log.token_counts[index], self._log.matches
        if matches is None or not matches[index]:
            return length
        return max(length - matches[index][position], 0)


@dataclass(frozen=True, eq=False, repr=False)
class RoutingResult:
    """Where every request went. Each request is in exactly one of ``assignments``, ``leftovers`` and ``errors``.

    Attributes:
        expected_request_count: Sequences on the fullest rank if its fair share is taken (count); no rank ends above it.
        digest: Hash of everything that was put in (16 bytes): equal on ranks that saw the same.
        log: What happened, frozen; ``assignments`` and ``decisions`` are worked out from it when they are asked for.
    """

    leftovers: tuple[Leftover, ...]
    errors: tuple[RequestError, ...]
    expected_request_count: int
    digest: bytes
    log: RouteLog

    def __repr__(self) -> str:
        return (
            f"RoutingResult(assignments={self.assignments!r}, leftovers={self.leftovers!r}, errors={self.errors!r}, "
            f"expected_request_count={self.expected_request_count!r}, digest={self.digest!r})"
        )

    @cached_property
    def assignments(self) -> dict[int, tuple[int, ...]]:
        """Request ids by rank, in the order to start them; every rank is a key. See :meth:`ids_on` for one rank's."""
        log = self.log
        placed: list[list[int]] = [[] for _ in log.ranks]
        for position, index in zip(log.position, log.index, strict=True):
            placed[position].append(log.request_ids[index])
        return {state.rank: tuple(placed[p]) for p, state in enumerate(log.ranks)}

    def ids_on(self, rank: int) -> tuple[int, ...]:
        """Request ids of one rank, in the order to start them: all that this rank itself needs, without the others'.

        Raises:
            KeyError: No such rank was in this call.
        """
        log = self.log
        ranks = [state.rank for state in log.ranks]
        if rank not in ranks:
            raise KeyError(rank)
        mine = ranks.index(rank)
        if isinstance(log.position, bytes):
            is_mine = bytearray(256)
            is_mine[mine] = 1
            chosen: Iterable[int] = compress(log.index, log.position.translate(is_mine))
        else:
            chosen = [index for index, position in zip(log.index, log.position, strict=True) if position == mine]
        return tuple(map(log.request_ids.__getitem__, chosen))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every placement with what was known at that moment and the rule that decided; worked out when it is asked for."""
        return tuple(self.log.decisions())

    def explain(self, request_id: int | None = None) -> str:
        """In words, one line per request (of one request, when its id is given).

        Raises:
            KeyError: No such request was in this call.
        """
        lines = [
            *_lines(request_id, [(d.request_id, str(d)) for d in self.decisions]),
            *_lines(request_id, [(x.request_id, _left(x)) for x in self.leftovers]),
            *_lines(
                request_id,
                [(e.request_id, f"request {shown(e.request_id)} refused: {e.field}: {e.message}") for e in self.errors],
            ),
        ]
        if request_id is not None and not lines:
            raise KeyError(request_id)
        return "\n".join(lines)


def _left(leftover: Leftover) -> str:
    detail = f" ({leftover.detail})" if leftover.detail else ""
    return f"request {shown(leftover.request_id)} stays: {leftover.reason.value}{detail}"


def _lines(wanted: int | None, entries: Sequence[tuple[object, str]]) -> list[str]:
    return [line for request_id, line in entries if wanted is None or request_id is wanted or _same(request_id, wanted)]


def _same(request_id: object, wanted: object) -> bool:
    """Whether two ids are equal: as integers of any type or as strings; an id that was refused may be anything, arrays too."""
    number = plain_integer(wanted)
    if number is not None:
        return number == plain_integer(request_id)
    return isinstance(request_id, str) and isinstance(wanted, str) and str.__eq__(request_id, wanted)
