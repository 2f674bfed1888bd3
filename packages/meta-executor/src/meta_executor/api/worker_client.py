"""The way to an instance's worker, or to the door before it: one ``RpcClient``, its calls by name, and which way requests went.

Directly when the worker lives in this process and the fast path is on, else by RPC: looked up by every call, so nobody tells a
client where it runs. May be used by several threads and event loops.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from meta_executor import wire
from meta_executor.api.service import ExecutorService, Submit
from meta_executor.executor.request import Answers
from rpc_local_registry import RpcClient, RpcConfig, RpcError, RpcStream

#: A worker that is silent at the transport for so long is gone (s). A process that the system has stopped for a while is not.
PEER_TIMEOUT_S = 60.0
#: How long its answer may take (s): to a batch of requests, to any other call, to what only an operator waits for, and to the
#: question that an instance's start waits for.
_SUBMIT_S = 30.0
_CALL_S = 10.0
_CONDITION_S = 2.0
_LOOK_S = 5.0
_RECORD_S = 30.0


@dataclass(frozen=True, slots=True)
class SubmitCounts:
    """Requests (count) that went to the worker directly and by RPC, and the calls that carried them (count)."""

    local: int
    rpc: int
    calls: int


class WorkerClient:
    """See the module.

    Args:
        address: The worker's RPC address, or that of an instance's door.
        key: The run's key.
        fast_path: Call the worker directly when it lives in this process.
    """

    def __init__(self, address: str, key: bytes, *, fast_path: bool) -> None:
        self._client = RpcClient(
            address,
            key,
            config=RpcConfig(peer_timeout_s=PEER_TIMEOUT_S),
            fast_path=fast_path,
            interface=ExecutorService,
            name="proxy",
        )
        self._lock = threading.Lock()
        self._local_count = 0
        self._rpc_count = 0
        self._call_count = 0

    async def submit(self, subscriber: str, batch: Sequence[Submit]) -> list[wire.ErrorBody | None]:
        """Hand a batch over. Per request None, or why it was refused.

        Raises:
            RpcError: The worker cannot be reached, or was lost meanwhile.
        """
        local = self._client.path_of("submit_batch") == "local"
        with self._lock:
            self._call_count += 1
            if local:
                self._local_count += len(batch)
            else:
                self._rpc_count += len(batch)
        outcomes: list[wire.ErrorBody | None]
        outcomes = await self._client.submit_batch(subscriber, batch).remote_async(timeout_s=_SUBMIT_S)
        return outcomes

    def answers(self, subscriber: str) -> RpcStream[Answers]:
        """All answers to a subscriber's requests from now on; its requests may follow at once.

        Raises:
            RpcError: The worker was lost; also from the stream.
        """
        return self._client.answers(subscriber).remote_streaming()

    def stop(self, request_id: int, reason: str) -> None:
        """Stop a request; nobody waits for whether it was there.

        Without a time limit: a worker that stood still for long hears of it when it goes on. One that is lost, or loses its
        client, stops everything that the client brought.
        """
        with contextlib.suppress(RpcError):
            self._client.abort(request_id, reason).remote_oneway()

    async def abort(self, request_id: int, reason: str) -> bool:
        """Stop a request. Whether it had an answer to come."""
        return bool(await self._client.abort(request_id, reason).remote_async(timeout_s=_CALL_S))

    async def introduce(self, url: str, server_info: bytes) -> wire.ErrorBody | None:
        """Tell the ranks of a context instance. None, or why KV cannot move between the two."""
        refused: wire.ErrorBody | None
        refused = await self._client.introduce(url, server_info).remote_async(timeout_s=_CALL_S)
        return refused

    async def drain(self, deadline_s: float) -> int:
        """Begin to drain. Requests that are here (count)."""
        return int(await self._client.drain(deadline_s).remote_async(timeout_s=_CALL_S))

    async def counters(self) -> bytes:
        """The worker's part of the instance's statistics (JSON)."""
        return bytes(await self._client.counters().remote_async(timeout_s=_LOOK_S))

    async def routing(self, count_max: int) -> bytes:
        """Why the last requests went where they did (JSON of :class:`meta_executor.wire.InstanceRouting`)."""
        return bytes(await self._client.routing(count_max).remote_async(timeout_s=_LOOK_S))

    async def record(self) -> bytes:
        """The endpoint record (JSON)."""
        return bytes(await self._client.record().remote_async(timeout_s=_RECORD_S))

    async def condition(self) -> str:
        """Why the worker cannot serve now; "" while it can. A worker that does not answer is a reason."""
        try:
            return str(await self._client.condition().remote_async(timeout_s=_CONDITION_S))
        except RpcError as error:
            return f"the worker does not answer: {error}"

    def counts(self) -> SubmitCounts:
        """Since construction."""
        with self._lock:
            return SubmitCounts(self._local_count, self._rpc_count, self._call_count)

    def close(self) -> None:
        """Say goodbye; blocks, for a bounded time. Idempotent."""
        self._client.close()
