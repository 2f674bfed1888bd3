"""The one stream of an instance, from the front's end to a desk that only remembers: two real RPC servers, the worker's and the
door's, with the worker called directly and by RPC."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from kv_bounce_planner.planning import InstanceLayout, KVLayout
from meta_executor import wire
from meta_executor.api import worker_client
from meta_executor.api.door import Door, DoorServer
from meta_executor.api.endpoint import Refused
from meta_executor.api.proxy import Proxy, ProxyError
from meta_executor.api.server import ApiServer, ServerThread
from meta_executor.api.service import ExecutorService, Submit
from meta_executor.api.worker_client import SubmitCounts, WorkerClient
from meta_executor.engine.base import SamplingParams
from meta_executor.executor.desk import DeskError
from meta_executor.executor.messages import Peer
from meta_executor.executor.request import Notice, Request, make_answers
from meta_executor.front.http_legs import HttpLegs
from meta_executor.front.leg import CUT, UNREACHABLE, LegError, context_is_stale
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
        #: Context instances that the ranks were told of, and whom each replaces.
        self.peers: list[tuple[str, str]] = []

    def submit(self, request: Request) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)

    def abort(self, request_id: int, reason: str) -> None:
        self.aborts.append(request_id)

    def announce_peer(self, peer: Peer) -> None:
        self.peers.append((peer.name, peer.replaces))


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


#: Of a context instance: one rank with one layer.
LAYOUT = InstanceLayout(
    "c",
    (
        KVLayout.uniform(
            rank=0, first_layer=0, layer_count=1, head_total=2, head_dim=4, element_bytes=2, block_tokens=4,
            block_count=16, key_bases=[0x10000], value_bases=[0x18000],
        ),
    ),
    pp_size=1,
)  # fmt: skip


def context_info(generation: str) -> wire.ServerInfo:
    return wire.ServerInfo(
        ready=True, state="PUBLISHED", role="context", owner_id="ctx-0", instance_id="c", generation=generation,
        layout=msgspec.json.decode(LAYOUT.to_json()),
    )  # fmt: skip


class Instance:
    def __init__(self, *, direct: bool = True) -> None:
        self.desk = Desk()
        self.stands, self.goes_on = threading.Event(), threading.Event()
        self.service = ExecutorService(
            self.desk,
            role="generation",
            endpoint=Endpoint(),
            statistics=bytes,
            routing=self._stand,  # type: ignore[arg-type]
        )
        self.introduce("g")
        self.server = RpcServer(self.service, "ipc://", KEY).start()
        self.worker = WorkerClient(str(self.server.address), KEY, fast_path=direct)
        self.door = DoorServer(Door(self.worker), "ipc://", KEY, "door")
        self.clients: list[WorkerClient] = []

    def introduce(self, generation: str) -> None:
        """By another front than the one under test."""
        assert self.service.introduce("http://c", wire.encode_json(context_info(generation))) is None

    def _stand(self, count: int) -> bytes:
        self.stands.set()
        self.goes_on.wait(20.0)
        return b""

    async def stand_still(self) -> asyncio.Task[bytes]:
        """The worker's I/O thread takes nothing in any more, until ``goes_on`` is set."""
        asked = asyncio.create_task(self.worker.routing(1))
        await until(self.stands.is_set)
        return asked

    def client(self) -> WorkerClient:
        self.clients.append(WorkerClient(self.door.address, KEY, fast_path=False))
        return self.clients[-1]

    def proxy(self, batch_max: int = 1) -> Proxy:
        return Proxy(self.client(), BatchSubmitConfig(batch_max=batch_max))

    def close(self) -> None:
        self.service.close()
        self.door.close()
        for client in (*self.clients, self.worker):
            client.close()
        self.server.shutdown()


@pytest_asyncio.fixture(params=["direct", "rpc"])
async def instance(request: pytest.FixtureRequest) -> AsyncIterator[Instance]:
    made = Instance(direct=request.param == "direct")
    yield made
    await asyncio.to_thread(made.close)


def ask(request_id: int, tokens: int = 4, **sampling: Any) -> Request:
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
    tracked = [await proxy.submit(Submit(ask(r), "g1")) for r in (1, 2)]
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
    await proxy.submit(Submit(ask(1), "g1"))
    instance.desk.refuse = DeskError(wire.DRAINING, "draining")
    for submit, code in (
        (Submit(ask(2), "g1"), wire.DRAINING),
        (Submit(ask(2), "g0"), wire.STALE_GENERATION),
        (Submit(ask(2, tokens=99), "g1"), wire.INVALID_REQUEST),
        (Submit(ask(2, max_tokens=70), "g1"), wire.INVALID_REQUEST),
        (Submit(ask(2, logit_bias=((500, 1.0),)), "g1"), wire.INVALID_REQUEST),
        (Submit(ask(2, logit_bias=((-1, 1.0),)), "g1"), wire.INVALID_REQUEST),
        (Submit(ask(2, stop_token_ids=(500,), min_tokens=1), "g1"), wire.INVALID_REQUEST),
        (Submit(msgspec.structs.replace(ask(2), first_token=None), "g1"), wire.INVALID_REQUEST),
        (Submit(msgspec.structs.replace(ask(2), prefills_here=True), "g1"), wire.INVALID_REQUEST),
        (Submit(msgspec.structs.replace(ask(2), peer="c/g0"), "g1"), wire.STALE_GENERATION),
        (Submit(ask(1), "g1"), wire.DUPLICATE_REQUEST),
    ):
        with pytest.raises(ProxyError) as caught:
            await proxy.submit(submit)
        assert caught.value.code == code and not caught.value.received
    assert proxy.tracked_count == 1
    await proxy.close()


@contextlib.asynccontextmanager
async def legs_of(instance: Instance) -> AsyncIterator[StreamLegs]:
    legs = StreamLegs(Known("http://x", b"", Endpoint().info()), instance.client())
    yield legs
    await legs.close()


def from_context(generation: str) -> tuple[wire.PeerContext, Known]:
    info = context_info(generation)
    peer = wire.PeerContext(instance_id="c", endpoint_generation=generation, control_addresses=[], url="http://c")
    return peer, Known("http://c", wire.encode_json(info), info)


async def test_a_context_instance_that_another_front_has_replaced_is_introduced_again(instance: Instance) -> None:
    """A front that still takes an earlier lifetime for the present one tells of it late. A request is refused, before anything
    is touched: who is right is found out. The next one introduces its context instance again, those behind it need not."""
    async with legs_of(instance) as legs:

        async def sent(request_id: int) -> None:
            async with legs.generation(ask(request_id), "g1", *from_context("g2")):
                pass

        await sent(1)
        instance.introduce("g")
        with pytest.raises(LegError) as caught:
            await sent(2)
        assert context_is_stale(caught.value) and not caught.value.received
        await sent(3)
        await sent(4)
        assert instance.desk.peers == [("c/g", ""), ("c/g2", "c/g"), ("c/g", "c/g2"), ("c/g2", "c/g")]
        assert [(one.request_id, one.peer) for one in instance.desk.requests] == [(n, "c/g2") for n in (1, 3, 4)]


async def test_an_instance_that_is_replaced_at_one_address_is_gone_at_the_others(instance: Instance) -> None:
    """The ranks know it no more, by whichever address it was introduced."""
    info = wire.encode_json(context_info("g"))
    assert instance.service.introduce("http://also-c", info) is None
    instance.introduce("g2")
    proxy = instance.proxy()
    with pytest.raises(ProxyError) as caught:
        await proxy.submit(Submit(ask(1), "g1"))
    assert (caught.value.code, caught.value.body.field) == (wire.STALE_GENERATION, wire.CONTEXT_GENERATION)
    assert instance.desk.requests == []
    await proxy.close()


async def test_introductions_are_made_one_after_the_other(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier lifetime whose introduction takes its time does not replace a later one: the later one waits."""
    async with legs_of(instance) as legs:
        worker, gate, begun = instance.clients[-1], asyncio.Event(), []
        introduce = worker.introduce

        async def late(url: str, server_info: bytes) -> wire.ErrorBody | None:
            begun.append(msgspec.json.decode(server_info, type=wire.ServerInfo).generation)
            if len(begun) == 1:
                await gate.wait()
            return await introduce(url, server_info)

        monkeypatch.setattr(worker, "introduce", late)

        async def sent(request_id: int, generation: str) -> None:
            async with legs.generation(ask(request_id), "g1", *from_context(generation)):
                pass

        earlier = asyncio.create_task(sent(1, "g2"))
        await until(lambda: begun)
        later = asyncio.create_task(sent(2, "g3"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert begun == ["g2"]
        gate.set()
        await later
        with contextlib.suppress(LegError):  # replaced before it was sent
            await earlier
        assert instance.desk.peers == [("c/g", ""), ("c/g2", "c/g"), ("c/g3", "c/g2")]


async def test_sampling_and_log_probabilities_travel_whole(instance: Instance) -> None:
    """Every field of a request's sampling one way, what is told of its tokens the other, in the order of the tokens."""
    proxy = instance.proxy()
    sampling = {
        "temperature": 0.5, "top_k": 4, "min_p": 0.1, "min_tokens": 2, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.5, "logit_bias": ((7, -2.0),), "logprobs": 2, "stop_token_ids": (499,),
        "prompt_logprobs": 1,
    }  # fmt: skip
    tracked = await proxy.submit(Submit(ask(1, **sampling), "g1"))
    assert instance.desk.requests[0].sampling == SamplingParams(max_tokens=9, **sampling)  # type: ignore[arg-type]
    told = [wire.TokenLogprobs(-0.5 * token, ((token, -0.5 * token), (9, -8.0))) for token in (1, 2)]
    for token, one in zip((1, 2), told):
        of_prompt = tuple(told) if token == 1 else ()
        instance.service.deliver(make_answers([(1, token)], [Notice(1, logprobs=(one,), prompt_logprobs=of_prompt)]))
    instance.service.deliver(make_answers([], [Notice(1, "stop")]))
    tokens, notices = await tracked.next()
    while not notices[-1:] or not notices[-1].finish_reason:
        more_tokens, more = await tracked.next()
        tokens, notices = tokens + more_tokens, notices + more
    assert tokens == [1, 2] and [one for notice in notices for one in notice.logprobs] == told
    assert [one for notice in notices for one in notice.prompt_logprobs] == told
    await proxy.close()


async def test_a_request_travels_whole_over_http_too(instance: Instance) -> None:
    """What the front sends to an instance without a stream is what the desk gets: every field of it and of its sampling."""
    sampling = SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.75, seed=11, ignore_eos=True, stop_token_ids=(499,), top_k=4, min_p=0.125,
        min_tokens=2, presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.5, logit_bias=((7, -2.0),), logprobs=2,
        prompt_logprobs=3,
    )  # fmt: skip
    request = Request(
        request_id=1, token_ids=np.arange(4, dtype=np.int32), sampling=sampling, prefills_here=True, conversation_id="talk",
        cache_salt="alice's", deadline_s=30.0,
    )  # fmt: skip
    # A field that comes later has to be given here too, or this test would not see that it gets lost.
    assert not [one.name for one in dataclasses.fields(sampling) if getattr(sampling, one.name) == one.default]
    scalars = [one for one in msgspec.structs.fields(request) if one.name not in ("token_ids", "sampling")]
    untold = {one.name for one in scalars if getattr(request, one.name) == one.default}
    assert untold == {"schedule_style", "first_token", "peer"}  # of requests with a context leg

    server = ServerThread(
        ApiServer(instance.worker, BatchSubmitConfig(batch_max=1), Endpoint(), KEY.hex()), "127.0.0.1", 0
    )
    await asyncio.to_thread(server.start)
    legs = HttpLegs(KEY.hex())

    told = [wire.TokenLogprobs(-0.5, ((3, -0.5),)), wire.TokenLogprobs(-1.0)]

    async def read() -> list[int]:
        async with legs.generation(server.url, request, "g1", None) as chunks:
            got = [chunk async for chunk in chunks]
        assert [one for chunk in got for one in chunk.prompt_logprobs] == told
        return [token for chunk in got for token in chunk.tokens]

    reading = asyncio.create_task(read())
    try:
        await until(lambda: instance.desk.requests or reading.done())
        instance.service.deliver(make_answers([(1, 5)], [Notice(1, prompt_logprobs=tuple(told))]))
        instance.service.deliver(make_answers([(1, 6)], [Notice(1, "stop")]))
        assert await asyncio.wait_for(reading, 20) == [5, 6]
    finally:
        reading.cancel()
        await legs.close()
        await asyncio.to_thread(server.stop)
    (got,) = instance.desk.requests
    assert got.sampling == sampling and got.token_ids.tolist() == request.token_ids.tolist()
    assert {one.name: getattr(got, one.name) for one in scalars} == {
        one.name: getattr(request, one.name) for one in scalars
    }


async def test_subscribers_get_their_own_answers_and_one_that_leaves_is_cleaned_up(instance: Instance) -> None:
    """Two clients of one instance; the requests of the one that goes are stopped, the other's go on."""
    one, two = instance.proxy(), instance.proxy()
    mine = await one.submit(Submit(ask(1), "g1"))
    other = await two.submit(Submit(ask(2), "g1"))
    instance.service.deliver(make_answers([(1, 5), (2, 6)]))
    assert await asyncio.wait_for(mine.next(), 20) == ([5], [])
    assert await asyncio.wait_for(other.next(), 20) == ([6], [])
    await two.close()
    await until(lambda: instance.desk.aborts == [2])
    instance.service.deliver(make_answers([(1, 7), (2, 8)]))
    assert await asyncio.wait_for(mine.next(), 20) == ([7], [])
    await one.close()


async def test_a_batch_stays_one_and_is_counted_by_the_way_it_took(instance: Instance, request: Any) -> None:
    """Requests sent together reach the worker in one call, in order, one of them refused alone; each step comes back whole."""
    proxy = instance.proxy(batch_max=3)
    sent = [asyncio.create_task(proxy.submit(Submit(ask(r, tokens=99 if r == 2 else 4), "g1"))) for r in (1, 2, 3)]
    one, two, three = await asyncio.gather(*sent, return_exceptions=True)
    assert isinstance(two, ProxyError) and two.code == wire.INVALID_REQUEST
    assert [r.request_id for r in instance.desk.requests] == [1, 3]
    direct = "direct" in request.node.name
    assert instance.worker.counts() == SubmitCounts(local=3 * direct, rpc=3 * (not direct), calls=1)
    instance.service.deliver(make_answers([(1, 5), (3, 6)], [Notice(3, "stop")]))
    assert await asyncio.wait_for(three.next(whole=True), 20) == ([6], [Notice(3, "stop")])
    assert await asyncio.wait_for(one.next(), 20) == ([5], [])
    proxy.abort(1, "enough")
    await until(lambda: instance.desk.aborts == [1])
    await proxy.close()


async def test_a_worker_that_stands_still_hears_of_an_abort_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has a time limit is not begun after it: the request would be computed for nobody, and its KV kept until
    ``transfer_timeout_s``. The worker behind a door of another process, and the process where the front's stream ends."""
    monkeypatch.setattr(worker_client, "_CALL_S", 0.05)
    made = Instance(direct=False)
    known = Known("http://x", b"", Endpoint().info())
    legs = StreamLegs(known, WorkerClient(str(made.server.address), KEY, fast_path=False))
    try:
        asked = await made.stand_still()
        legs.abort(1, "its client has gone")
        await Door(made.worker).abort(2, "its client has gone")
        assert not made.desk.aborts
        made.goes_on.set()
        await until(lambda: sorted(made.desk.aborts) == [1, 2])
        await asked
    finally:
        made.goes_on.set()
        await legs.close()
        await asyncio.to_thread(made.close)


async def test_what_the_worker_said_last_gets_out_before_the_door_closes(instance: Instance) -> None:
    """A hundred steps, then the instance leaves at once: the reader has every token."""
    proxy = instance.proxy()
    tracked = await proxy.submit(Submit(ask(1), "g1"))
    for step in range(100):
        instance.service.deliver(make_answers([(1, step)]))
    instance.service.deliver(make_answers([], [Notice(1, "length")]))
    await asyncio.to_thread(instance.close)
    assert await asyncio.wait_for(tracked.next(whole=True), 20) == (list(range(100)), [Notice(1, "length")])


async def test_an_instance_that_ends_fails_what_runs_and_one_that_is_not_there_was_never_reached(tmp_path: Any) -> None:
    """CUT with ``received``: it may have begun. UNREACHABLE without: it certainly has not. Nobody hangs."""
    made = Instance()
    known = Known("http://x", b"", wire.ServerInfo(
        ready=True, state="PUBLISHED", role="context", owner_id="o", instance_id="i", service_address=made.door.address
    ))  # fmt: skip
    legs = StreamLegs(known, WorkerClient(known.info.service_address, KEY, fast_path=False))
    running = asyncio.create_task(legs.context(ask(1), "g1"))
    await until(lambda: made.desk.requests)
    await asyncio.to_thread(made.server.shutdown)  # the worker ends, its door stays
    with pytest.raises(LegError) as caught:
        await asyncio.wait_for(running, 30)
    assert (caught.value.code, caught.value.received) == (CUT, True)
    assert legs.lost
    await legs.close()
    await asyncio.to_thread(made.close)
    legs = StreamLegs(known, WorkerClient(known.info.service_address, KEY, fast_path=False))
    with pytest.raises(LegError) as caught:
        await asyncio.wait_for(legs.context(ask(2), "g1"), 30)
    assert (caught.value.code, caught.value.received) == (UNREACHABLE, False)
    await legs.close()
