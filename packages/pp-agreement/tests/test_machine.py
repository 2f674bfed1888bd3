"""The core, step by step: exact effects, and unchanged state on refusal."""

from __future__ import annotations

import struct
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp_agreement import (
    AgreementConfig,
    AgreementCore,
    Committed,
    ConfigurationError,
    Disposition,
    Domain,
    DomainStopped,
    Fault,
    FaultCode,
    InvariantViolation,
    Key,
    LocalProtocolError,
    Outcome,
    Reason,
    WouldBlock,
)
from pp_agreement import _events as ev
from pp_agreement._events import Answer, Frame, SendFrame
from pp_agreement._state import Kind
from pp_agreement.testing import mutate

DOMAIN = Domain(1, (0, 1))
CONFIG = AgreementConfig(credits=4)


def core(rank=1, config=CONFIG, domain=DOMAIN):
    return AgreementCore(domain, rank, config)


def frame(core_, source, *records):
    return ev.FrameReceived(source, Frame(core_.streams.expected[source], 0, records))


def test_a_commit_is_one_step():
    """The decision, its record for the other rank and the local event come from the step of the last vote."""
    coordinator = core()
    coordinator.step(ev.RequestAdmitted(5, 1, False), 0.0)
    vote = ev.TerminalVoted(Key(5, 1), Outcome.COMPLETED, Disposition.RELEASE, Reason.NONE)
    assert coordinator.step(vote, 0.0) == (Answer(True),)
    effects = coordinator.step(frame(coordinator, 0, (int(Kind.TERMINAL), 1, 0, 0, 0, 5, 1)), 0.0)
    assert effects == (Committed(Key(5, 1), Outcome.FAILED, Disposition.RELEASE, (Reason.NONE,) * 2),)
    assert coordinator.streams.queues[0] == [(int(Kind.COMMIT), 1, 0, 0, 0, 5, 1)]
    (sent,) = coordinator.step(ev.SlotFreed(0, 0), 0.0)
    assert sent == SendFrame(0, Frame(1, 0, ((int(Kind.COMMIT), 1, 0, 0, 0, 5, 1),)))
    assert not coordinator.rounds.open and coordinator.step(ev.SlotFreed(0, 0), 0.0) == ()


def test_what_a_frame_decides_ahead_of_its_violation_is_told():
    """The other ranks will hear the decision, so this one's host does as well; the first diagnosis is kept."""
    coordinator = core()
    coordinator.step(ev.RequestAdmitted(5, 1, False), 0.0)
    coordinator.step(ev.TerminalVoted(Key(5, 1), Outcome.COMPLETED, Disposition.RELEASE, Reason.NONE), 0.0)
    vote, forged = (int(Kind.TERMINAL), 1, 0, 0, 0, 5, 1), (int(Kind.PREPARE), 0, 0, 0, 0, 5, 1)
    committed, fault = coordinator.step(frame(coordinator, 0, vote, forged), 0.0)
    assert committed == Committed(Key(5, 1), Outcome.FAILED, Disposition.RELEASE, (Reason.NONE,) * 2)
    assert fault.code is FaultCode.PROTOCOL and "may not send kind 32" in fault.detail
    (sent,) = coordinator.step(ev.SlotFreed(0, 0), 0.0)
    assert [record[0] for record in sent.frame.records] == [Kind.COMMIT, Kind.FAIL_STOP]


def test_the_digest_is_of_all_final_decisions():
    """However many are digested together, and whoever looks meanwhile: a signal handler, for instance, between two lines."""
    one = core(0, AgreementConfig(credits=4), Domain(1, (0,)))
    member, finals, looks = one.member, [], []
    honest = member._finals

    class Watched:
        def __getattr__(self, name):
            return getattr(honest, name)

        def update(self, data):
            honest.update(data)
            looks.append(None)
            if len(looks) == 1:
                looks.append(member.digest)

    member._finals = Watched()
    for number in range(1, 501):
        one.step(ev.RequestAdmitted(number, number, False), 0.0)
        vote = ev.TerminalVoted(Key(number, number), Outcome(number % 3), Disposition.RELEASE, Reason.NONE)
        one.step(vote, 0.0)
        finals.append(struct.pack("<QQIBB", number, number, 0, number % 3, 0))
    assert member.digest == member.digest == blake2b(b"".join(finals), digest_size=16).digest()
    assert looks


def test_unsent_vote_is_replaced_by_the_withdrawal():
    """Never two unsent intents of a round."""
    follower = core(0)
    follower.step(ev.RequestAdmitted(5, 1, True), 0.0)
    follower.step(ev.ReadyPublished(Key(5, 1)), 0.0)
    follower.step(ev.WithdrawRequested(Key(5, 1), Reason.CANCELLED), 0.0)
    assert [r[0] for r in follower.streams.intents.values()] == [Kind.WITHDRAW]


@pytest.mark.parametrize(
    "call",
    [
        ev.RequestAdmitted(6, 3, True),
        ev.RequestAdmitted(-1, 2, True),
        ev.RequestAdmitted(True, 2, True),
        ev.ReadyPublished(Key(5, 9)),
        ev.ReadyPublished(Key(6, 1)),
        ev.ReadyPublished(Key(5, 1, 2)),
        ev.PrepareAcknowledged(Key(5, 1)),
        ev.AbortAcknowledged(Key(5, 1)),
        ev.ScheduleActivated((Key(5, 1),)),
        ev.TerminalVoted(Key(5, 1), Outcome.COMPLETED, Disposition.QUARANTINE, Reason.NONE),
        ev.TerminalVoted(Key(5, 1), Outcome.FAILED, Disposition.QUARANTINE, Reason.NONE),
        ev.DoubtRaised(Key(5, 1), Reason.DOUBT),
        ev.BusyDeclared(1e6),
        ev.DrainRequested(0),
        ev.CloseRequested(),
    ],
    ids=repr,
)
def test_a_refused_call_changes_nothing(call):
    """A local contract violation raises with the state, and leaves everything as it was."""
    for rank in (0, 1):
        one = core(rank)
        one.step(ev.RequestAdmitted(5, 1, True), 0.0)
        before = one.fingerprint()
        with pytest.raises(LocalProtocolError):
            one.step(call, 1.0)
        assert one.fingerprint() == before
        one.validate()


def test_refusals_tell_the_story():
    one = core()
    one.step(ev.RequestAdmitted(5, 1, True), 0.0)
    one.step(ev.ReadyPublished(Key(5, 1)), 1.0)
    with pytest.raises(LocalProtocolError) as caught:
        one.step(ev.TerminalVoted(Key(5, 1), Outcome.FAILED, Disposition.RELEASE, Reason.NONE), 2.0)
    assert caught.value.rank == 1 and caught.value.key == Key(5, 1) and "VOTED" in caught.value.state
    assert [line.split(" ", 1)[1] for line in caught.value.story] == [
        "admitted (rank 1)",
        "vote (rank 1)",
    ]


def test_credits_are_spent_at_admission():
    authority = core(0)
    for number in range(1, 5):
        authority.step(ev.RequestAdmitted(number, number, False), 0.0)
    with pytest.raises(WouldBlock):
        authority.step(ev.RequestAdmitted(5, 5, False), 0.0)
    assert authority.heard == 4


def test_silence_needs_an_empty_ring():
    """a peer whose frames wait to be read is not silent, however long."""
    one = core()
    for second in range(600):
        assert one.step(ev.SweepCompleted(0), float(second)) == ()
    events = [e for second in range(600, 1200) for e in one.step(ev.SweepCompleted(1), float(second))]
    assert [type(e) for e in events] == [ev.SilenceVerdict]


def test_first_diagnosis_stays():
    """nothing is decided after a fault, calls are refused with the first one."""
    one = core()
    one.step(ev.RequestAdmitted(5, 1, False), 0.0)
    (fault,) = one.step(ev.FrameRejected(0, "noise"), 0.0)
    assert isinstance(fault, Fault) and fault.code is FaultCode.BAD_FRAME
    assert one.step(frame(one, 0, (int(Kind.TERMINAL), 0, 0, 0, 0, 5, 1)), 0.0) == ()
    assert one.step(ev.PeerDied(0, "later"), 0.0) == ()
    with pytest.raises(DomainStopped) as caught:
        one.step(ev.ReadyPublished(Key(5, 1)), 0.0)
    assert caught.value.fault is fault is one.fault


def test_nothing_is_drained_after_a_fault():
    """the drain's last report is this rank's own, and the fault came before it, in the same frame."""
    one = core()
    drain, report = (int(Kind.DRAIN), 0, 0, 0, 0, 0, 0), (int(Kind.DRAIN_REPORT), 0, 0, 0, 0, 0, 0)
    effects = one.step(frame(one, 0, drain, report, (13, 0, 0, 0, 0, 0, 0)), 0.0)
    assert [type(e) for e in effects] == [ev.DrainStarted, Fault]
    (sent,) = one.step(ev.SlotFreed(0, 0), 0.0)
    assert [r[0] for r in sent.frame.records] == [Kind.FAIL_STOP]
    assert not one.drained and not one.ending.reported and one.step(ev.SlotFreed(0, 0), 1.0) == ()


def test_a_repetition_is_equal_byte_for_byte():
    """The number and the checksum of a frame can be those of another one: only the same bytes are the same frame."""
    one = core()
    one.step(ev.RequestAdmitted(5, 1, False), 0.0)
    vote = (int(Kind.TERMINAL), 0, 0, 0, 0, 5, 1)
    assert one.step(ev.FrameReceived(0, Frame(1, 0, (vote,), 9, b"what came")), 0.0) == ()
    assert one.step(ev.FrameReceived(0, Frame(1, 0, (vote,), 9, b"what came")), 0.0) == ()
    assert one.fault is None and one.statistics().duplicates == 1
    (fault,) = one.step(ev.FrameReceived(0, Frame(1, 0, (vote,), 9, b"what else")), 0.0)
    assert fault.code is FaultCode.SEQUENCE and "came again with another content" in fault.detail


def test_story_is_bounded_and_keeps_first_and_last():
    one = core(config=AgreementConfig(story_entries_max=6, credits=4))
    one.step(ev.RequestAdmitted(5, 1, True), 0.0)
    for attempt in range(6):
        key = Key(5, 1, attempt)
        one.step(ev.WithdrawRequested(key, Reason.NOT_READY), 1.0 + attempt)
        one.step(ev.AbortAcknowledged(key), 1.0 + attempt)
        one.step(frame(one, 0, (int(Kind.ABORT_ACK), 0, 0, 0, attempt, 5, 1)), 1.0 + attempt)
    story = one.story(1)
    assert len(story) == 6 and "admitted" in story[0] and "FINALIZE" in story[-1]


def test_a_copy_is_independent():
    one = core()
    one.step(ev.RequestAdmitted(5, 1, True), 0.0)
    twin = one.copy()
    assert twin.fingerprint() == one.fingerprint()
    twin.step(ev.ReadyPublished(Key(5, 1)), 0.0)
    assert twin.fingerprint() != one.fingerprint()
    assert one.rounds.open[1].tally.votes == 0


@pytest.mark.parametrize("field", ["votes", "acks", "activated", "terminal_mask", "held", "incarnation"])
def test_validate_notices_damage(field):
    """``validate()`` must be able to fail."""
    one = core()
    one.step(ev.RequestAdmitted(5, 1, True), 0.0)
    damage = {"votes": 0, "acks": 1, "activated": 2, "terminal_mask": 2, "held": [], "incarnation": 3}
    round_ = one.rounds.open[1]
    setattr(round_ if hasattr(round_, field) else round_.tally, field, damage[field])
    if field == "votes":
        round_.tally.phase = type(round_.tally.phase).GRANTING
    with pytest.raises(InvariantViolation):
        one.validate()


@pytest.mark.parametrize(("name", "value"), [
    ("credits", 0), ("credits", True), ("frame_bytes_max", 100), ("heartbeat_s", 0), ("silence_s", 0.5), ("startup_s", 1),
    ("round_timeout_s", -1), ("busy_max_s", "x"), ("frames_per_poll_max", 0), ("story_entries_max", -1),
])  # fmt: skip
def test_configuration_is_checked(name, value):
    with pytest.raises(ConfigurationError) as caught:
        AgreementConfig(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(("arguments", "field"), [
    ({"domain_id": -1, "ranks": (0,)}, "domain_id"), ({"domain_id": 0, "ranks": ()}, "ranks"),
    ({"domain_id": 0, "ranks": (1, 1)}, "ranks"), ({"domain_id": 0, "ranks": tuple(range(65))}, "ranks"),
    ({"domain_id": 0, "ranks": (0, 1), "scheduling_rank": 2}, "scheduling_rank"),
    ({"domain_id": 0, "ranks": (0, 1), "coordinator_rank": 5}, "coordinator_rank"),
    ({"domain_id": 0, "ranks": (0, -1)}, "ranks"),
])  # fmt: skip
def test_domain_is_checked(arguments, field):
    with pytest.raises(ConfigurationError) as caught:
        Domain(**arguments)
    assert caught.value.field == field


def test_queues_are_bounded_whatever_the_destination_does():
    """A destination that takes nothing: what waits for it stays below the space that admission reserves."""
    config = AgreementConfig(credits=8)
    domain = Domain(1, (0, 1, 2))
    coordinator = AgreementCore(domain, 2, config)
    for number in range(1, 201):
        try:
            coordinator.step(ev.RequestAdmitted(number, number, False), 0.0)
        except LocalProtocolError:
            break
        for source in (0, 1):
            if number <= 8 or source == 0:
                coordinator.step(frame(coordinator, source, (int(Kind.TERMINAL), 1, 0, 1, 0, number, number)), 0.0)
        coordinator.step(ev.TerminalVoted(Key(number, number), Outcome.FAILED, Disposition.RELEASE, Reason.HOST), 0.0)
        coordinator.validate()
    assert len(coordinator.streams.queues[1]) <= config.queue_records_max


records = st.tuples(
    st.sampled_from([int(k) for k in Kind] + [0, 99, 200, 255]), st.integers(0, 70), st.integers(0, 70), st.integers(0, 20),
    st.integers(0, 3), st.integers(0, 6), st.integers(0, 8),
)  # fmt: skip


@given(st.integers(0, 2), st.lists(records, max_size=40))
@settings(max_examples=400, deadline=None)
def test_any_records_fail_closed(rank, sent):
    """Whatever a peer says, in any order: no exception, no broken invariant, and after a fault nothing more."""
    domain = Domain(1, (0, 1, 2))
    one = AgreementCore(domain, rank, CONFIG)
    for number in range(1, 4):
        one.step(ev.RequestAdmitted(number, number, number != 2), 0.0)
    one.step(ev.ReadyPublished(Key(1, 1)), 0.0)
    one.step(ev.TerminalVoted(Key(2, 2), Outcome.COMPLETED, Disposition.RELEASE, Reason.NONE), 0.0)
    for record in sent:
        stopped = one.fault
        effects = one.step(frame(one, one.peers[0], record), 0.0)
        if stopped is not None:
            assert effects == () and one.fault is stopped
        one.validate()


@given(st.binary(max_size=200), st.randoms(use_true_random=False))
def test_mutate_really_changes_frames(data, draw):
    assert isinstance(mutate(draw, data), bytes)


def test_a_round_without_readiness_has_nothing_of_it():
    """What all such rounds share, and what they lack, is set by none: a rule that forgot to ask would say so at once."""
    coordinator = core()
    for request_id, ready in ((5, False), (6, True)):
        coordinator.step(ev.RequestAdmitted(request_id, request_id - 4, ready), 0.0)
    plain, other = coordinator.rounds.open[1], coordinator.rounds.open[2]
    for record in (plain.course, plain.tally):
        field = "told_reason" if record is plain.course else "votes"
        assert getattr(record, field) == 0
        with pytest.raises(AttributeError):
            setattr(record, field, 1)
        twin = getattr(plain.copy(), "course" if record is plain.course else "tally")
        assert twin.fingerprint() == record.fingerprint()
    other.course.told_reason = other.tally.votes = 1
    assert plain.course.told_reason == plain.tally.votes == 0
