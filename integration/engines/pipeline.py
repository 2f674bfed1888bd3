"""A pipeline of torch layers over plain mpi4py, whose ranks agree on every request without one of them waiting for the others.

    mpiexec -n 4 python pipeline.py [--requests 6] [--break-rank 2]

Rank 0 schedules. What it decides goes to all ranks as one ordered broadcast (comm-broadcast), hidden states go point to point
from stage to stage, and pp-agreement says when a request may begin (every rank has memory for it) and when its memory is free
again. Exit code 0: every answer equals that of the same layers in one process, and the drain is proven; another: a rank broke
off, and all say which and why.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from mpi4py import MPI

from comm_broadcast import BroadcastConfig, Broadcaster, ClosedError, Handle, MpiComm, TokenBatchCodec
from pp_agreement import (
    Aborted,
    Agreement,
    Committed,
    Domain,
    Drained,
    Fault,
    Finalized,
    Key,
    MpiTransport,
    Outcome,
    Prepared,
    Reason,
    Released,
    verify,
)

LAYERS, WIDTH, HEADS, VOCABULARY = 8, 64, 4, 512
SLOTS, TOKENS_MAX = 4, 48  # requests that a rank has memory for, and tokens of each
COMM = MPI.COMM_WORLD


# -- the engine: layers, a cache per request, a stage ----------------------------------------------------------------------


class Layer:
    """Attention over a cache, and a perceptron; the same weights wherever it is made."""

    def __init__(self, index: int) -> None:
        seed = torch.Generator().manual_seed(index)
        shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        self.weights = [torch.randn(s, generator=seed, dtype=torch.float64) / s[0] ** 0.5 for s in shapes]

    def __call__(self, hidden: Any, cache: dict[Any, Any]) -> Any:
        qkv, out, up, down = self.weights
        q, k, v = ((hidden @ qkv).view(len(hidden), 3, HEADS, -1).transpose(0, 2)).unbind(1)
        before = cache.get(self, (k[:, :0], v[:, :0]))
        k, v = cache[self] = (torch.cat((before[0], k), 1), torch.cat((before[1], v), 1))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(0, 1).reshape(len(hidden), -1)
        hidden = torch.nn.functional.layer_norm(hidden + seen @ out, (WIDTH,))
        return torch.nn.functional.layer_norm(hidden + torch.tanh(hidden @ up) @ down, (WIDTH,))


TABLE = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def run(layers: list[Layer], hidden: Any, cache: dict[Any, Any]) -> Any:
    for layer in layers:
        hidden = layer(hidden, cache)
    return hidden


def alone(prompt: list[int], count: int) -> list[int]:
    """The answer of all layers in one process."""
    layers, made, new = [Layer(i) for i in range(LAYERS)], list[int](), prompt
    cache: dict[Any, Any] = {}
    for _ in range(count):
        new = [int((TABLE @ run(layers, TABLE[new], cache)[-1]).argmax())]
        made += new
    return made


# -- the glue --------------------------------------------------------------------------------------------------------------


class Order(msgspec.Struct):
    """What rank 0 tells all ranks, in one order: admit a request, run a step of it, end it."""

    what: str
    request_id: int
    number: int = 0  # admit: the incarnation; end: the outcome
    tokens: npt.NDArray[np.int32] | None = None  # of the prompt, in admit


class Rank:
    """One rank: a loop none of whose turns waits. The scheduling rank has the requests, the others hear of them."""

    def __init__(self, agreement: Agreement, broadcaster: Broadcaster, requests: list[tuple[list[int], int]]) -> None:
        self.agreement, self.broadcaster = agreement, broadcaster
        self.me, self.last = COMM.rank, COMM.size - 1
        self.layers = [Layer(i) for i in range(LAYERS * self.me // COMM.size, LAYERS * (self.me + 1) // COMM.size)]
        self.caches: dict[int, dict[Any, Any] | None] = {}  # by request; None: memory is taken, nothing has run
        self.keys: dict[int, Key] = {}
        self.waiting: deque[Key] = deque()  # admitted, no memory for it yet
        self.todo: deque[Order] = deque()
        self.orders: list[Order] = []  # rank 0's, for the next broadcast
        self.handle: Handle[Any] | None = None
        self.sends: list[tuple[MPI.Request, object]] = []
        self.arriving = deque(enumerate(requests))  # rank 0: not admitted yet
        self.asked = dict(self.arriving)
        self.answers: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.draining = False

    def turn(self) -> bool:
        """One turn of the loop; True when the drain is proven.

        Raises:
            RuntimeError: A rank has stopped the domain; says which and why.
        """
        drained = False
        for event in self.agreement.poll():
            match event:
                case Prepared(key):
                    self.agreement.acknowledge_prepare(key)  # its memory is taken already
                case Released(key):
                    self.agreement.activate([key])  # before anybody can see the order
                    self.answers[key.request_id] = []
                    self.order(Order("run", key.request_id))
                case Aborted(key):
                    self.agreement.acknowledge_abort(key)
                case Committed() | Finalized() if event.ends_request:
                    self.caches.pop(event.key.request_id, None)
                    said = event.outcome if isinstance(event, Committed) else event.reason
                    self.ended[event.key.request_id] = said.name
                case Fault():
                    raise RuntimeError(f"rank {event.rank} has stopped the pipeline: {event.detail}")
            drained |= isinstance(event, Drained)
        self.follow() if self.me else self.schedule()
        while self.waiting and len(self.caches) < SLOTS:
            key = self.waiting.popleft()
            if key.request_id not in self.ended:
                self.caches[key.request_id] = None
                self.agreement.publish_ready(key)
        self.work()
        self.sends = [(request, kept) for request, kept in self.sends if not request.Test()]
        return drained

    def order(self, order: Order) -> None:
        """Rank 0: everybody does this, in this order."""
        self.orders.append(order)
        self.take(order)

    def schedule(self) -> None:
        while self.arriving and self.agreement.credits_available:
            request_id, (prompt, _) = self.arriving.popleft()
            order = Order("admit", request_id, self.agreement.next_incarnation, np.array(prompt, np.int32))
            self.order(order)
        while COMM.Iprobe(source=self.last, tag=1):
            request_id, token = COMM.recv(source=self.last, tag=1)
            self.answers[request_id].append(token)
            done = len(self.answers[request_id]) == self.asked[request_id][1]
            self.order(Order("end", request_id, Outcome.COMPLETED) if done else Order("run", request_id))
        if self.handle is not None and self.handle.test():  # in each turn: what was begun must get on
            self.handle = None
        if self.orders and self.handle is None:
            self.handle, self.orders = self.broadcaster.start_broadcast(self.orders), []
        if len(self.ended) == len(self.asked) and not self.draining:
            self.draining = True  # not before: a drain withdraws what was not scheduled yet
            self.agreement.start_drain(len(self.asked))

    def follow(self) -> None:
        """The others keep one receive open, beside their work."""
        if self.handle is None:
            self.handle = self.broadcaster.start_broadcast()
        if self.handle.test():
            for order in self.handle.result():
                self.take(order)
            self.handle = self.broadcaster.start_broadcast()

    def take(self, order: Order) -> None:
        if order.what == "admit":
            key = self.keys[order.request_id] = self.agreement.admit(order.request_id, order.number)
            if order.tokens is not None and len(order.tokens) > TOKENS_MAX and self.me == self.last:
                self.agreement.withdraw(key, Reason.CAPACITY)  # one rank that cannot is enough
            else:
                self.waiting.append(key)
        else:
            self.todo.append(order)

    def work(self) -> None:
        """The next step of this stage, if its input is here."""
        if not self.todo:
            return
        order, key = self.todo[0], self.keys[self.todo[0].request_id]
        if order.what == "end":
            self.agreement.vote_terminal(key, Outcome(order.number))  # all of its steps stood before: it is quiescent
        elif self.me == 0:
            new = self.answers[order.request_id][-1:] or self.asked[order.request_id][0]
            self.stage(order.request_id, TABLE[new])
        elif COMM.Iprobe(source=self.me - 1, tag=0):
            self.stage(order.request_id, torch.from_numpy(COMM.recv(source=self.me - 1, tag=0)))
        else:
            return
        self.todo.popleft()

    def stage(self, request_id: int, hidden: Any) -> None:
        if self.agreement.rank and self.caches[request_id] is None:
            self.agreement.activate([self.keys[request_id]])  # the order has reached it
        cache = self.caches[request_id] = self.caches[request_id] or {}
        hidden = run(self.layers, hidden, cache)
        if self.me < self.last:
            sent: object = hidden.numpy()
            self.sends.append((COMM.isend(sent, dest=self.me + 1, tag=0), sent))
        else:
            sent = (request_id, int((TABLE @ hidden[-1]).argmax()))
            self.sends.append((COMM.isend(sent, dest=0, tag=1), sent))


def serve(rank: Rank, break_rank: int | None) -> None:
    """Until the drain is proven."""
    while not rank.turn():
        if rank.me == break_rank and any(rank.caches.values()):
            raise MemoryError("this rank was told to break off")
        time.sleep(0.0002)  # an engine that is busy does not
    if rank.handle is not None and rank.me:
        with contextlib.suppress(ClosedError):  # which is how the standing receive ends
            rank.handle.wait(timeout_s=30)
    rank.broadcaster.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--break-rank", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw = np.random.default_rng(5)
    requests = [(draw.integers(0, VOCABULARY, 3 + i).tolist(), 4 + i % 3) for i in range(given.requests)]
    requests.append((draw.integers(0, VOCABULARY, TOKENS_MAX + 1).tolist(), 4))  # too long for the last rank
    domain = Domain(1, tuple(range(COMM.size)))
    broadcaster = Broadcaster(MpiComm(COMM), codec=TokenBatchCodec(Order), config=BroadcastConfig(ahead_max=1))
    try:
        with Agreement(domain, COMM.rank, MpiTransport(COMM, domain)) as agreement:
            rank = Rank(agreement, broadcaster, requests if COMM.rank == 0 else [])
            serve(rank, given.break_rank)
    except (RuntimeError, MemoryError) as error:
        sys.stdout.write(f"rank {COMM.rank}: {error}\n")
        sys.stdout.flush()
        broadcaster.release()  # local: nobody is waited for
        said, until_s = COMM.Ibarrier(), time.monotonic() + 5
        while not said.Test() and time.monotonic() < until_s:  # a launcher ends all ranks when the first one ends
            time.sleep(0.001)
        # Not by MPI_Finalize: what is under way ends nowhere, and its memory must stay until the process has ended.
        os._exit(1)
    records = COMM.gather(agreement.evidence())
    if records is None:
        return 0
    wrong = [i for i, made in rank.answers.items() if made != alone(*requests[i])]
    print(rank.ended, "wrong answers:", wrong, "differences:", verify(records))
    return 1 if wrong or verify(records) else 0


if __name__ == "__main__":
    sys.exit(main())
