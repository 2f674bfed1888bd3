"""The router: checks inputs, runs targets, starving and policy over one placement, and says what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from adp_router._batch import RouteBatch
from adp_router._check import Checked, check_ranks, check_requests, digest_of
from adp_router._config import number, take
from adp_router._errors import RouterConfigError
from adp_router._memory import Memory
from adp_router._plain import plain_flag, plain_integer
from adp_router._policies import Balanced, ConversationAffinity, Policy, PrefixAffinity, RoundRobin
from adp_router._result import RoutingResult
from adp_router._route import NO_LIMIT, Placement, fair_limits, seed_limits
from adp_router._starving import place_starving, place_targets, split_impossible
from adp_router._text import shown
from adp_router._types import Leftover, LeftoverReason, RankState, RouteRequest

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
        if self.count_multiplier is not None:
            take(self, "count_multiplier", number, "a number of at least 1", lambda value: value >= 1.0)
        take(self, "starvation_rounds", plain_integer, "an integer of at least 1", lambda value: value >= 1)
        take(self, "match_fraction_min", number, "a number in 0..1", lambda value: 0.0 <= value <= 1.0)
        take(self, "load_weight", number, "a finite number of at least 0", lambda value: 0.0 <= value < float("inf"))
        take(self, "conversations_max", plain_integer, "an integer of at least 1", lambda value: value >= 1)


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
        if config is not None and not isinstance(config, RouterConfig):
            raise RouterConfigError(f"config must be a RouterConfig, got {shown(config)}")
        self.config = config or RouterConfig()
        policies: dict[str, Policy] = {
            "balanced": Balanced(),
            "round_robin": RoundRobin(),
            "prefix": PrefixAffinity(self.config.match_fraction_min, self.config.load_weight),
            "conversation": ConversationAffinity(),
        }
        name = str.__str__(policy) if isinstance(policy, str) else None
        if name not in policies:
            raise RouterConfigError(f"policy must be one of {', '.join(policies)}, got {shown(policy)}")
        flag = plain_flag(compat)
        if flag is None:
            raise RouterConfigError(f"compat must be True or False, got {shown(compat)}")
        if flag and name != "balanced":
            raise RouterConfigError(f"compat goes with policy 'balanced' only, got {name!r}")
        self.policy_name = name
        self.compat = flag
        self._policy = policies[name]
        multiplier = self.config.count_multiplier
        self._multiplier = 1.0 if flag else _MULTIPLIER[name] if multiplier is None else multiplier
        if self._multiplier == float("inf"):
            self._multiplier = None
        self._memory = Memory()
        self._settings = repr((name, flag, *astuple(self.config))).encode()

    def home_of(self, conversation_id: str) -> int | None:
        """The rank that a conversation is at home on (policy ``conversation``), or None."""
        given: object = conversation_id
        return self._memory.homes.settled_rank_of(str.__str__(given)) if isinstance(given, str) else None

    def route(self, requests: Sequence[RouteRequest] | RouteBatch, ranks: Sequence[RankState]) -> RoutingResult:
        """Place a batch. Equal inputs give equal outputs on every rank and in every process.

        The router takes over what the call remembers by one assignment at its end: a call that raises, whatever it raises, has
        changed nothing. One thread at a time.

        Args:
            requests: In order of arrival; objects, or columns where there are thousands.
            ranks: Every rank of the group, in the same order everywhere.

        Returns:
            Every request in exactly one of assignments, leftovers (with a reason) and errors.

        Raises:
            RankStateError: No ranks, one twice, or a field that cannot be used. Nothing changed.
            RouteBatchError: Columns of unequal length, or something that is not a request. Nothing changed.
        """
        batch = requests if isinstance(requests, RouteBatch) else RouteBatch.of(requests)
        states, position_of, rank_bytes = check_ranks(ranks)
        checked = check_requests(batch, position_of, len(states))
        memory = self._memory.draft()
        digest = digest_of(self._settings, memory.digest_part(), rank_bytes, *checked.packed)
        # In the compatible mode nothing counts as given: the turns are the order of the ranks.
        turns = memory.turns(states)
        placement = Placement(checked.batch, states, turns, as_seed=self.compat, cached=self._policy.cached)
        if self.compat:
            impossible: dict[int, str] = {}
            self._place_as_seed(placement, checked.good, position_of, memory)
        else:
            memory.see_idle(states)
            impossible = self._place(placement, checked.good, position_of, memory)
            memory.homes.trim(self.config.conversations_max)
        result = self._result(placement, checked, impossible, digest)
        memory.totals.add(result, placement.why_counts, placement.placed_counts())
        self._memory = memory
        return result

    def _place_as_seed(
        self, placement: Placement, good: Sequence[int], position_of: dict[int, int], memory: Memory
    ) -> None:
        rest = place_targets(placement, good, position_of)
        placement.limit_to(seed_limits(placement, rest))
        self._policy.place(placement, rest, memory)

    def _place(
        self, placement: Placement, good: Sequence[int], position_of: dict[int, int], memory: Memory
    ) -> dict[int, str]:
        """The phases in order; returns what each impossible request lacks."""
        policy = self._policy
        rest, impossible = split_impossible(placement, good, position_of)
        for index in impossible:
            placement.leave(index, LeftoverReason.IMPOSSIBLE)
        rest, memory.held = place_starving(
            placement,
            rest,
            position_of,
            memory,
            self.config.starvation_rounds,
            lambda index: policy.prefers(placement, index, memory),
        )
        placement.limit_to(placement.limits)
        rest = place_targets(placement, rest, position_of)
        for index, position in zip(placement.log_index, placement.log_position, strict=True):
            policy.observe(placement, index, position, memory)
        self._place_in_shares(placement, rest, memory)
        memory.give(
            placement.ranks,
            [after - state.token_count for after, state in zip(placement.tokens, placement.ranks, strict=True)],
            [after - before for after, before in zip(placement.counts, placement.start, strict=True)],
        )
        return impossible

    def _place_in_shares(self, placement: Placement, rest: Sequence[int], memory: Memory) -> None:
        """Fair shares among the ranks that can take something; what a full rank cannot take is shared by the others again.

        It ends after as many rounds as there are ranks, and one: the shares of a round together are at least what is left, so
        where something is left over one of its ranks did not reach its share, and can take nothing of that in the next.
        """
        while True:
            among = placement.able(rest) or range(placement.size)
            placement.limit_to(fair_limits(placement, rest, self._multiplier, among))
            self._policy.place(placement, rest, memory)
            rest = placement.take_back()
            if not rest:
                return

    def _result(
        self, placement: Placement, checked: Checked, impossible: dict[int, str], digest: bytes
    ) -> RoutingResult:
        ids = placement.batch.request_ids
        return RoutingResult(
            leftovers=tuple(
                Leftover(ids[index], reason, impossible.get(index, "")) for index, reason in placement.left
            ),
            errors=tuple(checked.errors),
            expected_request_count=self._expected(placement),
            digest=digest,
            log=placement.log(),
        )

    def _expected(self, placement: Placement) -> int:
        fullest = max(placement.counts)
        if self._multiplier is None:
            return fullest
        # A rank that drains has no share, but in the compatible mode every rank has one.
        ends = (
            min(limit, count + slots)
            for limit, count, slots, is_open in zip(
                placement.limits, placement.counts, placement.slots, placement.open, strict=True
            )
            if limit < NO_LIMIT and (is_open or self.compat)
        )
        return max(fullest, *ends, 0)

    def statistics(self) -> RouterStatistics:
        """A frozen snapshot."""
        totals = self._memory.totals
        return RouterStatistics(
            calls=totals.calls,
            placed=totals.placed,
            left_over=totals.left_over,
            refused=totals.refused,
            placed_by_rank=dict(totals.by_rank),
            placed_by_reason={why.name.lower(): n for why, n in totals.by_reason.items()},
            left_over_by_reason={reason.value: n for reason, n in totals.by_leftover.items()},
        )
