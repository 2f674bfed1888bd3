"""The one file that imports cryptography; without it AES-GMAC is not offered and everything else works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

try:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import GCM

    available: bool = True
except ImportError:  # pragma: no cover - exercised by a subprocess test that blocks the import
    available = False

_PAD: Final = bytes(16)


class AesGmac:
    """AES-256-GMAC: AES-GCM that encrypts nothing. The message's number is the nonce; a session never uses one twice."""

    __slots__ = ("_encrypt", "_key")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._encrypt = AESGCM(key).encrypt

    def tag(self, number: int, first: bytes | memoryview, rest: Sequence[bytes | memoryview] = ()) -> bytes:
        """16 bytes of tag, padded to 32."""
        nonce = number.to_bytes(12, "little")
        if not rest:
            return self._encrypt(nonce, b"", first) + _PAD
        # Large arrays are fed in one by one rather than copied together.
        encryptor = Cipher(AES(self._key), GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(first)
        for part in rest:
            encryptor.authenticate_additional_data(part)
        encryptor.finalize()
        return encryptor.tag + _PAD
