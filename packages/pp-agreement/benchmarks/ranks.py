"""What each of the MPI ranks of ``bench_agreement.py`` runs; rank 0 prints the figures as one JSON line.

Work is emulated by sleeping until each iteration's time, ``stagger`` apart per stage, so the figures are the cost of agreeing
and of waiting for each other, not of computing. Sleeping lets caches and clock go cold, which multiplies whatever runs next;
the same iterations with a barrier before each instead of the sleep are the hot rows. The sides of a figure take turns of a
hundred iterations, in one run and over the same processes.

The bare exchange packs, checks and unpacks as many frames as the agreement sends, over persistent requests of the same kind,
looking as often as a frame needs to arrive within an iteration; see ``bare.py``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from bare import VOTE, pack, unpack
from mpi4py import MPI

from measure import Figure, counted, ratio, shown
from pp_agreement import Agreement, AgreementConfig, AllgatherAgreement, Committed, Domain, MpiTransport, Outcome

ITERATION_S, STAGGER_S = 0.020, 0.004
ROUNDS, ITERATIONS, WARM_UP = 12, 100, 20  # 1,200 iterations of each side are counted
REQUESTS = 256
LOOKS = 4
SWEEP = (  # stagger, jitter, what rank 1 is late by
    ("no stagger", 0.0, 0.0, 0.0),
    ("0.1 ms", 0.0001, 0.0, 0.0),
    ("1 ms", 0.001, 0.0, 0.0),
    ("20 ms", 0.020, 0.0, 0.0),
    ("4 ms, jitter of up to 6 ms", 0.004, 0.006, 0.0),
    ("4 ms, one rank 10 ms late", 0.004, 0.0, 0.010),
)
SWEEP_ITERATIONS = 40
P50, P99 = 0.5, 0.99
Row = dict[str, Any]


def quantile(values: list[float], share: float) -> float:
    """The value below which this share lies."""
    return sorted(values)[int(len(values) * share)]


class Side(Protocol):
    """One way to spend the iterations."""

    def turn(self) -> None:
        """This rank's calls of one iteration."""

    def note(self) -> None:
        """Bookkeeping of the benchmark, not measured."""

    def settle(self) -> None:
        """Come to rest after a block, together with the other ranks."""


class Agreeing:
    """The agreement, or the blocking baseline: one request per iteration, admitted, voted and polled once."""

    def __init__(self, comm: MPI.Intracomm, number: int, blocking: bool) -> None:
        self.comm = comm
        domain = Domain(number, tuple(range(comm.size)))
        config = AgreementConfig(credits=64, silence_s=60.0)
        self.agreement: Any = (
            AllgatherAgreement(domain, comm.rank, comm, config)
            if blocking
            else Agreement(domain, comm.rank, MpiTransport(comm, domain), config)
        )
        self.agreement.open()
        self.admitted = 0
        self.voted: dict[int, float] = {}
        self.latencies: list[float] = []
        self.events: tuple[Any, ...] = ()

    def turn(self) -> None:
        agreement = self.agreement
        self.admitted = number = self.admitted + 1
        key = agreement.admit(number, number, ready=False)
        agreement.vote_terminal(key, Outcome.COMPLETED)
        self.events = agreement.poll()

    def note(self) -> None:
        now_s = time.monotonic()
        self.voted[self.admitted] = now_s
        for event in self.events:
            if type(event) is Committed:
                self.latencies.append(now_s - self.voted.pop(event.key.incarnation))

    def settle(self) -> None:
        while self.comm.allreduce(self.agreement.open_rounds):
            self.agreement.poll()
        self.voted.clear()

    def end(self) -> tuple[bool, int, str, bool]:
        """Drain and close: whether it drained, how many it committed, its digest, whether it closed with all."""
        if self.agreement.is_scheduler:
            self.agreement.start_drain(self.admitted)
        report = self.agreement.drain(20.0)
        return report.drained, report.committed, report.digest, self.agreement.close(10.0)


class Exchanging:
    """As many frames over the same kind of requests, and no agreement."""

    SLOTS, LENGTH = 4, 256

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.world = comm
        comm = self.comm = comm.Dup()
        last = comm.size - 1
        self.peers = list(range(last)) if comm.rank == last else [last]
        self.out = {p: [bytearray(self.LENGTH) for _ in range(self.SLOTS)] for p in self.peers}
        self.into = {p: [bytearray(self.LENGTH) for _ in range(self.SLOTS)] for p in self.peers}
        self.views = {p: [memoryview(b) for b in self.into[p]] for p in self.peers}
        self.sends = {p: [comm.Ssend_init([b, self.LENGTH, MPI.BYTE], dest=p) for b in self.out[p]] for p in self.peers}
        self.receives = [comm.Recv_init([b, self.LENGTH, MPI.BYTE], source=p) for p in self.peers for b in self.into[p]]
        for request in self.receives:
            request.Start()
        self.sent, self.free, self.head, self.expected = (dict.fromkeys(self.peers, n) for n in (0, 0, 0, 1))
        self.arrived: dict[int, list[bool]] = {p: [False] * self.SLOTS for p in self.peers}
        self.records = 0

    def turn(self) -> None:
        self.take()
        for peer in self.peers:
            self.send(peer)

    def note(self) -> None:
        pass

    def take(self) -> None:
        quiet = 0
        while True:
            found = MPI.Request.Testsome(self.receives)
            if found:
                quiet = 0
                for index in found:
                    self.arrived[self.peers[index // self.SLOTS]][index % self.SLOTS] = True
                for place, peer in enumerate(self.peers):
                    slot = self.head[peer] % self.SLOTS
                    while self.arrived[peer][slot]:
                        self.receive(place, peer, slot)
                        slot = self.head[peer] % self.SLOTS
            else:
                quiet += 1
                if quiet >= LOOKS or not self.outstanding():
                    return

    def receive(self, place: int, peer: int, slot: int) -> None:
        view = self.views[peer][slot]
        length = (view[6] | view[7] << 8) * 24 + 44
        sequence, records = unpack(bytes(view[:length]))
        if sequence != self.expected[peer]:
            raise ValueError("order")
        self.expected[peer] = sequence + 1
        self.arrived[peer][slot] = False
        self.receives[place * self.SLOTS + slot].Start()
        self.head[peer] += 1
        for _record in records:
            self.records += 1

    def outstanding(self) -> int:
        waiting = 0
        for peer in self.peers:
            while self.free[peer] < self.sent[peer] and self.sends[peer][self.free[peer] % self.SLOTS].Test():
                self.free[peer] += 1
            waiting += self.sent[peer] - self.free[peer]
        return waiting

    def send(self, peer: int) -> None:
        if self.sent[peer] - self.free[peer] >= self.SLOTS:
            self.outstanding()
        if self.sent[peer] - self.free[peer] < self.SLOTS:
            number = self.sent[peer] + 1
            data = pack(number, ((VOTE, 0, 0, 0, 0, number, number),))
            slot = self.sent[peer] % self.SLOTS
            self.out[peer][slot][: len(data)] = data
            self.sends[peer][slot].Start()
            self.sent[peer] = number

    def settle(self) -> None:
        while self.world.allreduce(self.outstanding()):
            self.take()
        self.take()

    def end(self) -> None:
        """Let go of the requests: nothing is outstanding."""
        self.settle()
        self.world.Barrier()
        for request in self.receives:
            request.Cancel()
            request.Wait()
            request.Free()
        for requests in self.sends.values():
            for request in requests:
                request.Free()
        self.comm.Free()


def block(comm: MPI.Intracomm, side: Side, iterations: int, pause: Callable[[int], float] | None) -> Row:
    """Wall time and thread CPU in the calls of each iteration, in seconds.

    Args:
        pause: Gives the time of an iteration from the block's start, in seconds; None: as soon as all ranks are there.
    """
    start_s = comm.bcast(time.monotonic() + 0.02, 0)
    walls, cpus = [], []
    for number in range(iterations):
        if pause is not None:
            remaining_s = start_s + pause(number) - time.monotonic()
            if remaining_s > 0:
                time.sleep(remaining_s)
        else:
            comm.Barrier()
        began_s, began_cpu = time.monotonic(), time.thread_time()
        side.turn()
        cpus.append(time.thread_time() - began_cpu)
        walls.append(time.monotonic() - began_s)
        side.note()
    side.settle()
    cold = min(WARM_UP, iterations // 4)
    return {"wall": sum(walls[cold:]), "cpu": cpus[cold:]}


def in_turn(comm: MPI.Intracomm, sides: dict[str, Side], pause: Callable[[int], float] | None) -> dict[str, list[Any]]:
    """Blocks of all sides, every other round backwards; at rank 0 a list per round of the ranks' rows."""
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(ROUNDS):
        for name in reversed(sides) if number % 2 else sides:
            row = block(comm, sides[name], WARM_UP + ITERATIONS, pause)
            found[name].append(comm.gather(row))
    return found


def of_cpu(found: dict[str, list[Any]], how: str) -> list[Figure]:
    """Thread CPU against the bare exchange: the sum of the ranks in each iteration, and the rank with the worst ratio."""
    figures = []
    for what, share, goal in (("p50", P50, "<= 2"), ("p99", P99, "<= 2.5")):
        against = "a bare exchange of as many frames"
        sums = {
            name: [quantile([sum(one) for one in zip(*(row["cpu"] for row in rows))], share) for rows in found[name]]
            for name in ("ours", "bare")
        }
        name = f"{how}: thread CPU in calls per iteration, sum of 4 ranks over MPI, {what}"
        figures.append(ratio(name, sums["ours"], sums["bare"], unit="us", scale=1e6, goal=goal, against=against))
        ranks = [
            [[quantile(rows[rank]["cpu"], share) for rows in found[name]] for name in ("ours", "bare")]
            for rank in range(len(found["ours"][0]))
        ]
        worst = [
            ratio(
                f"{how}: the same at rank {rank}, {what}", ours, bare, unit="us", scale=1e6, goal=goal, against=against
            )
            for rank, (ours, bare) in enumerate(ranks)
        ]
        figures.append(max(worst, key=lambda figure: figure["ratio"]))
    return figures


def sweep(comm: MPI.Intracomm, sides: dict[str, Side]) -> list[Figure]:
    """Other staggers, shown: wall time in calls against the blocking baseline's."""
    figures = []
    for name, stagger_s, jitter_s, late_s in SWEEP:

        def pause(number: int, stagger_s=stagger_s, jitter_s=jitter_s, late_s=late_s) -> float:  # type: ignore[no-untyped-def]
            jittered_s = jitter_s * ((number * 7 + comm.rank * 3) % 11) / 10
            return number * ITERATION_S + comm.rank * stagger_s + jittered_s + (late_s if comm.rank == 1 else 0.0)

        rows = {side: comm.gather(block(comm, sides[side], SWEEP_ITERATIONS, pause)) for side in ("ours", "blocking")}
        if comm.rank == 0:
            ours_s, theirs_s = (sum(row["wall"] for row in rows[side] or ()) for side in ("ours", "blocking"))
            told = f"wall time in calls, sum over ranks, stagger {name}"
            figures.append(ratio(told, [ours_s], [theirs_s], unit="s", goal=None, against="the blocking baseline"))
    return figures


def late_rank(comm: MPI.Intracomm, number: int) -> list[Figure]:
    """256 opened at once, one rank two seconds late: decided everywhere, with one digest, within a frame per peer and poll."""
    domain = Domain(number, tuple(range(comm.size)))
    agreement = Agreement(domain, comm.rank, MpiTransport(comm, domain), AgreementConfig(credits=REQUESTS))
    agreement.open()
    keys = [agreement.admit(i, i + 1, ready=False) for i in range(REQUESTS)]
    comm.Barrier()
    if comm.rank == 2:
        time.sleep(2.0)
    for key in keys:
        agreement.vote_terminal(key, Outcome.COMPLETED)
    if agreement.is_scheduler:
        agreement.start_drain(REQUESTS)
    report = agreement.drain(20)
    statistics = agreement.statistics()
    most = statistics.core.frames_sent / statistics.polls / (comm.size - 1 if agreement.is_coordinator else 1)
    whole = report.drained and report.committed == REQUESTS and agreement.close(10)
    rows = comm.gather((whole, report.digest, most))
    if rows is None:
        return []
    same = len({digest for _whole, digest, _most in rows}) == 1
    done = sum(whole and same for whole, _digest, _most in rows)
    sent = -(-max(most for _whole, _digest, most in rows) // 1)
    return [
        counted(
            "256 at once, one rank 2 s late: ranks that decided all alike, drained and closed", done, "ranks", ">= 4"
        ),
        counted("the same: frames to one peer in one poll", int(sent), "frames", "<= 1"),
    ]


def calls_of_a_quiet_poll(comm: MPI.Intracomm, side: Agreeing) -> list[Figure]:
    """Everything that a poll calls when nothing came, nothing is to be said and nothing is on its way, counted."""
    agreement, counts = side.agreement, []
    for _ in range(50):
        agreement.poll()
        time.sleep(0.002)
        before = agreement.statistics().core
        on_its_way = sum(agreement._transport.outstanding(peer) for peer in agreement._core.peers)
        calls = [0]

        def count(_frame: Any, event: str, argument: Any, calls: list[int] = calls) -> None:
            if event in ("call", "c_call") and argument is not sys.setprofile:
                calls[0] += 1

        sys.setprofile(count)
        try:
            agreement.poll()
        finally:
            sys.setprofile(None)
        after = agreement.statistics().core
        moved = after.frames_sent - before.frames_sent + after.frames_received - before.frames_received
        if not moved and not on_its_way:
            counts.append(calls[0])
    rows = comm.gather(counts)
    if rows is None:
        return []
    if not all(rows):
        raise RuntimeError("a rank had no quiet poll")
    return [counted("calls of anything in a quiet poll, most of 4 ranks", max(map(max, rows)), "calls", "<= 15")]


def main() -> None:
    """Measure, and print at rank 0."""
    comm = MPI.COMM_WORLD
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    ours, blocking, bare = Agreeing(comm, 1, False), Agreeing(comm, 2, True), Exchanging(comm)
    gc.collect()
    gc.freeze()  # as a serving host does: what start-up allocated is not walked again
    sides: dict[str, Side] = {"ours": ours, "bare": bare, "blocking": blocking}
    cold = in_turn(comm, sides, lambda number: number * ITERATION_S + comm.rank * STAGGER_S)
    latencies = comm.gather(ours.latencies)
    hot = in_turn(comm, {"ours": ours, "bare": bare}, None)
    figures = sweep(comm, sides)
    figures += calls_of_a_quiet_poll(comm, ours)
    ends = comm.gather((ours.end(), blocking.end()))
    bare.end()
    figures += late_rank(comm, 3)
    if ends is None or latencies is None:
        return
    walls = {name: [sum(row["wall"] for row in rows) for rows in cold[name]] for name in ("ours", "blocking")}
    name = "wall time in calls, sum over ranks, 20 ms iterations, stagger 4 ms"
    against = "the blocking baseline"
    first = [ratio(name, walls["ours"], walls["blocking"], unit="s", goal="<= 0.05", against=against)]
    first += of_cpu(cold, "cold") + of_cpu(hot, "hot")
    slow = max(latencies, key=lambda values: quantile(values, P50))
    first.append(shown("from a rank's vote to its commit, 20 ms iterations, slowest rank", slow, unit="ms", scale=1e3))
    agreed = [
        all(drained and clean for drained, _count, _digest, clean in one)
        and len({(count, digest) for _drained, count, digest, _clean in one}) == 1
        for one in zip(*ends)
    ]
    first.append(counted("runs drained N of N with one digest and closed: ours, blocking", sum(agreed), "runs", ">= 2"))
    print("RESULT" + json.dumps(first + figures), flush=True)


if __name__ == "__main__":
    main()
