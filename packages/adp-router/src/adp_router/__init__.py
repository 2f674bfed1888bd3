"""Spread requests over attention-data-parallel ranks.

Layout:

- ``_types``: requests, ranks, reasons and rules: the vocabulary
- ``_batch``: requests as columns; ``_adapter``: an engine's objects as columns
- ``_plain``, ``_text``: foreign values as numbers, as truth values, as text
- ``_check``: the boundary: everything becomes plain there, or is refused; bytes for the digest
- ``_route``: the core: loads, capacities and limits while one batch is placed
- ``_starving``: liveness: seniority, ranks kept free, impossible requests; targets
- ``_balance``: longest first to the least loaded, the hot loops
- ``_policies``: balanced, round robin, prefix affinity, conversation affinity
- ``_memory``: what a router remembers between calls; ``_homes``: of conversations
- ``_router``: order of the phases, settings, statistics
- ``_result``: the frozen log, decisions and the rule behind each, in words
- ``_books``: what ranks hold by what was placed and what ended, for callers that are not told
- ``_gate``: waiting for fuller batches, bounded
- ``_errors``: the one error tree
- ``testing``: lower bounds and an exact optimum for small cases, and a check of who keeps a router supplied
"""

from adp_router.__about__ import __version__
from adp_router._adapter import ATTRIBUTES, batch_from, requests_from
from adp_router._batch import RouteBatch
from adp_router._books import RankBooks
from adp_router._errors import RankStateError, RouteBatchError, RouterConfigError, RouterError
from adp_router._gate import DpGate, GateConfig, GateRank, GateStatistics
from adp_router._result import Decision, PassedOver, RouteLog, RoutingResult, Span
from adp_router._router import Router, RouterConfig, RouterStatistics
from adp_router._types import (
    Exclusion,
    Leftover,
    LeftoverReason,
    RankState,
    RequestError,
    RouteRequest,
    Rule,
    Why,
)

__all__ = [
    "ATTRIBUTES",
    "Decision",
    "DpGate",
    "Exclusion",
    "GateConfig",
    "GateRank",
    "GateStatistics",
    "Leftover",
    "LeftoverReason",
    "PassedOver",
    "RankBooks",
    "RankState",
    "RankStateError",
    "RequestError",
    "RouteBatch",
    "RouteBatchError",
    "RouteLog",
    "RouteRequest",
    "Router",
    "RouterConfig",
    "RouterConfigError",
    "RouterError",
    "RouterStatistics",
    "RoutingResult",
    "Rule",
    "Span",
    "Why",
    "__version__",
    "batch_from",
    "requests_from",
]
