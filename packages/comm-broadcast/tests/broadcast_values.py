"""What several tests give and how it fails: requests, values that cannot be encoded, values that cannot be decoded."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from comm_broadcast import PickleCodec


class Request(msgspec.Struct):
    """An engine's request."""

    request_id: int
    tokens: np.ndarray


class Unpicklable:
    """Fails on the way out, with any error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error or ValueError("cannot be encoded")

    def __reduce__(self) -> Any:
        raise self.error


class Poison(PickleCodec):
    """Cannot decode texts that begin so, where it refuses."""

    def __init__(self, refuses: bool = True) -> None:
        super().__init__()
        self.refuses = refuses

    def decode(self, segments: Any) -> Any:
        value = super().decode(segments)
        if self.refuses and isinstance(value, str) and value.startswith("poison"):
            raise ValueError("cannot be decoded")
        return value
