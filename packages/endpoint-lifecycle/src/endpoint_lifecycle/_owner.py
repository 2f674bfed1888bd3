"""The owner side: one object per lifetime of an instance's runtime.

Pure and thread-safe: no I/O, no clock, no log. A lock guards a few fields and is never held across a caller's code. Reads
of the record copy it from canonical bytes, so no reader can see half of a publication or change one.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import msgspec

from endpoint_lifecycle._errors import (
    AlreadyOwned,
    Draining,
    EstimationNotClosed,
    InFlight,
    InvalidTransition,
    LocalProtocolError,
    NotFinal,
    NotReady,
    ProtocolViolation,
    StaleGeneration,
    StoryEntry,
)
from endpoint_lifecycle._record import DRAINING, PUBLISHED, EndpointProfile, EndpointRecord, check_id, check_record
from endpoint_lifecycle._state import TERMINAL, TRANSITIONS, VISIBLE, OwnerEvent, OwnerState

#: Entries kept of a story; older ones are dropped, which the sequence numbers show.
STORY_ENTRIES_MAX = 64


def new_generation() -> str:
    """128 random bits as 32 hexadecimal characters."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class EstimationAccount:
    """What the estimation runtimes of one owner held, kept after they closed.

    Attributes:
        peak_bytes: Largest sum held at any one moment.
        bytes_by_resource: Largest size seen per resource name, bytes.
        open_resources: What is still open now.
    """

    peak_bytes: int
    bytes_by_resource: Mapping[str, int]
    open_resources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OwnerStatistics:
    """Counters of one owner."""

    state: OwnerState
    epoch: int
    in_flight: int
    admitted: int
    finished: int
    abandoned: int
    refused_stale: int
    refused_not_ready: int
    refused_draining: int


@dataclass(frozen=True, slots=True)
class SlotView:
    """What a slot holds now: the record, and the place of its publication in the slot's order."""

    epoch: int
    record: EndpointRecord


class EndpointSlot:
    """The one place where an owner's current record stands, shared by the successive lifetimes of a process.

    Holds at most one published generation. Publishing raises the epoch; removing compares the generation first.
    """

    def __init__(self, owner_id: str) -> None:
        check_id("owner_id", owner_id)
        self.owner_id = owner_id
        self._lock = threading.Lock()
        self._epoch = 0
        self._generation: str | None = None
        self._encoded: bytes | None = None

    def current(self) -> SlotView | None:
        """The current record with its epoch, or None. The record is the reader's own copy."""
        with self._lock:
            epoch, encoded = self._epoch, self._encoded
        if encoded is None:
            return None
        return SlotView(epoch, msgspec.json.decode(encoded, type=EndpointRecord))

    @property
    def generation(self) -> str | None:
        """The current generation, or None."""
        return self._generation

    @property
    def epoch(self) -> int:
        """Publications so far."""
        return self._epoch

    def _set(self, record: EndpointRecord) -> int:
        encoded = record.encode()
        with self._lock:
            if self._encoded is not None and self._generation != record.generation:
                current = msgspec.json.decode(self._encoded, type=EndpointRecord)
                if current.state == PUBLISHED:
                    raise AlreadyOwned(f"{self.owner_id}: generation {self._generation!r} is published")
            self._epoch += 1
            self._generation = record.generation
            self._encoded = encoded
            return self._epoch

    def _mark_draining(self, generation: str) -> bool:
        with self._lock:
            if self._generation != generation or self._encoded is None:
                return False
            record = msgspec.json.decode(self._encoded, type=EndpointRecord)
            self._encoded = msgspec.structs.replace(record, state=DRAINING).encode()
            return True

    def delete(self, generation: str | None) -> bool:
        """Remove the record if it is of this generation; otherwise do nothing and say so."""
        with self._lock:
            if generation is None or self._generation != generation:
                return False
            self._generation = None
            self._encoded = None
            return True


class EndpointOwner:
    """One lifetime of a runtime that may publish an endpoint.

    Args:
        owner_id: Stable name of the slot (``ctx-0``).
        instance_id: Name of this process start.
        role: What the instance does.
        slot: Shared by successive lifetimes of one process; None makes one.
        mint_generation: Source of generations, for tests.

    Raises:
        RecordInvalid: A name is empty, too long or not printable.
    """

    def __init__(
        self,
        owner_id: str,
        instance_id: str,
        role: str,
        slot: EndpointSlot | None = None,
        *,
        mint_generation: Callable[[], str] = new_generation,
    ) -> None:
        for field, value in (("owner_id", owner_id), ("instance_id", instance_id), ("role", role)):
            check_id(field, value)
        if slot is not None and slot.owner_id != owner_id:
            raise LocalProtocolError(f"slot belongs to {slot.owner_id!r}, not to {owner_id!r}")
        self.owner_id = owner_id
        self.instance_id = instance_id
        self.role = role
        self.slot = slot if slot is not None else EndpointSlot(owner_id)
        self._mint_generation = mint_generation
        self._lock = threading.RLock()
        self._state = OwnerState.NEW
        self._story: deque[StoryEntry] = deque(maxlen=STORY_ENTRIES_MAX)
        self._events = 0
        self._runtime: EstimationRuntime | None = None
        self._peak_bytes = 0
        self._peaks: dict[str, int] = {}
        self._capability: PublishCapability | None = None
        self._generation: str | None = None
        self._published: tuple[tuple[str, ...], bytes] | None = None
        self._record: EndpointRecord | None = None
        self._encoded: bytes | None = None
        self._epoch = 0
        self._failure: str | None = None
        self._in_flight = 0
        self._admitted = 0
        self._finished = 0
        self._abandoned = 0
        self._refused_stale = 0
        self._refused_not_ready = 0
        self._refused_draining = 0

    # -- reading --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> OwnerState:
        """Where the lifetime stands."""
        return self._state

    @property
    def ready(self) -> bool:
        """Published and taking new work."""
        return self._state is OwnerState.PUBLISHED

    @property
    def generation(self) -> str | None:
        """The generation while the record is visible, else None."""
        with self._lock:
            return self._generation if self._state in VISIBLE else None

    @property
    def failure(self) -> str | None:
        """Why the lifetime failed, or None."""
        return self._failure

    @property
    def in_flight(self) -> int:
        """Admissions that have not finished."""
        return self._in_flight

    def record(self) -> EndpointRecord | None:
        """The published record, whole, with its present state; None before publication and after the end."""
        return self.snapshot()[1]

    def snapshot(self) -> tuple[OwnerState, EndpointRecord | None]:
        """State and record of one moment. The record is the caller's own copy."""
        with self._lock:
            state = self._state
            encoded = self._encoded if state in VISIBLE else None
        if encoded is None:
            return state, None
        return state, msgspec.json.decode(encoded, type=EndpointRecord)

    def estimation_account(self) -> EstimationAccount:
        """The byte account of all estimation runtimes of this owner; it outlives them."""
        with self._lock:
            runtime = self._runtime
            names = tuple(runtime._open) if runtime is not None else ()
            return EstimationAccount(self._peak_bytes, MappingProxyType(dict(self._peaks)), names)

    def story(self) -> tuple[StoryEntry, ...]:
        """What happened so far, oldest first, the last 64 entries."""
        with self._lock:
            return tuple(self._story)

    def statistics(self) -> OwnerStatistics:
        """Counters of one moment."""
        with self._lock:
            return OwnerStatistics(
                state=self._state,
                epoch=self._epoch,
                in_flight=self._in_flight,
                admitted=self._admitted,
                finished=self._finished,
                abandoned=self._abandoned,
                refused_stale=self._refused_stale,
                refused_not_ready=self._refused_not_ready,
                refused_draining=self._refused_draining,
            )

    def validate(self) -> None:
        """Check what must always hold; a failure is a defect of this package.

        Raises:
            AssertionError: An invariant is broken.
        """
        with self._lock:
            faults = []
            if (self._record is not None) != (self._generation is not None):
                faults.append("record without generation")
            if self._state in VISIBLE and self._encoded is None:
                faults.append("visible without record")
            if self._state not in VISIBLE and self._state not in TERMINAL and self._generation is not None:
                faults.append("generation before publication")
            if self._state is OwnerState.ESTIMATING and self._runtime is None:
                faults.append("estimating without runtime")
            if self._state in (OwnerState.FINAL, *VISIBLE) and self._runtime is not None:
                faults.append("final with an open estimation runtime")
            if self._state in TERMINAL and self._generation is not None and self.slot.generation == self._generation:
                faults.append("ended lifetime still in the slot")
            if self._in_flight < 0 or self._admitted != self._finished + self._abandoned + self._in_flight:
                faults.append("admissions do not add up")
            if faults:
                raise AssertionError(f"{self.owner_id}: {', '.join(faults)}; story {[str(e) for e in self._story]}")

    # -- moving ---------------------------------------------------------------------------------------------------------

    def _note(self, event: str, detail: str = "") -> None:
        self._events += 1
        self._story.append(StoryEntry(self._events, event, self._state.value, detail))

    def _target(self, event: OwnerEvent) -> OwnerState:
        target = TRANSITIONS.get((self._state, event))
        if target is None:
            kind = NotFinal if event is OwnerEvent.PUBLISHED and self._state not in VISIBLE else InvalidTransition
            raise kind(self.owner_id, self._state.value, event.value, story=tuple(self._story))
        return target

    def _move(self, event: OwnerEvent, detail: str = "") -> None:
        self._state = self._target(event)
        self._note(event.value, detail)

    def begin_estimation(self) -> EstimationRuntime:
        """Begin an estimation runtime. Use it in a ``with`` block, or close it by ``close()``.

        Raises:
            InvalidTransition: One is open already, or the lifetime is past estimating.
        """
        with self._lock:
            self._move(OwnerEvent.ESTIMATION_BEGAN)
            self._runtime = EstimationRuntime(self)
            return self._runtime

    def finalize(self) -> PublishCapability:
        """Declare the runtime final and take the only capability to publish it.

        Raises:
            AlreadyOwned: It was taken before.
            EstimationNotClosed: An estimation runtime is open; its open resources are named.
            InvalidTransition: The lifetime has ended.
        """
        with self._lock:
            if self._capability is not None:
                raise AlreadyOwned(f"{self.owner_id}: the publish capability was claimed", story=tuple(self._story))
            if self._state is OwnerState.ESTIMATING and self._runtime is not None:
                names = tuple(self._runtime._open) or ("the estimation runtime",)
                raise EstimationNotClosed(self.owner_id, names, story=tuple(self._story))
            self._move(OwnerEvent.FINALIZED)
            self._capability = PublishCapability(self)
            return self._capability

    def _publish(self, addresses: tuple[str, ...], profile: EndpointProfile) -> EndpointRecord:
        with self._lock:
            encoded_profile = msgspec.json.encode(profile, order="deterministic")
            if self._state in VISIBLE and self._record is not None:
                if self._published != (addresses, encoded_profile):
                    raise ProtocolViolation(
                        f"{self.owner_id}: a different record under generation {self._generation!r}",
                        story=tuple(self._story),
                    )
                return msgspec.json.decode(self._encoded or b"", type=EndpointRecord)
            self._target(OwnerEvent.PUBLISHED)
            record = EndpointRecord(
                role=self.role,
                owner_id=self.owner_id,
                instance_id=self.instance_id,
                generation=self._mint_generation(),
                state=PUBLISHED,
                control_addresses=addresses,
                profile=msgspec.json.decode(encoded_profile, type=EndpointProfile),
            )
            check_record(record)
            self._epoch = self.slot._set(record)
            self._generation = record.generation
            self._published = (addresses, encoded_profile)
            self._record = record
            self._encoded = record.encode()
            self._move(OwnerEvent.PUBLISHED, f"generation {record.generation}, epoch {self._epoch}")
            return msgspec.json.decode(self._encoded, type=EndpointRecord)

    def start_draining(self) -> None:
        """Take nothing new; what was admitted may finish. A second call is a no-op.

        Raises:
            InvalidTransition: Nothing is published.
        """
        with self._lock:
            if self._state is OwnerState.DRAINING:
                return
            self._move(OwnerEvent.DRAINING_STARTED)
            if self._record is not None and self._generation is not None:
                self._record = msgspec.structs.replace(self._record, state=DRAINING)
                self._encoded = self._record.encode()
                self.slot._mark_draining(self._generation)

    def retire(self, generation: str | None, *, abandon: bool = False) -> bool:
        """Withdraw exactly this generation.

        Args:
            generation: What to withdraw. Another one's is left alone.
            abandon: The drain deadline passed: count what is still in flight as abandoned. The caller has failed it.

        Returns:
            True when this call withdrew it; False when it is not this owner's live generation (a late call).

        Raises:
            InFlight: Admissions remain and ``abandon`` is not set. Nothing changed.
            InvalidTransition: The owner is published and not draining.
        """
        with self._lock:
            if generation is None or generation != self._generation or self._state in TERMINAL:
                self._note("retire ignored", f"generation {generation}")
                return False
            self._target(OwnerEvent.RETIRED)
            if self._in_flight and not abandon:
                raise InFlight(self.owner_id, self._in_flight, story=tuple(self._story))
            self._abandoned += self._in_flight
            self._in_flight = 0
            self._move(OwnerEvent.RETIRED, f"generation {generation}")
            self.slot.delete(generation)
            return True

    def fail(self, reason: str) -> bool:
        """End the lifetime by failure, from any state but RETIRED; the record is withdrawn.

        Returns:
            True the first time; False when it had failed before (the first reason stands).

        Raises:
            InvalidTransition: The lifetime was retired.
        """
        with self._lock:
            if self._state is OwnerState.FAILED:
                self._note("fail again", reason)
                return False
            self._move(OwnerEvent.FAILED, reason)
            self._failure = reason
            self._abandoned += self._in_flight
            self._in_flight = 0
            self.slot.delete(self._generation)
            self._runtime = None
            return True

    # -- admitting ------------------------------------------------------------------------------------------------------

    def check(self, expected: str | None, *, new_work: bool = True) -> None:
        """Refuse work that was meant for another lifetime, before anything is touched.

        Args:
            expected: The generation that the sender believes in; None where the sender knows none.
            new_work: False for the continuation of something dispatched before draining began.

        Raises:
            StaleGeneration: Another generation is live.
            NotReady: Nothing is published.
            Draining: New work while draining.
        """
        with self._lock:
            self._check(expected, new_work)

    def _check(self, expected: str | None, new_work: bool) -> None:
        if self._state not in VISIBLE:
            if self._state in TERMINAL and self._generation is not None and expected is not None:
                self._refused_stale += 1
                raise StaleGeneration(expected, None, story=tuple(self._story))
            self._refused_not_ready += 1
            raise NotReady(f"{self.owner_id} is {self._state.value}", story=tuple(self._story))
        if expected is not None and expected != self._generation:
            self._refused_stale += 1
            raise StaleGeneration(expected, self._generation)
        if new_work and self._state is OwnerState.DRAINING:
            self._refused_draining += 1
            raise Draining(f"{self.owner_id} is draining")

    def admit(self, expected: str | None, *, new_work: bool = True) -> Admission:
        """Check as ``check`` does and count the work as in flight until the admission is finished.

        Returns:
            An Admission: a context manager, or call its ``finish()``; counted once.
        """
        with self._lock:
            self._check(expected, new_work)
            self._in_flight += 1
            self._admitted += 1
            return Admission(self, self._generation)

    def _finish(self, admission: Admission) -> bool:
        with self._lock:
            if admission._finished:
                return False
            admission._finished = True
            if self._state in TERMINAL:
                return False  # it was counted as abandoned when the lifetime ended
            self._in_flight -= 1
            self._finished += 1
            return True


class Admission:
    """Work that an owner took in; finishing it is idempotent and safe from any thread."""

    __slots__ = ("_finished", "_owner", "generation")

    def __init__(self, owner: EndpointOwner, generation: str | None) -> None:
        self._owner = owner
        self._finished = False
        self.generation = generation

    def finish(self) -> bool:
        """Count the work as ended. True when this call did it."""
        return self._owner._finish(self)

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


class EstimationRuntime:
    """The throw-away runtime whose memory is counted. It opens and closes resources; it never publishes."""

    def __init__(self, owner: EndpointOwner) -> None:
        self._owner = owner
        self._open: dict[str, int] = {}
        self._closed = False

    def opened(self, resource: str, size_bytes: int = 0) -> None:
        """Record that a listener, registration or buffer exists, with its size.

        Raises:
            LocalProtocolError: The name is open already, the size is negative, or the runtime is closed.
        """
        owner = self._owner
        with owner._lock:
            self._check_current()
            if not isinstance(size_bytes, int) or size_bytes < 0:
                raise LocalProtocolError(f"{resource}: size_bytes is {size_bytes!r}, must be an integer >= 0")
            if resource in self._open:
                raise LocalProtocolError(f"{resource} is open already", story=owner.story())
            self._open[resource] = size_bytes
            owner._peaks[resource] = max(owner._peaks.get(resource, 0), size_bytes)
            owner._peak_bytes = max(owner._peak_bytes, sum(self._open.values()))
            owner._note("opened", f"{resource}, {size_bytes} bytes")

    def closed(self, resource: str) -> None:
        """Record the proof that a resource is gone (listener closed, registration released).

        Raises:
            LocalProtocolError: It is not open.
        """
        owner = self._owner
        with owner._lock:
            self._check_current()
            if resource not in self._open:
                raise LocalProtocolError(f"{resource} is not open", story=owner.story())
            del self._open[resource]
            owner._note("closed", resource)

    def publish(self, control_addresses: object = (), profile: object = None) -> EndpointRecord:
        """Always refused: here so that code handed either runtime meets the refusal, not an AttributeError.

        Raises:
            NotFinal: Always.
        """
        owner = self._owner
        raise NotFinal(owner.owner_id, owner.state.value, OwnerEvent.PUBLISHED.value, story=owner.story())

    def close(self) -> None:
        """End the estimation. The byte account stays.

        Raises:
            EstimationNotClosed: Resources are open. The owner stays in ESTIMATING.
        """
        owner = self._owner
        with owner._lock:
            if self._closed:
                return
            self._check_current()
            if self._open:
                raise EstimationNotClosed(owner.owner_id, tuple(self._open), story=owner.story())
            owner._move(OwnerEvent.ESTIMATION_CLOSED, f"peak {owner._peak_bytes} bytes")
            owner._runtime = None
            self._closed = True

    def _check_current(self) -> None:
        if self._owner._runtime is not self:
            raise LocalProtocolError(f"{self._owner.owner_id}: this estimation runtime has ended")

    def __enter__(self) -> EstimationRuntime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif self._owner._runtime is self:
            # Nobody can say what a runtime that broke still holds: this lifetime ends here.
            self._owner.fail(f"estimation: {type(error).__name__}: {error}")


class PublishCapability:
    """The right to publish one final runtime. Only ``EndpointOwner.finalize`` makes one, and once."""

    __slots__ = ("_owner",)

    def __init__(self, owner: EndpointOwner) -> None:
        if owner._capability is not None or owner.state is not OwnerState.FINAL:
            raise AlreadyOwned(f"{owner.owner_id}: only finalize() makes a capability", story=owner.story())
        self._owner = owner

    def publish(
        self, control_addresses: tuple[str, ...] | list[str], profile: EndpointProfile | None = None
    ) -> EndpointRecord:
        """Publish addresses, profile and a fresh generation as one.

        Args:
            control_addresses: Where peers dial, in rank order; ``profile.address_count`` of them.
            profile: What peers must know; JSON-able throughout. It is copied.

        Returns:
            The record. An identical second call returns the same one, draining included.

        Raises:
            RecordInvalid: A field cannot be published; nothing was.
            ProtocolViolation: Another record stands under this generation.
            AlreadyOwned: Another lifetime in the same slot is published.
            NotFinal: The lifetime has ended.
        """
        return self._owner._publish(tuple(control_addresses), profile if profile is not None else EndpointProfile())


def describe_owner(owner: EndpointOwner) -> dict[str, Any]:
    """Identity and state of an owner, JSON-able, without any endpoint field."""
    return {"role": owner.role, "owner_id": owner.owner_id, "instance_id": owner.instance_id}
