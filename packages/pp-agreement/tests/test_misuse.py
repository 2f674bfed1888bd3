"""What hosts get wrong: types, ranges, moments, threads, signal handlers. Refused, or stopped; never half done."""

from __future__ import annotations

import gc
import signal
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp_agreement import (
    Aborted,
    Agreement,
    AgreementConfig,
    Committed,
    ConcurrentCallError,
    ConfigurationError,
    Disposition,
    Domain,
    DomainStopped,
    Fault,
    FaultCode,
    InProcessNetwork,
    Key,
    LocalProtocolError,
    Outcome,
    Prepared,
    Reason,
    TransportError,
    WouldBlock,
)
from pp_agreement._events import CloseRequested
from pp_agreement._state import Kind
from pp_agreement._transport import Sweep

DOMAIN = Domain(1, (0, 1))


def pair(domain=DOMAIN, clock=None, **options):
    network = InProcessNetwork(domain)
    more = {} if clock is None else {"clock": clock}
    both = [Agreement(domain, r, network.transport(r), AgreementConfig(**options), **more) for r in domain.ranks]
    for agreement in both:
        agreement.open()
    return network, both


def never(_s):
    raise AssertionError("a wait until nonsense began")


KEY = Key(7, 1)
BAD_KEYS = [
    None, 7, "7", (7, 1, 0), ..., Key(7, "1"), Key(7, 1.0), Key(7, [1]), Key(7, 1, "0"), Key(7, 1, -1), Key(7, True),
]  # fmt: skip
BAD_REASONS = [None, 3, 99, -1, 2**70, "CANCELLED", Outcome.FAILED]
CALLS = {
    **{f"publish {k!r}": lambda a, k=k: a.publish_ready(k) for k in BAD_KEYS},
    **{f"withdraw {k!r}": lambda a, k=k: a.withdraw(k) for k in BAD_KEYS},
    **{f"ack {k!r}": lambda a, k=k: a.acknowledge_prepare(k) for k in BAD_KEYS},
    **{f"abort ack {k!r}": lambda a, k=k: a.acknowledge_abort(k) for k in BAD_KEYS},
    **{f"activate {k!r}": lambda a, k=k: a.activate([k]) for k in BAD_KEYS},
    **{f"revoke {k!r}": lambda a, k=k: a.revoke(k) for k in BAD_KEYS},
    **{f"recall {k!r}": lambda a, k=k: a.recall(k) for k in BAD_KEYS},
    **{f"vote {k!r}": lambda a, k=k: a.vote_terminal(k, Outcome.FAILED) for k in BAD_KEYS},
    **{f"doubt {k!r}": lambda a, k=k: a.doubt(k) for k in BAD_KEYS},
    **{f"withdraw for {r!r}": lambda a, r=r: a.withdraw(KEY, r) for r in BAD_REASONS},
    **{f"revoke for {r!r}": lambda a, r=r: a.revoke(KEY, r) for r in BAD_REASONS},
    **{f"recall for {r!r}": lambda a, r=r: a.recall(KEY, r) for r in BAD_REASONS},
    **{f"doubt for {r!r}": lambda a, r=r: a.doubt(KEY, r) for r in BAD_REASONS},
    **{f"vote for {r!r}": lambda a, r=r: a.vote_terminal(KEY, Outcome.FAILED, reason=r) for r in BAD_REASONS},
    **{f"vote {o!r}": lambda a, o=o: a.vote_terminal(KEY, o) for o in (None, 1, 7, -1, "FAILED", True, Reason.HOST)},
    **{f"disposition {d!r}": lambda a, d=d: a.vote_terminal(KEY, Outcome.FAILED, d) for d in (None, 1, 5, "x", True)},
    **{f"activate all of {k!r}": lambda a, k=k: a.activate(k) for k in (None, 7, KEY)},
    **{f"admit {i!r}": lambda a, i=i: a.admit(i, 2) for i in (None, "8", 8.0, True, -1, 2**63, [8])},
    **{f"admit number {n!r}": lambda a, n=n: a.admit(8, n) for n in (None, "2", 2.0, True, 0, -1, 3, 2**70, [2])},
    **{f"admit ready={r!r}": lambda a, r=r: a.admit(8, 2, r) for r in (None, 0, 1, "yes")},
    **{f"busy {s!r}": lambda a, s=s: a.busy(s) for s in (None, "1", True, -1, -0.1, float("nan"), float("inf"), 1e12)},
    **{f"drain at {n!r}": lambda a, n=n: a.start_drain(n) for n in (None, "1", 1.0, True, -1, 0)},
    **{f"fail with {c!r}": lambda a, c=c: a.fail("x", c) for c in (None, 99, "HOST", Reason.HOST)},
    **{f"drain for {s!r}": lambda a, s=s: a.drain(s, wait=never) for s in (None, "1", float("nan"), True)},
    **{f"close within {s!r}": lambda a, s=s: a.close(s, wait=never) for s in (None, "1", float("nan"), True)},
    **{f"state of {k!r}": lambda a, k=k: a.state(k) for k in BAD_KEYS[:6]},
    **{f"story of {k!r}": lambda a, k=k: a.story(k) for k in BAD_KEYS[:6]},
    "open twice": lambda a: a.open(),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_changes_nothing(name):
    """found here, by name, and not by the encoder when the record has left its queue already."""
    _network, both = pair()
    for agreement in both:
        agreement.admit(7, 1)
        before = agreement._core.fingerprint()
        with pytest.raises(LocalProtocolError):
            CALLS[name](agreement)
        assert agreement._core.fingerprint() == before
        assert agreement.stopped is None
        agreement.validate()
    for agreement in both:  # and the agreement is still usable
        agreement.withdraw(KEY)
    events = [e for _ in range(4) for a in both for e in a.poll()]
    assert sum(isinstance(e, Aborted) for e in events) == 2


@pytest.mark.parametrize("ranks", [None, 5, "01", (0, "1"), (0, True), [0, 0.0]])
def test_a_domain_of_nonsense_is_refused(ranks):
    with pytest.raises(ConfigurationError, match="ranks"):
        Domain(1, ranks)


@pytest.mark.parametrize(
    ("domain", "rank", "config", "field"),
    [(None, 0, None, "domain"), ((0, 1), 0, None, "domain"), (DOMAIN, 7, None, "rank"), (DOMAIN, "0", None, "rank"),
     (DOMAIN, 0, {}, "config"), (DOMAIN, 0, 0, "config")],
)  # fmt: skip
def test_an_agreement_of_nonsense_is_refused(domain, rank, config, field):
    with pytest.raises(ConfigurationError) as caught:
        Agreement(domain, rank, InProcessNetwork(DOMAIN).transport(0), config)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["scheduling_rank", "coordinator_rank"])
def test_roles_are_ranks(field):
    with pytest.raises(ConfigurationError, match=field):
        Domain(1, (0, 1), **{field: True})


@pytest.mark.parametrize("window", [0, -1, 2.5, "4", True, None])
def test_a_window_is_a_count(window):
    with pytest.raises(ConfigurationError, match="window"):
        InProcessNetwork(DOMAIN, window)


def test_the_longest_busy_time_fits_its_field():
    """It travels as 32 bits of milliseconds: the bound is the configuration's, not the encoder's."""
    with pytest.raises(ConfigurationError, match="busy_max_s"):
        AgreementConfig(busy_max_s=4.3e6)
    _network, (zero, one) = pair(busy_max_s=4e6)
    zero.poll()
    assert zero.busy(4e6)
    one.poll()
    assert one._core.silence.busy_s[0] == pytest.approx(4e6)
    assert zero.stopped is None and one.stopped is None


def test_every_call_after_close_is_refused():
    _network, (zero, _one) = pair()
    zero.admit(7, 1)
    assert zero.close() is False
    calls = (
        lambda: zero.admit(8, 2), lambda: zero.publish_ready(KEY), lambda: zero.withdraw(KEY), lambda: zero.revoke(KEY),
        lambda: zero.acknowledge_prepare(KEY), lambda: zero.acknowledge_abort(KEY), lambda: zero.activate([KEY]),
        lambda: zero.recall(KEY), lambda: zero.vote_terminal(KEY, Outcome.FAILED), lambda: zero.doubt(KEY),
        lambda: zero.start_drain(1), lambda: zero.busy(1.0), zero.poll, zero.open, lambda: zero.drain(1.0),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(LocalProtocolError):
            call()
    assert zero.close() is False and zero.evidence()["admitted"] == 1 and not zero.drain_state().drained


def test_a_second_close_says_nothing_again():
    """47: only one CLOSE is ever queued."""
    _network, (zero, one) = pair()
    zero.start_drain(0)
    for _ in range(4):
        zero.poll(), one.poll()
    ticks = iter(range(10**6))
    zero._clock = lambda: next(ticks) / 100
    assert zero.close(2.0, wait=lambda _s: None) is False  # the other never closed
    assert zero.close(2.0) is False
    assert zero._core.streams.sent_kinds[Kind.CLOSE] == 1


def test_events_kept_while_closing_can_still_be_had():
    """what a drain without a handler kept is not lost with the transport."""
    _network, (zero, one) = pair()
    for agreement in (zero, one):
        agreement.vote_terminal(agreement.admit(7, 1, ready=False), Outcome.COMPLETED)
    zero.start_drain(1)
    assert zero.drain(5.0, wait=lambda _s: one.poll()).drained
    one.poll()
    one._core.step(CloseRequested(), 0.0)
    assert zero.close(5.0, wait=lambda _s: one.poll())
    assert [type(e).__name__ for e in zero.poll()] == ["Committed", "DrainStarted", "Drained"]
    with pytest.raises(LocalProtocolError):
        zero.poll()


def test_what_a_drain_kept_from_before_a_fault_does_not_bind():
    """PREPARE and ABORT that a drain has buffered are suppressed when the fault comes before they are handed out."""
    _network, (zero, one) = pair()
    keys = [a.admit(7, 1) for a in (zero, one)]
    done = [a.admit(8, 2, ready=False) for a in (zero, one)]
    for agreement, key, other in zip((zero, one), keys, done):
        agreement.publish_ready(key)
        agreement.vote_terminal(other, Outcome.FAILED)
    steps = iter([one.poll, one.poll, lambda: one.fail("gone")])
    report = zero.drain(5.0, wait=lambda _s: next(steps, one.poll)())
    assert report.fault.code is FaultCode.HOST
    assert [type(e) for e in zero.poll()] == [Committed, Fault]


def test_a_handler_may_call_anything_but_is_answered_in_order():
    """Re-entrancy from an event handler: votes, polls and even close() from inside ``drain``."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1) for a in (zero, one))
    for agreement in (zero, one):
        agreement.publish_ready(key)
    seen = []

    def handler(events):
        for event in events:
            seen.append(type(event).__name__)
            if isinstance(event, Prepared):
                zero.acknowledge_prepare(key)
                seen.extend(type(e).__name__ for e in zero.poll())  # nested in the drain, not in a poll
            elif isinstance(event, Aborted):
                zero.acknowledge_abort(key)
                zero.close(0.0)

    def other(_s):
        for event in one.poll():
            if isinstance(event, Prepared):
                one.acknowledge_prepare(key)
            elif isinstance(event, Aborted):
                one.acknowledge_abort(key)

    def stop_soon(_s):
        other(_s)
        if "Released" in seen and zero.drain_state().last_incarnation is None:
            zero.start_drain(1)

    with pytest.raises(LocalProtocolError, match="after close"):
        zero.drain(5.0, wait=stop_soon, on_events=handler)
    assert seen[:2] == ["Prepared", "Released"] and seen[-1] == "Aborted"


class Calling:
    """A transport that calls back into its agreement."""

    def __init__(self, inner, where, call):
        self.inner, self.where, self.call = inner, where, call

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if name != self.where:
            return found

        def called(*arguments):
            self.call()
            return found(*arguments)

        return called


@pytest.mark.parametrize("where", ["receive", "send", "outstanding", "can_send", "deaths"])
@pytest.mark.parametrize("what", ["poll", "close", "fail", "vote"])
def test_calls_from_inside_a_transport(where, what):
    """A nested poll or close is refused; ``fail`` and votes are taken; nothing is lost or sent twice."""
    network, (zero, one) = pair(credits=4)
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    second, _same = (a.admit(8, 2, ready=False) for a in (zero, one))
    refused = []
    if where == "outstanding":
        network.refuse(1, 0)  # only where a slot is refused, or a heartbeat is due, it matters what is outstanding

    def call():
        one._transport = inner
        network.refusing.clear()
        try:
            if what == "poll":
                one.poll()
            elif what == "close":
                one.close(0.0)
            elif what == "fail":
                one.fail("from a callback")
            else:
                one.vote_terminal(second, Outcome.COMPLETED)
        except ConcurrentCallError as error:
            refused.append(error)

    inner = one._transport
    one._transport = Calling(inner, where, call)
    zero.vote_terminal(key, Outcome.COMPLETED)
    one.vote_terminal(key, Outcome.COMPLETED)
    zero.poll()
    outer = one._transport
    events = list(one.poll())
    assert one._transport is inner and outer is not inner, "the callback ran"
    assert bool(refused) == (what in ("poll", "close"))
    zero.vote_terminal(second, Outcome.COMPLETED)
    for _ in range(4):
        zero.poll()
        events += one.poll()
    one.validate()
    if what == "fail":
        assert one.stopped.code is zero.stopped.code is FaultCode.HOST
    else:
        assert one.stopped is None
        assert sum(isinstance(e, Committed) for e in events) == (2 if what == "vote" else 1)


def interrupted(core, name, error):
    """Make one inner call of the next step raise."""
    room = getattr(core, name.partition(".")[0])
    name = name.partition(".")[2]
    honest = getattr(room, name)

    def broken(*arguments):
        setattr(room, name, honest)
        honest(*arguments)
        raise error

    setattr(room, name, broken)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("defect"), MemoryError(), ConcurrentCallError("x")]
)
@pytest.mark.parametrize("name", ["streams.fan_out", "rounds.retire", "coordinator._commit", "member.hear"])
def test_a_step_that_is_broken_off_stops_the_domain(error, name):
    """An interrupt between two lines of a decision must not leave it in half of the queues."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    one.vote_terminal(key, Outcome.COMPLETED)
    zero.vote_terminal(key, Outcome.COMPLETED)
    zero.poll()
    interrupted(one._core, name, error)
    with pytest.raises(type(error)):
        one.poll()
    assert one.stopped.code is FaultCode.INTERNAL
    with pytest.raises(DomainStopped):
        one.doubt(key)
    events = [e for _ in range(3) for e in (*one.poll(), *zero.poll())]
    assert sum(isinstance(e, Fault) for e in events) == 2 and zero.stopped.code is FaultCode.INTERNAL
    told = [e for e in events if isinstance(e, Committed)]
    assert len(told) == one._core.member.committed + zero._core.member.committed, (
        "a decision that was made is told once"
    )


@pytest.mark.parametrize(
    ("name", "call"),
    [("streams.say", lambda zero, key: zero.vote_terminal(key, Outcome.COMPLETED)), ("rounds.note", Agreement.doubt)],
)
def test_a_call_that_is_broken_off_stops_the_domain(name, call):
    """Outside of a poll too: what the call had begun may have been said by half."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    one.vote_terminal(key, Outcome.COMPLETED)
    zero.poll()
    interrupted(zero._core, name, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        call(zero, key)
    assert zero.stopped.code is FaultCode.INTERNAL
    with pytest.raises(DomainStopped):
        zero.doubt(key)


@pytest.mark.parametrize("how", ["poll", "close"])
def test_an_interrupt_after_a_fault_keeps_the_first_diagnosis(how):
    """What stopped the domain is what is told: not what happened while it was being told."""
    network, (zero, one) = pair()
    network.hold(1, 0)
    one.fail("out of memory")
    interrupted(one._core, "streams.fill", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        one.poll()
    assert (one.stopped.code, one.stopped.detail) == (FaultCode.HOST, "out of memory")
    network.release(1, 0)
    told = list(one.poll()) if how == "poll" else []
    if how == "close":  # the frame that was made and not sent still leaves
        assert one.close(1.0, wait=lambda _s: told.extend(zero.poll())) is False
    told = [e for e in (*told, *zero.poll(), *one.poll()) if isinstance(e, Fault)]
    assert [fault.code for fault in told] == [FaultCode.HOST, FaultCode.HOST]


def test_what_was_made_before_an_interrupt_takes_the_slot_and_the_failure_follows():
    """With one slot free, the frame of the poll that was broken off and the FAIL_STOP must not both ask for it."""
    network, (zero, one) = pair()
    network.window = 1
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    zero.vote_terminal(key, Outcome.COMPLETED)
    interrupted(zero._core, "streams.fill", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        zero.poll()
    network.refuse(0, 1)
    assert [type(e) for e in zero.poll()] == [Fault] and not network.links[0, 1]
    network.release(0, 1)
    events = [e for _ in range(3) for e in (*zero.poll(), *one.poll())]
    assert [e.code for e in events if isinstance(e, Fault)] == [FaultCode.INTERNAL]
    assert zero.stopped.code is FaultCode.INTERNAL and zero.statistics().core.frames_sent == 2


def test_what_was_made_before_an_interrupt_is_overtaken_by_nothing():
    """Its slot comes free between two looks: what was made later still leaves later, or the stream would have a gap."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    zero.vote_terminal(key, Outcome.COMPLETED)
    interrupted(zero._core, "streams.fill", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        zero.poll()
    inner, looks = zero._transport, []

    class Fickle:
        def __getattr__(self, name):
            return getattr(inner, name)

        def can_send(self, peer):
            looks.append(peer)
            return len(looks) > 1 and inner.can_send(peer)

    zero._transport = Fickle()
    events = [e for _ in range(3) for e in (*zero.poll(), *one.poll())]
    assert [e.code for e in events if isinstance(e, Fault)] == [FaultCode.INTERNAL, FaultCode.INTERNAL]


def test_an_interrupt_between_two_events_stops_the_domain():
    """Of two decisions of one frame the second is not told: what is lost must not be lost quietly."""
    _network, (zero, one) = pair()
    keys = [zero.admit(n, n, ready=False) for n in (1, 2)]
    for key in keys:
        one.admit(key.request_id, key.incarnation, ready=False)
        zero.vote_terminal(key, Outcome.COMPLETED)
        one.vote_terminal(key, Outcome.COMPLETED)
    zero.poll()

    class Interrupted(list):
        def append(self, event):
            if len(self) == 1 and isinstance(event, Committed):
                raise KeyboardInterrupt
            super().append(event)

    one._core.context.events = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        one.poll()
    assert one.stopped.code is FaultCode.INTERNAL
    assert [type(e) for e in one.poll()] == [Committed, Fault]
    assert any(isinstance(e, Fault) for e in zero.poll())


@pytest.mark.parametrize("where", ["before it is decoded", "while it is decoded"])
def test_a_poll_that_is_broken_off_stops_the_domain(where):
    """A frame was taken from the transport and not heard: nothing may follow it, or its sender would be blamed for the gap."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    zero.vote_terminal(key, Outcome.COMPLETED)
    zero.poll()
    transport = one._transport

    def interrupt(_peer, _data):
        del one._codec.decode
        raise KeyboardInterrupt

    def take_and_interrupt():
        one._transport = transport
        frames, _empty = transport.receive(8)
        assert len(frames) == 1
        raise KeyboardInterrupt

    if where == "while it is decoded":
        one._codec.decode = interrupt
    else:
        one._transport = Calling(transport, "receive", take_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.poll()
    assert one.stopped.code is FaultCode.INTERNAL
    one.poll()
    assert any(isinstance(e, Fault) for e in zero.poll())


def test_an_interrupted_send_stops_the_domain():
    """The records have left their queue: nobody can say whether they arrived."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    zero.vote_terminal(key, Outcome.COMPLETED)

    def interrupt():
        zero._transport = inner
        raise KeyboardInterrupt

    inner = zero._transport
    zero._transport = Calling(inner, "send", interrupt)
    with pytest.raises(KeyboardInterrupt):
        zero.poll()
    assert zero.stopped.code is FaultCode.TRANSPORT
    zero.poll()
    assert any(isinstance(e, Fault) for e in one.poll())


@pytest.mark.parametrize("where", ["receive", "outstanding", "can_send", "deaths", "send"])
def test_a_broken_transport_is_a_fault_not_an_exception(where):
    """Whatever of it breaks: ``poll`` returns the fault, and ``close`` ends."""
    _network, (zero, _one) = pair()
    key = zero.admit(7, 1, ready=False)
    if where != "outstanding":  # which only a heartbeat asks for
        zero.vote_terminal(key, Outcome.COMPLETED)

    def broken():
        raise TransportError("cable", rank=1)

    zero._transport = Calling(zero._transport, where, broken)
    (fault,) = zero.poll()
    assert isinstance(fault, Fault) and fault.code is FaultCode.TRANSPORT and "cable" in fault.detail
    assert zero.poll() == ()
    assert zero.close(0.01) is False


def test_a_failed_opening_closes_what_it_had():
    """61: nothing of a transport stays behind, and the agreement can still be closed."""

    class Unready:
        name, closed = "unready", None

        def open(self, peers, frame_bytes_max):
            raise TransportError("no communicator")

        def close(self, clean):
            self.closed = clean

    transport = Unready()
    agreement = Agreement(DOMAIN, 0, transport)
    with pytest.raises(TransportError):
        agreement.open()
    assert transport.closed is False
    assert agreement.close() is False


def test_an_interrupted_close_leaves_nothing_open():
    network, (zero, one) = pair()
    zero.start_drain(0)
    for _ in range(4):
        zero.poll(), one.poll()

    def interrupt(_s):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zero.close(5.0, wait=interrupt)
    assert zero._transport.closed is False and zero.close() is False
    assert network.frames


def test_a_signal_handler_may_stop_the_domain():
    """``fail`` is safe at any moment: noted while a step runs, in force with the next poll at the latest."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    honest = one._core.streams.say
    before = signal.signal(signal.SIGUSR1, lambda *_: one.fail("SIGUSR1"))

    def noted(*arguments):
        one._core.streams.say = honest
        signal.raise_signal(signal.SIGUSR1)
        honest(*arguments)

    try:
        one._core.streams.say = noted
        assert one.vote_terminal(key, Outcome.COMPLETED) is True
        assert one.stopped is None
        (fault,) = one.poll()
        assert fault.code is FaultCode.HOST and fault.detail == "SIGUSR1"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert any(isinstance(e, Fault) for e in zero.poll())


def test_a_second_thread_is_refused_while_a_call_runs():
    """One thread uses an agreement: another one's call in the middle of a poll or a step is an error there, not damage."""
    _network, (zero, one) = pair()
    key, _same = (a.admit(7, 1, ready=False) for a in (zero, one))
    one.vote_terminal(key, Outcome.COMPLETED)
    zero.vote_terminal(key, Outcome.COMPLETED)
    zero.poll()
    found = []

    def other():
        for call in (one.poll, one.close, lambda: one.withdraw(key), lambda: one.admit(8, 2)):
            try:
                call()
            except ConcurrentCallError as error:
                found.append(error)

    honest = one._core.coordinator.hear

    def counting(*arguments):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        honest(*arguments)

    one._core.coordinator.hear = counting
    assert any(isinstance(e, Committed) for e in one.poll())
    assert len(found) == 4 and one.stopped is None
    one.validate()


def test_leaving_by_an_exception_tells_the_others():
    """A rank that will never vote again must not be waited for."""
    network = InProcessNetwork(DOMAIN)
    one = Agreement(DOMAIN, 1, network.transport(1))
    one.open()
    with pytest.raises(ValueError, match="host"), Agreement(DOMAIN, 0, network.transport(0)) as zero:
        zero.admit(7, 1)
        raise ValueError("host")
    (fault,) = [e for e in one.poll() if isinstance(e, Fault)]
    assert fault.code is FaultCode.HOST and fault.rank == 0 and "ValueError" in zero.stopped.detail


def test_one_watch_for_several_domains():
    """a death stops every domain with that rank, also when their transports share the evidence."""
    wide, narrow = Domain(1, (0, 1, 2)), Domain(2, (2, 0))
    agreements = []
    for domain in (wide, narrow):
        network = InProcessNetwork(domain)
        agreement = Agreement(domain, 0, network.transport(0))
        agreement._transport.deaths = lambda domain=domain: ((domain.index_of(2), "gone"),)  # told again and again
        agreement.open()
        agreements.append(agreement)
    for agreement in agreements:
        events = [e for _ in range(3) for e in agreement.poll()]
        assert [type(e).__name__ for e in events] == ["DeathVerdict", "Fault"]
        assert not agreement._dead


def test_what_a_dead_rank_had_said_is_heard_first():
    """the launcher's word about a death does not overtake the decision that lies in the ring."""
    _network, (zero, one) = pair()
    for agreement in (zero, one):
        agreement.vote_terminal(agreement.admit(7, 1, ready=False), Outcome.COMPLETED)
    zero.poll(), one.poll()
    zero.peer_died(1, "reaped")
    zero.peer_died(1, "reaped")
    assert zero.stopped is None
    assert [type(e).__name__ for e in zero.poll()] == ["Committed", "DeathVerdict", "Fault"]
    zero.peer_died(1, "again")
    assert zero.poll() == () and not zero._dead
    with pytest.raises(ConfigurationError):
        zero.peer_died(5, "no member")


def test_evidence_that_waits_does_not_pile_up():
    network, (_zero, one) = pair()
    network.hold(0, 1)
    for _ in range(100):
        network.links[0, 1].append((0.0, b"unread"))
        one._transport.deaths = lambda: ((0, "gone"),)
        one._transport.receive = lambda _n: Sweep([], 0)
        one.poll()
    assert one._dead == {0: "gone"} and one.stopped is None


values = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 4), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.sampled_from(list(Outcome) + list(Reason) + list(Disposition) + list(FaultCode)),
    st.builds(Key, st.integers(-1, 8), st.integers(-1, 3), st.integers(-1, 2)),
    st.builds(Key, st.none() | st.text(max_size=1) | st.just([]), st.none() | st.booleans() | st.just([]), st.floats()),
    st.lists(st.builds(Key, st.integers(7, 8), st.integers(1, 2)), max_size=3),
)  # fmt: skip
keys = st.builds(Key, st.sampled_from([7, 8]), st.sampled_from([1, 2]), st.sampled_from([0, 0, 0, 1]))
METHODS = {
    "admit": 3, "publish_ready": 1, "withdraw": 2, "acknowledge_prepare": 1, "acknowledge_abort": 1, "activate": 1,
    "revoke": 2, "recall": 2, "vote_terminal": 4, "doubt": 2, "start_drain": 1, "busy": 2, "state": 1, "story": 1,
}  # fmt: skip


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(sorted(METHODS)), st.tuples(keys | values, *[values] * 3)),
        max_size=25,
    )
)
@settings(max_examples=250, deadline=None)
def test_any_calls_with_any_arguments(calls):
    """Only this package's errors come out; a refusal changes nothing; what was accepted can be sent, and stops nobody."""
    _network, both = pair(credits=3)
    for agreement in both:
        agreement.admit(7, 1)
        agreement.admit(8, 2, ready=False)
    broken_word = False
    for member, name, arguments in calls:
        agreement = both[member]
        before = agreement._core.fingerprint()
        try:
            getattr(agreement, name)(*arguments[: METHODS[name]])
        except (LocalProtocolError, WouldBlock, DomainStopped):
            assert agreement._core.fingerprint() == before
        # Two hosts may contradict each other with calls that are right by themselves: then, and only then, a fault.
        broken_word |= name in ("admit", "start_drain", "activate")
        for one in both:
            one.poll()
            one.validate()
    if not broken_word:
        assert both[0].stopped is both[1].stopped is None
    else:
        assert all(a.stopped is None or a.stopped.code is not FaultCode.INTERNAL for a in both)


def count_calls(action):
    """Python and C calls that ``action`` makes: a measure of work that no machine disturbs."""
    calls = 0

    def profile(_frame, event, _argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    collecting = gc.isenabled()
    gc.disable()  # whose callbacks would count
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
    return calls


@pytest.mark.parametrize("rank", [0, 1])
def test_a_poll_costs_the_same_however_many_rounds_are_open(rank):
    """open rounds that nothing happens to are not looked at (8)."""
    costs = []
    for rounds in (4, 4000):
        _network, both = pair(credits=5000, round_timeout_s=600.0)
        for number in range(1, rounds + 1):
            for agreement in both:
                agreement.admit(number, number, ready=False)
            both[0].vote_terminal(Key(number, number), Outcome.COMPLETED)
        for _ in range(20):
            both[0].poll(), both[1].poll()
        costs.append(count_calls(both[rank].poll))
    assert costs[0] == costs[1]


def test_a_full_round_commits_at_once_among_many():
    """8: with thousands of one-vote rounds open, a full one is decided in the poll that brings its last vote."""
    _network, (zero, one) = pair(credits=2000)
    for number in range(1, 1501):
        for agreement in (zero, one):
            agreement.admit(number, number, ready=False)
        zero.vote_terminal(Key(number, number), Outcome.COMPLETED)
    for _ in range(6):
        zero.poll(), one.poll()
    assert one._core.streams.queues[0] == []
    one.vote_terminal(Key(1000, 1000), Outcome.FAILED, Disposition.RELEASE, Reason.HOST)
    assert [e.key.incarnation for e in one.poll() if isinstance(e, Committed)] == [1000]
    assert [e.key.incarnation for e in zero.poll() if isinstance(e, Committed)] == [1000]
