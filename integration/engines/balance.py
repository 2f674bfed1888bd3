"""Requests over data-parallel engines: adp-router beside round robin, the same requests at the same times.

    python balance.py [--engines 4] [--requests 600] [--load 0.8]

The engines are stand-ins in virtual time: each batches continuously, reads prompts in pieces, and a step costs what is in it.
So the figures are the same on every machine. ``Balancer`` is what a front writes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from adp_router import RankBooks, RankState, Router, RouteRequest
from endpoint_lifecycle.testing import run_virtual

POLICIES = ("balanced", "round_robin")


# -- the glue --------------------------------------------------------------------------------------------------------------


class Balancer:
    """Places requests on engines, and keeps those that find no slot, in order, until one is free.

    Args:
        slots: Requests that each engine serves at once (count).
        policy: One of adp-router's.
    """

    def __init__(self, slots: Sequence[int], policy: str) -> None:
        self._books = RankBooks([RankState(rank, total_slots=count) for rank, count in enumerate(slots)])
        self._router = Router(policy)  # type: ignore[arg-type]
        self._waiting: dict[int, tuple[RouteRequest, asyncio.Future[int]]] = {}

    def states(self) -> tuple[RankState, ...]:
        """What the engines hold."""
        return self._books.states()

    def offer(self, request: RouteRequest) -> int | None:
        """The engine of one request, or None."""
        return self._route([request]).get(request.request_id)

    def ended(self, request_id: int) -> None:
        """A request that had an engine has ended, in whatever way."""
        self._books.ended(request_id)

    @contextlib.asynccontextmanager
    async def engine_for(self, request_id: int, token_count: int) -> AsyncIterator[int]:
        """Number of the engine that is to serve a request; waits for a slot.

        Raises:
            ValueError: The request cannot be placed on any engine, its id or count is of no use, or its id is taken; says why.
        """
        if request_id in self._waiting:
            raise ValueError(f"request_id: {request_id} waits already")
        placed = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = (RouteRequest(request_id, token_count), placed)
        try:
            self._offer_waiting()
            yield await placed
        finally:
            self._waiting.pop(request_id, None)
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                self.ended(request_id)
                self._offer_waiting()

    def _offer_waiting(self) -> None:
        # Who went away in this very turn is passed over: those behind it would not hear of a slot that it was given.
        waiting = [request for request, placed in self._waiting.values() if not placed.cancelled()]
        for request_id, rank in self._route(waiting).items():
            self._waiting.pop(request_id)[1].set_result(rank)

    def _route(self, requests: list[RouteRequest]) -> dict[int, int]:
        result = self._books.route(self._router, requests)
        for error in result.errors:
            self._waiting.pop(error.request_id)[1].set_exception(ValueError(f"{error.field}: {error.message}"))
        for request_id, (request, placed) in self._waiting.items():
            self._waiting[request_id] = (replace(request, waited_rounds=request.waited_rounds + 1), placed)
        return {request_id: rank for rank, ids in result.assignments.items() for request_id in ids}


# -- stand-in engines ------------------------------------------------------------------------------------------------------


@dataclass
class Sequence_:
    unread: int
    left: int
    first: asyncio.Future[None]
    done: asyncio.Future[None]
    context: int = 0


@dataclass
class Engine:
    """Continuous batching: one token of each running sequence per step, and as much of the prompts as a step has room for."""

    step_tokens_max: int = 512
    running: list[Sequence_] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        while True:
            if not self.running:
                self.wake.clear()
                await self.wake.wait()
            decoding = [s for s in self.running if not s.unread]
            room = self.step_tokens_max - len(decoding)
            finished_reading = []
            for sequence in self.running:
                piece = min(room, sequence.unread)
                sequence.unread -= piece
                sequence.context += piece
                room -= piece
                if piece and not sequence.unread:
                    finished_reading.append(sequence)
            tokens = self.step_tokens_max - room
            context = sum(s.context for s in self.running)
            await asyncio.sleep(0.004 + 40e-6 * tokens + 0.2e-6 * context)  # weights, arithmetic, caches read
            for sequence in decoding + finished_reading:
                sequence.context += 1
                sequence.left -= 1
                if not sequence.first.done():
                    sequence.first.set_result(None)
                if not sequence.left:
                    self.running.remove(sequence)
                    sequence.done.set_result(None)

    def add(self, prompt_count: int, count: int) -> Sequence_:
        loop = asyncio.get_running_loop()
        sequence = Sequence_(prompt_count, count, loop.create_future(), loop.create_future())
        self.running.append(sequence)
        self.wake.set()
        return sequence


@dataclass(frozen=True)
class Asked:
    """One request of the trace."""

    at_s: float
    prompt_count: int
    count: int


def trace(engines: int, requests: int, load: float, seed: int) -> list[Asked]:
    """Poisson arrivals of lognormal prompts and exponential answers."""
    draw = random.Random(seed)
    found, at_s = [], 0.0
    for _ in range(requests):
        prompt, count = min(8000, int(draw.lognormvariate(5.5, 1.3)) + 1), min(512, int(draw.expovariate(1 / 64)) + 1)
        at_s += draw.expovariate(engines * load * 25.0)  # an engine serves about so many of these in a second
        found.append(Asked(at_s, prompt, count))
    return found


async def replay(asked: list[Asked], policy: str, engine_count: int, slots: int) -> dict[str, float]:
    """Seconds to first token and to the end, and how uneven the engines were."""
    engines = [Engine() for _ in range(engine_count)]
    loops = [asyncio.create_task(engine.run()) for engine in engines]
    balancer = Balancer([slots] * engine_count, policy)
    clock = asyncio.get_running_loop().time
    began_s, firsts, ends, uneven = clock(), [], [], []

    async def one(request_id: int, request: Asked) -> None:
        await asyncio.sleep(began_s + request.at_s - clock())
        async with balancer.engine_for(request_id, request.prompt_count) as rank:
            loads = [state.token_count for state in balancer.states()]
            uneven.append(max(loads) * len(loads) / sum(loads))
            sequence = engines[rank].add(request.prompt_count, request.count)
            await sequence.first
            firsts.append(clock() - began_s - request.at_s)
            await sequence.done
            ends.append(clock() - began_s - request.at_s)

    await asyncio.gather(*(one(number, request) for number, request in enumerate(asked)))
    for task in loops:
        task.cancel()
    firsts.sort()
    ends.sort()
    return {
        "first token, median (s)": firsts[len(firsts) // 2],
        "first token, 99 % (s)": firsts[len(firsts) * 99 // 100],
        "answer, median (s)": ends[len(ends) // 2],
        "answer, 99 % (s)": ends[len(ends) * 99 // 100],
        "fullest over mean load": sum(uneven) / len(uneven),
    }


def compare(engines: int, requests: int, load: float, slots: int, seeds: Sequence[int]) -> dict[str, list[list[float]]]:
    """Each figure of each policy, by seed."""
    found: dict[str, list[list[float]]] = {}
    for seed in seeds:
        asked = trace(engines, requests, load, seed)
        for number, policy in enumerate(POLICIES):
            for name, value in run_virtual(replay(asked, policy, engines, slots)).items():
                found.setdefault(name, [[] for _ in POLICIES])[number].append(value)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--load", type=float, default=0.8, help="of what the engines can serve")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    found = compare(given.engines, given.requests, given.load, given.slots, range(given.seeds))
    print(f"{'':26}{'balanced':>20}{'round robin':>20}{'ratio by seed':>18}")
    for name, (mine, other) in found.items():
        ratios = [a / b for a, b in zip(mine, other)]
        spans = [f"{min(v):.3f}–{max(v):.3f}" for v in (mine, other, ratios)]
        print(f"{name:26}{spans[0]:>20}{spans[1]:>20}{spans[2]:>18}")


if __name__ == "__main__":
    main()
