"""Invariants I1 to I14, each as a property over random or exhaustively enumerated behaviour."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncIdleBackoff,
    BackoffSchedule,
    DirectoryConfig,
    EndpointDirectory,
    EndpointError,
    EndpointOwner,
    EndpointProfile,
    EndpointRecord,
    EndpointSlot,
    Load,
    OwnerState,
    StaleGeneration,
    server_info_body,
)
from endpoint_lifecycle.testing import (
    Explorer,
    FakeTransport,
    FakeWorker,
    Scenario,
    cancel_target,
    explore,
    explore_faults,
    fire_timer,
    run_virtual,
)

A, B = "http://a", "http://b"
PROPERTY = settings(max_examples=80, deadline=None)
OWNER_ACTIONS = ("estimate", "open", "close", "end", "finalize", "publish", "drain", "retire", "fail")


def act(owner: EndpointOwner, action: str, kept: dict[str, Any], address: str) -> None:
    if action == "estimate":
        kept["runtime"] = owner.begin_estimation()
    elif action in ("open", "close", "end") and "runtime" in kept:
        runtime = kept["runtime"]
        {"open": lambda: runtime.opened("x", 3), "close": lambda: runtime.closed("x"), "end": runtime.close}[action]()
    elif action == "finalize":
        kept["capability"] = owner.finalize()
    elif action == "publish":
        kept["capability" if "capability" in kept else "runtime"].publish((address,), EndpointProfile())
    elif action == "drain":
        owner.start_draining()
    elif action == "retire":
        owner.retire(owner.generation)
    elif action == "fail":
        owner.fail("x")


@PROPERTY
@given(st.lists(st.sampled_from(OWNER_ACTIONS), max_size=25))
def test_i01_only_a_final_runtime_publishes(actions: list[str]) -> None:
    """Nothing can be read before FINAL, whatever is called in whatever order; an estimation's open resource blocks it."""
    owner = EndpointOwner("ctx-0", "i", "context")
    kept: dict[str, Any] = {}
    for action in actions:
        before = owner.state
        try:
            act(owner, action, kept, "tcp://10.0.0.1:1")
        except (EndpointError, KeyError):
            assert owner.state is before
        if owner.record() is not None and before not in (OwnerState.PUBLISHED, OwnerState.DRAINING):
            assert before is OwnerState.FINAL and action == "publish"
        if owner.state in (OwnerState.NEW, OwnerState.ESTIMATING, OwnerState.ESTIMATED, OwnerState.FINAL):
            body = server_info_body(owner)
            assert body["ready"] is False
            assert not {"generation", "control_addresses", "profile"} & set(body)
        if owner.state is OwnerState.FINAL:
            assert owner.estimation_account().open_resources == ()
        owner.validate()


@PROPERTY
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(OWNER_ACTIONS)), max_size=60))
def test_i02_and_i03_one_published_generation_per_slot_and_epochs_rise(steps: list[tuple[int, str]]) -> None:
    slot = EndpointSlot("ctx-0")
    owners = [EndpointOwner("ctx-0", f"i{n}", "context", slot) for n in range(4)]
    kept: list[dict[str, Any]] = [{} for _ in owners]
    epochs: list[int] = []
    for index, action in steps:
        try:
            act(owners[index], action, kept[index], f"tcp://10.0.0.1:{index + 1}")
        except (EndpointError, KeyError):
            pass
        assert sum(owner.state is OwnerState.PUBLISHED for owner in owners) <= 1
        epochs.append(slot.epoch)
        for owner in owners:
            owner.validate()
    assert epochs == sorted(epochs)


@PROPERTY
@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 8)), max_size=40))
def test_i03_directory_epoch_strictly_rises_per_lifetime(sets: list[tuple[str, int]]) -> None:
    directory = EndpointDirectory(DirectoryConfig())
    seen: dict[str, list[tuple[int, str | None]]] = {A: [], B: []}
    for number, (server, generation) in enumerate(sets):
        directory.apply_set(server, record_of(f"{server[-1]}{generation}"), float(number))
        view = next(v for v in directory.audit(0.0).servers if v.server == server)
        if not seen[server] or seen[server][-1][1] != view.generation:
            seen[server].append((view.epoch, view.generation))
    every = sorted(epoch for entries in seen.values() for epoch, _ in entries)
    assert len(set(every)) == len(every)
    for entries in seen.values():
        epochs = [epoch for epoch, _ in entries]
        assert epochs == sorted(set(epochs))


def record_of(generation: str, **changes: Any) -> EndpointRecord:
    """Address and profile are functions of the generation, so that a mix of two would show."""
    number = sum(map(ord, generation)) % 60000 + 1
    values: dict[str, Any] = {
        "role": "context",
        "owner_id": "ctx-0",
        "instance_id": "i",
        "generation": generation,
        "state": "published",
        "control_addresses": (f"tcp://10.0.0.1:{number}",),
        "profile": EndpointProfile(details={"generation": generation}),
    }
    return EndpointRecord(**(values | changes))


def whole(record: EndpointRecord) -> bool:
    return record == record_of(record.generation or "", state=record.state)


def test_i04_readers_see_one_publication_in_every_interleaving() -> None:
    """Registrations, fetches and readers in every order: address, generation and profile always belong together."""

    def make() -> Scenario:
        now = {"generation": "g1"}

        async def fetch(server: str) -> EndpointRecord:
            generation = now["generation"]
            await asyncio.sleep(0)
            return record_of(generation)

        directory = AsyncEndpointDirectory(fetch, DirectoryConfig(probe_ready_s=None), random=lambda: 0.5)

        async def restarts() -> None:
            now["generation"] = "g2"
            await asyncio.sleep(0)
            directory.apply_set(A, record_of("g2"))

        async def reads() -> None:
            assert whole(await directory.refresh(A))
            record = directory.record(A)
            assert record is not None and whole(record)

        async def main(explorer: Explorer) -> None:
            directory.add_server(A, "context")
            tasks = [explorer.loop.create_task(c) for c in (restarts(), reads())]
            for task in tasks:
                await task
            assert directory.record(A) == record_of("g2")
            await directory.aclose()

        return Scenario(main)

    assert explore(make).runs > 10


@PROPERTY
@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "delete", "unreachable"]), st.sampled_from([A, B]), st.integers(0, 4)),
        max_size=40,
    )
)
def test_i05_delete_of_another_generation_is_a_no_op(steps: list[tuple[str, str, int]]) -> None:
    directory = EndpointDirectory(DirectoryConfig())
    model: dict[str, str] = {}
    past: dict[str, set[str]] = {A: set(), B: set()}  # lifetimes that had a successor: they never come back
    ended: dict[str, set[str]] = {A: set(), B: set()}  # removed, without a successor yet: the same may come back
    for kind, server, number in steps:
        generation = f"{server[-1]}{number}"
        if kind == "set":
            directory.apply_set(server, record_of(generation), 0.0)
            if generation not in past[server]:
                if model.get(server) not in (None, generation):
                    past[server].add(model[server])
                past[server] |= ended[server] - {generation}
                ended[server].clear()
                model[server] = generation
        elif kind == "delete":
            directory.apply_delete(server, generation, 0.0)
            if model.get(server) == generation:
                ended[server].add(model.pop(server))
        else:
            directory.unreachable(server, generation, 0.0)
        assert {s: directory.record(s).generation for s in directory.servers()} == model  # type: ignore[union-attr]
        directory.validate()


RESERVATION_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "reserve", "release", "restart", "drop", "expire", "renew"]),
        st.integers(0, 9),
        st.integers(0, 5),
    ),
    max_size=60,
)


@PROPERTY
@given(RESERVATION_STEPS)
def test_i06_i07_i08_loads_are_the_sum_of_live_reservations_and_leave_once(steps: list[tuple[str, int, int]]) -> None:
    directory = EndpointDirectory(DirectoryConfig(reservation_ttl_s=10.0))
    now_s = 0.0
    starts = 0
    directory.apply_set(A, record_of("g0"), now_s)
    live: dict[int, Any] = {}
    made: list[Any] = []
    left = 0
    for action, request_id, weight in steps:
        now_s += 1.0
        if action == "reserve":
            try:
                reservation = directory.reserve("context", request_id, now_s, weight=weight)
            except EndpointError:
                continue
            left += request_id in live
            live[request_id] = reservation
            made.append(reservation)
        elif action == "release" and made:
            reservation = made[request_id % len(made)]
            first = directory.release(reservation)
            assert first is (live.get(reservation.request_id) is reservation)
            if first:
                del live[reservation.request_id]
                left += 1
        elif action == "restart":
            starts += 1
            directory.apply_set(A, record_of(f"g{starts}"), now_s)
            assert directory.load(A) == Load(0, 0)  # I8
        elif action == "drop":
            directory.apply_delete(A, f"g{starts}", now_s)
            directory.apply_set(A, record_of(f"g{starts}"), now_s)
        elif action == "renew" and request_id in live:
            assert directory.renew(live[request_id], now_s)
        elif action == "expire":
            for reservation in directory.expire(now_s)[0]:
                assert live.pop(reservation.request_id) is reservation
                left += 1
        for generation in {r.generation for r in made}:
            mine = [r for r in live.values() if r.generation == generation]
            assert directory.load(A, generation) == Load(len(mine), sum(r.weight for r in mine))  # I6
        directory.validate()
    for reservation in made:
        left += directory.release(reservation)
    assert left == len(made)  # I7
    assert directory.statistics().load_weight == 0
    assert directory.load(A) == Load(0, 0)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.floats(0.001, 0.9), st.booleans())
def test_i09_any_number_of_callers_make_one_fetch_and_none_of_b_waits(callers: int, delay_s: float, hang: bool) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        workers = [FakeWorker(A, "context", "ctx-0"), FakeWorker(B, "context", "ctx-1")]
        directory = AsyncEndpointDirectory(FakeTransport(*workers).fetch, DirectoryConfig(probe_ready_s=None))
        directory.add_server(B, "context")
        await directory.prepare()
        directory.add_server(A, "context")
        workers[0].info_delay_s = delay_s
        workers[0].info_mode = "hang" if hang else "ok"
        tasks = [asyncio.create_task(directory.refresh(A)) for _ in range(callers)]
        await asyncio.sleep(0)
        started_s = loop.time()
        for number in range(50):
            async with directory.reserve("context", number) as reservation:
                assert reservation.server == B
        assert loop.time() == started_s
        await asyncio.gather(*tasks, return_exceptions=True)
        assert workers[0].fetches == (1 if not hang else workers[0].fetches)
        assert workers[0].fetches <= 3
        await directory.aclose()

    run_virtual(main())


STATES = st.lists(
    st.tuples(
        st.sampled_from(["restart", "drain", "retire", "fetch", "prove", "reserve", "dispatch"]), st.integers(0, 5)
    ),
    max_size=40,
)


@PROPERTY
@given(STATES)
def test_i10_nothing_is_dispatched_to_what_the_directory_knows_to_be_gone(steps: list[tuple[str, int]]) -> None:
    """A dispatch that succeeds goes to the generation that was last learnt, published, and not proven stale."""
    directory = EndpointDirectory(DirectoryConfig(negative_ttl_s=0.0))
    directory.add_server(A, "context", 0.0)
    known: tuple[str, str] | None = None
    truth = ("g0", "published")
    starts = 0
    reservations: list[Any] = []
    stale: set[str] = set()
    for number, (action, index) in enumerate(steps):
        now_s = float(number)
        if action == "restart":
            starts += 1
            truth = (f"g{starts}", "published")
        elif action == "drain":
            truth = (truth[0], "draining")
        elif action == "retire":
            truth = (truth[0], "retired")
        elif action in ("fetch", "prove"):
            proven = known[0] if action == "prove" and known is not None else None
            _, effects = directory.join(A, now_s, proven_stale=proven)
            if proven is not None:
                stale.add(proven)
            for flight in effects.start:
                directory.fetch_began(flight, now_s)
                payload: Any = (
                    {"state": "retired", "ready": False}
                    if truth[1] == "retired"
                    else record_of(truth[0], state=truth[1])
                )
                directory.fetch_succeeded(flight, payload, now_s)
                if truth[1] == "retired":
                    known = (known[0] if known else "", "unknown")
                else:
                    stale.discard(truth[0])
                    known = truth
        elif action == "reserve":
            try:
                reservations.append(directory.reserve("context", number, now_s))
            except EndpointError:
                assert known is None or known[1] != "published" or known[0] in stale
        elif action == "dispatch" and reservations:
            reservation = reservations[index % len(reservations)]
            try:
                directory.dispatched(reservation, now_s)
            except EndpointError:
                continue
            assert known == (reservation.generation, "published") and reservation.generation not in stale
    directory.validate()


@PROPERTY
@given(st.lists(st.sampled_from(["restart", "send live", "send old", "drain", "fail"]), max_size=30))
def test_i11_receiver_refuses_a_mismatch_before_it_touches_anything(steps: list[str]) -> None:
    worker = FakeWorker(A, "context", "ctx-0")
    old = "never"
    touched = 0
    for step in steps:
        owner = worker.owner
        if step == "restart":
            old = worker.generation or old
            worker.restart()
        elif step == "drain" and owner.state is OwnerState.PUBLISHED:
            owner.start_draining()
        elif step == "fail":
            owner.fail("x")
        elif step.startswith("send"):
            expected = owner.generation if step == "send live" and owner.generation else old
            before = owner.statistics()
            try:
                with owner.admit(expected):
                    assert expected == owner.generation and owner.ready
                    touched += 1
            except EndpointError:
                after = owner.statistics()
                assert (after.admitted, after.in_flight) == (before.admitted, before.in_flight)
                assert expected != owner.generation or not owner.ready


@PROPERTY
@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "drain", "delete", "garbage", "unreachable"]), st.integers(0, 3)), max_size=30
    ),
    st.integers(0, 3),
)
def test_i12_readiness_means_enough_published_and_validated(steps: list[tuple[str, int]], minimum: int) -> None:
    async def main() -> None:
        async def fetch(server: str) -> bytes:
            raise OSError

        directory = AsyncEndpointDirectory(fetch, DirectoryConfig(probe_ready_s=None))
        good: dict[str, str] = {}
        for number, (kind, index) in enumerate(steps):
            server = f"http://s{index}"
            generation = f"g{number}"
            current = directory.record(server).generation if server in directory.servers() else None  # type: ignore[union-attr]
            if kind == "set":
                directory.apply_set(server, record_of(generation, owner_id=f"o{index}"))
                good[server] = generation
            elif kind == "garbage":
                with pytest.raises(EndpointError):
                    directory.apply_set(server, record_of(generation, control_addresses=()))
            elif kind == "drain" and server in directory.servers():
                directory.start_draining(server)
                good.pop(server, None)
            elif kind == "delete":
                directory.apply_delete(server, current)
                if server not in directory.servers():
                    good.pop(server, None)
            elif kind == "unreachable" and current is not None:
                directory._perform(directory.core.unreachable(server, current, 0.0))
                good.pop(server, None)
            assert directory.ready(context=minimum) is (len(good) >= minimum)
        await directory.aclose()

    run_virtual(main())


def test_i13_nothing_is_sent_twice_by_the_package_whatever_fails_whenever() -> None:
    """Any two faults at any two moments: a request reaches a worker at most once, and only by the caller's own sending."""

    def make() -> Scenario:
        worker = FakeWorker(A, "context", "ctx-0")
        transport = FakeTransport(worker)
        directory = AsyncEndpointDirectory(transport.fetch, DirectoryConfig(probe_ready_s=None), random=lambda: 0.5)
        sent = {"count": 0}

        async def request() -> None:
            async with directory.reserve("context", 7, revalidate=True) as reservation:
                reservation.dispatched()
                sent["count"] += 1
                async for _ in transport.stream(A, reservation.generation, 7, 2):
                    reservation.renew()

        async def main(explorer: Explorer) -> None:
            directory.add_server(A, "context")
            await asyncio.gather(explorer.aim(request()), return_exceptions=True)
            await asyncio.sleep(10)
            await directory.aclose()

        def check(_: Explorer) -> None:
            assert sent["count"] <= 1
            assert len(worker.received) + len(worker.refused) <= sent["count"]

        def die(_: Explorer) -> None:
            worker.up = False

        return Scenario(
            main,
            {"cancel": cancel_target, "timeout": fire_timer, "restart": lambda _: worker.restart(), "die": die},
            check,
        )

    actions = ("cancel", "timeout", "restart", "die")
    report = explore_faults(make, [[a, b] for a in actions for b in actions])
    assert report.runs > 1000


@PROPERTY
@given(st.lists(st.booleans(), max_size=200), st.floats(1e-6, 0.01), st.floats(0.001, 0.01))
def test_i14_an_idle_step_sleeps_at_most_ten_milliseconds(progress: list[bool], first_s: float, cap_s: float) -> None:
    """0, then the first step, then doubling to the cap; progress begins anew."""
    first_s = min(first_s, cap_s)
    schedule = BackoffSchedule(first_s, cap_s)
    expected = 0.0
    for made in progress:
        if made:
            schedule.reset()
            expected = 0.0
        assert schedule.next_s() == expected <= 0.010
        expected = min(2 * expected, cap_s) if expected else first_s


@pytest.mark.parametrize("cause", ["submit", "cancel", "completion", "shutdown"])
def test_i14_idle_loop_wakes_at_once_for(cause: str) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        backoff = AsyncIdleBackoff()
        for _ in range(20):
            assert not await backoff.wait()
        asleep = asyncio.create_task(backoff.wait())
        await asyncio.sleep(0.001)
        started_s = loop.time()
        backoff.notify()
        assert await asleep
        assert loop.time() == started_s
        assert not await backoff.wait()  # the schedule began anew: the next wait is 0
        assert loop.time() == started_s

    run_virtual(main())


def test_random_interference_of_many_requests_leaves_every_counter_at_zero() -> None:
    """Hundreds of requests, restarts, hangs, removals and cancellations on virtual time; at rest all loads are 0."""
    for seed in range(6):
        run_virtual(_storm(random.Random(seed)))


async def _storm(chance: random.Random) -> None:
    workers = [FakeWorker(f"http://s{n}", "context", f"ctx-{n}") for n in range(4)]
    transport = FakeTransport(*workers)
    directory = AsyncEndpointDirectory(
        transport.fetch,
        DirectoryConfig(probe_ready_s=0.5, attempt_timeout_s=0.1, total_timeout_s=0.3, reservation_ttl_s=5.0),
        random=chance.random,
    )
    outcomes: list[Any] = []

    async def request(number: int) -> None:
        async with directory.reserve(
            "context", number, weight=chance.randrange(4), revalidate=number % 3 == 0
        ) as claim:
            for _ in range(2):
                try:
                    claim.dispatched()
                    async for _ in transport.stream(claim.server, claim.generation, number, chance.randrange(30)):
                        claim.renew()
                    return
                except StaleGeneration:
                    await claim.prove_stale()
                except ConnectionError:
                    claim.unreachable()
                    raise

    async with directory:
        for worker in workers:
            directory.add_server(worker.server, worker.role)
        tasks = []
        for number in range(400):
            tasks.append(asyncio.create_task(request(number)))
            await asyncio.sleep(chance.random() * 0.01)
            worker = chance.choice(workers)
            event = chance.random()
            if event < 0.05:
                worker.restart()
                worker.up = True
            elif event < 0.08:
                worker.up = False
            elif event < 0.12:
                worker.info_mode = chance.choice(("ok", "ok", "hang", "error", "garbage"))
            elif event < 0.14 and worker.server in directory.servers():
                directory.remove_server(worker.server)
            elif event < 0.20:
                directory.add_server(worker.server, worker.role)
            elif event < 0.35:
                chance.choice(tasks).cancel()
            directory.core.validate()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert directory.statistics().reservations == 0
        assert directory.statistics().load_weight == 0
        assert directory.audit().faults == ()
    assert sum(outcome is None for outcome in outcomes) > 50
    for outcome in outcomes:
        assert outcome is None or isinstance(outcome, (EndpointError, ConnectionError, asyncio.CancelledError)), outcome
    for worker in workers:
        assert worker.running == 0
        per_request = [request_id for _, request_id in worker.received]
        assert len(per_request) == len(set(per_request))
