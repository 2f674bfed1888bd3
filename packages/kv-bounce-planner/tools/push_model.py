"""The model of pushed transfers for ``explore.py``: senders write, part by part, into the receiver's memory or a region of it.

Besides what every model checks:

- no part lands in memory or a region after that memory was released;
- no part reads a source after it was released;
- success only with every part landed and, where bounced, scattered once after all of them.
"""

# ruff: noqa: S101 - assertions are about its own model

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from explorer import AGENT_GONE, Model, Move, Scope, Violation

from kv_bounce_planner.sessions import core as shared
from kv_bounce_planner.sessions import receive_core as rc
from kv_bounce_planner.sessions import send_core as sc
from kv_bounce_planner.sessions.messages import BounceGrant, BounceRefused, Cancel, ReceiveRequest, WriterResult
from kv_bounce_planner.sessions.proof import Evidence, WriteExecutor
from kv_bounce_planner.sessions.states import SendState


@dataclass
class Write(Move):
    """One operation's write, physically."""

    bounce: bool = False
    flying: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)

    @property
    def completed_count(self) -> int:
        return len(self.completed)


class PushWorld(Model):
    """One state of the model."""

    LISTS = (*Model.LISTS, "offered")

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.marks: list[set[int]] = [set() for _ in self.senders]
        self.scattered = 0
        self.offered = [False] * scope.writers
        self.lied = False
        self.halted = False  # a stop that the transport has not answered yet

    def clone(self) -> Any:
        new = super().clone()
        new.marks = [set(marks) for marks in self.marks]
        return new

    def own_key(self) -> tuple[Any, ...]:
        return (tuple(map(frozenset, self.marks)), self.scattered, self.lied, tuple(self.offered))

    # -- what may happen next

    def own_actions(self) -> list[tuple[Any, ...]]:
        if not self.scope.ahead:
            return []
        return [("decline", index) for index, each in enumerate(self.todo) if each[0] in ("region", "gathered")]

    def own_actions_of(self, rank: int) -> list[tuple[Any, ...]]:
        scope, live = self.scope, self.alive[rank]
        able: list[tuple[Any, ...]] = []
        if live and scope.ahead and self.tx[rank].knows(self.operations[rank]):
            state = self.tx[rank].state_of(self.operations[rank])
            if state is SendState.WANTED and not self.offered[rank]:
                able.append(("offer", rank))
            if state in (SendState.AHEAD, SendState.STAGED):
                able.append(("ask", rank))
        if self.marks[rank] and self.agent:
            able.extend(("mark", rank, part) for part in sorted(self.marks[rank]))
        write = self.moves[rank]
        if write is None:
            return able
        if live and not write.error and not write.stopped and write.posted < scope.parts:
            able.append(("post", rank))
        for part in sorted(write.flying):
            if live if scope.executor is WriteExecutor.SENDER else self.agent:
                able.append(("land", rank, part))
            if scope.errors and live and not write.error:
                able.append(("error", rank))
        return able

    def clock_of(self, core: sc.SendTransfer) -> bool:
        return core.sealed

    # -- making it happen

    def _deliver_to_sender(self, rank: int) -> None:
        message = self.to_sender[rank].popleft()
        operation = self.operations[rank]
        match message:
            case ReceiveRequest() if self.tx[rank].knows(operation):
                self.tell_sender(rank, sc.AskedAgain(operation))
            case ReceiveRequest():
                self.tell_sender(rank, sc.RequestArrived(self.receiver, message))
            case Cancel():
                if not self.tx[rank].knows(operation):
                    raise Violation("a cancel overtook its request")
                self.tell_sender(rank, sc.CancelArrived(operation, ""))
            case BounceGrant():
                self.tell_sender(rank, sc.GrantArrived(operation))
            case BounceRefused():
                self.tell_sender(rank, sc.RefusalArrived(operation, ""))

    def _deliver_to_receiver(self, rank: int) -> None:
        self.tell_receiver(rc.MessageArrived(self.to_receiver[rank].popleft()))

    def _offer(self, rank: int) -> None:
        self.offered[rank] = True
        self.tell_sender(rank, sc.SlotOffered(self.operations[rank]))

    def _ask(self, rank: int) -> None:
        self.tell_sender(rank, sc.SlotAsked(self.operations[rank]))

    def _decline(self, index: int) -> None:
        kind, *rest = self.todo.pop(index)
        if kind == "region":
            self.tell_receiver(rc.RegionRefused("no_space"))
        else:
            self.tell_sender(rest[0], sc.GatherEnded(self.operations[rest[0]], False, True, "the copier failed"))

    def is_of_sender(self, todo: tuple[Any, ...], rank: int) -> bool:
        return todo[0] in ("resolved", "slot", "gathered") and todo[1] == rank

    def _retire(self) -> None:
        self.agent = False
        for marks in self.marks:
            marks.clear()
        for peer in self.senders:
            self.tell_receiver(shared.PeerInDoubt(peer, "peer retired"))
            for evidence in AGENT_GONE:
                self.tell_receiver(shared.PeerEvidenced(peer, evidence))

    def _post(self, rank: int) -> None:
        write = self.moves[rank]
        assert write is not None
        write.flying.add(write.posted)
        write.posted += 1
        self._report(rank)

    def _land(self, rank: int, part: int) -> None:
        write = self.moves[rank]
        assert write is not None
        if self.memory in ("released", "freed region"):
            raise Violation("a part landed in memory that was released")
        if self.source[rank] == "released" and (self.scope.executor is WriteExecutor.SENDER or not write.error):
            raise Violation("a part was read from a source that was released")
        write.flying.discard(part)
        write.landed.add(part)
        if not write.error and self.alive[rank]:
            write.completed.add(part)
            self.marks[rank].add(part)
            self._report(rank)

    def _error(self, rank: int) -> None:
        write = self.moves[rank]
        assert write is not None
        write.error = True
        self._report(rank)

    def _mark(self, rank: int, part: int) -> None:
        self.marks[rank].discard(part)
        self.tell_receiver(rc.MarkArrived(self.operations[rank], part, self.scope.parts))

    def _report(self, rank: int) -> None:
        if self.alive[rank]:
            self.report(rank, lambda told: self.tell_sender(rank, told))

    def _answer(self, index: int) -> None:
        kind, *rest = self.todo.pop(index)
        match kind:
            case "resolved":
                self.tell_sender(rest[0], shared.Resolved(self.operations[rest[0]], rest[1]))
            case "slot":
                self.tell_sender(rest[0], sc.SlotReserved(self.operations[rest[0]]))
            case "gathered":
                self.tell_sender(rest[0], sc.GatherEnded(self.operations[rest[0]], True, True))
            case "region":
                self.tell_receiver(rc.RegionReserved() if rest[0] else rc.RegionRefused("no_space"))
            case "check":
                self.lied = self.lied or not rest[1]
                self.tell_receiver(rc.ReportChecked(self.operations[rest[0]], rest[1], "" if rest[1] else "lie"))
            case "scatter":
                if any(not w or len(w.landed) < self.scope.parts for w in self.moves if w and w.bounce):
                    raise Violation("scattered before every bounced part had landed")
                if self.memory == "released":
                    raise Violation("a scatter ran in memory that was released")
                self.scattered += 1
                self.tell_receiver(rc.ScatterEnded(True, True))

    # -- performing effects

    def receiver_does(self, effect: Any) -> None:
        match effect:
            case rc.SendCancel(peer, message) | rc.SendRefusal(peer, message):
                self.say(self.to_sender, peer.rank, message)
            case rc.ReserveRegion():
                self.todo.append(("region", True))
            case rc.BindAndGrant(operation, peer):
                self.say(self.to_sender, peer.rank, BounceGrant(operation, 64, 8, "DRAM", 0))
            case rc.WithdrawRegion():
                self.todo = [each for each in self.todo if each[0] != "region"]
            case rc.CheckReport(operation, _):
                self.todo.append(("check", operation.writer_rank, not self.scope.lies))
            case rc.Scatter():
                self.todo.append(("scatter",))
            case _:
                raise Violation(f"an effect of another kind of transfer: {effect}")

    def check_success(self) -> None:
        for write in self.moves:
            if write is None or len(write.landed) < self.scope.parts:
                raise Violation("success without every part")
            if write.bounce and self.scattered != 1:
                raise Violation(f"success with {self.scattered} scatters")
        if self.lied:
            raise Violation("success with a refused report")

    def tell_sender(self, rank: int, event: sc.SendEvent) -> None:
        super().tell_sender(rank, event)
        if self.halted:  # the transport is asked after all effects were performed
            self.halted = False
            self._report(rank)

    def sender_does(self, rank: int, effect: Any) -> None:
        match effect:
            case shared.Resolve():
                self.todo.append(("resolved", rank, self.scope.bounce))
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
                self.moves[rank] = Write(bounce=bounce)
                if bounce:
                    self.say(self.to_receiver, rank, WriterResult(operation, 64, b"report"))
            case sc.SendReportAgain(operation):
                self.say(self.to_receiver, rank, WriterResult(operation, 64, b"report"))
            case shared.StopPosting():
                if self.moves[rank] is None:
                    raise Violation("stopped a write that never began")
                self.moves[rank].stopped = True
                self.halted = True
            case sc.ReleaseSource():
                if ("gathered", rank) in self.todo:
                    raise Violation("a source was released while a gather reads it")
            case sc.OperationEnded() | sc.QuarantineSlot():
                pass
            case _:
                raise Violation(f"an effect of another kind of transfer: {effect}")

    # -- invariants

    def check_snapshot(self, rank: int, snapshot: Any) -> None:
        write = self.moves[rank]
        if write and write.flying and not write.error and not snapshot.quarantined:
            raise Violation("a terminal snapshot with a write in progress")
        if snapshot.outcome == "COMPLETED" and (write is None or len(write.landed) < self.scope.parts):
            raise Violation("COMPLETED without every part")

    def at_the_end(self) -> None:
        """Nothing can happen any more: is anything left owned that should not be?"""
        if self.memory == "owned" and not self._doubt_is_honest():
            raise Violation(f"stuck: memory owned for ever; {[self.rx.state_of(op).value for op in self.operations]}")
        for rank, core in enumerate(self.tx):
            if self.alive[rank] and core.sealed and not core.settled and not self.scope.errors:
                raise Violation(f"stuck: sender {rank} owns its source for ever")

    def _doubt_is_honest(self) -> bool:
        """Owned at the end is right where a proof of the class cannot come, or the sender was never asked to end."""
        agent_gone = not self.agent and bool(self.needed & {Evidence.AGENT_DESTROYED, Evidence.DEREGISTERED})
        return any(
            not agent_gone and not (Evidence.PEER_REAPED in self.needed and self.reaped[op.writer_rank])
            for op in self.operations
            if self.rx.state_of(op).value in ("IN_DOUBT", "CONFLICTED")
        )
