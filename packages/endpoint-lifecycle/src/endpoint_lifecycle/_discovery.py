"""Where servers come from, pure: the interface of sources and stores, and the book that turns them into directory steps.

A source shows a set of registrations as of a revision and then every change after it, in one order. A static list is a
source that never changes. A lease store is a source that can be written: a registration lives as long as its lease is kept
alive. The book compares what it was shown with what it applied, so a change that was missed while nobody watched is found
by the next listing. One bad registration is set aside and counted; it never stops the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from endpoint_lifecycle._errors import EndpointError, RecordInvalid
from endpoint_lifecycle._record import EndpointRecord, check_id, parse_record

#: Keys of registrations begin with this.
PREFIX = "/endpoint-lifecycle/servers/"
_VALUE_BYTES_MAX = 65536 + 1024


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """One entry: where a server is, and its record where the source has one.

    Attributes:
        server: What a router dials.
        role: What it does.
        record: Its record; None: to be fetched from the server.
    """

    server: str
    role: str
    record: EndpointRecord | None = None

    def encode(self) -> bytes:
        """JSON, canonical."""
        return msgspec.json.encode(self, order="deterministic")


def decode_registration(value: bytes) -> Registration:
    """Read a stored registration strictly.

    Raises:
        RecordInvalid: ``field`` names what is wrong.
    """
    if len(value) > _VALUE_BYTES_MAX:
        raise RecordInvalid("$", f"{len(value)} bytes, at most {_VALUE_BYTES_MAX}")
    try:
        registration = msgspec.json.decode(value, type=Registration)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordInvalid("$", f"not a registration: {str(error)[:200]}") from error
    check_id("role", registration.role)
    if not registration.server or len(registration.server) > 512 or not registration.server.isprintable():
        raise RecordInvalid("server", f"is {registration.server[:64]!r}, must be 1 to 512 printable characters")
    if registration.record is not None:
        parse_record(registration.record, server=registration.server, role=registration.role, require_generation=False)
    return registration


def registration_key(role: str, owner_id: str, prefix: str = PREFIX) -> str:
    """Where an owner's registration stands: one per slot, so a new lifetime overwrites the old one; never two slots'."""
    role, owner_id = (part.replace("%", "%25").replace("/", "%2F") for part in (role, owner_id))
    return f"{prefix}{role}/{owner_id}"


@dataclass(frozen=True, slots=True)
class StoreEvent:
    """One change: a value was set, or (None) deleted or expired."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything under a prefix as of a revision, and the revision at which each key was last changed."""

    revision: int
    items: Mapping[str, bytes]
    revisions: Mapping[str, int]


class ServerSource(Protocol):
    """What a reconciler reads. Errors are StoreError (StoreCompacted where the revision is too old)."""

    async def snapshot(self, prefix: str) -> Snapshot:
        """All registrations as of one revision."""
        ...

    def watch(self, prefix: str, after_revision: int) -> AsyncIterator[Sequence[StoreEvent]]:
        """Every change after that revision, in order, none missed. Closing the iterator ends the watch."""
        ...


class LeaseStore(ServerSource, Protocol):
    """A source that can be written; values live as long as their lease is kept alive."""

    async def grant(self, ttl_s: float) -> int:
        """Make a lease; returns its id (> 0)."""
        ...

    async def keep_alive(self, lease_id: int) -> bool:
        """Put the expiry off. False: the lease is gone, with what hung on it."""
        ...

    async def revoke(self, lease_id: int) -> None:
        """End a lease and delete what hangs on it. An unknown lease is no error."""
        ...

    async def put(self, key: str, value: bytes, lease_id: int, if_revision: int | None = None) -> int | None:
        """Set a value under a lease.

        Args:
            key, value, lease_id: What.
            if_revision: Only if the key was last changed at that revision (0: does not exist); None: in any case.

        Returns:
            The revision of the change, or None when the condition did not hold.
        """
        ...

    async def compare_and_delete(self, key: str, revision: int) -> bool:
        """Delete the key if it was last changed at that revision. False: somebody else's value, left alone."""
        ...

    async def aclose(self) -> None:
        """Give connections back."""
        ...


class _Target(Protocol):
    def add_server(self, server: str, role: str, owner_id: str | None = None) -> None: ...
    def remove_server(self, server: str) -> None: ...
    def apply_set(self, server: str, record: EndpointRecord) -> None: ...
    def apply_delete(self, server: str, generation: str | None) -> None: ...
    def servers(self, role: str | None = None) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class BookStatistics:
    """Counters of a book."""

    entries: int
    sets: int
    deletes: int
    invalid: int
    listings: int
    suspected: int


@dataclass(slots=True)
class RegistryBook:
    """What was applied of a source, so that the next listing or event can be compared with it.

    Attributes:
        target: The directory.
        grace_s: After a store lost its memory (its revision went back), entries that it no longer shows are kept for so
            long before they are removed: owners need a moment to register again.
        on_error: Told of each registration that is set aside. What it raises is counted in ``callback_failures``.
        invalid: Registrations set aside, with the reason. They are tried again at every change: the cause may be gone.
    """

    target: _Target
    grace_s: float = 30.0
    on_error: Callable[[str, EndpointError], None] | None = None
    invalid: dict[str, str] = field(default_factory=dict)
    callback_failures: int = 0
    _aside: dict[str, bytes] = field(default_factory=dict)
    _known: dict[str, Registration] = field(default_factory=dict)
    _suspects: dict[str, float] = field(default_factory=dict)
    #: Servers given back to the target without a record, because another key speaks for them.
    _asked: set[str] = field(default_factory=set)
    _revision: int = 0
    _sets: int = 0
    _deletes: int = 0
    _invalid_count: int = 0
    _listings: int = 0

    def list_applied(self, snapshot: Snapshot, now_s: float) -> None:
        """Take a listing: what is new or changed is set, what is missing is removed."""
        self._listings += 1
        forgetful = snapshot.revision < self._revision
        self._revision = snapshot.revision
        for key in list(self._known):
            if key in snapshot.items:
                continue
            if forgetful:
                self._suspects.setdefault(key, now_s + self.grace_s)
            elif key not in self._suspects:
                self._delete(key)
        for key in self._aside.keys() - snapshot.items.keys():
            self._put_aside(key, None, "")
        for key, value in snapshot.items.items():
            self._set(key, value)
        self._try_again()
        self.settle_suspects(now_s)

    def event_applied(self, event: StoreEvent, now_s: float) -> None:
        """Take one change."""
        self._revision = max(self._revision, event.revision)
        if event.value is None:
            self._suspects.pop(event.key, None)
            self._delete(event.key)
        else:
            self._set(event.key, event.value)
        self._try_again(but=event.key)
        self.settle_suspects(now_s)

    def settle_suspects(self, now_s: float) -> float:
        """Remove what stayed missing past its grace; returns when to ask again (infinity: nothing is suspected)."""
        for key, until_s in list(self._suspects.items()):
            if until_s <= now_s:
                del self._suspects[key]
                self._delete(key)
        return min(self._suspects.values(), default=float("inf"))

    def _set(self, key: str, value: bytes, *, again: bool = False) -> None:
        self._suspects.pop(key, None)
        try:
            registration = decode_registration(value)
            known = self._known.get(key)
            if registration == known and registration.server in self.target.servers():
                return
            if registration.record is None:
                self.target.add_server(registration.server, registration.role)
            else:
                self.target.apply_set(registration.server, registration.record)
        except EndpointError as error:
            # The last good registration stays in force: its server is probed and goes by itself if it is dead.
            if again:
                return
            self._invalid_count += 1
            self._put_aside(key, value, error.message)
            self._tell(key, error)
            return
        self._sets += 1
        self._put_aside(key, None, "")
        self._known[key] = registration
        if known is not None and known.server != registration.server:
            self._drop(known)

    def _put_aside(self, key: str, value: bytes | None, reason: str) -> None:
        if value is None:
            self._aside.pop(key, None)
            self.invalid.pop(key, None)
        else:
            self._aside[key] = value
            self.invalid[key] = reason

    def _try_again(self, but: str | None = None) -> None:
        """What was refused for the state of the others (its address under another role) is taken once that has changed."""
        for key, value in list(self._aside.items()):
            if key != but:
                self._set(key, value, again=True)

    def _tell(self, key: str, error: EndpointError) -> None:
        if self.on_error is None:
            return
        try:
            self.on_error(key, error)
        except Exception:  # noqa: BLE001 - the callback is the user's and must not stop the other registrations
            self.callback_failures += 1

    def _delete(self, key: str) -> None:
        self._put_aside(key, None, "")
        known = self._known.pop(key, None)
        if known is not None:
            self._deletes += 1
            self._drop(known)

    def _drop(self, registration: Registration) -> None:
        server = registration.server
        other = next((other for other in self._known.values() if other.server == server), None)
        if registration.record is not None:
            self.target.apply_delete(server, registration.record.generation)
            if other is not None and server not in self.target.servers():
                # Another key speaks for the same address, of a lifetime before this one: who lives there now is asked.
                self.target.add_server(server, other.role)
                self._asked.add(server)
        if other is not None:
            return
        if (registration.record is None or server in self._asked) and server in self.target.servers():
            self.target.remove_server(server)
        self._asked.discard(server)

    def statistics(self) -> BookStatistics:
        """Counters so far."""
        return BookStatistics(
            len(self._known), self._sets, self._deletes, self._invalid_count, self._listings, len(self._suspects)
        )
