"""What an engine's steps took, as its own thread saw it, for trials.

Of each step there is when the thread began it, when the device's time was over, when the thread had the interpreter back, and
how long the system had it wait for a core meanwhile. A device whose end is known before it comes (the synthetic engine's) tells
what the thread waited for the interpreter's lock; where the thread itself computes, device and thread end together.

The newest so many steps are kept, in memory that is there from the start.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Int64Rows = npt.NDArray[np.int64]
_Output = TypeVar("_Output")

#: Of a step: moments by the monotonic clock, and a duration (ns).
STEP_COLUMNS = ("began", "device_end", "ended", "core_wait")


class Ring:
    """The newest rows of int64, of one width."""

    def __init__(self, rows_max: int, width: int) -> None:
        if rows_max < 1:
            raise ValueError(f"rows_max is {rows_max}, want at least 1")
        self._width = width
        self._rows_max = rows_max
        self._data = array("q", bytes(8 * width * rows_max))
        self.added = 0

    def add(self, row: list[int]) -> None:
        """One more; the oldest goes when there is no room."""
        place = self.added % self._rows_max * self._width
        self._data[place : place + self._width] = array("q", row)
        self.added += 1

    @property
    def dropped(self) -> int:
        """Rows that are gone (count)."""
        return max(self.added - self._rows_max, 0)

    def rows(self) -> Int64Rows:
        """What is kept, oldest first; a copy."""
        every = np.frombuffer(self._data, np.int64).reshape(self._rows_max, self._width)
        if self.added <= self._rows_max:
            return every[: self.added].copy()
        first = self.added % self._rows_max
        return np.concatenate([every[first:], every[:first]])


class CoreWaits:
    """How long the calling thread has waited for a core since it was started (ns)."""

    def __init__(self) -> None:
        self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __call__(self) -> int:
        return int(os.pread(self._file, 96, 0).split()[1])

    def close(self) -> None:
        """Once."""
        os.close(self._file)


class StepRecorder:
    """The engine's thread tells it of each step. One thread adds, another may read when that has ended.

    Args:
        steps_max: Steps that are kept (count).
        clock: Monotonic time (ns).
        sleep: Waits without the interpreter's lock (s).
        core_waits: Makes what :class:`CoreWaits` is, in the engine's thread.
    """

    def __init__(
        self,
        steps_max: int,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
        core_waits: Callable[[], Callable[[], int]] = CoreWaits,
    ) -> None:
        self._ring = Ring(steps_max, len(STEP_COLUMNS))
        self._clock = clock
        self._sleep = sleep
        self._make_core_waits = core_waits
        self._core_waits: Callable[[], int] | None = None
        self._device_end_ns = 0
        self._core_wait_ns = 0

    def device_wait(self, seconds: float) -> None:
        """Wait for the device so long; when it is over is known before."""
        core = self._core_waits = self._core_waits or self._make_core_waits()
        before_ns = core()
        self._device_end_ns = self._clock() + int(seconds * 1e9)
        self._sleep(seconds)
        self._core_wait_ns = core() - before_ns

    def run(self, work: Callable[[], _Output]) -> _Output:
        """Run a step and note it, whether it fails or not."""
        began_ns = self._clock()
        try:
            return work()
        finally:
            self._ended(began_ns)

    @property
    def ring(self) -> Ring:
        """What is kept."""
        return self._ring

    def _ended(self, began_ns: int) -> None:
        """A step has ended just now. Without a wait for the device it was the thread itself that computed, until now."""
        now_ns = self._clock()
        self._ring.add([began_ns, self._device_end_ns or now_ns, now_ns, self._core_wait_ns])
        self._device_end_ns = self._core_wait_ns = 0
