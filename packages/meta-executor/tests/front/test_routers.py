"""Each policy against its own words, alone and through the front with several instances."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from endpoint_lifecycle import PickRequest
from meta_executor.config import FrontRouterConfig
from meta_executor.engine.base import SamplingParams
from meta_executor.executor.request import Request
from meta_executor.front.routers import Hint, Routers, block_names


@dataclass
class Server:
    """A candidate as the directory shows one."""

    server: str
    weight: int = 0
    count: int = 0


def routers(**config: Any) -> Routers:
    one = FrontRouterConfig(**config)
    return Routers(one, one)


def pick(chosen: Routers, servers: list[Server], hint: Hint | None = None) -> str:
    question = PickRequest(role="context", request_id=1, weight=1, affinity=hint)
    return chosen.pick(servers, question).server  # type: ignore[arg-type]


def request(tokens: list[int], *, salt: str = "", conversation: str | None = None) -> Request:
    return Request(
        request_id=1, token_ids=np.array(tokens, np.int32), sampling=SamplingParams(1), cache_salt=salt,
        conversation_id=conversation,
    )  # fmt: skip


def test_in_turn_whatever_the_load() -> None:
    """Each once before any twice."""
    chosen = routers(type="round_robin")
    servers = [Server("a", 900, 9), Server("b"), Server("c", 5, 1)]
    assert [pick(chosen, servers) for _ in range(7)] == ["a", "b", "c", "a", "b", "c", "a"]


def test_the_least_loaded_by_tokens_or_by_requests() -> None:
    """The other one decides among equals."""
    servers = [Server("a", 100, 1), Server("b", 50, 3), Server("c", 50, 2)]
    assert pick(routers(), servers) == "c"
    assert pick(routers(use_tokens=False), servers) == "a"


def test_a_conversation_sticks_and_moves_only_when_its_home_is_gone() -> None:
    """However loaded its home is; the longest silent is forgotten first."""
    chosen = routers(type="conversation", remembered_max=2)
    servers = [Server("a"), Server("b")]
    assert pick(chosen, servers, Hint(conversation="x")) == "a"
    servers[0].weight = 500
    assert [pick(chosen, servers, Hint(conversation=name)) for name in ("x", "y", "x", "")] == ["a", "b", "a", "b"]
    assert pick(chosen, servers[1:], Hint(conversation="x")) == "b"
    assert pick(chosen, servers, Hint(conversation="x")) == "b"
    servers[1].weight = 900
    # A third takes the place of y, which was silent longest, not of x, which is older; two more take that of x.
    assert [pick(chosen, servers, Hint(conversation=name)) for name in "zxwvx"] == ["a", "b", "a", "a", "a"]


def test_most_of_the_prompt_cached_less_what_is_ahead() -> None:
    """Tokens against half of the tokens ahead: a long prefix outweighs a short queue, and a long queue a short prefix."""
    chosen = routers(type="kv_cache_aware", tokens_per_block=4)
    servers = [Server("a"), Server("b")]

    def asked(tokens: list[int]) -> str:
        return pick(chosen, servers, chosen.hint("context", request(tokens)))

    prefix = list(range(100, 140))
    assert asked([*prefix, 1, 2, 3]) == "a"
    servers[0].weight = 70
    assert asked([*prefix, 9, 9, 9]) == "a"  # 40 tokens are there, half of 70 are ahead
    servers[0].weight = 90
    assert asked([*prefix, 7, 7, 7]) == "b"  # and now half of 90
    servers[0].weight = 0
    assert asked([5] * 30) == "a"
    assert asked([0, *prefix]) == "a"  # the same tokens elsewhere are no prefix
    servers[1].weight = 2
    assert asked([6] * 3) == "a"  # less than a block: the load decides


def test_prefixes_are_named_by_all_before_them_and_by_who_may_share_them() -> None:
    """Equal beginnings have equal names, whole blocks only; another salt has others; what was used last is kept."""
    one, two = block_names(request([1, 2, 3, 4, 5]), 2), block_names(request([1, 2, 3, 9, 5]), 2)
    assert len(one) == 2 and one[0] == two[0] and one[1] != two[1]
    assert block_names(request([3, 4]), 2)[0] not in one
    assert not set(one) & set(block_names(request([1, 2, 3, 4], salt="s"), 2))
    chosen = routers(type="kv_cache_aware", tokens_per_block=1, remembered_max=4)
    policy = chosen._policies["context"]
    pick(chosen, [Server("a")], chosen.hint("context", request([1, 2, 3, 4, 5, 6])))
    assert policy.cached_blocks("a", chosen.hint("context", request([1, 2, 3, 4, 5, 6]))) == 4  # type: ignore[attr-defined]


def test_instances_that_have_left_are_forgotten() -> None:
    """Each start at another address would leave its blocks behind; what is used and some that may come back are kept."""
    chosen = routers(type="kv_cache_aware", tokens_per_block=1)
    policy, hint = chosen._policies["context"], chosen.hint("context", request([1, 2, 3]))
    for start in range(20):
        assert policy.cached_blocks("stays", hint) == (3 if start else 0)  # type: ignore[attr-defined]
        pick(chosen, [Server("stays")], hint)
        pick(chosen, [Server(f"start {start}")], hint)
    known = [name for name in ("stays", *(f"start {start}" for start in range(20))) if policy.cached_blocks(name, hint)]  # type: ignore[attr-defined]
    assert known == ["stays", *(f"start {start}" for start in range(12, 20))]


def test_prefix_hits_against_the_least_loaded() -> None:
    """Forty conversations of eight turns at four instances, the same load for both policies: of the
    blocks that could be found nearly all are, by load alone far fewer."""

    def hit_share(kind: str) -> float:
        chance = random.Random(5)
        chosen = routers(type=kind, tokens_per_block=16)
        cached: dict[str, set[bytes]] = {name: set() for name in "abcd"}
        histories = [[chance.randrange(1000) for _ in range(64)] for _ in range(40)]
        hits = asked = 0
        running: list[tuple[Server, int]] = []
        servers = [Server(name) for name in "abcd"]
        for turn in range(8):
            for history in chance.sample(histories, len(histories)):
                history += [chance.randrange(1000) for _ in range(32)]
                wanted = request(history)
                names = block_names(wanted, 16)
                name = pick(chosen, servers, chosen.hint("context", wanted))
                server = next(one for one in servers if one.server == name)
                if turn:
                    asked += len(names)
                    hits += sum(block in cached[name] for block in names)
                cached[name].update(names)
                server.weight += len(history)
                running.append((server, len(history)))
                if len(running) > 6:
                    ended, weight = running.pop(0)
                    ended.weight -= weight
        return hits / asked

    aware, balanced = hit_share("kv_cache_aware"), hit_share("load_balancing")
    assert aware > balanced * 1.3, (aware, balanced)


# -- through the front --------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_two_of_each_role_take_turns(make_cluster: Any) -> None:
    """The rule is each role's own, and is told with each decision."""
    async with make_cluster(contexts=2, generations=2, context_router=FrontRouterConfig(type="round_robin")) as cluster:
        for _ in range(6):
            assert (await cluster.complete()).status_code == 200
        served = Counter({i.owner_id: len(i.received) for i in cluster.instances})
        assert (served["ctx-0"], served["ctx-1"]) == (3, 3)
        routing = (await cluster.client.get(f"{cluster.url}/debug/routing")).json()
        assert routing["policy"] == "round_robin and load_balancing"
        whys = {one["role"]: one["why"] for one in routing["decisions"]}
        assert whys == {"context": "next in turn of 2", "generation": "least loaded of 2"}
        await cluster.settled()


@pytest.mark.asyncio
async def test_conversations_stick_under_load(make_cluster: Any) -> None:
    """Many at once, several turns each: every conversation has one context and one generation instance; all are used."""
    sticky = FrontRouterConfig(type="conversation")
    async with make_cluster(contexts=2, generations=2, context_router=sticky, generation_router=sticky) as cluster:

        async def talk(name: str) -> None:
            for _ in range(4):
                assert (await cluster.complete(conversation_id=name, max_tokens=3)).status_code == 200

        await asyncio.gather(*(talk(f"c{index}") for index in range(12)))
        for role in ("context", "generation"):
            homes: dict[str, set[str]] = {}
            for instance in cluster.instances:
                if instance.role == role:
                    assert instance.received
                    for body in instance.received:
                        homes.setdefault(body.conversation_id, set()).add(instance.owner_id)
            assert len(homes) == 12 and all(len(places) == 1 for places in homes.values())
        await cluster.settled()


@pytest.mark.asyncio
async def test_prompts_go_where_their_beginning_is(make_cluster: Any) -> None:
    """Two families of prompts, alternating: each family stays at the instance that has its beginning."""
    aware = FrontRouterConfig(type="kv_cache_aware", tokens_per_block=8)
    async with make_cluster(contexts=2, context_router=aware) as cluster:
        families = ["a" * 64, "b" * 64]
        gate = cluster.instances[0].gate = asyncio.Event()
        first = asyncio.create_task(cluster.complete(families[0]))
        await cluster.instances[0].started.wait()
        assert (await cluster.complete(families[1])).status_code == 200  # the other one has the load
        gate.set()
        await first
        for turn in range(8):
            await cluster.complete(families[turn % 2] + f" and {turn}", max_tokens=2)
        for instance in cluster.instances[:2]:
            assert len({body.token_ids[0] for body in instance.received}) == 1
            assert len(instance.received) == 5
        await cluster.settled()
