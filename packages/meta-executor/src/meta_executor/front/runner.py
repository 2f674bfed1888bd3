"""The front's process: sockets, signals, readiness, drain.

Told to drain (``POST /internal/drain`` or SIGTERM) it answers new requests with 503, lets running ones end, and leaves
with exit code 0. A second signal cuts what still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec
import uvicorn
import uvloop

from meta_executor.config import RunSpec
from meta_executor.discovery import following
from meta_executor.engine.factory import model_info
from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.front.app import FrontService, create_app, worded
from meta_executor.front.legs import LegClient
from meta_executor.front.routers import Routers
from meta_executor.front.servers import FrontServer, make_directory
from meta_executor.listener.credentials import credentials
from meta_executor.listener.descriptors import within_descriptors
from meta_executor.listener.serving import listen, server_of, url_of
from meta_executor.supervise.lasting import set_apart_what_lasts
from meta_executor.supervise.report import Reporter

_LOG = logging.getLogger("meta_executor.front")
#: glibc's name of the setting (``malloc.h``), and its first value of it.
_M_MMAP_THRESHOLD, _LARGE_BYTES = -3, 128 * 1024
#: How often readiness of the instances is looked at while starting (s).
_READY_POLL_S = 0.02
#: After the last answer, this long for connections to close (s).
_CLOSE_S = 5.0


def run_front(run: RunSpec, servers: Sequence[FrontServer]) -> int:
    """Serve until drained.

    Args:
        run: The run; ``service.hostname`` and ``service.port`` say where to listen.
        servers: Instances that are listed; those of ``discovery.store`` are found.

    Returns:
        Exit code: 0 after a drain, 1 if running requests had to be cut.
    """
    _give_memory_back()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(run, servers))


def _give_memory_back() -> None:
    """Have large buffers returned to the system when they are freed.

    glibc raises the size from which it does so to that of the largest buffer it has seen, so that a burst of large bodies
    would stay the process's for good. Naming the size keeps it there.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


async def _serve(run: RunSpec, servers: Sequence[FrontServer]) -> int:
    service_config = run.service
    reporter = Reporter(run.run_dir, "front", 0)
    reporter.send("status", phase="reading the tokenizer")
    model = model_info(service_config.engine)
    if service_config.engine.kind == "synthetic":
        tokenizer = Tokenizer.synthetic(model.vocab_size)
    else:
        tokenizer = Tokenizer.for_model(service_config.engine.model)
    front = service_config.front
    keys, tls = credentials(front)
    front = msgspec.structs.replace(front, http=within_descriptors(front.http, tls=tls is not None))
    listener = listen(service_config.hostname, service_config.port)
    key = run.key().hex()
    legs = LegClient(key)
    routers = Routers(front.context_router, front.generation_router)
    directory = make_directory(servers, legs, request_timeout_s=front.request_timeout_s, routers=routers)
    drain = asyncio.Event()
    cut = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(legs.close)
        stack.callback(reporter.close)
        await stack.enter_async_context(directory)
        if service_config.discovery.store is not None:
            reporter.send("status", phase="looking for instances")
            await stack.enter_async_context(following(run, directory))
        service = FrontService(
            model=model,
            served_name=(*service_config.served_model_names, model.name)[0],
            aliases=service_config.served_model_names,
            # The name that it was started with, and its own.
            known_as=(model.name, service_config.engine.model),
            tokenizer=tokenizer,
            config=front,
            schedule_style=service_config.schedule_style,
            servers=servers,
            directory=directory,
            routers=routers,
            legs=legs,
            key=key,
            keys=keys,
            local_prefill_max=service_config.conditional_disagg_config.max_local_prefill_length,
            on_drain=drain.set,
        )
        stack.callback(service.close)
        _watch_signals(service, cut)
        server = server_of(
            create_app(service),
            front.http,
            service.ledger,
            body_bytes_max=front.body_bytes_max,
            worded=worded,
            loop="uvloop",
            tls=tls,
            close_s=int(_CLOSE_S),
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stack.push_async_callback(_stop, server, serving)
        # A drain can be watched to its end; then the watches end, for which the listener would wait otherwise.
        stack.push_async_callback(service.watching.close)
        await stack.enter_async_context(service.wellness.followed())
        await _instances_ready(service, drain, serving)
        set_apart_what_lasts()
        reporter.send("ready", url=url_of(listener, tls=tls is not None))
        await _first(drain.wait(), _ended(serving))
        if not await _first(service.wait_idle(), cut.wait(), _ended(serving)):
            _LOG.error("cut %d running requests", service.cut())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.wait_idle(), _CLOSE_S)
            return 1
    return 0


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
