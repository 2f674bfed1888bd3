"""Bytes of reports, plans and block tables: golden, canonical, bounded, refused whole and byte by byte."""

from __future__ import annotations

import random
import struct
import zlib

import numpy as np
import pytest

from kv_bounce_planner.planning import (
    BlockTable,
    CodecError,
    InstanceLayout,
    KVLayout,
    Reason,
    ReportRefused,
    RequestBlocks,
    TokenRange,
    TransferPlan,
    WriterPlan,
    WriterReport,
    decode_blocks,
    decode_instance,
    decode_layout,
    decode_plan,
    decode_report,
    encode_blocks,
    encode_layout,
    encode_plan,
    encode_report,
    validate_report,
)
from kv_bounce_planner.planning.codec import BLOCKS_BYTES_MAX, PLAN_BYTES_MAX, REPORT_BYTES_MAX

OPERATION = bytes(range(16))


def writer_plan(rank: int = 3) -> WriterPlan:
    return WriterPlan(
        rank, np.array([0x1000, 0x1400, 0x1800, 0x4000], np.int64), np.array([256, 256, 256, 64], np.int64), 9, 4
    )


def transfer_plan() -> TransferPlan:
    other = WriterPlan(5, np.array([0x2000], np.int64), np.array([512], np.int64), 1, 1)
    return TransferPlan(7, {3: writer_plan(), 5: other}, 5, "VRAM", 2)


BLOCKS = (RequestBlocks({0: BlockTable([4, 5, 6, -1], 32), 3: BlockTable([], 0)}), TokenRange(33, 90))


def reseal(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def test_golden_bytes() -> None:
    """The wire is fixed: a change here is a new version."""
    digest = writer_plan().digest
    assert digest.hex() == "93aa2a20ca01980f662cc55c7800871a"
    report = WriterReport.for_transfer(writer_plan(), operation_id=OPERATION, bound_base=0x1000)
    assert encode_report(report).hex() == (
        "4b567270" "01" "00" "0000" + OPERATION.hex() + "03000000" "00000000" "0010000000000000" "4003000000000000"
        + digest.hex() + "652edf7d"
    )  # fmt: skip
    explicit = WriterReport.for_transfer(writer_plan(), operation_id=OPERATION, bound_base=0x1000, explicit=True)
    assert encode_report(explicit).hex() == (
        "4b567270" "01" "01" "0000" + OPERATION.hex() + "03000000" "04000000" "0010000000000000" "4003000000000000"
        + digest.hex()
        + "0010000000000000"  # first address
        "08010000" "030327"  # gaps 0x300, 0x300, 0x2700: shift 8, one byte each
        "06010000" "04040401"  # sizes 256, 256, 256, 64: shift 6
        + "dfe9b136"
    )  # fmt: skip
    assert encode_blocks(*BLOCKS).hex() == (
        "4b56626b" "01" "00" "0200" "2100000000000000" "5a00000000000000"
        "00000000" "2000000000000000" "04000000" "00010000" "0802020d"
        "03000000" "0000000000000000" "00000000" "00010000"
        + "4da3043d"
    )  # fmt: skip
    assert encode_plan(transfer_plan()).hex() == (
        "4b56706c" "01" "01" "0200" "02000000" "07000000" "0500000000000000" + "67f2531044b5e48e090a1f51c522e791"
        + "03000000" "0900000000000000" "0400000000000000" "04000000" "4003000000000000"
        "0010000000000000" "08010000" "030327" "06010000" "04040401"
        "05000000" "0100000000000000" "0100000000000000" "01000000" "0002000000000000"
        "0020000000000000" "00010000" "09010000" "01"
        + "6ff00f95"
    )  # fmt: skip


def test_round_trips() -> None:
    """Equal values, equal bytes, both ways."""
    for explicit in (False, True):
        report = WriterReport.for_transfer(writer_plan(), operation_id=OPERATION, bound_base=64, explicit=explicit)
        assert decode_report(encode_report(report)) == report
        assert encode_report(decode_report(memoryview(encode_report(report)))) == encode_report(report)
    plan = decode_plan(encode_plan(transfer_plan()))
    assert plan == transfer_plan() and plan.digest == transfer_plan().digest
    assert not plan.writers[3].sizes.flags.writeable
    assert decode_blocks(encode_blocks(*BLOCKS)) == BLOCKS


@pytest.mark.parametrize("count", [1, 2, 70_000])
def test_many_entries_and_their_size(count: int) -> None:
    """More than 65,535 entries; regular lists are a few bytes, random ones 2 to 4 bytes an entry, not 16."""
    regular = WriterPlan(0, np.arange(count, dtype=np.int64) * 4096, np.full(count, 1024, np.int64), count, count)
    data = encode_plan(TransferPlan(0, {0: regular}, count))
    assert decode_plan(data).writers[0] == regular and len(data) < 150
    rng = np.random.default_rng(count)
    gaps = rng.integers(1, 1 << 12, count) << 12
    shuffled = WriterPlan(0, np.cumsum(gaps), np.full(count, 1024, np.int64), count, count)
    data = encode_plan(TransferPlan(0, {0: shuffled}, count))
    assert decode_plan(data).writers[0] == shuffled and len(data) < 160 + 2 * count


@pytest.mark.parametrize("value", [0, 1, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**61 - 1])
def test_columns_at_every_width(value: int) -> None:
    """The width's edges survive; ids use them through the differences."""
    blocks = RequestBlocks({0: BlockTable([value, 0, value, -1])})
    assert decode_blocks(encode_blocks(blocks, TokenRange(0, 1)))[0] == blocks


MESSAGES = {
    "digest report": (
        encode_report(WriterReport.for_transfer(writer_plan(), operation_id=OPERATION, bound_base=64)),
        decode_report,
    ),
    "explicit report": (
        encode_report(WriterReport.for_transfer(writer_plan(), operation_id=OPERATION, bound_base=64, explicit=True)),
        decode_report,
    ),
    "plan": (encode_plan(transfer_plan()), decode_plan),
    "blocks": (encode_blocks(*BLOCKS), decode_blocks),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_every_single_byte_corruption_is_refused(name: str) -> None:
    """All 255 other values of every byte, every truncation, every one-byte extension: refused as CodecError."""
    data, decode = MESSAGES[name]
    decode(data)
    for at in range(len(data)):
        for value in range(256):
            if value != data[at]:
                with pytest.raises(CodecError):
                    decode(data[:at] + bytes([value]) + data[at + 1 :])
    for size in range(len(data)):
        with pytest.raises(CodecError):
            decode(data[:size])
    for extra in (b"\0", b"\xff"):
        with pytest.raises(CodecError):
            decode(data + extra)


@pytest.mark.parametrize("explicit", [False, True])
def test_every_resealed_byte_corruption_of_a_report_is_refused(explicit: bool) -> None:
    """The checksum is not what protects memory: with it recomputed, every changed byte still fails decoding or the check
    against the plan, and neither the plan nor anything else changed.
    """
    plan = writer_plan()
    report = WriterReport.for_transfer(plan, operation_id=OPERATION, bound_base=64, explicit=explicit)
    body = encode_report(report)[:-4]
    before = plan.digest
    reasons = set()
    for at in range(len(body)):
        for flip in (0x01, 0x80, 0xFF):
            data = reseal(body[:at] + bytes([body[at] ^ flip]) + body[at + 1 :])
            with pytest.raises((CodecError, ReportRefused)) as refused:
                validate_report(plan, decode_report(data), bound_base=64, operation_id=OPERATION)
            reasons.add(refused.value.reason)
    assert plan.digest == before
    assert {
        Reason.WRONG_OPERATION,
        Reason.WRONG_RANK,
        Reason.WRONG_BASE,
        Reason.WRONG_BYTES,
        Reason.WRONG_PLAN,
    } <= reasons
    validate_report(plan, decode_report(reseal(body)), bound_base=64, operation_id=OPERATION)


def test_every_resealed_byte_corruption_of_a_plan_is_refused_or_another_plan() -> None:
    """With the checksum repaired: what the digest covers cannot change at all; the rest decodes to what it says."""
    body = encode_plan(transfer_plan())[:-4]
    reasons, others = set(), 0
    for at in range(len(body)):
        for flip in (0x01, 0x80, 0xFF):
            data = reseal(body[:at] + bytes([body[at] ^ flip]) + body[at + 1 :])
            try:
                plan = decode_plan(data)
            except CodecError as error:
                reasons.add(error.reason)
            else:
                others += 1
                assert plan.digest == transfer_plan().digest and plan != transfer_plan()
                assert encode_plan(plan) == data
    assert {Reason.WRONG_PLAN, Reason.BAD_FIELD, Reason.BAD_MAGIC, Reason.BAD_VERSION} <= reasons and others


def _ranges_message(first: int, gaps: bytes, sizes: bytes, count: int = 2) -> bytes:
    head = struct.pack("<4sBBH16sIIQQ16s", b"KVrp", 1, 1, 0, OPERATION, 0, count, 0, 1, bytes(16))
    return reseal(head + struct.pack("<Q", first) + gaps + sizes)


@pytest.mark.parametrize(
    ("first", "gaps", "sizes", "words"),
    [
        (2**63, "00010000" "01", "00010000" "0101", "does not fit"),
        (2**63 - 2, "00010000" "01", "00010000" "0102", "beyond the address space"),
        (2**63 - 3, "00010000" "01", "00010000" "0102", "beyond the address space"),
        (2**62, "3e010000" "01", "00010000" "0101", "beyond the address space"),
        (16, "00010000" "01", "00010000" "0100", "without bytes"),
        (16, "00080000" "ffffffffffffffff", "00010000" "0101", "does not fit into int64"),
        (16, "3f010000" "01", "00010000" "0101", "column of shift"),
        (16, "00030000" "010101", "00010000" "0101", "column of shift"),
        (16, "00010200" "01", "00010000" "0101", "column of shift"),
    ],
)  # fmt: skip
def test_ranges_at_the_end_of_the_address_space(first: int, gaps: str, sizes: str, words: str) -> None:
    """Sums that would wrap are refused, not wrapped."""
    with pytest.raises(CodecError, match=words):
        decode_report(_ranges_message(first, bytes.fromhex(gaps), bytes.fromhex(sizes)))


def test_ranges_up_to_the_last_byte_decode() -> None:
    """The largest address is usable."""
    report = decode_report(_ranges_message(2**63 - 6, bytes.fromhex("0001000001"), bytes.fromhex("000100000102")))
    assert report.target_addresses is not None
    assert report.target_addresses.tolist() == [2**63 - 6, 2**63 - 4]


def test_writers_must_ascend() -> None:
    """One order of writers, so one encoding; a plan keeps it whatever order it was made with."""
    plan = transfer_plan()
    assert encode_plan(TransferPlan(7, dict(reversed(plan.writers.items())), 5, "VRAM", 2)) == encode_plan(plan)
    body = encode_plan(plan)[:-4]
    first, second = body.index(struct.pack("<IQ", 3, 9)), body.index(struct.pack("<IQ", 5, 1))
    with pytest.raises(CodecError, match="ascend"):
        decode_plan(reseal(body[:first] + body[second:] + body[first:second]))
    with pytest.raises(CodecError, match="ascend"):
        decode_plan(reseal(body[:first] + body[first:second] * 2))


def test_writer_bytes_of_a_plan_must_add_up() -> None:
    """A stated total that its ranges do not have."""
    body = encode_plan(transfer_plan())[:-4]
    total = struct.pack("<Q", writer_plan().total_bytes)
    assert body.count(total) == 1
    with pytest.raises(CodecError, match="its byte count"):
        decode_plan(reseal(body.replace(total, struct.pack("<Q", writer_plan().total_bytes + 1))))


def test_wrong_magic_version_and_cross_type() -> None:
    """A message of another kind or version is named as such."""
    for name, (data, decode) in MESSAGES.items():
        for other, (foreign, _) in MESSAGES.items():
            if foreign[:4] != data[:4]:
                with pytest.raises(CodecError) as refused:
                    decode(foreign)
                assert refused.value.reason is Reason.BAD_MAGIC, (name, other)
        with pytest.raises(CodecError) as refused:
            decode(reseal(data[:4] + b"\x02" + data[5:-4]))
        assert refused.value.reason is Reason.BAD_VERSION
        for empty in (b"", b"KV", bytearray()):
            with pytest.raises(CodecError) as refused:
                decode(empty)
            assert refused.value.reason is Reason.TRUNCATED


def test_only_the_canonical_encoding_is_accepted() -> None:
    """A wider width, a smaller shift or runs where plain is shorter: the same values, other bytes, refused."""
    body = encode_report(
        WriterReport.for_transfer(writer_plan(), operation_id=OPERATION, bound_base=64, explicit=True)
    )[:-4]
    column = bytes.fromhex("08010000030327")
    assert body.count(column) == 1
    for other in (
        bytes.fromhex("08020000") + struct.pack("<3H", 3, 3, 0x27),
        bytes.fromhex("00020000") + struct.pack("<3H", 0x300, 0x300, 0x2700),
        bytes.fromhex("07010000") + bytes([6, 6, 0x4E]),
        bytes.fromhex("08010100") + struct.pack("<III", 2, 2, 1) + bytes([3, 0x27]),
    ):
        with pytest.raises(CodecError, match="canonical"):
            decode_report(reseal(body.replace(column, other)))


def test_counts_are_checked_before_memory_is_taken() -> None:
    """An inflated count with few bytes behind it costs nothing."""
    head = struct.pack("<4sBBH16sIIQQ16s", b"KVrp", 1, 1, 0, OPERATION, 0, 1 << 20, 0, 1, bytes(16))
    for column in (
        b"",
        struct.pack("<Q", 0),
        struct.pack("<Q", 0) + bytes.fromhex("00010100") + struct.pack("<I", 1 << 31),
    ):
        with pytest.raises(CodecError):
            decode_report(reseal(head + column))
    too_many = struct.pack("<4sBBH16sIIQQ16s", b"KVrp", 1, 1, 0, OPERATION, 0, (1 << 20) + 1, 0, 1, bytes(16))
    with pytest.raises(CodecError) as refused:
        decode_report(reseal(too_many))
    assert refused.value.reason is Reason.TOO_LARGE
    bomb = struct.pack("<4sBBHQQIQI", b"KVbk", 1, 0, 1, 0, 1, 0, 0, (1 << 32) - 1)
    bomb += bytes.fromhex("00010100") + struct.pack("<II", 1, (1 << 32) - 1) + b"\x02"
    with pytest.raises(CodecError):
        decode_blocks(reseal(bomb))


@pytest.mark.parametrize(
    ("decode", "bound"),
    [(decode_report, REPORT_BYTES_MAX), (decode_blocks, BLOCKS_BYTES_MAX), (decode_plan, PLAN_BYTES_MAX)],
)
def test_too_long_messages_are_refused_unread(decode: object, bound: int) -> None:
    """The bound is on bytes as well."""

    long = memoryview(np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (bound + 1,), (0,)))
    with pytest.raises(CodecError) as refused:
        decode(long)  # type: ignore[operator]
    assert refused.value.reason is Reason.TOO_LARGE


def test_encoders_refuse_what_does_not_fit() -> None:
    """Nothing is truncated silently."""
    good = WriterReport.for_transfer(writer_plan(), operation_id=OPERATION, bound_base=64)
    bad = [
        WriterReport(b"short", 0, 0, 1, bytes(16)),
        WriterReport(OPERATION, 0, 0, 1, b""),
        WriterReport(OPERATION, 1 << 32, 0, 1, bytes(16)),
        WriterReport(OPERATION, 0, -1, 1, bytes(16)),
        WriterReport(OPERATION, 0, 1 << 63, 1, bytes(16)),
        WriterReport(OPERATION, 0, 0, 1, bytes(16), np.array([0]), np.array([0])),
        WriterReport(OPERATION, 0, 0, 1, bytes(16), np.array([-1]), np.array([2])),
        WriterReport(OPERATION, 0, 0, 1, bytes(16), np.array([2**63 - 1]), np.array([2])),
        WriterReport(OPERATION, 0, 0, 1, bytes(16), np.array([0, 1]), np.array([2, 2])),
    ]
    encode_report(good)
    for report in bad:
        with pytest.raises(CodecError):
            encode_report(report)
    with pytest.raises(ReportRefused):
        WriterReport(OPERATION, 0, 0, 1, bytes(16), np.array([0]), None)
    overlap = WriterPlan(0, np.array([0, 1]), np.array([2, 2]), 1, 1)
    with pytest.raises(CodecError):
        encode_plan(TransferPlan(0, {0: overlap}, 1))
    with pytest.raises(CodecError):
        encode_blocks(RequestBlocks.single([1 << 61]), TokenRange(0, 1))


def test_random_garbage_and_mutations_raise_only_codec_errors() -> None:
    """A small run of tools/fuzz.py's mutations."""
    rng = random.Random(7)
    for _ in range(3000):
        data, decode = MESSAGES[rng.choice(sorted(MESSAGES))]
        body = bytearray(data[:-4])
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(4 if rng.random() < 0.8 else 0, len(body))] = rng.randrange(256)
        if rng.random() < 0.2:
            del body[rng.randrange(len(body)) :]
        try:
            decode(reseal(bytes(body)))
        except CodecError:
            pass


def test_layouts_decode_or_raise_codec_errors() -> None:
    """A peer's layout goes through the same validation as a caller's."""
    layout = KVLayout.uniform(
        rank=0, first_layer=0, layer_count=1, head_total=1, head_dim=4, element_bytes=2, block_tokens=4, block_count=4,
        key_bases=[4096],
    )  # fmt: skip
    instance = InstanceLayout("x", (layout,))
    assert decode_layout(encode_layout(layout)) == layout
    assert decode_instance(encode_layout(instance)) == instance
    for decode in (decode_layout, decode_instance):
        for bad in (b"", b"null", b"{}", b'{"rank":0}', encode_layout(layout)[:-1], b"\xf0\x28"):
            with pytest.raises(CodecError):
                decode(bad)
