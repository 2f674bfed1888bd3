"""Fakes and a schedule explorer, for tests of programs that use this package.

- ``FakeClock``: time that moves when told.
- ``FakeWorker`` and ``FakeTransport``: instances that can restart, hang, fail, answer late or wrongly, and refuse a stale
  generation, with every message that reached them written down.
- ``ExplorerLoop``: an event loop with virtual time where nothing is left to chance: which of the ready callbacks runs next
  is asked of a chooser.
- ``run_virtual``: one coroutine on such a loop, in first-come order; sleeps cost nothing.
- ``explore``: every interleaving of a scenario's tasks, and every choice that its fakes ask for, by depth-first replay.
- ``explore_faults``: a scenario in first-come order, once per moment at which something can be done to it: each action
  (cancel, timeout, server removed, ...) is tried before every step that the loop makes, alone and, where asked, in pairs.
- ``check_lease_store`` and ``check_instance``: what a store of one's own, and an instance's HTTP face, must do.

A moment is "before the loop's n-th callback". The target task is suspended at every moment, so all of its await points are
covered, each both while what it waits for is pending and when it is done but not yet delivered.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import inspect
import itertools
import sys
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, TypeVarTuple

from endpoint_lifecycle._errors import (
    Draining,
    EndpointError,
    LocalProtocolError,
    NotReady,
    StaleGeneration,
    StoreError,
    Unavailable,
)
from endpoint_lifecycle._http import refusal_of, server_info_body
from endpoint_lifecycle._owner import EndpointOwner, EndpointSlot, PublishCapability
from endpoint_lifecycle._record import EndpointProfile, parse_record

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class FakeClock:
    """Seconds that move when told; callable."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> float:
        """Move on; returns the new time."""
        if seconds < 0:
            raise LocalProtocolError("time does not go back; use a fake wall clock for that")
        self.now_s += seconds
        return self.now_s


# -- the loop -----------------------------------------------------------------------------------------------------------


class Deadlock(AssertionError):
    """Nothing is ready, no timer is armed, and the scenario has not ended."""


class StepLimit(AssertionError):
    """The scenario made more steps than allowed: a loop that spins."""


class Chooser:
    """Answers ``choose(n)`` from a given prefix, then 0, and writes down what was answered."""

    def __init__(self, prefix: Sequence[int] = ()) -> None:
        self._prefix = tuple(prefix)
        self.taken: list[tuple[int, int]] = []

    def choose(self, options: int) -> int:
        """One of ``range(options)``."""
        if options <= 1:
            return 0
        position = len(self.taken)
        choice = self._prefix[position] if position < len(self._prefix) else 0
        if choice >= options:
            raise LocalProtocolError(
                f"schedule asks for option {choice} of {options}: the scenario is not deterministic"
            )
        self.taken.append((choice, options))
        return choice

    def following(self) -> tuple[int, ...] | None:
        """The next prefix in depth-first order, or None when all were tried."""
        taken = list(self.taken)
        while taken:
            choice, options = taken.pop()
            if choice + 1 < options:
                return (*(c for c, _ in taken), choice + 1)
        return None


class ExplorerLoop(asyncio.AbstractEventLoop):
    """An event loop whose every decision is made by a chooser; time is virtual and moves only when nothing is ready.

    Args:
        chooser: Asked which ready callback runs next; None: first come.
        steps_max: Callbacks after which StepLimit is raised.
        before_step: Called with the loop before every callback.
    """

    def __init__(
        self,
        chooser: Chooser | None = None,
        *,
        steps_max: int = 100_000,
        before_step: Callable[[ExplorerLoop], None] | None = None,
    ) -> None:
        self._chooser = chooser
        self._steps_max = steps_max
        self._before_step = before_step
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._counter = itertools.count()
        self._now_s = 0.0
        self._closed = False
        self._running = False
        self._tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()
        self.steps = 0
        self.errors: list[Mapping[str, Any]] = []

    # what asyncio itself calls

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def get_debug(self) -> bool:
        """Never."""
        return False

    def is_running(self) -> bool:
        """Whether inside run_until_complete."""
        return self._running

    def is_closed(self) -> bool:
        """Whether closed."""
        return self._closed

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Ready now."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As call_soon: there are no threads here."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Ready after virtual seconds."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Ready at a virtual time."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._counter), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Required of loops; a cancelled timer is skipped when its turn comes."""

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        """A task of this loop."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.add(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Errors that nobody took are kept; running ends with them."""
        self.errors.append(context)

    async def shutdown_asyncgens(self) -> None:
        """Close generators that were left half-way."""
        for generator in list(self._generators):
            await generator.aclose()

    def close(self) -> None:
        """Drop everything."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()

    # what tests call

    def live_tasks(self) -> tuple[asyncio.Task[Any], ...]:
        """Tasks that have not ended."""
        return tuple(sorted((t for t in self._tasks if not t.done()), key=lambda t: t.get_name()))

    def armed_timers(self) -> int:
        """Timers that would still fire."""
        return sum(not handle.cancelled() for _, _, handle in self._timers)

    def fire_next_timer(self) -> bool:
        """Let time run to the next timer now, though other callbacks are ready. False: none is armed."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            return False
        self._now_s = max(self._now_s, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now_s:
            handle = heapq.heappop(self._timers)[2]
            if not handle.cancelled():
                self._ready.append(handle)
        return True

    def run_until_complete(self, future: Any) -> Any:
        """Run until the coroutine or future is done, and return its result.

        Raises:
            Deadlock: Nothing can happen any more.
            StepLimit: Too much happened.
        """
        main: asyncio.Future[Any] = self.create_task(future) if asyncio.iscoroutine(future) else future
        self._running = True
        asyncio._set_running_loop(self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generators.add, finalizer=self._finalize_generator)
        try:
            while not main.done():
                self._step()
        finally:
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(None)
            self._running = False
        return main.result()

    def _finalize_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.create_task(generator.aclose())

    def _step(self) -> None:
        while True:
            self._ready = [handle for handle in self._ready if not handle.cancelled()]
            if self._ready or not self.fire_next_timer():
                break
        if not self._ready:
            waiting = ", ".join(task.get_name() for task in self.live_tasks())
            raise Deadlock(f"nothing can happen any more; waiting: {waiting or 'nobody'}")
        if self._before_step is not None:
            self._before_step(self)
            self._ready = [handle for handle in self._ready if not handle.cancelled()]
            if not self._ready:
                return
        self.steps += 1
        if self.steps > self._steps_max:
            raise StepLimit(f"{self._steps_max} steps")
        index = self._chooser.choose(len(self._ready)) if self._chooser is not None else 0
        self._ready.pop(index)._run()

    def settle(self) -> None:
        """After the end: close generators, run what is ready, without letting time pass.

        Raises:
            AssertionError: Callbacks raised errors that nobody took.
        """
        self.run_until_complete(self.shutdown_asyncgens())
        self._before_step = None
        asyncio._set_running_loop(self)
        try:
            while any(not handle.cancelled() for handle in self._ready):
                self.steps += 1
                if self.steps > self._steps_max:
                    raise StepLimit(f"{self._steps_max} steps")
                handle = self._ready.pop(0)
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        if self.errors:
            raise AssertionError(f"errors that nobody took: {self.errors}")


def run_virtual(coroutine: Coroutine[Any, Any, T], *, steps_max: int = 1_000_000) -> T:
    """Run one coroutine with virtual time, first come first served.

    Raises:
        AssertionError: It left tasks behind, or an error that nobody took.
    """
    loop = ExplorerLoop(steps_max=steps_max)  # type: ignore[abstract]  # sockets and processes are not for it
    try:
        result: T = loop.run_until_complete(coroutine)
        loop.settle()
        left = loop.live_tasks()
        if left:
            raise AssertionError(f"tasks left behind: {[task.get_name() for task in left]}")
        return result
    finally:
        _abandon(loop)


def _abandon(loop: ExplorerLoop) -> None:
    """Close what a failed scenario left, so that the garbage collector has nothing to warn of."""
    for task in loop.live_tasks():
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        coroutine = task.get_coro()
        if coroutine is not None and hasattr(coroutine, "close"):
            try:
                coroutine.close()
            except RuntimeError:
                pass  # it awaits in its cleanup: it is dropped as it is
    loop.close()


# -- exploring ----------------------------------------------------------------------------------------------------------


@dataclass
class Scenario:
    """What an exploration runs, made anew for every run.

    Attributes:
        main: The whole scenario. It starts the target, waits for everything, and checks.
        actions: What can be done to it, by name; called on the loop's thread at a moment.
        check: Called after the end, for what must hold then.
    """

    main: Callable[[Explorer], Coroutine[Any, Any, Any]]
    actions: Mapping[str, Callable[[Explorer], object]] = field(default_factory=dict)
    check: Callable[[Explorer], object] | None = None


class Explorer:
    """One run, as its scenario sees it.

    Attributes:
        loop: The loop.
        target: The task that faults are aimed at, once the scenario has named it.
    """

    def __init__(self, loop: ExplorerLoop, chooser: Chooser) -> None:
        self.loop = loop
        self._chooser = chooser
        self.target: asyncio.Task[Any] | None = None
        self.points: list[str] = []

    def choose(self, *options: T) -> T:
        """One of the options; every one is tried in some run."""
        return options[self._chooser.choose(len(options))]

    def aim(self, coroutine: Coroutine[Any, Any, T], name: str = "target") -> asyncio.Task[T]:
        """Start the task that faults are aimed at."""
        task: asyncio.Task[T] = self.loop.create_task(coroutine, name=name)
        self.target = task
        return task


def cancel_target(explorer: Explorer) -> None:
    """The action of cancelling the target."""
    if explorer.target is not None:
        explorer.target.cancel()


def fire_timer(explorer: Explorer) -> None:
    """The action of letting the next deadline pass now."""
    explorer.loop.fire_next_timer()


def await_point(task: asyncio.Task[Any]) -> str:
    """Where a suspended task stands: the chain of functions, innermost last; ``(not started)`` before its first step."""
    frame: Any = task.get_coro()
    if inspect.iscoroutine(frame) and inspect.getcoroutinestate(frame) == inspect.CORO_CREATED:
        return "(not started)"
    names = []
    while frame is not None:
        name = getattr(frame, "__qualname__", None)
        started = next((f for a in ("cr_frame", "ag_frame", "gi_frame") if (f := getattr(frame, a, None))), None)
        if name is not None and started is not None:
            names.append(f"{name}:{started.f_lineno}")
        frame = next((f for a in ("cr_await", "ag_await", "gi_yieldfrom") if (f := getattr(frame, a, None))), None)
    return " > ".join(names)


@dataclass(frozen=True)
class ExploreReport:
    """What an exploration did.

    Attributes:
        runs: Schedules run.
        steps_max: Most steps of one run.
        moments: Moments at which something was done (``explore_faults``).
        points: Await points of the target at those moments, by function and line.
    """

    runs: int
    steps_max: int
    moments: int = 0
    points: frozenset[str] = frozenset()


class ScheduleFailed(AssertionError):
    """A run failed; ``schedule`` (and ``plan``) make it again."""

    def __init__(self, schedule: tuple[int, ...], plan: tuple[tuple[int, str], ...], points: list[str]) -> None:
        self.schedule = schedule
        self.plan = plan
        self.points = points
        super().__init__(f"schedule {list(schedule)}, plan {list(plan)}, target at {points}")


class ExplorationLimit(AssertionError):
    """More runs than allowed: the exploration would not have been complete."""


def _run_once(
    make: Callable[[], Scenario],
    prefix: tuple[int, ...],
    plan: tuple[tuple[int, str], ...],
    *,
    interleave: bool,
    steps_max: int,
) -> tuple[ExplorerLoop, Chooser, Explorer]:
    chooser = Chooser(prefix)
    scenario = make()
    pending = list(plan)
    explorer: Explorer

    def before_step(loop: ExplorerLoop) -> None:
        while pending and pending[0][0] == loop.steps:
            _, name = pending.pop(0)
            if explorer.target is not None and not explorer.target.done():
                explorer.points.append(await_point(explorer.target))
            scenario.actions[name](explorer)

    taken = chooser if interleave else None
    loop = ExplorerLoop(taken, steps_max=steps_max, before_step=before_step)  # type: ignore[abstract]
    explorer = Explorer(loop, chooser)
    try:
        loop.run_until_complete(scenario.main(explorer))
        loop.settle()
        left = loop.live_tasks()
        if left:
            raise AssertionError(f"tasks left behind: {[task.get_name() for task in left]}")
        if scenario.check is not None:
            scenario.check(explorer)
    except Exception as error:
        raise ScheduleFailed(tuple(c for c, _ in chooser.taken), plan, explorer.points) from error
    finally:
        _abandon(loop)
    return loop, chooser, explorer


def explore(
    make: Callable[[], Scenario],
    *,
    runs_max: int = 100_000,
    steps_max: int = 10_000,
    schedule: Sequence[int] | None = None,
) -> ExploreReport:
    """Run every interleaving of a scenario.

    Args:
        make: Makes the scenario anew; it must be deterministic apart from ``Explorer.choose``.
        runs_max: More interleavings than this raise ExplorationLimit: an incomplete exploration proves nothing.
        steps_max: Bound of one run.
        schedule: Run this one only (from ScheduleFailed).

    Raises:
        ScheduleFailed: With the schedule; the cause is chained.
    """
    prefix: tuple[int, ...] | None = tuple(schedule or ())
    runs = 0
    longest = 0
    while prefix is not None:
        if runs >= runs_max:
            raise ExplorationLimit(f"more than {runs_max} interleavings")
        loop, chooser, _ = _run_once(make, prefix, (), interleave=True, steps_max=steps_max)
        runs += 1
        longest = max(longest, loop.steps)
        prefix = None if schedule is not None else chooser.following()
    return ExploreReport(runs, longest)


def explore_faults(
    make: Callable[[], Scenario],
    plans: Sequence[Sequence[str]],
    *,
    runs_max: int = 100_000,
    steps_max: int = 10_000,
) -> ExploreReport:
    """Run a scenario once per moment and plan; see the module's head.

    Args:
        make: Makes the scenario anew.
        plans: Each a sequence of action names: ``["cancel"]`` is tried at every moment; ``["cancel", "cancel"]`` at every
            pair of moments, the second not before the first.
        runs_max, steps_max: Bounds.

    Raises:
        ScheduleFailed: With schedule and plan; the cause is chained.
    """
    runs = 0
    longest = 0
    moments = 0
    points: set[str] = set()

    def all_choices(plan: tuple[tuple[int, str], ...]) -> Iterator[ExplorerLoop]:
        nonlocal runs, longest
        prefix: tuple[int, ...] | None = ()
        while prefix is not None:
            if runs >= runs_max:
                raise ExplorationLimit(f"more than {runs_max} runs")
            loop, chooser, explorer = _run_once(make, prefix, plan, interleave=False, steps_max=steps_max)
            runs += 1
            longest = max(longest, loop.steps)
            points.update(explorer.points)
            yield loop
            prefix = chooser.following()

    def deepen(done: tuple[tuple[int, str], ...], rest: tuple[str, ...], first: int) -> None:
        """Place the next action at every moment of the runs that the actions so far lead to."""
        nonlocal moments
        steps = max(loop.steps for loop in all_choices(done))
        if not rest:
            return
        for moment in range(first, steps):
            moments += 1
            deepen((*done, (moment, rest[0])), rest[1:], moment)

    for plan in plans:
        deepen((), tuple(plan), 0)
    return ExploreReport(runs, longest, moments, frozenset(points))


# -- fakes --------------------------------------------------------------------------------------------------------------


class FakeWorker:
    """An instance behind one address: it can restart with a new generation, and be told how to answer.

    Attributes:
        owner: The present lifetime.
        info_mode: How ``/server_info`` is answered: ``ok``, ``hang``, ``error``, ``garbage``, ``legacy`` (no generation).
        info_delay_s: Before each answer.
        up: False: connections are refused.
        fetches: ``/server_info`` requests seen.
        received: (generation asked for, request id) of every request that was taken in.
        refused: The same of those refused as stale.
    """

    def __init__(self, server: str, role: str, owner_id: str, *, info_delay_s: float = 0.0) -> None:
        self.server = server
        self.role = role
        self.owner_id = owner_id
        self.info_mode = "ok"
        self.info_delay_s = info_delay_s
        self.up = True
        self.fetches = 0
        self.received: list[tuple[str | None, int]] = []
        self.refused: list[tuple[str | None, int]] = []
        self.running = 0
        self._starts = 0
        self.slot = EndpointSlot(owner_id)
        self.owner: EndpointOwner
        self.restart()

    @property
    def generation(self) -> str:
        """The live generation."""
        return self.owner.generation or ""

    def restart(self) -> str:
        """Die and come back at the same address; returns the new generation."""
        self._starts += 1
        number = self._starts
        if number > 1 and self.owner.generation is not None:
            self.owner.fail("killed")
        self.owner = EndpointOwner(
            self.owner_id,
            f"{self.owner_id}.{number}",
            self.role,
            self.slot,
            mint_generation=lambda: f"{self.owner_id}-g{number}",
        )
        capability: PublishCapability = self.owner.finalize()
        port = 1 + (len(self.server) * 131 + number) % 60000
        capability.publish((f"tcp://127.0.0.1:{port}",), EndpointProfile())
        return self.generation


class FakeTransport:
    """A network of FakeWorkers: the ``fetch`` that a directory is given, and requests with streamed answers.

    Args:
        step_s: Virtual time of each hop.
    """

    def __init__(self, *workers: FakeWorker, step_s: float = 0.001) -> None:
        self.workers = {worker.server: worker for worker in workers}
        self.step_s = step_s

    async def fetch(self, server: str) -> Mapping[str, Any] | bytes:
        """GET /server_info."""
        worker = self._connected(server)
        worker.fetches += 1
        await asyncio.sleep(worker.info_delay_s or self.step_s)
        if worker.info_mode == "hang":
            await asyncio.get_running_loop().create_future()
        if worker.info_mode == "error" or not worker.up:
            raise ConnectionResetError(f"{server} reset the connection")
        if worker.info_mode == "garbage":
            return b"<html>busy</html>"
        body = server_info_body(worker.owner)
        if worker.info_mode == "legacy":
            body.pop("generation", None)
        return body

    async def stream(self, server: str, generation: str | None, request_id: int, items: int) -> AsyncIterator[int]:
        """POST a request and iterate its answer. Refused before anything is taken in if the generation is stale."""
        worker = self._connected(server)
        await asyncio.sleep(self.step_s)
        self._connected(server)
        try:
            admission = worker.owner.admit(generation)
        except Exception:
            worker.refused.append((generation, request_id))
            raise
        worker.received.append((generation, request_id))
        worker.running += 1
        try:
            with admission:
                for item in range(items):
                    await asyncio.sleep(self.step_s)
                    if not worker.up:
                        raise ConnectionResetError(f"{server} reset the connection")
                    yield item
        finally:
            worker.running -= 1

    def _connected(self, server: str) -> FakeWorker:
        worker = self.workers[server]
        if not worker.up:
            raise ConnectionRefusedError(f"{server} refused the connection")
        return worker


async def until(condition: Callable[[], bool], *, steps_max: int = 10_000) -> None:
    """Give others turns until a condition holds. No time is waited for by itself: for use on the virtual loop.

    Raises:
        AssertionError: It did not hold after so many turns.
    """
    for _ in range(steps_max):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("the condition did not come true")


# -- conformance --------------------------------------------------------------------------------------------------------


async def check_lease_store(
    make: Callable[[], Awaitable[Any]], wait_for_expiry: Callable[[float], Awaitable[None]]
) -> None:
    """What every LeaseStore must do; a store of one's own can be checked with it.

    Args:
        make: Makes a store with nothing under the prefix ``/check/``.
        wait_for_expiry: Waits until a lease of so many seconds that is not kept alive has expired.

    Raises:
        AssertionError: Something differs.
    """

    def require(ok: bool, what: str) -> None:
        if not ok:
            raise AssertionError(what)

    store = await make()
    prefix, key = "/check/", "/check/a"
    empty = await store.snapshot(prefix)
    require(not empty.items, "a fresh store is not empty")
    lease = await store.grant(60.0)
    require(lease > 0, "a lease id is not positive")
    first = await store.put(key, b"1", lease)
    require(await store.put(key, b"x", lease, 0) is None, "put-if-absent overwrote a value")
    require(await store.put(key, b"x", lease, first + 1000) is None, "put at another revision overwrote a value")
    second = await store.put(key, b"2", lease, first)
    require(second is not None and second > first, "put at the right revision was refused, or revisions do not rise")
    require(not await store.compare_and_delete(key, first), "a late delete removed the successor's value")
    seen = await store.snapshot(prefix)
    require(dict(seen.items) == {key: b"2"}, f"the listing is {dict(seen.items)}")
    require(dict(seen.revisions) == {key: second} and seen.revision >= second, "revisions of the listing are wrong")
    require(not (await store.snapshot("/other/")).items, "a listing shows what is under another prefix")

    events: list[Any] = []
    watch = store.watch(prefix, empty.revision)
    while len(events) < 2:
        events.extend(await anext(watch))
    require([(e.key, e.value) for e in events] == [(key, b"1"), (key, b"2")], f"past changes are shown as {events}")
    require([e.revision for e in events] == [first, second], "revisions of events are wrong")

    short = await store.grant(1.0)
    require(await store.keep_alive(short), "a live lease was not kept alive")
    third = await store.put("/check/b", b"3", short)
    await wait_for_expiry(1.0)
    require(not await store.keep_alive(short), "an expired lease was kept alive")
    try:
        await store.put("/check/d", b"4", short)
    except StoreError:
        pass
    else:
        raise AssertionError("a lease that is gone took a value")
    require("/check/d" not in (await store.snapshot(prefix)).items, "a refused put left a value")
    # A value that a new lease took over outlives the old lease: a restart inside the lease time.
    old, new = await store.grant(1.0), await store.grant(60.0)
    await store.put("/check/c", b"old", old)
    fourth = await store.put("/check/c", b"new", new)
    await wait_for_expiry(1.0)
    require((await store.snapshot(prefix)).items.get("/check/c") == b"new", "the old lease took the new value with it")
    require("/check/b" not in (await store.snapshot(prefix)).items, "a value outlived its lease")
    require(await store.compare_and_delete("/check/c", fourth), "the right delete was refused")
    await store.revoke(lease)
    await store.revoke(lease)
    require(not (await store.snapshot(prefix)).items, "revoking left values")

    while not any(e.key == key and e.value is None for e in events):
        events.extend(await anext(watch))
    order = [e.revision for e in events]
    require(order == sorted(order), "events are out of order")
    require(any(e.key == "/check/b" and e.value is None and e.revision > third for e in events), "expiry was not shown")
    await watch.aclose()
    await store.aclose()


async def check_instance(
    info: Callable[[], Awaitable[Any]],
    work: Callable[[str], Awaitable[tuple[int, Any]]],
    drain: Callable[[], Awaitable[object]],
) -> None:
    """What an instance's face must do; one of your own, over whatever carries it, can be checked with it.

    Args:
        info: Its ``/server_info``: text or decoded.
        work: Sends one piece of work for a generation; gives status and body, as ``send`` of ``directory.dispatch`` does.
        drain: Tells it to drain and returns when it has begun to, while it still answers. Afterwards it ends.

    Raises:
        AssertionError: Something differs.
    """

    def require(ok: bool, what: str, shown: object) -> None:
        if not ok:
            raise AssertionError(f"{what}: {shown}")

    async def refusal(generation: str) -> StaleGeneration | Unavailable | None:
        status, body = await work(generation)
        refused = refusal_of(status, body)
        require(refused is not None or 200 <= status < 300, "work is neither served nor refused", (status, body))
        return refused

    try:
        record = parse_record(await info())
    except EndpointError as error:
        raise AssertionError(f"its record cannot be read: {error}") from error
    again = parse_record(await info())
    require(again.generation == record.generation, "the generation changes within one lifetime", again.generation)
    require(record.state == "published", "it is not published", record.state)
    generation = str(record.generation)
    served = await refusal(generation)
    require(served is None, "work for its own generation is refused", served)
    stale = await refusal("0" * len(generation))
    require(isinstance(stale, StaleGeneration), "work for another generation is not refused as stale", stale)
    require(await refusal(generation) is None, "a stale piece of work has ended the lifetime", generation)
    await drain()
    try:
        record = parse_record(await info())
    except NotReady:
        require(False, "what drains must still say so, with its record", await info())
    require(record.state == "draining", "it does not say that it drains", record.state)
    require(record.generation == generation, "draining has changed the generation", record.generation)
    late = await refusal(generation)
    require(isinstance(late, Draining), "new work is not refused as draining", late)
