"""An asyncio API server in front of a worker's loop, which runs in another process, in a thread of this one, or restarts.

    python api_server.py [--port 8000] [--in-process]
    curl -N localhost:8000/generate -d '{"prompt": [1, 2, 3], "tokens_max": 8}'

Requests go to the worker in batches (rpc-batch-submit over rpc-local-registry), tokens come back one push per step. A client
that goes away is aborted at the worker; a worker that dies costs the requests that were open, by name and at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rpc_batch_submit import AsyncioBatchSubmitter, BatchBackpressure, BatchItemFailed, BatchSubmitConfig
from rpc_local_registry import RpcError, RpcServer, TypedClient, new_key, remote_method, remote_stream
from worker_loop import Engine, Request, Token, Worker

SUBMIT = BatchSubmitConfig(batch_max=32, delay_ms=1.0)
SUBMIT_TIMEOUT_S = 5.0
RESTART_S = 0.2


# -- the glue --------------------------------------------------------------------------------------------------------------


class WorkerClient(TypedClient):
    submit_batch = remote_method(Worker.submit_batch)
    abort = remote_method(Worker.abort)
    counts = remote_method(Worker.counts)
    steps = remote_stream(Worker.steps)


class Session:
    """One worker's lifetime as this process sees it: its client, its submitter, and the requests that it owes an answer."""

    def __init__(self, client: WorkerClient) -> None:
        self.client = client
        self.owed: dict[int, asyncio.Queue[Token | Exception]] = {}
        self.submitter = AsyncioBatchSubmitter[Request](
            lambda batch: client.submit_batch(batch).remote_async(timeout_s=SUBMIT_TIMEOUT_S),
            SUBMIT,
            register=self._register,
            rollback=self._rollback,
            on_unknown=lambda request, error: self.abort_at_worker(request.request_id),
            id_of=lambda request: request.request_id,
            bypass=lambda: client.path_of("submit_batch") == "local",
        )

    def _register(self, request: Request) -> None:
        self.owed[request.request_id] = asyncio.Queue()

    def _rollback(self, request: Request, error: BaseException) -> None:
        self.owed.pop(request.request_id, None)

    def abort_at_worker(self, request_id: int) -> None:
        with contextlib.suppress(RpcError):  # a worker that is gone runs nothing
            self.client.abort(request_id).remote_oneway()

    async def follow(self) -> None:
        """Hand each token to whom it is owed; ends with the worker, and then so does every open request."""
        error: Exception = ConnectionError("the worker has ended")
        try:
            async for step in self.client.steps().remote_streaming():
                for token in step:
                    if token.request_id in self.owed:
                        self.owed[token.request_id].put_nowait(token)
        except RpcError as lost:
            error = lost
        finally:
            for queue in self.owed.values():
                queue.put_nowait(error)

    async def tokens(self, request: Request) -> AsyncGenerator[int, None]:
        """The answer, token by token.

        Raises:
            BatchItemFailed: The worker refused it.
            BatchBackpressure: Too many are open.
            BatchSubmitError, RpcError, ConnectionError: The worker is lost; what was given so far stands.
        """
        ticket = self.submitter.submit(request)
        ended = False
        try:
            await ticket
            while not ended:
                token = await self.owed[request.request_id].get()
                if isinstance(token, Exception):
                    ended = True
                    raise token
                ended = token.last
                yield token.token
        finally:
            if self.owed.pop(request.request_id, None) is not None and not ended:
                self.abort_at_worker(request.request_id)  # whoever asked went away


# -- the server ----------------------------------------------------------------------------------------------------------


class Server:
    """The application, and the worker that it keeps alive."""

    def __init__(self, *, in_process: bool, step_ms: float) -> None:
        self._in_process, self._step_ms = in_process, step_ms
        self._ids = itertools.count(1)
        self.session: Session | None = None
        self.app = Starlette(
            routes=[Route("/generate", self.generate, methods=["POST"]), Route("/counts", self.counts)],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        keeper = asyncio.create_task(self._keep_a_worker())
        yield
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper

    async def _keep_a_worker(self) -> None:
        while True:  # a worker that ends is followed by a new one, with an address, a key and a client of its own
            try:
                async with self._thread() if self._in_process else self._process() as client:
                    self.session = Session(client)
                    try:
                        await self.session.follow()
                    finally:
                        await self.session.submitter.aclose(SUBMIT_TIMEOUT_S)
                        self.session = None
                        await asyncio.to_thread(client.close)  # it waits for what was sent one way: not on this loop
            except (RpcError, OSError) as error:
                print(f"no worker: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(RESTART_S)  # one that cannot start must not keep a core busy

    @contextlib.asynccontextmanager
    async def _process(self) -> AsyncIterator[WorkerClient]:
        key = new_key()
        program = (sys.executable, str(Path(__file__).with_name("worker_loop.py")), "--step-ms", str(self._step_ms))
        pipe = asyncio.subprocess.PIPE
        worker = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe)
        if worker.stdin is None or worker.stdout is None:
            raise RuntimeError("no pipes")
        try:
            worker.stdin.write(key.hex().encode() + b"\n")
            address = (await worker.stdout.readline()).decode().strip()
            yield WorkerClient(address, key)
        finally:
            worker.stdin.close()
            await worker.wait()

    @contextlib.asynccontextmanager
    async def _thread(self) -> AsyncIterator[WorkerClient]:
        key, worker = new_key(), Worker(Engine(self._step_ms / 1000))
        loop = threading.Thread(target=worker.run)
        with RpcServer(worker, "ipc://", key) as server:
            loop.start()
            try:
                yield WorkerClient(server.address, key, fast_path=True)
            finally:
                worker.stop()
                loop.join()

    async def generate(self, http: HttpRequest) -> Response:
        """POST {"prompt": [...], "tokens_max": n}: one line of JSON per token."""
        session = self.session
        if session is None:
            return JSONResponse({"error": "no worker"}, 503, {"Retry-After": "1"})
        try:
            asked = msgspec.json.decode(await http.body(), type=dict[str, list[int] | int])
            request = msgspec.convert({**asked, "request_id": next(self._ids)}, Request)  # never an id of the client's
        except msgspec.MsgspecError as error:
            return JSONResponse({"error": str(error)}, 400)
        tokens = session.tokens(request)
        try:
            first = await anext(tokens)
        except BatchItemFailed as error:
            return JSONResponse({"error": str(error)}, 400)
        except BatchBackpressure as error:
            return JSONResponse({"error": str(error)}, 429)
        except Exception as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 503)

        async def lines() -> AsyncIterator[bytes]:
            yield b'{"token": %d}\n' % first
            try:
                async for token in tokens:
                    yield b'{"token": %d}\n' % token
            except (RpcError, ConnectionError) as error:
                yield msgspec.json.encode({"error": f"{type(error).__name__}: {error}"}) + b"\n"
            finally:
                await tokens.aclose()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def counts(self, _: HttpRequest) -> Response:
        """What is open here and at the worker."""
        if self.session is None:
            return JSONResponse({"error": "no worker"}, 503)
        at_worker = await self.session.client.counts().remote_async(timeout_s=SUBMIT_TIMEOUT_S)
        return JSONResponse({**at_worker, "owed": len(self.session.owed)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--in-process", action="store_true")
    given = parser.parse_args()
    server = Server(in_process=given.in_process, step_ms=given.step_ms)
    uvicorn.run(server.app, host="127.0.0.1", port=given.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
