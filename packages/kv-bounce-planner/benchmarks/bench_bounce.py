"""Two processes: a bounce transfer end to end through sessions, against the three copies it cannot do without.

``nox -s bench -- kv-bounce-planner``

Baseline, measured in turn in the same processes: gather, one NIXL write with its notification, scatter, all by memcpy.
End to end is from ``Sender.ready`` to the receiver's ``MemoryReleased``: region asked for and granted, gather, write, report
compared with the derived plan, scatter, all over ZeroMQ and NIXL (shared memory, CMA). Both processes only poll. Every run's
bytes are checked. Where a bounce's time goes is shown part by part, in seven rows that add up to it run by run: what it takes
beyond its limit has a place there (the clock is the host's, the same in both processes). The same fragments written in place,
and read by the receiver (pull), are shown beside it; they take up to 500 times as long, so they are measured in every ninth
turn only. A side that fails or ends takes the other with it.

Posting is measured by every ``poll`` of a sender that writes 32,768 fragments directly: the longest of all polls of all runs
of each run counts. A poll that was interrupted is told apart and shown in a row of its own: the kernel switched the thread
out against its will (``ru_nivcsw`` of the thread rose), or the host took the core away (the thread neither ran nor waited of
its own accord for more than 0.1 ms). In an interrupted poll the thread's processor time is what posting took of the caller, so
that is what counts of it; of all others it is the time on the wall, waits included. First contact (an agent is made, 20 to
400 ms) is not posting: ``introduce`` and ``spare_agents`` are for it. As serving engines do, both processes freeze their
garbage collector's old generation once they are set up.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import resource
import select
import tempfile
import time
from collections import defaultdict
from typing import Any

import numpy as np

from kv_bounce_planner.copies.gather import CopyHandle, PreparedCopy
from kv_bounce_planner.planning import HostCopier, WriterPlan, WriterTransfer
from kv_bounce_planner.sessions import (
    BounceArena,
    ExpectedOperation,
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
from kv_bounce_planner.sessions.identity import OperationIdentity
from kv_bounce_planner.transports.interface import TransferJob, TransportProgress
from measure import Figure, ratio, run_benchmark, shown

TOTAL, COUNT, RUNS, SLOW_EVERY = 4 << 20, 32768, 99, 9
SIZE = TOTAL // COUNT
ROOM = 4 * TOTAL  # fragments lie at random places of a range four times their bytes
RECEIVER, SENDER = PeerId("gen", "g1", 0), PeerId("ctx", "c1", 0)
KEY = b"a key for benchmarks"
#: The parts of a bounce, in order: what lies between two of the points that are noted.
PARTS = (
    "until the gather begins",
    "gather",
    "until the write is handed over",
    "write, until its notification is taken",
    "until the scatter begins",
    "scatter",
    "until the memory is released",
)
#: What one turn of one step may take, on a machine that does much else (seconds).
TURN_LIMIT_S = 60.0


def places(seed: int, base: int, *, ascending: bool) -> np.ndarray[Any, Any]:
    """COUNT slots of SIZE bytes, none touching another: every other slot of the range at most."""
    slots = np.random.default_rng(seed).permutation(ROOM // SIZE // 2)[:COUNT] * 2
    addresses: np.ndarray[Any, Any] = base + (np.sort(slots) if ascending else slots).astype(np.int64) * SIZE
    addresses.setflags(write=False)  # as plans have them
    return addresses


def plan_at(base: int) -> WriterPlan:
    sizes = np.full(COUNT, SIZE, np.int64)
    sizes.setflags(write=False)
    return WriterPlan(0, places(1, base, ascending=True), sizes, COUNT, COUNT)


def transfer_from(base: int, plan: WriterPlan) -> WriterTransfer:
    return WriterTransfer(plan, places(2, base, ascending=False), plan.target_addresses, plan.sizes, COUNT)


def memory_of(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, ROOM, dtype=np.uint8)


def raw_operation(number: int) -> OperationIdentity:
    return OperationIdentity(TransferIdentity(1 << 40, 0, RECEIVER.generation, 0), 0, number)


def raw_transport(self_id: PeerId, tls: str | None, *memories: np.ndarray[Any, Any]) -> NixlTransport:
    """The baseline's own: its write is one post, whatever it takes."""
    transport = NixlTransport(self_id, config=NixlConfig(tls=tls, bytes_per_grain=TOTAL, bytes_per_post_max=TOTAL))
    transport.register([MemoryRegion(m.ctypes.data, m.nbytes) for m in memories])
    return transport


class TimedCopier(HostCopier):
    """Notes when its last copy began and ended."""

    began = ended = 0.0

    def submit(self, prepared: PreparedCopy) -> CopyHandle:
        self.began = time.monotonic()
        handle = super().submit(prepared)
        self.ended = time.monotonic()
        return handle


class TimedTransport(NixlTransport):
    """Notes when its last job was handed over and its last notification taken."""

    started = marked = 0.0

    def start(self, job: TransferJob) -> None:
        self.started = time.monotonic()
        super().start(job)

    def poll(self) -> TransportProgress:
        progress = super().poll()
        if progress.marks:
            self.marked = time.monotonic()
        return progress


def receiver_main(pipe: Any, tls: str | None) -> None:
    memory, region = np.zeros(ROOM, np.uint8), np.zeros(3 * TOTAL, np.uint8)
    memory[:], region[:] = 1, 1
    transport = TimedTransport(RECEIVER, config=NixlConfig(tls=tls))
    transport.register([MemoryRegion(m.ctypes.data, m.nbytes) for m in (memory, region)])
    channel = ZmqControlChannel(RECEIVER, KEY)
    channel.connect(SENDER, pipe.recv())
    arena = BounceArena(region.ctypes.data, 2 * TOTAL)  # the last third is the raw baseline's
    timed = TimedCopier()
    resources = SessionResources(transport, channel, arena=arena, copier=timed, copier_errors_prove_idle=True)
    receiver = Receiver(RECEIVER, resources)
    receiver.introduce([SENDER])
    plain = raw_transport(RECEIVER, tls, region)
    pipe.send((memory.ctypes.data, region.ctypes.data, plain.agent_info(SENDER)))
    expected = memory_of(7)
    plan = plan_at(memory.ctypes.data)
    copier = HostCopier()
    table = copier.prepare(
        region.ctypes.data + 2 * TOTAL + np.arange(COUNT, dtype=np.int64) * SIZE, plan.target_addresses, plan.sizes
    )
    gc.collect()
    gc.freeze()
    while True:
        while not pipe.poll():
            receiver.poll()
            os.sched_yield()
        command, number = pipe.recv()
        if command == "stop":
            break
        memory[:] = 0
        if command == "raw":
            pipe.send("go")
            while not any(arrived.mark.operation.operation == number for arrived in plain.poll().marks):
                os.sched_yield()
            landed = time.monotonic()
            copier.submit(table).wait()
            pipe.send((landed, time.monotonic()))
        else:
            identity = TransferIdentity(number, 0, RECEIVER.generation, 0)
            reads = (lambda offer: transfer_from(int(offer), plan)) if command == "pull" else None
            receiver.open(identity, [ExpectedOperation(SENDER, TOTAL, b"", plan, command, resolve=reads)], claim=number)
            receiver.poll()
            released = 0.0
            while not released:
                os.sched_yield()  # the channel's own thread wants the core too
                for event in receiver.poll():
                    if type(event).__name__ == "MemoryReleased":
                        released = time.monotonic()
                        free(event.proven)
                    elif type(event).__name__ != "TransferSucceeded" or event.tiers[0][1] != command:
                        raise RuntimeError(f"not a {command} success: {event}")
            pipe.send((transport.marked, timed.began, timed.ended, released))
        got = memory.reshape(-1, SIZE)[(plan.target_addresses - memory.ctypes.data) // SIZE]
        want = expected.reshape(-1, SIZE)[places(2, 0, ascending=False) // SIZE]
        others = np.ones(ROOM // SIZE, np.bool_)
        others[(plan.target_addresses - memory.ctypes.data) // SIZE] = False
        pipe.send(bool((got == want).all()) and not memory.reshape(-1, SIZE)[others].any())


def measure(tls: str | None) -> dict[str, list[float]]:
    """Seconds, measured in turn: one raw, one of each tier, and then the other way round. RUNS of raw and bounce."""
    with tempfile.TemporaryDirectory() as folder:
        return _measure(tls, folder)


def _measure(tls: str | None, folder: str) -> dict[str, list[float]]:
    context = mp.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=receiver_main, args=(child, tls), daemon=True)
    process.start()
    child.close()  # so that the receiver's end is the pipe's end
    memory, slot = memory_of(7), np.zeros(3 * TOTAL, np.uint8)
    slot[:] = 1
    transport = TimedTransport(SENDER, config=NixlConfig(tls=tls))
    transport.register([MemoryRegion(m.ctypes.data, m.nbytes) for m in (memory, slot)])
    channel = ZmqControlChannel(SENDER, KEY, f"ipc://{folder}/c")
    # The first two thirds are the arena; the last is the raw baseline's staging.
    timed = TimedCopier()
    arena = BounceArena(slot.ctypes.data, 2 * TOTAL)
    resources = SessionResources(transport, channel, arena=arena, copier=timed, copier_errors_prove_idle=True)
    sender = Sender(SENDER, resources, SessionConfig(serves_reads=True))
    pipe.send(channel.address)
    base, region, agent = pipe.recv()
    plain = raw_transport(SENDER, tls, slot)
    plain.connect(RECEIVER, agent)

    def in_time(since: float) -> None:
        if time.monotonic() - since > TURN_LIMIT_S or not process.is_alive():
            raise RuntimeError(f"the receiver has ended, or {TURN_LIMIT_S:g} s were not enough: {sender.peers()}")

    met = time.monotonic()
    while not sender.statistics().get("frames_received"):
        sender.poll()
        in_time(met)
    for _ in range(100):
        sender.poll()
    answered = select.poll()
    answered.register(pipe.fileno(), select.POLLIN)
    sources = places(2, memory.ctypes.data, ascending=False)
    plan = plan_at(base)
    transfer = transfer_from(memory.ctypes.data, plan)
    loan = Loan(str(memory.ctypes.data).encode())
    copier = HostCopier()
    staging = slot.ctypes.data + 2 * TOTAL
    table = copier.prepare(sources, staging + transfer.staging_offsets, transfer.sizes)
    times: dict[str, list[float]] = defaultdict(list)

    def raw(number: int) -> None:
        pipe.send(("raw", number))
        pipe.recv()
        began = time.monotonic()
        copier.submit(table).wait()
        gathered = time.monotonic()
        operation = raw_operation(number)
        plain.start(
            TransferJob(operation, RECEIVER, *(np.array([v], np.int64) for v in (staging, region + 2 * TOTAL, TOTAL)))
        )
        state = ""
        while state != "done":
            os.sched_yield()
            for write in plain.poll().jobs:
                state = write.state
            if state == "error":
                raise RuntimeError("the baseline's write failed")
            in_time(began)
        plain.forget(operation)
        landed, scattered = pipe.recv()
        check(pipe.recv())
        times["raw gather"].append(gathered - began)
        times["raw write"].append(landed - gathered)
        times["raw scatter"].append(scattered - landed)
        times["raw"].append(scattered - began)

    def session(tier: str, number: int) -> None:
        pipe.send((tier, number))
        asked = time.monotonic()
        while not any(type(event).__name__ == "ReceiveRequested" for event in sender.poll()):
            in_time(asked)
        began = time.monotonic()
        served: list[Any] = []
        sender.expect(RequestKey(number, 0), 1)
        sender.ready(RequestKey(number, 0), lambda request: loan if request.pulls else transfer, claim=number)
        polls: list[tuple[float, float, int, int]] = []
        # pipe.poll() makes a selector each time: ten times as dear as this, twice in a bounce.
        while not answered.poll(0):
            usage, wall, cpu = resource.getrusage(resource.RUSAGE_THREAD), time.monotonic(), time.thread_time()
            served += sender.poll()
            cpu, wall = time.thread_time() - cpu, time.monotonic() - wall
            after = resource.getrusage(resource.RUSAGE_THREAD)
            polls.append((wall, cpu, after.ru_nivcsw - usage.ru_nivcsw, after.ru_nvcsw - usage.ru_nvcsw))
            if len(polls) % 256 == 255:
                in_time(began)
            os.sched_yield()
        stamps = pipe.recv()
        check(pipe.recv())
        while not any(type(event).__name__ == "RequestServed" for event in served):
            served += sender.poll()
            in_time(began)
        sender.seal(RequestKey(number, 0))
        sender.poll()
        sender.forget(RequestKey(number, 0))
        times[tier].append(stamps[-1] - began)
        if tier == "bounce":
            points = (began, timed.began, timed.ended, transport.started, *stamps)
            for part, since, until in zip(PARTS, points, points[1:]):
                times[part].append(until - since)
        if tier == "direct":
            counted = []
            for wall, cpu, against, own in polls:
                interrupted = against or (not own and wall - cpu > 1e-4)
                counted.append(cpu if interrupted else wall)
                if interrupted:
                    times["interrupted"].append(wall)
            times["longest poll"].append(max(counted))

    def check(good: bool) -> None:
        if not good:
            raise RuntimeError("bytes differ")

    gc.collect()
    gc.freeze()
    number = 1
    for run in range(RUNS + 2):
        if run == 2:  # two turns of warming: first contact, first touch
            for values in times.values():
                values.clear()
        steps = ("raw", "bounce", "direct", "pull") if run < 2 or (run - 2) % SLOW_EVERY == 0 else ("raw", "bounce")
        for step in steps if run % 2 else steps[::-1]:
            if step == "raw":
                raw(number)
            else:
                session(step, number)
            number += 1
    pipe.send(("stop", 0))
    process.join(10)
    if process.is_alive():
        process.kill()
    return times


def link(name: str, tls: str | None) -> list[Figure]:
    times = measure(tls)

    def against(what: str, reference: list[float], goal: str | None, text: str) -> Figure:
        return ratio(f"{what}, {name}", times[what], reference, unit="ms", scale=1e3, goal=goal, against=text)

    figures = [
        against("bounce", times["raw"], "<= 1.25", "gather, one write, scatter"),
        against("direct", times["bounce"][::SLOW_EVERY], None, "bounce"),
        against("pull", times["direct"], None, "direct"),
    ]
    figures += [
        shown(f"{step} alone, {name}", times[f"raw {step}"], unit="ms", scale=1e3)
        for step in ("gather", "write", "scatter")
    ]
    figures += [shown(f"of a bounce: {part}, {name}", times[part], unit="ms", scale=1e3) for part in PARTS]
    figures.append(
        shown(f"longest poll of a run that posts 32,768 fragments, {name}", times["longest poll"], unit="ms", scale=1e3)
    )
    if times["interrupted"]:
        longest = [max(times["interrupted"])]
        figures.append(shown(f"longest poll that was interrupted, on the wall, {name}", longest, unit="ms", scale=1e3))
    return figures


def shared_memory() -> list[Figure]:
    return link("shared memory", None)


def over_tcp() -> list[Figure]:
    return link("tcp", "tcp")


if __name__ == "__main__":
    run_benchmark(shared_memory, over_tcp)
