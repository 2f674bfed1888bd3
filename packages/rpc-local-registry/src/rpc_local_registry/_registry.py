"""Workers of this process by address. Per process, weak, identity-checked, empty in forked children.

Lookups take no lock: they are one ``dict.get`` of a complete entry. Changes take a re-entrant lock, because a weak
reference's callback can run inside a change.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from rpc_local_registry._errors import RpcAddressInUse, RpcConfigError
from rpc_local_registry._methods import SYNC, MethodSpec, methods_of


class Entry:
    """One registered worker. ``closed`` becomes True when it leaves the registry and never False again."""

    __slots__ = ("_streams", "address", "closed", "direct", "reference", "specs")

    def __init__(self, address: str, worker: object, specs: Mapping[str, MethodSpec]) -> None:
        self.address = address
        self.specs = specs
        self.closed = False
        #: Plain methods that may be called directly, by name.
        self.direct = {name: spec.function for name, spec in specs.items() if spec.non_blocking and spec.kind == SYNC}
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()
        try:
            self.reference: weakref.ref[object] = weakref.ref(worker, lambda _: _forget(self))
        except TypeError:
            raise RpcConfigError(
                f"{type(worker).__qualname__} cannot be weakly referenced: add '__weakref__' to its __slots__"
            ) from None

    def attach(self, stream: Any) -> None:
        """Remember an open local stream, to be ended when the worker leaves."""
        with _lock:
            self._streams.add(stream)

    def close(self) -> list[Any]:
        """Mark as gone; returns the local streams to end, outside the lock."""
        self.closed = True
        streams = list(self._streams)
        self._streams.clear()
        return streams


_lock = threading.RLock()
#: Read directly by the client's fast path.
entries: dict[str, Entry] = {}


def _forget(entry: Entry) -> None:
    with _lock:
        if entries.get(entry.address) is entry:
            del entries[entry.address]
        streams = entry.close()
    for stream in streams:
        stream.end_stopped()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    entries.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def register_local_worker(address: str, worker: object) -> None:
    """Let clients of this process reach ``worker`` under ``address`` without a socket. The registry holds it weakly.

    Registering the same worker again is harmless.

    Raises:
        RpcAddressInUse: Another live worker has this address.
        RpcConfigError: The worker cannot be weakly referenced, or its declarations are wrong.
    """
    specs = methods_of(type(worker))
    entry = Entry(address, worker, specs)
    with _lock:
        present = entries.get(address)
        if present is not None:
            holder = present.reference()
            if holder is worker:
                return
            if holder is not None:
                raise RpcAddressInUse(f"{address} has another worker in this process")
        entries[address] = entry


def unregister_local_worker(address: str, worker: object) -> bool:
    """Remove ``worker`` from ``address``; a different worker there stays. True if it was removed.

    Local streams of it end with ``RpcServerStopped``; a direct call that is under way raises that when it returns.
    """
    with _lock:
        entry = entries.get(address)
        if entry is None or entry.reference() is not worker:
            return False
        del entries[address]
        streams = entry.close()
    for stream in streams:
        stream.end_stopped()
    return True


def get_local_worker(address: str) -> object | None:
    """The worker of this process at ``address``, or None. Never blocks."""
    entry = entries.get(address)
    return None if entry is None else entry.reference()


_logger = logging.getLogger("rpc_local_registry")


def log_oneway_failure(address: str, name: str, error: BaseException) -> None:
    """A one-way call has nobody to raise to: its failure is logged, on both paths alike."""
    _logger.warning("one-way %s at %s failed: %s", name, address, error)
