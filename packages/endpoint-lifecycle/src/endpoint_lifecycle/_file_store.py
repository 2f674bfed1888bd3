"""A lease store in a folder that several processes, or hosts, share. No server: every call takes the folder's lock.

The state is one file, replaced whole under the lock, so a reader never sees half of a change and a process that is killed in
the middle leaves the former state. Leases end by the clock of whoever looks: hosts that share a folder need clocks that agree
within a small part of the lease time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from endpoint_lifecycle._errors import StoreError
from endpoint_lifecycle._lease_table import LeaseTable, TableState

T = TypeVar("T")

_LOCK, _STATE, _NEXT = "lock", "state.json", "state.json.next"
_STATE_BYTES_MAX = 64 << 20
#: First and longest pause between two tries of the lock, seconds.
_LOCK_FIRST_S, _LOCK_PAUSE_S = 0.001, 0.02


class LeaseFolder:
    """The blocking part: one step on the folder's table at a time, across all processes that use it.

    Args:
        folder: Made if it is missing, for its owner and group alone.
        timeout_s: How long a call waits for the lock.
        history_max: Changes kept for watches.
        now_s: Seconds on a clock that all hosts share.
    """

    def __init__(self, folder: Path, timeout_s: float, history_max: int, now_s: Callable[[], float]) -> None:
        self.folder = folder
        self._timeout_s = timeout_s
        self._history_max = history_max
        self._now_s = now_s

    def step(self, action: Callable[[LeaseTable, float], T]) -> T:
        """Run one step on the table as it is now, and write it back if it changed.

        Raises:
            StoreError: The folder cannot be used, is locked too long, or its file is not a state.
        """
        try:
            with self._locked() as folder:
                before = self._read(folder)
                table = self._table(before)
                now_s = self._now_s()
                table.expire(now_s)
                try:
                    return action(table, now_s)
                finally:
                    after = msgspec.json.encode(table.state())
                    if after != before:
                        self._write(folder, after)
        except OSError as error:
            raise StoreError(f"{self.folder}: {type(error).__name__}: {error.strerror or error}") from error

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """A descriptor of the folder, with its lock held."""
        self.folder.mkdir(mode=0o770, exist_ok=True)
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_mode & stat.S_IWOTH:
                raise StoreError(f"{self.folder}: everybody may write there, so anybody could register a server")
            lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o660, dir_fd=folder)
            try:
                self._take(lock)
                yield folder
            finally:
                os.close(lock)  # gives the lock back
        finally:
            os.close(folder)

    def _take(self, lock: int) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        pause_s = _LOCK_FIRST_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                    raise
            if time.monotonic() >= deadline_s:
                raise StoreError(f"{self.folder}: locked by another process for more than {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOCK_PAUSE_S)

    @staticmethod
    def _read(folder: int) -> bytes:
        try:
            file = os.open(_STATE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return b""
        with open(file, "rb") as stream:
            return stream.read(_STATE_BYTES_MAX + 1)

    def _table(self, encoded: bytes) -> LeaseTable:
        if not encoded:
            return LeaseTable(self._history_max)
        place = self.folder / _STATE
        if len(encoded) > _STATE_BYTES_MAX:
            raise StoreError(f"{place}: more than {_STATE_BYTES_MAX} bytes")
        try:
            state = msgspec.json.decode(encoded, type=TableState)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StoreError(f"{place}: not a state: {error}") from error
        if state.format != 1:
            raise StoreError(f"{place}: format is {state.format}, this version reads 1")
        return LeaseTable(self._history_max, state)

    @staticmethod
    def _write(folder: int, encoded: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(_NEXT, flags, 0o660, dir_fd=folder), "wb") as stream:
            stream.write(encoded)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(_NEXT, _STATE, src_dir_fd=folder, dst_dir_fd=folder)
