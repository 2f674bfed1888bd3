"""Which submissions may enter the authoritative broadcast now, and which rank gets them.

Context: all ranks. In the generation-first schedule only requests whose destination rank 0 holds, and at most so many as the
metadata-only window takes: they wait for peers, not for compute. Generation: one attention-DP rank each, chosen by
adp-router from what rank 0 knows of their load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adp_router import RankState, Router, RouteRequest
from meta_executor.executor.desk import Client, Submission

#: Routing decisions that ``/debug/routing`` shows (count).
DECISIONS_KEPT_MAX = 64


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

    def admits(self, submission: Submission) -> bool:
        """Whether it may enter now."""
        if self._credits() - self._entering <= 0:
            return False
        if submission.schedule_style == "generation_first":
            waiting = self._pre_active_count() + self._entering_generation_first
            if waiting >= self._pre_active_max or not self._peer_is_ready(submission.request_id):
                return False
            self._entering_generation_first += 1
            self.pre_active_peak = max(self.pre_active_peak, waiting + 1)
        self._entering += 1
        return True

    def place(self, submissions: list[Submission]) -> list[int]:
        """Every rank of the pipeline holds its layers of every request."""
        self._entering = 0
        self._entering_generation_first = 0
        return [-1] * len(submissions)

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
        batch_size: Sequences that one rank decodes at once (count): what a "full" rank is.
    """

    def __init__(self, *, rank_count: int, policy: str) -> None:
        self._router = Router(policy)  # type: ignore[arg-type]
        self._loads = [_Load() for _ in range(rank_count)]
        self.routed = [0] * rank_count
        self._decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS_KEPT_MAX)

    def admits(self, submission: Submission) -> bool:
        """What finds no blocks yet waits on its rank."""
        return True

    def place(self, submissions: list[Submission]) -> list[int]:
        """Target rank of each."""
        requests = [
            RouteRequest(s.request_id, len(s.token_ids), conversation_id=s.conversation_id) for s in submissions
        ]
        ranks = [RankState(rank, load.tokens, load.requests) for rank, load in enumerate(self._loads)]
        result = self._router.route(requests, ranks)
        rank_of = {request_id: rank for rank, ids in result.assignments.items() for request_id in ids}
        targets = []
        for submission in submissions:
            # Nothing limits a rank here, so the router leaves none over; a rank that is full queues.
            target = rank_of.get(
                submission.request_id, min(range(len(self._loads)), key=lambda r: self._loads[r].tokens)
            )
            self._loads[target].tokens += _weight(submission)
            self._loads[target].requests += 1
            self.routed[target] += 1
            targets.append(target)
        for decision in result.decisions:
            self._decisions.append(
                {
                    "request_id": decision.request_id,
                    "rank": decision.rank,
                    "why": decision.why.value,
                    "tokens": decision.token_count,
                    "load_tokens": decision.load_tokens,
                    "load_requests": decision.load_requests,
                }
            )
        return targets

    def left(self, client: Client) -> None:
        """Its rank is lighter."""
        load = self._loads[client.target_rank]
        load.tokens -= _weight(client.submission)
        load.requests -= 1

    def decisions(self) -> list[dict[str, Any]]:
        """The last decisions, oldest first."""
        return list(self._decisions)


def _weight(submission: Submission) -> int:
    return len(submission.token_ids)
