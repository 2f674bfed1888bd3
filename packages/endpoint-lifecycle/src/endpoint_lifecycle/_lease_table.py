"""A lease store's state, pure: values, the leases that they hang on, and the changes that watches still need.

Every method is one step at a given time; ``MemoryLeaseStore`` keeps one in a process, ``FileLeaseStore`` one in a folder.
"""

from __future__ import annotations

from collections import deque

import msgspec

from endpoint_lifecycle._discovery import Snapshot, StoreEvent
from endpoint_lifecycle._errors import StoreCompacted, StoreError


class Stored(msgspec.Struct, frozen=True):
    """A value, the revision of its last change, and the lease that it hangs on."""

    value: bytes
    revision: int
    lease: int


class Lease(msgspec.Struct):
    """How long it lives from each keep-alive on, and when it ends (seconds, on the table's clock)."""

    ttl_s: float
    expires_s: float


class Change(msgspec.Struct, frozen=True):
    """One change; None: deleted or expired."""

    key: str
    value: bytes | None
    revision: int


class TableState(msgspec.Struct, kw_only=True):
    """All of it, as it is written down.

    Attributes:
        format: Of this structure; another one is refused.
    """

    format: int = 1
    revision: int = 0
    lease_ids: int = 0
    values: dict[str, Stored] = msgspec.field(default_factory=dict)
    leases: dict[int, Lease] = msgspec.field(default_factory=dict)
    history: list[Change] = msgspec.field(default_factory=list)


class LeaseTable:
    """See the module.

    Args:
        history_max: Changes kept for watches (count, >= 1); who asks for an older one gets StoreCompacted.
        state: Where it left off; None: empty.
    """

    def __init__(self, history_max: int, state: TableState | None = None) -> None:
        state = state if state is not None else TableState()
        self.revision = state.revision
        self._lease_ids = state.lease_ids
        self._values = state.values
        self._leases = state.leases
        self._history: deque[Change] = deque(state.history, maxlen=history_max)

    def state(self) -> TableState:
        """What ``LeaseTable(history_max, state)`` goes on from."""
        return TableState(
            revision=self.revision,
            lease_ids=self._lease_ids,
            values=self._values,
            leases=self._leases,
            history=list(self._history),
        )

    def expire(self, now_s: float) -> None:
        """End the leases whose time is over."""
        for lease_id in [i for i, lease in self._leases.items() if lease.expires_s <= now_s]:
            self.revoke(lease_id)

    def next_expiry_s(self) -> float | None:
        """When the next lease ends; None: there is none."""
        return min((lease.expires_s for lease in self._leases.values()), default=None)

    def grant(self, ttl_s: float, now_s: float) -> int:
        """A new lease."""
        self._lease_ids += 1
        self._leases[self._lease_ids] = Lease(ttl_s, now_s + ttl_s)
        return self._lease_ids

    def keep_alive(self, lease_id: int, now_s: float) -> bool:
        """Whether the lease lives on."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.expires_s = now_s + lease.ttl_s
        return True

    def revoke(self, lease_id: int) -> None:
        """End a lease and delete what hangs on it; an unknown one is no error."""
        if self._leases.pop(lease_id, None) is None:
            return
        for key in sorted(key for key, stored in self._values.items() if stored.lease == lease_id):
            del self._values[key]
            self._changed(key, None)

    def put(self, key: str, value: bytes, lease_id: int, if_revision: int | None) -> int | None:
        """Set under a lease, if the key was last changed at that revision.

        Raises:
            StoreError: The lease is gone.
        """
        if lease_id not in self._leases:
            raise StoreError(f"lease {lease_id} is gone")
        old = self._values.get(key)
        if if_revision is not None and (old.revision if old is not None else 0) != if_revision:
            return None
        revision = self._changed(key, value)
        self._values[key] = Stored(value, revision, lease_id)
        return revision

    def compare_and_delete(self, key: str, revision: int) -> bool:
        """Delete, if the key was last changed at that revision."""
        old = self._values.get(key)
        if old is None or old.revision != revision:
            return False
        del self._values[key]
        self._changed(key, None)
        return True

    def snapshot(self, prefix: str) -> Snapshot:
        """Everything under a prefix."""
        shown = {k: v for k, v in self._values.items() if k.startswith(prefix)}
        return Snapshot(
            self.revision, {k: v.value for k, v in shown.items()}, {k: v.revision for k, v in shown.items()}
        )

    def events_after(self, prefix: str, after_revision: int) -> list[StoreEvent]:
        """Every change under a prefix after that revision, in order.

        Raises:
            StoreCompacted: It is older than what is kept: list again.
            StoreError: It lies ahead: the store has lost its memory.
        """
        if after_revision > self.revision:
            raise StoreError(f"revision {after_revision} lies ahead of {self.revision}: the store began anew")
        oldest = self._history[0].revision if self._history else self.revision + 1
        if after_revision + 1 < oldest:
            raise StoreCompacted(f"revision {after_revision + 1} is compacted, the oldest is {oldest}")
        return [
            StoreEvent(change.key, change.value, change.revision)
            for change in self._history
            if change.revision > after_revision and change.key.startswith(prefix)
        ]

    def _changed(self, key: str, value: bytes | None) -> int:
        self.revision += 1
        self._history.append(Change(key, value, self.revision))
        return self.revision
