"""Instances register themselves, fronts find them: the store that a service's instances and front share.

endpoint-lifecycle does the work (leases, publishing, following). Here is which store a run uses, under which keys, and what
its values are worth: they are sealed with the run's key, because a front dials what it finds and shows its key there. Whoever
writes to the store without that key can withhold an instance, and never invent one.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager, suppress

import msgspec

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncLeasePublisher,
    AsyncReconciler,
    EndpointOwner,
    EndpointProfile,
    EndpointTimeout,
    FileLeaseStore,
    LeaseStore,
    Snapshot,
    StoreEvent,
)
from meta_executor import wire
from meta_executor.config import ConfigError, RunSpec

_LOG = logging.getLogger("meta_executor.discovery")
#: Begin of all keys.
_PREFIX = "/meta-executor/"
#: A store that has not answered by then, at the start of an instance or a front, cannot be used (s).
STORE_TIMEOUT_S = 30.0
_SEAL_BYTES = 32


def registry_prefix(run: RunSpec) -> str:
    """Where the registrations of a service stand, also of parts that were started apart: what has one key is one service."""
    return f"{_PREFIX}{hmac.digest(run.key(), b'meta-executor service', 'sha256')[:8].hex()}/"


def open_store(run: RunSpec) -> SealedStore:
    """The run's store; no call is made yet.

    Raises:
        ConfigError: None is configured, or its client is not installed.
    """
    place = run.service.discovery.store
    if place is None:
        raise ConfigError("discovery.store", "no store is configured")
    store: LeaseStore
    if place.startswith(("http://", "https://")):
        try:
            from endpoint_lifecycle.etcd import EtcdLeaseStore

            store = EtcdLeaseStore(place)
        except ImportError as error:
            raise ConfigError("discovery.store", f"{place}: {error}; pip install 'endpoint-lifecycle[etcd]'") from error
    else:
        store = FileLeaseStore(place)
    return SealedStore(store, run.key())


def profile_of(info: wire.ServerInfo) -> EndpointProfile:
    """What a front must know of an instance: the same whether it was registered or read from ``/server_info``."""
    return EndpointProfile(
        layout_fingerprint=info.profile,
        dp_size=info.attention_dp_size,
        pp_size=info.pipeline_parallel_size,
        tp_size=max(1, info.world_size // max(1, info.attention_dp_size * info.pipeline_parallel_size)),
        limits={} if info.limits is None else msgspec.to_builtins(info.limits),
        details={"model": info.model, "vocab_size": info.vocab_size},
    )


class SealedStore:
    """A ``LeaseStore`` whose values carry a MAC over key and value. One without it is as if it were not there.

    Args:
        store: Where.
        key: The run's.
    """

    def __init__(self, store: LeaseStore, key: bytes) -> None:
        self._store = store
        self._key = hmac.digest(key, b"meta-executor registrations", "sha256")
        #: Values that were passed over because nobody who has the key wrote them.
        self.unsealed = 0

    def _seal(self, key: str, value: bytes) -> bytes:
        return hmac.digest(self._key, hashlib.sha256(key.encode()).digest() + value, "sha256")

    def _opened(self, key: str, value: bytes | None) -> bytes | None:
        if value is None:
            return None
        if not hmac.compare_digest(value[:_SEAL_BYTES], self._seal(key, value[_SEAL_BYTES:])):
            self.unsealed += 1
            return None
        return value[_SEAL_BYTES:]

    async def grant(self, ttl_s: float) -> int:
        """See LeaseStore."""
        return await self._store.grant(ttl_s)

    async def keep_alive(self, lease_id: int) -> bool:
        """See LeaseStore."""
        return await self._store.keep_alive(lease_id)

    async def revoke(self, lease_id: int) -> None:
        """See LeaseStore."""
        await self._store.revoke(lease_id)

    async def put(self, key: str, value: bytes, lease_id: int, if_revision: int | None = None) -> int | None:
        """See LeaseStore."""
        return await self._store.put(key, self._seal(key, value) + value, lease_id, if_revision)

    async def compare_and_delete(self, key: str, revision: int) -> bool:
        """See LeaseStore."""
        return await self._store.compare_and_delete(key, revision)

    async def snapshot(self, prefix: str) -> Snapshot:
        """See ServerSource."""
        found = await self._store.snapshot(prefix)
        opened = {key: self._opened(key, value) for key, value in found.items.items()}
        return Snapshot(
            found.revision, {key: value for key, value in opened.items() if value is not None}, found.revisions
        )

    async def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Sequence[StoreEvent]]:
        """See ServerSource. A value without a seal takes the place of what stood there: that is gone."""
        changes = self._store.watch(prefix, after_revision)
        async with aclosing(changes):  # type: ignore[type-var]
            async for events in changes:
                yield [StoreEvent(each.key, self._opened(each.key, each.value), each.revision) for each in events]

    async def aclose(self) -> None:
        """See LeaseStore."""
        await self._store.aclose()


@asynccontextmanager
async def following(run: RunSpec, directory: AsyncEndpointDirectory) -> AsyncIterator[AsyncReconciler]:
    """Inside, the directory has what the run's store has, from the first listing on.

    Raises:
        ConfigError: The store could not be read within ``STORE_TIMEOUT_S``. What goes wrong later is waited out.
    """
    async with (
        aclosing(open_store(run)) as store,
        AsyncReconciler(store, directory, prefix=registry_prefix(run)) as reconciler,
    ):
        try:
            await reconciler.wait_synced(STORE_TIMEOUT_S)
        except EndpointTimeout as error:
            raise ConfigError("discovery.store", f"{run.service.discovery.store}: {error}") from error
        yield reconciler


class Registration:
    """Keeps an instance registered, in a thread of its own. Construction returns when it is.

    Args:
        run: With a store.
        owner: Published.
        url: Where the instance answers.

    Raises:
        ConfigError: The store cannot be used, or took nothing within ``STORE_TIMEOUT_S``.
    """

    def __init__(self, run: RunSpec, owner: EndpointOwner, url: str) -> None:
        self._run, self._owner, self._url = run, owner, url
        self._store = open_store(run)
        self._registered: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._publisher: AsyncLeasePublisher | None = None
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._keep, name="registration", daemon=True)
        self._thread.start()
        try:
            self._registered.result()
        except Exception as error:
            self._thread.join()
            raise ConfigError("discovery.store", f"{run.service.discovery.store}: {error}") from error

    def _keep(self) -> None:
        try:
            asyncio.run(self._published())
        except Exception as error:  # noqa: BLE001 - a store's, of any kind: told to who waits for the registration, or logged
            if self._registered.done():
                _LOG.warning("the registration has ended with an error", exc_info=error)
            else:
                self._registered.set_exception(error)

    async def _published(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with aclosing(self._store):
            publisher = AsyncLeasePublisher(
                self._store,
                self._owner,
                self._url,
                self._run.service.discovery.lease_s,
                prefix=f"{registry_prefix(self._run)}{self._run.run_id}/",  # a slot of this run alone
            )
            self._publisher = publisher
            async with publisher:
                await publisher.wait_registered(STORE_TIMEOUT_S)
                self._registered.set_result(None)
                ousted = asyncio.create_task(self._watch(publisher))
                await self._ended.wait()
                ousted.cancel()

    async def _watch(self, publisher: AsyncLeasePublisher) -> None:
        await publisher.wait_superseded()
        _LOG.warning("%s is registered by another process: fronts send nothing here any more", self._owner.owner_id)

    def update(self) -> None:
        """The owner's record has changed: write it now, not only when the lease is next kept alive. Any thread."""
        if self._publisher is not None:
            self._call(self._publisher.update)

    def close(self) -> None:
        """Withdraw, or let the lease run out if the store cannot be reached. Idempotent."""
        self._call(self._ended.set)
        self._thread.join()

    def _call(self, function: Callable[[], None]) -> None:
        if self._loop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # it has ended by itself meanwhile
                self._loop.call_soon_threadsafe(function)
