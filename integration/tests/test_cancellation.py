"""Clients that leave at any moment, many prompts cancelled at once, one instance restarted again and again.

After each everything is given back: requests, reservations, KV blocks without a quarantine, descriptors, threads, memory.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from faults import Held, not_at_rest
from meta_executor.config import apply_environment, service_config
from meta_executor.supervise.launch import Launcher
from meta_executor.supervise.procfs import ProcessIdentity

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]

#: Requests at once (count).
AT_ONCE = 48
#: Of all requests, clients that leave (share).
LEAVE = 0.2
#: At rest everything is given back within this time (s).
REST_S = 30.0
#: What a process may hold more than after the first round: connections that stay open (count), what allocators keep (MiB).
DESCRIPTORS, THREADS, MEMORY_MIB = 8, 2, 24.0


def settings(run_dir: Path, style: str = "generation_first") -> dict[str, Any]:
    """Two stages, two ranks, without a model."""
    pool = {"tokens_per_block": 16, "max_tokens": 16384}
    agreement = {"enable_async_terminal_agreement": True, "enable_async_readiness_agreement": True}
    return {
        "port": 0,
        "run_dir": str(run_dir),
        "schedule_style": style,
        "engine": {"kind": "synthetic", "synthetic": {"step_ms": 4.0, "layer_count": 8, "context_tokens_max": 4096}},
        "context_servers": {
            "pipeline_parallel_size": 2,
            "max_num_tokens": 64,
            "kv_cache_config": pool,
            "cache_transceiver_config": agreement,
        },
        "generation_servers": {"tensor_parallel_size": 2, "enable_attention_dp": True, "kv_cache_config": pool},
    }


@pytest.fixture
def launcher(short_folder: Path) -> Iterator[Launcher]:
    """A running service."""
    made = Launcher(
        apply_environment(service_config(settings(short_folder / "c")), {}), say=lambda _line: None, restart="instance"
    )
    with made.started():
        yield made
    assert made.deaths == [] or made.restarts


def model_of(url: str) -> str:
    return httpx.get(f"{url}/v1/models", timeout=30, trust_env=False).json()["data"][0]["id"]


def serves(url: str, model: str) -> bool:
    """Whether a short request is answered: a front may take an instance for its predecessor for a moment."""
    body = {"model": model, "prompt": "serves", "max_tokens": 2}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200


def until(launcher: Launcher, condition: Callable[[], bool], limit_s: float, what: Callable[[], object]) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, what()
        launcher.turn(0.1)


def come_to_rest(launcher: Launcher) -> dict[str, Held]:
    """Wait until nothing is held; what each process holds then."""
    until(launcher, lambda: not list(not_at_rest(launcher)), REST_S, lambda: list(not_at_rest(launcher)))
    found = {name: Held.of(pid) for name, pid in launcher.processes().items() if name != "launcher"}
    return {name: held for name, held in found.items() if held is not None}


def check_held(first: dict[str, Held], last: dict[str, Held]) -> None:
    for name in first:
        assert last[name].descriptors <= first[name].descriptors + DESCRIPTORS, (name, first[name], last[name])
        assert last[name].threads <= first[name].threads + THREADS, (name, first[name], last[name])
        assert last[name].resident_mib <= first[name].resident_mib + MEMORY_MIB, (name, first[name], last[name])


class Round:
    """Requests of one round, some of whose clients leave; every other one's answer is checked."""

    def __init__(self, url: str, model: str, seed: int, count: int) -> None:
        self.url, self.model = url, model
        self.rng = random.Random(seed)
        self.left = list(range(count))
        self.outcomes: Counter[str] = Counter()
        self.first: dict[tuple[int, int], list[int]] = {}

    async def run(self) -> Counter[str]:
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(timeout=300.0, trust_env=False, limits=limits) as client:
            await asyncio.gather(*(self._client(client) for _ in range(AT_ONCE)))
        return self.outcomes

    async def _client(self, client: httpx.AsyncClient) -> None:
        while self.left:
            self.left.pop()
            key = self.rng.choice((2, 30, 130)), self.rng.choice((1, 3, 20, 40))
            leaves = self.rng.random() < LEAVE
            after_s = self.rng.choice((0.0, 0.01, 0.1, 0.4, 1.0)) if leaves else None
            after_tokens = self.rng.random() * key[1] if leaves else None
            try:
                async with asyncio.timeout(after_s):
                    self.outcomes[await self._one(client, key, after_tokens)] += 1
            except TimeoutError:
                self.outcomes["left"] += 1

    async def _one(self, client: httpx.AsyncClient, key: tuple[int, int], after_tokens: float | None) -> str:
        body = {
            "model": self.model, "prompt": [3 + (7 * i + key[0]) % 900 for i in range(key[0])], "max_tokens": key[1],
            "ignore_eos": True, "return_token_ids": True, "temperature": 0, "stream": True,
        }  # fmt: skip
        got: list[int] = []
        async with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code}: {(await answer.aread()).decode()[:200]}"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    if len(got) != key[1] or self.first.setdefault(key, got) != got:
                        return f"wrong: {key} {got}"
                    return "answered"
                if line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"error: {event['error']}"
                    for choice in event["choices"]:
                        got += choice.get("token_ids") or []
                    if after_tokens is not None and len(got) > after_tokens:
                        return "left"
        return "no end"


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_clients_that_leave_at_any_moment_cost_nobody_anything(launcher: Launcher, count: int) -> None:
    """A fifth leaves, in five rounds: who stays has the whole answer once, and after each round nothing is held."""
    url = launcher.front_url
    model = model_of(url)
    held: list[dict[str, Held]] = []
    for number in range(5):
        outcomes = asyncio.run(Round(url, model, number, count // 5).run())
        assert set(outcomes) <= {"answered", "left"}, outcomes
        assert sum(outcomes.values()) == count // 5
        assert outcomes["answered"] > 0.6 * count / 5
        held.append(come_to_rest(launcher))
    check_held(held[0], held[-1])


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_many_prompts_cancelled_four_times_over(launcher: Launcher, count: int) -> None:
    """All at once, long ones, each client gone before its first token; a probe is answered at once afterwards."""
    url = launcher.front_url
    model = model_of(url)
    prompt = [3 + i % 900 for i in range(400)]

    async def ask(client: httpx.AsyncClient, index: int) -> None:
        body = {"model": model, "prompt": [3 + index, *prompt], "max_tokens": 64, "stream": True, "ignore_eos": True}
        try:
            async with asyncio.timeout(0.3 + 0.002 * index):
                async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    async for _ in answer.aiter_lines():
                        pass
        except TimeoutError:
            pass

    async def all_at_once() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60.0, trust_env=False, limits=limits) as client:
            await asyncio.gather(*(ask(client, index) for index in range(count)))

    def probe() -> float:
        begun_s = time.monotonic()
        body = {"model": model, "prompt": "abc", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return time.monotonic() - begun_s

    alone_s = probe()
    for _ in range(4):
        asyncio.run(all_at_once())
        after_s = probe()
        print(f"a probe takes {after_s:.2f} s after {count} cancelled prompts, {alone_s:.2f} s alone")
        come_to_rest(launcher)


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["gen-0", "ctx-0"])
@pytest.mark.parametrize("times", [3, 20])
def test_restarts_of_one_instance_do_not_wear_the_other_away(launcher: Launcher, owner: str, times: int) -> None:
    """Killed in the middle of requests, again and again: blocks, agreements, descriptors and memory of the other as before."""
    url = launcher.front_url
    model = model_of(url)
    other = "ctx-0" if owner == "gen-0" else "gen-0"

    def survivors() -> dict[str, Held]:
        return {name: held for name, held in come_to_rest(launcher).items() if name.startswith(other)}

    held = []
    for number in range(times + 1):
        outcomes = asyncio.run(Round(url, model, number, 24).run())
        assert set(outcomes) <= {"answered", "left"}, outcomes
        held.append(survivors())
        if number == times:
            break
        restarts = launcher.restarts
        running = asyncio.run(killed_meanwhile(launcher, owner, Round(url, model, 100 + number, 24)))
        assert "no end" not in running and not any(word.startswith("wrong") for word in running), running
        until(launcher, lambda r=restarts: launcher.restarts > r, 30, lambda: launcher.deaths)  # type: ignore[misc]
        until(
            launcher,
            lambda: httpx.get(f"{url}/health", timeout=10, trust_env=False).status_code == 200 and serves(url, model),
            90,
            lambda: launcher.deaths,
        )
    check_held(held[1], held[-1])


async def killed_meanwhile(launcher: Launcher, owner: str, requests: Round) -> Counter[str]:
    """A rank is killed while requests run; what became of them."""
    running = asyncio.create_task(requests.run())
    await asyncio.sleep(0.2)
    victim = ProcessIdentity.of(launcher.processes()[f"{owner}/rank0"])
    assert victim is not None and victim.kill()
    while not running.done():
        launcher.turn(0.02)
        await asyncio.sleep(0.02)
    return await running
