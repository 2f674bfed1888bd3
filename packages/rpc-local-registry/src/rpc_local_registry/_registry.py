"""Workers of this process by address. Per process, weak, identity-checked, empty in forked children.

Lookups take no lock: they are one ``dict.get`` of a complete entry. Changes take a re-entrant lock, because a weak
reference's callback can run inside a change.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from rpc_local_registry._errors import RpcAddressInUse, RpcConfigError, RpcError, RpcServerStopped
from rpc_local_registry._hooks import for_each
from rpc_local_registry._methods import SYNC, MethodSpec, methods_of


class Attached(Protocol):
    """Something that ends when its worker leaves: a local stream, a coroutine on its caller's loop, a client."""

    def end_with(self, error: RpcError) -> None:
        """End; from any thread, must not block."""


class Entry:
    """One registered worker. ``closed`` becomes True when it leaves the registry and never False again."""

    __slots__ = ("_attached", "address", "closed", "direct", "key", "reference", "specs")

    def __init__(self, address: str, worker: object, specs: Mapping[str, MethodSpec], key: bytes | None) -> None:
        self.address = address
        self.specs = specs
        #: Key that a client must have; None when the worker was registered without one.
        self.key = key
        self.closed = False
        #: Plain methods that may be called directly, by name.
        self.direct = {name: spec.function for name, spec in specs.items() if spec.non_blocking and spec.kind == SYNC}
        self._attached: weakref.WeakSet[Any] = weakref.WeakSet()
        try:
            self.reference: weakref.ref[object] = weakref.ref(worker, lambda _: _forget(self))
        except TypeError:
            raise RpcConfigError(
                f"{type(worker).__qualname__} cannot be weakly referenced: add '__weakref__' to its __slots__"
            ) from None

    def attach(self, attached: Attached) -> bool:
        """Remember something to end when the worker leaves; False if it has left already."""
        with _lock:
            if not self.closed:
                self._attached.add(attached)
            return not self.closed

    def close(self) -> list[Attached]:
        """Mark as gone; returns what is to end, outside the lock."""
        self.closed = True
        attached = list(self._attached)
        self._attached.clear()
        return attached

    def opens_for(self, key: bytes) -> bool:
        """Whether a client with this key may enter."""
        return self.key is None or hmac.compare_digest(self.key, key)


def _end(entry: Entry, attached: list[Attached]) -> None:
    for_each(lambda each: each.end_with(RpcServerStopped(f"{entry.address} stopped")), attached)


_lock = threading.RLock()
#: Read directly by the client's fast path.
entries: dict[str, Entry] = {}


def _forget(entry: Entry) -> None:
    with _lock:
        if entries.get(entry.address) is entry:
            del entries[entry.address]
        attached = entry.close()
    _end(entry, attached)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    entries.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def register_local_worker(address: str, worker: object, key: bytes | None = None) -> None:
    """Let clients of this process reach ``worker`` under ``address`` without a socket. The registry holds it weakly.

    Registering the same worker again is harmless.

    Args:
        key: Key that clients must have; None lets every client of this process in.

    Raises:
        RpcAddressInUse: Another live worker has this address.
        RpcConfigError: The worker cannot be weakly referenced, or its declarations are wrong.
    """
    specs = methods_of(type(worker))
    entry = Entry(address, worker, specs, key)
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
        attached = entry.close()
    _end(entry, attached)
    return True


def get_local_worker(address: str) -> object | None:
    """The worker of this process at exactly ``address``, or None. Never blocks."""
    entry = entries.get(address)
    return None if entry is None else entry.reference()


def find(address: str) -> Entry | None:
    """The entry of the server that a client reaches at ``address``, if it is of this process and its worker lives."""
    entry = entries.get(address)
    if entry is None and address.startswith("tcp://"):
        port = address[address.rindex(":") :]
        if any(name.endswith(port) for name in list(entries)):
            for name in names_of(address):
                entry = entries.get(name)
                if entry is not None:
                    break
    return entry if entry is not None and entry.reference() is not None else None


def names_of(address: str) -> tuple[str, ...]:
    """Every address under which the server that a client reaches at ``address`` can be registered in this process.

    A tcp server is registered under the address it was bound to, which may be a wildcard: whoever connects to an address of
    this machine then reaches it, because nobody else can listen at that port beside it.
    """
    if not address.startswith("tcp://"):
        return (address,)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    names = [address]
    for family, found in _addresses_of(host.strip("[]")):
        if not _is_ours(family, found):
            continue
        if family == socket.AF_INET:
            names += [f"tcp://{found}:{port}", f"tcp://0.0.0.0:{port}"]
        else:
            names.append(f"tcp://[{found}]:{port}")
        # A socket bound to all of IPv6 takes IPv4 as well.
        names.append(f"tcp://[::]:{port}")
    return tuple(dict.fromkeys(names))


def _addresses_of(host: str) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [(family, str(where[0])) for family, _, _, _, where in found if family in (socket.AF_INET, socket.AF_INET6)]


def _is_ours(family: int, host: str) -> bool:
    """Whether this machine has the address: only then can a socket be bound to it."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


_logger = logging.getLogger("rpc_local_registry")


def log_oneway_failure(address: str, name: str, error: BaseException) -> None:
    """A one-way call has nobody to raise to: its failure is logged, on both paths alike."""
    _logger.warning("one-way %s at %s failed: %s", name, address, error)
