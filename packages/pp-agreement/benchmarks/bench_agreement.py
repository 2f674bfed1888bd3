"""Agreement of four ranks: cost inside the calls, floods, long lives, drains; against bare code and the blocking baseline.

One process: the hot exchange of four ranks, 256 requests at once at the coordinator, and a long life. Four MPI ranks
(``ranks.py``): iterations of 20 ms with a stagger of 4 ms per stage. What everything is compared with stands in ``bare.py``.
Both sides of a figure are measured in turn, in one run.

    python benchmarks/bench_agreement.py                  # all parts, three to four minutes
    python benchmarks/bench_agreement.py hot over_mpi     # some of hot, at_once, long_life, over_mpi
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
from bare import COMMIT, VOTE, Counter, Exchange, counting_loop, pack

from measure import ROUNDS, Figure, counted, in_turn, pinned, ratio, run_benchmark, shown
from pp_agreement import Agreement, AgreementConfig, Committed, Domain, InProcessNetwork, Outcome, Prepared, Released
from worlds import launcher

RANKS = 4
HUB = RANKS - 1
REQUESTS = 256
LIFE_ROUNDS = 200_000
ITERATIONS, WARM_UP = 300, 40
P50, P99 = 0.5, 0.99


def quantile(values: list[float], share: float) -> float:
    """The value below which this share lies."""
    return sorted(values)[int(len(values) * share)]


def cost_of_looking() -> float:
    """Seconds of thread CPU between two looks at the clock, a tenth of what a bare exchange takes."""
    looks = [-(time.thread_time() - time.thread_time()) for _ in range(200)]
    return quantile(looks, P50)


def group_of(credits: int, size: int = RANKS) -> list[Agreement]:
    """Opened agreements of one process."""
    domain = Domain(1, tuple(range(size)))
    network = InProcessNetwork(domain, 4)
    group = [Agreement(domain, r, network.transport(r), AgreementConfig(credits=credits)) for r in domain.ranks]
    for agreement in group:
        agreement.open()
    return group


# -- the hot exchange --------------------------------------------------------------------------------------------------------


class Agreeing:
    """Four ranks of one process, one request per iteration: admitted, voted, decided in the next two."""

    def __init__(self) -> None:
        self.group = group_of(64)
        self.number = 0

    def turns(self) -> list[Callable[[], None]]:
        """What each rank does in the next iteration."""
        self.number += 1
        return [lambda a=agreement, n=self.number: self.turn(a, n) for agreement in self.group]

    def turn(self, agreement: Agreement, number: int) -> None:
        """One rank's calls of one iteration."""
        agreement.vote_terminal(agreement.admit(number, number, ready=False), Outcome.COMPLETED)
        agreement.poll()


class Exchanging:
    """The same four ranks and frames without agreement."""

    def __init__(self) -> None:
        domain = Domain(1, tuple(range(RANKS)))
        network = InProcessNetwork(domain, 4)
        hub = tuple(range(HUB))
        self.ends = [Exchange(network.transport(r), hub if r == HUB else (HUB,)) for r in domain.ranks]
        self.number = 0

    def turns(self) -> list[Callable[[], None]]:
        """See :class:`Agreeing`."""
        self.number += 1
        return [lambda e=end, n=self.number: e.turn(n) for end in self.ends]


def block(world: Agreeing | Exchanging) -> list[list[float]]:
    """Thread CPU in seconds of each rank in each of ITERATIONS iterations."""
    look = time.thread_time
    looking_s = cost_of_looking()
    spent: list[list[float]] = []
    for _ in range(WARM_UP + ITERATIONS):
        row = []
        for turn in world.turns():
            began = look()
            turn()
            row.append(look() - began - looking_s)
        spent.append(row)
    return spent[WARM_UP:]


def hot() -> list[Figure]:
    """Four ranks' calls back to back, all caches hot, against a bare exchange of as many frames."""
    sides = {"ours": Agreeing(), "bare": Exchanging()}
    rows: dict[str, list[list[list[float]]]] = {name: [] for name in sides}
    gc.collect()
    gc.freeze()
    with pinned():
        for number in range(-1, ROUNDS):
            for name in reversed(sides) if number % 2 else sides:
                measured = block(sides[name])
                if number >= 0:
                    rows[name].append(measured)
    gc.unfreeze()
    figures = []
    parts: dict[str, Callable[[list[float]], float]] = {
        "sum of 4 ranks": sum, "coordinator": lambda row: row[HUB], "a follower": lambda row: row[1],
    }  # fmt: skip
    for part, take in parts.items():
        for what, share, goal in (("p50", P50, "<= 2"), ("p99", P99, "<= 2.5")):
            ours, bare = (
                [quantile([take(row) for row in one], share) for one in rows[name]] for name in ("ours", "bare")
            )
            name = f"hot: thread CPU in calls per iteration, {part}, {what}"
            against = "a bare exchange of as many frames"
            figures.append(ratio(name, ours, bare, unit="us", scale=1e6, goal=goal, against=against))
    return figures


# -- 256 at once -------------------------------------------------------------------------------------------------------------


def flood_of_votes() -> float:
    """Coordinator's thread CPU per request: 256 admitted, voted and decided, frames in and out, events handed over."""
    group = group_of(REQUESTS)
    hub, followers = group[HUB], group[:HUB]
    numbers = range(1, REQUESTS + 1)
    for agreement in followers:
        keys = [agreement.admit(n, n, ready=False) for n in numbers]
        for key in keys:
            agreement.vote_terminal(key, Outcome.COMPLETED)
        agreement.poll()
    began = time.thread_time()
    keys = [hub.admit(n, n, ready=False) for n in numbers]
    for key in keys:
        hub.vote_terminal(key, Outcome.COMPLETED)
    events = hub.poll()
    spent = time.thread_time() - began
    if [e.key for e in events if isinstance(e, Committed)] != keys:
        raise RuntimeError("not everything was decided")
    return spent / REQUESTS


def votes() -> list[bytes]:
    """A frame of votes for all requests from each follower."""
    return [pack(1, [(VOTE, 0, 0, 0, 0, n, n) for n in range(1, REQUESTS + 1)]) for _ in range(HUB)]


def flood_of_counts() -> float:
    """The same at a coordinator that only counts."""
    frames, counter = votes(), Counter(HUB)
    began = time.thread_time()
    numbers = [counter.admit(n, n) for n in range(1, REQUESTS + 1)]
    for number in numbers:
        counter.vote(number, 0)
    for member, data in enumerate(frames):
        counter.receive(member, data)
    sent = counter.frames()
    spent = time.thread_time() - began
    if len(counter.decided) != REQUESTS or counter.open or len(sent) != HUB:
        raise RuntimeError("not everything was counted")
    return spent / REQUESTS


def flood_in_one_loop() -> float:
    """The same count as one loop."""
    frames = votes()
    began = time.thread_time()
    sent = counting_loop(frames, REQUESTS)
    spent = time.thread_time() - began
    if any(data[0] != COMMIT or len(data) != REQUESTS * 24 for data in sent):
        raise RuntimeError("not everything was counted")
    return spent / REQUESTS


def whole_lives(frames_most: list[int]) -> float:
    """Coordinator's thread CPU per request for readiness and terminal phase, 256 at once; frames to one peer in one poll."""
    group = group_of(REQUESTS)
    hub = group[HUB]
    spent = 0.0

    def at(agreement: Agreement, work: Callable[[], object]) -> object:
        nonlocal spent
        began = time.thread_time()
        result = work()
        if agreement is hub:
            spent += time.thread_time() - began
        return result

    keys: list = []
    for agreement in group:
        keys = at(agreement, lambda a=agreement: [a.admit(n, n) for n in range(1, REQUESTS + 1)])
        at(agreement, lambda a=agreement, k=keys: [a.publish_ready(key) for key in k])
    for step in range(13):
        if step == 8:
            for agreement in group:
                at(agreement, lambda a=agreement: [a.vote_terminal(key, Outcome.COMPLETED) for key in keys])
        for agreement in group:
            before = agreement.statistics().core.frames_sent
            events = at(agreement, agreement.poll)
            sent = agreement.statistics().core.frames_sent - before
            frames_most.append(-(-sent // (HUB if agreement is hub else 1)))
            prepared = [e.key for e in events if isinstance(e, Prepared)]
            at(agreement, lambda a=agreement, p=prepared: [a.acknowledge_prepare(key) for key in p])
            released = [e.key for e in events if isinstance(e, Released)]
            if released:
                for other in group:
                    at(other, lambda a=other, r=released: a.activate(r))
    if any(a.open_rounds or a.drain_state().committed != REQUESTS for a in group):
        raise RuntimeError("not everything was decided")
    return spent / REQUESTS


def at_once() -> list[Figure]:
    """256 requests at once: what one terminal decision costs the coordinator."""
    frames_most: list[int] = []
    subjects = {
        "ours": flood_of_votes, "counter": flood_of_counts, "loop": flood_in_one_loop,
        "life": lambda: whole_lives(frames_most),
    }  # fmt: skip
    with pinned():
        found = in_turn(subjects, 2 * ROUNDS)
    name = "coordinator's CPU per terminal decision, 256 at once, from admission to event"
    return [
        ratio(name, found["ours"], found["counter"], unit="us", scale=1e6, goal="<= 4",
              against="a bare vote count with the same calls and frames"),
        ratio(name + " (loop)", found["ours"], found["loop"], unit="us", scale=1e6, goal=None,
              against="the same count as one loop without calls or objects"),
        shown("coordinator's CPU per whole life with readiness, 256 at once", found["life"], unit="us", scale=1e6),
        counted("frames to one peer in one poll, most", max(frames_most), "frames", "<= 1"),
    ]  # fmt: skip


# -- a long life -------------------------------------------------------------------------------------------------------------


class Life:
    """Two ranks, one round after the other."""

    def __init__(self) -> None:
        self.both = group_of(64, 2)
        self.number = 0

    def rounds(self, count: int) -> None:
        """That many more rounds."""
        for number in range(self.number + 1, self.number + count + 1):
            for agreement in self.both:
                agreement.vote_terminal(agreement.admit(number, number, ready=False), Outcome.COMPLETED)
            while self.both[0].open_rounds or self.both[1].open_rounds:
                for agreement in self.both:
                    agreement.poll()
        self.number += count

    def sample(self, count: int = 250) -> float:
        """Seconds of thread CPU per round."""
        began = time.thread_time()
        self.rounds(count)
        return (time.thread_time() - began) / count


def resident_kib() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def long_life() -> list[Figure]:
    """The cost of a round and the memory after 200,000 rounds, against those after 1,000."""
    old, young = Life(), Life()
    with pinned():
        old.rounds(20_000)
        before_kib = resident_kib()
        old.rounds(LIFE_ROUNDS - 20_000)
        after_kib = resident_kib()
        young.rounds(1_000)
        found = in_turn({"old": old.sample, "young": young.sample}, 2 * ROUNDS)
    name = f"CPU per round, two ranks, after {LIFE_ROUNDS} rounds"
    grown = counted(f"resident memory after {LIFE_ROUNDS} rounds", after_kib, "KiB", f"<= {int(before_kib * 1.02)}")
    return [
        ratio(name, found["old"], found["young"], unit="us", scale=1e6, goal="<= 1.2", against="the same after 1,000"),
        {
            **grown,
            "baseline": before_kib,
            "ratio": round(after_kib / before_kib, 4),
            "against": "that after 20,000, + 2 %",
        },
    ]


# -- four ranks over MPI -----------------------------------------------------------------------------------------------------


def over_mpi() -> list[Figure]:
    """What ``ranks.py`` found on four ranks."""
    program = [sys.executable, str(Path(__file__).with_name("ranks.py"))]
    done = subprocess.run(launcher.find_launcher().command(RANKS, program), capture_output=True, text=True, timeout=400)
    line = next((part for part in done.stdout.splitlines() if part.startswith("RESULT")), None)
    if line is None:
        raise RuntimeError(f"the ranks gave no result:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    figures: list[Figure] = json.loads(line[len("RESULT") :])
    return figures


if __name__ == "__main__":
    parts = {part.__name__: part for part in (hot, at_once, long_life, over_mpi)}
    run_benchmark(*[parts[name] for name in sys.argv[1:] or parts])
