"""One lifetime of an instance: real ranks and their service, driven in simulated time, and their end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from endpoint_lifecycle import EndpointOwner
from kv_bounce_planner.planning import InstanceLayout, from_kv_memory
from kv_bounce_planner.sessions import ExposureLedger, PeerId, Receiver, Sender, SessionConfig, SessionResources
from kv_bounce_planner.testing import FakeTransport
from meta_executor import wire
from meta_executor.api.endpoint import OwnedEndpoint
from meta_executor.api.service import ExecutorService
from meta_executor.discovery import profile_of
from meta_executor.engine.base import StageSpec
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
from meta_executor.executor.request import Answers, decoder, encoder
from meta_executor.executor.scheduler import StepLimits
from meta_executor.executor.tiers import TierPolicy
from meta_executor.executor.work import ChainWork
from pp_agreement import Agreement, AgreementConfig, Domain, InProcessNetwork
from simulation import Violation
from simulation.engine import SimulatedEngine

if TYPE_CHECKING:
    from simulation.site import Site

#: How long a control link may be away, a transfer may take, and memory may be in doubt (s).
LINK_S, TRANSFER_S, DOUBT_S = 1.0, 3.0, 6.0
#: Longest pause of a rank that has nothing to do, and of one that waits for what tells nobody (s).
IDLE_S, POLL_S = 0.05, 0.004


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
        engines = [SimulatedEngine(site.model, stage, site.later) for stage in stages]
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
