"""What a generation rank's loop costs while it only decodes: its thread alone, with an engine that takes no time.

200 sequences, one token each per step: take new work, retire the step, launch the next, hand the step's tokens to rank 0 as one
encoded frame. Against a plain Python loop that appends 200 tokens to 200 lists and tests their ends, measured in turn.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench_service import figure, plain_loop_s

from meta_executor.engine.base import SamplingParams, StepInput, StepOutput
from meta_executor.engine.kv_pool import BlockPool
from meta_executor.executor.decode import DecodeCompute
from meta_executor.executor.links import LocalWorld
from meta_executor.executor.loop import RankLoop
from meta_executor.executor.memory import PlannedBlocks
from meta_executor.executor.ownership import Event, Registry
from meta_executor.executor.request import AnswerBook, Request
from meta_executor.executor.scheduler import StepLimits
from meta_executor.executor.work import BroadcastWork

ROWS, STEPS, ROUNDS = 200, 400, 7
PROMPT = 1024


class Instant:
    """An engine whose steps have ended when they are launched: what is left is the loop's own time."""

    def __init__(self, rows: int) -> None:
        self._output = StepOutput(0, token_ids=np.full(rows, 7, np.int32))

    def launch(self, step: StepInput) -> Instant:
        """Keep nothing of it."""
        return self

    def add_done_callback(self, call: object) -> None:
        """Nobody waits."""

    def done(self) -> bool:
        """Always."""
        return True

    def result(self) -> StepOutput:
        """The same tokens each time."""
        return self._output


def made_loop(rows: int = ROWS) -> tuple[RankLoop, LocalWorld]:
    """Rank 1 of two, with its rows at work."""
    registry, answers, world = Registry("generation"), AnswerBook(), LocalWorld(2)
    quiet: Any = SimpleNamespace(
        poll_cap_s=None, update_readiness=lambda now_s: False, progress=lambda now_s: False, poll=lambda now_s: []
    )
    compute = DecodeCompute(
        rank=1,
        engine=Instant(rows),  # type: ignore[arg-type]
        registry=registry,
        blocks=PlannedBlocks(BlockPool(8, 16)),
        limits=StepLimits(rows + 56, 2 * rows, 8, 1, 8),
        transceiver=quiet,
        answers=answers,
        wake=lambda: None,
    )
    loop = RankLoop(
        rank=1,
        registry=registry,
        compute=compute,
        answers=answers,
        link=world.link(1),
        work=BroadcastWork(None, 1),
        sending=None,
        receiving=quiet,
        desk=None,
        on_fault=lambda diagnosis: None,
    )
    blocks = (PROMPT + STEPS) // 16 + 1
    for number in range(1, rows + 1):
        sampling = SamplingParams(10 * STEPS, stop_token_ids=(2,))
        request = Request(request_id=number, token_ids=np.zeros(PROMPT, np.int32), sampling=sampling, first_token=5)
        sequence, _ = registry.prepare(request, number)
        sequence.block_ids = list(range(blocks))
        registry.apply(sequence, Event.PUBLISHED)
        registry.apply(sequence, Event.ARRIVED)
        compute.arrived(sequence, 5)
    return loop, world


def per_step_s(rows: int, steps: int) -> float:
    """Processor time of the loop's thread per step of so many rows (s)."""
    loop, world = made_loop(rows)
    loop.iterate(0.0)
    began_s = time.thread_time()
    for _ in range(steps):
        loop.iterate(0.0)
    spent_s = time.thread_time() - began_s
    handed = sum(len(arrived.body) for arrived in world.link(0).poll())  # type: ignore[arg-type]
    if handed < rows * steps:
        raise RuntimeError(f"{handed} tokens were handed out, expected {rows * steps}")
    return spent_s / steps


def per_token_s() -> float:
    """Processor time of the loop's thread per token (s)."""
    return per_step_s(ROWS, STEPS) / ROWS


def main() -> None:
    """Measure in turn; a table, one figure."""
    ratios, loops, plains = [], [], []
    for _ in range(ROUNDS):
        loops.append(per_token_s())
        plains.append(plain_loop_s())
        ratios.append(loops[-1] / plains[-1])
        print(f"loop {1e6 * loops[-1]:6.3f} us/token   plain Python {1e6 * plains[-1]:6.3f}   ratio {ratios[-1]:5.2f}")
    ratio = statistics.median(ratios)
    figure(
        "decoding loop over a plain Python loop", round(1e6 * statistics.median(loops), 4), "us/token",
        round(1e6 * statistics.median(plains), 4), round(ratio, 3), "<= 4", ratio <= 4,
    )  # fmt: skip


if __name__ == "__main__":
    main()
