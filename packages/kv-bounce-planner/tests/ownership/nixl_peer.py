"""Rank processes for tests, driven by JSON lines over a local socket; each answer is one JSON line.

``python nixl_peer.py SOCKET`` imports everything once and forks one rank process per connection. The test decides when each
side polls, so "a target that makes no progress" is a fact and not a matter of timing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any

import numpy as np

from kv_bounce_planner.planning import WriterPlan, WriterTransfer
from kv_bounce_planner.sessions import (
    BounceArena,
    ExpectedOperation,
    ExposureLedger,
    Loan,
    MemoryRegion,
    NixlConfig,
    NixlTransport,
    PeerId,
    Receiver,
    RequestKey,
    Sender,
    SessionConfig,
    SessionResources,
    TransferIdentity,
    ZmqControlChannel,
    free,
)


def pattern(nbytes: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def fragments(count: int, size: int, seed: int, base: int, room: int) -> np.ndarray[Any, Any]:
    """``count`` fragments of ``size`` bytes at random places of a range, none adjacent by intent."""
    slots = np.random.default_rng(seed).permutation(room // size)[:count]
    return base + np.sort(slots).astype(np.int64) * size


class Peer:
    def __init__(self) -> None:
        self.transport: Any = None
        self.channel: Any = None
        self.shell: Any = None
        self.peer: PeerId
        self.memory: np.ndarray[Any, Any]
        self.bounce: np.ndarray[Any, Any] | None = None
        self.events: list[Any] = []
        self.freed: list[Any] = []
        self.operations: dict[int, Any] = {}
        self.raw: list[Any] = []
        self.ledger = ExposureLedger()

    # -- set-up

    def init(
        self, instance: str, generation: str, rank: int, tls: str | None, nbytes: int, arena: int, nixl: dict[str, Any]
    ) -> Any:
        self.peer = PeerId(instance, generation, rank)
        self.memory = np.zeros(nbytes, np.uint8)
        self.transport = NixlTransport(self.peer, config=NixlConfig(tls=tls, **nixl))
        regions = [MemoryRegion(self.memory.ctypes.data, nbytes)]
        if arena:
            self.bounce = np.zeros(arena, np.uint8)
            regions.append(MemoryRegion(self.bounce.ctypes.data, arena))
        self.registration = self.transport.register(regions)
        self.channel = ZmqControlChannel(self.peer, b"a key of the tests", "tcp://127.0.0.1:*")
        return {"address": self.channel.address, "base": self.memory.ctypes.data, "pid": os.getpid()}

    def connect(self, peer: list[Any], address: str) -> None:
        self.channel.connect(PeerId(*peer), address)

    def session(self, role: str, config: dict[str, Any]) -> None:
        arena = BounceArena(self.bounce.ctypes.data, self.bounce.nbytes) if self.bounce is not None else None
        kind = Receiver if role == "receiver" else Sender
        extra: dict[str, Any] = {"ledger": self.ledger} if kind is Receiver else {}
        resources = SessionResources(self.transport, self.channel, arena=arena)
        self.shell = kind(self.peer, resources, SessionConfig(**({"serves_reads": True} | config)), **extra)

    def remake(self, role: str, config: dict[str, Any], forgetful: bool = False) -> None:
        """The session object made again in this process over the same transport and channel, as after an error.

        ``forgetful``: even what is still exposed is not remembered.
        """
        if forgetful:
            self.ledger = ExposureLedger()
        self.session(role, config)

    def introduce(self, peer: list[Any]) -> None:
        self.shell.introduce([PeerId(*peer)])

    # -- sessions

    def plan(self, writer: int, count: int, size: int, seed: int, base: int, room: int) -> Any:
        targets = fragments(count, size, seed, base, room)
        return WriterPlan(writer, targets, np.full(count, size, np.int64), count, count)

    def open(self, request: int, incarnation: int, writers: list[Any], count: int, size: int, tier: str) -> list[int]:
        """Ask each writer for ``count`` fragments in its own equal share of our memory."""
        identity = TransferIdentity(request, incarnation, self.peer.generation, self.peer.rank)
        share = self.memory.nbytes // len(writers)
        expected = []
        for index, writer in enumerate(writers):
            base = self.memory.ctypes.data + index * share
            plan = self.plan(writer[2], count, size, request * 7 + index, base, share)
            payload = json.dumps([count, size, request * 7 + index, base, share]).encode()
            reads: dict[str, Any] = {}
            if tier == "pull":
                reads = {"resolve": lambda offer, plan=plan, at=request * 7 + index: self._read_plan(offer, plan, at)}
            expected.append(ExpectedOperation(PeerId(*writer), plan.total_bytes, payload, plan, tier, **reads))
        opened = self.shell.open(identity, expected, claim=request)
        self.operations.update({each.operation: each for each in opened})
        return [each.operation for each in opened]

    def _one(self, peer: PeerId, size: int) -> ExpectedOperation:
        payload = json.dumps([1, size, 1, self.memory.ctypes.data, size]).encode()
        return ExpectedOperation(peer, size, payload)

    def open_in_ledger(self, request: int, writers: list[Any], size: int, blocks: list[str]) -> None:
        identity = TransferIdentity(request, 0, self.peer.generation, self.peer.rank)
        self.shell.open(identity, [self._one(PeerId(*writer), size) for writer in writers], request, blocks=blocks)

    def open_stale(self, request: int, peer: list[Any], generation: str, size: int) -> None:
        """Ask the live peer with the generation that it had in an earlier life."""
        from kv_bounce_planner.sessions import receiver as module

        live, stale = PeerId(*peer), PeerId(peer[0], generation, peer[2])
        identity = TransferIdentity(request, 0, self.peer.generation, self.peer.rank)
        original = module.ReceiveRequest

        def aged(operation: Any, sender_generation: str, *rest: Any) -> Any:
            return original(operation, stale.generation, *rest)

        module.ReceiveRequest = aged  # type: ignore[assignment, misc]
        try:
            self.shell.open(identity, [self._one(live, size)], request)
        finally:
            module.ReceiveRequest = original  # type: ignore[misc]

    def _read_plan(self, offer: bytes, plan: WriterPlan, seed: int) -> WriterTransfer:
        """Where the source is, by what the sender said of its memory."""
        base, nbytes = json.loads(offer)
        return self._sources(plan, seed, base, nbytes)

    def _sources(self, plan: WriterPlan, seed: int, base: int, nbytes: int) -> WriterTransfer:
        count, size = len(plan.sizes), int(plan.sizes[0])
        sources = fragments(count, size, seed + 1, base, nbytes)
        sources = np.random.default_rng(seed + 2).permutation(sources)
        return WriterTransfer(plan, sources, plan.target_addresses, plan.sizes, count)

    def _resolve(self, request: Any) -> WriterTransfer | Loan:
        if request.pulls:
            return Loan(json.dumps([self.memory.ctypes.data, self.memory.nbytes]).encode())
        count, size, seed, base, room = json.loads(request.payload)
        plan = self.plan(self.peer.rank, count, size, seed, base, room)
        return self._sources(plan, seed, self.memory.ctypes.data, self.memory.nbytes)

    def late_pool(self, nbytes: int) -> int:
        """Memory that is made and registered now, in place of the first."""
        self.first, self.memory = self.memory, np.zeros(nbytes, np.uint8)
        self.transport.register([MemoryRegion(self.memory.ctypes.data, nbytes)])
        return self.memory.ctypes.data

    def ready(self, request: int, incarnation: int = 0, count: int = 1) -> None:
        self.shell.expect(RequestKey(request, incarnation), count)
        self.shell.ready(RequestKey(request, incarnation), self._resolve, claim=request)

    def expected_bytes(
        self,
        rank: int,
        writers: int,
        index: int,
        request: int,
        count: int,
        size: int,
        base: int,
        room: int,
        source_seed: int,
    ) -> Any:
        """What our memory must hold after a transfer from a writer that was filled with ``source_seed``."""
        seed = request * 7 + index
        source = pattern(self.memory.nbytes, source_seed)
        places = fragments(count, size, seed + 1, 0, self.memory.nbytes)
        places = np.random.default_rng(seed + 2).permutation(places)
        targets = fragments(count, size, seed, 0, room) + base - self.memory.ctypes.data
        good = all(
            (self.memory[t : t + size] == source[s : s + size]).all() for t, s in zip(targets.tolist(), places.tolist())
        )
        return bool(good)

    def poll(self, seconds: float = 0.0, until: list[str] | None = None, count: int = 1) -> list[Any]:
        """Poll ``count`` times, or until one of the named events was seen, at most ``seconds``."""
        seen: list[Any] = []
        limit = time.monotonic() + seconds
        turns = 0
        while True:
            for event in self.shell.poll():
                self.events.append(event)
                seen.append([type(event).__name__, *_short(event)])
                if type(event).__name__ in ("MemoryReleased", "SourceReleased"):
                    self.freed.append(free(event.proven))
            turns += 1
            if until and any(event[0] in until for event in seen):
                return seen
            if turns >= count and time.monotonic() >= limit:
                return seen

    def until_state(self, operation: int, states: list[str], seconds: float) -> str:
        limit = time.monotonic() + seconds
        while True:
            for event in self.shell.poll():
                self.events.append(event)
                if type(event).__name__ in ("MemoryReleased", "SourceReleased"):
                    self.freed.append(free(event.proven))
            state = self.state(operation)
            if state in states or time.monotonic() >= limit:
                return state

    def state(self, operation: int) -> str:
        known = self.operations.get(operation)
        if known is None:
            for event in self.events:
                if type(event).__name__ == "ReceiveRequested" and event.operation.operation == operation:
                    known = self.operations[operation] = event.operation
        return str(self.shell.state_of(known)) if known is not None else "UNKNOWN"

    def cancel(self, request: int, incarnation: int = 0) -> bool:
        return bool(
            self.shell.cancel(TransferIdentity(request, incarnation, self.peer.generation, self.peer.rank), "test")
        )

    def seal(self, request: int, incarnation: int = 0) -> None:
        self.shell.seal(RequestKey(request, incarnation))

    def forget(self, request: int, incarnation: int = 0) -> None:
        self.shell.forget(RequestKey(request, incarnation))

    def snapshot(self, request: int, incarnation: int = 0) -> Any:
        snapshot = self.shell.snapshot(RequestKey(request, incarnation))
        return (
            None if snapshot is None else [snapshot.outcome, [d for _, d in snapshot.operations], snapshot.quarantined]
        )

    def peer_died(self, peer: list[Any], evidence: str) -> None:
        self.shell.peer_died(PeerId(*peer), evidence)

    def retire(self, instance: str, generation: str) -> None:
        self.shell.retire_peer(instance, generation)

    def freed_claims(self) -> list[Any]:
        return self.freed

    def statistics(self) -> Any:
        return self.shell.statistics()

    def transport_statistics(self) -> Any:
        counters = self.transport.statistics()
        return {name: getattr(counters, name) for name in ("posts", "post_longest_s", "poll_longest_s", "errors")}

    def census(self) -> dict[str, int]:
        """What this process holds: everything here is as before when peers that came have gone."""
        sizes = {
            name: len(getattr(holder, name))
            for holder, names in (
                (self.transport, ("_agents",)),
                (self.channel, ("_links", "_dialled", "_numbers")),
                (self.shell, ("_lives", "_strangers", "_inbox", "_jobs", "_marks", "_lost", "_link_news")),
            )
            for name in names
        }
        for name in ("_high_water", "_flying", "_clocked", "_of_operation", "_transfers", "_draining"):
            sizes[name] = len(getattr(self.shell, name, ()))
        statistics = self.shell.statistics()
        return sizes | {
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "quarantined": statistics["quarantined_count"],
            "undelivered": statistics["undelivered"],
            "open": len(self.shell.drain().open),
        }

    def close_all(self) -> None:
        """Session, channel and transport end, the process lives on."""
        self.shell.close()
        self.transport.deregister(self.registration)
        self.transport.close()

    def outside(self, value: int, requests: list[list[int]]) -> bool:
        """Whether every byte outside the destinations of these (request, count, size) still has a value."""
        touched = np.zeros(self.memory.nbytes, bool)
        for request, count, size in requests:
            for at in fragments(count, size, request * 7, 0, self.memory.nbytes).tolist():
                touched[at : at + size] = True
        return bool((self.memory[~touched] == value).all())

    # -- memory

    def fill(self, value: int) -> None:
        self.memory[:] = value

    def fill_pattern(self, seed: int) -> None:
        self.memory[:] = pattern(self.memory.nbytes, seed)

    def count_of(self, value: int) -> int:
        return int((self.memory == value).sum())

    # -- the library without a session: what a careless program does

    def raw_connect(self, peer: list[Any], info: list[Any]) -> None:
        from kv_bounce_planner.transports.interface import AgentInfo

        self.transport.connect(PeerId(*peer), AgentInfo(info[0], bytes.fromhex(info[1])))

    def raw_info(self, peer: list[Any]) -> list[str]:
        info = self.transport.agent_info(PeerId(*peer))
        return [info.name, info.metadata.hex()]

    def raw_post(self, peer: list[Any], target: int, nbytes: int) -> str:
        """Post one write of our whole memory without any session; keeps the library's handle."""
        self.raw_prepare(peer, target, nbytes)
        return self.raw_transfer()

    def raw_prepare(self, peer: list[Any], target: int, nbytes: int, verb: str = "WRITE") -> None:
        agent = self.transport._agents[PeerId(*peer).instance]
        nixl = agent.nixl
        source = np.array([[self.memory.ctypes.data, nbytes, 0]], np.uint64)
        remote = np.array([[target, nbytes, 0]], np.uint64)
        handle = nixl.initialize_xfer(
            verb,
            nixl.get_xfer_descs(source, "DRAM"),
            nixl.get_xfer_descs(remote, "DRAM"),
            agent.remotes[PeerId(*peer)],
            b"careless" if verb == "WRITE" else b"",
        )
        self.raw_note = b"careless" if verb == "WRITE" else b""
        self.raw.append(handle)
        self.raw_nixl = nixl

    def raw_transfer(self) -> str:
        try:
            return str(self.raw_nixl.transfer(self.raw[-1], self.raw_note))
        except Exception as error:
            return f"raised {type(error).__name__}"

    def raw_progress(self, peer: list[Any], seconds: float) -> str:
        nixl = self.transport._agents[PeerId(*peer).instance].nixl
        limit = time.monotonic() + seconds
        state = "none"
        while time.monotonic() < limit:
            nixl.get_new_notifs()
            if self.raw:
                try:
                    state = nixl.check_xfer_state(self.raw[-1])
                except Exception as error:
                    state = f"raised {type(error).__name__}"
        return state

    def raw_drop(self) -> None:
        """Forget the library's handles without releasing them: they go with their agent."""
        from kv_bounce_planner.transports._nixl import _let_go

        while self.raw:
            _let_go(self.raw.pop())
        self.raw_nixl = None

    def raw_release(self) -> str:
        try:
            self.raw.pop().release()
        except Exception as error:
            return f"raised {type(error).__name__}"
        return "released"

    def destroy_agent(self, instance: str, generation: str) -> None:
        self.transport.destroy_agent((instance, generation))

    def deregister(self) -> None:
        self.transport.deregister(self.registration)

    def renew(self, generation: str) -> Any:
        """A later generation in this very process: new agent, channel and session over the same memory."""
        self.shell = None
        self.channel.close()
        self.peer = PeerId(self.peer.instance_id, generation, self.peer.rank)
        self.transport = NixlTransport(self.peer, config=self.transport.config)
        self.registration = self.transport.register([MemoryRegion(self.memory.ctypes.data, self.memory.nbytes)])
        self.channel = ZmqControlChannel(self.peer, b"a key of the tests", "tcp://127.0.0.1:*")
        self.session("receiver", {})
        return {"address": self.channel.address}


def _short(event: Any) -> list[Any]:
    if hasattr(event, "tiers"):
        return [event.identity.request_id, [tier for _, tier, _ in event.tiers]]
    if hasattr(event, "identity"):
        return [event.identity.request_id, getattr(event, "reason", "")]
    if hasattr(event, "request"):
        operation = getattr(event, "operation", None)
        return [event.request.request_id, operation.operation if operation else None, getattr(event, "reason", "")]
    return []


def serve(connection: socket.socket) -> None:
    peer = Peer()
    with connection.makefile("r") as commands, connection.makefile("w") as answers:
        answers.write(json.dumps(os.getpid()) + "\n")
        answers.flush()
        for line in commands:
            name, arguments = json.loads(line)
            try:
                answer: Any = [True, getattr(peer, name)(**arguments)]
            except Exception as error:
                answer = [False, f"{type(error).__name__}: {error}"]
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    os._exit(0)  # the library's teardown with writes in doubt is not what is tested


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped the moment they end
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(16)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                serve(connection)
            connection.close()


if __name__ == "__main__":
    main()
