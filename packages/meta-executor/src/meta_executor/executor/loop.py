"""One iteration of one rank: the same list for both roles, every engine, CPU and CUDA.

    take new work -> update readiness -> schedule or mirror -> run layers -> progress transfers -> terminal votes
    -> poll the agreement -> hand out

Overlap. ``launch`` returns at once, so from ``run layers`` on the engine computes step k while this thread hands out what
step k-1 made, moves transfers, and (in the next round of the list) takes in what step k+1 needs. A finished step is retired
and its successor launched before anything else is done with its results: a step costs the longer of host and device time.

Planning ranks (rank 0 of a pipeline; every attention-DP rank) make schedules, the others mirror what arrives. A schedule
leaves a rank with the activations that belong to it, and waits on a follower until that follower has heard that the blocks it
overwrites were given back.

Nothing here blocks, sleeps or looks at a clock; the caller gives the time and waits between iterations
(:mod:`meta_executor.executor.drive`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from meta_executor import wire
from meta_executor.engine.base import Engine, StepOutput
from meta_executor.engine.sampling import finish_reason
from meta_executor.executor.desk import Desk, stop_item
from meta_executor.executor.links import Link
from meta_executor.executor.memory import FollowedBlocks, PlannedBlocks
from meta_executor.executor.messages import (
    Admit,
    Answer,
    Answers,
    Drain,
    Leave,
    Peer,
    Result,
    Schedule,
    Status,
    Stop,
    Work,
    WorkItem,
    unpack_blocks,
)
from meta_executor.executor.ownership import PRE_ACTIVE_STATES, Event, Leg, Outcome, Registry, Role, Sequence, State
from meta_executor.executor.scheduler import StepLimits, plan_step
from meta_executor.executor.steps import Step, make_schedule, sampling_of, step_input
from meta_executor.executor.transceiver import (
    Arrived,
    Ended,
    Expired,
    Fault,
    PeerCancelled,
    PeerReady,
    Revoked,
    Transceiver,
    TransferFailed,
)
from meta_executor.executor.work import WorkChannel

#: Steps given to the engine at once on one rank (count): the next one waits ready in its queue while one runs.
LAUNCHED_MAX = 2


class RankLoop:
    """One rank.

    Args:
        role: What the instance does.
        rank, stage_count: Place in the world, stages of the pipeline (1 for an attention-DP group).
        engine: This rank's stage.
        registry: This rank's requests.
        blocks: This rank's KV blocks: planned or followed.
        limits: What fits.
        link: Frames to other ranks.
        work: How new work comes.
        transceiver: The only owner of transfer state.
        desk: Rank 0's, else None.
        on_fault: Told once, with the first diagnosis.
    """

    def __init__(
        self,
        *,
        role: Role,
        rank: int,
        stage_count: int,
        engine: Engine,
        registry: Registry,
        blocks: PlannedBlocks | FollowedBlocks,
        limits: StepLimits,
        link: Link,
        work: WorkChannel,
        transceiver: Transceiver,
        desk: Desk | None,
        on_fault: Callable[[str], None],
        statistics: Callable[[], bytes] = lambda: b"{}",
    ) -> None:
        self.role = role
        self.rank = rank
        self._stage_count = stage_count
        self._plans = role == "generation" or rank == 0
        self._is_last = role == "generation" or rank == stage_count - 1
        self._engine = engine
        self.registry = registry
        self._blocks = blocks
        self._limits = limits
        self._link = link
        self._work = work
        self._transceiver = transceiver
        self._desk = desk
        self._on_fault = on_fault
        self._statistics = statistics
        #: Planning ranks: sequences that may be in a step, in order of activation.
        self._active: dict[int, Sequence] = {}
        #: Schedules that this rank has yet to launch, and those it has launched, in order.
        self._ready: deque[Step] = deque()
        self._launched: deque[Step] = deque()
        #: Planning ranks: steps whose result has not come back.
        self._unanswered: dict[int, Schedule] = {}
        self._results: deque[Result] = deque()
        self._answers: list[Answer] = []
        self._next_step_id = 0
        self._retired_step_id = -1
        # -- leaving
        self.draining = False
        self.drain_deadline_s = float("inf")
        self.last_incarnation = 0
        self._drain_told = False
        self._drained_ranks: set[int] = set()
        self.left = False
        self.drained = False
        self.fault = ""
        # -- counters
        self.step_count = 0
        self.token_count = 0
        self.taken_count = 0
        self._now_s = 0.0
        #: Durations of the last steps on this rank, launch to retirement as this thread saw them (s).
        self.step_times_s: deque[float] = deque(maxlen=2048)

    # -- the list -----------------------------------------------------------------------------------------------------

    def iterate(self, now_s: float) -> bool:
        """One round. Returns whether anything moved; if nothing did, the caller may wait a little."""
        self._now_s = now_s
        moved = self._take_new_work(now_s)
        moved |= self._transceiver.update_readiness(now_s)
        moved |= self._retire()
        moved |= self._schedule(now_s) if self._plans else self._mirror()
        moved |= self._run_layers()
        moved |= self._transceiver.progress(now_s)
        moved |= self._transceiver.vote_terminal(now_s)
        moved |= self._poll(now_s)
        moved |= self._hand_out(now_s)
        return moved

    @property
    def busy(self) -> bool:
        """A step, a round or a transfer of ours is open: idle waits are capped lower."""
        return bool(
            self._launched
            or self._ready
            or len(self.registry)
            or self._transceiver.busy
            or self._work.busy
            or self._link.unsent_count
        )

    # -- take new work ------------------------------------------------------------------------------------------------

    def _take_new_work(self, now_s: float) -> bool:
        arrived = self._link.poll()
        for frame in arrived:
            body = frame.body
            if isinstance(body, Work):
                self._work.deliver(body)
            elif isinstance(body, Schedule):
                self._ready.append(Step(body, frame.activations, failed=body.failed))
            elif isinstance(body, Result):
                self._results.append(body)
            elif isinstance(body, Answers) and self._desk is not None:
                self._desk.answer(body.answers)
            elif isinstance(body, Status):
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
        for request_id, outcome, reason, code in stops:
            self._author_stop(request_id, outcome, reason, code)
        if desk.draining and not self._drain_told:
            self._drain_told = True
            self._work.publish([Drain(desk.last_incarnation, max(desk.drain_deadline_s - now_s, 0.0))])

    def _apply(self, item: WorkItem, now_s: float) -> None:
        if isinstance(item, Admit):
            if item.target_rank in (-1, self.rank):
                sequence, _ = self.registry.prepare(item.request(self.role), now_s=now_s)
                self._transceiver.admit(sequence, now_s)
                self.taken_count += 1
        elif isinstance(item, Stop):
            self._stop(item)
        elif isinstance(item, Peer):
            self._transceiver.register_peer(item)
        elif isinstance(item, Drain):
            self.draining = True
            self.last_incarnation = item.last_incarnation
            self.drain_deadline_s = now_s + item.deadline_s
            self._transceiver.start_drain(item.last_incarnation)
            self._drop_revoked()
        elif isinstance(item, Leave):
            self.left = True
            self.drained = item.drained

    def _drop_revoked(self) -> None:
        """Selected for a step but not activated: the drain has just revoked their leases."""
        for sequence in list(self._active.values()):
            if sequence.state in PRE_ACTIVE_STATES and sequence.request.schedule_style == "generation_first":
                del self._active[sequence.request_id]

    def _author_stop(self, request_id: int, outcome: Outcome, reason: str, code: str) -> None:
        """Rank 0: end a request on every rank. On a pipeline no later schedule will name it."""
        sequence = self.registry.get(request_id)
        last_step_id = -1
        if self.role == "context":
            if sequence is None and self.registry.is_finished(request_id):
                return
            if sequence is not None:
                if sequence.state is State.QUIESCENT or not self.registry.end(sequence, outcome, reason, code):
                    return
                last_step_id = sequence.last_step_id
                self._active.pop(request_id, None)
        self._work.publish([stop_item(request_id, outcome, reason, code, last_step_id)])

    def _stop(self, item: Stop) -> None:
        sequence = self.registry.get(item.request_id)
        if sequence is None:
            if not self.registry.is_finished(item.request_id):
                self._transceiver.refuse(item.request_id, item.reason)
            return
        if sequence.state is State.QUIESCENT:
            return
        self.registry.end(sequence, Outcome(item.outcome), item.reason, item.error_code)
        if self.role == "context":
            sequence.last_step_id = max(sequence.last_step_id, item.last_step_id)
        self._active.pop(item.request_id, None)
        self._transceiver.stop(sequence)
        self._end_compute(sequence)
        if sequence.ended_early:
            self._answer_end(sequence)

    # -- schedule, mirror ---------------------------------------------------------------------------------------------

    def _schedule(self, now_s: float) -> bool:
        """Plan steps while the pipeline takes them."""
        planned = False
        while len(self._unanswered) < self._limits.steps_in_flight_max and len(self._ready) < LAUNCHED_MAX:
            self._select_candidates()
            chunks = plan_step(self._active.values(), self._limits)
            if not chunks:
                break
            schedule = make_schedule(self._next_step_id, chunks, self.registry)
            self._next_step_id += 1
            # What the schedule names, in its order, and nothing else is activated: before anybody can see the schedule.
            first = [self.registry.require(part.request_id) for part in schedule.parts if part.first]
            if first and self.role == "context":
                self._transceiver.activate(first)
            self._name(schedule)
            if self.role == "context":
                self._await_results(schedule)
            self._unanswered[schedule.step_id] = schedule
            self._ready.append(Step(schedule, None))
            planned = True
        return planned

    def _await_results(self, schedule: Schedule) -> None:
        """This rank is not quiescent for a request before every stage has computed what the schedule names."""
        for part in schedule.parts:
            sequence = self.registry.require(part.request_id)
            sequence.results_due += 1
            self.registry.open_leg(sequence, Leg.SCHEDULE)

    def _select_candidates(self) -> None:
        """Context rank 0: let requests have blocks, in canonical order, as far as the compute cap and the blocks go."""
        if self.role != "context" or not isinstance(self._blocks, PlannedBlocks):
            return
        for sequence in self._transceiver.candidates():
            if len(self._active) >= self._limits.active_max:
                return
            if sequence.request_id in self._active:
                continue
            if not self._blocks.acquire(sequence, sequence.request.prompt_count):
                # In order: a smaller request behind it does not overtake, so none starves.
                return
            sequence.launched = sequence.retired = sequence.cached_count
            self._active[sequence.request_id] = sequence

    def _mirror(self) -> bool:
        """Follow rank 0's schedules: activate what they name. One that needs blocks still held here waits."""
        moved = False
        for step in self._ready:
            if step.activated:
                continue
            if not self._mirror_one(step):
                break
            step.activated = True
            moved = True
        return moved

    def _mirror_one(self, step: Step) -> bool:
        blocks = self._blocks
        if not isinstance(blocks, FollowedBlocks):
            raise TypeError("a rank that mirrors schedules follows its blocks")
        first = [part for part in step.schedule.parts if part.first]
        tables = [(part, unpack_blocks(part.blocks)) for part in first]
        if not all(blocks.can_take(table, part.shared_count) for part, table in tables):
            return False
        sequences = []
        for part, table in tables:
            sequence = self.registry.require(part.request_id)
            blocks.take(sequence, table, part.shared_count)
            sequence.launched = sequence.retired = sequence.cached_count
            sequences.append(sequence)
        if sequences:
            self._transceiver.activate(sequences)
        self._name(step.schedule)
        return True

    def _name(self, schedule: Schedule) -> None:
        """The schedule names these sequences: their tokens are in a step from now on."""
        for part in schedule.parts:
            sequence = self.registry.require(part.request_id)
            sequence.launched = part.start + part.count
            sequence.last_step_id = max(sequence.last_step_id, schedule.step_id)
            sequence.steps_in_flight += 1
            self.registry.apply(sequence, Event.LAUNCHED)

    # -- run layers ---------------------------------------------------------------------------------------------------

    def _run_layers(self) -> bool:
        """Give the engine what is ready."""
        moved = False
        while self._ready and len(self._launched) < LAUNCHED_MAX:
            step = self._ready[0]
            if not self._plans and not step.activated:
                break
            self._ready.popleft()
            if not step.failed:
                step.handle = self._engine.launch(step_input(step, self.registry))
                step.launched_s = self._now_s
                self.step_count += 1
                self.token_count += sum(part.count for part in step.schedule.parts)
            step.activations = None
            self._launched.append(step)
            moved = True
        return moved

    def _retire(self) -> bool:
        """Take finished steps from the engine, pass their activations on, take results in."""
        moved = False
        while self._launched and self._launched[0].done():
            step = self._launched.popleft()
            if step.handle is not None:
                self.step_times_s.append(self._now_s - step.launched_s)
            output = self._output(step)
            self._pass_on(step, output)
            self._retired_step_id = step.schedule.step_id
            self._retire_parts(step, output)
            moved = True
        while self._results:
            self._take_result(self._results.popleft())
            moved = True
        return moved

    def _output(self, step: Step) -> StepOutput | None:
        if step.handle is None:
            return None
        try:
            return step.handle.result()
        except Exception as error:  # noqa: BLE001 - whatever the engine met ends this step's requests, with its words
            step.failed = f"rank {self.rank}: {type(error).__name__}: {error}"
            return None

    def _pass_on(self, step: Step, output: StepOutput | None) -> None:
        if not self._is_last:
            schedule = step.schedule
            if step.failed:
                schedule = Schedule(schedule.step_id, schedule.parts, step.failed)
            self._link.send(self.rank + 1, schedule, output.hidden if output is not None else None)
            return
        tokens: tuple[tuple[int, int], ...] = ()
        if output is not None and output.token_ids is not None:
            tokens = tuple(
                (part.request_id, int(token))
                for part, token in zip(step.schedule.parts, output.token_ids)
                if part.wants_token
            )
        result = Result(step.schedule.step_id, tokens, step.failed)
        if self._plans:
            self._results.append(result)
        else:
            self._link.send(0, result)

    def _retire_parts(self, step: Step, output: StepOutput | None) -> None:
        """Count down what compute still holds; a context prompt that is complete here is offered to its peer."""
        for index, part in enumerate(step.schedule.parts):
            sequence = self.registry.require(part.request_id)
            sequence.steps_in_flight -= 1
            sequence.retired = max(sequence.retired, part.start + part.count)
            if step.failed:
                self.registry.end(sequence, Outcome.FAILED, step.failed, wire.ENGINE_FAILED)
            elif self.role == "context" and part.wants_token and not sequence.ended_early:
                token = int(output.token_ids[index]) if output is not None and output.token_ids is not None else None
                self._transceiver.prompt_computed(sequence, token)
            self._end_compute(sequence)

    def _end_compute(self, sequence: Sequence) -> None:
        """End compute's leg of a sequence that is ending, once the last step that names it has retired here."""
        if sequence.state is not State.ENDING or sequence.steps_in_flight or Leg.COMPUTE not in sequence.legs:
            return
        if sequence.last_step_id > self._retired_step_id:
            return
        self.registry.end_leg(sequence, Leg.COMPUTE)
        self._transceiver.compute_ended(sequence)

    # -- results ------------------------------------------------------------------------------------------------------

    def _take_result(self, result: Result) -> None:
        schedule = self._unanswered.pop(result.step_id)
        if result.failed:
            for part in schedule.parts:
                self._fail(part.request_id, result.failed)
        for request_id, token in result.tokens:
            sequence = self.registry.get(request_id)
            if sequence is None or sequence.ended_early:
                continue
            if self.role == "context":
                self._prefilled(sequence, token)
            else:
                self._take_token(sequence, token)
        if self.role == "context":
            self._results_came(schedule)

    def _results_came(self, schedule: Schedule) -> None:
        for part in schedule.parts:
            sequence = self.registry.require(part.request_id)
            sequence.results_due -= 1
            if sequence.results_due == 0:
                self.registry.end_leg(sequence, Leg.SCHEDULE)
                self._transceiver.compute_ended(sequence)

    def _fail(self, request_id: int, message: str) -> None:
        if self.role == "context":
            sequence = self.registry.get(request_id)
            if sequence is not None and sequence.outcome is Outcome.FAILED:
                # This rank's own step failed: the outcome is set, the others do not know yet.
                self._active.pop(request_id, None)
                self._work.publish(
                    [stop_item(request_id, Outcome.FAILED, message, wire.ENGINE_FAILED, sequence.last_step_id)]
                )
            else:
                self._author_stop(request_id, Outcome.FAILED, message, wire.ENGINE_FAILED)
            return
        sequence = self.registry.get(request_id)
        if sequence is not None:
            self.registry.end(sequence, Outcome.FAILED, message, wire.ENGINE_FAILED)
            self._active.pop(request_id, None)
            self._answer_end(sequence)
            self._transceiver.stop(sequence)
            self._end_compute(sequence)

    def _prefilled(self, sequence: Sequence, token: int) -> None:
        """Context rank 0: the prompt is computed on every stage and its first token known."""
        request = sequence.request
        self._active.pop(request.request_id, None)
        if isinstance(self._blocks, PlannedBlocks):
            self._blocks.store_prefix(sequence)
        reason = finish_reason(token, 1, sampling_of(request), ())
        self._answers.append(
            Answer(request.request_id, (token,), reason or "", cached_tokens=sequence.cached_count, rank=self.rank)
        )
        if reason and request.schedule_style == "context_first":
            # The answer is complete: no peer will ask for this KV.
            self._author_stop(request.request_id, Outcome.COMPLETED, "no generation leg", "")

    def _arrived(self, event: Arrived) -> None:
        """Generation: the prompt's KV is here, with its first token."""
        sequence = self.registry.require(event.request_id)
        if event.first_token is None:
            self.registry.end(sequence, Outcome.FAILED, "no first token", wire.TRANSFER_FAILED)
            self._answer_end(sequence)
            self._transceiver.stop(sequence)
            return
        self.registry.open_leg(sequence, Leg.COMPUTE)
        if isinstance(self._blocks, PlannedBlocks):
            self._blocks.store_prefix(sequence)
        self._active[sequence.request_id] = sequence
        shown = sequence.request.schedule_style == "generation_first"
        self._take_token(sequence, event.first_token, shown=shown)

    def _take_token(self, sequence: Sequence, token: int, *, shown: bool = True) -> None:
        """Generation: one more token; perhaps the last."""
        request = sequence.request
        sequence.generated.append(token)
        reason = finish_reason(token, len(sequence.generated), sampling_of(request), ())
        if shown or reason:
            tokens = (token,) if shown else ()
            self._answers.append(Answer(request.request_id, tokens, reason or "", rank=self.rank))
        if reason:
            self._active.pop(request.request_id, None)
            self.registry.end(sequence, Outcome.COMPLETED)
            self.registry.apply(sequence, Event.FINISHED)
            self._end_compute(sequence)

    # -- poll ---------------------------------------------------------------------------------------------------------

    def _poll(self, now_s: float) -> bool:
        events = self._transceiver.poll(now_s)
        for event in events:
            if isinstance(event, Arrived):
                self._arrived(event)
            elif isinstance(event, TransferFailed):
                self._answer_end(event.sequence)
            elif isinstance(event, PeerReady):
                if self._desk is not None:
                    self._desk.admission_may_have_changed()
            elif isinstance(event, PeerCancelled):
                self._peer_cancelled(event.request_id)
            elif isinstance(event, Expired):
                self._author_stop(event.request_id, Outcome.FAILED, event.reason, wire.TRANSFER_FAILED)
            elif isinstance(event, Revoked):
                # Perhaps selected for a step, with blocks set aside, and not activated: it must not be scheduled any more.
                self._active.pop(event.sequence.request_id, None)
                self._answer_end(event.sequence)
            elif isinstance(event, Ended):
                self._ended(event)
            elif isinstance(event, Fault) and not self.fault:
                self.fault = event.diagnosis
                self._on_fault(event.diagnosis)
        return bool(events)

    def _ended(self, event: Ended) -> None:
        """Terminal on this rank. A client that heard nothing yet (revoked by a drain, say) hears it now."""
        self._active.pop(event.request_id, None)
        if self._desk is None:
            return
        self._desk.admission_may_have_changed()
        unheard = self._desk.client(event.request_id) is not None and event.outcome is not Outcome.COMPLETED
        if self.role == "context" and unheard:
            reason = "cancelled" if event.outcome is Outcome.CANCELLED else "error"
            code = event.error_code or (wire.CANCELLED if event.outcome is Outcome.CANCELLED else wire.INTERNAL)
            words = event.reason or "ended before it was computed"
            self._answers.append(Answer(event.request_id, (), reason, code, words))

    def _peer_cancelled(self, request_id: int) -> None:
        """The receiver gave a request up: rank 0 stops it everywhere."""
        if self._desk is not None:
            self._desk.abort(request_id, "the generation instance gave it up")
        else:
            self._link.send(0, Status(self.rank, b"", ((request_id, wire.CANCELLED, "the receiver gave it up"),)))

    def _take_status(self, status: Status) -> None:
        if self._desk is None:
            return
        for request_id, _, message in status.failed_requests:
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
        cancelled = sequence.outcome is Outcome.CANCELLED
        self._answers.append(
            Answer(
                sequence.request_id,
                (),
                "cancelled" if cancelled else "error",
                sequence.error_code or (wire.CANCELLED if cancelled else wire.INTERNAL),
                sequence.reason,
                rank=self.rank,
            )
        )

    def _hand_out(self, now_s: float) -> bool:
        """Results of this iteration leave in one piece; then what a drain still waits for."""
        answers, self._answers = self._answers, []
        if self._desk is not None:
            if answers:
                self._desk.answer(answers)
            handed = self._desk.hand_out()
        else:
            handed = bool(answers)
            if answers:
                self._link.send(0, Answers(tuple(answers)))
        if self._transceiver.lockstep and self._transceiver.drained:
            # Every poll is a collective, so every rank sees the proof in the same one and leaves after it.
            self.left = self.drained = True
        elif self.draining and not self.left:
            self._progress_drain(now_s)
        return handed

    def _progress_drain(self, now_s: float) -> None:
        quiet = not len(self.registry) and not self._launched and not self._ready and self._transceiver.drained
        if self._transceiver.lockstep:
            return
        if self._desk is None:
            if quiet and not self._drain_told:
                self._drain_told = True
                self._link.send(0, Status(self.rank, self._statistics(), drained=True))
            return
        if quiet:
            self._drained_ranks.add(self.rank)
        complete = len(self._drained_ranks) == self._link.size and not self._unanswered
        if complete or now_s >= self.drain_deadline_s:
            self._work.publish([Leave(complete)])
            for item in self._work.take():
                self._apply(item, now_s)
