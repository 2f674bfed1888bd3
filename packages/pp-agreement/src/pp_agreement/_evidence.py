"""``evidence()``: one rank's lifetime as data, complete enough to compare ranks without having been there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from pp_agreement.__about__ import __version__
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._events import Verdict
from pp_agreement._statistics import AgreementStatistics, DrainReport

EVIDENCE_VERSION = 1


def evidence_of(
    *,
    mode: str,
    transport: str,
    rank: int,
    domain: Domain,
    config: AgreementConfig,
    statistics: AgreementStatistics,
    drain: DrainReport,
    busy_reason: str,
    verdicts: Sequence[Verdict],
) -> dict[str, object]:
    """See :meth:`Agreement.evidence`."""
    core = statistics.core
    fault = drain.fault
    return {
        "format": "pp-agreement evidence",
        "version": EVIDENCE_VERSION,
        "package_version": __version__,
        "mode": mode,
        "transport": transport,
        "rank": rank,
        "domain": {
            "id": domain.domain_id,
            "epoch": domain.epoch,
            "ranks": list(domain.ranks),
            "scheduling_rank": domain.scheduling_rank,
            "coordinator_rank": domain.coordinator_rank,
        },
        "config": dict(config.describe()),
        "admitted": core.admitted,
        "committed": core.committed,
        "closed": core.closed,
        "open_rounds": core.open_rounds,
        "outcomes": dict(zip(("COMPLETED", "FAILED", "CANCELLED"), core.outcomes)),
        "quarantined": core.quarantined,
        "activated": core.activated,
        "digest": core.digest,
        "activation_digest": core.activation_digest,
        "drained": drain.drained,
        "last_incarnation": drain.last_incarnation,
        "undecided": [list(k) for k in drain.undecided],
        "missing_ranks": list(drain.missing_ranks),
        "fault": None
        if fault is None
        else {
            "code": fault.code.name,
            "detail": fault.detail,
            "rank": fault.rank,
            "suspect_rank": fault.suspect_rank,
            "key": None if fault.key is None else list(fault.key),
            "story": list(fault.story),
        },
        "events": dict(core.events),
        "records_sent": dict(core.records_sent),
        "records_received": dict(core.records_received),
        "busy_reason": busy_reason,
        "frames_sent": core.frames_sent,
        "frames_received": core.frames_received,
        "heartbeats_sent": core.heartbeats_sent,
        "stale": core.stale,
        "duplicates": core.duplicates,
        "ignored": core.ignored,
        "high_water": {
            "open_rounds": core.open_rounds_max,
            "queue_records": core.queue_records_max,
            "outstanding_frames": statistics.outstanding_max,
        },
        "refused_slots": statistics.refused_slots,
        "bytes_sent": statistics.bytes_sent,
        "bytes_received": statistics.bytes_received,
        "polls": {
            "count": statistics.polls,
            "sum_s": statistics.poll_sum_s,
            "max_s": statistics.poll_max_s,
            "gap_max_s": statistics.poll_gap_max_s,
            "microsecond_power_of_two_buckets": list(statistics.poll_buckets),
        },
        "latency": {
            "count": core.latency_count,
            "sum_s": core.latency_sum_s,
            "max_s": core.latency_max_s,
            "microsecond_power_of_two_buckets": list(core.latency_buckets),
        },
        "verdicts": [{"kind": type(v).__name__, **asdict(v)} for v in verdicts],
    }
