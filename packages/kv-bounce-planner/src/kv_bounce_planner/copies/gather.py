"""Gather and scatter by pointer, for host memory, with numpy alone.

One copy list (source, target, size) serves both directions. Fragments of one size are copied by one fancy-index
assignment over elements of exactly that size (numpy's void type at a stride of one byte, so no alignment is needed);
large fragments by one ``memmove`` each; rare sizes are cut into powers of two first, so that a skewed list still costs
few passes. The slow paths of the field (a Python call per small fragment, uint8 index copies) are never taken.

The caller guarantees that the addresses are this process's memory and stay alive: pointers carry no owner.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from kv_bounce_planner._errors import LayoutError
from kv_bounce_planner._reasons import Reason
from kv_bounce_planner.layout.model import ADDRESS_MAX, Int64Array, frozen_int64, read_only

#: From this size on, one memmove per fragment (about 0.5 us each) costs less than a percent or two of the copy itself.
MEMMOVE_BYTES_MIN = 32 << 10
#: One step of an indexed copy: bytes, and fragments, at most.
STEP_BYTES = 256 << 10
STEP_COUNT_MAX = 4096
#: Few fragments are memmoved whatever their size: cheaper than building an index.
MEMMOVE_COUNT_MAX = 16
#: Up to so many distinct sizes each get a pass of their own; beyond, sizes are cut into powers of two.
SIZE_CLASSES_MAX = 12


@dataclass(frozen=True)
class _Class:
    """Fragments of one size: either a fancy-index pass or single moves."""

    size: int
    source: Int64Array
    target: Int64Array
    moves: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class CopyTable:
    """A checked copy list, prepared once and usable many times.

    Attributes:
        source_addresses, target_addresses, sizes: int64 (n,), read-only. Targets do not overlap each other nor any source.
        total_bytes: Sum of sizes.
    """

    source_addresses: Int64Array
    target_addresses: Int64Array
    sizes: Int64Array
    total_bytes: int
    _classes: tuple[_Class, ...]

    @staticmethod
    def of(source_addresses: Int64Array, target_addresses: Int64Array, sizes: Int64Array) -> CopyTable:
        """Prepare a list.

        Raises:
            LayoutError: Lengths differ, a size is not positive or an address does not fit.
        """
        source, target, size = (frozen_int64(a) for a in (source_addresses, target_addresses, sizes))
        if not len(source) == len(target) == len(size):
            raise LayoutError(f"{len(source)} sources, {len(target)} targets, {len(size)} sizes")
        if not len(size):
            return CopyTable(source, target, size, 0, ())
        smallest, largest = int(size.min()), int(size.max())
        if smallest <= 0 or int(source.min()) < 0 or int(target.min()) < 0:
            raise LayoutError("a fragment without bytes or at no address", reason=Reason.BAD_FIELD)
        for addresses in (source, target):
            # The exact check makes temporaries as large as the list: only where the largest values could reach it.
            near = int(addresses.max()) > ADDRESS_MAX - largest
            if near and bool((addresses > ADDRESS_MAX - size).any()):
                raise LayoutError("a fragment beyond the address space", reason=Reason.BAD_FIELD)
        if smallest == largest < MEMMOVE_BYTES_MIN and len(size) > MEMMOVE_COUNT_MAX:
            return CopyTable(source, target, size, smallest * len(size), (_Class(smallest, source, target),))
        return CopyTable(source, target, size, int(size.sum()), tuple(_classes(source, target, size)))

    @staticmethod
    def gather(addresses: Int64Array, sizes: Int64Array, staging_address: int) -> CopyTable:
        """Fragments into one contiguous region, in order."""
        sizes = frozen_int64(sizes)
        return CopyTable.of(addresses, _contiguous(staging_address, sizes), sizes)

    @staticmethod
    def scatter(staging_address: int, addresses: Int64Array, sizes: Int64Array) -> CopyTable:
        """One contiguous region into fragments, in order."""
        sizes = frozen_int64(sizes)
        return CopyTable.of(_contiguous(staging_address, sizes), addresses, sizes)

    def run(self) -> int:
        """Copy now, in this thread, through the host's memory. Returns bytes copied."""
        for part in self._classes:
            if part.moves:
                move = ctypes.memmove
                for target, source, size in part.moves:
                    move(target, source, size)
            else:
                _copy_class(part)
        return self.total_bytes


@dataclass(frozen=True)
class PackedCopy:
    """Fragments of one size into one contiguous region, in order: a gather's list without a list of its targets.

    Attributes:
        source_addresses: int64 (n,), read-only.
        size, staging_address: Bytes of each, and where the first goes.
        total_bytes: Of all.
    """

    source_addresses: Int64Array
    size: int
    staging_address: int
    total_bytes: int
    _low: int
    _high: int

    @staticmethod
    def of(source_addresses: Int64Array, sizes: Int64Array, staging_address: int) -> PackedCopy | CopyTable:
        """Prepare a gather; a ``CopyTable`` where the sizes differ, or large or few fragments are moved one by one.

        Raises:
            LayoutError: As of ``CopyTable.of``.
        """
        count = len(sizes)
        if count <= MEMMOVE_COUNT_MAX or len(source_addresses) != count or staging_address < 0:
            return CopyTable.gather(source_addresses, sizes, staging_address)
        size, largest = int(sizes.min()), int(sizes.max())
        if not 0 < size == largest < MEMMOVE_BYTES_MIN:
            return CopyTable.gather(source_addresses, sizes, staging_address)
        source = frozen_int64(source_addresses)
        low, high = int(source.min()), int(source.max())
        if low < 0 or max(high, staging_address + (count - 1) * size) > ADDRESS_MAX - size:
            raise LayoutError("a fragment at no address or beyond the address space", reason=Reason.BAD_FIELD)
        return PackedCopy(source, size, staging_address, count * size, low, high)

    def run(self) -> int:
        """Copy now, in this thread, through the host's memory. Returns bytes copied."""
        count, size = len(self.source_addresses), self.size
        source = np.asarray(_Span(self._low, self._high, size))
        target = np.asarray(_Span(self.staging_address, self.staging_address + (count - 1) * size, size))[::size]
        step = min(max(1, STEP_BYTES // size), STEP_COUNT_MAX)
        for begin in range(0, count, step):
            end = begin + step
            target[begin:end] = source[self.source_addresses[begin:end] - self._low]
        return self.total_bytes


def _contiguous(address: int, sizes: Int64Array) -> Int64Array:
    """Addresses of pieces that follow one another, read-only."""
    offsets = np.cumsum(sizes)
    offsets -= sizes
    offsets += address
    return read_only(offsets)


def _classes(source: Int64Array, target: Int64Array, sizes: Int64Array) -> Iterator[_Class]:
    large = sizes >= MEMMOVE_BYTES_MIN
    if len(sizes) <= MEMMOVE_COUNT_MAX:
        large = np.ones(len(sizes), np.bool_)
    if bool(large.any()):
        moves = tuple(zip(target[large].tolist(), source[large].tolist(), sizes[large].tolist(), strict=True))
        yield _Class(0, read_only(source[large]), read_only(target[large]), moves)
        small = ~large
        source, target, sizes = source[small], target[small], sizes[small]
        if len(sizes) == 0:
            return
    if int(sizes.min()) == int(sizes.max()):
        yield _Class(int(sizes[0]), source, target)
        return
    distinct = np.unique(sizes)
    if len(distinct) <= SIZE_CLASSES_MAX:
        for size in distinct:
            index = np.flatnonzero(sizes == size)
            yield _Class(int(size), source[index], target[index])
        return
    done = np.zeros(len(sizes), np.int64)
    for bit in range(int(sizes.max()).bit_length() - 1, -1, -1):
        index = np.flatnonzero(sizes & (1 << bit))
        if len(index):
            yield _Class(1 << bit, source[index] + done[index], target[index] + done[index])
            done[index] += 1 << bit


class _Span:
    """Host memory seen as overlapping elements of one size, one per byte position: the buffer that indices point into."""

    def __init__(self, address: int, last: int, size: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (last - address + 1,),
            "strides": (1,),
            "typestr": f"|V{size}",
        }


def _copy_class(part: _Class) -> None:
    """One pass. The spans between lowest and highest address are only indexed where a fragment stands."""
    source_low, source_high = int(part.source.min()), int(part.source.max())
    target_low, target_high = int(part.target.min()), int(part.target.max())
    source = np.asarray(_Span(source_low, source_high, part.size))
    target = np.asarray(_Span(target_low, target_high, part.size))
    dense_source, dense_target = _dense(part.source, part.size), _dense(part.target, part.size)
    if dense_source and dense_target:
        target[:: part.size] = source[:: part.size]
        return
    # An indexed read makes a temporary, and so does shifting the indices: in steps that fit the cache they cost little and
    # touch no new pages.
    step = min(max(1, STEP_BYTES // part.size), STEP_COUNT_MAX)
    from_flat, to_flat = (
        source[:: part.size] if dense_source else source,
        target[:: part.size] if dense_target else target,
    )
    for begin in range(0, len(part.source), step):
        end = begin + step
        read = from_flat[begin:end] if dense_source else from_flat[part.source[begin:end] - source_low]
        if dense_target:
            to_flat[begin:end] = read
        else:
            to_flat[part.target[begin:end] - target_low] = read


def _dense(addresses: Int64Array, size: int) -> bool:
    """Whether the fragments follow one another without a gap."""
    if int(addresses[-1]) - int(addresses[0]) != (len(addresses) - 1) * size:
        return False
    for begin in range(0, len(addresses), STEP_COUNT_MAX):
        part = addresses[begin : begin + STEP_COUNT_MAX + 1]
        if not bool((part[1:] - part[:-1] == size).all()):
            return False
    return True


def gather(source_addresses: Int64Array, sizes: Int64Array, staging_address: int) -> int:
    """Copy host fragments into one contiguous host region, in order. Returns bytes copied.

    Raises:
        LayoutError: The list is malformed; nothing was copied.
    """
    return CopyTable.gather(source_addresses, sizes, staging_address).run()


def scatter(staging_address: int, target_addresses: Int64Array, sizes: Int64Array) -> int:
    """Copy one contiguous host region into host fragments, in order. Returns bytes copied.

    Raises:
        LayoutError: The list is malformed; nothing was copied.
    """
    return CopyTable.scatter(staging_address, target_addresses, sizes).run()


@runtime_checkable
class PreparedCopy(Protocol):
    """A copy list in the form that one copier wants (on a device: resident there)."""

    @property
    def total_bytes(self) -> int: ...


class CopyHandle(Protocol):
    """A submitted copy. Until :meth:`done` has answered True, sources and targets are both in use."""

    def done(self) -> bool:
        """Whether every byte has landed; never blocks. Raises TransportError when the copy failed: memory in doubt."""
        ...

    def wait(self) -> None:
        """Block until :meth:`done`."""
        ...


@runtime_checkable
class PacksFragments(Protocol):
    """A copier that can prepare a gather from its sources alone."""

    def prepare_gather(self, source_addresses: Int64Array, sizes: Int64Array, staging_address: int) -> PreparedCopy: ...


class Copier(Protocol):
    """Copies lists of fragments. One interface for host and device memory."""

    def prepare(
        self, source_addresses: Int64Array, target_addresses: Int64Array, sizes: Int64Array
    ) -> PreparedCopy: ...

    def submit(self, prepared: PreparedCopy) -> CopyHandle: ...


class _Finished:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


#: The handle of a copy that ended before it was returned.
FINISHED: CopyHandle = _Finished()


class HostLists:
    """Prepared lists of copies between places in host memory."""

    def prepare(self, source_addresses: Int64Array, target_addresses: Int64Array, sizes: Int64Array) -> CopyTable:
        """Check and classify a list. Raises LayoutError."""
        return CopyTable.of(source_addresses, target_addresses, sizes)

    def prepare_gather(
        self, source_addresses: Int64Array, sizes: Int64Array, staging_address: int
    ) -> PackedCopy | CopyTable:
        """Check a gather into one region. Raises LayoutError."""
        return PackedCopy.of(source_addresses, sizes, staging_address)


class HostCopier(HostLists):
    """Copies host memory in the calling thread: a submitted copy is finished when ``submit`` returns."""

    def submit(self, prepared: PreparedCopy) -> CopyHandle:
        """Copy now."""
        if not isinstance(prepared, CopyTable | PackedCopy):
            raise LayoutError("a list prepared by another copier")
        prepared.run()
        return FINISHED
