"""How a bounce write is described to its receiver, and checked there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kv_bounce_planner.sessions.identity import OperationIdentity

if TYPE_CHECKING:
    from kv_bounce_planner.planning.plan import WriterPlan, WriterTransfer


class Reports(Protocol):
    """How a bounce write is described to the receiver, and checked there."""

    def encode(self, transfer: WriterTransfer, operation: OperationIdentity, base_address: int) -> bytes: ...

    def check(self, plan: WriterPlan, report: bytes, operation: OperationIdentity, base_address: int) -> None:
        """Raise a KVTransferError unless the report describes exactly the plan's bytes at this base."""
        ...


class PlannerReports:
    """The planner's reports: the plan's digest, or with ``explicit`` every fragment."""

    def __init__(self, *, explicit: bool = False) -> None:
        # Imported here, once: sessions need no planner unless they bounce.
        from kv_bounce_planner.planning import codec, report

        self._explicit, self._codec, self._report = explicit, codec, report

    def encode(self, transfer: WriterTransfer, operation: OperationIdentity, base_address: int) -> bytes:
        return self._codec.encode_report(
            self._report.WriterReport.for_transfer(
                transfer.writer, operation_id=operation.digest(), bound_base=base_address, explicit=self._explicit
            )
        )

    def check(self, plan: WriterPlan, report: bytes, operation: OperationIdentity, base_address: int) -> None:
        decoded = self._codec.decode_report(report)
        self._report.validate_report(plan, decoded, bound_base=base_address, operation_id=operation.digest())
