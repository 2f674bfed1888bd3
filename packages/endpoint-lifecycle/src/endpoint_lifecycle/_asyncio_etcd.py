"""The lease store on etcd for an event loop: each blocking call on a small pool of threads, each watch on one of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from endpoint_lifecycle._discovery import Snapshot, StoreEvent
from endpoint_lifecycle._errors import StoreError
from endpoint_lifecycle._etcd import EtcdClient, EtcdWatch
from endpoint_lifecycle._record import check_field

if TYPE_CHECKING:
    from etcd3gw.client import Etcd3Client

T = TypeVar("T")


class EtcdLeaseStore:
    """A lease store on etcd v3 over its JSON gateway.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        timeout_s: Bound of one call, seconds.
        idle_s: A watch on which nothing came for so long ends, and the follower lists again.
        client: A client of etcd3gw made elsewhere (TLS, credentials); ``url`` is then for messages only.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:2379",
        *,
        timeout_s: float = 2.0,
        idle_s: float = 60.0,
        client: Etcd3Client | None = None,
    ) -> None:
        check_field(idle_s > 0, "idle_s", "must be > 0")
        self._idle_s = idle_s
        self._client = EtcdClient(url, timeout_s, client)
        self.url = url
        self._pool = ThreadPoolExecutor(max_workers=4, thread_name_prefix="etcd")
        self._closed = False
        self._watches: dict[EtcdWatch, None] = {}

    async def _call(self, function: Callable[[], T]) -> T:
        if self._closed:
            raise StoreError(f"{self.url}: the store was closed")
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    async def grant(self, ttl_s: float) -> int:
        """See LeaseStore. etcd counts whole seconds: rounded up."""
        return await self._call(lambda: self._client.grant(ttl_s))

    async def keep_alive(self, lease_id: int) -> bool:
        """See LeaseStore."""
        return await self._call(lambda: self._client.keep_alive(lease_id))

    async def revoke(self, lease_id: int) -> None:
        """See LeaseStore."""
        await self._call(lambda: self._client.revoke(lease_id))

    async def put(self, key: str, value: bytes, lease_id: int, if_revision: int | None = None) -> int | None:
        """See LeaseStore: one transaction."""
        return await self._call(lambda: self._client.put(key, value, lease_id, if_revision))

    async def compare_and_delete(self, key: str, revision: int) -> bool:
        """See LeaseStore: one transaction."""
        return await self._call(lambda: self._client.compare_and_delete(key, revision))

    async def snapshot(self, prefix: str) -> Snapshot:
        """See ServerSource."""
        return await self._call(lambda: self._client.snapshot(prefix))

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Sequence[StoreEvent]]:
        """See ServerSource. An empty sequence first says that the watch stands."""
        if self._closed:
            raise StoreError(f"{self.url}: the store was closed")
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Sequence[StoreEvent] | StoreError | None] = asyncio.Queue()

        def hand_over(item: Sequence[StoreEvent] | StoreError | None) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, item)
            except RuntimeError:
                watch.stop()  # the loop is closed: nobody listens any more

        def run() -> None:
            try:
                watch.read()
                hand_over(None)
            except StoreError as error:
                hand_over(error)
            except BaseException as error:
                # Whatever ended the thread ends the watch: one that died without a word would be waited for for ever.
                failure = StoreError(f"{self.url}: the watch failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                hand_over(failure)
                raise

        watch = EtcdWatch(self._client, prefix, after_revision, self._idle_s, hand_over)
        self._watches[watch] = None
        threading.Thread(target=run, name="etcd-watch", daemon=True).start()
        try:
            while True:
                item = await queue.get()
                if item is None:
                    return
                if isinstance(item, StoreError):
                    raise item
                yield item
        finally:
            watch.stop()
            del self._watches[watch]

    async def aclose(self) -> None:
        """See LeaseStore. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for watch in tuple(self._watches):
            watch.stop()
        await asyncio.get_running_loop().run_in_executor(None, self._shutdown)

    def _shutdown(self) -> None:
        self._pool.shutdown(wait=True)
        self._client.close()
