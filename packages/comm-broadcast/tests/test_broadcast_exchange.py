"""Exchanges over threads: values, counts of operations, failures after which the next exchange works."""

import pickle
import random
import sys
import threading
import types
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
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
from comm_broadcast.testing import FakeWorld

sys.path.insert(0, str(Path(__file__).parent))
from broadcast_values import Poison, Unpicklable


class Request(msgspec.Struct):
    """An engine's request."""

    request_id: int
    tokens: np.ndarray
    temperature: float = 0.0
    stop: tuple[int, ...] = ()


class Nameless(PickleCodec):
    """Fails when it is looked at."""

    @property
    def name(self):
        raise ZeroDivisionError

    @name.setter
    def name(self, value):
        pass


def equal(first, second):
    if isinstance(first, np.ndarray):
        return isinstance(second, np.ndarray) and first.dtype == second.dtype and np.array_equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(v, second[k]) for k, v in first.items())
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return type(first) is type(second) and first == second


def values():
    rng = random.Random(7)
    yield from (None, "", "x" * 5000, {}, [], (), {"a": [1, {"b": None}]}, b"\0" * 70_000, 2**80, [True, 1.5, "é"])
    yield list(range(100_000))
    yield [np.arange(n, dtype=np.int64) - 2**40 for n in (0, 1, 600, 100_000)]
    yield {"big": np.ones(500_000, np.float32), "small": np.zeros(3), "strided": np.arange(10_000)[::2]}
    yield [rng.randbytes(rng.randrange(5000)) for _ in range(50)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shared", [0, 1 << 20])
@pytest.mark.parametrize("chunk", [4096, 1 << 30])
def test_every_value_arrives_and_the_root_keeps_its_own(size, shared, chunk):
    """Equal on the others, the very object on the root; every root, inline, chunked, large and shared."""
    for root in {0, size - 1}:
        world = FakeWorld(size)
        if shared and root:
            continue
        config = BroadcastConfig(chunk_bytes=chunk, shared_slot_bytes=shared, gather_bytes_max=100_000)
        cases = list(values())

        def body(comm, root=root, config=config, cases=cases):
            broadcaster = Broadcaster(comm, root, config=config)
            return [broadcaster.broadcast(value if comm.rank == root else None) for value in cases]

        results = world.run(body)
        for rank, got in enumerate(results):
            assert isinstance(got, list), got
            for value, arrived in zip(cases, got, strict=True):
                assert arrived is value if rank == root else equal(value, arrived)
        assert len({tuple(world.operations(r)) for r in range(size)}) == 1


@pytest.mark.parametrize("delta", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("frame", [256, 1024, 4096])
def test_sizes_around_the_frame(frame, delta):
    """One byte more or less than fits into the first frame makes no difference to the value."""
    overhead = 64 + 12 + 64  # header, table, alignment of the first segment at its worst
    payload = b"a" * (frame - overhead + delta)

    def body(comm):
        return Broadcaster(comm, config=BroadcastConfig(frame_bytes=frame)).broadcast(
            payload if comm.rank == 0 else None
        )

    assert FakeWorld(2).run(body) == [payload, payload]


@pytest.mark.parametrize("value", [None, b"x" * 3072, Unpicklable(ValueError("no"))])
def test_nothing_small_values_and_errors_cost_one_operation(value):
    """After construction: one collective."""
    world = FakeWorld(3)

    def body(comm):
        broadcaster = Broadcaster(comm)
        before = len(world.operations(comm.rank))
        try:
            broadcaster.broadcast(value if comm.rank == 0 else None)
        except BroadcastError:
            pass
        return len(world.operations(comm.rank)) - before

    assert world.run(body) == [1, 1, 1]


def test_a_value_is_pickled_once_and_never_read_back(monkeypatch):
    """The root serialises once and unpickles nothing."""
    calls = {"dump": 0, "load": 0}

    def counted(name, function):
        def call(*arguments, **options):
            calls[name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr("comm_broadcast._codec.pickle.dumps", counted("dump", pickle.dumps))
    monkeypatch.setattr("comm_broadcast._codec.pickle.loads", counted("load", pickle.loads))
    FakeWorld(3).run(lambda comm: Broadcaster(comm).broadcast({"a": 1} if comm.rank == 0 else None))
    assert calls == {"dump": 1, "load": 2}


@pytest.mark.parametrize(
    "error", [ValueError("no way"), KeyboardInterrupt(), SystemExit(3), MemoryError("full"), RecursionError("deep")]
)
@pytest.mark.parametrize("agree", [False, True])
def test_a_root_that_cannot_encode_fails_everybody_and_the_next_works(error, agree):
    """Every rank raises, naming the rank and the cause; an interrupt stays itself where it came; nobody hangs."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(agree=agree))
        with pytest.raises((BroadcastError, type(error))) as caught:
            broadcaster.broadcast(Unpicklable(error) if comm.rank == 0 else None)
        if comm.rank == 0 and not isinstance(error, Exception):
            assert caught.value is error
            return broadcaster.broadcast("next")
        assert caught.value.rank == 0
        assert type(error).__name__ in caught.value.cause
        assert "__reduce__" in caught.value.details
        if comm.rank == 0:
            assert caught.value.__cause__ is error
        return broadcaster.broadcast("next" if comm.rank == 0 else None)

    assert FakeWorld(3).run(body) == ["next"] * 3


def test_with_agreement_a_rank_that_cannot_decode_fails_everybody_at_once():
    """The exchange itself raises on all ranks, naming the one."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(agree=True), codec=Poison(comm.rank == 1))
        with pytest.raises(BroadcastError) as caught:
            broadcaster.broadcast("poison" if comm.rank == 0 else None)
        assert caught.value.rank == 1
        assert "cannot be decoded" in caught.value.cause
        return broadcaster.broadcast("next" if comm.rank == 0 else None)

    assert FakeWorld(3).run(body) == ["next"] * 3


@pytest.mark.parametrize("following", ["broadcast", "gather", "allgather"])
def test_without_agreement_it_fails_the_next_exchange_everywhere(following):
    """The rank itself raises at once; all raise in the next exchange, whatever it is; then all is well."""
    world = FakeWorld(3)

    def body(comm):
        broadcaster = Broadcaster(comm, codec=Poison(comm.rank == 2))
        if comm.rank == 2:
            with pytest.raises(BroadcastError, match="rank 2"):
                broadcaster.broadcast()
        else:
            broadcaster.broadcast("poison" if comm.rank == 0 else None)
        if following == "broadcast":
            with pytest.raises(BroadcastError) as caught:
                broadcaster.broadcast("lost" if comm.rank == 0 else None)
            assert caught.value.rank == 2
            assert "earlier" in str(caught.value)
        else:
            with pytest.raises(BroadcastError) as caught:
                getattr(broadcaster, following)(comm.rank)
            assert (caught.value.rank, caught.value.earlier) == (2, True)
            assert getattr(broadcaster, following)(comm.rank) in ([0, 1, 2], None)
        return broadcaster.broadcast("next" if comm.rank == 0 else None)

    results = world.run(body)
    assert results == ["next"] * 3, results


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_gather_fails_together_and_the_next_works(where, everywhere):
    """Any rank that cannot encode: all raise, naming it."""

    def body(comm):
        broadcaster = Broadcaster(comm)
        call = broadcaster.allgather if everywhere else broadcaster.gather
        with pytest.raises(BroadcastError) as caught:
            call(Unpicklable(ValueError("no")) if comm.rank == where else "fine")
        assert caught.value.rank == where
        return call(comm.rank)

    results = FakeWorld(3).run(body)
    assert results == ([[0, 1, 2]] * 3 if everywhere else [[0, 1, 2], None, None])


def test_gathers_of_very_different_sizes():
    """Nothing, a little, chunks, large buffers: in rank order; own values are the very objects."""
    config = BroadcastConfig(chunk_bytes=4096, gather_bytes_max=8192)
    payloads = [None, "x" * 3000, list(range(20_000)), np.arange(50_000)]

    def body(comm):
        broadcaster = Broadcaster(comm, root=1, config=config)
        mine = payloads[comm.rank]
        everywhere = broadcaster.allgather(mine)
        assert everywhere[comm.rank] is mine
        return everywhere, broadcaster.gather(mine)

    for rank, (everywhere, at_root) in enumerate(FakeWorld(4).run(body)):
        assert all(map(equal, payloads, everywhere))
        assert (at_root is None) == (rank != 1)
        if rank == 1:
            assert all(map(equal, payloads, at_root))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"frame_bytes": 512}, "frame_bytes"),
        ({"agree": True}, "agree"),
        ({"shared_slot_bytes": 4096}, "shared_slot_bytes"),
    ],
)
def test_ranks_that_disagree_are_refused_at_construction(change, part):
    """Root, frame, agreement, window, codec: every rank raises, naming what and who."""

    def body(comm):
        with pytest.raises(BroadcastConfigError) as caught:
            Broadcaster(comm, config=BroadcastConfig(**(change if comm.rank == 1 else {})))
        assert part in str(caught.value)
        assert "rank 1" in str(caught.value)

    assert FakeWorld(2).run(body) == [None, None]


def test_a_different_root_or_codec_is_refused_at_construction():
    """Silently different results are what a root disagreement gives elsewhere."""

    def roots(comm):
        with pytest.raises(BroadcastConfigError, match="root=0, rank 1 has root=1"):
            Broadcaster(comm, root=comm.rank)

    def codecs(comm):
        codec = PickleCodec() if comm.rank else TokenBatchCodec(Request)
        with pytest.raises(BroadcastConfigError, match="codec"):
            Broadcaster(comm, codec=codec)

    def no_rank(comm):
        with pytest.raises(BroadcastConfigError, match="root must be a rank"):
            Broadcaster(comm, root=5)

    for body in (roots, codecs, no_rank):
        assert FakeWorld(2).run(body) == [None, None]


@pytest.mark.parametrize(
    "bad",
    [
        {"frame_bytes": 0}, {"chunk_bytes": 0}, {"chunk_bytes": -1}, {"chunk_bytes": 2**31}, {"gather_bytes_max": -1},
        {"shared_slot_bytes": -1}, {"spin_s": 2.0}, {"spin_s": None}, {"frame_bytes": "4096"},
    ],
)  # fmt: skip
def test_bad_settings_of_one_rank_are_refused_by_all(bad):
    """Every rank raises, naming rank and field: one that raised alone would leave the others in the constructor."""

    def body(comm):
        config = BroadcastConfig(**bad) if comm.rank == 1 else BroadcastConfig()
        with pytest.raises(BroadcastConfigError, match=f"rank 1: {next(iter(bad))}"):
            Broadcaster(comm, config=config)
        return Broadcaster(comm).broadcast("next" if comm.rank == 0 else None)

    assert FakeWorld(3).run(body) == ["next"] * 3


def test_a_handle_lets_the_caller_go_on():
    """Until the root comes, a peer's handle is not done and costs it nothing but polls; results are kept."""
    gate = threading.Event()

    def body(comm):
        broadcaster = Broadcaster(comm)
        if comm.rank == 0:
            gate.wait(10)
            return broadcaster.broadcast("late")
        handle = broadcaster.start_broadcast()
        assert not handle.test()
        with pytest.raises(LocalProtocolError, match="not ended"):
            handle.result()
        with pytest.raises(LocalProtocolError, match="one at a time"):
            broadcaster.start_broadcast()
        gate.set()
        waits = []
        assert handle.wait(lambda timeout_s: (waits.append(timeout_s), gate.wait(timeout_s))) == "late"
        assert all(0 < w <= 1e-3 for w in waits)
        return handle.result()

    assert FakeWorld(2).run(body) == ["late", "late"]


def test_a_closed_broadcaster_refuses():
    """Use after close is the caller's error; closing twice is none."""

    def body(comm):
        broadcaster = Broadcaster(comm)
        broadcaster.close()
        broadcaster.close()
        with pytest.raises(LocalProtocolError, match="closed"):
            broadcaster.broadcast()

    assert FakeWorld(2).run(body) == [None, None]


def requests(count, length, kind):
    rng = np.random.default_rng(count + length)
    for index in range(count):
        tokens = rng.integers(0, 150_000, length)
        yield Request(index, tokens.tolist() if kind == "list" else tokens.astype(kind), index / 2, (index,))


@pytest.mark.parametrize("kind", ["list", "int32", "int64"])
@pytest.mark.parametrize("shared", [0, 1 << 20])
def test_token_batches_arrive_as_read_only_vectors(kind, shared):
    """Lists and arrays become int32 views, other fields their declared types; the root keeps its own objects."""

    def body(comm):
        broadcaster = Broadcaster(
            comm, config=BroadcastConfig(shared_slot_bytes=shared), codec=TokenBatchCodec(Request)
        )
        got = []
        for count, length in ((0, 0), (1, 5), (3, 0), (8, 1000), (2, 40_000)):
            batch = list(requests(count, length, kind))
            arrived = broadcaster.broadcast(batch if comm.rank == 0 else None)
            got.append([(r.request_id, list(map(int, r.tokens)), r.temperature, r.stop) for r in arrived])
            if comm.rank and count:
                assert arrived[0].tokens.dtype == np.int32
                with pytest.raises(ValueError, match="read-only"):
                    arrived[0].tokens[...] = 1
        return got

    first, second, third = FakeWorld(3).run(body)
    assert isinstance(first, list), first
    assert first == second == third


def test_views_live_until_the_next_but_one_exchange():
    """A batch may be looked at while the next one is in flight; the root running ahead does not change it."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=TokenBatchCodec(Request))
        seen = []
        previous = None
        for step in range(8):
            batch = [Request(step, np.full(5000, step, np.int32))]
            current = broadcaster.broadcast(batch if comm.rank == 0 else None)
            if previous is not None:
                seen.append((previous[0].tokens == step - 1).all())
            previous = current
        return all(seen)

    assert FakeWorld(3).run(body) == [True] * 3


@pytest.mark.parametrize(
    ("batch", "part"),
    [
        (["text"], "item 0: want Request"),
        ([Request(1, [1, 2**31])], "token 1: want a 32-bit"),
        ([Request(1, [1, "a"])], "token 1"),
        ([Request(1, np.zeros((2, 2), np.int32))], "shape (2, 2)"),
        ([Request(1, np.zeros(2))], "float64"),
        ([Request(1, np.array([2**40]))], "32-bit"),
        ([Request("x" * 10, [1])], "request_id"),
    ],
)
def test_a_bad_batch_fails_everybody_by_name(batch, part):
    """Wrong types and tokens of more than 32 bits name item and field; the next batch goes through."""

    def body(comm):
        broadcaster = Broadcaster(comm, codec=TokenBatchCodec(Request), config=BroadcastConfig(agree=True))
        with pytest.raises(BroadcastError) as caught:
            broadcaster.broadcast(batch if comm.rank == 0 else None)
        good = [Request(1, [5])]
        return caught.value.cause + caught.value.details, len(broadcaster.broadcast(good if comm.rank == 0 else None))

    for text, count in FakeWorld(2).run(body):
        assert part in text or part == "request_id"
        assert count == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PickleCodec, "must be an instance, got the class PickleCodec"),
        (
            lambda: PickleCodec(out_of_band_bytes_min=-1),
            "out_of_band_bytes_min must be an integer of at least 0, got -1",
        ),
        (lambda: PickleCodec(per_item=1), "per_item must be True or False, got 1"),
        (lambda: BytesCodec(copy="no"), "copy must be True or False, got 'no'"),
        (lambda: TokenBatchCodec(dict), "struct_type must be a msgspec.Struct type"),
        (lambda: TokenBatchCodec(Request, ["toks"]), "no field 'toks'"),
        (lambda: TokenBatchCodec(Request, "tokens"), "token_fields must be a sequence of names"),
        (lambda: TokenBatchCodec(Request, ["tokens", "tokens"]), "token_fields must be different names"),
        (object, "codec must have encode"),
        (Nameless, "codec: ZeroDivisionError"),
    ],
)
def test_a_codec_that_one_rank_cannot_use_is_refused_by_all(make, text):
    """Each rank looks at its own first, and all learn of it: nobody is left in the constructor."""

    def body(comm):
        with pytest.raises(BroadcastConfigError, match="rank 1: ") as caught:
            Broadcaster(comm, codec=make() if comm.rank == 1 else None)
        assert text in str(caught.value)
        return Broadcaster(comm).broadcast("next" if comm.rank == 0 else None)

    assert FakeWorld(3).run(body) == ["next"] * 3


class NamedArray:
    """What a ``type`` statement makes, and NumPy 2.5 of ``NDArray``: a name whose ``__value__`` is the array's type."""

    __value__ = npt.NDArray[Any]
    __class_getitem__ = classmethod(types.GenericAlias)


class NamedList:
    """The same of another type."""

    __value__ = list[int]


@pytest.mark.parametrize(
    ("annotation", "is_token_field"),
    [
        (np.ndarray, True),
        (npt.NDArray[np.int32], True),
        (npt.NDArray[np.int32] | None, True),
        (Annotated[npt.NDArray[np.int32], "ids"], True),
        (NamedArray, True),
        (NamedArray[np.int32], True),
        (NamedArray[np.int32] | None, True),
        (NamedList, False),
        (list[int] | None, False),
    ],
    ids=str,
)
def test_token_fields_are_found_by_their_annotations(annotation, is_token_field):
    """However the array's type is written: they travel as vectors and arrive as views."""
    kind = msgspec.defstruct("Found", [("name", str), ("values", annotation)])
    if not is_token_field:
        assert ":tokens" not in TokenBatchCodec(kind).name
        return
    codec = TokenBatchCodec(kind)
    segments = codec.encode([kind("a", np.arange(3, dtype=np.int32)), kind("b", [7])])
    block = [bytearray(segment.nbytes) for segment in segments]
    for segment, target in zip(segments, block, strict=True):
        segment.prepare(memoryview(target))
        list(segment.copy(memoryview(target)))
    got = codec.decode([memoryview(part).toreadonly() for part in block])
    assert [(item.name, item.values.tolist()) for item in got] == [("a", [0, 1, 2]), ("b", [7])]


def test_a_codec_with_a_problem_does_not_encode():
    """Used without a broadcaster, it says what is wrong with it."""
    for call in (lambda c: c.encode([]), lambda c: c.decode([memoryview(b"")])):
        with pytest.raises(BroadcastConfigError, match="struct_type"):
            call(TokenBatchCodec(dict))


def test_what_does_not_round_trip_can_be_found():
    """The root keeps its object and the others get another: the check says so, everywhere."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(check_round_trip=True))
        value = Shrinks(3) if comm.rank == 0 else None
        with pytest.raises(BroadcastError, match="does not survive"):
            broadcaster.broadcast(value)
        return equal(broadcaster.broadcast({"a": np.arange(3)} if comm.rank == 0 else None), {"a": np.arange(3)})

    assert FakeWorld(2).run(body) == [True, True]


class Shrinks:
    """Comes back smaller."""

    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        return self.n == other.n

    def __hash__(self):
        return self.n

    def __reduce__(self):
        return Shrinks, (self.n - 1,)


def test_lists_can_be_pickled_item_by_item():
    """One item at a time, so that no hold of the lock grows with the list."""
    value = [{"a": np.arange(3000)}, "x", [1, 2]]

    def body(comm):
        return Broadcaster(comm, codec=PickleCodec(per_item=True)).broadcast(value if comm.rank == 0 else None)

    first, second = FakeWorld(2).run(body)
    assert first is value
    assert equal(second, value)


def test_statistics_count():
    """Exchanges by kind, and bytes."""

    def body(comm):
        broadcaster = Broadcaster(comm, config=BroadcastConfig(gather_bytes_max=1000))
        for value in (None, b"x" * 9000, np.zeros(5000)):
            broadcaster.broadcast(value if comm.rank == 0 else None)
        return broadcaster.statistics()

    root, peer = FakeWorld(2).run(body)
    assert (root.exchanges, root.inline, root.large_buffers) == (3, 1, 1)
    assert root.bytes_sent == peer.bytes_received > 49_000
