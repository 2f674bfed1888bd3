"""A worker's loop beside 2,000 submits per second: how late it wakes, and what it loses while it works.

One process, as on rank 0: a loop thread wakes every 5 ms and then computes for about a millisecond; another thread
submits 1,024-token requests at a fixed rate to the worker that the loop belongs to. Modes take turns of a second each.
Lateness is the wake-up's time minus its due time minus the time that the kernel kept the thread in a run queue
(schedstat), so that what is left is timer and interpreter lock. The loss is the computation's wall time minus its own
CPU time minus its run-queue time: waiting for the lock.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from rpc_batch_submit import BatchSubmitConfig, ThreadBatchSubmitter, take_in
from rpc_local_registry import RpcClient, RpcServer, new_key, rpc_method

PERIOD_S = 0.005
RATE_PER_S = 2000
TURN_S = 1.0
TURNS = 6
WORK = 20_000


class Request(msgspec.Struct):
    """A submit."""

    request_id: int
    token_ids: np.ndarray


class Worker:
    """Takes requests and does nothing with them."""

    def __init__(self) -> None:
        self.taken = 0

    @rpc_method(non_blocking=True)
    def submit(self, request: Request) -> None:
        """One."""
        self.taken += 1

    @rpc_method(non_blocking=True)
    def submit_batch(self, requests: Iterator[Request]) -> list[str | None]:
        """Many."""
        return take_in(requests, self.submit)


class Loop:
    """The worker's loop; collects (lateness, loss) per step."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin stepping."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        descriptor = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

        def queued_s() -> float:
            return int(os.pread(descriptor, 64, 0).split()[1]) / 1e9

        due_s = time.perf_counter() + PERIOD_S
        try:
            while not self._stop:
                before_s = queued_s()
                time.sleep(max(0.0, due_s - time.perf_counter()))
                woke_s = time.perf_counter()
                queue_s = queued_s()
                late_s = max(0.0, woke_s - due_s - (queue_s - before_s))
                start_s, cpu_s = time.perf_counter(), time.thread_time()
                total = 0
                for number in range(WORK):
                    total += number
                wall_s, used_s = time.perf_counter() - start_s, time.thread_time() - cpu_s
                lost_s = max(0.0, wall_s - used_s - (queued_s() - queue_s))
                self.samples.append((late_s, lost_s))
                due_s += PERIOD_S
                if due_s < time.perf_counter():
                    due_s = time.perf_counter() + PERIOD_S
        finally:
            os.close(descriptor)


def paced(action: Callable[[Request], Any] | None, request: Request) -> None:
    """One turn of submits at the fixed rate; None only keeps the pace."""
    due_s = time.perf_counter()
    for _ in range(int(RATE_PER_S * TURN_S)):
        if action is not None:
            action(request)
        due_s += 1 / RATE_PER_S
        left_s = due_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


def quantile(values: list[float], share: float) -> float:
    """Order statistic."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> list[dict]:
    """All figures."""
    key, worker = new_key(), Worker()
    request = Request(1, np.arange(1024, dtype=np.int32))
    collected: dict[str, list[tuple[float, float]]] = {}
    process_cpu: dict[str, list[float]] = {}
    gc.collect()
    gc.disable()
    with (
        RpcServer(worker, "ipc://", key) as server,
        RpcClient(server.address, key) as remote,
        RpcClient(server.address, key, fast_path=True) as local,
        ThreadBatchSubmitter(
            lambda batch: remote.submit_batch(batch).remote_future(), BatchSubmitConfig(batch_max=32, delay_ms=0.5)
        ) as small,
        ThreadBatchSubmitter(
            lambda batch: remote.submit_batch(batch).remote_future(), BatchSubmitConfig(batch_max=32, delay_ms=5.0)
        ) as large,
    ):
        modes: dict[str, Callable[[], None]] = {
            "no_load": lambda: time.sleep(TURN_S),
            "pacing_only": lambda: paced(None, request),
            "fast_path": lambda: paced(lambda r: local.submit(r).remote(), request),
            "batched_0.5ms": lambda: paced(small.submit, request),
            "batched_5ms": lambda: paced(large.submit, request),
            "off": lambda: paced(lambda r: remote.submit(r).remote_oneway(), request),
        }
        loop = Loop()
        loop.start()
        for _ in range(TURNS):
            for mode, run in modes.items():
                begin, start_s = len(loop.samples), time.process_time()
                run()
                process_cpu.setdefault(mode, []).append(time.process_time() - start_s)
                collected.setdefault(mode, []).extend(loop.samples[begin:])
        loop.stop()
    gc.enable()
    figures = []
    base: dict[str, float] = {}
    for mode, samples in collected.items():
        late_ms = [late_s * 1e3 for late_s, _ in samples]
        lost_ms = [lost_s * 1e3 for _, lost_s in samples]
        values = {
            "lateness_p50": (statistics.median(late_ms), "ms"),
            "lateness_p99": (quantile(late_ms, 0.99), "ms"),
            "lost_per_step_mean": (statistics.fmean(lost_ms), "ms"),
            "process_cpu_share": (statistics.median(process_cpu[mode]) / TURN_S, "cores"),
        }
        for name, (value, unit) in values.items():
            if mode == "no_load":
                base[name] = value
            ratio = value / base[name] if base[name] else None
            goal, met = "printed", True
            if mode == "fast_path" and name == "lateness_p99" and ratio is not None:
                goal, met = "<= 1.3x no load", ratio <= 1.3
            figures.append(
                {
                    "name": f"loop_{mode}_{name}", "value": round(value, 4), "unit": unit, "baseline": round(base[name], 4),
                    "ratio": None if ratio is None else round(ratio, 3), "goal": goal, "met": met,
                }
            )  # fmt: skip
    return figures


def show(figures: list[dict]) -> None:
    """Table, then one JSON line per figure."""
    print(f"switch interval {sys.getswitchinterval() * 1e3} ms, {os.cpu_count()} cores, steps of {PERIOD_S * 1e3} ms")
    for line in figures:
        ratio = "" if line["ratio"] is None else f"{line['ratio']:>9.2f}"
        print(
            f"{line['name']:<44}{line['value']:>10.4f} {line['unit']:<6}{line['baseline']:>10.4f}{ratio:>10}  "
            f"{line['goal']:<20}{line['met']}"
        )
    for line in figures:
        print(json.dumps(line))


if __name__ == "__main__":
    show(main())
