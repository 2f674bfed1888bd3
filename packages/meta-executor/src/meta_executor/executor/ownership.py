"""A request's life on one rank: one table for both roles and both schedule styles, one owner per request id.

Theory of operation
-------------------
Each rank holds one :class:`Registry`. It maps a request id to one :class:`Sequence`, the only record of that request on
this rank: no other room keeps state under a request id. The state changes only through :meth:`Registry.apply`, which looks
the edge up in :data:`TRANSITIONS`; an edge that is not there raises with the whole story of that request and changes
nothing.

The paths::

    context, context-first      WAITING            -> ACTIVATED -> COMPUTING -> TRANSFERRING -> QUIESCENT -> TERMINAL
    context, generation-first   WAITING -> PREPARED -> ACTIVATED -> COMPUTING -> TRANSFERRING -> QUIESCENT -> TERMINAL
    generation, both            WAITING -> TRANSFERRING -> ACTIVATED -> COMPUTING -> QUIESCENT -> TERMINAL
    generation, no context leg  WAITING ------------------> ACTIVATED -> COMPUTING -> QUIESCENT -> TERMINAL
    never activated             WAITING | PREPARED -> ABORTED -> WAITING (another attempt) | QUIESCENT | TERMINAL
    ended early                 ACTIVATED | COMPUTING | TRANSFERRING -> ENDING -> QUIESCENT -> TERMINAL

PREPARED means that this rank has granted its lease (readiness agreement). TRANSFERRING means that a peer may be writing or
reading this request's memory. QUIESCENT means that nothing of this rank touches the memory any more: the terminal vote was
cast. Only TERMINAL gives memory back.

*Legs* are the parties that may touch the memory now: compute, the schedule, the transceiver. Each ends its own leg only;
ending a leg twice, or another's, changes nothing. QUIESCENT is refused while a leg is open.

*Preparation is idempotent in every state*: the executor prepares a request at admission and again whenever it looks for
schedulable work. The same object is a no-op wherever it stands; another object under the same id fails closed and both are
named.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from meta_executor.executor.request import Request, Role, ScheduleStyle
from meta_executor.wire import TokenLogprobs
from pp_agreement import Key


class State(StrEnum):
    """Where a request stands on this rank."""

    WAITING = "WAITING"
    PREPARED = "PREPARED"
    ACTIVATED = "ACTIVATED"
    COMPUTING = "COMPUTING"
    TRANSFERRING = "TRANSFERRING"
    ABORTED = "ABORTED"
    ENDING = "ENDING"
    QUIESCENT = "QUIESCENT"
    TERMINAL = "TERMINAL"


class Event(StrEnum):
    """What can happen to it (past tense)."""

    LEASED = "LEASED"  # this rank acknowledged PREPARE: its lease is irrevocable
    PUBLISHED = "PUBLISHED"  # generation: blocks owned, destination published to the writers
    OWNED = "OWNED"  # generation: blocks owned for a prompt that is computed here
    ARRIVED = "ARRIVED"  # generation: every writer's bytes are in place
    SCHEDULED = "SCHEDULED"  # the propagated schedule named it
    LAUNCHED = "LAUNCHED"  # a step that holds its blocks was given to the engine
    COMPUTED = "COMPUTED"  # context: the last step of its prompt has retired on this rank
    FINISHED = "FINISHED"  # generation: its last token is known
    STOPPED = "STOPPED"  # cancelled or failed after activation
    ABORTED = "ABORTED"  # withdrawn, aborted or cancelled before activation
    REOPENED = "REOPENED"  # the aborted attempt is final, another one may open
    QUIESCED = "QUIESCED"  # no leg is open: the terminal vote (context) is cast
    COMMITTED = "COMMITTED"  # every rank was quiescent (context); memory is proven (generation)


class Leg(StrEnum):
    """Who may touch the request's memory now."""

    COMPUTE = "compute"
    #: Scheduling rank of a pipeline: schedules that name it are under way on other ranks.
    SCHEDULE = "schedule"
    TRANSCEIVER = "transceiver"


class Outcome(StrEnum):
    """How a request ended on this rank. The order of severity is the agreement's: CANCELLED over FAILED over COMPLETED."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Edge:
    """One row of the table."""

    target: State
    #: Roles whose requests may take it.
    roles: tuple[Role, ...] = ("context", "generation")
    #: Schedule styles that it belongs to.
    styles: tuple[ScheduleStyle, ...] = ("context_first", "generation_first")


_CONTEXT: tuple[Role, ...] = ("context",)
_GENERATION: tuple[Role, ...] = ("generation",)
_GENERATION_FIRST: tuple[ScheduleStyle, ...] = ("generation_first",)
_CONTEXT_FIRST: tuple[ScheduleStyle, ...] = ("context_first",)

#: (state, event) -> edge. What is not here is refused. docs/executor.md draws its figure from this table.
TRANSITIONS: Mapping[tuple[State, Event], Edge] = {
    (State.WAITING, Event.LEASED): Edge(State.PREPARED, _CONTEXT, _GENERATION_FIRST),
    (State.WAITING, Event.SCHEDULED): Edge(State.ACTIVATED, _CONTEXT, _CONTEXT_FIRST),
    (State.PREPARED, Event.SCHEDULED): Edge(State.ACTIVATED, _CONTEXT, _GENERATION_FIRST),
    (State.WAITING, Event.PUBLISHED): Edge(State.TRANSFERRING, _GENERATION),
    (State.WAITING, Event.OWNED): Edge(State.ACTIVATED, _GENERATION, _CONTEXT_FIRST),
    (State.TRANSFERRING, Event.ARRIVED): Edge(State.ACTIVATED, _GENERATION),
    (State.ACTIVATED, Event.LAUNCHED): Edge(State.COMPUTING),
    (State.COMPUTING, Event.LAUNCHED): Edge(State.COMPUTING),
    (State.COMPUTING, Event.COMPUTED): Edge(State.TRANSFERRING, _CONTEXT),
    (State.COMPUTING, Event.FINISHED): Edge(State.ENDING, _GENERATION),
    # a first token that already ends the answer: nothing is left to compute here
    (State.ACTIVATED, Event.FINISHED): Edge(State.ENDING, _GENERATION),
    (State.WAITING, Event.ABORTED): Edge(State.ABORTED),
    (State.PREPARED, Event.ABORTED): Edge(State.ABORTED, _CONTEXT, _GENERATION_FIRST),
    (State.ABORTED, Event.REOPENED): Edge(State.WAITING, _CONTEXT, _GENERATION_FIRST),
    (State.ABORTED, Event.QUIESCED): Edge(State.QUIESCENT),
    # finalised without another attempt: the terminal phase is not used
    (State.ABORTED, Event.COMMITTED): Edge(State.TERMINAL),
    (State.ACTIVATED, Event.STOPPED): Edge(State.ENDING),
    (State.COMPUTING, Event.STOPPED): Edge(State.ENDING),
    (State.TRANSFERRING, Event.STOPPED): Edge(State.ENDING),
    (State.ENDING, Event.STOPPED): Edge(State.ENDING),
    (State.ENDING, Event.LAUNCHED): Edge(State.ENDING, _CONTEXT),  # a schedule that was already under way
    (State.TRANSFERRING, Event.QUIESCED): Edge(State.QUIESCENT, _CONTEXT),
    (State.ENDING, Event.QUIESCED): Edge(State.QUIESCENT),
    (State.QUIESCENT, Event.COMMITTED): Edge(State.TERMINAL),
}

#: States in which a request has been activated and computes or still owns memory because it did.
ACTIVE_STATES = frozenset({State.ACTIVATED, State.COMPUTING})
#: States before activation: metadata only on the context side.
PRE_ACTIVE_STATES = frozenset({State.WAITING, State.PREPARED})

STORY_EVENTS_MAX = 64


class RegistryError(Exception):
    """The contract of this file was broken; the registry is unchanged. Carries the request's id, state and story."""

    def __init__(self, message: str, *, request_id: int, state: str = "", story: tuple[str, ...] = ()) -> None:
        told = f" (story: {' > '.join(story)})" if story else ""
        super().__init__(message + told)
        self.request_id = request_id
        self.state = state
        self.story = story


class IllegalTransition(RegistryError):
    """The table has no such edge."""


class OwnershipConflict(RegistryError):
    """Two owners for one request id. Fail closed: the rank stops, because memory could be given back twice."""


class UnknownRequest(RegistryError, KeyError):
    """No record under that id, and no tombstone either."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(slots=True, eq=False)
class Sequence:
    """The record of one request on this rank."""

    request: Request
    #: Place in the authoritative broadcast of this instance, dense from 1: the agreement's incarnation.
    incarnation: int = 0
    state: State = State.WAITING
    legs: set[Leg] = field(default_factory=set)
    #: KV blocks, in token order.
    block_ids: list[int] = field(default_factory=list)
    #: Tokens of the prompt whose KV was found in this rank's prefix cache (count), and the blocks that hold them.
    cached_count: int = 0
    shared_blocks: int = 0
    block_cache: npt.NDArray[np.int64] | None = None
    #: Positions [0, launched) of the prompt are in a step that was launched or in cached blocks; [0, retired) are computed.
    launched: int = 0
    retired: int = 0
    steps_in_flight: int = 0
    #: Scheduling rank: steps that name it and whose result has not come back (count).
    results_due: int = 0
    #: On the rank that hands the first token out: what is told of the prompt's tokens that are computed, if it is asked for.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    #: Highest step that names this request and that must have retired before compute is quiescent; -1: none.
    last_step_id: int = -1
    outcome: Outcome | None = None
    #: Why it ended early, for the client.
    reason: str = ""
    #: Code of :mod:`meta_executor.wire` when it failed.
    error_code: str = ""
    quarantined: bool = False
    #: Its client was told that it ended early.
    answered_end: bool = False
    #: The transceiver has heard of it.
    admitted: bool = False
    #: The agreement's key of the present attempt (context).
    key: Key | None = None
    #: This rank's READY vote of the present attempt is cast (context, generation-first).
    voted_ready: bool = False
    #: No transfer operation may begin any more (context).
    sealed: bool = False
    operations_ended: int = 0
    #: Its memory is in doubt: said to the other ranks; and the deadline after which a QUARANTINE vote is allowed has passed.
    doubted: bool = False
    doubt_expired: bool = False
    #: Every writer's bytes are in place (generation).
    arrived: bool = False
    admitted_s: float = 0.0
    #: Since when its memory is exposed to a peer, or offered to one (monotonic, s).
    transfer_since_s: float = 0.0
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_EVENTS_MAX))

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.request.request_id

    @property
    def agreed_key(self) -> Key:
        """The agreement's key of the present attempt; set when the request is admitted."""
        if self.key is None:
            raise RegistryError(f"{self.describe()}: no agreement was opened", request_id=self.request_id)
        return self.key

    def describe(self) -> str:
        """Names this very record in a diagnosis."""
        return f"{self.request.describe()} incarnation {self.incarnation}"

    def block_array(self) -> npt.NDArray[np.int64]:
        """Its block table: int64, shape (blocks,)."""
        if self.block_cache is None or len(self.block_cache) != len(self.block_ids):
            self.block_cache = np.asarray(self.block_ids, dtype=np.int64)
        return self.block_cache

    @property
    def ended_early(self) -> bool:
        """It was cancelled or has failed."""
        return self.outcome in (Outcome.CANCELLED, Outcome.FAILED)


class Registry:
    """All requests of one rank. Not thread-safe: the loop is its only caller.

    Args:
        role: What the rank's instance does; the table's edges depend on it.
        requests_max: Live records at once (count); more are a fault of admission.
        tombstones_max: Finished ids that are remembered, so that a late cancel or a reuse is recognised (count).
    """

    def __init__(self, role: Role, *, requests_max: int = 65_536, tombstones_max: int = 65_536) -> None:
        self.role = role
        self._sequences: dict[int, Sequence] = {}
        self._tombstones: OrderedDict[int, str] = OrderedDict()
        self._requests_max = requests_max
        self._tombstones_max = tombstones_max
        self._taken_count = 0
        self._finished: dict[str, int] = {outcome.value: 0 for outcome in Outcome}
        self._prepared_again_count = 0
        self._peak_count = 0

    # -- lookup -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def get(self, request_id: int) -> Sequence | None:
        """The record, or None when the id is not live here."""
        return self._sequences.get(request_id)

    def require(self, request_id: int) -> Sequence:
        """The record.

        Raises:
            UnknownRequest: The id is not live here.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            ended = self._tombstones.get(request_id)
            raise UnknownRequest(
                f"request {request_id}: "
                + (f"already {ended} on this rank" if ended else "never admitted on this rank"),
                request_id=request_id,
            )
        return sequence

    def is_finished(self, request_id: int) -> bool:
        """The id was live here and has ended (as far as tombstones reach back)."""
        return request_id in self._tombstones

    def in_state(self, *states: State) -> tuple[Sequence, ...]:
        """Records in one of the states, in the order of the authoritative broadcast."""
        return tuple(s for s in self._sequences.values() if s.state in states)

    # -- change -------------------------------------------------------------------------------------------------------

    def prepare(self, request: Request, incarnation: int, *, now_s: float = 0.0) -> tuple[Sequence, bool]:
        """Take a request in. Idempotent in every state for the same object.

        Args:
            request: What is asked.
            incarnation: Its place in the authoritative broadcast, >= 1.
            now_s: The time (monotonic, s).

        Returns:
            The record, and whether it is new.

        Raises:
            OwnershipConflict: Another object holds this id, live or as a tombstone. Nothing has changed.
        """
        held = self._sequences.get(request.request_id)
        if held is not None:
            if held.request is request:
                self._prepared_again_count += 1
                return held, False
            raise OwnershipConflict(
                f"two owners for request id {request.request_id}: {held.describe()} in state {held.state.value}, and "
                f"{request.describe()} incarnation {incarnation} being prepared",
                request_id=request.request_id,
                state=held.state.value,
                story=tuple(held.story),
            )
        ended = self._tombstones.get(request.request_id)
        if ended is not None:
            raise OwnershipConflict(
                f"two owners for request id {request.request_id}: one that ended {ended}, and {request.describe()} "
                f"incarnation {incarnation} being prepared",
                request_id=request.request_id,
                state=State.TERMINAL.value,
            )
        if len(self._sequences) >= self._requests_max:
            raise RegistryError(
                f"request {request.request_id}: {len(self._sequences)} requests are live, at most {self._requests_max}",
                request_id=request.request_id,
            )
        sequence = Sequence(request, incarnation, admitted_s=now_s)
        sequence.story.append("prepared")
        self._sequences[request.request_id] = sequence
        self._taken_count += 1
        self._peak_count = max(self._peak_count, len(self._sequences))
        return sequence, True

    def apply(self, sequence: Sequence, event: Event) -> State:
        """Take one edge of the table.

        Returns:
            The new state. TERMINAL removes the record and leaves a tombstone.

        Raises:
            IllegalTransition: No such edge for this role and style, or a leg is open that QUIESCED or COMMITTED forbids.
            OwnershipConflict: The record is not the one that this registry holds under its id.
        """
        self._check_held(sequence)
        request = sequence.request
        edge = TRANSITIONS.get((sequence.state, event))
        if edge is None or self.role not in edge.roles or request.schedule_style not in edge.styles:
            raise self._illegal(sequence, event, "no such edge")
        if event in (Event.QUIESCED, Event.COMMITTED) and sequence.legs:
            legs = ", ".join(sorted(leg.value for leg in sequence.legs))
            raise self._illegal(sequence, event, f"open legs: {legs}")
        sequence.state = edge.target
        sequence.story.append(f"{event}:{edge.target}")
        if edge.target is State.TERMINAL:
            self._bury(sequence)
        return edge.target

    def open_leg(self, sequence: Sequence, leg: Leg) -> None:
        """A party may touch the memory from now on. Idempotent."""
        self._check_held(sequence)
        if sequence.state in (State.QUIESCENT, State.TERMINAL):
            raise self._illegal(sequence, leg, "nothing may touch its memory any more")
        if leg not in sequence.legs:
            sequence.legs.add(leg)
            sequence.story.append(f"+{leg}")

    def end_leg(self, sequence: Sequence, leg: Leg) -> bool:
        """That party is done. Returns whether its leg was open; another party's leg is never touched."""
        self._check_held(sequence)
        if leg not in sequence.legs:
            return False
        sequence.legs.remove(leg)
        sequence.story.append(f"-{leg}")
        return True

    def end(self, sequence: Sequence, outcome: Outcome, reason: str = "", error_code: str = "") -> bool:
        """Settle how the request ends; the first word that is not COMPLETED wins. Returns whether it was settled now."""
        self._check_held(sequence)
        if sequence.outcome is not None and sequence.outcome is not Outcome.COMPLETED:
            return False
        if sequence.outcome is outcome:
            return False
        sequence.outcome = outcome
        sequence.reason = reason
        sequence.error_code = error_code
        sequence.story.append(f"{outcome.value}({reason})" if reason else outcome.value)
        return True

    def _bury(self, sequence: Sequence) -> None:
        outcome = sequence.outcome or Outcome.COMPLETED
        self._finished[outcome.value] += 1
        del self._sequences[sequence.request_id]
        self._tombstones[sequence.request_id] = outcome.value
        while len(self._tombstones) > self._tombstones_max:
            self._tombstones.popitem(last=False)

    def _check_held(self, sequence: Sequence) -> None:
        held = self._sequences.get(sequence.request_id)
        if held is not sequence:
            other = f"{held.describe()} in state {held.state.value}" if held else "no record"
            raise OwnershipConflict(
                f"request id {sequence.request_id}: {sequence.describe()} in state {sequence.state.value} acts, but "
                f"this rank holds {other}",
                request_id=sequence.request_id,
                state=sequence.state.value,
                story=tuple(sequence.story),
            )

    def _illegal(self, sequence: Sequence, what: Event | Leg, why: str) -> IllegalTransition:
        return IllegalTransition(
            f"{sequence.describe()}: {what.value} in state {sequence.state.value}: {why}",
            request_id=sequence.request_id,
            state=sequence.state.value,
            story=tuple(sequence.story),
        )

    # -- checks -------------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Re-prove what must always hold.

        Raises:
            RegistryError: It does not; our bug.
        """
        for request_id, sequence in self._sequences.items():
            if request_id != sequence.request_id or request_id in self._tombstones:
                raise OwnershipConflict(f"request {request_id}: filed twice", request_id=request_id)
            if sequence.state is State.TERMINAL:
                raise RegistryError(f"request {request_id}: terminal and live", request_id=request_id)
            if sequence.state is State.QUIESCENT and sequence.legs:
                raise RegistryError(f"request {request_id}: quiescent with open legs", request_id=request_id)
            if not 0 <= sequence.retired <= sequence.launched <= sequence.request.prompt_count:
                raise RegistryError(
                    f"request {request_id}: retired {sequence.retired}, launched {sequence.launched}, prompt "
                    f"{sequence.request.prompt_count}",
                    request_id=request_id,
                    story=tuple(sequence.story),
                )
            if sequence.steps_in_flight and Leg.COMPUTE not in sequence.legs:
                raise RegistryError(
                    f"request {request_id}: steps in flight without compute's leg", request_id=request_id
                )

    def statistics(self) -> RegistryStatistics:
        """Counters since construction."""
        return RegistryStatistics(
            taken=self._taken_count,
            live=len(self._sequences),
            live_peak=self._peak_count,
            completed=self._finished[Outcome.COMPLETED.value],
            failed=self._finished[Outcome.FAILED.value],
            cancelled=self._finished[Outcome.CANCELLED.value],
            prepared_again=self._prepared_again_count,
        )


@dataclass(frozen=True, slots=True)
class RegistryStatistics:
    """A registry's counters (requests)."""

    taken: int
    live: int
    live_peak: int
    completed: int
    failed: int
    cancelled: int
    prepared_again: int
