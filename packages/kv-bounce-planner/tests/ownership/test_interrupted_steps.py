"""An interrupt at any bytecode of a core: its step is taken whole or not at all, and a transfer ends as if nothing had been."""

from __future__ import annotations

import sys

import pytest

from kv_bounce_planner.sessions import PeerEvidence, RequestKey, SessionConfig

KEY = RequestKey(1, 0)
CORES = ("sessions/core.py", "sessions/receive_core.py", "sessions/send_core.py", "sessions/states.py")
#: Interrupts tried per way to an end, spread over its bytecodes.
POINTS = 80
#: By night: at every bytecode, or at so many of a way that is longer (slices: a third).
NIGHT_POINTS_MAX = 10_000


class Interrupt(BaseException):
    pass


class Interrupting:
    """Counts the bytecodes of the cores that calls run, and raises at one of them."""

    def __init__(self, point=0):
        self.point, self.count = point, 0

    def __call__(self, call, *arguments, **named):
        """Call until it is not interrupted: as a host's loop does that goes on after a signal."""
        while True:
            sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it when tracing begins
            sys.settrace(self._trace)
            try:
                return call(*arguments, **named)
            except Interrupt:
                continue
            finally:
                sys.settrace(None)

    def _trace(self, frame, event, _argument):
        if not frame.f_code.co_filename.endswith(CORES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.point:
                raise Interrupt
        return self._trace


def turns(lab, calling, count=14):
    for _ in range(count):
        for rank, sender in enumerate(lab.senders):
            if rank not in lab.dead:
                lab.sent[rank].extend(calling(sender.poll))
        lab.events.extend(calling(lab.receiver.poll))


def succeeds(tier):
    def body(lab, calling):
        lab.open(tier=tier)
        turns(lab, calling, 3)
        lab.ready()
        turns(lab, calling)
        calling(lab.senders[0].seal, KEY)
        turns(lab, calling, 3)

    return body


def cancelled(tier):
    """Everything was posted and nothing has landed when it is cancelled; then it lands."""

    def body(lab, calling):
        lab.world.landing = lambda _job, _part: "hold"
        lab.open(tier=tier)
        turns(lab, calling, 3)
        lab.ready()
        turns(lab, calling)
        calling(lab.receiver.cancel, lab.identity())
        turns(lab, calling, 3)
        lab.world.landing = lambda _job, _part: "land"
        turns(lab, calling)
        calling(lab.senders[0].seal, KEY)
        turns(lab, calling, 3)

    return body


def in_slices(tier):
    """The first lands, then the rest is computed at once: more than one waits for a slot."""

    def body(lab, calling):
        cut = lab.in_slices(3, tier)
        cut.open()
        turns(lab, calling, 2)
        cut.compute(1)
        turns(lab, calling, 4)
        cut.compute(3)
        turns(lab, calling, 8)
        calling(lab.senders[0].seal, KEY)
        turns(lab, calling, 2)

    return body


def slices_cancelled(lab, calling):
    """One has landed, one was posted and lands later, one was not begun."""
    cut = lab.in_slices(3, "bounce")
    cut.open()
    turns(lab, calling, 2)
    cut.compute(1)
    turns(lab, calling, 5)
    lab.world.landing = lambda _job, _part: "hold"
    cut.compute(2)
    turns(lab, calling, 4)
    calling(lab.receiver.cancel, lab.identity())
    turns(lab, calling, 2)
    lab.world.landing = lambda _job, _part: "land"
    turns(lab, calling, 5)
    calling(lab.senders[0].seal, KEY)
    turns(lab, calling, 2)


def failed(lab, calling):
    lab.open(tier="bounce")
    turns(lab, calling, 3)
    calling(lab.senders[0].fail, KEY, "out of memory")
    turns(lab, calling)


def timed_out(lab, calling):
    """Nobody becomes ready; then the sender's process is found dead."""
    lab.open(tier="direct")
    turns(lab, calling, 3)
    lab.kill(0)
    lab.clock.advance(1000.0)
    turns(lab, calling, 3)
    calling(lab.receiver.peer_died, lab.senders[0].self_id, PeerEvidence.PROCESS_REAPED)
    calling(lab.receiver.retire_peer, "ctx", "c1")
    turns(lab, calling, 3)


def quarantined(lab, calling):
    """The sender stops answering; time decides."""
    lab.open(tier="bounce")
    turns(lab, calling, 3)
    lab.dead.add(0)
    calling(lab.receiver.cancel, lab.identity())
    lab.clock.advance(11.0)
    turns(lab, calling, 3)


def source_quarantined(lab, calling):
    """The receiver reads, and is not heard of again; time decides."""
    lab.world.landing = lambda _job, _part: "hold"
    lab.open(tier="pull")
    turns(lab, calling, 3)
    lab.ready()
    turns(lab, calling, 3)
    calling(lab.senders[0].seal, KEY)
    lab.clock.advance(11.0)
    for _ in range(3):
        lab.sent[0].extend(calling(lab.senders[0].poll))
    lab.events.extend(calling(lab.receiver.poll))


BODIES = {
    "direct": succeeds("direct"),
    "bounce": succeeds("bounce"),
    "pull": succeeds("pull"),
    "direct, cancelled": cancelled("direct"),
    "bounce, cancelled": cancelled("bounce"),
    "pull, cancelled": cancelled("pull"),
    "slices": in_slices("direct"),
    "slices, bounce": in_slices("bounce"),
    "slices, cancelled": slices_cancelled,
    "failed at the sender": failed,
    "timed out, and a death": timed_out,
    "quarantined": quarantined,
    "quarantined at the sender": source_quarantined,
}


def outcome_of(lab):
    """What hosts were told, whatever the turn in which they were; and where every byte is."""
    received = [type(event).__name__ for event in lab.events]
    sent = sorted(type(event).__name__ for event in lab.sent[0])
    return received, sent, lab.target.tobytes(), lab.receiver.drain().open


@pytest.mark.parametrize(
    "points", [POINTS, pytest.param(0, id="night", marks=(pytest.mark.slow, pytest.mark.timeout(1800)))]
)
# Python 3.12 lets a generator that `all` left be traced to its end; what is raised there, the interpreter itself drops.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("body", BODIES)
def test_an_interrupt_at_any_bytecode_of_a_core_changes_no_end(make_lab, body, points):
    """Every end is told once, the same as without it; nothing is stuck, nothing released twice."""
    config = SessionConfig(drain_deadline_s=10.0, bounce_wait_s=0.2, operation_timeout_s=600.0)
    plain, counting = make_lab(1, config=config, areas=1), Interrupting()
    BODIES[body](plain, counting)
    expected = outcome_of(plain)
    assert expected[0] + expected[1] and counting.count > POINTS
    points = points or min(counting.count, NIGHT_POINTS_MAX)
    for index in range(points):
        lab, interrupting = make_lab(1, config=config, areas=1), Interrupting(1 + index * counting.count // points)
        BODIES[body](lab, interrupting)
        assert interrupting.count > interrupting.point, "it was not interrupted: it shows nothing"
        assert outcome_of(lab) == expected, f"interrupted at bytecode {interrupting.point}"


def test_a_core_keeps_few_steps_however_many_reports_of_progress_come(make_lab):
    """What a report says, the next one says too; and a request that is over, of which 4,096 are kept, keeps none."""
    lab = make_lab(1, parts_max=1, areas=1)
    lab.open(count=64)
    lab.run(3)
    lab.ready(count=64)
    lab.run(70)
    core = lab.senders[0]._requests[KEY].core

    def steps():
        count, entry = 0, core._log
        while entry is not None:
            count, entry = count + 1, entry[0]
        return count

    assert lab.names() == ["TransferSucceeded", "MemoryReleased"] and 0 < steps() < 10
    lab.senders[0].seal(KEY)
    lab.run(2)
    assert core.settled and steps() == 0 and core.next_effect() is None
