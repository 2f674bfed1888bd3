"""The router: checks inputs, runs targets, starving and policy over one placement, and says what came of it."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal

from adp_router._batch import NO_TARGET, RouteBatch
from adp_router._errors import RankStateError, RouterConfigError
from adp_router._policies import Balanced, ConversationAffinity, Policy, PrefixAffinity, RoundRobin
from adp_router._route import Placement, fair_limit, gather
from adp_router._types import Leftover, LeftoverReason, RankState, RequestError, RouteRequest, RoutingResult, Why

PolicyName = Literal["balanced", "round_robin", "prefix", "conversation"]

#: Default of ``count_multiplier`` by policy: the balanced one keeps the seed's fair share, affinity needs slack.
_MULTIPLIER: dict[str, float | None] = {"balanced": 1.0, "round_robin": None, "prefix": 2.0, "conversation": 1.0}


@dataclass(frozen=True)
class RouterConfig:
    """Settings; equal on every rank of a group (the digest covers them).

    Attributes:
        count_multiplier: A rank takes at most this multiple of a fair share of requests (>= 1); the shares are those of
            the ranks that can take something (draining and full ones have none). 1.25 brings the fullest
            rank's tokens within a fraction of a percent of the best possible, at 20 % more requests on it; ``inf`` relaxes
            the limit altogether. None: the policy's default.
        starvation_rounds: A request left over this often goes first, and a rank is kept free for it (count, >= 1).
        match_fraction_min: ``prefix``: a smaller cached part does not attract (0–1).
        load_weight: ``prefix``: weight of the load against the cache (>= 0).
        conversations_max: ``conversation``: homes remembered (count, >= 1).
    """

    count_multiplier: float | None = None
    starvation_rounds: int = 16
    match_fraction_min: float = 0.1
    load_weight: float = 1.0
    conversations_max: int = 65_536

    def __post_init__(self) -> None:
        if self.count_multiplier is not None and not self.count_multiplier >= 1.0:
            raise RouterConfigError(f"count_multiplier must be at least 1, got {self.count_multiplier!r}")
        if self.starvation_rounds < 1:
            raise RouterConfigError(f"starvation_rounds must be at least 1, got {self.starvation_rounds!r}")
        if not 0.0 <= self.match_fraction_min <= 1.0:
            raise RouterConfigError(f"match_fraction_min must be in 0..1, got {self.match_fraction_min!r}")
        if not self.load_weight >= 0.0:
            raise RouterConfigError(f"load_weight must be at least 0, got {self.load_weight!r}")
        if self.conversations_max < 1:
            raise RouterConfigError(f"conversations_max must be at least 1, got {self.conversations_max!r}")


@dataclass(frozen=True)
class RouterStatistics:
    """Counts since construction."""

    calls: int
    placed: int
    left_over: int
    refused: int
    placed_by_rank: dict[int, int]
    placed_by_reason: dict[str, int]
    left_over_by_reason: dict[str, int]


@dataclass
class _Totals:
    calls: int = 0
    placed: int = 0
    left_over: int = 0
    refused: int = 0
    by_rank: dict[int, int] = field(default_factory=dict)
    by_reason: dict[Why, int] = field(default_factory=dict)
    by_leftover: dict[LeftoverReason, int] = field(default_factory=dict)


class Router:
    """Spreads batches of requests over ranks.

    Args:
        policy: What places requests without a target.
        compat: Exactly the order of the router that this one grew from, pins and children included: tokens of targeted
            requests and children are not counted, and a strict request whose target is full goes elsewhere.
        config: See :class:`RouterConfig`.

    Raises:
        RouterConfigError: The policy is not known, or ``compat`` goes with another than ``balanced``.
    """

    def __init__(
        self, policy: PolicyName = "balanced", *, compat: bool = False, config: RouterConfig | None = None
    ) -> None:
        self.config = config or RouterConfig()
        policies: dict[str, Policy] = {
            "balanced": Balanced(),
            "round_robin": RoundRobin(),
            "prefix": PrefixAffinity(self.config.match_fraction_min, self.config.load_weight),
            "conversation": ConversationAffinity(self.config.conversations_max),
        }
        if policy not in policies:
            raise RouterConfigError(f"policy must be one of {', '.join(policies)}, got {policy!r}")
        if compat and policy != "balanced":
            raise RouterConfigError(f"compat goes with policy 'balanced' only, got {policy!r}")
        self.policy_name = policy
        self.compat = compat
        self._policy = policies[policy]
        multiplier = self.config.count_multiplier
        self._multiplier = 1.0 if compat else _MULTIPLIER[policy] if multiplier is None else multiplier
        if self._multiplier == float("inf"):
            self._multiplier = None
        self._totals = _Totals()
        self._settings = f"{policy}|{compat}|{self.config}".encode()

    @property
    def policy(self) -> Policy:
        """The policy object, for its state."""
        return self._policy

    def route(self, requests: Sequence[RouteRequest] | RouteBatch, ranks: Sequence[RankState]) -> RoutingResult:
        """Place a batch. Equal inputs give equal outputs on every rank and in every process.

        Args:
            requests: In order of arrival; objects, or columns where there are thousands.
            ranks: Every rank of the group, in the same order everywhere.

        Returns:
            Every request in exactly one of assignments, leftovers (with a reason) and errors.

        Raises:
            RankStateError: The ranks are none, not distinct, no integers, or have negative counts. Nothing changed.
            RouteBatchError: Columns of unequal length. Nothing changed.
        """
        batch = requests.normalised() if isinstance(requests, RouteBatch) else RouteBatch.of(requests)
        position_of = _check_ranks(ranks)
        good, errors, packed = _check_requests(batch, position_of, len(ranks))
        digest = _digest(self._settings, self._policy.state_digest(), packed, ranks)
        placement = Placement(batch, ranks, count_pinned_tokens=not self.compat, count_children=not self.compat)
        rest = placement.place_targets(good, position_of, strict_may_move=self.compat)
        if batch.conversation_ids is not None:
            for index, position in zip(placement.log_index, placement.log_position, strict=True):
                conversation = batch.conversation_ids[index]
                if conversation is not None:
                    self._policy.observe_target(conversation, ranks[position].rank)
        if self.compat:
            placement.limit = fair_limit(placement, rest, self._multiplier, among=range(len(ranks)))
            self._policy.place(placement, rest)
        else:
            rest = placement.place_starving(rest, self.config.starvation_rounds)
            self._place_in_shares(placement, rest)
        ids = batch.request_ids
        placed: list[list[int]] = [[] for _ in ranks]
        adders = [one.append for one in placed]
        for position, request_id in zip(placement.log_position, gather(ids, placement.log_index), strict=True):
            adders[position](request_id)
        fullest = max(placement.counts)
        result = RoutingResult(
            assignments={state.rank: tuple(placed[p]) for p, state in enumerate(ranks)},
            leftovers=tuple(Leftover(ids[index], reason) for index, reason in placement.left),
            errors=tuple(errors),
            expected_request_count=fullest if self._multiplier is None else max(placement.limit, fullest),
            digest=digest,
            placement=placement,
        )
        self._count(result, placement)
        return result

    def _place_in_shares(self, placement: Placement, rest: list[int]) -> None:
        """Fair shares among the ranks that can take something; what a full rank cannot take is shared by the others again."""
        for attempt in range(placement.size + 1):
            among = placement.able(rest) or range(placement.size)
            # Each round fills a rank for good, or nearly so; the last one only asks for capacity.
            multiplier = self._multiplier if attempt < placement.size else None
            placement.limit = fair_limit(placement, rest, multiplier, among=among)
            self._policy.place(placement, rest)
            rest = placement.take_back()
            if not rest:
                return
        for index in rest:
            placement.leave(index, LeftoverReason.COUNT_LIMIT)

    def _count(self, result: RoutingResult, placement: Placement) -> None:
        totals = self._totals
        totals.calls += 1
        totals.placed += len(placement.log_index)
        totals.left_over += len(result.leftovers)
        totals.refused += len(result.errors)
        for rank, ids in result.assignments.items():
            totals.by_rank[rank] = totals.by_rank.get(rank, 0) + len(ids)
        for why, count in placement.why_counts.items():
            totals.by_reason[why] = totals.by_reason.get(why, 0) + count
        for left in result.leftovers:
            totals.by_leftover[left.reason] = totals.by_leftover.get(left.reason, 0) + 1

    def statistics(self) -> RouterStatistics:
        """A frozen snapshot."""
        totals = self._totals
        return RouterStatistics(
            calls=totals.calls,
            placed=totals.placed,
            left_over=totals.left_over,
            refused=totals.refused,
            placed_by_rank=dict(totals.by_rank),
            placed_by_reason={why.name.lower(): n for why, n in totals.by_reason.items()},
            left_over_by_reason={reason.value: n for reason, n in totals.by_leftover.items()},
        )


def _check_ranks(ranks: Sequence[RankState]) -> dict[int, int]:
    if not ranks:
        raise RankStateError("ranks: want at least one, got none")
    position_of: dict[int, int] = {}
    for position, state in enumerate(ranks):
        for name in _RANK_FIELDS:
            value = getattr(state, name)
            if not _is_integer(value) and (value is not None or name in _REQUIRED):
                raise RankStateError(f"ranks[{position}].{name}: want an integer, got {value!r}")
        if state.rank < 0:
            raise RankStateError(f"ranks[{position}].rank: must not be negative, got {state.rank}")
        if state.rank in position_of:
            raise RankStateError(f"ranks[{position}].rank: {state.rank} stands twice")
        position_of[state.rank] = position
        if state.token_count < 0 or state.request_count < 0:
            field_name = "token_count" if state.token_count < 0 else "request_count"
            raise RankStateError(
                f"ranks[{position}].{field_name}: must not be negative, got {getattr(state, field_name)}"
            )
    return position_of


def _check_requests(
    batch: RouteBatch, position_of: dict[int, int], size: int
) -> tuple[list[int], list[RequestError], list[bytes]]:
    """Indices of requests that can be routed, what is wrong with the others, and the columns' bytes for the digest.

    Columns without a fault cost one pass: packing them as 64-bit integers also tells whether they are such.
    """
    ids = batch.request_ids
    bad: dict[int, tuple[str, str]] = {}
    packed: list[bytes] = []
    columns = (
        ("request_id", ids), ("token_count", batch.token_counts), ("child_count", batch.child_counts),
        ("kv_block_count", batch.kv_block_counts), ("waited_rounds", batch.waited_rounds),
    )  # fmt: skip
    for name, column in columns:
        if column is None:
            continue
        numbers, small, data = _pack(column)
        packed += (name.encode(), data)
        if small:
            continue
        if not numbers:
            for index, value in enumerate(column):
                if not _is_integer(value):
                    bad.setdefault(index, (name, f"want an integer, got {value!r}"))
                elif name != "request_id" and value >= _COUNT_END:
                    bad.setdefault(index, (name, f"want less than {_COUNT_END}, got {value}"))
        if name != "request_id" and (not numbers or (column and min(column) < 0)):
            for index, value in enumerate(column):
                if index not in bad and value < 0:
                    bad[index] = (name, f"must not be negative, got {value}")
    if bad or len(set(ids)) != len(ids):
        seen: set[int] = set()
        for index, request_id in enumerate(ids):
            if index in bad and bad[index][0] == "request_id":
                continue
            if request_id in seen:
                bad.setdefault(index, ("request_id", f"{request_id} stands twice"))
            seen.add(request_id)
    if batch.target_ranks is not None:
        nobody = NO_TARGET if batch.minus_one_is_no_target else None
        targets = [None if target == nobody else target for target in batch.target_ranks]
        packed += (b"target_rank", _pack([NO_TARGET - 1 if target is None else target for target in targets])[2])
    else:
        targets = None
    if targets is not None or batch.strict is not None:
        strict = batch.strict
        for index in range(len(ids)):
            target = None if targets is None else targets[index]
            if target is not None and (not _is_integer(target) or target not in position_of):
                bad.setdefault(index, ("target_rank", f"no rank {target!r}; there are {sorted(position_of)}"))
            elif target is None and strict is not None and strict[index]:
                bad.setdefault(index, ("strict", "a strict request names its target_rank, got None"))
    if batch.strict is not None:
        packed += (b"strict", bytes(map(bool, batch.strict)))
    if batch.conversation_ids is not None:
        packed += (b"conversation_id", _text(batch.conversation_ids))
        keys: Sequence[object] = batch.conversation_ids
        for index, key in enumerate(keys):
            if key is not None and not isinstance(key, str):
                bad.setdefault(index, ("conversation_id", f"want a string or None, got {key!r}"))
    if batch.prefix_matches is not None:
        for index, matches in enumerate(batch.prefix_matches):
            if matches:
                numbers, _, data = _pack(matches)
                packed.append(b"prefix_matches %d" % index + data)
                if len(matches) != size:
                    bad.setdefault(index, ("prefix_matches", f"want one count per rank ({size}), got {len(matches)}"))
                elif not numbers or min(matches) < 0:
                    bad.setdefault(index, ("prefix_matches", f"want counts that are not negative, got {matches!r}"))
    if not bad:
        return list(range(len(ids))), [], packed
    errors = [RequestError(ids[i], *bad[i]) for i in sorted(bad)]
    return [i for i in range(len(ids)) if i not in bad], errors, packed


_RANK_FIELDS = ("rank", "token_count", "request_count", "free_slots", "free_kv_blocks", "free_tokens")
_REQUIRED = ("rank", "token_count", "request_count")
#: Type code of unsigned integers of 32 bits.
_UNSIGNED = "I" if array("I").itemsize == 4 else "L"
#: Counts are below this, so that sums of thousands stay what they are (count).
_COUNT_END = 1 << 62


def _digest(settings: bytes, policy_state: bytes, columns: Sequence[bytes], ranks: Sequence[RankState]) -> bytes:
    """Hash of what a call was given (16 bytes): settings, the policy's memory, requests and ranks, in order."""
    digest = hashlib.blake2b(settings, digest_size=16)
    digest.update(policy_state)
    for column in columns:
        digest.update(b"%d:" % len(column))
        digest.update(column)
    for state in ranks:
        values = [getattr(state, name) for name in _RANK_FIELDS]
        digest.update(_text([*values, bool(state.draining)]))
    return digest.digest()


def _is_integer(value: object) -> bool:
    return type(value) is int or isinstance(value, Integral)


def _pack(column: Sequence[Any]) -> tuple[bool, bool, bytes]:
    """Whether a column is all integers of 64 bits, whether all of them are of 32 and none is negative, and its bytes.

    Unsigned ones are a third of the work, and half the bytes to hash.
    """
    values = column if type(column) is list else list(column)
    for code in _UNSIGNED, "q":
        packed = array(code)
        try:
            packed.fromlist(values)
        except (TypeError, OverflowError):
            continue
        return True, code != "q", code.encode() + packed.tobytes()
    return False, False, _text(values)


def _text(values: Sequence[Any]) -> bytes:
    """Bytes of anything, equal in every process: an object's address never gets in."""
    return repr([v if v is None or isinstance(v, (int, float, str)) else type(v).__name__ for v in values]).encode()
