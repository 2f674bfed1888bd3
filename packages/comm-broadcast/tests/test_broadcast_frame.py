"""Frames and blocks: golden bytes, damage, bounds; the package without its optional libraries."""

import random
import subprocess
import sys
import zlib

import pytest

from comm_broadcast import BroadcastConfig, RemoteProtocolError
from comm_broadcast import _block as block
from comm_broadcast._codec import BufferSegment
from comm_broadcast._frame import Call, Frame, Kind, Operation, Status, pack_text, unpack_text


def packed(frame, size=256):
    data = bytearray(size)
    frame.pack_into(memoryview(data))
    return data


def test_golden_bytes():
    """The header's layout is fixed: a change is a new version."""
    frame = Frame(5, Status.GOOD, Kind.FOLLOWS, 70_000, 4096, 2, 1, 0, 1, Call(Operation.GATHER, 3, 0x0A0B0C0D, 9))
    wanted = (
        "4342584d 04 00 01 01 0500000000000000 7011010000000000 0010000000000000"
        "02000000 01000000 00000000 01000000 03000000 0d0c0b0a 09000000"
    )
    assert packed(frame)[:60] == bytes.fromhex(wanted)
    assert packed(frame)[60:64] == zlib.crc32(bytes.fromhex(wanted)).to_bytes(4, "little")
    assert Frame.unpack(memoryview(packed(frame)), 5, 1) == frame


def test_every_damaged_byte_of_a_header_is_refused():
    """The checksum covers the header, itself included."""
    good = packed(Frame(5, Status.GOOD, Kind.INLINE, 10))
    for position in range(64):
        bad = bytearray(good)
        bad[position] ^= 0x40
        with pytest.raises(RemoteProtocolError):
            Frame.unpack(memoryview(bad), 5, 0)


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (0, "damaged first frame .magic 0x4d584242"), (3, "damaged first frame .magic 0x4c584243"),
        (4, "frame version 5, this is 4"), (5, "status 255, kind 0, operation 0 of rank 0"),
        (6, "status 0, kind 255, operation 0 of rank 0"), (7, "status 0, kind 0, operation 255 of rank 0"),
        (8, "exchange 4, this rank is at 5"), (36, "operation 0 of rank 1"),
    ],
)  # fmt: skip
def test_what_another_program_means_is_refused_though_its_sum_is_right(position, text):
    """Magic, version, status, kind, operation, exchange, rank: each by name, and never by the sum alone."""
    bad = packed(Frame(5, Status.GOOD, Kind.INLINE, 10))
    bad[position] ^= 0xFF if position in (5, 6, 7) else 1
    bad[60:64] = zlib.crc32(bad[:60]).to_bytes(4, "little")
    with pytest.raises(RemoteProtocolError, match=text):
        Frame.unpack(memoryview(bad), 5, 0)


def test_another_exchange_is_not_taken_for_this_one():
    """Ranks that are not level are noticed, naming the rank and both numbers."""
    with pytest.raises(RemoteProtocolError, match="rank 3: exchange 5, this rank is at 6"):
        Frame.unpack(memoryview(packed(Frame(5))), 6, 3)


def test_a_frame_cannot_promise_more_than_it_holds():
    """Inline payloads, texts and heads are bounded by the frame, heads by their block, too."""
    streamed = {"kind": Kind.STREAMED, "chunk_bytes": 4096, "block_bytes": 10_000}
    for frame in (
        Frame(1, block_bytes=10_000),
        Frame(1, Status.FAILED, payload_bytes=10_000),
        Frame(1, payload_bytes=193, **streamed),
        Frame(1, payload_bytes=185, large_count=1, **streamed),
        Frame(1, payload_bytes=101, **{**streamed, "block_bytes": 100}),
    ):
        with pytest.raises(RemoteProtocolError, match="more than it holds"):
            Frame.unpack(memoryview(packed(frame)), 1, 0)


def test_texts_are_cut_from_the_front_of_the_traceback():
    """The cause and the traceback's end matter most."""
    target = bytearray(100)
    length = pack_text(memoryview(target), "ValueError: no", "start " + "x" * 500 + " end")
    cause, details = unpack_text(memoryview(target)[:length])
    assert cause == "ValueError: no"
    assert details.endswith(" end")
    assert "start" not in details


def test_blocks_keep_random_segments():
    """Random sizes, random thresholds: what is split is what was written."""
    rng = random.Random(3)
    for _ in range(300):
        segments = [rng.randbytes(rng.choice([0, 1, 63, 64, 65, 1000])) for _ in range(rng.randrange(1, 12))]
        config = BroadcastConfig(gather_bytes_max=rng.choice([0, 64, 2000]), frame_bytes=rng.choice([256, 4096]))
        wrapped = [BufferSegment(s) for s in segments]
        size, entries, large = block.plan(wrapped, config)
        data = memoryview(bytearray(size))
        block.write(data, wrapped, entries)
        assert [bytes(s) for s in block.split(data, [memoryview(segments[i]) for i in large])] == segments


def test_damaged_blocks_are_refused():
    """A table that leaves the block, or does not fit in it."""
    for data in (b"", b"\1\0\0\0", b"\1\0\0\0" + (1000).to_bytes(8, "little")):
        with pytest.raises(RemoteProtocolError):
            block.split(memoryview(data), [])
    size, entries, _ = block.plan(
        [BufferSegment(b"x"), BufferSegment(b"y" * 500)], BroadcastConfig(gather_bytes_max=100)
    )
    data = memoryview(bytearray(size))
    block.write(data, [BufferSegment(b"x"), BufferSegment(b"y" * 500)], entries)
    for buffers in ([], [memoryview(b"y" * 499)], [memoryview(b"y" * 500)] * 2):
        with pytest.raises(RemoteProtocolError, match="large segment"):
            block.split(data, buffers)
    with pytest.raises(RemoteProtocolError):
        block.read_sizes(memoryview(bytes(10)), 2)


def test_the_package_imports_without_mpi_and_torch():
    """Their libraries are imported when an adapter is made; what is missing, and what brings it, is said then."""
    code = (
        "import sys\nsys.modules['mpi4py'] = None\nsys.modules['torch'] = None\nimport comm_broadcast\n"
        "for adapter in (comm_broadcast.MpiComm, comm_broadcast.TorchComm):\n"
        "    try:\n        adapter()\n    except comm_broadcast.MissingLibraryError as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    mpi, torch = done.stdout.splitlines()
    assert "pip install 'comm-broadcast[mpi]' mpich" in mpi
    assert "pip install 'comm-broadcast[torch]'" in torch


def test_a_frame_without_chunks_is_refused():
    """Chunks of no bytes would never end."""
    for kind in (Kind.FOLLOWS, Kind.STREAMED):
        bad = Frame(1, Status.GOOD, kind, 10_000, 0)
        with pytest.raises(RemoteProtocolError, match="chunks of 0"):
            Frame.unpack(memoryview(packed(bad)), 1, 0)


def test_pieces_cover_what_is_left_of_a_block():
    """In order, without gaps, none above the chunk; few, and none tiny, where chunks allow; none when the head is all."""
    rng = random.Random(5)
    for _ in range(2000):
        start = rng.choice([0, 0, rng.randrange(4000)])
        end = start + rng.choice([1, 100, 4096, 600_000, 1 << 20, rng.randrange(1, 1 << 26), rng.randrange(1, 1 << 36)])
        chunk = rng.choice([4096, 1 << 20, 64 << 20, (1 << 31) - 1])
        if (end - start) // chunk > 10_000:
            continue
        ends = block.piece_ends(start, end, chunk)
        sizes = [b - a for a, b in zip([start, *ends], ends, strict=False)]
        assert ends[-1] == end
        assert all(0 < size <= chunk for size in sizes)
        if end - start <= 16 * min(chunk, 1 << 30):
            assert len(sizes) <= 16
            assert len(sizes) == 1 or chunk < 512 << 10 or min(sizes[:-1]) >= 512 << 10
    assert block.piece_ends(500, 500, 4096) == []


def test_a_block_is_complete_up_to_where_it_says():
    """Each step of a copy names a place before which nothing changes any more, and the last one the end."""
    rng = random.Random(11)
    for _ in range(100):
        parts = [rng.randbytes(rng.choice([0, 1, 63, 64, 65, 1000])) for _ in range(rng.randrange(1, 8))]
        wrapped = [BufferSegment(part) for part in parts]
        size, entries, _ = block.plan(wrapped, BroadcastConfig())
        whole = memoryview(bytearray(size))
        block.write(whole, wrapped, entries)
        data = memoryview(bytearray(size))
        block.prepare(data, wrapped, entries)
        head = block.head_bytes(entries, 4000)
        steps = []
        for done in block.copy(data, wrapped, entries):
            assert data[:done] == whole[:done]
            steps.append(done)
        assert steps == sorted(steps)
        assert head == steps[0]
        assert data == whole
    assert block.head_bytes([100], 100) == 0
