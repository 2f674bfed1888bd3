"""Settings, validated once; the only file that reads the environment (inside ``from_env``)."""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
from collections.abc import Mapping

from rpc_local_registry._errors import RpcConfigError

#: Shortest accepted shared key: as long as the MAC's own output.
KEY_BYTES_MIN = 32
LOCAL_FASTPATH_VARIABLE = "TLLM_RPC_LOCAL_FASTPATH"


@dataclasses.dataclass(frozen=True)
class RpcConfig:
    """Bounds and times of a client or server. Every queue has a bound here.

    Attributes:
        local_fast_path: Calls go straight to a worker of this process when it may (off: always over the socket).
        call_timeout_s: Deadline of a call that names none; None for no deadline. Seconds, > 0.
        handshake_timeout_s: A wrong key, another protocol or a missing server is an error after this. Seconds, > 0.
        pending_calls_max: Unanswered calls, unacknowledged one-way calls and open streams per client, and again per
            session at the server. Calls beyond it raise ``RpcBackpressure``.
        pending_bytes_max: Bytes of unanswered calls per client. A single call above it is refused as well.
        message_bytes_max: Largest message in either direction, all frames together; bigger ones are refused before any
            work.
        buffers_max: Most arrays in one message.
        inline_bytes_max: Arrays up to this size are copied into the first frame; larger ones travel as frames of their
            own, uncopied. Copying 16 KiB costs less than one more frame (measured: about 1 µs per frame).
        stream_credit: Items of a stream in flight before the consumer has taken some.
        heartbeat_s: Interval of the transport's heartbeats.
        peer_timeout_s: A peer that is silent at the transport this long is dead.
        drain_s: Longest that ``close()`` and ``shutdown()`` wait for the other side to read what was said last.
        lane_threads: Threads that one blocking method may occupy at a time, unless its declaration says otherwise.
        exceptions: Exception classes rebuilt as ``RpcRemoteError.cause`` from their message, beside plain built-ins.
        warn_unused_calls: Warn when ``client.method()`` is dropped without a ``.remote…()``; costs about 0.1 µs a call.
    """

    local_fast_path: bool = False
    call_timeout_s: float | None = None
    handshake_timeout_s: float = 3.0
    pending_calls_max: int = 16384
    pending_bytes_max: int = 1 << 30
    message_bytes_max: int = 64 << 20
    buffers_max: int = 4096
    inline_bytes_max: int = 16384
    stream_credit: int = 64
    heartbeat_s: float = 1.0
    peer_timeout_s: float = 5.0
    drain_s: float = 0.2
    lane_threads: int = 4
    exceptions: tuple[type[Exception], ...] = ()
    warn_unused_calls: bool = False

    def __post_init__(self) -> None:
        for name in ("handshake_timeout_s", "heartbeat_s", "peer_timeout_s"):
            self._check_seconds(name, getattr(self, name))
        if self.call_timeout_s is not None:
            self._check_seconds("call_timeout_s", self.call_timeout_s)
        if not (isinstance(self.drain_s, (int, float)) and 0 <= self.drain_s < math.inf):
            raise RpcConfigError(f"drain_s must be finite seconds >= 0, got {self.drain_s!r}")
        for name, low, high in (
            ("pending_calls_max", 1, 1 << 24),
            ("pending_bytes_max", 1, 1 << 44),
            ("message_bytes_max", 1024, 1 << 31),
            ("buffers_max", 0, 65535),
            ("inline_bytes_max", 0, 1 << 24),
            ("stream_credit", 1, 1 << 20),
            ("lane_threads", 1, 1024),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise RpcConfigError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
        if self.heartbeat_s > self.peer_timeout_s:
            raise RpcConfigError(f"heartbeat_s {self.heartbeat_s} exceeds peer_timeout_s {self.peer_timeout_s}")
        for kind in self.exceptions:
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise RpcConfigError(f"exceptions wants exception classes, got {kind!r}")

    @staticmethod
    def _check_seconds(name: str, value: object) -> None:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise RpcConfigError(f"{name} must be finite seconds > 0, got {value!r}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, /, **overrides: object) -> RpcConfig:
        """Configuration with the fast path taken from ``TLLM_RPC_LOCAL_FASTPATH`` (exactly ``0`` or ``1``; unset is 0).

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
