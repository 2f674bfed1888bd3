"""Computing answers on one attention-DP rank: every sequence adds one token per step, so a step is a table of columns.

A row is a sequence whose KV has arrived; rows stand in the order of arrival. A step takes the first rows that fit. What a
step costs this thread is a handful of array operations, whatever the number of rows; only rows that begin or end in it are
touched one by one.

A prompt without a context leg is computed here, in chunks behind the rows of a step; its first token makes it a row.

One step is in flight at a time. Rows of a step in flight stay until it has retired, also where their request was stopped
meanwhile: the engine reads their blocks.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from meta_executor import wire
from meta_executor.engine.base import Engine, SamplingParams, StepHandle, StepInput, Told
from meta_executor.engine.sampling import finish_reason
from meta_executor.executor.links import Float32Array
from meta_executor.executor.memory import PlannedBlocks
from meta_executor.executor.messages import Result, Schedule
from meta_executor.executor.ownership import Event, Leg, Outcome, Registry, Sequence
from meta_executor.executor.request import AnswerBook, Notice
from meta_executor.executor.scheduler import Chunk, StepLimits, plan_step
from meta_executor.executor.steps import output_of, prompt_part
from meta_executor.executor.transceiver import Transceiver
from meta_executor.wire import TokenLogprobs

_ROWS_MIN = 64
#: Rows whose blocks an iteration gives back (count): it costs more than all else in it, and many answers may end in one step.
GIVEN_BACK_PER_TURN_MAX = 4


class RowTable:
    """Sequences that are being answered, in columns.

    Attributes:
        count: Rows in use.
        request_ids: int64, shape (rows,).
        last_tokens: Newest token of each, int32.
        known: Tokens whose value is known, prompt and answer (count), int64.
        limits: ``known`` at which the answer is complete, int64.
        floors: ``known`` up to which no token ends it, int64.
        stops: Tokens that end the answer, int32, shape (rows, stops), padded with -1.
        tables: KV blocks, int64, shape (rows, width), padded with -1.
        told: What each has so far, kept where its sampling changes logits.
    """

    def __init__(self) -> None:
        self.count = 0
        self.sequences: list[Sequence] = []
        self.sampling: list[SamplingParams] = []
        self.request_ids: npt.NDArray[np.int64] = np.zeros(_ROWS_MIN, np.int64)
        self.last_tokens: npt.NDArray[np.int32] = np.zeros(_ROWS_MIN, np.int32)
        self.known: npt.NDArray[np.int64] = np.zeros(_ROWS_MIN, np.int64)
        self.limits: npt.NDArray[np.int64] = np.zeros(_ROWS_MIN, np.int64)
        self.floors: npt.NDArray[np.int64] = np.zeros(_ROWS_MIN, np.int64)
        self.told: list[Told | None] = []
        self.stops: npt.NDArray[np.int32] = np.full((_ROWS_MIN, 1), -1, np.int32)
        self.tables: npt.NDArray[np.int64] = np.full((_ROWS_MIN, 1), -1, np.int64)

    def add(self, sequence: Sequence, token: int) -> None:
        """A row at the end. ``token``: the newest one, already part of the answer."""
        request = sequence.request
        row, stops = self.count, request.sampling.stop_token_ids
        self._fit(row + 1, len(stops), len(sequence.block_ids))
        self.request_ids[row] = request.request_id
        self.last_tokens[row] = token
        self.known[row] = request.prompt_count + 1
        self.limits[row] = request.prompt_count + request.sampling.max_tokens
        self.floors[row] = request.prompt_count + request.sampling.min_tokens
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops
        self.tables[row] = -1
        self.tables[row, : len(sequence.block_ids)] = sequence.block_ids
        self.sequences.append(sequence)
        self.sampling.append(request.sampling)
        self.told.append(Told(request.token_ids, [token]) if request.sampling.changes_logits else None)
        self.count += 1

    def tell(self, tokens: npt.NDArray[np.int32]) -> None:
        """The leading rows' newest tokens, to those that remember."""
        for told, token in zip(self.told[: len(tokens)], tokens.tolist()):
            if told is not None:
                told.answer.append(token)

    def remove(self, rows: list[int]) -> None:
        """Take rows out; the others keep their order. ``rows`` ascending."""
        begin, count = rows[0], self.count
        gone = set(rows)
        kept = np.array([row for row in range(begin, count) if row not in gone], np.int64)
        self.count = count - len(rows)
        for column in (self.request_ids, self.last_tokens, self.known, self.limits, self.floors, self.stops,
                       self.tables):  # fmt: skip
            column[begin : self.count] = column[kept]
        for row in reversed(rows):
            del self.sequences[row], self.sampling[row], self.told[row]

    def row_of(self, request_id: int) -> int:
        """The row of a request; -1: it has none."""
        found = np.flatnonzero(self.request_ids[: self.count] == request_id)
        return int(found[0]) if len(found) else -1

    def _fit(self, rows: int, stops: int, blocks: int) -> None:
        capacity = len(self.request_ids)
        if rows > capacity:
            capacity *= 2
            for name in ("request_ids", "last_tokens", "known", "limits", "floors"):
                setattr(self, name, np.resize(getattr(self, name), capacity))
        self.stops = _widened(self.stops, capacity, stops)
        self.tables = _widened(self.tables, capacity, blocks)


_Integer = TypeVar("_Integer", np.int32, np.int64)


def _widened(table: npt.NDArray[_Integer], rows: int, width: int) -> npt.NDArray[_Integer]:
    if rows <= table.shape[0] and width <= table.shape[1]:
        return table
    wider = np.full((rows, max(width, table.shape[1])), -1, table.dtype)
    wider[: table.shape[0], : table.shape[1]] = table
    return wider


def _with_chunks(step: StepInput, chunks: tuple[tuple[Sequence, Chunk], ...]) -> StepInput:
    """A step of rows, with chunks of prompts behind them."""
    prompts = StepInput.of(step.step_id, (prompt_part(sequence, chunk) for sequence, chunk in chunks))
    if not step.sequence_count:
        return prompts
    width = max(step.block_tables.shape[1], prompts.block_tables.shape[1])
    tables = np.full((step.sequence_count + prompts.sequence_count, width), -1, np.int64)
    tables[: step.sequence_count, : step.block_tables.shape[1]] = step.block_tables
    tables[step.sequence_count :, : prompts.block_tables.shape[1]] = prompts.block_tables
    return StepInput(
        step_id=step.step_id,
        request_ids=np.concatenate([step.request_ids, prompts.request_ids]),
        token_ids=np.concatenate([step.token_ids, prompts.token_ids]),
        counts=np.concatenate([step.counts, prompts.counts]),
        starts=np.concatenate([step.starts, prompts.starts]),
        block_tables=tables,
        sampling=(*step.sampling, *prompts.sampling),
        told=(*step.told, *prompts.told),
        scored={step.sequence_count + index: count for index, count in prompts.scored.items()},
    )


@dataclass(slots=True)
class _Flight:
    """The step that the engine has: the first ``count`` rows, then chunks of prompts."""

    handle: StepHandle
    count: int
    launched_s: float
    chunks: tuple[tuple[Sequence, Chunk], ...] = ()


class DecodeCompute:
    """One attention-DP rank of a generation instance.

    Args:
        rank: This rank.
        engine: The whole model.
        registry: This rank's requests.
        blocks: This rank's KV blocks.
        limits: What fits.
        transceiver: The only owner of transfer state.
        answers: Collects what is handed out.
        wake: Called by the engine's thread when a step has ended.
    """

    def __init__(
        self,
        *,
        rank: int,
        engine: Engine,
        registry: Registry,
        blocks: PlannedBlocks,
        limits: StepLimits,
        transceiver: Transceiver,
        answers: AnswerBook,
        wake: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._engine = engine
        self._registry = registry
        self._blocks = blocks
        self._limits = limits
        self._rows_max = min(limits.sequences_max, limits.tokens_max)
        self._transceiver = transceiver
        self._answers = answers
        self._wake = wake
        self._rows = RowTable()
        #: Leading rows that were in a step already (count).
        self._named = 0
        self._flight: _Flight | None = None
        #: Prompts that are computed here, in order of arrival.
        self._prompts: deque[Sequence] = deque()
        self.prompt_count = 0
        #: Stopped while their rows were in flight.
        self._stopped: set[int] = set()
        #: Rows that retired steps ended: the engine has its next step before their blocks are given back.
        self._ended: deque[Sequence] = deque()
        #: Of the leading rows, until rows come or go.
        self._sampling: tuple[SamplingParams, ...] = ()
        self._told: tuple[Told | None, ...] = ()
        self._remembers = False
        self._next_step_id = 0
        self.step_count = 0
        self.token_count = 0
        #: Durations of the last steps on this rank, launch to retirement as this thread saw them (s).
        self.step_times_s: deque[float] = deque(maxlen=2048)

    # -- what the loop tells ------------------------------------------------------------------------------------------

    def take_schedule(self, schedule: Schedule, activations: Float32Array | None) -> None:
        """Every rank plans for itself here."""
        raise TypeError(f"a schedule (step {schedule.step_id}) came to a rank that plans for itself")

    def take_result(self, result: Result) -> None:
        """See :meth:`take_schedule`."""
        raise TypeError(f"a result (step {result.step_id}) came to a rank that plans for itself")

    def arrived(self, sequence: Sequence, first_token: int) -> None:
        """The prompt's KV is here, with its first token: it computes from now on, unless that token ends the answer."""
        request = sequence.request
        self._registry.open_leg(sequence, Leg.COMPUTE)
        self._blocks.store_prefix(sequence)
        if request.generation_first:
            self._answers.token(request.request_id, first_token)
        self._first_token(sequence, first_token)

    def own_prompt(self, sequence: Sequence) -> None:
        """Its blocks are owned: it is computed from now on."""
        self._registry.open_leg(sequence, Leg.COMPUTE)
        self._prompts.append(sequence)

    def stopped(self, sequence: Sequence) -> None:
        """Its outcome is set: no later step has it; compute's leg ends with the step in flight."""
        row = self._rows.row_of(sequence.request_id)
        if row < 0:
            if sequence in self._prompts:
                self._prompts.remove(sequence)
            if self._flight is not None and any(flown is sequence for flown, _ in self._flight.chunks):
                self._stopped.add(sequence.request_id)
            else:
                self._end_compute(sequence)
        elif self._flight is not None and row < self._flight.count:
            self._stopped.add(sequence.request_id)
        else:
            self._remove([row])
            self._end_compute(sequence)

    def forget(self, request_id: int) -> None:
        """A record that is gone has no row: rows go before their record does."""

    def drop_revoked(self) -> None:
        """There are no leases here."""

    def author_stop(self, request_id: int, outcome: Outcome, reason: str, code: str) -> None:
        """Stops are authored by the loop of rank 0, for whichever rank holds the request."""
        raise TypeError(f"request {request_id}: a stop is published by the loop here")

    @property
    def busy(self) -> bool:
        """A step is in flight, rows or prompts wait for one, or blocks are to be given back."""
        return self._flight is not None or self._rows.count > 0 or bool(self._prompts) or bool(self._ended)

    @property
    def stepping(self) -> bool:
        """The engine has a step."""
        return self._flight is not None

    # -- a step -------------------------------------------------------------------------------------------------------

    def schedule(self) -> bool:
        """The first rows are the plan."""
        return False

    def run_layers(self, now_s: float) -> bool:
        """Launch a step of the first rows and of prompts, if none is in flight; then give back some of what earlier ones ended.
        Returns whether one was launched, or more is to be given back."""
        launched = self._launch(now_s)
        self._give_back(GIVEN_BACK_PER_TURN_MAX)
        return launched or bool(self._ended)

    def _give_back(self, count_max: int) -> None:
        for _ in range(min(count_max, len(self._ended))):
            self._end_compute(self._ended.popleft())

    def _launch(self, now_s: float) -> bool:
        rows = self._rows
        # A prompt always has a place: rows that fill every step would keep it out for as long as they live.
        count = min(rows.count, self._rows_max - bool(self._prompts))
        if self._flight is not None or (count == 0 and not self._prompts):
            return False
        for sequence in rows.sequences[self._named : count]:
            self._registry.apply(sequence, Event.LAUNCHED)
        self._named = max(self._named, count)
        if len(self._sampling) != count:
            self._sampling = tuple(rows.sampling[:count])
            self._told = tuple(rows.told[:count])
            self._remembers = any(told is not None for told in self._told)
        step = StepInput(
            step_id=self._next_step_id,
            request_ids=rows.request_ids[:count],
            token_ids=rows.last_tokens[:count].copy(),
            counts=np.ones(count, np.int64),
            starts=rows.known[:count] - 1,
            block_tables=rows.tables[:count],
            sampling=self._sampling,
            told=self._told,
        )
        chunks = self._plan_chunks(count) if self._prompts else ()
        if chunks:
            step = _with_chunks(step, chunks)
        self._next_step_id += 1
        handle = self._engine.launch(step)
        handle.add_done_callback(self._wake)
        self._flight = _Flight(handle, count, now_s, chunks)
        self.step_count += 1
        self.token_count += step.token_count
        return True

    def _plan_chunks(self, row_count: int) -> tuple[tuple[Sequence, Chunk], ...]:
        """What of the waiting prompts fits behind so many rows; it is in a step from now on."""
        limits = dataclasses.replace(
            self._limits,
            sequences_max=self._limits.sequences_max - row_count,
            tokens_max=self._limits.tokens_max - row_count,
        )
        chunks = []
        for chunk in plan_step(self._prompts, limits):
            sequence = self._registry.require(chunk.request_id)
            sequence.launched = chunk.start + chunk.count
            self._registry.apply(sequence, Event.LAUNCHED)
            chunks.append((sequence, chunk))
        return tuple(chunks)

    def retire(self, now_s: float) -> bool:
        """Take a finished step's tokens; take out the rows that it ended. Returns whether a step was taken."""
        flight = self._flight
        if flight is None or not flight.handle.done():
            return False
        self._flight = None
        self.step_times_s.append(now_s - flight.launched_s)
        output, failed = output_of(flight.handle, self._rank)
        if output is None or output.token_ids is None:
            self._fail(flight, failed or f"rank {self._rank}: the step made no tokens")
            return True
        made = np.asarray(output.token_ids, np.int32)
        if flight.count:
            self._retire_rows(flight.count, made[: flight.count], output.logprobs)
        for place, (sequence, chunk) in enumerate(flight.chunks, flight.count):
            told = output.logprobs.get(place)
            sequence.prompt_logprobs += output.prompt_logprobs.get(place, ())
            self._retire_chunk(sequence, chunk, int(made[place]), () if told is None else (told,))
        return True

    def _retire_rows(self, count: int, tokens: npt.NDArray[np.int32], logprobs: Mapping[int, TokenLogprobs]) -> None:
        """The leading rows have a token more; end those that it ended."""
        rows = self._rows
        rows.last_tokens[:count] = tokens
        rows.known[:count] += 1
        if self._remembers:
            rows.tell(tokens)
        stopping = (rows.stops[:count] == tokens[:, None]).any(axis=1) & (rows.known[:count] > rows.floors[:count])
        ended = stopping | (rows.known[:count] >= rows.limits[:count])
        # The engine or the hand-over may still look at the columns when rows move up.
        request_ids = rows.request_ids[:count].copy()
        if self._stopped:
            cut = np.isin(request_ids, np.fromiter(self._stopped, np.int64))
            self._answers.step(request_ids[~cut], tokens[~cut])
            ended |= cut
        else:
            self._answers.step(request_ids, tokens)
        for index, one in logprobs.items():
            if index < count and int(request_ids[index]) not in self._stopped:
                self._answers.notice(Notice(int(request_ids[index]), rank=self._rank, logprobs=(one,)))
        if ended.any():
            self._end_rows([int(row) for row in np.flatnonzero(ended)], stopping)

    def _retire_chunk(self, sequence: Sequence, chunk: Chunk, token: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """A part of a prompt is computed; with its last one the first token is known."""
        sequence.retired = chunk.start + chunk.count
        if sequence.request_id in self._stopped:
            self._stopped.discard(sequence.request_id)
            self._end_compute(sequence)
        elif chunk.wants_token:
            self._prompts.remove(sequence)
            self.prompt_count += 1
            self._blocks.store_prefix(sequence)
            self._answers.token(sequence.request_id, token)
            self._answers.notice(
                Notice(
                    sequence.request_id,
                    cached_tokens=sequence.cached_count,
                    rank=self._rank,
                    logprobs=logprobs,
                    prompt_logprobs=sequence.prompt_logprobs,
                )
            )
            self._first_token(sequence, token)

    def _first_token(self, sequence: Sequence, token: int) -> None:
        """It becomes a row, unless its first token ends the answer."""
        reason = finish_reason(token, 1, sequence.request.sampling, ())
        if reason:
            self._finish(sequence, reason)
            self._end_compute(sequence)
            return
        self._rows.add(sequence, token)
        self._sampling = ()

    def _end_rows(self, ended: list[int], stopping: npt.NDArray[np.bool_]) -> None:
        """Rows whose answer is complete, or whose request was stopped while they were in flight."""
        sequences = [self._rows.sequences[row] for row in ended]
        self._remove(ended)
        for row, sequence in zip(ended, sequences):
            if sequence.request_id in self._stopped:
                self._stopped.discard(sequence.request_id)
            else:
                self._finish(sequence, "stop" if stopping[row] else "length")
            self._ended.append(sequence)

    def _fail(self, flight: _Flight, message: str) -> None:
        """The engine could not compute the step: its requests end with the engine's words."""
        chunked = [sequence for sequence, _ in flight.chunks]
        sequences = [*self._rows.sequences[: flight.count], *chunked]
        self._remove(list(range(flight.count)))
        for sequence in chunked:
            if sequence in self._prompts:
                self._prompts.remove(sequence)
        for sequence in sequences:
            self._stopped.discard(sequence.request_id)
            if self._registry.end(sequence, Outcome.FAILED, message, wire.ENGINE_FAILED):
                self._answers.notice(Notice(sequence.request_id, "error", wire.ENGINE_FAILED, message, rank=self._rank))
                sequence.answered_end = True
                self._transceiver.stop(sequence)
            self._end_compute(sequence)

    def _finish(self, sequence: Sequence, reason: str) -> None:
        """The last token is known: nothing of it is computed any more."""
        self._answers.notice(Notice(sequence.request_id, reason, rank=self._rank))
        self._registry.end(sequence, Outcome.COMPLETED)
        self._registry.apply(sequence, Event.FINISHED)
        sequence.answered_end = True

    def _end_compute(self, sequence: Sequence) -> None:
        if self._registry.get(sequence.request_id) is sequence and self._registry.end_leg(sequence, Leg.COMPUTE):
            self._transceiver.compute_ended(sequence)

    def _remove(self, rows: list[int]) -> None:
        if rows:
            self._named -= sum(row < self._named for row in rows)
            self._rows.remove(rows)
            self._sampling = ()
