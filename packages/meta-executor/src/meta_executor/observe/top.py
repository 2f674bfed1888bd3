"""Two samples of a service's metrics as one frame: levels of the newer one, rates between both. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from prometheus_client.parser import text_string_to_metric_families

#: Prefixes of an instance's metrics, for the instance and for one rank (label ``rank``).
_INSTANCE, _RANK = "meta_executor_", "meta_executor_rank_"


@dataclass
class Values:
    """Metrics of one process: those without a rank by name, those of ranks by rank and name. Prefixes are cut off."""

    totals: dict[str, float] = field(default_factory=dict)
    ranks: dict[int, dict[str, float]] = field(default_factory=dict)


def values_of(text: str) -> Values:
    """Read the exposition format. Series with other labels than ``rank`` (buckets) are left out."""
    values = Values()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.labels:
                values.totals[sample.name.removeprefix(_INSTANCE)] = sample.value
            elif set(sample.labels) == {"rank"} and sample.name.startswith(_RANK):
                rank = values.ranks.setdefault(int(sample.labels["rank"]), {})
                rank[sample.name.removeprefix(_RANK)] = sample.value
    return values


@dataclass(frozen=True)
class InstanceSample:
    """One instance's metrics at one moment; empty with the reason in ``status`` when it could not be asked."""

    owner_id: str
    role: str
    status: str
    totals: Mapping[str, float]
    ranks: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True)
class Sample:
    """A service's metrics at one moment (monotonic, s). ``front``: None where an instance was asked alone."""

    at_s: float
    url: str
    health: str
    front: Mapping[str, float] | None
    instances: tuple[InstanceSample, ...]


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank now. Rates per second between the two samples; None: not known (it was not there before, or has restarted)."""

    rank: int
    #: Requests on this rank (count).
    requests: int
    kv_blocks_used: int
    kv_blocks_total: int
    quarantined_bytes: int
    #: Context: admitted to the agreement and not decided (count).
    undecided: int
    steps_per_s: float | None
    #: Tokens computed, prompts included.
    tokens_per_s: float | None

    @property
    def kv_share(self) -> float:
        """Of its blocks in use (0–1)."""
        return self.kv_blocks_used / self.kv_blocks_total if self.kv_blocks_total else 0.0


class InstanceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One instance now."""

    owner_id: str
    role: str
    #: ``ok``, ``draining``, …, or ``gone: why``.
    status: str
    #: Requests here, and those of them that wait for admission (count).
    requests: int
    waiting: int
    #: Tokens of answers handed out.
    answer_tokens_per_s: float | None
    requests_per_s: float | None
    step_p50_ms: float
    step_p99_ms: float
    completed: int
    failed: int
    cancelled: int
    ranks: list[RankRow]


class FrontRow(msgspec.Struct, frozen=True, kw_only=True):
    """The front now."""

    health: str
    running: int
    requests: int
    requests_per_s: float | None
    #: Answered with an error, refused for their content, left by their client (count).
    errors: int
    refused: int
    left: int


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """What ``top`` shows. ``front``: None where an instance was asked alone."""

    url: str
    #: Between the two samples (s).
    interval_s: float
    front: FrontRow | None
    instances: list[InstanceRow]


def frame_of(before: Sample, after: Sample) -> Frame:
    """The frame of two samples, the older one first."""
    interval_s = max(after.at_s - before.at_s, 1e-9)
    known = {instance.owner_id: instance for instance in before.instances}
    return Frame(
        url=after.url,
        interval_s=interval_s,
        front=_front(before, after, interval_s),
        instances=[_instance(known.get(now.owner_id), now, interval_s) for now in after.instances],
    )


def _front(before: Sample, after: Sample, interval_s: float) -> FrontRow | None:
    now = after.front
    if now is None:
        return None
    return FrontRow(
        health=after.health,
        running=_count(now, "running_requests"),
        requests=_count(now, "total_requests_total"),
        requests_per_s=_rate(before.front, now, "total_requests_total", interval_s),
        errors=_count(now, "http_exceptions_total") + _count(now, "internal_errors_total"),
        refused=_count(now, "validation_exceptions_total"),
        left=_count(now, "client_disconnects_total"),
    )


def _instance(before: InstanceSample | None, now: InstanceSample, interval_s: float) -> InstanceRow:
    earlier = None if before is None else before.totals
    totals = now.totals
    return InstanceRow(
        owner_id=now.owner_id,
        role=now.role,
        status=now.status,
        requests=_count(totals, "requests_live_now"),
        waiting=_count(totals, "requests_waiting_now"),
        answer_tokens_per_s=_rate(earlier, totals, "tokens_returned", interval_s),
        requests_per_s=_rate(earlier, totals, "requests_ok", interval_s),
        step_p50_ms=totals.get("step_p50_ms", 0.0),
        step_p99_ms=totals.get("step_p99_ms", 0.0),
        completed=_count(totals, "requests_ok"),
        failed=_count(totals, "requests_failed"),
        cancelled=_count(totals, "requests_cancelled"),
        ranks=[
            _rank(rank, None if before is None else before.ranks.get(rank), values, interval_s)
            for rank, values in sorted(now.ranks.items())
        ],
    )


def _rank(rank: int, before: Mapping[str, float] | None, now: Mapping[str, float], interval_s: float) -> RankRow:
    return RankRow(
        rank=rank,
        requests=_count(now, "active_now"),
        kv_blocks_used=_count(now, "kv_blocks_used_now"),
        kv_blocks_total=_count(now, "kv_blocks_total"),
        quarantined_bytes=_count(now, "quarantined_bytes_now"),
        undecided=_count(now, "agreement_opened") - _count(now, "agreement_decided"),
        steps_per_s=_rate(before, now, "steps", interval_s),
        tokens_per_s=_rate(before, now, "tokens_computed", interval_s),
    )


def _count(values: Mapping[str, float], name: str) -> int:
    return int(values.get(name, 0.0))


def _rate(before: Mapping[str, float] | None, now: Mapping[str, float], name: str, interval_s: float) -> float | None:
    """Growth per second; None where there is nothing to compare with, or the counter began anew."""
    if before is None or name not in before or name not in now or now[name] < before[name]:
        return None
    return (now[name] - before[name]) / interval_s
