"""Buffers that are reused once nobody looks at them any more.

Touching fresh memory for the first time costs several times the copy into it. A buffer is handed out as an array; it is free
again when that array and every view of it are gone, which the pool sees by a weak reference: nothing has to be given back,
and a view that is kept only keeps its buffer from being reused.

Larger buffers lie in huge pages where the system has them: on one node MPI reads the sender's memory page by page, which takes
half the time in pages of 2 MiB.
"""

from __future__ import annotations

import mmap
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]

_SMALL_BYTES = 64 << 10
_HUGE_PAGE_BYTES = 2 << 20
#: Linux; Python names it from 3.11 on some systems only.
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0)


def _capacity(size: int) -> int:
    """Powers of two: few different sizes, so a buffer is found again."""
    return max(_SMALL_BYTES, 1 << (size - 1).bit_length()) if size else _SMALL_BYTES


def _map(capacity: int) -> tuple[mmap.mmap, int]:
    """Private memory of this size, and where in it to begin; in huge pages if it is large and there are such.

    Raises:
        MemoryError: There is none.
    """
    huge = capacity >= _HUGE_PAGE_BYTES
    try:
        # Room to begin at a huge page; what is not touched costs nothing.
        memory = mmap.mmap(
            -1, capacity + _HUGE_PAGE_BYTES if huge else capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"no memory for {capacity} bytes: {error}") from error
    if not huge:
        return memory, 0
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):
        # A system without: ordinary pages, slower and no less right.
        return memory, 0
    return memory, -np.frombuffer(memory, np.uint8, 1).ctypes.data % _HUGE_PAGE_BYTES


@dataclass(slots=True)
class _Entry:
    memory: mmap.mmap
    offset: int
    capacity: int
    user: weakref.ref[ByteArray]


class Sink:
    """Where a rank receives what it has no memory for. Room is reserved while there is some; unused it costs addresses only.

    Raises:
        MemoryError: There is no room.
    """

    def __init__(self, size: int) -> None:
        try:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"no room for {size} bytes: {error}") from error

    def take(self, size: int) -> memoryview:
        """Bytes that anybody may overwrite; more than was reserved only while there is memory."""
        return memoryview(self._memory)[:size] if size <= len(self._memory) else memoryview(bytearray(size))


class BufferPool:
    """See the module.

    Args:
        idle_bytes_max: Free buffers beyond this are given back, and larger buffers are never kept (bytes).
        entries_max: Buffers tracked; further ones serve once (count).
    """

    def __init__(self, idle_bytes_max: int, entries_max: int = 32) -> None:
        self._idle_bytes_max = idle_bytes_max
        self._entries_max = entries_max
        self._entries: list[_Entry] = []
        self.allocations = 0

    def take(self, size: int) -> ByteArray:
        """Memory of this size (bytes), contents undefined.

        Raises:
            MemoryError: There is none.
        """
        capacity = _capacity(size)
        if capacity > self._idle_bytes_max:
            self.allocations += 1
            return np.empty(size, np.uint8)
        best: _Entry | None = None
        for entry in self._entries:
            if entry.capacity >= size and entry.user() is None and (best is None or entry.capacity < best.capacity):
                best = entry
        if best is None:
            self._trim(capacity)
            memory, offset = _map(capacity)
            self.allocations += 1
            array = np.frombuffer(memory, np.uint8, size, offset)
            if len(self._entries) < self._entries_max:
                self._entries.append(_Entry(memory, offset, capacity, weakref.ref(array)))
            return array
        array = np.frombuffer(best.memory, np.uint8, size, best.offset)
        best.user = weakref.ref(array)
        return array

    @property
    def idle_bytes(self) -> int:
        """Bytes in buffers that nobody looks at."""
        return sum(entry.capacity for entry in self._entries if entry.user() is None)

    def _trim(self, coming: int) -> None:
        """Give back free buffers, largest first, until there is room for what is coming."""
        idle = sorted((e for e in self._entries if e.user() is None), key=lambda e: e.capacity)
        total = coming + sum(entry.capacity for entry in idle)
        while idle and (total > self._idle_bytes_max or len(self._entries) >= self._entries_max):
            entry = idle.pop()
            total -= entry.capacity
            self._entries.remove(entry)
