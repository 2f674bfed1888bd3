"""Broadcast of token batches on two ranks: total time, the root's processor time, the longest stall of its other threads; small
exchanges on four.

Started alone it starts itself under ``mpiexec``. All ranks measure the same subjects in the same order, in turn.
"""

from __future__ import annotations

import functools
import json
import pickle
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
from measure import Figure, in_turn, ratio, run_benchmark
from worlds import launcher

#: The batch that has goals, and those that are shown (requests, tokens each).
GOAL = (64, 8192)
BATCHES = ((0, 0), (1, 1024), (1, 8192), (64, 1024), GOAL, (512, 1024), (512, 8192))
#: Tokens above which a batch is measured a few times only, so that the whole stays within its time.
LARGE = 1 << 20
ROUNDS_OF_GOAL, ROUNDS, ROUNDS_LARGE = 41, 15, 3
#: A round of arrays takes a tenth of one of lists, and its ratios spread more.
ROUNDS_OF_ARRAYS = 301
#: Small exchanges between two looks at the clock (count).
NUMBER = 20


class Request(msgspec.Struct):
    """An engine's request."""

    request_id: int
    tokens: np.ndarray


class Collective:
    """A sample of one collective on all ranks: seconds until the last one has it; keeps the root's processor time beside it."""

    def __init__(self, comm: Any, body: Callable[[], object], number: int = 1) -> None:
        self._comm = comm
        self._body = body
        self._number = number
        self.busy_s: list[float] = []

    def __call__(self) -> float:
        from mpi4py import MPI

        self._comm.Barrier()
        began_s, busy_s = time.perf_counter(), time.thread_time()
        for _ in range(self._number):
            self._body()
        busy_s = time.thread_time() - busy_s
        took_s: float = self._comm.allreduce(time.perf_counter() - began_s, op=MPI.MAX) / self._number
        self.busy_s.append(self._comm.bcast(busy_s, 0))
        return took_s


def longest_stall_s(body: Callable[[], object]) -> float:
    """Longest time that another thread of this process did not run (s)."""
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
    return worst


class Rank:
    """One rank's part of the measurements."""

    def __init__(self) -> None:
        from mpi4py import MPI
        from mpi4py.util import pkl5

        from comm_broadcast import BroadcastConfig, Broadcaster, MpiComm, TokenBatchCodec

        self.comm = MPI.COMM_WORLD
        self.is_root = self.comm.rank == 0
        self._byte = MPI.BYTE
        self._five = pkl5.Intracomm(self.comm)
        self.codec = TokenBatchCodec(Request)
        self.plain = Broadcaster(MpiComm(self.comm), codec=self.codec)
        self.window = Broadcaster(
            MpiComm(self.comm), codec=self.codec, config=BroadcastConfig(shared_slot_bytes=72 << 20)
        )
        self.ahead = Broadcaster(MpiComm(self.comm), codec=self.codec, config=BroadcastConfig(ahead_max=4))
        self.figures: list[Figure] = []

    def _reread(self, value: Any) -> Any:
        """A pickle in chunks, which the root loads, too."""
        data = pickle.dumps(value, 5) if self.is_root else b""
        size = self.comm.bcast(len(data), 0)
        buffer = bytearray(data) if self.is_root else bytearray(size)
        for start in range(0, size, 4 << 20):
            self.comm.Bcast([memoryview(buffer)[start : start + (4 << 20)], self._byte], 0)
        return pickle.loads(buffer)

    def batch(self, count: int, size: int, kind: str) -> None:
        """All variants of one batch."""
        rng = np.random.default_rng(1)
        arrays = [rng.integers(0, 150_000, size).astype(np.int32) for _ in range(count)] if self.is_root else []
        payload: Any = [a.tolist() for a in arrays] if kind == "list" else arrays
        batch = [Request(i, tokens) for i, tokens in enumerate(payload)] if self.is_root else None
        value = payload if self.is_root else None
        joined = np.concatenate(arrays) if arrays else np.empty(0, np.int32)
        flat = np.empty(count * size, np.int32)

        def raw() -> None:
            if self.is_root:
                flat[:] = joined
            self.comm.Bcast(flat, 0)

        bodies: dict[str, Callable[[], object]] = {
            "default": lambda: self.plain.broadcast(batch), "with a window": lambda: self.window.broadcast(batch),
            "ahead": lambda: self.ahead.broadcast(batch),
            "comm.bcast": lambda: self.comm.bcast(value, 0), "pkl5": lambda: self._five.bcast(value, 0),
            "a root that reads its bytes again": lambda: self._reread(value), "a copy and a raw Bcast": raw,
        }  # fmt: skip
        subjects = {name: Collective(self.comm, body) for name, body in bodies.items()}
        has_goal = (count, size) == GOAL
        rounds = ROUNDS_LARGE if count * size > LARGE else ROUNDS
        if has_goal:
            rounds = ROUNDS_OF_GOAL if kind == "list" else ROUNDS_OF_ARRAYS
        samples = in_turn(subjects, rounds)
        other, goal = ("comm.bcast", "<= 0.25") if kind == "list" else ("a copy and a raw Bcast", "<= 1.3")
        for way in ("default", "with a window", "ahead"):
            self.figures.append(
                ratio(
                    f"{count} x {size} {kind}, {way}, total", samples[way], samples[other], unit="ms", scale=1e3,
                    goal=goal if has_goal else None, against=other,
                )
            )  # fmt: skip
            if has_goal and kind == "list":
                again = "a root that reads its bytes again"
                self.figures.append(
                    ratio(
                        f"{count} x {size} {kind}, {way}, root's CPU", subjects[way].busy_s[1:], subjects[again].busy_s[1:],
                        unit="ms", scale=1e3, goal="<= 0.25", against=again,
                    )
                )  # fmt: skip
        if kind == "list" and size == GOAL[1] and count >= GOAL[0]:
            self.stall(count, size, batch, value)

    def stall(self, count: int, size: int, batch: Any, value: Any) -> None:
        """On the root: how long an encoding keeps its other threads from running. The other rank sleeps meanwhile."""
        if self.is_root:
            # Memory that is there already, as the pool's is.
            targets = [memoryview(bytearray(segment.nbytes)) for segment in self.codec.encode(batch)]

            def encode() -> None:
                for segment, target in zip(self.codec.encode(batch), targets, strict=True):
                    segment.write_into(target)

            found = in_turn(
                {
                    "ours": lambda: longest_stall_s(encode),
                    "dumps": lambda: longest_stall_s(lambda: pickle.dumps(value, 5)),
                },
                11,
            )
            self.figures.append(
                ratio(
                    f"longest stall, {count} x {size} list", found["ours"], found["dumps"], unit="ms", scale=1e3,
                    goal="<= 0.5", against="pickle.dumps",
                )
            )  # fmt: skip
        level = self.comm.Ibarrier()
        while not level.Test():
            time.sleep(0.002)


def rank_main() -> None:
    """One rank; the root prints what was found."""
    rank = Rank()
    for count, size in BATCHES:
        for kind in ("list", "int32"):
            rank.batch(count, size, kind)
    if rank.is_root:
        print("\n".join(json.dumps(figure) for figure in rank.figures), flush=True)
    for broadcaster in (rank.plain, rank.window, rank.ahead):
        broadcaster.close()


def small_rank_main() -> None:
    """One of the ranks that exchange little: what everybody knows afterwards, by hand costs a broadcast and an allgather."""
    from mpi4py import MPI

    from comm_broadcast import BroadcastConfig, Broadcaster, MpiComm

    comm = MPI.COMM_WORLD
    figures: list[Figure] = []
    forms = {
        "level": Broadcaster(MpiComm(comm)),
        "ahead by 1": Broadcaster(MpiComm(comm), config=BroadcastConfig(ahead_max=1)),
        "ahead by 4": Broadcaster(MpiComm(comm), config=BroadcastConfig(ahead_max=4)),
    }
    by_hand = "comm.bcast and comm.allgather of a status"
    for name, value in (("nothing", None), ("200 bytes", {"request_id": 7, "text": "y" * 170})):
        given = value if comm.rank == 0 else None
        bodies: dict[str, Callable[[], object]] = {
            form: functools.partial(broadcaster.broadcast, given) for form, broadcaster in forms.items()
        }
        bodies[by_hand] = functools.partial(_by_hand, comm, given)
        samples = in_turn({form: Collective(comm, body, NUMBER) for form, body in bodies.items()}, ROUNDS_OF_GOAL)
        figures += [
            ratio(
                f"{name}, {comm.size} ranks, {form}", samples[form], samples[by_hand], unit="us", scale=1e6, goal="<= 2.0",
                against=by_hand,
            )
            for form in forms
        ]  # fmt: skip
    if comm.rank == 0:
        print("\n".join(json.dumps(figure) for figure in figures), flush=True)
    for broadcaster in forms.values():
        broadcaster.close()


def _by_hand(comm: Any, value: object) -> None:
    comm.bcast(value, 0)
    comm.allgather(None)


def on_ranks(count: int, part: str) -> list[Figure]:
    """The figures of one part, measured by so many ranks."""
    command = launcher.find_launcher().command(count, [sys.executable, "-m", "mpi4py", __file__, part])
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=170, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    if sys.argv[1:] == ["batches"]:
        rank_main()
    elif sys.argv[1:] == ["small"]:
        small_rank_main()
    else:
        run_benchmark(lambda: on_ranks(4, "small"), lambda: on_ranks(2, "batches"))
