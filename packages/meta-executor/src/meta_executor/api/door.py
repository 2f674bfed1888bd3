"""Where the front's stream ends: in the process of an instance's API server, which brings its requests to the worker.

The front reaches one address per instance, whatever stands behind it. A worker that is a thread of this process is called
directly, one in another process by RPC. A batch stays a batch, and what the worker hands over at once leaves at once: one
frame per step with the tokens of all requests.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from meta_executor import wire
from meta_executor.api.service import HAND_OVERS_MAX, Submit
from meta_executor.api.worker_client import PEER_TIMEOUT_S, WorkerClient
from meta_executor.executor.request import Answers
from rpc_batch_submit import take_in
from rpc_local_registry import RpcConfig, RpcError, RpcServer, StreamSource, rpc_method

#: When the instance leaves, what the worker has said last may take so long to get out (s).
LAST_WORDS_S = 2.0


class Door:
    """What the front may call: the methods of :class:`~meta_executor.api.service.ExecutorService` that requests need.

    Args:
        worker: Reaches the worker.
    """

    def __init__(self, worker: WorkerClient) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        self._open_count = 0

    @rpc_method(non_blocking=True)
    async def submit_batch(self, subscriber: str, submits: Iterator[Submit]) -> list[wire.ErrorBody | None]:
        """Bring a batch to the worker. Per item None, or why it was refused."""
        batch: list[Submit] = []
        unreadable = take_in(submits, batch.append)
        taken = iter(await self._worker.submit(subscriber, batch))
        return [
            next(taken) if why is None else wire.ErrorBody(error=wire.INVALID_REQUEST, message=why)
            for why in unreadable
        ]

    @rpc_method(streaming=True, non_blocking=True)
    def answers(self, subscriber: str) -> StreamSource[Answers]:
        """All answers to this subscriber's requests, from now on. When it leaves, its requests are stopped."""
        stream = self._worker.answers(subscriber)
        out: StreamSource[Answers] = StreamSource(HAND_OVERS_MAX, on_cancel=stream.cancel)
        with self._changed:
            self._open_count += 1

        def ended(error: RpcError | None) -> None:
            out.close(error)
            with self._changed:
                self._open_count -= 1
                self._changed.notify_all()

        # In the thread that brings them: a hand-over wakes nobody but the door's own I/O thread. A front that does not read is
        # gone: what ``push`` raises then ends the worker's stream.
        stream.deliver_to(out.push, ended)
        return out

    @rpc_method(non_blocking=True)
    async def abort(self, request_id: int, reason: str) -> None:
        """Stop a request, if it is still here. On the loop, as its batch was: it does not overtake that."""
        self._worker.stop(request_id, reason)

    @rpc_method(non_blocking=True)
    async def introduce(self, url: str, server_info: bytes) -> wire.ErrorBody | None:
        """Tell every rank of a context instance, before requests that name it."""
        return await self._worker.introduce(url, server_info)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until every stream of answers has ended, at most so long. Whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._open_count == 0, timeout_s)


class DoorServer:
    """A door that is open.

    Args:
        door: What is served.
        address: Where; a socket in the run's folder, or TCP with port 0.
        key: The run's key.
        name: Shown to clients.

    Raises:
        RpcError: The address cannot be taken.
    """

    def __init__(self, door: Door, address: str, key: bytes, name: str) -> None:
        self._door = door
        config = RpcConfig(peer_timeout_s=PEER_TIMEOUT_S, drain_s=LAST_WORDS_S)
        self._server = RpcServer(door, address, key, config=config, name=name)
        self._server.start()
        self.address = str(self._server.address)

    def close(self) -> None:
        """Let the streams of a worker that has ended them run out, then end. Idempotent."""
        self._door.wait_quiet(LAST_WORDS_S)
        self._server.shutdown()
