"""The lease store in a folder for an event loop: each step on a small pool of threads, a watch that looks now and then."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from endpoint_lifecycle._discovery import Snapshot, StoreEvent
from endpoint_lifecycle._errors import StoreError
from endpoint_lifecycle._file_store import LeaseFolder
from endpoint_lifecycle._lease_table import LeaseTable
from endpoint_lifecycle._record import check_field

T = TypeVar("T")


def _changes(prefix: str, after_revision: int, table: LeaseTable, _: float) -> tuple[list[StoreEvent], int]:
    return table.events_after(prefix, after_revision), table.revision


class FileLeaseStore:
    """A lease store in a shared folder: for hosts with a common file system, or processes of one host, without a server.

    Needs ``flock`` on that file system (local ones, NFS from version 4 on) and hosts whose clocks agree within a small part
    of the lease time. A few hundred registrations: each call rewrites one file.

    Args:
        folder: Shared; made if it is missing. One that everybody may write to is refused.
        timeout_s: How long a call waits for the folder's lock, seconds.
        poll_s: How often a watch looks for changes, seconds.
        history_max: Changes kept for watches; equal in all processes that share the folder.
        now_s: Seconds on a clock that all hosts share.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        timeout_s: float = 2.0,
        poll_s: float = 0.2,
        history_max: int = 1024,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        check_field(timeout_s > 0, "timeout_s", "must be > 0")
        check_field(poll_s > 0, "poll_s", "must be > 0")
        check_field(history_max >= 1, "history_max", "must be >= 1")
        self.folder = Path(folder)
        self._poll_s = poll_s
        self._folder = LeaseFolder(self.folder, timeout_s, history_max, now_s)
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="lease-folder")
        self._closed = False

    async def _step(self, action: Callable[[LeaseTable, float], T]) -> T:
        if self._closed:
            raise StoreError(f"{self.folder}: the store was closed")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._folder.step, action)

    async def grant(self, ttl_s: float) -> int:
        """See LeaseStore."""
        return await self._step(lambda table, now_s: table.grant(ttl_s, now_s))

    async def keep_alive(self, lease_id: int) -> bool:
        """See LeaseStore."""
        return await self._step(lambda table, now_s: table.keep_alive(lease_id, now_s))

    async def revoke(self, lease_id: int) -> None:
        """See LeaseStore."""
        await self._step(lambda table, _: table.revoke(lease_id))

    async def put(self, key: str, value: bytes, lease_id: int, if_revision: int | None = None) -> int | None:
        """See LeaseStore."""
        return await self._step(lambda table, _: table.put(key, value, lease_id, if_revision))

    async def compare_and_delete(self, key: str, revision: int) -> bool:
        """See LeaseStore."""
        return await self._step(lambda table, _: table.compare_and_delete(key, revision))

    async def snapshot(self, prefix: str) -> Snapshot:
        """See ServerSource."""
        return await self._step(lambda table, _: table.snapshot(prefix))

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Sequence[StoreEvent]]:
        """See ServerSource. An empty sequence first says that the watch stands."""
        at = after_revision
        first = True
        while True:
            events, at = await self._step(functools.partial(_changes, prefix, at))
            if events or first:
                first = False
                yield events
            else:
                await asyncio.sleep(self._poll_s)

    async def aclose(self) -> None:
        """See LeaseStore. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)
