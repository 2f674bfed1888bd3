"""The chosen tier against the best tier, over NIXL between two processes, on shared memory (CMA) and tcp.

``python packages/kv-bounce-planner/benchmarks/bench_tiers.py [--tls tcp]``

The model is calibrated on the link first (a small grid), then every cell of {4, 64 MiB} x {1, 256, 4096, 32768} is measured
with every tier, in turn, and the tier that the model chooses is compared with the fastest one.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from typing import Any

import numpy as np

from kv_bounce_planner.planning import CalibrationTarget, LinkCalibration, Tier, WriterPlan, calibrate, choose_tier
from kv_bounce_planner.planning.calibration import scratch_bytes, trial_offsets
from kv_bounce_planner.sessions import MemoryRegion, NixlConfig, NixlTransport, PeerId, ZmqControlChannel

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
            if target.trials != before and target.last_trial is not None:
                # The first trials of each kind, one direct and one bounce: the check delays the next trial's begin.
                kind = target.last_trial[1:]
                checked[kind] = checked.get(kind, 0) + 1
                if checked[kind] <= 2:
                    check_trial(wanted, memory, target.last_trial, errors)
    transport.deregister(registration)
    channel.close()
    transport.close()


def figure(name: str, value: float, unit: str, baseline: float | None, goal: float | None) -> dict[str, object]:
    return {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "baseline": None if baseline is None else round(baseline, 4),
        "ratio": None if baseline is None else round(value / baseline, 4),
        "goal": goal,
        "met": None if goal is None else value <= goal,
    }


def measure(tls: str | None, repeats: int = 3) -> list[dict[str, object]]:
    """One link: calibrate, then the grid."""
    name = tls or "cma"
    context = multiprocessing.get_context("spawn")
    stop, errors = context.Event(), context.Queue()
    memory = source_memory()
    region = MemoryRegion(memory.ctypes.data, memory.nbytes)
    transport = NixlTransport(SENDER, config=NixlConfig(tls=tls))
    registration = transport.register([region])
    channel = ZmqControlChannel(SENDER, KEY, "tcp://127.0.0.1:*")
    child = context.Process(target=serve, args=(channel.address, tls, stop, errors))
    child.start()
    results: list[dict[str, object]] = []
    try:
        link = LinkCalibration(
            transport, channel, TARGET, region, clock=time.perf_counter, repeats=2, timeout_s=IDLE_EXIT_S
        )
        link.connect()
        begin = time.perf_counter()
        model = calibrate(link, name)
        results.append(figure(f"{name}: calibration", time.perf_counter() - begin, "s", None, None))
        regrets = []
        for total in SIZES:
            for count in COUNTS:
                best: dict[Tier, float] = {Tier.DIRECT: math.inf, Tier.BOUNCE: math.inf}
                for _ in range(repeats):
                    for tier in best:
                        phases = link.measure(tier, total, count)
                        best[tier] = min(
                            best[tier], phases.wire_s + phases.gather_s + phases.scatter_s + phases.overhead_s
                        )
                size = total // count
                addresses = np.arange(count, dtype=np.int64) * 2 * size
                writer = WriterPlan(0, addresses, np.full(count, size, np.int64), count, count)
                choice = choose_tier(writer, model)
                regrets.append(best[choice.tier] / min(best.values()))
                results.append(
                    figure(
                        f"{name}: {total >> 20} MiB x {count}: {choice.tier.value} chosen "
                        f"(direct {1e3 * best[Tier.DIRECT]:.2f} ms, bounce {1e3 * best[Tier.BOUNCE]:.2f} ms)",
                        1e3 * best[choice.tier],
                        "ms",
                        1e3 * min(best.values()),
                        None,
                    )
                )
        mean = math.exp(sum(map(math.log, regrets)) / len(regrets))
        results.append(figure(f"{name}: chosen against best tier, geometric mean", mean, "x", 1.0, 1.05))
        results.append(figure(f"{name}: chosen against best tier, worst", max(regrets), "x", 1.0, 1.25))
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
    return results


def main(links: tuple[str | None, ...] = (None, "tcp")) -> list[dict[str, object]]:
    return [result for tls in links for result in measure(tls)]


def show(results: list[dict[str, object]]) -> None:
    """A table, then one JSON line per figure."""
    width = max(len(str(r["name"])) for r in results)
    for r in results:
        verdict = "" if r["met"] is None else ("met" if r["met"] else "MISSED")
        goal = "" if r["goal"] is None else f"goal {r['goal']}"
        ratio = "" if r["ratio"] is None else f"{r['ratio']}x"
        print(f"{r['name']!s:<{width}}  {r['value']!s:>10} {r['unit']!s:<3} {ratio:>9} {goal:>10} {verdict}")
    for r in results:
        print(json.dumps(r))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tls", action="append", help="UCX transport; default: the host's own choice, then tcp")
    chosen = parser.parse_args().tls
    show(main(tuple(chosen)) if chosen else main())
