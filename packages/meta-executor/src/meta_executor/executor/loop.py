"""One iteration of one rank: the same list for both roles, every engine, CPU and CUDA.

    take new work -> update readiness -> retire -> schedule or mirror -> run layers -> progress transfers -> terminal votes
    -> poll the agreement -> hand out

Overlap. ``launch`` returns at once, so from ``run layers`` on the engine computes step k while this thread hands out what
step k-1 made, moves transfers, and (in the next round of the list) takes in what step k+1 needs. A finished step is retired
and its successor launched before anything else is done with its results: a step costs the longer of host and device time.

What a step is differs by role and is a room of its own: :mod:`~meta_executor.executor.prefill` (rank 0 of a pipeline plans,
the others mirror) and :mod:`~meta_executor.executor.decode` (every attention-DP rank steps its own table of rows). The loop
gives them what has come and publishes what they decide.

Nothing here blocks, sleeps or looks at a clock; the caller gives the time and waits between iterations
(:mod:`meta_executor.executor.drive`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Protocol

from meta_executor import wire
from meta_executor.executor.desk import Desk, StopOrder
from meta_executor.executor.links import Float32Array, Link
from meta_executor.executor.messages import (
    Admit,
    Drain,
    Leave,
    Peer,
    Result,
    Schedule,
    Status,
    Stop,
    Work,
    WorkItem,
)
from meta_executor.executor.ownership import Outcome, Registry, Sequence, State
from meta_executor.executor.request import AnswerBook, Answers, Notice, Role
from meta_executor.executor.transceiver import (
    MOVING_CAP_S,
    RECEIVING_STEP_CAP_S,
    SENDING_STEP_CAP_S,
    Arrived,
    Ended,
    Expired,
    Fault,
    Owned,
    PeerCancelled,
    PeerReady,
    ReceivingTransceiver,
    Revoked,
    SendingTransceiver,
    TransceiverEvent,
    TransferFailed,
)
from meta_executor.executor.work import WorkChannel


class Compute(Protocol):
    """What the loop needs of a role's steps."""

    step_count: int
    token_count: int
    #: Prompts that a generation rank computed itself (count).
    prompt_count: int
    step_times_s: deque[float]

    def take_schedule(self, schedule: Schedule, activations: Float32Array | None) -> None:
        """A schedule has come from the stage before."""
        ...

    def take_result(self, result: Result) -> None:
        """The last stage has ended a step."""
        ...

    def arrived(self, sequence: Sequence, first_token: int) -> None:
        """A prompt's KV has come, with its first token."""
        ...

    def own_prompt(self, sequence: Sequence) -> None:
        """A request without a context leg has its blocks: its prompt is computed here."""
        ...

    def stopped(self, sequence: Sequence) -> None:
        """Its outcome is set: no later step has it, and compute's leg ends with the last one that does."""
        ...

    def forget(self, request_id: int) -> None:
        """It must not be chosen for a step any more."""
        ...

    def drop_revoked(self) -> None:
        """A drain has just revoked every lease that is not scheduled."""
        ...

    def author_stop(self, request_id: int, outcome: Outcome, reason: str, code: str) -> None:
        """Rank 0: end a request on every rank."""
        ...

    def retire(self, now_s: float) -> bool:
        """Take finished steps. Returns whether anything moved, as the next two do."""
        ...

    def schedule(self) -> bool:
        """Plan, or follow a plan."""
        ...

    def run_layers(self, now_s: float) -> bool:
        """Give the engine what is ready."""
        ...

    @property
    def busy(self) -> bool:
        """Steps are ready, in flight or unanswered."""
        ...

    @property
    def stepping(self) -> bool:
        """The engine has a step: its end will ring."""
        ...


class RankLoop:
    """One rank.

    Args:
        rank: Place in the instance's world.
        registry: This rank's requests.
        compute: The role's steps.
        answers: What they and the loop have to say to clients.
        link: Frames to other ranks.
        work: How new work comes.
        sending: A context rank's transceiver, the only owner of its transfer state; None on a generation rank.
        receiving: A generation rank's; None on a context rank.
        desk: Rank 0's, else None.
        on_fault: Told once, with the first diagnosis.
    """

    def __init__(
        self,
        *,
        rank: int,
        registry: Registry,
        compute: Compute,
        answers: AnswerBook,
        link: Link,
        work: WorkChannel,
        sending: SendingTransceiver | None,
        receiving: ReceivingTransceiver | None,
        desk: Desk | None,
        on_fault: Callable[[str], None],
    ) -> None:
        transceiver = sending if sending is not None else receiving
        if transceiver is None:
            raise ValueError("a rank sends or receives")
        self.role: Role = registry.role
        self.rank = rank
        self.registry = registry
        self.compute = compute
        self._answers = answers
        self._link = link
        self._work = work
        self._transceiver = transceiver
        self._sending = sending
        self._receiving = receiving
        self._desk = desk
        self._on_fault = on_fault
        # -- leaving
        self.draining = False
        self.drain_deadline_s = float("inf")
        self.last_incarnation = 0
        self._drain_told = False
        self._drained_ranks: set[int] = set()
        self.left = False
        self.drained = False
        self.fault = ""
        self.taken_count = 0
        #: Ranks that sent anything, until somebody who counts their silence clears it.
        self.heard: set[int] = set()

    # -- the list -----------------------------------------------------------------------------------------------------

    def iterate(self, now_s: float) -> bool:
        """One round. Returns whether anything moved; if nothing did, the caller may wait a little."""
        moved = False
        for _, phase in self.phases:
            moved |= phase(now_s)
        return moved

    @cached_property
    def phases(self) -> tuple[tuple[str, Callable[[float], bool]], ...]:
        """The list, in order, under its names; each takes the time and returns whether anything moved."""
        transceiver, compute, sending = self._transceiver, self.compute, self._sending
        return (
            ("take new work", self._take_new_work),
            ("update readiness", transceiver.update_readiness),
            ("retire", compute.retire),
            ("schedule", lambda now_s: compute.schedule()),
            ("run layers", compute.run_layers),
            ("progress transfers", transceiver.progress),
            *(() if sending is None else (("vote terminal", sending.vote_terminal),)),
            ("poll", self._poll),
            ("hand out", self._hand_out),
        )

    @property
    def progress(self) -> tuple[int, int]:
        """Steps launched here and tokens in them, since the start (count)."""
        return self.compute.step_count, self.compute.token_count

    @property
    def poll_cap_s(self) -> float | None:
        """Longest wait until what is open must be looked at, because its end tells nobody (s); None: every end is told.

        A write by NIXL, and a message or broadcast that is not whole yet, tell nobody; steps of the engine, new work, control
        frames, and frames and agreement of ranks on this host do.
        """
        if self._link.busy or self._work.busy:
            return MOVING_CAP_S
        cap_s = self._transceiver.poll_cap_s
        if cap_s is None or not self.compute.stepping:
            return cap_s
        return max(cap_s, RECEIVING_STEP_CAP_S if self._sending is None else SENDING_STEP_CAP_S)

    # -- take new work ------------------------------------------------------------------------------------------------

    def _take_new_work(self, now_s: float) -> bool:
        arrived = self._link.poll()
        for frame in arrived:
            self.heard.add(frame.source_rank)
            body = frame.body
            if isinstance(body, Work):
                self._work.deliver(body)
            elif isinstance(body, Schedule):
                self.compute.take_schedule(body, frame.activations)
            elif isinstance(body, Result):
                self.compute.take_result(body)
            elif isinstance(body, Answers):
                if self._desk is not None:
                    self._desk.answer(body)
            else:
                self._take_status(body)
        if self._desk is not None:
            self._take_desk(self._desk, now_s)
        items = self._work.take()
        for item in items:
            self._apply(item, now_s)
        return bool(arrived or items)

    def _take_desk(self, desk: Desk, now_s: float) -> None:
        items, stops = desk.collect(now_s)
        if items:
            self._work.publish(items)
        for stop in stops:
            self._author_stop(stop)
        if desk.draining and not self._drain_told:
            self._drain_told = True
            self._work.publish([Drain(desk.last_incarnation, max(desk.drain_deadline_s - now_s, 0.0))])

    def _apply(self, item: WorkItem, now_s: float) -> None:
        if isinstance(item, Admit):
            if item.target_rank in (-1, self.rank):
                sequence, _ = self.registry.prepare(item.request, item.incarnation, now_s=now_s)
                self._transceiver.admit(sequence, now_s)
                self.taken_count += 1
        elif isinstance(item, Stop):
            self._stop(item)
        elif isinstance(item, Peer):
            if self._receiving is not None:
                self._receiving.register_peer(item)
        elif isinstance(item, Drain):
            self.draining = True
            self.last_incarnation = item.last_incarnation
            self.drain_deadline_s = now_s + item.deadline_s
            if self._sending is not None:
                self._sending.start_drain(item.last_incarnation)
            self.compute.drop_revoked()
        else:
            self.left = True
            self.drained = item.drained

    def _author_stop(self, stop: StopOrder) -> None:
        """Rank 0: end a request wherever it is."""
        if self.role == "context":
            self.compute.author_stop(stop.request_id, stop.outcome, stop.reason, stop.error_code)
        else:
            self._work.publish([Stop(stop.request_id, stop.outcome, stop.reason, stop.error_code, -1)])

    def _stop(self, item: Stop) -> None:
        sequence = self.registry.get(item.request_id)
        if sequence is None:
            if self._sending is not None and not self.registry.is_finished(item.request_id):
                self._sending.refuse(item.request_id, item.reason)
            return
        if sequence.state is State.QUIESCENT or (self.role == "generation" and sequence.answered_end):
            # Its client has heard the last word: what is left of it is given back without being told.
            return
        self.registry.end(sequence, item.outcome, item.reason, item.error_code)
        if self.role == "context":
            sequence.last_step_id = max(sequence.last_step_id, item.last_step_id)
        self._transceiver.stop(sequence)
        self.compute.stopped(sequence)
        if sequence.ended_early:
            self._answer_end(sequence)

    # -- poll ---------------------------------------------------------------------------------------------------------

    def _poll(self, now_s: float) -> bool:
        events = self._transceiver.poll(now_s)
        for event in events:
            self._take_event(event)
        return bool(events)

    def _take_event(self, event: TransceiverEvent) -> None:
        if isinstance(event, Arrived):
            self._arrived(event)
        elif isinstance(event, Owned):
            self.compute.own_prompt(event.sequence)
        elif isinstance(event, TransferFailed):
            self._answer_end(event.sequence)
        elif isinstance(event, PeerReady):
            if self._desk is not None:
                self._desk.admission_may_have_changed()
        elif isinstance(event, PeerCancelled):
            self._given_up(event)
        elif isinstance(event, Expired):
            if self._desk is None:
                self._given_up(event)
            else:
                self._author_stop(StopOrder(event.request_id, Outcome.FAILED, event.reason, wire.TRANSFER_FAILED))
        elif isinstance(event, Revoked):
            # Perhaps selected for a step, with blocks set aside, and not activated: it must not be scheduled any more.
            self.compute.forget(event.sequence.request_id)
            self._answer_end(event.sequence)
        elif isinstance(event, Ended):
            self._ended(event)
        elif isinstance(event, Fault) and not self.fault:
            self.fault = event.diagnosis
            self._on_fault(event.diagnosis)

    def _arrived(self, event: Arrived) -> None:
        sequence = self.registry.require(event.request_id)
        if event.first_token is None:
            self.registry.end(sequence, Outcome.FAILED, "no first token", wire.TRANSFER_FAILED)
            self._answer_end(sequence)
            self._transceiver.stop(sequence)
            return
        self.compute.arrived(sequence, event.first_token)

    def _ended(self, event: Ended) -> None:
        """Terminal on this rank. A client that heard nothing yet (revoked by a drain, say) hears it now."""
        self.compute.forget(event.request_id)
        if self._desk is None:
            return
        self._desk.admission_may_have_changed()
        unheard = self._desk.client(event.request_id) is not None and event.outcome is not Outcome.COMPLETED
        if self.role == "context" and unheard:
            words = event.reason or "ended before it was computed"
            self._answers.notice(_end_notice(event.request_id, event.outcome, event.error_code, words))

    def _given_up(self, event: PeerCancelled | Expired) -> None:
        """The receiver gave a request up, or does not come for it here: rank 0 stops it everywhere."""
        if self._desk is not None:
            self._desk.abort(event.request_id, event.reason)
        else:
            self._link.send(0, Status(self.rank, b"", ((event.request_id, event.reason),)))

    def _take_status(self, status: Status) -> None:
        if self._desk is None:
            return
        for request_id, message in status.given_up:
            self._desk.abort(request_id, message)
        if status.statistics:
            self._desk.take_statistics(status.rank, status.statistics)
        if status.drained:
            self._drained_ranks.add(status.rank)

    # -- hand out -----------------------------------------------------------------------------------------------------

    def _answer_end(self, sequence: Sequence) -> None:
        """Tell the client that its request ended early; once, from the rank that answers for it."""
        if sequence.answered_end or (self.role == "context" and self._desk is None):
            return
        sequence.answered_end = True
        outcome = sequence.outcome or Outcome.FAILED
        self._answers.notice(_end_notice(sequence.request_id, outcome, sequence.error_code, sequence.reason, self.rank))

    def _hand_out(self, now_s: float) -> bool:
        """Results of this iteration leave in one piece; then what a drain still waits for."""
        answers = self._answers.take()
        if self._desk is not None:
            if answers is not None:
                self._desk.answer(answers)
            handed = self._desk.hand_out()
        else:
            handed = answers is not None
            if answers is not None:
                self._link.send(0, answers)
        if self._sending is not None and self._sending.lockstep:
            # Every poll is a collective, so every rank sees the proof in the same one and leaves after it.
            if self._sending.drained:
                self.left = self.drained = True
        elif self.draining and not self.left:
            self._progress_drain(now_s)
        return handed

    def _progress_drain(self, now_s: float) -> None:
        quiet = not len(self.registry) and not self.compute.busy and self._transceiver.drained
        if self._desk is None:
            if quiet and not self._drain_told:
                self._drain_told = True
                self._link.send(0, Status(self.rank, b"", drained=True))
            return
        if quiet:
            self._drained_ranks.add(self.rank)
        complete = len(self._drained_ranks) == self._link.size
        if complete or now_s >= self.drain_deadline_s:
            self._work.publish([Leave(complete)])
            for item in self._work.take():
                self._apply(item, now_s)


def _end_notice(request_id: int, outcome: Outcome, code: str, reason: str, rank: int = 0) -> Notice:
    """The last word on a request that ended early."""
    cancelled = outcome is Outcome.CANCELLED
    return Notice(
        request_id,
        "cancelled" if cancelled else "error",
        code or (wire.CANCELLED if cancelled else wire.INTERNAL),
        reason,
        rank=rank,
    )
