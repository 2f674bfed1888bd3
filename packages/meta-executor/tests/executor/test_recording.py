"""What a loop did with its time, noted turn by turn."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from meta_executor.config import SyntheticConfig
from meta_executor.engine.base import SamplingParams, SequenceStep, StageSpec, StepInput
from meta_executor.engine.step_recorder import STEP_COLUMNS, CoreWaits, Ring, StepRecorder
from meta_executor.engine.synthetic import SyntheticEngine
from meta_executor.executor.drive import Turns, drive
from meta_executor.executor.recording import TURN_COLUMNS, LoopRecord, LoopRecorder
from meta_executor.executor.testing import Pair


class Silent:
    """A bell that nobody rings, and that waits for nobody."""

    def wait(self, timeout_s: float) -> bool:
        return False


class Time:
    """A clock that phases move."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.worked_ns = 0
        self.core_ns = 0


class TwoPhases:
    """Takes 3 and 5 ns, 6 of them on the processor; waits 1 ns for a core."""

    def __init__(self, world: Time) -> None:
        self._world = world
        self.progress = (0, 0)
        self.phases: tuple[tuple[str, Callable[[float], bool]], ...] = (("take", self._take), ("run", self._run))

    def _take(self, now_s: float) -> bool:
        self._world.now_ns += 3
        self._world.worked_ns += 2
        return False

    def _run(self, now_s: float) -> bool:
        self._world.now_ns += 5
        self._world.worked_ns += 4
        self._world.core_ns += 1
        self.progress = (self.progress[0] + 1, self.progress[1] + 10)
        return now_s > 1


def recorder_of(world: Time, loop: TwoPhases, turns_max: int = 8) -> LoopRecorder:
    return LoopRecorder(
        loop, turns_max, clock=lambda: world.now_ns, worked=lambda: world.worked_ns, core_waits=lambda: world.core_ns
    )


def test_a_turn_has_its_phases_its_processor_time_and_the_wait_before_it() -> None:
    world = Time()
    loop = TwoPhases(world)
    recorder = recorder_of(world, loop)
    world.now_ns, world.core_ns = 100, 7
    assert not recorder.iterate(1.0)
    world.now_ns += 50
    assert recorder.iterate(2.0)
    record = msgspec.msgpack.decode(
        msgspec.msgpack.encode(recorder.record("gen-0", 1, "generation", None)), type=LoopRecord
    )
    assert record.turn_columns == (*TURN_COLUMNS, "take", "run")
    assert record.turn_rows().tolist() == [
        [100, 108, 6, 1, 100, 7, 0, 1, 10, 3, 5],
        [158, 166, 6, 1, 50, 0, 1, 2, 20, 3, 5],
    ]
    assert record.step_rows().shape == (0, len(STEP_COLUMNS))
    assert threading.main_thread().name in record.threads.values()


def test_only_the_newest_turns_are_kept_and_what_is_gone_is_counted() -> None:
    world = Time()
    recorder = recorder_of(world, TwoPhases(world), turns_max=2)
    for _ in range(5):
        recorder.iterate(0.0)
    record = recorder.record("gen-0", 0, "generation", None)
    assert record.turns_dropped == 3
    assert record.turn_rows()[:, 0].tolist() == [24, 32]


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="rows_max is 0"):
        Ring(0, 3)


def test_a_step_notes_when_the_device_was_over_and_when_its_thread_went_on() -> None:
    """The device ends when it was said to, however late the thread comes back."""
    times = itertools.chain([10, 1_000, 2_600], itertools.repeat(9_000))
    waits = iter([5, 12])
    recorder = StepRecorder(
        4, clock=lambda: next(times), sleep=lambda seconds: None, core_waits=lambda: lambda: next(waits)
    )
    assert recorder.run(lambda: recorder.device_wait(1.5e-6) or "made") == "made"
    assert recorder.ring.rows().tolist() == [[10, 2_500, 2_600, 7]]


def test_a_step_that_fails_is_noted_and_one_without_a_wait_ends_with_its_thread() -> None:
    times = iter([10, 20])
    recorder = StepRecorder(4, clock=lambda: next(times))
    with pytest.raises(ZeroDivisionError):
        recorder.run(lambda: 1 // 0)
    assert recorder.ring.rows().tolist() == [[10, 20, 20, 0]]


def test_the_synthetic_engine_tells_of_its_device_time() -> None:
    engine = SyntheticEngine(SyntheticConfig(step_ms=2.0), StageSpec(0, 1, 0, 8))
    engine.allocate_kv(2, 16)
    recorder = StepRecorder(4)
    engine.record_steps(recorder)
    sequence = SequenceStep(
        request_id=1,
        token_ids=np.full(3, 7, np.int32),
        start_position=0,
        block_ids=np.zeros(1, np.int64),
        sampling=SamplingParams(4),
    )
    engine.launch(StepInput.of(0, [sequence])).result()
    engine.close()
    ((began, device_end, ended, core_wait),) = recorder.ring.rows().tolist()
    # Rounded to whole nanoseconds on the way.
    assert began + 1_990_000 <= device_end <= ended
    assert core_wait >= 0


def test_a_loop_that_is_driven_with_a_recorder_is_recorded() -> None:
    """Whatever drives it sees no difference; every turn is there."""
    loop = Pair().context.ranks[0].loop
    recorder = LoopRecorder(loop, 16)
    turns = Turns()

    def leave(now_s: float) -> None:
        loop.left = turns.count >= 3

    drive(loop, Silent(), every_s=0.0, periodically=leave, turns=turns, recorder=recorder)
    record = recorder.record("ctx-0", 0, "context", None)
    assert len(record.turn_rows()) == turns.count == 3
    assert record.phases == tuple(name for name, _ in loop.phases)
    assert {"take new work", "retire", "vote terminal", "hand out"} <= set(record.phases)


def test_the_wait_for_a_core_is_that_of_the_asking_thread() -> None:
    waits = CoreWaits()
    try:
        before = waits()
        time.sleep(0)
        assert waits() >= before >= 0
    finally:
        waits.close()
