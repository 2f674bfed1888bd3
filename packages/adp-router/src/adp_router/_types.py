"""Inputs, reasons and rules: the vocabulary. All frozen; ids and counts are integers, so any engine can fill them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One request to place.

    Attributes:
        request_id: Unique in a call.
        token_count: Length of its prompt (tokens, >= 0), whatever may be cached of it.
        target_rank: Rank that it asks for, or None (-1 is not a rank).
        strict: Only the target will do; otherwise it is a wish.
        child_count: Further sequences that share the prompt (n > 1); each takes a slot (count).
        kv_block_count: KV blocks that it will need (count); 0 where the engine does not say.
        conversation_id: Turns of one conversation share it.
        prefix_matches: Tokens of its prompt that each rank has cached, by position in the ranks given (tokens). Policy
            ``prefix`` subtracts them: a rank has to compute the rest. Other policies do not read them.
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
        free_slots: Sequences that it can still take (count; negative where a rank is over its limit).
        free_kv_blocks: KV blocks that are free (count).
        free_tokens: Prompt tokens that it can still compute (count).
        draining: Takes nothing new.
        total_slots: Sequences that it can take when it is empty (count). None: not known.
        total_kv_blocks: KV blocks when it is empty (count). None: not known.
        total_tokens: Prompt tokens that it can compute when it is empty (count). None: not known.
    """

    rank: int
    token_count: int = 0
    request_count: int = 0
    free_slots: int | None = None
    free_kv_blocks: int | None = None
    free_tokens: int | None = None
    draining: bool = False
    total_slots: int | None = None
    total_kv_blocks: int | None = None
    total_tokens: int | None = None


class LeftoverReason(enum.Enum):
    """Why a request was not placed in this call. It may be offered again.

    IMPOSSIBLE: it exceeds the totals of every rank that it may go to; offering it again helps only if the ranks change.
    """

    TARGET_FULL = "target_full"
    TARGET_DRAINING = "target_draining"
    ALL_DRAINING = "all_draining"
    NO_FREE_SLOT = "no_free_slot"
    NO_FREE_KV_BLOCKS = "no_free_kv_blocks"
    NO_FREE_TOKENS = "no_free_tokens"
    COUNT_LIMIT = "count_limit"
    HELD_FOR_STARVING = "held_for_starving"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A request that stays in the queue, why, and (where it is impossible) what it needs and what there is."""

    request_id: int
    reason: LeftoverReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RequestError:
    """A request that can never be routed as it is: which field, and what is wrong with it. Its id is what was given."""

    request_id: int
    field: str
    message: str


class Exclusion(enum.Enum):
    """Why one rank could not take one request at that moment."""

    DRAINING = "draining"
    NO_FREE_SLOT = "no free slot"
    NO_FREE_KV_BLOCKS = "not enough free KV blocks"
    NO_FREE_TOKENS = "not enough free tokens"
    COUNT_LIMIT = "it had its share of the batch"
    HELD_FOR_STARVING = "kept free for a request that waited longer"


class Why(enum.Enum):
    """Which part of the router placed a request; see :class:`Rule` for what decided between the ranks."""

    TARGET = "its target"
    LEAST_LOADED = "least loaded"
    STARVING = "waited longest"
    NEXT_IN_TURN = "next in turn"
    CACHED_PREFIX = "cached prefix"
    HOME = "home of its conversation"
    OVERFLOW = "its conversation's home is full"
    REHOMED = "its conversation's home drains or is gone"


class Rule(enum.Enum):
    """What decided between the ranks, each true as it reads."""

    TARGET = "its target"
    LEAST_LOADED = "least loaded"
    FEWEST_REQUESTS = "least loaded, with the fewest requests of its equals"
    ITS_TURN = "least loaded, and its turn among equals"
    WITH_ROOM = "least loaded of the ranks that can take it"
    IN_SHARE = "least loaded of the ranks that had not had their share of the batch"
    NOT_HELD = "least loaded of the ranks that are not kept free for another request"
    NEXT_IN_TURN = "next in turn that can take it"
    CACHED_PREFIX = "what is cached there outweighs its load"
    CACHE_OUTWEIGHED = "least to compute and to wait for; more is cached elsewhere"
    HOME = "home of its conversation"
