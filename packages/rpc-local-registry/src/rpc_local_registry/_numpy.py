"""The one file that imports numpy; without it arrays cannot travel and everything else can."""

from __future__ import annotations

from typing import Any

from rpc_local_registry._errors import RpcArgumentError

try:
    import numpy
except ImportError:  # pragma: no cover - exercised by a subprocess test that blocks the import
    numpy = None  # type: ignore[assignment]

DIMENSIONS_MAX = 32
#: Element types that may travel, by their wire name (little endian, fixed size): no objects, no structures.
DTYPES: dict[str, Any] = (
    {}
    if numpy is None
    else {
        name: numpy.dtype(name)
        for name in ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16")
    }
)
_NAMES: dict[Any, str] = {dtype: name for name, dtype in DTYPES.items()}


def array_type() -> type | None:
    """``numpy.ndarray``, or None without numpy."""
    return None if numpy is None else numpy.ndarray


def is_array_like(value: object) -> bool:
    """An array, a numpy scalar, or CPU memory that offers itself as one (torch tensors do)."""
    return numpy is not None and (
        isinstance(value, (numpy.ndarray, numpy.generic)) or hasattr(type(value), "__array__")
    )


def export(value: Any) -> tuple[str, tuple[int, ...], memoryview]:
    """(dtype name, shape, flat byte view) of an array; copies only if it is not C-contiguous.

    Raises:
        RpcArgumentError: Element type that may not travel.
    """
    array = numpy.asarray(value)
    name = _NAMES.get(array.dtype)
    if name is None:
        raise RpcArgumentError(f"arrays of dtype {array.dtype} cannot travel")
    shape = array.shape
    if not array.flags.c_contiguous:
        array = numpy.ascontiguousarray(array)
    flat: Any = array.reshape(-1).view(numpy.uint8)
    return name, shape, memoryview(flat)


def rebuild(name: str, shape: tuple[int, ...], buffer: memoryview) -> Any:
    """Read-only array over ``buffer``, uncopied.

    Raises:
        ValueError: Unknown element type, or the shape does not fit the bytes.
    """
    if numpy is None:
        raise ValueError("numpy is not installed here")
    dtype = DTYPES.get(name)
    if dtype is None or len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"array of dtype {name!r} and {len(shape)} dimensions")
    count = 1
    for extent in shape:
        if extent < 0:
            raise ValueError("negative extent")
        count *= extent
    if count * dtype.itemsize != len(buffer):
        raise ValueError(f"{len(buffer)} bytes do not fill shape {shape} of {name}")
    array = numpy.frombuffer(buffer, dtype)
    if array.flags.writeable:
        array.flags.writeable = False
    return array if len(shape) == 1 else array.reshape(shape)
