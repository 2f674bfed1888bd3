"""Agreement of four ranks: cost inside the calls, latency, floods, drains; against the blocking baseline in the same run.

Ranks are real MPI processes, each pinned to one core. Work is emulated by sleeping until each iteration's time, ``stagger``
apart per stage, so that the figures are the cost of agreeing and of waiting for each other, not of computing.

Sleeping lets caches, TLB and clock go cold, which multiplies whatever runs next. Two rows tell that part from ours: the
floor, a bare exchange of as many MPI frames at the same times without any agreement; and the same calls back to back in one
process, all caches hot.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from worlds import launcher

RANKS = 4
ITERATION_S = 0.020
STAGGER_S = 0.004
WARM_UP = 100
MAIN_ITERATIONS = 450  # three times, the first WARM_UP of each not counted
ROUNDS = 200_000
SWEEP = (
    ("stagger 0 ms", 0.0, 0.0, 0.0),
    ("stagger 0.1 ms", 0.0001, 0.0, 0.0),
    ("stagger 1 ms", 0.001, 0.0, 0.0),
    ("stagger 4 ms", 0.004, 0.0, 0.0),
    ("stagger 20 ms", 0.020, 0.0, 0.0),
    ("4 ms, lognormal jitter", 0.004, 0.003, 0.0),
    ("4 ms, straggler +10 ms", 0.004, 0.0, 0.010),
)


def figure(name: str, value: float, unit: str, goal: str, met: bool | None, baseline: float | None = None) -> dict:
    """One line of the report."""
    ratio = None if not baseline else value / baseline
    return {
        "name": name,
        "value": round(value, 6),
        "unit": unit,
        "baseline": baseline,
        "ratio": ratio,
        "goal": goal,
        "met": met,
    }


# -- one process: the coordinator's CPU -------------------------------------------------------------------------------------


def coordinator_cpu_us(ready: bool, requests: int = 256) -> tuple[float, float]:
    """Coordinator's thread CPU in microseconds per request for a flood, and the greatest of frames per peer and poll."""
    from pp_agreement import Agreement, AgreementConfig, Domain, InProcessNetwork, Outcome, Prepared, Released

    domain = Domain(1, tuple(range(RANKS)))
    network = InProcessNetwork(domain, 4)
    config = AgreementConfig(credits=requests)
    group = [Agreement(domain, r, network.transport(r), config) for r in range(RANKS)]
    spent_ns = 0
    keys = []
    frames_most = 0.0

    def timed(agreement, work):  # type: ignore[no-untyped-def]
        nonlocal spent_ns
        if agreement.is_coordinator:
            began = time.thread_time_ns()
            result = work()
            spent_ns += time.thread_time_ns() - began
            return result
        return work()

    def each(work):  # type: ignore[no-untyped-def]
        for agreement in group:
            timed(agreement, lambda agreement=agreement: work(agreement))

    def polls(count):  # type: ignore[no-untyped-def]
        nonlocal frames_most
        for _ in range(count):
            for agreement in group:
                before = agreement._core.streams.frames_sent
                events = timed(agreement, agreement.poll)
                peers = len(agreement._core.peers)
                frames_most = max(frames_most, (agreement._core.streams.frames_sent - before) / peers)
                prepared = [e.key for e in events if isinstance(e, Prepared)]
                released = [e.key for e in events if isinstance(e, Released)]
                timed(agreement, lambda a=agreement, p=prepared: [a.acknowledge_prepare(k) for k in p])
                if released:
                    group[0].activate(released)
                    for other in group[1:]:
                        timed(other, lambda a=other, r=released: a.activate(r))

    for agreement in group:
        agreement.open()
    for number in range(1, requests + 1):
        keys.append(group[0].admit(number, number, ready))
        for agreement in group[1:]:
            timed(agreement, lambda a=agreement, n=number: a.admit(n, n, ready))
    if ready:
        each(lambda a: [a.publish_ready(k) for k in keys])
        polls(8)
    each(lambda a: [a.vote_terminal(k, Outcome.COMPLETED) for k in keys])
    polls(5)
    assert all(a.open_rounds == 0 for a in group), "not everything was decided"
    assert len({a.drain_state().digest for a in group}) == 1
    return spent_ns / 1000 / requests, frames_most


def counting_us(requests: int = 256) -> float:
    """Thread CPU in microseconds per decision of a bare loop that counts the same votes: frames in, sets, frames out.

    What a coordinator cannot do without: unpack each follower's records, add its bit to the request's mask, and pack a
    decision for each follower when all have voted. No identity, order, phase, reason, bound or check of anything.
    """
    import struct

    record = struct.Struct("<BBBBIQQ")
    followers = RANKS - 1
    full = (1 << RANKS) - 1
    frames = [b"".join(record.pack(8, 0, 0, 0, 0, n, n) for n in range(1, requests + 1)) for _ in range(followers)]
    began = time.thread_time_ns()
    masks: dict[int, int] = {}
    for number in range(1, requests + 1):
        masks[number] = 1 << followers
    queues: list[list[tuple[int, ...]]] = [[] for _ in range(followers)]
    for member, data in enumerate(frames):
        for _kind, _outcome, _disposition, _reason, _attempt, request_id, incarnation in record.iter_unpack(data):
            mask = masks[incarnation] | 1 << member
            masks[incarnation] = mask
            if mask == full:
                del masks[incarnation]
                for queue in queues:
                    queue.append((37, 0, 0, 0, 0, request_id, incarnation))
    sent = [b"".join([record.pack(*one) for one in queue]) for queue in queues]
    spent_ns = time.thread_time_ns() - began
    assert not masks and all(len(data) == requests * record.size for data in sent)
    return spent_ns / 1000 / requests


def hot_exchange_ms(iterations: int = 1200) -> tuple[float, float]:
    """Thread CPU per iteration at the hub of a bare exchange: as many frames, encoded and decoded, and no agreement."""
    from pp_agreement import Domain, InProcessNetwork
    from pp_agreement._codec import Codec
    from pp_agreement._events import Frame

    domain = Domain(1, tuple(range(RANKS)))
    network = InProcessNetwork(domain, 4)
    hub = RANKS - 1
    ends = [network.transport(r) for r in range(RANKS)]
    codecs = [Codec(domain, r, 16_384) for r in range(RANKS)]
    for rank, end in enumerate(ends):
        end.open(tuple(range(hub)) if rank == hub else (hub,), 16_384)
    spent: list[float] = []
    for number in range(1, iterations + 1):
        for rank, end in enumerate(ends):
            began = time.thread_time()
            for peer, data in end.receive(64).frames:
                codecs[rank].decode(peer, data)
            for peer in range(hub) if rank == hub else (hub,):
                if end.can_send(peer):
                    end.send(peer, codecs[rank].encode(peer, Frame(number, 0, ((8, 0, 0, 0, 0, number, number),))))
            if rank == hub:
                spent.append(time.thread_time() - began)
    spent = sorted(spent[WARM_UP:])
    return statistics.median(spent) * 1e3, spent[int(len(spent) * 0.99)] * 1e3


def rounds_us(rounds: int, block: int = 1000) -> tuple[float, float, int, int]:
    """Two ranks, one round after the other: thread CPU per round of the first and of the last block, and resident KiB then."""
    from pp_agreement import Agreement, AgreementConfig, Domain, InProcessNetwork, Outcome

    domain = Domain(1, (0, 1))
    network = InProcessNetwork(domain, 4)
    both = [Agreement(domain, r, network.transport(r), AgreementConfig()) for r in domain.ranks]
    for agreement in both:
        agreement.open()
    costs, resident = [], []
    for first in range(1, rounds + 1, block):
        began = time.thread_time()
        for number in range(first, first + block):
            for agreement in both:
                agreement.vote_terminal(agreement.admit(number, number, ready=False), Outcome.COMPLETED)
            while both[0].open_rounds or both[1].open_rounds:
                for agreement in both:
                    agreement.poll()
        costs.append((time.thread_time() - began) * 1e6 / block)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE") // 1024)
    ends = max(1, len(costs) // 10)
    return statistics.median(costs[:ends]), statistics.median(costs[-ends:]), resident[ends - 1], resident[-1]


def hot_calls_ms(iterations: int = 1200) -> tuple[float, float]:
    """Thread CPU per iteration (admit, vote, poll) at the coordinator, back to back: p50 and p99 in milliseconds."""
    from pp_agreement import Agreement, AgreementConfig, Domain, InProcessNetwork, Outcome

    domain = Domain(1, tuple(range(RANKS)))
    network = InProcessNetwork(domain, 4)
    group = [Agreement(domain, r, network.transport(r), AgreementConfig(credits=64)) for r in range(RANKS)]
    spent: list[float] = []
    for agreement in group:
        agreement.open()
    for number in range(1, iterations + 1):
        for agreement in group:
            began = time.thread_time()
            key = agreement.admit(number, number, ready=False)
            agreement.vote_terminal(key, Outcome.COMPLETED)
            agreement.poll()
            if agreement.is_coordinator:
                spent.append(time.thread_time() - began)
    spent = sorted(spent[WARM_UP:])
    return statistics.median(spent) * 1e3, spent[int(len(spent) * 0.99)] * 1e3


# -- four ranks over MPI ------------------------------------------------------------------------------------------------------


def staggered(
    comm, blocking: bool, iterations: int, stagger_s: float, jitter_s: float, straggler_s: float, number: int
):  # type: ignore[no-untyped-def]
    """One rank's part of a run: times inside agreement calls, and the latencies from own vote to COMMIT."""
    from pp_agreement import Agreement, AgreementConfig, AllgatherAgreement, Committed, Domain, MpiTransport, Outcome

    rank = comm.Get_rank()
    domain = Domain(number, tuple(range(comm.Get_size())))
    config = AgreementConfig(credits=64)
    agreement = (
        AllgatherAgreement(domain, rank, comm, config)
        if blocking
        else Agreement(domain, rank, MpiTransport(comm, domain), config)
    )
    agreement.open()
    draw = random.Random(rank + 1)
    comm.Barrier()
    start_s = time.monotonic() + 0.02
    walls, cpus, latencies = [], [], []
    voted: dict[int, float] = {}
    admitted = 0

    def take() -> None:
        events = agreement.poll()
        now_s = time.monotonic()
        for event in events:
            if isinstance(event, Committed):
                latencies.append(now_s - voted.pop(event.key.incarnation))

    for i in range(iterations):
        due_s = start_s + i * ITERATION_S + rank * stagger_s
        if jitter_s:
            due_s += jitter_s * draw.lognormvariate(0.0, 0.5)
        if straggler_s and rank == 1:
            due_s += straggler_s
        remaining_s = due_s - time.monotonic()
        if remaining_s > 0:
            time.sleep(remaining_s)
        began_s, began_cpu = time.monotonic(), time.thread_time()
        admitted += 1
        key = agreement.admit(1000 + i, admitted, ready=False)
        voted[admitted] = time.monotonic()
        agreement.vote_terminal(key, Outcome.COMPLETED)
        take()
        cpus.append(time.thread_time() - began_cpu)
        walls.append(time.monotonic() - began_s)
    if agreement.is_scheduler:
        agreement.start_drain(admitted)
    if blocking:
        for _ in range(4):
            take()
    else:
        until_s = time.monotonic() + 20
        while not agreement.drain_state().drained and time.monotonic() < until_s:
            take()
            time.sleep(0.001)
    state = agreement.drain_state()
    agreement.close()
    cold = WARM_UP if iterations > 2 * WARM_UP else 0
    walls, cpus = walls[cold:], cpus[cold:]
    return {
        "rank": rank,
        "wall_sum_s": sum(walls),
        "waited_sum_s": max(0.0, sum(walls) - sum(cpus)),
        "cpu_p99_ms": sorted(cpus)[int(len(cpus) * 0.99)] * 1e3,
        "cpu_p50_ms": statistics.median(cpus) * 1e3,
        "latency_p50_ms": statistics.median(latencies) * 1e3,
        "latency_p99_ms": sorted(latencies)[int(len(latencies) * 0.99)] * 1e3,
        "drained": state.drained,
        "committed": state.committed,
        "digest": state.digest,
    }


def bare(comm, iterations: int, stagger_s: float):  # type: ignore[no-untyped-def]
    """The floor: one synchronous send and one posted receive per peer and iteration, as MpiTransport does, and no more."""
    from mpi4py import MPI

    rank, last = comm.Get_rank(), comm.Get_size() - 1
    peers = list(range(last)) if rank == last else [last]
    private = comm.Dup()
    slots, length = 4, 64
    out = {p: [private.Ssend_init([bytearray(length), length, MPI.BYTE], dest=p) for _ in range(slots)] for p in peers}
    buffers = {p: [bytearray(256) for _ in range(slots)] for p in peers}
    into = {p: [private.Recv_init([b, 256, MPI.BYTE], source=p) for b in buffers[p]] for p in peers}
    for requests in into.values():
        for request in requests:
            request.Start()
    head, sent, acknowledged = (dict.fromkeys(peers, 0) for _ in range(3))
    status = MPI.Status()

    def take(peer: int) -> None:
        slot = head[peer] % slots
        if into[peer][slot].Test(status):
            bytes(buffers[peer][slot][:length])
            into[peer][slot].Start()
            head[peer] += 1

    def settle(peer: int) -> None:
        while acknowledged[peer] < sent[peer] and out[peer][acknowledged[peer] % slots].Test():
            acknowledged[peer] += 1

    comm.Barrier()
    start_s = time.monotonic() + 0.02
    walls, cpus = [], []
    for i in range(iterations):
        remaining_s = start_s + i * ITERATION_S + rank * stagger_s - time.monotonic()
        if remaining_s > 0:
            time.sleep(remaining_s)
        began_s, began_cpu = time.monotonic(), time.thread_time()
        for peer in peers:
            take(peer)
        for peer in peers:
            settle(peer)
            if sent[peer] - acknowledged[peer] < slots:
                out[peer][sent[peer] % slots].Start()
                sent[peer] += 1
        cpus.append(time.thread_time() - began_cpu)
        walls.append(time.monotonic() - began_s)
    until_s = time.monotonic() + 10
    while any(acknowledged[p] < sent[p] for p in peers) and time.monotonic() < until_s:
        for peer in peers:
            take(peer)
            settle(peer)
        time.sleep(0.001)
    sent_to_me = {p: comm.sendrecv(sent[p], dest=p, source=p) for p in peers}
    while any(head[p] < sent_to_me[p] for p in peers) and time.monotonic() < until_s:
        for peer in peers:
            take(peer)
            settle(peer)
    for requests in into.values():
        for request in requests:
            request.Cancel()
            request.Wait()
            request.Free()
    for requests in out.values():
        for request in requests:
            request.Free()
    comm.Barrier()
    private.Free()
    walls, cpus = walls[WARM_UP:], cpus[WARM_UP:]
    return {
        "rank": rank,
        "wall_sum_s": sum(walls),
        "cpu_p50_ms": statistics.median(cpus) * 1e3,
        "cpu_p99_ms": sorted(cpus)[int(len(cpus) * 0.99)] * 1e3,
    }


def flood(comm, requests: int, number: int):  # type: ignore[no-untyped-def]
    """256 opened at once, then a drain with one rank late by two seconds."""
    from pp_agreement import Agreement, AgreementConfig, Domain, MpiTransport, Outcome

    rank = comm.Get_rank()
    domain = Domain(number, tuple(range(comm.Get_size())))
    agreement = Agreement(domain, rank, MpiTransport(comm, domain), AgreementConfig(credits=requests))
    agreement.open()
    keys = [agreement.admit(i, i + 1, ready=False) for i in range(requests)]
    comm.Barrier()
    if rank == 2:
        time.sleep(2.0)
    began_s = time.monotonic()
    for key in keys:
        agreement.vote_terminal(key, Outcome.COMPLETED)
    if agreement.is_scheduler:
        agreement.start_drain(requests)
    state = agreement.drain(20)
    spent_s = time.monotonic() - began_s
    evidence = agreement.evidence()
    clean = agreement.close(10)
    return {
        "rank": rank, "drained": state.drained, "committed": state.committed, "admitted": state.admitted,
        "digest": state.digest, "clean": clean, "spent_s": spent_s, "frames": evidence["frames_sent"],
        "polls": evidence["polls"]["count"], "late_s": 2.0,
    }  # fmt: skip


def rank_main() -> None:
    """What each MPI rank runs; rank 0 prints one JSON line."""
    import gc

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[comm.Get_rank() % len(cores)]})
    gc.collect()
    gc.freeze()  # as a serving host does: what start-up allocated is not walked again
    results: dict[str, object] = {}
    number = 10
    rows = []
    for _ in range(3):  # in turn, so that both meet the same machine
        pair = []
        for blocking in (False, True):
            number += 1
            pair.append(comm.gather(staggered(comm, blocking, MAIN_ITERATIONS, STAGGER_S, 0.0, 0.0, number)))
        pair.append(comm.gather(bare(comm, MAIN_ITERATIONS, STAGGER_S)))
        rows.append(pair)
    results["main"] = rows
    sweep = []
    for name, stagger_s, jitter_s, straggler_s in SWEEP:
        pair = []
        for blocking in (False, True):
            number += 1
            pair.append(comm.gather(staggered(comm, blocking, 40, stagger_s, jitter_s, straggler_s, number)))
        sweep.append((name, pair))
    results["sweep"] = sweep
    results["flood"] = comm.gather(flood(comm, 256, number + 1))
    if comm.Get_rank() == 0:
        print("RESULT" + json.dumps(results), flush=True)


def main() -> list[dict]:
    """All figures."""
    figures = []
    terminal, counting = [], []
    for _ in range(7):  # in turn, so that both meet the same machine
        terminal.append(coordinator_cpu_us(False))
        counting.append(counting_us())
    cpu_us = statistics.median(us for us, _most in terminal)
    bare_us = statistics.median(counting)
    life_us = statistics.median(coordinator_cpu_us(True)[0] for _ in range(5))
    frames_most = max(most for _us, most in terminal)
    spread = f"{min(counting):.2f}..{max(counting):.2f}"
    name = f"coordinator CPU per terminal decision, 256 at once, P=4 (bare counting loop {spread})"
    figures.append(figure(name, cpu_us, "µs", "<= 4 x counting", cpu_us <= 4 * bare_us, bare_us))
    figures.append(figure("coordinator CPU per whole life (256 at once, P=4)", life_us, "µs", "none", None))
    figures.append(figure("frames per peer per poll, most", frames_most, "frames", "<= 1", frames_most <= 1))

    first_us, last_us, first_kib, last_kib = rounds_us(ROUNDS)
    name = f"CPU per round, two ranks, last tenth of {ROUNDS} against the first"
    figures.append(figure(name, last_us, "µs", "<= 1.2 x", last_us <= 1.2 * first_us, first_us))
    name = "resident memory after them, against after the first tenth"
    figures.append(figure(name, last_kib, "KiB", "<= 1.02 x", last_kib <= 1.02 * first_kib, first_kib))

    hot, floor = hot_calls_ms(), hot_exchange_ms()
    for index, (what, times) in enumerate((("p50", 2.0), ("p99", 2.5))):
        met = hot[index] <= times * floor[index]
        name = f"hot: thread CPU in calls, in process, coordinator, {what}, against a bare exchange"
        figures.append(figure(name, hot[index], "ms", f"<= {times} x bare", met, floor[index]))

    program = [sys.executable, str(Path(__file__).resolve()), "--rank"]
    done = subprocess.run(launcher.find_launcher().command(RANKS, program), capture_output=True, text=True, timeout=170)
    line = next((part for part in done.stdout.splitlines() if part.startswith("RESULT")), None)
    if line is None:
        raise RuntimeError(f"the ranks gave no result:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    results = json.loads(line[len("RESULT") :])
    runs = results["main"]
    ours_s = sum(row["wall_sum_s"] for run in runs for row in run[0])
    theirs_s = sum(row["wall_sum_s"] for run in runs for row in run[1])
    name = "wall time in calls, sum over ranks (20 ms, stagger 4 ms)"
    figures.append(figure(name, ours_s, "s", "<= 5 % of blocking", ours_s <= 0.05 * theirs_s, theirs_s))
    latencies = [statistics.median(run[0][rank]["latency_p50_ms"] for run in runs) for rank in range(RANKS)]
    for what, times in (("p50", 2.0), ("p99", 2.5)):
        pairs = [
            tuple(statistics.median(run[side][rank][f"cpu_{what}_ms"] for run in runs) for side in (0, 2))
            for rank in range(RANKS)
        ]
        mine, bare_ms = max(pairs, key=lambda pair: pair[0] / pair[1])
        name = f"cold: thread CPU in calls, {what}, worst rank, against a bare MPI exchange"
        figures.append(figure(name, mine, "ms", f"<= {times} x bare", mine <= times * bare_ms, bare_ms))
    hops_ms = 2 * ITERATION_S * 1e3
    figures.append(
        figure(
            "agreement latency p50, worst rank",
            max(latencies),
            "ms",
            f"<= {hops_ms:.0f} (2 hops x 20 ms)",
            max(latencies) <= hops_ms,
        )
    )
    decided = all(
        row["drained"] and row["committed"] == MAIN_ITERATIONS
        for pair in results["main"]
        for side in pair[:2]
        for row in side
    )
    figures.append(figure("runs drained N of N, both modes", float(decided), "bool", "1", decided))
    for name, pair in results["sweep"]:
        ours = max(row["wall_sum_s"] for row in pair[0])
        theirs = max(row["wall_sum_s"] for row in pair[1])
        figures.append(
            figure(f"sweep, {name}: wall in calls, worst rank", ours, "s", "below blocking", ours < theirs, theirs)
        )
    rows = results["flood"]
    whole = all(r["drained"] and r["committed"] == 256 == r["admitted"] and r["clean"] for r in rows)
    same = len({r["digest"] for r in rows}) == 1
    figures.append(
        figure(
            "256 at once, one rank late by 2 s: decided on every rank",
            float(min(r["committed"] for r in rows)),
            "of 256",
            "256, digests equal",
            whole and same,
        )
    )
    bounded = all(r["frames"] <= r["polls"] * (RANKS - 1) for r in rows)
    figures.append(
        figure("256 at once over MPI: frames within one per peer and poll", float(bounded), "bool", "1", bounded)
    )
    return figures


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank_main()
    else:
        found = main()
        width = max(len(f["name"]) for f in found)
        for f in found:
            against = "" if f["ratio"] is None else f"  {100 * f['ratio']:.2f} % of {f['baseline']:.3f}"
            verdict = "" if f["met"] is None else "met" if f["met"] else "MISSED"
            print(f"{f['name']:{width}}  {f['value']:10.4f} {f['unit']:7} goal {f['goal']:22} {verdict}{against}")
        for f in found:
            print(json.dumps(f))
