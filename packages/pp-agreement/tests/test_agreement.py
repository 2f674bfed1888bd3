"""The shell around the core: events once, faults as data, optional libraries absent."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import pp_agreement
from pp_agreement import (
    Agreement,
    AgreementConfig,
    AllgatherAgreement,
    Committed,
    Domain,
    Drained,
    Fault,
    FaultCode,
    InProcessExchange,
    InProcessNetwork,
    Key,
    LocalProtocolError,
    Outcome,
    Prepared,
    Reason,
    Released,
    RevokeResult,
    WithdrawResult,
    verify,
)

DOMAIN = Domain(1, (0, 1))


def pair(**options):
    network = InProcessNetwork(DOMAIN)
    both = [Agreement(DOMAIN, r, network.transport(r), AgreementConfig(**options)) for r in (0, 1)]
    for agreement in both:
        agreement.open()
    return network, both


def settle(agreements, rounds=5):
    events = {a.rank: [] for a in agreements}
    for _ in range(rounds):
        for agreement in agreements:
            events[agreement.rank].extend(agreement.poll())
            agreement.validate()
    return events


def test_import_without_optional_libraries():
    """The package and its in-process transport need neither mpi4py nor pyzmq."""
    code = (
        "import sys\n"
        "sys.modules['mpi4py'] = sys.modules['zmq'] = None\n"
        "import pp_agreement, pp_agreement.testing\n"
        "assert pp_agreement.Agreement\n"
        "for name in ('MpiTransport', 'ZmqTransport', 'MpiExchange'):\n"
        "    try:\n"
        "        getattr(pp_agreement, name)\n"
        "    except pp_agreement.MissingLibraryError as error:\n"
        "        assert isinstance(error, ImportError) and isinstance(error, pp_agreement.AgreementError)\n"
        "        assert name in str(error) and 'pip install' in str(error), error\n"
        "        continue\n"
        "    raise SystemExit(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("raised", [RuntimeError, OSError])
def test_a_library_that_cannot_be_loaded_is_told(monkeypatch, raised):
    """mpi4py without an MPI library to load: not an ImportError there, one here, with what to install."""
    import importlib

    import pp_agreement

    def cannot_load(name):
        raise raised(f"{name}: cannot load MPI library")

    monkeypatch.setattr(importlib, "import_module", cannot_load)
    with pytest.raises(pp_agreement.MissingLibraryError, match=r"MpiTransport needs .* pip install .*cannot load"):
        _ = pp_agreement.MpiTransport


def test_every_public_name_exists():
    import pp_agreement

    for name in pp_agreement.__all__:
        assert getattr(pp_agreement, name) is not None
    with pytest.raises(AttributeError):
        _ = pp_agreement.NoSuchName


def test_own_withdrawal_swallows_a_waiting_prepare():
    """PREPARE was decided in the coordinator's own step and waits for its poll; the withdrawal comes first."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1) for a in (zero, one))
    zero.publish_ready(key)
    settle([zero])
    one.poll()
    one.publish_ready(key)
    assert one.withdraw(key) is WithdrawResult.WILL_ABORT
    assert not any(isinstance(e, Prepared) for e in one.poll())


def test_own_revocation_swallows_a_waiting_release():
    domain = Domain(1, (0,))
    one = Agreement(domain, 0, InProcessNetwork(domain).transport(0))
    one.open()
    key = one.admit(7, 1)
    one.publish_ready(key)
    one.poll()
    one.acknowledge_prepare(key)
    assert one.revoke(key) is RevokeResult.WILL_ABORT
    assert not any(isinstance(e, Released) for e in one.poll())


def test_a_fault_is_data_and_comes_once():
    _network, (zero, one) = pair()
    one.fail("broken")
    events = settle([zero, one])
    assert [type(e) for e in events[1]] == [Fault] and events[1][0].code is FaultCode.HOST
    assert [type(e) for e in events[0]] == [Fault] and events[0][0].rank == 1
    assert zero.poll() == () and zero.stopped is not None


def test_a_defect_inside_the_core_stops_the_domain(monkeypatch):
    """no exception may leave half a step behind and the group waiting for it."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))

    def broken(*_arguments):
        raise OverflowError("defect")

    monkeypatch.setattr(one._core.coordinator, "hear", broken)
    zero.vote_terminal(key, Outcome.COMPLETED)
    zero.poll()
    with pytest.raises(OverflowError):
        one.poll()
    assert one.stopped.code is FaultCode.INTERNAL
    one.poll()
    assert any(isinstance(e, Fault) for e in settle([zero, one])[0])


def test_drain_keeps_events_for_the_next_poll():
    """nothing that happens while draining is lost."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    for agreement in (zero, one):
        agreement.vote_terminal(key, Outcome.COMPLETED)
    zero.start_drain(1)
    report = zero.drain(5.0, wait=lambda _s: one.poll())
    assert report.drained
    assert [type(e).__name__ for e in zero.poll()] == ["Committed", "DrainStarted", "Drained"]


def test_drain_hands_events_over_and_ends_by_deadline():
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    zero.vote_terminal(key, Outcome.COMPLETED)
    zero.start_drain(1)
    seen = []
    report = zero.drain(0.05, wait=lambda _s: one.poll(), on_events=seen.extend)
    assert not report.drained and report.undecided == (key,) and report.fault is None
    assert report.missing_ranks == (0, 1)
    assert [type(e).__name__ for e in seen] == ["DrainStarted"]


def test_use_before_open_and_after_close():
    network = InProcessNetwork(DOMAIN)
    agreement = Agreement(DOMAIN, 0, network.transport(0))
    with pytest.raises(LocalProtocolError):
        agreement.poll()
    agreement.open()
    with pytest.raises(LocalProtocolError):
        agreement.open()
    assert agreement.close() is False and agreement.close() is False
    for call in (agreement.poll, lambda: agreement.admit(1, 1), lambda: agreement.busy(1)):
        with pytest.raises(LocalProtocolError):
            call()


def test_busy_leaves_at_once_or_says_so():
    network, (zero, _one) = pair()
    zero.poll()
    assert zero.busy(3.0, "graph capture") is True
    network.refuse(0, 1)
    assert zero.busy(3.0) is False


def test_several_domains_in_one_process():
    """The same ranks in two domains, and a subset with other roles: nothing crosses."""
    wide, narrow = Domain(1, (0, 1, 2)), Domain(2, (2, 0), scheduling_rank=2, coordinator_rank=2)
    agreements = {}
    for domain in (wide, narrow):
        network = InProcessNetwork(domain)
        agreements[domain] = [Agreement(domain, r, network.transport(r)) for r in domain.ranks]
        for agreement in agreements[domain]:
            agreement.open()
            agreement.vote_terminal(agreement.admit(domain.domain_id, 1, ready=False), Outcome.COMPLETED)
    for domain in (wide, narrow):
        for events in settle(agreements[domain]).values():
            (committed,) = [e for e in events if isinstance(e, Committed)]
            assert committed.key.request_id == domain.domain_id


def run_threads(domain, work):
    exchange = InProcessExchange(domain, timeout_s=30)
    results, failures = {}, []

    def member(rank):
        try:
            results[rank] = work(rank, exchange.member(rank))
        except BaseException as error:
            failures.append(error)
            exchange.abort()

    threads = [threading.Thread(target=member, args=(r,)) for r in domain.ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    return results


@pytest.mark.parametrize("size", [1, 3])
def test_baseline_decides_alike(size):
    """Lockstep: the same decisions on every rank in the same poll."""
    domain = Domain(4, tuple(range(size)))

    def work(rank, member):
        with AllgatherAgreement(domain, rank, member) as agreement:
            keys = [agreement.admit(n, n, ready=n % 2 == 0) for n in range(1, 31)]
            for key in keys:
                if key.incarnation % 2:
                    agreement.vote_terminal(key, Outcome.COMPLETED if rank else Outcome.CANCELLED)
                elif key.incarnation == 2 and rank == size - 1:
                    agreement.withdraw(key)
                else:
                    agreement.publish_ready(key)
            events = list(agreement.poll())
            for event in events:
                if isinstance(event, Prepared):
                    agreement.acknowledge_prepare(event.key)
                elif type(event).__name__ == "Aborted":
                    agreement.acknowledge_abort(event.key)
            events.extend(agreement.poll())
            agreement.activate([k for k in keys if k.incarnation % 2 == 0 and k.incarnation > 2])
            for key in keys:
                if key.incarnation % 2 == 0 and key.incarnation > 2:
                    agreement.vote_terminal(key, Outcome.COMPLETED)
            events.extend(agreement.poll())
            if agreement.is_scheduler:
                agreement.start_drain(30)
            for _ in range(4):
                events.extend(agreement.poll())
            agreement.validate()
            evidence = agreement.evidence()
            return evidence, agreement.close(), sum(isinstance(e, Committed) for e in events), events

    results = run_threads(domain, work)
    assert verify([r[0] for r in results.values()]) == ()
    assert all(r[1] for r in results.values()) and all(r[2] == 29 for r in results.values())
    assert all(any(isinstance(e, Drained) for e in r[3]) for r in results.values())


def test_baseline_poison_stops_everybody():
    """A rank that fails contributes poison in the next poll instead of leaving the others in it."""
    domain = Domain(4, (0, 1, 2))

    def work(rank, member):
        with AllgatherAgreement(domain, rank, member) as agreement:
            agreement.poll()
            if rank == 1:
                agreement.fail("out of memory")
            events = agreement.poll()
            return events, agreement.poll()

    for rank, (events, later) in run_threads(domain, work).items():
        (fault,) = [e for e in events if isinstance(e, Fault)]
        assert fault.code is (FaultCode.HOST if rank == 1 else FaultCode.POISON) and later == ()
        assert rank == 1 or fault.suspect_rank == 1


def test_baseline_polls_run_the_timers():
    """A lease that waits too long is revoked by a poll, and a round that nobody moves stops the domain, on every rank."""
    domain = Domain(4, (0, 1, 2))
    config = AgreementConfig(credits=2, lease_timeout_s=1.0, round_timeout_s=10.0)

    def work(rank, member):
        now = [0.0]
        with AllgatherAgreement(domain, rank, member, config, lambda: now[0]) as agreement:
            key = agreement.admit(7, 1, ready=True)
            agreement.publish_ready(key)
            told = []
            for now[0] in (0.1, 0.3, 0.9, 1.4, 1.5, 11.6):
                events = agreement.poll()
                told.append([type(e).__name__ for e in events])
                if any(isinstance(e, Prepared) for e in events):
                    agreement.acknowledge_prepare(key)
            return told, agreement.stopped

    for rank, (told, fault) in run_threads(domain, work).items():
        leased, revoked = (["Released"], ["Revoked"]) if rank == 0 else ([], [])
        assert told == [["Prepared"], leased, [], revoked, ["Aborted"], ["Fault"]]
        assert fault.code is FaultCode.ROUND_TIMEOUT


def test_baseline_leaves_a_drain_together():
    """the first deadline that passes anywhere ends the drain everywhere, in the same exchange; nobody is left in one."""
    domain = Domain(4, (0, 1, 2))
    polls = {}

    def work(rank, member):
        agreement = AllgatherAgreement(domain, rank, member)
        agreement.open()
        agreement.admit(7, 1, ready=False)  # nobody votes: the drain cannot be proven
        if agreement.is_scheduler:
            agreement.start_drain(1)
        report = agreement.drain(0.05 if rank == 1 else 1000.0)
        polls[rank] = agreement.polls
        return report, agreement.poll(), agreement.close()

    results = run_threads(domain, work)
    assert len(set(polls.values())) == 1
    for report, events, clean in results.values():
        assert not report.drained and report.fault is None and report.undecided == (Key(7, 1),)
        assert [type(e).__name__ for e in events] == ["DrainStarted"] and clean is False


def test_baseline_leaves_a_drain_together_after_a_fault():
    """A rank that fails inside the drain still gives its poison: the others are not left waiting for it."""
    domain = Domain(4, (0, 1, 2))

    def work(rank, member):
        agreement = AllgatherAgreement(domain, rank, member)
        agreement.open()

        def handler(events):  # after the exchange of a poll, before the next one
            if rank == 1:
                agreement.fail(f"out of memory at {events[0]}")

        if agreement.is_scheduler:
            agreement.admit(7, 1, ready=False)
            agreement.start_drain(1)
        report = agreement.drain(1000.0, on_events=handler)
        return report, agreement.polls

    results = run_threads(domain, work)
    assert len({polls for _report, polls in results.values()}) == 1
    assert {r.fault.code for r, _polls in results.values()} == {FaultCode.HOST, FaultCode.POISON}


def test_baseline_leaving_by_an_exception_is_poison():
    domain = Domain(4, (0, 1))

    def work(rank, member):
        try:
            with AllgatherAgreement(domain, rank, member) as agreement:
                agreement.poll()
                if rank:
                    raise ValueError("host")
                return [e for _ in range(2) for e in agreement.poll()]
        except ValueError:
            return []

    (fault,) = run_threads(domain, work)[0]
    assert isinstance(fault, Fault) and fault.code is FaultCode.POISON and fault.suspect_rank == 1


def test_baseline_refuses_what_is_no_contribution_of_this_domain():
    """Cut, foreign, or with flags of another version: as good as poison, never half read."""
    domain = Domain(4, (0, 1))

    class Forged:
        name = "forged"

        def __init__(self, other):
            self.other = other

        def exchange(self, contribution):
            return [contribution, self.other]

        def close(self, clean):
            pass

    good = {}

    class Seen(Forged):
        def exchange(self, contribution):
            good["head"] = contribution
            return [contribution, contribution]

    with AllgatherAgreement(domain, 0, Seen(b"")) as agreement:
        assert agreement.poll() == ()
    head = good["head"][:16]
    for other in (b"", head[:-1], head + b"x", head[:-4] + b"\2\0\0\0", b"\0" * 16, head[:4] + b"\7\0\0\0" + head[8:]):
        with AllgatherAgreement(domain, 0, Forged(other)) as agreement:
            (fault,) = agreement.poll()
            assert fault.code is FaultCode.POISON and fault.suspect_rank == 1


def test_the_largest_domain_tells_every_rank_s_reason():
    """64 ranks, the mask's whole width: all reasons of a commit on all ranks, in rank order, over eight records."""
    domain = Domain(3, tuple(range(100, 164)), scheduling_rank=130, coordinator_rank=101)
    network = InProcessNetwork(domain)
    agreements = [Agreement(domain, r, network.transport(r), AgreementConfig(credits=2)) for r in domain.ranks]
    reasons = tuple(Reason(r % 12) for r in domain.ranks)
    for agreement, reason in zip(agreements, reasons):
        agreement.open()
        key = agreement.admit(7, 1, ready=False)
        agreement.vote_terminal(key, Outcome.FAILED, reason=reason)
    agreements[30].start_drain(1)
    for events in settle(agreements, 6).values():
        (committed,) = [e for e in events if isinstance(e, Committed)]
        assert committed.reasons == reasons
        assert sum(isinstance(e, Drained) for e in events) == 1
    assert verify([a.evidence() for a in agreements]) == ()


def test_another_activation_order_is_found():
    """the order in which a schedule was followed is compared, not only how much of it."""
    _network, (zero, one) = pair()
    keys = [zero.admit(n, n) for n in (1, 2)]
    assert [one.admit(n, n) for n in (1, 2)] == keys
    for agreement in (zero, one):
        for key in keys:
            agreement.publish_ready(key)
    settle((zero, one))
    for agreement in (zero, one):
        for key in keys:
            agreement.acknowledge_prepare(key)
    settle((zero, one))
    zero.activate(keys)
    one.activate(keys[::-1])
    for agreement in (zero, one):
        for key in keys:
            agreement.vote_terminal(key, Outcome.COMPLETED)
    zero.start_drain(2)
    settle((zero, one), 8)
    assert {d.field for d in verify([zero.evidence(), one.evidence()])} == {"activation_digest"}


def test_the_core_has_no_clock_and_does_no_input_or_output():
    """what decides imports nothing that could wait, look at a clock, or talk to anybody."""
    root = Path(pp_agreement.__file__).parent
    allowed = {
        "__future__", "struct", "collections", "collections.abc", "contextlib", "dataclasses", "enum", "functools", "hashlib",
        "types", "typing", "zlib",
    }  # fmt: skip
    for name in ("_events", "_state", "_machine", "_codec", "_config", "_errors"):
        for node in ast.walk(ast.parse((root / f"{name}.py").read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= allowed, name
            elif isinstance(node, ast.ImportFrom):
                assert node.module in allowed or node.module.startswith("pp_agreement"), name


def test_baseline_interrupted_in_an_exchange_takes_part_in_no_other():
    """Out of step is out: another exchange would mix two of them."""
    domain = Domain(4, (0, 1))
    calls = []

    class Interrupted:
        name = "interrupted"

        def exchange(self, contribution):
            calls.append(contribution)
            raise KeyboardInterrupt

        def close(self, clean):
            calls.append(clean)

    agreement = AllgatherAgreement(domain, 0, Interrupted())
    agreement.open()
    with pytest.raises(KeyboardInterrupt):
        agreement.poll()
    assert [type(e) for e in agreement.poll()] == [Fault] and agreement.poll() == ()
    assert agreement.close() is False and len(calls) == 2
