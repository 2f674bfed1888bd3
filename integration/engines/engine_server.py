"""A server of one engine as a process: it registers itself, refuses what was meant for another lifetime, and drains on SIGTERM.

    python engine_server.py NAME PORT STORE [--answer-ms 20]     # STORE: a folder, or the URL of an etcd

Started again under the same name and port it is another lifetime. The engine is a stand-in; `instance` and
`registered` are what endpoint-lifecycle asks of an ASGI application.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from endpoint_lifecycle import (
    AsyncLeasePublisher,
    EndpointError,
    EndpointOwner,
    FileLeaseStore,
    LeaseStore,
    error_body,
    http_status,
    server_info_body,
)
from worker_loop import answer

ROLE, GENERATION = "engine", "x-generation"
TTL_S, DRAIN_S = 2.0, 10.0
#: The listener stays so long after the drain: who has not heard of it is refused by name, and does not meet a closed connection
#: under a request that nobody can say was served or not.
LINGER_S = 1.0

Generate = Callable[[list[int], int], Awaitable[list[int]]]


def open_store(place: str) -> LeaseStore:
    """An etcd by its URL, else a folder."""
    if not place.startswith("http"):
        return FileLeaseStore(place)
    from endpoint_lifecycle.etcd import EtcdLeaseStore

    return EtcdLeaseStore(place)


# -- the glue --------------------------------------------------------------------------------------------------------------


def instance(owner: EndpointOwner, generate: Generate) -> Starlette:
    """The two routes: what this lifetime is, and work for it."""

    async def server_info(_: Request) -> Response:
        return JSONResponse(server_info_body(owner))

    async def work(request: Request) -> Response:
        try:
            with owner.admit(request.headers.get(GENERATION)):
                asked = json.loads(await request.body())
                made = await generate(asked["prompt"], asked["tokens_max"])
                return JSONResponse({"tokens": made, "pid": os.getpid()})
        except EndpointError as error:
            return JSONResponse(error_body(error), http_status(error))

    return Starlette(routes=[Route("/server_info", server_info), Route("/generate", work, methods=["POST"])])


@contextlib.asynccontextmanager
async def registered(store: LeaseStore, owner: EndpointOwner, url: str) -> AsyncIterator[AsyncLeasePublisher]:
    """The lifetime: published and registered while the block runs."""
    owner.finalize().publish([url.replace("http", "tcp", 1)])  # no other channel than HTTP leads to it
    async with AsyncLeasePublisher(store, owner, url, TTL_S) as publisher:
        await publisher.wait_registered(timeout_s=10.0)
        yield publisher
    await store.aclose()


# -- the server ------------------------------------------------------------------------------------------------------------


class Listener(uvicorn.Server):
    """Leaves signals to us: uvicorn would close the listener first and drain afterwards."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(name: str, port: int, store: LeaseStore, generate: Generate) -> None:
    """Until SIGTERM, and then until what is in flight has ended."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    owner = EndpointOwner(name, f"{name}-{os.getpid()}", ROLE)
    listener = Listener(uvicorn.Config(instance(owner, generate), "127.0.0.1", port, log_level="warning"))
    serving = asyncio.create_task(listener.serve())
    while not listener.started and not serving.done():
        await asyncio.sleep(0.01)
    if listener.started:
        async with registered(store, owner, f"http://127.0.0.1:{port}") as publisher:
            await told.wait()
            abandoned = await publisher.drain(DRAIN_S)
            print(f"{name}: drained, {abandoned} abandoned", flush=True)
            await asyncio.sleep(LINGER_S)
    listener.should_exit = True
    await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("port", type=int)
    parser.add_argument("store")
    parser.add_argument("--answer-ms", type=float, default=20.0)
    given = parser.parse_args()

    async def generate(prompt: list[int], tokens_max: int) -> list[int]:
        await asyncio.sleep(given.answer_ms / 1000)  # stands for the engine
        return answer(prompt, tokens_max)

    asyncio.run(serve(given.name, given.port, open_store(given.store), generate))


if __name__ == "__main__":
    main()
