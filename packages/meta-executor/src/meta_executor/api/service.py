"""What rank 0's worker offers to its proxy, over rpc-local-registry: by RPC, or by a direct call in the same process.

Every method returns at once: it appends to the desk's inbox and wakes the loop. A batch is taken in item by item, so the
loop can run between two requests. The response stream hands over once per step, not per token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from meta_executor import wire
from meta_executor.executor.desk import Desk, DeskError, Submission
from meta_executor.executor.messages import Answer, Peer
from rpc_batch_submit import take_in
from rpc_local_registry import RpcBackpressure, StreamSource, rpc_method

#: Hand-overs that may wait for the proxy (count). One that does not read for so long is gone; its stream is closed.
HAND_OVERS_MAX = 65_536


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request on its way from the proxy to the worker. ``token_ids``: int32, shape (tokens,), not changed afterwards."""

    request_id: int
    token_ids: np.ndarray
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    generation_first: bool = False
    first_token: int | None = None
    peer: str = ""
    conversation_id: str | None = None
    #: Seconds from now.
    deadline_s: float | None = None


class AnswerBatch(msgspec.Struct, frozen=True, array_like=True):
    """One hand-over."""

    answers: tuple[Answer, ...]


class ExecutorService:
    """See the module.

    Args:
        desk: Rank 0's desk.
        statistics: The instance's counters, as JSON of :class:`meta_executor.wire.InstanceStatistics`.
        info: The endpoint record, as JSON of :class:`meta_executor.wire.ServerInfo`.
        routing: The newest decisions, at most so many, as JSON of :class:`meta_executor.wire.InstanceRouting`.
    """

    def __init__(
        self,
        desk: Desk,
        *,
        statistics: Callable[[], bytes],
        info: Callable[[], bytes],
        routing: Callable[[int], bytes],
    ) -> None:
        self._desk = desk
        self._statistics = statistics
        self._info = info
        self._routing = routing
        self._lock = threading.Lock()
        self._streams: list[StreamSource[AnswerBatch]] = []

    @rpc_method(non_blocking=True)
    def submit(self, request: SubmitRequest) -> None:
        """Take one request in."""
        self._desk.submit(_submission(request))

    @rpc_method(non_blocking=True)
    def submit_batch(self, requests: Iterator[SubmitRequest]) -> list[str | None]:
        """Take a batch in, item by item. Per item None, or "CODE: why"."""
        return take_in(requests, self._submit_one)

    def _submit_one(self, request: SubmitRequest) -> None:
        try:
            self._desk.submit(_submission(request))
        except DeskError as error:
            raise RuntimeError(f"{error.code}: {error}") from error

    @rpc_method(non_blocking=True)
    def abort(self, request_id: int, reason: str) -> None:
        """Stop a request, if it is still here."""
        self._desk.abort(request_id, reason)

    @rpc_method(non_blocking=True)
    def announce_peer(
        self,
        name: str,
        layout: bytes,
        control_addresses: tuple[str, ...],
        processes: tuple[str, ...] = (),
        replaces: str = "",
    ) -> None:
        """Tell every rank of a context instance."""
        self._desk.announce_peer(Peer(name, layout, control_addresses, processes, replaces))

    @rpc_method(non_blocking=True)
    def drain(self, deadline_s: float) -> int:
        """Begin to drain. Returns requests that are here."""
        return self._desk.drain(time.monotonic() + deadline_s)

    @rpc_method(non_blocking=True)
    def counters(self) -> bytes:
        """Counters."""
        return self._statistics()

    @rpc_method(non_blocking=True)
    def record(self) -> bytes:
        """Endpoint record."""
        return self._info()

    @rpc_method(non_blocking=True)
    def routing(self, count_max: int) -> bytes:
        """Why the last requests went where they did. Made by the calling thread; the loop does nothing for it."""
        return self._routing(count_max)

    @rpc_method(streaming=True, non_blocking=True)
    def responses(self) -> StreamSource[AnswerBatch]:
        """All answers from now on."""
        source: StreamSource[AnswerBatch] = StreamSource(HAND_OVERS_MAX)
        with self._lock:
            self._streams.append(source)
        return source

    def deliver(self, answers: list[Answer]) -> None:
        """The desk's hand-over (the loop's thread)."""
        batch = AnswerBatch(tuple(answers))
        with self._lock:
            streams = list(self._streams)
        for source in streams:
            try:
                alive = source.push(batch)
            except RpcBackpressure as error:
                source.close(error)
                alive = False
            if not alive:
                with self._lock:
                    self._streams.remove(source)

    def close(self) -> None:
        """End every stream."""
        with self._lock:
            streams, self._streams = self._streams, []
        for source in streams:
            source.close()


def _submission(request: SubmitRequest) -> Submission:
    deadline_s = None if request.deadline_s is None else time.monotonic() + request.deadline_s
    return Submission(
        request_id=request.request_id,
        token_ids=np.ascontiguousarray(request.token_ids, dtype=np.int32),
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        schedule_style="generation_first" if request.generation_first else "context_first",
        first_token=request.first_token,
        peer=request.peer,
        conversation_id=request.conversation_id,
        deadline_s=deadline_s,
    )


def split_error(text: str) -> tuple[str, str]:
    """Code and message of a refused item."""
    _, _, told = text.rpartition("RuntimeError: ")
    code, separator, message = told.partition(": ")
    return (code, message) if separator and code in wire.STATUS_OF else (wire.INTERNAL, text)
