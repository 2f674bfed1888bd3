"""What a submit costs: fast path, our RPC, a bare ZeroMQ echo, and the path that the fast path replaces.

Every ratio is measured within one run, the two sides in turn, median of several rounds. CPU figures are ``time.process_time``
of the whole process, both ends and ZeroMQ's own threads included: with a co-located worker all of it is rank 0's.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import hmac
import json
import os
import pickle
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import zmq

from rpc_local_registry import RpcClient, RpcConfig, RpcServer, get_local_worker, new_key, rpc_method

ROUNDS = 7


class Request(msgspec.Struct):
    """A submit with its prompt as a buffer."""

    request_id: int
    token_ids: np.ndarray
    max_tokens: int = 64


@dataclasses.dataclass
class ListRequest:
    """The same with the prompt as a list, as the pickling path carries it."""

    request_id: int
    token_ids: list[int]
    max_tokens: int = 64


class Worker:
    """Takes requests and does nothing with them."""

    def __init__(self) -> None:
        self.taken = 0

    @rpc_method(non_blocking=True)
    def submit(self, request: Request) -> None:
        """Count."""
        self.taken += 1

    @rpc_method(non_blocking=True)
    def echo(self, value: int) -> int:
        """Give back."""
        return value


class BareEcho:
    """The hand-offs of our RPC without its frames: caller → I/O thread → ROUTER thread → I/O thread → caller."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="bench-")
        address = f"ipc://{self._folder}/s"
        context = zmq.Context.instance()
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(address)
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.connect(address)
        self._stop_fd = os.eventfd(0)
        self._wake_fd = os.eventfd(0)
        self._outbox: deque[tuple[threading.Lock, list[Any], bytes]] = deque()
        self._stop = False
        self._threads = [threading.Thread(target=self._serve), threading.Thread(target=self._io)]
        for thread in self._threads:
            thread.start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stop_fd, zmq.POLLIN)
        while not self._stop:
            poller.poll()
            while self._router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                self._router.send_multipart(self._router.recv_multipart())

    def _io(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        waiting: deque[tuple[threading.Lock, list[Any]]] = deque()
        while not self._stop:
            for ready, _ in poller.poll():
                if ready is not self._dealer:
                    os.eventfd_read(self._wake_fd)
            while self._outbox:
                gate, answer, payload = self._outbox.popleft()
                waiting.append((gate, answer))
                self._dealer.send(payload)
            while self._dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                payload = self._dealer.recv()
                gate, answer = waiting.popleft()
                answer.append(payload)
                gate.release()

    def call(self, payload: bytes) -> bytes:
        """One round trip."""
        gate = threading.Lock()
        gate.acquire()
        answer: list[Any] = []
        self._outbox.append((gate, answer, payload))
        os.eventfd_write(self._wake_fd, 1)
        gate.acquire()
        return answer[0]

    def close(self) -> None:
        """Stop both threads."""
        self._stop = True
        os.eventfd_write(self._stop_fd, 1)
        os.eventfd_write(self._wake_fd, 1)
        for thread in self._threads:
            thread.join()
        self._router.close(0)
        self._dealer.close(0)
        os.close(self._stop_fd)
        os.close(self._wake_fd)
        os.unlink(f"{self._folder}/s")
        os.rmdir(self._folder)


class BareFrames:
    """Three frames from one thread to another, nothing else: the floor for a submit's CPU."""

    def __init__(self, payload: np.ndarray) -> None:
        self._payload = payload
        self._folder = tempfile.mkdtemp(prefix="bench-")
        address = f"ipc://{self._folder}/s"
        context = zmq.Context.instance()
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVHWM, 0)
        self._router.bind(address)
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.SNDHWM, 0)
        self._dealer.connect(address)
        self._received = 0
        self._wanted = 0
        self._done = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._receive)
        self._thread.start()

    def _receive(self) -> None:
        while not self._stop:
            if self._router.poll(100):
                while self._router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    self._router.recv_multipart()
                    self._received += 1
                    if self._received == self._wanted:
                        self._done.set()

    def burst(self, count: int, pace_s: float) -> None:
        """Send ``count`` messages and wait until they arrived."""
        self._done.clear()
        self._wanted = self._received + count
        header, body = bytes(88), bytes(32)
        view = memoryview(self._payload).cast("B")
        paced(count, pace_s, lambda: self._dealer.send_multipart([header, body, view]))
        self._done.wait()

    def close(self) -> None:
        """Stop."""
        self._stop = True
        self._thread.join()
        self._router.close(0)
        self._dealer.close(0)
        os.unlink(f"{self._folder}/s")
        os.rmdir(self._folder)


class PicklePath:
    """The path that the fast path replaces: pickle, HMAC, ZeroMQ, HMAC, unpickle, a thread pool, and the way back.

    Written from its public description; here only as a yardstick.
    """

    def __init__(self, worker: Callable[[ListRequest], None]) -> None:
        self._folder = tempfile.mkdtemp(prefix="bench-")
        address = f"ipc://{self._folder}/s"
        context = zmq.Context.instance()
        self._key = os.urandom(32)
        self._worker = worker
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(address)
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.connect(address)
        self._pool = ThreadPoolExecutor(4)
        self._stop = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _pack(self, value: object) -> bytes:
        data = pickle.dumps(value)
        return data + hmac.digest(self._key, data, "sha256")

    def _unpack(self, data: bytes) -> Any:
        if not hmac.compare_digest(hmac.digest(self._key, data[:-32], "sha256"), data[-32:]):
            raise RuntimeError("bad MAC")
        return pickle.loads(data[:-32])

    def _serve(self) -> None:
        while not self._stop:
            if self._router.poll(100):
                identity, data = self._router.recv_multipart()
                request = self._unpack(data)
                result = self._pool.submit(self._worker, request).result()
                self._router.send_multipart([identity, self._pack(result)])

    def submit(self, request: ListRequest) -> None:
        """One submit, acknowledged."""
        self._dealer.send(self._pack(request))
        self._unpack(self._dealer.recv())

    def close(self) -> None:
        """Stop."""
        self._stop = True
        self._thread.join()
        self._pool.shutdown()
        self._router.close(0)
        self._dealer.close(0)
        os.unlink(f"{self._folder}/s")
        os.rmdir(self._folder)


def paced(count: int, pace_s: float, action: Callable[[], object]) -> None:
    """Do something ``count`` times, evenly spaced; 0 is as fast as possible."""
    if not pace_s:
        for _ in range(count):
            action()
        return
    due_s = time.perf_counter()
    for _ in range(count):
        action()
        due_s += pace_s
        left_s = due_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


def wall_us(action: Callable[[], object], count: int) -> float:
    """Wall time of one action."""
    start_s = time.perf_counter()
    for _ in range(count):
        action()
    return (time.perf_counter() - start_s) / count * 1e6


def cpu_us(action: Callable[[], object], count: int) -> float:
    """CPU time of one action, whole process."""
    start_s = time.process_time()
    for _ in range(count):
        action()
    return (time.process_time() - start_s) / count * 1e6


def p50_us(action: Callable[[], object], count: int) -> float:
    """Median wall time."""
    times = []
    for _ in range(count):
        start_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times) * 1e6


def in_turn(rounds: int, *measures: Callable[[], float]) -> list[float]:
    """Medians of several measures, taken in turn so that the machine's moods hit all alike."""
    samples: list[list[float]] = [[] for _ in measures]
    for _ in range(rounds):
        for measure, values in zip(measures, samples):
            values.append(measure())
    return [statistics.median(values) for values in samples]


def figure(
    name: str, value: float, unit: str, baseline: float | None, ratio: float | None, goal: str, met: bool
) -> dict:
    """One line of the result."""
    return {
        "name": name, "value": round(value, 4), "unit": unit, "baseline": None if baseline is None else round(baseline, 4),
        "ratio": None if ratio is None else round(ratio, 3), "goal": goal, "met": met,
    }  # fmt: skip


def bench_lookup() -> list[dict]:
    """Registry lookup and direct call against a bare call; and the whole client call."""
    worker = Worker()
    request = Request(1, np.arange(1024, dtype=np.int32))
    key = new_key()
    with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key, fast_path=True) as client:
        address = server.address
        submit = worker.submit

        def bare() -> None:
            submit(request)

        def lookup() -> None:
            get_local_worker(address).submit(request)

        def whole() -> None:
            client.submit(request).remote()

        bare_us, lookup_us, whole_us = in_turn(
            15, lambda: wall_us(bare, 20000), lambda: wall_us(lookup, 20000), lambda: wall_us(whole, 20000)
        )
        over_us, whole_over_us = lookup_us - bare_us, whole_us - bare_us
    return [
        figure(
            "registry_lookup_and_call_over_bare",
            over_us,
            "us",
            bare_us,
            lookup_us / bare_us,
            "<= 0.5 us",
            over_us <= 0.5,
        ),
        figure("client_fast_path_over_bare", whole_over_us, "us", bare_us, whole_us / bare_us, "printed", True),
    ]


def bench_submit() -> list[dict]:
    """CPU of an 8,192-token submit on three paths."""
    tokens = np.arange(8192, dtype=np.int32)
    request = Request(1, tokens)
    list_request = ListRequest(1, tokens.tolist())
    worker = Worker()
    key = new_key()
    old = PicklePath(lambda request: None)
    try:
        with (
            RpcServer(worker, "ipc://", key) as server,
            RpcClient(server.address, key, fast_path=True) as local,
            RpcClient(server.address, key) as remote,
        ):
            local_us, remote_us, old_us = in_turn(
                ROUNDS,
                lambda: cpu_us(lambda: local.submit(request).remote(), 20000),
                lambda: cpu_us(lambda: remote.submit(request).remote(), 1000),
                lambda: cpu_us(lambda: old.submit(list_request), 200),
            )
    finally:
        old.close()
    return [
        figure(
            "submit_8192_local_cpu_vs_pickle_path", local_us, "us", old_us, old_us / local_us, ">= 200x less",
            old_us >= 200 * local_us,
        ),
        figure(
            "submit_8192_local_cpu_vs_own_rpc", local_us, "us", remote_us, remote_us / local_us, ">= 10x less",
            remote_us >= 10 * local_us,
        ),
        figure("submit_8192_own_rpc_cpu_vs_pickle_path", remote_us, "us", old_us, old_us / remote_us, "printed", True),
    ]  # fmt: skip


def bench_round_trip() -> list[dict]:
    """Round trip of a small message against a bare echo with the same threads and hand-offs."""
    key = new_key()
    echo = BareEcho()
    try:
        with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            payload = bytes(92)
            ours_us, bare_us = in_turn(
                15,
                lambda: p50_us(lambda: client.echo(1).remote(), 500),
                lambda: p50_us(lambda: echo.call(payload), 500),
            )
    finally:
        echo.close()
    return [
        figure(
            "round_trip_p50", ours_us, "us", bare_us, ours_us / bare_us, "<= 1.3x bare echo", ours_us <= 1.3 * bare_us
        )
    ]


def _burst_cpu_us(burst: Callable[[int, float], None], count: int, pace_s: float) -> float:
    return cpu_us(lambda: burst(count, pace_s), 1) / count


def bench_cpu() -> list[dict]:
    """CPU of a 1,024-token submit, both sides, against a bare three-frame send and receive, at two paces."""
    tokens = np.arange(1024, dtype=np.int32)
    request = Request(1, tokens)
    key = new_key()
    worker = Worker()
    bare = BareFrames(tokens)
    figures = []
    try:
        with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key) as client:

            def ours(count: int, pace_s: float) -> None:
                wanted = worker.taken + count
                paced(count, pace_s, lambda: client.submit(request).remote_oneway())
                while worker.taken < wanted:
                    time.sleep(0.0005)

            for label, count, pace_s in (("", 3000, 0.0), ("_at_2000_per_s", 1000, 0.0005)):
                ours_us, bare_us = in_turn(
                    ROUNDS,
                    functools.partial(_burst_cpu_us, ours, count, pace_s),
                    functools.partial(_burst_cpu_us, bare.burst, count, pace_s),
                )
                figures.append(
                    figure(
                        f"submit_1024_cpu_both_sides{label}",
                        ours_us,
                        "us",
                        bare_us,
                        ours_us / bare_us,
                        "<= 2.5x bare three frames",
                        ours_us <= 2.5 * bare_us,
                    )
                )
    finally:
        bare.close()
    return figures


def main() -> list[dict]:
    """All figures."""
    gc.disable()
    try:
        return bench_lookup() + bench_submit() + bench_round_trip() + bench_cpu()
    finally:
        gc.enable()


def show(figures: list[dict]) -> None:
    """Table, then one JSON line per figure."""
    print(f"switch interval {sys.getswitchinterval() * 1e3} ms, {os.cpu_count()} cores, config {RpcConfig()}")
    for line in figures:
        base = "" if line["baseline"] is None else f"{line['baseline']:>12.2f}"
        ratio = "" if line["ratio"] is None else f"{line['ratio']:>9.2f}"
        print(
            f"{line['name']:<44}{line['value']:>12.3f} {line['unit']:<6}{base:>13}{ratio:>10}  {line['goal']:<28}{line['met']}"
        )
    for line in figures:
        print(json.dumps(line))


if __name__ == "__main__":
    show(main())
