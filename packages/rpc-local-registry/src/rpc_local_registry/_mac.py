"""Message authentication codes by name, and which of them is the fastest here.

A code has a key of one direction of one session and tags message number ``number`` (the session's sequence, never used twice
under one key). HMAC-SHA256 is the floor that every peer has; keyed BLAKE2b comes with Python as well; AES-GMAC needs the
``cryptography`` package (``_cryptography``) and is the fastest for long messages where the processor has AES instructions, but
costs twice as much as BLAKE2b to begin with: one code more takes the one for short messages and the other for long ones.
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
BY_SIZE: Final = "blake2b-short-aes-256-gmac-long"
#: Longest first frame that BLAKE2b codes there, bytes, if it has no other behind it.
SHORT_BYTES_MAX: Final = 1024

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


class BySize:
    """BLAKE2b for short messages, AES-GMAC for long ones, each under a key of its own; the length says which."""

    __slots__ = ("_long", "_state")

    def __init__(self, key: bytes) -> None:
        self._state = hashlib.blake2b(key=_part(key, b"short"), digest_size=TAG_BYTES)
        self._long = _cryptography.AesGmac(_part(key, b"long")).tag

    def tag(self, number: int, first: Part, rest: Sequence[Part] = ()) -> bytes:
        """See ``Mac``."""
        if rest or len(first) > SHORT_BYTES_MAX:
            return self._long(number, first, rest)
        state = self._state.copy()
        state.update(first)
        return state.digest()


def _part(key: bytes, use: bytes) -> bytes:
    return hashlib.blake2b(key=key, digest_size=32, person=use).digest()


#: Every code that this process can compute, by name.
MACS: Final[dict[str, Callable[[bytes], Mac]]] = {HMAC_SHA256: HmacSha256, BLAKE2B: Blake2b}
if _cryptography.available:
    MACS[AES_GMAC] = _cryptography.AesGmac
    MACS[BY_SIZE] = BySize
#: Every code that the protocol knows.
MAC_NAMES: Final = (BY_SIZE, AES_GMAC, BLAKE2B, HMAC_SHA256)

#: Messages by which codes are compared, bytes and count: a prompt of a thousand tokens, its answer, a small call, its answer.
_SAMPLES: Final = ((4096, 1), (96, 3))
_SAMPLE_ROUNDS: Final = 7


@functools.cache
def costs_ns() -> dict[str, int]:
    """Nanoseconds that each code takes for one long and three short messages here; measured once per process."""
    costs: dict[str, int] = {}
    for name, make in MACS.items():
        tag = make(bytes(32)).tag
        costs[name] = max(1, sum(count * _cost_ns(tag, bytes(size)) for size, count in _SAMPLES))
    return costs


def _cost_ns(tag: Callable[[int, Part], bytes], sample: bytes) -> int:
    tag(0, sample)
    best = 1 << 40
    for number in range(1, 1 + _SAMPLE_ROUNDS):
        start_ns = time.perf_counter_ns()
        tag(number, sample)
        best = min(best, time.perf_counter_ns() - start_ns)
    return best


def offer(allowed: Sequence[str]) -> dict[str, int]:
    """What a side offers: of the allowed codes those that it can compute, with their costs."""
    costs = costs_ns()
    return {name: costs[name] for name in allowed if name in costs}


def choose(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """The code that both have and that costs both together the least; None if they share none."""
    shared = sorted(name for name in ours if name in theirs and name in MACS)
    return min(shared, key=lambda name: ours[name] + theirs[name], default=None)
