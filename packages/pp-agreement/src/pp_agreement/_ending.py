"""Drain and close. Drained is N of N: every rank has heard the same last admission and decided all, with one digest."""

from __future__ import annotations

from collections.abc import Callable

from pp_agreement import _events as ev
from pp_agreement._context import Context, Violation
from pp_agreement._events import REQUEST_ID_MAX, FaultCode
from pp_agreement._member import Member
from pp_agreement._rounds import Rounds
from pp_agreement._silence import Silence
from pp_agreement._state import Kind
from pp_agreement._streams import Streams


class Ending:
    """Both halves: what this rank says and is told, and what the coordinator counts.

    Args:
        deliver: Has this rank's halves hear each other.
    """

    def __init__(
        self,
        context: Context,
        streams: Streams,
        rounds: Rounds,
        member: Member,
        silence: Silence,
        deliver: Callable[[], None],
    ) -> None:
        self.context = context
        self.streams = streams
        self.rounds = rounds
        self.member = member
        self.silence = silence
        self.deliver = deliver
        # this rank
        self.started = False  # DRAIN_ALL has come: every rank knows the last admission
        self.reported = False
        self.drained = False
        self.closing = False
        self.closed = False
        # the coordinator; report_mask everywhere, as far as it is known
        self.declared: int | None = None  # the last admission, as the authority has said
        self.report_mask = 0
        self.reports: dict[int, tuple[int, int]] = {}
        self.close_mask = 0

    # -- the host's calls -------------------------------------------------------------------------------------------

    def start(self, last: int) -> None:
        """Nothing after this incarnation was or will be admitted."""
        context, rounds = self.context, self.rounds
        if type(last) is not int or last < rounds.heard or (context.is_scheduler and last != rounds.heard):
            context.refuse(f"drain at {last!r}, but {rounds.heard} were admitted here")
        if last > REQUEST_ID_MAX:
            context.refuse(f"drain at {last}: incarnations end at 2**63-1")
        if last < max(rounds.open, default=0):
            context.refuse(f"drain at {last}, but peers speak of incarnation {max(rounds.open)}")
        if rounds.last is not None and rounds.last != last:
            context.refuse(f"drain at {last}, but it was declared at {rounds.last}")
        declared = rounds.last is not None
        rounds.last = last
        if context.is_scheduler and not declared:
            self.streams.control(Kind.DRAIN, incarnation=last)
            self._end_unscheduled()

    def _end_unscheduled(self) -> None:
        for round_ in tuple(self.rounds.open.values()):
            self.member.end_unscheduled(round_)

    def close(self) -> None:
        """This rank is drained and will say nothing more."""
        if not self.drained:
            self.context.refuse("close before the drain is proven")
        if not self.closing:
            self.closing = True
            self.silence.over = True
            self.streams.muted = not self.context.is_coordinator
            self.streams.control(Kind.CLOSE)

    def report(self) -> None:
        """Say so, once, when everything up to the last admission was heard and decided here."""
        rounds = self.rounds
        if not self.reported and rounds.heard == rounds.last and not rounds.open:
            self.reported = True
            self.streams.control(Kind.DRAIN_REPORT, request_id=self._digest(), incarnation=rounds.heard)
            self.deliver()

    def _digest(self) -> int:
        return int.from_bytes(self.member.digest[:8], "little")

    # -- what members say, at the coordinator -----------------------------------------------------------------------

    def from_member(self, source: int, kind: int, request_id: int, incarnation: int) -> None:
        """A record about the domain."""
        context, bit = self.context, 1 << source
        if kind == Kind.DRAIN:
            if self.declared is None:
                self.declared = incarnation
                self.streams.fan_out((int(Kind.DRAIN_ALL), 0, 0, 0, 0, 0, incarnation))
                if self.report_mask:
                    self._compare()
            elif self.declared != incarnation:
                raise Violation(FaultCode.DRAIN_MISMATCH, f"drain at {incarnation} after {self.declared}")
        elif kind == Kind.DRAIN_REPORT:
            if self.report_mask & bit:
                if self.reports[source] != (incarnation, request_id):
                    raise Violation(
                        FaultCode.DRAIN_MISMATCH,
                        f"rank {context.name(source)} changed its drain report",
                        suspect=source,
                    )
                self.streams.duplicates += 1
                return
            self.report_mask |= bit
            self.reports[source] = (incarnation, request_id)
            if self.declared is not None:
                self._compare()
        else:
            if not self.report_mask & bit:
                context.blame(source, "closed before it drained")
            if self.close_mask & bit:
                self.streams.duplicates += 1
                return
            self.close_mask |= bit
            self.silence.left_mask |= bit
            if self.close_mask == context.all_mask:
                self.streams.fan_out((int(Kind.CLOSE_ACK), 0, 0, 0, 0, 0, 0))

    def _compare(self) -> None:
        """Look at the reports that have come, once the last admission is known."""
        context = self.context
        last = self.declared or 0
        for member, (count, _digest) in self.reports.items():
            if count != last:
                raise Violation(
                    FaultCode.DRAIN_MISMATCH,
                    f"rank {context.name(member)} drained at {count}, not at {last}",
                    suspect=member,
                )
        if self.report_mask != context.all_mask:
            self.streams.fan_out((int(Kind.DRAIN_STATUS), 0, 0, 0, 0, self.report_mask, last))
            return
        digests = {digest for _count, digest in self.reports.values()}
        if len(digests) != 1:
            told = ", ".join(f"{context.name(m)}: {d:016x}" for m, (_c, d) in sorted(self.reports.items()))
            raise Violation(FaultCode.DRAIN_MISMATCH, f"digests of {last} decisions differ: {told}")
        self._conclude(digests.pop(), last)

    def _conclude(self, digest: int, last: int) -> None:
        """All ranks have reported, and alike: the drain is proven."""
        self.streams.fan_out((int(Kind.DRAINED), 0, 0, 0, 0, digest, last))

    # -- what the coordinator says ----------------------------------------------------------------------------------

    def from_coordinator(self, kind: int, request_id: int, incarnation: int) -> None:
        """A decision about the domain."""
        if kind == Kind.DRAIN_ALL:
            self._begin(incarnation)
        elif kind == Kind.DRAIN_STATUS:
            self.report_mask |= request_id & self.context.all_mask
        elif kind == Kind.DRAINED:
            if not self.reported or incarnation != self.rounds.heard or request_id != self._digest():
                raise Violation(FaultCode.DRAIN_MISMATCH, f"drained at {incarnation} without this rank's report")
            if self.drained:
                self.streams.duplicates += 1
                return
            self.report_mask = self.context.all_mask
            self.drained = True
            self.context.emit(ev.Drained(incarnation, self.member.digest.hex()))
        else:
            if not self.closing:
                self.context.blame_coordinator("closed without this rank")
            self.closed = True
            self.streams.muted = True

    def _begin(self, last: int) -> None:
        context, rounds = self.context, self.rounds
        known = max(rounds.heard, max(rounds.open, default=0))
        if (rounds.last is not None and rounds.last != last) or known > last:
            raise Violation(
                FaultCode.DRAIN_MISMATCH,
                f"drain at {last}; here {known} is the last one known and it was declared at {rounds.last}",
            )
        if self.started:
            self.streams.duplicates += 1
            return
        if context.is_scheduler and rounds.last is None:
            raise Violation(FaultCode.DRAIN_MISMATCH, "a drain that this rank never began", suspect=context.coordinator)
        self.started = True
        rounds.last = last
        context.emit(ev.DrainStarted(last))

    # -- looking at it ----------------------------------------------------------------------------------------------

    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks whose drain report is not known here."""
        mask = self.report_mask | (1 << self.context.me if self.reported else 0)
        return tuple(r for i, r in enumerate(self.context.domain.ranks) if not mask >> i & 1)

    def copy(
        self,
        context: Context,
        streams: Streams,
        rounds: Rounds,
        member: Member,
        silence: Silence,
        deliver: Callable[[], None],
    ) -> Ending:
        """An independent copy, for explorers."""
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.context, twin.streams, twin.rounds, twin.member = context, streams, rounds, member
        twin.silence, twin.deliver = silence, deliver
        twin.reports = dict(self.reports)
        return twin

    def fingerprint(self) -> tuple[object, ...]:
        """All of it decides the future."""
        return (
            self.started, self.reported, self.drained, self.closing, self.closed, self.declared, self.report_mask,
            tuple(sorted(self.reports.items())), self.close_mask,
        )  # fmt: skip
