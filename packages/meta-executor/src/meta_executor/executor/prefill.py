"""Computing prompts on one stage of a pipeline: rank 0 plans steps, the others mirror them.

A schedule leaves a rank with the activations that belong to it, and waits on a follower until that follower has heard that
the blocks it overwrites were given back. What the schedule names, in its order, and nothing else is activated: on rank 0
before anybody can see the schedule.

A finished step is retired and its successor launched before anything else is done with its results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items

from meta_executor import wire
from meta_executor.engine.base import Engine, StepOutput
from meta_executor.engine.sampling import finish_reason
from meta_executor.executor.links import Float32Array, Link
from meta_executor.executor.memory import FollowedBlocks, PlannedBlocks
from meta_executor.executor.messages import Part, Result, Schedule, Stop, WorkItem, unpack_blocks
from meta_executor.executor.ownership import PRE_ACTIVE_STATES, Event, Leg, Outcome, Registry, Sequence, State
from meta_executor.executor.request import AnswerBook, Notice
from meta_executor.executor.scheduler import StepLimits, plan_step
from meta_executor.executor.steps import LAUNCHED_MAX, Step, first_of, make_schedule, step_input
from meta_executor.executor.transceiver import SendingTransceiver
from meta_executor.wire import TokenLogprobs


class PrefillCompute:
    """One stage of a context instance.

    Args:
        rank, stage_count: Place in the pipeline.
        engine: This rank's stage.
        registry: This rank's requests.
        blocks: This rank's KV blocks: planned on rank 0, followed on the others.
        limits: What fits.
        link: Frames to other ranks.
        transceiver: The only owner of transfer state.
        answers: Collects what rank 0 hands out.
        publish: Rank 0: decides new work for every rank.
        wake: Called by the engine's thread when a step has ended.
    """

    def __init__(
        self,
        *,
        rank: int,
        stage_count: int,
        engine: Engine,
        registry: Registry,
        blocks: PlannedBlocks | FollowedBlocks,
        limits: StepLimits,
        link: Link,
        transceiver: SendingTransceiver,
        answers: AnswerBook,
        publish: Callable[[Items[WorkItem]], None],
        wake: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._is_last = rank == stage_count - 1
        self._engine = engine
        self._registry = registry
        self._blocks = blocks
        self._limits = limits
        self._link = link
        self._transceiver = transceiver
        self._answers = answers
        self._publish = publish
        self._wake = wake
        #: Rank 0: sequences that may be in a step, in order of activation.
        self._active: dict[int, Sequence] = {}
        #: Schedules that this rank has yet to launch, and those it has launched, in order.
        self._ready: deque[Step] = deque()
        self._launched: deque[Step] = deque()
        #: Rank 0: steps whose result has not come back.
        self._unanswered: dict[int, Schedule] = {}
        self._results: deque[Result] = deque()
        self._next_step_id = 0
        self._retired_step_id = -1
        self.step_count = 0
        self.token_count = 0
        self.prompt_count = 0
        #: Durations of the last steps on this rank, launch to retirement as this thread saw them (s).
        self.step_times_s: deque[float] = deque(maxlen=2048)

    # -- what the loop tells ------------------------------------------------------------------------------------------

    def take_schedule(self, schedule: Schedule, activations: Float32Array | None) -> None:
        """A schedule has come from the stage before."""
        self._ready.append(Step(schedule, activations, failed=schedule.failed))

    def take_result(self, result: Result) -> None:
        """Rank 0: the last stage has ended a step."""
        self._results.append(result)

    def arrived(self, sequence: Sequence, first_token: int) -> None:
        """KV arrives at generation instances only."""
        raise TypeError(f"{sequence.describe()}: KV arrived at a context instance")

    def own_prompt(self, sequence: Sequence) -> None:
        """Prompts come by a schedule here."""
        raise TypeError(f"{sequence.describe()}: a prompt without a context leg at a context instance")

    def stopped(self, sequence: Sequence) -> None:
        """Its outcome is set: no later plan names it; compute's leg ends with the last step that does."""
        self._active.pop(sequence.request_id, None)
        self._end_compute(sequence)

    def forget(self, request_id: int) -> None:
        """It must not be chosen for a step any more (ended, or its lease was taken back)."""
        self._active.pop(request_id, None)

    def drop_revoked(self) -> None:
        """Selected for a step but not activated: a drain has just revoked their leases."""
        for sequence in list(self._active.values()):
            if sequence.state in PRE_ACTIVE_STATES and sequence.request.generation_first:
                del self._active[sequence.request_id]

    def author_stop(self, request_id: int, outcome: Outcome, reason: str, code: str) -> None:
        """Rank 0: end a request on every rank. No later schedule will name it."""
        sequence = self._registry.get(request_id)
        last_step_id = -1
        if sequence is None and self._registry.is_finished(request_id):
            return
        if sequence is not None:
            # Quiescent here, it may still wait on another rank for a receiver that does not come there.
            if sequence.state is not State.QUIESCENT and not self._registry.end(sequence, outcome, reason, code):
                return
            last_step_id = sequence.last_step_id
            self._active.pop(request_id, None)
        self._publish([Stop(request_id, outcome, reason, code, last_step_id)])

    @property
    def busy(self) -> bool:
        """Steps are ready, launched or unanswered."""
        return bool(self._launched or self._ready or self._unanswered)

    @property
    def stepping(self) -> bool:
        """The engine has a step."""
        return bool(self._launched)

    # -- schedule, mirror ---------------------------------------------------------------------------------------------

    def schedule(self) -> bool:
        """Rank 0 plans steps while the pipeline takes them; the others follow. Returns whether anything moved."""
        return self._plan() if self._rank == 0 else self._mirror()

    def _plan(self) -> bool:
        planned = False
        while len(self._unanswered) < self._limits.steps_in_flight_max and len(self._ready) < LAUNCHED_MAX:
            self._select_candidates()
            chunks = plan_step(self._active.values(), self._limits) if self._active else ()
            if not chunks:
                break
            schedule = make_schedule(self._next_step_id, chunks, self._registry)
            self._next_step_id += 1
            first = [self._registry.require(part.request_id) for part in schedule.parts if part.first]
            if first:
                self._transceiver.activate(first)
            self._name(schedule)
            self._await_results(schedule)
            self._unanswered[schedule.step_id] = schedule
            self._ready.append(Step(schedule, None, activated=True))
            planned = True
        return planned

    def _await_results(self, schedule: Schedule) -> None:
        """Rank 0 is not quiescent for a request before every stage has computed what the schedule names."""
        for part in schedule.parts:
            sequence = self._registry.require(part.request_id)
            sequence.results_due += 1
            self._registry.open_leg(sequence, Leg.SCHEDULE)

    def _select_candidates(self) -> None:
        """Let requests have blocks, in canonical order, as far as the compute cap and the blocks go."""
        if not isinstance(self._blocks, PlannedBlocks):
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
        """Activate what rank 0's schedules name. One that needs blocks still held here waits."""
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
        tables: list[tuple[Part, list[int]]] = [
            (part, unpack_blocks(part.blocks)) for part in step.schedule.parts if part.first
        ]
        if not all(blocks.can_take(table, part.shared_count) for part, table in tables):
            return False
        sequences = []
        for part, table in tables:
            sequence = self._registry.require(part.request_id)
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
            sequence = self._registry.require(part.request_id)
            sequence.launched = part.start + part.count
            sequence.last_step_id = max(sequence.last_step_id, schedule.step_id)
            sequence.steps_in_flight += 1
            self._registry.apply(sequence, Event.LAUNCHED)

    # -- run layers, retire -------------------------------------------------------------------------------------------

    def run_layers(self, now_s: float) -> bool:
        """Give the engine what is ready. Returns whether it got anything."""
        moved = False
        while self._ready and len(self._launched) < LAUNCHED_MAX and self._ready[0].activated:
            step = self._ready.popleft()
            if not step.failed:
                step.handle = self._engine.launch(step_input(step, self._registry))
                step.handle.add_done_callback(self._wake)
                step.launched_s = now_s
                self.step_count += 1
                self.token_count += sum(part.count for part in step.schedule.parts)
            step.activations = None
            self._launched.append(step)
            moved = True
        return moved

    def retire(self, now_s: float) -> bool:
        """Take finished steps from the engine, pass their activations on, take results in."""
        moved = False
        while self._launched and self._launched[0].done():
            step = self._launched.popleft()
            if step.handle is not None:
                self.step_times_s.append(now_s - step.launched_s)
            output = step.output(self._rank)
            self._pass_on(step, output)
            self._retired_step_id = step.schedule.step_id
            self._retire_parts(step, output)
            moved = True
        while self._results:
            self._answered(self._results.popleft())
            moved = True
        return moved

    def _pass_on(self, step: Step, output: StepOutput | None) -> None:
        schedule = step.schedule
        if not self._is_last:
            if step.failed:
                schedule = Schedule(schedule.step_id, schedule.parts, step.failed)
            self._link.send(self._rank + 1, schedule, output.hidden if output is not None else None)
            return
        made = ((part.request_id, first_of(step, output, index)) for index, part in enumerate(schedule.parts))
        tokens = tuple((request_id, token) for request_id, token in made if token is not None)
        told = output.logprobs.items() if output is not None else ()
        logprobs = tuple((schedule.parts[index].request_id, one) for index, one in told)
        scored = output.prompt_logprobs.items() if output is not None else ()
        prompts = tuple((schedule.parts[index].request_id, several) for index, several in scored)
        result = Result(schedule.step_id, tokens, step.failed, logprobs, prompts)
        if self._rank == 0:
            self._results.append(result)
        else:
            self._link.send(0, result)

    def _retire_parts(self, step: Step, output: StepOutput | None) -> None:
        """Count down what compute still holds; a prompt that is complete here is offered to its peer."""
        for index, part in enumerate(step.schedule.parts):
            sequence = self._registry.require(part.request_id)
            sequence.steps_in_flight -= 1
            sequence.retired = max(sequence.retired, part.start + part.count)
            if step.failed:
                self._registry.end(sequence, Outcome.FAILED, step.failed, wire.ENGINE_FAILED)
            elif part.wants_token and not sequence.ended_early:
                self._transceiver.prompt_computed(sequence, first_of(step, output, index))
            self._end_compute(sequence)

    def _end_compute(self, sequence: Sequence) -> None:
        """End compute's leg of a sequence that is ending, once the last step that names it has retired here."""
        if sequence.state is not State.ENDING or sequence.steps_in_flight or Leg.COMPUTE not in sequence.legs:
            return
        if sequence.last_step_id > self._retired_step_id:
            return
        self._registry.end_leg(sequence, Leg.COMPUTE)
        self._transceiver.compute_ended(sequence)

    # -- results ------------------------------------------------------------------------------------------------------

    def _answered(self, result: Result) -> None:
        """Rank 0: every stage has computed this step."""
        schedule = self._unanswered.pop(result.step_id)
        if result.failed:
            for part in schedule.parts:
                self._fail(part.request_id, result.failed)
        for request_id, several in result.prompt_logprobs:
            sequence = self._registry.get(request_id)
            if sequence is not None:
                sequence.prompt_logprobs += several
        for request_id, token in result.tokens:
            sequence = self._registry.get(request_id)
            if sequence is not None and not sequence.ended_early:
                self._prefilled(sequence, token, tuple(one for whose, one in result.logprobs if whose == request_id))
        for part in schedule.parts:
            sequence = self._registry.require(part.request_id)
            sequence.results_due -= 1
            if sequence.results_due == 0:
                self._registry.end_leg(sequence, Leg.SCHEDULE)
                self._transceiver.compute_ended(sequence)

    def _fail(self, request_id: int, message: str) -> None:
        sequence = self._registry.get(request_id)
        if sequence is not None and sequence.outcome is Outcome.FAILED:
            # This rank's own step failed: the outcome is set, the others do not know yet.
            self._active.pop(request_id, None)
            self._publish([Stop(request_id, Outcome.FAILED, message, wire.ENGINE_FAILED, sequence.last_step_id)])
        else:
            self.author_stop(request_id, Outcome.FAILED, message, wire.ENGINE_FAILED)

    def _prefilled(self, sequence: Sequence, token: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """The prompt is computed on every stage and its first token known."""
        request = sequence.request
        self._active.pop(request.request_id, None)
        if isinstance(self._blocks, PlannedBlocks):
            self._blocks.store_prefix(sequence)
        reason = finish_reason(token, 1, request.sampling, ())
        self._answers.token(request.request_id, token)
        self._answers.notice(
            Notice(
                request.request_id,
                reason or "",
                cached_tokens=sequence.cached_count,
                rank=self._rank,
                logprobs=logprobs,
                prompt_logprobs=sequence.prompt_logprobs,
            )
        )
        if reason and not request.generation_first:
            # The answer is complete: no peer will ask for this KV.
            self.author_stop(request.request_id, Outcome.COMPLETED, "no generation leg", "")
