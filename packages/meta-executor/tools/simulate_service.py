# ruff: noqa: T201
"""The whole service in one process under a simulated clock, network and faults; what a seed does, it does again.

The real parts: the front's dispatch, directory, routers, legs, streams and batchers; the service and the endpoint of each
instance; every rank's loop, desk, transceivers, sessions and agreement; an engine that reads every byte of KV. The simulated
ones: time (an event loop that jumps to its next timer), the wires between front, instances and ranks, the fabric that moves
KV, processes and their ends. A seed decides on shapes, requests, delays and faults: clients that leave, ranks that stand
still, control links that break, KV that arrives late, instances that die and come back as another lifetime at the same address.

At the end everything is healed, and then every client has been told once and rightly or with an error, every block is back, no
reservation, request, task or agreement is open anywhere, and every instance drains with the proof of all its ranks.

    python packages/meta-executor/tools/simulate_service.py --count 1000            # seeds 0 to 999
    python packages/meta-executor/tools/simulate_service.py --seed 17 --trace       # one again, with what happened
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from simulation import Violation
from simulation.clock import SimulatedLoop
from simulation.engine import SimulatedEngine
from simulation.site import Site
from simulation.wires import Http, Worker

from endpoint_lifecycle import EndpointError
from meta_executor.config import FrontRouterConfig, HttpConfig
from meta_executor.engine.base import SamplingParams, StageSpec
from meta_executor.executor.request import Request
from meta_executor.executor.testing import reference_tokens
from meta_executor.front.dispatch import Dispatch, Job
from meta_executor.front.leg import LegError
from meta_executor.front.legs import LegClient
from meta_executor.front.metrics import FrontMetrics
from meta_executor.front.routers import Routers
from meta_executor.front.servers import FrontServer, make_directory
from meta_executor.listener.bounds import Ledger

#: After the last client was told, everything must be at rest within this time (s).
REST_S = 60.0
#: A request's own limit (s): whatever happens, a client is told before.
REQUEST_S = 20.0
#: Healed, the service answers again within this time (s).
AGAIN_S = 10.0


@dataclass
class Told:
    """What one client was told."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""


class Simulation(Site):
    """Clients and faults of one seed, and what must hold at its end."""

    def __init__(self, seed: int, say: Callable[[str], object]) -> None:
        super().__init__(seed, say)
        self._expected: dict[tuple[tuple[int, ...], int], list[int]] = {}

    # -- faults

    async def misfortune(self) -> None:
        """The seed's faults, one after the other."""
        chance = self.chance
        for _ in range(self.shape.faults):
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            living = [instance for instance in self.everyone if instance.alive]
            if not living:
                continue
            instance = chance.choice(living)
            kind = chance.choice(("stands still", "link", "dies", "dies"))
            self.counts[kind] += 1
            if kind == "stands still":
                rank, for_s = chance.choice(instance.ranks), chance.choice((0.05, 0.5, 2.5))
                self.tell(f"{rank.process} stands still for {for_s:g} s")
                rank.stands_until_s = self.now_s() + for_s
            elif kind == "link":
                context, generation = (
                    chance.choice([r for i in living if i.role == role for r in i.ranks] or instance.ranks)
                    for role in ("context", "generation")
                )
                if context.peer.instance == generation.peer.instance:
                    continue
                for_s = chance.choice((0.01, 0.5, 2.0))
                self.tell(f"the link {context.process} - {generation.process} breaks for {for_s:g} s")
                self.sever(context.peer, generation.peer)
                self.after(for_s, lambda a=context.peer, b=generation.peer: self.heal(a, b))
            else:
                instance.die()
                await asyncio.sleep(chance.uniform(0.0, 0.5))
                again = self.begin(instance.owner_id, instance.role)
                self.tell(f"{again.name} serves")

    # -- clients

    def expected(self, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        key = (prompt, max_tokens)
        if key not in self._expected:
            engine = SimulatedEngine(self.model, StageSpec(0, 1, 0, self.model.layer_count), lambda end: end())
            try:
                self._expected[key] = reference_tokens(engine, list(prompt), max_tokens, self.shape.block_tokens)
            finally:
                engine.close()
        return self._expected[key]

    async def client(self, request_id: int, dispatch: Dispatch, *, patient: bool = False) -> Told:
        """One request: answered rightly, or told an error; some leave before."""
        chance = self.chance
        prompt = tuple(chance.randrange(3, 9) for _ in range(chance.randrange(1, 24)))
        max_tokens = chance.randrange(2 if patient else 1, 8)
        limit_s = REQUEST_S if patient else chance.choice((REQUEST_S, REQUEST_S, REQUEST_S, 0.05))
        request = Request(
            request_id=request_id, token_ids=np.asarray(prompt, np.int32),
            sampling=SamplingParams(max_tokens, ignore_eos=True), schedule_style=self.shape.style,  # type: ignore[arg-type]
        )  # fmt: skip
        told, deadline = Told(), self.now_s() + limit_s
        try:
            async with (
                asyncio.timeout_at(deadline),
                contextlib.aclosing(dispatch.run(Job(request, deadline, self.now_s()))) as steps,
            ):
                async for step in steps:
                    if told.finish:
                        raise Violation(f"request {request_id} was told more after its end")
                    told.tokens += step.token_ids
                    told.finish = step.finish_reason or ""
        except (LegError, EndpointError) as error:
            told.error = f"{type(error).__name__}: {error}"
        except TimeoutError:
            told.error = "deadline"
        if self.now_s() > deadline + 1.0:
            raise Violation(f"request {request_id} was told {self.now_s() - deadline:.2f} s after its deadline")
        self.tell(f"request {request_id}: {told.error or told.finish or 'cut off'}")
        if told.error == "deadline" and limit_s == REQUEST_S:
            raise Violation(f"request {request_id} waited {REQUEST_S:g} s and was told nothing")
        if not told.error:
            if told.finish != "length":
                raise Violation(f"request {request_id} ended with {told.finish!r} and no error")
            if told.tokens != self.expected(prompt, max_tokens):
                raise Violation(f"request {request_id} was answered wrongly: {told.tokens}")
        elif told.tokens != self.expected(prompt, max_tokens)[: len(told.tokens)]:
            raise Violation(f"request {request_id} was told wrong tokens before its error: {told.tokens}")
        elif not self.shape.faults and told.error != "deadline" and "LEASE_EXPIRED" not in told.error:
            raise Violation(f"request {request_id} failed without a fault: {told.error}")
        self.counts["answered" if not told.error else "deadline" if told.error == "deadline" else "failed"] += 1
        return told

    async def _serves_again(self, dispatch: Dispatch) -> None:
        """What was healed answers, one request after the other, soon: the front may learn by a refusal who lives where."""
        until_s = self.now_s() + AGAIN_S
        request_id, answered = 1000, 0
        while answered < 5:
            request_id += 1
            told = await self.client(request_id, dispatch, patient=True)
            answered = 0 if told.error else answered + 1
            if told.error and self.now_s() > until_s:
                raise Violation(f"request {request_id} failed although everything is healed: {told.error}")
            await asyncio.sleep(0.1)

    async def leaving(self, task: asyncio.Task[None], after_s: float) -> None:
        """A client that leaves after a while."""
        await asyncio.wait({task}, timeout=after_s)
        if not task.done():
            self.counts["left"] += 1
            task.cancel()

    # -- the whole

    async def run(self) -> None:
        """From the start to the end.

        Raises:
            Violation: What does not hold.
        """
        self.tell(str(self.shape))
        routers = Routers(
            FrontRouterConfig(), FrontRouterConfig(type=self.chance.choice(("load_balancing", "round_robin")))
        )
        legs = LegClient("00" * 32, http=Http(self), worker_at=self._worker_at)  # type: ignore[arg-type]
        servers = []
        for role, prefix, count in (
            ("context", "ctx", self.shape.contexts),
            ("generation", "gen", self.shape.generations),
        ):
            for index in range(count):
                self.begin(f"{prefix}-{index}", role)
                servers.append(FrontServer(f"{prefix}-{index}", role, f"http://{prefix}-{index}"))
        directory = make_directory(servers, legs, request_timeout_s=REQUEST_S, routers=routers)
        async with directory:
            await directory.prepare()
            dispatch = Dispatch(
                directory, routers, legs, FrontMetrics(Ledger(HttpConfig())), clock=self.now_s, instance_wait_s=3.0
            )  # fmt: skip
            faults = asyncio.create_task(self.misfortune(), name="misfortune")
            clients, leaving = [], []
            for request_id in range(1, self.chance.choice((4, 8, 16)) + 1):
                await asyncio.sleep(self.chance.uniform(0.0, 0.05))
                task = asyncio.create_task(self.client(request_id, dispatch), name=f"client {request_id}")
                clients.append(task)
                if self.chance.random() < 0.2:
                    leaving.append(asyncio.create_task(self.leaving(task, self.chance.uniform(0.0, 0.2))))
            await asyncio.wait(clients)
            for task in clients:
                if not task.cancelled():
                    await task
            await asyncio.gather(faults, *leaving)
            await dispatch.settle()
            await self._come_to_rest()
            await self._serves_again(dispatch)
            await dispatch.settle()
            await self._come_to_rest()
            self._check_front(directory, legs)
            await self._drain()
            await legs.close()
        for instance in self.everyone:
            instance.service.close()
        self._check_broken()

    def _worker_at(self, address: str) -> Any:
        return Worker(self, next(each for each in self.everyone if each.address == address))

    def _check_broken(self) -> None:
        if self.broken:
            raise Violation(f"a rank's loop raised {self.broken[0]!r}") from self.broken[0]

    async def _come_to_rest(self) -> None:
        for one, other in list(self.severed):
            self.heal(one, other)
        deadline_s = self.now_s() + REST_S
        while busy := self._busy():
            self._check_broken()
            if self.now_s() > deadline_s:
                raise Violation("not at rest: " + "; ".join(busy))
            await asyncio.sleep(0.05)

    def _busy(self) -> list[str]:
        """What of the living is not as it was before the first request."""
        busy = []
        for instance in (each for each in self.everyone if each.alive):
            if instance.desk.live_count or instance.service._owned:
                busy.append(
                    f"{instance.name} has {instance.desk.live_count} requests, {len(instance.service._owned)} owned"
                )
            for rank in instance.ranks:
                parts = rank.parts
                if len(parts.registry):
                    stories = [
                        f"{each.request_id} {each.state.value}: {' > '.join(each.story)}" for each in parts.registry
                    ]
                    busy.append(f"{rank.process}: {stories}")
                elif parts.blocks.free_count != parts.blocks.block_count:
                    busy.append(
                        f"{rank.process}: {parts.blocks.block_count - parts.blocks.free_count} blocks are not free"
                    )
                if rank.session is not None and rank.session.statistics()["quarantined_count"]:
                    raise Violation(f"{rank.process} has memory in quarantine: all that it waited for has come")
        return busy

    @staticmethod
    def _check_front(directory: Any, legs: LegClient) -> None:
        if not all(stream.idle for stream in (*legs._streams.values(), *legs._closing)):
            raise Violation("the front still waits for an answer")
        audit = directory.audit()
        if audit.reservations or audit.faults:
            raise Violation(f"reservations {audit.reservations}, faults {audit.faults}")

    async def _drain(self) -> None:
        """Every instance that lives proves that everything is over, on all of its ranks."""
        living = [each for each in self.everyone if each.alive]
        for instance in living:
            instance.endpoint.start_draining()
            instance.desk.drain(self.now_s() + 30.0)
        await asyncio.wait([task for each in living for task in each.tasks], timeout=REST_S)
        for instance in living:
            for rank in instance.ranks:
                rank.parts.registry.validate()
                if not (rank.parts.loop.left and rank.parts.loop.drained):
                    raise Violation(f"{rank.process} did not drain: left {rank.parts.loop.left}, faults {rank.faults}")
            cores = [rank.agreement.statistics().core for rank in instance.ranks if rank.agreement is not None]
            if len({(c.admitted, c.committed, c.closed, c.digest, c.activation_digest) for c in cores}) > 1:
                raise Violation(f"the ranks of {instance.name} differ at the end")


def simulate(seed: int, trace: bool = False) -> tuple[str, Simulation | None]:
    """One seed. Returns what is wrong, or nothing."""
    random.seed(seed)
    site: list[Simulation] = []

    async def run() -> None:
        site.append(Simulation(seed, print if trace else lambda line: None))
        unseen: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, about: unseen.append(str(about)))
        await site[0].run()
        gc.collect()
        if unseen:
            raise Violation(f"an error that nobody looked at: {unseen[0]}")

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        try:
            runner.run(run())
        except Exception as error:  # noqa: BLE001 - whatever a part raises is a violation of the composition
            return f"{type(error).__name__}: {error}", site[0] if site else None
    return "", site[0]


def seeds(options: argparse.Namespace) -> Iterator[int]:
    if options.seed is not None:
        yield options.seed
        return
    yield from range(options.first, options.first + options.count)


def main(arguments: list[str] | None = None) -> int:
    """Simulate; exit 1 at the first violation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200, help="seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, default=None, help="this one alone")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    options = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets decides who goes first: the same in every run, or a seed would not do the same again.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})  # noqa: S606
    began_s, total, done = time.monotonic(), Counter[str](), 0
    for seed in seeds(options):
        problem, site = simulate(seed, options.trace)
        if problem:
            print(f"VIOLATION: seed {seed}: {problem[:3000]}")
            if site is not None and not options.trace:
                print("\n".join(site.story[-40:]))
            return 1
        done += 1
        if site is not None:
            total += site.counts
    told = ", ".join(f"{count} {what}" for what, count in sorted(total.items()))
    print(f"{done} seeds, 0 violations, {told}, {time.monotonic() - began_s:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
