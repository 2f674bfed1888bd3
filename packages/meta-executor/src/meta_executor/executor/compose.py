"""One rank from its parts: the only place where registry, blocks, session, transceiver, steps, desk and loop are joined.

Production gives real parts (:mod:`meta_executor.rank.assemble`: MPI, NIXL, sockets), tests give fakes of the same interfaces
(:mod:`meta_executor.executor.testing`); what is made of them is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kv_bounce_planner.planning import InstanceLayout, KVLayout
from kv_bounce_planner.sessions import PeerId, Receiver, Sender
from meta_executor.engine.base import Engine
from meta_executor.engine.kv_pool import BlockPool
from meta_executor.executor.admission import ContextAdmission, GenerationAdmission
from meta_executor.executor.aux_slots import AuxSlots
from meta_executor.executor.decode import DecodeCompute
from meta_executor.executor.desk import AdmissionRule, Desk
from meta_executor.executor.links import Link
from meta_executor.executor.loop import RankLoop
from meta_executor.executor.memory import FollowedBlocks, PlannedBlocks
from meta_executor.executor.ownership import Registry
from meta_executor.executor.prefill import PrefillCompute
from meta_executor.executor.request import AnswerBook, Answers, Role
from meta_executor.executor.scheduler import StepLimits
from meta_executor.executor.tiers import TierPolicy
from meta_executor.executor.transceiver_context import AnyAgreement, ContextTransceiver
from meta_executor.executor.transceiver_generation import GenerationTransceiver
from meta_executor.executor.work import WorkChannel


@dataclass(frozen=True)
class Settings:
    """What a rank is configured to be; the same on every rank of its instance.

    Attributes:
        limits: What fits into a step, and how many requests wait where.
        block_count, block_tokens: The rank's KV pool.
        enable_block_reuse: Keep finished prefixes by their hash.
        transfer_timeout_s: A transfer, or KV that nobody fetches, is given up after this.
        lease_timeout_s: The agreement's; None: it has none.
        requests_max: Requests of the instance at once, waiting ones included (count).
        routing_policy: How a request finds its attention-DP rank.
    """

    limits: StepLimits
    block_count: int
    block_tokens: int
    enable_block_reuse: bool = False
    transfer_timeout_s: float = 60.0
    lease_timeout_s: float | None = None
    requests_max: int = 4096
    routing_policy: str = "balanced"


@dataclass(frozen=True)
class Surroundings:
    """What a rank calls, and what calls it.

    Attributes:
        rank, size: Place in the instance's world.
        engine: This rank's stage, its KV memory allocated.
        aux: Slots for first tokens.
        link, work: Ways to the other ranks.
        clock: Monotonic time (s).
        wake: Ends the loop's wait, from any thread.
        deliver: Rank 0: gets each hand-over, from the loop's thread.
        on_fault: Told once, with the first diagnosis.
        say: Gets lines for the log.
    """

    rank: int
    size: int
    engine: Engine
    aux: AuxSlots
    link: Link
    work: WorkChannel
    clock: Callable[[], float]
    wake: Callable[[], None] = lambda: None
    deliver: Callable[[Answers], None] = lambda answers: None
    on_fault: Callable[[str], None] = lambda diagnosis: None
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class SendingParts:
    """How a context rank hands its KV out.

    Attributes:
        session: Serves receive requests from this rank's memory.
        agreement: Over the instance's ranks.
        layout: Of the whole instance.
        process_of: A receiver's process, by its own word.
        process_is_gone: Whether the operating system says that a peer's process has ended (of this host only).
    """

    session: Sender
    agreement: AnyAgreement
    layout: InstanceLayout
    process_of: Callable[[PeerId], str] = lambda peer: ""
    process_is_gone: Callable[[str], bool] = lambda process: False


@dataclass(frozen=True)
class ReceivingParts:
    """How a generation rank gets its KV.

    Attributes:
        session: Publishes destinations and proves what has come.
        self_id: This rank's process.
        layout: How this rank lays its KV out.
        tiers: Chooses direct or bounce.
        connect: Opens the control channel to a peer rank: (peer, address).
        process_is_gone: Whether the operating system says that a peer's process has ended (of this host only).
    """

    session: Receiver
    self_id: PeerId
    layout: KVLayout
    tiers: TierPolicy
    connect: Callable[[PeerId, str], None]
    process_is_gone: Callable[[str], bool] = lambda process: False


@dataclass(frozen=True)
class ComposedRank:
    """A rank that can be iterated. ``sending`` or ``receiving`` is None by role, ``desk`` and ``admission`` beyond rank 0."""

    loop: RankLoop
    registry: Registry
    blocks: PlannedBlocks | FollowedBlocks
    sending: ContextTransceiver | None
    receiving: GenerationTransceiver | None
    desk: Desk | None
    admission: ContextAdmission | GenerationAdmission | None

    @property
    def transceiver(self) -> ContextTransceiver | GenerationTransceiver:
        """The one that the rank has."""
        either = self.sending or self.receiving
        if either is None:
            raise ValueError("a rank sends or receives")
        return either


def compose_context(around: Surroundings, settings: Settings, parts: SendingParts) -> ComposedRank:
    """One stage of a context instance."""
    registry = Registry("context")
    blocks: PlannedBlocks | FollowedBlocks
    if around.rank == 0:
        blocks = _planned(settings)
    else:
        blocks = FollowedBlocks(settings.block_count, settings.block_tokens)
    transceiver = ContextTransceiver(
        rank=around.rank,
        is_last=around.rank == around.size - 1,
        registry=registry,
        blocks=blocks,
        sender=parts.session,
        agreement=parts.agreement,
        source=parts.layout,
        aux=around.aux,
        transfer_timeout_s=settings.transfer_timeout_s,
        lease_timeout_s=settings.lease_timeout_s,
        process_of=parts.process_of,
        process_is_gone=parts.process_is_gone,
        log=around.say,
    )
    answers = AnswerBook()
    compute = PrefillCompute(
        rank=around.rank,
        stage_count=around.size,
        engine=around.engine,
        registry=registry,
        blocks=blocks,
        limits=settings.limits,
        link=around.link,
        transceiver=transceiver,
        answers=answers,
        publish=around.work.publish,
        wake=around.wake,
    )
    admission = None
    if around.rank == 0:
        admission = ContextAdmission(
            peer_is_ready=transceiver.peer_is_ready,
            pre_active_count=lambda: transceiver.pre_active_count,
            pre_active_max=settings.limits.pre_active_max,
            credits=lambda: parts.agreement.credits_available,
        )
    desk = None if admission is None else _desk("context", admission, around, settings)
    loop = RankLoop(
        rank=around.rank,
        registry=registry,
        compute=compute,
        answers=answers,
        link=around.link,
        work=around.work,
        sending=transceiver,
        receiving=None,
        desk=desk,
        on_fault=around.on_fault,
    )
    return ComposedRank(loop, registry, blocks, transceiver, None, desk, admission)


def compose_generation(around: Surroundings, settings: Settings, parts: ReceivingParts) -> ComposedRank:
    """One attention-DP rank of a generation instance."""
    registry = Registry("generation")
    blocks = _planned(settings)
    transceiver = GenerationTransceiver(
        self_id=parts.self_id,
        registry=registry,
        blocks=blocks,
        receiver=parts.session,
        connect=parts.connect,
        layout=parts.layout,
        aux=around.aux,
        tiers=parts.tiers,
        transfer_timeout_s=settings.transfer_timeout_s,
        log=around.say,
        process_is_gone=parts.process_is_gone,
    )
    answers = AnswerBook()
    compute = DecodeCompute(
        rank=around.rank,
        engine=around.engine,
        registry=registry,
        blocks=blocks,
        limits=settings.limits,
        transceiver=transceiver,
        answers=answers,
        wake=around.wake,
    )
    admission = None
    if around.rank == 0:
        admission = GenerationAdmission(rank_count=around.size, policy=settings.routing_policy)
    desk = None if admission is None else _desk("generation", admission, around, settings)
    loop = RankLoop(
        rank=around.rank,
        registry=registry,
        compute=compute,
        answers=answers,
        link=around.link,
        work=around.work,
        sending=None,
        receiving=transceiver,
        desk=desk,
        on_fault=around.on_fault,
    )
    return ComposedRank(loop, registry, blocks, None, transceiver, desk, admission)


def _planned(settings: Settings) -> PlannedBlocks:
    pool = BlockPool(settings.block_count, settings.block_tokens, enable_reuse=settings.enable_block_reuse)
    return PlannedBlocks(pool)


def _desk(role: Role, admission: AdmissionRule, around: Surroundings, settings: Settings) -> Desk:
    return Desk(
        role=role,
        admission=admission,
        requests_max=settings.requests_max,
        deliver=around.deliver,
        wake=around.wake,
        clock=around.clock,
        peer_wait_max_s=settings.transfer_timeout_s,
    )
