"""Rank processes for tests, driven step by step."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_bounce_planner.planning import WriterPlan, WriterTransfer
from kv_bounce_planner.sessions import (
    BounceArena,
    ExpectedOperation,
    ExposureLedger,
    Loan,
    OperationIdentity,
    PeerId,
    Receiver,
    RequestKey,
    Sender,
    SessionConfig,
    SessionResources,
    TransferIdentity,
)
from kv_bounce_planner.sessions.messages import ReceiveRequest, decode_message, encode_message
from kv_bounce_planner.sessions.proof import WriteExecutor
from kv_bounce_planner.testing import FakeClock, FakeNetwork, FakeWorld

PROGRAM = Path(__file__).with_name("nixl_peer.py")
#: The two transports whose classes were measured: name of the class, NixlConfig.tls.
#: Options of a Lab that are resources of its receiver.
RESOURCES = ("copier", "copier_errors_prove_idle", "handshake", "reports")
TRANSPORTS = {"tcp": "tcp", "cma": None}


@pytest.fixture(scope="session")
def peer_source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A process that has imported everything and forks a rank process per connection. Returns its socket's path."""
    path = str(tmp_path_factory.mktemp("p") / "s")
    process = subprocess.Popen([sys.executable, str(PROGRAM), path], stdin=subprocess.DEVNULL)
    yield path
    process.kill()
    process.wait()


class PeerProcess:
    """One rank process; each call is one command, answered before the next."""

    def __init__(self, path: str, instance: str, generation: str, rank: int) -> None:
        limit = time.monotonic() + 300  # a machine that is loaded imports slowly
        while True:  # the source of processes may still be importing
            self.socket = socket.socket(socket.AF_UNIX)
            try:
                self.socket.connect(path)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                self.socket.close()
                if time.monotonic() > limit:
                    raise
                time.sleep(0.01)
        self.reader, self.writer = self.socket.makefile("r"), self.socket.makefile("w")
        self.pid = int(self.reader.readline())
        self.peer: list[Any] = [instance, generation, rank]
        self.address = ""
        self.base = 0

    def start(self, name: str, **arguments: Any) -> None:
        self.writer.write(json.dumps([name, arguments]) + "\n")
        self.writer.flush()

    def finish(self) -> Any:
        line = self.reader.readline()
        if not line:
            raise RuntimeError(f"{self.peer} has ended")
        good, answer = json.loads(line)
        if not good:
            raise RuntimeError(f"{self.peer}: {answer}")
        return answer

    def __call__(self, name: str, **arguments: Any) -> Any:
        self.start(name, **arguments)
        return self.finish()

    def init(self, tls: str | None, nbytes: int = 1 << 20, arena: int = 0, **nixl: Any) -> None:
        answer = self(
            "init",
            instance=self.peer[0],
            generation=self.peer[1],
            rank=self.peer[2],
            tls=tls,
            nbytes=nbytes,
            arena=arena,
            nixl=nixl,
        )
        self.address, self.base = answer["address"], answer["base"]

    def kill(self) -> None:
        """SIGKILL, and reaped: the process is gone when this returns."""
        os.kill(self.pid, signal.SIGKILL)
        while Path(f"/proc/{self.pid}").exists():
            time.sleep(0.001)

    def close(self) -> None:
        self.reader.close()
        try:
            self.writer.close()
        except BrokenPipeError:
            pass
        self.socket.close()


@pytest.fixture
def make_peer(peer_source: str) -> Iterator[Callable[..., PeerProcess]]:
    made: list[PeerProcess] = []

    def make(instance: str, generation: str, rank: int = 0) -> PeerProcess:
        made.append(PeerProcess(peer_source, instance, generation, rank))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


def both(*started: tuple[PeerProcess, str, dict[str, Any]]) -> list[Any]:
    """Run one command in each process at the same time."""
    for peer, name, arguments in started:
        peer.start(name, **arguments)
    return [peer.finish() for peer, _, _ in started]


@pytest.fixture
def together() -> Callable[..., list[Any]]:
    return both


@pytest.fixture
def session_pair(
    make_peer: Callable[..., PeerProcess],
) -> Callable[..., tuple[PeerProcess, PeerProcess]]:
    """(receiver, sender), introduced to each other."""

    def make(
        transport: str,
        *,
        nbytes: int = 1 << 20,
        arena: int = 0,
        config: dict[str, Any] | None = None,
        nixl: dict[str, Any] | None = None,
    ) -> tuple[PeerProcess, PeerProcess]:
        receiver, sender = make_peer("gen", "g1"), make_peer("ctx", "c1", 1)
        tls = TRANSPORTS[transport]
        for peer, role in ((receiver, "receiver"), (sender, "sender")):
            peer.init(tls, nbytes, arena, **(nixl or {}))
            peer("session", role=role, config=config or {})
        receiver("connect", peer=sender.peer, address=sender.address)
        receiver("introduce", peer=sender.peer)
        for _ in range(500):
            both((receiver, "poll", {"seconds": 0.005}), (sender, "poll", {"seconds": 0.005}))
            if receiver("statistics").get("frames_received", 0):
                break
        return receiver, sender

    return make


class Lab:
    """One receiver and some senders over fakes, in one process and one thread, with a clock that stands still.

    The destination of writer w is the w-th share of the request's area of ``target``; every writer's source holds its own byte
    value pattern.
    """

    SHARE = 4096

    def __init__(
        self,
        writers: int = 1,
        *,
        executor: WriteExecutor = WriteExecutor.RECEIVER,
        arena: int = 1 << 15,
        send_arena: int = 1 << 15,
        config: SessionConfig | None = None,
        parts_max: int = 2,
        landing: Any = None,
        areas: int = 2048,
        linked: bool = False,
        introduced: bool = True,
        **receiver_options: Any,
    ) -> None:
        self.linked, self.areas = linked, areas
        receiver_options.setdefault("ledger", ExposureLedger())  # tests of one process reuse addresses
        self.clock = FakeClock()
        self.network = FakeNetwork()
        self.world = FakeWorld(executor=executor, parts_max=parts_max, landing=landing)
        self.config = replace(config or SessionConfig(drain_deadline_s=10.0, bounce_wait_s=0.2), serves_reads=True)
        self.target = np.zeros(self.SHARE * max(writers, 1) * areas, np.uint8)
        self.target_at = self.world.add_buffer(self.target)
        self.bounce = np.zeros(max(arena, 1), np.uint8)
        self.bounce_at = self.world.add_buffer(self.bounce)
        self.peer = PeerId("gen", "g1", 0)
        self.arena = BounceArena(self.bounce_at, arena, alignment=64) if arena else None
        self.receiver = Receiver(
            self.peer,
            SessionResources(
                self.world.transport(self.peer),
                self.network.channel(self.peer, linked=linked),
                arena=self.arena,
                clock=self.clock,
                **{name: receiver_options.pop(name) for name in RESOURCES if name in receiver_options},
            ),
            self.config,
            **receiver_options,
        )
        self.senders: list[Sender] = []
        self.sources: list[Any] = []
        self.slots: list[Any] = []
        for rank in range(writers):
            peer = PeerId("ctx", "c1", rank)
            source = ((np.arange(self.SHARE) * 7 + rank * 31 + 1) % 251 + 1).astype(np.uint8)
            slot = np.zeros(max(send_arena, 1), np.uint8)
            self.world.add_buffer(source)
            self.sources.append(source)
            self.slots.append(slot)
            self.senders.append(
                Sender(
                    peer,
                    SessionResources(
                        self.world.transport(peer),
                        self.network.channel(peer, linked=linked),
                        arena=BounceArena(self.world.add_buffer(slot), send_arena, alignment=64)
                        if send_arena
                        else None,
                        clock=self.clock,
                    ),
                    self.config,
                )
            )
        self.events: list[Any] = []
        self.sent: list[list[Any]] = [[] for _ in self.senders]
        self.dead: set[int] = set()
        if introduced:
            self.introduce()

    def introduce(self) -> None:
        """Both sides know each other; nothing of it stays in the events."""
        self.receiver.introduce([sender.self_id for sender in self.senders])
        for _ in range(2):
            self.receiver.poll()
            for sender in self.senders:
                sender.poll()
        self.receiver.poll()

    def inject(self, source: PeerId, target: PeerId, message: Any) -> None:
        """A message as if the session that lives there now had sent it, to the one that lives here now."""
        sessions = {each.self_id: each.session for each in (self.receiver, *self.senders)}
        frame = encode_message(message, sessions.get(source, b"s" * 16), sessions.get(target, b"t" * 16))
        self.network.inject(source, target, frame)

    def plan(self, rank: int, count: int = 8, size: int = 64, request: int = 1) -> WriterTransfer:
        step = self.SHARE // count
        targets = self.target_at + self._share(rank, request) + np.arange(count, dtype=np.int64) * step
        source_at = int(self.sources[rank].__array_interface__["data"][0])
        sources = source_at + np.arange(count, dtype=np.int64)[::-1] * step
        sizes = np.full(count, size, np.int64)
        plan = WriterPlan(rank, targets, sizes, count, count)
        return WriterTransfer(plan, sources, targets, sizes, count)

    def plan_by(self, payload: bytes, rank: int, count: int, request: int) -> WriterTransfer:
        """The receiver's planner: from what the sender's offer says."""
        assert payload == b"blocks of %d" % rank
        return self.plan(rank, count, request=request)

    def identity(self, request: int = 1, incarnation: int = 0) -> TransferIdentity:
        return TransferIdentity(request, incarnation, "g1", 0)

    def open(
        self, request: int = 1, *, tier: Any = "direct", incarnation: int = 0, count: int = 8, **more: Any
    ) -> tuple[OperationIdentity, ...]:
        expected = []
        for sender in self.senders:
            rank = sender.self_id.rank
            plan = self.plan(rank, count, request=request).writer
            wanted = tier if isinstance(tier, str) else tier[rank]
            reads: Any = {}
            if wanted == "pull":
                reads = {"resolve": lambda payload, rank=rank: self.plan_by(payload, rank, count, request)}
            blocks = (f"block {rank}", "a shared block")
            expected.append(
                ExpectedOperation(sender.self_id, plan.total_bytes, b"", plan, wanted, blocks=blocks, **reads)
            )
        return self.receiver.open(self.identity(request, incarnation), expected, claim=f"blocks of {request}", **more)

    def in_slices(self, slices: int = 2, tier: Any = "direct") -> Sliced:
        return Sliced(self, slices, tier)

    def ready(self, request: int = 1, *, ranks: Any = None, incarnation: int = 0, count: int = 8) -> None:
        for rank, sender in enumerate(self.senders):
            if ranks is None or rank in ranks:
                key = RequestKey(request, incarnation)
                sender.expect(key, 1)
                sender.ready(
                    key,
                    lambda asked, rank=rank: (
                        Loan(b"blocks of %d" % rank) if asked.pulls else self.plan(rank, count, request=request)
                    ),
                    claim=f"source of {request}",
                )

    def run(self, turns: int = 20, *, receiver: bool = True, senders: Any = None) -> list[str]:
        """Poll everybody; returns the names of the receiver's new events."""
        new: list[str] = []
        for _ in range(turns):
            for rank, sender in enumerate(self.senders):
                if rank not in self.dead and (senders is None or rank in senders):
                    self.sent[rank].extend(sender.poll())
            if receiver:
                events = self.receiver.poll()
                self.events.extend(events)
                new.extend(type(event).__name__ for event in events)
        return new

    def kill(self, rank: int) -> None:
        self.dead.add(rank)
        self.world.kill(self.senders[rank].self_id)

    def names(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def sent_names(self, rank: int = 0) -> list[str]:
        return [type(event).__name__ for event in self.sent[rank]]

    def _share(self, rank: int, request: int) -> int:
        return ((request - 1) % self.areas * max(len(self.senders), 1) + rank) * self.SHARE

    def in_place(self, count: int = 8) -> bool:
        """Whether every fragment of what succeeded (of request 1, before that) is in place and no other byte was touched."""
        expected = np.zeros_like(self.target)
        step, size = self.SHARE // count, 64
        succeeded = {e.identity.request_id for e in self.events if type(e).__name__ == "TransferSucceeded"} or {1}
        for request in succeeded:
            for rank, source in enumerate(self.sources):
                for index in range(count):
                    at = self._share(rank, request) + index * step
                    origin = (count - 1 - index) * step
                    expected[at : at + size] = source[origin : origin + size]
        return bool((expected == self.target).all())

    def state(self, operation: OperationIdentity) -> str:
        return self.receiver.state_of(operation)

    def validate(self) -> None:
        if self.arena is not None:
            self.arena.validate()
        for sender in self.senders:
            if sender._arena is not None:
                sender._arena.validate()


class Sliced:
    """A lab's request 1 in slices of equally many of a writer's eight fragments; the last waits for the whole prompt.

    Args:
        tier: Of all slices, or of each.
    """

    def __init__(self, lab: Lab, slices: int, tier: Any) -> None:
        self.lab, self.slices = lab, slices
        self.tiers = [tier] * slices if isinstance(tier, str) else list(tier)
        self.key = RequestKey(1, 0)

    def part(self, rank: int, index: int) -> WriterTransfer:
        whole, each = self.lab.plan(rank), 8 // self.slices
        taken = slice(index * each, (index + 1) * each)
        targets, sizes = whole.target_addresses[taken], whole.sizes[taken]
        plan = WriterPlan(rank, targets, sizes, each, each)
        return WriterTransfer(plan, whole.source_addresses[taken], targets, sizes, each)

    def open(self) -> tuple[OperationIdentity, ...]:
        expected = []
        for index, tier in enumerate(self.tiers):
            for sender in self.lab.senders:
                rank = sender.self_id.rank
                plan = self.part(rank, index).writer
                reads: Any = {}
                if tier == "pull":
                    reads = {"resolve": lambda payload, rank=rank, index=index: self.part(rank, index)}
                expected.append(
                    ExpectedOperation(
                        sender.self_id,
                        plan.total_bytes,
                        b"",
                        plan,
                        tier,
                        blocks=(f"block {index} of {rank}",),
                        slice_index=index,
                        after=index + 1 if index + 1 < self.slices else 0,
                        **reads,
                    )
                )
        return self.lab.receiver.open(self.lab.identity(), expected, claim="blocks")

    def resolver(self, rank: int) -> Callable[[Any], Any]:
        def resolve(asked: Any) -> Any:
            index = asked.operation.transfer.slice_index
            return Loan(b"slice %d" % index) if asked.pulls else self.part(rank, index)

        return resolve

    def compute(self, through: int, ranks: Any = None) -> None:
        """The first so many slices are computed on these ranks."""
        for rank, sender in enumerate(self.lab.senders):
            if ranks is None or rank in ranks:
                sender.expect(self.key, self.slices)
                if through == self.slices:
                    sender.ready(self.key, self.resolver(rank), claim="source")
                else:
                    sender.reached(self.key, through, self.resolver(rank), claim="source")

    def landed(self) -> list[int]:
        return [event.slice_index for event in self.lab.events if type(event).__name__ == "SliceLanded"]

    def in_place(self, *indexes: int) -> bool:
        """Whether exactly these slices are at their places, and no other byte was touched."""
        expected = np.zeros_like(self.lab.target)
        for index in indexes:
            for rank, source in enumerate(self.lab.sources):
                part = self.part(rank, index)
                base = int(source.__array_interface__["data"][0])
                for start, target, size in zip(
                    *map(np.ndarray.tolist, (part.source_addresses, part.target_addresses, part.sizes))
                ):
                    at = target - self.lab.target_at
                    expected[at : at + size] = source[start - base : start - base + size]
        return bool((expected == self.lab.target).all())

    def requests(self, rank: int = 0) -> list[ReceiveRequest]:
        """What that sender was asked, frame by frame."""
        peer = self.lab.senders[rank].self_id
        frames = (decode_message(frame) for _, target, frame in self.lab.network.log if target == peer)
        return [message for message in frames if isinstance(message, ReceiveRequest)]


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    made: list[Lab] = []

    def make(*arguments: Any, **named: Any) -> Lab:
        made.append(Lab(*arguments, **named))
        return made[-1]

    yield make
    for lab in made:
        lab.validate()
