"""What a router does when a receiver refuses: the loop around ``refused``, and errors of every callback in between."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import pytest

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncReservation,
    ConfigError,
    DirectoryConfig,
    Draining,
    EndpointError,
    NoServer,
    NotReady,
    NotSent,
    Overloaded,
    RefreshFailed,
    ReservedStream,
    ServerStatus,
    StaleGeneration,
    error_body,
    http_status,
    refusal_of,
    server_info_body,
)
from endpoint_lifecycle.testing import FakeTransport, FakeWorker, run_virtual, until

A, B = "http://a", "http://b"


class Net:
    """Workers behind a directory; ``send`` answers as a server built on this package does."""

    def __init__(self, *servers: str, **config: Any) -> None:
        self.workers = {server: FakeWorker(server, "context", f"ctx-{server}") for server in servers}
        self.transport = FakeTransport(*self.workers.values())
        self.directory = AsyncEndpointDirectory(
            self.fetch, DirectoryConfig(probe_ready_s=None, **config), random=lambda: 0.5
        )
        for server in servers:
            self.directory.add_server(server, "context")
        self.sent: list[str] = []
        self.overloaded: set[str] = set()

    async def fetch(self, server: str) -> Any:
        worker = self.workers[server]
        if not worker.up:
            raise ConnectionRefusedError(server)
        await asyncio.sleep(0.001)
        return server_info_body(worker.owner)

    async def send(self, reservation: AsyncReservation) -> tuple[int, Any]:
        await asyncio.sleep(0.001)
        self.sent.append(reservation.server)
        worker = self.workers[reservation.server]
        if not worker.up:
            raise NotSent(reservation.server)
        try:
            if reservation.server in self.overloaded:
                raise Overloaded("full")
            with worker.owner.admit(reservation.generation):
                return 200, {"from": reservation.server}
        except EndpointError as error:
            return http_status(error), error_body(error)

    async def one(self, request_id: int, **options: Any) -> Any:
        return await self.directory.dispatch("context", request_id, self.send, **options)

    async def ready(self) -> None:
        await self.directory.prepare()
        assert self.directory.ready(context=len(self.workers))

    async def end(self) -> None:
        assert self.directory.core.reservation_count == 0
        self.directory.core.validate()
        await self.directory.aclose()


def retire(worker: FakeWorker) -> None:
    """Drain and end a lifetime; nothing follows it."""
    worker.owner.start_draining()
    worker.owner.retire(worker.generation)


def test_a_draining_server_is_refused_once_and_never_reserved_again() -> None:
    """20 requests, one of two servers begins to drain unseen: every request is served, one refusal in all."""

    async def main() -> None:
        net = Net(A, B)
        await net.ready()
        net.workers[A].owner.start_draining()
        answers = [await net.one(number) for number in range(20)]
        assert all(answer == (200, {"from": B}) for answer in answers)
        assert net.sent.count(A) == 1
        assert net.directory.status(A) is ServerStatus.DRAINING
        await net.end()

    run_virtual(main())


def test_a_retired_server_costs_nobody_its_request() -> None:
    """The refusal is stale, the refresh says "not ready": the request goes to the other server."""

    async def main() -> None:
        net = Net(A, B)
        await net.ready()
        retire(net.workers[A])
        for number in range(20):
            assert (await net.one(number))[0] == 200
        assert net.sent.count(A) == 1
        await net.end()

    run_virtual(main())


def test_a_restarted_server_serves_the_request_it_refused() -> None:
    """Alone, at the same address: one refresh, then the same server with its new generation."""

    async def main() -> None:
        net = Net(A)
        await net.ready()
        net.workers[A].restart()
        assert await net.one(1) == (200, {"from": A})
        assert net.sent == [A, A]
        await net.end()

    run_virtual(main())


def test_a_restarted_server_keeps_the_request_though_another_is_free() -> None:
    """What it may have cached is worth more than a turn: the other server gets nothing."""

    async def main() -> None:
        net = Net(A, B)
        await net.ready()
        async with net.directory.reserve("context", 0) as reservation:
            busy = reservation.server
        other = {A: B, B: A}[busy]
        net.workers[other].restart()
        assert await net.one(1) == (200, {"from": other})
        assert net.sent == [other, other]
        await net.end()

    run_virtual(main())


def test_a_server_that_drains_and_restarts_is_found_again() -> None:
    """A drained lifetime says nothing about the next one at the address."""

    async def main() -> None:
        net = Net(A, B)
        await net.ready()
        net.workers[A].owner.start_draining()
        for number in range(4):
            await net.one(number)
        net.workers[A].restart()
        await net.directory.refresh(A)
        assert net.directory.ready(context=2)
        await net.end()

    run_virtual(main())


def test_a_late_refusal_does_not_drain_the_next_lifetime() -> None:
    """DRAINING for a generation that is not there any more marks nobody."""

    async def main() -> None:
        net = Net(A)
        await net.ready()
        async with net.directory.reserve("context", 1) as reservation:
            net.workers[A].restart()
            await net.directory.refresh(A)
            await reservation.refused_by(Draining("late"))
            assert reservation.generation == net.workers[A].generation
        assert net.directory.status(A) is ServerStatus.READY
        await net.end()

    run_virtual(main())


def test_a_server_that_cannot_be_reached_waits_for_a_probe() -> None:
    """Others serve; alone, the caller is told within its time."""

    async def main() -> None:
        net = Net(A, B)
        await net.ready()
        net.workers[A].up = False
        for number in range(6):
            assert (await net.one(number))[1] == {"from": B}
        assert net.sent.count(A) == 1
        net.workers[B].up = False
        with pytest.raises(NoServer):
            await net.one(9)
        await until(lambda: net.directory.task_count == 0)
        await net.end()

    run_virtual(main())


def test_an_overloaded_server_is_left_out_by_this_request_alone() -> None:
    """Another takes it; if all are, the caller is told so; the next request may go there again."""

    async def main() -> None:
        net = Net(A, B)
        await net.ready()
        net.overloaded = {A}
        assert {(await net.one(number))[1]["from"] for number in range(4)} == {B}
        net.overloaded = {A, B}
        with pytest.raises(Overloaded):
            await net.one(9)
        assert net.directory.ready(context=2)
        net.overloaded = set()
        assert {(await net.one(number))[1]["from"] for number in range(10, 14)} == {A, B}
        await net.end()

    run_virtual(main())


def test_an_overloaded_server_is_asked_once_though_it_looks_least_loaded() -> None:
    """The other one holds more, so load alone would lead back to the one that refused."""

    async def main() -> None:
        net = Net(A, B)
        await net.ready()
        net.overloaded = {A}
        async with net.directory.reserve("context", 1, exclude=[A]), net.directory.reserve("context", 2, exclude=[A]):
            assert await net.one(3) == (200, {"from": B})
        assert net.sent == [A, B]
        await net.end()

    run_virtual(main())


def test_refusals_of_one_request_are_bounded() -> None:
    """A server that always says stale with a new generation each time: 16 moves, then its own error."""

    async def main() -> None:
        net = Net(A)
        await net.ready()
        sent = 0

        async def send(reservation: AsyncReservation) -> tuple[int, Any]:
            nonlocal sent
            sent += 1
            net.workers[A].restart()
            error = StaleGeneration(reservation.generation, net.workers[A].generation)
            return http_status(error), error_body(error)

        with pytest.raises(StaleGeneration):
            await net.directory.dispatch("context", 1, send)
        assert sent == 17
        await net.end()

    run_virtual(main())


def test_what_send_raises_ends_the_loop() -> None:
    """The request may have been taken in: it is never sent again, and the claim is released."""

    async def main() -> None:
        net = Net(A, B)
        await net.ready()

        async def send(reservation: AsyncReservation) -> tuple[int, Any]:
            net.sent.append(reservation.server)
            raise ConnectionResetError("in the middle")

        with pytest.raises(ConnectionResetError):
            await net.directory.dispatch("context", 1, send)
        assert len(net.sent) == 1
        await net.end()

    run_virtual(main())


@pytest.mark.parametrize(
    "error", [StaleGeneration("g1", "g2"), StaleGeneration(None, None), Draining("d"), NotReady("n"), Overloaded("o")]
)
def test_a_refusal_is_read_as_it_was_written(error: EndpointError) -> None:
    found = refusal_of(http_status(error), error_body(error))
    assert type(found) is type(error)
    if isinstance(error, StaleGeneration) and isinstance(found, StaleGeneration):
        assert (found.expected, found.current) == (error.expected, error.current)


@pytest.mark.parametrize("status", [200, 409, 429, 503, 404, 500, True, 0, -1])
@pytest.mark.parametrize(
    "body",
    [
        None, b"", b"{", b"[]", b"null", b"\xff\xfe", "\ud800", b"[" * 100_000, b"{}" + b" " * 70_000, {}, {"error": 5},
        {"error": ["STALE_GENERATION"]}, {"error": "NO_SUCH"}, 7, [], object(), b'{"error":"DRAINING","message":5}',
        {"error": "STALE_GENERATION", "expected": 5, "current": []},
    ],
)  # fmt: skip
def test_any_answer_is_a_refusal_or_the_clients(status: Any, body: Any) -> None:
    """Never an exception: a proxy's page, another server's JSON, nothing at all."""
    found = refusal_of(status, body)
    assert found is None or http_status(found) == status


def test_a_refusal_needs_its_own_status() -> None:
    """A 500 that quotes one, or a 409 with another code, is the client's."""
    body = error_body(Draining("x"))
    assert [refusal_of(status, body) is None for status in (200, 409, 429, 500, 502, 503)] == [True] * 5 + [False]


class Unread(dict[str, Any]):
    """A body that must not be looked at."""

    def get(self, *_: Any) -> Any:
        raise AssertionError("the client's answer was read")

    __getitem__ = __iter__ = get


@pytest.mark.parametrize("status", [True, 200, 204, 400, 404, 500, 502, 504])
def test_an_answer_that_is_the_clients_is_not_read(status: int) -> None:
    """It may be long, or a stream that can be read once."""
    assert refusal_of(status, Unread(error="DRAINING")) is None


def test_a_refusal_is_looked_for_in_bodies_of_bearable_size() -> None:
    """To the byte: a proxy's long page is not decoded."""
    body = b'{"error":"DRAINING","message":""}'
    for size, found in ((65_536, True), (65_537, False)):
        for padded in (body.ljust(size), body.ljust(size).decode()):
            assert isinstance(refusal_of(503, padded), Draining) is found


# -- errors that are no Exceptions, tasks that others cancel, callbacks that raise --------------------------------------


class Foreign(BaseException):
    """What is not an Exception."""


@pytest.mark.parametrize("kind", [Foreign, GeneratorExit, asyncio.CancelledError, RuntimeError])
def test_a_fetch_may_raise_anything(kind: type[BaseException]) -> None:
    """The waiter is told, and the next refresh of that server works."""

    async def main() -> None:
        net = Net(A, attempts=1)
        broken = True
        good = net.directory._fetch

        async def fetch(server: str) -> Any:
            if broken:
                raise kind("out of the blue")
            return await good(server)

        net.directory._fetch = fetch
        with pytest.raises(RefreshFailed):
            await net.directory.refresh(A)
        broken = False
        await asyncio.sleep(0.2)
        assert (await net.directory.refresh(A)).generation == net.workers[A].generation
        await net.end()

    loop_errors(main)


def loop_errors(main: Any) -> None:
    """Run on a real loop whose handler keeps what it is shown."""

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        await main()

    asyncio.run(body())


def test_a_fetch_task_that_others_cancel_is_a_failure() -> None:
    """A host that cancels every task of its loop leaves no server that is never fetched again."""

    async def main() -> None:
        net = Net(A)
        net.workers[A].info_mode = "hang"
        waiting = asyncio.create_task(net.directory.refresh(A))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in net.directory._tasks.values():
            task.cancel()
        with pytest.raises(RefreshFailed, match="Cancelled"):
            await waiting
        await asyncio.sleep(0.2)
        net.workers[A].info_mode = "ok"
        await net.directory.refresh(A)
        await net.end()

    run_virtual(main())


def test_one_reservation_that_cannot_be_released_keeps_no_other() -> None:
    class Broken:
        def release(self, reason: str = "") -> bool:
            raise RuntimeError("no")

        def renew(self) -> bool:
            return True

    async def main() -> None:
        net = Net(A)
        await net.ready()
        reservation = await net.directory.reserve("context", 1).acquire()

        async def items() -> Any:
            yield 1

        stream = ReservedStream(items(), Broken(), reservation)
        with pytest.raises(RuntimeError, match="no"):
            await stream.aclose()
        await net.end()

    run_virtual(main())


def test_a_hook_that_cancels_itself_is_counted() -> None:
    async def main() -> None:
        async def hook(notice: Any) -> None:
            raise asyncio.CancelledError

        worker = FakeWorker(A, "context", "ctx-0")
        directory = AsyncEndpointDirectory(
            FakeTransport(worker).fetch, DirectoryConfig(probe_ready_s=None), on_release=hook
        )
        directory.add_server(A, "context")
        await directory.prepare()
        async with directory.reserve("context", 1):
            pass
        await until(lambda: directory.task_count == 0)
        assert directory.release_hook_failures == 1
        await directory.aclose()

    run_virtual(main())


def test_no_server_names_the_roles_that_are_known() -> None:
    """Two sides that call a role differently are told so."""

    async def main() -> None:
        net = Net(A)
        with pytest.raises(NoServer, match=r"none is known \(roles that are: context\)"):
            async with net.directory.reserve("ctx", 1):
                pass
        await net.end()

    run_virtual(main())


NUMBERS = [field.name for field in fields(DirectoryConfig) if type(field.default) in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["3", True, float("nan"), [], object()])
def test_settings_that_are_no_numbers_are_refused_by_name(name: str, value: Any) -> None:
    """Never a bare TypeError, never nan, which compares false with every deadline."""
    with pytest.raises(ConfigError, match=f"^{name}: "):
        DirectoryConfig(**{name: value})


def test_waits_and_exclusions_of_a_reservation_are_what_they_say() -> None:
    """nan would wait for ever; one string would exclude every server whose name is part of it."""

    async def main() -> None:
        net = Net(A)
        for wrong in (float("nan"), "1", True):
            with pytest.raises(ConfigError, match="timeout_s"):
                net.directory.reserve("context", 1, timeout_s=wrong)  # type: ignore[arg-type]
        for exclude in (A, None, 5):
            with pytest.raises(ConfigError, match="exclude"):
                await net.one(1, exclude=exclude)
        await net.end()

    run_virtual(main())
