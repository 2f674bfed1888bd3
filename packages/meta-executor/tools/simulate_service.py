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
import selectors
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from endpoint_lifecycle import EndpointError, EndpointOwner
from kv_bounce_planner.planning import InstanceLayout, from_kv_memory
from kv_bounce_planner.sessions import (
    BounceArena,
    ExposureLedger,
    PeerId,
    Receiver,
    Sender,
    SessionConfig,
    SessionResources,
)
from kv_bounce_planner.sessions.proof import WriteExecutor
from kv_bounce_planner.testing import FakeNetwork, FakeTransport, FakeWorld
from meta_executor import wire
from meta_executor.api.endpoint import OwnedEndpoint
from meta_executor.api.service import ExecutorService, Submit
from meta_executor.config import FrontRouterConfig, HttpConfig, SyntheticConfig
from meta_executor.discovery import profile_of
from meta_executor.engine.base import SamplingParams, StageSpec, StepInput, StepOutput
from meta_executor.engine.synthetic import SyntheticEngine
from meta_executor.executor.aux_slots import AuxSlots
from meta_executor.executor.bell import RingingTransport
from meta_executor.executor.compose import (
    ComposedRank,
    ReceivingParts,
    SendingParts,
    Settings,
    Surroundings,
    compose_context,
    compose_generation,
)
from meta_executor.executor.links import LocalWorld
from meta_executor.executor.request import Answers, Request, decoder, encoder
from meta_executor.executor.scheduler import StepLimits
from meta_executor.executor.testing import reference_tokens
from meta_executor.executor.tiers import TierPolicy
from meta_executor.executor.work import ChainWork
from meta_executor.front.dispatch import Dispatch, Job
from meta_executor.front.leg import UNREACHABLE, LegError
from meta_executor.front.legs import LegClient
from meta_executor.front.metrics import FrontMetrics
from meta_executor.front.routers import Routers
from meta_executor.front.servers import FrontServer, make_directory
from meta_executor.listener.bounds import Ledger
from pp_agreement import Agreement, AgreementConfig, Domain, InProcessNetwork
from rpc_local_registry import RpcPeerDead, RpcUnreachable

#: How long a control link may be away, a transfer may take, and memory may be in doubt (s).
LINK_S, TRANSFER_S, DOUBT_S = 1.0, 3.0, 6.0
#: Longest pause of a rank that has nothing to do, and of one that waits for what tells nobody (s).
IDLE_S, POLL_S = 0.05, 0.004
#: After the last client was told, everything must be at rest within this time (s).
REST_S = 60.0
#: A request's own limit (s): whatever happens, a client is told before.
REQUEST_S = 20.0
#: Healed, the service answers again within this time (s).
AGAIN_S = 10.0


class Violation(Exception):
    """Something does not hold."""


# -- time -------------------------------------------------------------------------------------------------------------


class _Jump(selectors.BaseSelector):
    """Waits for nothing: the time that a wait would have taken has passed when it is asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Violation("nothing will ever happen again")
        self.now_s += max(timeout, 0.0)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def get_map(self) -> dict[Any, Any]:
        return {}

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while anything runs."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)  # there is one thread

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()
        done.set_result(func(*args))
        return done


# -- engine -----------------------------------------------------------------------------------------------------------


class SimulatedEngine(SyntheticEngine):
    """The engine that reads all KV; a step has run when it is launched, and ends at its time."""

    def __init__(self, config: SyntheticConfig, stage: StageSpec, later: Callable[[Callable[[], None]], float]) -> None:
        super().__init__(config, stage)
        super().close()
        self._later = later

    def launch(self, step: StepInput) -> Any:
        return _Step(self._step(step), self._later)

    def close(self) -> None:
        """There is no thread."""


class _Step:
    def __init__(self, output: StepOutput, later: Callable[[Callable[[], None]], float]) -> None:
        self._output = output
        self._ended = False
        self._call: Callable[[], None] = lambda: None
        later(self._end)

    def _end(self) -> None:
        self._ended = True
        self._call()

    def add_done_callback(self, call: Callable[[], None]) -> None:
        self._call = call
        if self._ended:
            call()

    def done(self) -> bool:
        return self._ended

    def result(self) -> StepOutput:
        if not self._ended:
            raise Violation("a step was asked for its result before its end")
        return self._output


class _Now(SyntheticEngine):
    """For the reference: no time, no thread."""

    def launch(self, step: StepInput) -> Any:
        return _Step(self._step(step), lambda end: end() or 0.0)


# -- one rank, one instance -------------------------------------------------------------------------------------------


class Rank:
    """A rank's parts, its process, and what drives it."""

    def __init__(self, site: Site, instance: Instance, rank: int) -> None:
        self._site = site
        self._instance = instance
        self.rank = rank
        self.peer = PeerId("unknown", "unknown", rank)
        self.made: ComposedRank | None = None
        self.session: Sender | Receiver | None = None
        self.agreement: Agreement | None = None
        self.faults: list[str] = []
        self.stands_until_s = 0.0
        self._bell: asyncio.Future[None] | None = None

    @property
    def process(self) -> str:
        return f"{self._instance.name}/{self.rank}"

    @property
    def parts(self) -> ComposedRank:
        if self.made is None:
            raise Violation("a rank was asked before it was made")
        return self.made

    def ring(self) -> None:
        """There is something for it."""
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    async def drive(self) -> None:
        """Iterate until it has left, or has met a fault: then its process ends, and with it its instance."""
        loop = asyncio.get_running_loop()
        parts, chance = self.parts.loop, self._site.chance
        while not parts.left:
            if self.stands_until_s > loop.time():
                await asyncio.sleep(self.stands_until_s - loop.time())
                continue
            moved = parts.iterate(loop.time())
            if parts.fault:
                self._site.tell(f"{self.process} ends by a fault: {parts.fault}")
                self._instance.die()
                return
            if moved:
                self._instance.ring()
                await asyncio.sleep(chance.uniform(0.00002, 0.0003))
                continue
            cap_s = parts.poll_cap_s
            self._bell = loop.create_future()
            timer = loop.call_later(IDLE_S if cap_s is None else max(cap_s, POLL_S), self.ring)
            try:
                await self._bell
            finally:
                timer.cancel()
                self._bell = None


_ENCODER, _DECODER = encoder(), decoder(Answers)


class Instance:
    """One lifetime of an instance: its ranks, and its service at an address."""

    def __init__(self, site: Site, owner_id: str, role: str, lifetime: int) -> None:
        self.site = site
        self.role = role
        self.owner_id = owner_id
        self.name = f"{owner_id}.{lifetime}"
        self.address = f"sim://{self.name}"
        self.alive = True
        self.streams: list[Any] = []
        shape = site.shape
        count = shape.stages if role == "context" else shape.generation_ranks
        owner = EndpointOwner(owner_id, self.name, role, mint_generation=lambda: f"{self.name}-generation")
        self.owner = owner
        stages = StageSpec.split(site.model.layer_count, count) if role == "context" else [
            StageSpec(0, 1, 0, site.model.layer_count)
        ] * count  # fmt: skip
        blocks = shape.context_blocks if role == "context" else shape.generation_blocks
        self.ranks = [Rank(site, self, rank) for rank in range(count)]
        engines = [
            SimulatedEngine(site.model, stage, lambda end, rank=rank: site.later(rank, end))
            for stage, rank in zip(stages, self.ranks)
        ]
        memories = [engine.allocate_kv(blocks, shape.block_tokens) for engine in engines]
        for memory in memories:
            site.world.add_buffer(memory.owner)
        layouts = [
            from_kv_memory(
                memory, rank=rank, layer_ids=tuple(stages[rank].layers), head_total=site.model.kv_head_count, dtype="float32"
            )
            for rank, memory in enumerate(memories)
        ]  # fmt: skip
        whole = InstanceLayout(self.name, tuple(layouts), **{"pp_size" if role == "context" else "adp_size": count})
        info = wire.ServerInfo(
            ready=False, state="NEW", role=role, owner_id=owner_id, instance_id=self.name, world_size=count,
            pipeline_parallel_size=count if role == "context" else 1,
            attention_dp_size=1 if role == "context" else count,
            model="synthetic", vocab_size=site.model.vocab_size, layout=msgspec.json.decode(whole.to_json()), profile="one",
            processes=tuple(rank.process for rank in self.ranks),
            limits=wire.Limits(
                max_seq_len=256, kv_tokens=blocks * shape.block_tokens, max_batch_size=4, max_num_tokens=16,
                max_queue_size=4096, pre_active_requests=4,
            ),
        )  # fmt: skip
        record = owner.finalize().publish(
            tuple(f"tcp://{self.name}:{1 + rank}" for rank in range(count)), profile_of(info)
        )
        generation = str(record.generation)
        self.endpoint = OwnedEndpoint(owner, info)
        self.endpoint.service_address = self.address
        settings = Settings(
            limits=StepLimits.for_instance(
                max_batch_size=4, max_num_tokens=16, stage_count=count if role == "context" else 1, pre_active_requests=None
            ),
            block_count=blocks, block_tokens=shape.block_tokens, enable_block_reuse=shape.reuse,
            transfer_timeout_s=TRANSFER_S, lease_timeout_s=shape.lease_s if role == "context" else None,
        )  # fmt: skip
        world = LocalWorld(count)
        self.agreements = InProcessNetwork(
            Domain(1, tuple(range(count))), clock=site.now_s, delay_s=site.agreement_delay
        )
        for rank, engine in zip(self.ranks, engines):
            rank.peer = PeerId(self.name, generation, rank.rank)
            site.rank_of[rank.peer] = rank
            link = world.link(rank.rank)
            aux = AuxSlots(256)
            site.world.add_buffer(aux._slab)
            around = Surroundings(
                rank=rank.rank, size=count, engine=engine, aux=aux, link=link, work=ChainWork(link), clock=site.now_s,
                wake=rank.ring, deliver=self._deliver, on_fault=rank.faults.append,
            )  # fmt: skip
            resources = SessionResources(
                FakeTransport(site.world, rank.peer), site.network.channel(rank.peer, linked=True), arena=site.arena(),
                clock=site.now_s,
            )  # fmt: skip
            bounds = SessionConfig(
                drain_deadline_s=DOUBT_S, link_timeout_s=LINK_S, introduction_timeout_s=LINK_S + 1.0,
                operation_timeout_s=4 * TRANSFER_S,
            )  # fmt: skip
            if role == "context":
                self._compose_context(rank, around, settings, resources, bounds, whole)
            else:
                rank.session = Receiver(rank.peer, resources, bounds, ledger=ExposureLedger())
                tiers = TierPolicy.configured(
                    enable_bounce=shape.bounce, bounce_bytes_min=0, arena_bytes=1 << 16, transport_key="tcp"
                )
                rank.made = compose_generation(
                    around,
                    settings,
                    ReceivingParts(
                        rank.session, rank.peer, layouts[rank.rank], tiers, connect=site.connect(rank.peer),
                        process_is_gone=site.gone.__contains__,
                    ),
                )  # fmt: skip
        desk = self.ranks[0].parts.desk
        if desk is None:
            raise Violation("rank 0 has no desk")
        self.desk = desk
        self.service = ExecutorService(
            desk, role=role, endpoint=self.endpoint, statistics=bytes, routing=lambda count: b""  # type: ignore[arg-type]
        )  # fmt: skip
        self.tasks = [asyncio.create_task(rank.drive(), name=rank.process) for rank in self.ranks]
        for task in self.tasks:
            task.add_done_callback(site.driven)

    def _compose_context(
        self, rank: Rank, around: Surroundings, settings: Settings, resources: SessionResources, bounds: SessionConfig,
        whole: InstanceLayout,
    ) -> None:  # fmt: skip
        site = self.site
        rank.agreement = Agreement(
            self.agreements.domain, rank.rank,
            RingingTransport(self.agreements.transport(rank.rank), lambda peer: site.after(0.0006, self.ranks[peer].ring)),
            AgreementConfig(credits=64, lease_timeout_s=site.shape.lease_s), clock=site.now_s,
        )  # fmt: skip
        rank.agreement.open()
        rank.session = Sender(rank.peer, resources, bounds)
        rank.made = compose_context(
            around,
            settings,
            SendingParts(
                rank.session, rank.agreement, whole, process_of=lambda peer: site.rank_of[peer].process,
                process_is_gone=site.gone.__contains__,
            ),
        )  # fmt: skip

    def _deliver(self, answers: Answers) -> None:
        self.service.deliver(_DECODER.decode(_ENCODER.encode(answers)))

    def ring(self) -> None:
        for rank in self.ranks:
            rank.ring()

    def die(self) -> None:
        """Every process of it ends as it is."""
        if not self.alive:
            return
        self.alive = False
        self.site.tell(f"{self.name} dies")
        for rank, task in zip(self.ranks, self.tasks):
            if task is not asyncio.current_task():
                task.cancel()
            self.site.world.kill(rank.peer)
            self.site.gone.add(rank.process)
            for other in self.site.rank_of:
                if other.instance != rank.peer.instance:
                    self.site.sever(rank.peer, other)
        for stream in self.streams:
            stream.break_off()


# -- the front's way to an instance -----------------------------------------------------------------------------------


class _Stream:
    """Answers of an instance on their way to the front."""

    def __init__(self, worker: Worker, subscriber: str) -> None:
        self._worker = worker
        self._broken = False
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._pump = asyncio.create_task(self._carry(subscriber), name=f"stream {worker.instance.name}")

    async def _carry(self, subscriber: str) -> None:
        site, instance = self._worker.site, self._worker.instance
        if not await self._worker.reached():
            self._worker.open.set()
            self._inbox.put_nowait(RpcUnreachable("nobody listens there"))
            return
        instance.streams.append(self)
        source = instance.service.answers(subscriber)
        self._worker.open.set()
        inbox = source._take()
        try:
            while not self._broken:
                item = await inbox.get_async(None)
                if not isinstance(item, Answers):
                    break
                await asyncio.sleep(site.delay())
                self._inbox.put_nowait(item)
        finally:
            source._cancel()
            self._inbox.put_nowait(RpcPeerDead("the stream broke") if self._broken or not instance.alive else None)

    def break_off(self) -> None:
        self._broken = True
        self._pump.cancel()

    def __aiter__(self) -> AsyncIterator[Answers]:
        return self._read()

    async def _read(self) -> AsyncIterator[Answers]:
        try:
            while (item := await self._inbox.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._pump.cancel()


class Worker:
    """``WorkerClient`` over simulated wires."""

    def __init__(self, site: Site, instance: Instance) -> None:
        self.site = site
        self.instance = instance
        self.open = asyncio.Event()

    async def reached(self) -> bool:
        await asyncio.sleep(self.site.delay())
        return self.instance.alive

    async def _there(self) -> ExecutorService:
        if not await self.reached():
            raise RpcUnreachable("nobody listens there")
        return self.instance.service

    async def _back(self) -> None:
        await asyncio.sleep(self.site.delay())
        if not self.instance.alive:
            raise RpcPeerDead("it died before it answered")

    async def submit(self, subscriber: str, batch: Sequence[Submit]) -> list[wire.ErrorBody | None]:
        service = await self._there()
        if not self.open.is_set():
            await self.open.wait()  # a stream is open before any later call of the same client
            if not self.instance.alive:
                raise RpcUnreachable("nobody listens there")
        outcomes = service.submit_batch(subscriber, iter(batch))
        await self._back()
        return outcomes

    def answers(self, subscriber: str) -> Any:
        return _Stream(self, subscriber)

    def stop(self, request_id: int, reason: str) -> None:
        self.site.after(
            self.site.delay(), lambda: self.instance.alive and self.instance.service.abort(request_id, reason)
        )

    async def abort(self, request_id: int, reason: str) -> bool:
        known = (await self._there()).abort(request_id, reason)
        await self._back()
        return known

    async def introduce(self, url: str, server_info: bytes) -> wire.ErrorBody | None:
        refused = (await self._there()).introduce(url, server_info)
        await self._back()
        return refused

    def close(self) -> None:
        """Nothing is held."""


class Http:
    """What is asked of instances beside their streams."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def server_info(self, server: str) -> bytes:
        await asyncio.sleep(self._site.delay())
        instance = self._site.at[server]
        if not instance.alive:
            raise LegError("", server, UNREACHABLE, "nobody listens there", received=False)
        told = wire.encode_json(instance.endpoint.info())
        await asyncio.sleep(self._site.delay())
        return told

    async def abort(self, server: str, request_id: int, reason: str) -> bool:
        return False

    async def close(self) -> None:
        """Nothing is held."""


# -- one seed ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What a seed builds."""

    style: str
    contexts: int
    generations: int
    stages: int
    generation_ranks: int
    context_blocks: int
    generation_blocks: int
    block_tokens: int
    bounce: bool
    reuse: bool
    lease_s: float | None
    executor: WriteExecutor
    faults: int

    @staticmethod
    def of(chance: random.Random) -> Shape:
        return Shape(
            style=chance.choice(("context_first", "generation_first")),
            contexts=chance.choice((1, 1, 2)),
            generations=chance.choice((1, 1, 2)),
            stages=chance.choice((1, 2, 3)),
            generation_ranks=chance.choice((1, 2)),
            context_blocks=chance.choice((12, 24, 64)),
            generation_blocks=chance.choice((16, 32, 64)),
            block_tokens=4,
            bounce=chance.random() < 0.3,
            reuse=chance.random() < 0.4,
            lease_s=chance.choice((None, None, 0.05)),
            executor=chance.choice((WriteExecutor.RECEIVER, WriteExecutor.SENDER)),
            faults=chance.choice((0, 1, 2, 4)),
        )


@dataclass
class Told:
    """What one client was told."""

    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    error: str = ""


class _Network(FakeNetwork):
    """Control links; who gets a frame is woken."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site

    def _send(self, source: PeerId, target: PeerId, frame: bytes) -> None:
        super()._send(source, target, frame)
        self.log.clear()
        self._site.rank_of[target].ring()


class Site:
    """Everything that a seed makes, and its invariants."""

    def __init__(self, seed: int, trace: bool) -> None:
        self.chance = random.Random(seed)  # noqa: S311 - replayable, not secret
        self.shape = Shape.of(self.chance)
        self.model = SyntheticConfig(layer_count=3, kv_head_count=1, head_dim=2, vocab_size=997)
        self.late = self.chance.choice((0.0, 0.0, 0.05))
        self.world = FakeWorld(executor=self.shape.executor, landing=self._landing)
        self.network = _Network(self)
        self.gone: set[str] = set()
        self.rank_of: dict[PeerId, Rank] = {}
        self.at: dict[str, Instance] = {}
        self.everyone: list[Instance] = []
        self.severed: set[tuple[PeerId, PeerId]] = set()
        self.story: list[str] = []
        self.counts: Counter[str] = Counter()
        self._trace = trace
        self._lifetimes: Counter[str] = Counter()
        self._arenas: list[Any] = []
        self._landing_at: dict[tuple[Any, int], float] = {}
        self._expected: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._broken: list[BaseException] = []
        self._loop = asyncio.get_running_loop()

    # -- what the parts ask for

    def now_s(self) -> float:
        return self._loop.time()

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now_s():9.4f} {what}")
        if self._trace:
            print(self.story[-1])

    def delay(self) -> float:
        """One way between the front and an instance (s)."""
        return self.chance.uniform(0.0001, 0.002) if self.chance.random() > 0.02 else self.chance.uniform(0.01, 0.3)

    def agreement_delay(self, _source: int, _target: int) -> float:
        return self.chance.uniform(0.0, 0.0005) if self.chance.random() > 0.03 else self.chance.uniform(0.001, 0.05)

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        self._loop.call_later(delay_s, call)

    def later(self, rank: Rank, end: Callable[[], None]) -> float:
        """A step ends after a while; who waits for it is woken by its own callback."""
        took_s = self.chance.uniform(0.0002, 0.004)
        self._loop.call_later(took_s, end)
        return took_s

    def arena(self) -> BounceArena | None:
        if not self.shape.bounce:
            return None
        buffer = np.zeros(1 << 16, np.uint8)
        self._arenas.append(buffer)
        return BounceArena(self.world.add_buffer(buffer), buffer.nbytes)

    def connect(self, receiver: PeerId) -> Callable[[PeerId, str], None]:
        """Links to processes that have ended already are never made."""

        def connect(peer: PeerId, _address: str) -> None:
            if self.rank_of[peer].process in self.gone:
                self.sever(receiver, peer)

        return connect

    def _landing(self, job: Any, part: int) -> str:
        """Late in a seed's own measure: a part lands when its time has come."""
        if not self.late:
            return "land"
        key = (job.operation, part)
        due_s = self._landing_at.setdefault(key, self.now_s() + self.chance.uniform(0.0, self.late))
        return "land" if self.now_s() >= due_s else "hold"

    def driven(self, task: asyncio.Task[None]) -> None:
        """A rank's loop raises nothing: that is a bug of the product."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken.append(error)

    # -- faults

    def begin(self, owner_id: str, role: str) -> Instance:
        """The next lifetime of an instance, at its address."""
        instance = Instance(self, owner_id, role, self._lifetimes[owner_id])
        self._lifetimes[owner_id] += 1
        self.at[f"http://{owner_id}"] = instance
        self.everyone.append(instance)
        return instance

    def sever(self, one: PeerId, other: PeerId) -> None:
        key = (min(one, other), max(one, other))
        if key not in self.severed:
            self.severed.add(key)
            self.network.sever(one, other)
            self.rank_of[one].ring()
            self.rank_of[other].ring()

    def heal(self, one: PeerId, other: PeerId) -> None:
        key = (min(one, other), max(one, other))
        if key in self.severed and not {self.rank_of[one].process, self.rank_of[other].process} & self.gone:
            self.severed.discard(key)
            self.network.heal(one, other)
            self.rank_of[one].ring()
            self.rank_of[other].ring()

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
            engine = _Now(self.model, StageSpec(0, 1, 0, self.model.layer_count))
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
        if self._broken:
            raise Violation(f"a rank's loop raised {self._broken[0]!r}") from self._broken[0]

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


def simulate(seed: int, trace: bool = False) -> tuple[str, Site | None]:
    """One seed. Returns what is wrong, or nothing."""
    random.seed(seed)
    site: list[Site] = []

    async def run() -> None:
        site.append(Site(seed, trace))
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
