"""Broadcasts whose root waits for nobody: what it may do ahead of the others, and how everybody learns what went wrong."""

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
    RankFailure,
    RemoteProtocolError,
    TokenBatchCodec,
)
from comm_broadcast._frame import Call, Frame, Kind, Operation, pack_report, report_in
from comm_broadcast.testing import FakeWorld

sys.path.insert(0, str(Path(__file__).parent))
from broadcast_values import Poison, Request, Unpicklable

ONE = BroadcastConfig(ahead_max=1)
VERBS = ("broadcast", "gather", "allgather")


def outcomes(broadcaster, calls, timeout_s=10.0):
    """Of each call: its value, or what its error says."""
    got = []
    for verb, value in calls:
        try:
            got.append(getattr(broadcaster, verb)(value, timeout_s=timeout_s))
        except BroadcastError as error:
            got.append([(f.rank, f.earlier) for f in error.failures])
        except CallMismatchError as error:
            got.append((error.calls, error.earlier))
        except ClosedError as error:
            got.append(("closed", error.rank))
    return got


@pytest.mark.parametrize("ahead_max", [1, 3])
@pytest.mark.parametrize("value", [None, "small", b"x" * 200_000])
def test_the_root_ends_its_broadcasts_before_the_others_have_begun_them(ahead_max, value):
    """As many as it may be ahead; the next one waits, and everybody has every value in the end."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=ahead_max), codec=BytesCodec())
        data = value.encode() if isinstance(value, str) else value
        if comm.rank:
            assert gate.wait(10)
            got = [broadcaster.broadcast(timeout_s=10.0) for _ in range(ahead_max + 2)]
        else:
            got = [broadcaster.broadcast(data, timeout_s=10.0) for _ in range(ahead_max)]
            handle = broadcaster.start_broadcast(data)
            assert not handle.test()
            gate.set()
            got += [handle.wait(timeout_s=10.0), broadcaster.broadcast(data, timeout_s=10.0)]
        broadcaster.close()
        assert broadcaster.progress()
        return got == [data] * (ahead_max + 2)

    assert FakeWorld(3).run(body) == [True] * 3


@pytest.mark.parametrize("following", VERBS)
@pytest.mark.parametrize("failing", [(1,), (2,), (1, 2)])
def test_failures_are_told_in_the_next_exchange_all_at_once(failing, following):
    """Whatever it is: every rank raises, naming all that failed; the one after works."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=ONE, codec=Poison(comm.rank in failing))
        calls = [("broadcast", "poison"), (following, comm.rank), (following, comm.rank), ("broadcast", "last")]
        return outcomes(broadcaster, calls)

    told = [(rank, True) for rank in failing]
    for rank, (first, second, third, last) in enumerate(FakeWorld(3).run(body)):
        assert first == ([(rank, False)] if rank in failing else "poison")
        assert second == told
        assert third == {"broadcast": 0, "gather": None if rank else [0, 1, 2], "allgather": [0, 1, 2]}[following]
        assert last == "last"


def test_a_root_that_cannot_encode_is_told_at_once():
    """In its own exchange, beside nothing else; what others have to tell comes in the next."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=ONE, codec=Poison(comm.rank == 1))
        calls = [("broadcast", v) for v in (Unpicklable(), "poison", "lost", Unpicklable(), "last")]
        return outcomes(broadcaster, calls)

    bad, told = [(0, False)], [(1, True)]
    assert FakeWorld(3).run(body) == [
        [bad, "poison", told, bad, "last"], [bad, [(1, False)], told, bad, "last"], [bad, "poison", told, bad, "last"],
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["small", "x" * 20_000])
@pytest.mark.parametrize("window", [0, 65_536])
@pytest.mark.parametrize("verbs", [v for v in itertools.product(VERBS, repeat=3) if len(set(v)) > 1])
def test_calls_that_do_not_match_are_found_by_every_rank(verbs, window, value):
    """If the root gathers, in that exchange. If it broadcasts, by those who do not in that exchange, by all in the next."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=1, shared_slot_bytes=window))
        calls = [(verbs[comm.rank], value), ("broadcast", value), ("broadcast", value), ("allgather", comm.rank)]
        return outcomes(broadcaster, calls)

    everybody = tuple(f"{verb}(root=0)" for verb in verbs)
    for rank, (first, second, *rest) in enumerate(FakeWorld(3).run(body)):
        if verbs[0] != "broadcast":
            assert first == (everybody, False)
            assert second == value
        else:
            mine = tuple(call if r in (0, rank) else "" for r, call in enumerate(everybody))
            assert first == (value if verbs[rank] == "broadcast" else (mine, False))
            assert second == (everybody, True)
        assert rest == [value, [0, 1, 2]]


@pytest.mark.parametrize("ahead_max", [1, 2])
@pytest.mark.parametrize("untold", [False, True])
@pytest.mark.parametrize("closing", [(0,), (1,), (2,), (1, 2), (0, 2), (0, 1, 2)])
def test_whoever_closes_all_are_told(closing, untold, ahead_max):
    """The root waits for the others then, and says what they had not been told."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=ahead_max), codec=Poison(comm.rank == 1))
        got = outcomes(broadcaster, [("broadcast", "poison" if untold else "fine")])
        while comm.rank not in closing and got[-1] != ("closed", min(closing)):
            assert len(got) < 6, got
            got += outcomes(broadcaster, [("broadcast", "more")])
        try:
            broadcaster.close(timeout_s=10.0)
        except BroadcastError as error:
            got.append([(f.rank, f.earlier) for f in error.failures])
        broadcaster.close()
        return got

    rows = FakeWorld(3).run(body)
    for rank, row in enumerate(rows):
        first = "fine" if not untold else [(1, False)] if rank == 1 else "poison"
        assert row[0] == first, rows
        if ahead_max == 1 or 0 in closing:
            assert row.count([(1, True)]) == untold, rows
        assert ("more" in row) == (0 not in closing and rank not in closing), rows


def test_a_root_that_is_ahead_says_what_it_knows():
    """A broadcast that fails, or whose statuses have not come, loses none of what is under way; each is told once, in order."""
    gates = [threading.Event() for _ in range(2)]

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=3), codec=Poison(comm.rank == 1))
        if comm.rank == 1:
            assert gates[0].wait(10)
            got = outcomes(broadcaster, [("broadcast", None)] * 3)
            gates[1].set()
            return got + outcomes(broadcaster, [("broadcast", None)] * 4)
        got = outcomes(broadcaster, [("broadcast", v) for v in ("poison 1", Unpicklable(), "poison 2")])
        assert not broadcaster.progress()
        gates[0].set()
        assert gates[1].wait(10)
        while not broadcaster.progress():
            pass
        return got + outcomes(broadcaster, [("broadcast", v) for v in ("lost", "lost", "good", "last")])

    told, bad = [(1, True)], [(0, False)]
    assert FakeWorld(2).run(body) == [
        ["poison 1", bad, "poison 2", told, told, "good", "last"],
        [[(1, False)], bad, [(1, False)], told, told, "good", "last"],
    ]


def test_a_mismatch_and_a_failure_of_one_exchange_are_both_told():
    """In two exchanges, the calls first; that a rank closes is told after what failed beside it."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=2), codec=Poison(comm.rank == 2))
        verb = "allgather" if comm.rank == 1 else "broadcast"
        got = outcomes(broadcaster, [(verb, "poison"), *[("broadcast", n) for n in range(4)]])
        kinds = [type(g) is tuple or g == [(2, True)] for g in got[1:]]
        broadcaster.close(timeout_s=10.0)
        again = Broadcaster(comm, config=BroadcastConfig(ahead_max=2), codec=Poison(comm.rank == 2))
        told = []
        if comm.rank == 1:
            again.broadcast(timeout_s=10.0)
            with pytest.raises(BroadcastError) as caught:
                again.close(timeout_s=10.0)
            told.append([(f.rank, f.earlier) for f in caught.value.failures])
        else:
            while ("closed", 1) not in told:
                told += outcomes(again, [("broadcast", "poison" if comm.rank == 0 and not told else "more")])
        return kinds.count(True), [g for g in got[1:] if type(g) is int][-1], told.count([(2, True)]), len(told) < 6

    assert FakeWorld(3).run(body) == [(2, 3, 1, True)] * 3


@pytest.mark.parametrize("ahead_max", [0, 2])
@pytest.mark.parametrize("between", [(), ("mismatch",)])
def test_a_failure_that_was_not_told_is_told_by_closing(between, ahead_max):
    """Of a gather, in whose frames there was no room for it, or of the exchange just before: all ranks raise it, closed."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=ahead_max), codec=Poison(comm.rank == 1))
        got = outcomes(broadcaster, [("allgather", "poison" if comm.rank == 0 else "fine")])
        for _ in between:
            got += outcomes(broadcaster, [("gather" if comm.rank == 0 else "allgather", 1)])
        with pytest.raises(BroadcastError) as caught:
            broadcaster.close(timeout_s=10.0)
        assert pickle.loads(pickle.dumps(broadcaster.last.closed)).failures == caught.value.failures
        broadcaster.close()
        return len(got), [(f.rank, f.earlier) for f in caught.value.failures]

    assert FakeWorld(3).run(body) == [(1 + len(between), [(1, True)])] * 3


def test_all_that_was_not_told_is_told_by_closing():
    """Two failures and a call that did not match, of three broadcasts: one error, whose cause has the failures of both."""

    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=4), codec=Poison(comm.rank == 1))
        assert comm.rank == 0 or gate.wait(10)
        outcomes(broadcaster, [("broadcast", "poison")])
        outcomes(broadcaster, [("allgather" if comm.rank == 2 else "broadcast", "fine")])
        outcomes(broadcaster, [("broadcast", "poison")])
        gate.set()
        with pytest.raises(CallMismatchError) as caught:
            broadcaster.close(timeout_s=10.0)
        return caught.value.calls[1:], [(f.rank, f.earlier) for f in caught.value.__cause__.failures]

    said = ("broadcast(root=0)", "allgather(root=0)"), [(1, True), (1, True)]
    assert FakeWorld(3).run(body) == [said] * 3


def test_what_failed_after_a_rank_closed_is_told_before_that():
    """A root that is ahead of both: it has read who closed, and not yet what came of its next broadcast."""
    begun, late = threading.Event(), threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(ahead_max=3), codec=Poison(comm.rank == 1))
        if comm.rank == 2:
            assert begun.wait(10)
            with pytest.raises(BroadcastError):
                broadcaster.close(timeout_s=10.0)
            return "closed"
        if comm.rank == 1:
            first = outcomes(broadcaster, [("broadcast", None)])
            assert late.wait(10)
            return first + outcomes(broadcaster, [("broadcast", None)] * 3)
        got = outcomes(broadcaster, [("broadcast", v) for v in ("fine", "poison")])
        begun.set()
        while not comm.test(0):
            pass  # until the statuses of the first are there
        handle = broadcaster.start_broadcast("more")
        assert not handle.test()
        late.set()
        with pytest.raises(BroadcastError) as caught:
            handle.wait(timeout_s=10.0)
        return got, [(f.rank, f.earlier) for f in caught.value.failures], outcomes(broadcaster, [("broadcast", "more")])

    closed = ("closed", 2)
    assert FakeWorld(3).run(body) == [
        (["fine", "poison"], [(1, True)], [closed]), ["fine", [(1, False)], [(1, True)], closed], "closed",
    ]  # fmt: skip


def test_slots_of_calls_that_do_not_match_are_free_again():
    """A rank that called something else lets go of what it does not look at."""

    def body(comm):
        config = BroadcastConfig(ahead_max=1, shared_slot_bytes=65_536)
        broadcaster = Broadcaster(comm, codec=BytesCodec(), config=config)
        for _ in range(4):
            outcomes(broadcaster, [("allgather" if comm.rank else "broadcast", b"x" * 9000), ("broadcast", b"y")])
            broadcaster.allgather(None)
        return broadcaster.statistics().shared

    assert FakeWorld(2).run(body) == [4, 0]


def test_two_failures_of_one_rank_are_both_told():
    """Of a gather and of the broadcast after it, which has one status: the second comes with the next status."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=ONE, codec=Poison(comm.rank == 1))
        calls = [
            ("allgather", "poison" if comm.rank == 0 else "fine"),
            *[("broadcast", v) for v in ("poison", 1, 2, 3, 4)],
        ]
        return outcomes(broadcaster, calls)

    mine, told = [(1, False)], [(1, True)]
    assert FakeWorld(2).run(body) == [
        [["poison", "fine"], "poison", told, 2, told, 4], [mine, mine, told, 2, told, 4],
    ]  # fmt: skip


def test_a_failure_in_a_gather_is_not_lost_in_a_broadcast():
    """The root's broadcast goes on; the rank says it in its status, and all raise it then."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=ONE, codec=Poison(comm.rank == 1))
        calls = [
            ("allgather", "poison" if comm.rank == 0 else "fine"),
            *[("broadcast", v) for v in (1, "poison", 3, 4, 5)],
        ]
        return outcomes(broadcaster, calls)

    first, second = FakeWorld(2).run(body)
    told = [(1, True)]
    # What rank 1 could not say of the second while it said the first comes with the next status.
    assert first == [["poison", "fine"], 1, told, 3, 4, 5], first
    assert second == [[(1, False)], 1, told, 3, 4, 5]


def test_statistics_and_names_of_what_is_refused():
    """Counts as in any exchange; agreement and being ahead exclude each other, on every rank."""

    def body(comm):
        for change in ({"agree": True, "ahead_max": 1}, {"ahead_max": 65}, {"ahead_max": True}):
            with pytest.raises(BroadcastConfigError, match="rank 1: ahead_max"):
                Broadcaster(comm, config=BroadcastConfig(**change) if comm.rank == 1 else ONE)
        with pytest.raises(BroadcastConfigError, match="ahead_max=1, rank 1 has ahead_max=2"):
            Broadcaster(comm, config=BroadcastConfig(ahead_max=comm.rank + 1))
        broadcaster = Broadcaster(comm, config=ONE)
        for value in (1, b"x" * 9000, np.zeros(200_000)):
            broadcaster.broadcast(value)
        return broadcaster.statistics()

    root, peer = FakeWorld(2).run(body)
    assert (root.exchanges, root.inline, root.large_buffers) == (3, 1, 1)
    assert root.bytes_sent == peer.bytes_received > 1_600_000


@pytest.mark.parametrize("window", [0, 1 << 20])
def test_blocks_that_are_under_way_are_not_written_again(window):
    """A root three ahead packs each batch into memory of its own; late readers find what was sent."""
    gates = [threading.Event() for _ in range(30)]

    def body(comm):
        config = BroadcastConfig(ahead_max=3, shared_slot_bytes=window)
        broadcaster = Broadcaster(comm, config=config, codec=TokenBatchCodec(Request))
        kept = []
        for step in range(30):
            if comm.rank == 0:
                broadcaster.broadcast([Request(step, [step] * 5000)], timeout_s=10.0)
                gates[step].set()
            else:
                assert gates[min(29, step + 2 - step % 3)].wait(10)
                kept.append(broadcaster.broadcast(timeout_s=10.0))
                assert all((batch[0].tokens == n).all() for n, batch in enumerate(kept))
                del kept[: -1 if step % 2 else 0]
                kept = [[Request(n, np.full(5000, n))] for n in range(step + 1 - len(kept))] + kept
        broadcaster.close()
        return True

    assert FakeWorld(2).run(body) == [True] * 2


ERRORS = [
    ClosedError(3), CallMismatchError(("broadcast(root=0)", "", "gather(root=0)"), earlier=True),
    BroadcastError(1, "ValueError: no", "trace", earlier=True, others=(RankFailure(2, "ä" * 50, "end", True),)),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_reports_say_what_went_wrong(error):
    """The same error comes out; texts that are too long are cut, rank by rank, and a damaged report is refused."""
    view = memoryview(bytearray(4096))
    pack_report(view, Frame(4, rank=1, call=Call(Operation.GATHER)), error)
    got = report_in(view, Frame.unpack(view, 4, 1))
    assert (type(got), str(got), got.__dict__) == (type(error), str(error), error.__dict__)
    for size in range(1, Frame.unpack(view, 4, 1).payload_bytes):
        with pytest.raises(RemoteProtocolError):
            report_in(view, Frame(4, rank=1, payload_bytes=size))


@pytest.mark.parametrize("ranks", [1, 5, 300])
@pytest.mark.parametrize("frame_bytes", [256, 4096])
def test_long_reports_are_cut_to_the_frame(ranks, frame_bytes):
    """Causes are kept before tracebacks' beginnings, and the first ranks before the last."""
    failures = tuple(
        RankFailure(r, f"cause {r} " + "é" * 3000, "start" + "t" * 5000 + "end", True) for r in range(ranks)
    )
    for error in (BroadcastError.of(failures), CallMismatchError(tuple("c" * 90 for _ in range(ranks)), earlier=True)):
        view = memoryview(bytearray(frame_bytes))
        pack_report(view, Frame(1, kind=Kind.NONE), error)
        got = report_in(view, Frame.unpack(view, 1, 0))
        assert type(got) is type(error)
        if isinstance(got, BroadcastError):
            assert got.failures[0].cause.startswith("cause 0")
            assert got.failures[0].details.endswith("end")
            assert [f.rank for f in got.failures] == list(range(len(got.failures)))


def test_only_errors_that_ranks_tell_each_other_become_reports():
    """Anything else is a mistake of the package."""
    with pytest.raises(TypeError, match="CommBroadcastError"):
        pack_report(memoryview(bytearray(256)), Frame(1), CommBroadcastError("x"))


def test_a_root_that_must_wait_has_a_bound():
    """Whose peer does not come: it gives the exchange up, and the next call finishes it."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm, config=ONE)
        if comm.rank:
            assert gate.wait(10)
            return [broadcaster.broadcast(timeout_s=10.0) for _ in range(3)]
        broadcaster.broadcast(0, timeout_s=10.0)
        with pytest.raises(BroadcastTimeoutError):
            broadcaster.broadcast(1, timeout_s=0.01)
        gate.set()
        return broadcaster.broadcast(2, timeout_s=10.0)

    assert FakeWorld(2).run(body) == [2, [0, 1, 2]]


def check_lateness(comm):
    """A rank begins only when it has been told, apart, that the broadcasts of the others, or of the root, have ended."""
    from comm_broadcast import MpiComm

    rank, last, late = comm.rank, comm.size - 1, comm.size // 2
    broadcaster = Broadcaster(MpiComm(comm), config=BroadcastConfig(ahead_max=8), codec=BytesCodec())
    # Little holds up nobody, whichever rank is late.
    if rank == late:
        comm.recv(source=0, tag=5)
    values = [b"small", None, b"y" * 200]
    assert [broadcaster.broadcast(value if rank == 0 else None, timeout_s=30.0) for value in values] == values
    others = [r for r in range(1, comm.size) if r != late]
    if rank == 0:
        for other in others:
            comm.recv(source=other, tag=6)
        comm.send(None, dest=late, tag=5)
    elif rank in others:
        comm.send(None, dest=0, tag=6)
    # Much goes through other ranks, and does not hold up the root.
    if rank == last:
        comm.recv(source=0, tag=5)
    values = [b"x" * 900_000, b"small"]
    assert [broadcaster.broadcast(value if rank == 0 else None, timeout_s=30.0) for value in values] == values
    if rank == 0:
        comm.send(None, dest=last, tag=5)
    while not broadcaster.progress():
        pass
    # A failure on the last two ranks at once, and a call that does not match, each in the next exchange of all.
    poisoned = Broadcaster(MpiComm(comm), config=ONE, codec=Poison(rank >= max(1, comm.size - 2)))
    calls = [("broadcast", v) for v in ("poison", 1, 2)]
    failing = range(max(1, comm.size - 2), comm.size)
    first, *rest = outcomes(poisoned, calls, 30.0)
    assert first == ([(rank, False)] if rank in failing else "poison")
    assert rest == [[(r, True) for r in failing], 2]
    if rank == last:
        first = outcomes(poisoned, [("allgather", "x" * 20_000)], 30.0)[0]
        assert first[0][rank] == "allgather(root=0)"
    else:
        assert outcomes(poisoned, [("broadcast", b"x" * 20_000)], 30.0) == [b"x" * 20_000]
    calls, earlier = outcomes(poisoned, [("broadcast", 3)], 30.0)[0]
    assert (calls[0], calls[last], earlier) == ("broadcast(root=0)", "allgather(root=0)", True)
    assert outcomes(poisoned, [("broadcast", 4), ("allgather", rank)], 30.0) == [4, list(range(comm.size))]
    # A buffer of the caller's is not given back while it is being read.
    large = Broadcaster(MpiComm(comm), config=BroadcastConfig(ahead_max=4, gather_bytes_max=4096))
    for step in range(5):
        data = np.full(300_000, step)
        assert (large.broadcast(data if rank == 0 else None, timeout_s=30.0) == step).all()
        data[:] = -1
    for one in (broadcaster, poisoned, large):
        one.close(timeout_s=30.0)


@pytest.mark.mpi(2)
def test_a_late_rank_on_two_ranks(world_comm):
    """The root has ended before it begins; see :func:`check_lateness`."""
    check_lateness(world_comm)


@pytest.mark.mpi(4)
def test_a_late_rank_on_four_ranks(world_comm):
    """The root has ended before it begins; see :func:`check_lateness`."""
    check_lateness(world_comm)
