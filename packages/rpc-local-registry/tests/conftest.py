"""Fixtures: a served worker of many shapes, and a guard against leaks."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from rpc_local_registry import RpcClient, RpcConfig, RpcServer, StreamSource, new_key, rpc_method
from rpc_local_registry.testing import eventually, resources


class Request(msgspec.Struct):
    """A submit."""

    request_id: int
    token_ids: np.ndarray
    tags: dict[str, str] = {}


class TwoArguments(Exception):
    """Pickles, and does not unpickle: its constructor wants more than a message."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


class Service:
    """Blocking, non-blocking, async and streaming methods."""

    def __init__(self) -> None:
        self.submitted: list[Request] = []
        self.log: list[Any] = []
        self.flag = False
        self.count = 0
        self.gate = threading.Event()
        self.inside = threading.Semaphore(0)
        self.closed: list[str] = []
        self.source: StreamSource[Any] | None = None

    @rpc_method(non_blocking=True)
    def submit(self, request: Request) -> int:
        """Take a request."""
        self.submitted.append(request)
        return int(request.token_ids.sum())

    @rpc_method(non_blocking=True)
    def submit_batch(self, requests: Iterator[Request]) -> list[int]:
        """Take many, item by item."""
        ids = []
        for request in requests:
            self.log.append(("item", request.request_id))
            ids.append(request.request_id)
        return ids

    @rpc_method(non_blocking=True)
    def echo(self, value: Any) -> Any:
        """Give back."""
        return value

    @rpc_method(non_blocking=True)
    def repeat(self, text: str, count: int) -> list[str]:
        """A result larger than its arguments."""
        return [text] * count

    @rpc_method
    def increment(self) -> int:
        """Count on a lane."""
        self.count += 1
        return self.count

    @rpc_method(non_blocking=True)
    def set_flag(self) -> None:
        """For one-way calls."""
        self.flag = True

    @rpc_method(non_blocking=True)
    def get_flag(self) -> bool:
        """For one-way calls."""
        return self.flag

    @rpc_method(non_blocking=True)
    def note(self, value: int) -> None:
        """Log at once."""
        self.log.append(value)

    @rpc_method
    def note_slowly(self, value: int) -> None:
        """Log from a lane, after the gate."""
        self.gate.wait(20)
        self.log.append(value)

    @rpc_method
    async def note_async(self, value: int) -> None:
        """Log from the loop."""
        await asyncio.sleep(0)
        self.log.append(value)

    @rpc_method
    def hold(self, value: str = "held") -> str:
        """Wait for the gate on a lane."""
        self.inside.release()
        self.gate.wait(20)
        return value

    @rpc_method(concurrency_max=1)
    def hold_alone(self) -> None:
        """A lane one wide."""
        self.inside.release()
        self.gate.wait(20)

    @rpc_method
    async def hold_async(self) -> str:
        """Wait until cancelled."""
        self.inside.release()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.closed.append("hold_async")
            raise
        return "slept"

    @rpc_method
    def fast(self) -> str:
        """Another lane."""
        return "fast"

    @rpc_method
    def divide(self, left: float, right: float) -> float:
        """Raise by arithmetic."""
        return left / right

    @rpc_method
    def fail_two_arguments(self) -> None:
        """Raise what pickle cannot rebuild."""
        raise TwoArguments(1, 2)

    @rpc_method
    def local_function(self) -> Any:
        """A result that cannot travel."""
        return lambda: None

    @rpc_method(streaming=True)
    def local_functions(self) -> Iterator[Any]:
        """An item that cannot travel."""
        yield 1
        yield lambda: None

    @rpc_method(streaming=True)
    def numbers(self, stop: int) -> Iterator[int]:
        """Generator on a lane."""
        try:
            for value in range(stop):
                self.log.append(value)
                yield value
        finally:
            self.closed.append("numbers")

    @rpc_method(streaming=True)
    async def numbers_async(self, stop: int, delay_s: float = 0.0) -> AsyncIterator[int]:
        """Async generator."""
        try:
            for value in range(stop):
                await asyncio.sleep(delay_s)
                self.log.append(value)
                yield value
        finally:
            self.closed.append("numbers_async")

    @rpc_method(streaming=True, non_blocking=True)
    def responses(self) -> StreamSource[Any]:
        """Push stream."""
        self.source = StreamSource(items_max=100)
        return self.source

    def undeclared(self) -> str:
        """Public, and not for calling."""
        return "secret"


@pytest.fixture
def service() -> Iterator[Service]:
    """The worker; its gate is opened at the end so that no lane thread stays."""
    worker = Service()
    yield worker
    worker.gate.set()


@pytest.fixture
def key() -> bytes:
    """A fresh key."""
    return new_key()


@pytest.fixture
def server(service: Service, key: bytes) -> Iterator[RpcServer]:
    """A started server over ipc."""
    with RpcServer(service, "ipc://", key) as started:
        yield started
        service.gate.set()


@pytest.fixture
def connect(server: RpcServer, key: bytes) -> Iterator[Callable[..., RpcClient]]:
    """Makes clients of that server and closes them."""
    clients: list[RpcClient] = []

    def make(config: RpcConfig | None = None, **options: Any) -> RpcClient:
        options.setdefault("interface", Service)
        client = RpcClient(server.address, options.pop("key", key), config=config, **options)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[..., RpcClient]) -> RpcClient:
    """One client of that server."""
    return connect()


@pytest.fixture
def request_type() -> type[Request]:
    """The struct of ``submit``."""
    return Request


@pytest.fixture
def service_type() -> type[Service]:
    """The worker's class."""
    return Service


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """No descriptor and no thread more than before."""
    gc.collect()
    before = resources()
    yield
    gc.collect()

    def settled() -> bool:
        now = resources()
        return now.descriptors <= before.descriptors and now.threads <= before.threads

    eventually(settled)


@pytest.fixture
def started() -> float:
    """Monotonic time at the test's start."""
    return time.monotonic()
