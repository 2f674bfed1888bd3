"""Two pipeline stages of two tensor-parallel ranks each decide three requests: in one process, or as four MPI ranks.

    python examples/stages_with_tp.py
    mpiexec -n 4 python examples/stages_with_tp.py --mpi

Each rank is ready when it is, acts on what it is told, and votes when it is quiescent; a rank of the second stage cancels
request 8 before it is scheduled. Nobody waits for anybody: every line here is what one iteration of an engine's loop does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

from pp_agreement import (
    Aborted,
    Committed,
    Domain,
    Drained,
    Finalized,
    FinalizeMode,
    GroupAgreement,
    Groups,
    InProcessNetwork,
    Key,
    Lanes,
    MpiTransport,
    Outcome,
    Prepared,
    Released,
    Transport,
    verify,
)

GROUPS = Groups(1, groups=((0, 1), (2, 3)))  # rank 0 schedules and leads the first stage, rank 2 leads the last one
WORLD = Domain(0, GROUPS.ranks)
REQUESTS = (7, 8, 9)


class Rank:
    """One rank's loop.

    Args:
        carrier: The one transport of its two domains.
        schedule: What the scheduling rank has sent down the pipeline so far, in order.
    """

    def __init__(self, rank: int, carrier: Transport, schedule: Callable[[], list[Key]]) -> None:
        lanes = Lanes(carrier, WORLD, rank, GROUPS.domains(rank))
        self.agreement = GroupAgreement(GROUPS, rank, lanes.transport)
        self.schedule = schedule
        self.scheduled: list[Key] = []  # by this rank, when it is the scheduling one
        self.followed = 0
        self.open = len(REQUESTS)
        self.draining = False

    def begin(self) -> None:
        """The broadcast names the requests; this rank is ready for all but the one that it cancels."""
        self.agreement.open()
        for number, request_id in enumerate(REQUESTS, 1):
            key = self.agreement.admit(request_id, number)
            if self.agreement.rank == 3 and request_id == 8:
                self.agreement.withdraw(key)
            else:
                self.agreement.publish_ready(key)

    def iterate(self) -> bool:
        """One iteration of the loop; True once the drain is proven."""
        agreement = self.agreement
        drained = False
        for event in agreement.poll():
            if isinstance(event, Prepared):
                agreement.acknowledge_prepare(event.key)
            elif isinstance(event, Released):
                agreement.activate([event.key])  # before anybody can see the schedule
                self.scheduled.append(event.key)
                self.run(event.key)
            elif isinstance(event, Aborted):
                agreement.acknowledge_abort(event.key)
            elif isinstance(event, (Committed, Finalized)):
                ended = isinstance(event, Committed) or event.mode is FinalizeMode.CLOSED
                self.open -= ended
                print(agreement.rank, event)
            drained |= isinstance(event, Drained)
        if not agreement.is_scheduler:
            for key in self.schedule()[self.followed :]:
                self.followed += 1
                agreement.activate([key])
                self.run(key)
        elif not self.open and not self.draining:
            self.draining = True
            agreement.start_drain(len(REQUESTS))
        return drained

    def run(self, key: Key) -> None:
        """The request has run here, and nothing touches its memory any more."""
        outcome = Outcome.FAILED if self.agreement.rank == 1 and key.request_id == 9 else Outcome.COMPLETED
        self.agreement.vote_terminal(key, outcome)


def in_one_process() -> Iterator[dict[str, object]]:
    """All four ranks, one after the other in each iteration."""
    network = InProcessNetwork(WORLD, window=8)
    ranks: list[Rank] = []
    ranks.extend(Rank(rank, network.transport(rank), lambda: ranks[0].scheduled) for rank in WORLD.ranks)
    for rank in ranks:
        rank.begin()
    waiting = list(ranks)
    while waiting:
        waiting = [rank for rank in waiting if not rank.iterate()]
    for rank in ranks:
        yield rank.agreement.evidence()
        rank.agreement.abandon()


def over_mpi() -> Iterator[dict[str, object]]:
    """This process is one rank; the schedule travels beside the agreement, point to point."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.Get_size() != WORLD.size:
        sys.exit(f"needs {WORLD.size} ranks, not {comm.Get_size()}")
    received: list[Key] = []

    def schedule() -> list[Key]:
        while comm.iprobe(source=0):
            received.append(Key(*comm.recv(source=0)))
        return received

    rank = Rank(comm.Get_rank(), MpiTransport(comm, WORLD, window=4), schedule)
    rank.begin()
    sent = 0
    while not rank.iterate():
        for key in rank.scheduled[sent:]:
            for other in WORLD.ranks[1:]:
                comm.send(tuple(key), dest=other)
            sent += 1
        time.sleep(0.0005)  # the engine's work
    evidence = rank.agreement.evidence()
    if not rank.agreement.close(10):  # polls: a rank that stopped here would keep the others from their last frames
        sys.exit("not every rank has closed")
    yield from comm.gather(evidence) or ()


def main() -> int:
    """Exit code 0: every rank decided alike, and the drain is proven."""
    records = list(over_mpi() if "--mpi" in sys.argv else in_one_process())
    differences = verify(records) if records else ()
    for difference in differences:
        print(difference)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
