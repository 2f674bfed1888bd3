"""What the MPI transport asks of MPI, seen by a stand-in that records it: no MPI is needed, and everything can go wrong."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import threading
import types

import pytest

import pp_agreement
from pp_agreement import Agreement, AgreementConfig, Committed, Domain, FaultCode, Outcome, TransportError, WouldBlock

DOMAIN = Domain(1, (0, 1))


class MpiError(Exception):
    pass


class World:
    """Requests and channels of a whole group in one process."""

    def __init__(self, size=2):
        self.size = size
        self.log = []
        self.channels = {}  # (source, target) -> sends started and not received
        self.fail_at = set()
        self.looks = 0  # at all requests of a rank
        self.absent = threading.Event()  # set: every member has come to Create_group
        self.absent.set()
        self.stuck = set()  # receives of these ranks have matched a large frame whose sender is gone


class Request:
    def __init__(self, comm, kind, buffer, peer):
        self.comm, self.kind, self.buffer, self.peer = comm, kind, buffer, peer
        self.active = self.done = self.cancelled = self.freed = False

    def Start(self):
        assert not self.active, "started while active"
        assert not self.freed
        self.active, self.done = True, False
        if self.kind == "send":
            self.comm.world.channels.setdefault((self.comm.rank, self.peer), []).append(self)
        else:  # frames match in posting order
            self.comm.posted.append(self)

    def Test(self):
        world = self.comm.world
        if "Test" in world.fail_at:
            raise MpiError("Test")
        if not self.active:
            return True
        if self.kind == "receive" and not self.done:
            if self.comm.rank in world.stuck:
                return False
            waiting = world.channels.get((self.peer, self.comm.rank), [])
            first = next((r for r in self.comm.posted if r.peer == self.peer), None)
            if waiting and first is self and not self.cancelled:
                self.comm.posted.remove(self)
                sent = waiting.pop(0)
                data = bytes(sent.buffer)
                self.buffer[: len(data)] = data
                sent.done = self.done = True
            elif self.cancelled:
                self.done = True
        if self.done:
            self.active = False
            return True
        return False

    @staticmethod
    def Testsome(requests):
        """One look: what completes in it, in the order of the list."""
        requests[0].comm.world.looks += 1
        return [index for index, request in enumerate(requests) if request.active and request.Test()]

    def Cancel(self):
        assert self.kind == "receive", "a send cannot be cancelled"
        self.comm.world.log.append((self.comm.rank, "Cancel"))
        self.cancelled = True

    def Free(self):
        assert not self.active, "freed while MPI may still use it"
        self.comm.world.log.append((self.comm.rank, "Free request"))
        self.freed = True


class Comm:
    """Has nothing that a transport may not use between open and close."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank
        self.posted = []

    def Get_size(self):
        return self.world.size

    def Get_rank(self):
        return self.rank

    def Get_group(self):
        return types.SimpleNamespace(
            Incl=lambda _ranks: types.SimpleNamespace(Free=lambda: self.world.log.append((self.rank, "Free group"))),
            Free=lambda: self.world.log.append((self.rank, "Free group")),
        )

    def Create_group(self, _members, _tag):
        self.world.log.append((self.rank, "Create_group"))
        self.world.absent.wait(20)
        if "Create_group" in self.world.fail_at:
            raise MpiError("Create_group")
        return Private(self)


class Private:
    def __init__(self, parent):
        self.world, self.rank, self.posted = parent.world, parent.rank, parent.posted

    def Set_errhandler(self, handler):
        self.world.log.append((self.rank, f"errhandler {handler}"))

    def Ssend_init(self, what, dest, tag):
        if "Ssend_init" in self.world.fail_at:
            raise MpiError("Ssend_init")
        buffer, size, _kind = what
        return Request(self, "send", memoryview(buffer)[:size], dest)

    def Recv_init(self, what, source, tag):
        if "Recv_init" in self.world.fail_at:
            raise MpiError("Recv_init")
        return Request(self, "receive", memoryview(what[0]), source)

    def Free(self):
        self.world.log.append((self.rank, "Free comm"))


@pytest.fixture
def mpi(monkeypatch):
    """The adapter over a stand-in for mpi4py, as a module of its own."""

    fake = types.ModuleType("mpi4py")
    fake.MPI = types.SimpleNamespace(
        Exception=MpiError, BYTE="byte", ERRORS_RETURN="returns", Request=Request,
        THREAD_MULTIPLE=3, Query_thread=lambda: 3,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mpi4py", fake)
    monkeypatch.delitem(sys.modules, "pp_agreement._mpi", raising=False)
    module = importlib.import_module("pp_agreement._mpi")
    monkeypatch.delattr(pp_agreement, "_mpi")
    monkeypatch.delitem(sys.modules, "pp_agreement._mpi")  # nobody else gets the stand-in
    return module


def pair(mpi, world=None, window=2, **options):
    world = world or World()
    config = AgreementConfig(**options)
    both = [Agreement(DOMAIN, r, mpi.MpiTransport(Comm(world, r), DOMAIN, window=window), config) for r in (0, 1)]
    for agreement in both:
        agreement.open()
    return world, both


def settle(both, polls=6):
    return [e for _ in range(polls) for a in both for e in a.poll()]


def test_a_whole_life_uses_no_collective(mpi):
    """between open and close only persistent requests are touched; the stand-in has nothing else to offer. Requests
    and the communicator are freed after the handshake of all, and nothing is left."""
    world, both = pair(mpi)
    for number in range(1, 30):
        for agreement in both:
            agreement.vote_terminal(agreement.admit(number, number, ready=False), Outcome.COMPLETED)
        assert sum(isinstance(e, Committed) for e in settle(both)) == 2
    both[0].start_drain(29)
    settle(both)
    assert "Free comm" not in [what for _rank, what in world.log]
    both[1]._step(both[1]._core.ending.close, (), both[1]._clock())
    assert both[0].close(5.0, wait=lambda _s: both[1].poll())
    assert both[1].close(5.0)
    assert [what for _rank, what in world.log].count("Free comm") == 2
    assert [what for _rank, what in world.log].count("Cancel") == 4, "every posted receive is cancelled"
    assert mpi._left_behind == []
    assert world.log[1][1] == "errhandler returns" or (0, "errhandler returns") in world.log


def test_a_setup_that_fails_leaves_nothing_posted(mpi):
    """42: requests that exist are cancelled; the error is this package's."""
    for what in ("Create_group", "Ssend_init", "Recv_init"):
        world = World()
        world.fail_at.add(what)
        agreement = Agreement(DOMAIN, 0, mpi.MpiTransport(Comm(world, 0), DOMAIN))
        with pytest.raises(TransportError, match=what):
            agreement.open()
        assert (0, "Free comm") not in world.log, "freeing is collective: not from one side"
        assert agreement.close() is False


def test_a_message_that_is_shorter_than_its_frame_says_is_no_frame(mpi):
    """MPI is not asked how long a message is: the frame says so, and what is left of an older one fits no checksum."""
    world, (zero, one) = pair(mpi, credits=4)
    for number in (1, 2, 3):
        for agreement in (zero, one):
            agreement.vote_terminal(agreement.admit(number, number, ready=False), Outcome.COMPLETED)
        zero.poll()
        if number == 3:
            world.channels[0, 1][-1].buffer = world.channels[0, 1][-1].buffer[:50]
        told = one.poll()
    assert [type(event).__name__ for event in told] == ["Fault"] and one.stopped.code is FaultCode.BAD_FRAME


def test_an_unclean_close_keeps_what_mpi_may_still_read(mpi):
    """A synchronous send that nobody has received is neither freed nor forgotten: its buffer stays allocated."""
    world, (zero, _one) = pair(mpi)
    zero.vote_terminal(zero.admit(7, 1, ready=False), Outcome.COMPLETED)
    zero.poll()
    (sent,) = world.channels[0, 1]
    data = bytes(sent.buffer)
    assert zero.close(0.0) is False
    (left,) = mpi._left_behind
    assert any(sent is request for slot in left._sends for _size, request in slot) and not sent.freed
    assert bytes(sent.buffer) == data
    assert (0, "Free comm") not in world.log
    assert [what for rank, what in world.log if rank == 0].count("Cancel") == 2


def test_an_unclean_close_never_waits_for_a_dead_sender(mpi):
    """A posted receive that has matched a large frame completes only with its sender: it is left alone, with its buffer."""
    world, (zero, _one) = pair(mpi)
    world.stuck.add(0)
    zero.fail("peer lost")
    assert zero.close(0.0) is False
    (left,) = mpi._left_behind
    assert all(not request.freed for request in left.receives)


def test_opening_is_bounded(mpi):
    """Making the communicator waits for every member: whoever never opens costs the others the deadline, and no more."""
    world = World()
    world.absent.clear()
    transport = mpi.MpiTransport(Comm(world, 0), DOMAIN, open_deadline_s=0.05)
    agreement = Agreement(DOMAIN, 0, transport)
    try:
        with pytest.raises(TransportError, match=r"not every member of \(0, 1\) has opened within 0.05 s"):
            agreement.open()
        assert agreement.close() is False
    finally:
        world.absent.set()
    with pytest.raises(pp_agreement.ConfigurationError, match="open_deadline_s"):
        mpi.MpiTransport(Comm(world, 0), DOMAIN, open_deadline_s=0)


def test_a_quiet_poll_looks_once_and_is_short(mpi):
    """A poll that finds nothing and says nothing: one look at all streams, at most fifteen calls of anything."""
    world, both = pair(mpi, heartbeat_s=1000.0, silence_s=1e4, startup_s=1e4)
    for agreement in both:
        agreement.vote_terminal(agreement.admit(7, 1, ready=False), Outcome.COMPLETED)
    settle(both)
    for agreement in both:
        looks, calls, inside = world.looks, [], []

        def count(frame, event, argument, calls=calls, inside=inside):
            if event == "return" and inside == [frame]:
                inside.clear()
            if inside or event not in ("call", "c_call") or argument is sys.setprofile:
                return
            calls.append(frame.f_code.co_name if event == "call" else argument.__name__)
            if calls[-1] == "Testsome":  # the stand-in's own work is not ours
                inside.append(frame)

        sys.setprofile(count)
        try:
            agreement.poll()
        finally:
            sys.setprofile(None)
        assert world.looks == looks + 1
        assert 0 < len(calls) <= 15, " ".join(calls)


def test_an_mpi_error_is_a_fault(mpi):
    world, (zero, _one) = pair(mpi)
    world.fail_at.add("Test")
    (fault,) = zero.poll()
    assert fault.code is pp_agreement.FaultCode.TRANSPORT
    assert zero.poll() == ()
    with pytest.raises(TransportError):
        zero.close(0.0)
    assert zero.close(0.0) is False and mpi._left_behind


def test_what_was_received_before_an_mpi_error_is_heard(mpi):
    """a decision in hand is not dropped because the next request fails."""
    world, (zero, one) = pair(mpi)
    for agreement in (zero, one):
        agreement.vote_terminal(agreement.admit(7, 1, ready=False), Outcome.COMPLETED)
    zero.poll(), one.poll()
    look = mpi.MPI.Request.Testsome

    def fails_second(requests):
        mpi.MPI.Request = types.SimpleNamespace(Testsome=fails_always)
        return look(requests)

    def fails_always(_requests):
        raise MpiError("second")

    mpi.MPI.Request = types.SimpleNamespace(Testsome=fails_second)
    assert [type(e).__name__ for e in zero.poll()] == ["Committed"]
    assert [type(e).__name__ for e in zero.poll()] == ["Fault"]
    assert world.size == 2


def test_the_window_is_refused_before_mpi_is_asked(mpi):
    """43: the second frame waits without a Start; it leaves when the first was received."""
    world, (zero, one) = pair(mpi, window=1)
    transport = zero._transport
    transport.send(1, b"x" * 40)
    with pytest.raises(WouldBlock):
        transport.send(1, b"y" * 40)
    assert len(world.channels[0, 1]) == 1 and transport.outstanding(1) == 1
    assert one._transport.receive(4).frames
    transport.send(1, b"y" * 40)


@pytest.mark.parametrize("frames_max", [1, 2, 3])
def test_a_flood_of_one_rank_hides_no_other(mpi, frames_max):
    """a sweep that ends at its limit still tells which rings it found empty, or a silent rank would never be judged."""
    domain = Domain(1, (0, 1, 2))
    world = World(3)
    hub = mpi.MpiTransport(Comm(world, 2), domain, window=4)
    flood = mpi.MpiTransport(Comm(world, 0), domain, window=4)
    hub.open((0, 1), 256)
    flood.open((2,), 256)
    seen = 0
    for _ in range(8):
        while flood.can_send(2):
            flood.send(2, b"\0" * 64)
        sweep = hub.receive(frames_max)
        assert 1 <= len(sweep.frames) <= frames_max
        seen += sweep.empty >> 1 & 1
    assert seen >= 4


def test_a_watch_that_breaks_is_a_fault(mpi):
    world = World()

    def broken():
        raise OSError("pidfd")

    agreement = Agreement(DOMAIN, 0, mpi.MpiTransport(Comm(world, 0), DOMAIN, watch=broken))
    agreement.open()
    (fault,) = agreement.poll()
    assert fault.code is pp_agreement.FaultCode.TRANSPORT and "pidfd" in fault.detail


@pytest.mark.parametrize("window", [0, 65, 2.5, True, "4"])
def test_the_window_is_checked(mpi, window):
    with pytest.raises(pp_agreement.ConfigurationError, match="window"):
        mpi.MpiTransport(Comm(World(), 0), DOMAIN, window=window)
    with pytest.raises(pp_agreement.ConfigurationError, match="ranks"):
        mpi.MpiTransport(Comm(World(), 0), Domain(1, (0, 5)))


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="MISSING COVERAGE: mpi4py is not installed")
@pytest.mark.parametrize(("place", "given_back"), [("mpi._left_behind", 0), ("mpi.another", 1)])
def test_what_mpi_may_still_write_outlives_the_interpreters_modules(place, given_back):
    """MPI_Finalize comes after Python's end and goes on with a receive that is under way: its memory must still be there."""
    program = f"""
import os
from mpi4py import MPI
import pp_agreement._mpi as mpi
class Buffer(bytearray):
    def __del__(self, write=os.write):
        write(1, b"given back ")
mpi.another = []
{place}.append([MPI.COMM_SELF.Irecv([Buffer(64), MPI.BYTE], source=0, tag=1)])
os.write(1, b"begun ")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stdout == b"begun " + b"given back " * given_back, done
