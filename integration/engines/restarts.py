"""Two servers behind a lease store that are restarted under load, politely and not: who was answered, and by which lifetime.

    python restarts.py [--etcd | --store http://127.0.0.1:2379]     # an etcd from PATH, one that runs; else a folder

First one server is told to end (SIGTERM) and started again, then the other is killed (SIGKILL) and started again. A request
whose server was killed under it ends with the sender's error, because nobody knows whether it was served; all others are
answered. Exit code 0: so it was, each server lived twice, and no reservation is left.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from endpoint_lifecycle import AsyncEndpointDirectory, AsyncReconciler, AsyncReservation, LeaseStore, NotSent
from engine_server import GENERATION, ROLE, open_store
from worker_loop import answer

NAMES = ("one", "two")


# -- the glue --------------------------------------------------------------------------------------------------------------


class Front:
    """Finds servers and sends requests to the lifetime that it reserved.

    Args:
        store: Where servers register.
    """

    def __init__(self, store: LeaseStore) -> None:
        self._store = store
        self._http = httpx.AsyncClient(trust_env=False, timeout=30.0)
        self.directory = AsyncEndpointDirectory(self._fetch)
        self.refusals: collections.Counter[str] = collections.Counter()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Front]:
        """Follows the store while the block runs."""
        async with self._http, self.directory, AsyncReconciler(self._store, self.directory) as reconciler:
            await reconciler.wait_synced(timeout_s=10.0)
            yield self
        await self._store.aclose()

    async def _fetch(self, server: str) -> Any:
        return (await self._http.get(f"{server}/server_info")).raise_for_status().json()

    async def generate(self, request_id: int, prompt: list[int], tokens_max: int) -> dict[str, Any]:
        """The answer of whichever server took the request.

        Raises:
            EndpointError: Nobody could take it; it was not served.
            httpx.HTTPError: The connection broke under it; nobody knows.
        """

        async def send(reservation: AsyncReservation) -> tuple[int, dict[str, Any]]:
            try:
                reply = await self._http.post(
                    f"{reservation.server}/generate",
                    json={"prompt": prompt, "tokens_max": tokens_max},
                    headers={GENERATION: str(reservation.generation)},
                )
            except httpx.ConnectError as error:
                self.refusals["not connected"] += 1
                raise NotSent(str(error)) from error
            if reply.status_code != 200:
                self.refusals[str(reply.json().get("error"))] += 1
            return reply.status_code, reply.json()

        status, body = await self.directory.dispatch(ROLE, request_id, send, timeout_s=10.0)
        if status != 200:
            raise RuntimeError(f"{status}: {body}")
        return body


# -- the restarts ----------------------------------------------------------------------------------------------------------


class Fleet:
    """The two servers' processes."""

    def __init__(self, store: str, answer_ms: float) -> None:
        self._arguments = (store, "--answer-ms", str(answer_ms))
        self._ports = dict(zip(NAMES, free_ports(len(NAMES))))
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str) -> None:
        program = (sys.executable, str(Path(__file__).with_name("engine_server.py")))
        port = str(self._ports[name])
        self.processes[name] = await asyncio.create_subprocess_exec(*program, name, port, *self._arguments)

    async def end(self, name: str, *, kill: bool = False) -> None:
        process = self.processes[name]
        if process.returncode is None:
            process.kill() if kill else process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def an_etcd(folder: str) -> AsyncIterator[str]:
    """An etcd of our own, from PATH."""
    client, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    program = ("etcd", "--data-dir", f"{folder}/data", "--log-level", "error", "--unsafe-no-fsync")
    listen = ("--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer)
    alone = ("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}")
    process = await asyncio.create_subprocess_exec(*program, *listen, *alone)
    try:
        async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as http:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(f"{client}/health")).is_success:
                        break
                await asyncio.sleep(0.05)
        yield client
    finally:
        process.kill()
        await process.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


async def restart_under_load(place: str, answer_ms: float, clients: int) -> dict[str, Any]:
    """Clients ask without a pause while both servers are restarted; counts of what became of their requests."""
    fleet = Fleet(place, answer_ms)
    answers: collections.Counter[int] = collections.Counter()
    ids = itertools.count(1)
    unknown: list[str] = []
    unserved: list[str] = []
    wrong = 0
    ended = asyncio.Event()

    async def client(front: Front) -> None:
        nonlocal wrong
        while not ended.is_set():
            request_id = next(ids)
            prompt = [request_id, request_id % 7]
            try:
                body = await front.generate(request_id, prompt, 5)
            except httpx.HTTPError as error:
                unknown.append(type(error).__name__)
            except Exception as error:
                unserved.append(f"{type(error).__name__}: {error}")
            else:
                answers[body["pid"]] += 1
                wrong += body["tokens"] != answer(prompt, 5)

    async def until_served(pid: int, more: int) -> None:
        goal = answers[pid] + more
        async with asyncio.timeout(60):
            while answers[pid] < goal:
                await asyncio.sleep(0.02)

    try:
        for name in NAMES:
            await fleet.start(name)
        async with Front(open_store(place)).running() as front:
            async with asyncio.timeout(60):
                while not front.directory.ready(**{ROLE: len(NAMES)}):
                    await asyncio.sleep(0.02)
            asking = [asyncio.create_task(client(front)) for _ in range(clients)]
            for name in NAMES:
                await until_served(fleet.processes[name].pid, 5)
            await fleet.end("one")
            await fleet.start("one")
            await until_served(fleet.processes["one"].pid, 5)
            politely = len(unknown)
            await fleet.end("two", kill=True)
            await fleet.start("two")
            await until_served(fleet.processes["two"].pid, 5)
            ended.set()
            await asyncio.gather(*asking)
            at_rest = front.directory.audit().statistics.reservations == 0 and not front.directory.audit().faults
            return {
                "answered": sum(answers.values()), "lifetimes": len(answers), "wrong": wrong, "unserved": unserved,
                "unknown at the polite restart": politely, "unknown at the kill": len(unknown) - politely,
                "clients": clients, "refusals": dict(front.refusals), "at rest": at_rest,
            }  # fmt: skip
    finally:
        ended.set()
        for name in list(fleet.processes):
            await fleet.end(name)


async def run(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    if given.etcd:
        async with an_etcd(folder) as store:
            return await restart_under_load(store, given.answer_ms, given.clients)
    return await restart_under_load(given.store or folder, given.answer_ms, given.clients)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="")
    parser.add_argument("--etcd", action="store_true")
    parser.add_argument("--answer-ms", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8)
    with tempfile.TemporaryDirectory(prefix="me") as folder:
        found = asyncio.run(run(parser.parse_args(), folder))
    print(json.dumps(found))
    lost = found["wrong"] or found["unserved"] or found["unknown at the polite restart"]
    return 0 if not lost and found["at rest"] and found["lifetimes"] == 2 * len(NAMES) else 1


if __name__ == "__main__":
    sys.exit(main())
