"""The client: a handle on one worker. What it calls is in ``_calls``, what it is in ``_core``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rpc_local_registry._calls import Method
from rpc_local_registry._config import RpcConfig, check_config, check_key, check_name
from rpc_local_registry._core import Core, Handle, value_of
from rpc_local_registry._errors import RpcConfigError, RpcError
from rpc_local_registry._methods import methods_of
from rpc_local_registry._typed import remote_specs
from rpc_local_registry._zmq import check_address

if TYPE_CHECKING:
    from rpc_local_registry._methods import MethodSpec


@dataclasses.dataclass(frozen=True)
class ClientStatistics:
    """What a client did so far, over all its sessions. Counts, unless a unit is named."""

    local_calls: int
    remote_calls: int
    fallbacks: Mapping[str, int]
    #: Unanswered now.
    pending: int
    pending_high_water: int
    oneway_sent: int
    oneway_done: int
    #: Of the done ones: the handler raised, or the call was refused.
    oneway_failed: int
    #: Never confirmed done: their session ended, or never began.
    oneway_lost: int
    #: Unconfirmed bytes now.
    pending_bytes: int
    late_answers: int
    refused: Mapping[str, int]
    sent_bytes: int
    received_bytes: int
    sessions: int
    #: Authentication code of the open session; empty without one.
    mac: str


class ClientBase:
    """What untyped and typed clients share."""

    def __init__(
        self,
        address: str,
        key: bytes,
        *,
        config: RpcConfig | None = None,
        fast_path: bool | None = None,
        interface: type | None = None,
        name: str = "",
        on_lost: Callable[[RpcError], None] | None = None,
    ) -> None:
        config = check_config(config)
        if fast_path is not None and not isinstance(fast_path, bool):
            raise RpcConfigError(f"fast_path must be True, False or None, got {fast_path!r}")
        core = Core(
            check_address(address, bind=False),
            check_key(key),
            config,
            config.local_fast_path if fast_path is None else fast_path,
            self._interface(interface),
            check_name(name),
            on_lost,
        )
        self._core = core
        self._handle = Handle(core)

    def _interface(self, interface: type | None) -> Mapping[str, MethodSpec] | None:
        return None if interface is None else methods_of(interface)

    def method(self, name: str) -> Method:
        """The method called ``name``.

        Raises:
            RpcMethodNotFound: The interface has none, or no worker could.
        """
        return Method(self._handle, name)

    @property
    def address(self) -> str:
        """Where the calls go."""
        return self._core.address

    def path_of(self, name: str) -> str:
        """``"local"`` or ``"remote"``: where a call of ``name`` would go now. Counts nothing."""
        core = self._core
        if not core.has_local():
            return "remote"
        engine = core.engine
        spec = core.local_specs().get(name)
        busy = engine is not None and engine.busy
        return "local" if spec is not None and spec.non_blocking and not busy else "remote"

    def start(self) -> Self:
        """Open the session now and wait for it.

        Raises:
            RpcUnreachable, RpcAuthenticationError, RpcProtocolMismatch: Within ``handshake_timeout_s``.
        """
        self._core.live_engine().wait_open()
        return self

    def reconnect(self) -> None:
        """Leave a session behind, lost or not: the next call opens a new one.

        What was pending has failed and is not repeated.

        Raises:
            RpcClosed: The client was closed.
        """
        self._core.reset()

    def close(self) -> None:
        """End: pending calls fail with ``RpcClosed``; one-way calls that were sent are done first.

        Waits for them at most ``flush_s``, else for the farewell at most ``drain_s``. What was not confirmed by then is counted
        (``oneway_lost``) and logged. Idempotent.
        """
        self._core.close()

    def statistics(self) -> ClientStatistics:
        """Counters so far."""
        core = self._core
        engine = core.engine
        totals = core.totals
        open_now = engine is not None and engine.failure is None
        local_oneways = value_of(core.local_oneways)
        return ClientStatistics(
            local_calls=value_of(core.local_calls),
            remote_calls=value_of(core.remote_calls),
            fallbacks={reason: value_of(counter) for reason, counter in core.fallbacks.items()},
            pending=0 if engine is None else len(engine.pending),
            pending_high_water=totals.pending_high_water,
            oneway_sent=totals.oneway_sent + local_oneways,
            oneway_done=totals.oneway_done + local_oneways,
            oneway_failed=totals.oneway_failed + value_of(core.local_oneways_failed),
            oneway_lost=totals.oneway_lost,
            pending_bytes=0 if engine is None else engine.pending_bytes,
            late_answers=totals.late_answers,
            refused=dict(totals.refused),
            sent_bytes=totals.bytes_sent,
            received_bytes=totals.bytes_received,
            sessions=core.sessions,
            mac=engine.mac_name if engine is not None and open_now else "",
        )

    def __enter__(self) -> Self:
        return self if self._core.has_local() else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        core = self._core
        engine = core.engine
        if core.closed:
            state = "closed"
        elif core.failure is not None:
            state = "lost"
        elif engine is None or engine.failure is not None:
            state = "idle" if core.local is None else "local"
        else:
            state = "open" if engine.was_open else "connecting"
        return f"<{type(self).__name__} {self.address} {state}>"


class RpcClient(ClientBase):
    """Calls the methods of one worker: ``client.method(*args).remote()`` and its sisters.

    Construction does no I/O; the socket and its one thread start with the first call that needs them, ``start`` or
    ``with``. Thread-safe, and usable from any number of event loops. In a forked child the client is as new. Names, arguments
    and results are checked at run time; for a type checker use ``TypedClient``.

    Args:
        address: The server's ``address``.
        key: The shared key, at least 32 bytes.
        config: Bounds and times; None for ``RpcConfig.from_env()``.
        fast_path: Take the local path when possible; None for ``config.local_fast_path``.
        interface: The worker's class (or one with the same declared methods): names are checked at once and results
            decoded to their annotated types. Without it results are built-ins and arrays.
        name: Shown to the server's ``on_peer_lost``.
        on_lost: Called once when a session is lost, with its error; on the I/O thread, or on the thread that shut the server
            of this process down. Must not block.

    Raises:
        RpcConfigError, RpcAddressError: Wrong key, settings or address.
    """

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise AttributeError(name)
        method = Method(self._handle, name)
        # Found as a plain attribute from now on.
        self.__dict__[name] = method
        return method


class TypedClient(ClientBase):
    """A client whose methods a type checker sees; subclass it and name them.

    ``submit = remote_method(Worker.submit)`` takes the arguments of ``Worker.submit`` and gives a ``Call`` of its result;
    ``responses = remote_stream(Worker.responses)`` gives a stream of its items. Anything else is an error to the type checker
    and at run time. Arguments as of ``RpcClient``, but for ``interface``: that is the class itself.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        *,
        config: RpcConfig | None = None,
        fast_path: bool | None = None,
        name: str = "",
        on_lost: Callable[[RpcError], None] | None = None,
    ) -> None:
        super().__init__(address, key, config=config, fast_path=fast_path, name=name, on_lost=on_lost)

    def _interface(self, interface: type | None) -> Mapping[str, MethodSpec] | None:
        return remote_specs(type(self))
