"""The pure core: which requests leave together, when, and why. No clock, no thread, no I/O.

Theory of operation. Each request is one ``Entry`` and walks ADMITTED → BUFFERED → SENT → SETTLED, or to SETTLED from
wherever it is when it is withdrawn, aborted or dropped. Admission checks everything and takes the id and a place, so the
caller's registration in between cannot meet a refusal. There is one buffer, in order. Every way to leave it
(``FLUSH_REASONS``) takes the whole buffer from its front, so order holds across flush kinds. Methods return the batches to
send, in order; the driver sends them in exactly that order, and tells the core when a send is over (only the adaptive delay
depends on it).

An exception may come out of any method at any bytecode: an interrupt, which the caller's own signal handler raises. What counts
is then in the entries and in ``_open``, which change in single steps, and ``mend`` makes everything else from them again.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._errors import BatchAborted, BatchBackpressure, BatchClosed, BatchUsageError

_T = TypeVar("_T")

SIZE: Final = "size"
BYTES: Final = "bytes"
DELAY: Final = "delay"
IDLE: Final = "idle"
BYPASS: Final = "bypass"
EXPLICIT: Final = "explicit"
CLOSE: Final = "close"
#: Why a batch left: full, byte cap, oldest waited long enough, nothing in flight, caller goes direct, asked for,
#: closing.
FLUSH_REASONS: Final = (SIZE, BYTES, DELAY, IDLE, BYPASS, EXPLICIT, CLOSE)


class EntryState(enum.Enum):
    """Where a request is."""

    ADMITTED = "admitted"
    BUFFERED = "buffered"
    SENT = "sent"
    SETTLED = "settled"

    # By identity: the enumeration's own hash is a Python call, and each request is looked up in the table twice.
    __hash__ = object.__hash__


#: Legal moves of an entry.
TRANSITIONS: Final[Mapping[EntryState, frozenset[EntryState]]] = {
    EntryState.ADMITTED: frozenset({EntryState.BUFFERED, EntryState.SETTLED}),
    EntryState.BUFFERED: frozenset({EntryState.SENT, EntryState.SETTLED}),
    EntryState.SENT: frozenset({EntryState.SETTLED}),
    EntryState.SETTLED: frozenset(),
}


class Entry(Generic[_T]):
    """One request on its way. ``ticket`` belongs to the driver."""

    __slots__ = ("asked", "kept", "request", "request_id", "size_bytes", "state", "submitted_s", "ticket", "told")

    def __init__(self, request: _T, request_id: Hashable, size_bytes: int, ticket: Any) -> None:
        self.request = request
        self.request_id = request_id
        self.size_bytes = size_bytes
        #: When it was buffered.
        self.submitted_s = 0.0
        self.ticket = ticket
        #: The driver's: ``on_unknown`` was called, and its answer; ``rollback`` was called.
        self.asked = False
        self.kept = False
        self.told = False
        self.state = EntryState.ADMITTED


@dataclasses.dataclass(frozen=True, eq=False)
class SendBatch(Generic[_T]):
    """Effect: send these together. Must happen in the order in which the effects were returned."""

    entries: tuple[Entry[_T], ...]
    reason: str


def ends_of(
    batch: SendBatch[_T], handed_over: Sequence[Entry[_T]], outcomes: Sequence[BaseException | None]
) -> list[tuple[Entry[_T], BaseException | None]]:
    """Each request of a batch with its end: the outcome of those that were handed over; the others were cancelled."""
    if len(handed_over) == len(batch.entries):
        return list(zip(batch.entries, outcomes))
    known = dict(zip(handed_over, outcomes))
    return [
        (entry, known[entry] if entry in known else BatchAborted("cancelled before it was sent"))
        for entry in batch.entries
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BatchStatistics:
    """What a submitter did so far. Counts, unless a unit is named."""

    submitted: int
    sent: int
    settled: int
    aborted: int
    failed: int
    #: Of the failed ones: they may have been served.
    unknown: int
    batches: int
    flushes: Mapping[str, int]
    buffered: int
    outstanding: int
    outstanding_high_water: int
    batch_high_water: int
    dropped_in_fork: int


class Batcher(Generic[_T]):
    """See the module's header. Not thread-safe; a driver owns it.

    Time is seconds on any monotonic clock, given by the caller.
    """

    def __init__(self, config: BatchSubmitConfig) -> None:
        self.config = config
        self._buffer: list[Entry[_T]] = []
        self._buffer_bytes = 0
        self._by_id: dict[Hashable, Entry[_T]] = {}
        self._closed = False
        self._batches_in_flight = 0
        #: Every request that is not settled, in order of admission.
        self._open: dict[Entry[_T], None] = {}
        self._sent = 0
        self._settled = 0
        self._aborted = 0
        self._failed = 0
        self._unknown = 0
        self._batches = 0
        self._flushes = dict.fromkeys(FLUSH_REASONS, 0)
        self._outstanding_high_water = 0
        self._batch_high_water = 0
        self._dropped = 0

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    @property
    def outstanding(self) -> int:
        """Requests admitted, buffered or sent and not settled."""
        return len(self._open)

    @property
    def entries(self) -> tuple[Entry[_T], ...]:
        """Them, in order of admission."""
        return tuple(self._open)

    def find(self, ticket: object) -> Entry[_T] | None:
        """The request with this very ticket, if it is not settled; looks at all of them."""
        return next((entry for entry in self._open if entry.ticket is ticket), None)

    @property
    def oldest(self) -> Entry[_T] | None:
        """The request that has been buffered longest."""
        return self._buffer[0] if self._buffer else None

    def due_s(self) -> float | None:
        """When the buffer must be sent at the latest; None while it is empty."""
        return self._buffer[0].submitted_s + self.config.delay_s if self._buffer else None

    def admit(self, request: _T, *, request_id: Hashable = None, size_bytes: int = 0, ticket: Any = None) -> Entry[_T]:
        """Check a request and take its id and a place for it; ``buffer`` or ``withdraw`` must follow.

        Args:
            request_id: For ``abort``; None if it will never be aborted.
            size_bytes: Its share of ``bytes_max``, >= 0.

        Raises:
            BatchClosed, BatchBackpressure, BatchUsageError: Not taken; nothing was changed.
        """
        if self._closed:
            raise BatchClosed("the submitter is closed")
        outstanding = len(self._open)
        if outstanding >= self.config.outstanding_max:
            raise BatchBackpressure(f"{outstanding} requests are not settled")
        if not isinstance(size_bytes, int) or size_bytes < 0:
            raise BatchUsageError(f"size_bytes must be an integer >= 0, got {size_bytes!r}")
        if request_id is not None:
            try:
                known = request_id in self._by_id
            except TypeError as error:
                raise BatchUsageError(f"request id {request_id!r} cannot be an id: {error}") from None
            if known:
                raise BatchUsageError(f"request {request_id!r} is buffered already")
        entry = Entry(request, request_id, size_bytes, ticket)
        self._open[entry] = None
        if request_id is not None:
            self._by_id[request_id] = entry
        if outstanding >= self._outstanding_high_water:
            self._outstanding_high_water = outstanding + 1
        return entry

    def withdraw(self, entry: Entry[_T]) -> None:
        """An admitted request will not be buffered after all: as if it had never been there."""
        if entry.state is not EntryState.ADMITTED:
            return
        self._move(entry, EntryState.SETTLED)
        self._forget_id(entry)
        self._open.pop(entry, None)

    def buffer(self, entry: Entry[_T], now_s: float, *, bypass: bool = False) -> tuple[SendBatch[_T], ...]:
        """Put an admitted request into the buffer.

        Args:
            bypass: Send at once, with whatever was buffered before it.
        """
        config, buffer = self.config, self._buffer
        entry.submitted_s = now_s
        self._move(entry, EntryState.BUFFERED)
        effects: tuple[SendBatch[_T], ...] = ()
        if buffer and self._buffer_bytes + entry.size_bytes > config.bytes_max:
            effects = self._flush(BYTES)
        buffer.append(entry)
        self._buffer_bytes += entry.size_bytes
        if len(buffer) >= config.batch_max:
            return effects + self._flush(SIZE)
        if bypass:
            return effects + self._flush(BYPASS)
        if self._buffer_bytes >= config.bytes_max:
            return effects + self._flush(BYTES)
        if self._closed:
            return effects + self._flush(CLOSE)
        if config.adaptive and not self._batches_in_flight:
            return effects + self._flush(IDLE)
        return effects

    def add(
        self,
        request: _T,
        now_s: float,
        *,
        request_id: Hashable = None,
        size_bytes: int = 0,
        ticket: Any = None,
        bypass: bool = False,
    ) -> tuple[SendBatch[_T], ...]:
        """``admit`` and ``buffer`` in one.

        Raises:
            BatchClosed, BatchBackpressure, BatchUsageError: Not taken; nothing was changed.
        """
        entry = self.admit(request, request_id=request_id, size_bytes=size_bytes, ticket=ticket)
        return self.buffer(entry, now_s, bypass=bypass)

    def tick(self, now_s: float) -> tuple[SendBatch[_T], ...]:
        """Send the buffer if its oldest request has waited long enough."""
        due_s = self.due_s()
        return self._flush(DELAY) if due_s is not None and now_s >= due_s else ()

    def flush(self) -> tuple[SendBatch[_T], ...]:
        """Send what is buffered."""
        return self._flush(EXPLICIT)

    def close(self) -> tuple[SendBatch[_T], ...]:
        """Take nothing more; send what is buffered. Idempotent."""
        self._closed = True
        return self._flush(CLOSE)

    def abort(self, request_id: Hashable) -> Entry[_T] | None:
        """Remove a request that is still buffered and settle it; None if it is not buffered (any more)."""
        entry = self.buffered(request_id)
        if entry is not None:
            self.take_back(entry)
        return entry

    def buffered(self, request_id: Hashable) -> Entry[_T] | None:
        """The request with this id, if it is buffered."""
        try:
            entry = self._by_id.get(request_id)
        except TypeError:
            return None
        return entry if entry is not None and entry.state is EntryState.BUFFERED else None

    def take_back(self, entry: Entry[_T]) -> None:
        """Remove a buffered request and settle it."""
        self._forget_id(entry)
        self._buffer.remove(entry)
        self._buffer_bytes -= entry.size_bytes
        self._aborted += 1
        self.settle(entry)

    def remove(self, entry: Entry[_T]) -> bool:
        """End a request that has not left, wherever it is; True if it was buffered."""
        if entry.state is EntryState.BUFFERED:
            self.take_back(entry)
            return True
        self.withdraw(entry)
        return False

    def settle(self, entry: Entry[_T], *, failed: bool = False, unknown: bool = False) -> bool:
        """The request's outcome is there. False if it was settled before: then nothing changes.

        Args:
            failed: It was not, or perhaps not, served.
            unknown: Perhaps.
        """
        if entry.state is EntryState.SETTLED:
            return False
        # From every other state: the table need not be asked.
        entry.state = EntryState.SETTLED
        self._open.pop(entry, None)
        self._settled += 1
        self._failed += failed
        self._unknown += unknown
        return True

    def settle_served(self, entries: Iterable[Entry[_T]]) -> None:
        """``settle`` for many that were served."""
        for entry in entries:
            if entry.state is not EntryState.SETTLED:
                entry.state = EntryState.SETTLED
                self._open.pop(entry, None)
                self._settled += 1

    def send_over(self) -> tuple[SendBatch[_T], ...]:
        """A batch's send is over, however it ended.

        With the adaptive delay, what waited behind the last one leaves now.
        """
        if self._batches_in_flight <= 0:
            raise BatchUsageError("send_over without a send")
        self._batches_in_flight -= 1
        return self._flush(IDLE) if self.config.adaptive and not self._batches_in_flight else ()

    def drop(self) -> tuple[Entry[_T], ...]:
        """Forget everything outstanding (in a forked child it is the parent's); returns what was buffered."""
        dropped = tuple(self._buffer)
        self._dropped += len(self._open)
        for entry in self._open:
            entry.state = EntryState.SETTLED
        self._buffer.clear()
        self._by_id.clear()
        self._buffer_bytes = 0
        self._open.clear()
        self._batches_in_flight = 0
        return dropped

    def mend(self, held: Iterable[SendBatch[_T]]) -> tuple[SendBatch[_T], ...]:
        """After an exception out of the middle of a method: put every request where it belongs, and give what is to be sent.

        Only statistics may be one short then.

        Args:
            held: The batches that the driver has and whose sends are not over. A request that was on its way into one that
                the driver does not have is buffered again.
        """
        held = set(held)
        with_driver = {entry for batch in held for entry in batch.entries}
        for entry in [each for each in self._open if each.state is EntryState.SETTLED]:
            del self._open[entry]
        buffered = [
            each for each in self._open if each.state is not EntryState.ADMITTED and each not in with_driver
        ]  # fmt: skip
        buffered.sort(key=lambda each: each.submitted_s)
        for entry in buffered:
            entry.state = EntryState.BUFFERED
        self._buffer[:] = buffered
        self._buffer_bytes = sum(each.size_bytes for each in buffered)
        self._by_id = {
            each.request_id: each
            for each in self._open
            if each.request_id is not None and each not in with_driver
        }  # fmt: skip
        self._batches_in_flight = len(held)
        if self._closed:
            return self._flush(CLOSE)
        if len(buffered) >= self.config.batch_max:
            return self._flush(SIZE)
        return self._flush(BYTES) if self._buffer_bytes >= self.config.bytes_max else ()

    def statistics(self) -> BatchStatistics:
        """Counters so far."""
        return BatchStatistics(
            submitted=self._settled + self._dropped + len(self._open),
            sent=self._sent,
            settled=self._settled,
            aborted=self._aborted,
            failed=self._failed,
            unknown=self._unknown,
            batches=self._batches,
            flushes=dict(self._flushes),
            buffered=len(self._buffer),
            outstanding=len(self._open),
            outstanding_high_water=self._outstanding_high_water,
            batch_high_water=self._batch_high_water,
            dropped_in_fork=self._dropped,
        )

    def validate(self) -> None:
        """Check the invariants; for tests.

        Raises:
            AssertionError: One is broken.
        """
        entries = self._buffer
        problems = [
            (len(entries) < max(2, self.config.batch_max), "the buffer never holds a full batch"),
            (self._buffer_bytes == sum(e.size_bytes for e in entries), "bytes are the buffer's"),
            (all(e.state is EntryState.BUFFERED for e in entries), "only buffered entries are in the buffer"),
            (
                {e for e in self._by_id.values() if e.state is not EntryState.ADMITTED} <= set(entries),
                "ids name buffered entries",
            ),
            (all(e.state is not EntryState.SETTLED for e in self._open), "what is settled is not open"),
            (
                [e for e in self._open if e.state is EntryState.BUFFERED]
                == sorted(entries, key=list(self._open).index),
                "what is buffered is open, and what is open and buffered is in the buffer",
            ),
            (0 <= self._batches_in_flight <= self._batches, "sends in flight were made"),
        ]
        for holds, text in problems:
            if not holds:
                raise AssertionError(f"{text}: {self.statistics()}")

    @staticmethod
    def _move(entry: Entry[_T], state: EntryState) -> None:
        if state not in TRANSITIONS[entry.state]:
            raise BatchUsageError(f"request {entry.request_id!r}: {entry.state.value} cannot become {state.value}")
        entry.state = state

    def _forget_id(self, entry: Entry[_T]) -> None:
        if entry.request_id is not None:
            self._by_id.pop(entry.request_id, None)

    def _flush(self, reason: str) -> tuple[SendBatch[_T], ...]:
        if not self._buffer:
            return ()
        entries = tuple(self._buffer)
        self._buffer.clear()
        self._buffer_bytes = 0
        for entry in entries:
            if entry.request_id is not None:
                self._forget_id(entry)
            self._move(entry, EntryState.SENT)
        self._sent += len(entries)
        self._batches += 1
        self._batches_in_flight += 1
        self._flushes[reason] += 1
        self._batch_high_water = max(self._batch_high_water, len(entries))
        return (SendBatch(entries, reason),)
