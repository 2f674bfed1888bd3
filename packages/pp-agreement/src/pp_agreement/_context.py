"""What the rooms of one core share: who this rank is, the time, the effects of the running step, how it ends early."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

from pp_agreement._errors import LocalProtocolError
from pp_agreement._events import (
    SURVIVES_FAULT,
    AgreementEvent,
    Fault,
    FaultCode,
    Frame,
    Key,
    Verdict,
)

if TYPE_CHECKING:
    from pp_agreement._config import AgreementConfig, Domain
    from pp_agreement._round import Round

JUMP_MAX_S = 1e9
"""A clock that moves further between two steps has no meaning, and does not move the timers."""

VERDICTS_MAX = 256
"""Verdicts that are kept for the evidence."""


class Violation(Exception):
    """A peer (or this package) broke the contract while ``step`` ran; becomes a ``Fault``."""

    def __init__(
        self,
        code: FaultCode,
        detail: str,
        round_: Round | None = None,
        suspect: int | None = None,
        *,
        origin: int | None = None,
        text: str = "",
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.round = round_
        self.suspect = suspect
        self.origin = origin  # the member that stopped the domain; None: this one
        self.text = text  # what the host said, for the others


class Context:
    """One core's identity, its time, and what has not been taken from it yet: events for the host, frames for the transport.

    Two times: ``now_s`` is the caller's reading, for stories; ``elapsed_s`` adds up its forward movements, so a clock that
    jumps ahead makes timers due once and one that goes back makes none late. All timers run on ``elapsed_s``.
    """

    def __init__(self, domain: Domain, rank: int, config: AgreementConfig, replicated: bool, session: int) -> None:
        self.domain = domain
        self.config = config
        self.rank = rank
        self.session = session
        self.me = domain.index_of(rank)
        self.size = domain.size
        self.voices = domain.voices  # how many reasons a commit carries: of each member one, or of each group
        self.all_mask = (1 << self.size) - 1
        self.replicated = replicated
        self.coordinator = self.me if replicated else domain.coordinator_index
        self.scheduler = domain.scheduler_index
        self.is_coordinator = self.me == self.coordinator
        self.is_scheduler = self.me == self.scheduler
        others = tuple(i for i in range(self.size) if i != self.me)
        self.peers: tuple[int, ...] = () if replicated else (others if self.is_coordinator else (self.coordinator,))
        self.now_s = float("nan")  # no reading yet
        self.elapsed_s = 0.0
        self.events: list[AgreementEvent] = []
        self.frames: list[tuple[int, Frame]] = []  # by peer; given to the transport in this order
        self.event_counts: dict[type[AgreementEvent], int] = {}  # without ``Committed``, which is counted by outcome
        self.may_lapse = False  # an event waits that this rank's own later call can swallow
        self.verdicts: list[Verdict] = []  # the last ones, for the evidence
        self.fault: Fault | None = None

    def emit(self, event: AgreementEvent) -> None:
        """Have an event for the host."""
        self.events.append(event)
        kind = type(event)
        self.event_counts[kind] = self.event_counts.get(kind, 0) + 1

    def judge(self, verdict: Verdict) -> None:
        """Have a verdict for the host, and remember it."""
        self.emit(verdict)
        self.verdicts.append(verdict)
        del self.verdicts[:-VERDICTS_MAX]

    def stop(self, fault: Fault) -> None:
        """Keep the diagnosis; what the host was not given yet and no longer binds is suppressed."""
        self.events[:] = [event for event in self.events if isinstance(event, SURVIVES_FAULT)]
        self.fault = fault
        self.emit(fault)

    def name(self, member: int) -> int:
        """The rank of a member."""
        return self.domain.ranks[member]

    def refuse(self, message: str, key: Key | None = None, round_: Round | None = None) -> NoReturn:
        """The local call breaks the contract; nothing has changed."""
        raise LocalProtocolError(
            message,
            rank=self.rank,
            key=key,
            state="not open" if round_ is None else f"{round_.ready.name}, {round_.terminal.name}",
            story=() if round_ is None else self.tell(round_),
        )

    def known(self, kind: type[IntEnum], value: object) -> int:
        """The number of an enumeration's member; anything else would be found only on the wire."""
        if type(value) is not kind:
            self.refuse(f"{value!r} is not of type {kind.__name__}")
        return int(value)

    def blame(self, source: int, what: str, round_: Round | None = None) -> NoReturn:
        """A member broke the contract."""
        raise Violation(FaultCode.PROTOCOL, f"rank {self.name(source)} {what}", round_, source)

    def blame_coordinator(self, what: str, round_: Round | None = None) -> NoReturn:
        """The coordinator says what cannot be."""
        raise Violation(FaultCode.PROTOCOL, what, round_, self.coordinator)

    def tell(self, round_: Round) -> tuple[str, ...]:
        """A round's story, a line per entry."""
        return tuple(f"{at_s:.6f} {what} (rank {self.name(source)})" for at_s, what, source in round_.story)

    def copy(self) -> Context:
        """An independent copy, for explorers."""
        twin = Context.__new__(Context)
        twin.__dict__.update(self.__dict__)
        twin.events = list(self.events)
        twin.frames = list(self.frames)
        twin.verdicts = list(self.verdicts)
        twin.event_counts = dict(self.event_counts)
        return twin
