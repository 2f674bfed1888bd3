"""What goes wrong between exchanges: interrupted callers, failures told once, memory that is not there, views that are kept."""

import contextlib
import gc
import mmap
import os
import random
import re
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from comm_broadcast import (
    BroadcastConfig,
    BroadcastConfigError,
    Broadcaster,
    BroadcastError,
    BytesCodec,
    CallMismatchError,
    LocalProtocolError,
    RemoteProtocolError,
    TokenBatchCodec,
    TransportError,
    _window,
)
from comm_broadcast._codec import BufferSegment, Segment
from comm_broadcast._pool import BufferPool
from comm_broadcast.testing import FakeWorld

sys.path.insert(0, str(Path(__file__).parent))
from broadcast_values import Poison


class Request(msgspec.Struct):
    """An engine's request; its second token field may be absent."""

    request_id: int
    tokens: np.ndarray
    draft: np.ndarray | None = None


class KeywordRequest(msgspec.Struct, kw_only=True):
    """A struct whose fields are given by name."""

    tokens: np.ndarray
    name: str


class Interrupt:
    """A caller's wait that is interrupted once."""

    def __init__(self):
        self.left = 1

    def __call__(self, timeout_s):
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt
        threading.Event().wait(timeout_s)


def test_an_interrupted_wait_is_finished_by_the_next_exchange():
    """A peer gives up while the root is late: its next broadcast finishes the old one first, and all stay in step."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            assert gate.wait(10)
            return [broadcaster.broadcast("first"), broadcaster.broadcast("second"), broadcaster.allgather(0)]
        if comm.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                broadcaster.broadcast(wait=Interrupt())
            gate.set()
            second = broadcaster.broadcast()
            assert broadcaster.statistics().abandoned == 1
            return [second, broadcaster.allgather(1)]
        return [broadcaster.broadcast(), broadcaster.broadcast(), broadcaster.allgather(2)]

    first, second, third = FakeWorld(3).run(body)
    assert first == third == ["first", "second", [0, 1, 2]]
    assert second == ["second", [0, 1, 2]]


@pytest.mark.parametrize("everywhere", [False, True])
def test_an_interrupted_gather_is_finished_too(everywhere):
    """With payloads that follow the first frame; the next exchange may be of another kind."""
    late = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm)
        call = broadcaster.allgather if everywhere else broadcaster.gather
        mine = np.full(20_000, comm.rank)
        if comm.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                call(mine, wait=Interrupt())
            late.set()
        elif comm.rank == 0:
            assert late.wait(10)
            got = call(mine)
            assert [int(a[0]) for a in got] == [0, 1, 2]
        else:
            call(mine)
        return broadcaster.broadcast("next" if comm.rank == 0 else None)

    assert FakeWorld(3).run(body) == ["next"] * 3


def test_an_abandoned_exchange_that_failed_is_past():
    """Its error was raised by the others; the one that gave up sees the next exchange only."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm, codec=Poison(comm.rank == 1))
        if comm.rank == 0:
            assert gate.wait(10)
            with pytest.raises(BroadcastError):
                broadcaster.broadcast(lambda: None)
        else:
            with pytest.raises(KeyboardInterrupt):
                broadcaster.broadcast(wait=Interrupt())
            gate.set()
        value = broadcaster.broadcast("next" if comm.rank == 0 else None)
        broadcaster.close()
        return value

    assert FakeWorld(2).run(body) == ["next"] * 2


@pytest.mark.parametrize("abandon", [False, True])
def test_close_finishes_what_is_open(abandon):
    """So that nobody waits for this rank, whether it gave the exchange up before or has it open still."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            assert gate.wait(10)
            broadcaster.broadcast(b"x" * 100_000)
        else:
            handle = broadcaster.start_broadcast()
            if abandon:
                handle.abandon()
            gate.set()
        broadcaster.close()
        return len(world.operations(comm.rank))

    world = FakeWorld(2)
    first, second = world.run(body)
    assert first == second > 2


@pytest.mark.parametrize("following", ["gather", "allgather"])
def test_a_failure_is_told_once(following):
    """The gather that follows raises everywhere; the report that the root finds later adds nothing."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=Poison(comm.rank == 1))
        if comm.rank == 1:
            with pytest.raises(BroadcastError) as caught:
                broadcaster.broadcast()
            assert (caught.value.rank, caught.value.earlier) == (1, False)
        else:
            broadcaster.broadcast("poison" if comm.rank == 0 else None)
        with pytest.raises(BroadcastError) as caught:
            getattr(broadcaster, following)(comm.rank)
        assert (caught.value.rank, caught.value.earlier) == (1, True)
        assert "cannot be decoded" in caught.value.cause
        return [broadcaster.broadcast(n if comm.rank == 0 else None) for n in range(5)]

    assert FakeWorld(3).run(body) == [list(range(5))] * 3


def test_ranks_that_failed_are_told_at_once():
    """All failures raise in one exchange, everywhere, with each rank's cause; then all is well."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=Poison(comm.rank > 0))
        try:
            broadcaster.broadcast("poison" if comm.rank == 0 else None)
        except BroadcastError:
            pass
        told = []
        for n in range(4):
            try:
                assert broadcaster.broadcast(n if comm.rank == 0 else None) == n
            except BroadcastError as error:
                told.append([(f.rank, f.earlier, "cannot be decoded" in f.cause) for f in error.failures])
        return told

    assert FakeWorld(5).run(body) == [[[(rank, True, True) for rank in range(1, 5)]]] * 5


def test_a_root_that_cannot_decode_a_gather_tells_in_its_next_frame():
    """Gather at the root: only it decodes, so only it knows."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=Poison(comm.rank == 0))
        value = "poison" if comm.rank == 1 else "fine"
        if comm.rank == 0:
            with pytest.raises(BroadcastError, match="rank 0"):
                broadcaster.gather(value)
        else:
            broadcaster.gather(value)
        with pytest.raises(BroadcastError) as caught:
            broadcaster.broadcast("lost" if comm.rank == 0 else None)
        assert (caught.value.rank, caught.value.earlier) == (0, True)
        return broadcaster.broadcast("next" if comm.rank == 0 else None)

    assert FakeWorld(2).run(body) == ["next"] * 2


class Full(BufferPool):
    """Memory for small things only."""

    def take(self, size):
        if size > 50_000:
            raise MemoryError(f"{size} bytes")
        return super().take(size)


def big_value():
    return {"a": np.arange(30_000), "b": np.ones(40_000), "c": [np.zeros(9_000), b"x" * 200_000]}


@pytest.mark.parametrize("agree", [False, True])
@pytest.mark.parametrize("call", ["broadcast", "gather", "allgather"])
def test_a_rank_without_memory_stays_in_step(call, agree):
    """Block and several large buffers, many chunks: it takes part in all of them, raises, and the next exchange works."""
    world = FakeWorld(3)

    def body(comm):
        config = BroadcastConfig(chunk_bytes=4096, gather_bytes_max=100_000, agree=agree)
        broadcaster = Broadcaster(comm, config=config)
        hungry = 0 if call == "gather" else 2
        if comm.rank == hungry:
            broadcaster.pool = Full(0)
        value = None if call == "broadcast" and comm.rank else "small" if comm.rank == hungry else big_value()
        if agree or comm.rank == hungry:
            with pytest.raises(BroadcastError, match="MemoryError") as caught:
                getattr(broadcaster, call)(value)
            assert caught.value.rank == hungry
        else:
            getattr(broadcaster, call)(value)
        gathered = []
        if not agree:
            with pytest.raises(BroadcastError, match="earlier"):
                broadcaster.allgather(1)
        gathered.append(broadcaster.allgather(comm.rank))
        return gathered

    assert world.run(body) == [[[0, 1, 2]]] * 3
    assert world.operations(0) == world.operations(1) == world.operations(2)


class BrokenComm:
    """A communicator that fails at some operation."""

    def __init__(self, comm, after):
        self._comm = comm
        self._left = after
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def iallgather(self, send, receive):
        self._left -= 1
        if self._left < 0:
            raise TransportError("Iallgather", self.rank, RuntimeError("link down"))
        return self._comm.iallgather(send, receive)


def test_a_communicator_that_fails_breaks_the_object():
    """The error is the package's own, says what and where; every later call repeats it; closing waits for nobody."""
    comm = BrokenComm(FakeWorld(1).comm(0), 2)
    broadcaster = Broadcaster(comm)
    assert broadcaster.broadcast("works") == "works"
    with pytest.raises(TransportError, match="rank 0: Iallgather: link down") as caught:
        broadcaster.broadcast("fails")
    assert caught.value.operation == "Iallgather"
    with pytest.raises(LocalProtocolError, match="broken: rank 0: Iallgather"):
        broadcaster.broadcast("again")
    broadcaster.close()


def test_a_communicator_that_cannot_be_freed_is_given_up():
    """Closing says so once; the object is closed all the same."""

    class Kept(BrokenComm):
        def free(self):
            raise TransportError("Free", self.rank, RuntimeError("busy"))

    broadcaster = Broadcaster(Kept(FakeWorld(1).comm(0), 9))
    with pytest.raises(TransportError, match="rank 0: Free: busy"):
        broadcaster.close()
    broadcaster.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        broadcaster.broadcast(1)


def test_ranks_that_are_not_level_are_noticed_by_all():
    """One rank is an exchange behind: the frames say so to everybody, and the object refuses from then on."""

    def body(comm):
        broadcaster = Broadcaster(comm)
        broadcaster.last = broadcaster.last._replace(sequence=comm.rank)
        with pytest.raises(RemoteProtocolError, match="not level"):
            broadcaster.broadcast("x")
        with pytest.raises(LocalProtocolError, match="broken"):
            broadcaster.broadcast("x")

    assert FakeWorld(2).run(body) == [None, None]


@pytest.mark.parametrize("call", ["gather", "allgather"])
def test_gathers_do_not_stop_a_shared_window(call):
    """Any mixture of exchanges: the root never waits for an acknowledgement that will not come."""

    def body(comm):
        config = BroadcastConfig(shared_slot_bytes=1 << 20)
        broadcaster = Broadcaster(comm, config=config)
        for step in range(12):
            got = broadcaster.broadcast(np.full(10_000, step) if comm.rank == 0 else None)
            assert (got == step).all()
            if step % 3:
                getattr(broadcaster, call)(comm.rank)
        return broadcaster.statistics().shared

    assert FakeWorld(3).run(body) == [12, 0, 0]


@pytest.mark.parametrize("how", ["calls differ", "a copy fails", "a failure is told"])
def test_slots_of_exchanges_that_came_to_nothing_are_free_again(how):
    """The root wrote them, and nobody will look at them: after four of them a value goes through the window as before."""

    def body(comm):
        codec = HaltingCodec() if how == "a copy fails" else Poison(comm.rank == 1)
        broadcaster = Broadcaster(comm, codec=codec, config=BroadcastConfig(shared_slot_bytes=1 << 17))
        bad, good = ((1, 90_000, 3), (1, 90_000, None)) if how == "a copy fails" else ("x" * 9000, "y" * 9000)
        other = how == "calls differ" and comm.rank == 1
        lost = 0
        for _ in range(4):
            if how == "a failure is told":
                with contextlib.suppress(BroadcastError):
                    broadcaster.broadcast("poison")
            try:
                (broadcaster.allgather if other else broadcaster.broadcast)(bad)
            except (BroadcastError, CallMismatchError, KeyboardInterrupt):
                lost += 1
        broadcaster.broadcast(good)
        return lost, broadcaster.statistics().shared

    assert FakeWorld(2).run(body) == [(4, 1), (4, 0)]


def test_a_failure_is_told_after_calls_that_did_not_match():
    """Those come first, and what a rank has to tell waits for the next exchange."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=Poison(comm.rank == 1))
        with contextlib.suppress(BroadcastError):
            broadcaster.broadcast("poison")
        with pytest.raises(CallMismatchError):
            (broadcaster.allgather if comm.rank else broadcaster.broadcast)("other")
        with pytest.raises(BroadcastError) as caught:
            broadcaster.broadcast("lost")
        assert (caught.value.rank, caught.value.earlier) == (1, True)
        return broadcaster.broadcast("next")

    assert FakeWorld(2).run(body) == ["next"] * 2


def batch(step, count=4, size=5000):
    return [Request(i, np.full(size, step * 10 + i, np.int32)) for i in range(count)]


def intact(kept):
    return all((r.tokens == step * 10 + r.request_id).all() for step, requests in kept for r in requests)


@pytest.mark.parametrize("shared", [0, 1 << 20])
def test_views_that_are_kept_stay_what_they_were(shared):
    """However long, through however many exchanges, after close too: a kept view keeps its memory from being reused."""

    def body(comm):
        broadcaster = Broadcaster(
            comm, config=BroadcastConfig(shared_slot_bytes=shared), codec=TokenBatchCodec(Request)
        )
        kept = []
        for step in range(20):
            got = broadcaster.broadcast(batch(step) if comm.rank == 0 else None)
            if step % 4 == 1 and comm.rank != 2:
                kept.append((step, got))
            assert intact(kept)
            # Everybody has dropped what it does not keep before the root writes again.
            del got
            broadcaster.allgather(None)
        shared_count = broadcaster.statistics().shared
        broadcaster.close()
        del broadcaster
        gc.collect()
        assert intact(kept)
        return shared_count

    root, *_ = FakeWorld(3).run(body)
    # Both slots are held by views of rank 1 after step 5: from then on payloads travel as without a window.
    assert root == (6 if shared else 0)


def test_memory_is_reused_when_views_are_dropped():
    """A hundred equal batches need two blocks at most, on root and peer."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=TokenBatchCodec(Request))
        for step in range(100):
            got = broadcaster.broadcast(batch(step) if comm.rank == 0 else None)
            assert len(got) == 4
        return broadcaster.statistics().allocations

    assert all(count <= 2 for count in FakeWorld(2).run(body))


def test_the_pool_keeps_what_it_may():
    """Free buffers up to the limit, larger ones never; a buffer in use is never handed out again."""
    pool = BufferPool(1 << 20)
    first = pool.take(100_000)
    first[:] = 1
    view = first[10:20]
    del first
    second = pool.take(100_000)
    second[:] = 2
    assert (view == 1).all()
    del view
    third = pool.take(100_000)
    assert pool.allocations == 2
    big = pool.take(2 << 20)
    assert pool.allocations == 3
    del second, third, big
    assert pool.idle_bytes == 2 * (1 << 17)
    pool.take(900_000)
    assert pool.idle_bytes <= 1 << 20


def test_a_window_needs_one_node(monkeypatch):
    """A rank that cannot map the root's memory: every rank refuses, naming it; no file is left."""
    paths, make = [], _window._make
    monkeypatch.setattr(_window, "_make", lambda path, total: [paths.append(path), make(path, total)][1])

    class Elsewhere:
        """A rank that is told of a file that is not there."""

        def __init__(self, comm):
            self._comm = comm
            self.rank, self.size = comm.rank, comm.size
            self._gathers = 0

        def __getattr__(self, name):
            return getattr(self._comm, name)

        def iallgather(self, send, receive):
            self._gathers += 1
            if self._gathers == 2 and self.rank == 0:
                send[:60] = b"/dev/shm/comm-broadcast-" + b"0" * 32 + b"\0" * 4
            return self._comm.iallgather(send, receive)

    def body(comm):
        with pytest.raises(BroadcastConfigError, match="rank 1: the ranks must be on one node"):
            Broadcaster(Elsewhere(comm), config=BroadcastConfig(shared_slot_bytes=4096))

    assert FakeWorld(2).run(body) == [None, None]
    assert paths and not [path for path in paths if os.path.exists(path)]


@pytest.mark.parametrize(
    "value", [None, b"", b"abc", b"x" * 70_000, bytearray(b"yz"), memoryview(b"12"), np.arange(3, dtype=np.int32)]
)
@pytest.mark.parametrize("copy", [True, False])
def test_bytes_travel_as_they_are(value, copy):
    """No pickle: None, bytes of any size, any buffer; bytes or a read-only view come out; the root keeps its object."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=BytesCodec(copy=copy))
        got = broadcaster.broadcast(value if comm.rank == 0 else None)
        everybody = broadcaster.allgather(None if comm.rank == 0 else b"me")
        assert everybody[0] is None
        if comm.rank == 0:
            assert got is value
            assert everybody[1] == b"me"
        elif value is None:
            assert got is None
        else:
            assert type(got) is (bytes if copy else memoryview)
            assert memoryview(got).readonly
            assert bytes(got) == bytes(memoryview(value).cast("B"))
        return True

    assert FakeWorld(2).run(body) == [True, True]


def test_what_is_no_buffer_is_refused_by_the_bytes_codec():
    """Everywhere, by type."""

    def body(comm):
        with pytest.raises(BroadcastError, match="TypeError"):
            Broadcaster(comm, codec=BytesCodec()).broadcast([1] if comm.rank == 0 else None)

    assert FakeWorld(2).run(body) == [None, None]


@pytest.mark.parametrize(
    "value",
    [
        None, [], (), [Request(1, None)], [Request(1, [1, 2], [3])], (Request(1, (4,)), Request(2, np.arange(3), None)),
        [Request(i, list(range(i)), np.arange(i, dtype=np.int16) if i % 3 else None) for i in range(100)],
    ],
)  # fmt: skip
def test_token_batches_of_every_shape(value):
    """None, no requests, tuples (which arrive as lists), absent token fields, two token fields, more than one group."""

    def body(comm):
        return Broadcaster(comm, codec=TokenBatchCodec(Request)).broadcast(value if comm.rank == 0 else None)

    first, second = FakeWorld(2).run(body)
    assert first is value
    if value is None:
        assert second is None
        return
    assert type(second) is list
    assert len(second) == len(value)
    for sent, got in zip(value, second, strict=True):
        assert got.request_id == sent.request_id
        for name in ("tokens", "draft"):
            want = getattr(sent, name)
            assert (getattr(got, name) is None) == (want is None)
            if want is not None:
                assert getattr(got, name).tolist() == list(want)


def test_fields_given_by_name_only():
    """kw_only structs are made by name."""

    def body(comm):
        value = [KeywordRequest(tokens=np.arange(3), name="a")] if comm.rank == 0 else None
        got = Broadcaster(comm, codec=TokenBatchCodec(KeywordRequest)).broadcast(value)
        return got[0].name, got[0].tokens.tolist()

    assert FakeWorld(2).run(body) == [("a", [0, 1, 2])] * 2


@pytest.mark.parametrize("value", [b"abc", "abc", 5])
def test_what_is_no_batch_is_refused_by_name(value):
    """Everywhere."""

    def body(comm):
        with pytest.raises(BroadcastError, match="TypeError"):
            Broadcaster(comm, codec=TokenBatchCodec(Request)).broadcast(value if comm.rank == 0 else None)

    assert FakeWorld(2).run(body) == [None, None]


def test_codecs_of_other_field_types_are_refused_at_construction():
    """Equal names, other types: the peers would misread every batch. Long settings differ beyond what a text can show."""
    other = msgspec.defstruct("Request", [("request_id", str), ("tokens", np.ndarray), ("draft", np.ndarray | None)])
    long = [(f"field_with_a_rather_long_name_{i}", int) for i in range(60)]
    wide = [msgspec.defstruct("W", [*long, ("last", kind), ("tokens", np.ndarray)]) for kind in (int, float)]

    def types(comm):
        with pytest.raises(BroadcastConfigError, match="codec"):
            Broadcaster(comm, codec=TokenBatchCodec(other if comm.rank else Request))

    def cut(comm):
        with pytest.raises(BroadcastConfigError, match="rank 1 differs from rank 0"):
            Broadcaster(comm, codec=TokenBatchCodec(wide[comm.rank]))

    for body in (types, cut):
        assert FakeWorld(2).run(body) == [None, None]


def test_damaged_descriptions_are_refused():
    """Counts that do not fit the bytes raise the package's error, never an index error."""
    codec = TokenBatchCodec(Request)
    segments = codec.encode([Request(1, [1, 2, 3]), Request(2, [4])])
    data = []
    for segment in segments:
        data.append(bytearray(segment.nbytes))
        segment.write_into(memoryview(data[-1]))
    head, tokens = data
    for bad in ((b"\\xff\\0\\0\\0" + head[4:], tokens), (head, tokens[:8]), (head, tokens + tokens)):
        with pytest.raises(RemoteProtocolError):
            codec.decode([memoryview(bytes(part)) for part in bad])


@pytest.mark.parametrize("token", [2**31, 2**32 - 1, 2**32, -(2**31) - 1, 2**70, "a", 1.5, None, True, False, [1]])
def test_a_token_that_is_none_is_named(token):
    """Request, field, position and value."""

    def body(comm):
        value = [Request(0, [1]), Request(1, [1], [1, token])] if comm.rank == 0 else None
        with pytest.raises(BroadcastError) as caught:
            Broadcaster(comm, codec=TokenBatchCodec(Request)).broadcast(value)
        return caught.value.cause

    first, second = FakeWorld(2).run(body)
    assert first == second == f"ValueError: item 1: draft: token 1: want a 32-bit integer, got {token!r}"


def test_round_trips_of_token_batches_can_be_checked():
    """Lists that come back as vectors are equal; the check does not trip over them."""

    def body(comm):
        config = BroadcastConfig(check_round_trip=True)
        broadcaster = Broadcaster(comm, config=config, codec=TokenBatchCodec(Request))
        return len(broadcaster.broadcast([Request(1, [1, 2]), Request(2, np.arange(4))] if comm.rank == 0 else None))

    assert FakeWorld(2).run(body) == [2, 2]


@pytest.mark.parametrize("token", [True, False, 2**31, 2**32 - 1, np.True_, np.int64(2**31), "x"])
@pytest.mark.parametrize("filler", [0, 1, 2, 150_000, -1])
@pytest.mark.parametrize("place", [0, 7, 499])
def test_a_token_that_is_none_is_found_among_many(token, filler, place):
    """Whatever surrounds it, in lists before and after arrays: padding, special tokens, negative ones."""
    lists = [[filler] * 500 for _ in range(4)]
    lists[2][place] = token
    parts = [lists[0], np.arange(5, dtype=np.int32), lists[1], lists[2], np.arange(3, dtype=np.int32), lists[3]]
    codec = TokenBatchCodec(Request)
    _, tokens = codec.encode([Request(i, part) for i, part in enumerate(parts)])
    wanted = re.escape(f"item 3: tokens: token {place}: want a 32-bit integer, got {token!r}")
    with pytest.raises(ValueError, match=f"^{wanted}$"):
        tokens.write_into(memoryview(bytearray(tokens.nbytes)))


def test_lists_become_the_vectors_that_numpy_makes_of_them():
    """Random lists, tuples, arrays and nothing; edges of the range, NumPy's integers, many small ids: no value changes."""
    rng = random.Random(17)
    kinds = [
        lambda: rng.randrange(150_000), lambda: rng.randrange(3), lambda: 0, lambda: rng.choice([2**31 - 1, -(2**31), -1, 5]),
        lambda: np.int64(rng.randrange(150_000)), lambda: np.uint16(7),
    ]  # fmt: skip
    codec = TokenBatchCodec(Request)
    for _ in range(300):
        batch = []
        for index in range(rng.randrange(1, 9)):
            make = rng.choice(kinds)
            values = [make() for _ in range(rng.choice([0, 1, 5, 300]))]
            shape = rng.choice([list, tuple, lambda v: np.array(v, np.int32), lambda v: np.array(v, np.int64)])
            draft = rng.choice([None, values[:3]])
            batch.append(Request(index, rng.choice([shape(values), values, None]), draft))
        segments = codec.encode(batch)
        data = [memoryview(bytearray(segment.nbytes)) for segment in segments]
        for segment, target in zip(segments, data, strict=True):
            segment.write_into(target)
        for sent, got in zip(batch, codec.decode(data), strict=True):
            for name in ("tokens", "draft"):
                want, have = getattr(sent, name), getattr(got, name)
                assert (want is None) == (have is None)
                if want is not None:
                    assert have.dtype == np.int32
                    assert have.tolist() == [int(token) for token in want]


class Halting(Segment):
    """Copies in ten steps; at one of them it raises."""

    def __init__(self, nbytes, at, error=KeyboardInterrupt):
        self.nbytes, self.at, self.error = nbytes, at, error

    def copy(self, target):
        for step in range(10):
            if step == self.at:
                raise self.error("while copying")
            end = self.nbytes * (step + 1) // 10
            target[self.nbytes * step // 10 : end] = bytes([step]) * (end - self.nbytes * step // 10)
            yield end


class HaltingCodec(BytesCodec):
    """Values are (head bytes, body bytes, where to halt)."""

    def __init__(self, error=KeyboardInterrupt):
        super().__init__()
        self.error = error

    def encode(self, value):
        head, body, at = value
        return [BufferSegment(b"h" * head), Halting(body, at, self.error)]

    def decode(self, segments):
        return bytes(segments[0]), bytes(segments[1])


@pytest.mark.parametrize("form", [{}, {"agree": True}, {"ahead_max": 1}, {"ahead_max": 3}])
@pytest.mark.parametrize("head", [1, 200, 5000])
@pytest.mark.parametrize(
    ("at", "error"), [(0, KeyboardInterrupt), (3, KeyboardInterrupt), (9, KeyboardInterrupt), (3, ValueError)]
)
def test_a_root_that_stops_while_pieces_travel_fails_everybody(at, error, head, form):
    """All ranks raise in this exchange, one without memory too; they did the same operations, and the next works."""
    world = FakeWorld(3)

    def body(comm):
        config = BroadcastConfig(chunk_bytes=4096, **form)
        broadcaster = Broadcaster(comm, config=config, codec=HaltingCodec(error))
        pool = broadcaster.pool
        if comm.rank == 2:
            broadcaster.pool = Full(0)
        with pytest.raises((BroadcastError, KeyboardInterrupt), match="while copying") as caught:
            broadcaster.broadcast((head, 90_000, at) if comm.rank == 0 else None)
        if comm.rank == 0 and error is KeyboardInterrupt:
            assert type(caught.value) is KeyboardInterrupt
        else:
            assert (caught.value.rank, caught.value.earlier) == (0, False)
        broadcaster.pool = pool
        value = broadcaster.broadcast((head, 90_000, None) if comm.rank == 0 else None)
        return True if comm.rank == 0 else (len(value[0]), len(value[1]), set(value[1]))

    assert world.run(body) == [True, *[(head, 90_000, set(range(10)))] * 2]
    assert world.operations(0) == world.operations(1) == world.operations(2)


class Watching(BytesCodec):
    """Notes how many pieces were under way at each step of copying."""

    def __init__(self, comm, log):
        super().__init__()
        self.comm, self.log = comm, log

    def encode(self, value):
        return [BufferSegment(b"h"), Noting(value, self)]


class Noting(Halting):
    """Asks at each step."""

    def __init__(self, nbytes, codec):
        super().__init__(nbytes, None)
        self.codec = codec

    def copy(self, target):
        for done in super().copy(target):
            self.codec.log.append(len(self.codec.comm._world.operations(0)))
            yield done


def test_pieces_travel_while_the_rest_is_copied():
    """The first is under way before the second is complete, and so on: the others take in what is there."""
    world, log = FakeWorld(2), []

    def body(comm):
        codec = Watching(comm, log) if comm.rank == 0 else BytesCodec()
        return Broadcaster(comm, codec=codec).broadcast(5 << 20 if comm.rank == 0 else None)

    _, got = world.run(body)
    assert len(got) == 5 << 20
    assert log[-1] - log[0] >= 8, log
    assert world.operations(0) == world.operations(1)


def test_large_buffers_need_no_block_of_their_own():
    """What is not large fits in the first frame, beside the large ones' sizes: one operation, and one for each of those."""
    world = FakeWorld(2)

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(gather_bytes_max=10_000))
        before = len(world.operations(comm.rank))
        value = [np.arange(5000), "text", np.ones(9000)] if comm.rank == 0 else None
        got = broadcaster.broadcast(value)
        assert got[0].sum() == np.arange(5000).sum()
        return len(world.operations(comm.rank)) - before

    assert world.run(body) == [3, 3]


class HeadPoison(TokenBatchCodec):
    """Refuses to decode on one rank, before the tokens are there."""

    def __init__(self, refuse):
        super().__init__(Request)
        self.refuse = refuse

    def decode(self, segments):
        got = super().decode(segments)
        if self.refuse and got and got[0].request_id == 13:
            raise ValueError("not here")
        return got


def test_a_rank_that_fails_on_the_head_takes_the_pieces_all_the_same():
    """Decoded while they travel; its failure is told as any other, and the others have their value."""
    world = FakeWorld(3)

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(chunk_bytes=4096), codec=HeadPoison(comm.rank == 1))
        value = [Request(13, np.arange(20_000, dtype=np.int32))] if comm.rank == 0 else None
        if comm.rank == 1:
            with pytest.raises(BroadcastError, match="not here"):
                broadcaster.broadcast()
        else:
            assert broadcaster.broadcast(value)[0].tokens[-1] == 19_999
        with pytest.raises(BroadcastError, match="earlier"):
            broadcaster.allgather(None)
        return broadcaster.broadcast(batch(1) if comm.rank == 0 else None)[0].tokens[0]

    assert world.run(body) == [10, 10, 10]
    assert world.operations(0) == world.operations(1) == world.operations(2)


@pytest.mark.parametrize("fields", [3, 500])
def test_heads_that_fit_in_the_frame_and_heads_that_do_not(fields):
    """Few requests and many, several pieces, two token fields: what arrives is what was sent."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=TokenBatchCodec(Request))
        value = [Request(i, np.full(9000, i, np.int32), [i, 2, 3]) for i in range(fields)]
        got = broadcaster.broadcast(value if comm.rank == 0 else None)
        return all((r.tokens == r.request_id).all() and list(r.draft) == [r.request_id, 2, 3] for r in got)

    assert FakeWorld(2).run(body) == [True, True]


def test_large_buffers_of_the_pool_begin_at_huge_pages():
    """Where the system has them, and the memory is as good where it has not."""
    pool = BufferPool(64 << 20)
    array = pool.take(3 << 20)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert array.ctypes.data % (2 << 20) == 0
    array[:] = 7
    again = pool.take(3 << 20)
    assert again.ctypes.data != array.ctypes.data


@pytest.mark.parametrize("error", [OSError(22, "Invalid argument"), AttributeError("MADV_HUGEPAGE")])
def test_a_system_without_huge_pages_has_ordinary_ones(error, monkeypatch):
    """The advice is refused; the buffer is whole."""

    class Refusing(mmap.mmap):
        def madvise(self, *arguments):
            raise error

    monkeypatch.setattr("comm_broadcast._pool.mmap.mmap", Refusing)
    array = BufferPool(64 << 20).take(3 << 20)
    array[:] = 7
    assert int(array.sum()) == 7 * (3 << 20)
