"""What each front router does with conversations at two context and two generation instances: the share of prompt tokens that a
prefix cache had, as ``/metrics`` counts it, and where requests went, as ``/debug/routing`` tells it.

A whole service on the synthetic engine for each policy in turn. ``CONVERSATIONS`` conversations of ``TURNS`` turns, in an order
that is drawn anew for each turn, ``AT_ONCE`` at a time; each turn's prompt is all that was said before and something new. One
context instance's KV pool holds about half of all that is said. Counts and ratios of counts: nothing here depends on the
machine's speed but the order in which answers come. Each of ``ROUNDS`` rounds has conversations of its own, the same for
every policy. ``/metrics`` has to say what the clients counted.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import httpx

from measure import counted, ratio, run_benchmark, shown
from meta_executor.config import service_config
from meta_executor.supervise.launch import Launcher

CONVERSATIONS = int(os.environ.get("CONVERSATIONS", "20"))
TURNS = int(os.environ.get("TURNS", "6"))
AT_ONCE = int(os.environ.get("AT_ONCE", "6"))
ROUNDS = int(os.environ.get("ROUNDS", "11"))
POLICIES = ("round_robin", "load_balancing", "kv_cache_aware", "conversation")
BLOCK_TOKENS, FIRST_TOKENS, NEW_TOKENS, ANSWER_TOKENS = 16, 96, 32, 16
VOCABULARY = 4096
#: What one conversation has at its end (tokens).
WHOLE_TOKENS = FIRST_TOKENS + TURNS * (NEW_TOKENS + ANSWER_TOKENS)
#: kv_cache_aware finds more than round_robin.
GOAL = "> 1"


@dataclass(frozen=True)
class Round:
    """What one policy did with one set of conversations.

    Attributes:
        hit_share: Of all prompt tokens, those found in a prefix cache.
        findable_share: Those of whole blocks that had been said before.
        homes: Instances that a conversation was at, by role: the mean.
        busiest_share: Of the requests, those of the busier of two context instances.
    """

    hit_share: float
    findable_share: float
    homes: dict[str, float]
    busiest_share: float


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """The sum of one of the front's counters."""
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


async def converse(url: str, key: dict[str, str], seed: int) -> Round:
    """One round."""
    chance = random.Random(seed)
    histories = [[chance.randrange(3, VOCABULARY) for _ in range(FIRST_TOKENS)] for _ in range(CONVERSATIONS)]
    slots = asyncio.Semaphore(AT_ONCE)
    findable = counted_prompt = counted_cached = 0
    answers: dict[str, int] = {}
    async with httpx.AsyncClient(base_url=url, headers=key, timeout=120, trust_env=False) as client:
        before = [await metric(client, f"trtllm_{name}_total") for name in ("prompt_tokens", "cached_prompt_tokens")]

        async def turn(place: int) -> None:
            nonlocal counted_prompt, counted_cached
            history = histories[place]
            body = {
                "model": "synthetic", "prompt": history, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, "conversation_id": f"c{seed}-{place}",
            }  # fmt: skip
            async with slots:
                answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
            history += answer["choices"][0]["token_ids"]
            answers[answer["id"].removeprefix("cmpl-")] = place
            counted_prompt += answer["usage"]["prompt_tokens"]
            counted_cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        for number in range(TURNS):
            said = [len(history) for history in histories]
            for history in histories:
                history += [chance.randrange(3, VOCABULARY) for _ in range(NEW_TOKENS)]
            if number:
                findable += sum(length // BLOCK_TOKENS * BLOCK_TOKENS for length in said)
            order = chance.sample(range(CONVERSATIONS), CONVERSATIONS)
            await asyncio.gather(*(turn(place) for place in order))
        after = [await metric(client, f"trtllm_{name}_total") for name in ("prompt_tokens", "cached_prompt_tokens")]
        prompt, cached = (int(more - less) for more, less in zip(after, before))
        if (prompt, cached) != (counted_prompt, counted_cached):
            raise SystemExit(
                f"/metrics says {prompt} and {cached} tokens, clients counted {counted_prompt} and {counted_cached}"
            )
        routing: dict[str, Any] = (await client.get("/debug/routing?limit=256")).raise_for_status().json()
    homes: dict[str, dict[int, set[str]]] = {"context": defaultdict(set), "generation": defaultdict(set)}
    served: dict[str, int] = defaultdict(int)
    for one in routing["decisions"]:
        place = answers.get(f"{one['request_id']:x}")
        if place is not None:
            homes[one["role"]][place].add(one["owner_id"])
            served[one["owner_id"]] += one["role"] == "context"
    return Round(
        cached / prompt,
        findable / prompt,
        {role: statistics.mean(len(places) for places in found.values()) for role, found in homes.items()},
        max(served.values()) / sum(served.values()),
    )


def rounds_of(policy: str) -> list[Round]:
    """A service with this policy for both roles, and its rounds."""
    side = {
        "num_instances": 2,
        "max_batch_size": 8,
        "kv_cache_config": {
            "tokens_per_block": BLOCK_TOKENS,
            "max_tokens": CONVERSATIONS * WHOLE_TOKENS // 2 + AT_ONCE * WHOLE_TOKENS // 2,
            "enable_block_reuse": True,
        },
    }
    router = {"type": policy, "tokens_per_block": BLOCK_TOKENS}
    service = service_config(
        {
            "port": 0,
            "engine": {"kind": "synthetic", "synthetic": {"vocab_size": VOCABULARY, "step_ms": 1, "kv_check": "off"}},
            "context_servers": {"pipeline_parallel_size": 1, **side},
            "generation_servers": {"tensor_parallel_size": 1, "enable_attention_dp": True, **side},
            "front": {"context_router": router, "generation_router": router},
        }
    )
    launcher = Launcher(service, say=lambda line: print(f"{policy}: {line}", file=sys.stderr))
    with launcher.started():
        return [asyncio.run(converse(launcher.front_url, launcher.key_header, seed)) for seed in range(ROUNDS)]


def routers() -> list[dict[str, Any]]:
    """Each policy in turn; a table, then the figures."""
    if 2 * CONVERSATIONS * TURNS > 256:
        raise SystemExit("a front keeps its last 256 decisions: fewer conversations or turns, please")
    found = {policy: rounds_of(policy) for policy in POLICIES}
    shares = {policy: [one.hit_share for one in rounds] for policy, rounds in found.items()}
    print(
        f"{'':16} {'hit share':>10} {'lowest':>8} {'highest':>8} {'findable':>9} {'homes ctx':>10} {'gen':>6} {'busiest':>8}"
    )
    for policy, rounds in found.items():
        hits = shares[policy]
        print(
            f"{policy:16} {statistics.median(hits):10.3f} {min(hits):8.3f} {max(hits):8.3f} {rounds[0].findable_share:9.3f} "
            f"{statistics.mean(one.homes['context'] for one in rounds):10.2f} "
            f"{statistics.mean(one.homes['generation'] for one in rounds):6.2f} "
            f"{statistics.mean(one.busiest_share for one in rounds):8.2f}"
        )
    aware, in_turn = shares["kv_cache_aware"], shares["round_robin"]
    homes = max(home for one in found["conversation"] for home in one.homes.values())
    return [
        ratio("prefix_hits_kv_cache_aware", aware, in_turn, unit="%", scale=100, goal=GOAL, against="round_robin"),
        shown("prefix_hits_load_balancing", shares["load_balancing"], unit="%", scale=100),
        shown("prefix_hits_conversation", shares["conversation"], unit="%", scale=100),
        counted("homes_of_a_conversation", math.ceil(homes), "instances", "<= 1"),
    ]


if __name__ == "__main__":
    run_benchmark(routers)
