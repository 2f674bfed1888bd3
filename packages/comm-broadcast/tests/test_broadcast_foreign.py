"""What foreign objects do: settings, codecs and their segments, callbacks and finalizers that misbehave in any way.

None of it may leave a rank waiting: each is told to all ranks, or refused before anything was sent, and the next call works.
"""

import importlib.util
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from comm_broadcast import (
    BroadcastConfig,
    BroadcastConfigError,
    Broadcaster,
    BroadcastError,
    BytesCodec,
    LocalProtocolError,
    PickleCodec,
    TokenBatchCodec,
)
from comm_broadcast import _pool as pool
from comm_broadcast.testing import FakeWorld

sys.path.insert(0, str(Path(__file__).parent))
from broadcast_values import Request

CONFIG = BroadcastConfig(frame_bytes=512, chunk_bytes=4096, gather_bytes_max=8192)
VERBS = ("broadcast", "gather", "allgather")


class Silent:
    """Cannot be shown in any way."""

    def __repr__(self):
        raise RuntimeError("cannot be shown")

    __str__ = __repr__

    def __format__(self, form):
        raise RuntimeError("cannot be shown")


class First:
    """A type that a union may have once only."""


class Second:
    """Another one."""


class Union(msgspec.Struct):
    """A struct whose fields msgspec does not take."""

    field: First | Second
    tokens: np.ndarray


class Loud(PickleCodec):
    """Raises when it is looked at."""

    def __init__(self, error, where):
        super().__init__()
        self.error, self.where, self.looks = error, where, 0

    def __getattribute__(self, name):
        if name == object.__getattribute__(self, "where"):
            raise object.__getattribute__(self, "error")
        return object.__getattribute__(self, name)


class LoudConfig(BroadcastConfig):
    """Raises when a field is read."""

    def __getattribute__(self, name):
        if name == "chunk_bytes":
            raise ValueError("loud")
        return super().__getattribute__(name)


#: Longer than Python is willing to print.
LONG = 10**5000
FOREIGN = {"silent": Silent(), "long": LONG, "negative": -LONG, "surrogate": "\ud800", "nan": float("nan")}
FIELDS = (
    "frame_bytes", "chunk_bytes", "gather_bytes_max", "agree", "shared_slot_bytes", "pool_bytes_max", "check_round_trip",
    "spin_s",
)  # fmt: skip


def mistakes():
    """(name, what is named in the message, the constructor's arguments, made by the test where they are partial)"""
    for kind, value in FOREIGN.items():
        for field in FIELDS:
            if not (kind == "long" and field in ("gather_bytes_max", "pool_bytes_max")):
                yield f"{field}-{kind}", field, {"config": partial(BroadcastConfig, **{field: value})}
        yield f"root-{kind}", "root", {"root": value}
        yield f"config-{kind}", "config", {"config": value}
        yield f"codec-{kind}", "codec", {"codec": value}
        yield f"timeout_s-{kind}", "timeout_s", {"timeout_s": value}
        yield f"struct_type-{kind}", "struct_type", {"codec": partial(TokenBatchCodec, value)}
        yield f"token_fields-{kind}", "token_fields", {"codec": partial(TokenBatchCodec, Request, value)}
        yield f"token_field-{kind}", "token_fields", {"codec": partial(TokenBatchCodec, Request, [value])}
        yield f"per_item-{kind}", "per_item", {"codec": partial(PickleCodec, per_item=value)}
        yield f"copy-{kind}", "copy", {"codec": partial(BytesCodec, copy=value)}
        if kind != "long":
            codec = partial(PickleCodec, out_of_band_bytes_min=value)
            yield f"out_of_band-{kind}", "out_of_band_bytes_min", {"codec": codec}
    yield "union", "struct_type", {"codec": partial(TokenBatchCodec, Union)}
    for where in ("name", "views", "head_only", "encode", "decode", "problem"):
        yield f"codec-{where}", "codec: ValueError: loud", {"codec": partial(Loud, ValueError("loud"), where)}
    yield "config-raises", "ValueError: loud", {"config": LoudConfig()}
    yield "slot", "shared_slot_bytes", {"config": partial(BroadcastConfig, shared_slot_bytes=1 << 62)}


MISTAKES = {name: (named, arguments) for name, named, arguments in mistakes()}


@pytest.mark.parametrize("name", MISTAKES)
def test_whatever_one_rank_is_constructed_with_all_ranks_are_told(name):
    """A mistake of one rank that cannot even be shown: every rank raises, and it names the field and the rank."""
    named, given = MISTAKES[name]
    arguments = {key: value() if isinstance(value, partial) else value for key, value in given.items()}

    def body(comm):
        with pytest.raises(BroadcastConfigError, match="rank 1: ") as caught:
            Broadcaster(comm, **(arguments if comm.rank == 1 else {"timeout_s": 10.0}))
        return str(caught.value)

    results = FakeWorld(3).run(body)
    assert all(isinstance(text, str) and named in text and len(text) < 1200 for text in results), results


@pytest.mark.parametrize("where", ["problem", "name", "encode"])
def test_an_interrupt_from_a_codec_at_construction_is_told_and_stays_itself(where):
    """The rank that it hits raises it; the others learn why there is no broadcaster."""

    def body(comm):
        codec = Loud(KeyboardInterrupt("now"), where) if comm.rank == 1 else None
        with pytest.raises(KeyboardInterrupt if comm.rank == 1 else BroadcastConfigError) as caught:
            Broadcaster(comm, codec=codec, timeout_s=None if comm.rank == 1 else 10.0)
        return str(caught.value)

    assert FakeWorld(2).run(body) == ["rank 1: KeyboardInterrupt: now", "now"]


def test_a_rank_that_cannot_reserve_its_room_is_told(monkeypatch):
    """What it needs to stay in step without memory is reserved at construction: there, every rank can be told."""
    poor: set[int] = set()

    def reserve(size):
        if threading.get_ident() in poor:
            raise MemoryError("no room")
        return pool.Sink(size)

    monkeypatch.setattr("comm_broadcast._settings.Sink", reserve)

    def body(comm):
        if comm.rank == 1:
            poor.add(threading.get_ident())
        with pytest.raises(BroadcastConfigError, match="rank 1: MemoryError: no room"):
            Broadcaster(comm, timeout_s=10.0)
        return True

    assert FakeWorld(2).run(body) == [True, True]


@pytest.mark.parametrize("kind", ["no memory", "no file"])
def test_a_window_that_cannot_be_made_is_told_and_leaves_no_file(kind, monkeypatch):
    """Whatever stands in the way of one rank; the memory's name is gone either way."""
    from comm_broadcast import _window as window

    paths = []

    def fail(path, total):
        paths.append(path)
        if kind == "no file":
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        raise OverflowError("too much")

    monkeypatch.setattr(window, "_make", fail)

    def body(comm):
        with pytest.raises(BroadcastConfigError, match="rank 0: OverflowError: too much"):
            Broadcaster(comm, config=BroadcastConfig(shared_slot_bytes=4096), timeout_s=10.0)
        return True

    assert FakeWorld(2).run(body) == [True, True]
    assert paths and not [path for path in paths if os.path.exists(path)]


# -- segments ---------------------------------------------------------------------------------------------------------


class Plain:
    """Bytes, as a segment of somebody else's making."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.nbytes: Any = len(data)
        self.asked = 0

    def prepare(self, target):
        """Nothing."""

    def copy(self, target):
        target[:] = self.data
        yield self.nbytes

    def source(self):
        self.asked += 1
        return memoryview(self.data)


def raises(error):
    def method(self, *arguments):
        raise error

    return method


def late(error):
    """A generator that raises at its first step."""

    def method(self, target):
        raise error
        yield

    return method


def yields(value):
    def method(self, target):
        target[:] = self.data
        yield value

    return method


def once(then):
    """The right bytes the first time, something else later."""

    def method(self):
        self.asked += 1
        return memoryview(self.data) if self.asked == 1 else then(self)

    return method


def fail():
    raise ValueError("later")


ERRORS = (
    ValueError("no"),
    KeyboardInterrupt("no"),
    GeneratorExit("no"),
    StopIteration(5),
    MemoryError(),
    RecursionError(),
)
SEGMENTS: dict[str, dict[str, Any]] = {
    **{f"prepare {type(e).__name__}": {"prepare": raises(e)} for e in ERRORS},
    **{f"copy {type(e).__name__}": {"copy": raises(e)} for e in ERRORS},
    **{f"first step {type(e).__name__}": {"copy": late(e)} for e in ERRORS},
    **{f"source {type(e).__name__}": {"source": raises(e)} for e in ERRORS},
    **{f"copy yields {value!r}": {"copy": yields(value)} for value in ("x", None, 1.5, -5, 10**9, float("nan"))},
    "copy is no iterator": {"copy": lambda self, target: 5},
    "source is a string": {"source": lambda self: "abc"},
    "source is short": {"source": lambda self: memoryview(self.data)[:-5]},
    "source is long": {"source": lambda self: memoryview(self.data + b"12345")},
    "source is gone later": {"source": once(lambda self: None)},
    "source is short later": {"source": once(lambda self: memoryview(self.data)[:-5])},
    "source raises later": {"source": once(lambda self: fail())},
    **{f"nbytes {v!r}": {"nbytes": v} for v in (-3, 1.0, "x", 1 << 45, 1 << 70, None)},
}


class Segmented:
    """One segment of the kind that is wanted."""

    views = head_only = False
    name = "segmented"

    def __init__(self) -> None:
        self.kind: dict[str, Any] = {}

    def encode(self, value):
        segment = type("Odd", (Plain,), {k: v for k, v in self.kind.items() if k != "nbytes"})(value)
        if "nbytes" in self.kind:
            segment.nbytes = self.kind["nbytes"]
        return [Plain(b"head"), segment]

    def decode(self, segments):
        return bytes(segments[1])


@pytest.mark.parametrize("kind", SEGMENTS)
@pytest.mark.parametrize("verb", VERBS)
def test_whatever_a_segment_does_the_next_exchange_works(kind, verb):
    """In the frame, in pieces, and from where it lies: the exchange ends for all, with the right bytes or an error."""

    def body(comm):
        codec = Segmented()
        broadcaster = Broadcaster(comm, config=CONFIG, codec=codec, timeout_s=10.0)
        call = getattr(broadcaster, verb)
        for size in (10, 6000, 20_000):
            data, first = bytes([comm.rank]) * size, bytes(size)
            right = {"broadcast": first, "allgather": [first, b"\1" * size], "gather": [first, b"\1" * size]}[verb]
            codec.kind = SEGMENTS[kind] if comm.rank == (verb == "gather") else {}
            begun = broadcaster.begun
            try:
                got = call(data, timeout_s=10.0)
            except (BroadcastError, KeyboardInterrupt, GeneratorExit):
                got = right
            assert broadcaster.begun == begun + 1
            codec.kind = {}
            again = call(data, timeout_s=10.0)
            for value in (got, again):
                assert value == (right if comm.rank == 0 or verb != "gather" else None) or value is right
        return True

    assert FakeWorld(2).run(body) == [True, True]


class Number:
    """An integer, and nothing else."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


@pytest.mark.parametrize("kind", [np.int32, np.uint64, Number])
@pytest.mark.parametrize("verb", VERBS)
def test_a_segment_may_count_in_any_kind_of_integer(kind, verb):
    """Its size, and how far its copy has come: in the frame, in pieces, and from where it lies the values arrive."""

    class Counting(Plain):
        def __init__(self, data):
            super().__init__(data)
            self.nbytes = kind(len(data))

    class Codec(Segmented):
        def encode(self, value):
            return [Counting(b"head"), Counting(value)]

    def body(comm):
        broadcaster = Broadcaster(comm, config=CONFIG, codec=Codec(), timeout_s=10.0)
        for size in (10, 6000, 20_000):
            first, second = bytes(size), b"\1" * size
            got = getattr(broadcaster, verb)(second if comm.rank else first, timeout_s=10.0)
            right = {"broadcast": first, "allgather": [first, second], "gather": None if comm.rank else [first, second]}
            assert got == right[verb]
        return True

    assert FakeWorld(2).run(body) == [True, True]


class Renamed(str):
    """A text whose methods are somebody else's."""

    def replace(self, *arguments):
        raise RuntimeError("not this")

    encode = replace


class Hidden(type):
    """A class that does not want to be looked at."""

    def __getattribute__(cls, name):
        raise RuntimeError("not this")


class HiddenError(Exception, metaclass=Hidden):
    """One such."""


class FrozenError(Exception):
    """Takes no attribute."""

    def __setattr__(self, name, value):
        raise RuntimeError("not this")


def odd_errors():
    chain = ValueError("0")
    for number in range(1500):
        following = ValueError(str(number))
        following.__cause__, chain = chain, following
    return {
        "name": type(Renamed("OddError"), (Exception,), {"__str__": lambda self: Renamed("")})(),
        "text": type("TextError", (Exception,), {"__str__": lambda self: Renamed("text")})(),
        "class": HiddenError(),
        "frozen": FrozenError(),
        "chain": chain,
        "long": ValueError("\ud800\0x" * 5000),
    }


@pytest.mark.parametrize("agree", [False, True])
@pytest.mark.parametrize("kind", ["name", "text", "class", "frozen", "chain", "long"])
def test_errors_of_any_make_are_told_once(kind, agree):
    """Of the root's encoding and of a peer's decoding, and everything works afterwards."""
    error = odd_errors()[kind]

    class Odd(PickleCodec):
        fails = ""

        def encode(self, value):
            if value == "bad" and self.fails == "encode":
                raise error
            return super().encode(value)

        def decode(self, segments):
            value = super().decode(segments)
            if value == "bad" and self.fails == "decode":
                raise error
            return value

    def body(comm):
        codec = Odd()
        broadcaster = Broadcaster(comm, codec=codec, config=BroadcastConfig(agree=agree), timeout_s=10.0)
        codec.fails = "encode" if comm.rank == 0 else "decode"
        value = "bad" if comm.rank == 0 else None
        with pytest.raises(BroadcastError):
            broadcaster.broadcast(value, timeout_s=10.0)
        codec.fails = "decode"
        told = 0
        for _ in range(2):
            try:
                broadcaster.broadcast(value, timeout_s=10.0)
            except BroadcastError:
                told += 1
            value = None
        return told, broadcaster.allgather(comm.rank, timeout_s=10.0)

    told = {(1, 1)} if agree else {(1, 2)}
    results = FakeWorld(2).run(body)
    assert {tuple(r[0] for r in results)} == told, results
    assert [r[1] for r in results] == [[0, 1]] * 2


# -- arguments, callbacks, owners -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wait", "timeout_s", "codec"])
@pytest.mark.parametrize("kind", FOREIGN)
def test_an_argument_that_cannot_be_used_sends_nothing(name, kind):
    """Whatever it is: the call does not count, and the same call without it works."""

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 1:
            for verb in VERBS:
                with pytest.raises(BroadcastConfigError, match=name):
                    getattr(broadcaster, verb)(1, **{name: FOREIGN[kind]})
            handle = broadcaster.start_allgather(1)
            if name != "codec":
                with pytest.raises(BroadcastConfigError, match=name):
                    handle.wait(**{name: FOREIGN[kind]})
            if name == "timeout_s":
                with pytest.raises(BroadcastConfigError, match=name):
                    broadcaster.close(timeout_s=FOREIGN[kind])
            assert broadcaster.begun == 1
            return handle.wait(timeout_s=10.0)
        return broadcaster.allgather(0, timeout_s=10.0)

    assert FakeWorld(2).run(body) == [[0, 1]] * 2


@pytest.mark.parametrize("error", [StopIteration(7), StopAsyncIteration(7), GeneratorExit(7), RuntimeError(7)])
@pytest.mark.parametrize("way", ["block", "handle"])
def test_what_wait_raises_stays_itself(error, way):
    """Though the call is driven by a generator, which cannot raise everything."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            assert gate.wait(10)
            return [broadcaster.broadcast(n) for n in range(2)]

        def wait(timeout_s):
            gate.set()
            raise error

        with pytest.raises(type(error)) as caught:
            broadcaster.broadcast(wait=wait) if way == "block" else broadcaster.start_broadcast().wait(wait)
        assert caught.value is error
        return broadcaster.broadcast(timeout_s=10.0)

    assert FakeWorld(2).run(body) == [[0, 1], 1]


def test_a_communicator_serves_one_broadcaster():
    """Of two on one communicator the second finds operations under way: it is refused, and the first goes on."""
    gate = threading.Event()

    def body(comm):
        first, second = Broadcaster(comm), Broadcaster(comm)
        if comm.rank == 0:
            assert gate.wait(10)
            return first.broadcast("value")
        handle = first.start_broadcast()
        with pytest.raises(LocalProtocolError, match="serves one broadcaster"):
            second.start_broadcast()
        with pytest.raises(LocalProtocolError, match="serves one broadcaster"):
            second.close()
        with pytest.raises(BroadcastConfigError, match="used by nobody else"):
            Broadcaster(comm)
        gate.set()
        return handle.wait(timeout_s=10.0)

    assert FakeWorld(2).run(body) == ["value", "value"]


def test_a_handle_that_a_traceback_keeps_can_be_given_up():
    """The function that held it has ended with an exception; what handles the exception goes on with the others."""

    def work(broadcaster):
        handle = broadcaster.start_broadcast("lost")
        raise ValueError(handle)

    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            assert gate.wait(10)
            return broadcaster.broadcast("lost"), broadcaster.broadcast("sorry")
        try:
            work(broadcaster)
        except ValueError:
            with pytest.raises(LocalProtocolError, match=r"abandon\(\)"):
                broadcaster.broadcast()
            broadcaster.abandon()
            gate.set()
            return broadcaster.broadcast(timeout_s=10.0)

    assert FakeWorld(2).run(body) == [("lost", "sorry"), "sorry"]


def test_a_finalizer_of_a_value_may_begin_the_next_exchange():
    """It runs where the value is forgotten: within the object that it calls, when a gather has ended that keeps none here."""
    begun: list[Any] = []
    gate = threading.Event()

    class Last:
        def __init__(self, broadcaster):
            self.broadcaster = broadcaster

        def __reduce__(self):
            return str, ("first",)

        def __del__(self):
            begun.append(self.broadcaster.start_gather("second"))

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            assert gate.wait(10)
            return [broadcaster.gather("mine", timeout_s=10.0) for _ in range(3)]
        handle = broadcaster.start_gather(Last(broadcaster))
        assert not begun
        gate.set()
        assert handle.wait(timeout_s=10.0) is None
        assert (len(begun), broadcaster.begun) == (1, 2)
        begun.pop().wait(timeout_s=10.0)
        return broadcaster.gather("third", timeout_s=10.0)

    assert FakeWorld(2).run(body) == [[["mine", word] for word in ("first", "second", "third")], None]


@pytest.mark.parametrize(
    "value", [b"", bytearray(), np.empty(0, np.int32), np.empty((0, 3)), np.empty((3, 0, 2)), np.empty((), np.int8)]
)
def test_buffers_of_any_shape_go_in(value):
    """Empty ones in several dimensions, too."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=BytesCodec())
        return broadcaster.allgather(value)[1 - comm.rank] == bytes(memoryview(value))

    assert FakeWorld(2).run(body) == [True, True]


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", [7000, 50_000])
def test_a_rank_without_any_memory_takes_part(verb, size, monkeypatch):
    """It reserved what it needs for that at construction: nothing can be had afterwards, and the others have their values."""
    victim = 0 if verb == "gather" else 1
    poor: set[int] = set()

    def guard(real):
        def allocate(*arguments, **options):
            if threading.get_ident() in poor:
                raise MemoryError("none left")
            return real(*arguments, **options)

        return allocate

    monkeypatch.setattr(pool.np, "empty", guard(np.empty))
    monkeypatch.setattr(pool.mmap, "mmap", guard(pool.mmap.mmap))
    monkeypatch.setattr(pool, "bytearray", guard(bytearray), raising=False)

    def body(comm):
        broadcaster = Broadcaster(comm, config=CONFIG)
        make = lambda rank: bytes([rank]) * size  # noqa: E731
        if comm.rank == victim:
            poor.add(threading.get_ident())
        try:
            getattr(broadcaster, verb)(make(comm.rank) if comm.rank != victim else 0, timeout_s=10.0)
            got = "value"
        except BroadcastError as error:
            got = error.cause
        poor.discard(threading.get_ident())
        with pytest.raises(BroadcastError, match="none left"):
            broadcaster.allgather(comm.rank, timeout_s=10.0)
        return got, broadcaster.allgather(comm.rank, timeout_s=10.0)

    results = FakeWorld(3).run(body)
    assert [r[1] for r in results] == [[0, 1, 2]] * 3
    assert ["none left" in r[0] for r in results] == [rank == victim for rank in range(3)]


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="MISSING COVERAGE: mpi4py is not installed")
@pytest.mark.parametrize(("place", "given_back"), [("mpi._IN_FLIGHT", 0), ("mpi.another", 1)])
def test_what_mpi_may_still_write_outlives_the_interpreters_modules(place, given_back):
    """MPI_Finalize comes after Python's end and goes on with a receive that is under way: its memory must still be there."""
    program = f"""
import os
from mpi4py import MPI
import comm_broadcast._mpi as mpi
class Buffer(bytearray):
    def __del__(self, write=os.write):
        write(1, b"given back ")
mpi.another = []
{place}.append([MPI.COMM_SELF.Irecv([Buffer(64), MPI.BYTE], source=0, tag=1)])
os.write(1, b"begun ")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.stdout == b"begun " + b"given back " * given_back, done
