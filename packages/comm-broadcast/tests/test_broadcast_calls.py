"""Calls that do not match, closing, time-outs, codecs of a call, errors as values."""

import copy
import gc
import itertools
import pickle
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from comm_broadcast import (
    BroadcastConfig,
    BroadcastConfigError,
    Broadcaster,
    BroadcastError,
    BroadcastTimeoutError,
    BytesCodec,
    CallMismatchError,
    ClosedError,
    CommBroadcastError,
    LocalProtocolError,
    MissingLibraryError,
    MpiComm,
    PickleCodec,
    RankFailure,
    RemoteProtocolError,
    TokenBatchCodec,
    TransportError,
)
from comm_broadcast._codec import BufferSegment, Segment
from comm_broadcast._exchange import Exchange
from comm_broadcast._frame import Call, Frame, Kind, Operation, Status, pack_failure, verdict
from comm_broadcast._handle import Pace
from comm_broadcast._settings import choose, is_crowded
from comm_broadcast.testing import FakeWorld

sys.path.insert(0, str(Path(__file__).parent))
from broadcast_values import Poison, Request

VERBS = ("broadcast", "gather", "allgather")
#: For what holds in both forms: every exchange waits for all ranks; the root of a broadcast waits for nobody.
both_forms = pytest.mark.parametrize("ahead_max", [0, 2])


@pytest.mark.parametrize("value", ["small", "x" * 20_000])
@pytest.mark.parametrize(
    "config", [BroadcastConfig(), BroadcastConfig(agree=True), BroadcastConfig(shared_slot_bytes=65_536)]
)
@pytest.mark.parametrize("verbs", [v for v in itertools.product(VERBS, repeat=3) if len(set(v)) > 1])
def test_calls_that_do_not_match_are_found_by_every_rank(verbs, config, value):
    """In the same exchange, naming what each rank called; nothing moved, and the next exchange works."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=config)
        with pytest.raises(CallMismatchError) as caught:
            getattr(broadcaster, verbs[comm.rank])(value, timeout_s=10.0)
        assert isinstance(caught.value, RemoteProtocolError)
        assert caught.value.calls == tuple(f"{verb}(root=0)" for verb in verbs)
        got = [broadcaster.broadcast(value if comm.rank == 0 else None) for _ in range(3)]
        return got == [value] * 3, broadcaster.allgather(comm.rank)

    assert FakeWorld(3).run(body) == [(True, [0, 1, 2])] * 3


def test_codecs_of_a_call_that_differ_are_found_by_every_rank():
    """Each rank names its codec by the call; a difference is a call that does not match."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=TokenBatchCodec(Request))
        with pytest.raises(CallMismatchError, match=r"rank 1: allgather\(root=0, another codec\)"):
            broadcaster.allgather(1, codec=PickleCodec() if comm.rank else PickleCodec(per_item=True))
        return broadcaster.allgather(comm.rank, codec=PickleCodec())

    assert FakeWorld(2).run(body) == [[0, 1]] * 2


@pytest.mark.parametrize("other", [Call(root=1), Call(settings=5), Call(codec=7), Call(Operation.GATHER)])
def test_every_part_of_a_call_is_compared(other):
    """Operation, root, codec and settings stand in the frame."""
    frames = [Frame(1, kind=Kind.NONE), Frame(1, kind=Kind.NONE, rank=1, call=other)]
    assert isinstance(verdict(frames, [memoryview(bytes(64))] * 2), CallMismatchError)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_verdicts_are_those_of_the_table(size):
    """All frames of up to three ranks: who closes is told first, then calls that differ, then all failures at once."""
    for states in itertools.product(itertools.product(Operation, Status), repeat=size):
        frames, views = [], []
        for rank, (operation, status) in enumerate(states):
            frame = Frame(1, status, Kind.NONE, rank=rank, call=Call(operation))
            view = memoryview(bytearray(256))
            pack_failure(view, frame, f"cause {rank}", "")
            frames.append(Frame.unpack(view, 1, rank))
            views.append(view)
        error = verdict(frames, views)
        failed = [r for r, (_, status) in enumerate(states) if status is not Status.GOOD]
        if any(operation is Operation.CLOSE for operation, _ in states):
            assert isinstance(error, ClosedError)
            assert error.rank == min(r for r, (operation, _) in enumerate(states) if operation is Operation.CLOSE)
        elif len({operation for operation, _ in states}) > 1:
            assert isinstance(error, CallMismatchError)
        elif failed:
            assert isinstance(error, BroadcastError)
            assert [(f.rank, f.cause) for f in error.failures] == [(r, f"cause {r}") for r in failed]
            assert [f.earlier for f in error.failures] == [states[r][1] is Status.FAILED_EARLIER for r in failed]
        else:
            assert error is None


def test_a_mismatch_forgets_no_failure():
    """A failure that was not told yet is told in the exchange after the one whose calls differed."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=Poison() if comm.rank else PickleCodec())
        told = []
        for verb in ("broadcast", "broadcast" if comm.rank else "gather", "broadcast"):
            try:
                getattr(broadcaster, verb)("poison", timeout_s=10.0)
            except CommBroadcastError as error:
                told.append((type(error), getattr(error, "earlier", None)))
        return told

    last = [(CallMismatchError, False), (BroadcastError, True)]
    assert FakeWorld(2).run(body) == [last, [(BroadcastError, False), *last]]


class Halts(Segment):
    """Nine thousand bytes that cannot be written."""

    nbytes = 9000

    def prepare(self, target):
        raise ValueError("cannot be written")


class Halting(BytesCodec):
    """Values that fail when their block is filled."""

    def encode(self, value):
        return [BufferSegment(b"h"), Halts()]


def test_slots_of_exchanges_that_failed_are_free_again():
    """Whatever ended them, the root's own failure or calls that differ: nobody looks at what was written for them."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=BytesCodec(), config=BroadcastConfig(shared_slot_bytes=65_536))
        good = b"y" * 9000
        for _ in range(4):
            with pytest.raises(CallMismatchError):
                (broadcaster.allgather if comm.rank else broadcaster.broadcast)(good, timeout_s=10.0)
            with pytest.raises(BroadcastError, match="cannot be written"):
                broadcaster.broadcast(codec=Halting(), timeout_s=10.0)
            assert broadcaster.broadcast(good, timeout_s=10.0) == good
            broadcaster.allgather(None)
        return broadcaster.statistics().shared

    assert FakeWorld(2).run(body) == [4, 0]


@both_forms
def test_one_broadcaster_serves_several_codecs(ahead_max):
    """A broadcaster of tokens gathers a number, without another communicator."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=TokenBatchCodec(Request), config=BroadcastConfig(ahead_max=ahead_max))
        batch = [Request(1, np.arange(5, dtype=np.int32))]
        got = broadcaster.broadcast(batch if comm.rank == 0 else None)
        raw = broadcaster.broadcast(b"raw" if comm.rank == 0 else None, codec=BytesCodec())
        return got[0].tokens.tolist(), broadcaster.allgather(comm.rank, codec=PickleCodec()), raw

    assert FakeWorld(2).run(body) == [([0, 1, 2, 3, 4], [0, 1], b"raw")] * 2


@both_forms
def test_a_bad_argument_of_one_call_is_refused_and_nothing_was_sent(ahead_max):
    """A codec that cannot be used, a time that is none: the call does not count, and the ranks stay level."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=ahead_max))
        for bad in (PickleCodec, object(), PickleCodec(out_of_band_bytes_min=-1)):
            with pytest.raises(BroadcastConfigError, match="codec"):
                broadcaster.broadcast(1, codec=bad)
        for bad in (-1, float("nan"), "1", True):
            with pytest.raises(BroadcastConfigError, match="timeout_s must be"):
                broadcaster.allgather(1, timeout_s=bad)
        assert broadcaster.begun == 0
        return broadcaster.allgather(comm.rank)

    assert FakeWorld(2).run(body) == [[0, 1]] * 2


@both_forms
def test_a_standing_receive_ends_when_the_root_closes(ahead_max):
    """It raises what happened; whoever had it open then closes without waiting."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=ahead_max))
        if comm.rank == 0:
            broadcaster.broadcast("work")
            broadcaster.close()
            return None
        got = []
        while True:
            try:
                got.append(broadcaster.broadcast())
            except ClosedError as error:
                got.append(error.rank)
                break
        with pytest.raises(LocalProtocolError, match="closed: rank 0 closed"):
            broadcaster.broadcast()
        broadcaster.close(timeout_s=0)
        broadcaster.close()
        return got

    assert FakeWorld(3).run(body) == [None, ["work", 0], ["work", 0]]


@pytest.mark.parametrize("closing", [0, 1])
def test_whoever_has_a_receive_open_may_close(closing):
    """Root or not: what is open is given up; the others learn of it in their exchange."""

    def body(comm):
        broadcaster = Broadcaster(comm)
        handle = broadcaster.start_broadcast("given" if comm.rank == 0 else None) if comm.rank == closing else None
        if comm.rank == closing:
            broadcaster.close()
            with pytest.raises(LocalProtocolError, match=r"given up|closed"):
                handle.result()
            return "closed"
        broadcaster.broadcast("given")
        with pytest.raises(ClosedError):
            broadcaster.broadcast("next")
        broadcaster.close()
        return "told"

    rows = FakeWorld(2).run(body)
    if closing == 0:
        # The root's own value needs no making: its handle has it.
        assert rows[1] == "told"
    else:
        assert rows == ["told", "closed"]


@both_forms
def test_a_dropped_handle_gives_its_exchange_up(ahead_max):
    """The next call finishes it, and so does close; a handle that is kept is refused a second exchange."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=ahead_max))
        broadcaster.start_broadcast(1)
        gc.collect()
        handle = broadcaster.start_broadcast(2)
        if not handle.test():
            with pytest.raises(LocalProtocolError, match="one at a time"):
                broadcaster.start_broadcast(3)
        got = handle.wait(timeout_s=10.0)
        broadcaster.start_broadcast(4)
        broadcaster.close()
        return got

    assert FakeWorld(2).run(body) == [2, 2]


@both_forms
def test_a_fault_can_be_left_without_the_others(ahead_max):
    """``release`` is local and waits for nobody; what is open ends with a named error."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=ahead_max))
        if comm.rank == 2:
            with pytest.raises(BroadcastTimeoutError):
                broadcaster.close(timeout_s=0.05)
            broadcaster.release()
            return "left"
        handle = broadcaster.start_broadcast() if comm.rank else None
        broadcaster.release()
        with pytest.raises(LocalProtocolError, match="closed"):
            broadcaster.broadcast()
        if handle is not None:
            with pytest.raises(LocalProtocolError, match="released"):
                handle.test()
        broadcaster.close()
        return "left"

    assert FakeWorld(3).run(body) == ["left"] * 3


@both_forms
def test_a_with_statement_closes_or_releases(ahead_max):
    """Closes, together; with an exception it waits for nobody."""

    def body(comm):
        with Broadcaster(comm, config=BroadcastConfig(ahead_max=ahead_max)) as broadcaster:
            broadcaster.allgather(1)
        with pytest.raises(ZeroDivisionError), Broadcaster(comm, config=BroadcastConfig(ahead_max=ahead_max)) as other:
            raise ZeroDivisionError
        with pytest.raises(LocalProtocolError, match="closed"):
            other.broadcast()
        with pytest.raises(LocalProtocolError, match="closed"):
            broadcaster.broadcast()

    assert FakeWorld(2).run(body) == [None, None]


@pytest.mark.parametrize("own_wait", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_every_wait_has_a_bound(verb, own_wait):
    """A blocking call whose peer does not come raises; its exchange is given up, and the next call finishes it."""
    gate = threading.Event()
    wait = threading.Event().wait if own_wait else None

    def body(comm):
        broadcaster = Broadcaster(comm)
        call = getattr(broadcaster, verb)
        if comm.rank == 1:
            assert gate.wait(10)
            call("late")
        else:
            with pytest.raises(BroadcastTimeoutError, match=r"within 0\.02 s") as caught:
                call("early", wait=wait, timeout_s=0.02)
            assert isinstance(caught.value, TimeoutError)
            gate.set()
        return broadcaster.allgather(comm.rank, timeout_s=10.0)

    assert FakeWorld(2).run(body) == [[0, 1]] * 2


def test_a_handle_outlives_its_time_out():
    """It is still its holder's: a later wait gets the value."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            assert gate.wait(10)
            return broadcaster.broadcast("late")
        handle = broadcaster.start_broadcast()
        with pytest.raises(BroadcastTimeoutError):
            handle.wait(timeout_s=0)
        gate.set()
        return handle.wait(timeout_s=10.0)

    assert FakeWorld(2).run(body) == ["late", "late"]


def test_construction_has_a_bound():
    """A rank that does not come."""
    with pytest.raises(BroadcastTimeoutError):
        Broadcaster(FakeWorld(2).comm(0), timeout_s=0.02)


@pytest.mark.parametrize("bad", [None, object(), FakeWorld])
def test_what_is_no_adapter_is_refused(bad):
    """By name, before anything is asked of it."""
    with pytest.raises(BroadcastConfigError, match="comm must be an adapter"):
        Broadcaster(bad)


class Calls(PickleCodec):
    """Uses the broadcaster that uses it."""

    broadcaster = None

    def encode(self, value):
        if value == "again":
            self.broadcaster.broadcast("inner")
        return super().encode(value)


@both_forms
def test_a_codec_cannot_begin_an_exchange_within_one(ahead_max):
    """It is told so, and the exchange fails on every rank as it does for any codec's error."""

    def body(comm):
        codec = Calls()
        config = BroadcastConfig(ahead_max=ahead_max)
        codec.broadcaster = broadcaster = Broadcaster(comm, codec=codec, config=config)
        with pytest.raises(BroadcastError, match="from within an exchange"):
            broadcaster.broadcast("again" if comm.rank == 0 else None)
        return broadcaster.allgather(comm.rank)

    assert FakeWorld(2).run(body) == [[0, 1]] * 2


ERRORS = [
    BroadcastError(1, "ValueError: no", "trace", earlier=True, others=(RankFailure(2, "other"),)),
    TransportError("Ibcast", 3, RuntimeError("down")), CallMismatchError(("broadcast(root=0)", "gather(root=0)")),
    ClosedError(2), BroadcastTimeoutError("late"), LocalProtocolError("twice"),
    RemoteProtocolError("damaged"), BroadcastConfigError("bad"),
    MissingLibraryError("install it"), CommBroadcastError("base"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_can_be_pickled_and_copied(error):
    """With their fields and text: a worker hands them to its parent."""
    error.add_note("seen on the way")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.__dict__ == error.__dict__


def test_every_error_is_tried():
    """A new one is added above."""
    kinds = {CommBroadcastError}
    for kind in list(kinds):
        kinds |= set(kind.__subclasses__())
    assert kinds | {CallMismatchError} == {type(error) for error in ERRORS}


@pytest.mark.mpi(2)
def test_communicators_that_cannot_be_used_are_named(world_comm):
    """One that was freed, one that is none; an adapter after its end."""
    from mpi4py import MPI

    freed = world_comm.Dup()
    freed.Free()
    with pytest.raises(BroadcastConfigError, match="freed"):
        MpiComm(freed)
    with pytest.raises(BroadcastConfigError, match="intracommunicator, got str"):
        MpiComm("world")
    comm = MpiComm(MPI.COMM_WORLD)
    comm.free()
    comm.free()
    with pytest.raises(LocalProtocolError, match="Ibcast: the communicator was freed"):
        comm.ibcast(bytearray(1), 0)


def check_calls(comm):
    broadcaster = Broadcaster(MpiComm(comm), timeout_s=30.0)
    for verbs in itertools.product(VERBS, repeat=2):
        verb = verbs[min(comm.rank, 1)]
        try:
            getattr(broadcaster, verb)("x" * 9000, timeout_s=20.0)
            assert len(set(verbs)) == 1
        except CallMismatchError:
            assert len(set(verbs)) == 2
        assert broadcaster.allgather(comm.rank, timeout_s=20.0) == list(range(comm.size))
    # The receivers stand open; the root closes.
    if comm.rank == 0:
        broadcaster.close()
    else:
        with pytest.raises(ClosedError):
            broadcaster.broadcast(timeout_s=20.0)
        broadcaster.close()
    # Nobody comes; each leaves by itself.
    lonely = Broadcaster(MpiComm(comm), timeout_s=30.0)
    if comm.rank == 0:
        with pytest.raises(BroadcastTimeoutError):
            lonely.gather(1, timeout_s=0.05)
    lonely.release()
    comm.Barrier()


@pytest.mark.mpi(2)
def test_calls_on_two_ranks(world_comm):
    """Mismatches found by all, standing receives ended, a rank left alone."""
    check_calls(world_comm)


@pytest.mark.mpi(4)
def test_calls_on_four_ranks(world_comm):
    """Mismatches found by all, standing receives ended, a rank left alone."""
    check_calls(world_comm)


class Clock:
    """Time that passes only by what is done: a look costs 1 us, a yield as long as it is told to, a sleep what it says."""

    def __init__(self, yield_s=2e-6):
        self.now_s, self.yield_s, self.done = 0.0, yield_s, []

    def perf_counter(self):
        self.now_s += 1e-6
        return self.now_s

    def sleep(self, duration_s):
        self.now_s += max(duration_s, 60e-6)
        self.done.append(duration_s)

    def give_way(self):
        self.now_s += self.yield_s
        self.done.append("yield")


def waited(monkeypatch, clock, pace, duration_s):
    """What a wait of this duration does: polls without a pause before the first, yields, naps, pauses."""
    from comm_broadcast import _handle

    monkeypatch.setattr(_handle, "time", clock)
    monkeypatch.setattr(_handle, "_yield", clock.give_way)
    clock.done, end_s, bare = [], clock.now_s + duration_s, [0]

    def test():
        bare[0] += not clock.done
        return clock.now_s >= end_s

    exchange = Exchange(None, Call(), None, choose(PickleCodec()))
    exchange.completed = 1
    pace.poll(test, None, None, exchange)
    return (
        bare[0],
        clock.done.count("yield"),
        clock.done.count(1e-6),
        [d for d in clock.done if d not in ("yield", 1e-6)],
    )


def test_a_wait_polls_then_yields_then_sleeps(monkeypatch):
    """Each for as long as it pays; pauses grow to half a millisecond. A rank that shares the core gets it at once."""
    clock, pace = Clock(), Pace(2e-3, crowded=True)
    bare, yields, naps, pauses = waited(monkeypatch, clock, pace, 0.1)
    assert 5 <= bare <= 15
    assert 50 <= yields <= 450
    assert 15 <= naps <= 40
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (20e-6, 0.5e-3)
    assert len(pauses) < 250
    assert waited(monkeypatch, clock, pace, 50e-6)[2:] == (0, [])


def test_a_wait_on_a_core_of_its_own_polls_at_first(monkeypatch):
    """Without giving it away; then it sleeps, longer and longer."""
    bare, yields, naps, pauses = waited(monkeypatch, Clock(), Pace(2e-3, crowded=False), 0.1)
    assert bare > 500
    assert (yields, naps) == (0, 0)
    assert (pauses[0], pauses[-1]) == (20e-6, 0.5e-3)


@pytest.mark.parametrize(
    ("places", "crowded"),
    [
        (["a1", "a2"], False), (["a1", "a2", "a3"], True), (["a1", "b1", "a2", "b2"], False), (["a1", "a1"], True),
        (["a1", "b1", "b1", "b2"], False), (["b1", "a1", "b1", "b2"], True),
    ],
)  # fmt: skip
def test_ranks_that_share_cores_know_it(places, crowded):
    """More ranks on rank 0's machine than its two cores, or another rank in its process."""
    named = [machine.encode() * 8 + process.encode() * 8 for machine, process in places]
    assert is_crowded(named, 0, 2) == crowded


def test_a_wait_on_a_busy_machine_sleeps(monkeypatch):
    """A yield that others take for a whole time slice is the last one for fifty waits."""
    clock, pace = Clock(yield_s=3e-3), Pace(2e-3, crowded=True)
    assert waited(monkeypatch, clock, pace, 5e-3)[1] == 1
    assert [waited(monkeypatch, clock, pace, 5e-3)[1] for _ in range(51)] == [0] * 50 + [1]
