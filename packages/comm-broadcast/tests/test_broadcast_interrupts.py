"""Exceptions at any bytecode: sampled here, at every one in ``tools/explore.py``; foreign objects that fail at every chance."""

import contextlib
import gc
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from comm_broadcast import BroadcastConfig, Broadcaster, BroadcastError, LocalProtocolError, PickleCodec
from comm_broadcast._failure import Failure
from comm_broadcast.testing import FakeWorld

sys.path.insert(0, str(Path(__file__).parent))
import broadcast_injection as injection
import broadcast_programs as programs
import broadcast_random


@pytest.mark.parametrize("form", injection.FORMS)
@pytest.mark.parametrize("way", ["block", "handle"])
@pytest.mark.parametrize("payload", ["small", "pieces"])
@pytest.mark.parametrize("verb", injection.VERBS)
@pytest.mark.parametrize(("size", "victim"), [(2, 0), (2, 1)])
def test_an_exception_before_any_bytecode_leaves_all_ranks_level(form, size, victim, verb, payload, way):
    """Nobody waits for ever, the ranks agree on what came of the exchange, and the next one works."""
    stride = 53 if payload == "small" else 241
    assert injection.sweep(form, size, victim, verb, payload, way, stride=stride) > 12


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12),
    reason="NO COVERAGE: Python 3.12 crashes when bytecodes of several threads are traced",
)
@pytest.mark.parametrize("form", injection.FORMS)
@pytest.mark.parametrize(("size", "victim"), [(2, 0), (3, 1)])
def test_an_exception_while_closing_leaves_nobody_waiting(form, size, victim):
    """Whoever was interrupted closes again; the others were told, or are told then."""
    assert injection.sweep_close(form, size, victim, stride=47) > 8


@pytest.mark.parametrize("form", programs.FORMS)
def test_small_programs_of_calls_end_as_the_oracle_says(form):
    """Operations that match or do not, failures, dropped handles, closing: what every rank gets of every exchange."""
    assert programs.explore(form, stride=61) > 150


@pytest.mark.parametrize("first", range(0, 200, 40))
def test_random_programs_with_exceptions_end_right(first):
    """Two features at once, whichever: gathers, windows, codecs of a call, dropped handles, failures, closing, interrupts."""
    hits = sum(broadcast_random.run(seed) for seed in range(first, first + 40))
    assert hits > 50


def on_mpi(comm):
    for form in injection.FORMS:
        for verb in injection.VERBS:
            for victim in (0, comm.size - 1):
                injection.on_ranks(comm, form, verb, "pieces", victim, 1, 30, 83)


@pytest.mark.timeout(240)
@pytest.mark.mpi(2)
def test_an_exception_before_any_bytecode_on_two_ranks(world_comm):
    """Over MPI: the request that MPI gave is known, wherever the exception comes."""
    on_mpi(world_comm)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.mpi(4)
def test_an_exception_before_any_bytecode_on_four_ranks(world_comm):
    """Over MPI: the request that MPI gave is known, wherever the exception comes."""
    on_mpi(world_comm)


@pytest.mark.mpi(2)
def test_signals_at_any_time(world_comm):
    """A timer's signals, whose handler raises wherever the last rank happens to be in the package's code."""
    from comm_broadcast import MpiComm

    class Alarm(Exception):
        pass

    armed = False

    def ring(number, frame):
        while armed and frame is not None:
            if frame.f_code.co_filename.startswith(injection.SOURCES):
                raise Alarm
            frame = frame.f_back

    broadcaster, victim = Broadcaster(MpiComm(world_comm)), world_comm.size - 1
    before = signal.signal(signal.SIGALRM, ring)
    # What is raised where a plugin listens to collections is dropped by the interpreter.
    gc.disable()
    try:
        if world_comm.rank == victim:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0013)
        for turn in range(400):
            for number in range(2):
                begun = broadcaster.begun
                while broadcaster.begun == begun:
                    try:
                        armed = True
                        broadcaster.allgather([turn] * 300 * number, timeout_s=20.0)
                    except (Alarm, BroadcastError):
                        pass
                    finally:
                        armed = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    try:
        assert broadcaster.allgather(world_comm.rank, timeout_s=20.0) == list(range(world_comm.size))
    except BroadcastError:
        assert broadcaster.allgather(world_comm.rank, timeout_s=20.0) == list(range(world_comm.size))
    broadcaster.close()


class Mute(Exception):
    """Its text cannot be made."""

    def __init__(self, error):
        self.error = error

    def __str__(self):
        raise self.error


class Talks(type):
    """A class whose name cannot be told."""

    @property
    def __name__(cls):
        raise ValueError("no name")


class Nameless(Exception, metaclass=Talks):
    """See there."""


class Answers(Exception):
    """Its text is no text."""

    def __str__(self):
        return 5


def loop():
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


FOREIGN = [
    lambda: Mute(ValueError("no text")), lambda: Mute(Mute(ValueError())), lambda: Mute(RecursionError()), lambda: Nameless(),
    Answers, loop,
    lambda: ValueError("\ud800 lone"), lambda: ValueError("a\0b"), lambda: ValueError("x" * 10_000_000),
]  # fmt: skip


class Raises:
    """Cannot be pickled."""

    def __init__(self, make):
        self.make = make

    def __reduce__(self):
        raise self.make()


@pytest.mark.parametrize("make", FOREIGN)
@pytest.mark.parametrize("where", ["encode", "decode"])
@pytest.mark.parametrize("verb", injection.VERBS)
def test_an_exception_whose_text_cannot_be_made_is_told_all_the_same(verb, where, make):
    """Nothing that a foreign exception does may fail where it is handled: every rank raises, the next exchange works."""

    class Codec(PickleCodec):
        def decode(self, segments):
            value = super().decode(segments)
            if value == "poison":
                raise make()
            return value

    def body(comm):
        broadcaster = Broadcaster(comm, codec=Codec())
        mine = Raises(make) if where == "encode" else "poison"
        told = []
        # A gather is decoded at the root only, and no rank decodes what is its own.
        giver = 1 if (verb, where) == ("gather", "decode") else 0
        for value in (mine if comm.rank == giver else "fine", "second", "third"):
            try:
                getattr(broadcaster, verb)(value, timeout_s=10.0)
                told.append("fine")
            except BroadcastError as error:
                told.append("told" if len(error.cause) < 5000 else "long")
        return told

    rows = FakeWorld(2).run(body)
    assert all(type(row) is list and "told" in row[:2] and row[2] == "fine" for row in rows), rows


def test_an_interrupt_that_comes_while_a_text_is_made_stays_itself():
    """It takes the place of the exception whose text was made."""
    failure = Failure.of(Mute(KeyboardInterrupt("now")))
    assert failure.is_interrupt
    assert type(failure.error) is KeyboardInterrupt


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3)])
@pytest.mark.parametrize("agree", [False, True])
def test_an_interrupt_while_decoding_stays_itself(error, agree):
    """The rank that it hits raises it as it is; the others are told; the next exchange works."""

    class Codec(PickleCodec):
        def decode(self, segments):
            value = super().decode(segments)
            if value == "poison":
                raise error
            return value

    def body(comm):
        config = BroadcastConfig(agree=agree)
        broadcaster = Broadcaster(comm, config=config, codec=Codec() if comm.rank == 1 else PickleCodec())
        told = []
        for value in ("poison", "second", "third"):
            try:
                told.append(broadcaster.broadcast(value, timeout_s=10.0))
            except BroadcastError as caught:
                told.append((caught.rank, caught.earlier))
            except BaseException as caught:
                told.append("itself" if caught is error else caught)
        return told

    first, second = FakeWorld(2).run(body)
    if agree:
        assert first == [(1, False), "second", "third"]
        assert second == ["itself", "second", "third"]
    else:
        assert first == ["poison", (1, True), "third"]
        assert second == ["itself", (1, True), "third"]


@pytest.mark.parametrize("where", ["encode", "decode"])
@pytest.mark.parametrize("form", [{}, {"agree": True}, {"ahead_max": 1}])
def test_an_interrupt_is_what_its_handle_comes_to(form, where):
    """The others are told; the handle that it came to says so itself, whenever it is asked."""
    error, gate = KeyboardInterrupt("stop"), threading.Event()

    class Codec(PickleCodec):
        def decode(self, segments):
            if super().decode(segments) == "poison":
                raise error

    def body(comm):
        broadcaster = Broadcaster(
            comm, config=BroadcastConfig(**form), codec=Codec() if comm.rank == 1 else PickleCodec()
        )
        if comm.rank == 0:
            assert gate.wait(10)
            if where == "decode":
                return injection.outcome(lambda: broadcaster.broadcast("poison", timeout_s=10.0))
            broadcaster.allgather(0, timeout_s=10.0)
            return injection.outcome(lambda: broadcaster.allgather(1, timeout_s=10.0))
        if where == "decode":
            handle = broadcaster.start_broadcast()
        else:
            # Encoded when the one before it has ended, in a test of its own.
            broadcaster.start_allgather(2).abandon()
            handle = broadcaster.start_allgather(Raises(lambda: error))
        gate.set()
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                while not handle.test():
                    pass
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt) as caught:
                handle.result()
            assert caught.value is error
        return True

    told = ("value", "poison") if where == "decode" and not form.get("agree") else ("told", [1])
    assert FakeWorld(2).run(body) == [told, True]


def test_six_hundred_exchanges_are_given_up_and_finished():
    """One after the other, without nesting, at any depth of the caller's stack."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            assert gate.wait(10)
            return [broadcaster.broadcast(n) for n in range(601)][-1]
        for _ in range(600):
            broadcaster.start_broadcast().abandon()
        gate.set()

        def deep(levels):
            return broadcaster.broadcast(timeout_s=15.0) if levels == 0 else deep(levels - 1)

        return deep(sys.getrecursionlimit() // 2), broadcaster.statistics().abandoned

    assert FakeWorld(2).run(body) == [600, (600, 600)]


def test_exchanges_that_are_given_up_have_a_bound():
    """A rank that nobody joins does not gather them for ever."""
    from comm_broadcast._broadcaster import ABANDONED_MAX

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            return True
        for _ in range(ABANDONED_MAX):
            broadcaster.start_broadcast()
        with pytest.raises(LocalProtocolError, match="1024 exchanges were given up"):
            broadcaster.start_broadcast()
        broadcaster.release()
        return broadcaster.begun == ABANDONED_MAX

    assert FakeWorld(2).run(body) == [True, True]


def test_an_interrupted_handle_goes_on():
    """A step that an exception ends is made again at the next test, and the value comes."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            assert gate.wait(10)
            return broadcaster.broadcast("late")
        handle = broadcaster.start_broadcast()

        def interrupt(timeout_s):
            gate.set()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            handle.wait(interrupt)
        return handle.wait(lambda timeout_s: time.sleep(timeout_s), timeout_s=10.0)

    assert FakeWorld(2).run(body) == ["late", "late"]


def test_a_value_that_was_given_up_is_not_made():
    """Its handle says so; the others have theirs."""

    gate = threading.Event()

    def body(comm):
        if comm.rank == 0:
            broadcaster = Broadcaster(comm)
            assert gate.wait(10)
            return [broadcaster.broadcast(n) for n in range(2)]
        broadcaster = Broadcaster(comm)
        handle = broadcaster.start_broadcast()
        handle.abandon()
        gate.set()
        got = broadcaster.broadcast(timeout_s=10.0)
        with pytest.raises(LocalProtocolError, match="given up"):
            handle.result()
        return got

    assert FakeWorld(2).run(body) == [[0, 1], 1]
