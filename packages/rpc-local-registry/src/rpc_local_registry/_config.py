"""Settings, validated once; the only file that reads the environment (inside ``from_env``)."""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import Mapping
from typing import TypeGuard

from rpc_local_registry._errors import RpcArgumentError, RpcConfigError, RpcMethodNotFound, RpcTimeout
from rpc_local_registry._mac import MAC_NAMES, MACS
from rpc_local_registry._wire import NAME_BYTES_MAX

#: Shortest accepted shared key: as long as the MAC's own output.
KEY_BYTES_MIN = 32
LOCAL_FASTPATH_VARIABLE = "TLLM_RPC_LOCAL_FASTPATH"
#: Longest time that a call may name, seconds: about thirty years. "For ever" is None.
TIMEOUT_S_MAX = 1e9


@dataclasses.dataclass(frozen=True)
class RpcConfig:
    """Bounds and times of a client or server. Every queue has a bound here.

    What both sides use is told in the handshake: of the bounds on messages, arrays and pending calls the smaller of both
    sides' numbers holds for both; those on streams and unread answers are the client's. All the rest is one side's alone.

    Attributes:
        local_fast_path: Calls go straight to a worker of this process when it may (off: always over the socket). Client's.
        call_timeout_s: Deadline of a call that names none; None for no deadline. Seconds, > 0. Client's.
        handshake_timeout_s: A wrong key, another protocol or a missing server is an error after this. Seconds, > 0.
        pending_calls_max: Unanswered calls, unacknowledged one-way calls and open streams of one session: the smaller of both
            sides' numbers. Calls beyond it raise ``RpcBackpressure``.
        pending_bytes_max: Bytes of unanswered calls of one session, likewise. A single call above it is refused as well.
        unread_bytes_max: Bytes of answers that may wait for this client to read them. Beyond it the server refuses its calls
            with ``RpcBackpressure``; beyond twice of it the session ends, unless one answer alone leads there. Client's.
        message_bytes_max: Largest message, all frames together: the smaller of both sides' numbers. Bigger ones are refused
            before any work.
        buffers_max: Most arrays in one message, likewise.
        inline_bytes_max: Arrays up to this size are copied into the first frame; larger ones travel as frames of their
            own. Copying 16 KiB costs less than one more frame (measured: about 1 µs per frame). Sender's.
        stream_credit: Items of a stream in flight before the consumer has taken some. Client's.
        stream_bytes: Bytes of a stream in flight likewise; one item may go beyond it. Client's.
        heartbeat_s: Interval of the transport's heartbeats.
        peer_timeout_s: A peer that is silent at the transport this long is dead.
        drain_s: Longest that ``close()`` and ``shutdown()`` wait for the other side to read what was said last.
        flush_s: Longest that ``close()`` waits for one-way calls that were sent to be done; what was not is counted. Client's.
        lane_threads: Threads that one blocking method may occupy at a time, unless its declaration says otherwise. Server's.
        macs: Authentication codes that this side accepts. The handshake takes the one that is fastest for both together;
            AES-GMAC only where the ``cryptography`` package is installed.
        exceptions: Exception classes rebuilt as ``RpcRemoteError.cause`` from their message, beside plain built-ins. Client's.
        warn_unused_calls: Warn when ``client.method()`` is dropped without a ``.remote…()``; costs about 0.1 µs a call.
    """

    local_fast_path: bool = False
    call_timeout_s: float | None = None
    handshake_timeout_s: float = 3.0
    pending_calls_max: int = 16384
    pending_bytes_max: int = 1 << 30
    unread_bytes_max: int = 256 << 20
    message_bytes_max: int = 64 << 20
    buffers_max: int = 4096
    inline_bytes_max: int = 16384
    stream_credit: int = 64
    stream_bytes: int = 8 << 20
    heartbeat_s: float = 1.0
    peer_timeout_s: float = 5.0
    drain_s: float = 0.2
    flush_s: float = 5.0
    lane_threads: int = 4
    macs: tuple[str, ...] = MAC_NAMES
    exceptions: tuple[type[Exception], ...] = ()
    warn_unused_calls: bool = False

    def __post_init__(self) -> None:
        for name in ("handshake_timeout_s", "heartbeat_s", "peer_timeout_s"):
            self._check_seconds(name, getattr(self, name))
        if self.call_timeout_s is not None:
            self._check_seconds("call_timeout_s", self.call_timeout_s)
        for name in ("drain_s", "flush_s"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= TIMEOUT_S_MAX:
                raise RpcConfigError(f"{name} must be seconds in [0, {TIMEOUT_S_MAX:.0f}], got {value!r}")
        for name in ("local_fast_path", "warn_unused_calls"):
            if not isinstance(getattr(self, name), bool):
                raise RpcConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name, low, high in (
            ("pending_calls_max", 1, 1 << 24),
            ("pending_bytes_max", 1, 1 << 44),
            ("unread_bytes_max", 1024, 1 << 44),
            ("message_bytes_max", 1024, (1 << 31) - 1),
            ("buffers_max", 0, 65535),
            ("inline_bytes_max", 0, 1 << 24),
            ("stream_credit", 1, 1 << 20),
            ("stream_bytes", 1, 1 << 39),
            ("lane_threads", 1, 1024),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise RpcConfigError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
        if self.heartbeat_s > self.peer_timeout_s:
            raise RpcConfigError(f"heartbeat_s {self.heartbeat_s} exceeds peer_timeout_s {self.peer_timeout_s}")
        if not isinstance(self.macs, tuple) or not set(self.macs) <= set(MAC_NAMES):
            raise RpcConfigError(f"macs must be a tuple of names among {', '.join(MAC_NAMES)}, got {self.macs!r}")
        if not any(name in MACS for name in self.macs):
            raise RpcConfigError(f"macs names no code that is available here ({', '.join(MACS)}), got {self.macs!r}")
        if not isinstance(self.exceptions, tuple):
            raise RpcConfigError(f"exceptions must be a tuple of exception classes, got {self.exceptions!r}")
        for kind in self.exceptions:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise RpcConfigError(f"exceptions wants exception classes, got {kind!r}")

    @staticmethod
    def _check_seconds(name: str, value: object) -> None:
        if not is_number(value) or not 0 < value <= TIMEOUT_S_MAX:
            raise RpcConfigError(f"{name} must be seconds in (0, {TIMEOUT_S_MAX:.0f}], got {value!r}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, /, **overrides: object) -> RpcConfig:
        """Configuration with the fast path taken from ``TLLM_RPC_LOCAL_FASTPATH`` (exactly ``0`` or ``1``; unset is 0).

        Clients and servers that are given no configuration use this one.

        Raises:
            RpcConfigError: Any other value, empty and padded ones included; the message names the variable.
        """
        text = (os.environ if environ is None else environ).get(LOCAL_FASTPATH_VARIABLE)
        if text is not None and text not in ("0", "1"):
            raise RpcConfigError(f"{LOCAL_FASTPATH_VARIABLE} must be 0 or 1, got {text!r}")
        values: dict[str, object] = {"local_fast_path": text == "1", **overrides}
        return cls(**values)  # type: ignore[arg-type]


def new_key() -> bytes:
    """A fresh shared key: 32 bytes from the system's generator."""
    return secrets.token_bytes(KEY_BYTES_MIN)


def check_key(key: object) -> bytes:
    """The key itself, or an error that does not repeat it."""
    if not isinstance(key, bytes):
        raise RpcConfigError(f"key must be bytes, got {type(key).__name__}")
    if len(key) < KEY_BYTES_MIN:
        raise RpcConfigError(f"key must hold at least {KEY_BYTES_MIN} bytes, got {len(key)}")
    return key


def check_config(config: object) -> RpcConfig:
    """The configuration itself, or the environment's where none was given."""
    if config is None:
        return RpcConfig.from_env()
    if not isinstance(config, RpcConfig):
        raise RpcConfigError(f"config must be an RpcConfig or None, got {type(config).__name__}")
    return config


def check_name(name: object) -> str:
    """What one side shows of itself to the other."""
    if not isinstance(name, str):
        raise RpcConfigError(f"name must be text, got {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise RpcConfigError(f"name must be text that can be written down, got {name!r}") from None
    return name


def is_number(value: object) -> TypeGuard[float]:
    """A plain number: no bool, and no NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


# The checks below are made in the caller's thread, before anything is touched, on both paths.


def check_timeout(name: str, value: object, method: str) -> float | None:
    """A call's time limit, seconds.

    Raises:
        RpcArgumentError: Not a number, not finite, or beyond ``TIMEOUT_S_MAX``.
        RpcTimeout: Zero or less: the deadline had passed before the call.
    """
    if value is None:
        return None
    if not is_number(value) or value > TIMEOUT_S_MAX:
        raise RpcArgumentError(
            f"{method}: {name} must be None or seconds up to {TIMEOUT_S_MAX:.0f}, got {value!r} (None waits for ever)"
        )
    if value <= 0:
        raise RpcTimeout(f"{method}: the deadline had passed before the call")
    return value


def check_method_name(name: object) -> str:
    """A name that a worker's method could have.

    Raises:
        RpcMethodNotFound: It could not; nothing is sent.
    """
    if (
        not isinstance(name, str)
        or not name.isascii()
        or not name.isidentifier()
        or name.startswith("_")
        or len(name) > NAME_BYTES_MAX
    ):
        raise RpcMethodNotFound(f"method {name!r:.80} not found: it cannot be a method's name")
    return name
