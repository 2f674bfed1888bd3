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

from dataclasses import dataclass, field
from typing import Any

from explorer import AGENT_GONE, Model, Move, Scope, Violation, frame_key

from kv_bounce_planner.sessions import OperationIdentity
from kv_bounce_planner.sessions import core as shared
from kv_bounce_planner.sessions import receive_core as rc
from kv_bounce_planner.sessions import send_core as sc
from kv_bounce_planner.sessions.messages import Cancel, Doubt, ReadOffer, ReadOver, ReceiveRequest
from kv_bounce_planner.sessions.proof import Evidence, WriteExecutor
from kv_bounce_planner.sessions.states import ReceiveState, SendState


@dataclass
class Read(Move):
    """One operation's read, physically."""

    begun: set[int] = field(default_factory=set)
    served: set[int] = field(default_factory=set)
    stale: bool = False  # a part was served from a source that was released

    @property
    def completed_count(self) -> int:
        return len(self.landed)


class PullWorld(Model):
    """One state of the model."""

    LISTS = (*Model.LISTS, "agents", "words")

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope)
        self.receiver_reaped = False
        self.agents = [True] * scope.writers  # the sources'
        self.words: list[Any] = [None] * scope.writers  # the last word of each operation, kept by the receiver's shell

    def own_key(self) -> tuple[Any, ...]:
        words = tuple(frame_key(word) if word else None for word in self.words)
        return (self.receiver_reaped, tuple(self.agents), words)

    # -- what may happen next

    def own_actions(self) -> list[tuple[Any, ...]]:
        if not self.scope.reader_dies:
            return []
        if self.receiver_alive:
            return [("reader dies",)] if self.published else []
        return [] if self.receiver_reaped else [("reader reaped",)]

    def own_actions_of(self, rank: int) -> list[tuple[Any, ...]]:
        scope, live, here = self.scope, self.alive[rank], self.receiver_alive
        able: list[tuple[Any, ...]] = []
        wanted = (scope.retire and not here) or (scope.retire_sources and self.tx[rank].outstanding)
        if live and self.agents[rank] and wanted:
            able.append(("retire reader", rank))
        read = self.moves[rank]
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
            return self.alive[rank] and self.receiver_alive and self.agent
        return self.alive[rank] and self.agents[rank]

    # -- making it happen

    def _deliver_to_sender(self, rank: int) -> None:
        message, operation = self.to_sender[rank].popleft(), self.operations[rank]
        if not self.agents[rank]:
            return
        known = self.tx[rank].knows(operation)
        match message:
            case ReceiveRequest() if known:
                self.tell_sender(rank, sc.AskedAgain(operation))
            case ReceiveRequest():
                self.tell_sender(rank, sc.RequestArrived(self.receiver, message, self.needed))
            case ReadOver(complete=complete) if known:
                self.tell_sender(rank, sc.Returned(operation, complete))
            case Doubt() if known:
                self.tell_sender(rank, sc.Returned(operation, False, doubt=True))

    def _deliver_to_receiver(self, rank: int) -> None:
        message = self.to_receiver[rank].popleft()
        if self.rx.settled:
            if isinstance(message, ReadOffer | Cancel) and self.words[rank] is not None:
                self.say(self.to_sender, rank, self.words[rank])
            return
        self.tell_receiver(rc.MessageArrived(message))

    def is_of_sender(self, todo: tuple[Any, ...], rank: int) -> bool:
        return todo == ("lend", rank)

    def _reader_dies(self) -> None:
        self.receiver_alive = False
        self.todo = [each for each in self.todo if each[0] == "lend"]
        for rank, live in enumerate(self.alive):
            self.to_sender[rank].clear()  # a session takes no frame of a peer that it knows to be dead
            if live:
                self.tell_sender(rank, shared.PeerInDoubt(self.receiver, "connection lost"))

    def _reader_reaped(self) -> None:
        self.receiver_reaped = True
        for rank, live in enumerate(self.alive):
            if live:
                self.tell_sender(rank, shared.PeerEvidenced(self.receiver, Evidence.PEER_REAPED))

    def _retire_reader(self, rank: int) -> None:
        self.agents[rank] = False
        self.to_sender[rank].clear()  # nor does a session take frames of a life that it retired
        self.tell_sender(rank, shared.PeerInDoubt(self.receiver, "peer retired"))
        for evidence in AGENT_GONE:
            self.tell_sender(rank, shared.PeerEvidenced(self.receiver, evidence))

    def _retire(self) -> None:
        self.agent = False
        for rank, peer in enumerate(self.senders):
            self.tell_receiver(shared.PeerInDoubt(peer, "peer retired"))
            read = self.moves[rank]
            if read is not None and (read.begun or read.served or read.posted < self.scope.parts):
                read.error = True
                self._report(rank)
            for evidence in AGENT_GONE:
                self.tell_receiver(shared.PeerEvidenced(peer, evidence))

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
        read = self.moves[rank]
        assert read is not None
        return read

    def _report(self, rank: int) -> None:
        if self.receiver_alive:
            self.report(rank, self.tell_receiver)

    def _answer(self, index: int) -> None:
        kind, rank = self.todo.pop(index)
        if kind == "lend":
            self.tell_sender(rank, shared.Resolved(self.operations[rank]))
        elif not self.rx.settled:
            self.tell_receiver(shared.Resolved(self.operations[rank]))

    # -- performing effects

    def receiver_does(self, effect: Any) -> None:
        match effect:
            case shared.Resolve(operation):
                self.todo.append(("read", operation.writer_rank))
            case rc.StartRead(operation):
                self.moves[operation.writer_rank] = Read()
            case shared.StopPosting(operation):
                self._read(operation.writer_rank).stopped = True
                self._report(operation.writer_rank)
            case rc.SayOver(peer, word):
                self._spoken(peer.rank, word)
            case _:
                raise Violation(f"an effect of another kind of transfer: {effect}")

    def _spoken(self, rank: int, word: Any) -> None:
        read = self.moves[rank]
        if isinstance(word, ReadOver) and read is not None and self.agent and (read.begun or read.served):
            raise Violation("said to be over while parts are under way")
        self.words[rank] = word
        self.say(self.to_sender, rank, word)

    def check_success(self) -> None:
        for read in self.moves:
            if read is None or len(read.landed) < self.scope.parts:
                raise Violation("success without every part")
            if read.stale:
                raise Violation("success with a part of a source that was released")

    def sender_does(self, rank: int, effect: Any) -> None:
        match effect:
            case shared.Resolve():
                self.todo.append(("lend", rank))
            case sc.Lend(operation):
                self.say(self.to_receiver, rank, ReadOffer(operation, "DRAM", 0, b"blocks"))
            case sc.OperationEnded() | sc.ReleaseSource():
                pass
            case _:
                raise Violation(f"an effect of another kind of transfer: {effect}")

    # -- invariants

    def check_snapshot(self, rank: int, snapshot: Any) -> None:
        read = self.moves[rank]
        if snapshot.outcome == "COMPLETED" and (read is None or len(read.landed) < self.scope.parts):
            raise Violation("COMPLETED without every part")

    def at_the_end(self) -> None:
        """Nothing can happen any more: is anything left owned that a proof exists for?"""
        if self.receiver_alive and self.memory == "owned" and not all(map(self._is_honest, self.operations)):
            raise Violation(f"stuck: memory owned for ever; {[self.rx.state_of(op).value for op in self.operations]}")
        for rank, core in enumerate(self.tx):
            if not self.alive[rank] or not core.sealed or core.settled:
                continue
            state = core.state_of(self.operations[rank])
            proof = self.receiver_reaped or (not self.agents[rank] and Evidence.PEER_REAPED not in self.needed)
            reader = self.rx.state_of(self.operations[rank])
            honest = (
                reader in (ReceiveState.READ_IN_DOUBT, ReceiveState.QUARANTINED)
                or not self.agents[rank]
                or not self.receiver_alive
            )
            if state is not SendState.LENT_IN_DOUBT or proof or not honest:
                raise Violation(f"stuck: source {rank} owned for ever in {state}")

    def _is_honest(self, operation: OperationIdentity) -> bool:
        """Owned at the end is right where the reader's class needs a proof that did not come, or nothing ended it."""
        state = self.rx.state_of(operation)
        if state in (ReceiveState.PROVEN, ReceiveState.QUARANTINED):
            return True
        if state is ReceiveState.READ_IN_DOUBT:
            return self.agent
        # It waits for who does not talk to it any more: until its time-out.
        return not self.agents[operation.writer_rank]
