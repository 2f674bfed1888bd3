"""What slices take off the wait for the first token, by the clock of the fakes: real plans and sessions, paced wires.

``nox -s bench -- kv-bounce-planner``, or this file with ``PYTHONPATH=tools``.

A pipeline of stages computes a prompt chunk by chunk; each stage has a wire to the receiver that moves a chunk's KV in exactly
the time in which the stage computes it. The clock is the fakes' and goes on by a fraction of a chunk per turn, so figures are
ratios of what the protocol makes of given durations, the same on every machine. They say nothing of what Python costs; for that
stands the number of control frames that the request took, cut and not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kv_bounce_planner.planning import (
    InstanceLayout,
    KVLayout,
    RequestBlocks,
    Slice,
    TokenRange,
    WriterTransfer,
    cut_slices,
    plan_slices,
    plan_writer_slices,
)
from kv_bounce_planner.sessions import (
    BounceArena,
    ExpectedOperation,
    ExposureLedger,
    PeerId,
    Receiver,
    ReceiveRequest,
    RequestKey,
    Sender,
    SessionConfig,
    SessionResources,
    TransferIdentity,
    events,
)
from kv_bounce_planner.testing import FakeClock, FakeNetwork, FakeWorld
from kv_bounce_planner.transports.interface import TransferJob
from measure import Figure, counted, run_benchmark

BLOCK_TOKENS, HEADS, HEAD_DIM, ELEMENT = 64, 1, 4, 2
#: Turns of every session while one chunk is computed.
TURNS = 40
KEY = RequestKey(1)
#: Of 8,192 tokens, where moving takes as long as computing: 45 % less time to the first token.
GOAL = "<= 0.55"


@dataclass
class Wires:
    """One per sender: bytes move in the order in which they were handed over, at a constant rate."""

    clock: FakeClock
    bytes_per_s: float
    free_s: dict[int, float] = field(default_factory=dict)
    ends_s: dict[tuple[Any, int], float] = field(default_factory=dict)

    def __call__(self, job: TransferJob, part: int) -> str:
        rank, key = job.operation.writer_rank, (job.operation, part)
        if key not in self.ends_s:
            begin_s = max(self.clock(), self.free_s.get(rank, 0.0))
            self.free_s[rank] = self.ends_s[key] = begin_s + int(job.sizes.sum()) / self.bytes_per_s
        return "land" if self.clock() >= self.ends_s[key] else "hold"


class Service:
    """A receiver and the stages of one prompt.

    Args:
        tokens, chunk: Of the prompt, and of each computing step (tokens).
        stages: Of the pipeline, each with its layers.
        slices: How the transfer is cut.
        bounce: Whether regions are offered.
    """

    def __init__(self, tokens: int, chunk: int, stages: int, slices: tuple[Slice, ...], *, bounce: bool) -> None:
        self.tokens, self.chunk, self.stages, self.slices, self.bounce = tokens, chunk, stages, slices, bounce
        self.clock, self.network = FakeClock(), FakeNetwork()
        self.world = FakeWorld(parts_max=1 << 24)
        blocks = -(-tokens // BLOCK_TOKENS)
        self.table, self.source_table = (
            RequestBlocks.single(np.random.default_rng(seed).permutation(blocks)) for seed in (1, 2)
        )
        self.target = self._layout(0, range(stages), blocks)
        self.source = InstanceLayout(
            "ctx", tuple(self._layout(rank, range(rank, rank + 1), blocks) for rank in range(stages)), pp_size=stages
        )
        self.chunk_s = 1.0
        self.stage_bytes = tokens * 2 * HEADS * HEAD_DIM * ELEMENT
        self.world.landing = Wires(self.clock, self.stage_bytes / (tokens / chunk * self.chunk_s))
        gen = PeerId("gen", "g1", 0)
        self.receiver = Receiver(gen, self._resources(gen), SessionConfig(bounce_wait_s=1e9), ledger=ExposureLedger())
        self.senders = [
            Sender(peer, self._resources(peer)) for peer in (PeerId("ctx", "c1", rank) for rank in range(stages))
        ]
        self.receiver.introduce([sender.self_id for sender in self.senders])
        for _ in range(3):
            self._turn(0.0)

        self.before = len(self.network.log)

    def _layout(self, rank: int, layers: range, blocks: int) -> KVLayout:
        size = BLOCK_TOKENS * HEADS * HEAD_DIM * ELEMENT
        pools = [np.arange(2 * blocks * size, dtype=np.uint64).astype(np.uint8) for _ in layers]
        bases = [self.world.add_buffer(pool) for pool in pools]
        return KVLayout.uniform(
            rank=rank, first_layer=layers.start, layer_count=len(layers), head_total=HEADS, head_dim=HEAD_DIM,
            element_bytes=ELEMENT, block_tokens=BLOCK_TOKENS, block_count=blocks, key_bases=bases,
            value_bases=[base + blocks * size for base in bases], order="NHD",
        )  # fmt: skip

    def _resources(self, peer: PeerId) -> SessionResources:
        arena = None
        if self.bounce:
            memory = np.zeros(2 * self.stages * self.stage_bytes + (1 << 16), np.uint8)
            arena = BounceArena(self.world.add_buffer(memory), memory.nbytes)
        return SessionResources(self.world.transport(peer), self.network.channel(peer), arena=arena, clock=self.clock)

    def _turn(self, step_s: float) -> list[events.SessionEvent]:
        self.clock.advance(step_s)
        for sender in self.senders:
            sender.poll()
        return self.receiver.poll()

    def _open(self) -> None:
        plan = plan_slices(self.source, self.target, self.table, TokenRange(0, self.tokens), self.slices)
        expected = [
            ExpectedOperation(
                self.senders[rank].self_id, writer.total_bytes, b"", writer, "bounce" if self.bounce else "direct",
                slice_index=index, after=self.slices[index].tokens.end if index + 1 < len(self.slices) else 0,
            )
            for index, each in enumerate(plan.plans)
            for rank, writer in each.writers.items()
        ]  # fmt: skip
        self.receiver.open(TransferIdentity(1, 0, "g1", 0), expected)
        for sender in self.senders:
            sender.expect(KEY, len(self.slices))

    def _planner(self, rank: int) -> Any:
        planned: list[tuple[WriterTransfer | None, ...]] = []

        def resolve(asked: ReceiveRequest) -> WriterTransfer:
            if not planned:
                planned.append(
                    plan_writer_slices(
                        self.source,
                        rank,
                        self.source_table,
                        self.target,
                        self.table,
                        TokenRange(0, self.tokens),
                        self.slices,
                    )
                )
            transfer = planned[0][asked.operation.transfer.slice_index]
            if transfer is None:
                raise ValueError(f"rank {rank} has nothing to write")
            return transfer

        return resolve

    def run(self) -> tuple[float, float]:
        """One request. Returns when its prompt is computed and when its KV is in place, in chunks."""
        start_s = self.clock()
        self._open()
        chunks = -(-self.tokens // self.chunk)
        done, planners = [0] * self.stages, [self._planner(rank) for rank in range(self.stages)]
        while True:
            now = (self.clock() - start_s) / self.chunk_s
            for rank, sender in enumerate(self.senders):
                reached = min(int(now - rank + 1e-9), chunks)
                if reached <= done[rank]:
                    continue
                done[rank] = reached
                if reached == chunks:
                    sender.ready(KEY, planners[rank])
                else:
                    sender.reached(KEY, reached * self.chunk, planners[rank])
            if any(isinstance(event, events.TransferSucceeded) for event in self._turn(self.chunk_s / TURNS)):
                return float(chunks + self.stages - 1), (self.clock() - start_s) / self.chunk_s
            if now > 10 * chunks + 100:
                raise RuntimeError("the transfer does not end")


def measure(tokens: int, chunk: int, stages: int, *, bounce: bool) -> list[Figure]:
    """One prompt, sliced by its chunks and not sliced."""
    whole = Service(tokens, chunk, stages, (Slice(TokenRange(0, tokens)),), bounce=bounce)
    computed, unsliced = whole.run()
    cut = Service(tokens, chunk, stages, cut_slices(TokenRange(0, tokens), chunk), bounce=bounce)
    _, landed = cut.run()
    name = f"{tokens} tokens by {chunk}, {stages} stage(s), {'bounce' if bounce else 'direct'}"
    frames = [len(each.network.log) - each.before for each in (cut, whole)]
    return [
        counted(f"{name}: wait after the prompt, over a slice's time", landed - computed, "x", "<= 1.15"),
        counted(
            f"{name}: to the first token, over unsliced", landed / unsliced, "x", GOAL if tokens == 8192 else "<= 1"
        ),
        counted(f"{name}: control frames, over unsliced", frames[0] / frames[1], "x", f"<= {len(cut.slices)}"),
    ]


def direct() -> list[Figure]:
    """Every length by every chunk, through a pipeline of one and of four stages."""
    return [
        figure
        for tokens in (1024, 8192, 32768)
        for chunk in (256, 512, 1024, 2048)
        if chunk < tokens
        for stages in (1, 4)
        for figure in measure(tokens, chunk, stages, bounce=False)
    ]


def bounce() -> list[Figure]:
    """Through regions, the middle length."""
    return [
        figure for chunk in (256, 1024) for stages in (1, 4) for figure in measure(8192, chunk, stages, bounce=True)
    ]


if __name__ == "__main__":
    run_benchmark(direct, bounce)
