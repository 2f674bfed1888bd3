"""Spread requests over attention-data-parallel ranks.

Layout:

- ``_types``: requests, ranks, results, reasons
- ``_batch``: requests as columns
- ``_route``: the core: loads and capacities while one batch is placed
- ``_policies``: balanced, round robin, prefix affinity, conversation affinity
- ``_router``: checks, order of the phases, digest, statistics
- ``_gate``: waiting for fuller batches, bounded
- ``_adapter``: engine request objects
- ``_errors``: the one error tree
- ``testing``: lower bounds and an exact optimum for small cases
"""

from adp_router.__about__ import __version__
from adp_router._adapter import ATTRIBUTES, batch_from, requests_from
from adp_router._batch import RouteBatch
from adp_router._errors import RankStateError, RouteBatchError, RouterConfigError, RouterError
from adp_router._gate import DpGate, GateConfig, GateRank, GateStatistics
from adp_router._router import Router, RouterConfig, RouterStatistics
from adp_router._types import (
    Decision,
    Leftover,
    LeftoverReason,
    RankState,
    RequestError,
    RouteRequest,
    RoutingResult,
    Why,
)

__all__ = [
    "ATTRIBUTES",
    "Decision",
    "DpGate",
    "GateConfig",
    "GateRank",
    "GateStatistics",
    "Leftover",
    "LeftoverReason",
    "RankState",
    "RankStateError",
    "RequestError",
    "RouteBatch",
    "RouteBatchError",
    "RouteRequest",
    "Router",
    "RouterConfig",
    "RouterConfigError",
    "RouterError",
    "RouterStatistics",
    "RoutingResult",
    "Why",
    "__version__",
    "batch_from",
    "requests_from",
]
