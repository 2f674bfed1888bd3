"""What a rank did, as data: counters for ``/internal/statistics``, and the evidence that is left behind."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from meta_executor import __about__, wire
from meta_executor.executor.compose import ComposedRank
from meta_executor.executor.loop import RankLoop
from meta_executor.executor.memory import PlannedBlocks
from meta_executor.executor.transceiver import TransferCounters
from meta_executor.executor.transceiver_context import AnyAgreement

EVIDENCE_FORMAT = "meta-executor evidence"
EVIDENCE_VERSION = 1


def rank_statistics(made: ComposedRank, agreement: AnyAgreement | None, block_bytes: int) -> wire.RankStatistics:
    """Counters of one rank now. Called from the loop's thread; nothing is walked."""
    loop, blocks = made.loop, made.blocks
    registry = loop.registry.statistics()
    counters = made.transceiver.counters
    core = agreement.statistics().core if agreement is not None else None
    events = dict(core.events) if core is not None else {}
    context = loop.role == "context"
    return wire.RankStatistics(
        rank=loop.rank,
        steps=loop.compute.step_count,
        tokens_computed=loop.compute.token_count,
        requests_taken=loop.taken_count,
        requests_finished=registry.completed + registry.failed + registry.cancelled,
        active_now=registry.live,
        kv_blocks_used_now=blocks.block_count - blocks.free_count,
        kv_blocks_total=blocks.block_count,
        quarantined_bytes_now=blocks.quarantined_count * block_bytes,
        links_away_now=made.transceiver.links_away_count,
        agreement_opened=core.admitted if core is not None else 0,
        agreement_decided=core.committed + core.closed if core is not None else 0,
        ready_votes=counters.ready_votes,
        ready_prepares=events.get("Prepared", 0),
        ready_activations=core.activated if core is not None else 0,
        ready_completions=events.get("Completed", 0),
        leases_expired=counters.leases_expired,
        activation_digest=core.activation_digest if core is not None else "",
        transfers_coalesced=counters.coalesced,
        transfers_direct=counters.direct,
        transfers_merged=counters.merged,
        bytes_sent=counters.bytes_moved if context else 0,
        bytes_received=0 if context else counters.bytes_moved,
        tier_reasons=dict(counters.reasons or {}),
        prompts_computed=loop.compute.prompt_count,
        prefix_hit_tokens=blocks.pool.statistics().prefix_hit_tokens if isinstance(blocks, PlannedBlocks) else 0,
    )


@dataclass(frozen=True)
class Lifetime:
    """Whose evidence it is."""

    owner_id: str
    instance_id: str
    generation: str
    world_size: int
    modes: dict[str, Any]


def rank_evidence(
    made: ComposedRank, statistics: wire.RankStatistics, agreement: AnyAgreement | None, lifetime: Lifetime
) -> dict[str, Any]:
    """One rank's lifetime, complete enough to compare ranks without having been there (JSON-able)."""
    loop = made.loop
    return {
        "format": EVIDENCE_FORMAT,
        "version": EVIDENCE_VERSION,
        "package_version": __about__.__version__,
        "role": loop.role,
        "owner_id": lifetime.owner_id,
        "instance_id": lifetime.instance_id,
        "generation": lifetime.generation,
        "rank": loop.rank,
        "world_size": lifetime.world_size,
        "written_unix_s": time.time(),
        "modes": lifetime.modes,
        "drained": loop.drained,
        "fault": loop.fault,
        "last_incarnation": _last_incarnation(loop, agreement),
        "requests": _requests(loop),
        "ready": {
            "votes": statistics.ready_votes,
            "prepares": statistics.ready_prepares,
            "activations": statistics.ready_activations,
            "completions": statistics.ready_completions,
        },
        "transfers": _transfers(made.transceiver.counters),
        "kv": {
            "blocks_total": statistics.kv_blocks_total,
            "blocks_used": statistics.kv_blocks_used_now,
            "quarantined_bytes": statistics.quarantined_bytes_now,
            "prefix_hit_tokens": statistics.prefix_hit_tokens,
        },
        "steps": {"count": loop.compute.step_count, "tokens": loop.compute.token_count},
        "stories": [
            {"request_id": s.request_id, "state": s.state.value, "story": list(s.story)}
            for s in list(loop.registry)[:32]
        ],
        "agreement": agreement.evidence() if agreement is not None else None,
    }


def _requests(loop: RankLoop) -> dict[str, int]:
    registry = loop.registry.statistics()
    return {
        "taken": registry.taken,
        "completed": registry.completed,
        "failed": registry.failed,
        "cancelled": registry.cancelled,
        "live": registry.live,
        "live_peak": registry.live_peak,
        "prepared_again": registry.prepared_again,
    }


def _transfers(counters: TransferCounters) -> dict[str, Any]:
    return {
        "opened": counters.opened,
        "succeeded": counters.succeeded,
        "failed": counters.failed,
        "cancelled": counters.cancelled,
        "quarantined": counters.quarantined,
        "coalesced": counters.coalesced,
        "direct": counters.direct,
        "merged": counters.merged,
        "bytes": counters.bytes_moved,
        "reasons": dict(counters.reasons or {}),
    }


def _last_incarnation(loop: RankLoop, agreement: AnyAgreement | None) -> int:
    """As the drain said: to the agreement where there is one, which every rank hears; else in the broadcast."""
    told = agreement.drain_state().last_incarnation if agreement is not None else None
    return loop.last_incarnation if told is None else int(told)
