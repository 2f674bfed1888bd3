"""Settings, validated once; the only file that reads the environment (inside ``from_env``)."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping

from rpc_batch_submit._errors import BatchConfigError

BATCH_MAX_VARIABLE = "TLLM_RPC_SUBMIT_BATCH_MAX"
DELAY_MS_VARIABLE = "TLLM_RPC_SUBMIT_BATCH_DELAY_MS"
_INTEGER = re.compile(r"[0-9]{1,9}")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


@dataclasses.dataclass(frozen=True)
class BatchSubmitConfig:
    """When a buffer is sent.

    Attributes:
        batch_max: Requests per send (count, >= 1). 1 turns batching off: each submit is a send of its own.
        delay_ms: Longest that the oldest buffered request waits, milliseconds, 0 … 60,000. 0: until the driver's next
            turn.
        bytes_max: Bytes per send, as told by ``size_of`` (>= 1). A request that would cross it sends what was buffered
            before.
        adaptive: Send at once while nothing is in flight; wait for company only behind a send that is under way. The
            wait never exceeds ``delay_ms``.
        outstanding_max: Requests buffered or sent and not yet settled (count); beyond it ``submit`` raises
            ``BatchBackpressure``.
    """

    batch_max: int = 1
    delay_ms: float = 0.5
    bytes_max: int = 4 << 20
    adaptive: bool = False
    outstanding_max: int = 65536

    def __post_init__(self) -> None:
        for name, high in (("batch_max", 65536), ("bytes_max", 1 << 40), ("outstanding_max", 1 << 24)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
                raise BatchConfigError(f"{name} must be an integer in [1, {high}], got {value!r}")
        delay_ms = self.delay_ms
        if isinstance(delay_ms, bool) or not isinstance(delay_ms, (int, float)) or not 0 <= delay_ms <= 60_000:
            raise BatchConfigError(f"delay_ms must be milliseconds in [0, 60000], got {delay_ms!r}")
        if math.isnan(delay_ms):
            raise BatchConfigError("delay_ms must be a number, got nan")
        if not isinstance(self.adaptive, bool):
            raise BatchConfigError(f"adaptive must be True or False, got {self.adaptive!r}")

    @property
    def delay_s(self) -> float:
        """``delay_ms`` in seconds."""
        return self.delay_ms / 1000.0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, /, **overrides: object) -> BatchSubmitConfig:
        """Configuration from ``TLLM_RPC_SUBMIT_BATCH_MAX`` and ``TLLM_RPC_SUBMIT_BATCH_DELAY_MS``.

        Submitters that are given no configuration use this one.

        Unset means the default. Anything but plain decimal digits (with one point for the delay) is an error: signs,
        spaces, exponents, ``nan``, an empty value.

        Raises:
            BatchConfigError: Names the variable and its value.
        """
        env = os.environ if environ is None else environ
        values: dict[str, object] = {}
        text = env.get(BATCH_MAX_VARIABLE)
        if text is not None:
            if not _INTEGER.fullmatch(text) or not text.isascii() or not 1 <= int(text) <= 65536:
                raise BatchConfigError(f"{BATCH_MAX_VARIABLE} must be an integer in [1, 65536], got {text!r}")
            values["batch_max"] = int(text)
        text = env.get(DELAY_MS_VARIABLE)
        if text is not None:
            if not _DECIMAL.fullmatch(text) or not text.isascii() or not 0 <= float(text) <= 60_000:
                raise BatchConfigError(f"{DELAY_MS_VARIABLE} must be milliseconds in [0, 60000], got {text!r}")
            values["delay_ms"] = float(text)
        return cls(**{**values, **overrides})  # type: ignore[arg-type]
