"""The live page and its events over fake instances: what they say, who may see it, and that nobody pays when nobody looks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meta_executor.front import live
from meta_executor.listener.access import KeyFile

pytestmark = pytest.mark.asyncio
OPERATOR = "o" * 32
CLIENT = "c" * 32


async def looks(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for line in lines:
        if line.startswith("data: "):
            yield json.loads(line[6:])


@contextlib.asynccontextmanager
async def watched(cluster: Any, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    async with cluster.client.stream("GET", f"{cluster.url}/live/events", headers=headers) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        yield looks(answer.aiter_lines())


async def test_the_page_brings_everything_and_runs_nothing_else(make_cluster: Any) -> None:
    """No address in it leads elsewhere, and the browser is told to run its own script alone."""
    async with make_cluster() as cluster:
        answer = await cluster.client.get(f"{cluster.url}/")
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
        addresses = re.findall(r"""(?:src|href)=["']?([^"'>\s]+)|url\(([^)]+)\)|https?://([^"'\s]+)""", answer.text)
        assert {"".join(found) for found in addresses} == {"data:,", "www.w3.org/2000/svg"}
        (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = answer.headers["content-security-policy"]
        assert (
            f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy and "unsafe-eval" not in policy
        )
        # What comes from the service is put in as text.
        assert "innerHTML" not in script and "insertAdjacentHTML" not in script and "document.write" not in script


async def test_a_look_says_what_the_metrics_say(make_cluster: Any) -> None:
    """Numbers of the front as ``/metrics`` has them, instances with their statistics, legs that run; ids of nobody."""
    async with make_cluster(generations=2) as cluster:
        await cluster.complete()
        generations = [instance for instance in cluster.instances if instance.role == "generation"]
        for instance in generations:
            instance.gate = asyncio.Event()
            instance.started.clear()
        running = asyncio.create_task(cluster.complete())
        started = [asyncio.create_task(instance.started.wait()) for instance in generations]
        await asyncio.wait(started, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        async with watched(cluster) as seen:
            look = await anext(seen)
        text = (await cluster.client.get(f"{cluster.url}/metrics")).text
        for instance, task in zip(generations, started):
            task.cancel()
            instance.gate.set()
        await running
        told = {
            s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples if not s.labels
        }
        for name in ("total_requests_total", "total_responses_total", "running_requests", "ctx_total_requests_total"):
            assert look["values"][name] == told[name], name
        assert look["values"]["trtllm_time_to_first_token_seconds_count"] == 1
        assert (look["running"], look["serves"], look["draining"], look["watchers"]) == (1, True, False, 1)
        assert [one["owner_id"] for one in look["instances"]] == ["ctx-0", "gen-0", "gen-1"]
        for one in look["instances"]:
            assert one["why"] == "" and one["generation"] == f"{one['owner_id']}-g1" and one["status"] == "ready"
            assert one["statistics"]["tokens_returned"] == 7
            assert one["statistics"]["ranks"][0]["tier_reasons"] == {"ok": 2}
        assert sum(one["legs"] for one in look["instances"] if one["role"] == "generation") == 1
        assert not {"request_id", "prompt", "caller"} & set(re.findall(r'"(\w+)":', json.dumps(look)))
        await cluster.settled()


async def test_an_instance_that_cannot_be_asked_says_why(make_cluster: Any) -> None:
    """The others are shown as before."""
    async with make_cluster() as cluster:
        await cluster.servers.stop(cluster.generation.url)
        async with watched(cluster) as seen:
            context, generation = (await anext(seen))["instances"]
        assert context["statistics"] is not None and context["why"] == ""
        assert generation["statistics"] is None and generation["why"]


async def test_who_may_look(make_cluster: Any, tmp_path: Path) -> None:
    """Who may read the metrics; the page itself holds nothing and is everybody's."""
    file = tmp_path / "keys"
    file.write_text(f"one {CLIENT}\ntwo {OPERATOR} operator\n")
    file.chmod(0o600)
    async with make_cluster(keys=KeyFile(file)) as cluster:
        del cluster.client.headers["x-meta-executor-key"]
        assert (await cluster.client.get(f"{cluster.url}/")).status_code == 200
        for key, status in (("", 401), (CLIENT, 403)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            assert (await cluster.client.get(f"{cluster.url}/live/events", headers=headers)).status_code == status
        async with watched(cluster, authorization=f"Bearer {OPERATOR}") as seen:
            assert (await anext(seen))["model"] == "synthetic"


async def test_however_many_watch_an_instance_is_asked_once_a_look(make_cluster: Any) -> None:
    async with make_cluster() as cluster:
        async with watched(cluster) as one, watched(cluster) as two:
            first = await anext(one)
            assert (await anext(two))["at_s"] >= first["at_s"]
            asked = cluster.context.statistics_asked
            while (await anext(two))["at_s"] == first["at_s"]:
                pass
            assert cluster.context.statistics_asked <= asked + 2
        while cluster.service.watching.watchers:
            await asyncio.sleep(0.01)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "live"]


async def test_as_many_watch_as_may(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused, and may when one has left."""
    monkeypatch.setattr(live, "WATCHERS_MAX", 1)
    async with make_cluster() as cluster:
        async with watched(cluster) as seen:
            await anext(seen)
            refused = await cluster.client.get(f"{cluster.url}/live/events")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_watchers")
        while cluster.service.watching.watchers:
            await asyncio.sleep(0.01)
        async with watched(cluster) as seen:
            await anext(seen)


# -- the looks themselves -----------------------------------------------------------------------------------------------


def counting() -> Any:
    count = 0

    async def look() -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"count": count}

    return look


async def test_closing_ends_every_watch() -> None:
    """One that waits, and one that begins afterwards."""
    made = live.Live(counting(), every_s=3600)
    watch = made.watch()
    assert await anext(watch) == b'data: {"count":1}\n\n'
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    await made.close()
    with pytest.raises(StopAsyncIteration):
        await waiting
    with pytest.raises(StopAsyncIteration):
        await anext(made.watch())
    await made.close()


async def test_who_comes_after_a_pause_sees_nothing_old() -> None:
    made = live.Live(counting(), every_s=3600)
    watch = made.watch()
    assert b"1" in await anext(watch)
    await watch.aclose()
    await watch.aclose()
    assert made.watchers == 0
    again = made.watch()
    assert b"2" in await anext(again)
    await again.aclose()
    await made.close()


async def test_a_look_that_fails_sends_watchers_away_and_the_next_may_look(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged; nobody waits for ever."""
    broken = True

    async def look() -> dict[str, Any]:
        if broken:
            raise ZeroDivisionError
        return {}

    made = live.Live(look, every_s=3600)
    watch = made.watch()
    with pytest.raises(StopAsyncIteration):
        await anext(watch)
    assert "a look at the service failed" in caplog.text and made.watchers == 0
    broken = False
    again = made.watch()
    assert await anext(again) == b"data: {}\n\n"
    await again.aclose()
    await made.close()


async def test_a_look_that_fails_when_it_was_ended_ends_no_later_one() -> None:
    """Its last watcher had left; who came meanwhile sees on, and the looking ends with that one."""
    count, go_on = 0, asyncio.Event()

    async def look() -> dict[str, Any]:
        nonlocal count
        count += 1
        if count > 1:
            return {"count": count}
        try:
            await asyncio.Event().wait()
        finally:
            await go_on.wait()
            raise ZeroDivisionError

    made = live.Live(look, every_s=0.0)
    watch = made.watch()
    waiting = asyncio.ensure_future(anext(watch))
    while not count:
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait((waiting,))
    await watch.aclose()
    again = made.watch()
    assert b'"count":2' in await anext(again)
    go_on.set()
    seen = [await anext(again) for _ in range(5)]
    assert len(set(seen)) == 5
    await again.aclose()
    while [task for task in asyncio.all_tasks() if task.get_name() == "live"]:
        await asyncio.sleep(0)
    await made.close()
