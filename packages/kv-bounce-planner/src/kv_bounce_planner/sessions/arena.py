"""Bounce memory: one registered range, handed out in reservations whose writers have sub-regions of their own.

Theory. The arena owns no memory and does no I/O: it is given a base address and a size. A reservation is all or nothing
over its writers, so no transfer holds a part while it waits for the rest. Two types stand for the two sides of the
advertisement:

    Reservation              nothing left this process: ``abandon()`` gives the space back (fail open)
        │ advertise()
    AdvertisedReservation    ``bind_writer()`` makes an address that leaves: only ``release(proofs)`` or ``quarantine()``

Waiting is first come, first served with bounded overtaking: a reservation that fits may pass a head that does not, at
most ``max(8, 2 * waiting)`` times per head; then nothing passes until the head fits. So small flows cannot starve a large one.
Conservation: free + held + quarantined == capacity, after every call.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner._reasons import Reason, Refusal
from kv_bounce_planner.sessions.identity import OperationIdentity
from kv_bounce_planner.sessions.proof import OwnedMemory, Proof

MemoryKind = Literal["DRAM", "VRAM"]
#: Reservations that may wait: a bound on the queue, far above any admission window.
WAITING_MAX = 65536


@dataclass(frozen=True)
class BoundRegion:
    """Sub-region that one writer, and nobody else, may fill. ``address`` may leave the process."""

    operation: OperationIdentity
    writer: int
    address: int
    byte_count: int
    memory_kind: MemoryKind
    device_id: int


@dataclass(frozen=True)
class ArenaStatistics:
    """Bytes unless said; ``free + held + quarantined == capacity``."""

    capacity_bytes: int
    free_bytes: int
    held_bytes: int
    quarantined_bytes: int
    high_water_bytes: int
    reservations: int
    waiting: int
    granted_total: int
    refused_total: int
    overtakes_total: int


class _Span:
    __slots__ = ("key", "offset", "parts", "size", "state")

    def __init__(self, key: Hashable, offset: int, size: int, parts: dict[int, tuple[int, int]]) -> None:
        self.key = key
        self.offset = offset
        self.size = size
        self.parts = parts
        self.state: Literal["reserved", "advertised", "free", "quarantined"] = "reserved"


@final
class Reservation:
    """Space that nobody outside knows of. Fail-open side of the boundary."""

    __slots__ = ("_arena", "_span")

    def __init__(self, arena: BounceArena, span: _Span) -> None:
        self._arena = arena
        self._span = span

    @property
    def key(self) -> Hashable:
        return self._span.key

    def abandon(self) -> None:
        """Give the space back: no address of it ever left ("never exposed" is its proof).

        Raises:
            LocalProtocolError: It was advertised or abandoned before; nothing changed.
        """
        self._take("abandon")
        self._arena._return(self._span)

    def advertise(self) -> AdvertisedReservation:
        """Cross the boundary. This object is spent; from here on only proof or quarantine ends the reservation."""
        self._take("advertise")
        self._span.state = "advertised"
        return AdvertisedReservation(self._arena, self._span)

    def _take(self, what: str) -> None:
        if self._span.state != "reserved":
            raise LocalProtocolError(f"cannot {what}: this reservation is {self._span.state}")


@final
class AdvertisedReservation:
    """Space that a writer may write. Fail-closed side of the boundary: it has no ``abandon``."""

    __slots__ = ("_arena", "_bound", "_span")

    def __init__(self, arena: BounceArena, span: _Span) -> None:
        self._arena = arena
        self._span = span
        self._bound: dict[int, BoundRegion] = {}

    @property
    def key(self) -> Hashable:
        return self._span.key

    @property
    def byte_count(self) -> int:
        return self._span.size

    @property
    def bound(self) -> tuple[BoundRegion, ...]:
        return tuple(self._bound.values())

    def bind_writer(self, operation: OperationIdentity, writer: int) -> BoundRegion:
        """Bind a writer's sub-region to one operation, before its address leaves. Binding is for ever.

        Raises:
            LocalProtocolError: Not a writer of this reservation, bound to another operation, or already ended.
        """
        if self._span.state != "advertised":
            raise LocalProtocolError(f"cannot bind: this reservation is {self._span.state}")
        if writer not in self._span.parts:
            raise LocalProtocolError(f"writer {writer} has no part in the reservation of {self._span.key}")
        known = self._bound.get(writer)
        if known is not None:
            if known.operation != operation:
                raise LocalProtocolError(f"writer {writer} is bound to {known.operation}, not {operation}")
            return known
        offset, size = self._span.parts[writer]
        region = BoundRegion(
            operation,
            writer,
            self._arena.base_address + offset,
            size,
            self._arena.memory_kind,
            self._arena.device_id,
        )
        self._bound[writer] = region
        return region

    def release(self, proofs: Iterable[Proof]) -> None:
        """OWNED → PROVEN → FREE: every bound operation needs its proof; a part never bound was never exposed.

        Raises:
            LocalProtocolError: A proof is missing, or it already ended. The space stays as it was.
        """
        if self._span.state != "advertised":
            raise LocalProtocolError(f"cannot release: this reservation is {self._span.state}")
        owned = OwnedMemory(self._span.key, (region.operation for region in self._bound.values()), self._span.size)
        owned.prove(proofs)
        self._arena._return(self._span)

    def quarantine(self) -> int:
        """OWNED → QUARANTINED, with no way back. Returns the bytes given up."""
        if self._span.state != "advertised":
            raise LocalProtocolError(f"cannot quarantine: this reservation is {self._span.state}")
        self._arena._quarantine(self._span)
        return self._span.size


class BounceArena:
    """First-fit reservations over one range.

    Args:
        base_address: Address of the range, > 0; its owner keeps it alive and registered as long as the arena lives.
        capacity_bytes: Size of the range.
        alignment: Start alignment of every part in bytes, a power of two.
        memory_kind: Where the range lies.
        device_id: Device of the range (0 for DRAM).
    """

    def __init__(
        self,
        base_address: int,
        capacity_bytes: int,
        *,
        alignment: int = 512,
        memory_kind: MemoryKind = "DRAM",
        device_id: int = 0,
    ) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment wants a power of two, got {alignment}")
        if base_address <= 0:
            raise ValueError(f"base_address wants > 0, got {base_address}")
        first = -base_address % alignment
        if capacity_bytes - first < alignment:
            raise ValueError(f"capacity of {capacity_bytes} bytes holds no aligned unit of {alignment}")
        self.base_address = base_address
        self.capacity_bytes = capacity_bytes
        self.alignment = alignment
        self.memory_kind: MemoryKind = memory_kind
        self.device_id = device_id
        self._first = first
        self._memory: object = None
        self._offsets: list[int] = []  # of the spans below, ascending
        self._spans: list[_Span] = []
        self._by_key: dict[Hashable, _Span] = {}
        self._waiting: OrderedDict[Hashable, dict[int, int]] = OrderedDict()
        self._overtaken = 0
        self._held = 0
        self._quarantined = 0
        self._high_water = 0
        self._granted = 0
        self._refused = 0
        self._overtakes = 0
        self._closed = False

    @classmethod
    def of(cls, memory: np.ndarray[Any, Any], *, alignment: int = 512) -> BounceArena:
        """An arena over host memory that it keeps alive itself.

        Args:
            memory: Contiguous and writable; register it with the transport.
            alignment: As of the arena.

        Raises:
            ValueError: It is not contiguous, or not writable.
        """
        if not memory.flags.c_contiguous or not memory.flags.writeable:
            raise ValueError("bounce memory wants to be contiguous and writable")
        arena = cls(memory.ctypes.data, memory.nbytes, alignment=alignment)
        arena._memory = memory
        return arena

    def reserve(self, key: Hashable, parts: Mapping[int, int]) -> Reservation | Refusal:
        """Reserve one region with a part per writer, now or not at all.

        Args:
            key: Names the reservation; one live reservation per key.
            parts: writer -> bytes, at least one writer, every size >= 1.

        Returns:
            A reservation, or why not: OVERSIZE (permanent), NO_SPACE (also while others wait: no barging),
            KEY_LIVE, CLOSING, PLAN_BYTES (a size that is not one). Nothing is held by a refusal.
        """
        refusal = self._check(key, parts)  # a Refusal is false in a condition: compared with None throughout
        if refusal is None and self._waiting:
            refusal = Refusal(Reason.NO_SPACE, f"{len(self._waiting)} reservations wait")
        if refusal is None:
            found = self._place(key, dict(parts))
            if found is not None:
                return found
            refusal = Refusal(Reason.NO_SPACE, "no hole is large enough")
        self._refused += 1
        return refusal

    def enqueue(self, key: Hashable, parts: Mapping[int, int]) -> Refusal | None:
        """Wait for a region; ``pump()`` returns it. Only permanent obstacles refuse here."""
        refusal = self._check(key, parts)
        if refusal is None and key in self._waiting:
            refusal = Refusal(Reason.KEY_LIVE, f"{key} already waits")
        if refusal is None and len(self._waiting) >= WAITING_MAX:
            refusal = Refusal(Reason.NO_SPACE, f"{WAITING_MAX} reservations wait")
        if refusal is not None:
            self._refused += 1
            return refusal
        self._waiting[key] = dict(parts)
        return None

    def withdraw(self, key: Hashable) -> bool:
        """Leave the queue. False: it did not wait."""
        if key not in self._waiting:
            return False
        if next(iter(self._waiting)) == key:
            self._overtaken = 0
        del self._waiting[key]
        return True

    def pump(self) -> tuple[Reservation, ...]:
        """Serve the queue as far as space and fairness allow."""
        served: list[Reservation] = []
        while self._waiting:
            head = next(iter(self._waiting))
            found = self._place(head, self._waiting[head])
            if found is not None:
                del self._waiting[head]
                self._overtaken = 0
                served.append(found)
                continue
            limit = max(8, 2 * len(self._waiting))
            passed = None
            for key in list(self._waiting)[1:]:
                if self._overtaken >= limit:
                    break
                passed = self._place(key, self._waiting[key])
                if passed is not None:
                    del self._waiting[key]
                    self._overtaken += 1
                    self._overtakes += 1
                    served.append(passed)
            break
        return tuple(served)

    def close(self) -> None:
        """Admit nothing more.

        Raises:
            LocalProtocolError: Space is held or quarantined: the memory must outlive it. Admission stays closed; retry.
        """
        self._closed = True
        self._waiting.clear()
        if self._held or self._quarantined:
            raise LocalProtocolError(
                f"{self._held} bytes are held and {self._quarantined} quarantined: the memory cannot be given back"
            )

    def peek(self, byte_count: int) -> int | None:
        """Where a region of one part would come to lie if it were reserved now. A guess about later, a promise of nothing."""
        found = self._find(byte_count)
        return None if found is None else self.base_address + found[1]

    @property
    def waiting_count(self) -> int:
        """Reservations that wait."""
        return len(self._waiting)

    def largest_region_bytes(self) -> int:
        """What an empty arena could give to one writer."""
        return self.capacity_bytes - self._first

    def statistics(self) -> ArenaStatistics:
        return ArenaStatistics(
            self.capacity_bytes,
            self.capacity_bytes - self._held - self._quarantined,
            self._held,
            self._quarantined,
            self._high_water,
            len(self._spans),
            len(self._waiting),
            self._granted,
            self._refused,
            self._overtakes,
        )

    def validate(self) -> None:
        """Raise if an invariant does not hold: order, disjointness, conservation. For tests' teardown."""
        end = 0
        held = quarantined = 0
        for offset, span in zip(self._offsets, self._spans):
            if offset != span.offset or offset < end or span.state == "free":
                raise LocalProtocolError(f"spans are not sorted, disjoint and live at {offset}")
            end = offset + span.size
            if span.state == "quarantined":
                quarantined += span.size
            else:
                held += span.size
        if end > self.capacity_bytes or held != self._held or quarantined != self._quarantined:
            raise LocalProtocolError("bytes are not conserved")

    def _check(self, key: Hashable, parts: Mapping[int, int]) -> Refusal | None:
        if self._closed:
            return Refusal(Reason.CLOSING, "the arena is closing")
        if key in self._by_key:
            return Refusal(Reason.KEY_LIVE, f"{key} holds a reservation")
        if not parts or any(type(size) is not int or size < 1 for size in parts.values()):
            return Refusal(Reason.PLAN_BYTES, f"every writer needs a positive size, got {dict(parts)}")
        total = self._total(parts)
        if total > self.capacity_bytes - self._first:
            return Refusal(Reason.OVERSIZE, f"{total} bytes do not fit into {self.capacity_bytes}")
        return None

    def _rounded(self, size: int) -> int:
        return (size + self.alignment - 1) & ~(self.alignment - 1)

    def _total(self, parts: Mapping[int, int]) -> int:
        sizes = list(parts.values())
        # The last part needs no padding behind it: an exact fit fits.
        return sum(self._rounded(size) for size in sizes[:-1]) + sizes[-1]

    def _find(self, total: int) -> tuple[int, int] | None:
        """First fit: (index among the spans, offset), or None."""
        at = self._first
        for index, span in enumerate(self._spans):
            if span.offset - at >= total:
                return index, at
            at = max(at, self._aligned(span.offset + span.size))
        return (len(self._spans), at) if at + total <= self.capacity_bytes else None

    def _place(self, key: Hashable, parts: dict[int, int]) -> Reservation | None:
        total = self._total(parts)
        found = self._find(total)
        if found is None:
            return None
        index, at = found
        offset, bound = at, {}
        for writer, size in parts.items():
            bound[writer] = (offset, size)
            offset += self._rounded(size)
        span = _Span(key, at, total, bound)
        self._offsets.insert(index, at)
        self._spans.insert(index, span)
        self._by_key[key] = span
        self._held += total
        self._granted += 1
        self._high_water = max(self._high_water, self._held + self._quarantined)
        return Reservation(self, span)

    def _aligned(self, offset: int) -> int:
        return offset + (-(self.base_address + offset) % self.alignment)

    def _return(self, span: _Span) -> None:
        index = bisect.bisect_left(self._offsets, span.offset)
        if index == len(self._spans) or self._spans[index] is not span:
            raise LocalProtocolError(f"the region of {span.key} is not of this arena")
        del self._offsets[index], self._spans[index]
        del self._by_key[span.key]
        self._held -= span.size
        span.state = "free"

    def _quarantine(self, span: _Span) -> None:
        self._by_key.pop(span.key)
        self._held -= span.size
        self._quarantined += span.size
        span.state = "quarantined"
