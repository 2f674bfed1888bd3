"""The model of pulled transfers for ``explore.py``: one receiver core that reads, one sender core for each source.

A part is *begun* by the reader, *served* (its bytes leave the source) and *landed* (they are in the target). What each needs
depends on the transport's class: over tcp the source's agent serves and the reader's agent lands; over CMA the reader's own
process does both at once, from a process that must exist; a NIC serves while the source is registered. Besides the rules of the
pushed model:

- no part lands in memory after it was released;
- no transfer succeeds with a part that was served from a source after that was released;
- a source comes back when its loan is over or nobody can use what is read, and never stays for ever where a proof exists.
"""

# ruff: noqa: S101 - assertions are about its own model

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kv_bounce_planner.sessions import OperationIdentity, PeerId, RequestKey, TransferIdentity
from kv_bounce_planner.sessions import core as shared
from kv_bounce_planner.sessions import receive_core as rc
from kv_bounce_planner.sessions import send_core as sc
from kv_bounce_planner.sessions.messages import (
    Cancel,
    Doubt,
    Drained,
    ReadOffer,
    ReadOver,
    ReceiveRequest,
)
from kv_bounce_planner.sessions.proof import READER_PROOFS, Evidence, WriteExecutor, required_proofs
from kv_bounce_planner.sessions.states import Outcome, ReceiveState, SendState
from kv_bounce_planner.transports.interface import JobProgress

DEADLINE_S = 10.0


class Violation(Exception):
    """An invariant does not hold."""


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
    return (tuple(rows), own)


def frame_key(message: Any) -> tuple[Any, ...]:
    extra: tuple[Any, ...] = ()
    if isinstance(message, Drained):
        extra = (message.posted, message.completed)
    elif isinstance(message, ReadOver):
        extra = (message.complete,)
    return (type(message).__name__, *extra)


@dataclass
class Read:
    """One operation's read, physically."""

    posted: int = 0
    stopped: bool = False
    error: bool = False
    begun: set[int] = field(default_factory=set)
    served: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    stale: bool = False  # a part was served from a source that was released
    reported: tuple[Any, ...] | None = None

    def clone(self) -> Read:
        new = copy.copy(self)
        new.begun, new.served, new.landed = set(self.begun), set(self.served), set(self.landed)
        return new

    def key(self) -> tuple[Any, ...]:
        sets = (frozenset(self.begun), frozenset(self.served), frozenset(self.landed))
        return (self.posted, self.stopped, self.error, *sets, self.stale, self.reported)


class PullWorld:
    """One state of the model; the scope is one of ``explore.Scope``."""

    def __init__(self, scope: Any) -> None:
        self.scope = scope
        self.now_s = 0.0
        self.receiver = PeerId("gen", "g1", 0)
        self.senders = [PeerId("ctx", "c1", rank) for rank in range(scope.writers)]
        transfer = TransferIdentity(1, 0, "g1", 0)
        self.operations = [OperationIdentity(transfer, rank, rank) for rank in range(scope.writers)]
        specs = [
            rc.OperationSpec(
                operation,
                self.senders[rank],
                ReceiveRequest(operation, "c1", 8, b"d", False, True, "KV", "DRAM", 0, b""),
            )
            for rank, operation in enumerate(self.operations)
        ]
        self.needed = required_proofs([scope.executor])
        self.needed_of_reader = required_proofs([scope.executor], READER_PROOFS)
        self.rx = rc.ReceiveTransfer(
            transfer,
            specs,
            required=self.needed,
            required_of_reader=self.needed_of_reader,
            drain_deadline_s=DEADLINE_S,
        )
        self.tx = [sc.SendTransfer(RequestKey(1, 0), drain_deadline_s=DEADLINE_S) for _ in self.senders]
        for core in self.tx:
            core.expected = 1
        self.to_sender: list[deque[Any]] = [deque() for _ in self.senders]
        self.to_receiver: list[deque[Any]] = [deque() for _ in self.senders]
        self.reads: list[Read | None] = [None] * scope.writers
        self.todo: list[tuple[Any, ...]] = []
        self.alive = [True] * scope.writers
        self.reaped = [False] * scope.writers
        self.reader_alive, self.reader_reaped = True, False
        self.agent = True  # the reader's
        self.agents = [True] * scope.writers  # the sources'
        self.published = self.cancelled = False
        self.ready = [False] * scope.writers
        self.sealed = [False] * scope.writers
        self.link = ["up"] * scope.writers
        self.timed_out = [False] * (scope.writers + 1)
        self.ticked = 0
        self.memory = "owned"
        self.source = ["none"] * scope.writers
        self.outcome = Outcome.PENDING
        self.words: list[Any] = [None] * scope.writers  # the last word of each operation, kept by the receiver's shell
        self.snapshots: list[Any] = [None] * scope.writers

    _LISTS = (
        "todo",
        "alive",
        "reaped",
        "agents",
        "ready",
        "sealed",
        "link",
        "timed_out",
        "source",
        "words",
        "snapshots",
    )

    def clone(self) -> PullWorld:
        new = copy.copy(self)
        new.rx = clone_core(self.rx)
        new.tx = [clone_core(core) for core in self.tx]
        new.to_sender = [deque(queue) for queue in self.to_sender]
        new.to_receiver = [deque(queue) for queue in self.to_receiver]
        new.reads = [read.clone() if read else None for read in self.reads]
        for name in self._LISTS:
            setattr(new, name, list(getattr(self, name)))
        return new

    def key(self) -> tuple[Any, ...]:
        return (
            core_key(self.rx),
            tuple(core_key(core) for core in self.tx),
            tuple(tuple(map(frame_key, queue)) for queue in self.to_sender),
            tuple(tuple(map(frame_key, queue)) for queue in self.to_receiver),
            tuple(read.key() if read else None for read in self.reads),
            tuple(frame_key(word) if word else None for word in self.words),
            tuple(self.todo), tuple(self.alive), tuple(self.reaped), self.reader_alive, self.reader_reaped,
            self.agent, tuple(self.agents), self.published, self.cancelled, tuple(self.ready), tuple(self.sealed),
            tuple(self.link), tuple(self.timed_out), self.ticked, self.memory, tuple(self.source), self.outcome,
            self.now_s,
        )  # fmt: skip

    # -- what may happen next

    def actions(self) -> list[tuple[Any, ...]]:
        scope, here = self.scope, self.reader_alive
        able: list[tuple[Any, ...]] = [("answer", index) for index in range(len(self.todo))]
        if here and not self.published and self.memory == "owned" and "down" not in self.link:
            able.append(("publish",))
        if here and self.memory == "owned":
            if scope.cancel and not self.cancelled:
                able.append(("cancel",))
            if scope.timeouts and not self.timed_out[-1]:
                able.append(("receiver timed out",))
        if scope.reader_dies:
            if here and self.published:
                able.append(("reader dies",))
            elif not here and not self.reader_reaped:
                able.append(("reader reaped",))
        if scope.retire and here and self.agent and self.published and (not all(self.alive) or not scope.kill):
            able.append(("retire",))
        if scope.time and self.ticked < 2 and (self.rx.drain_until_s is not None or any(c.clock_runs for c in self.tx)):
            able.append(("time",))
        for rank in range(scope.writers):
            able.extend(self._actions_of(rank))
        return able

    def _actions_of(self, rank: int) -> list[tuple[Any, ...]]:
        scope, live, here, core = self.scope, self.alive[rank], self.reader_alive, self.tx[rank]
        able: list[tuple[Any, ...]] = []
        if live and self.to_sender[rank]:
            able.append(("deliver to sender", rank))
        if here and self.to_receiver[rank]:
            able.append(("deliver to receiver", rank))
        if scope.sever and live and here and self.link[rank] == "up":
            able.append(("sever", rank))
        if self.link[rank] == "down":
            able.append(("heal", rank))
        if live and not self.ready[rank] and not core.sealed:
            able.append(("ready", rank))
        if live and scope.fail and not core.sealed:
            able.append(("fail", rank))
        if live and scope.seal and not self.sealed[rank] and (core.served or scope.fail):
            able.append(("seal", rank))
        if scope.timeouts and live and not self.timed_out[rank] and core.knows(self.operations[rank]):
            able.append(("sender timed out", rank))
        if scope.kill and live and self.published:
            able.append(("kill", rank))
        if not live and not self.reaped[rank]:
            able.append(("reaped", rank))
        if live and self.agents[rank] and ((scope.retire and not here) or (scope.retire_sources and core.outstanding)):
            able.append(("retire reader", rank))
        read = self.reads[rank]
        if read is None:
            return able
        if here and self.agent and not read.error and not read.stopped and read.posted < scope.parts:
            able.append(("begin", rank))
        if scope.errors and here and not read.error and (read.begun or read.served):
            able.append(("error", rank))
        if self._serves(rank):
            able.extend(("serve", rank, part) for part in sorted(read.begun))
        if here and self.agent:
            able.extend(("land", rank, part) for part in sorted(read.served))
        return able

    def _serves(self, rank: int) -> bool:
        if self.scope.executor is WriteExecutor.SENDER:
            return self.alive[rank] and self.reader_alive and self.agent
        return self.alive[rank] and self.agents[rank]

    # -- making it happen

    def apply(self, action: tuple[Any, ...]) -> None:
        name, *rest = action
        getattr(self, "_" + name.replace(" ", "_"))(*rest)
        self._check()

    def _publish(self) -> None:
        self.published = True
        self._rx(rc.Published())

    def _cancel(self) -> None:
        self.cancelled = True
        self._rx(rc.CancelAsked("cancelled"))

    def _deliver_to_sender(self, rank: int) -> None:
        message, operation = self.to_sender[rank].popleft(), self.operations[rank]
        if not self.agents[rank]:
            return
        known = self.tx[rank].knows(operation)
        match message:
            case ReceiveRequest() if known:
                self._tx(rank, sc.AskedAgain(operation))
            case ReceiveRequest():
                self._tx(rank, sc.RequestArrived(self.receiver, message, self.needed))
            case ReadOver(complete=complete) if known:
                self._tx(rank, sc.Returned(operation, complete))
            case Doubt() if known:
                self._tx(rank, sc.Returned(operation, False, doubt=True))

    def _deliver_to_receiver(self, rank: int) -> None:
        message = self.to_receiver[rank].popleft()
        if self.rx.settled:
            if isinstance(message, ReadOffer | Cancel) and self.words[rank] is not None:
                self._say(self.to_sender, rank, self.words[rank])
            return
        self._rx(rc.MessageArrived(message))

    def _sever(self, rank: int) -> None:
        self.link[rank] = "down"
        self.to_sender[rank].clear()
        self.to_receiver[rank].clear()

    def _heal(self, rank: int) -> None:
        self.link[rank] = "up again"
        if self.reader_alive:
            self._rx(shared.LinkReturned(self.senders[rank]))
        if self.alive[rank]:
            self._tx(rank, shared.LinkReturned(self.receiver))

    def _receiver_timed_out(self) -> None:
        self.timed_out[-1] = True
        self._rx(shared.FailAsked("timed out"))

    def _sender_timed_out(self, rank: int) -> None:
        self.timed_out[rank] = True
        self._tx(rank, sc.TimedOut(self.operations[rank], 1.0))

    def _ready(self, rank: int) -> None:
        self.ready[rank] = True
        self.source[rank] = "owned"
        self._tx(rank, sc.SourceReady())

    def _fail(self, rank: int) -> None:
        self.sealed[rank] = True
        self._tx(rank, shared.FailAsked("aborted"))

    def _seal(self, rank: int) -> None:
        self.sealed[rank] = True
        self._tx(rank, sc.SealAsked())

    def _kill(self, rank: int) -> None:
        self.alive[rank] = False
        self.todo = [each for each in self.todo if each != ("lend", rank)]
        if self.reader_alive:
            self._rx(shared.PeerInDoubt(self.senders[rank], "connection lost"))

    def _reaped(self, rank: int) -> None:
        self.reaped[rank] = True
        if self.reader_alive:
            self._rx(shared.PeerEvidenced(self.senders[rank], Evidence.PEER_REAPED))

    def _reader_dies(self) -> None:
        self.reader_alive = False
        self.todo = [each for each in self.todo if each[0] == "lend"]
        for rank, live in enumerate(self.alive):
            self.to_sender[rank].clear()  # a session takes no frame of a peer that it knows to be dead
            if live:
                self._tx(rank, shared.PeerInDoubt(self.receiver, "connection lost"))

    def _reader_reaped(self) -> None:
        self.reader_reaped = True
        for rank, live in enumerate(self.alive):
            if live:
                self._tx(rank, shared.PeerEvidenced(self.receiver, Evidence.PEER_REAPED))

    def _retire_reader(self, rank: int) -> None:
        self.agents[rank] = False
        self.to_sender[rank].clear()  # nor does a session take frames of a life that it retired
        self._tx(rank, shared.PeerInDoubt(self.receiver, "peer retired"))
        for evidence in (Evidence.AGENT_DESTROYED, Evidence.DEREGISTERED, Evidence.QUEUE_PAIRS_GONE):
            self._tx(rank, shared.PeerEvidenced(self.receiver, evidence))

    def _retire(self) -> None:
        self.agent = False
        for rank, peer in enumerate(self.senders):
            self._rx(shared.PeerInDoubt(peer, "peer retired"))
            read = self.reads[rank]
            if read is not None and (read.begun or read.served or read.posted < self.scope.parts):
                read.error = True
                self._report(rank)
            for evidence in (Evidence.AGENT_DESTROYED, Evidence.DEREGISTERED, Evidence.QUEUE_PAIRS_GONE):
                self._rx(shared.PeerEvidenced(peer, evidence))

    def _time(self) -> None:
        self.ticked += 1
        self.now_s += DEADLINE_S + 1
        if self.reader_alive:
            self._rx(shared.Ticked())
        for rank, live in enumerate(self.alive):
            if live:
                self._tx(rank, shared.Ticked())

    def _begin(self, rank: int) -> None:
        read = self._read(rank)
        read.begun.add(read.posted)
        read.posted += 1
        self._report(rank)

    def _serve(self, rank: int, part: int) -> None:
        read = self._read(rank)
        read.begun.discard(part)
        read.served.add(part)
        read.stale = read.stale or self.source[rank] == "released"
        if self.scope.executor is WriteExecutor.SENDER:  # one call of the reader's own process
            self._land(rank, part)

    def _land(self, rank: int, part: int) -> None:
        read = self._read(rank)
        if self.memory == "released":
            raise Violation("a part landed in memory that was released")
        read.served.discard(part)
        read.landed.add(part)
        if not read.error:
            self._report(rank)

    def _error(self, rank: int) -> None:
        self._read(rank).error = True
        self._report(rank)

    def _read(self, rank: int) -> Read:
        read = self.reads[rank]
        assert read is not None
        return read

    def _report(self, rank: int) -> None:
        read = self.reads[rank]
        if read is None or not self.reader_alive:
            return
        total, landed = self.scope.parts, len(read.landed)
        if read.error:
            state = "error"
        elif landed == total:
            state = "done"
        elif read.stopped and landed == read.posted:
            state = "stopped"
        else:
            state = "posted" if read.posted == total else "posting"
        report = (read.posted, landed, state)
        if report != read.reported:
            read.reported = report
            progress = JobProgress(self.operations[rank], read.posted, landed, total, state)  # type: ignore[arg-type]
            self._rx(shared.Progressed(progress))

    def _answer(self, index: int) -> None:
        kind, rank = self.todo.pop(index)
        if kind == "lend":
            self._tx(rank, shared.Resolved(self.operations[rank]))
        elif not self.rx.settled:
            self._rx(shared.Resolved(self.operations[rank]))

    def _say(self, queues: list[deque[Any]], rank: int, message: Any) -> None:
        if self.link[rank] != "down":
            queues[rank].append(message)

    # -- performing effects

    def _rx(self, event: rc.ReceiveEvent) -> None:
        for effect in self.rx.step(event, self.now_s):
            match effect:
                case rc.SendRequest(peer, request):
                    self._say(self.to_sender, peer.rank, request)
                case shared.Resolve(operation):
                    self.todo.append(("read", operation.writer_rank))
                case rc.StartRead(operation):
                    self.reads[operation.writer_rank] = Read()
                case shared.StopPosting(operation):
                    self.reads[operation.writer_rank].stopped = True  # type: ignore[union-attr]
                    self._report(operation.writer_rank)
                case rc.SayOver(peer, word):
                    self._spoken(peer.rank, word)
                case rc.EndOutcome(outcome, _):
                    self._ended(outcome)
                case rc.Release(proofs):
                    if self.memory != "owned":
                        raise Violation(f"released after {self.memory}")
                    if {proof.operation for proof in proofs} != set(self.operations):
                        raise Violation("released without a proof of every operation")
                    self.memory = "released"
                case rc.Quarantine():
                    if self.memory != "owned" or not self.ticked:
                        raise Violation(f"quarantined from {self.memory} after {self.ticked} deadlines")
                    self.memory = "quarantined"
                case shared.NoteConflict(_, reason):
                    raise Violation(f"honest peers conflict: {reason}")

    def _spoken(self, rank: int, word: Any) -> None:
        read = self.reads[rank]
        if isinstance(word, ReadOver) and read is not None and self.agent and (read.begun or read.served):
            raise Violation("said to be over while parts are under way")
        self.words[rank] = word
        self._say(self.to_sender, rank, word)

    def _ended(self, outcome: Outcome) -> None:
        if self.outcome is not Outcome.PENDING:
            raise Violation(f"outcome {self.outcome} changed to {outcome}")
        self.outcome = outcome
        if outcome is Outcome.SUCCEEDED:
            for read in self.reads:
                if read is None or len(read.landed) < self.scope.parts:
                    raise Violation("success without every part")
                if read.stale:
                    raise Violation("success with a part of a source that was released")

    def _tx(self, rank: int, event: sc.SendEvent) -> None:
        for effect in self.tx[rank].step(event, self.now_s):
            match effect:
                case shared.Resolve():
                    self.todo.append(("lend", rank))
                case sc.Lend(operation):
                    self._say(self.to_receiver, rank, ReadOffer(operation, "DRAM", 0, b"blocks"))
                case sc.SendMessage(_, message):
                    self._say(self.to_receiver, rank, message)
                case sc.ReleaseSource():
                    if self.source[rank] != "owned":
                        raise Violation(f"source released after {self.source[rank]}")
                    self.source[rank] = "released"
                case sc.QuarantineSource():
                    if self.source[rank] != "owned" or not self.ticked:
                        raise Violation(f"source quarantined from {self.source[rank]} after {self.ticked} deadlines")
                    self.source[rank] = "quarantined"
                case shared.NoteConflict(_, reason):
                    raise Violation(f"honest peers conflict at the sender: {reason}")

    # -- invariants of every state

    def _check(self) -> None:
        for rank, core in enumerate(self.tx):
            if not self.alive[rank]:
                continue
            snapshot, read = core.snapshot(), self.reads[rank]
            if snapshot is not None and self.snapshots[rank] is None:
                self.snapshots[rank] = snapshot
                if snapshot.outcome == "COMPLETED" and (
                    snapshot.quarantined or read is None or len(read.landed) < self.scope.parts
                ):
                    raise Violation("COMPLETED without every part")
            elif snapshot != self.snapshots[rank]:
                raise Violation("a terminal snapshot changed")

    def at_the_end(self) -> None:
        """Nothing can happen any more: is anything left owned that a proof exists for?"""
        if self.reader_alive and self.memory == "owned":
            stuck = [op for op in self.operations if not self._is_honest(op)]
            if stuck or not self.operations:
                raise Violation(
                    f"stuck: memory owned for ever; {[self.rx.state_of(op).value for op in self.operations]}"
                )
        for rank, core in enumerate(self.tx):
            if not self.alive[rank] or not core.sealed or core.settled:
                continue
            state = core.state_of(self.operations[rank])
            proof = self.reader_reaped or (not self.agents[rank] and Evidence.PEER_REAPED not in self.needed)
            reader_in_doubt = self.rx.state_of(self.operations[rank]) in (
                ReceiveState.READ_IN_DOUBT,
                ReceiveState.QUARANTINED,
            )
            retired = not self.agents[rank]
            if (
                state is not SendState.LENT_IN_DOUBT
                or proof
                or not (reader_in_doubt or retired or not self.reader_alive)
            ):
                raise Violation(f"stuck: source {rank} owned for ever in {state}")

    def _is_honest(self, operation: OperationIdentity) -> bool:
        """Owned at the end is right where the reader's class needs a proof that did not come, or nothing ended it."""
        state = self.rx.state_of(operation)
        if state in (ReceiveState.PROVEN, ReceiveState.QUARANTINED):
            return True
        if state is ReceiveState.READ_IN_DOUBT:
            return self.agent
        return not self.agents[
            operation.writer_rank
        ]  # it waits for who does not talk to it any more: until its time-out
