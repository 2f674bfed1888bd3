"""Rows against an oracle that handles one sequence at a time, and what ends a row."""

from __future__ import annotations

import random

import numpy as np
import pytest

from meta_executor.engine.base import SamplingParams, StepInput, StepOutput
from meta_executor.engine.kv_pool import BlockPool
from meta_executor.executor.decode import GIVEN_BACK_PER_TURN_MAX, DecodeCompute, RowTable
from meta_executor.executor.memory import PlannedBlocks
from meta_executor.executor.ownership import Event, Outcome, Registry, Sequence, State
from meta_executor.executor.request import AnswerBook, Request
from meta_executor.executor.scheduler import StepLimits
from meta_executor.wire import TokenLogprobs


def token_of(request_id: int, position: int) -> int:
    """The oracle's model: a token for each place of each request."""
    return (request_id * 31 + position * 7) % 50


class Engine:
    """Ends a step when it is told to; checks that what it gets belongs together."""

    def __init__(self) -> None:
        self.step: StepInput | None = None
        self.ended = False
        self.fail = False
        self.logprobs: dict[int, TokenLogprobs] = {}

    def launch(self, step: StepInput) -> Engine:
        self.step, self.ended = step, False
        for request_id, token, start, table in zip(step.request_ids, step.token_ids, step.starts, step.block_tables):
            assert token == token_of(int(request_id), int(start))
            assert table[0] == int(request_id) % 97
        return self

    def add_done_callback(self, call: object) -> None:
        pass

    def done(self) -> bool:
        return self.ended

    def result(self) -> StepOutput:
        assert self.step is not None
        if self.fail:
            raise RuntimeError("the device is gone")
        tokens = [token_of(int(r), int(s) + 1) for r, s in zip(self.step.request_ids, self.step.starts)]
        return StepOutput(self.step.step_id, token_ids=np.array(tokens, np.int32), logprobs=self.logprobs)


class Transceiver:
    def __init__(self, registry: Registry, engine: Engine) -> None:
        self.registry = registry
        self._engine = engine
        #: What was given back, and the step that the engine had then.
        self.ended: list[tuple[int, int]] = []

    def compute_ended(self, sequence: Sequence) -> None:
        if self._engine.step is not None:
            self.ended.append((sequence.request_id, self._engine.step.step_id))
        self.registry.apply(sequence, Event.QUIESCED)
        self.registry.apply(sequence, Event.COMMITTED)

    def stop(self, sequence: Sequence) -> None:
        self.registry.apply(sequence, Event.STOPPED)


class Bench:
    def __init__(self, sequences_max: int = 256) -> None:
        self.engine = Engine()
        self.registry = Registry("generation")
        self.answers = AnswerBook()
        self.transceiver = Transceiver(self.registry, self.engine)
        self.compute = DecodeCompute(
            rank=0, engine=self.engine, registry=self.registry, blocks=PlannedBlocks(BlockPool(8, 4)),
            limits=StepLimits(sequences_max, 512, 8, 1, 8), transceiver=self.transceiver, answers=self.answers,
            wake=lambda: None,
        )  # type: ignore[arg-type]  # fmt: skip
        self.told: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}

    def arrive(self, request_id: int, prompt: int, max_tokens: int, stops: tuple[int, ...]) -> None:
        request = Request(
            request_id=request_id,
            token_ids=np.zeros(prompt, np.int32),
            sampling=SamplingParams(max_tokens, stop_token_ids=stops),
            schedule_style="generation_first",
        )
        sequence, _ = self.registry.prepare(request, request_id)
        sequence.block_ids = [request_id % 97] * (1 + request_id % 5)
        self.registry.apply(sequence, Event.PUBLISHED)
        self.registry.apply(sequence, Event.ARRIVED)
        self.compute.arrived(sequence, token_of(request_id, prompt))

    def stop(self, request_id: int) -> None:
        sequence = self.registry.require(request_id)
        self.registry.end(sequence, Outcome.CANCELLED, "gone")
        self.transceiver.stop(sequence)
        self.compute.stopped(sequence)

    def turn(self, *, end: bool) -> None:
        self.engine.ended = self.engine.ended or end
        self.compute.retire(0.0)
        self.compute.run_layers(0.0)
        answers = self.answers.take()
        if answers is not None:
            for request_id, token in answers.pairs():
                assert request_id not in self.finish, "a token after the last word"
                self.told.setdefault(request_id, []).append(token)
            for notice in answers.notices:
                self.finish[notice.request_id] = notice.finish_reason
        self.registry.validate()


def expected(request_id: int, prompt: int, max_tokens: int, stops: tuple[int, ...]) -> tuple[list[int], str]:
    tokens: list[int] = []
    while True:
        tokens.append(token_of(request_id, prompt + len(tokens)))
        if tokens[-1] in stops:
            return tokens, "stop"
        if len(tokens) == max_tokens:
            return tokens, "length"


@pytest.mark.parametrize("seed", range(12))
def test_random_arrivals_and_stops_agree_with_one_sequence_at_a_time(seed: int) -> None:
    """Whatever comes and goes while steps are in flight: each answer is the oracle's, or a beginning of it if stopped."""
    chance = random.Random(seed)
    bench = Bench(sequences_max=chance.choice((3, 256)))
    asked: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    stopped: set[int] = set()
    for request_id in range(1, 120):
        stops = tuple(chance.sample(range(50), chance.randrange(0, 4)))
        asked[request_id] = (chance.randrange(1, 9), chance.randrange(1, 12), stops)
        bench.arrive(request_id, *asked[request_id])
        if chance.random() < 0.2:
            victim = chance.choice(sorted(asked))
            if bench.registry.get(victim) is not None and victim not in stopped:
                stopped.add(victim)
                bench.stop(victim)
        for _ in range(chance.randrange(3)):
            bench.turn(end=chance.random() < 0.7)
    for _ in range(3000):
        bench.turn(end=True)
    assert len(bench.registry) == 0 and not bench.compute.busy
    for request_id, (prompt, max_tokens, stops) in asked.items():
        want, reason = expected(request_id, prompt, max_tokens, stops)
        got = bench.told.get(request_id, [])
        if request_id in stopped:
            assert got == want[: len(got)]
        else:
            assert (got, bench.finish[request_id]) == (want, reason)


def test_a_stopped_row_stays_until_its_step_has_retired() -> None:
    """Compute's leg is open while the engine reads the blocks, and ends with the step; no token of it is told."""
    bench = Bench()
    bench.arrive(1, 3, 9, ())
    bench.turn(end=False)
    sequence = bench.registry.require(1)
    bench.stop(1)
    assert sequence.state is State.ENDING and sequence.legs
    told = len(bench.told[1])
    bench.turn(end=True)
    assert bench.registry.get(1) is None and len(bench.told[1]) == told


def test_the_next_step_is_launched_before_blocks_are_given_back() -> None:
    """Of a row that ended and of one that was stopped: giving back costs more than launching; the engine waits for neither."""
    bench = Bench()
    for request_id, max_tokens in ((1, 2), (2, 9), (3, 9)):
        bench.arrive(request_id, 3, max_tokens, ())
    bench.turn(end=False)
    bench.stop(2)
    bench.turn(end=True)
    assert bench.engine.step is not None and bench.engine.step.request_ids.tolist() == [3]
    assert bench.transceiver.ended == [(1, 1), (2, 1)]


def test_many_answers_that_end_in_one_step_are_given_back_over_several_iterations() -> None:
    """Each client is told at once; an iteration gives a few back and asks for the next one."""
    bench = Bench()
    count = 2 * GIVEN_BACK_PER_TURN_MAX + 1
    for request_id in range(1, count + 1):
        bench.arrive(request_id, 3, 2, ())
    bench.turn(end=False)
    bench.turn(end=True)
    assert len(bench.finish) == count and set(bench.finish.values()) == {"length"}
    assert len(bench.registry) == count - GIVEN_BACK_PER_TURN_MAX and bench.compute.busy
    last = bench.registry.require(count)
    assert last.state is State.ENDING and last.legs and last.answered_end
    assert bench.compute.run_layers(0.0) and not bench.compute.run_layers(0.0)
    assert len(bench.registry) == 0 and not bench.compute.busy


def test_a_step_that_fails_ends_its_requests_with_the_engines_words() -> None:
    """Rows that wait for the next step are untouched and served."""
    bench = Bench(sequences_max=1)
    bench.arrive(1, 3, 9, ())
    bench.arrive(2, 3, 2, ())
    bench.turn(end=False)
    bench.engine.fail = True
    bench.turn(end=True)
    assert bench.finish == {1: "error"}
    bench.engine.fail = False
    bench.turn(end=True)
    bench.turn(end=True)
    assert bench.finish[2] == "length" and bench.told[2] == expected(2, 3, 2, ())[0]


def test_rows_grow_and_keep_their_order() -> None:
    """More rows, blocks and stop tokens than at first; removing keeps the order of the rest."""
    rows = RowTable()
    for request_id in range(1, 301):
        request = Request(
            request_id=request_id, token_ids=np.zeros(2, np.int32),
            sampling=SamplingParams(5, stop_token_ids=tuple(range(request_id % 4))),
        )  # fmt: skip
        sequence = Sequence(request, request_id)
        sequence.block_ids = list(range(request_id % 7))
        rows.add(sequence, request_id)
    rows.remove([0, 5, 299])
    left = [r for r in range(1, 301) if r not in (1, 6, 300)]
    assert rows.request_ids[: rows.count].tolist() == left == [s.request_id for s in rows.sequences]
    assert rows.last_tokens[: rows.count].tolist() == left
    assert [int((table >= 0).sum()) for table in rows.tables[: rows.count]] == [r % 7 for r in left]
    assert (rows.row_of(2), rows.row_of(300)) == (0, -1)


def test_rows_remember_what_their_sampling_wants_and_tell_log_probabilities() -> None:
    """The engine sees prompt and answer of those rows alone, also after others left; a floor of tokens holds a stop back."""
    bench = Bench()
    tokens = [token_of(2, 3 + count) for count in range(4)]
    stop_at = (tokens[1], tokens[3])

    def arrive(request_id: int, sampling: SamplingParams) -> None:
        request = Request(
            request_id=request_id, token_ids=np.full(3, request_id, np.int32), sampling=sampling,
            schedule_style="generation_first",
        )  # fmt: skip
        sequence, _ = bench.registry.prepare(request, request_id)
        sequence.block_ids = [request_id]
        bench.registry.apply(sequence, Event.PUBLISHED)
        bench.registry.apply(sequence, Event.ARRIVED)
        bench.compute.arrived(sequence, token_of(request_id, 3))

    arrive(1, SamplingParams(2))
    arrive(2, SamplingParams(9, min_tokens=2, stop_token_ids=stop_at, logprobs=0))
    seen, told, ends = [], [], {}
    for turn in range(8):
        bench.engine.ended = True
        if bench.engine.step is not None:
            row = bench.engine.step.request_ids.tolist().index(2)
            bench.engine.logprobs = {row: TokenLogprobs(-float(turn))}
        bench.compute.retire(0.0)
        if bench.compute.run_layers(0.0):
            step = bench.engine.step
            assert step is not None
            seen.append([None if one is None else (one.prompt.tolist(), list(one.answer)) for one in step.told])
        answers = bench.answers.take()
        for notice in answers.notices if answers else ():
            told += [(notice.request_id, one.logprob) for one in notice.logprobs]
            ends |= {notice.request_id: notice.finish_reason} if notice.finish_reason else {}
    assert seen == [
        [None, ([2, 2, 2], tokens[:1])],
        [([2, 2, 2], tokens[:2])],
        [([2, 2, 2], tokens[:3])],
    ]
    # Its second token is a stop token and comes too early; its fourth is one and ends it.
    assert ends == {1: "length", 2: "stop"}
    assert told == [(2, -1.0), (2, -2.0), (2, -3.0)]
