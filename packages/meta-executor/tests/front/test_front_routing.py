"""``/debug/routing`` of the front: its own choices with what it knew, and every instance's decisions."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from endpoint_lifecycle import split_request_id
from meta_executor import wire
from meta_executor.config import FrontRouterConfig

pytestmark = pytest.mark.asyncio


async def shown(cluster, **query) -> wire.ServiceRouting:
    answer = await cluster.client.get(f"{cluster.url}/debug/routing", params=query)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=wire.ServiceRouting)


@pytest.mark.parametrize("style", ["context_first", "generation_first"])
async def test_both_legs_of_a_request_are_shown_with_the_instances_own_decisions(make_cluster, style) -> None:
    """One request: two choices of the front in the order of the legs, and one decision of each instance under its id."""
    async with make_cluster(style=style) as cluster:
        empty = await shown(cluster)
        assert (empty.decided, empty.decisions, [i.decided for i in empty.instances]) == (0, [], [0, 0])
        assert (await cluster.complete("Say hello", max_tokens=5)).status_code == 200
        routing = await shown(cluster)
        (request_id,) = {d.request_id for d in routing.decisions}
        assert [(d.role, d.owner_id) for d in routing.decisions] == [("context", "ctx-0"), ("generation", "gen-0")]
        assert {d.why for d in routing.decisions} == {"the only one that can be picked"}
        prompt = len(cluster.context.received[0].token_ids)
        assert [d.weight for d in routing.decisions] == [prompt, prompt + 5]
        assert {(d.load_weight, d.load_requests) for d in routing.decisions} == {(0, 0)}
        assert all(d.age_s >= 0 for d in routing.decisions)
        assert [(i.owner_id, i.decisions[0].request_id) for i in routing.instances] == [
            ("ctx-0", request_id),
            ("gen-0", request_id),
        ]
        assert routing.unknown == {} and routing.policy == "load_balancing"
        await cluster.settled()


async def test_the_load_before_a_choice_is_told_and_explains_it(make_cluster) -> None:
    """Two generation instances, the first busy: the second request goes to the other, whose load was less."""
    async with make_cluster(generations=2) as cluster:
        gate = asyncio.Event()
        for instance in cluster.instances:
            if instance.role == "generation":
                instance.line_gate = gate
        running = [asyncio.create_task(cluster.complete("one"))]
        while sum(len(i.received) for i in cluster.instances if i.role == "generation") < 1:
            await asyncio.sleep(0.005)
        running.append(asyncio.create_task(cluster.complete("two, which is longer")))
        while sum(len(i.received) for i in cluster.instances if i.role == "generation") < 2:
            await asyncio.sleep(0.005)
        choices = [d for d in (await shown(cluster)).decisions if d.role == "generation"]
        gate.set()
        await asyncio.gather(*running)
        assert len({d.owner_id for d in choices}) == 2
        assert {d.why for d in choices} == {"least loaded of 2"}
        assert [(d.load_weight, d.load_requests) for d in choices] == [(0, 0), (0, 0)]
        again = [asyncio.create_task(cluster.complete("three")) for _ in range(3)]
        await asyncio.gather(*again)
        await cluster.settled()


async def test_only_as_many_as_asked_for_and_never_more_than_the_bound(make_cluster) -> None:
    """``limit`` counts decisions of each place; what is out of range is refused with the field."""
    async with make_cluster() as cluster:
        for _ in range(3):
            await cluster.complete(max_tokens=2)
        routing = await shown(cluster, limit=2)
        assert routing.decided == 6
        assert len(routing.decisions) == 2 and [len(i.decisions) for i in routing.instances] == [2, 2]
        for wrong in ("0", "257", "-1", "x"):
            refused = await cluster.client.get(f"{cluster.url}/debug/routing", params={"limit": wrong})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "limit"
        await cluster.settled()


async def test_an_instance_that_cannot_be_asked_is_named_and_the_rest_is_shown(make_cluster) -> None:
    """One answers nonsense, one is gone: each is in ``unknown`` with why; the front's own choices stay."""
    async with make_cluster() as cluster:
        await cluster.complete(max_tokens=2)
        cluster.context.routing_broken = True
        await cluster.servers.stop(cluster.generation.url)
        routing = await shown(cluster)
        assert len(routing.decisions) == 2 and routing.instances == []
        assert routing.unknown["ctx-0"].startswith("MALFORMED: ")
        assert routing.unknown["gen-0"].startswith("UNREACHABLE: ")
        await cluster.settled()


async def test_a_server_that_could_not_be_reached_is_named_in_the_next_choice(make_cluster) -> None:
    """The first pick is gone: the second choice says why the other one got the leg."""
    async with make_cluster(contexts=2) as cluster:
        gone = next(i for i in cluster.instances if i.role == "context")
        await cluster.servers.stop(gone.url)
        for _ in range(2):
            assert (await cluster.complete(max_tokens=2)).status_code == 200
        whys = [d.why for d in (await shown(cluster)).decisions if d.role == "context"]
        assert any(why == f"the only one that can be picked; {gone.owner_id} could not be reached" for why in whys), (
            whys
        )
        await cluster.settled()


async def test_instances_of_several_runs_may_call_themselves_the_same(make_cluster) -> None:
    """Two of each role, each the first of its own run: all are used, and are told apart by the names that they have here."""
    turns = FrontRouterConfig(type="round_robin")
    async with make_cluster(
        contexts=2, generations=2, elsewhere=True, context_router=turns, generation_router=turns
    ) as cluster:
        for _ in range(4):
            assert (await cluster.complete()).status_code == 200
        assert [len(instance.received) for instance in cluster.instances] == [2, 2, 2, 2]
        routing = await shown(cluster)
        assert {d.owner_id for d in routing.decisions} == {"ctx-0", "ctx-1", "gen-0", "gen-1"}
        assert [i.owner_id for i in routing.instances] == ["ctx-0", "ctx-1", "gen-0", "gen-1"]
        assert [len(i.decisions) for i in routing.instances] == [2, 2, 2, 2]
        await cluster.settled()


async def test_an_instance_of_this_run_must_have_its_name(make_cluster) -> None:
    """An answer of another slot at its address is not believed."""
    async with make_cluster(prepare=False) as cluster:
        cluster.context.owner_id = "ctx-7"
        await cluster.service.directory.prepare()
        assert not cluster.service.can_serve()


@pytest.mark.parametrize("node_id", [0, 1023])
async def test_a_front_makes_the_ids_of_its_own_node(make_cluster, node_id) -> None:
    """Two fronts that ask the same instances never give one id to two requests: the node is a part of it."""
    async with make_cluster(node_id=node_id) as cluster:
        assert (await cluster.complete("Say hello", max_tokens=2)).status_code == 200
        assert split_request_id(cluster.context.received[0].request_id)[1] == node_id
        await cluster.settled()
