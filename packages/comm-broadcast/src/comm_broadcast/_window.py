"""Memory that the ranks of one node share: two slots that the root writes, and a line of acknowledgements for each rank.

The memory is an unnamed file in memory, mapped by every rank and kept by whoever looks at it: closing takes nothing from
under a view. A slot is written again only after every rank has dropped its views of it, which each rank's weak reference tells;
while one keeps them, the payload travels as if there were no window.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Generator
from typing import Any

import numpy as np

from comm_broadcast._comm import Comm, Run
from comm_broadcast._errors import BroadcastConfigError
from comm_broadcast._failure import Failure
from comm_broadcast._pool import ByteArray

_LINE = 64
_PAGE = 4096
_NONCE = 16
_TEXT = 512
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the name is random, the file private, and unlinked once mapped


def _fence() -> None:
    """Loads and stores before stay before, on every processor: two lock hand-overs order both ways.

    The lock is nobody else's: an exception between the two halves leaves nobody waiting for it.
    """
    lock = threading.Lock()
    for _ in range(2):
        lock.acquire()
        lock.release()


class SharedWindow:
    """One rank's mapping; made by :func:`open_window`."""

    def __init__(self, memory: mmap.mmap, slot_bytes: int, rank: int, size: int, root: int) -> None:
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._rank = rank
        self._others = [r for r in range(size) if r != root]
        self._start = header_bytes(size)
        lines = np.frombuffer(memory, np.int64, size * _LINE // 8, _PAGE).reshape(size, _LINE // 8)
        self._acknowledged = lines
        #: Root: the exchange that each slot was last written in.
        self._written = [0, 0]
        self._looking: list[weakref.ref[ByteArray] | None] = [None, None]

    def slot(self, index: int, size: int) -> ByteArray:
        """A slot's first bytes."""
        return np.frombuffer(self._memory, np.uint8, size, self._start + index * self._slot_bytes)

    def free_slot(self, sequence: int) -> int | None:
        """Root: a slot that no rank looks at, or None; one that was written for this exchange itself was not announced yet."""
        self.withdraw_all(sequence)
        _fence()
        for index in (0, 1):
            if all(self._acknowledged[r, index] >= self._written[index] for r in self._others):
                return index
        return None

    def write(self, index: int, size: int, sequence: int) -> ByteArray:
        """Root: a free slot's first bytes, to be filled."""
        self._written[index] = sequence
        return self.slot(index, size)

    def withdraw(self, index: int, sequence: int) -> None:
        """Root: what was written for this exchange will not be looked at by anybody."""
        if self._written[index] == sequence:
            self._written[index] = 0

    def withdraw_all(self, sequence: int) -> None:
        """Root: the same for whichever slot was written for this exchange."""
        for index in (0, 1):
            self.withdraw(index, sequence)

    def watch(self, index: int, array: ByteArray, sequence: int) -> None:
        """Acknowledge a slot's bytes when this array and every view of it are gone. The caller holds the array meanwhile."""
        looking = self._looking[index]
        if looking is not None and looking() is array:
            return
        _fence()
        line = self._acknowledged[self._rank]

        def dropped(_: object) -> None:
            _fence()
            line[index] = sequence

        self._looking[index] = weakref.ref(array, dropped)


def header_bytes(size: int) -> int:
    """Bytes before the first slot."""
    return _PAGE + -(-size * _LINE // _PAGE) * _PAGE


def open_window(comm: Comm, slot_bytes: int, root: int) -> Generator[None, None, SharedWindow]:
    """Make and map the memory, together (two small collectives).

    Raises:
        BroadcastConfigError: On every rank, when one of them could not; names it and why.
    """
    slot = -(-slot_bytes // _PAGE) * _PAGE
    total = header_bytes(comm.size) + 2 * slot
    path = f"{_SHARED_MEMORY}/comm-broadcast-{secrets.token_hex(_NONCE)}" if comm.rank == root else ""
    memory: mmap.mmap | None = None
    problem = ""
    try:
        if comm.rank == root:
            try:
                memory = _make(path, total)
            except Exception as error:  # noqa: BLE001 - told to everybody, who wait for this rank
                problem = Failure.of(error).cause
        announced = yield from _exchange(comm, path if memory is not None else "")
        if comm.rank != root and announced[root]:
            try:
                memory = _find(announced[root], total)
            except Exception as error:  # noqa: BLE001 - as above
                problem = f"the ranks must be on one node: {Failure.of(error).cause}"
        problems = yield from _exchange(comm, problem)
    finally:
        if path:
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
    for rank, text in enumerate(problems):
        if text:
            raise BroadcastConfigError(f"shared_slot_bytes={slot_bytes}: rank {rank}: {text}")
    if memory is None:
        raise BroadcastConfigError(f"shared_slot_bytes={slot_bytes}: rank {root} announced no memory")
    return SharedWindow(memory, slot, comm.rank, comm.size, root)


def _make(path: str, total: int) -> mmap.mmap:
    """The root's new memory; the path's last characters stand at its beginning."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Reserved now: writing to memory that is not there would be a signal, not an error.
        os.posix_fallocate(descriptor, 0, total)
        memory = mmap.mmap(descriptor, total)
    finally:
        os.close(descriptor)
    memory[:_NONCE] = bytes.fromhex(path[-2 * _NONCE :])
    return memory


def _find(path: str, total: int) -> mmap.mmap:
    """The same memory on another rank.

    Raises:
        ValueError: It is another one.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(descriptor, total)
    finally:
        os.close(descriptor)
    if memory[:_NONCE] != bytes.fromhex(path[-2 * _NONCE :]):
        raise ValueError("the memory found is not the root's")
    return memory


def _exchange(comm: Comm, text: str) -> Generator[None, None, list[str]]:
    send = bytearray(text.encode("utf-8", "replace")[:_TEXT].ljust(_TEXT, b"\0"))
    receive = bytearray(_TEXT * comm.size)
    run = Run(comm)
    yield from run.wait(run.start(comm.iallgather, send, receive))
    comm.forget(0)
    parts: list[Any] = [bytes(receive[r * _TEXT : (r + 1) * _TEXT]) for r in range(comm.size)]
    return [part.rstrip(b"\0").decode("utf-8", "replace") for part in parts]
