"""What happens when something ends early: disconnects, deadlines, dead legs, stale generations."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import openai
import pytest

from meta_executor import wire

pytestmark = pytest.mark.asyncio
STYLES = pytest.mark.parametrize("style", ["context_first", "generation_first"])
STREAMS = pytest.mark.parametrize("stream", [False, True])


async def until(condition: Any, limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


def first_lines(cluster: Any) -> float:
    samples = cluster.service.metrics.generation.first_token.collect()[0].samples
    return next(sample.value for sample in samples if sample.name.endswith("_count"))


@STYLES
@STREAMS
@pytest.mark.parametrize("where", ["in_context", "before_first_line", "mid_stream"])
async def test_client_leaves(make_cluster: Any, style: str, stream: bool, where: str) -> None:
    """Wherever the client leaves, each leg that was sent and had not ended is told, and nothing stays reserved."""
    async with make_cluster(style) as cluster:
        gate = asyncio.Event()
        if where == "in_context":
            cluster.context.gate = cluster.generation.gate = gate
        elif where == "before_first_line":
            cluster.generation.gate = gate
        else:
            cluster.generation.line_gate = gate
        task = asyncio.create_task(cluster.complete(stream=stream))
        await (cluster.context if where == "in_context" else cluster.generation).started.wait()
        if style == "generation_first":
            await cluster.generation.started.wait()
            await cluster.context.started.wait()
            if where != "in_context":
                await until(lambda: cluster.service.metrics.context.completed.collect()[0].samples[0].value >= 1)
        if where == "mid_stream":
            await until(lambda: first_lines(cluster) >= 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await cluster.client.aclose()
        await cluster.settled()
        (request_id,) = {body.request_id for body in cluster.context.received}
        context_done = where == "mid_stream" or (style == "generation_first" and where == "before_first_line")
        assert cluster.context.aborts == ([] if context_done else [request_id])
        generation_sent = style == "generation_first" or where != "in_context"
        assert cluster.generation.aborts == ([request_id] if generation_sent else [])
        assert cluster.service.metrics.client_disconnects.collect()[0].samples[0].value == 1
        gate.set()


@STYLES
@STREAMS
async def test_deadline(make_cluster: Any, style: str, stream: bool) -> None:
    """A request that takes too long ends with 504, or with an error event if its stream had begun; legs are told."""
    async with make_cluster(style, request_timeout_s=0.5) as cluster:
        cluster.generation.line_gate = asyncio.Event()
        response = await cluster.complete(stream=stream)
        if stream:
            assert response.status_code == 200
            last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
            assert last["error"]["code"] == "deadline_exceeded"
            assert "[DONE]" not in response.text
        else:
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "deadline_exceeded"
        await cluster.settled()
        assert cluster.generation.aborts == [cluster.generation.received[0].request_id]
        assert 0 < cluster.generation.received[0].deadline_s <= 0.5


@STYLES
@pytest.mark.parametrize("how", ["error", "cut"])
@pytest.mark.parametrize("after", [0, 2])
async def test_generation_leg_dies(make_cluster: Any, style: str, how: str, after: int) -> None:
    """502 in one piece; in a stream an error event that the official client raises. Nothing is sent twice."""
    async with make_cluster(style) as cluster:
        cluster.generation.break_after, cluster.generation.break_how = after, how
        response = await cluster.complete()
        assert response.status_code == 502
        assert response.json()["error"]["code"] == ("transfer_failed" if how == "error" else "cut")
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError) as caught:
            stream = await client.completions.create(model="synthetic", prompt="abc", max_tokens=64, stream=True)
            async for _ in stream:
                pass
        assert "generation instance" in str(caught.value)
        await client.close()
        await cluster.settled()
        assert len(cluster.context.received) == len(cluster.generation.received) == 2
        assert len(cluster.generation.aborts) == 2


@STYLES
async def test_context_leg_refuses(make_cluster: Any, style: str) -> None:
    """A refusal of the context instance is passed on with its status, tried once, and the other leg is told."""
    async with make_cluster(style) as cluster:
        cluster.generation.gate = asyncio.Event()
        for code, status in (
            (wire.BACKPRESSURE, 429),
            (wire.DRAINING, 503),
            (wire.LEASE_EXPIRED, 503),
            (wire.ENGINE_FAILED, 502),
        ):
            cluster.context.refusals = [(code, "not now")]
            response = await cluster.complete()
            assert response.status_code == status
            assert response.json()["error"]["code"] == code.lower()
            assert "not now" in response.json()["error"]["message"]
        await cluster.settled()
        assert not cluster.context.received
        if style == "context_first":
            assert not cluster.generation.received
        else:
            assert set(cluster.generation.aborts) >= {body.request_id for body in cluster.generation.received}
        cluster.generation.gate.set()
        assert (await cluster.complete()).status_code == 200


async def test_generation_leg_refuses(make_cluster: Any) -> None:
    """The context leg had ended; its KV is given up by an abort, and it is not computed again."""
    async with make_cluster() as cluster:
        cluster.generation.refusals = [(wire.BACKPRESSURE, "full")]
        response = await cluster.complete()
        assert response.status_code == 429
        await cluster.settled()
        assert cluster.context.aborts == [cluster.context.received[0].request_id]
        assert not cluster.generation.received + cluster.generation.aborts


async def test_stale_context_is_refreshed_once(make_cluster: Any) -> None:
    """The instance was replaced at its address: its refusal leads to one refresh and the request passes."""
    async with make_cluster() as cluster:
        before = cluster.context.info_calls
        cluster.context.generation = "ctx-0-g2"
        answers = await asyncio.gather(*(cluster.complete() for _ in range(5)))
        assert [answer.status_code for answer in answers] == [200] * 5
        assert cluster.context.info_calls == before + 1
        assert {body.endpoint_generation for body in cluster.context.received} == {"ctx-0-g2"}
        assert {body.context.endpoint_generation for body in cluster.generation.received} == {"ctx-0-g2"}
        await cluster.settled()


async def test_stale_generation_leg_does_not_repeat_the_context_leg(make_cluster: Any) -> None:
    """The generation instance was replaced: one refresh, the leg again, the prompt is computed once."""
    async with make_cluster() as cluster:
        cluster.generation.generation = "gen-0-g2"
        response = await cluster.complete()
        assert response.json()["choices"][0]["text"] == "Hello, world!"
        assert len(cluster.context.received) == len(cluster.generation.received) == 1
        assert not cluster.context.aborts + cluster.generation.aborts
        await cluster.settled()


@STYLES
async def test_generation_instance_finds_the_context_stale(make_cluster: Any, style: str) -> None:
    """The context instance was replaced between the legs: no leg is repeated, and its record is fetched for the next."""
    async with make_cluster(style) as cluster:
        cluster.generation.gate = cluster.context.gate = asyncio.Event()
        cluster.generation.refusals = [(wire.STALE_GENERATION, "gone", "context.endpoint_generation")]
        before = cluster.context.info_calls, cluster.generation.info_calls
        task = asyncio.create_task(cluster.complete())
        cluster.context.gate.set()
        assert (await task).status_code == 503
        await cluster.settled()
        assert len(cluster.context.received) <= 1
        assert not cluster.generation.received
        assert cluster.context.info_calls == before[0] + (2 if style == "generation_first" else 1)
        assert cluster.generation.info_calls == before[1]
        assert (await cluster.complete()).status_code == 200


@STYLES
async def test_always_stale_fails_after_one_refresh(make_cluster: Any, style: str) -> None:
    """An instance that refuses its own published generation is not asked for ever."""
    async with make_cluster(style) as cluster:
        refusing = cluster.generation if style == "generation_first" else cluster.context
        refusing.refusals = [(wire.STALE_GENERATION, "no")] * 10
        response = await cluster.complete()
        assert response.status_code == 503
        assert len(refusing.refusals) == 8
        await cluster.settled()
        assert not refusing.received + refusing.aborts


async def test_generation_first_checks_the_context_before_it_sends(make_cluster: Any) -> None:
    """Generation-first binds to the live context generation before the generation leg is told about it."""
    async with make_cluster("generation_first") as cluster:
        cluster.context.generation = "ctx-0-g2"
        response = await cluster.complete()
        assert response.status_code == 200
        assert cluster.generation.received[0].context.endpoint_generation == "ctx-0-g2"
        await cluster.settled()


async def test_generation_first_stale_generation_leg_is_asked_again_alone(make_cluster: Any) -> None:
    """The generation instance was replaced while both legs were sent: one refresh for all, no context leg is repeated."""
    async with make_cluster("generation_first") as cluster:
        before = cluster.generation.info_calls
        cluster.generation.generation = "gen-0-g2"
        answers = await asyncio.gather(*(cluster.complete() for _ in range(24)))
        assert [answer.status_code for answer in answers] == [200] * 24
        assert cluster.generation.info_calls == before + 1
        assert {body.endpoint_generation for body in cluster.generation.received} == {"gen-0-g2"}
        sent = [body.request_id for body in cluster.context.received]
        assert len(set(sent)) == len(sent) == len(cluster.generation.received) == 24
        assert not cluster.context.aborts + cluster.generation.aborts
        await cluster.settled()


async def test_generation_first_stale_context_leg_is_not_asked_again(make_cluster: Any) -> None:
    """The generation leg was told of the context instance that is gone: the request fails, the next one passes."""
    async with make_cluster("generation_first") as cluster:
        cluster.context.refusals = [(wire.STALE_GENERATION, "gone")]
        assert (await cluster.complete()).status_code == 503
        await cluster.settled()
        assert not cluster.context.received
        assert (await cluster.complete()).status_code == 200


async def test_unreachable_server_is_left_for_another(make_cluster: Any) -> None:
    """Connecting fails: nothing was sent, so another server gets the request; with none left it is 502 or 503."""
    async with make_cluster(contexts=2) as cluster:
        first, second = (instance for instance in cluster.instances if instance.role == "context")
        await cluster.servers.stop(first.url)
        answers = [await cluster.complete() for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert len(second.received) == 4
        await cluster.servers.stop(second.url)
        answer = await cluster.complete()
        assert answer.status_code in (502, 503)
        assert (await cluster.client.get(f"{cluster.url}/health")).status_code == 503
        await cluster.settled()


async def test_generation_first_leg_that_reaches_nobody_goes_to_another(make_cluster: Any) -> None:
    """Nothing of it was received, and any generation instance may be told of the same context instance: the context leg runs on
    and is not repeated. With nobody left it is 502 or 503, and the context leg is told."""
    async with make_cluster("generation_first", generations=2) as cluster:
        first, second = (instance for instance in cluster.instances if instance.role == "generation")
        cluster.context.peer = second
        await cluster.servers.stop(first.url)
        answers = [await cluster.complete() for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert len(second.received) == len({body.request_id for body in cluster.context.received}) == 4
        assert len(cluster.context.received) == 4 and not cluster.context.aborts + second.aborts
        assert cluster.service.metrics.generation.retry.collect()[0].samples[0].value >= 1
        await cluster.settled()
        await cluster.servers.stop(second.url)
        assert (await cluster.complete()).status_code in (502, 503)
        await cluster.settled()


async def test_no_instance_is_a_503(make_cluster: Any) -> None:
    """Nothing was sent to anybody: the client may try again, and hears so in bounded time."""
    async with make_cluster() as cluster:
        cluster.context.ready = False
        await cluster.servers.stop(cluster.generation.url)
        with contextlib.suppress(Exception):
            await cluster.service.directory.refresh(cluster.context.url)
        for _ in range(2):
            response = await cluster.complete()
            assert response.status_code in (502, 503)
        assert (await cluster.complete()).status_code == 503
        await cluster.settled()


async def test_instance_restarts_at_its_address(make_cluster: Any) -> None:
    """The server goes away and comes back at the same port as a new instance: the front finds it by itself."""
    async with make_cluster() as cluster:
        assert (await cluster.complete()).status_code == 200
        port = int(cluster.context.url.rsplit(":", 1)[1])
        await cluster.servers.stop(cluster.context.url)
        assert (await cluster.complete()).status_code in (502, 503)
        cluster.context.generation = "ctx-0-g2"
        cluster.servers.start(cluster.context.app, port)
        async with asyncio.timeout(10):
            while (await cluster.client.get(f"{cluster.url}/health")).status_code != 200:
                await asyncio.sleep(0.02)
        assert (await cluster.complete()).status_code == 200
        assert cluster.context.received[-1].endpoint_generation == "ctx-0-g2"
        await cluster.settled()


@STREAMS
@pytest.mark.parametrize("order", ["context_before", "context_after", "together"])
async def test_generation_first_in_any_order(make_cluster: Any, stream: bool, order: str) -> None:
    """Whichever leg answers first, the result is the same, and the counts are the context leg's."""
    async with make_cluster("generation_first") as cluster:
        context_gate, generation_gate = asyncio.Event(), asyncio.Event()
        cluster.context.gate, cluster.generation.gate = context_gate, generation_gate
        options = {"stream_options": {"include_usage": True}} if stream else {}
        task = asyncio.create_task(cluster.complete(stream=stream, **options))
        await cluster.generation.started.wait()
        await cluster.context.started.wait()
        first, second = (
            (context_gate, generation_gate) if order == "context_before" else (generation_gate, context_gate)
        )
        first.set()
        if order != "together":
            await asyncio.sleep(0.1)
        second.set()
        response = await task
        if stream:
            events = [json.loads(e.removeprefix("data: ")) for e in response.text.strip().split("\n\n")[:-1]]
            text = "".join(event["choices"][0]["text"] for event in events[:-1])
            usage = events[-1]["usage"]
        else:
            text, usage = response.json()["choices"][0]["text"], response.json()["usage"]
        assert text == "Hello, world!"
        assert usage["prompt_tokens_details"]["cached_tokens"] == 1
        await cluster.settled()
        assert not cluster.context.aborts + cluster.generation.aborts


async def test_burst_cancelled_in_the_middle(make_cluster: Any) -> None:
    """A hundred requests, all cancelled while they run: every count is zero again and the next request passes."""
    for style in ("context_first", "generation_first"):
        async with make_cluster(style) as cluster:
            cluster.generation.line_gate = asyncio.Event()
            client = httpx.AsyncClient(timeout=20, limits=httpx.Limits(max_connections=None), trust_env=False)
            body = {"model": "synthetic", "prompt": "abc", "max_tokens": 30, "stream": True}
            tasks = [asyncio.create_task(client.post(f"{cluster.url}/v1/completions", json=body)) for _ in range(100)]
            await until(lambda: len(cluster.generation.received) >= 60, 60)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await client.aclose()
            await cluster.settled()
            cluster.generation.line_gate = None
            answer = await cluster.complete()
            assert answer.status_code == 200, answer.text
            # The last, whole one aside, every leg that an instance took in was told to abort.
            assert set(cluster.generation.aborts) >= {body.request_id for body in cluster.generation.received[:-1]}
