"""What a client's handles share: its two paths, its one state, its counters.

A call goes local when all of this holds: the fast path is on, this process has a live worker registered under the address
and with the client's key, the method is declared non-blocking and fits the call mode, and nothing that this client sent over
the socket could still be overtaken. Otherwise it goes remote and the reason is counted. The choice is made once per call,
before anything ran, and never revised.

The state is one for both paths: a client is usable, or lost with one error until ``reset``, or closed. The local path binds
to the worker that it found first and is lost when that worker leaves, as a session is when its server does.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from rpc_local_registry import _registry
from rpc_local_registry._config import RpcConfig
from rpc_local_registry._engine import Engine, Totals
from rpc_local_registry._errors import (
    RpcAuthenticationError,
    RpcClosed,
    RpcError,
    RpcServerStopped,
    again,
    cause_table,
    describe,
    rebuild,
)
from rpc_local_registry._hooks import call_hook, for_each
from rpc_local_registry._methods import MethodSpec

#: Why a call that could have gone local did not; each is a counter.
FALLBACK_REASONS: Final = ("no_local_worker", "blocking_method", "remote_in_flight", "unknown_method", "call_mode")
_cores: weakref.WeakSet[Core] = weakref.WeakSet()

#: Where a local call goes.
Target = tuple[_registry.Entry, MethodSpec, object]


def value_of(counter: Any) -> int:
    """Value of an ``itertools.count``: incremented atomically by ``next``, read through its text."""
    return int(repr(counter)[6:-1])


class Core:
    """See the module's header."""

    def __init__(
        self,
        address: str,
        key: bytes,
        config: RpcConfig,
        fast_path: bool,
        interface: Mapping[str, MethodSpec] | None,
        name: str,
        on_lost: Callable[[RpcError], None] | None,
    ) -> None:
        self.address = address
        self.config = config
        self.fast_path = fast_path
        self.interface = interface
        self.causes = cause_table(config.exceptions)
        #: Why no call can be made: the lost session's error, or that it was closed.
        self.failure: RpcError | None = None
        self.engine: Engine | None = None
        #: The worker that local calls go to.
        self.local: _registry.Entry | None = None
        self.closed = False
        self.totals = Totals()
        self.local_calls = itertools.count()
        self.local_oneways = itertools.count()
        self.local_oneways_failed = itertools.count()
        self.remote_calls = itertools.count()
        self.fallbacks = {reason: itertools.count() for reason in FALLBACK_REASONS}
        self.sessions = 0
        self._key = key
        self._name = name
        self._on_lost = on_lost
        # Re-entrant: a forgotten stream may be collected inside any of these sections.
        self._lock = threading.RLock()
        self._attached: weakref.WeakSet[Any] = weakref.WeakSet()
        _cores.add(self)

    # ---- state

    def live_engine(self) -> Engine:
        """The engine, started when there is none or when the last one never got a session.

        Raises:
            RpcError: The client was closed, or its session is lost.
        """
        engine = self.engine
        if engine is not None and engine.failure is None and self.failure is None:
            return engine
        with self._lock:
            if self.failure is not None:
                raise again(self.failure)
            engine = self.engine
            if engine is not None:
                if engine.failure is None:
                    return engine
                if engine.was_open:
                    raise again(engine.failure)
            engine = Engine(
                self.address, self._key, self.config, self._name, self.causes, self.totals, self._on_engine_failed
            )
            try:
                self.sessions += 1
                engine.start()
                self.engine = engine
            except BaseException:
                # An interrupt: nobody would end its thread and its session.
                engine.close(wait=False)
                raise
            return engine

    def _on_engine_failed(self, engine: Engine, error: RpcError) -> None:
        if engine.was_open and self.engine is engine:
            self.end_with(error)

    def end_with(self, error: RpcError) -> None:
        """The session is lost, or the worker that local calls went to has left."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        if self._on_lost is not None:
            call_hook("on_lost", self._on_lost, again(error))

    def reset(self) -> None:
        """Leave a session behind, lost or not."""
        with self._lock:
            if self.closed:
                raise RpcClosed(f"client of {self.address} was closed")
            engine, self.engine = self.engine, None
            self.local = None
            self.failure = None
            attached = self._take_attached()
        self._end(engine, attached, wait=True)

    def close(self, *, wait: bool = True) -> None:
        """End for good."""
        with self._lock:
            self.closed = True
            if not isinstance(self.failure, RpcClosed):
                self.failure = RpcClosed(f"client of {self.address} was closed")
            engine = self.engine
            attached = self._take_attached()
        self._end(engine, attached, wait=wait)

    def forget(self) -> None:
        """End for good without waiting: nobody holds the client any more."""
        self.close(wait=False)

    def _take_attached(self) -> list[_registry.Attached]:
        attached = list(self._attached)
        self._attached.clear()
        return attached

    def _end(self, engine: Engine | None, attached: list[_registry.Attached], *, wait: bool) -> None:
        try:
            for_each(lambda each: each.end_with(RpcClosed(f"client of {self.address} was closed")), attached)
        finally:
            if engine is not None:
                engine.close(wait=wait)

    def after_fork_in_child(self) -> None:
        """The parent's socket, thread and worker stay the parent's; this process opens its own when it needs one."""
        self._lock = threading.RLock()
        self.engine = None
        self.local = None
        self._attached.clear()
        if not self.closed:
            self.failure = None

    # ---- the local path

    def bind(self) -> _registry.Entry | None:
        """The worker of this process at the client's address; None if there is none.

        Raises:
            RpcAuthenticationError: It is served under another key.
            RpcError: The client was closed, or its session is lost.
        """
        if self.failure is not None:
            raise again(self.failure)
        entry = self.local
        if entry is None:
            entry = _registry.find(self.address)
            if entry is None:
                return None
            if not entry.opens_for(self._key):
                raise RpcAuthenticationError(f"{self.address} is served in this process under another key")
            self.local = entry
            if not entry.attach(self):
                self.end_with(RpcServerStopped(f"{entry.address} stopped"))
                raise RpcServerStopped(f"{entry.address} stopped")
        return entry

    def has_local(self) -> bool:
        """Whether local calls have somewhere to go; counts and binds nothing."""
        if not self.fast_path or self.failure is not None:
            return False
        entry = self.local or _registry.find(self.address)
        return entry is not None and entry.reference() is not None and entry.opens_for(self._key)

    def local_specs(self) -> Mapping[str, MethodSpec]:
        """Methods of the worker that local calls would go to."""
        entry = self.local or _registry.find(self.address)
        return {} if entry is None else entry.specs

    def local_target(self, name: str, kinds: tuple[str, ...]) -> Target | None:
        """(entry, method, worker) when the call goes local; else None, with the reason counted."""
        entry = self.bind()
        worker = None if entry is None else entry.reference()
        if entry is None or worker is None:
            next(self.fallbacks["no_local_worker"])
            return None
        spec = entry.specs.get(name)
        if spec is None:
            next(self.fallbacks["unknown_method"])
            return None
        if not spec.non_blocking:
            next(self.fallbacks["blocking_method"])
            return None
        if spec.kind not in kinds:
            next(self.fallbacks["call_mode"])
            return None
        engine = self.engine
        if engine is not None and engine.busy:
            next(self.fallbacks["remote_in_flight"])
            return None
        next(self.local_calls)
        return entry, spec, worker

    def attach(self, entry: _registry.Entry, attached: _registry.Attached) -> None:
        """Have something local end with the worker and with the client."""
        with self._lock:
            self._attached.add(attached)
        if not entry.attach(attached) or self.failure is not None:
            attached.end_with(self.failure or RpcServerStopped(f"{entry.address} stopped"))

    def handler_error(
        self, spec: MethodSpec, args: tuple[Any, ...], keywords: Mapping[str, Any], error: BaseException
    ) -> RpcError:
        """What the remote path would have raised for a handler's exception."""
        if issubclass(type(error), TypeError):
            try:
                spec.bind(args, keywords)
            except RpcError as mismatch:
                return mismatch
        return rebuild(describe(error), self.causes)


def _after_fork_in_child() -> None:
    for core in list(_cores):
        core.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Handle:
    """Held by the client and by everything made from it; when the last of them is gone, the client's core ends."""

    __slots__ = ("__weakref__", "core")

    def __init__(self, core: Core) -> None:
        self.core = core
        weakref.finalize(self, Core.forget, core).atexit = False
