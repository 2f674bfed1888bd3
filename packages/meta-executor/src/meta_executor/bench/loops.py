"""What the loops of a trial's ranks did within a window of time: figures from their records (pure).

A *step* here is the time from one launch to the next, which is what a client waits for. The *wait for the interpreter's lock*
of a step has two parts: between the end of the device's time and the loop's next turn, as far as the loop was waiting then and
no thread of it waited for a core; and within turns, what is left of their time without the processor's and a core's. The first
part contains what the system's timer is late (about 0.06 ms), the second calls that block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meta_executor.bench.spread import Spread
from meta_executor.engine.step_recorder import STEP_COLUMNS, Int64Rows
from meta_executor.executor.recording import TURN_COLUMNS, LoopRecord

_TURN = {name: place for place, name in enumerate(TURN_COLUMNS)}
_STEP = {name: place for place, name in enumerate(STEP_COLUMNS)}


@dataclass(frozen=True)
class LoopFigures:
    """One rank's loop within a window. Times in ms; of a step: mean over the window's steps unless it is a spread.

    Attributes:
        step_ms, step_mean_ms: From one launch to the next.
        host_ms: The loop's turns in a step, by the clock.
        device_ms: A step of the device, from when its thread took it.
        worked_ms: Processor time of the loop's thread in a step.
        lock_after_device_ms, lock_mean_ms: See the module; the mean.
        lock_in_turns_ms: See the module.
        core_wait_ms: The loop's thread waited for a core in a step.
        phases_ms: By the clock, of a step, in the order of the list.
        rows: Tokens of a step.
    """

    name: str
    role: str
    steps: int
    turns: int
    rows: float
    step_ms: Spread
    step_mean_ms: float
    host_ms: Spread
    device_ms: Spread
    worked_ms: float
    lock_after_device_ms: Spread
    lock_mean_ms: float
    lock_in_turns_ms: float
    core_wait_ms: float
    phases_ms: dict[str, float]
    dropped: int

    @property
    def lock_share(self) -> float:
        """Of the steps' time, what was waited for the interpreter's lock (0–1)."""
        return (self.lock_in_turns_ms + self.lock_mean_ms) / self.step_mean_ms if self.step_mean_ms > 0 else 0.0


def loop_figures(record: LoopRecord, window_ns: tuple[int, int]) -> LoopFigures | None:
    """Of the turns that began and the steps that ended within the window; None: fewer than two steps were launched."""
    turns = _within(record.turn_rows(), _TURN["began"], window_ns)
    launched = np.flatnonzero(np.diff(turns[:, _TURN["steps"]]) > 0) + 1
    if len(launched) < 2:
        return None
    # Whole steps: from the first launch to the last.
    whole = turns[launched[0] : launched[-1]]
    starts = launched[:-1] - launched[0]
    count = len(starts)
    spent = whole[:, _TURN["ended"]] - whole[:, _TURN["began"]]
    worked, core = whole[:, _TURN["worked"]], whole[:, _TURN["core_wait"]]
    waited = np.maximum(spent - worked - core, 0)
    steps = _within(record.step_rows(), _STEP["ended"], window_ns)
    after = _lock_after_device(turns, steps)
    period = np.diff(turns[launched, _TURN["began"]])
    tokens = int(turns[launched[-1], _TURN["tokens"]] - turns[launched[0], _TURN["tokens"]])
    phases = whole[:, len(TURN_COLUMNS) :].sum(axis=0)
    return LoopFigures(
        name=f"{record.owner_id}.{record.rank}",
        role=record.role,
        steps=count,
        turns=len(whole),
        rows=tokens / count,
        step_ms=Spread.of(period.tolist(), 1e-6),
        host_ms=Spread.of(np.add.reduceat(spent, starts).tolist(), 1e-6),
        device_ms=Spread.of((steps[:, _STEP["device_end"]] - steps[:, _STEP["began"]]).tolist(), 1e-6),
        worked_ms=float(worked.sum()) * 1e-6 / count,
        lock_after_device_ms=Spread.of(after.tolist(), 1e-6),
        lock_in_turns_ms=float(waited.sum()) * 1e-6 / count,
        core_wait_ms=float(core.sum() + whole[:, _TURN["core_wait_before"]].sum()) * 1e-6 / count,
        phases_ms={name: float(spent_ns) * 1e-6 / count for name, spent_ns in zip(record.phases, phases, strict=True)},
        dropped=record.turns_dropped if _lost(record, window_ns) else 0,
        lock_mean_ms=float(after.mean()) * 1e-6 if len(after) else 0.0,
        step_mean_ms=float(period.mean()) * 1e-6,
    )


def _within(rows: Int64Rows, column: int, window_ns: tuple[int, int]) -> Int64Rows:
    return rows[(rows[:, column] >= window_ns[0]) & (rows[:, column] < window_ns[1])]


def _lost(record: LoopRecord, window_ns: tuple[int, int]) -> bool:
    """Turns of the window were not kept."""
    turns = record.turn_rows()
    return bool(record.turns_dropped) and (not len(turns) or int(turns[0, 0]) > window_ns[0])


def _lock_after_device(turns: Int64Rows, steps: Int64Rows) -> Int64Rows:
    """Per step that a turn followed: how long its thread, and then the loop if it was waiting, waited for the lock (ns)."""
    followed = np.searchsorted(turns[:, _TURN["began"]], steps[:, _STEP["ended"]], side="left")
    steps, followed = steps[followed < len(turns)], followed[followed < len(turns)]
    of_engine = np.maximum(steps[:, _STEP["ended"]] - steps[:, _STEP["device_end"]] - steps[:, _STEP["core_wait"]], 0)
    turn = turns[followed]
    asleep = turn[:, _TURN["began"]] - turn[:, _TURN["wait_before"]] <= steps[:, _STEP["ended"]]
    of_loop = turn[:, _TURN["began"]] - steps[:, _STEP["ended"]] - turn[:, _TURN["core_wait_before"]]
    return np.asarray(of_engine + np.where(asleep, np.maximum(of_loop, 0), 0), np.int64)


def every_loop(records: Sequence[LoopRecord], window_ns: tuple[int, int]) -> tuple[LoopFigures, ...]:
    """Of all records that show steps, by name."""
    found = (loop_figures(record, window_ns) for record in records)
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.name))
