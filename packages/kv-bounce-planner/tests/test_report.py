"""Validation of a writer's report: any segmentation, this rank's bytes only, everything else refused and nothing changed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kv_bounce_planner.planning import Reason, ReportRefused, WriterPlan, WriterReport, validate_report
from kv_bounce_planner.planning.report import check_fragments

OPERATION = b"operation-000001"
BASE = 0x100000


def plan(rank: int = 0) -> WriterPlan:
    """Pool (0x2000, 100 B, 8 slots), the request owns block 2; a second range at 0x3000."""
    return WriterPlan(rank, np.array([0x2000 + 200, 0x3000], np.int64), np.array([100, 256], np.int64), 2, 2)


def honest(writer: WriterPlan, **changes: object) -> WriterReport:
    fields: dict[str, object] = {
        "operation_id": OPERATION,
        "rank": writer.rank,
        "bound_base": BASE,
        "total_bytes": writer.total_bytes,
        "plan_digest": writer.digest,
    }
    fields.update(changes)
    return WriterReport(**fields)  # type: ignore[arg-type]


def refuse(writer: WriterPlan, report: WriterReport, reason: Reason) -> None:
    before = writer.digest
    with pytest.raises(ReportRefused) as refused:
        validate_report(writer, report, bound_base=BASE, operation_id=OPERATION)
    assert refused.value.reason is reason and refused.value.rank == report.rank
    assert reason.when == "fail_closed"
    assert WriterPlan(writer.rank, writer.target_addresses, writer.sizes, 1, 1).digest == before


def test_honest_reports_pass_in_both_forms() -> None:
    """Digest form, and every range by name."""
    for explicit in (False, True):
        report = WriterReport.for_transfer(plan(), operation_id=OPERATION, bound_base=BASE, explicit=explicit)
        validate_report(plan(), report, bound_base=BASE, operation_id=OPERATION)
        validate_report(plan(), report, bound_base=BASE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"operation_id": b"operation-000002"}, Reason.WRONG_OPERATION),
        ({"rank": 1}, Reason.WRONG_RANK),
        ({"bound_base": BASE + 64}, Reason.WRONG_BASE),
        ({"total_bytes": 355}, Reason.WRONG_BYTES),
        ({"total_bytes": 0}, Reason.WRONG_BYTES),
        ({"plan_digest": bytes(16)}, Reason.WRONG_PLAN),
    ],
)
def test_a_wrong_field_is_refused_with_its_code(changes: dict[str, object], reason: Reason) -> None:
    """A stale operation, another writer, another base, other bytes, another plan."""
    refuse(plan(), honest(plan(), **changes), reason)


def test_reports_are_bound_to_their_rank() -> None:
    """Two writers with the same number of bytes cannot stand in for each other, whatever they put into the fields."""
    one = plan(0)
    two = WriterPlan(1, one.target_addresses + 0x10000, one.sizes, 2, 2)
    theirs = WriterReport.for_transfer(two, operation_id=OPERATION, bound_base=BASE, explicit=True)
    refuse(one, theirs, Reason.WRONG_RANK)
    refuse(one, honest(one, plan_digest=two.digest), Reason.WRONG_PLAN)
    refuse(
        one,
        honest(one, target_addresses=two.target_addresses, sizes=two.sizes),
        Reason.OUTSIDE_PLAN,
    )


@pytest.mark.parametrize(
    ("addresses", "sizes", "reason"),
    [
        # c15: the tail names block 3, which the request does not own.
        ([0x2000 + 300, 0x3000], [100, 256], Reason.OUTSIDE_PLAN),
        # c27: partly outside, and truncated inside.
        ([0x2000 + 180, 0x3000], [100, 256], Reason.OUTSIDE_PLAN),
        ([0x2000 + 200, 0x3080], [228, 128], Reason.OUTSIDE_PLAN),
        ([0x3000], [256], Reason.WRONG_BYTES),
        ([0x2000 + 200, 0x3000], [100, 255], Reason.WRONG_BYTES),
        # c12: a duplicate never counts twice.
        ([0x3000, 0x3000 + 128, 0x3000 + 100], [128, 128, 100], Reason.DUPLICATE),
        ([0x3000, 0x3000], [178, 178], Reason.DUPLICATE),
        # Same bytes in number, one range short at its end and another long.
        ([0x2000 + 200, 0x3000], [101, 255], Reason.OUTSIDE_PLAN),
        # No bytes, negative, wrapping.
        ([0x2000 + 200, 0x3000, 0x3100], [100, 256, 0], Reason.BAD_FIELD),
        ([0x2000 + 200, 0x3000], [-100, 456], Reason.BAD_FIELD),
        ([-1, 0x3000], [100, 256], Reason.BAD_FIELD),
        ([2**63 - 1, 0x3000], [100, 256], Reason.BAD_FIELD),
        ([], [], Reason.BAD_FIELD),
        ([0x3000, 0x3000, 0x3000], [2**62, 2**62, 2**62], Reason.WRONG_BYTES),
        # The sum wraps around to exactly the plan's bytes.
        ([0x3000] * 5, [2**62, 2**62, 2**62, 2**62, 356], Reason.WRONG_BYTES),
    ],
)
def test_wrong_fragments_are_refused_with_their_code(addresses: list[int], sizes: list[int], reason: Reason) -> None:
    """Every way in which fragments can be something else than the plan's bytes."""
    refuse(
        plan(),
        honest(plan(), target_addresses=np.array(addresses, np.int64), sizes=np.array(sizes, np.int64)),
        reason,
    )


def test_unequal_lengths_and_too_many_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds before work."""
    with pytest.raises(ReportRefused) as refused:
        check_fragments(plan(), np.array([1, 2]), np.array([1]))
    assert refused.value.reason is Reason.BAD_FIELD
    monkeypatch.setattr("kv_bounce_planner.planning.report.REPORT_FRAGMENTS_MAX", 2)
    with pytest.raises(ReportRefused) as refused:
        check_fragments(plan(), np.array([1, 2, 3]), np.array([1, 1, 1]))
    assert refused.value.reason is Reason.TOO_LARGE


def _random_plan(rng: random.Random) -> WriterPlan:
    addresses, sizes, at = [], [], rng.randrange(1000)
    for _ in range(rng.randint(1, 6)):
        size = rng.randint(1, 9)
        addresses.append(at)
        sizes.append(size)
        at += size + rng.randint(1, 5)
    return WriterPlan(rng.randrange(4), np.array(addresses), np.array(sizes), len(sizes), 1)


def test_any_segmentation_in_any_order_passes_and_every_deviation_fails() -> None:
    """Against a set of bytes: fragments pass exactly if they are a partition of the plan's bytes."""
    rng = random.Random(3)
    passed = refused = 0
    for _ in range(4000):
        writer = _random_plan(rng)
        wanted = sorted(
            b for a, s in zip(writer.target_addresses.tolist(), writer.sizes.tolist()) for b in range(a, a + s)
        )
        pieces: list[tuple[int, int]] = []
        for byte in wanted:
            if pieces and pieces[-1][0] + pieces[-1][1] == byte and rng.random() < 0.6:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + 1)
            else:
                pieces.append((byte, 1))
        rng.shuffle(pieces)
        if rng.random() < 0.7:
            for _ in range(rng.randint(1, 2)):
                i = rng.randrange(len(pieces))
                address, size = pieces[i]
                pieces[i] = rng.choice(
                    [
                        (address + rng.choice([-1, 1]), size),
                        (address, size + rng.choice([-1, 1])),
                        pieces[rng.randrange(len(pieces))],
                    ]
                )
        covered = [b for a, s in pieces for b in range(a, a + s)]
        honest_pieces = sorted(covered) == wanted and all(s > 0 and a >= 0 for a, s in pieces)
        addresses = np.array([a for a, _ in pieces], np.int64)
        sizes = np.array([s for _, s in pieces], np.int64)
        try:
            check_fragments(writer, addresses, sizes)
        except ReportRefused:
            refused += 1
            assert not honest_pieces
        else:
            passed += 1
            assert honest_pieces
    assert passed > 500 and refused > 500


def test_validation_is_not_quadratic() -> None:
    """262,144 one-block fragments in random order: a quadratic scan would take hours (the seed's took 383 ms for 4,096)."""
    count = 1 << 18
    writer = WriterPlan(0, np.arange(count, dtype=np.int64) * 128, np.full(count, 64, np.int64), count, count)
    order = np.random.default_rng(0).permutation(count)
    check_fragments(writer, writer.target_addresses[order], writer.sizes[order])
    wrong = writer.target_addresses[order].copy()
    wrong[count // 2] += 64
    with pytest.raises(ReportRefused):
        check_fragments(writer, wrong, writer.sizes[order])
