"""Builds one rank: engine, memory, transfer endpoint, agreement, loop; taken apart in the opposite order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from comm_broadcast import Broadcaster, MpiComm, TokenBatchCodec
from endpoint_lifecycle import EndpointOwner, EndpointProfile, IdleBackoff
from kv_bounce_planner.planning import InstanceLayout, default_copier, from_kv_memory
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
from meta_executor.config import ConfigError, EngineConfig, InstanceConfig, InstanceSpec, RunSpec
from meta_executor.engine.base import Engine, KVMemory, ModelInfo, StageSpec, create_engine, model_info
from meta_executor.engine.kv_pool import BlockPool
from meta_executor.executor._mpi import MpiLink
from meta_executor.executor.admission import ContextAdmission, GenerationAdmission
from meta_executor.executor.aux_slots import AuxSlots
from meta_executor.executor.control import ReceiverControl, SenderControl
from meta_executor.executor.desk import Desk
from meta_executor.executor.loop import RankLoop
from meta_executor.executor.memory import FollowedBlocks, PlannedBlocks
from meta_executor.executor.ownership import Registry
from meta_executor.executor.scheduler import StepLimits
from meta_executor.executor.tiers import TierPolicy
from meta_executor.executor.transceiver_context import ContextTransceiver
from meta_executor.executor.transceiver_generation import GenerationTransceiver
from meta_executor.executor.work import BroadcastRecord, BroadcastWork, ChainWork, WorkChannel
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
    AllgatherAgreement,
    Domain,
    MpiTransport,
    PidWatch,
    contribution,
    negotiate,
)

#: Open incarnations of the agreement at once: every admitted request until its memory is back (count).
CREDITS_MIN = 256
#: AUX slots of a rank: transfers of first tokens at once (count).
AUX_SLOTS = 4096


@dataclass
class Rank:
    """Everything that one rank is made of."""

    spec: RunSpec
    instance: InstanceSpec
    instance_id: str
    generation: str
    rank: int
    size: int
    comm: Any
    owner: EndpointOwner
    engine: Engine
    memory: KVMemory
    block_bytes: int
    layout: InstanceLayout
    transport: NixlTransport
    registration: Any
    listening: SenderControl
    control: Any
    session: Any
    agreement: Any
    link: MpiLink
    work: WorkChannel
    registry: Registry
    blocks: PlannedBlocks | FollowedBlocks
    transceiver: Any
    loop: RankLoop
    desk: Desk | None
    admission: Any
    backoff: IdleBackoff
    info: wire.ServerInfo
    modes: dict[str, Any]
    #: Other ranks' processes; None where the agreement looks at them itself.
    watch: PidWatch | None
    buffers: list[Any]


def log(text: str) -> None:
    """One structured line, in one write."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


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
        startup_s=max(120.0, config.cache_transceiver_config.silence_s),
        lease_timeout_s=config.cache_transceiver_config.lease_timeout_s,
    )


def assemble(
    spec: RunSpec,
    instance: InstanceSpec,
    instance_id: str,
    comm: Any,
    *,
    deliver: Callable[[list[Any]], None],
    phase: Callable[[str], None],
) -> Rank:
    """Build this rank; collective over the instance.

    Args:
        spec, instance, instance_id: What to build.
        comm: The instance's world.
        deliver: Gets rank 0's answers.
        phase: Told what happens now, for a person.

    Raises:
        ConfigError: The same on every rank, before any request; names rank and field.
    """
    rank, size = comm.Get_rank(), comm.Get_size()
    role, config, service = instance.role, instance.config, spec.service
    check_world(size, config)
    generation_first = service.schedule_style == "generation_first"
    transceiver_config = config.cache_transceiver_config
    owner = EndpointOwner(instance.owner_id, instance_id, role)

    phase("loading weights")
    model = model_info(service.engine)
    stage = _stage(role, model, rank, size)
    engine = create_engine(service.engine, stage)

    phase("measuring memory")
    arena_bytes = transceiver_config.bounce_arena_mib << 20 if transceiver_config.enable_bounce else 0
    cuda = uses_cuda(service.engine)
    arena_memory = _arena_memory(arena_bytes, cuda)
    budget = measure_budget(
        owner,
        engine,
        config.kv_cache_config,
        rank=rank,
        sharing_ranks=max(spec.measuring_ranks, 1),
        arena=None if cuda else arena_memory,
        free_bytes=device_free_bytes if cuda else host_free_bytes,
        together=lambda: barrier(comm),
    )
    measured = [msgspec.json.decode(p, type=RankBudget) for p in exchange(comm, msgspec.json.encode(budget))]
    agreed = agreed_budget(measured, config.kv_cache_config, f"{role}_servers")
    block_count = agreed.block_count
    if rank == 0:
        log(f"{instance.owner_id}: KV: {agreed.words}")
    block_tokens = config.kv_cache_config.tokens_per_block
    memory = engine.allocate_kv(block_count, block_tokens)
    aux = AuxSlots(AUX_SLOTS, cuda_device=memory.device_id if memory.memory_kind == "VRAM" else None)

    phase("exchanging layouts")
    backoff = IdleBackoff()
    listening = SenderControl(f"ipc://{spec.path('ipc', f'{instance.owner_id}.{rank}.c')}", spec.key(), backoff.notify)
    address = listening.start()
    limits = StepLimits.for_instance(
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        stage_count=stage.stage_count,
        pre_active_requests=transceiver_config.max_num_generation_first_pre_active_requests,
    )
    domain = Domain(1, tuple(range(size))) if role == "context" else None
    bounds = agreement_config(config, limits) if role == "context" else None
    layout = from_kv_memory(
        cast(Any, memory),
        rank=rank,
        layer_ids=tuple(stage.layers),
        head_total=model.kv_head_count,
        dtype=model.kv_dtype,
    )
    facts = RankFacts(
        rank=rank,
        layout=msgspec.json.decode(layout.to_json()),
        control_address=address,
        block_count=block_count,
        process=this_process(),
        agreement=contribution(
            {
                "async_terminal": transceiver_config.enable_async_terminal_agreement,
                "async_ready": transceiver_config.enable_async_readiness_agreement,
            },
            domain,
            bounds,
            topology={
                "tensor_parallel": config.tensor_parallel_size if role == "context" else 1,
                "context_parallel": config.context_parallel_size,
                "attention_dp": bool(config.enable_attention_dp) if role == "context" else False,
                "backend": transceiver_config.backend,
            },
        ),
    )
    try:
        check_qualified(role, config, generation_first=generation_first)
    except ConfigError as error:
        facts = msgspec.structs.replace(facts, refused_field=error.field, refused=str(error))
    everyone = agreed_facts(exchange(comm, msgspec.json.encode(facts)))
    mode = negotiate(
        {fact.rank: fact.agreement for fact in everyone},
        qualified={"tensor_parallel": 1, "context_parallel": 1, "attention_dp": False, "backend": "NIXL"},
    )
    whole = instance_layout(instance_id, role, everyone)
    info = _server_info(spec, instance, instance_id, model, whole, block_count, limits)
    info = msgspec.structs.replace(info, processes=tuple(fact.process for fact in everyone))
    generation = _published(comm, owner, everyone, info, rank)

    phase("opening transfers")
    peer = PeerId(instance_id, generation, rank)
    transport = NixlTransport(peer, config=NixlConfig(spare_agents=1))
    regions = [MemoryRegion(a, n, memory.memory_kind, memory.device_id) for a, n in memory.regions]
    regions.append(MemoryRegion(*aux.region, memory.memory_kind, memory.device_id))
    arena = None
    if arena_memory is not None:
        base, size_bytes = _address_of(arena_memory), arena_bytes
        regions.append(MemoryRegion(base, size_bytes, memory.memory_kind, memory.device_id))
        arena = BounceArena(base, size_bytes, memory_kind=memory.memory_kind, device_id=memory.device_id)
    registration = transport.register(regions)
    # Making an agent takes tens of milliseconds: the first peer finds one ready.
    transport.prepare_agents()
    session_config = SessionConfig(
        drain_deadline_s=transceiver_config.transfer_timeout_s,
        quarantine_bytes_max=transceiver_config.quarantine_budget_mib << 20,
    )
    copier = _copier(memory)

    def resources(channel: Any) -> SessionResources:
        return SessionResources(
            transport,
            channel,
            arena=arena,
            copier=copier,
            memory_kind=memory.memory_kind,
            device_id=memory.device_id,
        )

    registry = Registry()
    link = MpiLink(comm)
    watch = watch_of(everyone, rank)
    work: WorkChannel
    desk = None
    admission: Any = None
    agreement: Any = None
    if role == "context":
        if domain is None or bounds is None:
            raise ConfigError("role", "a context instance has a domain")
        blocks: PlannedBlocks | FollowedBlocks
        if rank == 0:
            blocks = PlannedBlocks(
                BlockPool(block_count, block_tokens, enable_reuse=config.kv_cache_config.enable_block_reuse)
            )
        else:
            blocks = FollowedBlocks(block_count, block_tokens)
        asynchronous = mode.terminal or (size == 1)
        if asynchronous:
            agreement = Agreement(domain, rank, MpiTransport(comm, domain, watch=watch.dead), bounds)
        else:
            agreement = AllgatherAgreement(domain, rank, comm, bounds)
        agreement.open()
        control: Any = listening
        session: Any = Sender(peer, resources(listening), session_config)
        transceiver: Any = ContextTransceiver(
            rank=rank,
            is_last=rank == size - 1,
            registry=registry,
            blocks=blocks,
            sender=session,
            agreement=agreement,
            source=whole,
            aux=aux,
            transfer_timeout_s=transceiver_config.transfer_timeout_s,
            lease_timeout_s=transceiver_config.lease_timeout_s,
        )
        work = ChainWork(link)
        if rank == 0:
            admission = ContextAdmission(
                peer_is_ready=transceiver.peer_is_ready,
                pre_active_count=lambda: transceiver.pre_active_count,
                pre_active_max=limits.pre_active_max,
                credits=lambda: agreement.credits_available,
            )
    else:
        blocks = PlannedBlocks(
            BlockPool(block_count, block_tokens, enable_reuse=config.kv_cache_config.enable_block_reuse)
        )
        control = ReceiverControl(peer, spec.key(), backoff.notify)
        session = Receiver(peer, resources(control), session_config)
        key = "cma" if "cma" in transport.transport_class.key else "tcp"
        transceiver = GenerationTransceiver(
            self_id=peer,
            registry=registry,
            blocks=blocks,
            receiver=session,
            connect=control.connect,
            layout=layout,
            aux=aux,
            tiers=TierPolicy.configured(
                enable_bounce=transceiver_config.enable_bounce,
                bounce_bytes_min=transceiver_config.bounce_bytes_min,
                arena_bytes=arena_bytes,
                transport_key=key,
            ),
            transfer_timeout_s=transceiver_config.transfer_timeout_s,
            log=lambda text: log(f"{instance.owner_id} rank {rank}: {text}"),
            lost=control.take_lost,
            process_is_gone=process_is_gone,
        )
        work = _group_work(comm)
        if rank == 0:
            admission = GenerationAdmission(rank_count=size, policy=config.router.type)
    if rank == 0:
        desk = Desk(
            role=role,
            admission=admission,
            requests_max=config.max_queue_size,
            deliver=deliver,
            wake=backoff.notify,
            clock=time.monotonic,
            peer_wait_max_s=transceiver_config.transfer_timeout_s,
        )
    loop = RankLoop(
        role=role,
        rank=rank,
        stage_count=stage.stage_count,
        engine=engine,
        registry=registry,
        blocks=blocks,
        limits=limits,
        link=link,
        work=work,
        transceiver=transceiver,
        desk=desk,
        on_fault=lambda diagnosis: backoff.notify(),
    )
    modes = {
        "schedule_style": service.schedule_style,
        "async_terminal": mode.terminal,
        "async_ready": mode.ready,
        "bounce": transceiver_config.enable_bounce,
        "block_reuse": config.kv_cache_config.enable_block_reuse,
        "fast_path": bool(config.rpc.local_fastpath),
        "submit_batch_max": config.rpc.submit_batch_max or 1,
        "transport": transport.transport_class.key,
        "engine": service.engine.kind,
        "pre_active_requests": limits.pre_active_max,
        "compute_cap": limits.active_max,
    }
    return Rank(
        spec=spec,
        instance=instance,
        instance_id=instance_id,
        generation=generation,
        rank=rank,
        size=size,
        comm=comm,
        owner=owner,
        engine=engine,
        memory=memory,
        block_bytes=block_bytes_of(engine, block_tokens),
        layout=whole,
        transport=transport,
        registration=registration,
        listening=listening,
        control=control,
        session=session,
        agreement=agreement,
        link=link,
        work=work,
        registry=registry,
        blocks=blocks,
        transceiver=transceiver,
        loop=loop,
        desk=desk,
        admission=admission,
        backoff=backoff,
        info=info,
        modes=modes,
        watch=None if role == "context" and mode.terminal else watch,
        buffers=[arena_memory, aux],
    )


def watch_of(facts: list[RankFacts], rank: int) -> PidWatch:
    """The other ranks' processes, those of this host."""
    here = facts[rank].process.split("/")[0]
    pids = {}
    for fact in facts:
        boot, pid, _ = fact.process.split("/")
        if fact.rank != rank and boot == here:
            pids[fact.rank] = int(pid)
    return PidWatch(pids)


def _stage(role: str, model: ModelInfo, rank: int, size: int) -> StageSpec:
    if role == "context":
        return StageSpec.split(model.layer_count, size)[rank]
    return StageSpec(0, 1, 0, model.layer_count)


def _group_work(comm: Any) -> WorkChannel:
    """Typed, non-blocking broadcasts from rank 0 on a communicator of their own."""
    if comm.Get_size() == 1:
        return BroadcastWork(None, 0)
    return BroadcastWork(Broadcaster(MpiComm(comm.Dup()), codec=TokenBatchCodec(BroadcastRecord)), comm.Get_rank())


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
    spec: RunSpec,
    instance: InstanceSpec,
    instance_id: str,
    model: ModelInfo,
    layout: InstanceLayout,
    block_count: int,
    limits: StepLimits,
) -> wire.ServerInfo:
    config = instance.config
    kv_tokens = block_count * config.kv_cache_config.tokens_per_block
    context = instance.role == "context"
    return wire.ServerInfo(
        ready=False,
        state="NEW",
        role=instance.role,
        owner_id=instance.owner_id,
        instance_id=instance_id,
        world_size=len(layout.ranks),
        pipeline_parallel_size=len(layout.ranks) if context else 1,
        attention_dp_size=1 if context else len(layout.ranks),
        model=spec.service.served_model_name or model.name,
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


def _published(comm: Any, owner: EndpointOwner, facts: list[RankFacts], info: wire.ServerInfo, rank: int) -> str:
    """Publish the final runtime's endpoint on rank 0; every rank learns the generation. The API is not up yet."""
    generation = b""
    if rank == 0:
        record = owner.finalize().publish(
            tuple(fact.control_address for fact in facts),
            EndpointProfile(
                layout_fingerprint=info.profile,
                dp_size=info.attention_dp_size,
                pp_size=info.pipeline_parallel_size,
                limits={} if info.limits is None else msgspec.to_builtins(info.limits),
            ),
        )
        generation = str(record.generation).encode()
    return exchange(comm, generation)[0].decode()
