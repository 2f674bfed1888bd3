"""Which submissions may enter the authoritative broadcast now, and which rank gets them.

Context: all ranks. In the generation-first schedule only requests whose destination rank 0 holds, and at most so many as the
metadata-only window takes: they wait for peers, not for compute. Generation: one attention-DP rank each, chosen by
adp-router from what rank 0 knows of their load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adp_router import RankState, Router, RouteRequest
from meta_executor.executor.desk import Client, RankChoice
from meta_executor.executor.request import Request

#: Why a context instance uses all its ranks, and what a request may have to wait for before it enters; as they are shown.
EVERY_STAGE = "every stage of the pipeline holds its layers"
NO_CREDIT = "a credit of the agreement"
WINDOW_FULL = "a place in the metadata-only window"
NO_DESTINATION = "its destination from the generation instance"


class ContextAdmission:
    """See the module.

    Args:
        peer_is_ready: Whether rank 0 holds a request's destination.
        pre_active_count: Generation-first requests that are admitted and not activated, now.
        pre_active_max: The window (requests).
        credits: Requests that the agreement can take now (count).
    """

    def __init__(
        self,
        *,
        peer_is_ready: Callable[[int], bool],
        pre_active_count: Callable[[], int],
        pre_active_max: int,
        credits: Callable[[], int],
    ) -> None:
        self._peer_is_ready = peer_is_ready
        self._pre_active_count = pre_active_count
        self._pre_active_max = pre_active_max
        self._credits = credits
        #: Admitted in this round of the desk, not yet counted by the transceiver.
        self._entering = 0
        self._entering_generation_first = 0
        self.pre_active_peak = 0
        self.policy = "pipeline"

    def waits_for(self, request: Request) -> str:
        """What it must wait for; "": it enters now, and counts from now on."""
        if self._credits() - self._entering <= 0:
            return NO_CREDIT
        if request.generation_first:
            if not self._peer_is_ready(request.request_id):
                return NO_DESTINATION
            waiting = self._pre_active_count() + self._entering_generation_first
            if waiting >= self._pre_active_max:
                return WINDOW_FULL
            self._entering_generation_first += 1
            self.pre_active_peak = max(self.pre_active_peak, waiting + 1)
        self._entering += 1
        return ""

    def place(self, requests: list[Request]) -> list[RankChoice]:
        """Every rank of the pipeline holds its layers of every request."""
        self._entering = 0
        self._entering_generation_first = 0
        return [RankChoice(-1, EVERY_STAGE)] * len(requests)

    def left(self, client: Client) -> None:
        """The agreement gives credits back, not the answer."""


@dataclass(slots=True)
class _Load:
    tokens: int = 0
    requests: int = 0


class GenerationAdmission:
    """See the module.

    Args:
        rank_count: Ranks of the attention-DP group.
        policy: One of adp-router's.
    """

    def __init__(self, *, rank_count: int, policy: str) -> None:
        self._router = Router(policy)  # type: ignore[arg-type]
        self._loads = [_Load() for _ in range(rank_count)]
        self.routed = [0] * rank_count
        self.policy = policy

    def waits_for(self, request: Request) -> str:
        """Nothing: what finds no blocks yet waits on its rank."""
        return ""

    def place(self, requests: list[Request]) -> list[RankChoice]:
        """Target rank of each, with what was known when it was chosen."""
        asked = [RouteRequest(r.request_id, r.prompt_count, conversation_id=r.conversation_id) for r in requests]
        ranks = [RankState(rank, load.tokens, load.requests) for rank, load in enumerate(self._loads)]
        result = self._router.route(asked, ranks)
        chosen = {
            decision.request_id: RankChoice(
                decision.rank, decision.rule.value, decision.load_tokens, decision.load_requests
            )
            for decision in result.decisions
        }
        placements = []
        for request in requests:
            # Nothing limits a rank here, so the router leaves none over; a rank that is full queues.
            placement = chosen.get(request.request_id) or self._least()
            self._loads[placement.rank].tokens += request.prompt_count
            self._loads[placement.rank].requests += 1
            self.routed[placement.rank] += 1
            placements.append(placement)
        return placements

    def _least(self) -> RankChoice:
        rank = min(range(len(self._loads)), key=lambda r: self._loads[r].tokens)
        load = self._loads[rank]
        return RankChoice(rank, "left over by the router, fewest tokens", load.tokens, load.requests)

    def left(self, client: Client) -> None:
        """Its rank is lighter."""
        load = self._loads[client.target_rank]
        load.tokens -= client.request.prompt_count
        load.requests -= 1
