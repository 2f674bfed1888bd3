"""What goes wrong between exchanges: interrupted callers, failures told once, memory that is not there, views that are kept."""

import gc
import os
import threading

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
    RemoteProtocolError,
    TokenBatchCodec,
    TransportError,
)
from comm_broadcast._pool import BufferPool
from comm_broadcast.testing import FakeWorld


class Request(msgspec.Struct):
    """An engine's request; its second token field may be absent."""

    request_id: int
    tokens: np.ndarray
    draft: np.ndarray | None = None


class KeywordRequest(msgspec.Struct, kw_only=True):
    """A struct whose fields are given by name."""

    tokens: np.ndarray
    name: str


class Poison(PickleCodec):
    """Refuses to decode one value on one rank."""

    def __init__(self, refuse):
        super().__init__()
        self.refuse = refuse

    def decode(self, segments):
        value = super().decode(segments)
        if self.refuse and value == "poison":
            raise ValueError("cannot be rebuilt here")
        return value


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


def test_close_finishes_an_abandoned_exchange():
    """So that nobody waits for this rank; one that is merely open is refused."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            assert gate.wait(10)
            broadcaster.broadcast(b"x" * 100_000)
        else:
            handle = broadcaster.start_broadcast()
            with pytest.raises(LocalProtocolError, match="close"):
                broadcaster.close()
            handle.abandon()
            gate.set()
        broadcaster.close()
        return len(world.operations(comm.rank))

    world = FakeWorld(2)
    first, second = world.run(body)
    assert first == second


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
        assert "cannot be rebuilt" in caught.value.cause
        return [broadcaster.broadcast(n if comm.rank == 0 else None) for n in range(5)]

    assert FakeWorld(3).run(body) == [list(range(5))] * 3


def test_two_ranks_that_failed_are_told_one_after_the_other():
    """Each failure raises in one exchange, everywhere; then all is well."""
    reported = threading.Barrier(3)

    def body(comm):
        broadcaster = Broadcaster(comm, codec=Poison(comm.rank > 0))
        try:
            broadcaster.broadcast("poison" if comm.rank == 0 else None)
        except BroadcastError:
            pass
        reported.wait(10)
        ranks = []
        for n in range(4):
            try:
                assert broadcaster.broadcast(n if comm.rank == 0 else None) == n
            except BroadcastError as error:
                ranks.append(error.rank)
        return ranks

    assert FakeWorld(3).run(body) == [[1, 2]] * 3


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
            broadcaster._pool = Full(0)
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
        self.rank, self.size, self.reports = comm.rank, comm.size, comm.reports

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def ibcast(self, buffer, root):
        self._left -= 1
        if self._left < 0:
            raise TransportError("Ibcast", self.rank, RuntimeError("link down"))
        return self._comm.ibcast(buffer, root)


def test_a_communicator_that_fails_breaks_the_object():
    """The error is the package's own, says what and where; every later call repeats it; closing waits for nobody."""
    comm = BrokenComm(FakeWorld(1).comm(0), 1)
    broadcaster = Broadcaster(comm)
    assert broadcaster.broadcast("works") == "works"
    with pytest.raises(TransportError, match="rank 0: Ibcast: link down") as caught:
        broadcaster.broadcast("fails")
    assert caught.value.operation == "Ibcast"
    with pytest.raises(LocalProtocolError, match="broken: rank 0: Ibcast"):
        broadcaster.broadcast("again")
    broadcaster.close()


def test_calls_that_do_not_match_are_noticed():
    """One rank is an exchange behind: the frames say so, and the object refuses from then on."""

    def body(comm):
        broadcaster = Broadcaster(comm)
        broadcaster._sequence += comm.rank
        if comm.rank:
            with pytest.raises(RemoteProtocolError, match="calls do not match"):
                broadcaster.broadcast()
            with pytest.raises(LocalProtocolError, match="broken"):
                broadcaster.broadcast()
        else:
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


def test_a_window_needs_one_node():
    """A rank that cannot map the root's memory: every rank refuses, naming it; no file is left."""
    before = set(os.listdir("/dev/shm"))

    class Elsewhere:
        """A rank that is told of a file that is not there."""

        def __init__(self, comm):
            self._comm = comm
            self.rank, self.size, self.reports = comm.rank, comm.size, comm.reports
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
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("comm-broadcast")]


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


@pytest.mark.parametrize("token", [2**31, "a", 1.5, None])
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
