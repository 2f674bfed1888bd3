"""The GGUF container: metadata and tensor directory, read in one pass with every length checked.

Only the container is read here (magic, version 2 or 3, key-value metadata, tensor directory). Dequantising a tensor's
bytes belongs to :mod:`meta_executor.engine.weights`. Reading the 100,000 strings of a tokenizer this way takes a
fraction of a second where general readers take seconds, and needs nothing but the standard library and numpy.

Source: the GGUF specification (github.com/ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meta_executor.engine.errors import ModelFormatError, ModelNotFoundError

_SCALARS: dict[int, tuple[str, int]] = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4), 7: ("?", 1),
    10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
_STRING = 8
_ARRAY = 9
_ENTRIES_MAX = 1 << 20
_ALIGNMENT_DEFAULT = 32


@dataclass(frozen=True)
class TensorEntry:
    """One line of the tensor directory.

    Attributes:
        name: Tensor name.
        shape: Dimensions, slowest first (the file has them fastest first).
        type_id: GGML tensor type.
        offset: First byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GgufFile:
    """A GGUF file, mapped read-only.

    Attributes:
        path: The file.
        metadata: Key -> value; arrays of numbers are numpy arrays, arrays of strings are lists.
        tensors: Name -> directory entry.

    Raises:
        ModelNotFoundError: No such file.
        ModelFormatError: Not a GGUF file, or a length in it leads outside it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelNotFoundError(f"GGUF file {self.path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ModelFormatError(f"GGUF file {self.path}: {error}") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, ValueError, IndexError, OverflowError, RecursionError, MemoryError) as error:
            if isinstance(error, ModelFormatError):
                raise
            raise ModelFormatError(f"GGUF file {self.path}: cut or damaged near byte {self._at}: {error}") from error

    def close(self) -> None:
        """Unmap the file. Arrays made of it must be gone."""
        self._map.close()

    def data(self, entry: TensorEntry, size_bytes: int) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, read-only, uint8, shape (size_bytes,).

        Raises:
            ModelFormatError: They would lie outside the file.
        """
        if entry.offset < 0 or entry.offset + size_bytes > len(self._map):
            raise ModelFormatError(f"GGUF file {self.path}: tensor {entry.name} lies outside the file")
        return np.frombuffer(self._map, dtype=np.uint8, count=size_bytes, offset=entry.offset)

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelFormatError(f"GGUF file {self.path}: no GGUF magic at its start")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ModelFormatError(f"GGUF file {self.path}: version {version}, want 2 or 3")
        tensor_count = self._count("tensors", self._number("Q"))
        entry_count = self._count("metadata entries", self._number("Q"))
        self.metadata: dict[str, Any] = {}
        for _ in range(entry_count):
            key = self._string()
            self.metadata[key] = self._value(self._number("I"))
        directory = []
        for _ in range(tensor_count):
            name = self._string()
            dimensions = self._number("I")
            if dimensions > 8:
                raise ModelFormatError(f"GGUF file {self.path}: tensor {name} has {dimensions} dimensions")
            shape = struct.unpack_from(f"<{dimensions}Q", self._map, self._at)
            self._at += 8 * dimensions
            type_id = self._number("I")
            directory.append((name, tuple(reversed(shape)), type_id, self._number("Q")))
        alignment = self.metadata.get("general.alignment", _ALIGNMENT_DEFAULT)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
            raise ModelFormatError(
                f"GGUF file {self.path}: general.alignment is {str(alignment)[:40]}, want an integer in 1..{1 << 20}"
            )
        data_start = -(-self._at // alignment) * alignment
        for name, _, _, offset in directory:
            if data_start + offset > len(self._map):
                raise ModelFormatError(
                    f"GGUF file {self.path}: tensor {name} begins at byte {offset}, outside the file"
                )
        self.tensors: dict[str, TensorEntry] = {
            name: TensorEntry(name, shape, type_id, data_start + offset) for name, shape, type_id, offset in directory
        }

    def _count(self, what: str, count: int) -> int:
        if count > _ENTRIES_MAX:
            raise ModelFormatError(f"GGUF file {self.path}: {count} {what}, at most {_ENTRIES_MAX} are read")
        return count

    def _number(self, code: str) -> int:
        value = struct.unpack_from(f"<{code}", self._map, self._at)[0]
        self._at += struct.calcsize(f"<{code}")
        return int(value)

    def _string(self) -> str:
        (size,) = struct.unpack_from("<Q", self._map, self._at)
        start = self._at + 8
        if start + size > len(self._map):
            raise ModelFormatError(
                f"GGUF file {self.path}: the string at byte {self._at} has {size} bytes, more than are left"
            )
        self._at = start + size
        return self._map[start : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            code, size = _SCALARS[kind]
            value = struct.unpack_from(f"<{code}", self._map, self._at)[0]
            self._at += size
            return value
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ModelFormatError(f"GGUF file {self.path}: type {kind} of the value at byte {self._at} is not known")
        inner = self._number("I")
        count = self._number("Q")
        if inner == _ARRAY:
            raise ModelFormatError(f"GGUF file {self.path}: the array of arrays at byte {self._at} is not supported")
        if inner in _SCALARS:
            code, size = _SCALARS[inner]
            if self._at + size * count > len(self._map):
                raise ModelFormatError(
                    f"GGUF file {self.path}: the array at byte {self._at} has {count} entries, more than are left"
                )
            array = np.frombuffer(self._map, dtype=np.dtype(code).newbyteorder("<"), count=count, offset=self._at)
            self._at += size * count
            return array.copy()
        if count > len(self._map):
            raise ModelFormatError(
                f"GGUF file {self.path}: the array at byte {self._at} has {count} entries, more than are left"
            )
        return [self._value(inner) for _ in range(count)]
