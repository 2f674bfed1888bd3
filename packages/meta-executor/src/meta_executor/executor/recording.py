"""What a rank's loop did with its time, turn by turn, for trials; nothing of it runs unless a configuration asks for it.

A turn is one iteration and the wait before it. Of each there are the clock's time, the thread's processor time, how long the
system had it wait for a core (``run_delay`` of ``schedstat``), and each phase's share. What is left of a turn's time when
processor and core are taken off is what the thread waited for inside: another thread that held the interpreter's lock, or a
call that blocked. The engine's steps are noted by their own thread
(:mod:`meta_executor.engine.step_recorder`).

The newest so many turns are kept, in memory that is there from the start.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from meta_executor.engine.step_recorder import STEP_COLUMNS, CoreWaits, Int64Rows, Ring, StepRecorder

#: End of the name of a record's file, MessagePack of a :class:`LoopRecord`.
RECORD_SUFFIX = ".turns.msgpack"
#: Columns of a turn before its phases; times in ns, those that name a moment by the monotonic clock.
TURN_COLUMNS = (
    "began",
    "ended",
    "worked",
    "core_wait",
    "wait_before",
    "core_wait_before",
    "moved",
    "steps",
    "tokens",
)


class LoopRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's turns and steps, oldest first.

    Attributes:
        phases: Of an iteration, in order.
        threads: Name of each of the process's threads that Python started, by its number in the system.
        turns, steps: int64, little-endian, rows of ``turn_columns`` and of ``step_columns``.
        turns_dropped, steps_dropped: Older ones that were not kept (count).
    """

    owner_id: str
    rank: int
    role: str
    pid: int
    phases: tuple[str, ...]
    threads: dict[int, str]
    turn_columns: tuple[str, ...]
    step_columns: tuple[str, ...]
    turns: bytes
    steps: bytes
    turns_dropped: int = 0
    steps_dropped: int = 0

    def turn_rows(self) -> Int64Rows:
        """Shape (turns, columns)."""
        return _rows(self.turns, len(self.turn_columns))

    def step_rows(self) -> Int64Rows:
        """Shape (steps, columns)."""
        return _rows(self.steps, len(self.step_columns))


def _rows(data: bytes, width: int) -> Int64Rows:
    return np.frombuffer(data, "<i8").reshape(-1, width).astype(np.int64)


class Recorded(Protocol):
    """What is recorded: a :class:`~meta_executor.executor.loop.RankLoop`."""

    @property
    def phases(self) -> Sequence[tuple[str, Callable[[float], bool]]]:
        """What an iteration does, in order."""
        ...

    @property
    def progress(self) -> tuple[int, int]:
        """Steps launched and tokens in them, since the start (count)."""
        ...


class LoopRecorder:
    """Iterates a loop phase by phase and notes what each took. Everything in the loop's thread.

    Args:
        loop: What is recorded.
        turns_max: Turns that are kept (count).
        clock: Monotonic time (ns).
        worked: Processor time of this thread (ns).
        core_waits: How long this thread has waited for a core (ns).
    """

    def __init__(
        self,
        loop: Recorded,
        turns_max: int,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        worked: Callable[[], int] = time.thread_time_ns,
        core_waits: Callable[[], int] | None = None,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._worked = worked
        self._core_waits = CoreWaits() if core_waits is None else core_waits
        self._ring = Ring(turns_max, len(TURN_COLUMNS) + len(loop.phases))
        self._ended_ns = clock()
        self._core_ns = self._core_waits()

    def iterate(self, now_s: float) -> bool:
        """One round of the loop."""
        clock, loop = self._clock, self._loop
        core_ns, worked_ns, began_ns = self._core_waits(), self._worked(), clock()
        laps, last_ns, moved = [], began_ns, False
        for _, phase in loop.phases:
            moved |= phase(now_s)
            lap_ns = clock()
            laps.append(lap_ns - last_ns)
            last_ns = lap_ns
        worked_ns, after_ns = self._worked() - worked_ns, self._core_waits()
        steps, tokens = loop.progress
        self._ring.add(
            [
                began_ns, last_ns, worked_ns, after_ns - core_ns, began_ns - self._ended_ns, core_ns - self._core_ns,
                int(moved), steps, tokens, *laps,
            ]
        )  # fmt: skip
        self._ended_ns, self._core_ns = last_ns, after_ns
        return moved

    def record(self, owner_id: str, rank: int, role: str, steps: StepRecorder | None) -> LoopRecord:
        """What was kept."""
        ring = None if steps is None else steps.ring
        return LoopRecord(
            owner_id=owner_id,
            rank=rank,
            role=role,
            pid=os.getpid(),
            phases=tuple(name for name, _ in self._loop.phases),
            threads={one.native_id: one.name for one in threading.enumerate() if one.native_id is not None},
            turn_columns=(*TURN_COLUMNS, *(name for name, _ in self._loop.phases)),
            step_columns=STEP_COLUMNS,
            turns=self._ring.rows().astype("<i8").tobytes(),
            steps=b"" if ring is None else ring.rows().astype("<i8").tobytes(),
            turns_dropped=self._ring.dropped,
            steps_dropped=0 if ring is None else ring.dropped,
        )
