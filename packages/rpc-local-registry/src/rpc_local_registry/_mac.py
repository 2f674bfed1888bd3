"""Message authentication codes by name, and which of them is the fastest here.

A code has a key of one direction of one session and tags message number ``number`` (the session's sequence, never used twice
under one key). HMAC-SHA256 is the floor that every peer has; keyed BLAKE2b comes with Python as well; AES-GMAC needs the
``cryptography`` package (``_cryptography``) and is the fastest where the processor has AES instructions.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from rpc_local_registry import _cryptography

#: Bytes of a tag on the wire; shorter ones are padded with zeros, which are compared like the rest.
TAG_BYTES: Final = 32
HMAC_SHA256: Final = "hmac-sha256"
BLAKE2B: Final = "blake2b"
AES_GMAC: Final = "aes-256-gmac"

Part = bytes | memoryview


class Mac(Protocol):
    """One key's code."""

    def tag(self, number: int, first: Part, rest: Sequence[Part] = ()) -> bytes:
        """``TAG_BYTES`` over the concatenation of all parts of message ``number``."""


class HmacSha256:
    """HMAC-SHA256 with both pads absorbed once; equal to ``hmac.digest(key, data, "sha256")`` at a third of its fixed cost."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, key: bytes) -> None:
        block = (hashlib.sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))

    def tag(self, number: int, first: Part, rest: Sequence[Part] = ()) -> bytes:
        """See ``Mac``; the number is part of the message already."""
        inner = self._inner.copy()
        inner.update(first)
        for part in rest:
            inner.update(part)
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest()


class Blake2b:
    """BLAKE2b in its own keyed mode, 32-byte tags."""

    __slots__ = ("_state",)

    def __init__(self, key: bytes) -> None:
        self._state = hashlib.blake2b(key=key, digest_size=TAG_BYTES)

    def tag(self, number: int, first: Part, rest: Sequence[Part] = ()) -> bytes:
        """See ``Mac``; the number is part of the message already."""
        state = self._state.copy()
        state.update(first)
        for part in rest:
            state.update(part)
        return state.digest()


#: Every code that this process can compute, by name.
MACS: Final[dict[str, Callable[[bytes], Mac]]] = {HMAC_SHA256: HmacSha256, BLAKE2B: Blake2b}
if _cryptography.available:
    MACS[AES_GMAC] = _cryptography.AesGmac
#: Every code that the protocol knows.
MAC_NAMES: Final = (AES_GMAC, BLAKE2B, HMAC_SHA256)

_SAMPLE_BYTES: Final = 4096
_SAMPLE_ROUNDS: Final = 5


@functools.cache
def costs_ns() -> dict[str, int]:
    """Nanoseconds that each code takes for 4 KiB here; measured once per process, in well under a millisecond."""
    sample = bytes(_SAMPLE_BYTES)
    costs: dict[str, int] = {}
    for name, make in MACS.items():
        tag = make(bytes(32)).tag
        tag(0, sample)
        best = 1 << 40
        for number in range(1, 1 + _SAMPLE_ROUNDS):
            start_ns = time.perf_counter_ns()
            tag(number, sample)
            best = min(best, time.perf_counter_ns() - start_ns)
        costs[name] = max(1, best)
    return costs


def offer(allowed: Sequence[str]) -> dict[str, int]:
    """What a side offers: of the allowed codes those that it can compute, with their costs."""
    costs = costs_ns()
    return {name: costs[name] for name in allowed if name in costs}


def choose(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """The code that both have and that costs both together the least; None if they share none."""
    shared = sorted(name for name in ours if name in theirs and name in MACS)
    return min(shared, key=lambda name: ours[name] + theirs[name], default=None)
