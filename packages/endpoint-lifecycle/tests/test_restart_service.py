"""Real processes behind real sockets: a context instance is killed and comes back at the same port, under load."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    DirectoryConfig,
    EndpointError,
    RequestIdGenerator,
)

pytestmark = pytest.mark.service
WORKER = Path(__file__).with_name("worker_process.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Instance:
    """One worker process at a fixed port."""

    def __init__(self, role: str, owner_id: str) -> None:
        self.role, self.owner_id = role, owner_id
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: asyncio.subprocess.Process | None = None
        self.generation = ""

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(WORKER), str(self.port), self.role, self.owner_id, stdout=asyncio.subprocess.PIPE
        )

    async def published(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        assert line, f"worker ended with {await self.process.wait()}"
        self.generation = json.loads(line)["generation"]
        return self.generation

    async def kill(self) -> None:
        if self.process is not None:
            if self.process.returncode is None:
                self.process.kill()
            await self.process.communicate()
            self.process = None


async def http(
    url: str, method: str, path: str, body: Any = None
) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        data = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        status_line = await reader.readline()
        if not status_line:
            raise ConnectionResetError("closed before the status line")
        while (line := await reader.readline()) not in (b"\r\n", b""):
            pass
        if not line:
            raise ConnectionResetError("closed in the head")
        return int(status_line.split()[1]), reader, writer
    except BaseException:
        writer.close()
        raise


async def get(url: str, path: str) -> bytes:
    status, reader, writer = await http(url, "GET", path)
    try:
        body = await reader.read()
    finally:
        writer.close()
    if status != 200:
        raise ConnectionError(f"{path}: {status}")
    return body


async def fetch(server: str) -> bytes:
    return await get(server, "/server_info")


class Client:
    """Sends one request after the other as a front would, and notes what became of each."""

    def __init__(self, directory: AsyncEndpointDirectory, ids: RequestIdGenerator) -> None:
        self.directory, self.ids = directory, ids
        self.results: list[tuple[float, str, str | None]] = []
        self.stop = False

    async def run(self) -> None:
        while not self.stop:
            generation: str | None = None
            try:
                generation = await self.once(self.ids.next_id())
                outcome = "ok"
            except (EndpointError, OSError) as error:
                outcome = type(error).__name__
                await asyncio.sleep(0.01)
            self.results.append((asyncio.get_running_loop().time(), outcome, generation))

    async def once(self, request_id: int) -> str | None:
        async with self.directory.reserve("context", request_id, timeout_s=1.0) as claim:
            for _ in range(2):
                claim.dispatched()
                try:
                    status, reader, writer = await http(
                        claim.server,
                        "POST",
                        "/v1/completions",
                        {"request_id": request_id, "endpoint_generation": claim.generation, "tokens": 3},
                    )
                except ConnectionRefusedError:
                    claim.unreachable()
                    raise
                try:
                    if status == 409:  # refused before anything was taken in: one refresh, one more sending
                        await claim.prove_stale()
                        continue
                    if status != 200:
                        raise ConnectionError(f"status {status}")
                    lines = []
                    while line := await reader.readline():
                        claim.renew()
                        lines.append(line)
                    if lines[-1:] != [b"end\n"]:
                        raise ConnectionResetError("cut")  # never sent again: it may have been taken in
                    return claim.generation
                finally:
                    writer.close()
            raise ConnectionError("refused twice")


@pytest.mark.parametrize("restarts", [2])
@pytest.mark.timeout(180)
def test_context_instance_killed_and_restarted_at_the_same_port_under_load(restarts: int) -> None:
    """Within 2 s of its readiness requests succeed on the new generation, none reaches the old, counters 0 at rest."""
    asyncio.run(restart_under_load(restarts))


async def restart_under_load(restarts: int) -> None:
    loop = asyncio.get_running_loop()
    instance = Instance("context", "ctx-0")
    await instance.start()
    try:
        first = await instance.published()
        # Generous bounds on one probe: a loaded test machine is not a dead instance.
        config = DirectoryConfig(probe_ready_s=1.0, attempt_timeout_s=5.0, total_timeout_s=10.0)
        directory = AsyncEndpointDirectory(fetch, config)
        async with directory:
            directory.add_server(instance.url, "context", "ctx-0")
            await directory.prepare()
            ids = RequestIdGenerator(1)
            clients = [Client(directory, ids) for _ in range(16)]
            tasks = [asyncio.create_task(client.run()) for client in clients]
            await asyncio.sleep(0.5)
            generations = [first]
            for _ in range(restarts):
                old = generations[-1]
                await instance.kill()
                killed_s = loop.time()
                await instance.start()
                seen: list[dict[str, Any]] = []
                polling = asyncio.create_task(poll_server_info(instance.url, seen))
                new = await instance.published()
                ready_s = loop.time()
                generations.append(new)
                async with asyncio.timeout(30):
                    while not any(g == new for client in clients for _, _, g in client.results):
                        await asyncio.sleep(0.01)
                first_ok_s = min(t for client in clients for t, _, g in client.results if g == new)
                assert first_ok_s - ready_s < 2.0, f"{first_ok_s - ready_s:.2f} s after readiness"
                await asyncio.sleep(0.5)
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
                for body in seen:
                    assert "127.0.0.1:9'" not in str(body), "the estimation's address was served"
                    assert body["ready"] is (body.get("generation") == new)
                received = json.loads(await get(instance.url, "/received"))
                assert {generation for generation, _ in received["taken"]} == {new}
                assert {generation for generation, _ in received["refused"]} <= {old}
                late_old = [
                    t for client in clients for t, outcome, g in client.results if g == old and t > killed_s + 0.5
                ]
                assert not late_old
                recent = [o for client in clients for t, o, _ in client.results if t > first_ok_s + 0.2]
                assert recent and set(recent) == {"ok"}, recent
            for client in clients:
                client.stop = True
            await asyncio.gather(*tasks)
            statistics = directory.statistics()
            assert (statistics.reservations, statistics.load_weight, statistics.reservations_expired) == (0, 0, 0)
            audit = directory.audit()
            assert audit.faults == () and all(view.count == view.weight == 0 for view in audit.loads)
            outcomes = [outcome for client in clients for _, outcome, _ in client.results]
            assert outcomes.count("ok") >= 3 * len(clients)
            # Every request that was taken in was taken in once: nothing is replayed.
            received = json.loads(await get(instance.url, "/received"))
            taken = [request_id for _, request_id in received["taken"]]
            assert len(taken) == len(set(taken))
            assert received["in_flight"] == 0
        assert directory.task_count == 0
        directory.core.validate()
    finally:
        await instance.kill()


async def poll_server_info(url: str, seen: list[dict[str, Any]]) -> None:
    """Ask in a tight loop during the start: the estimation's address must never show."""
    while True:
        try:
            seen.append(json.loads(await get(url, "/server_info")))
        except OSError:
            await asyncio.sleep(0.005)


@pytest.mark.timeout(120)
def test_draining_instance_finishes_its_stream_and_the_other_takes_the_rest() -> None:
    async def main() -> None:
        instances = [Instance("context", f"ctx-{n}") for n in range(2)]
        try:
            for instance in instances:
                await instance.start()
            for instance in instances:
                await instance.published()
            config = DirectoryConfig(probe_ready_s=0.2, attempt_timeout_s=5.0, total_timeout_s=10.0)
            async with AsyncEndpointDirectory(fetch, config) as directory:
                for instance in instances:
                    directory.add_server(instance.url, "context")
                await directory.prepare()
                claim = await directory.reserve("context", 1, exclude={instances[1].url}).acquire()
                claim.dispatched()
                body = {"request_id": 1, "endpoint_generation": claim.generation, "tokens": 50}
                status, reader, writer = await http(claim.server, "POST", "/v1/completions", body)
                assert status == 200
                assert await reader.readline() == b"0\n"
                await get_drained(instances[0].url)
                async with asyncio.timeout(20):
                    while directory.status(instances[0].url).value != "draining":
                        await asyncio.sleep(0.01)
                for number in range(2, 12):
                    async with directory.reserve("context", number) as other:
                        assert other.server == instances[1].url
                assert directory.resolve(claim.generation or "").state == "draining"
                lines = (await reader.read()).splitlines()
                writer.close()
                assert lines[-1] == b"end" and len(lines) == 50
                assert claim.release()
                status, _, writer = await http(instances[0].url, "POST", "/v1/completions", body | {"request_id": 99})
                writer.close()
                assert status == 503
        finally:
            for instance in instances:
                await instance.kill()

    asyncio.run(main())


async def get_drained(url: str) -> None:
    status, reader, writer = await http(url, "POST", "/drain", {})
    await reader.read()
    writer.close()
    assert status == 200
