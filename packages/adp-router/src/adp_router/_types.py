"""Inputs and results of routing. All frozen; ids and counts are plain integers, so any engine can fill them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adp_router._route import Placement


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One request to place.

    Attributes:
        request_id: Unique in a call.
        token_count: Prompt tokens that its rank has to compute (count, >= 0).
        target_rank: Rank that it asks for, or None (-1 is no rank).
        strict: Only the target will do; otherwise it is a wish.
        child_count: Further sequences that share the prompt (n > 1); each takes a slot (count).
        kv_block_count: KV blocks that it will need (count); 0 where the engine does not say.
        conversation_id: Turns of one conversation share it.
        prefix_matches: Tokens of its prompt that each rank has cached, by position in the ranks given (tokens).
        waited_rounds: Calls in which it was left over before (count).
    """

    request_id: int
    token_count: int
    target_rank: int | None = None
    strict: bool = False
    child_count: int = 0
    kv_block_count: int = 0
    conversation_id: str | None = None
    prefix_matches: tuple[int, ...] = ()
    waited_rounds: int = 0


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank before this call. A capacity of None does not limit.

    Attributes:
        token_count: Tokens that load it (count).
        request_count: Sequences that it holds (count).
        free_slots: Sequences that it can still take (count).
        free_kv_blocks: KV blocks that are free (count).
        free_tokens: Prompt tokens that it can still take in (count).
        draining: Takes nothing new.
    """

    rank: int
    token_count: int = 0
    request_count: int = 0
    free_slots: int | None = None
    free_kv_blocks: int | None = None
    free_tokens: int | None = None
    draining: bool = False


class LeftoverReason(enum.Enum):
    """Why a request was not placed in this call. It may be offered again."""

    TARGET_FULL = "target_full"
    TARGET_DRAINING = "target_draining"
    ALL_DRAINING = "all_draining"
    NO_FREE_SLOT = "no_free_slot"
    NO_FREE_KV_BLOCKS = "no_free_kv_blocks"
    NO_FREE_TOKENS = "no_free_tokens"
    COUNT_LIMIT = "count_limit"
    HELD_FOR_STARVING = "held_for_starving"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A request that stays in the queue, and why."""

    request_id: int
    reason: LeftoverReason


@dataclass(frozen=True, slots=True)
class RequestError:
    """A request that can never be routed as it is: which field, and what is wrong with it. Its id is what was given."""

    request_id: int
    field: str
    message: str


class Why(enum.Enum):
    """Why a request went where it did."""

    TARGET = "its target"
    LEAST_LOADED = "least loaded"
    STARVING = "waited longest, least loaded"
    NEXT_IN_TURN = "next in turn"
    CACHED_PREFIX = "most of its prompt is cached there"
    HOME = "home of its conversation"
    OVERFLOW = "its conversation's home is full, least loaded"


@dataclass(frozen=True, slots=True)
class Decision:
    """One placement, with what was known at that moment.

    Attributes:
        load_tokens: Tokens on the rank before it (count).
        load_requests: Sequences on the rank before it (count).
    """

    request_id: int
    rank: int
    why: Why
    token_count: int
    load_tokens: int
    load_requests: int


@dataclass(frozen=True, eq=False)
class RoutingResult:
    """Where every request went. Each request is in exactly one of ``assignments``, ``leftovers`` and ``errors``.

    Attributes:
        assignments: Request ids by rank, in the order to start them; every rank is a key.
        expected_request_count: Sequences on the fullest rank if its fair share is taken (count); no rank ends above it.
        digest: Hash of everything that was put in (16 bytes): equal on ranks that saw the same.
        placement: The core's books; read ``decisions`` instead.
    """

    assignments: dict[int, tuple[int, ...]]
    leftovers: tuple[Leftover, ...]
    errors: tuple[RequestError, ...]
    expected_request_count: int
    digest: bytes
    placement: Placement = field(repr=False)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Every placement with what was known at that moment; made when it is asked for."""
        books = self.placement
        tokens = [state.token_count for state in books.ranks]
        counts = [state.request_count for state in books.ranks]
        found = []
        for index, position, why, added in zip(
            books.log_index, books.log_position, books.log_why, books.log_added, strict=True
        ):
            found.append(
                Decision(
                    books.batch.request_ids[index], books.ranks[position].rank, why, books.batch.token_counts[index],
                    tokens[position], counts[position],
                )
            )  # fmt: skip
            tokens[position] += added
            counts[position] += books.weight(index)
        return tuple(found)

    def explain(self, request_id: int | None = None) -> str:
        """In words, one line per request (of one request, when its id is given).

        Raises:
            KeyError: No such request was in this call.
        """
        lines = [
            f"request {d.request_id} ({d.token_count} tokens) -> rank {d.rank}: {d.why.value} "
            f"({d.load_tokens} tokens in {d.load_requests} requests before it)"
            for d in self.decisions
            if request_id in (None, d.request_id)
        ]
        lines += [
            f"request {x.request_id} stays: {x.reason.value}"
            for x in self.leftovers
            if request_id in (None, x.request_id)
        ]
        lines += [
            f"request {e.request_id} refused: {e.field}: {e.message}"
            for e in self.errors
            if request_id in (None, e.request_id)
        ]
        if request_id is not None and not lines:
            raise KeyError(request_id)
        return "\n".join(lines)
