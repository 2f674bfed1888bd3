"""The pure core: which requests leave together, when, and why. No clock, no thread, no I/O.

Theory of operation. Each request is one ``Entry`` and walks ADMITTED → BUFFERED → SENT → SETTLED, or to SETTLED from
wherever it is when it is withdrawn, aborted or dropped. Admission checks everything and takes the id and a place, so the
caller's registration in between cannot meet a refusal. There is one buffer, in order. Every way to leave it
(``FLUSH_REASONS``) takes the whole buffer from its front, so order holds across flush kinds. Methods return the batches to
send, in order; the driver sends them in exactly that order, and tells the core when a send is over (only the adaptive delay
depends on it).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Mapping
from typing import Any, Final, Generic, TypeVar

from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._errors import BatchBackpressure, BatchClosed, BatchUsageError

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

    __slots__ = ("request", "request_id", "size_bytes", "state", "submitted_s", "ticket")

    def __init__(self, request: _T, request_id: Hashable, size_bytes: int, ticket: Any) -> None:
        self.request = request
        self.request_id = request_id
        self.size_bytes = size_bytes
        #: When it was buffered.
        self.submitted_s = 0.0
        self.ticket = ticket
        self.state = EntryState.ADMITTED


@dataclasses.dataclass(frozen=True)
class SendBatch(Generic[_T]):
    """Effect: send these together. Must happen in the order in which the effects were returned."""

    entries: tuple[Entry[_T], ...]
    reason: str


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
        self._outstanding = 0
        #: Requests between ``admit`` and ``buffer``.
        self._admitted = 0
        self._submitted = 0
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
        """Requests buffered or sent and not settled."""
        return self._outstanding

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
        if self._outstanding >= self.config.outstanding_max:
            raise BatchBackpressure(f"{self._outstanding} requests are not settled")
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
        if request_id is not None:
            self._by_id[request_id] = entry
        self._submitted += 1
        self._admitted += 1
        self._outstanding += 1
        if self._outstanding > self._outstanding_high_water:
            self._outstanding_high_water = self._outstanding
        return entry

    def withdraw(self, entry: Entry[_T]) -> None:
        """An admitted request will not be buffered after all: as if it had never been there."""
        if entry.state is not EntryState.ADMITTED:
            return
        self._move(entry, EntryState.SETTLED)
        self._forget_id(entry)
        self._admitted -= 1
        self._submitted -= 1
        self._outstanding -= 1

    def buffer(self, entry: Entry[_T], now_s: float, *, bypass: bool = False) -> tuple[SendBatch[_T], ...]:
        """Put an admitted request into the buffer.

        Args:
            bypass: Send at once, with whatever was buffered before it.
        """
        config, buffer = self.config, self._buffer
        self._move(entry, EntryState.BUFFERED)
        self._admitted -= 1
        effects: tuple[SendBatch[_T], ...] = ()
        if buffer and self._buffer_bytes + entry.size_bytes > config.bytes_max:
            effects = self._flush(BYTES)
        entry.submitted_s = now_s
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
        try:
            entry = self._by_id.get(request_id)
        except TypeError:
            return None
        if entry is None or entry.state is not EntryState.BUFFERED:
            return None
        del self._by_id[request_id]
        self._buffer.remove(entry)
        self._buffer_bytes -= entry.size_bytes
        self._aborted += 1
        self.settle(entry)
        return entry

    def settle(self, entry: Entry[_T], *, failed: bool = False, unknown: bool = False) -> bool:
        """The request's outcome is there. False if it was settled before: then nothing changes.

        Args:
            failed: It was not, or perhaps not, served.
            unknown: Perhaps.
        """
        if entry.state is EntryState.SETTLED:
            return False
        self._move(entry, EntryState.SETTLED)
        self._outstanding -= 1
        self._settled += 1
        self._failed += failed
        self._unknown += unknown
        return True

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
        self._admitted = 0
        dropped = tuple(self._buffer)
        self._dropped += self._outstanding
        for entry in dropped:
            entry.state = EntryState.SETTLED
        self._buffer.clear()
        self._by_id.clear()
        self._buffer_bytes = 0
        self._outstanding = 0
        self._batches_in_flight = 0
        return dropped

    def statistics(self) -> BatchStatistics:
        """Counters so far."""
        return BatchStatistics(
            submitted=self._submitted,
            sent=self._sent,
            settled=self._settled,
            aborted=self._aborted,
            failed=self._failed,
            unknown=self._unknown,
            batches=self._batches,
            flushes=dict(self._flushes),
            buffered=len(self._buffer),
            outstanding=self._outstanding,
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
            (
                self._submitted == self._sent + self._aborted + self._admitted + len(entries) or bool(self._dropped),
                "every request is somewhere",
            ),
            (self._outstanding >= len(entries) + self._admitted, "admitted and buffered requests are outstanding"),
            (self._submitted == self._settled + self._outstanding + self._dropped, "settled and outstanding are all"),
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
            self._forget_id(entry)
            self._move(entry, EntryState.SENT)
        self._sent += len(entries)
        self._batches += 1
        self._batches_in_flight += 1
        self._flushes[reason] += 1
        self._batch_high_water = max(self._batch_high_water, len(entries))
        return (SendBatch(entries, reason),)
