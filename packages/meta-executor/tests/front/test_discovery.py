"""Instances register themselves and the front finds them: the sealed store, a registration, and a whole service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import yaml

from endpoint_lifecycle import AsyncEndpointDirectory, EndpointOwner, MemoryLeaseStore, decode_registration
from endpoint_lifecycle.testing import check_lease_store, run_virtual
from meta_executor import wire
from meta_executor.api.endpoint import OwnedEndpoint
from meta_executor.config import ConfigError, DiscoveryConfig, RunSpec, ServiceConfig, apply_environment, service_config
from meta_executor.discovery import Registration, SealedStore, following, open_store, registry_prefix
from meta_executor.front.legs import LegClient
from meta_executor.supervise.launch import Launcher

KEY = bytes.fromhex("ab" * 32)


def run_spec(folder: Path, store: str | None, lease_s: float = 3.0) -> RunSpec:
    folder.mkdir(exist_ok=True)
    (folder / "key").write_text(KEY.hex())
    service = ServiceConfig(discovery=DiscoveryConfig(store=store, lease_s=lease_s))
    return RunSpec(run_id="r1", run_dir=str(folder), launcher_pid=os.getpid(), service=service, instances=())


def published(owner_id: str = "ctx-0") -> EndpointOwner:
    owner = EndpointOwner(owner_id, "process-1", "context")
    owner.finalize().publish(["tcp://127.0.0.1:7000"])
    return owner


def test_a_sealed_store_conforms() -> None:
    """It is a store like any other: the suite of endpoint-lifecycle, on a clock that runs by itself."""

    async def make() -> SealedStore:
        return SealedStore(MemoryLeaseStore(), KEY)

    async def wait(ttl_s: float) -> None:
        await asyncio.sleep(ttl_s + 0.1)

    run_virtual(check_lease_store(make, wait))


@pytest.mark.asyncio
async def test_what_was_written_without_the_key_is_not_there() -> None:
    """A value of somebody else, one that was changed, and one that was moved under another name: in listings and in changes."""
    inner = MemoryLeaseStore()
    ours, other = SealedStore(inner, KEY), SealedStore(inner, b"x" * 32)
    lease = await ours.grant(30.0)
    await ours.put("/a/1", b"one", lease)
    stored = (await inner.snapshot("/a/")).items["/a/1"]
    seen = []

    async def follow() -> None:
        async for events in ours.watch("/a/", revision):
            seen.extend((event.key, event.value) for event in events)

    revision = (await ours.snapshot("/a/")).revision
    following = asyncio.create_task(follow())
    await other.put("/a/2", b"two", lease)
    await inner.put("/a/3", stored, lease)
    await inner.put("/a/4", stored[:-1] + b"X", lease)
    await inner.put("/a/5", b"", lease)
    await ours.put("/a/6", b"six", lease)
    assert (await ours.snapshot("/a/")).items == {"/a/1": b"one", "/a/6": b"six"}
    async with asyncio.timeout(10):
        while len(seen) < 5:
            await asyncio.sleep(0.01)
    assert seen == [("/a/2", None), ("/a/3", None), ("/a/4", None), ("/a/5", None), ("/a/6", b"six")]
    assert ours.unsealed == 8
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


def test_a_registration_stands_while_its_instance_lives(tmp_path: Path) -> None:
    """Construction returns with the registration in the store, under the run's own prefix; close withdraws it."""
    run = run_spec(tmp_path / "run", str(tmp_path / "registry"))
    owner = published()
    registration = Registration(run, owner, "http://127.0.0.1:8101")

    async def found() -> list[str]:
        async with contextlib.aclosing(open_store(run)) as store:
            return sorted((await store.snapshot(registry_prefix(run))).items)

    beside = Registration(msgspec.structs.replace(run, run_id="r2"), published(), "http://127.0.0.1:8102")
    service = registry_prefix(run)
    assert asyncio.run(found()) == [f"{service}r1/context/ctx-0", f"{service}r2/context/ctx-0"]
    assert KEY.hex()[:8] not in service
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "key").write_text("cd" * 32)
    assert registry_prefix(msgspec.structs.replace(run, run_dir=str(tmp_path / "other"))) != service
    beside.close()
    registration.close()
    assert not registration._thread.is_alive()
    registration.close()
    assert asyncio.run(found()) == []


def test_an_instance_whose_name_another_process_took_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would serve on and wonder why nobody comes: its log names what happened."""
    run = run_spec(tmp_path / "run", str(tmp_path / "registry"), lease_s=0.5)
    first = Registration(run, published(), "http://127.0.0.1:8101")
    second = Registration(run, published(), "http://127.0.0.1:8102")
    deadline = time.monotonic() + 20
    while "ctx-0 is registered by another process" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.close()
    second.close()


def test_a_drain_is_registered_when_it_begins(tmp_path: Path) -> None:
    """Fronts pick it no more from then on; the lease, kept alive every third of its time, would tell them much later."""
    run = run_spec(tmp_path / "run", str(tmp_path / "registry"), lease_s=3600.0)
    owner = published()
    endpoint = OwnedEndpoint(owner, wire.ServerInfo(ready=True, state="", role="context", owner_id="", instance_id=""))
    registration = Registration(run, owner, "http://127.0.0.1:8101")
    endpoint.on_draining = registration.update

    async def state() -> str:
        async with contextlib.aclosing(open_store(run)) as store:
            (value,) = (await store.snapshot(registry_prefix(run))).items.values()
            record = decode_registration(value).record
            return "" if record is None else record.state

    assert asyncio.run(state()) == "published"
    endpoint.start_draining()
    deadline = time.monotonic() + 20
    while asyncio.run(state()) != "draining":
        assert time.monotonic() < deadline
    registration.close()
    registration.update()


def test_a_store_that_fails_after_the_registration_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for the registration any more: the log has the error, and the instance still leaves."""

    async def broken(self: SealedStore) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(SealedStore, "aclose", broken)
    registration = Registration(
        run_spec(tmp_path / "run", str(tmp_path / "registry")), published(), "http://127.0.0.1:8101"
    )
    assert "the disk is gone" not in caplog.text
    registration.close()
    assert "the registration has ended with an error" in caplog.text and "the disk is gone" in caplog.text


def test_a_store_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instance does not come up unfound: the setting, the place and the reason."""
    everybody = tmp_path / "everybody"
    everybody.mkdir()
    everybody.chmod(0o777)
    monkeypatch.setattr("meta_executor.discovery.STORE_TIMEOUT_S", 1.0)
    with pytest.raises(ConfigError, match=r"discovery\.store.*everybody may write there"):
        Registration(run_spec(tmp_path / "run", str(everybody)), published(), "http://127.0.0.1:8101")

    async def front() -> None:
        run = run_spec(tmp_path / "run", str(everybody))
        async with AsyncEndpointDirectory(dict) as directory, following(run, directory):  # type: ignore[arg-type]
            raise AssertionError("a front that finds nobody began")

    with pytest.raises(ConfigError, match=r"discovery\.store.*everybody may write there"):
        asyncio.run(front())
    with pytest.raises(ConfigError, match="no store is configured"):
        open_store(run_spec(tmp_path / "run", None))
    with pytest.raises(ConfigError, match="want a folder, the URL of an etcd, or null"):
        service_config({"discovery": {"store": ""}})


# -- the front --------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_instance_that_was_found_is_asked_once_per_lifetime_where_its_stream_ends(make_cluster) -> None:  # type: ignore[no-untyped-def]
    """Its registration has the record, so nobody has fetched it: the first leg of each generation asks, the others do not."""
    async with make_cluster() as cluster, contextlib.AsyncExitStack() as stack:
        legs = LegClient(KEY.hex())
        stack.push_async_callback(legs.close)
        fake = cluster.context
        before = fake.info_calls
        for generation in ("g1", "g1", "g2", "g2"):
            fake.generation = generation
            assert await legs._stream(fake.url, generation) is None, "the fake offers no stream"
        assert fake.info_calls == before + 2
        await legs.abort(fake.url, 1, "its client has gone")
        assert fake.aborts == [1] and fake.info_calls == before + 2


@pytest.mark.asyncio
async def test_what_registers_is_served_shown_and_named_when_it_has_left(make_cluster) -> None:  # type: ignore[no-untyped-def]
    """A second context instance comes and goes while the front runs."""
    async with make_cluster() as cluster:
        service, url = cluster.service, "http://127.0.0.1:9"
        record = published("ctx-7").record()
        assert record is not None
        service.directory.apply_set(url, record)
        assert [s.owner_id for s in service.servers] == ["ctx-0", "ctx-7", "gen-0"]
        shown = (await cluster.client.get(f"{cluster.url}/server_info")).json()["servers"]
        assert {"owner_id": "ctx-7", "role": "context", "url": url, "status": "ready"} in shown
        service.directory.apply_delete(url, record.generation)
        assert [s.owner_id for s in service.servers] == ["ctx-0", "gen-0"]
        assert service.servers.owner_of(url) == "ctx-7" and service.servers.owner_of("http://nobody") == "http://nobody"


# -- a whole service --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder_store(folder: Path) -> Iterator[str]:
    yield str(folder / "registry")


@contextlib.contextmanager
def etcd_store(folder: Path) -> Iterator[str]:
    etcd = shutil.which("etcd")
    if etcd is None:
        pytest.skip("MISSING COVERAGE: no etcd binary (Debian: apt-get install etcd-server)")
    pytest.importorskip("etcd3gw", reason="MISSING COVERAGE: the extra `etcd` (etcd3gw) is not installed")
    url, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with (folder / "etcd.log").open("ab") as log:
        process = subprocess.Popen(
            [
                etcd,
                *("--name", "t", "--data-dir", str(folder / "data"), "--unsafe-no-fsync"),
                *("--listen-client-urls", url, "--advertise-client-urls", url),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"t={peer}"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield url
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def served(launcher: Launcher, limit_s: float = 60.0) -> dict[str, str]:
    """Wait until a completion succeeds; where each instance is, by the front's own word."""
    deadline = time.monotonic() + limit_s
    with httpx.Client(base_url=launcher.front_url, timeout=20.0, trust_env=False) as client:
        body = {"model": "synthetic", "prompt": "Say hello", "max_tokens": 8, "temperature": 0}
        while (answer := client.post("/v1/completions", json=body)).status_code != 200:
            assert time.monotonic() < deadline, answer.text
            launcher.turn(0.1)
        assert answer.json()["usage"]["completion_tokens"] == 8
        info = client.get("/server_info", headers=launcher.key_header).json()
        return {server["owner_id"]: server["url"] for server in info["servers"]}


@pytest.mark.service
@pytest.mark.timeout(300)
@pytest.mark.parametrize("make_store", [folder_store, pytest.param(etcd_store, marks=pytest.mark.etcd)])
def test_a_front_finds_instances_and_those_that_come_back_elsewhere(make_store) -> None:  # type: ignore[no-untyped-def]
    """Nobody tells the front an address: it serves, a context rank is killed, its instance comes back at another port and is
    found there; when all is drained nothing is registered any more."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    side = {"max_num_tokens": 64, "kv_cache_config": {"max_tokens": 4096}}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        place = stack.enter_context(make_store(folder))
        config = service_config(
            {
                "port": 0,
                "run_dir": str(folder / "r"),
                "engine": {"kind": "synthetic", "synthetic": {"vocab_size": 997, "step_ms": 1}},
                "discovery": {"store": place, "lease_s": 3.0},
                "context_servers": {**side, "pipeline_parallel_size": 1, "proxy": "spawn"},
                "generation_servers": side,
            }
        )
        lines: list[str] = []
        launcher = Launcher(apply_environment(config, {}), say=lines.append, restart="instance")
        with launcher.started():
            command = Path(f"/proc/{launcher.processes()['front']}/cmdline").read_bytes()
            assert b"--server" not in command and b"http" not in command
            first = served(launcher)
            assert first == launcher.urls() and set(first) == {"ctx-0", "gen-0"}
            os.kill(launcher.processes()["ctx-0/rank0"], signal.SIGKILL)
            deadline = time.monotonic() + 100
            while not (launcher.restarts == 1 and launcher._components["ctx-0"].ready):
                assert time.monotonic() < deadline, lines
                launcher.turn(0.1)
            again = served(launcher)
            assert again == launcher.urls() and again["ctx-0"] != first["ctx-0"] and again["gen-0"] == first["gen-0"]
            run = msgspec.structs.replace(launcher.run, run_dir=str(folder))
            (folder / "key").write_text(launcher._key_hex)

        async def left() -> list[str]:
            async with contextlib.aclosing(open_store(run)) as store:
                return sorted((await store.snapshot(registry_prefix(run))).items)

        assert asyncio.run(left()) == []


@pytest.mark.service
@pytest.mark.timeout(200)
def test_parts_that_were_started_apart_meet_in_the_store() -> None:
    """Two context instances, a generation instance and a front, each a start of its own with one key; nobody names an address.
    One context instance leaves: it is shown no more and the other one serves."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    (folder / "key").write_text(KEY.hex())
    (folder / "key").chmod(0o600)
    config = {
        "port": 0,
        "run_dir": str(folder / "r"),
        "key_file": str(folder / "key"),
        "engine": {"kind": "synthetic"},
        "discovery": {"store": str(folder / "registry"), "lease_s": 3.0},
        "context_servers": {"pipeline_parallel_size": 1},
        "generation_servers": {"tensor_parallel_size": 1},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    commands: list[subprocess.Popen[str]] = []

    def start(*words: str) -> None:
        program = [sys.executable, "-m", "meta_executor", *words, str(folder / "c.yaml")]
        commands.append(subprocess.Popen(program, stderr=subprocess.PIPE, text=True))

    def address(command: subprocess.Popen[str]) -> str:
        said = []
        for line in command.stderr or ():
            said.append(line)
            if ": ready at " in line:
                return line.split()[3]
        raise AssertionError("".join(said))

    def end(command: subprocess.Popen[str]) -> int:
        command.send_signal(signal.SIGINT)
        command.communicate(timeout=60)
        return command.returncode

    try:
        for words in (("front",), ("serve", "context"), ("serve", "context"), ("serve", "generation")):
            start(*words)
        urls = [address(command) for command in commands[1:]]
        front = address(commands[0])
        with httpx.Client(
            base_url=front, timeout=20.0, trust_env=False, headers={wire.KEY_HEADER: KEY.hex()}
        ) as client:

            def shown(wanted: set[str]) -> None:
                deadline = time.monotonic() + 30
                while (now := {s["url"] for s in client.get("/server_info").json()["servers"]}) != wanted:
                    assert time.monotonic() < deadline, now
                    time.sleep(0.05)

            def answered() -> None:
                body = {"model": "synthetic", "prompt": "abcdefgh", "max_tokens": 4, "temperature": 0}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

            shown(set(urls))
            answered()
            assert end(commands.pop(1)) == 0
            shown(set(urls[1:]))
            answered()
        assert [end(command) for command in commands] == [0, 0, 0]
        commands.clear()
    finally:
        for command in commands:
            command.kill()
            command.wait()
        shutil.rmtree(folder, ignore_errors=True)
