"""The one stream of an instance: a real service behind a real RPC server, with a desk that only remembers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from meta_executor import wire
from meta_executor.api.endpoint import Refused
from meta_executor.api.proxy import Proxy, ProxyError
from meta_executor.api.service import ExecutorService, Submit
from meta_executor.engine.base import SamplingParams
from meta_executor.executor.desk import DeskError
from meta_executor.executor.request import Notice, Request, make_answers
from meta_executor.front.leg import CUT, UNREACHABLE, LegError
from meta_executor.front.stream_legs import Known, StreamLegs
from rpc_batch_submit import BatchSubmitConfig
from rpc_local_registry import RpcServer, new_key

pytestmark = pytest.mark.asyncio
KEY = new_key()


class Desk:
    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.aborts: list[int] = []
        self.refuse: DeskError | None = None

    def submit(self, request: Request) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)

    def abort(self, request_id: int, reason: str) -> None:
        self.aborts.append(request_id)


class Endpoint:
    def info(self) -> wire.ServerInfo:
        limits = wire.Limits(
            max_seq_len=100, kv_tokens=60, max_batch_size=8, max_num_tokens=64, max_queue_size=9, pre_active_requests=8
        )
        return wire.ServerInfo(
            ready=True, state="PUBLISHED", role="generation", owner_id="gen-0", instance_id="i", vocab_size=500,
            limits=limits, service_address="",
        )  # fmt: skip

    def admit(self, generation: str) -> contextlib.AbstractContextManager[object]:
        if generation != "g1":
            raise Refused(wire.ErrorBody(error=wire.STALE_GENERATION, message="another lifetime"))
        return contextlib.nullcontext()


class Instance:
    def __init__(self) -> None:
        self.desk = Desk()
        self.service = ExecutorService(
            self.desk,
            role="generation",
            endpoint=Endpoint(),
            statistics=bytes,
            routing=lambda count: b"",  # type: ignore[arg-type]
        )
        self.server = RpcServer(self.service, "ipc://", KEY).start()

    def proxy(self) -> Proxy:
        return Proxy(str(self.server.address), KEY, fast_path=False, batching=BatchSubmitConfig())


@pytest_asyncio.fixture
async def instance() -> AsyncIterator[Instance]:
    made = Instance()
    yield made
    made.service.close()
    await asyncio.to_thread(made.server.shutdown)


def request(request_id: int, tokens: int = 4, **sampling: Any) -> Request:
    return Request(
        request_id=request_id,
        token_ids=np.arange(tokens, dtype=np.int32),
        sampling=SamplingParams(**{"max_tokens": 9, **sampling}),
        first_token=3,
        peer="c/g",
    )


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_step_of_all_requests_is_one_frame_and_each_reader_gets_its_own(instance: Instance) -> None:
    """Prompts arrive as int32; tokens gather for a reader that is slow, and one that wants the whole wakes at its end."""
    proxy = instance.proxy()
    tracked = [await proxy.submit(Submit(request(r), "g1")) for r in (1, 2)]
    assert [r.token_ids.dtype for r in instance.desk.requests] == [np.int32] * 2
    whole = asyncio.create_task(tracked[1].next(whole=True))
    for step in range(5):
        instance.service.deliver(make_answers([(1, 10 + step), (2, 20 + step)]))
    instance.service.deliver(make_answers([(2, 25)], [Notice(2, "stop", rank=1)]))
    tokens, notices = await asyncio.wait_for(whole, 20)
    assert tokens == [20, 21, 22, 23, 24, 25] and notices == [Notice(2, "stop", rank=1)]
    assert await tracked[0].next() == ([10, 11, 12, 13, 14], [])
    assert tracked[1].ended and not tracked[0].ended
    await proxy.close()


async def test_refusals_are_typed_and_touch_nothing(instance: Instance) -> None:
    """The desk's code, a stale lifetime, a prompt that does not fit, an id twice: each as itself, nothing tracked."""
    proxy = instance.proxy()
    await proxy.submit(Submit(request(1), "g1"))
    instance.desk.refuse = DeskError(wire.DRAINING, "draining")
    for submit, code in (
        (Submit(request(2), "g1"), wire.DRAINING),
        (Submit(request(2), "g0"), wire.STALE_GENERATION),
        (Submit(request(2, tokens=99), "g1"), wire.INVALID_REQUEST),
        (Submit(request(2, max_tokens=70), "g1"), wire.INVALID_REQUEST),
        (Submit(request(1), "g1"), wire.DUPLICATE_REQUEST),
    ):
        with pytest.raises(ProxyError) as caught:
            await proxy.submit(submit)
        assert caught.value.code == code and not caught.value.received
    assert proxy.statistics().tracked == 1
    await proxy.close()


async def test_subscribers_get_their_own_answers_and_one_that_leaves_is_cleaned_up(instance: Instance) -> None:
    """Two clients of one instance; the requests of the one that goes are stopped, the other's go on."""
    one, two = instance.proxy(), instance.proxy()
    mine = await one.submit(Submit(request(1), "g1"))
    other = await two.submit(Submit(request(2), "g1"))
    instance.service.deliver(make_answers([(1, 5), (2, 6)]))
    assert await asyncio.wait_for(mine.next(), 20) == ([5], [])
    assert await asyncio.wait_for(other.next(), 20) == ([6], [])
    await two.close()
    await until(lambda: instance.desk.aborts == [2])
    instance.service.deliver(make_answers([(1, 7), (2, 8)]))
    assert await asyncio.wait_for(mine.next(), 20) == ([7], [])
    assert one.statistics().unknown_answers == 0
    await one.close()


async def test_an_instance_that_ends_fails_what_runs_and_one_that_is_not_there_was_never_reached(tmp_path: Any) -> None:
    """CUT with ``received``: it may have begun. UNREACHABLE without: it certainly has not. Nobody hangs."""
    made = Instance()
    known = Known("http://x", b"", wire.ServerInfo(
        ready=True, state="PUBLISHED", role="context", owner_id="o", instance_id="i", service_address=made.server.address
    ))  # fmt: skip
    legs = StreamLegs(known, KEY)
    running = asyncio.create_task(legs.context(request(1), "g1"))
    await until(lambda: made.desk.requests)
    await asyncio.to_thread(made.server.shutdown)
    with pytest.raises(LegError) as caught:
        await asyncio.wait_for(running, 30)
    assert (caught.value.code, caught.value.received) == (CUT, True)
    assert legs.lost
    await legs.close()
    legs = StreamLegs(known, KEY)
    with pytest.raises(LegError) as caught:
        await asyncio.wait_for(legs.context(request(2), "g1"), 30)
    assert (caught.value.code, caught.value.received) == (UNREACHABLE, False)
    await legs.close()
