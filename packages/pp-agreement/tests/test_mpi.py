"""Real ranks over MPI. Started under ``mpiexec -n N`` by the marker; every rank runs the same test."""

from __future__ import annotations

import random
import time

import pytest

from pp_agreement import (
    Aborted,
    Agreement,
    AgreementConfig,
    AllgatherAgreement,
    Committed,
    Completed,
    Domain,
    Drained,
    Finalized,
    FinalizeMode,
    Key,
    Outcome,
    Prepared,
    PublishResult,
    Reason,
    Released,
    verify,
)

CONFIG = AgreementConfig(credits=512, heartbeat_s=0.2, silence_s=20.0)
LIMIT_S = 30.0
SCHEDULE_TAG = 11


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
        with make(comm, domain) as agreement:
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


@pytest.mark.mpi(4)
class TestFourRanks(AgreementBehaviour):
    def test_terminal_flood(self, world_comm):
        self.check_terminal_flood(world_comm)

    def test_readiness(self, world_comm):
        self.check_readiness(world_comm)

    def test_withdraw_race(self, world_comm):
        self.check_withdraw_race(world_comm)

    def test_late_rank_drain(self, world_comm):
        self.check_late_rank_drain(world_comm)

    def test_baseline(self, world_comm):
        self.check_baseline(world_comm)
