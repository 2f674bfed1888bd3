"""Two whole instances in one process, stepped by hand: real loop, desk, transceivers, sessions, agreement; fake wires.

Nothing here waits or looks at a clock. ``Pair.step`` gives one rank one iteration; a test chooses the order, holds links,
cancels, kills, and looks at every record. The engine is a real one whose steps are run to their end at launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from kv_bounce_planner.planning import InstanceLayout, KVLayout, encode_layout, from_kv_memory
from kv_bounce_planner.sessions import (
    BounceArena,
    ExposureLedger,
    PeerId,
    Receiver,
    Sender,
    SessionConfig,
    SessionResources,
)
from kv_bounce_planner.testing import FakeNetwork, FakeTransport, FakeWorld
from meta_executor.config import SyntheticConfig
from meta_executor.engine.base import Engine, KVMemory, SamplingParams, StageSpec, StepHandle, StepInput
from meta_executor.engine.synthetic import SyntheticEngine
from meta_executor.executor.aux_slots import AuxSlots
from meta_executor.executor.compose import (
    ComposedRank,
    ReceivingParts,
    SendingParts,
    Settings,
    Surroundings,
    compose_context,
    compose_generation,
)
from meta_executor.executor.desk import Desk
from meta_executor.executor.links import LocalWorld
from meta_executor.executor.loop import RankLoop
from meta_executor.executor.memory import FollowedBlocks, PlannedBlocks
from meta_executor.executor.messages import Peer
from meta_executor.executor.ownership import Registry
from meta_executor.executor.request import Answers, Notice, Request, ScheduleStyle, decoder, encoder
from meta_executor.executor.scheduler import StepLimits
from meta_executor.executor.tiers import TierPolicy
from meta_executor.executor.work import ChainWork
from pp_agreement import Agreement, AgreementConfig, Domain, InProcessNetwork


class PromptEngine:
    """An engine whose steps have ended when ``launch`` returns. ``fail``: step ids that end in an error instead."""

    def __init__(self, engine: SyntheticEngine) -> None:
        self._engine = engine
        self.model = engine.model
        self.stage = engine.stage
        self.fail: set[int] = set()

    def allocate_kv(self, block_count: int, block_tokens: int) -> KVMemory:
        """The engine's."""
        return self._engine.allocate_kv(block_count, block_tokens)

    def launch(self, step: StepInput) -> StepHandle:
        """Run the step now."""
        if step.step_id in self.fail:
            step = StepInput.of(step.step_id, (), step.hidden)
        handle = self._engine.launch(step)
        try:
            handle.result()
        except Exception:  # noqa: BLE001, S110 - raised again by whoever asks the handle
            pass
        return handle

    def close(self) -> None:
        """End the engine's thread."""
        self._engine.close()


@dataclass
class FakeRank:
    """One rank and what it was made of."""

    made: ComposedRank
    session: Sender | Receiver
    engine: PromptEngine
    memory: KVMemory
    agreement: Agreement | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def loop(self) -> RankLoop:
        """Its loop."""
        return self.made.loop

    @property
    def registry(self) -> Registry:
        """Its requests."""
        return self.made.registry

    @property
    def blocks(self) -> PlannedBlocks | FollowedBlocks:
        """Its blocks."""
        return self.made.blocks

    @property
    def transceiver(self) -> Any:
        """Its transceiver, of whichever kind."""
        return self.made.transceiver


class Heard:
    """What an instance has handed out, by request. ``get`` and ``in``: the notices."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.notices: dict[int, list[Notice]] = {}

    def deliver(self, answers: Answers) -> None:
        """A hand-over, as it would have come over a wire."""
        answers = _DECODER.decode(_ENCODER.encode(answers))
        for request_id, token in answers.pairs():
            self.tokens.setdefault(request_id, []).append(token)
        for notice in answers.notices:
            self.notices.setdefault(notice.request_id, []).append(notice)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self.notices

    def __getitem__(self, request_id: int) -> list[Notice]:
        return self.notices[request_id]

    def get(self, request_id: int, default: Iterable[Notice] = ()) -> list[Notice]:
        """All that was said of a request beside its tokens."""
        return self.notices.get(request_id, list(default))


_ENCODER = encoder()
_DECODER = decoder(Answers)


@dataclass
class FakeInstance:
    """One instance."""

    name: str
    ranks: list[FakeRank]
    desk: Desk
    layout: InstanceLayout
    answers: Heard
    #: Frames between its ranks.
    links: LocalWorld

    def tokens(self, request_id: int) -> list[int]:
        """All tokens that were handed out for a request."""
        return self.answers.tokens.get(request_id, [])

    def finish(self, request_id: int) -> str:
        """The finish reason of its last notice, "" while there is none."""
        notices = self.answers.notices.get(request_id, [])
        return notices[-1].finish_reason if notices else ""


@dataclass(frozen=True)
class PairConfig:
    """Shapes and limits of a pair of instances."""

    stages: int = 4
    generation_ranks: int = 2
    context_blocks: int = 64
    generation_blocks: int = 64
    block_tokens: int = 4
    max_batch_size: int = 4
    max_num_tokens: int = 16
    pre_active_requests: int | None = None
    bounce: bool = False
    reuse: bool = False
    layer_count: int = 4
    credits: int = 64
    lease_timeout_s: float | None = None


class Pair:
    """A context and a generation instance that can reach each other."""

    def __init__(self, config: PairConfig = PairConfig(), *, world: FakeWorld | None = None) -> None:
        self.config = config
        self.now_s = 0.0
        self.world = world or FakeWorld()
        self.network = FakeNetwork()
        #: Processes of ranks that have left, and links that end after what such a rank has sent: (it, its peer).
        self.gone: set[str] = set()
        self.ending: list[tuple[PeerId, PeerId]] = []
        self.model = SyntheticConfig(layer_count=config.layer_count, kv_head_count=1, head_dim=2, vocab_size=997)
        self.domain = Domain(1, tuple(range(config.stages)))
        self.agreement_network = InProcessNetwork(self.domain)
        self._arenas: list[np.ndarray[Any, Any]] = []
        self.context = self._context()
        self.generation = self._generation()
        self.context_name = "ctx/g1"
        self.generation.desk.announce_peer(
            Peer(
                self.context_name,
                encode_layout(self.context.layout),
                tuple(f"fake:{r}" for r in range(config.stages)),
                tuple(_process("context", r) for r in range(config.stages)),
            )
        )

    # -- driving ------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[FakeRank]:
        """All ranks: context, then generation."""
        return [*self.context.ranks, *self.generation.ranks]

    def step(self, rank: FakeRank) -> bool:
        """One iteration of one rank."""
        self.now_s += 0.0001
        if rank.loop.left:
            return False
        moved = rank.loop.iterate(self.now_s)
        self._end_processes()
        return moved

    def _end_processes(self) -> None:
        """A rank that has left: its process is gone, and its links end after what it has sent."""
        sides = [(self.context, self.generation), (self.generation, self.context)]
        for instance, others in sides:
            for index, rank in enumerate(instance.ranks):
                if rank.loop.left and _process(instance.name, index) not in self.gone:
                    self.gone.add(_process(instance.name, index))
                    peers = [_peer(others.name, other) for other in range(len(others.ranks))]
                    self.ending += [(_peer(instance.name, index), peer) for peer in peers]
        for one, other in list(self.ending):
            if not self.network.waiting(one, other):
                self.ending.remove((one, other))
                self.network.sever(one, other)

    def sever(self, context_rank: int, generation_rank: int) -> None:
        """Break a control link between two ranks that both live."""
        self.network.sever(_peer("context", context_rank), _peer("generation", generation_rank))

    def heal(self, context_rank: int, generation_rank: int) -> None:
        """A new link between them."""
        self.network.heal(_peer("context", context_rank), _peer("generation", generation_rank))

    def kill(self, rank: FakeRank) -> None:
        """End a rank's process as it is."""
        rank.loop.left = True
        self._end_processes()

    def run(
        self, until: Callable[[], bool], *, rounds_max: int = 3000, order: Iterable[FakeRank] | None = None
    ) -> None:
        """Rounds over all ranks until the condition holds.

        Raises:
            AssertionError: It does not within ``rounds_max``; tells where every request stands.
        """
        ranks = list(order or self.ranks)
        for _ in range(rounds_max):
            if until():
                return
            for rank in ranks:
                self.step(rank)
        raise AssertionError("nothing more happens:\n" + self.story())

    def settle(self, rounds: int = 50) -> None:
        """So many rounds over all ranks."""
        for _ in range(rounds):
            for rank in self.ranks:
                self.step(rank)

    def story(self) -> str:
        """Every live request of every rank, with what happened to it."""
        lines = []
        for instance in (self.context, self.generation):
            for index, rank in enumerate(instance.ranks):
                lines.append(f"{instance.name} rank {index}: faults {rank.faults} {rank.registry.statistics()}")
                for sequence in rank.registry:
                    lines.append(f"  {sequence.request_id} {sequence.state.value}: {' > '.join(sequence.story)}")
        return "\n".join(lines)

    def idle(self) -> bool:
        """No rank holds a request."""
        return all(len(rank.registry) == 0 for rank in self.ranks)

    def validate(self) -> None:
        """Re-prove every rank's books."""
        for rank in self.ranks:
            rank.registry.validate()
            if isinstance(rank.blocks, PlannedBlocks):
                rank.blocks.pool.validate()
            if rank.agreement is not None:
                rank.agreement.validate()
            assert not rank.faults, rank.faults  # noqa: S101 - a check for tests

    def close(self) -> None:
        """End the engines' threads."""
        for rank in self.ranks:
            rank.engine.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit_context(
        self,
        request_id: int,
        prompt: list[int],
        *,
        max_tokens: int = 4,
        style: ScheduleStyle = "context_first",
        deadline_s: float | None = None,
        prompt_logprobs: int | None = None,
    ) -> None:
        """The context leg."""
        self.context.desk.submit(
            Request(
                request_id=request_id,
                token_ids=np.asarray(prompt, np.int32),
                sampling=SamplingParams(max_tokens, prompt_logprobs=prompt_logprobs),
                schedule_style=style,
                deadline_s=deadline_s,
            )
        )

    def submit_generation(
        self,
        request_id: int,
        prompt: list[int],
        *,
        max_tokens: int = 4,
        first_token: int | None = None,
        style: ScheduleStyle = "context_first",
    ) -> None:
        """The generation leg."""
        self.generation.desk.submit(
            Request(
                request_id=request_id,
                token_ids=np.asarray(prompt, np.int32),
                sampling=SamplingParams(max_tokens),
                schedule_style=style,
                first_token=first_token,
                peer=self.context_name,
            )
        )

    def submit_alone(
        self, request_id: int, prompt: list[int], *, max_tokens: int = 4, prompt_logprobs: int | None = None
    ) -> None:
        """A generation leg without a context leg."""
        self.generation.desk.submit(
            Request(
                request_id=request_id,
                token_ids=np.asarray(prompt, np.int32),
                sampling=SamplingParams(max_tokens, prompt_logprobs=prompt_logprobs),
                prefills_here=True,
            )
        )

    def serve(self, request_id: int, prompt: list[int], *, max_tokens: int = 4) -> list[int]:
        """One context-first request from end to end. Returns all its tokens."""
        self.submit_context(request_id, prompt, max_tokens=max_tokens)
        self.run(lambda: bool(self.context.answers.get(request_id)))
        first = self.context.tokens(request_id)[0]
        if not self.context.finish(request_id):
            self.submit_generation(request_id, prompt, max_tokens=max_tokens, first_token=first)
            self.run(lambda: bool(self.generation.finish(request_id)))
        return [first, *self.generation.tokens(request_id)]

    def reference(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What one engine that holds all layers answers."""
        engine = SyntheticEngine(self.model, StageSpec(0, 1, 0, self.model.layer_count))
        try:
            return reference_tokens(engine, prompt, max_tokens, self.config.block_tokens)
        finally:
            engine.close()

    # -- building -----------------------------------------------------------------------------------------------------

    def _engine(self, stage: StageSpec, block_count: int) -> tuple[PromptEngine, KVMemory]:
        engine = PromptEngine(SyntheticEngine(self.model, stage))
        memory = engine.allocate_kv(block_count, self.config.block_tokens)
        self.world.add_buffer(memory.owner)
        return engine, memory

    def _aux(self, count: int) -> AuxSlots:
        aux = AuxSlots(count)
        self.world.add_buffer(aux._slab)
        return aux

    def _arena(self) -> BounceArena | None:
        if not self.config.bounce:
            return None
        buffer = np.zeros(1 << 20, np.uint8)
        self._arenas.append(buffer)
        return BounceArena(self.world.add_buffer(buffer), buffer.nbytes)

    def _layout(self, memory: KVMemory, rank: int, stage: StageSpec) -> KVLayout:
        return from_kv_memory(
            cast(Any, memory),
            rank=rank,
            layer_ids=tuple(stage.layers),
            head_total=self.model.kv_head_count,
            dtype="float32",
        )

    def _limits(self, stage_count: int) -> StepLimits:
        return StepLimits.for_instance(
            max_batch_size=self.config.max_batch_size,
            max_num_tokens=self.config.max_num_tokens,
            stage_count=stage_count,
            pre_active_requests=self.config.pre_active_requests,
        )

    def _settings(self, stage_count: int, block_count: int) -> Settings:
        config = self.config
        return Settings(
            limits=self._limits(stage_count),
            block_count=block_count,
            block_tokens=config.block_tokens,
            enable_block_reuse=config.reuse,
            lease_timeout_s=config.lease_timeout_s,
        )

    def _around(
        self, rank: int, world: LocalWorld, engine: PromptEngine, heard: Heard, faults: list[str]
    ) -> Surroundings:
        link = world.link(rank)
        return Surroundings(
            rank=rank,
            size=world.size,
            engine=engine,
            aux=self._aux(256),
            link=link,
            work=ChainWork(link),
            clock=lambda: self.now_s,
            deliver=heard.deliver,
            on_fault=faults.append,
        )

    def _context(self) -> FakeInstance:
        config = self.config
        stages = StageSpec.split(config.layer_count, config.stages)
        world = LocalWorld(config.stages)
        engines = [self._engine(stage, config.context_blocks) for stage in stages]
        layouts = [self._layout(memory, rank, stages[rank]) for rank, (_, memory) in enumerate(engines)]
        source = InstanceLayout("ctx", tuple(layouts), pp_size=config.stages)
        heard = Heard()
        ranks: list[FakeRank] = []
        for rank, (engine, memory) in enumerate(engines):
            peer = _peer("context", rank)
            agreement = Agreement(
                self.domain,
                rank,
                self.agreement_network.transport(rank),
                AgreementConfig(credits=config.credits, lease_timeout_s=config.lease_timeout_s),
                clock=lambda: self.now_s,
            )
            agreement.open()
            sender = Sender(
                peer,
                SessionResources(
                    FakeTransport(self.world, peer),
                    self.network.channel(peer, linked=True),
                    arena=self._arena(),
                    clock=lambda: self.now_s,
                ),
            )
            faults: list[str] = []
            made = compose_context(
                self._around(rank, world, engine, heard, faults),
                self._settings(config.stages, config.context_blocks),
                SendingParts(
                    sender,
                    agreement,
                    source,
                    process_of=lambda peer: _process("generation", peer.rank),
                    process_is_gone=self.gone.__contains__,
                ),
            )
            ranks.append(FakeRank(made, sender, engine, memory, agreement, faults))
        return self._instance("context", ranks, source, heard, world)

    def _generation(self) -> FakeInstance:
        config = self.config
        stage = StageSpec(0, 1, 0, config.layer_count)
        world = LocalWorld(config.generation_ranks)
        engines = [self._engine(stage, config.generation_blocks) for _ in range(config.generation_ranks)]
        layouts = [self._layout(memory, rank, stage) for rank, (_, memory) in enumerate(engines)]
        layout = InstanceLayout("gen", tuple(layouts), adp_size=config.generation_ranks)
        tiers = TierPolicy.configured(
            enable_bounce=config.bounce, bounce_bytes_min=0, arena_bytes=1 << 20, transport_key="tcp"
        )
        heard = Heard()
        ranks: list[FakeRank] = []
        for rank, (engine, memory) in enumerate(engines):
            peer = _peer("generation", rank)
            receiver = Receiver(
                peer,
                SessionResources(
                    FakeTransport(self.world, peer),
                    self.network.channel(peer, linked=True),
                    arena=self._arena(),
                    clock=lambda: self.now_s,
                ),
                SessionConfig(drain_deadline_s=1e9),
                # Each rank stands for a process: what one that was killed had exposed ends with it.
                ledger=ExposureLedger(),
            )
            faults: list[str] = []
            made = compose_generation(
                self._around(rank, world, engine, heard, faults),
                self._settings(1, config.generation_blocks),
                ReceivingParts(
                    receiver,
                    peer,
                    layouts[rank],
                    tiers,
                    connect=lambda peer, address: None,
                    process_is_gone=self.gone.__contains__,
                ),
            )
            ranks.append(FakeRank(made, receiver, engine, memory, None, faults))
        return self._instance("generation", ranks, layout, heard, world)

    @staticmethod
    def _instance(
        name: str, ranks: list[FakeRank], layout: InstanceLayout, heard: Heard, links: LocalWorld
    ) -> FakeInstance:
        desk = ranks[0].made.desk
        if desk is None:
            raise ValueError("rank 0 has a desk")
        return FakeInstance(name, ranks, desk, layout, heard, links)


def _peer(instance: str, rank: int) -> PeerId:
    """What names a rank to its peers."""
    return PeerId("ctx", "g1", rank) if instance == "context" else PeerId("gen", "h1", rank)


def _process(instance: str, rank: int) -> str:
    """What names a rank's process."""
    return f"fake-{instance}/{rank}"


def reference_tokens(engine: Engine, prompt: list[int], max_tokens: int, block_tokens: int) -> list[int]:
    """Greedy tokens of one request on one engine that holds all layers, one chunk and then one token at a time."""
    from meta_executor.engine.base import SamplingParams, SequenceStep

    total = len(prompt) + max_tokens
    engine.allocate_kv(-(-total // block_tokens), block_tokens)
    blocks = np.arange(-(-total // block_tokens), dtype=np.int64)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    pending, start, made = np.asarray(prompt, np.int32), 0, []
    for step_id in range(max_tokens):
        step = StepInput.of(step_id, (SequenceStep(1, pending, start, blocks, sampling),))
        output = engine.launch(step).result()
        if output.token_ids is None:
            raise ValueError("the engine is not a whole model")
        start += len(pending)
        made.append(int(output.token_ids[0]))
        pending = output.token_ids[:1]
    return made
