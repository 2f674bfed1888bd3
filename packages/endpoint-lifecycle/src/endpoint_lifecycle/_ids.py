"""Request ids of 63 bits that two running fronts never both make.

An id is 41 bits of milliseconds since 2025-01-01, 10 bits of node, 12 bits of counter, in this order from the top. So ids
are positive in a signed 64-bit field, at least 2**40 (smaller ids are left to what engines number locally), and grow per
node.

Bounds within which two ids never collide:
- node ids differ between generators that run at one time (0 to 1023);
- at most 4,096,000 ids a second over a second (4,096 a millisecond; a burst borrows from the next ``ahead_ms_max``
  milliseconds and then raises, it never repeats);
- for ``RequestIdGenerator`` over a restart: the wall clock at the start is later than the last id's millisecond. A
  clock that steps back while the generator runs is harmless: its own time never goes back;
- for ``DurableRequestIds`` over a restart: the file is still there. The clock may stand anywhere; a window of time is
  written down before ids out of it are handed out;
- until 2094-09-07, where the milliseconds run out and an error is raised.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from endpoint_lifecycle._errors import IdSpaceExhausted, LocalProtocolError
from endpoint_lifecycle._record import check_field

#: 2025-01-01T00:00:00Z in Unix milliseconds.
EPOCH_MS = 1_735_689_600_000
NODE_BITS = 10
COUNTER_BITS = 12
TIME_BITS = 63 - NODE_BITS - COUNTER_BITS
ID_MIN = 1 << 40
ID_MAX = (1 << 63) - 1
#: Below this the id would be smaller than 2**40.
_TIME_MIN = 1 << (40 - NODE_BITS - COUNTER_BITS)
_TIME_MAX = (1 << TIME_BITS) - 1
_COUNTER_END = 1 << COUNTER_BITS


def wall_ms() -> int:
    """Unix time in milliseconds."""
    return time.time_ns() // 1_000_000


def split_request_id(request_id: int) -> tuple[int, int, int]:
    """The (Unix milliseconds, node id, counter) that an id was made from."""
    counter = request_id & (_COUNTER_END - 1)
    node_id = request_id >> COUNTER_BITS & ((1 << NODE_BITS) - 1)
    return (request_id >> (NODE_BITS + COUNTER_BITS)) + EPOCH_MS, node_id, counter


class RequestIdGenerator:
    """Makes ids; thread-safe; survives restarts within the bounds of this module's head.

    Args:
        node_id: Distinct among generators that run at one time, [0, 1023].
        floor_ms: Never use a millisecond (Unix) before this one.
        now_ms: The wall clock, Unix milliseconds.
        ahead_ms_max: How far a burst may borrow from the future, milliseconds.
    """

    def __init__(
        self, node_id: int, floor_ms: int = 0, *, now_ms: Callable[[], int] = wall_ms, ahead_ms_max: int = 1000
    ) -> None:
        check_field(isinstance(node_id, int) and 0 <= node_id < 1 << NODE_BITS, "node_id", "must be in [0, 1023]")
        check_field(ahead_ms_max >= 0, "ahead_ms_max", "must be >= 0")
        self.node_id = node_id
        self._now_ms = now_ms
        self._ahead_ms_max = ahead_ms_max
        self._lock = threading.Lock()
        self._floor = max(floor_ms - EPOCH_MS, _TIME_MIN)
        self._time = self._floor - 1
        self._clock_high = 0
        self._counter = _COUNTER_END  # the first id takes a fresh millisecond

    def next_id(self) -> int:
        """One more id.

        Raises:
            IdSpaceExhausted: The burst bound was met, or the year 2094.
        """
        with self._lock:
            now = self._now_ms() - EPOCH_MS
            stepped_back = now < self._clock_high
            if not stepped_back:
                self._clock_high = now
            if now > self._time:
                self._enter(now)
            elif self._counter == _COUNTER_END:
                # Our own time goes on by itself: a burst outran the clock, or the clock went back.
                ahead_ms = self._time + 1 - max(now, self._floor)
                if ahead_ms > self._ahead_ms_max and not stepped_back:
                    raise IdSpaceExhausted(
                        f"node {self.node_id}: ids are {ahead_ms} ms ahead of the clock, at most {self._ahead_ms_max}"
                    )
                self._enter(self._time + 1)
            value = (self._time << NODE_BITS | self.node_id) << COUNTER_BITS | self._counter
            self._counter += 1
            return value

    def _enter(self, millisecond: int) -> None:
        if millisecond > _TIME_MAX:
            raise IdSpaceExhausted("the 41 bits of milliseconds since 2025 are used up")
        self._reserve(millisecond)
        self._time = millisecond
        self._counter = 0

    def _reserve(self, millisecond: int) -> None:
        """Hook of the durable kind: called before the first id of a millisecond."""


class DurableRequestIds(RequestIdGenerator):
    """A generator whose ids stay distinct whatever the clock did between two runs.

    A file holds the end of the window of time that ids may come from. It is moved ahead, and synced, before the window is
    used up, and a new run begins after it. The file is locked while the generator lives, so two live processes cannot
    share one node id's file.

    Args:
        path: The state file; made if missing. Its folder must exist.
        node_id, now_ms, ahead_ms_max: As for RequestIdGenerator.
        window_ms: Time written down at once: one fsync per so much, and so much skipped at a restart.

    Raises:
        LocalProtocolError: The file is locked by another process, or holds something else.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        node_id: int,
        *,
        now_ms: Callable[[], int] = wall_ms,
        ahead_ms_max: int = 1000,
        window_ms: int = 3000,
    ) -> None:
        check_field(window_ms >= 1, "window_ms", "must be >= 1")
        self._path = Path(path)
        self._window_ms = window_ms
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise LocalProtocolError(f"{self._path} is in use by another process") from error
            text = os.pread(self._file, 64, 0)
            end_ms = self._read(text, node_id)
            self._reserved = end_ms - EPOCH_MS
            super().__init__(node_id, end_ms + 1, now_ms=now_ms, ahead_ms_max=ahead_ms_max)
        except BaseException:
            os.close(self._file)
            self._file = -1
            raise

    def _read(self, text: bytes, node_id: int) -> int:
        if not text:
            return 0
        parts = text.split()
        if len(parts) != 3 or parts[0] != b"request-ids" or not parts[1].isdigit() or not parts[2].isdigit():
            raise LocalProtocolError(f"{self._path} holds something else: {text[:32]!r}")
        if int(parts[1]) != node_id:
            raise LocalProtocolError(f"{self._path} belongs to node {int(parts[1])}, not {node_id}")
        return int(parts[2])

    def _reserve(self, millisecond: int) -> None:
        if self._file < 0:
            raise LocalProtocolError(f"{self._path} was closed")
        if millisecond <= self._reserved:
            return
        end = millisecond + self._window_ms
        # Fixed width: an overwrite is never shorter than what it replaces, and fits one sector.
        text = f"request-ids {self.node_id:04d} {end + EPOCH_MS:020d}\n".encode()
        os.pwrite(self._file, text, 0)
        os.fsync(self._file)
        self._reserved = end

    def close(self) -> None:
        """Give the file back. No more ids can be made. Idempotent."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> DurableRequestIds:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
