"""Bytes of reports, plans and block tables: compact, canonical, bounded.

Every message is little-endian, begins with a magic and a version and ends with the CRC-32 of all before it. A list of
numbers travels as a *column*: divided by the largest power of two that divides all, at the smallest of 1, 2, 4 or 8 bytes,
plain or run-length coded, whichever is shorter. Exactly one encoding is accepted for each value: a decoder refuses what no
encoder writes, so equal values have equal bytes. Counts are checked against bounds before anything is allocated.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from kv_bounce_planner._errors import CodecError, LayoutError, PlanRefused
from kv_bounce_planner._reasons import Reason
from kv_bounce_planner.layout.model import (
    ADDRESS_MAX,
    GROUPS_MAX,
    RANKS_MAX,
    BlockTable,
    InstanceLayout,
    Int64Array,
    KVLayout,
    RequestBlocks,
    TokenRange,
    read_only,
)
from kv_bounce_planner.planning.plan import FRAGMENTS_MAX, TransferPlan, WriterPlan, overlaps, sort_ranges
from kv_bounce_planner.planning.report import REPORT_FRAGMENTS_MAX, WriterReport

VERSION = 1
#: Block ids in one message, at most (count).
BLOCKS_MAX = 1 << 22

_REPORT = struct.Struct("<4sBBH16sIIQQ16s")
_PLAN = struct.Struct("<4sBBHIIQ16s")
_WRITER = struct.Struct("<IQQIQ")
_BLOCKS = struct.Struct("<4sBBHQQ")
_TABLE = struct.Struct("<IQI")
_COLUMN = struct.Struct("<BBBx")
_CRC = struct.Struct("<I")
_COUNT = struct.Struct("<I")
_REPORT_MAGIC, _PLAN_MAGIC, _BLOCKS_MAGIC = b"KVrp", b"KVpl", b"KVbk"
_PLAIN, _RUNS = 0, 1
_WIDTHS: dict[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
}

#: Longest encodings, bytes.
REPORT_BYTES_MAX = _REPORT.size + 8 + 2 * (_COLUMN.size + 8 * REPORT_FRAGMENTS_MAX) + _CRC.size
PLAN_BYTES_MAX = 256 << 20
BLOCKS_BYTES_MAX = _BLOCKS.size + GROUPS_MAX * (_TABLE.size + _COLUMN.size) + 8 * BLOCKS_MAX + _CRC.size

Buffer = bytes | bytearray | memoryview


# --- columns ----------------------------------------------------------------------------------------------------------


def _width_of(largest: int) -> int:
    for width in (1, 2, 4):
        if largest < 1 << (8 * width):
            return width
    return 8


def _pack_column(values: Int64Array) -> bytes:
    """Not negative int64 values."""
    if len(values) == 0:
        return _COLUMN.pack(0, 1, _PLAIN)
    merged = int(np.bitwise_or.reduce(values))
    shift = (merged & -merged).bit_length() - 1 if merged else 0
    small = values >> shift
    width = _width_of(int(small.max()))
    starts = np.flatnonzero(np.concatenate(([True], small[1:] != small[:-1])))
    runs = len(starts)
    if _COUNT.size + runs * (_COUNT.size + width) < len(values) * width:
        lengths = np.diff(starts, append=len(values))
        return b"".join(
            (
                _COLUMN.pack(shift, width, _RUNS),
                _COUNT.pack(runs),
                lengths.astype("<u4").tobytes(),
                small[starts].astype(_WIDTHS[width]).tobytes(),
            )
        )
    return _COLUMN.pack(shift, width, _PLAIN) + small.astype(_WIDTHS[width]).tobytes()


@dataclass
class _Reader:
    """A cursor that refuses instead of reading past the end."""

    data: memoryview
    at: int = 0

    def take(self, size: int) -> memoryview:
        if size < 0 or len(self.data) - self.at < size:
            raise CodecError("the message ends too early", reason=Reason.TRUNCATED)
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def finish(self) -> None:
        if self.at != len(self.data):
            raise CodecError(f"{len(self.data) - self.at} B too many", reason=Reason.TRUNCATED)

    def column(self, count: int) -> Int64Array:
        begin = self.at
        shift, width, mode = self.unpack(_COLUMN)
        if shift > 62 or width not in _WIDTHS or mode not in (_PLAIN, _RUNS):
            raise CodecError(f"column of shift {shift}, width {width}, mode {mode}", reason=Reason.BAD_FIELD)
        if mode == _RUNS:
            (runs,) = self.unpack(_COUNT)
            if not 1 <= runs <= count:
                raise CodecError(f"{runs} runs for {count} values", reason=Reason.BAD_FIELD)
            lengths = np.frombuffer(self.take(4 * runs), "<u4").astype(np.int64)
            short = np.frombuffer(self.take(width * runs), _WIDTHS[width])
            # Each length is below 2**32 and runs is bounded by count, so the sum cannot wrap.
            if int(lengths.sum()) != count:
                raise CodecError("run lengths do not add up", reason=Reason.BAD_FIELD)
            small = np.repeat(short, lengths)
        else:
            small = np.frombuffer(self.take(width * count), _WIDTHS[width])
        if count and int(small.max()) > ADDRESS_MAX >> shift:
            raise CodecError("a value does not fit into int64", reason=Reason.BAD_FIELD)
        values: Int64Array = small.astype(np.int64) << shift
        if _pack_column(values) != self.data[begin : self.at]:
            raise CodecError("not the canonical encoding of this column", reason=Reason.BAD_FIELD)
        return values


def _open(data: Buffer, magic: bytes, size_max: int) -> _Reader:
    """Check length, checksum, magic and version; the reader stands behind the version."""
    view = memoryview(data)
    if view.nbytes > size_max:
        raise CodecError(f"{view.nbytes} B exceed {size_max}", reason=Reason.TOO_LARGE)
    if not view.contiguous:
        raise CodecError("not contiguous bytes", reason=Reason.BAD_FIELD)
    view = view.cast("B") if view.nbytes else memoryview(b"")
    if len(view) < 8 + _CRC.size:
        raise CodecError(f"{len(view)} B are no message", reason=Reason.TRUNCATED)
    if bytes(view[:4]) != magic:
        raise CodecError(f"begins with {bytes(view[:4])!r}, want {magic!r}", reason=Reason.BAD_MAGIC)
    if view[4] != VERSION:
        raise CodecError(f"version {view[4]}, spoken here: {VERSION}", reason=Reason.BAD_VERSION)
    body = view[: -_CRC.size]
    if zlib.crc32(body) != _CRC.unpack(view[-_CRC.size :])[0]:
        raise CodecError("checksum", reason=Reason.BAD_CHECKSUM)
    return _Reader(body)


def _seal(parts: list[bytes], size_max: int) -> bytes:
    body = b"".join(parts)
    if len(body) + _CRC.size > size_max:
        raise CodecError(f"{len(body)} B exceed {size_max}", reason=Reason.TOO_LARGE)
    return body + _CRC.pack(zlib.crc32(body))


def _pack_ranges(addresses: Int64Array, sizes: Int64Array) -> bytes:
    """Ascending, disjoint ranges, at least one."""
    gaps = addresses[1:] - addresses[:-1] - sizes[:-1]
    return struct.pack("<Q", int(addresses[0])) + _pack_column(gaps) + _pack_column(sizes)


def _read_ranges(reader: _Reader, count: int) -> tuple[Int64Array, Int64Array]:
    (first,) = reader.unpack(struct.Struct("<Q"))
    if first > ADDRESS_MAX:
        raise CodecError("an address does not fit into int64", reason=Reason.BAD_FIELD)
    gaps = reader.column(count - 1)
    sizes = reader.column(count)
    if int(sizes.min()) <= 0 or bool((gaps > ADDRESS_MAX - sizes[:-1]).any()):
        raise CodecError("a range without bytes or beyond the address space", reason=Reason.BAD_FIELD)
    addresses = np.empty(count, np.int64)
    addresses[0] = first
    addresses[1:] = gaps + sizes[:-1]
    # Steps are below 2**63, so the first wrap of the running sum shows as a negative address.
    np.cumsum(addresses, out=addresses)
    if int(addresses.min()) < 0 or bool((addresses > ADDRESS_MAX - sizes).any()):
        raise CodecError("a range ends beyond the address space", reason=Reason.BAD_FIELD)
    return addresses, sizes


# --- reports ----------------------------------------------------------------------------------------------------------


def encode_report(report: WriterReport) -> bytes:
    """Encode; explicit fragments travel in ascending order.

    Raises:
        CodecError: A field does not fit, fragments overlap or exceed ``REPORT_FRAGMENTS_MAX``.
    """
    addresses, sizes = report.target_addresses, report.sizes
    explicit = addresses is not None and sizes is not None
    count = len(sizes) if sizes is not None else 0
    if len(report.operation_id) != 16 or len(report.plan_digest) != 16:
        raise CodecError("ids and digests have 16 bytes", reason=Reason.BAD_FIELD)
    if count > REPORT_FRAGMENTS_MAX:
        raise CodecError(f"{count} fragments exceed {REPORT_FRAGMENTS_MAX}", reason=Reason.TOO_LARGE)
    if not (
        0 <= report.bound_base <= ADDRESS_MAX and 0 <= report.total_bytes <= ADDRESS_MAX and 0 <= report.rank < 1 << 32
    ):
        raise CodecError("its rank, base or byte count is out of range", reason=Reason.BAD_FIELD)
    parts = [
        _REPORT.pack(
            _REPORT_MAGIC,
            VERSION,
            int(explicit),
            0,
            report.operation_id,
            report.rank,
            count,
            report.bound_base,
            report.total_bytes,
            report.plan_digest,
        )
    ]
    if addresses is not None and sizes is not None:
        if count == 0 or len(addresses) != count or int(sizes.min()) <= 0 or int(addresses.min()) < 0:
            raise CodecError("explicit fragments must have bytes", reason=Reason.BAD_FIELD)
        if bool((addresses > ADDRESS_MAX - sizes).any()):
            raise CodecError("a fragment ends beyond the address space", reason=Reason.BAD_FIELD)
        addresses, sizes = sort_ranges(addresses, sizes)
        if overlaps(addresses, sizes):
            raise CodecError("fragments overlap", reason=Reason.DUPLICATE)
        parts.append(_pack_ranges(addresses, sizes))
    return _seal(parts, REPORT_BYTES_MAX)


def decode_report(data: Buffer) -> WriterReport:
    """Decode a peer's bytes. Fuzzed whole and byte by byte: :class:`CodecError` is all that it raises.

    Bounds: ``REPORT_BYTES_MAX`` bytes, ``REPORT_FRAGMENTS_MAX`` fragments.
    """
    reader = _open(data, _REPORT_MAGIC, REPORT_BYTES_MAX)
    fields = _REPORT.unpack(reader.take(_REPORT.size))
    _, _, form, reserved, operation_id, rank, count, base, total, digest = fields
    if form not in (0, 1) or reserved != 0 or base > ADDRESS_MAX or total > ADDRESS_MAX:
        raise CodecError("its form, reserved field, base or byte count is wrong", reason=Reason.BAD_FIELD)
    if (form == 0) != (count == 0):
        raise CodecError(f"form {form} cannot have {count} fragments", reason=Reason.BAD_FIELD)
    if count > REPORT_FRAGMENTS_MAX:
        raise CodecError(f"{count} fragments exceed {REPORT_FRAGMENTS_MAX}", reason=Reason.TOO_LARGE)
    addresses: Int64Array | None = None
    sizes: Int64Array | None = None
    if form == 1:
        addresses, sizes = _read_ranges(reader, count)
    reader.finish()
    return WriterReport(operation_id, rank, base, total, digest, addresses, sizes)


# --- plans ------------------------------------------------------------------------------------------------------------

_KINDS = ("DRAM", "VRAM")


def encode_plan(plan: TransferPlan) -> bytes:
    """Encode the destination of a plan (the senders' sides are never sent).

    Raises:
        CodecError: The plan is larger than ``PLAN_BYTES_MAX`` or not canonical.
    """
    try:
        plan.validate()
    except PlanRefused as refused:
        raise CodecError(str(refused), reason=refused.reason) from refused
    head = _PLAN.pack(
        _PLAN_MAGIC,
        VERSION,
        _KINDS.index(plan.memory_kind),
        len(plan.writers),
        plan.device_id,
        plan.target_rank,
        plan.block_count,
        plan.digest,
    )
    parts = [head]
    for writer in plan.writers.values():
        parts.append(
            _WRITER.pack(writer.rank, writer.fragment_count, writer.block_count, writer.range_count, writer.total_bytes)
        )
        parts.append(_pack_ranges(writer.target_addresses, writer.sizes))
    return _seal(parts, PLAN_BYTES_MAX)


def decode_plan(data: Buffer) -> TransferPlan:
    """Decode a peer's bytes and re-prove that the plan is canonical and disjoint. Raises only :class:`CodecError`.

    Bounds: ``PLAN_BYTES_MAX`` bytes, ``RANKS_MAX`` writers, ``FRAGMENTS_MAX`` ranges in all.
    """
    reader = _open(data, _PLAN_MAGIC, PLAN_BYTES_MAX)
    _, _, kind, writers_count, device_id, target_rank, block_count, digest = _PLAN.unpack(reader.take(_PLAN.size))
    if kind >= len(_KINDS) or writers_count > RANKS_MAX or block_count > ADDRESS_MAX:
        raise CodecError("its memory kind, writer count or block count is wrong", reason=Reason.BAD_FIELD)
    writers: dict[int, WriterPlan] = {}
    ranges = 0
    for _ in range(writers_count):
        rank, fragments, blocks, count, total = reader.unpack(_WRITER)
        if writers and rank <= next(reversed(writers)):
            raise CodecError("writers do not ascend", reason=Reason.BAD_FIELD)
        ranges += count
        if count == 0 or ranges > FRAGMENTS_MAX or fragments > ADDRESS_MAX or blocks > ADDRESS_MAX:
            raise CodecError(f"writer {rank}: a count is wrong", reason=Reason.BAD_FIELD)
        addresses, sizes = _read_ranges(reader, count)
        writers[rank] = WriterPlan(rank, read_only(addresses), read_only(sizes), fragments, blocks)
        if writers[rank].total_bytes != total:
            raise CodecError(f"writer {rank}: its byte count is wrong", reason=Reason.BAD_FIELD)
    reader.finish()
    plan = TransferPlan(target_rank, writers, block_count, _KINDS[kind], device_id)
    try:
        plan.validate()
    except PlanRefused as refused:
        raise CodecError(str(refused), reason=refused.reason) from refused
    if plan.digest != digest:
        raise CodecError("the digest is of another plan", reason=Reason.WRONG_PLAN)
    return plan


# --- what a receive request carries -----------------------------------------------------------------------------------


def encode_blocks(blocks: RequestBlocks, tokens: TokenRange) -> bytes:
    """Encode block tables and the token range: with the two layouts, all that a sender needs to derive the plan.

    Raises:
        CodecError: More than ``BLOCKS_MAX`` ids, or an id beyond 2**61.
    """
    parts = [_BLOCKS.pack(_BLOCKS_MAGIC, VERSION, 0, len(blocks.tables), tokens.start, tokens.end)]
    total = 0
    for group_id, table in blocks.tables.items():
        ids = table.block_ids
        total += len(ids)
        if total > BLOCKS_MAX or group_id >= 1 << 32:
            raise CodecError(f"{total} block ids, or group {group_id}, is out of range", reason=Reason.TOO_LARGE)
        if len(ids) and int(ids.max()) >= 1 << 61:
            raise CodecError("a block id does not fit", reason=Reason.BAD_FIELD)
        parts.append(_TABLE.pack(group_id, table.first_token, len(ids)))
        step = np.diff(ids, prepend=0)
        parts.append(_pack_column((step << 1) ^ (step >> 63)))
    return _seal(parts, BLOCKS_BYTES_MAX)


def decode_blocks(data: Buffer) -> tuple[RequestBlocks, TokenRange]:
    """Decode a peer's bytes. Raises only :class:`CodecError`.

    Bounds: ``BLOCKS_BYTES_MAX`` bytes, ``BLOCKS_MAX`` ids in all, ``GROUPS_MAX`` tables.
    """
    reader = _open(data, _BLOCKS_MAGIC, BLOCKS_BYTES_MAX)
    _, _, reserved, tables_count, start, end = _BLOCKS.unpack(reader.take(_BLOCKS.size))
    if reserved != 0 or tables_count > GROUPS_MAX or end > ADDRESS_MAX or start > end:
        raise CodecError("its reserved field, table count or token range is wrong", reason=Reason.BAD_FIELD)
    tables: dict[int, BlockTable] = {}
    total = 0
    for _ in range(tables_count):
        group_id, first_token, count = reader.unpack(_TABLE)
        total += count
        if total > BLOCKS_MAX or first_token > ADDRESS_MAX or (tables and group_id <= next(reversed(tables))):
            raise CodecError(f"the table of group {group_id} is wrong", reason=Reason.BAD_FIELD)
        folded = reader.column(count)
        ids = np.cumsum((folded >> 1) ^ -(folded & 1))
        if count and (int(ids.min()) < -1 or int(ids.max()) >= 1 << 61 or int(folded.max()) >= 1 << 62):
            raise CodecError("a block id does not fit", reason=Reason.BAD_FIELD)
        tables[group_id] = BlockTable(ids, first_token)
    reader.finish()
    return RequestBlocks(tables), TokenRange(start, end)


# --- layouts ----------------------------------------------------------------------------------------------------------


def encode_layout(layout: InstanceLayout | KVLayout) -> bytes:
    """Canonical JSON of one rank or a whole instance."""
    return layout.to_json()


def decode_layout(data: Buffer) -> KVLayout:
    """Decode one rank's layout from a peer. Raises only :class:`CodecError`. Bound: ``LAYOUT_BYTES_MAX``."""
    try:
        return KVLayout.from_json(data)
    except LayoutError as error:
        raise CodecError(str(error), reason=error.reason) from error


def decode_instance(data: Buffer) -> InstanceLayout:
    """Decode an instance from a peer. Raises only :class:`CodecError`. Bound: ``LAYOUT_BYTES_MAX``."""
    try:
        return InstanceLayout.from_json(data)
    except LayoutError as error:
        raise CodecError(str(error), reason=error.reason) from error
