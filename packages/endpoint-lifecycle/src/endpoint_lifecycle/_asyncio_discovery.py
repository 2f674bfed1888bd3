"""Discovery on an event loop: the static source, the in-memory store, the reconciler and the publisher."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from endpoint_lifecycle._asyncio import AsyncEndpointDirectory
from endpoint_lifecycle._discovery import (
    PREFIX,
    LeaseStore,
    Registration,
    RegistryBook,
    ServerSource,
    Snapshot,
    StoreEvent,
    decode_registration,
    registration_key,
)
from endpoint_lifecycle._errors import (
    EndpointTimeout,
    LocalProtocolError,
    ProtocolViolation,
    StoreCompacted,
    StoreError,
)
from endpoint_lifecycle._lease_table import LeaseTable
from endpoint_lifecycle._owner import EndpointOwner
from endpoint_lifecycle._record import check_field

T = TypeVar("T")

#: Between looks at what is in flight while an owner drains: it may end in any thread.
_DRAIN_POLL_S = 0.01


class StaticServers:
    """A source that is a fixed list: ``StaticServers({"context": ["http://a:8000"], "generation": [...]})``.

    Raises:
        LocalProtocolError: A server is listed twice.
    """

    def __init__(self, servers: Mapping[str, Sequence[str]]) -> None:
        self._items: dict[str, bytes] = {}
        seen: set[str] = set()
        for role, names in servers.items():
            for name in names:
                if name in seen:
                    raise LocalProtocolError(f"{name} is listed twice")
                seen.add(name)
                self._items[registration_key(role, name)] = Registration(server=name, role=role).encode()

    async def snapshot(self, prefix: str) -> Snapshot:
        """The list, at revision 1."""
        items = {k: v for k, v in self._items.items() if k.startswith(prefix)}
        return Snapshot(1, items, dict.fromkeys(items, 1))

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Sequence[StoreEvent]]:
        """Nothing, for ever."""
        await asyncio.get_running_loop().create_future()
        yield ()


class MemoryLeaseStore:
    """A lease store in this process: for tests, and for instances and router in one process.

    Args:
        now_s: The clock; None: the running loop's.
        history_max: Changes kept for watches; a watch that asks for an older one gets StoreCompacted.

    Attributes:
        down: Set to make every call fail with StoreError, as a store that cannot be reached.
    """

    def __init__(self, now_s: Callable[[], float] | None = None, history_max: int = 1024) -> None:
        check_field(history_max >= 1, "history_max", "must be >= 1")
        self._clock = now_s
        self._history_max = history_max
        self._table = LeaseTable(history_max)
        self._watchers: dict[asyncio.Future[None], None] = {}
        self._dropped = 0
        self.down = False

    def _now_s(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()

    def _enter(self) -> LeaseTable:
        if self.down:
            raise StoreError("the store is down")
        self._step(lambda table: table.expire(self._now_s()))
        return self._table

    def _step(self, action: Callable[[LeaseTable], T]) -> T:
        before = self._table.revision
        result = action(self._table)
        if self._table.revision != before:
            self._wake()
        return result

    def _wake(self) -> None:
        for future in self._watchers:
            if not future.done():
                future.set_result(None)

    async def grant(self, ttl_s: float) -> int:
        """See LeaseStore."""
        return self._enter().grant(ttl_s, self._now_s())

    async def keep_alive(self, lease_id: int) -> bool:
        """See LeaseStore."""
        return self._enter().keep_alive(lease_id, self._now_s())

    async def revoke(self, lease_id: int) -> None:
        """See LeaseStore."""
        self._enter()
        self._step(lambda table: table.revoke(lease_id))

    async def put(self, key: str, value: bytes, lease_id: int, if_revision: int | None = None) -> int | None:
        """See LeaseStore."""
        self._enter()
        return self._step(lambda table: table.put(key, value, lease_id, if_revision))

    async def compare_and_delete(self, key: str, revision: int) -> bool:
        """See LeaseStore."""
        self._enter()
        return self._step(lambda table: table.compare_and_delete(key, revision))

    async def snapshot(self, prefix: str) -> Snapshot:
        """See ServerSource."""
        return self._enter().snapshot(prefix)

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Sequence[StoreEvent]]:
        """See ServerSource."""
        self._enter()
        dropped = self._dropped
        at = after_revision
        loop = asyncio.get_running_loop()
        while True:
            if self._dropped != dropped:
                raise StoreError("the watch was cut")
            table = self._enter()
            events = table.events_after(prefix, at)
            at = table.revision
            if events:
                yield events
                continue
            future: asyncio.Future[None] = loop.create_future()
            self._watchers[future] = None
            next_s = table.next_expiry_s()
            timer = None
            if next_s is not None:
                timer = loop.call_later(max(next_s - self._now_s(), 0.0), self._wake)
            try:
                await future
            finally:
                del self._watchers[future]
                if timer is not None:
                    timer.cancel()

    def drop_watches(self) -> None:
        """Cut every watch, as a lost connection does."""
        self._dropped += 1
        self._wake()

    def lose_memory(self) -> None:
        """Forget everything and begin at revision 0, as a store that was restored from nothing."""
        self._table = LeaseTable(self._history_max)
        self.drop_watches()

    async def aclose(self) -> None:
        """See LeaseStore."""
        self.drop_watches()


@dataclass(frozen=True, slots=True)
class ReconcilerStatistics:
    """Counters of a reconciler. ``retry_in_s`` is the wait that it is in, 0 while connected."""

    listings: int
    events: int
    failures: int
    compactions: int
    connected: bool
    retry_in_s: float


class AsyncReconciler:
    """Keeps a directory in step with a source: list, watch from there, and list again whenever the watch breaks.

    Used as ``async with``. Whatever the source does, the task goes on: errors are counted and answered with a wait that
    doubles from ``backoff_first_s`` to ``backoff_max_s``, each time shortened randomly so that many routers do not come
    back in step. While the source is away the directory keeps what it has.

    Args:
        source: A static list or a store.
        directory: What is kept in step.
        prefix: Keys to look at.
        grace_s: See RegistryBook.
        random: Uniform in [0, 1).
    """

    def __init__(
        self,
        source: ServerSource,
        directory: AsyncEndpointDirectory,
        *,
        prefix: str = PREFIX,
        backoff_first_s: float = 0.1,
        backoff_max_s: float = 5.0,
        grace_s: float = 30.0,
        random: Callable[[], float] = random.random,
    ) -> None:
        check_field(0 < backoff_first_s <= backoff_max_s, "backoff_first_s", "must be in (0, backoff_max_s]")
        self.book = RegistryBook(directory, grace_s)
        self._source = source
        self._prefix = prefix
        self._first_s = backoff_first_s
        self._max_s = backoff_max_s
        self._random = random
        self._task: asyncio.Task[None] | None = None
        self._suspect_timer: asyncio.TimerHandle | None = None
        self._synced = asyncio.Event()
        self._events = 0
        self._failures = 0
        self._compactions = 0
        self._listings = 0
        self._connected = False
        self._retry_in_s = 0.0
        self.last_error: BaseException | None = None

    async def __aenter__(self) -> AsyncReconciler:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="endpoint-reconciler")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop following the source. The directory keeps what it has."""
        if self._suspect_timer is not None:
            self._suspect_timer.cancel()
            self._suspect_timer = None
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def wait_synced(self, timeout_s: float | None = None) -> None:
        """Until the first listing was applied.

        Raises:
            EndpointTimeout: Not within ``timeout_s``; the last error of the source is chained.
        """
        await _wait(self._synced, timeout_s, "no listing", lambda: self.last_error)

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                snapshot = await self._source.snapshot(self._prefix)
                self._listings += 1
                self._apply_listing(snapshot)
                await self._follow(snapshot.revision)
                failures = 0
                self.last_error = StoreError("the watch ended")
            except StoreCompacted as error:
                self._compactions += 1
                self.last_error = error
            except Exception as error:  # noqa: BLE001 - a source may fail in any way; following it must never end
                self._failures += 1
                self.last_error = error
            if self._connected:
                failures = 0
            self._connected = False
            failures += 1
            limit_s = min(self._first_s * 2 ** min(failures - 1, 20), self._max_s)
            self._retry_in_s = limit_s * (0.5 + 0.5 * self._random())
            await asyncio.sleep(self._retry_in_s)

    async def _follow(self, revision: int) -> None:
        watch = self._source.watch(self._prefix, revision)
        try:
            async for events in watch:
                self._connected = True
                self._retry_in_s = 0.0
                now_s = asyncio.get_running_loop().time()
                for event in events:
                    self._events += 1
                    self.book.event_applied(event, now_s)
                self._arm_suspects()
        finally:
            close = getattr(watch, "aclose", None)
            if close is not None:
                await close()

    def _apply_listing(self, snapshot: Snapshot) -> None:
        self.book.list_applied(snapshot, asyncio.get_running_loop().time())
        self._arm_suspects()
        self._synced.set()

    def _arm_suspects(self) -> None:
        loop = asyncio.get_running_loop()
        if self._suspect_timer is not None:
            self._suspect_timer.cancel()
            self._suspect_timer = None
        next_s = self.book.settle_suspects(loop.time())
        if next_s != float("inf"):
            self._suspect_timer = loop.call_at(next_s, self._arm_suspects)

    def statistics(self) -> ReconcilerStatistics:
        """Counters so far."""
        return ReconcilerStatistics(
            self._listings, self._events, self._failures, self._compactions, self._connected, self._retry_in_s
        )


@dataclass(frozen=True, slots=True)
class PublisherStatistics:
    """Counters of a publisher."""

    registrations: int
    keep_alives: int
    failures: int
    lease_losses: int
    registered: bool
    superseded: bool


class AsyncLeasePublisher:
    """Keeps a published owner registered: a lease kept alive, registered anew when it was lost, withdrawn at the end.

    A registration overwrites what an earlier lifetime left. When it was lost (a store away too long), it is put back only
    if nobody else has registered meanwhile; somebody else's newer registration ends this one (``superseded``). The
    withdrawal is compare-and-delete, so a late one never removes the successor.

    Args:
        store: Where.
        owner: Published, or soon: until then nothing is registered.
        server: What routers dial.
        ttl_s: Lease time; kept alive every third of it.
        prefix: Begin of the key.
        random: Uniform in [0, 1).
    """

    def __init__(
        self,
        store: LeaseStore,
        owner: EndpointOwner,
        server: str,
        ttl_s: float = 10.0,
        *,
        prefix: str = PREFIX,
        random: Callable[[], float] = random.random,
    ) -> None:
        check_field(ttl_s > 0, "ttl_s", "must be > 0")
        self._store = store
        self._owner = owner
        self._server = server
        self._ttl_s = ttl_s
        self._key = registration_key(owner.role, owner.owner_id, prefix)
        self._random = random
        self._lease = 0
        self._revision = 0
        self._value: bytes | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._done = asyncio.Event()
        self._registrations = 0
        self._keep_alives = 0
        self._failures = 0
        self._losses = 0
        self._superseded = asyncio.Event()
        self.last_error: BaseException | None = None

    async def __aenter__(self) -> AsyncLeasePublisher:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="endpoint-publisher")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    async def wait_registered(self, timeout_s: float | None = None) -> None:
        """Until the first registration stands in the store.

        Raises:
            ProtocolViolation: Another instance registered as this owner; this one is superseded.
            EndpointTimeout: Not within ``timeout_s``; the last error of the store is chained.
        """
        await _wait(self._done, timeout_s, "no registration", lambda: self.last_error)
        if self._superseded.is_set():
            raise ProtocolViolation(f"{self._owner.owner_id}: superseded by another instance") from self.last_error

    async def wait_superseded(self) -> None:
        """Until another instance has registered as this owner: no router finds this one any more, and it ends or is named anew.

        ``last_error`` says so as well; waiting for it is how a host is told after the first registration.
        """
        await self._superseded.wait()

    def update(self) -> None:
        """The owner's record changed (draining): write it now instead of at the next keep-alive."""
        self._wake.set()

    async def drain(self, timeout_s: float) -> int:
        """End the owner's lifetime: take nothing new, say so in the store, wait for what is in flight, withdraw.

        Args:
            timeout_s: Longest wait for what is in flight.

        Returns:
            Admissions that were still in flight then and are abandoned: the caller fails them (count).

        Raises:
            InvalidTransition: Nothing is published. Nothing changed.
        """
        owner = self._owner
        owner.start_draining()
        self.update()
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + timeout_s
        while owner.in_flight and now_s() < until_s:
            await asyncio.sleep(min(_DRAIN_POLL_S, max(0.0, until_s - now_s())))
        before = owner.statistics().abandoned
        owner.retire(owner.generation, abandon=True)
        self.update()
        return owner.statistics().abandoned - before

    async def _run(self) -> None:
        while not self._superseded.is_set():
            wait_s = self._ttl_s / 3
            try:
                await self._step()
            except Exception as error:  # noqa: BLE001 - a store may fail in any way; keeping the registration must not end
                self._failures += 1
                self.last_error = error
                wait_s = min(wait_s, 1.0)
            self._wake.clear()
            try:
                async with asyncio.timeout(wait_s * (0.5 + 0.5 * self._random())):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _step(self) -> None:
        record = self._owner.record()
        if record is None:
            if self._value is not None:
                await self._withdraw()
            return
        value = Registration(server=self._server, role=self._owner.role, record=record).encode()
        if self._lease:
            if not await self._store.keep_alive(self._lease):
                self._lease = 0
                self._value = None
                self._losses += 1
            else:
                self._keep_alives += 1
                if value == self._value and await self._stands():
                    return
        if not self._lease:
            self._lease = await self._store.grant(self._ttl_s)
        revision = await self._put(value)
        if revision is None:
            self._value = None
            self.last_error = ProtocolViolation(f"{self._key} is registered by another instance")
            self._done.set()
            self._superseded.set()
            await self._store.revoke(self._lease)
            self._lease = 0
            return
        self._registrations += 1
        self._revision = revision
        self._value = value
        self._done.set()

    async def _stands(self) -> bool:
        """Whether the registration is as it was left: a lease lives on when somebody else took the key over."""
        snapshot = await self._store.snapshot(self._key)
        return snapshot.revisions.get(self._key) == self._revision

    async def _put(self, value: bytes) -> int | None:
        """Write; None when somebody else's registration stands there."""
        store, key = self._store, self._key
        if not self._revision:
            return await store.put(key, value, self._lease)  # the first one overwrites what an earlier lifetime left
        revision = await store.put(key, value, self._lease, self._revision if self._value is not None else 0)
        if revision is not None:
            return revision
        # The key is not as we left it: gone, or ours by a write whose answer was lost, or a successor's.
        snapshot = await store.snapshot(key)
        stored = snapshot.items.get(key)
        if stored is None:
            return await store.put(key, value, self._lease, 0)
        record = decode_registration(stored).record
        if record is None or record.generation != self._owner.generation:
            return None
        return await store.put(key, value, self._lease, snapshot.revisions[key])

    async def _withdraw(self) -> None:
        await self._store.compare_and_delete(self._key, self._revision)
        self._value = None
        if self._lease:
            await self._store.revoke(self._lease)
            self._lease = 0

    async def aclose(self) -> None:
        """Withdraw the registration, for at most 2 s; a store that cannot be reached lets the lease run out."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._done.clear()  # used again, it is waited for again
        if self._superseded.is_set():
            self._done.set()
        if self._value is None and not self._lease:
            return
        try:
            async with asyncio.timeout(2.0):
                if self._value is not None:
                    await self._withdraw()
                else:  # cancelled while it wrote, perhaps after the store had it: what hangs on our lease goes with it
                    await self._store.revoke(self._lease)
                    self._lease = 0
        except Exception as error:  # noqa: BLE001 - a store may fail in any way; the lease runs out then
            self._failures += 1
            self.last_error = error

    def statistics(self) -> PublisherStatistics:
        """Counters so far."""
        return PublisherStatistics(
            registrations=self._registrations,
            keep_alives=self._keep_alives,
            failures=self._failures,
            lease_losses=self._losses,
            registered=self._value is not None,
            superseded=self._superseded.is_set(),
        )


async def _wait(
    event: asyncio.Event, timeout_s: float | None, what: str, last_error: Callable[[], BaseException | None]
) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        error = last_error()
        detail = f"; last error: {error}" if error is not None else ""
        raise EndpointTimeout(f"{what} within {timeout_s:g} s{detail}") from error
