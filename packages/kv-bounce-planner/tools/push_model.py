"""The model of pushed transfers for ``explore.py``: senders write, part by part, into the receiver's memory or a region of it.

Besides what every model checks:

- no part lands in memory or a region after that memory was released;
- no part reads a source after it was released;
- success only with every part landed and, where bounced, each slice scattered once after all of its parts;
- nothing of a slice moves before it is computed, and its region is not written or read after it was given back.
"""

# ruff: noqa: S101 - assertions are about its own model

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from explorer import AGENT_GONE, Model, Move, Scope, Violation

from kv_bounce_planner.sessions import TransferIdentity
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

    LISTS = (*Model.LISTS, "offered", "scattered", "regions")

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.marks: list[set[int]] = [set() for _ in self.operations]
        self.scattered = [0] * scope.slices
        self.regions = ["none"] * scope.slices
        self.offered = [False] * len(self.operations)
        self.lied = False
        self.halted = False  # a stop that the transport has not answered yet

    def clone(self) -> Any:
        new = super().clone()
        new.marks = [set(marks) for marks in self.marks]
        return new

    def own_key(self) -> tuple[Any, ...]:
        return (
            tuple(map(frozenset, self.marks)),
            tuple(self.scattered),
            tuple(self.regions),
            self.lied,
            tuple(self.offered),
        )

    # -- what may happen next

    def own_actions(self) -> list[tuple[Any, ...]]:
        if not self.scope.ahead:
            return []
        return [("decline", index) for index, each in enumerate(self.todo) if each[0] in ("region", "gathered")]

    def own_actions_of(self, rank: int) -> list[tuple[Any, ...]]:
        return [action for number in self.of(rank) for action in self._actions_on(number, rank)]

    def _actions_on(self, number: int, rank: int) -> list[tuple[Any, ...]]:
        scope, live = self.scope, self.alive[rank]
        able: list[tuple[Any, ...]] = []
        if live and scope.ahead and self.tx[rank].knows(self.operations[number]):
            state = self.tx[rank].state_of(self.operations[number])
            if state is SendState.WANTED and not self.offered[number]:
                able.append(("offer", number))
            if state in (SendState.AHEAD, SendState.STAGED):
                able.append(("ask", number))
        if self.marks[number] and self.agent:
            able.extend(("mark", number, part) for part in sorted(self.marks[number]))
        write = self.moves[number]
        if write is None:
            return able
        if live and not write.error and not write.stopped and write.posted < scope.parts:
            able.append(("post", number))
        for part in sorted(write.flying):
            if live if scope.executor is WriteExecutor.SENDER else self.agent:
                able.append(("land", number, part))
            if scope.errors and live and not write.error:
                able.append(("error", number))
        return able

    def clock_of(self, core: sc.SendTransfer) -> bool:
        return core.sealed

    # -- making it happen

    def _deliver_to_sender(self, rank: int) -> None:
        message = self.to_sender[rank].popleft()
        operation = message.operation
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

    def tell_owner(self, number: int, event: sc.SendEvent) -> None:
        self.tell_sender(self.operations[number].writer_rank, event)

    def _offer(self, number: int) -> None:
        self.offered[number] = True
        self.tell_owner(number, sc.SlotOffered(self.operations[number]))

    def _ask(self, number: int) -> None:
        self.tell_owner(number, sc.SlotAsked(self.operations[number]))

    def _decline(self, index: int) -> None:
        kind, *rest = self.todo.pop(index)
        if kind == "region":
            self.tell_receiver(rc.RegionRefused(self.slice_id(rest[0]), "no_space"))
        else:
            self.tell_owner(rest[0], sc.GatherEnded(self.operations[rest[0]], False, True, "the copier failed"))

    def slice_id(self, index: int) -> TransferIdentity:
        return self.rx.identity.of_slice(index)

    def is_of_sender(self, todo: tuple[Any, ...], rank: int) -> bool:
        return todo[0] in ("resolved", "slot", "gathered") and self.operations[todo[1]].writer_rank == rank

    def _retire(self) -> None:
        self.agent = False
        for marks in self.marks:
            marks.clear()
        for peer in self.senders:
            self.tell_receiver(shared.PeerInDoubt(peer, "peer retired"))
            for evidence in AGENT_GONE:
                self.tell_receiver(shared.PeerEvidenced(peer, evidence))

    def _post(self, number: int) -> None:
        write = self.moves[number]
        assert write is not None
        write.flying.add(write.posted)
        write.posted += 1
        self._report(number)

    def _land(self, number: int, part: int) -> None:
        write, operation = self.moves[number], self.operations[number]
        assert write is not None
        if self.memory == "released":
            raise Violation("a part landed in memory that was released")
        if write.bounce and self.regions[operation.transfer.slice_index] == "released":
            raise Violation("a part landed in a region that was given back")
        if self.source[operation.writer_rank] == "released" and (
            self.scope.executor is WriteExecutor.SENDER or not write.error
        ):
            raise Violation("a part was read from a source that was released")
        write.flying.discard(part)
        write.landed.add(part)
        if not write.error and self.alive[operation.writer_rank]:
            write.completed.add(part)
            self.marks[number].add(part)
            self._report(number)

    def _error(self, number: int) -> None:
        write = self.moves[number]
        assert write is not None
        write.error = True
        self._report(number)

    def _mark(self, number: int, part: int) -> None:
        self.marks[number].discard(part)
        self.tell_receiver(rc.MarkArrived(self.operations[number], part, self.scope.parts))

    def _report(self, number: int) -> None:
        if self.alive[self.operations[number].writer_rank]:
            self.report(number, lambda told: self.tell_owner(number, told))

    def _answer(self, index: int) -> None:
        kind, *rest = self.todo.pop(index)
        match kind:
            case "resolved":
                self.tell_owner(rest[0], shared.Resolved(self.operations[rest[0]], rest[1]))
            case "slot":
                self.tell_owner(rest[0], sc.SlotReserved(self.operations[rest[0]]))
            case "gathered":
                self.tell_owner(rest[0], sc.GatherEnded(self.operations[rest[0]], True, True))
            case "region":
                self.regions[rest[0]] = "held"
                self.tell_receiver(rc.RegionReserved(self.slice_id(rest[0])))
            case "check":
                self.lied = self.lied or not rest[1]
                self.tell_receiver(rc.ReportChecked(self.operations[rest[0]], rest[1], "" if rest[1] else "lie"))
            case "scatter":
                writes = [self.moves[number] for number in self._of_slice(rest[0])]
                if any(write is None or len(write.landed) < self.scope.parts for write in writes):
                    raise Violation("scattered before every bounced part had landed")
                if self.memory == "released" or self.regions[rest[0]] == "released":
                    raise Violation("a scatter ran in memory that was released")
                self.scattered[rest[0]] += 1
                self.tell_receiver(rc.ScatterEnded(self.slice_id(rest[0]), True, True))

    def _of_slice(self, index: int) -> range:
        return range(index * self.scope.writers, (index + 1) * self.scope.writers)

    # -- performing effects

    def receiver_does(self, effect: Any) -> None:
        match effect:
            case rc.SendCancel(peer, message) | rc.SendRefusal(peer, message):
                self.say(self.to_sender, peer.rank, message)
            case rc.ReserveRegion(slice_id):
                self.todo.append(("region", slice_id.slice_index))
            case rc.BindAndGrant(operation, peer):
                self.say(self.to_sender, peer.rank, BounceGrant(operation, 64, 8, "DRAM", 0))
            case rc.WithdrawRegion(slice_id):
                self.todo = [each for each in self.todo if each != ("region", slice_id.slice_index)]
                self.regions[slice_id.slice_index] = "none"
            case rc.ReleaseRegion(slice_id, proofs):
                wanted = {self.operations[number] for number in self._of_slice(slice_id.slice_index)}
                if self.regions[slice_id.slice_index] != "held" or {proof.operation for proof in proofs} != wanted:
                    raise Violation(f"a region was given back from {self.regions[slice_id.slice_index]}")
                self.regions[slice_id.slice_index] = "released"
            case rc.SliceLanded(slice_id):
                if any(
                    len(self.moves[number].landed) < self.scope.parts for number in self._of_slice(slice_id.slice_index)
                ):
                    raise Violation("a slice landed without every part")
            case rc.CheckReport(operation, _):
                self.todo.append(("check", operation.operation, not self.scope.lies))
            case rc.Scatter(slice_id):
                self.todo.append(("scatter", slice_id.slice_index))
            case _:
                raise Violation(f"an effect of another kind of transfer: {effect}")

    def check_success(self) -> None:
        for operation, write in zip(self.operations, self.moves):
            if write is None or len(write.landed) < self.scope.parts:
                raise Violation("success without every part")
            if write.bounce and self.scattered[operation.transfer.slice_index] != 1:
                raise Violation(f"success with {self.scattered} scatters")
        if self.lied:
            raise Violation("success with a refused report")

    def tell_sender(self, rank: int, event: sc.SendEvent) -> None:
        super().tell_sender(rank, event)
        if self.halted:  # the transport is asked after all effects were performed
            self.halted = False
            for number in self.of(rank):
                self._report(number)

    def sender_does(self, rank: int, effect: Any) -> None:
        number = effect.operation.operation if hasattr(effect, "operation") else -1
        match effect:
            case shared.Resolve():
                self.todo.append(("resolved", number, self.scope.bounce))
            case sc.ReserveSlot():
                self.todo.append(("slot", number))
            case sc.DropSlot():
                if ("gathered", number) in self.todo:
                    raise Violation("a slot was given back while a gather writes it")
                self.todo = [each for each in self.todo if each != ("slot", number)]
            case sc.Gather():
                if ("gathered", number) in self.todo:
                    raise Violation("two gathers into one slot")
                if not self.computed(number):
                    raise Violation("a gather of what is not computed")
                self.todo.append(("gathered", number))
            case sc.Post(operation, bounce):
                if ("gathered", number) in self.todo:
                    raise Violation("a write was posted while its gather runs")
                if not self.computed(number):
                    raise Violation("a write of what is not computed")
                self.moves[number] = Write(bounce=bounce)
                if bounce:
                    self.say(self.to_receiver, rank, WriterResult(operation, 64, b"report"))
            case sc.SendReportAgain(operation):
                self.say(self.to_receiver, rank, WriterResult(operation, 64, b"report"))
            case shared.StopPosting():
                if self.moves[number] is None:
                    raise Violation("stopped a write that never began")
                self.moves[number].stopped = True
                self.halted = True
            case sc.ReleaseSource():
                if any(("gathered", each) in self.todo for each in self.of(rank)):
                    raise Violation("a source was released while a gather reads it")
            case sc.OperationEnded() | sc.QuarantineSlot():
                pass
            case _:
                raise Violation(f"an effect of another kind of transfer: {effect}")

    # -- invariants

    def check_snapshot(self, rank: int, snapshot: Any) -> None:
        for write in (self.moves[number] for number in self.of(rank)):
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
