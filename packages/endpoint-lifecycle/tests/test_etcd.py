"""The store on a real etcd, started for the test: conformance, watches, restarts, compaction, loss."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("etcd3gw", reason="MISSING COVERAGE: the extra `etcd` (etcd3gw) is not installed")

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncLeasePublisher,
    AsyncReconciler,
    ConfigError,
    DirectoryConfig,
    StoreCompacted,
    StoreError,
)
from endpoint_lifecycle.etcd import EtcdLeaseStore
from endpoint_lifecycle.testing import FakeTransport, FakeWorker, check_lease_store

ETCD = shutil.which("etcd")
pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(ETCD is None, reason="MISSING COVERAGE: no etcd binary (Debian: apt-get install etcd-server)"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One etcd of our own, on free ports, with its data in the test's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.peer_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        peer = f"http://127.0.0.1:{self.peer_port}"
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    ETCD or "etcd",
                    *("--name", "t", "--data-dir", str(self.folder / "data")),
                    *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", f"t={peer}", "--unsafe-no-fsync"),
                ],
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                    if b"true" in answer.read():
                        return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"etcd did not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    for attempt in range(3):  # the ports were free a moment ago; somebody else may have taken one
        try:
            server.start()
            break
        except AssertionError:
            server.kill()
            if attempt == 2:
                raise
            server.port, server.peer_port = free_port(), free_port()
            server.url = f"http://127.0.0.1:{server.port}"
            shutil.rmtree(tmp_path / "data", ignore_errors=True)
    yield server
    server.kill()


async def becomes(condition: Any, limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError("the condition did not come true")
        await asyncio.sleep(0.02)


def test_etcd_store_conforms(server: Server) -> None:
    async def make() -> EtcdLeaseStore:
        return EtcdLeaseStore(server.url)

    async def wait(ttl_s: float) -> None:
        await asyncio.sleep(ttl_s + 2.0)  # etcd looks at leases every half second and counts whole seconds

    asyncio.run(check_lease_store(make, wait))


def test_instance_is_followed_through_registration_draining_and_withdrawal(server: Server) -> None:
    async def main() -> None:
        worker = FakeWorker("http://a", "context", "ctx-0")
        directory = AsyncEndpointDirectory(FakeTransport(worker).fetch, DirectoryConfig(probe_ready_s=None))
        store, other = EtcdLeaseStore(server.url), EtcdLeaseStore(server.url)
        async with AsyncReconciler(store, directory) as reconciler:
            async with AsyncLeasePublisher(other, worker.owner, "http://a", 3.0) as publisher:
                await becomes(lambda: directory.ready(context=1))
                await asyncio.sleep(4.0)  # kept alive beyond its lease
                assert directory.ready(context=1)
                worker.owner.start_draining()
                publisher.update()
                await becomes(lambda: directory.status("http://a").value == "draining")
            await becomes(lambda: directory.servers() == ())
            assert reconciler.statistics().failures == 0
        await directory.aclose()
        await store.aclose()
        await other.aclose()
        await store.aclose()

    asyncio.run(main())


def test_killed_etcd_keeps_routes_and_everything_heals_when_it_is_back(server: Server) -> None:
    async def main() -> None:
        worker = FakeWorker("http://a", "context", "ctx-0")
        late = FakeWorker("http://b", "context", "ctx-1")
        directory = AsyncEndpointDirectory(FakeTransport(worker, late).fetch, DirectoryConfig(probe_ready_s=None))
        store = EtcdLeaseStore(server.url, timeout_s=1.0)
        async with (
            AsyncReconciler(store, directory, backoff_max_s=0.5) as reconciler,
            AsyncLeasePublisher(store, worker.owner, "http://a", 3.0) as publisher,
        ):
            await becomes(lambda: directory.ready(context=1))
            server.kill()
            await becomes(lambda: reconciler.statistics().failures > 0 and publisher.statistics().failures > 0)
            async with directory.reserve("context", 1) as reservation:
                assert reservation.server == "http://a"
            with pytest.raises(StoreError):
                await store.snapshot("/")
            await asyncio.to_thread(server.start)
            async with AsyncLeasePublisher(store, late.owner, "http://b", 3.0):
                await becomes(lambda: directory.ready(context=2))
                assert publisher.statistics().registered
        await directory.aclose()
        await store.aclose()

    asyncio.run(main())


def test_etcd_that_falls_silent_is_noticed_and_found_again(server: Server) -> None:
    """Stopped, not killed: the connection stands and nothing comes. The idle bound ends the watch; a listing tells."""

    async def main() -> None:
        worker = FakeWorker("http://a", "context", "ctx-0")
        directory = AsyncEndpointDirectory(FakeTransport(worker).fetch, DirectoryConfig(probe_ready_s=None))
        store = EtcdLeaseStore(server.url, timeout_s=0.5, idle_s=1.0)
        async with AsyncReconciler(store, directory, backoff_max_s=0.3) as reconciler:
            await reconciler.wait_synced()
            assert server.process is not None
            server.process.send_signal(signal.SIGSTOP)
            try:
                await becomes(lambda: reconciler.statistics().failures >= 2)
            finally:
                server.process.send_signal(signal.SIGCONT)
            publishing = EtcdLeaseStore(server.url)
            async with AsyncLeasePublisher(publishing, worker.owner, "http://a", 5.0):
                await becomes(lambda: directory.ready(context=1))
                listings = reconciler.statistics().listings
                await becomes(lambda: reconciler.statistics().listings > listings)  # quiet: it looks again by itself
                assert directory.ready(context=1)
            await publishing.aclose()
        await directory.aclose()
        await store.aclose()

    asyncio.run(main())


def test_compacted_revision_and_closed_store_are_told(server: Server) -> None:
    async def main() -> None:
        store = EtcdLeaseStore(server.url)
        lease = await store.grant(60)
        revision = 0
        for number in range(5):
            revision = await store.put("/k/a", str(number).encode(), lease) or 0
        await store._call(lambda: store._client.post("/kv/compaction", {"revision": str(revision), "physical": True}))
        watch = store.watch("/k/", 0)
        with pytest.raises(StoreCompacted):
            while True:
                await anext(watch)
        live = store.watch("/k/", revision)
        with contextlib.suppress(StopAsyncIteration):
            assert await anext(live) == []  # the watch stands
        await live.aclose()
        await store.aclose()
        with pytest.raises(StoreError, match="closed"):
            await store.snapshot("/k/")

    asyncio.run(main())


def test_wrong_address_is_a_mapped_error_in_bounded_time() -> None:
    async def main() -> None:
        store = EtcdLeaseStore(f"http://127.0.0.1:{free_port()}", timeout_s=0.5)
        for call in (store.snapshot("/"), store.grant(5), store.keep_alive(1), store.put("/a", b"", 1)):
            with pytest.raises(StoreError) as caught:
                await call
            assert caught.value.__cause__ is not None
        with pytest.raises(StoreError):
            await anext(store.watch("/", 0))
        await store.aclose()
        for url in ("localhost:2379", "ftp://x", "http://"):
            with pytest.raises(ConfigError):
                EtcdLeaseStore(url)

    asyncio.run(main())
