"""What a submit costs: fast path, our RPC, a bare ZeroMQ echo, and the path that the fast path replaces.

Every goal is a ratio within one run, the two sides in turn. CPU figures are ``time.process_time`` of the whole process, both
ends and ZeroMQ's own threads included: with a co-located worker all of it is rank 0's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from measure import Figure, Sample, in_turn, ratio, run_benchmark, timed
from rpc_local_registry import RpcClient, RpcServer, get_local_worker, new_key, rpc_method


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


def echo_frames(router: zmq.Socket[bytes], stop_fd: int) -> None:
    """A bare server: one poll per message, everything goes back where it came from; until the descriptor is written to."""
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(stop_fd, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if router in ready:
            router.send_multipart(router.recv_multipart())
        if stop_fd in ready:
            return


class BareServer:
    """``echo_frames`` on a thread of this process."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._folder = tempfile.mkdtemp(prefix="bench-")
        self.address = f"ipc://{self._folder}/s"
        self._router = context.socket(zmq.ROUTER)
        self._router.bind(self.address)
        self._stop_fd = os.eventfd(0)
        self._thread = threading.Thread(target=echo_frames, args=(self._router, self._stop_fd))
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and remove the socket."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        self._router.close(0)
        os.close(self._stop_fd)
        os.unlink(f"{self._folder}/s")
        os.rmdir(self._folder)


class BareClient:
    """A client with an I/O thread, as ours has, without anything else: caller, I/O thread, server, I/O thread, caller."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.connect(address)
        self._wake_fd = os.eventfd(0)
        self._outbox: deque[tuple[threading.Lock, list[bytes], bytes]] = deque()
        self._stop = False
        self._thread = threading.Thread(target=self._io)
        self._thread.start()

    def _io(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        waiting: deque[tuple[threading.Lock, list[bytes]]] = deque()
        while not self._stop:
            for ready, _ in poller.poll():
                if ready is self._dealer:
                    answer = self._dealer.recv()
                    gate, answers = waiting.popleft()
                    answers.append(answer)
                    gate.release()
                else:
                    os.eventfd_read(self._wake_fd)
                    while self._outbox:
                        gate, answers, payload = self._outbox.popleft()
                        waiting.append((gate, answers))
                        self._dealer.send(payload)

    def call(self, payload: bytes) -> bytes:
        """One round trip."""
        gate = threading.Lock()
        gate.acquire()
        answers: list[bytes] = []
        self._outbox.append((gate, answers, payload))
        os.eventfd_write(self._wake_fd, 1)
        gate.acquire()
        return answers[0]

    def close(self) -> None:
        """Stop the thread."""
        self._stop = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        self._dealer.close(0)
        os.close(self._wake_fd)


class DirectClient:
    """A client without an I/O thread: the caller itself sends and receives, and can do nothing else."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._dealer = context.socket(zmq.DEALER)
        self._dealer.connect(address)

    def call(self, payload: bytes) -> bytes:
        """One round trip."""
        self._dealer.send(payload)
        return self._dealer.recv()

    def close(self) -> None:
        """Let go of the socket."""
        self._dealer.close(0)


@contextlib.contextmanager
def other_process(role: str, *lines: str) -> Iterator[str]:
    """This file in a process of its own, as a server of that role; gives its address. ``lines``: what it reads first."""
    command = [sys.executable, __file__, role]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("no pipes")
        child.stdin.writelines(f"{line}\n" for line in lines)
        child.stdin.flush()
        try:
            yield child.stdout.readline().strip()
        finally:
            child.stdin.close()


def serve(role: str) -> None:
    """What the other process does, until its standard input is closed."""
    if role == "ours":
        with RpcServer(Worker(), "ipc://", bytes.fromhex(sys.stdin.readline())) as server:
            print(server.address, flush=True)
            sys.stdin.read()
        return
    server = BareServer(zmq.Context.instance())
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


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


def cpu(action: Callable[[], object], number: int) -> Sample:
    """Processor time of one action, all threads of the process."""
    return timed(action, number, time.process_time)


def median_time(action: Callable[[], object], number: int) -> Sample:
    """Median wall time of one action."""

    def sample() -> float:
        times = []
        for _ in range(number):
            start_s = time.perf_counter()
            action()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times)

    return sample


def lookup() -> list[Figure]:
    """Registry lookup and direct call, and the whole client call, against a bare call of the same method."""
    worker = Worker()
    request = Request(1, np.arange(1024, dtype=np.int32))
    key = new_key()
    with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key, fast_path=True) as client:
        address = server.address
        samples = in_turn(
            {
                "bare": timed(lambda: worker.submit(request), 20_000),
                "lookup": timed(lambda: get_local_worker(address).submit(request), 20_000),  # type: ignore[union-attr]
                "client": timed(lambda: client.submit(request).remote(), 20_000),
            }
        )
    return [
        ratio(name, samples[subject], samples["bare"], unit="us", scale=1e6, goal=goal, against="a bare call of the method")
        for name, subject, goal in (
            ("registry_lookup_and_call", "lookup", "<= 4"), ("client_fast_path_call", "client", None),
        )
    ]  # fmt: skip


def submit() -> list[Figure]:
    """CPU of an 8,192-token submit on three paths."""
    tokens = np.arange(8192, dtype=np.int32)
    request = Request(1, tokens)
    list_request = ListRequest(1, tokens.tolist())
    key = new_key()
    old = PicklePath(lambda request: None)
    try:
        with (
            RpcServer(Worker(), "ipc://", key) as server,
            RpcClient(server.address, key, fast_path=True) as local,
            RpcClient(server.address, key) as remote,
        ):
            samples = in_turn(
                {
                    "local": cpu(lambda: local.submit(request).remote(), 10_000),
                    "remote": cpu(lambda: remote.submit(request).remote(), 400),
                    "pickle": cpu(lambda: old.submit(list_request), 100),
                }
            )
    finally:
        old.close()
    return [
        ratio(name, samples[subject], samples[reference], unit="us", scale=1e6, goal=goal, against=against)
        for name, subject, reference, goal, against in (
            ("submit_8192_local_cpu", "local", "pickle", "<= 0.005", "the pickle path: 200 times less"),
            ("submit_8192_local_cpu_own", "local", "remote", "<= 0.1", "our own RPC: 10 times less"),
            ("submit_8192_rpc_cpu", "remote", "pickle", None, "the pickle path"),
        )
    ]


#: Calls of one sample, and rounds: what disturbs wake-ups comes and goes in tenths of a second.
ROUND_TRIPS, ROUND_TRIP_ROUNDS = 150, 41


def round_trip() -> list[Figure]:
    """Round trip of a small message, again and again, against bare sockets in the same places: in one process, and in two."""
    key, payload = new_key(), bytes(92)
    here = zmq.Context()
    with contextlib.ExitStack() as stack:

        def until_done(made: Any) -> Any:
            stack.callback(made.close)
            return made

        bare = until_done(BareServer(here))
        server = stack.enter_context(RpcServer(Worker(), "ipc://", key))
        places = {
            "one_process": (server.address, bare.address, here),
            "two_processes": (
                stack.enter_context(other_process("ours", key.hex())),
                stack.enter_context(other_process("bare")),
                zmq.Context(),
            ),
        }
        subjects: dict[str, Sample] = {}
        for place, (ours_at, bare_at, context) in places.items():
            client = stack.enter_context(RpcClient(ours_at, key))
            threaded = until_done(BareClient(context, bare_at))
            direct = until_done(DirectClient(context, bare_at))
            subjects[place] = median_time(lambda client=client: client.echo(1).remote(), ROUND_TRIPS)  # type: ignore[misc]
            for name, each in (("thread", threaded), ("direct", direct)):
                subjects[f"{place}_{name}"] = median_time(lambda each=each: each.call(payload), ROUND_TRIPS)  # type: ignore[misc]
        samples = in_turn(subjects, ROUND_TRIP_ROUNDS, warm_up=3)
    return [
        ratio(
            f"round_trip_p50_{place}{suffix}", samples[place], samples[f"{place}_{name}"], unit="us", scale=1e6,
            goal=goal, against=against,
        )
        for place in places
        for name, suffix, goal, against in (
            ("thread", "", "<= 1.3", "a bare client with an I/O thread"),
            ("direct", "_direct", None, "a bare socket that the caller drives"),
        )
    ]  # fmt: skip


def round_trip_asyncio() -> list[Figure]:
    """The same from a coroutine in one process, against pyzmq's own sockets for asyncio."""
    key, payload = new_key(), bytes(92)
    here = zmq.Context()
    bare = BareServer(here)
    loop = asyncio.new_event_loop()
    dealer = zmq.asyncio.Context.shadow(here).socket(zmq.DEALER)
    dealer.connect(bare.address)

    async def bare_call() -> None:
        await dealer.send(payload)
        await dealer.recv()

    def median(make: Callable[[], Coroutine[Any, Any, object]]) -> Sample:
        async def calls() -> float:
            times = []
            for _ in range(ROUND_TRIPS):
                start_s = time.perf_counter()
                await make()
                times.append(time.perf_counter() - start_s)
            return statistics.median(times)

        return lambda: loop.run_until_complete(calls())

    try:
        with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
            samples = in_turn(
                {"ours": median(lambda: client.echo(1).remote_async()), "bare": median(bare_call)},
                ROUND_TRIP_ROUNDS,
                warm_up=3,
            )
    finally:
        dealer.close(0)
        bare.close()
        loop.close()
    return [
        ratio(
            "round_trip_p50_asyncio", samples["ours"], samples["bare"], unit="us", scale=1e6, goal=None,
            against="a socket of zmq.asyncio",
        )
    ]  # fmt: skip


def submit_cpu() -> list[Figure]:
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
                samples = in_turn(
                    {
                        "ours": cpu(lambda count=count, pace_s=pace_s: ours(count, pace_s), 1),
                        "bare": cpu(lambda count=count, pace_s=pace_s: bare.burst(count, pace_s), 1),
                    }
                )
                figures.append(
                    ratio(
                        f"submit_1024_cpu_both_sides{label}", samples["ours"], samples["bare"], unit="us",
                        scale=1e6 / count, goal="<= 2.5",
                        against=f"bare three frames ({client.statistics().mac} here)",
                    )
                )  # fmt: skip
    finally:
        bare.close()
    return figures


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(sys.argv[1])
        sys.exit()
    run_benchmark(lookup, submit, round_trip, round_trip_asyncio, submit_cpu)
