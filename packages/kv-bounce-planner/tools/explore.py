"""Explore the real cores exhaustively for small scopes: every interleaving of writers, parts, cancel, failure, death, time.

The model is one receiver core, one sender core per writer, a first-in first-out channel per direction, and writes that land
part by part or end in an error and land later. It knows nothing of the protocol; it only remembers what is physically
true and checks, after every step of every interleaving:

- no part lands in memory or a region after that memory was released;
- no part reads a source after it was released;
- released or quarantined at most once, never both; an outcome never changes;
- success only with every part landed and, where bounced, scattered once after all of them;
- a terminal snapshot never changes, and is never COMPLETED with a quarantine;
- when nothing can happen any more, nothing is left owned.

Pulled transfers have a model of their own, ``explore_pull.py``, with the same rules.

Run: ``python tools/explore.py [--scope NAME] [--states-max N]``. Exit code 1 with the shortest story on a violation.
"""

# ruff: noqa: T201, S101 - a command prints; its assertions are about its own model

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_bounce_planner.sessions import OperationIdentity, PeerId, RequestKey, TransferIdentity
from kv_bounce_planner.sessions import core as shared
from kv_bounce_planner.sessions import receive_core as rc
from kv_bounce_planner.sessions import send_core as sc
from kv_bounce_planner.sessions.messages import (
    BounceGrant,
    BounceRefused,
    Cancel,
    ReceiveRequest,
    WriterResult,
)
from kv_bounce_planner.sessions.proof import Evidence, WriteExecutor, required_proofs
from kv_bounce_planner.sessions.states import IllegalTransition, Outcome, SendState
from kv_bounce_planner.transports.interface import JobProgress

sys.path.insert(0, str(Path(__file__).resolve().parent))
from explore_pull import DEADLINE_S, PullWorld, Violation, clone_core, core_key, frame_key


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
    reader_dies: bool = False
    retire_sources: bool = False


SCOPES = (
    Scope("direct, cancel"),
    Scope("direct, cancel and abort, two writers", writers=2, parts=1, fail=True),
    Scope("direct, errors and death, receiver-executed", kill=True, errors=True, retire=True),
    Scope(
        "direct, errors and death, sender-executed", kill=True, errors=True, retire=True, executor=WriteExecutor.SENDER
    ),
    Scope("direct, time", parts=1, errors=True, time=True),
    Scope("bounce, cancel", bounce=True, parts=1),
    Scope("bounce, cancel and abort, two parts", bounce=True, fail=True, parts=2),
    Scope("bounce, two writers", bounce=True, writers=2, parts=1),
    Scope("bounce, errors and death", bounce=True, parts=1, kill=True, errors=True, retire=True),
    Scope("bounce, time", bounce=True, parts=1, errors=True, time=True, fail=True),
    Scope("bounce, gathered ahead", bounce=True, ahead=True, parts=1, fail=True),
    Scope(
        "bounce, gathered ahead, errors and death",
        bounce=True,
        ahead=True,
        parts=1,
        kill=True,
        errors=True,
        retire=True,
    ),
    Scope("bounce, gathered ahead, time", bounce=True, ahead=True, parts=1, time=True, fail=True),
    Scope("direct, a link breaks", parts=1, sever=True, fail=True),
    Scope("direct, a link breaks, two parts", parts=2, sever=True),
    Scope("bounce, a link breaks", bounce=True, parts=1, sever=True),
    Scope("bounce, gathered ahead, a link breaks", bounce=True, ahead=True, parts=1, sever=True, cancel=False),
    Scope("direct, time-outs", parts=1, timeouts=True, time=True, errors=True),
    Scope("bounce, time-outs", bounce=True, parts=1, timeouts=True, time=True),
    Scope("direct, errors and death, NIC-executed", kill=True, errors=True, retire=True, executor=WriteExecutor.NIC),
    Scope("pull, cancel and abort", pull=True, fail=True),
    Scope("pull, two senders", pull=True, writers=2, parts=1),
    Scope("pull, errors and death, receiver-executed", pull=True, parts=1, kill=True, errors=True, retire=True),
    Scope(
        "pull, errors and death, sender-executed",
        pull=True,
        parts=1,
        kill=True,
        errors=True,
        retire=True,
        executor=WriteExecutor.SENDER,
    ),
    Scope(
        "pull, errors and death, NIC-executed",
        pull=True,
        parts=1,
        kill=True,
        errors=True,
        retire=True,
        executor=WriteExecutor.NIC,
    ),
    Scope("pull, the reader dies", pull=True, parts=1, fail=True, reader_dies=True, retire=True),
    Scope("pull, sources retire a living reader", pull=True, parts=1, fail=True, retire_sources=True),
    Scope(
        "pull, sources retire a living reader, sender-executed",
        pull=True,
        parts=1,
        fail=True,
        retire_sources=True,
        executor=WriteExecutor.SENDER,
    ),
    Scope("pull, a link breaks", pull=True, parts=1, fail=True, sever=True),
    Scope("pull, a link breaks, two parts", pull=True, parts=2, sever=True),
    Scope("pull, time-outs", pull=True, parts=1, timeouts=True, time=True, errors=True),
    Scope("bounce, a bad report", bounce=True, parts=1, lies=True, retire=True, time=True),
)
#: The scopes of the smoke test: the smaller ones.
SMOKE = ("direct, cancel", "direct, errors and death, sender-executed", "bounce, cancel", "direct, time")


@dataclass
class Write:
    """One operation's write, physically."""

    bounce: bool
    posted: int = 0
    stopped: bool = False
    error: bool = False
    flying: set[int] = field(default_factory=set)
    landed: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    reported: tuple[Any, ...] | None = None

    def clone(self) -> Write:
        new = copy.copy(self)
        new.flying, new.landed, new.completed = set(self.flying), set(self.landed), set(self.completed)
        return new

    def key(self) -> tuple[Any, ...]:
        return (
            self.bounce, self.posted, self.stopped, self.error, frozenset(self.flying),
            frozenset(self.landed), frozenset(self.completed), self.reported,
        )  # fmt: skip


class World:
    """One state of the model."""

    def __init__(self, scope: Scope) -> None:
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
                ReceiveRequest(operation, "c1", 8, b"d", scope.bounce, False, "KV", "DRAM", 0, b""),
            )
            for rank, operation in enumerate(self.operations)
        ]
        self.rx = rc.ReceiveTransfer(
            transfer, specs, required=required_proofs([scope.executor]), drain_deadline_s=DEADLINE_S
        )
        self.tx = [sc.SendTransfer(RequestKey(1, 0), drain_deadline_s=DEADLINE_S) for _ in self.senders]
        for core in self.tx:
            core.expected = 1
        self.to_sender: list[deque[Any]] = [deque() for _ in self.senders]
        self.to_receiver: list[deque[Any]] = [deque() for _ in self.senders]
        self.writes: list[Write | None] = [None] * scope.writers
        self.marks: list[set[int]] = [set() for _ in self.senders]
        self.todo: list[tuple[Any, ...]] = []  # answers that the shells owe the cores
        self.alive = [True] * scope.writers
        self.agent = True
        self.reaped = [False] * scope.writers
        self.published = self.cancelled = False
        self.ready = [False] * scope.writers
        self.sealed = [False] * scope.writers
        self.ticked = 0
        self.memory = "owned"
        self.source = ["none"] * scope.writers
        self.outcome = Outcome.PENDING
        self.scattered = 0
        self.snapshots: list[Any] = [None] * scope.writers
        self.offered = [False] * scope.writers
        self.link = ["up"] * scope.writers  # up | down | up again
        self.timed_out = [False] * (scope.writers + 1)  # the senders', then the receiver's
        self.lied = False

    def clone(self) -> World:
        new = copy.copy(self)
        new.rx = clone_core(self.rx)
        new.tx = [clone_core(core) for core in self.tx]
        new.to_sender = [deque(queue) for queue in self.to_sender]
        new.to_receiver = [deque(queue) for queue in self.to_receiver]
        new.writes = [write.clone() if write else None for write in self.writes]
        new.marks = [set(marks) for marks in self.marks]
        for name in (
            "todo",
            "alive",
            "reaped",
            "ready",
            "sealed",
            "source",
            "snapshots",
            "offered",
            "link",
            "timed_out",
        ):
            setattr(new, name, list(getattr(self, name)))
        return new

    def key(self) -> tuple[Any, ...]:
        return (
            core_key(self.rx),
            tuple(core_key(core) for core in self.tx),
            tuple(tuple(map(frame_key, queue)) for queue in self.to_sender),
            tuple(tuple(map(frame_key, queue)) for queue in self.to_receiver),
            tuple(write.key() if write else None for write in self.writes),
            tuple(map(frozenset, self.marks)),
            tuple(self.todo),
            tuple(self.alive), self.agent, tuple(self.reaped), self.published, self.cancelled,
            tuple(self.ready), tuple(self.sealed), self.ticked, self.memory, tuple(self.source),
            self.outcome, self.scattered, self.lied, self.now_s, tuple(self.offered),
            tuple(self.link), tuple(self.timed_out),
        )  # fmt: skip

    # -- what may happen next

    def actions(self) -> list[tuple[Any, ...]]:
        scope = self.scope
        able: list[tuple[Any, ...]] = []
        if not self.published and self.memory == "owned" and "down" not in self.link:
            able.append(("publish",))
        if scope.timeouts and not self.timed_out[-1] and self.memory == "owned":
            able.append(("receiver timed out",))
        if scope.cancel and not self.cancelled and self.memory == "owned":
            able.append(("cancel",))
        if self.todo:
            able.extend(("answer", index) for index in range(len(self.todo)))
            if scope.ahead:
                able.extend(
                    ("decline", index) for index, each in enumerate(self.todo) if each[0] in ("region", "gathered")
                )
        for rank in range(scope.writers):
            live = self.alive[rank]
            if live and self.to_sender[rank]:
                able.append(("deliver to sender", rank))
            if self.to_receiver[rank]:
                able.append(("deliver to receiver", rank))
            if scope.sever and live and self.link[rank] == "up":
                able.append(("sever", rank))
            if self.link[rank] == "down":
                able.append(("heal", rank))
            if scope.timeouts and live and not self.timed_out[rank] and self.tx[rank].knows(self.operations[rank]):
                able.append(("sender timed out", rank))
            if live and not self.ready[rank] and not self.tx[rank].sealed:
                able.append(("ready", rank))
            if live and scope.ahead and self.tx[rank].knows(self.operations[rank]):
                state = self.tx[rank].state_of(self.operations[rank])
                if state is SendState.WANTED and not self.offered[rank]:
                    able.append(("offer", rank))
                if state in (SendState.AHEAD, SendState.STAGED):
                    able.append(("ask", rank))
            if live and scope.fail and not self.tx[rank].sealed:
                able.append(("fail", rank))
            if live and scope.seal and not self.sealed[rank] and (self.tx[rank].served or scope.fail):
                able.append(("seal", rank))
            if scope.kill and live and self.published:
                able.append(("kill", rank))
            if not live and not self.reaped[rank]:
                able.append(("reaped", rank))
            if self.marks[rank] and self.agent:
                able.extend(("mark", rank, part) for part in sorted(self.marks[rank]))
            write = self.writes[rank]
            if write is None:
                continue
            if live and not write.error and not write.stopped and write.posted < scope.parts:
                able.append(("post", rank))
            for part in sorted(write.flying):
                if self._can_land(rank):
                    able.append(("land", rank, part))
                if scope.errors and live and not write.error:
                    able.append(("error", rank))
        if scope.retire and self.agent and self.published and (not all(self.alive) or not scope.kill):
            able.append(("retire",))
        if scope.time and self.ticked < 2 and (self.rx.drain_until_s is not None or any(c.sealed for c in self.tx)):
            able.append(("time",))
        return able

    def _can_land(self, rank: int) -> bool:
        return self.alive[rank] if self.scope.executor is WriteExecutor.SENDER else self.agent

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
        message = self.to_sender[rank].popleft()
        operation = self.operations[rank]
        match message:
            case ReceiveRequest() if self.tx[rank].knows(operation):
                self._tx(rank, sc.AskedAgain(operation))
            case ReceiveRequest():
                self._tx(rank, sc.RequestArrived(self.receiver, message))
            case Cancel():
                if not self.tx[rank].knows(operation):
                    raise Violation("a cancel overtook its request")
                self._tx(rank, sc.CancelArrived(operation, ""))
            case BounceGrant():
                self._tx(rank, sc.GrantArrived(operation))
            case BounceRefused():
                self._tx(rank, sc.RefusalArrived(operation, ""))

    def _deliver_to_receiver(self, rank: int) -> None:
        self._rx(rc.MessageArrived(self.to_receiver[rank].popleft()))

    def _sever(self, rank: int) -> None:
        """Every frame under way is lost, and what is sent until the link is back."""
        self.link[rank] = "down"
        self.to_sender[rank].clear()
        self.to_receiver[rank].clear()

    def _heal(self, rank: int) -> None:
        self.link[rank] = "up again"
        self._rx(shared.LinkReturned(self.senders[rank]))

    def _receiver_timed_out(self) -> None:
        self.timed_out[-1] = True
        self._rx(shared.FailAsked("timed out"))

    def _sender_timed_out(self, rank: int) -> None:
        self.timed_out[rank] = True
        self._tx(rank, sc.TimedOut(self.operations[rank], 1.0))

    def _say(self, queues: list[deque[Any]], rank: int, message: Any) -> None:
        if self.link[rank] != "down":
            queues[rank].append(message)

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

    def _offer(self, rank: int) -> None:
        self.offered[rank] = True
        self._tx(rank, sc.SlotOffered(self.operations[rank]))

    def _ask(self, rank: int) -> None:
        self._tx(rank, sc.SlotAsked(self.operations[rank]))

    def _decline(self, index: int) -> None:
        kind, *rest = self.todo.pop(index)
        if kind == "region":
            self._rx(rc.RegionRefused("no_space"))
        else:
            self._tx(rest[0], sc.GatherEnded(self.operations[rest[0]], False, True, "the copier failed"))

    def _kill(self, rank: int) -> None:
        self.alive[rank] = False
        self.todo = [
            each for each in self.todo if not (each[0] in ("resolved", "slot", "gathered") and each[1] == rank)
        ]
        self._rx(shared.PeerInDoubt(self.senders[rank], "connection lost"))

    def _reaped(self, rank: int) -> None:
        self.reaped[rank] = True
        self._rx(shared.PeerEvidenced(self.senders[rank], Evidence.PEER_REAPED))

    def _retire(self) -> None:
        self.agent = False
        for marks in self.marks:
            marks.clear()
        for peer in self.senders:
            self._rx(shared.PeerInDoubt(peer, "peer retired"))
            for evidence in (Evidence.AGENT_DESTROYED, Evidence.DEREGISTERED, Evidence.QUEUE_PAIRS_GONE):
                self._rx(shared.PeerEvidenced(peer, evidence))

    def _time(self) -> None:
        self.ticked += 1
        self.now_s += DEADLINE_S + 1
        self._rx(shared.Ticked())
        for rank, core in enumerate(self.tx):
            if self.alive[rank]:
                self._tx(rank, shared.Ticked())
                del core

    def _post(self, rank: int) -> None:
        write = self.writes[rank]
        assert write is not None
        write.flying.add(write.posted)
        write.posted += 1
        self._report(rank)

    def _land(self, rank: int, part: int) -> None:
        write = self.writes[rank]
        assert write is not None
        if self.memory in ("released", "freed region"):
            raise Violation("a part landed in memory that was released")
        if self.source[rank] == "released" and self.scope.executor is WriteExecutor.SENDER:
            raise Violation("a part was read from a source that was released")
        if self.source[rank] == "released" and not write.error:
            raise Violation("a part was read from a source that was released")
        write.flying.discard(part)
        write.landed.add(part)
        if not write.error and self.alive[rank]:
            write.completed.add(part)
            self.marks[rank].add(part)
            self._report(rank)

    def _error(self, rank: int) -> None:
        write = self.writes[rank]
        assert write is not None
        write.error = True
        self._report(rank)

    def _mark(self, rank: int, part: int) -> None:
        self.marks[rank].discard(part)
        self._rx(rc.MarkArrived(self.operations[rank], part, self.scope.parts))

    def _report(self, rank: int) -> None:
        write = self.writes[rank]
        if write is None or not self.alive[rank]:
            return
        total = self.scope.parts
        if write.error:
            state = "error"
        elif len(write.completed) == total:
            state = "done"
        elif write.stopped and len(write.completed) == write.posted:
            state = "stopped"
        else:
            state = "posted" if write.posted == total else "posting"
        report = (write.posted, len(write.completed), state)
        if report != write.reported:
            write.reported = report
            progress = JobProgress(self.operations[rank], write.posted, len(write.completed), total, state)  # type: ignore[arg-type]
            self._tx(rank, shared.Progressed(progress))

    def _answer(self, index: int) -> None:
        kind, *rest = self.todo.pop(index)
        match kind:
            case "resolved":
                self._tx(rest[0], shared.Resolved(self.operations[rest[0]], rest[1]))
            case "slot":
                self._tx(rest[0], sc.SlotReserved(self.operations[rest[0]]))
            case "gathered":
                self._tx(rest[0], sc.GatherEnded(self.operations[rest[0]], True, True))
            case "region":
                self._rx(rc.RegionReserved() if rest[0] else rc.RegionRefused("no_space"))
            case "check":
                self.lied = self.lied or not rest[1]
                self._rx(rc.ReportChecked(self.operations[rest[0]], rest[1], "" if rest[1] else "lie"))
            case "scatter":
                if any(not w or len(w.landed) < self.scope.parts for w in self.writes if w and w.bounce):
                    raise Violation("scattered before every bounced part had landed")
                if self.memory == "released":
                    raise Violation("a scatter ran in memory that was released")
                self.scattered += 1
                self._rx(rc.ScatterEnded(True, True))

    def _both(self, *choices: tuple[Any, ...]) -> None:
        """The environment picks: all choices are queued as alternatives; taking one drops the others."""
        self.todo.extend(choices)

    # -- performing effects

    def _rx(self, event: rc.ReceiveEvent) -> None:
        for effect in self.rx.step(event, self.now_s):
            match effect:
                case rc.SendRequest(peer, request):
                    self._say(self.to_sender, peer.rank, request)
                case rc.SendCancel(peer, message) | rc.SendRefusal(peer, message):
                    self._say(self.to_sender, peer.rank, message)
                case rc.ReserveRegion():
                    self.todo.append(("region", True))
                case rc.BindAndGrant(operation, peer):
                    self._say(self.to_sender, peer.rank, BounceGrant(operation, 64, 8, "DRAM", 0))
                case rc.WithdrawRegion():
                    self.todo = [each for each in self.todo if each[0] != "region"]
                case rc.CheckReport(operation, _):
                    self.todo.append(("check", operation.writer_rank, not self.scope.lies))
                case rc.Scatter():
                    self.todo.append(("scatter",))
                case rc.EndOutcome(outcome, _):
                    if self.outcome is not Outcome.PENDING:
                        raise Violation(f"outcome {self.outcome} changed to {outcome}")
                    self.outcome = outcome
                    if outcome is Outcome.SUCCEEDED:
                        self._check_success()
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

    def _check_success(self) -> None:
        for write in self.writes:
            if write is None or len(write.landed) < self.scope.parts:
                raise Violation("success without every part")
            if write.bounce and self.scattered != 1:
                raise Violation(f"success with {self.scattered} scatters")
        if self.lied:
            raise Violation("success with a refused report")

    def _tx(self, rank: int, event: sc.SendEvent) -> None:
        for effect in self.tx[rank].step(event, self.now_s):
            match effect:
                case shared.Resolve():
                    self.todo.append(("resolved", rank, self.scope.bounce))
                case sc.SendMessage(_, message):
                    self._say(self.to_receiver, rank, message)
                case sc.ReserveSlot():
                    self.todo.append(("slot", rank))
                case sc.DropSlot():
                    if ("gathered", rank) in self.todo:
                        raise Violation("a slot was given back while a gather writes it")
                    self.todo = [each for each in self.todo if each != ("slot", rank)]
                case sc.Gather():
                    if ("gathered", rank) in self.todo:
                        raise Violation("two gathers into one slot")
                    self.todo.append(("gathered", rank))
                case sc.Post(operation, bounce):
                    if ("gathered", rank) in self.todo:
                        raise Violation("a write was posted while its gather runs")
                    self.writes[rank] = Write(bounce)
                    if bounce:
                        self._say(self.to_receiver, rank, WriterResult(operation, 64, b"report"))
                case sc.SendReportAgain(operation):
                    self._say(self.to_receiver, rank, WriterResult(operation, 64, b"report"))
                case shared.StopPosting():
                    write = self.writes[rank]
                    if write is None:
                        raise Violation("stopped a write that never began")
                    write.stopped = True
                    self.todo.append(("progress", rank))
                case sc.ReleaseSource():
                    if self.source[rank] != "owned":
                        raise Violation(f"source released after {self.source[rank]}")
                    if ("gathered", rank) in self.todo:
                        raise Violation("a source was released while a gather reads it")
                    self.source[rank] = "released"
                case sc.QuarantineSource():
                    if self.source[rank] != "owned":
                        raise Violation(f"source quarantined after {self.source[rank]}")
                    self.source[rank] = "quarantined"
                case shared.NoteConflict(_, reason):
                    raise Violation(f"honest peers conflict at the sender: {reason}")
        if ("progress", rank) in self.todo:
            self.todo.remove(("progress", rank))
            self._report(rank)

    # -- invariants of every state

    def _check(self) -> None:
        for rank, core in enumerate(self.tx):
            if not self.alive[rank]:
                continue
            write = self.writes[rank]
            snapshot = core.snapshot()
            if snapshot is not None and self.snapshots[rank] is None:
                self.snapshots[rank] = snapshot
                if write and write.flying and not write.error and not snapshot.quarantined:
                    raise Violation("a terminal snapshot with a write in progress")
                if snapshot.outcome == "COMPLETED" and snapshot.quarantined:
                    raise Violation("COMPLETED with QUARANTINE")
                if snapshot.outcome == "COMPLETED" and (write is None or len(write.landed) < self.scope.parts):
                    raise Violation("COMPLETED without every part")
            elif snapshot is not self.snapshots[rank] and snapshot != self.snapshots[rank]:
                raise Violation("a terminal snapshot changed")

    def at_the_end(self) -> None:
        """Nothing can happen any more: is anything left owned that should not be?"""
        if self.memory == "owned" and not self._doubt_is_honest():
            raise Violation(f"stuck: memory owned for ever; {[self.rx.state_of(op).value for op in self.operations]}")
        for rank, core in enumerate(self.tx):
            if self.alive[rank] and core.sealed and not core.settled and not self.scope.errors:
                raise Violation(f"stuck: sender {rank} owns its source for ever")

    def _doubt_is_honest(self) -> bool:
        """Owned at the end is right where a proof of the class cannot come, or the sender was never asked to end."""
        if any(self.rx.state_of(op).value in ("IN_DOUBT", "CONFLICTED") for op in self.operations):
            needed = required_proofs([self.scope.executor])
            have = [
                (bool(needed & {Evidence.AGENT_DESTROYED, Evidence.DEREGISTERED}) and not self.agent)
                or (Evidence.PEER_REAPED in needed and self.reaped[op.writer_rank])
                for op in self.operations
                if self.rx.state_of(op).value in ("IN_DOUBT", "CONFLICTED")
            ]
            return not all(have)
        return False


def explore(scope: Scope, *, states_max: int = 2_000_000) -> tuple[int, int]:
    """Breadth first over every interleaving. Returns (states, transitions).

    Raises:
        Violation: With the shortest story that leads to it.
    """
    start: Any = PullWorld(scope) if scope.pull else World(scope)
    seen = {start.key(): None}
    parents: dict[tuple[Any, ...], tuple[tuple[Any, ...], tuple[Any, ...]]] = {}
    frontier: deque[Any] = deque([start])
    transitions = 0

    def story(key: tuple[Any, ...], last: tuple[Any, ...] | None) -> str:
        steps = [] if last is None else [last]
        while key in parents:
            key, action = parents[key]
            steps.append(action)
        return " → ".join(" ".join(map(str, step)) for step in reversed(steps))

    while frontier:
        world = frontier.popleft()
        key = world.key()
        actions = world.actions()
        if not actions:
            try:
                world.at_the_end()
            except Violation as violation:
                raise Violation(f"{scope.name}: {violation}; story: {story(key, None)}") from None
        for action in actions:
            branch = world.clone()
            try:
                branch.apply(action)
            except (Violation, IllegalTransition) as violation:
                raise Violation(f"{scope.name}: {violation}; story: {story(key, action)}") from None
            transitions += 1
            reached = branch.key()
            if reached not in seen:
                if len(seen) >= states_max:
                    raise Violation(f"{scope.name}: more than {states_max} states: the scope is not exhausted")
                seen[reached] = None
                parents[reached] = (key, action)
                frontier.append(branch)
    return len(seen), transitions


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scope", action="append", help="explore only this scope (repeatable)")
    parser.add_argument("--smoke", action="store_true", help="the smaller scopes only")
    parser.add_argument("--states-max", type=int, default=2_000_000)
    parser.add_argument("--nightly", action="store_true", help="every scope, which is the default too")
    options = parser.parse_args(arguments)
    wanted = options.scope or (SMOKE if options.smoke else [scope.name for scope in SCOPES])
    unknown = set(wanted) - {scope.name for scope in SCOPES}
    if unknown:
        parser.error(f"unknown scopes {sorted(unknown)}; known: {[scope.name for scope in SCOPES]}")
    for scope in SCOPES:
        if scope.name not in wanted:
            continue
        began = time.monotonic()
        try:
            states, transitions = explore(scope, states_max=options.states_max)
        except Violation as violation:
            print(f"VIOLATION {violation}")
            return 1
        print(f"{scope.name}: {states} states, {transitions} transitions, {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
