"""Members that are groups of ranks: to every rank one domain of all of them."""

from __future__ import annotations

import collections
import threading

import pytest

from pp_agreement import (
    Agreement,
    AgreementConfig,
    Committed,
    ConfigurationError,
    Domain,
    Fault,
    FaultCode,
    GroupAgreement,
    Groups,
    InProcessNetwork,
    Lanes,
    LocalProtocolError,
    Outcome,
    WouldBlock,
    verify,
)
from pp_agreement.testing import simulate_groups

TWO = Groups(1, ((0, 1), (2, 3)))
BLOCK = 40


def agreements_of(groups, config=None, clock=lambda: 0.0):
    world = Domain(99, groups.ranks)
    network = InProcessNetwork(world, 8)
    found = []
    for rank in groups.ranks:
        lanes = Lanes(network.transport(rank), world, rank, groups.domains(rank))
        found.append(GroupAgreement(groups, rank, lanes.transport, config, clock))
        found[-1].open()
    return found, network


def settle(agreements, times=10):
    events = collections.defaultdict(list)
    for _ in range(times):
        for agreement in agreements:
            if not agreement._ended:
                events[agreement.rank] += agreement.poll()
    return events


@pytest.mark.parametrize("block", range(2))
def test_seeds(block):
    """Whole groups through every fault, by the invariants of one domain of all ranks; every seed converges."""
    faults = collections.Counter()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        faults[simulate_groups(seed).fault] += 1
    assert set(faults) >= {"clean", "malformed", "crash", "death", "interrupt"}


def test_groups_are_checked_by_name():
    for field, arguments, options in (
        ("groups", (1, 7), {}),
        ("groups", (1, (7,)), {}),
        ("groups", (1, ()), {}),
        ("groups", (1, ((),)), {}),
        ("groups", (1, ((0, "1"),)), {}),
        ("groups", (1, ((0, 1), (1, 2))), {}),
        ("groups", (1, tuple((i,) for i in range(65))), {}),
        ("domain_id", (2**32 - 2, ((0,), (1,))), {}),
        ("domain_id", ("1", ((0,), (1,))), {}),
        ("scheduling_rank", (1, ((0, 1), (2, 3))), {"scheduling_rank": 1}),
        ("coordinator_rank", (1, ((0, 1), (2, 3))), {"coordinator_rank": 3}),
        ("epoch", (1, ((0, 1), (2, 3))), {"epoch": -1}),
    ):
        with pytest.raises(ConfigurationError) as refused:
            Groups(*arguments, **options)
        assert refused.value.field == field, arguments
    with pytest.raises(ConfigurationError, match="7 is not a member"):
        TWO.inner(7)
    with pytest.raises(ConfigurationError, match="is not a Groups"):
        GroupAgreement(((0, 1),), 0, lambda _domain: None)


def test_domains_and_fingerprint():
    """Each group has a domain of its own beside that of the leaders; any difference is another fingerprint."""
    groups = Groups(10, [[3, 1], [0, 2]], epoch=4)
    assert (groups.leaders, groups.ranks, groups.scheduling_rank, groups.coordinator_rank) == (
        (3, 0),
        (3, 1, 0, 2),
        3,
        0,
    )
    assert groups.outer == Domain(10, (3, 0), epoch=4)
    assert [d.domain_id for d in groups.domains(0)] == [12, 10] and [d.domain_id for d in groups.domains(1)] == [11]
    assert groups.inner(2).coordinator_rank == 0 and groups.inner(2).epoch == 4
    others = [
        Groups(11, groups.groups, epoch=4), Groups(10, ((3, 1), (2, 0)), epoch=4), Groups(10, groups.groups),
        Groups(10, groups.groups, scheduling_rank=0, epoch=4), Groups(10, ((3, 1, 0), (2,)), epoch=4),
    ]  # fmt: skip
    assert len({g.fingerprint for g in (groups, *others)}) == 6


def test_only_the_scheduling_rank_schedules():
    """A leader of another group is a rank like any other: it neither admits first, nor revokes, nor is released to."""
    agreements, _network = agreements_of(TWO, AgreementConfig(credits=1))
    assert [a.is_scheduler for a in agreements] == [True, False, False, False]
    assert [a.is_coordinator for a in agreements] == [False, False, True, False]
    key = agreements[0].admit(7, 1)
    with pytest.raises(WouldBlock):
        agreements[0].admit(8, 2)
    with pytest.raises(LocalProtocolError, match="only the scheduling rank"):
        agreements[2].revoke(key)
    assert agreements[3].admit(7, 1) == agreements[2].admit(7, 1) == key  # in any order
    agreements[2].publish_ready(key)
    assert agreements[2].admit(7, 1) == key


def test_a_refused_admission_changes_neither_of_a_leader_s_two_domains():
    agreements, _network = agreements_of(TWO)
    leader = agreements[0]
    for request_id, incarnation, ready in ((7, 2, True), (-1, 1, True), (7, 0, True), (7, 1, 1), ("7", 1, True)):
        with pytest.raises(LocalProtocolError):
            leader.admit(request_id, incarnation, ready)
    assert leader.next_incarnation == 1 and leader._voice.next_incarnation == 1
    leader.admit(7, 1)
    assert leader._voice.next_incarnation == 2


def test_a_drain_and_close_of_every_rank():
    """Drained on every rank with equal evidence as of one domain; closed alike; nothing can be called afterwards."""
    agreements, _network = agreements_of(Groups(1, ((4, 1), (2, 3, 0), (5,)), coordinator_rank=2))
    for agreement in agreements:
        agreement.vote_terminal(agreement.admit(7, 1, ready=False), Outcome(agreement.rank % 3))
    agreements[0].start_drain(1)
    settle(agreements)
    assert all(a.drain_state().drained and a.drain_state().committed == 1 for a in agreements)
    records = [a.evidence() for a in agreements]
    assert verify(records) == ()
    assert verify(records[:-1]) != ()
    assert agreements[0].statistics().bytes_sent > 0
    clean = {}
    threads = [
        threading.Thread(target=lambda a=a: clean.__setitem__(a.rank, a.close(20)), daemon=True) for a in agreements
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert clean == dict.fromkeys(range(6), True)
    for agreement in agreements:
        assert agreement.close(0) is True
        with pytest.raises(LocalProtocolError, match="after close"):
            agreement.admit(8, 2)


def test_a_close_that_is_given_up_is_told_to_every_group():
    """A leader that leaves while others still close: nobody takes it for a clean end."""
    agreements, _network = agreements_of(TWO)
    agreements[0].start_drain(0)
    settle(agreements)
    assert all(a.drain_state().drained for a in agreements)
    for agreement in agreements:
        assert agreement.close(0.0) is False
    agreements[2].abandon()
    settle(agreements)
    assert [a.close(0.0) for a in agreements] == [False] * 4
    assert all(a.stopped is not None and a.stopped.code is FaultCode.HOST for a in agreements)


def test_a_group_does_not_close_before_the_leaders():
    """Where any rank has closed cleanly every leader has closed: while one does not, no other group ends."""
    agreements, _network = agreements_of(TWO)
    agreements[0].start_drain(0)
    settle(agreements)
    for _ in range(20):
        assert [a.close(0.0) for a in agreements[:2]] == [False, False]
        settle(agreements, 1)
    left = list(agreements)
    for _ in range(20):
        left = [a for a in left if not a.close(0.0)]
        settle(left, 1)
    assert left == []


def test_a_failure_of_any_rank_reaches_every_group():
    for culprit in range(4):
        agreements, _network = agreements_of(TWO)
        for agreement in agreements:
            agreement.admit(7, 1)
        agreements[culprit].fail("out of memory")
        events = settle(agreements)
        for agreement in agreements:
            (fault,) = [e for e in events[agreement.rank] if isinstance(e, Fault)]
            assert fault.code is FaultCode.HOST and "out of memory" in fault.detail
        assert [a.close(0.0) for a in agreements] == [False] * 4


def test_evidence_about_a_rank_of_another_group_stops_this_one():
    """A launcher may tell any rank about any other; a rank of no group is the caller's mistake."""
    agreements, _network = agreements_of(TWO)
    with pytest.raises(ConfigurationError, match="9 is not a member"):
        agreements[1].peer_died(9, "SIGKILL")
    agreements[1].peer_died(3, "SIGKILL")
    settle(agreements)
    assert all(a.stopped.code is FaultCode.DEATH and "rank 3 died: SIGKILL" in a.stopped.detail for a in agreements)


def test_an_interrupt_while_a_leader_joins_stops_the_domain():
    """What the voice was told may have fallen only in part: nothing is decided after it, on any rank."""
    agreements, _network = agreements_of(TWO)
    keys = [a.admit(7, 1) for a in agreements]
    bridge = agreements[0]._bridge
    honest = bridge.hear

    def broken(event):
        bridge.hear = honest
        raise KeyboardInterrupt

    bridge.hear = broken
    for agreement, key in zip(agreements, keys):
        agreement.publish_ready(key)
    with pytest.raises(KeyboardInterrupt):
        settle(agreements)
    settle(agreements)
    assert all(a.stopped.code is FaultCode.INTERNAL for a in agreements)


def test_a_handler_may_call_while_a_leader_s_voice_is_in_a_step():
    """A signal handler's call between two lines of the voice's step is taken, and rises when the step is over."""
    agreements, _network = agreements_of(TWO)
    leader = agreements[0]
    for agreement in agreements:
        key = agreement.admit(7, 1, ready=False)
        if agreement is not leader:
            agreement.vote_terminal(key, Outcome.COMPLETED)
    settle(agreements)
    silence = leader._voice._core.silence
    honest, calls = silence.news_of, []

    def interrupted(*arguments):
        silence.news_of = honest
        calls.append(leader.vote_terminal(key, Outcome.FAILED))
        honest(*arguments)

    silence.news_of = interrupted
    agreements[2]._voice.busy(0.0)  # a frame for the leader's voice, about nothing else
    events = settle(agreements)
    assert calls == [True] and all(a.stopped is None for a in agreements)
    for agreement in agreements:
        (committed,) = [e for e in events[agreement.rank] if isinstance(e, Committed)]
        assert committed.outcome is Outcome.FAILED


def test_an_interrupt_in_a_voice_s_poll_stops_the_group_at_once():
    agreements, _network = agreements_of(TWO)
    leader = agreements[0]

    def broken(_frames_max):
        raise KeyboardInterrupt

    honest, leader._voice._transport.receive = leader._voice._transport.receive, broken
    with pytest.raises(KeyboardInterrupt):
        leader.poll()
    assert leader.stopped.code is FaultCode.INTERNAL
    leader._voice._transport.receive = honest
    settle(agreements)
    assert all(a.stopped.code is FaultCode.INTERNAL for a in agreements)


def test_a_group_of_one_is_an_ordinary_member():
    """Groups of one rank each decide what a flat domain decides, in the same order."""
    groups = Groups(1, ((0,), (1,), (2,)))
    grouped, _network = agreements_of(groups)
    flat_network = InProcessNetwork(Domain(1, (0, 1, 2)))
    flat = [Agreement(Domain(1, (0, 1, 2)), r, flat_network.transport(r), clock=lambda: 0.0) for r in range(3)]
    for agreement in flat:
        agreement.open()
    digests = []
    for agreements in (grouped, flat):
        for agreement in agreements:
            for number in (1, 2, 3):
                key = agreement.admit(number, number, ready=False)
                agreement.vote_terminal(key, Outcome((agreement.rank + number) % 3))
        agreements[0].start_drain(3)
        settle(agreements)
        digests.append({a.drain_state().digest for a in agreements})
    assert digests[0] == digests[1] and len(digests[0]) == 1
