"""Real ranks over MPI. Started under ``mpiexec -n N`` by the marker; every rank runs the same test."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest

from pp_agreement import (
    Aborted,
    Agreement,
    AgreementConfig,
    AllgatherAgreement,
    Committed,
    Completed,
    DeathVerdict,
    Domain,
    Drained,
    Fault,
    FaultCode,
    Finalized,
    FinalizeMode,
    GroupAgreement,
    Groups,
    Key,
    Lanes,
    Outcome,
    PidWatch,
    Prepared,
    PublishResult,
    Reason,
    Released,
    SilenceVerdict,
    verify,
)
from pp_agreement.testing import check_transport

CONFIG = AgreementConfig(credits=512, heartbeat_s=0.2, silence_s=20.0)
LIMIT_S = 30.0
SCHEDULE_TAG = 11
WINDOW = 3


def domain_of(comm, **fields):
    return Domain(7, tuple(range(comm.Get_size())), **fields)


def make(comm, domain, config=CONFIG, **options):
    from pp_agreement import MpiTransport

    return Agreement(domain, comm.Get_rank(), MpiTransport(comm, domain, **options), config)


def poll_until(agreement, done, events=None):
    """Poll without ever blocking until ``done(events)``; a hang fails by deadline."""
    events = [] if events is None else events
    until_s = time.monotonic() + LIMIT_S
    while not done(events):
        assert time.monotonic() < until_s, f"rank {agreement.rank}: not done; {agreement.drain_state()}; {events[-5:]}"
        events.extend(agreement.poll())
        time.sleep(0.0002)
    agreement.validate()
    return events


def count(kind):
    return lambda events: sum(isinstance(e, kind) for e in events)


def drain_and_close(agreement, last):
    if agreement.is_scheduler:
        agreement.start_drain(last)
    report = agreement.drain(LIMIT_S)
    assert report.drained, report
    evidence = agreement.evidence()
    assert agreement.close(LIMIT_S), "the closing handshake did not complete"
    return report, evidence


def gathered(comm, value):
    return comm.allgather(value)


class AgreementBehaviour:
    """One life of everything, at any size."""

    def check_terminal_flood(self, comm):
        """256 requests opened at once: all decided on all ranks, digests equal, at most one frame per peer and poll."""
        domain = domain_of(comm)
        with make(comm, domain) as agreement:
            keys = [agreement.admit(1000 + i, i + 1, ready=False) for i in range(256)]
            order = list(keys)
            random.Random(comm.Get_rank()).shuffle(order)
            for key in order:
                agreement.vote_terminal(
                    key, Outcome.FAILED if key.incarnation % 5 == comm.Get_rank() else Outcome.COMPLETED
                )
            events = poll_until(agreement, lambda es: count(Committed)(es) == 256)
            outcomes = {e.key.incarnation: e.outcome for e in events if isinstance(e, Committed)}
            size = comm.Get_size()
            assert all(outcomes[i] == (Outcome.FAILED if i % 5 < size else Outcome.COMPLETED) for i in outcomes)
            report, evidence = drain_and_close(agreement, 256)
            assert evidence["frames_sent"] <= evidence["polls"]["count"] * max(1, size - 1)
            records = gathered(comm, evidence)
            assert verify(records) == ()
            assert len({tuple(r) for r in gathered(comm, [report.digest])}) == 1

    def check_readiness(self, comm):
        """The whole generation-first life; activation in schedule order; equal activation digests."""
        domain = domain_of(comm)
        self.live(comm, domain, make(comm, domain))

    def live(self, comm, domain, ranks_agreement):
        with ranks_agreement as agreement:
            keys = [agreement.admit(i, i + 1) for i in range(20)]
            for key in keys:
                assert agreement.publish_ready(key) is PublishResult.PUBLISHED
            poll_until(agreement, lambda es: count(Prepared)(es) == 20)
            for key in keys:
                assert agreement.acknowledge_prepare(key)
            if agreement.is_scheduler:
                poll_until(agreement, lambda es: count(Released)(es) == 20)
                agreement.activate(reversed(keys))
                for rank in domain.ranks:
                    if rank != agreement.rank:
                        comm.send([tuple(k) for k in reversed(keys)], dest=rank, tag=SCHEDULE_TAG)
            else:
                poll_until(agreement, lambda _: comm.iprobe(source=domain.scheduling_rank, tag=SCHEDULE_TAG))
                schedule = comm.recv(source=domain.scheduling_rank, tag=SCHEDULE_TAG)
                agreement.activate([Key(*k) for k in schedule])
            poll_until(agreement, lambda es: count(Completed)(es) == 20)
            for key in keys:
                agreement.vote_terminal(key, Outcome.COMPLETED)
            poll_until(agreement, lambda es: count(Committed)(es) == 20)
            _report, evidence = drain_and_close(agreement, 20)
            assert verify(gathered(comm, evidence)) == ()
            assert evidence["activated"] == 20

    def check_groups(self, comm):
        """The same life where members are groups, over lanes of one transport: one domain of all ranks to every rank."""
        from pp_agreement import MpiTransport

        size, rank = comm.Get_size(), comm.Get_rank()
        ranks = tuple(range(size))
        groups = Groups(40, (ranks[: (size + 1) // 2][::-1], ranks[(size + 1) // 2 :]))
        world = Domain(39, ranks)
        lanes = Lanes(MpiTransport(comm, world), world, rank, groups.domains(rank))
        agreement = GroupAgreement(groups, rank, lanes.transport, CONFIG)
        self.live(comm, Domain(1, ranks, scheduling_rank=groups.scheduling_rank), agreement)
        assert lanes._closed is True

    def check_lanes(self, comm):
        """Two domains of unlike rank orders at once on one transport, one of them a subset: each decides its own."""
        from pp_agreement import MpiTransport

        size, rank = comm.Get_size(), comm.Get_rank()
        world = Domain(50, tuple(range(size)))
        domains = [Domain(51, world.ranks), Domain(52, world.ranks[::-1]), Domain(53, world.ranks[1:][::-1])]
        mine = [domain for domain in domains if rank in domain.ranks]
        lanes = Lanes(MpiTransport(comm, world, window=6), world, rank, mine)
        agreements = [Agreement(domain, rank, lanes.transport(domain), CONFIG) for domain in mine]
        wanted = {}
        for agreement in agreements:
            agreement.open()
            identity = agreement.domain.domain_id
            for number in range(1, 101):
                key = agreement.admit(identity * 1000 + number, number, ready=False)
                failing = agreement.domain.ranks[number % agreement.domain.size]
                agreement.vote_terminal(key, Outcome.FAILED if rank == failing else Outcome.COMPLETED)
            if agreement.is_scheduler:
                agreement.start_drain(100)
            wanted[identity] = [identity * 1000 + number for number in range(1, 101)]
        committed = {identity: [] for identity in wanted}
        until_s = time.monotonic() + LIMIT_S
        while not all(a.drain_state().drained for a in agreements):
            assert time.monotonic() < until_s, [a.drain_state() for a in agreements]
            for agreement in agreements:
                committed[agreement.domain.domain_id] += [e for e in agreement.poll() if isinstance(e, Committed)]
        for identity, events in committed.items():
            assert sorted(e.key.request_id for e in events) == wanted[identity]
            assert {e.outcome for e in events} == {Outcome.FAILED}
        closing = list(agreements)
        while closing:  # all lanes of a rank close beside one another
            assert time.monotonic() < until_s
            closing = [agreement for agreement in closing if not agreement.close(0.01)]
        assert lanes._closed is True

    def check_withdraw_race(self, comm):
        """PREPARE races a withdrawal; the attempt aborts everywhere, reuse waits for FINALIZE, the next one completes."""
        domain = domain_of(comm)
        withdrawer = domain.ranks[len(domain.ranks) // 2]
        with make(comm, domain) as agreement:
            key = agreement.admit(5, 1)
            events = []
            agreement.publish_ready(key)
            events.extend(agreement.poll())
            if agreement.rank == withdrawer:
                agreement.withdraw(key, Reason.NOT_READY)
            again = key._replace(attempt=1)
            poll_until(agreement, lambda es: count(Aborted)(es) == 1, events)
            agreement.acknowledge_abort(key)
            poll_until(agreement, lambda es: count(Finalized)(es) == 1, events)
            (final,) = [e for e in events if isinstance(e, Finalized)]
            assert final.mode is FinalizeMode.REOPEN
            assert not any(isinstance(e, (Released, Completed)) for e in events)
            assert agreement.publish_ready(key) is PublishResult.FINAL
            assert agreement.publish_ready(again) is PublishResult.PUBLISHED
            prepared = lambda es: any(isinstance(e, Prepared) and e.key.attempt == 1 for e in es)  # noqa: E731
            poll_until(agreement, prepared, events)
            assert agreement.acknowledge_prepare(again)
            if agreement.is_scheduler:
                poll_until(agreement, lambda es: count(Released)(es) == 1, events)
                agreement.activate([again])
            token = comm.Ibarrier()  # stands for the schedule
            poll_until(agreement, lambda _: token.Test(), events)
            if not agreement.is_scheduler:
                agreement.activate([again])
            agreement.vote_terminal(again, Outcome.CANCELLED)
            poll_until(agreement, lambda es: count(Committed)(es) == 1, events)
            assert events.index(next(e for e in events if isinstance(e, Completed))) < events.index(
                next(e for e in events if isinstance(e, Committed))
            )
            _report, evidence = drain_and_close(agreement, 1)
            assert verify(gathered(comm, evidence)) == ()

    def check_late_rank_drain(self, comm):
        """One rank is late by two seconds: N of N on every rank before anybody closes."""
        domain = domain_of(comm)
        with make(comm, domain) as agreement:
            keys = [agreement.admit(i, i + 1, ready=False) for i in range(64)]
            if agreement.is_scheduler:
                agreement.start_drain(64)
            if agreement.rank == domain.ranks[len(domain.ranks) // 2]:
                until_s = time.monotonic() + 2.0
                while time.monotonic() < until_s:
                    time.sleep(0.05)
            for key in keys:
                agreement.vote_terminal(key, Outcome.COMPLETED)
            report = agreement.drain(LIMIT_S)
            assert report.drained and report.committed == 64 and report.missing_ranks == ()
            evidence = agreement.evidence()
            assert agreement.close(LIMIT_S)
            assert verify(gathered(comm, evidence)) == ()

    def check_baseline(self, comm):
        """The blocking baseline gives the same decisions with the same calls."""
        domain = domain_of(comm)
        with AllgatherAgreement(domain, comm.Get_rank(), comm, CONFIG) as agreement:
            keys = [agreement.admit(i, i + 1, ready=i % 2 == 0) for i in range(60)]
            events = []
            for key in keys:
                if key.incarnation % 2:
                    agreement.publish_ready(key)
                else:
                    agreement.vote_terminal(key, Outcome.FAILED if agreement.rank == 0 else Outcome.COMPLETED)
            for _ in range(3):
                for event in agreement.poll():
                    events.append(event)
                    if isinstance(event, Prepared):
                        agreement.acknowledge_prepare(event.key)
            if agreement.is_scheduler:
                assert count(Released)(events) == 30
            agreement.activate([k for k in keys if k.incarnation % 2])
            for key in keys:
                if key.incarnation % 2:
                    agreement.vote_terminal(key, Outcome.COMPLETED)
            for _ in range(2):
                events.extend(agreement.poll())
            assert count(Committed)(events) == 60 and count(Completed)(events) == 30
            if agreement.is_scheduler:
                agreement.start_drain(60)
            for _ in range(4):
                events.extend(agreement.poll())
            assert count(Drained)(events) == 1
            evidence = agreement.evidence()
            assert agreement.close()
            assert verify(gathered(comm, evidence)) == ()

    def check_conformance(self, comm):
        """The transport suite over MPI: order, bounded window, receiving without send space, whole frames."""
        from pp_agreement import MpiTransport

        domain = Domain(11, tuple(range(comm.Get_size())))
        transport = MpiTransport(comm, domain, window=WINDOW)
        check_transport(
            transport, domain, comm.Get_rank(), sync=comm.Barrier, frames_outstanding_max=2 * WINDOW, count=60
        )

    def check_foreign_traffic(self, comm):
        """a message on the world communicator with the same tag survives, and no collective is needed while polling."""
        domain = domain_of(comm)
        rank, size = comm.Get_rank(), comm.Get_size()
        with make(comm, domain) as agreement:
            comm.send(f"from {rank}", dest=(rank + 1) % size, tag=0)
            key = agreement.admit(1, 1, ready=False)
            agreement.vote_terminal(key, Outcome.COMPLETED)
            poll_until(agreement, lambda es: count(Committed)(es) == 1)
            assert comm.recv(source=(rank - 1) % size, tag=0) == f"from {(rank - 1) % size}"
            drain_and_close(agreement, 1)

    def check_window_one(self, comm):
        """Capacity: one frame outstanding and tiny frames still decide everything, in the same order everywhere."""
        domain = domain_of(comm)
        config = AgreementConfig(credits=128, frame_bytes_max=256)
        with make(comm, domain, config, window=1) as agreement:
            for number in range(1, 101):
                agreement.vote_terminal(agreement.admit(number, number, ready=False), Outcome.COMPLETED)
            poll_until(agreement, lambda es: count(Committed)(es) == 100)
            report, evidence = drain_and_close(agreement, 100)
            assert verify(comm.allgather(evidence)) == ()
            assert len(set(comm.allgather(report.digest))) == 1

    def check_skewed_outcomes(self, comm):
        """Votes at different times, one FAILED: FAILED on all ranks."""
        domain = domain_of(comm)
        rank = comm.Get_rank()
        with make(comm, domain) as agreement:
            key = agreement.admit(1, 1, ready=False)
            until_s = time.monotonic() + 0.03 * rank
            poll_until(agreement, lambda _: time.monotonic() >= until_s)
            agreement.vote_terminal(key, Outcome.FAILED if rank == 1 else Outcome.COMPLETED)
            events = poll_until(agreement, lambda es: count(Committed)(es) == 1)
            assert [e.outcome for e in events if isinstance(e, Committed)] == [Outcome.FAILED]
            drain_and_close(agreement, 1)

    def check_incomplete_round(self, comm):
        """A round that lacks votes stops everybody by its timeout, without a commit; no clean close is claimed."""
        domain = domain_of(comm)
        config = AgreementConfig(round_timeout_s=0.2)
        agreement = make(comm, domain, config)
        agreement.open()
        key = agreement.admit(1, 1, ready=False)
        if comm.Get_rank() == 0:
            agreement.vote_terminal(key, Outcome.COMPLETED)
        events = []
        poll_until(agreement, lambda es: count(Fault)(es) == 1, events)
        assert not count(Committed)(events) and agreement.stopped.code is FaultCode.ROUND_TIMEOUT
        assert agreement.open_rounds == 1
        done = comm.Ibarrier()
        while not done.Test():
            agreement.poll()
        assert agreement.close(1.0) is False

    def check_staggered_shutdown(self, comm):
        """Ranks reach drain and close at different times; everybody closes cleanly."""
        domain = domain_of(comm)
        rank = comm.Get_rank()
        with make(comm, domain) as agreement:
            for number in range(1, 11):
                agreement.vote_terminal(agreement.admit(number, number, ready=False), Outcome.COMPLETED)
            if agreement.is_scheduler:
                agreement.start_drain(10)
            until_s = time.monotonic() + 0.1 * (comm.Get_size() - rank)
            poll_until(agreement, lambda _: time.monotonic() >= until_s)
            assert agreement.drain(LIMIT_S).drained
            time.sleep(0.05 * rank)
            assert agreement.close(LIMIT_S)

    def check_subset_domains(self, comm):
        """Two domains of the same processes, one of them a subset in another order: nothing crosses."""
        rank, size = comm.Get_rank(), comm.Get_size()
        wide = Domain(1, tuple(range(size)))
        narrow = Domain(2, tuple(range(size - 1, 0, -1)), coordinator_rank=1)
        agreements = [make(comm, wide)] + ([make(comm, narrow)] if rank in narrow.ranks else [])
        for agreement in agreements:
            agreement.open()
            key = agreement.admit(agreement.domain.domain_id, 1, ready=False)
            agreement.vote_terminal(key, Outcome.COMPLETED)
            if agreement.is_scheduler:
                agreement.start_drain(1)
        until_s = time.monotonic() + LIMIT_S
        while not all(a.drain_state().drained for a in agreements):
            assert time.monotonic() < until_s
            for agreement in agreements:
                for event in agreement.poll():
                    if isinstance(event, Committed):
                        assert event.key.request_id == agreement.domain.domain_id
        for agreement in agreements:
            assert agreement.close(LIMIT_S)

    def check_flood_fairness(self, comm):
        """Rank 0 floods; the one round of the others is decided although frames per poll are few."""
        domain = domain_of(comm)
        config = AgreementConfig(credits=400, frame_bytes_max=256, frames_per_poll_max=2)
        with make(comm, domain, config) as agreement:
            keys = [agreement.admit(n, n, ready=False) for n in range(1, 301)]
            mine = keys if agreement.rank == 0 else [keys[-1]]
            for key in mine:
                agreement.vote_terminal(key, Outcome.COMPLETED)
            poll_until(agreement, lambda es: any(isinstance(e, Committed) and e.key == keys[-1] for e in es))
            for key in keys[:-1] if agreement.rank else ():  # rank 0 has voted: by now some of these may be decided
                agreement.vote_terminal(key, Outcome.COMPLETED)
            drain_and_close(agreement, 300)


@pytest.mark.mpi(4)
class TestFourRanks(AgreementBehaviour):
    def test_everything(self, world_comm):
        for name in CHECKS:
            getattr(self, name)(world_comm)

    def test_late_rank_drain(self, world_comm):
        self.check_late_rank_drain(world_comm)

    def test_a_stopped_rank_is_named_by_every_other(self, world_comm):
        """SIGSTOP: a verdict on every rank within the bound, none about a rank that declared itself busy, nothing freed."""
        comm = world_comm
        rank = comm.Get_rank()
        config = AgreementConfig(heartbeat_s=0.1, silence_s=1.0, startup_s=5.0, round_timeout_s=None)
        agreement = make(comm, domain_of(comm), config)
        agreement.open()
        key = agreement.admit(1, 1, ready=False)
        events = []
        if rank not in (1, 2):
            agreement.vote_terminal(key, Outcome.COMPLETED)
        settled_s = time.monotonic() + 0.5
        poll_until(agreement, lambda _: time.monotonic() > settled_s, events)
        if rank == 2:  # announces that it will not poll, and does not
            assert agreement.busy(20.0, "graph capture")
            time.sleep(3.0)
        elif rank == 1:  # is stopped from outside, and resumed when the others have seen it
            stopper = subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 3.5; kill -CONT {os.getpid()}"])
            stopper.wait()
        else:
            began_s = time.monotonic()
            poll_until(agreement, lambda es: count(SilenceVerdict)(es) == 1, events)
            assert time.monotonic() - began_s < 3.4
        ended_s = time.monotonic() + 3.0
        poll_until(agreement, lambda _: time.monotonic() > ended_s, events)
        named = {(e.observer_rank, e.suspect_rank) for e in events if isinstance(e, SilenceVerdict)}
        assert named <= {(3, 1)}, named
        assert named == {(3, 1)} or rank in (1, 2)
        assert agreement.stopped is None and agreement.open_rounds == 1 and not count(Committed)(events)
        if rank in (1, 2):
            agreement.vote_terminal(key, Outcome.COMPLETED)
        drain_and_close(agreement, 1)


@pytest.mark.mpi(2)
class TestTwoRanks(AgreementBehaviour):
    def test_everything(self, world_comm):
        for name in CHECKS:
            getattr(self, name)(world_comm)


@pytest.mark.mpi(3)
class TestThreeRanks(AgreementBehaviour):
    def test_everything(self, world_comm):
        for name in CHECKS:
            getattr(self, name)(world_comm)


@pytest.mark.mpi(6)
class TestSixRanks(AgreementBehaviour):
    def test_everything(self, world_comm):
        for name in ("check_readiness", "check_terminal_flood", "check_withdraw_race", "check_staggered_shutdown"):
            getattr(self, name)(world_comm)


@pytest.mark.mpi(2)
def test_death_seen_by_a_guard_that_outlives_its_rank(world_comm):
    """Hydra would kill the survivors of a killed rank, so rank 0 is a guard whose child speaks and is then killed: pidfd
    tells rank 1, which stops, names it and frees nothing."""
    comm = world_comm
    domain = Domain(1, (0, 1))
    if comm.Get_rank() == 0:
        agreement = make(comm, domain)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        comm.send(child.pid, dest=1, tag=5)
        agreement.open()
        key = agreement.admit(1, 1, ready=False)
        agreement.poll()
        comm.recv(source=1, tag=6)
        child.kill()
        child.wait()  # the guard outlives its rank
        poll_until(agreement, lambda es: count(Fault)(es) == 1)
    else:
        pid = comm.recv(source=0, tag=5)
        with PidWatch({0: pid}) as watch:
            agreement = make(comm, domain, watch=watch.dead)
            agreement.open()
            key = agreement.admit(1, 1, ready=False)
            agreement.vote_terminal(key, Outcome.COMPLETED)
            agreement.poll()
            comm.send(None, dest=0, tag=6)
            events = poll_until(agreement, lambda es: count(Fault)(es) == 1)
            verdicts = [e for e in events if isinstance(e, DeathVerdict)]
            assert [v.suspect_rank for v in verdicts] == [0] and not count(Committed)(events)
            assert agreement.stopped.code is FaultCode.DEATH
    assert agreement.open_rounds == 1 and key.incarnation == 1
    done = comm.Ibarrier()
    while not done.Test():
        agreement.poll()
    assert agreement.close(1.0) is False


CHECKS = (
    "check_terminal_flood",
    "check_readiness",
    "check_groups",
    "check_lanes",
    "check_withdraw_race",
    "check_baseline",
    "check_conformance",
    "check_foreign_traffic",
    "check_window_one",
    "check_skewed_outcomes",
    "check_staggered_shutdown",
    "check_subset_domains",
    "check_flood_fairness",
    "check_incomplete_round",
)
