"""A worker as engines have it: one loop that takes requests in, makes one token of each per step, and hands each step over.

    python worker_loop.py [--step-ms 2]     # started by api_server.py: the key comes down stdin, the address goes up stdout

The engine is a stand-in whose next token is a function of everything before it, so that every answer can be checked.
``Worker`` is what two packages ask of a worker: requests in batches with `rpc_batch_submit.take_in`, tokens out through one
push stream of `rpc_local_registry`.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence

import msgspec

from rpc_batch_submit import take_in
from rpc_local_registry import RpcBackpressure, RpcServer, StreamSource, rpc_method

VOCABULARY = 32_000


class Request(msgspec.Struct, frozen=True):
    """What the API server hands over."""

    request_id: int
    prompt: list[int]
    tokens_max: int


class Token(msgspec.Struct, frozen=True):
    """One token of one request."""

    request_id: int
    token: int
    last: bool


def next_token(tokens: Sequence[int]) -> int:
    """The stand-in's model: depends on every token before."""
    return zlib.crc32(",".join(map(str, tokens)).encode()) % VOCABULARY


def answer(prompt: Sequence[int], tokens_max: int) -> list[int]:
    """What a request must be answered with."""
    tokens = list(prompt)
    for _ in range(tokens_max):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Engine:
    """The stand-in: a request is refused for its size, and a step costs the same however many run."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.running: dict[int, tuple[Request, list[int]]] = {}

    def check(self, request: Request) -> None:
        """Refuse what cannot be served; called from any thread."""
        if not request.prompt or not 1 <= request.tokens_max <= 4096:
            raise ValueError("a prompt must have tokens, and tokens_max must be in 1..4096")

    def add(self, request: Request) -> None:
        self.running[request.request_id] = (request, list(request.prompt))

    def drop(self, request_id: int) -> None:
        self.running.pop(request_id, None)

    def step(self) -> list[Token]:
        time.sleep(self.step_s)  # stands for the kernels
        made = []
        for request, tokens in list(self.running.values()):
            tokens.append(next_token(tokens))
            last = len(tokens) == len(request.prompt) + request.tokens_max
            made.append(Token(request.request_id, tokens[-1], last))
            if last:
                self.drop(request.request_id)
        return made


# -- the glue: what the packages ask of a worker -------------------------------------------------------------------------


class Worker:
    """The loop's side of the calls. All of them return at once: they leave notes, and the loop reads them between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._notes: deque[Request | int] = deque()  # a request, or the id of one to drop
        self._wake = threading.Event()
        self._steps: StreamSource[list[Token]] = StreamSource()
        self._batches = 0
        self._stopping = False

    @rpc_method(non_blocking=True)
    def submit_batch(self, requests: list[Request]) -> list[str | None]:
        self._batches += 1
        outcomes = take_in(requests, self._take)
        self._wake.set()
        return outcomes

    @rpc_method(non_blocking=True)
    def abort(self, request_id: int) -> None:
        self._notes.append(request_id)
        self._wake.set()

    @rpc_method(streaming=True, non_blocking=True)
    def steps(self) -> StreamSource[list[Token]]:
        self._steps = StreamSource(on_cancel=self._wake.set)
        return self._steps

    @rpc_method(non_blocking=True)
    def counts(self) -> dict[str, int]:
        return {"running": len(self._engine.running), "batches": self._batches}

    def _take(self, request: Request) -> None:
        self._engine.check(request)  # what it raises is this request's refusal
        self._notes.append(request)

    def run(self) -> None:
        """The engine's loop, in a thread of its own or the process's main one."""
        unread: list[Token] = []
        while not self._stopping:
            if not self._engine.running and not unread and not self._notes:
                self._wake.wait()
            self._wake.clear()
            while self._notes:
                note = self._notes.popleft()
                self._engine.drop(note) if isinstance(note, int) else self._engine.add(note)
            unread += self._engine.step()
            try:
                if unread and not self._steps.push(unread):
                    for request_id in list(self._engine.running):
                        self._engine.drop(request_id)  # whoever asked is gone
            except RpcBackpressure:
                continue  # the reader is a thousand steps behind: these go with the next step's
            unread = []

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()


def main() -> None:
    """The worker's process: until stdin ends, which is when the parent closes it or is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=2.0)
    worker = Worker(Engine(parser.parse_args().step_ms / 1000))
    key = bytes.fromhex(sys.stdin.readline())
    with RpcServer(worker, "ipc://", key) as server:
        print(server.address, flush=True)
        loop = threading.Thread(target=worker.run)
        loop.start()
        sys.stdin.read()
        worker.stop()
        loop.join()


if __name__ == "__main__":
    main()
