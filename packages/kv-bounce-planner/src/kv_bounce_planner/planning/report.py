"""What a writer reports after its bounce write, and the check that it wrote exactly its own bytes.

The report names the operation, the writer, the base it wrote to, and the destination: either as the digest of the ranges
that the sender derived (16 bytes), or as the fragments themselves in any segmentation. The check compares with the plan
bound to that very writer: equal arrays pass in O(n); any other segmentation is sorted and joined, O(n log n), and must
cover the same bytes. There is no other way to pass, and a refusal releases nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kv_bounce_planner._errors import ReportRefused
from kv_bounce_planner._reasons import Reason
from kv_bounce_planner.layout.model import ADDRESS_MAX, Int64Array, frozen_int64
from kv_bounce_planner.planning.plan import WriterPlan, join_ranges, sort_ranges

#: Explicit fragments in one report, at most (count).
REPORT_FRAGMENTS_MAX = 1 << 20


@dataclass(frozen=True, eq=False)
class WriterReport:
    """A writer's account of one finished bounce write.

    Attributes:
        operation_id: 16 bytes that name the operation.
        rank: The writer.
        bound_base: Address of the bounce sub-region that it wrote to.
        total_bytes: Bytes written.
        plan_digest: Digest of the destination that the writer derived (:attr:`WriterPlan.digest`).
        target_addresses, sizes: Explicit fragments (int64, read-only copies), or None for the digest form.
    """

    operation_id: bytes
    rank: int
    bound_base: int
    total_bytes: int
    plan_digest: bytes
    target_addresses: Int64Array | None = None
    sizes: Int64Array | None = None

    def __post_init__(self) -> None:
        if (self.target_addresses is None) != (self.sizes is None):
            raise ReportRefused(Reason.BAD_FIELD, "addresses without sizes, or sizes without addresses", rank=self.rank)
        if self.target_addresses is not None and self.sizes is not None:
            object.__setattr__(self, "target_addresses", frozen_int64(self.target_addresses))
            object.__setattr__(self, "sizes", frozen_int64(self.sizes))

    @staticmethod
    def for_transfer(
        writer: WriterPlan, *, operation_id: bytes, bound_base: int, explicit: bool = False
    ) -> WriterReport:
        """The honest report for a plan; ``explicit`` names every range, for peers and tools that want to see them."""
        return WriterReport(
            operation_id=operation_id,
            rank=writer.rank,
            bound_base=bound_base,
            total_bytes=writer.total_bytes,
            plan_digest=writer.digest,
            target_addresses=writer.target_addresses if explicit else None,
            sizes=writer.sizes if explicit else None,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WriterReport):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        fragments = None
        if self.target_addresses is not None and self.sizes is not None:
            fragments = (self.target_addresses.tobytes(), self.sizes.tobytes())
        return (self.operation_id, self.rank, self.bound_base, self.total_bytes, self.plan_digest, fragments)


def validate_report(
    plan: WriterPlan, report: WriterReport, *, bound_base: int, operation_id: bytes | None = None
) -> None:
    """Accept a report only if it describes exactly the bytes bound to this writer.

    Pure; the plan and the caller's state are unchanged whatever the outcome.

    Args:
        plan: The plan bound to the writer that is expected to report.
        report: What arrived.
        bound_base: The base that was bound to this writer before its address was published.
        operation_id: The operation that the plan belongs to; None skips that check.

    Raises:
        ReportRefused: With one of ``WRONG_OPERATION``, ``WRONG_RANK``, ``WRONG_BASE``, ``WRONG_BYTES``, ``WRONG_PLAN``,
            ``BAD_FIELD``, ``TOO_LARGE``, ``DUPLICATE``, ``OUTSIDE_PLAN``, ``BYTES_MISSING``. Fail closed.
    """
    rank = report.rank
    if operation_id is not None and report.operation_id != operation_id:
        raise ReportRefused(Reason.WRONG_OPERATION, "names another operation", rank=rank)
    if report.rank != plan.rank:
        raise ReportRefused(Reason.WRONG_RANK, f"the plan is bound to writer {plan.rank}", rank=rank)
    if report.bound_base != bound_base:
        raise ReportRefused(Reason.WRONG_BASE, f"{report.bound_base:#x} is not the bound {bound_base:#x}", rank=rank)
    if report.total_bytes != plan.total_bytes:
        raise ReportRefused(Reason.WRONG_BYTES, f"{report.total_bytes} B, planned {plan.total_bytes} B", rank=rank)
    if report.plan_digest != plan.digest:
        raise ReportRefused(Reason.WRONG_PLAN, "derived from another plan", rank=rank)
    if report.target_addresses is None or report.sizes is None:
        return
    check_fragments(plan, report.target_addresses, report.sizes)


def check_fragments(plan: WriterPlan, addresses: Int64Array, sizes: Int64Array) -> None:
    """Accept fragments, in any order and segmentation, only if they are exactly the plan's bytes, each once.

    Raises:
        ReportRefused: ``BAD_FIELD``, ``TOO_LARGE``, ``WRONG_BYTES``, ``DUPLICATE``, ``OUTSIDE_PLAN`` or ``BYTES_MISSING``.
    """
    rank = plan.rank
    if np.array_equal(addresses, plan.target_addresses) and np.array_equal(sizes, plan.sizes):
        return
    if len(addresses) != len(sizes) or len(sizes) == 0:
        raise ReportRefused(Reason.BAD_FIELD, f"{len(addresses)} addresses and {len(sizes)} sizes", rank=rank)
    if len(sizes) > REPORT_FRAGMENTS_MAX:
        raise ReportRefused(Reason.TOO_LARGE, f"{len(sizes)} fragments exceed {REPORT_FRAGMENTS_MAX}", rank=rank)
    if int(sizes.min()) <= 0 or int(addresses.min()) < 0 or bool((addresses > ADDRESS_MAX - sizes).any()):
        raise ReportRefused(Reason.BAD_FIELD, "a fragment without bytes or beyond the address space", rank=rank)
    # A size beyond the plan's is refused before anything is summed, so that the sum cannot wrap.
    if int(sizes.max()) > plan.total_bytes or int(sizes.sum()) != plan.total_bytes:
        raise ReportRefused(Reason.WRONG_BYTES, f"fragments do not add up to {plan.total_bytes} B", rank=rank)
    addresses, sizes = sort_ranges(addresses, sizes)
    clash = addresses[1:] < addresses[:-1] + sizes[:-1]
    if bool(clash.any()):
        at = int(addresses[1:][clash][0])
        raise ReportRefused(Reason.DUPLICATE, f"bytes from {at:#x} are reported twice", rank=rank)
    addresses, sizes = join_ranges(addresses, sizes)
    if np.array_equal(addresses, plan.target_addresses) and np.array_equal(sizes, plan.sizes):
        return
    index = np.searchsorted(plan.target_addresses, addresses, side="right") - 1
    inside = index >= 0
    ends = plan.target_addresses + plan.sizes
    inside &= addresses + sizes <= ends[np.maximum(index, 0)]
    if not bool(inside.all()):
        at = int(addresses[~inside][0])
        raise ReportRefused(Reason.OUTSIDE_PLAN, f"the fragment at {at:#x} leaves this writer's ranges", rank=rank)
    raise ReportRefused(Reason.BYTES_MISSING, "bytes of the plan are not reported", rank=rank)
