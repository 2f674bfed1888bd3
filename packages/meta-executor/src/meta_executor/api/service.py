"""What rank 0's worker offers to the instance's API server, which brings the front's requests and those of foreign clients. By
RPC, or by a direct call in the same process.

One stream per subscriber carries its requests' answers: one frame per step, with the tokens of all of them. Every other
method returns at once: it appends to the desk's inbox and wakes the loop. A batch is taken in item by item, so the loop can
run between two requests. Whatever may be refused is refused here, typed, before anything is touched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec
import numpy as np

from kv_bounce_planner.planning import InstanceLayout, KVTransferError
from meta_executor import wire
from meta_executor.api.endpoint import OwnedEndpoint, Refused
from meta_executor.executor.desk import Desk, DeskError
from meta_executor.executor.messages import Peer
from meta_executor.executor.request import Answers, Request, Role
from rpc_batch_submit import take_in
from rpc_local_registry import RpcBackpressure, StreamSource, rpc_method

#: Hand-overs that may wait for one subscriber (count). One that does not read for so long is gone; its stream is closed.
HAND_OVERS_MAX = 65_536
#: Instances that are remembered by their address, so that a new lifetime replaces the earlier one (count).
_PEERS_MAX = 4096


class Submit(msgspec.Struct, frozen=True, array_like=True):
    """A request, and the lifetime of the instance that it is meant for."""

    request: Request
    endpoint_generation: str


@dataclass(slots=True)
class _Subscriber:
    source: StreamSource[Answers]
    request_ids: set[int]


@dataclass(slots=True)
class _Owned:
    """Who is told of a request's answer, and what is left when it has ended."""

    subscriber: str
    admission: AbstractContextManager[object]


class ExecutorService:
    """See the module.

    Args:
        desk: Rank 0's desk.
        role: What the instance does.
        endpoint: Whether requests may come in, and what the instance says of itself.
        statistics: The instance's counters, as JSON of :class:`meta_executor.wire.InstanceStatistics`.
        routing: The newest decisions, at most so many, as JSON of :class:`meta_executor.wire.InstanceRouting`.
        condition: Why the instance cannot serve now; "" while it can.
    """

    def __init__(
        self,
        desk: Desk,
        *,
        role: Role,
        endpoint: OwnedEndpoint,
        statistics: Callable[[], bytes],
        routing: Callable[[int], bytes],
        condition: Callable[[], str] = lambda: "",
    ) -> None:
        self._desk = desk
        self._role = role
        self._endpoint = endpoint
        self._statistics = statistics
        self._routing = routing
        self._condition = condition
        self._lock = threading.Lock()
        self._subscribers: dict[str, _Subscriber] = {}
        self._owned: dict[int, _Owned] = {}
        #: Requests whose subscriber has left and whose last word has not come: nobody is told of them.
        self._orphans: set[int] = set()
        #: The lifetime that was last introduced behind each address.
        self._peer_at: dict[str, str] = {}

    # -- requests -----------------------------------------------------------------------------------------------------

    @rpc_method(non_blocking=True)
    def submit_batch(self, subscriber: str, submits: Iterator[Submit]) -> list[wire.ErrorBody | None]:
        """Take a batch in, item by item. Per item None, or why it was refused."""
        outcomes: list[wire.ErrorBody | None] = []

        def take(submit: Submit) -> None:
            outcomes.append(self._take(subscriber, submit))

        for index, unreadable in enumerate(take_in(submits, take)):
            if unreadable is not None:
                outcomes.insert(index, wire.ErrorBody(error=wire.INVALID_REQUEST, message=unreadable))
        return outcomes

    def _take(self, subscriber: str, submit: Submit) -> wire.ErrorBody | None:
        request = submit.request
        try:
            admission = self._endpoint.admit(submit.endpoint_generation)
        except Refused as refused:
            return refused.body
        refusal = self._refusal(request)
        if refusal is None and not self._own(subscriber, request, admission):
            words = f"request {request.request_id} is here already, or its subscriber has gone"
            refusal = wire.ErrorBody(error=wire.DUPLICATE_REQUEST, message=words, request_id=request.request_id)
        if refusal is None:
            try:
                self._desk.submit(request)
                return None
            except DeskError as error:
                self._disown([request.request_id])
                return wire.ErrorBody(error=error.code, message=str(error), request_id=request.request_id)
        admission.__exit__(None, None, None)
        return refusal

    def _own(self, subscriber: str, request: Request, admission: AbstractContextManager[object]) -> bool:
        with self._lock:
            there = self._subscribers.get(subscriber)
            if there is None or request.request_id in self._owned:
                return False
            there.request_ids.add(request.request_id)
            self._owned[request.request_id] = _Owned(subscriber, admission)
            return True

    def _disown(self, request_ids: list[int]) -> None:
        """Their last word is on its way, or nobody wants it."""
        ended = []
        with self._lock:
            for request_id in request_ids:
                owned = self._owned.pop(request_id, None)
                if owned is not None:
                    ended.append(owned.admission)
                    there = self._subscribers.get(owned.subscriber)
                    if there is not None:
                        there.request_ids.discard(request_id)
        for admission in ended:
            admission.__exit__(None, None, None)

    def _refusal(self, request: Request) -> wire.ErrorBody | None:
        """Why this instance cannot serve the request at all; the same for every caller."""
        info = self._endpoint.info()
        sampling = request.sampling
        if request.prompt_count == 0:
            return _invalid("token_ids", "is empty")
        if self._role == "generation":
            expected = not (request.generation_first or request.prefills_here)
            if expected != (request.first_token is not None):
                return _invalid("first_token", "is required" if expected else "must be null: it comes from elsewhere")
            if not request.prefills_here and not self._is_introduced(request.peer):
                return wire.ErrorBody(
                    error=wire.STALE_GENERATION,
                    message=f"context instance {request.peer} is not introduced here, or another has replaced it",
                    request_id=request.request_id,
                    field=wire.CONTEXT_GENERATION,
                )
        if request.prefills_here and (self._role == "context" or request.generation_first):
            return _invalid("prefills_here", "is for context_first requests of a generation instance")
        if info.vocab_size and not 0 <= int(request.token_ids.min()) <= int(request.token_ids.max()) < info.vocab_size:
            return _invalid("token_ids", f"has a token outside 0..{info.vocab_size - 1}")
        if info.vocab_size:
            named = {
                "stop_token_ids": sampling.stop_token_ids,
                "logit_bias": [token for token, _ in sampling.logit_bias],
            }
            for field, tokens in named.items():
                if tokens and not 0 <= min(tokens) <= max(tokens) < info.vocab_size:
                    return _invalid(f"sampling.{field}", f"has a token outside 0..{info.vocab_size - 1}")
        limits = info.limits
        if limits is None:
            return None
        total = request.prompt_count + sampling.max_tokens
        if total > limits.max_seq_len:
            return _invalid(
                "sampling.max_tokens", f"prompt and answer have {total} tokens, at most {limits.max_seq_len} fit"
            )
        keeps = request.prompt_count if self._role == "context" else total - 1
        if keeps > limits.kv_tokens:
            return _invalid("token_ids", f"needs KV for {keeps} tokens, one rank holds {limits.kv_tokens}")
        return None

    def _is_introduced(self, name: str) -> bool:
        with self._lock:
            return name in self._peer_at.values()

    @rpc_method(non_blocking=True)
    def abort(self, request_id: int, reason: str) -> bool:
        """Stop a request, if it is still here. Whether it had an answer to come."""
        with self._lock:
            known = request_id in self._owned
        self._desk.abort(request_id, reason)
        return known

    @rpc_method(non_blocking=True)
    def introduce(self, url: str, server_info: bytes) -> wire.ErrorBody | None:
        """Tell every rank of a context instance, before requests that name it. Again and again is fine.

        Args:
            url: Where it answers: a new lifetime behind the same address replaces the earlier one.
            server_info: Its ``/server_info``.

        Returns:
            None, or why KV cannot move between the two.
        """
        try:
            info = msgspec.json.decode(server_info, type=wire.ServerInfo)
            layout = msgspec.json.encode(info.layout)
            InstanceLayout.from_json(layout)
        except (msgspec.DecodeError, KVTransferError, ValueError) as error:
            words = f"context instance {url[:200]}: its server_info cannot be used: {str(error)[:200]}"
            return wire.ErrorBody(error=wire.TRANSFER_FAILED, message=words, field="context.url")
        if info.profile != self._endpoint.info().profile or info.generation is None:
            return wire.ErrorBody(
                error=wire.INVALID_REQUEST, message=f"context instance {url} has another KV profile", field="context"
            )
        name = f"{info.instance_id}/{info.generation}"
        with self._lock:
            before = self._peer_at.pop(url, "")
            if before != name:
                # Whoever is replaced at one of its addresses has ended, and answers at no other either.
                self._peer_at = {at: known for at, known in self._peer_at.items() if known != before}
            self._peer_at[url] = name
            while len(self._peer_at) > _PEERS_MAX:
                del self._peer_at[next(iter(self._peer_at))]
        if before != name:
            self._desk.announce_peer(Peer(name, layout, tuple(info.control_addresses), info.processes, before))
        return None

    # -- answers ------------------------------------------------------------------------------------------------------

    @rpc_method(streaming=True, non_blocking=True)
    def answers(self, subscriber: str) -> StreamSource[Answers]:
        """All answers to this subscriber's requests, from now on. When it leaves, its requests are stopped."""
        source: StreamSource[Answers] = StreamSource(HAND_OVERS_MAX, on_cancel=lambda: self._left(subscriber))
        with self._lock:
            before = self._subscribers.get(subscriber)
            self._subscribers[subscriber] = _Subscriber(source, set())
        if before is not None:
            before.source.close()
        return source

    def _left(self, subscriber: str) -> None:
        """Nobody reads these answers any more (any thread)."""
        with self._lock:
            there = self._subscribers.pop(subscriber, None)
            if there is not None:
                self._orphans |= there.request_ids
        if there is not None:
            request_ids = list(there.request_ids)
            self._disown(request_ids)
            for request_id in request_ids:
                self._desk.abort(request_id, "its client has gone")

    def deliver(self, answers: Answers) -> None:
        """The desk's hand-over (the loop's thread): to each subscriber what is its own."""
        context = self._role == "context"
        ended = [notice.request_id for notice in answers.notices if notice.finish_reason or context]
        with self._lock:
            if len(self._subscribers) == 1 and not self._orphans:
                shares = [(name, there.source, answers) for name, there in self._subscribers.items()]
            else:
                shares = [
                    (name, there.source, _share(answers, there.request_ids))
                    for name, there in self._subscribers.items()
                ]
            self._orphans.difference_update(ended)
        for name, source, share in shares:
            if share:
                self._push(name, source, share)
        if ended:
            self._disown(ended)

    def _push(self, subscriber: str, source: StreamSource[Answers], answers: Answers) -> None:
        try:
            alive = source.push(answers)
        except RpcBackpressure as error:
            source.close(error)
            alive = False
        if not alive:
            self._left(subscriber)

    # -- the rest -----------------------------------------------------------------------------------------------------

    @rpc_method(non_blocking=True)
    def drain(self, deadline_s: float) -> int:
        """Begin to drain. Returns requests that are here."""
        self._endpoint.start_draining()
        return self._desk.drain(time.monotonic() + deadline_s)

    @rpc_method(non_blocking=True)
    def counters(self) -> bytes:
        """Counters, as JSON of :class:`meta_executor.wire.InstanceStatistics`; those of submits are its caller's."""
        return self._statistics()

    @rpc_method(non_blocking=True)
    def record(self) -> bytes:
        """Endpoint record, as JSON of :class:`meta_executor.wire.ServerInfo`."""
        return wire.encode_json(self._endpoint.info())

    @rpc_method(non_blocking=True)
    def routing(self, count_max: int) -> bytes:
        """Why the last requests went where they did. Made by the calling thread; the loop does nothing for it."""
        return self._routing(count_max)

    @rpc_method(non_blocking=True)
    def condition(self) -> str:
        """Why the instance cannot serve now; "" while it can."""
        return self._condition()

    def close(self) -> None:
        """End every stream."""
        with self._lock:
            sources = [there.source for there in self._subscribers.values()]
            self._subscribers.clear()
        for source in sources:
            source.close()


def _share(answers: Answers, request_ids: set[int]) -> Answers:
    """The part of a hand-over that is about these requests."""
    mine = np.fromiter((request_id in request_ids for request_id in answers.request_ids.tolist()), np.bool_)
    notices = tuple(notice for notice in answers.notices if notice.request_id in request_ids)
    return Answers(answers.request_ids[mine], answers.token_ids[mine], notices)


def _invalid(field: str, message: str) -> wire.ErrorBody:
    return wire.ErrorBody(error=wire.INVALID_REQUEST, message=f"{field}: {message}", field=field)
