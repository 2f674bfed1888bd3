"""A day's load in small: clients with mixed verbs against servers that are killed, stalled and restarted.

Ten clients in threads and on event loops call, stream and send one way; a disturber kills the server's process, freezes it,
stops it politely and starts it again at the same address, and closes and replaces clients. Every call must end exactly once
with a value, or with an error that its cause explains; at the end every account (calls, bytes, streams, descriptors, threads)
is zero.

    python tools/soak.py [--seconds 60] [--seed 1] [--transport ipc|tcp]

Exit code 0 if the invariant held, 1 if not.
"""

# ruff: noqa: T201, S311, BLE001 - a command line tool with reproducible randomness
from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from rpc_local_registry import (
    RpcBackpressure,
    RpcClient,
    RpcConfig,
    RpcConnectionError,
    RpcError,
    RpcRemoteError,
    RpcServer,
    RpcTimeout,
    StreamSource,
    rpc_method,
)
from rpc_local_registry.testing import RawPeer, resources

CONFIG = RpcConfig(
    heartbeat_s=0.1, peer_timeout_s=0.6, handshake_timeout_s=2.0, flush_s=1.0, pending_calls_max=256,
    pending_bytes_max=16 << 20, stream_credit=16, stream_bytes=1 << 20,
)  # fmt: skip
CLIENTS = 10
#: A call that has not ended after so long never will.
STUCK_S = 30.0


class Worker:
    """Methods of every kind."""

    @rpc_method(non_blocking=True)
    def echo(self, value: Any) -> Any:
        """Give back."""
        return value

    @rpc_method
    def slow(self, delay_s: float) -> str:
        """On a lane."""
        time.sleep(delay_s)
        return "slow"

    @rpc_method
    async def nap(self, delay_s: float) -> str:
        """On the loop."""
        await asyncio.sleep(delay_s)
        return "nap"

    @rpc_method(non_blocking=True)
    def fail(self, text: str) -> None:
        """Raise."""
        raise ValueError(text)

    @rpc_method
    def note(self, value: int) -> None:
        """One way."""

    @rpc_method(streaming=True)
    def count(self, stop: int) -> Iterator[int]:
        """Generator."""
        yield from range(stop)

    @rpc_method(streaming=True, non_blocking=True)
    def pushed(self, stop: int) -> StreamSource[np.ndarray]:
        """Push stream."""
        source: StreamSource[np.ndarray] = StreamSource()
        for number in range(stop):
            source.push(np.full(1000, number))
        source.close()
        return source


def serve(address: str) -> None:
    """The server's process: stops politely at SIGTERM."""
    key = bytes.fromhex(sys.stdin.readline())
    with RpcServer(Worker(), address, key, config=CONFIG):
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        print("serving", flush=True)
        stop.wait()


def warm_up() -> None:
    """What a process makes once and keeps (the transport's own threads and descriptors) is no leak."""
    key = os.urandom(32)
    with RpcServer(Worker(), "ipc://", key) as server, RpcClient(server.address, key) as client:
        client.echo(np.zeros(100_000)).remote()
    # Beside a server of the same process a client makes no use of the process's own context; every other one does.
    RawPeer("tcp://127.0.0.1:1").close()


class Ledger:
    """What became of every call. A call that ends twice, or never, breaks the invariant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[int, tuple[str, float]] = {}
        self._next = 0
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []

    def begin(self, what: str) -> int:
        """A call was made."""
        with self._lock:
            self._next += 1
            self._open[self._next] = (what, time.monotonic())
            return self._next

    def end(self, ticket: int, outcome: str) -> None:
        """It ended."""
        with self._lock:
            opened = self._open.pop(ticket, None)
            if opened is None:
                self.problems.append(f"call {ticket} ended twice: {outcome}")
                return
            self.outcomes[f"{opened[0]}: {outcome}"] += 1

    def wrong(self, text: str) -> None:
        """Something that must not be."""
        with self._lock:
            self.problems.append(text)

    def stuck(self, older_than_s: float) -> list[str]:
        """Calls that have not ended."""
        now_s = time.monotonic()
        with self._lock:
            return [
                f"{what} since {now_s - since_s:.1f} s"
                for what, since_s in self._open.values()
                if now_s - since_s >= older_than_s
            ]

    @property
    def calls(self) -> int:
        """Calls made."""
        return self._next


class Caller:
    """One client with its thread and its own luck."""

    def __init__(self, soak: Soak, number: int) -> None:
        self.soak = soak
        self.random = random.Random(f"{soak.seed} {number}")
        self.name = f"client-{number}"
        self.client = self.make()
        self.finished: list[RpcClient] = []
        self.thread = threading.Thread(target=self.run, name=self.name)

    def make(self) -> RpcClient:
        """A fresh client."""
        return RpcClient(self.soak.address, self.soak.key, config=CONFIG, interface=Worker, name=self.name)

    def run(self) -> None:
        """Call until the time is over."""
        while not self.soak.over.is_set():
            try:
                verb = self.random.choice(
                    (self.blocking, self.in_a_row, self.future, self.oneway, self.stream, self.loop, self.loop)
                )
                verb()
            except RpcBackpressure:
                time.sleep(0.01)
            except RpcConnectionError:
                self.recover()
            except RpcTimeout:
                continue
            except Exception as error:
                self.soak.ledger.wrong(f"{self.name}: {error!r}")
                return
            if self.random.random() < 0.002:
                self.replace()
        self.leave(self.client)

    def recover(self) -> None:
        """The recipe for a lost session."""
        time.sleep(self.random.uniform(0.01, 0.1))
        self.client.reconnect()

    def replace(self) -> None:
        """Close in the middle of it all and begin anew."""
        old, self.client = self.client, self.make()
        self.leave(old)

    def leave(self, client: RpcClient) -> None:
        """Close and check the accounts."""
        begun_s = time.monotonic()
        client.close()
        took_s = time.monotonic() - begun_s
        statistics = client.statistics()
        if (statistics.pending, statistics.pending_bytes) != (0, 0):
            self.soak.ledger.wrong(f"{self.name}: accounts after close: {statistics}")
        if statistics.oneway_sent != statistics.oneway_done + statistics.oneway_lost:
            self.soak.ledger.wrong(f"{self.name}: one-way calls unaccounted for: {statistics}")
        if took_s > CONFIG.flush_s + CONFIG.drain_s + 2.0:
            self.soak.ledger.wrong(f"{self.name}: close took {took_s:.1f} s")
        self.soak.lost += statistics.oneway_lost

    # ---- verbs; each books its call and its end

    @contextlib.contextmanager
    def booked(self, what: str) -> Iterator[None]:
        """Begin and end of one call in this thread."""
        ticket = self.soak.ledger.begin(what)
        try:
            yield
        except BaseException as error:
            self.soak.ledger.end(ticket, type(error).__name__)
            raise
        self.soak.ledger.end(ticket, "value")

    def timeout_s(self) -> float:
        """Some short, most long."""
        return self.random.choice((0.02, 0.5, 5.0, 5.0, 5.0))

    def same(self, got: object, wanted: object) -> None:
        """An answer is the one to the question."""
        if not np.array_equal(got, wanted):  # type: ignore[arg-type]
            self.soak.ledger.wrong(f"{self.name}: {got!r:.80} for {wanted!r:.80}")

    def blocking(self) -> None:
        """Plain calls of all sizes, lanes, coroutines, errors."""
        value = np.full(self.random.choice((1, 100, 10_000, 100_000)), self.random.randrange(1000))
        match self.random.randrange(4):
            case 0 | 1:
                with self.booked("remote"):
                    self.same(self.client.echo(value).remote(self.timeout_s()), value)
            case 2:
                with self.booked("remote"):
                    self.same(self.client.slow(self.random.choice((0.0, 0.05))).remote(self.timeout_s()), "slow")
            case _:
                try:
                    with self.booked("remote"):
                        self.client.fail("told").remote(self.timeout_s())
                except RpcRemoteError as error:
                    self.same(error.message, "told")

    def in_a_row(self) -> None:
        """Small blocking calls one after the other: the thread borrows the socket."""
        for number in range(self.random.randrange(100)):
            with self.booked("in a row"):
                self.same(self.client.echo(number).remote(self.timeout_s()), number)
            if self.random.random() < 0.02:
                self.client.note(number).remote_oneway()

    def future(self) -> None:
        """Some are cancelled."""
        ticket = self.soak.ledger.begin("future")
        try:
            future = self.client.nap(self.random.choice((0.0, 0.01, 0.2))).remote_future(self.timeout_s())
        except RpcError as error:
            self.soak.ledger.end(ticket, type(error).__name__)
            raise
        future.add_done_callback(
            lambda f: self.soak.ledger.end(
                ticket, "cancelled" if f.cancelled() else type(f.exception()).__name__ if f.exception() else "value"
            )
        )
        if self.random.random() < 0.3:
            future.cancel()

    def oneway(self) -> None:
        """A handful."""
        for number in range(self.random.randrange(1, 20)):
            with self.booked("oneway"):
                self.client.note(number).remote_oneway()

    def stream(self) -> None:
        """Read whole, in part, or not at all."""
        stop = self.random.choice((0, 3, 100))
        with self.booked("stream"):
            if self.random.random() < 0.5:
                got = list(self.client.count(stop).remote_streaming(self.timeout_s()))
                self.same(got, list(range(stop)))
            else:
                with self.client.pushed(stop).remote_streaming(self.timeout_s(), item_timeout_s=2.0) as stream:
                    for number, item in enumerate(stream):
                        self.same(item, np.full(1000, number))
                        if self.random.random() < 0.02:
                            break

    def loop(self) -> None:
        """Many at once from an event loop, some cancelled."""

        async def one() -> None:
            ticket = self.soak.ledger.begin("async")
            try:
                value = self.random.randrange(1000)
                self.same(await self.client.echo(value).remote_async(self.timeout_s()), value)
                await self.client.nap(0.01).remote_async(self.timeout_s())
            except BaseException as error:
                self.soak.ledger.end(ticket, type(error).__name__)
                if not isinstance(error, (RpcError, asyncio.CancelledError)):
                    raise
                return
            self.soak.ledger.end(ticket, "value")

        async def run() -> None:
            tasks = [asyncio.create_task(one()) for _ in range(self.random.randrange(1, 12))]
            await asyncio.sleep(self.random.choice((0.0, 0.005)))
            for task in tasks:
                if self.random.random() < 0.2:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(run())
        if self.client._core.failure is not None and not self.client._core.closed:
            self.recover()


class Soak:
    """One run."""

    def __init__(self, seconds: float, seed: int, transport: str) -> None:
        self.seconds = seconds
        self.seed = seed
        self.transport = transport
        self.random = random.Random(seed)
        self.key = os.urandom(32)
        self.ledger = Ledger()
        self.over = threading.Event()
        self.lost = 0
        self.events: collections.Counter[str] = collections.Counter()
        self.folder = tempfile.mkdtemp(prefix="soak-")
        self.address = (
            f"ipc://{self.folder}/s" if transport == "ipc" else f"tcp://127.0.0.1:{20_000 + os.getpid() % 10_000}"
        )
        self.process: subprocess.Popen[str] | None = None

    def start_server(self) -> None:
        """Another process at the same address."""
        command = [sys.executable, __file__, "--serve", self.address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("no pipes")
        with self.process.stdin as pipe:
            pipe.write(self.key.hex() + "\n")
        self.process.stdout.readline()

    def end_server(self, how: int) -> None:
        """Kill it, or ask it to stop."""
        process = self.process
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            self.ledger.wrong("the server did not stop")
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def disturb(self) -> None:
        """Something every second or so."""
        until_s = time.monotonic() + self.seconds
        while time.monotonic() < until_s:
            time.sleep(self.random.uniform(0.5, 2.0))
            process = self.process
            event = self.random.choice(("kill", "stop", "stall", "freeze", "nothing"))
            self.events[event] += 1
            if process is None or event == "nothing":
                continue
            if event in ("kill", "stop"):
                self.end_server(signal.SIGKILL if event == "kill" else signal.SIGTERM)
                time.sleep(self.random.choice((0.0, 0.2)))
                self.start_server()
            else:
                # A stall is shorter than what counts as death, a freeze longer.
                process.send_signal(signal.SIGSTOP)
                time.sleep(0.3 if event == "stall" else 1.5)
                process.send_signal(signal.SIGCONT)

    def run(self) -> int:
        """All of it; the exit code."""
        warm_up()
        before = resources()
        self.start_server()
        callers = [Caller(self, number) for number in range(CLIENTS)]
        for caller in callers:
            caller.thread.start()
        self.disturb()
        self.over.set()
        until_s = time.monotonic() + STUCK_S
        for caller in callers:
            caller.thread.join(max(0.0, until_s - time.monotonic()))
            if caller.thread.is_alive():
                self.ledger.wrong(f"{caller.name} hangs")
        while self.ledger.stuck(0.0) and time.monotonic() < until_s:
            time.sleep(0.01)
        self.end_server(signal.SIGTERM)
        for text in self.ledger.stuck(0.0):
            self.ledger.wrong(f"never ended: {text}")
        del callers
        gc.collect()
        while time.monotonic() < until_s and resources() != before:
            time.sleep(0.05)
        after = resources()
        if after.descriptors > before.descriptors or after.threads > before.threads:
            self.ledger.wrong(f"left behind: {before} before, {after} after")
        with contextlib.suppress(OSError):
            os.unlink(f"{self.folder}/s")
        os.rmdir(self.folder)
        return self.report()

    def report(self) -> int:
        """Outcomes, then the verdict."""
        for outcome, count in sorted(self.ledger.outcomes.items()):
            print(f"  {outcome:<40}{count:>9}")
        print(f"disturbances: {dict(self.events)}")
        ended = sum(self.ledger.outcomes.values())
        print(
            f"{self.ledger.calls} calls, {ended} ended once; {self.lost} one-way calls lost with their session, counted"
        )
        for problem in self.ledger.problems[:20]:
            print(f"PROBLEM: {problem}")
        if self.ledger.problems or ended != self.ledger.calls:
            print(
                f"FAILED: python tools/soak.py --seconds {self.seconds} --seed {self.seed} --transport {self.transport}"
            )
            return 1
        print("held: every call ended exactly once, every account is zero")
        return 0


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc")
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    logging.getLogger("rpc_local_registry").setLevel(logging.CRITICAL)
    if options.serve:
        serve(options.serve)
        return 0
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    print(
        f"soak rpc-local-registry: {CLIENTS} clients, {options.seconds:.0f} s over {options.transport}, seed {seed}",
        flush=True,
    )
    return Soak(options.seconds, seed, options.transport).run()


if __name__ == "__main__":
    sys.exit(main())
