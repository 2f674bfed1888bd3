"""The lease store in a folder: conformance, several processes, kills, locks, files that are not ours."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncLeasePublisher,
    AsyncReconciler,
    ConfigError,
    DirectoryConfig,
    FileLeaseStore,
    LeaseStore,
    MemoryLeaseStore,
    StoreCompacted,
    StoreError,
)
from endpoint_lifecycle.testing import FakeTransport, FakeWorker, check_lease_store

EXAMPLE = Path(__file__).parent.parent / "examples" / "discovery.py"


async def _sleep(ttl_s: float) -> None:
    await asyncio.sleep(ttl_s + 0.1)


@pytest.mark.parametrize("kind", ["memory", "file", "file seen by another"])
def test_stores_conform(tmp_path: Path, kind: str) -> None:
    """Every discovery keeps the same promises; etcd's part of this is in test_etcd.py."""

    class Two:
        """Writes through one store, reads through another: two hosts with one folder."""

        def __init__(self) -> None:
            self.one, self.other = (
                FileLeaseStore(tmp_path / "r", poll_s=0.02),
                FileLeaseStore(tmp_path / "r", poll_s=0.02),
            )

        def __getattr__(self, name: str) -> Any:
            return getattr(self.other if name in ("snapshot", "watch", "keep_alive") else self.one, name)

        async def aclose(self) -> None:
            await self.one.aclose()
            await self.other.aclose()

    async def make() -> Any:
        if kind == "memory":
            return MemoryLeaseStore()
        return Two() if kind == "file seen by another" else FileLeaseStore(tmp_path / "r", poll_s=0.02)

    asyncio.run(check_lease_store(make, _sleep))


def in_store(tmp_path: Path, body: Any, **options: Any) -> Any:
    async def main() -> Any:
        store = FileLeaseStore(tmp_path / "r", poll_s=0.02, **options)
        try:
            return await body(store)
        finally:
            await store.aclose()

    return asyncio.run(main())


def test_the_state_outlives_its_processes(tmp_path: Path) -> None:
    async def first(store: LeaseStore) -> int | None:
        return await store.put("/a", b"\xff\x00", await store.grant(60.0))

    async def second(store: LeaseStore) -> Any:
        return await store.snapshot("/")

    revision = in_store(tmp_path, first)
    snapshot = in_store(tmp_path, second)
    assert dict(snapshot.items) == {"/a": b"\xff\x00"}
    assert dict(snapshot.revisions) == {"/a": revision}


def test_expiry_is_seen_by_whoever_looks(tmp_path: Path) -> None:
    """No process has to live for a lease to end."""
    now_s = 1000.0

    async def write(store: LeaseStore) -> None:
        await store.put("/a", b"1", await store.grant(5.0))

    async def read(store: LeaseStore) -> Any:
        return (await store.snapshot("/")).items

    in_store(tmp_path, write, now_s=lambda: now_s)
    assert in_store(tmp_path, read, now_s=lambda: now_s + 4.9)
    assert not in_store(tmp_path, read, now_s=lambda: now_s + 5.0)


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"format":2}', b'{"values":{"/a":{"value":"x"}}}', b'{"revision":"x"}', b"\xff", b"null"],
)
def test_a_file_that_is_not_a_state_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    """By name; it is not written over."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "state.json").write_bytes(content)

    async def body(store: LeaseStore) -> None:
        for call in (store.snapshot("/"), store.grant(5.0)):
            with pytest.raises(StoreError, match=r"state\.json: "):
                await call

    in_store(tmp_path, body)
    assert (tmp_path / "r" / "state.json").read_bytes() == content


def test_folders_and_files_that_others_could_plant_are_refused(tmp_path: Path) -> None:
    """A link in place of the folder, the lock or the state; a folder that everybody may write to."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "r"

    async def fails(store: LeaseStore) -> None:
        with pytest.raises(StoreError, match=str(folder)):
            await store.grant(5.0)

    folder.symlink_to(elsewhere)
    in_store(tmp_path, fails)
    folder.unlink()
    folder.mkdir()
    for name in ("lock", "state.json", "state.json.next"):
        (folder / name).symlink_to(elsewhere / "target")
        in_store(tmp_path, fails)
        (folder / name).unlink()
    folder.chmod(0o777)
    in_store(tmp_path, fails)
    folder.chmod(0o770)
    assert not list(elsewhere.iterdir())
    folder.rename(tmp_path / "moved")
    folder.write_text("a file")
    in_store(tmp_path, fails)


def test_a_lock_that_is_held_too_long_is_an_error_and_passes(tmp_path: Path) -> None:
    async def body(store: LeaseStore) -> None:
        await store.grant(5.0)
        with (tmp_path / "r" / "lock").open("rb+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(StoreError, match=r"locked by another process for more than 0\.1 s"):
                await store.grant(5.0)
        await store.grant(5.0)

    in_store(tmp_path, body, timeout_s=0.1)


WRITER = """
import asyncio, sys
from endpoint_lifecycle import FileLeaseStore
async def main():
    store = FileLeaseStore(sys.argv[1], timeout_s=60)
    lease = await store.grant(600)
    print("ready", flush=True)
    for number in range(int(sys.argv[3])):
        await store.put("/" + sys.argv[2], str(number).encode(), lease)
    await store.aclose()
asyncio.run(main())
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Three processes, 40 changes each, one watcher: every change has a revision of its own and is seen, in order."""

    async def main() -> None:
        store = FileLeaseStore(tmp_path / "r", poll_s=0.01, timeout_s=60.0)
        await store.grant(600.0)
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "r"), name, "40"], stdout=subprocess.DEVNULL)
            for name in "abc"
        ]
        seen: list[Any] = []
        watch = store.watch("/", 0)
        while len(seen) < 120:
            seen.extend(await asyncio.wait_for(anext(watch), 100.0))
        await watch.aclose()
        assert [event.revision for event in seen] == list(range(1, 121))
        for name in "abc":
            assert [event.value for event in seen if event.key == f"/{name}"] == [str(n).encode() for n in range(40)]
        assert [writer.wait(30) for writer in writers] == [0, 0, 0]
        await store.aclose()

    asyncio.run(main())


def test_a_process_that_is_killed_in_the_middle_leaves_a_whole_state(tmp_path: Path) -> None:
    """Killed while it writes as fast as it can: the lock is free, the state is one of those that it wrote."""
    for round_ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "r"), f"k{round_}", "100000"], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.05 * (round_ + 1))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()

        async def body(store: LeaseStore) -> None:
            before = await store.snapshot("/")
            assert await store.put("/x", b"1", await store.grant(60.0)) == before.revision + 1

        in_store(tmp_path, body)
        json.loads((tmp_path / "r" / "state.json").read_bytes())


def test_a_watch_that_fell_behind_is_told(tmp_path: Path) -> None:
    """Compacted, and a folder that was emptied: list again."""

    async def body(store: LeaseStore) -> None:
        lease = await store.grant(60.0)
        for number in range(9):
            await store.put("/a", str(number).encode(), lease)
        with pytest.raises(StoreCompacted):
            await anext(store.watch("/", 2))
        watch = store.watch("/", 9)
        assert await anext(watch) == []
        os.unlink(tmp_path / "r" / "state.json")
        with pytest.raises(StoreError, match="began anew"):
            await anext(watch)

    in_store(tmp_path, body, history_max=3)


def test_a_directory_follows_a_folder_through_its_loss(tmp_path: Path) -> None:
    """Registered, folder emptied, registered again by itself: the server stays known all the while."""

    async def main() -> None:
        worker = FakeWorker("http://a", "context", "ctx-0")
        directory = AsyncEndpointDirectory(FakeTransport(worker).fetch, DirectoryConfig(probe_ready_s=None))
        mine, theirs = (FileLeaseStore(tmp_path / "r", poll_s=0.02) for _ in range(2))
        async with AsyncReconciler(mine, directory, backoff_max_s=0.2):
            async with AsyncLeasePublisher(theirs, worker.owner, "http://a", 1.5) as publisher:
                await publisher.wait_registered(20.0)
                await becomes(lambda: directory.ready(context=1))
                (tmp_path / "r" / "state.json").unlink()
                await becomes(lambda: publisher.statistics().registrations >= 2)
                assert directory.ready(context=1)
            await becomes(lambda: directory.servers() == ())
        await directory.aclose()
        await mine.aclose()
        await theirs.aclose()

    asyncio.run(main())


async def becomes(condition: Any, limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("bad", [{"timeout_s": 0}, {"poll_s": 0.0}, {"history_max": 0}, {"poll_s": float("nan")}])
def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        FileLeaseStore(tmp_path, **bad)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        store = FileLeaseStore(tmp_path / "r")
        await store.aclose()
        await store.aclose()
        with pytest.raises(StoreError, match="closed"):
            await store.grant(1.0)

    asyncio.run(main())


def test_the_example_finds_instances_and_sees_them_go(tmp_path: Path) -> None:
    """Three processes and a folder: registered and found, drained on SIGTERM, gone; killed, gone by its lease."""

    def start(*given: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, str(EXAMPLE), *given], stdout=subprocess.PIPE, text=True)

    def read_until(process: subprocess.Popen[str], wanted: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == wanted:
                return
        raise AssertionError(f"the process ended before it said {wanted!r}")

    place = str(tmp_path / "r")
    front = start("front", place)
    a = start("instance", place, "http://a")
    b = start("instance", place, "http://b")
    # Reading blocks: whatever goes wrong, the processes end, and so does the reading.
    watchdog = threading.Timer(80.0, lambda: [process.kill() for process in (front, a, b)])
    watchdog.start()
    try:
        assert front.stdout is not None
        assert any("http://a ready" in line and "http://b ready" in line for line in front.stdout)
        a.send_signal(signal.SIGTERM)
        read_until(front, "servers http://b ready")
        assert a.wait(30) == 0
        b.kill()
        read_until(front, "servers")
        front.send_signal(signal.SIGTERM)
        assert front.wait(30) == 0
    finally:
        watchdog.cancel()
        for process in (front, a, b):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
