"""The explorer of ``explore.py``: what a scope is, what every model of a transfer has in common, and the search.

A model is one receiver core, one sender core per writer, a first-in first-out channel per direction between them, and moves:
what really happens to bytes, part by part. It knows nothing of the protocol; it remembers what is physically true and checks
it after every step. ``push_model.py`` has moves that senders make (writes), ``pull_model.py`` such as the receiver makes
(reads).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from kv_bounce_planner.sessions import OperationIdentity, PeerId, RequestKey, TransferIdentity
from kv_bounce_planner.sessions import core as shared
from kv_bounce_planner.sessions import receive_core as rc
from kv_bounce_planner.sessions import send_core as sc
from kv_bounce_planner.sessions.messages import Drained, ReadOver, ReceiveRequest
from kv_bounce_planner.sessions.proof import READER_PROOFS, Evidence, WriteExecutor, required_proofs
from kv_bounce_planner.sessions.states import IllegalTransition, Outcome
from kv_bounce_planner.transports.interface import JobProgress

DEADLINE_S = 10.0
#: What the end of an agent proves.
AGENT_GONE = (Evidence.AGENT_DESTROYED, Evidence.DEREGISTERED, Evidence.QUEUE_PAIRS_GONE)


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Scope:
    """What may happen in one exploration; counts and switches."""

    name: str
    writers: int = 1
    parts: int = 2
    bounce: bool = False
    cancel: bool = True
    fail: bool = False
    seal: bool = True
    kill: bool = False
    errors: bool = False
    retire: bool = False
    time: bool = False
    lies: bool = False
    ahead: bool = False
    sever: bool = False
    timeouts: bool = False
    executor: WriteExecutor = WriteExecutor.RECEIVER
    pull: bool = False
    slices: int = 1  # of each writer
    reader_dies: bool = False
    retire_sources: bool = False


@dataclass
class Move(ABC):
    """One operation's bytes, physically; numbers, switches and sets of parts."""

    posted: int = 0
    stopped: bool = False
    error: bool = False
    landed: set[int] = field(default_factory=set)
    reported: tuple[Any, ...] | None = None

    @property
    @abstractmethod
    def completed_count(self) -> int:
        """Parts that the transport says are complete."""

    def clone(self) -> Self:
        new = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, set):
                setattr(new, name, set(value))
        return new

    def key(self) -> tuple[Any, ...]:
        return tuple(frozenset(value) if isinstance(value, set) else value for value in vars(self).values())


class Model(ABC):
    """One state: what both models have."""

    #: Names of lists that a copy of a state copies.
    LISTS: ClassVar[tuple[str, ...]] = (
        "todo",
        "alive",
        "reaped",
        "ready",
        "reached",
        "sealed",
        "source",
        "snapshots",
        "link",
        "timed_out",
    )

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.now_s = 0.0
        self.receiver = PeerId("gen", "g1", 0)
        self.senders = [PeerId("ctx", "c1", rank) for rank in range(scope.writers)]
        transfer = TransferIdentity(1, 0, "g1", 0)
        #: By number: a writer's first slices come first. With one slice an operation's number is its writer's rank.
        self.operations = [
            OperationIdentity(transfer.of_slice(index), rank, index * scope.writers + rank)
            for index in range(scope.slices)
            for rank in range(scope.writers)
        ]
        specs = [
            rc.OperationSpec(
                operation,
                self.senders[operation.writer_rank],
                ReceiveRequest(
                    operation, "c1", 8, b"d", scope.bounce, scope.pull, "KV", "DRAM", 0, b"", self.after(operation)
                ),
            )
            for operation in self.operations
        ]
        self.needed = required_proofs([scope.executor])
        self.rx = rc.ReceiveTransfer(
            transfer,
            specs,
            required=self.needed,
            required_of_reader=required_proofs([scope.executor], READER_PROOFS),
            drain_deadline_s=DEADLINE_S,
        )
        self.tx = [sc.SendTransfer(RequestKey(1, 0), drain_deadline_s=DEADLINE_S) for _ in self.senders]
        for core in self.tx:
            core.expected = scope.slices
        self.to_sender: list[deque[Any]] = [deque() for _ in self.senders]
        self.to_receiver: list[deque[Any]] = [deque() for _ in self.senders]
        self.moves: list[Any] = [None] * len(self.operations)
        self.todo: list[tuple[Any, ...]] = []  # answers that the shells owe the cores
        self.alive = [True] * scope.writers
        self.reaped = [False] * scope.writers
        self.receiver_alive = True
        self.agent = True  # the receiver's
        self.published = self.cancelled = False
        self.ready = [False] * scope.writers
        self.reached = [0] * scope.writers  # slices that are computed, without the last
        self.sealed = [False] * scope.writers
        self.ticked = 0
        self.memory = "owned"
        self.source = ["none"] * scope.writers
        self.outcome = Outcome.PENDING
        self.snapshots: list[Any] = [None] * scope.writers
        self.link = ["up"] * scope.writers  # up | down | up again
        self.timed_out = [False] * (scope.writers + 1)  # the senders', then the receiver's

    def after(self, operation: OperationIdentity) -> int:
        """The last slice waits for the whole source, the others for what they move."""
        index = operation.transfer.slice_index
        return index + 1 if index + 1 < self.scope.slices else 0

    def of(self, rank: int) -> range:
        """The numbers of that writer's operations."""
        return range(rank, len(self.operations), self.scope.writers)

    def computed(self, number: int) -> bool:
        """Whether what that operation moves is computed."""
        operation = self.operations[number]
        rank = operation.writer_rank
        return self.ready[rank] or operation.transfer.slice_index < self.reached[rank]

    def clone(self) -> Any:
        new = copy.copy(self)
        new.rx = clone_core(self.rx)
        new.tx = [clone_core(core) for core in self.tx]
        new.to_sender = [deque(queue) for queue in self.to_sender]
        new.to_receiver = [deque(queue) for queue in self.to_receiver]
        new.moves = [move.clone() if move else None for move in self.moves]
        for name in self.LISTS:
            setattr(new, name, list(getattr(self, name)))
        return new

    def key(self) -> tuple[Any, ...]:
        return (
            core_key(self.rx),
            tuple(core_key(core) for core in self.tx),
            tuple(tuple(map(frame_key, queue)) for queue in self.to_sender),
            tuple(tuple(map(frame_key, queue)) for queue in self.to_receiver),
            tuple(move.key() if move else None for move in self.moves),
            tuple(self.todo), tuple(self.alive), tuple(self.reaped), self.receiver_alive, self.agent, self.published,
            self.cancelled, tuple(self.ready), tuple(self.reached), tuple(self.sealed), self.ticked, self.memory,
            tuple(self.source), self.outcome, self.now_s, tuple(self.link), tuple(self.timed_out), *self.own_key(),
        )  # fmt: skip

    # -- what a model adds

    @abstractmethod
    def own_key(self) -> tuple[Any, ...]:
        """What tells two states of this model apart, beside what every model has."""

    @abstractmethod
    def own_actions(self) -> list[tuple[Any, ...]]:
        """What may happen in this model that is of no sender."""

    @abstractmethod
    def own_actions_of(self, rank: int) -> list[tuple[Any, ...]]:
        """What may happen in this model at that sender, and to its move."""

    @abstractmethod
    def is_of_sender(self, todo: tuple[Any, ...], rank: int) -> bool:
        """Whether an answer that is owed is owed by that sender's shell: it dies with it."""

    @abstractmethod
    def receiver_does(self, effect: Any) -> None:
        """Perform an effect of the receiver's core that only this model knows."""

    @abstractmethod
    def sender_does(self, rank: int, effect: Any) -> None:
        """Perform an effect of that sender's core that only this model knows."""

    @abstractmethod
    def check_success(self) -> None:
        """The transfer has just succeeded: may it?"""

    @abstractmethod
    def check_snapshot(self, rank: int, snapshot: Any) -> None:
        """That sender's terminal snapshot has just come: is it true?"""

    @abstractmethod
    def at_the_end(self) -> None:
        """Nothing can happen any more: is anything left owned that should not be?"""

    @abstractmethod
    def _answer(self, index: int) -> None:
        """The shell gives the answer that it owes at that place of ``todo``."""

    @abstractmethod
    def _deliver_to_sender(self, rank: int) -> None:
        """The next frame reaches that sender."""

    @abstractmethod
    def _deliver_to_receiver(self, rank: int) -> None:
        """That sender's next frame reaches the receiver."""

    @abstractmethod
    def _retire(self) -> None:
        """The receiver ends its agent."""

    # -- what may happen next

    def actions(self) -> list[tuple[Any, ...]]:
        scope, here = self.scope, self.receiver_alive
        able: list[tuple[Any, ...]] = [("answer", index) for index in range(len(self.todo))]
        if here and self.memory == "owned":
            if not self.published and "down" not in self.link:
                able.append(("publish",))
            if scope.timeouts and not self.timed_out[-1]:
                able.append(("receiver timed out",))
            if scope.cancel and not self.cancelled:
                able.append(("cancel",))
        if scope.retire and here and self.agent and self.published and (not all(self.alive) or not scope.kill):
            able.append(("retire",))
        if scope.time and self.ticked < 2 and (self.rx.drain_until_s is not None or any(map(self.clock_of, self.tx))):
            able.append(("time",))
        able.extend(self.own_actions())
        for rank in range(scope.writers):
            able.extend(self._actions_of(rank))
            able.extend(self.own_actions_of(rank))
        return able

    def clock_of(self, core: sc.SendTransfer) -> bool:
        """Whether time can do anything to that sender."""
        return core.due_s is not None

    def _actions_of(self, rank: int) -> list[tuple[Any, ...]]:
        scope, live, here, core = self.scope, self.alive[rank], self.receiver_alive, self.tx[rank]
        able: list[tuple[Any, ...]] = []
        if live and self.to_sender[rank]:
            able.append(("deliver to sender", rank))
        if here and self.to_receiver[rank]:
            able.append(("deliver to receiver", rank))
        if scope.sever and live and here and self.link[rank] == "up":
            able.append(("sever", rank))
        if self.link[rank] == "down":
            able.append(("heal", rank))
        if scope.timeouts and live and not self.timed_out[rank] and core.knows(self.operations[rank]):
            able.append(("sender timed out", rank))
        if live and not self.ready[rank] and not core.sealed:
            able.append(("ready", rank))
            if self.reached[rank] + 1 < scope.slices:
                able.append(("reach", rank))
        if live and scope.fail and not core.sealed:
            able.append(("fail", rank))
        if live and scope.seal and not self.sealed[rank] and (core.served or scope.fail):
            able.append(("seal", rank))
        if scope.kill and live and self.published:
            able.append(("kill", rank))
        if not live and not self.reaped[rank]:
            able.append(("reaped", rank))
        return able

    # -- making it happen

    def apply(self, action: tuple[Any, ...]) -> None:
        name, *rest = action
        getattr(self, "_" + name.replace(" ", "_"))(*rest)
        self._check_snapshots()

    def _publish(self) -> None:
        self.published = True
        self.tell_receiver(rc.Published())

    def _cancel(self) -> None:
        self.cancelled = True
        self.tell_receiver(rc.CancelAsked("cancelled"))

    def _sever(self, rank: int) -> None:
        """Every frame under way is lost, and what is sent until the link is back."""
        self.link[rank] = "down"
        self.to_sender[rank].clear()
        self.to_receiver[rank].clear()

    def _heal(self, rank: int) -> None:
        self.link[rank] = "up again"
        if self.receiver_alive:
            self.tell_receiver(shared.LinkReturned(self.senders[rank]))
        if self.alive[rank]:
            self.tell_sender(rank, shared.LinkReturned(self.receiver))

    def _receiver_timed_out(self) -> None:
        self.timed_out[-1] = True
        self.tell_receiver(shared.FailAsked("timed out"))

    def _sender_timed_out(self, rank: int) -> None:
        self.timed_out[rank] = True
        self.tell_sender(rank, sc.TimedOut(self.operations[rank], 1.0))

    def _ready(self, rank: int) -> None:
        self.ready[rank] = True
        self.source[rank] = "owned"
        self.tell_sender(rank, sc.SourceReady())

    def _reach(self, rank: int) -> None:
        self.reached[rank] += 1
        self.source[rank] = "owned"
        self.tell_sender(rank, sc.SourceReached(self.reached[rank]))

    def _fail(self, rank: int) -> None:
        self.sealed[rank] = True
        self.tell_sender(rank, shared.FailAsked("aborted"))

    def _seal(self, rank: int) -> None:
        self.sealed[rank] = True
        self.tell_sender(rank, sc.SealAsked())

    def _kill(self, rank: int) -> None:
        self.alive[rank] = False
        self.todo = [each for each in self.todo if not self.is_of_sender(each, rank)]
        if self.receiver_alive:
            self.tell_receiver(shared.PeerInDoubt(self.senders[rank], "connection lost"))

    def _reaped(self, rank: int) -> None:
        self.reaped[rank] = True
        if self.receiver_alive:
            self.tell_receiver(shared.PeerEvidenced(self.senders[rank], Evidence.PEER_REAPED))

    def _time(self) -> None:
        self.ticked += 1
        self.now_s += DEADLINE_S + 1
        if self.receiver_alive:
            self.tell_receiver(shared.Ticked())
        for rank, live in enumerate(self.alive):
            if live:
                self.tell_sender(rank, shared.Ticked())

    # -- frames, effects

    def say(self, queues: list[deque[Any]], rank: int, message: Any) -> None:
        if self.link[rank] != "down":
            queues[rank].append(message)

    def tell_receiver(self, event: rc.ReceiveEvent) -> None:
        for effect in self.rx.step(event, self.now_s):
            match effect:
                case rc.SendRequest(peer, request):
                    self.say(self.to_sender, peer.rank, request)
                case rc.EndOutcome(outcome, _):
                    if self.outcome is not Outcome.PENDING:
                        raise Violation(f"outcome {self.outcome} changed to {outcome}")
                    self.outcome = outcome
                    if outcome is Outcome.SUCCEEDED:
                        self.check_success()
                case rc.Release(proofs):
                    if self.memory != "owned":
                        raise Violation(f"released after {self.memory}")
                    if {proof.operation for proof in proofs} != set(self.operations):
                        raise Violation("released without a proof of every operation")
                    self.memory = "released"
                case rc.Quarantine():
                    if self.memory != "owned":
                        raise Violation(f"quarantined after {self.memory}")
                    if not self.ticked:
                        raise Violation("quarantined before any deadline")
                    self.memory = "quarantined"
                case shared.NoteConflict(_, reason):
                    if not self.scope.lies and "report refused" not in reason:
                        raise Violation(f"honest peers conflict: {reason}")
                case _:
                    self.receiver_does(effect)

    def tell_sender(self, rank: int, event: sc.SendEvent) -> None:
        for effect in self.tx[rank].step(event, self.now_s):
            match effect:
                case sc.SendMessage(_, message):
                    self.say(self.to_receiver, rank, message)
                case sc.ReleaseSource():
                    if self.source[rank] != "owned":
                        raise Violation(f"source released after {self.source[rank]}")
                    self.source[rank] = "released"
                    self.sender_does(rank, effect)
                case sc.QuarantineSource():
                    if self.source[rank] != "owned" or not self.ticked:
                        raise Violation(f"source quarantined from {self.source[rank]} after {self.ticked} deadlines")
                    self.source[rank] = "quarantined"
                case shared.NoteConflict(_, reason):
                    raise Violation(f"honest peers conflict at the sender: {reason}")
                case _:
                    self.sender_does(rank, effect)

    def report(self, number: int, tell: Callable[[shared.Progressed], None]) -> None:
        """What the transport says of a move, if it has changed."""
        move: Move | None = self.moves[number]
        if move is None:
            return
        total, completed = self.scope.parts, move.completed_count
        if move.error:
            state = "error"
        elif completed == total:
            state = "done"
        elif move.stopped and completed == move.posted:
            state = "stopped"
        else:
            state = "posted" if move.posted == total else "posting"
        if (move.posted, completed, state) != move.reported:
            move.reported = (move.posted, completed, state)
            tell(shared.Progressed(JobProgress(self.operations[number], move.posted, completed, total, state)))  # type: ignore[arg-type]

    def _check_snapshots(self) -> None:
        for rank, core in enumerate(self.tx):
            if not self.alive[rank]:
                continue
            snapshot = core.snapshot()
            if snapshot is not None and self.snapshots[rank] is None:
                self.snapshots[rank] = snapshot
                if snapshot.outcome == "COMPLETED" and snapshot.quarantined:
                    raise Violation("COMPLETED with QUARANTINE")
                self.check_snapshot(rank, snapshot)
            elif snapshot != self.snapshots[rank]:
                raise Violation("a terminal snapshot changed")


# -- copies and keys of what the package has ------------------------------------------------------------------------------


def clone_core(core: Any) -> Any:
    new = copy.copy(core)
    new._effects = []
    records = {}
    for operation, record in core._records.items():
        twin = copy.copy(record)
        twin.machine = copy.copy(record.machine)
        twin.evidence = set(record.evidence)
        records[operation] = twin
    new._records = records
    if isinstance(core, rc.ReceiveTransfer):
        new._slices = {slice_id: copy.copy(each) for slice_id, each in core._slices.items()}
    return new


def core_key(core: Any) -> tuple[Any, ...]:
    skip = {"machine", "proof", "spec", "request", "peer", "reason", "required"}
    rows = []
    for record in core._records.values():
        names = getattr(type(record), "__slots__", None) or vars(record)
        fields = [getattr(record, name) for name in sorted(names) if name not in skip]
        rows.append((record.state, *(frozenset(value) if isinstance(value, set) else value for value in fields)))
    own = tuple(
        (name, value)
        for name, value in sorted(vars(core).items())
        if isinstance(value, bool | int | float | str | type(None)) and name != "reason"
    )
    shared = [(each.region, each.scatter, each.torn, each.landed) for each in getattr(core, "_slices", {}).values()]
    return (tuple(rows), own, tuple(shared))


def frame_key(message: Any) -> tuple[Any, ...]:
    extra: tuple[Any, ...] = ()
    if isinstance(message, Drained):
        extra = (message.posted, message.completed)
    elif isinstance(message, ReadOver):
        extra = (message.complete,)
    return (type(message).__name__, message.operation.operation, *extra)


# -- the search -----------------------------------------------------------------------------------------------------------


def search(start: Model, *, states_max: int) -> tuple[int, int]:
    """Breadth first over every interleaving. Returns (states, transitions).

    Raises:
        Violation: With the shortest story that leads to it, or that there are more states.
    """
    name = start.scope.name
    first = start.key()
    #: Every state that was reached, and how: the state before and the action.
    reached_by: dict[tuple[Any, ...], tuple[tuple[Any, ...], tuple[Any, ...]] | None] = {first: None}
    frontier: deque[tuple[tuple[Any, ...], Any]] = deque([(first, start)])
    transitions = 0

    def story(key: tuple[Any, ...], *last: tuple[Any, ...]) -> str:
        steps = list(last)
        while (before := reached_by[key]) is not None:
            key, action = before
            steps.append(action)
        return " → ".join(" ".join(map(str, step)) for step in reversed(steps))

    while frontier:
        key, world = frontier.popleft()
        actions = world.actions()
        if not actions:
            try:
                world.at_the_end()
            except Violation as violation:
                raise Violation(f"{name}: {violation}; story: {story(key)}") from None
        for action in actions:
            branch = world.clone()
            try:
                branch.apply(action)
            except (Violation, IllegalTransition) as violation:
                raise Violation(f"{name}: {violation}; story: {story(key, action)}") from None
            transitions += 1
            reached = branch.key()
            if reached not in reached_by:
                if len(reached_by) >= states_max:
                    raise Violation(f"{name}: more than {states_max} states: the scope is not exhausted")
                reached_by[reached] = (key, action)
                frontier.append((reached, branch))
    return len(reached_by), transitions
