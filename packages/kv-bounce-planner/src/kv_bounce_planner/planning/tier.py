"""Which way the bytes go: merged or direct writes in place, or one bounce write per writer.

A cost model is four affine functions fitted on the transport at hand. Each prices a step by its number of pieces and its
bytes: writing n fragments in place, gathering n fragments, writing one region, scattering n ranges. The choice is the
cheapest prediction among the tiers that are possible, with a stable reason code.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

import msgspec
import numpy as np

from kv_bounce_planner._errors import LayoutError
from kv_bounce_planner._reasons import Reason, Refusal
from kv_bounce_planner.planning.plan import TransferPlan, WriterPlan, WriterTransfer


class Tier(StrEnum):
    """How a transfer is carried."""

    MERGED = "merged"
    DIRECT = "direct"
    BOUNCE = "bounce"


@dataclass(frozen=True)
class Affine:
    """Seconds = base + per_piece * pieces + per_byte * bytes; all coefficients at least 0."""

    base_s: float
    per_piece_s: float
    per_byte_s: float

    def __call__(self, pieces: int, total_bytes: int) -> float:
        return self.base_s + self.per_piece_s * pieces + self.per_byte_s * total_bytes


@dataclass(frozen=True)
class CostModel:
    """What the steps cost on one transport between two places.

    Attributes:
        transport_key: Names transport class, memory kinds and hosts: a model is valid for its key only.
        direct: Writing n fragments in place, acknowledgement included.
        gather, wire, scatter: The steps of a bounce; wire includes the acknowledgement.
        bounce_overhead_s: Reservation, report and its check.
        merge_per_piece_s: Joining neighbours, per raw fragment.
        samples: Measured points that the fit rests on.
        relative_error: Largest relative error of the fit over them.
    """

    transport_key: str
    direct: Affine
    gather: Affine
    wire: Affine
    scatter: Affine
    bounce_overhead_s: float = 0.0
    merge_per_piece_s: float = 0.0
    samples: int = 0
    relative_error: float = 0.0

    def predict(
        self, tier: Tier, *, fragment_count: int, range_count: int, total_bytes: int, raw_count: int = 0
    ) -> float:
        """Seconds for one writer. ``fragment_count`` is after joining; ``raw_count`` before (0: the same)."""
        raw = raw_count or fragment_count
        if tier is Tier.DIRECT:
            return self.direct(raw, total_bytes)
        if tier is Tier.MERGED:
            return self.direct(fragment_count, total_bytes) + self.merge_per_piece_s * raw
        return (
            self.gather(fragment_count, total_bytes)
            + self.wire(1, total_bytes)
            + self.scatter(range_count, total_bytes)
            + self.bounce_overhead_s
        )

    def to_json(self) -> bytes:
        """Canonical JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> CostModel:
        """Decode. Raises :class:`LayoutError`."""
        try:
            return msgspec.json.decode(data, type=CostModel, strict=True)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LayoutError(f"not a cost model: {error}", reason=Reason.BAD_FIELD) from error


_US = 1e-6
_MS_PER_MIB = 1e-3 / (1 << 20)

#: Fitted on two cores with NIXL 1.5.1 over UCX (docs/design.md#tiers); a start until :func:`calibrate` has run.
DEFAULT_MODELS: Mapping[str, CostModel] = MappingProxyType(
    {
        "cma": CostModel(
            "cma",
            direct=Affine(106 * _US, 2.6 * _US, 0.17 * _MS_PER_MIB),
            gather=Affine(20 * _US, 0.012 * _US, 0.09 * _MS_PER_MIB),
            wire=Affine(300 * _US, 0.0, 0.16 * _MS_PER_MIB),
            scatter=Affine(20 * _US, 0.012 * _US, 0.09 * _MS_PER_MIB),
            bounce_overhead_s=100 * _US,
            merge_per_piece_s=0.01 * _US,
        ),
        "tcp": CostModel(
            "tcp",
            direct=Affine(150 * _US, 6.5 * _US, 0.24 * _MS_PER_MIB),
            gather=Affine(20 * _US, 0.012 * _US, 0.09 * _MS_PER_MIB),
            wire=Affine(200 * _US, 0.0, 0.23 * _MS_PER_MIB),
            scatter=Affine(20 * _US, 0.012 * _US, 0.09 * _MS_PER_MIB),
            bounce_overhead_s=100 * _US,
            merge_per_piece_s=0.01 * _US,
        ),
    }
)


@dataclass(frozen=True)
class TierLimits:
    """Gates before the prediction.

    Attributes:
        enabled: False: never bounce.
        bytes_min: Transfers below never bounce (bytes, at least 0).
        blocks_min: Transfers of fewer target blocks never bounce.
        bounce_bytes_max: Capacity of the bounce arena (bytes); None where it is not known yet.
        forced: A tier to take whatever the prediction says, for comparisons and demonstrations; the gates still hold, and
            MERGED where nothing joins is DIRECT.
    """

    enabled: bool = True
    bytes_min: int = 0
    blocks_min: int = 1
    bounce_bytes_max: int | None = None
    forced: Tier | None = None

    def __post_init__(self) -> None:
        if (
            self.bytes_min < 0
            or self.blocks_min < 0
            or (self.bounce_bytes_max is not None and self.bounce_bytes_max < 0)
        ):
            raise LayoutError("limits must not be negative")


@dataclass(frozen=True)
class TierChoice:
    """The tier and why.

    Attributes:
        tier: Chosen tier.
        reason: Stable code: a ``FASTER_…`` prediction, or the gate that ruled the bounce out.
        predicted_s: Seconds per possible tier, the slowest writer's where several write.
        fragment_count, range_count, total_bytes: What the prediction was made from.
    """

    tier: Tier
    reason: Reason
    predicted_s: Mapping[Tier, float] = field(default_factory=dict)
    fragment_count: int = 0
    range_count: int = 0
    total_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "predicted_s", MappingProxyType(dict(self.predicted_s)))


@dataclass(frozen=True)
class _Load:
    fragments: int
    raw: int
    ranges: int
    total_bytes: int
    blocks: int


def _loads(plan: WriterPlan | WriterTransfer | TransferPlan) -> list[_Load]:
    if isinstance(plan, WriterPlan):
        return [_Load(plan.fragment_count, plan.fragment_count, plan.range_count, plan.total_bytes, plan.block_count)]
    if isinstance(plan, WriterTransfer):
        writer = plan.writer
        return [_Load(plan.merged_count, plan.raw_count, writer.range_count, plan.total_bytes, writer.block_count)]
    return [load for rank, writer in plan.writers.items() for load in _loads(plan.transfers.get(rank, writer))]


def choose_tier(
    plan: WriterPlan | WriterTransfer | TransferPlan,
    model: CostModel,
    limits: TierLimits = TierLimits(),
    *,
    bounce_available: bool | Refusal = True,
) -> TierChoice:
    """Choose the predicted fastest tier that is possible.

    Args:
        plan: One writer (either side's view), or a whole plan: its writers work in parallel, the slowest decides.
        model: Costs of this transport.
        limits: Gates.
        bounce_available: False or a refusal (its code is kept) rules the bounce out.

    Returns:
        The choice; ties go to writing in place. A refusal's or gate's code is the reason only where the bounce
        would have been chosen otherwise.
    """
    loads = _loads(plan)
    total = sum(load.total_bytes for load in loads)
    fragments = sum(load.fragments for load in loads)
    ranges = sum(load.ranges for load in loads)
    if total == 0:
        return TierChoice(Tier.DIRECT, Reason.NOTHING_TO_TRANSFER)

    def slowest(tier: Tier) -> float:
        return max(
            model.predict(
                tier,
                fragment_count=load.fragments,
                raw_count=load.raw,
                range_count=load.ranges,
                total_bytes=load.total_bytes,
            )
            for load in loads
        )

    merges = any(load.fragments < load.raw for load in loads)
    predicted = {Tier.DIRECT: slowest(Tier.DIRECT)}
    if merges:
        predicted[Tier.MERGED] = slowest(Tier.MERGED)
    in_place = min(predicted, key=lambda tier: predicted[tier])
    bounce_s = slowest(Tier.BOUNCE)
    if all(load.fragments == load.ranges == 1 for load in loads):
        bounce_s = max(bounce_s, predicted[in_place])  # it is the very same write, and two copies
    refusal = _bounce_refusal(total, sum(load.blocks for load in loads), limits, bounce_available)
    if refusal is None:
        predicted[Tier.BOUNCE] = bounce_s
    if limits.forced is not None:
        if limits.forced in predicted:
            return TierChoice(limits.forced, Reason.OK, predicted, fragments, ranges, total)
        if limits.forced is Tier.BOUNCE and refusal is not None:
            return TierChoice(in_place, refusal, predicted, fragments, ranges, total)
        return TierChoice(Tier.DIRECT, Reason.OK, predicted, fragments, ranges, total)
    if bounce_s < predicted[in_place]:
        if refusal is None:
            return TierChoice(Tier.BOUNCE, Reason.FASTER_BOUNCE, predicted, fragments, ranges, total)
        return TierChoice(in_place, refusal, predicted, fragments, ranges, total)
    reason = Reason.FASTER_MERGED if in_place is Tier.MERGED else Reason.FASTER_DIRECT
    return TierChoice(in_place, reason, predicted, fragments, ranges, total)


def _bounce_refusal(total: int, blocks: int, limits: TierLimits, available: bool | Refusal) -> Reason | None:
    if not limits.enabled:
        return Reason.DISABLED
    if isinstance(available, Refusal):
        return available.reason
    if not available:
        return Reason.NO_SPACE
    if blocks < limits.blocks_min:
        return Reason.MIN_BLOCKS
    if total < limits.bytes_min:
        return Reason.MIN_BYTES
    if limits.bounce_bytes_max is not None and total > limits.bounce_bytes_max:
        return Reason.OVERSIZE
    return None


# --- calibration ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phases:
    """Seconds of one measured transfer; a direct write has only ``wire_s``."""

    wire_s: float
    gather_s: float = 0.0
    scatter_s: float = 0.0
    overhead_s: float = 0.0


class CalibrationTransport(Protocol):
    """Measures on the transport at hand. Its clock and memory are its own; each answer is a best of several runs."""

    def measure(self, tier: Tier, total_bytes: int, fragment_count: int) -> Phases:
        """Move ``total_bytes`` as ``fragment_count`` fragments at random positions once; DIRECT or BOUNCE."""
        ...


CALIBRATION_BYTES = (1 << 20, 4 << 20, 32 << 20)
CALIBRATION_COUNTS = (1, 64, 1024, 8192)
CALIBRATION_ROUNDS = 3


def calibrate(
    transport: CalibrationTransport,
    transport_key: str,
    cache: MutableMapping[str, CostModel] | None = None,
    *,
    sizes: Sequence[int] = CALIBRATION_BYTES,
    counts: Sequence[int] = CALIBRATION_COUNTS,
    rounds: int = CALIBRATION_ROUNDS,
) -> CostModel:
    """Measure a small grid, fit the four affine functions and remember the model under its key.

    Args:
        transport: Runs the transfers.
        transport_key: Names what is measured; a cached model of that key is returned as it is.
        cache: Where models are kept; None measures always.
        sizes: Total bytes of the grid.
        counts: Fragments of the grid; points with fragments under 16 B are left out.
        rounds: So often the whole grid is measured, at least 1; of each point the best counts. What slows the machine for a
            while slows one round, not every trial of a point.

    Returns:
        The model; every coefficient at least 0, fitted to relative error.

    Raises:
        LayoutError: The grid has fewer than three usable points, or there is no round.
    """
    if cache is not None and transport_key in cache:
        return cache[transport_key]
    grid = [(total, count) for total in sizes for count in counts if count >= 1 and total // count >= 16]
    if len(grid) < 3:
        raise LayoutError("calibration needs at least three points")
    if rounds < 1:
        raise LayoutError(f"calibration needs at least one round, got {rounds}")
    measured = [
        [(transport.measure(Tier.DIRECT, *point), transport.measure(Tier.BOUNCE, *point)) for point in grid]
        for _ in range(rounds)
    ]
    by_point = [*zip(*measured, strict=True)]
    direct = [min(phases.wire_s for phases, _ in trials) for trials in by_point]
    # Each phase by itself: what disturbed the gather of one trial says nothing against its wire.
    bounce = [Phases(*map(min, zip(*(astuple(phases) for _, phases in trials), strict=True))) for trials in by_point]
    pieces = [count for _, count in grid]
    ones = [1] * len(grid)
    totals = [total for total, _ in grid]
    fits = {
        "direct": _fit(pieces, totals, direct),
        "gather": _fit(pieces, totals, [phase.gather_s for phase in bounce]),
        "wire": _fit(ones, totals, [phase.wire_s for phase in bounce]),
        "scatter": _fit(pieces, totals, [phase.scatter_s for phase in bounce]),
    }
    errors = [abs(fits["direct"](n, b) - s) / s for n, b, s in zip(pieces, totals, direct, strict=True) if s > 0]
    model = CostModel(
        transport_key=transport_key,
        direct=fits["direct"],
        gather=fits["gather"],
        wire=fits["wire"],
        scatter=fits["scatter"],
        bounce_overhead_s=float(np.median([phase.overhead_s for phase in bounce])),
        merge_per_piece_s=DEFAULT_MODELS["cma"].merge_per_piece_s,
        samples=2 * len(grid),
        relative_error=max(errors, default=0.0),
    )
    if cache is not None:
        cache[transport_key] = model
    return model


def _fit(pieces: Sequence[int], totals: Sequence[int], seconds: Sequence[float]) -> Affine:
    """Least squares of relative error with coefficients held at 0 or above (try every support, keep the best)."""
    measured = np.maximum(np.asarray(seconds, np.float64), 1e-9)
    columns = np.stack([np.ones(len(measured)), np.asarray(pieces, np.float64), np.asarray(totals, np.float64)], axis=1)
    if bool((columns[:, 1] == columns[0, 1]).all()):
        columns[:, 1] = 0.0
    weighted = columns / measured[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    best, best_error = np.zeros(3), float("inf")
    for mask in range(1, 8):
        support = [i for i in range(3) if mask >> i & 1]
        part, *_ = np.linalg.lstsq(weighted[:, support] / scale[support], np.ones(len(measured)), rcond=None)
        if bool((part < 0).any()):
            continue
        full = np.zeros(3)
        full[support] = part / scale[support]
        error = float(((weighted @ full - 1.0) ** 2).sum())
        if error < best_error - 1e-15:
            best, best_error = full, error
    return Affine(float(best[0]), float(best[1]), float(best[2]))
