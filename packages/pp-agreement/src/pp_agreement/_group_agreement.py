"""The shell of one rank of a group: an ``Agreement`` inside it, and at the leader a second one among the leaders."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pp_agreement import _events as ev
from pp_agreement._agreement import Agreement
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import ConcurrentCallError, ConfigurationError, DomainStopped, LocalProtocolError
from pp_agreement._events import FaultCode, Key
from pp_agreement._groups import Groups
from pp_agreement._relay import Bridge, GroupCore, OuterCore, voice_config
from pp_agreement._statistics import DrainReport
from pp_agreement._transport import Transport


class _Voice(Agreement):
    """A leader among the leaders; only its group makes it speak."""

    def __init__(
        self, groups: Groups, rank: int, transport: Transport, config: AgreementConfig, clock: Callable[[], float]
    ) -> None:
        super().__init__(groups.outer, rank, transport, voice_config(config), clock)
        self.core = OuterCore(groups, rank, config, session=self._core.context.session)
        self._adopt(self.core)


class GroupAgreement(Agreement):
    """One rank's side of a domain whose members are groups of ranks, such as the ranks of one stage with TP or CP.

    To its host every rank is a member of one domain of all ranks, with the calls, events, promises and refusals of an
    :class:`Agreement`: ``Prepared`` comes when all ranks of all groups have published, a withdrawal of one ends the attempt on
    all of them, ``Committed`` follows the last rank's vote and carries the greatest outcome, and a drain is proven when every
    rank has decided everything. What differs is the way there: a group agrees first, and its leader speaks for it.

    ``Committed.reasons`` holds one reason per group, the greatest of its ranks. ``Advice`` from another group names its leader.
    A verdict about silence reaches the group of the silent rank, and for a leader all leaders.

    Args:
        groups: Who decides together.
        rank: This rank.
        transport_of: Gives the transport of a domain: asked for the group's own, and at a leader also for that of the leaders.
            ``Lanes.transport`` is one.
        config: Bounds, equal on every rank.
        clock: Monotonic seconds.

    Raises:
        ConfigurationError: ``rank`` belongs to no group.
    """

    def __init__(
        self,
        groups: Groups,
        rank: int,
        transport_of: Callable[[Domain], Transport],
        config: AgreementConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(groups, Groups):
            raise ConfigurationError("groups", f"{groups!r} is not a Groups")
        bounds = AgreementConfig() if config is None else config
        inner = groups.inner(rank)
        super().__init__(inner, rank, transport_of(inner), bounds, clock)
        self.groups = groups
        self._group = GroupCore(groups, rank, bounds, session=self._core.context.session)
        self._adopt(self._group)
        self._step = self._step_and_join
        self._joining = False
        self._voice: _Voice | None = None
        self._bridge: Bridge | None = None
        if rank in groups.leaders:
            self._voice = voice = _Voice(groups, rank, transport_of(groups.outer), bounds, clock)
            self._bridge = Bridge(self._group, voice.core, voice, self._fall)

    # -- joining the two --------------------------------------------------------------------------------------------

    def _fall(self, method: Callable[..., Any], *given: Any) -> None:
        method(*given, self._clock())

    def _join(self) -> None:
        """What the group has agreed rises, what the domain has decided falls.

        Not while a step of either core runs (a signal handler, a callback): whatever runs there joins them afterwards.
        """
        bridge, voice = self._bridge, self._voice
        if bridge is None or voice is None or self._joining or self._core.stepping or voice._core.stepping:
            return
        self._joining = True
        try:
            bridge.join(voice._take)
        except LocalProtocolError as error:  # not the host's mistake: what a group says is never refused outside
            super().fail(f"broken off: {error!r}", FaultCode.INTERNAL)
        except BaseException as error:  # half of it may have been said; the group's end rises with the next call
            super().fail(f"broken off: {error!r}", FaultCode.INTERNAL)
            raise
        finally:
            self._joining = False

    def _step_and_join(self, work: Callable[..., Any], given: tuple[Any, ...], now_s: float) -> Any:
        answer = self._core.call(work, given, now_s)
        self._join()
        return answer

    # -- calls that concern both ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the transports: of the group, then of the leaders. Nothing is exchanged yet."""
        super().open()
        if self._voice is not None:
            try:
                self._voice.open()
            except BaseException:
                self._end(False)
                raise

    def admit(self, request_id: int, incarnation: int, ready: bool = True) -> Key:
        """See :meth:`Agreement.admit`."""
        if self._core.stepping:
            raise ConcurrentCallError(f"rank {self.rank}: admit while another call runs")
        if self._voice is not None and self._core.fault is None and not self._ended:
            try:
                self._voice.admit(request_id, incarnation, ready)
            except DomainStopped:
                self._join()
                raise
        return super().admit(request_id, incarnation, ready)

    def start_drain(self, last_incarnation: int) -> None:
        """See :meth:`Agreement.start_drain`."""
        super().start_drain(last_incarnation)
        if self._voice is not None and self.is_scheduler and self._core.fault is None:
            self._voice.start_drain(last_incarnation)
            self._join()

    def fail(self, detail: str, code: FaultCode = FaultCode.HOST) -> None:
        """See :meth:`Agreement.fail`; every group is told."""
        super().fail(detail, code)
        self._join()

    def busy(self, max_s: float, reason: str = "") -> bool:
        """See :meth:`Agreement.busy`."""
        gone = super().busy(max_s, reason)
        return gone if self._voice is None else self._voice.busy(max_s, reason) and gone

    def peer_died(self, rank: int, evidence: str) -> None:
        """See :meth:`Agreement.peer_died`; of any rank of any group."""
        self.groups.group_of(rank)
        if rank in self.domain.ranks:
            super().peer_died(rank, evidence)
        elif self._voice is not None and rank in self.groups.leaders:
            self._voice.peer_died(rank, evidence)
        elif not self._core.closing:  # this rank does not speak with it; who has closed may leave
            self.fail(f"rank {rank} died: {str(evidence)[:1000]}", FaultCode.DEATH)
        self._join()

    def poll(self) -> tuple[ev.AgreementEvent, ...]:
        """See :meth:`Agreement.poll`: the group's frames, then the leaders', then what has fallen leaves at once."""
        events = super().poll()
        voice = self._voice
        if voice is None or self._ended:
            return events
        self._events[:0] = events
        self._join()
        try:
            if not voice._ended:
                voice._events[:0] = voice.poll()
        finally:
            self._join()
        speaking, beating = self._core.streams.wanting()
        if speaking or beating:
            self._flush(speaking, beating, self._clock())
        return self._take()

    # -- leaving ----------------------------------------------------------------------------------------------------

    def close(self, deadline_s: float = 5.0, wait: Callable[[float], object] = time.sleep) -> bool:
        """See :meth:`Agreement.close`. The leaders shake hands first, then each group: where any rank has closed cleanly, every
        leader has closed.
        """
        voice = self._voice
        if voice is None or self._ended or not self._opened:
            return super().close(deadline_s, wait)
        until_s = self._clock() + self._duration(deadline_s)
        while not voice._ended and self._is_drained(self) and self._is_drained(voice):
            if voice.close(0.0, wait):
                break
            if self._clock() >= until_s:
                return False
            self._events[:0] = self.poll()
            wait(0.0005)
        if (
            not voice._ended
        ):  # nothing is proven, or the domain has stopped: what was said last has half of the time to leave
            voice.close(max(0.0, until_s - self._clock()) / 2, wait)
        return super().close(max(0.0, until_s - self._clock()), wait)

    @staticmethod
    def _is_drained(agreement: Agreement) -> bool:
        return agreement._core.drained and agreement._core.fault is None

    def abandon(self) -> None:
        """See :meth:`Agreement.abandon`."""
        voice = self._voice
        if voice is None or self._ended:
            super().abandon()
            return
        try:
            if self._opened and self._core.fault is None and (voice._core.closing or self._core.closing):
                self.fail("left before everybody had closed")
                self._last_words()
        finally:
            self._end(False)

    def _let_go(self, clean: bool) -> None:
        try:
            super()._let_go(clean)
        finally:
            if self._voice is not None:
                self._voice._end(False)  # without effect where it has closed

    # -- looking at it ----------------------------------------------------------------------------------------------

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank's voice is the author of decisions."""
        return self.rank == self.groups.coordinator_rank

    def drain_state(self) -> DrainReport:
        """What is proven so far. Until all is, only leaders know of other groups, and those as a whole."""
        report = super().drain_state()
        if report.drained:
            return report
        others = set(self.groups.leaders) - {self.domain.ranks[0]}
        if self._voice is not None:
            others &= set(self._voice._core.ending.missing_ranks())
        missing = {rank for row in self.groups.groups if row[0] in others for rank in row} | set(report.missing_ranks)
        return replace(report, missing_ranks=tuple(rank for rank in self.groups.ranks if rank in missing))

    def validate(self) -> None:
        """See :meth:`Agreement.validate`."""
        super().validate()
        if self._voice is not None:
            self._voice.validate()

    def _traffic(self) -> tuple[int, int, int, int]:
        sent, received, refused, outstanding = super()._traffic()
        if self._voice is None:
            return sent, received, refused, outstanding
        above = self._voice._traffic()
        return sent + above[0], received + above[1], refused + above[2], max(outstanding, above[3])

    def evidence(self) -> dict[str, object]:
        """As of one domain of all ranks: ``pp-agreement verify`` compares the ranks of all groups."""
        groups = self.groups
        return {
            **super().evidence(),
            "domain": {
                "id": groups.domain_id,
                "epoch": groups.epoch,
                "ranks": list(groups.ranks),
                "scheduling_rank": groups.scheduling_rank,
                "coordinator_rank": groups.coordinator_rank,
                "groups": [list(row) for row in groups.groups],
            },
        }
