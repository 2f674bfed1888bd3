"""The chosen tier against the best tier, over NIXL between two processes, on shared memory (CMA) and tcp.

``nox -s bench -- kv-bounce-planner``

The model is calibrated on the link first (a small grid), then every cell of {4, 64 MiB} x {1, 256, 4096, 32768} is measured
with both tiers, in turn, and the tier that the model chooses is compared with the one that is faster in the median.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import numpy as np

from kv_bounce_planner.planning import (
    CalibrationTarget,
    CostModel,
    LinkCalibration,
    Tier,
    WriterPlan,
    calibrate,
    choose_tier,
)
from kv_bounce_planner.planning.calibration import scratch_bytes, trial_offsets
from kv_bounce_planner.sessions import MemoryRegion, NixlConfig, NixlTransport, PeerId, ZmqControlChannel
from measure import Figure, Sample, in_turn, ratio, run_benchmark, shown

KEY = b"a key for one benchmark run"
SENDER, TARGET = PeerId("bench-source", "g1", 0), PeerId("bench-target", "g2", 0)
SIZES, COUNTS = (4 << 20, 64 << 20), (1, 256, 4096, 32768)
SCRATCH = max(scratch_bytes(total, count) for total in SIZES for count in COUNTS) + (1 << 20)
IDLE_EXIT_S = 60.0


def source_memory() -> np.ndarray:
    """What the sender's scratch holds; the target makes it as well, to compare."""
    pattern = np.random.default_rng(0).integers(0, 256, (1 << 16) + 24, dtype=np.uint8)
    return np.resize(pattern, SCRATCH)


def check_trial(wanted: np.ndarray, memory: np.ndarray, trial: tuple[int, int, int], errors: Any) -> None:
    """Every byte of every fragment of a trial."""
    number, count, size = trial
    for source, target in zip(*trial_offsets(number, count, size), strict=True):
        if not np.array_equal(wanted[source : source + size], memory[target : target + size]):
            errors.put(f"trial {trial}: bytes differ")
            return


def serve(address: str, tls: str | None, stop: Any, errors: Any) -> None:
    """The receiving process."""
    memory = np.zeros(SCRATCH, np.uint8)
    memory[:] = 1
    region = MemoryRegion(memory.ctypes.data, memory.nbytes)
    transport = NixlTransport(TARGET, config=NixlConfig(tls=tls))
    registration = transport.register([region])
    channel = ZmqControlChannel(TARGET, KEY, None)
    channel.connect(SENDER, address)
    target = CalibrationTarget(transport, channel, region, clock=time.perf_counter)
    target.announce(SENDER)
    begin = time.monotonic()
    wanted = source_memory()
    checked: dict[tuple[int, int], int] = {}
    while not stop.is_set() and time.monotonic() - begin < 3 * IDLE_EXIT_S:
        for _ in range(64):
            before = target.trials
            target.poll()
            os.sched_yield()  # the channel's own thread wants the core too
            if target.trials != before and target.last_trial is not None:
                # The first trials of each kind, one direct and one bounce: the check delays the next trial's begin.
                kind = target.last_trial[1:]
                checked[kind] = checked.get(kind, 0) + 1
                if checked[kind] <= 2:
                    check_trial(wanted, memory, target.last_trial, errors)
    transport.deregister(registration)
    channel.close()
    transport.close()


def measure(tls: str | None, repeats: int = 11) -> list[Figure]:
    """One link: calibrate, then the grid. Each cell's tiers are measured in turn and compared round by round."""
    name = tls or "shared memory"
    context = multiprocessing.get_context("spawn")
    stop, errors = context.Event(), context.Queue()
    memory = source_memory()
    region = MemoryRegion(memory.ctypes.data, memory.nbytes)
    transport = NixlTransport(SENDER, config=NixlConfig(tls=tls))
    registration = transport.register([region])
    channel = ZmqControlChannel(SENDER, KEY, "tcp://127.0.0.1:*")
    child = context.Process(target=serve, args=(channel.address, tls, stop, errors))
    child.start()
    try:
        link = LinkCalibration(
            transport,
            channel,
            TARGET,
            region,
            clock=time.perf_counter,
            idle=os.sched_yield,
            repeats=1,
            timeout_s=IDLE_EXIT_S,
        )
        link.connect()
        began = time.perf_counter()
        model = calibrate(link, name)
        figures = [shown(f"calibration, {name}", [time.perf_counter() - began], unit="s")]
        cells = [_cell(link, model, name, total, count, repeats) for total in SIZES for count in COUNTS]
        figures += [figure for figure, _, _ in cells]
        # Round by round: what the chosen tiers took against what the best would have, over all cells.
        chosen = np.array([chosen for _, chosen, _ in cells])
        best = np.array([best for _, _, best in cells])
        means = np.exp(np.log(chosen / best).mean(axis=0))
        figures.append(_regret(f"chosen against best tier, geometric mean, {name}", means, "<= 1.05"))
        worst = int(np.argmax(np.median(chosen / best, axis=1)))
        figures.append(_regret(f"chosen against best tier, worst cell, {name}", chosen[worst] / best[worst], "<= 1.25"))
    finally:
        stop.set()
        child.join(20)
        if child.is_alive():
            child.kill()
            child.join()
        if not errors.empty():
            raise AssertionError(errors.get())
    transport.deregister(registration)
    channel.close()
    transport.close()
    return figures


def _cell(
    link: LinkCalibration, model: CostModel, name: str, total: int, count: int, repeats: int
) -> tuple[Figure, list[float], list[float]]:
    """(the figure, what the chosen tier took each round, what the better tier in the median took in the same rounds)."""

    def trial(tier: Tier) -> Sample:
        def sample() -> float:
            phases = link.measure(tier, total, count)
            return phases.wire_s + phases.gather_s + phases.scatter_s + phases.overhead_s

        return sample

    samples = in_turn({tier.value: trial(tier) for tier in (Tier.DIRECT, Tier.BOUNCE)}, repeats)
    size = total // count
    addresses = np.arange(count, dtype=np.int64) * 2 * size
    choice = choose_tier(WriterPlan(0, addresses, np.full(count, size, np.int64), count, count), model)
    chosen = samples[choice.tier.value]
    best = min(samples.values(), key=lambda values: float(np.median(values)))
    figure = ratio(
        f"{total >> 20} MiB x {count}: {choice.tier.value} chosen, {name}",
        chosen,
        samples[(Tier.BOUNCE if choice.tier is Tier.DIRECT else Tier.DIRECT).value],
        unit="ms",
        scale=1e3,
        goal=None,
        against="the other tier",
    )
    return figure, chosen, best


def _regret(name: str, ratios: np.ndarray, goal: str) -> Figure:
    return ratio(name, list(ratios), [1.0] * len(ratios), unit="x", goal=goal, against="the better tier of each cell")


def shared_memory() -> list[Figure]:
    return measure(None)


def over_tcp() -> list[Figure]:
    return measure("tcp")


if __name__ == "__main__":
    run_benchmark(shared_memory, over_tcp)
