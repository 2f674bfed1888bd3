"""What instances say of their health is asked again and again, and decides with the directory whether a role can be served."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from endpoint_lifecycle import ServerStatus
from meta_executor.front import wellness
from meta_executor.front.leg import Condition
from meta_executor.front.wellness import Wellness


class Directory:
    """Two instances of one role."""

    can_pick: tuple[str, ...] = ("a", "b")
    closed = False

    def servers(self, role: str | None = None) -> tuple[str, ...]:
        return ("a", "b") if role in (None, "context") else ()

    def ready(self, **minimum: int) -> bool:
        return not self.closed and bool(self.can_pick)

    def status(self, server: str) -> ServerStatus:
        return ServerStatus.READY if server in self.can_pick else ServerStatus.UNPREPARED

    def record(self, server: str) -> None:
        return None


class Legs:
    """Answers of instances; an exception stands for one that is none."""

    def __init__(self) -> None:
        self.says = {"a": "", "b": ""}
        self.asked = 0

    async def condition(self, server: str) -> Condition:
        self.asked += 1
        return Condition(self.says[server])


@pytest.mark.asyncio
async def test_a_role_is_served_while_one_of_its_instances_is_well() -> None:
    """And only while the directory would pick one."""
    directory, legs = Directory(), Legs()
    followed: Any = Wellness(directory, legs)  # type: ignore[arg-type]
    await followed.ask()
    assert followed.serves("context") and followed.unwell == {} and not followed.serves("generation")
    legs.says["a"] = "rank 1 was not heard for 7 s"
    await followed.ask()
    assert followed.serves("context") and followed.unwell == {"a": "rank 1 was not heard for 7 s"}
    legs.says["b"] = "no answer"
    await followed.ask()
    assert not followed.serves("context")
    legs.says["a"] = ""
    await followed.ask()
    assert followed.serves("context")
    directory.can_pick = ("b",)
    assert not followed.serves("context"), "the one that is well cannot be picked, the one that can be is not well"
    directory.can_pick = ("a",)
    assert followed.serves("context")
    directory.closed = True
    assert not followed.serves("context")
    directory.closed = False
    directory.can_pick = ()
    assert not followed.serves("context")


@pytest.mark.asyncio
@pytest.mark.parametrize("style", ["context_first", "generation_first"])
async def test_who_answers_as_another_lifetime_is_whom_requests_go_to(make_cluster: Any, style: str) -> None:
    """Both instances were replaced between two probes: that they are well, and who they are, is one piece of news."""
    async with make_cluster(style) as cluster:
        service = cluster.service
        for instance in cluster.instances:
            instance.generation = f"{instance.owner_id}-g2"
        await service.wellness.ask()
        assert (await cluster.client.get(f"{cluster.url}/health")).status_code == 200
        for instance in cluster.instances:
            assert service.directory.record(instance.url).generation == instance.generation
        assert (await cluster.complete()).status_code == 200
        for role in ("context", "generation"):
            assert service.metrics.role(role).retry.collect()[0].samples[0].value == 0
        calls = [instance.info_calls for instance in cluster.instances]
        await service.wellness.ask()
        assert [instance.info_calls for instance in cluster.instances] == calls, "what is known is not fetched again"


@pytest.mark.asyncio
async def test_one_that_was_replaced_is_unwell_until_its_record_is_here(make_cluster: Any) -> None:
    """It says that it is well, but requests would go to the one before it."""
    async with make_cluster() as cluster:
        wellness = cluster.service.wellness
        cluster.generation.generation = "gen-0-g2"
        cluster.generation.info_status = 500
        await wellness.ask()
        health = await cluster.client.get(f"{cluster.url}/health")
        assert health.status_code == 503
        assert health.json()["why"]["gen-0"].startswith("it was replaced, and its new record is not here yet: ")
        cluster.generation.info_status = 200
        async with asyncio.timeout(10):
            while not cluster.service.directory.ready(generation=1):  # the directory probes by itself
                await asyncio.sleep(0.01)
        await wellness.ask()
        assert wellness.unwell == {}
        assert (await cluster.client.get(f"{cluster.url}/health")).status_code == 200


@pytest.mark.asyncio
async def test_an_answer_that_is_older_than_the_record_is_no_news_of_the_record(make_cluster: Any) -> None:
    """Asked before the successor was known, heard after it: the successor stays, and counts when it was asked itself."""
    async with make_cluster() as cluster:
        directory, generation = cluster.service.directory, cluster.generation
        calls, late = generation.info_calls, generation.generation

        async def condition(server: str) -> Condition:
            if server != generation.url:
                return Condition("")
            generation.generation = "gen-0-g2"
            await directory.refresh(server)
            return Condition("", late)

        followed: Any = Wellness(directory, SimpleNamespace(condition=condition))  # type: ignore[arg-type]
        await followed.ask()
        assert directory.record(generation.url).generation == "gen-0-g2" and directory.ready(generation=1)
        assert generation.info_calls == calls + 1, "the successor is not suspected"
        assert followed.unwell == {generation.url: "it was replaced while it was asked"}
        await cluster.service.wellness.ask()
        assert cluster.service.wellness.unwell == {} and generation.info_calls == calls + 1


@pytest.mark.asyncio
async def test_it_is_asked_again_and_again_until_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes on afterwards."""
    monkeypatch.setattr(wellness, "ASK_EVERY_S", 0.001)
    legs = Legs()
    followed = Wellness(Directory(), legs)  # type: ignore[arg-type]
    async with followed.followed():
        while legs.asked < 6:
            await asyncio.sleep(0.001)
    asked = legs.asked
    await asyncio.sleep(0.02)
    assert legs.asked == asked
