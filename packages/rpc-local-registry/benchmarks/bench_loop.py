"""A worker's loop beside 2,000 submits per second: how late it wakes, and what it loses while it works.

One process, as on rank 0: a loop thread wakes every 5 ms and then computes for about a millisecond; another thread
submits 1,024-token requests at a fixed rate to the worker that the loop belongs to. Modes take turns of half a second each.
Lateness is the wake-up's time minus its due time minus the time that the kernel kept the thread in a run queue
(schedstat), so that what is left is timer and interpreter lock. The loss is the computation's wall time minus its own
CPU time minus its run-queue time: waiting for the lock.
"""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from measure import Figure, ratio, run_benchmark, shown
from rpc_batch_submit import BatchSubmitConfig, ThreadBatchSubmitter, take_in
from rpc_local_registry import RpcClient, RpcServer, new_key, rpc_method

PERIOD_S = 0.005
RATE_PER_S = 2000
TURN_S = 0.5
ROUNDS = 11
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


#: Per turn: 95th percentile of the lateness, mean loss per step (seconds), processor time of the process (share of a core).
Turn = tuple[float, float, float]


def turn(loop: Loop, run: Callable[[], object]) -> Turn:
    """One mode for half a second."""
    begin, start_s = len(loop.samples), time.process_time()
    run()
    cpu = (time.process_time() - start_s) / TURN_S
    steps = loop.samples[begin:]
    late_s = sorted(late_s for late_s, _ in steps)
    return late_s[int(0.95 * (len(late_s) - 1))], statistics.fmean(lost_s for _, lost_s in steps), cpu


def turns() -> dict[str, list[Turn]]:
    """All modes in turn, every other round backwards; the first round does not count."""
    key, worker = new_key(), Worker()
    request = Request(1, np.arange(1024, dtype=np.int32))
    taken: dict[str, list[Turn]] = {}
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
        modes: dict[str, Callable[[], object]] = {
            "no_load": lambda: time.sleep(TURN_S),
            "pacing_only": lambda: paced(None, request),
            "fast_path": lambda: paced(lambda r: local.submit(r).remote(), request),
            "batched_0.5ms": lambda: paced(small.submit, request),
            "batched_5ms": lambda: paced(large.submit, request),
            "rpc": lambda: paced(lambda r: remote.submit(r).remote_oneway(), request),
        }
        loop = Loop()
        loop.start()
        for number in range(-1, ROUNDS):
            for mode in reversed(modes) if number % 2 else modes:
                sample = turn(loop, modes[mode])
                if number >= 0:
                    taken.setdefault(mode, []).append(sample)
        loop.stop()
    gc.enable()
    return taken


def beside_submits() -> list[Figure]:
    """Lateness against no load, processor time against one RPC per submit; the loss as it is (without load it is nothing)."""
    taken = turns()
    late, lost, cpu = ({mode: [t[k] for t in each] for mode, each in taken.items()} for k in range(3))
    figures: list[Figure] = []
    for mode in taken:
        if mode != "no_load":
            goal = "<= 1.3" if mode == "fast_path" else None
            figures.append(
                ratio(
                    f"loop_{mode}_lateness_p95", late[mode], late["no_load"], unit="ms", scale=1e3, goal=goal,
                    against="no load",
                )
            )  # fmt: skip
        if mode not in ("no_load", "rpc"):
            figures.append(
                ratio(f"loop_{mode}_process_cpu", cpu[mode], cpu["rpc"], unit="cores", goal=None, against="one RPC per submit")
            )  # fmt: skip
        figures.append(shown(f"loop_{mode}_lost_per_step", lost[mode], unit="ms", scale=1e3))
    return figures


if __name__ == "__main__":
    run_benchmark(beside_submits)
