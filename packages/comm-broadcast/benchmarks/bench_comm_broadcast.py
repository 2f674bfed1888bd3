"""Broadcast of token batches on two ranks: total time, root CPU, longest stall, against mpi4py, pkl5, re-read, root-original.

Started alone it starts itself under ``mpiexec -n 2``. In each round every variant runs once, in an order that is drawn anew:
none profits from what its neighbour left in the caches. Medians; quartiles of the figures that have a goal.
"""

from __future__ import annotations

import json
import pickle
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from worlds import launcher

BATCHES = [(count, size) for size in (1024, 8192, 32768) for count in (0, 1, 64, 512)]
#: Tokens above which a batch is measured a few times only, so that the whole stays within its time.
LARGE = 1 << 20
#: The batch that has goals: more rounds.
GOAL = (64, 8192)


class Request(msgspec.Struct):
    """An engine's request."""

    request_id: int
    tokens: np.ndarray


def measured(comm: Any, variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[list[float]]]:
    """(total ms, root CPU ms) of each variant, sorted: until the last rank has it; the root's own thread."""
    from mpi4py import MPI

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    order, names = random.Random(1), list(variants)
    for turn in range(rounds + 1):
        order.shuffle(names)
        for name in names:
            body = variants[name]
            comm.Barrier()
            start, busy = time.perf_counter(), time.thread_time()
            body()
            busy = time.thread_time() - busy
            took = comm.allreduce(time.perf_counter() - start, op=MPI.MAX)
            if turn:
                times[name].append((took * 1e3, comm.bcast(busy, 0) * 1e3))
    return {name: [sorted(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}


def spread(values: list[float]) -> str:
    """Quartiles of sorted values (ms)."""
    return f"{values[len(values) // 4]:.2f}..{values[3 * len(values) // 4]:.2f}"


def longest_stall_ms(body: Callable[[], object]) -> float:
    """Longest time that another thread of the root did not run (ms)."""
    worst, stop = 0.0, False

    def watch() -> None:
        nonlocal worst
        last = time.perf_counter()
        while not stop:
            now = time.perf_counter()
            worst, last = max(worst, now - last), now

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=watch)
    thread.start()
    body()
    stop = True
    thread.join()
    sys.setswitchinterval(before)
    return worst * 1e3


def rank_main() -> None:
    """One rank."""
    from mpi4py import MPI
    from mpi4py.util import pkl5

    from comm_broadcast import BroadcastConfig, Broadcaster, MpiComm, TokenBatchCodec

    comm = MPI.COMM_WORLD
    root = comm.rank == 0
    codec = TokenBatchCodec(Request)
    plain = Broadcaster(MpiComm(comm), codec=codec)
    window = Broadcaster(MpiComm(comm), codec=codec, config=BroadcastConfig(shared_slot_bytes=72 << 20))
    five = pkl5.Intracomm(comm)

    def chunked(value: Any, reread: bool) -> Any:
        data = pickle.dumps(value, 5) if root else b""
        size = comm.bcast(len(data), 0)
        buffer = bytearray(data) if root else bytearray(size)
        for start in range(0, size, 4 << 20):
            comm.Bcast([memoryview(buffer)[start : start + (4 << 20)], MPI.BYTE], 0)
        return value if root and not reread else pickle.loads(buffer)

    found: list[dict[str, Any]] = []

    def note(
        name: str, value: float, unit: str, baseline: str, ratio: float | None, goal: str, met: bool | None
    ) -> None:
        found.append(
            {
                "name": f"comm-broadcast: {name}", "value": round(value, 4), "unit": unit, "baseline": baseline,
                "ratio": None if ratio is None else round(ratio, 2), "goal": goal, "met": met,
            }
        )  # fmt: skip

    begun = time.perf_counter()
    for count, size in BATCHES:
        for kind in ("list", "int32"):
            total = count * size
            if comm.bcast(time.perf_counter() - begun, 0) > 110 and (count, size) != GOAL:
                continue
            rng = np.random.default_rng(1)
            arrays = [rng.integers(0, 150_000, size).astype(np.int32) for _ in range(count)] if root else []
            payload: Any = [a.tolist() for a in arrays] if kind == "list" else arrays
            batch = [Request(i, t) for i, t in enumerate(payload)] if root else None
            value = payload if root else None
            joined = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
            flat = np.empty(total, np.int32)

            def raw(joined: Any = joined, flat: Any = flat) -> None:
                if root:
                    flat[:] = joined
                comm.Bcast(flat, 0)

            samples = measured(
                comm,
                {
                    "ours": lambda batch=batch: plain.broadcast(batch), "window": lambda batch=batch: window.broadcast(batch),
                    "mpi4py": lambda value=value: comm.bcast(value, 0), "pkl5": lambda value=value: five.bcast(value, 0),
                    "re-read": lambda value=value: chunked(value, True),
                    "original": lambda value=value: chunked(value, False), "raw": raw,
                },
                3 if total > LARGE else 41 if (count, size) == GOAL else 15,
            )  # fmt: skip
            result = {name: [statistics.median(column) for column in columns] for name, columns in samples.items()}
            key = (count, size)
            for way in ("ours", "window"):
                took, busy = result[way]
                base = result["raw" if kind == "int32" else "mpi4py"][0]
                texts = ", ".join(f"{n} {result[n][0]:.3f}" for n in ("mpi4py", "pkl5", "re-read", "original", "raw"))
                goal, met = "", None
                ratio = took / base if kind == "int32" else base / took
                if key == GOAL:
                    goal = "<= 1.3 x raw" if kind == "int32" else ">= 4 x mpi4py"
                    met = ratio <= 1.3 if kind == "int32" else ratio >= 4
                    other = "raw" if kind == "int32" else "mpi4py"
                    texts += f"; quartiles {spread(samples[way][0])}, {other} {spread(samples[other][0])}"
                note(f"{count} x {size} {kind}, {way}, total", took, "ms", texts, ratio, goal, met)
                if key == GOAL and kind == "list":
                    ratio = result["re-read"][1] / busy
                    note(
                        f"{count} x {size} {kind}, {way}, root CPU",
                        busy,
                        "ms",
                        f"re-read {result['re-read'][1]:.2f}; quartiles {spread(samples[way][1])}, "
                        f"re-read {spread(samples['re-read'][1])}",
                        ratio,
                        ">= 4 x less",
                        ratio >= 4,
                    )
            stalls = kind == "list" and size == 8192 and count >= 64
            if root and stalls:
                dumps = longest_stall_ms(lambda value=value: pickle.dumps(value, 5))

                # Memory that is there already, as the pool's is.
                targets = [memoryview(bytearray(segment.nbytes)) for segment in codec.encode(batch)]

                def encode(batch: Any = batch, targets: Any = targets) -> None:
                    for segment, target in zip(codec.encode(batch), targets, strict=True):
                        segment.write_into(target)

                stall = statistics.median(longest_stall_ms(encode) for _ in range(5))
                note(
                    f"longest stall, {count} x {size} list", stall, "ms", f"dumps {dumps:.2f}", dumps / stall, "", None
                )
            if stalls:
                # Nobody spins for the root meanwhile: its two threads would share a processor, and wait for its time slices.
                level = comm.Ibarrier()
                while not level.Test():
                    time.sleep(0.002)
    if root:
        print("\n".join(json.dumps(one) for one in found), flush=True)
    plain.close()
    window.close()


def main() -> list[dict[str, Any]]:
    """All figures, measured by two ranks."""
    command = launcher.find_launcher().command(2, [sys.executable, "-m", "mpi4py", __file__, "rank"])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=170, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank_main()
    else:
        figures = main()
        for one in figures:
            mark = {True: "met", False: "MISSED", None: ""}[one["met"]]
            print(
                f"{one['name']:<58} {one['value']:>9} {one['unit']} x{one['ratio']} {one['goal']} {mark} [{one['baseline']}]"
            )
        for one in figures:
            print(json.dumps(one))
