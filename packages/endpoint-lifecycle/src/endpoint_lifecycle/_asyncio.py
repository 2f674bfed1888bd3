"""The one file that imports asyncio: runs flights as tasks, settles futures, keeps probes and expiry going.

A fetch is a task of the directory's, never of a waiter: a waiter that is cancelled takes its own future away and nothing
else. A reservation is made and released in single steps without an await, so no cancellation can fall between a claim and
its record, and none can interrupt a release.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from endpoint_lifecycle._backoff import CAP_S, FIRST_S, BackoffSchedule, BackoffStatistics
from endpoint_lifecycle._directory import EndpointDirectory
from endpoint_lifecycle._errors import (
    ConfigError,
    DirectoryClosed,
    Draining,
    EndpointError,
    EndpointTimeout,
    LocalProtocolError,
    NoServer,
    NotSent,
    Overloaded,
    RecordInvalid,
    RefreshFailed,
    ReservationError,
    ServerGone,
    StaleGeneration,
    Unavailable,
)
from endpoint_lifecycle._http import refusal_of
from endpoint_lifecycle._record import EndpointRecord, check_number
from endpoint_lifecycle._slots import Effects, Flight, PickPolicy, Reservation, Ticket
from endpoint_lifecycle._views import (
    DirectoryAudit,
    DirectoryConfig,
    DirectoryStatistics,
    Load,
    ReservationState,
    ServerStatus,
)

T = TypeVar("T")
B = TypeVar("B")

Fetch = Callable[[str], Awaitable[bytes | Mapping[str, Any] | EndpointRecord]]


@dataclass(frozen=True, slots=True)
class ReleaseNotice:
    """What a release hook is told: a reservation left the books, once."""

    role: str
    request_id: int
    server: str
    generation: str | None
    weight: int
    reason: str


ReleaseHook = Callable[[ReleaseNotice], Awaitable[None]]

_RELEASE_ATTEMPTS = 3
_RELEASE_TIMEOUT_S = 1.0
#: Refusals that one reservation answers by going elsewhere.
_REFUSALS_MAX = 16


class AsyncEndpointDirectory:
    """The directory for asyncio programs. All its methods belong to one event loop.

    Used as ``async with``, it probes servers in the background: those without a record until they answer, the others every
    ``probe_ready_s``. Without it everything works on demand.

    Args:
        fetch: Gets a server's ``/server_info``: bytes of JSON, the decoded mapping, or a record. It may raise anything.
        config: Bounds.
        policy: Picks among candidates; None: least loaded.
        on_release: Told of every reservation that leaves the books, by a task of the directory's: tried three times of at
            most 1 s each, never in the way of the request, failures counted.
        random: Uniform in [0, 1).
    """

    def __init__(
        self,
        fetch: Fetch,
        config: DirectoryConfig | None = None,
        *,
        policy: PickPolicy | None = None,
        on_release: ReleaseHook | None = None,
        random: Callable[[], float] = random.random,
    ) -> None:
        self.core = EndpointDirectory(config, policy=policy, random=random)
        self.config = self.core.config
        self._fetch = fetch
        self._on_release = on_release
        self._random = random
        self._tasks: dict[Flight, asyncio.Task[None]] = {}
        self._hook_tasks: dict[asyncio.Task[None], None] = {}
        self._fetch_slots = asyncio.Semaphore(self.config.concurrent_fetches)
        self._role_waiters: dict[str, dict[asyncio.Future[None], None]] = {}  # dicts: first come, first woken
        self._maintenance: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.release_hook_failures = 0
        self.release_hook_error: BaseException | None = None

    # -- life -----------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> AsyncEndpointDirectory:
        if self.core.closed:
            raise DirectoryClosed("the directory is closed")
        if self._maintenance is None:
            self._maintenance = self._spawn(self._maintain(), "endpoint-directory")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel every task, answer every waiter with DirectoryClosed, take every reservation off the books. Idempotent.

        From anywhere, also from inside a fetch (which is cancelled then) or a hook.
        """
        self._perform(self.core.close())
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        # Whoever closes from inside a fetch or a hook is one of these tasks, and does not wait for itself.
        caller = asyncio.current_task()
        cancelled = [task for task in (self._maintenance, *self._tasks.values()) if task not in (None, caller)]
        for task in cancelled:
            task.cancel()
        await asyncio.gather(
            *cancelled, *(task for task in self._hook_tasks if task is not caller), return_exceptions=True
        )

    def _now_s(self) -> float:
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        return loop.time()

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(coroutine, name=name)

    # -- servers --------------------------------------------------------------------------------------------------------

    def add_server(self, server: str, role: str, owner_id: str | None = None) -> None:
        """Add a server whose record is still to be fetched; known ones stay as they are."""
        self._perform(self.core.add_server(server, role, self._now_s(), owner_id=owner_id))
        self._wake.set()

    def remove_server(self, server: str) -> None:
        """Forget a server: waiters get ServerGone, running requests keep their reservations."""
        self._perform(self.core.remove_server(server, self._now_s()))

    def start_draining(self, server: str) -> None:
        """Send nothing new to a server for the rest of its lifetime; in-flight peers still resolve it."""
        self._perform(self.core.start_draining(server))

    def apply_set(self, server: str, record: EndpointRecord) -> None:
        """Take a registration from discovery."""
        self._perform(self.core.apply_set(server, record, self._now_s()))
        self._wake.set()

    def apply_delete(self, server: str, generation: str | None) -> None:
        """Take a withdrawal or expiry from discovery."""
        self._perform(self.core.apply_delete(server, generation, self._now_s()))

    # -- refreshing -----------------------------------------------------------------------------------------------------

    async def refresh(
        self, server: str, proven_stale: str | None = None, timeout_s: float | None = None
    ) -> EndpointRecord:
        """Fetch a server's record, together with everybody else who asks now.

        Args:
            server: Whose.
            proven_stale: A generation that was seen refused; see ``EndpointDirectory.join``.
            timeout_s: How long to wait; None: ``total_timeout_s``.

        Raises:
            RefreshFailed, RecordInvalid, NotReady, ServerGone, Overloaded, DirectoryClosed: As they say.
            EndpointTimeout: The wait ended first. The fetch goes on for the others.
        """
        outcome, effects = self.core.join(server, self._now_s(), proven_stale=proven_stale)
        if isinstance(outcome, EndpointRecord):
            self._perform(effects)
            return outcome
        loop = asyncio.get_running_loop()
        future: asyncio.Future[EndpointRecord] = loop.create_future()
        outcome.waiter = future
        wait_s = self.config.total_timeout_s if timeout_s is None else timeout_s
        timer = loop.call_later(wait_s, _expire_waiter, future, f"{server}: no answer within {wait_s:g} s")
        try:
            self._perform(effects)
            return await future
        finally:
            timer.cancel()
            self._perform(self.core.leave(outcome))

    async def prepare(self, timeout_s: float | None = None) -> dict[str, EndpointRecord | EndpointError]:
        """Fetch every server that has no usable record, at once; one that hangs delays no other.

        Returns:
            Per server its record or the error. Never raises for a single server.
        """
        servers = [s for s in self.core.servers() if self.core.status(s) is ServerStatus.UNPREPARED]

        async def one(server: str) -> EndpointRecord | EndpointError:
            try:
                return await self.refresh(server, timeout_s=timeout_s)
            except EndpointError as error:
                return error

        results = await asyncio.gather(*(one(server) for server in servers))
        return dict(zip(servers, results, strict=True))

    async def _drive(self, flight: Flight) -> None:
        """Run one flight to its end, inside the bounds, and tell the core every outcome."""
        try:
            async with asyncio.timeout_at(flight.deadline_s):
                while not flight.ended:
                    retry_in_s = await self._attempt(flight)
                    if retry_in_s is None:
                        return
                    await asyncio.sleep(retry_in_s)
        except TimeoutError:
            self._perform(self.core.flight_expired(flight, self._now_s()))

    def _flight_ended(self, flight: Flight, task: asyncio.Task[None]) -> None:
        self._tasks.pop(flight, None)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if not flight.ended:
            # Cancelled by others, or ended by what is not an Exception: the server's next refresh must not wait for it.
            lost = error if error is not None else RuntimeError("the fetch ended without an outcome")
            self._perform(self.core.flight_lost(flight, lost, self._now_s()))
        if isinstance(error, Exception):
            raise error  # a defect of ours: the loop's exception handler shows it

    async def _attempt(self, flight: Flight) -> float | None:
        async with self._fetch_slots:
            if flight.ended:
                return None
            self.core.fetch_began(flight, self._now_s())
            try:
                async with asyncio.timeout(self.config.attempt_timeout_s):
                    payload = await self._fetch(flight.server)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The fetch cancelled itself; nobody cancelled us.
                effects = self.core.fetch_failed(flight, error, self._now_s())
            except Exception as error:  # noqa: BLE001 - the fetch is the user's: whatever it raises is that server's failure
                effects = self.core.fetch_failed(flight, error, self._now_s())
            else:
                effects = self.core.fetch_succeeded(flight, payload, self._now_s())
        self._perform(effects)
        return effects.retry_in_s

    def _perform(self, effects: Effects) -> None:
        for flight in effects.cancel:
            task = self._tasks.get(flight)
            if task is not None:
                task.cancel()
        for ticket, record in effects.resolved:
            _settle(ticket, record, None)
        for ticket, error in effects.failed:
            _settle(ticket, None, error)
        for flight in effects.start:
            task = self._spawn(self._drive(flight), f"refresh {flight.server}")
            self._tasks[flight] = task
            # Not a finally in _drive: a task that is cancelled before its first step never runs one.
            task.add_done_callback(functools.partial(self._flight_ended, flight))
        for role in effects.roles:
            for waiter in self._role_waiters.get(role, ()):
                if not waiter.done():
                    waiter.set_result(None)
        for reservation in effects.released:
            self._tell(reservation)

    # -- background -----------------------------------------------------------------------------------------------------

    async def _maintain(self) -> None:
        while True:
            self._wake.clear()
            try:
                wait_s = self._probe_due()
            except Exception as error:  # noqa: BLE001 - probing must go on; the handler shows what it met
                wait_s = self.config.probe_first_s
                context = {"message": "endpoint directory: a probe failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)
            try:
                async with asyncio.timeout(wait_s if wait_s != float("inf") else None):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _probe_due(self) -> float:
        """Begin the probes that are due; how long to wait for the next."""
        now_s = self._now_s()
        due, next_s = self.core.due_probes(now_s)
        for server in due:
            self._perform(self.core.probe(server, now_s))
        # A probe that ends sets the next one: look again when it has. 10 ms bounds what a thousand servers cost.
        wait_s = max(next_s - now_s, 0.01)
        return min(wait_s, 0.05) if due or self._tasks else wait_s

    def _arm_expiry(self) -> None:
        """One timer while something is reserved; it is left to fire and then finds out whether it is still needed."""
        if self._expiry is None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(self.config.reservation_ttl_s, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        expired, next_s = self.core.expire(self._now_s())
        for reservation in expired:
            self._tell(reservation)
        if next_s != float("inf"):
            self._expiry = asyncio.get_running_loop().call_at(next_s, self._expire)

    def _tell(self, reservation: Reservation) -> None:
        if self._on_release is None:
            return
        notice = ReleaseNotice(
            reservation.role,
            reservation.request_id,
            reservation.server,
            reservation.generation,
            reservation.weight,
            reservation.reason,
        )
        try:
            asyncio.get_running_loop()
        except RuntimeError as error:
            # Dropped by the garbage collector with no loop running: the books are right, nobody can be told.
            self.release_hook_failures += 1
            self.release_hook_error = error
            return
        task = self._spawn(self._run_hook(self._on_release, notice), f"release {notice.request_id}")
        self._hook_tasks[task] = None
        task.add_done_callback(self._hook_tasks.pop)

    async def _run_hook(self, hook: ReleaseHook, notice: ReleaseNotice) -> None:
        for attempt in range(_RELEASE_ATTEMPTS):
            if attempt:
                await asyncio.sleep(0.05 * 2**attempt * (0.5 + 0.5 * self._random()))
            try:
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await hook(notice)
                return
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                self.release_hook_error = error  # the hook cancelled itself; nobody cancelled us
            except Exception as error:  # noqa: BLE001 - the hook is the user's and must not reach the request
                self.release_hook_error = error
        self.release_hook_failures += 1

    # -- reserving ------------------------------------------------------------------------------------------------------

    def reserve(
        self,
        role: str,
        request_id: int,
        weight: int = 1,
        *,
        revalidate: bool = False,
        timeout_s: float | None = None,
        exclude: Collection[str] = (),
        affinity: Any = None,
    ) -> AsyncReservation:
        """Claim a server: ``async with directory.reserve(...) as reservation``.

        Entering picks and claims in one step. Where no server of the role can be picked but some might come, it waits for
        a fetch of theirs. Leaving releases without an await, on every path.

        Args:
            role, request_id: The key; a live reservation under it is replaced.
            weight: Integer >= 0.
            revalidate: Fetch the picked server's record before returning, where it has a generation, and bind to what is
                live then: what generation-first dispatch needs, since its first message goes to the peer, not to the
                server.
            timeout_s: Wait at most so long; None: ``total_timeout_s``.
            exclude: Servers not to pick.
            affinity: Handed to the policy.

        Raises:
            ConfigError: ``timeout_s`` is not a number, or ``exclude`` is not a collection of names (one string is not).
        """
        if timeout_s is not None:
            check_number(timeout_s, "timeout_s")
        if isinstance(exclude, str) or not isinstance(exclude, Collection):
            raise ConfigError("exclude", f"is {exclude!r}, not a collection of servers")
        return AsyncReservation(self, role, request_id, weight, revalidate, timeout_s, exclude, affinity)

    async def dispatch(
        self,
        role: str,
        request_id: int,
        send: Callable[[AsyncReservation], Awaitable[tuple[int, B]]],
        weight: int = 1,
        *,
        revalidate: bool = False,
        timeout_s: float | None = None,
        exclude: Collection[str] = (),
        affinity: Any = None,
    ) -> tuple[int, B]:
        """Reserve, send, and go elsewhere while receivers refuse: the loop around ``AsyncReservation.refused``.

        Args:
            send: Sends once, to ``reservation.server`` with ``reservation.generation``, and returns status and body. It raises
                NotSent when it could not connect. Whatever else it raises ends the loop: the request may have been taken in.

        The other arguments are those of ``reserve``; ``timeout_s`` bounds each wait for a server.

        Returns:
            The first answer that is not a refusal.

        Raises:
            NoServer, EndpointTimeout: Nobody is left who could take it.
            StaleGeneration, Unavailable: The last of 16 refusals.
        """
        reservation = self.reserve(
            role, request_id, weight, revalidate=revalidate, timeout_s=timeout_s, exclude=exclude, affinity=affinity
        )
        async with reservation:
            while True:
                try:
                    reservation.dispatched()
                except (StaleGeneration, Unavailable) as error:
                    await reservation.refused_by(error)
                    continue
                try:
                    status, body = await send(reservation)
                except NotSent as error:
                    await reservation.refused_by(error)
                    continue
                refusal = refusal_of(status, body if isinstance(body, (bytes, str, Mapping)) else None)
                if refusal is None:
                    return status, body
                await reservation.refused_by(refusal)

    async def _reserve_waiting(self, request: AsyncReservation, first: NoServer) -> Reservation:
        """Nothing could be picked: fetch what might become pickable and try again at each change."""
        role, exclude = request._role, request._exclude
        loop = asyncio.get_running_loop()
        waiters = self._role_waiters.setdefault(role, {})
        if len(waiters) >= self.config.waiters_max:
            raise Overloaded(f"{len(waiters)} callers wait for a {role} server")
        wait_s = self.config.total_timeout_s if request._timeout_s is None else request._timeout_s
        deadline_s = loop.time() + wait_s
        error = first
        while True:
            running, effects = self.core.probe_role(role, loop.time(), exclude)
            self._perform(effects)
            if not running:
                raise error
            future: asyncio.Future[None] = loop.create_future()
            waiters[future] = None
            timer = loop.call_at(deadline_s, _expire_waiter, future, f"no {role} server within {wait_s:g} s")
            try:
                await future
            finally:
                timer.cancel()
                del waiters[future]
            try:
                return self._reserve_now(request)
            except NoServer as again:
                error = again

    def _reserve_now(self, request: AsyncReservation) -> Reservation:
        # Only the last reservation under a key is live, so a replaced one is told of here, where it was looked up.
        core = self.core
        replaced = (
            core._reservations.get((request._role, request._request_id)) if self._on_release is not None else None
        )
        reservation = core.reserve(
            request._role,
            request._request_id,
            self._now_s(),
            weight=request._weight,
            exclude=request._exclude,
            affinity=request._affinity,
        )
        if replaced is not None:
            self._tell(replaced)
        if self._expiry is None:
            self._arm_expiry()
        return reservation

    # -- reading --------------------------------------------------------------------------------------------------------

    def resolve(self, generation: str) -> EndpointRecord:
        """The record of a generation that is still served, draining included. StaleGeneration when gone."""
        return self.core.resolve(generation)

    def record(self, server: str) -> EndpointRecord | None:
        """The cached record, or None. ServerGone for an unknown server."""
        return self.core.record(server)

    def status(self, server: str) -> ServerStatus:
        """Whether a server can be picked."""
        return self.core.status(server)

    def servers(self, role: str | None = None) -> tuple[str, ...]:
        """Keys of the known servers."""
        return self.core.servers(role)

    def ready(self, **minimum: int) -> bool:
        """Whether at least so many servers per role can be picked now: ``ready(context=1, generation=1)``."""
        return not self.core.closed and all(self.core.ready_count(role) >= count for role, count in minimum.items())

    def load(self, server: str, generation: str | None = None) -> Load:
        """Load of a server's present generation, or of the one named."""
        return self.core.load(server, generation)

    def audit(self) -> DirectoryAudit:
        """Servers, reservations, loads and every disagreement between them."""
        return self.core.audit(self._now_s())

    def statistics(self) -> DirectoryStatistics:
        """Counters of one moment."""
        return self.core.statistics()

    @property
    def task_count(self) -> int:
        """Tasks of the directory's that run now, the background one aside."""
        return sum(not task.done() for task in (*self._tasks.values(), *self._hook_tasks))


def _expire_waiter(future: asyncio.Future[Any], message: str) -> None:
    if not future.done():
        future.set_exception(EndpointTimeout(message))


def _settle(ticket: Ticket, record: EndpointRecord | None, error: EndpointError | None) -> None:
    future: asyncio.Future[EndpointRecord] | None = ticket.waiter
    if future is None or future.done():
        return
    if error is not None:
        future.set_exception(error)
    elif record is not None:
        future.set_result(record)


class AsyncReservation:
    """One request's claim: enter once, leave once. Made by ``AsyncEndpointDirectory.reserve``."""

    __slots__ = (
        "_affinity", "_directory", "_exclude", "_refusals", "_request_id", "_reservation", "_revalidate", "_role",
        "_timeout_s", "_weight",
    )  # fmt: skip

    def __init__(
        self,
        directory: AsyncEndpointDirectory,
        role: str,
        request_id: int,
        weight: int,
        revalidate: bool,
        timeout_s: float | None,
        exclude: Collection[str],
        affinity: Any,
    ) -> None:
        self._directory = directory
        self._role = role
        self._request_id = request_id
        self._weight = weight
        self._revalidate = revalidate
        self._timeout_s = timeout_s
        self._exclude = exclude
        self._affinity = affinity
        self._refusals = 0
        self._reservation: Reservation | None = None

    async def __aenter__(self) -> AsyncReservation:
        if self._reservation is not None:
            raise ReservationError("a reservation is entered once")
        directory = self._directory
        try:
            self._reservation = directory._reserve_now(self)
        except NoServer as error:
            self._reservation = await directory._reserve_waiting(self, error)
        if self._revalidate and self._reservation.generation is not None:
            try:
                await self._revalidated()
            except BaseException as error:
                self._leave(error)
                raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._leave(error)

    async def acquire(self) -> AsyncReservation:
        """As entering, for code that hands the reservation on; then ``release`` is the caller's to call."""
        return await self.__aenter__()

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            self.release("completed")
        elif isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self.release("cancelled")
        else:
            self.release(f"error: {type(error).__name__}")

    async def _revalidated(self) -> None:
        reservation = self._live()
        await self._directory.refresh(reservation.server, timeout_s=self._timeout_s)
        self._directory.core.rebind(reservation, self._directory._now_s())

    def _live(self) -> Reservation:
        if self._reservation is None:
            raise ReservationError("the reservation was not entered")
        return self._reservation

    # -- what was picked ------------------------------------------------------------------------------------------------

    @property
    def role(self) -> str:
        """First part of the key."""
        return self._role

    @property
    def request_id(self) -> int:
        """Second part of the key: the id at selection, whatever id a retry uses later."""
        return self._request_id

    @property
    def server(self) -> str:
        """The server that was picked."""
        return self._live().server

    @property
    def record(self) -> EndpointRecord:
        """Its record, as it was when the reservation was bound."""
        return self._live().record

    @property
    def generation(self) -> str | None:
        """The generation that the request must carry, so that the receiver can refuse another."""
        return self._live().generation

    @property
    def state(self) -> ReservationState:
        """See ReservationState."""
        return self._live().state

    # -- using it -------------------------------------------------------------------------------------------------------

    def dispatched(self) -> None:
        """Call right before the first byte leaves.

        Raises:
            StaleGeneration, Draining, NotReady, ServerGone: What was reserved is not there any more; nothing was sent.
            ReservationError: The reservation was released or has expired.
        """
        self._directory.core.dispatched(self._live(), self._directory._now_s())

    def renew(self) -> bool:
        """Put the expiry off; cheap enough for every chunk of a stream. False when the reservation is off the books."""
        return self._directory.core.renew(self._live(), self._directory._now_s())

    async def prove_stale(self) -> EndpointRecord:
        """The receiver refused the generation: get the live one, with everybody else who found out, and bind to it.

        Returns:
            The record to send again to: only if the refusal came before anything was taken in, as a generation check
            does.

        Raises:
            RefreshFailed, NotReady, RecordInvalid, ServerGone, Draining, EndpointTimeout: There is none. The reservation
                stays as it was, to be released by leaving.
        """
        reservation = self._live()
        directory = self._directory
        await directory.refresh(reservation.server, proven_stale=reservation.generation, timeout_s=self._timeout_s)
        return directory.core.rebind(reservation, directory._now_s())

    async def refused(self, status: int, body: bytes | str | Mapping[str, Any] | None) -> bool:
        """An answer came: if the receiver refused before it took anything in, find who takes the request instead.

        Returns:
            True: send again, to what ``server``, ``record`` and ``generation`` say now. False: it is not a refusal of this
            package's (``refusal_of``); the answer is the client's.

        Raises:
            As ``refused_by``.
        """
        refusal = refusal_of(status, body)
        if refusal is None:
            return False
        await self.refused_by(refusal)
        return True

    async def refused_by(self, error: StaleGeneration | Unavailable) -> None:
        """As ``refused``, for the error itself: from ``dispatched()``, or NotSent and NotReady where connecting failed.

        A stale generation is refreshed, and the same server is used again if it lives; a draining server gets nothing new for
        the rest of its lifetime; one that is not there gets nothing until a probe answers; an overloaded one is left out by
        this reservation. Then another server is reserved in one step, waiting as entering does.

        Raises:
            NoServer, EndpointTimeout: Nobody is left who could take it. The claim stands as it was, to be released by leaving.
            Overloaded: All that could are.
            StaleGeneration, Unavailable: ``error`` itself, after 16 moves of this reservation.
            DirectoryClosed: The directory was closed.
        """
        reservation = self._live()
        self._refusals += 1
        if self._refusals > _REFUSALS_MAX:
            raise error
        if isinstance(error, StaleGeneration):
            try:
                await self.prove_stale()
            except (RefreshFailed, RecordInvalid, Unavailable, EndpointTimeout):
                pass  # nobody lives there: the directory knows by now, and another server is looked for
            else:
                return
        elif isinstance(error, Overloaded):
            self._exclude = (*self._exclude, reservation.server)
        elif isinstance(error, Draining):
            self._mark_draining(reservation)
        elif not isinstance(error, ServerGone):
            self.unreachable()
        await self._move(error)

    def _mark_draining(self, reservation: Reservation) -> None:
        core = self._directory.core
        try:
            self._directory._perform(core.start_draining(reservation.server, reservation.generation))
        except ServerGone:
            return  # it went meanwhile, which is as good

    async def _move(self, error: EndpointError) -> None:
        directory = self._directory
        try:
            try:
                self._reservation = directory._reserve_now(self)
            except NoServer as none:
                self._reservation = await directory._reserve_waiting(self, none)
        except NoServer as none:
            raise (error if isinstance(error, Overloaded) else none) from error
        if self._revalidate and self._reservation.generation is not None:
            await self._revalidated()

    def unreachable(self) -> None:
        """Connecting failed: nobody is sent there until a probe answers."""
        reservation = self._live()
        directory = self._directory
        directory._perform(directory.core.unreachable(reservation.server, reservation.generation, directory._now_s()))
        directory._wake.set()

    def release(self, reason: str = "released") -> bool:
        """Take the reservation off the books. True the first time; later calls, and leaving, change nothing."""
        reservation = self._reservation
        if reservation is None:
            return False
        released = self._directory.core.release(reservation, reason)
        if released and self._directory._on_release is not None:
            self._directory._tell(reservation)
        return released


class _Releasable(Protocol):
    def release(self, reason: str = ...) -> bool: ...
    def renew(self) -> bool: ...


class ReservedStream(Generic[T]):
    """An async iterator that keeps reservations while it runs and releases them however it ends.

    A generator's ``finally`` does not run when the generator was never started (the client left before the first read);
    this object's ``aclose()`` does its work then too. Where the frame that makes it can leave without closing it, use it as
    ``async with``.

    Args:
        source: What is iterated. Its ``aclose`` is called if it has one.
        reservations: Renewed at every item, released at the end.
    """

    def __init__(self, source: AsyncIterator[T], *reservations: _Releasable) -> None:
        self._source = source
        self._reservations = reservations
        self._ended = False

    def __aiter__(self) -> ReservedStream[T]:
        return self

    async def __anext__(self) -> T:
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._source.__anext__()
        except StopAsyncIteration:
            self._release("completed")
            raise
        except asyncio.CancelledError:
            self._release("cancelled")
            await self._close_source()
            raise
        except BaseException as error:
            self._release(f"error: {type(error).__name__}")
            raise
        for reservation in self._reservations:
            reservation.renew()
        return item

    async def aclose(self) -> None:
        """End early: releases first, without an await, then closes the source. Idempotent."""
        self._release("disconnected")
        await self._close_source()

    async def _close_source(self) -> None:
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()

    def _release(self, reason: str) -> None:
        self._ended = True
        failures = []
        for reservation in self._reservations:
            try:
                reservation.release(reason)
            except Exception as error:  # noqa: BLE001 - one that fails must not keep the others
                failures.append(error)
        if failures:
            raise failures[0]

    async def __aenter__(self) -> ReservedStream[T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if not self._ended:
            self._release("disconnected" if error is None else "cancelled")
        await self._close_source()

    def __del__(self) -> None:
        if not self._ended:
            self._release("dropped")


class AsyncIdleBackoff:
    """Backoff for a coroutine's loop; the schedule and promises of IdleBackoff. One waiting task."""

    def __init__(self, first_s: float = FIRST_S, cap_s: float = CAP_S) -> None:
        self._schedule = BackoffSchedule(first_s, cap_s)
        self._notifications = 0
        self._seen = 0
        self._waits = 0
        self._notified = 0
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the next step of the schedule, or until notified. Arguments and result as for IdleBackoff.wait."""
        if self._waiter is not None:
            raise LocalProtocolError("another task is waiting already")
        self._loop = loop = asyncio.get_running_loop()
        wait_s = self._schedule.next_s()
        if timeout_s is not None and timeout_s < wait_s:
            wait_s = max(timeout_s, 0.0)
        self._waits += 1
        if self._seen == self._notifications:
            if wait_s == 0.0:
                await asyncio.sleep(0)
            else:
                self._waiter = waiter = loop.create_future()
                timer = loop.call_later(wait_s, _wake, waiter)
                try:
                    await waiter
                finally:
                    timer.cancel()
                    self._waiter = None
        else:
            await asyncio.sleep(0)
        if self._seen == self._notifications:
            return False
        self._seen = self._notifications
        self._notified += 1
        self._schedule.reset()
        return True

    def notify(self) -> None:
        """End the present wait, or the next one. On the loop's thread."""
        self._notifications += 1
        if self._waiter is not None:
            _wake(self._waiter)

    def notify_threadsafe(self) -> None:
        """As notify, from any thread. Nothing happens once the loop is closed: nobody waits there."""
        loop = self._loop
        if loop is None:
            self._notifications += 1  # nobody has waited yet; the first wait sees it
            return
        try:
            loop.call_soon_threadsafe(self.notify)
        except RuntimeError:
            if not loop.is_closed():
                raise

    def reset(self) -> None:
        """The loop made progress."""
        self._schedule.reset()

    def statistics(self) -> BackoffStatistics:
        """Counters so far."""
        return BackoffStatistics(self._waits, self._notified, self._notifications)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
