"""Rank 0's desk: where requests come in from other threads, wait for admission, and where answers go out.

``submit``, ``abort`` and ``drain`` may be called from any thread; they only append to an inbox and wake the loop. Everything
else belongs to the loop. The desk keeps one record per request from submission to its last answer.

Admission decides what enters the authoritative broadcast, and in which order: each admitted request gets the next
incarnation. Context, generation-first: only requests whose destination rank 0 holds, and only so many as the metadata-only
window takes; the others stay queued here, none is lost (two instances with opposite orders and a small window would
otherwise wait for each other for ever). Generation: every request is routed to an attention-DP rank.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from meta_executor import wire
from meta_executor.executor.messages import Admit, Peer, WorkItem
from meta_executor.executor.ownership import Outcome
from meta_executor.executor.request import Answers, Notice, Request, Role, join_answers, make_answers
from meta_executor.recent import Recent

#: Ids of ended requests that are remembered (count).
_PAST_MAX = 65_536
#: Decisions that are kept for whoever asks why a request went where it did (count).
DECISIONS_KEPT_MAX = 256


class DeskError(Exception):
    """A submission was refused before anything was touched. ``code`` is one of :mod:`meta_executor.wire`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class Client:
    """What rank 0 knows of one request until its last answer."""

    request: Request
    submitted_s: float
    target_rank: int = -1
    incarnation: int = 0
    admitted: bool = False
    stopping: bool = False
    #: What it last had to wait for before it entered; "": it entered at the first look.
    waited_for: str = ""

    @property
    def deadline_s(self) -> float:
        """When it must have been answered (monotonic, s); infinite without a deadline."""
        return float("inf") if self.request.deadline_s is None else self.submitted_s + self.request.deadline_s


@dataclass(frozen=True, slots=True)
class RankChoice:
    """Where a request goes, and what was known then.

    Attributes:
        rank: Target; -1 for all ranks.
        why: In words.
        load_tokens, load_requests: On that rank before it (count); 0 where all ranks take it.
    """

    rank: int
    why: str
    load_tokens: int = 0
    load_requests: int = 0


class StopOrder(NamedTuple):
    """A request that must end early on every rank. ``error_code``: one of :mod:`meta_executor.wire`."""

    request_id: int
    outcome: Outcome
    reason: str
    error_code: str


class AdmissionRule(Protocol):
    """Role-specific: may this one enter now, and where to. ``policy`` names the rule."""

    policy: str

    def waits_for(self, request: Request) -> str:
        """What it must wait for before it may enter the broadcast; "": it enters now."""
        ...

    def place(self, requests: list[Request]) -> list[RankChoice]:
        """Where each goes."""
        ...

    def left(self, client: Client) -> None:
        """A request has had its last answer."""
        ...


@dataclass(frozen=True, slots=True)
class DeskStatistics:
    """Counts since construction."""

    submitted: int
    admitted: int
    waiting: int
    waiting_peak: int
    live: int
    completed: int
    failed: int
    cancelled: int
    refused: int
    tokens_returned: int


@dataclass(slots=True)
class _Counts:
    submitted: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    tokens: int = 0
    waiting_peak: int = 0


@dataclass(slots=True)
class _Inbox:
    requests: deque[Request] = field(default_factory=deque)
    aborts: deque[tuple[int, str]] = field(default_factory=deque)
    peers: deque[Peer] = field(default_factory=deque)


class Desk:
    """See the module.

    Args:
        role: What the instance does.
        admission: The role's rule.
        requests_max: Requests at once, waiting ones included (count).
        deliver: Gets each batch of answers, once per hand-over, from the loop's thread.
        wake: Wakes the loop, from any thread.
        clock: Monotonic time (s).
        peer_wait_max_s: A generation-first context request whose peer does not ask within this time is failed (s).
    """

    def __init__(
        self,
        *,
        role: Role,
        admission: AdmissionRule,
        requests_max: int,
        deliver: Callable[[Answers], None],
        wake: Callable[[], None],
        clock: Callable[[], float],
        peer_wait_max_s: float = 60.0,
    ) -> None:
        self._peer_wait_max_s = peer_wait_max_s
        #: Ids that were here: an id is used once, because the ranks and the peer remember it.
        self._past: OrderedDict[int, None] = OrderedDict()
        self._role = role
        self._admission = admission
        self._requests_max = requests_max
        self._deliver = deliver
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._inbox = _Inbox()
        self._live_count = 0
        self._drain_deadline_s: float | None = None
        self._clients: dict[int, Client] = {}
        self._unadmitted: dict[int, Client] = {}
        self._answers: list[Answers] = []
        self._last_incarnation = 0
        self._rescan = False
        self._next_deadline_s = float("inf")
        self._counts = _Counts()
        #: Written by the loop, read by whoever serves ``/debug/routing``: (when, decision).
        self._decisions: Recent[tuple[float, wire.RoutingDecision]] = Recent(DECISIONS_KEPT_MAX)
        #: Latest counters of each rank, as JSON.
        self.rank_statistics: dict[int, bytes] = {}

    # -- any thread ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Take a request in.

        Raises:
            DeskError: BACKPRESSURE or DRAINING. Nothing was taken.
        """
        with self._lock:
            if self._drain_deadline_s is not None:
                self._counts.refused += 1
                raise DeskError(wire.DRAINING, "this instance is draining")
            if self._live_count >= self._requests_max:
                self._counts.refused += 1
                raise DeskError(
                    wire.BACKPRESSURE, f"{self._live_count} requests are here, at most {self._requests_max}"
                )
            self._live_count += 1
            self._counts.submitted += 1
            self._inbox.requests.append(request)
        self._wake()

    def abort(self, request_id: int, reason: str) -> None:
        """Stop a request, if it is still here."""
        with self._lock:
            self._inbox.aborts.append((request_id, reason))
        self._wake()

    def announce_peer(self, peer: Peer) -> None:
        """Tell every rank of a peer instance; before requests that name it."""
        with self._lock:
            self._inbox.peers.append(peer)
        self._wake()

    def drain(self, deadline_s: float) -> int:
        """Refuse new requests from now on; what is here must end by then (monotonic, s). Returns requests here now."""
        with self._lock:
            if self._drain_deadline_s is None:
                self._drain_deadline_s = deadline_s
            count = self._live_count
        self._wake()
        return count

    @property
    def live_count(self) -> int:
        """Requests between submission and last answer (count)."""
        return self._live_count

    def routing(self, count_max: int | None = None) -> tuple[int, list[wire.RoutingDecision]]:
        """Decisions since start (count), and the newest of them, oldest first, with their age. The loop never waits for
        this call."""
        decided, held = self._decisions.last(count_max)
        now_s = self._clock()
        return decided, [msgspec.structs.replace(decision, age_s=max(now_s - at_s, 0.0)) for at_s, decision in held]

    # -- the loop -----------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """A drain was asked for."""
        return self._drain_deadline_s is not None

    @property
    def drain_deadline_s(self) -> float:
        """When the drain must have ended (monotonic, s); infinite without one."""
        return float("inf") if self._drain_deadline_s is None else self._drain_deadline_s

    @property
    def last_incarnation(self) -> int:
        """The last one given out; 0 before the first."""
        return self._last_incarnation

    def client(self, request_id: int) -> Client | None:
        """The record, while it is here."""
        return self._clients.get(request_id)

    def admission_may_have_changed(self) -> None:
        """A destination has arrived, or a place in the window is free: look at the waiting ones again."""
        self._rescan = True

    def collect(self, now_s: float) -> tuple[list[WorkItem], list[StopOrder]]:
        """What enters the broadcast now.

        Returns:
            Items (peers, then admitted requests), and stops that the loop must author for admitted requests.
        """
        if self._inbox.requests or self._inbox.aborts or self._inbox.peers:
            with self._lock:
                inbox, self._inbox = self._inbox, _Inbox()
        else:
            inbox = None
        items: list[WorkItem] = []
        stops: list[StopOrder] = []
        if inbox is not None:
            items.extend(inbox.peers)
            for request in inbox.requests:
                self._enter(request, now_s)
            for request_id, reason in inbox.aborts:
                self._stop(request_id, Outcome.CANCELLED, reason, wire.CANCELLED, stops)
        if now_s >= self._next_deadline_s:
            self._expire(now_s, stops)
        if self.draining:
            for request_id in list(self._unadmitted):
                self._stop(request_id, Outcome.FAILED, "this instance is draining", wire.DRAINING, stops)
        if self._rescan and self._unadmitted:
            items.extend(self._admit(now_s))
        return items, stops

    def answer(self, answers: Answers) -> None:
        """Queue a hand-over; the notice that sets a finish reason ends its request, and so does a context's only one. What
        comes for a request after its last word is dropped."""
        heard = []
        for notice in answers.notices:
            client = self._clients.get(notice.request_id)
            if client is None:
                continue  # it has had its last word
            heard.append(notice)
            if notice.finish_reason or self._role == "context":
                self._finish(client, notice)
        if len(heard) != len(answers.notices):
            answers = Answers(answers.request_ids, answers.token_ids, tuple(heard))
        self._answers.append(answers)
        self._counts.tokens += len(answers)

    def take_statistics(self, rank: int, statistics: bytes) -> None:
        """A rank's latest counters."""
        self.rank_statistics[rank] = statistics

    def hand_out(self) -> bool:
        """Deliver what was queued, in one call. Returns whether there was any."""
        if not self._answers:
            return False
        answers, self._answers = self._answers, []
        self._deliver(join_answers(answers))
        return True

    def statistics(self) -> DeskStatistics:
        """Counters."""
        counts = self._counts
        return DeskStatistics(
            submitted=counts.submitted,
            admitted=self._last_incarnation,
            waiting=len(self._unadmitted),
            waiting_peak=counts.waiting_peak,
            live=self._live_count,
            completed=counts.completed,
            failed=counts.failed,
            cancelled=counts.cancelled,
            refused=counts.refused,
            tokens_returned=counts.tokens,
        )

    # -- within -------------------------------------------------------------------------------------------------------

    def _enter(self, request: Request, now_s: float) -> None:
        request_id = request.request_id
        if request_id in self._clients or request_id in self._past:
            # The one that is here goes on; this second owner of the id is told, and nothing of the first is touched.
            words = f"request {request_id} is or was here already"
            self._answers.append(make_answers(notices=[Notice(request_id, "error", wire.DUPLICATE_REQUEST, words)]))
            with self._lock:
                self._live_count -= 1
            return
        client = Client(request, now_s)
        self._clients[request_id] = client
        self._unadmitted[request_id] = client
        self._counts.waiting_peak = max(self._counts.waiting_peak, len(self._unadmitted))
        self._next_deadline_s = min(self._next_deadline_s, self._due_s(client))
        self._rescan = True

    def _admit(self, now_s: float) -> list[WorkItem]:
        self._rescan = False
        entering: list[Client] = []
        for client in list(self._unadmitted.values()):
            waits_for = self._admission.waits_for(client.request)
            if waits_for:
                client.waited_for = waits_for
                continue
            del self._unadmitted[client.request.request_id]
            entering.append(client)
        placements = self._admission.place([client.request for client in entering]) if entering else []
        items: list[WorkItem] = []
        for client, placement in zip(entering, placements, strict=True):
            self._last_incarnation += 1
            client.admitted = True
            client.incarnation = self._last_incarnation
            client.target_rank = placement.rank
            items.append(Admit(client.request, client.incarnation, client.target_rank))
            self._decisions.add((now_s, _decision(client, placement, now_s)))
        return items

    def _stop(
        self,
        request_id: int,
        outcome: Outcome,
        reason: str,
        code: str,
        stops: list[StopOrder],
    ) -> None:
        client = self._clients.get(request_id)
        if client is None:
            # Answered already: a context request lives on between the ranks until its KV was fetched. Or never here: it
            # was overtaken by its own abort, and must not begin any more.
            self._remember(request_id)
            stops.append(StopOrder(request_id, outcome, reason, code))
            return
        if client.stopping:
            return
        client.stopping = True
        if client.admitted:
            stops.append(StopOrder(request_id, outcome, reason, code))
            return
        self._unadmitted.pop(request_id, None)
        if client.request.generation_first and self._role == "context":
            # Its peer may be waiting for KV that will never come: every rank refuses it.
            stops.append(StopOrder(request_id, outcome, reason, code))
        finish = "cancelled" if outcome is Outcome.CANCELLED else "error"
        self.answer(make_answers(notices=[Notice(request_id, finish, code, reason)]))

    def _due_s(self, client: Client) -> float:
        """When the request must be looked at: its own deadline, or the end of waiting for its peer."""
        due_s = client.deadline_s
        waits = self._role == "context" and not client.admitted
        if waits and client.request.generation_first:
            due_s = min(due_s, client.submitted_s + self._peer_wait_max_s)
        return due_s

    def _expire(self, now_s: float, stops: list[StopOrder]) -> None:
        self._next_deadline_s = float("inf")
        for client in list(self._clients.values()):
            request_id = client.request.request_id
            if client.stopping:
                continue
            if now_s >= client.deadline_s:
                self._stop(request_id, Outcome.CANCELLED, "its deadline has passed", wire.DEADLINE, stops)
            elif now_s >= self._due_s(client):
                reason = f"no generation instance asked for it within {self._peer_wait_max_s:g} s"
                self._stop(request_id, Outcome.FAILED, reason, wire.TRANSFER_FAILED, stops)
            else:
                self._next_deadline_s = min(self._next_deadline_s, self._due_s(client))

    def _remember(self, request_id: int) -> None:
        self._past[request_id] = None
        while len(self._past) > _PAST_MAX:
            self._past.popitem(last=False)

    def _finish(self, client: Client, notice: Notice) -> None:
        del self._clients[client.request.request_id]
        self._remember(client.request.request_id)
        self._unadmitted.pop(client.request.request_id, None)
        if notice.finish_reason == "error":
            self._counts.failed += 1
        elif notice.finish_reason == "cancelled":
            self._counts.cancelled += 1
        else:
            self._counts.completed += 1
        if client.admitted:
            self._admission.left(client)
        with self._lock:
            self._live_count -= 1
        self._rescan = True


def _decision(client: Client, placement: RankChoice, now_s: float) -> wire.RoutingDecision:
    return wire.RoutingDecision(
        request_id=client.request.request_id,
        rank=placement.rank,
        why=placement.why,
        tokens=len(client.request.token_ids),
        load_tokens=placement.load_tokens,
        load_requests=placement.load_requests,
        waited_ms=1000.0 * max(now_s - client.submitted_s, 0.0),
        waited_for=client.waited_for,
    )
