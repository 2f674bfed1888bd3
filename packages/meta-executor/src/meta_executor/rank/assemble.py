"""Builds one rank: engine, memory, transfer endpoint, agreement, loop; taken apart in the opposite order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
from mpi4py import MPI

from comm_broadcast import Broadcaster, MpiComm, TokenBatchCodec
from endpoint_lifecycle import EndpointOwner
from kv_bounce_planner.planning import InstanceLayout, KVLayout, default_copier, from_kv_memory
from kv_bounce_planner.sessions import (
    BounceArena,
    MemoryRegion,
    NixlConfig,
    NixlTransport,
    PeerId,
    Receiver,
    Sender,
    SessionConfig,
    SessionResources,
)
from meta_executor import wire
from meta_executor.addresses import Place, place_of
from meta_executor.config import ConfigError, EngineConfig, InstanceConfig, InstanceSpec, Role, RunSpec
from meta_executor.discovery import profile_of
from meta_executor.engine.base import Engine, KVMemory, ModelInfo, StageSpec
from meta_executor.engine.factory import create_engine, model_info
from meta_executor.engine.step_recorder import StepRecorder
from meta_executor.executor._mpi import MpiLink
from meta_executor.executor.aux_slots import AuxSlots
from meta_executor.executor.bell import RankBell, RingingTransport
from meta_executor.executor.compose import (
    ComposedRank,
    ReceivingParts,
    SendingParts,
    Settings,
    Surroundings,
    compose_context,
    compose_generation,
)
from meta_executor.executor.control import ReceiverControl, SenderControl
from meta_executor.executor.desk import Desk
from meta_executor.executor.loop import RankLoop
from meta_executor.executor.request import Answers
from meta_executor.executor.scheduler import StepLimits
from meta_executor.executor.tiers import TierPolicy
from meta_executor.executor.transceiver_context import AnyAgreement
from meta_executor.executor.work import BROADCAST_CONFIG, BroadcastRecord, BroadcastWork, ChainWork, WorkChannel
from meta_executor.rank.free_memory import device_free_bytes, host_free_bytes
from meta_executor.rank.kv_budget import RankBudget, agreed_budget, block_bytes_of, measure_budget
from meta_executor.rank.startup import (
    RankFacts,
    agreed_facts,
    barrier,
    check_qualified,
    check_world,
    exchange,
    instance_layout,
    kv_profile,
    process_is_gone,
    this_process,
)
from pp_agreement import (
    Agreement,
    AgreementConfig,
    AgreementMode,
    AllgatherAgreement,
    Domain,
    MpiTransport,
    PidWatch,
    contribution,
    negotiate,
)

#: Open incarnations of the agreement at once: every admitted request until its memory is back (count).
CREDITS_MIN = 256
#: A quiet rank says so to the others at least this often (s).
HEARTBEAT_MAX_S = 2.0
#: A control link may be away for so long before what is open on it is in doubt (s): longer than a process stands still on a
#: machine that works.
LINK_AWAY_MAX_S = 30.0
#: AUX slots of a rank: transfers of first tokens at once (count).
AUX_SLOTS = 4096


@dataclass(frozen=True)
class Identity:
    """Which rank of which lifetime of which instance this is."""

    spec: RunSpec
    instance: InstanceSpec
    instance_id: str
    rank: int
    size: int

    @property
    def role(self) -> Role:
        """What the instance does."""
        return self.instance.role

    @property
    def name(self) -> str:
        """For the log."""
        return f"{self.instance.owner_id} rank {self.rank}"


@dataclass(frozen=True)
class Storage:
    """A rank's memory: KV, slots for first tokens, bounce arena."""

    memory: KVMemory
    aux: AuxSlots
    block_count: int
    block_bytes: int
    arena_memory: Any
    arena_bytes: int

    @property
    def arena(self) -> BounceArena | None:
        """The bounce arena, if there is one."""
        if self.arena_memory is None:
            return None
        return BounceArena(
            _address_of(self.arena_memory),
            self.arena_bytes,
            memory_kind=self.memory.memory_kind,
            device_id=self.memory.device_id,
        )

    def regions(self) -> list[MemoryRegion]:
        """All that a peer may read or write."""
        memory = self.memory
        regions = [MemoryRegion(a, n, memory.memory_kind, memory.device_id) for a, n in memory.regions]
        regions.append(MemoryRegion(*self.aux.region, memory.memory_kind, memory.device_id))
        if self.arena_memory is not None:
            address = _address_of(self.arena_memory)
            regions.append(MemoryRegion(address, self.arena_bytes, memory.memory_kind, memory.device_id))
        return regions


@dataclass(frozen=True)
class Negotiated:
    """What the ranks agreed on before the first request."""

    everyone: list[RankFacts]
    mode: AgreementMode
    layout: InstanceLayout
    info: wire.ServerInfo
    generation: str


@dataclass(frozen=True)
class Transfers:
    """A rank's end of the transfers, to be closed on proof only."""

    transport: NixlTransport
    control: SenderControl | ReceiverControl
    session: Sender | Receiver
    #: What gives channel, memory and agents back, in order.
    release: tuple[Callable[[], object], ...]


@dataclass(frozen=True)
class Rank:
    """Everything that one rank is made of."""

    identity: Identity
    owner: EndpointOwner
    engine: Engine
    #: Notes the engine's steps, where a trial asks for it.
    step_recorder: StepRecorder | None
    storage: Storage
    agreed: Negotiated
    limits: StepLimits
    transfers: Transfers
    listening: SenderControl
    agreement: AnyAgreement | None
    link: MpiLink
    work: WorkChannel
    made: ComposedRank
    bell: RankBell
    #: Every rank runs on this host, so that all of them can ring.
    together: bool
    #: Other ranks' processes; None where the agreement looks at them itself.
    watch: PidWatch | None

    @property
    def loop(self) -> RankLoop:
        """What is driven."""
        return self.made.loop

    @property
    def desk(self) -> Desk | None:
        """Rank 0's."""
        return self.made.desk


def log(text: str) -> None:
    """One structured line, in one write."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


def control_place(spec: RunSpec, instance: InstanceSpec, rank: int) -> Place:
    """Where a rank listens for KV control. Generation ranks call and nobody calls them: theirs stays in the run folder.

    Raises:
        OSError: The instance's hostname cannot be resolved.
    """
    path = spec.path("ipc", f"{instance.owner_id}.{rank}.c")
    if instance.role == "generation":
        return Place(f"ipc://{path}")
    return place_of(instance.config.hostname, instance.config.advertised_host, path)


def uses_cuda(config: EngineConfig) -> bool:
    """Whether the engine's memory is on a CUDA device."""
    if config.kind == "synthetic" or config.device == "cpu":
        return False
    import torch

    return config.device == "cuda" or bool(torch.cuda.is_available())


def agreement_config(config: InstanceConfig, limits: StepLimits) -> AgreementConfig:
    """Bounds of the agreement of an instance. The same on every rank: they are negotiated."""
    credits = max(CREDITS_MIN, limits.pre_active_max + limits.active_max + 2 * config.max_batch_size)
    return AgreementConfig(
        credits=min(max(credits, 1024), 65_535),
        silence_s=max(config.cache_transceiver_config.silence_s, 1.0),
        heartbeat_s=min(max(config.cache_transceiver_config.silence_s, 1.0) / 10.0, HEARTBEAT_MAX_S),
        startup_s=max(120.0, config.cache_transceiver_config.silence_s),
        lease_timeout_s=config.cache_transceiver_config.lease_timeout_s,
    )


def assemble(
    spec: RunSpec,
    instance: InstanceSpec,
    instance_id: str,
    comm: MPI.Intracomm,
    *,
    deliver: Callable[[Answers], None],
    phase: Callable[[str], None],
) -> Rank:
    """Build this rank; collective over the instance.

    Args:
        spec, instance, instance_id: What to build.
        comm: The instance's world.
        deliver: Gets rank 0's hand-overs.
        phase: Told what happens now, for a person.

    Raises:
        ConfigError: The same on every rank, before any request; names rank and field.
    """
    identity = Identity(spec, instance, instance_id, comm.Get_rank(), comm.Get_size())
    config = instance.config
    check_world(identity.size, config)
    owner = EndpointOwner(instance.owner_id, instance_id, identity.role)

    phase("loading weights")
    model = model_info(spec.service.engine)
    stage = _stage(identity, model)
    record_max = spec.service.record_turns_max
    step_recorder = StepRecorder(record_max) if record_max else None
    engine = create_engine(spec.service.engine, stage, step_recorder)

    phase("measuring memory")
    storage = _storage(identity, comm, owner, engine)

    phase("exchanging layouts")
    bell = RankBell(lambda rank: spec.path("ipc", f"{instance.owner_id}.{rank}.b"), identity.rank)
    place = control_place(spec, instance, identity.rank)
    listening = SenderControl(place.address, spec.key(), bell.notify)
    listening.start()
    limits = _limits(config, stage)
    layout = _layout(identity, stage, model, storage)
    agreed = _negotiate(identity, comm, owner, model, storage, layout, limits, place.announced(listening.address))

    phase("opening transfers")
    peer = PeerId(instance_id, agreed.generation, identity.rank)
    link = MpiLink(comm, bell.ring)
    watch = watch_of(agreed.everyone, identity.rank)
    asynchronous = agreed.mode.terminal or identity.size == 1
    agreement: AnyAgreement | None = None
    work: WorkChannel
    if identity.role == "context":
        agreement = _agreement(identity, comm, limits, watch if asynchronous else None, bell)
        work = ChainWork(link)
    else:
        work = _group_work(comm, bell)
    transfers = _transfers(identity, peer, storage, listening, bell)
    around = _surroundings(identity, engine, storage, link, work, bell, deliver)
    made = _composed(
        around, _settings(config, limits, storage), agreed.layout, layout, transfers, peer, agreement, config
    )
    return Rank(
        identity=identity,
        owner=owner,
        engine=engine,
        step_recorder=step_recorder,
        storage=storage,
        agreed=agreed,
        limits=limits,
        transfers=transfers,
        listening=listening,
        agreement=agreement,
        link=link,
        work=work,
        made=made,
        bell=bell,
        together=len({fact.process.split("/")[0] for fact in agreed.everyone}) == 1,
        watch=None if identity.role == "context" and agreed.mode.terminal else watch,
    )


def modes_of(rank: Rank) -> dict[str, Any]:
    """How this rank runs, for its evidence (JSON-able)."""
    identity, config = rank.identity, rank.identity.instance.config
    return {
        "schedule_style": identity.spec.service.schedule_style,
        "async_terminal": rank.agreed.mode.terminal,
        "async_ready": rank.agreed.mode.ready,
        "bounce": config.cache_transceiver_config.enable_bounce,
        "block_reuse": config.kv_cache_config.enable_block_reuse,
        "fast_path": bool(config.rpc.local_fastpath),
        "submit_batch_max": config.rpc.submit_batch_max or 1,
        "transport": rank.transfers.transport.transport_class.key,
        "engine": identity.spec.service.engine.kind,
        "pre_active_requests": rank.limits.pre_active_max,
        "compute_cap": rank.limits.active_max,
    }


# -- the steps of it --------------------------------------------------------------------------------------------------


def _limits(config: InstanceConfig, stage: StageSpec) -> StepLimits:
    return StepLimits.for_instance(
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        stage_count=stage.stage_count,
        pre_active_requests=config.cache_transceiver_config.max_num_generation_first_pre_active_requests,
    )


def _layout(identity: Identity, stage: StageSpec, model: ModelInfo, storage: Storage) -> KVLayout:
    return from_kv_memory(
        cast(Any, storage.memory),
        rank=identity.rank,
        layer_ids=tuple(stage.layers),
        head_total=model.kv_head_count,
        dtype=model.kv_dtype,
    )


def _surroundings(
    identity: Identity,
    engine: Engine,
    storage: Storage,
    link: MpiLink,
    work: WorkChannel,
    bell: RankBell,
    deliver: Callable[[Answers], None],
) -> Surroundings:
    return Surroundings(
        rank=identity.rank,
        size=identity.size,
        engine=engine,
        aux=storage.aux,
        link=link,
        work=work,
        clock=time.monotonic,
        wake=bell.notify,
        deliver=deliver,
        on_fault=lambda diagnosis: bell.notify(),
        say=lambda text: log(f"{identity.name}: {text}"),
    )


def _storage(identity: Identity, comm: MPI.Intracomm, owner: EndpointOwner, engine: Engine) -> Storage:
    """Measure what may be taken, agree on it with the other ranks, take it."""
    config, spec = identity.instance.config, identity.spec
    transceiver, pool = config.cache_transceiver_config, config.kv_cache_config
    arena_bytes = transceiver.bounce_arena_mib << 20 if transceiver.enable_bounce else 0
    cuda = uses_cuda(spec.service.engine)
    arena_memory = _arena_memory(arena_bytes, cuda)
    budget = measure_budget(
        owner,
        engine,
        pool,
        rank=identity.rank,
        sharing_ranks=max(spec.measuring_ranks, 1),
        arena=None if cuda else arena_memory,
        free_bytes=device_free_bytes if cuda else host_free_bytes,
        together=lambda: barrier(comm),
    )
    measured = [msgspec.json.decode(part, type=RankBudget) for part in exchange(comm, msgspec.json.encode(budget))]
    agreed = agreed_budget(measured, pool, f"{identity.role}_servers")
    if identity.rank == 0:
        log(f"{identity.instance.owner_id}: KV: {agreed.words}")
    memory = engine.allocate_kv(agreed.block_count, pool.tokens_per_block)
    aux = AuxSlots(AUX_SLOTS, cuda_device=memory.device_id if memory.memory_kind == "VRAM" else None)
    block_bytes = block_bytes_of(engine, pool.tokens_per_block)
    return Storage(memory, aux, agreed.block_count, block_bytes, arena_memory, arena_bytes)


def _negotiate(
    identity: Identity,
    comm: MPI.Intracomm,
    owner: EndpointOwner,
    model: ModelInfo,
    storage: Storage,
    layout: KVLayout,
    limits: StepLimits,
    control_address: str,
) -> Negotiated:
    """One exchange of facts, the same verdict on every rank; then the endpoint is published."""
    instance = identity.instance
    config, service = instance.config, identity.spec.service
    transceiver, context = config.cache_transceiver_config, identity.role == "context"
    facts = RankFacts(
        rank=identity.rank,
        layout=msgspec.json.decode(layout.to_json()),
        control_address=control_address,
        block_count=storage.block_count,
        process=this_process(),
        agreement=contribution(
            {
                "async_terminal": transceiver.enable_async_terminal_agreement,
                "async_ready": transceiver.enable_async_readiness_agreement,
            },
            _domain(identity.size) if context else None,
            agreement_config(config, limits) if context else None,
            topology={
                "tensor_parallel": config.tensor_parallel_size if context else 1,
                "context_parallel": config.context_parallel_size,
                "attention_dp": bool(config.enable_attention_dp) if context else False,
                "backend": transceiver.backend,
            },
        ),
    )
    try:
        check_qualified(identity.role, config, generation_first=service.schedule_style == "generation_first")
    except ConfigError as error:
        facts = msgspec.structs.replace(facts, refused_field=error.field, refused=str(error))
    everyone = agreed_facts(exchange(comm, msgspec.json.encode(facts)))
    mode = negotiate(
        {fact.rank: fact.agreement for fact in everyone},
        qualified={"tensor_parallel": 1, "context_parallel": 1, "attention_dp": False, "backend": "NIXL"},
    )
    whole = instance_layout(identity.instance_id, identity.role, everyone)
    info = _server_info(identity, model, whole, storage.block_count, limits)
    info = msgspec.structs.replace(info, processes=tuple(fact.process for fact in everyone))
    generation = _published(comm, owner, everyone, info, identity.rank)
    return Negotiated(everyone, mode, whole, info, generation)


def _domain(size: int) -> Domain:
    return Domain(1, tuple(range(size)))


def _agreement(
    identity: Identity, comm: MPI.Intracomm, limits: StepLimits, watch: PidWatch | None, bell: RankBell
) -> AnyAgreement:
    """The agreement of a context instance: asynchronous with a watch over the others' processes, else the baseline."""
    domain, bounds = _domain(identity.size), agreement_config(identity.instance.config, limits)
    agreement: AnyAgreement
    if watch is not None:
        transport = RingingTransport(MpiTransport(comm, domain, watch=watch.dead), bell.ring)
        agreement = Agreement(domain, identity.rank, transport, bounds)
    else:
        agreement = AllgatherAgreement(domain, identity.rank, comm, bounds)
    agreement.open()
    return agreement


def _transfers(
    identity: Identity, peer: PeerId, storage: Storage, listening: SenderControl, bell: RankBell
) -> Transfers:
    """Transport with its memory registered, control channel and session of this rank's role."""
    config = identity.instance.config.cache_transceiver_config
    memory = storage.memory
    transport = NixlTransport(
        peer, config=NixlConfig(tls=None if config.transport == "auto" else config.transport, spare_agents=1)
    )
    registration = transport.register(storage.regions())
    # Making an agent takes tens of milliseconds: the first peer finds one ready.
    transport.prepare_agents()
    settings = SessionConfig(
        drain_deadline_s=config.transfer_timeout_s,
        introduction_timeout_s=config.transfer_timeout_s,
        link_timeout_s=min(config.transfer_timeout_s, LINK_AWAY_MAX_S),
        quarantine_bytes_max=config.quarantine_budget_mib << 20,
    )

    def resources(channel: SenderControl | ReceiverControl) -> SessionResources:
        return SessionResources(
            transport,
            channel,
            arena=storage.arena,
            copier=_copier(memory),
            memory_kind=memory.memory_kind,
            device_id=memory.device_id,
        )

    control: SenderControl | ReceiverControl
    session: Sender | Receiver
    if identity.role == "context":
        control = listening
        listening.serve_as(peer)
        session = Sender(peer, resources(listening), settings)
    else:
        control = ReceiverControl(peer, identity.spec.key(), bell.notify, process=this_process())
        session = Receiver(peer, resources(control), settings)
    release = (control.close, lambda: transport.deregister(registration), transport.close)
    return Transfers(transport, control, session, release)


def _settings(config: InstanceConfig, limits: StepLimits, storage: Storage) -> Settings:
    transceiver = config.cache_transceiver_config
    return Settings(
        limits=limits,
        block_count=storage.block_count,
        block_tokens=config.kv_cache_config.tokens_per_block,
        enable_block_reuse=config.kv_cache_config.enable_block_reuse,
        transfer_timeout_s=transceiver.transfer_timeout_s,
        lease_timeout_s=transceiver.lease_timeout_s,
        requests_max=config.max_queue_size,
        routing_policy=config.router.type,
    )


def _composed(
    around: Surroundings,
    settings: Settings,
    whole: InstanceLayout,
    layout: KVLayout,
    transfers: Transfers,
    peer: PeerId,
    agreement: AnyAgreement | None,
    config: InstanceConfig,
) -> ComposedRank:
    session, control = transfers.session, transfers.control
    if isinstance(session, Sender) and agreement is not None:
        if not isinstance(control, SenderControl):
            raise TypeError(f"a rank that sends is called, got {type(control).__name__}")
        sending = SendingParts(session, agreement, whole, control.process_of, process_is_gone)
        return compose_context(around, settings, sending)
    if not isinstance(session, Receiver) or not isinstance(control, ReceiverControl):
        raise TypeError(f"a rank without agreement receives, got {type(session).__name__}")
    transceiver = config.cache_transceiver_config
    tiers = TierPolicy.configured(
        enable_bounce=transceiver.enable_bounce,
        bounce_bytes_min=transceiver.bounce_bytes_min,
        arena_bytes=transceiver.bounce_arena_mib << 20 if transceiver.enable_bounce else 0,
        transport_key="cma" if "cma" in transfers.transport.transport_class.key else "tcp",
    )
    parts = ReceivingParts(session, peer, layout, tiers, control.connect, process_is_gone=process_is_gone)
    return compose_generation(around, settings, parts)


def watch_of(facts: list[RankFacts], rank: int) -> PidWatch:
    """The other ranks' processes, those of this host."""
    here = facts[rank].process.split("/")[0]
    pids = {}
    for fact in facts:
        boot, pid, _ = fact.process.split("/")
        if fact.rank != rank and boot == here:
            pids[fact.rank] = int(pid)
    return PidWatch(pids)


def _stage(identity: Identity, model: ModelInfo) -> StageSpec:
    if identity.role == "context":
        return StageSpec.split(model.layer_count, identity.size)[identity.rank]
    return StageSpec(0, 1, 0, model.layer_count)


def _group_work(comm: MPI.Intracomm, bell: RankBell) -> WorkChannel:
    """Typed, non-blocking broadcasts from rank 0 on a communicator of their own."""
    size = comm.Get_size()
    if size == 1:
        return BroadcastWork(None, 0)

    def ring() -> None:
        for rank in range(1, size):
            bell.ring(rank)

    broadcaster = Broadcaster(MpiComm(comm.Dup()), codec=TokenBatchCodec(BroadcastRecord), config=BROADCAST_CONFIG)
    return BroadcastWork(broadcaster, comm.Get_rank(), ring)


def _arena_memory(size_bytes: int, cuda: bool) -> Any:
    if size_bytes == 0:
        return None
    if cuda:
        import torch

        return torch.zeros(size_bytes, dtype=torch.uint8, device="cuda")
    return np.zeros(size_bytes, np.uint8)


def _address_of(memory: Any) -> int:
    return int(memory.ctypes.data) if isinstance(memory, np.ndarray) else int(memory.data_ptr())


def _copier(memory: KVMemory) -> Any:
    """Gathers and scatters bounce regions: by pointer on the host, by the device's own kernels on a GPU."""
    if memory.memory_kind != "VRAM":
        return None
    return default_copier(memory.memory_kind, memory.device_id)


def _server_info(
    identity: Identity,
    model: ModelInfo,
    layout: InstanceLayout,
    block_count: int,
    limits: StepLimits,
) -> wire.ServerInfo:
    spec, instance = identity.spec, identity.instance
    config = instance.config
    kv_tokens = block_count * config.kv_cache_config.tokens_per_block
    context = instance.role == "context"
    return wire.ServerInfo(
        ready=False,
        state="NEW",
        role=instance.role,
        owner_id=instance.owner_id,
        instance_id=identity.instance_id,
        world_size=len(layout.ranks),
        pipeline_parallel_size=len(layout.ranks) if context else 1,
        attention_dp_size=1 if context else len(layout.ranks),
        model=next(iter(spec.service.served_model_names), model.name),
        vocab_size=model.vocab_size,
        eos_token_ids=list(model.eos_token_ids),
        limits=wire.Limits(
            max_seq_len=min(config.max_seq_len or model.context_tokens_max, model.context_tokens_max),
            kv_tokens=kv_tokens,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            max_queue_size=config.max_queue_size,
            pre_active_requests=limits.pre_active_max,
        ),
        layout=msgspec.json.decode(layout.to_json()),
        profile=kv_profile(model),
    )


def _published(
    comm: MPI.Intracomm, owner: EndpointOwner, facts: list[RankFacts], info: wire.ServerInfo, rank: int
) -> str:
    """Publish the final runtime's endpoint on rank 0; every rank learns the generation. The API is not up yet."""
    generation = b""
    if rank == 0:
        record = owner.finalize().publish(
            tuple(fact.control_address for fact in facts),
            profile_of(info),
        )
        generation = str(record.generation).encode()
    return exchange(comm, generation)[0].decode()
