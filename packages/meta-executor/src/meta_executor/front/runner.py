"""The front's process: sockets, signals, readiness, drain.

Told to drain (``POST /internal/drain`` or SIGTERM) it answers new requests with 503, lets running ones end, and leaves
with exit code 0. A second signal cuts what still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Coroutine, Sequence
from typing import Any

import uvicorn
import uvloop

from meta_executor.config import RunSpec
from meta_executor.engine.base import model_info
from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.front.app import FrontService, create_app
from meta_executor.front.legs import LegClient
from meta_executor.front.servers import FrontServer, make_directory
from meta_executor.supervise.report import Reporter

_LOG = logging.getLogger("meta_executor.front")
_BACKLOG = 2048
#: How often readiness of the instances is looked at while starting (s).
_READY_POLL_S = 0.02
#: After the last answer, this long for connections to close (s).
_CLOSE_S = 5.0


def run_front(run: RunSpec, servers: Sequence[FrontServer]) -> int:
    """Serve until drained.

    Args:
        run: The run; ``service.hostname`` and ``service.port`` say where to listen.
        servers: Instances of both roles.

    Returns:
        Exit code: 0 after a drain, 1 if running requests had to be cut.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(run, servers))


async def _serve(run: RunSpec, servers: Sequence[FrontServer]) -> int:
    service_config = run.service
    reporter = Reporter(run.run_dir, "front", 0)
    reporter.send("status", phase="reading the tokenizer")
    model = model_info(service_config.engine)
    if service_config.engine.kind == "synthetic":
        tokenizer = Tokenizer.synthetic(model.vocab_size)
    else:
        tokenizer = Tokenizer.for_model(service_config.engine.model)
    listener = _listen(service_config.hostname, service_config.port)
    key = run.key().hex()
    legs = LegClient(key)
    front = service_config.front
    directory = make_directory(servers, legs, request_timeout_s=front.request_timeout_s, router=front.router.type)
    drain = asyncio.Event()
    cut = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(legs.close)
        stack.callback(reporter.close)
        await stack.enter_async_context(directory)
        service = FrontService(
            model=model,
            served_name=service_config.served_model_name or model.name,
            tokenizer=tokenizer,
            config=front,
            schedule_style=service_config.schedule_style,
            servers=servers,
            directory=directory,
            legs=legs,
            key=key,
            on_drain=drain.set,
        )
        _watch_signals(service, cut)
        server = _Server(
            uvicorn.Config(
                create_app(service),
                loop="uvloop",
                http="httptools",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(_CLOSE_S),
                backlog=_BACKLOG,
                ws="none",
                server_header=False,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stack.push_async_callback(_stop, server, serving)
        host, port = listener.getsockname()[:2]
        await _instances_ready(service, drain, serving)
        reporter.send("ready", url=f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}")  # noqa: S104
        await _first(drain.wait(), _ended(serving))
        if not await _first(service.wait_idle(), cut.wait(), _ended(serving)):
            _LOG.error("cut %d running requests", service.cut())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.wait_idle(), _CLOSE_S)
            return 1
    return 0


def _listen(hostname: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    # With the protocol named asyncio switches Nagle's algorithm off; otherwise each answer's body waits 40 ms for the
    # acknowledgement of its head.
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((hostname, port))
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


class _Server(uvicorn.Server):
    """A server that leaves signals to the front."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def _watch_signals(service: FrontService, cut: asyncio.Event) -> None:
    def told() -> None:
        if service.draining:
            cut.set()
        service.start_draining()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)


async def _instances_ready(service: FrontService, drain: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Wait until a request could be served, or until nobody wants that any more."""
    await service.directory.prepare()
    while not service.can_serve() and not drain.is_set() and not serving.done():
        await asyncio.sleep(_READY_POLL_S)


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.wait((task,))


async def _first(wanted: Coroutine[Any, Any, Any], *others: Coroutine[Any, Any, Any]) -> bool:
    """Wait for whichever ends first; whether it is the wanted one."""
    tasks = [asyncio.create_task(wait) for wait in (wanted, *others)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _stop(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait((serving,))
    if not serving.cancelled() and (error := serving.exception()) is not None:
        raise error
