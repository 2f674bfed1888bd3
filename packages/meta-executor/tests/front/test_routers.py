"""Each policy against its own words, alone and through the front with several instances."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from endpoint_lifecycle import PickRequest
from meta_executor.config import FrontRouterConfig
from meta_executor.engine.base import SamplingParams
from meta_executor.executor.request import Request
from meta_executor.front import routers as routing
from meta_executor.front.routers import BlockNames, Hint, Routers, block_names


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


def hint_of(chosen: Routers, asked: Request) -> Hint:
    return asyncio.run(chosen.hint("context", asked, BlockNames()))


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
        return pick(chosen, servers, hint_of(chosen, request(tokens)))

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
    pick(chosen, [Server("a")], hint_of(chosen, request([1, 2, 3, 4, 5, 6])))
    assert policy.cached_blocks("a", hint_of(chosen, request([1, 2, 3, 4, 5, 6]))) == 4  # type: ignore[attr-defined]


@pytest.mark.asyncio
@pytest.mark.parametrize("tokens", [8, 9])
async def test_a_prompts_blocks_are_named_once_and_long_ones_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """For all its answers and legs, also where one of those that wait for it leaves."""
    monkeypatch.setattr(routing, "_NAMED_INLINE_TOKENS", 8)
    threads = []
    may_go_on = threading.Event()

    def noted(asked: Request, block_tokens: int) -> tuple[bytes, ...]:
        threads.append(threading.current_thread())
        if tokens > 8:
            may_go_on.wait(10)
        return block_names(asked, block_tokens)

    monkeypatch.setattr(routing, "block_names", noted)
    chosen = routers(type="kv_cache_aware", tokens_per_block=4)
    names, asked = BlockNames(), request(list(range(tokens)))
    first, *others = (asyncio.create_task(chosen.hint("context", asked, names)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first,))
    may_go_on.set()
    hints = [*await asyncio.gather(*others), await chosen.hint("generation", asked, names)]
    assert {hint.blocks for hint in hints} == {block_names(asked, 4)}
    (thread,) = threads
    assert (thread is threading.current_thread()) == (tokens == 8)
    # Another size of blocks has other names; who wants none has none made.
    assert len((await routers(type="kv_cache_aware", tokens_per_block=2).hint("context", asked, names)).blocks) == 4
    assert (await routers().hint("context", asked, names)).blocks == () and len(threads) == 2


def test_instances_that_have_left_are_forgotten() -> None:
    """Each start at another address would leave its blocks behind; what is used and some that may come back are kept."""
    chosen = routers(type="kv_cache_aware", tokens_per_block=1)
    policy, hint = chosen._policies["context"], hint_of(chosen, request([1, 2, 3]))
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
                name = pick(chosen, servers, hint_of(chosen, wanted))
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


class Oracle:
    """Each policy once more, as dumb as it can be: over the tokens themselves, with nothing forgotten."""

    def __init__(self, kind: str, block_tokens: int) -> None:
        self._kind = kind
        self._block_tokens = block_tokens
        self._turn = 0
        self._homes: dict[str, str] = {}
        self._sent: dict[str, list[list[int]]] = {}

    def pick(self, loads: dict[str, tuple[int, int]], tokens: list[int], conversation: str) -> str:
        """Loads: server to (tokens, requests), in the order in which they can be picked."""
        least = min(loads, key=lambda server: loads[server])
        if self._kind == "round_robin":
            least = list(loads)[self._turn % len(loads)]
            self._turn += 1
        elif self._kind == "conversation":
            least = self._homes.setdefault(conversation, least)
        elif self._kind == "kv_cache_aware":
            costs = {s: (loads[s][0] // 2 - self._found(s, tokens), loads[s]) for s in loads}
            least = min(costs, key=lambda server: costs[server])
            self._sent.setdefault(least, []).append(tokens)
        return least

    def _found(self, server: str, tokens: list[int]) -> int:
        whole = [
            count
            for count in range(0, len(tokens) + 1, self._block_tokens)
            for other in self._sent.get(server, [])
            if other[:count] == tokens[:count]
        ]
        return max(whole, default=0)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["round_robin", "load_balancing", "conversation", "kv_cache_aware"])
async def test_every_decision_under_load_is_the_rules(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Ninety requests, twenty-four at a time, three instances of each role: each choice is what an oracle makes from the
    loads of its moment; and the loads were unlike."""
    picked: list[tuple[str, int, dict[str, tuple[int, int]], str]] = []
    pick = Routers.pick

    def noted(self: Routers, candidates: Any, asked: PickRequest) -> Any:
        loads = {one.server: (one.weight, one.count) for one in candidates}
        found = pick(self, candidates, asked)
        picked.append((asked.role, asked.request_id, loads, found.server))
        return found

    monkeypatch.setattr(Routers, "pick", noted)
    router = FrontRouterConfig(type=kind, tokens_per_block=8)
    chance = random.Random(kind)
    async with make_cluster(contexts=3, generations=3, context_router=router, generation_router=router) as cluster:
        slots = asyncio.Semaphore(24)

        async def one(number: int) -> None:
            family = number % 5
            prompt = "abcde"[family] * chance.randrange(8, 120) + "xyz" * chance.randrange(8)
            async with slots:
                asked = cluster.complete(prompt, conversation_id=f"c{number % 11}", max_tokens=chance.randrange(1, 30))
                assert (await asked).status_code == 200

        await asyncio.gather(*(one(number) for number in range(90)))
        await cluster.settled()
        bodies = {(i.role, b.request_id): b for i in cluster.instances for b in i.received}
    for role in ("context", "generation"):
        oracle = Oracle(kind, 8)
        mine = [one for one in picked if one[0] == role]
        assert len(mine) > 60
        for _, request_id, loads, server in mine:
            body = bodies[role, request_id]
            assert server == oracle.pick(loads, body.token_ids, body.conversation_id), (role, loads)
        assert len({server for *_, server in mine}) == 3
        assert sum(len(set(loads.values())) > 1 for _, _, loads, _ in mine) > 20


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


@pytest.mark.asyncio
async def test_a_prompts_blocks_are_named_once_for_all_its_answers(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both legs; of each prompt on its own, and each client's own."""
    made = []

    def noted(asked: Request, block_tokens: int) -> tuple[bytes, ...]:
        made.append(asked.prompt_count)
        return block_names(asked, block_tokens)

    monkeypatch.setattr(routing, "block_names", noted)
    aware = FrontRouterConfig(type="kv_cache_aware", tokens_per_block=8)
    async with make_cluster(context_router=aware, generation_router=aware) as cluster:
        assert (await cluster.complete(["a" * 20, "b" * 30], n=3)).status_code == 200
        assert sorted(made) == [20, 30]
        await cluster.settled()


@pytest.mark.asyncio
async def test_how_long_a_leg_waits_for_an_instance_is_configured(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each leg, and never longer than its request has."""
    waits: list[float] = []

    async def waited(**config: float) -> list[float]:
        async with make_cluster(**config) as cluster:
            reserve = cluster.service.directory.reserve

            def noted(*arguments: Any, timeout_s: float, **more: Any) -> Any:
                waits.append(timeout_s)
                return reserve(*arguments, timeout_s=timeout_s, **more)

            monkeypatch.setattr(cluster.service.directory, "reserve", noted)
            assert (await cluster.complete()).status_code == 200
        told, waits[:] = waits[:], []
        return told

    assert await waited(instance_wait_s=7.5, request_timeout_s=30.0) == [7.5, 7.5]
    assert all(wait_s <= 30.0 for wait_s in await waited(instance_wait_s=90.0, request_timeout_s=30.0))
