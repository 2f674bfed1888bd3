"""The one file that imports numpy; without it arrays cannot travel and everything else can."""

from __future__ import annotations

import threading
import typing
import weakref
from collections.abc import Callable
from typing import Any

from rpc_local_registry._errors import RpcArgumentError
from rpc_local_registry._hooks import call_hook

try:
    import numpy
except ImportError:  # pragma: no cover - exercised by a subprocess test that blocks the import
    numpy = None  # type: ignore[assignment]

_BASE: Any = object if numpy is None else numpy.ndarray
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


def check_elements(annotation: Any, value: Any) -> None:
    """Hold an array to what ``NDArray[T]`` says of its elements; ``Any`` says nothing.

    Raises:
        ValueError: They are of another type.
    """
    if numpy is None or not isinstance(value, numpy.ndarray):
        return
    # ndarray[shape, dtype[T]]
    for wanted in [t for part in typing.get_args(annotation)[1:] for t in typing.get_args(part)]:
        if isinstance(wanted, type) and issubclass(wanted, numpy.generic) and not issubclass(value.dtype.type, wanted):
            raise ValueError(f"Expected an array of {wanted.__name__}, got one of {value.dtype}")


def export(value: Any) -> tuple[str, tuple[int, ...], bytes | memoryview]:
    """(dtype name, shape, flat bytes) of an array: a copy, or the memory itself if it was lent (``Loan``).

    Raises:
        RpcArgumentError: Element type that may not travel.
    """
    array = value if isinstance(value, numpy.ndarray) else numpy.asarray(value)
    name = _NAMES.get(array.dtype)
    if name is None:
        raise RpcArgumentError(f"arrays of dtype {array.dtype} cannot travel")
    if isinstance(array, numpy.ma.MaskedArray):
        raise RpcArgumentError("masked arrays cannot travel: their mask would be lost; send data and mask")
    if type(array) is not LentArray or not _is_lent(array):
        return name, array.shape, array.tobytes()
    flat: Any = array.view(numpy.ndarray).reshape(-1).view(numpy.uint8)
    return name, array.shape, memoryview(flat)


class LentArray(_BASE):  # type: ignore[misc]  # numpy may be missing
    """View of an array that its owner has lent; travels uncopied. Made by ``Loan.view`` only."""


def _is_lent(array: Any) -> bool:
    """Whether this is really the lent memory (arithmetic on it gives the same class over memory of its own)."""
    if not array.flags.c_contiguous:
        return False
    base = array.base
    while isinstance(base, numpy.ndarray):
        base = base.base
    return isinstance(base, memoryview)


class Loan:
    """Lends an array to calls or results without a copy, and tells when its memory is free again.

    A call owns its bytes when it returns: arrays are copied. Where a copy is too dear, pass ``loan.view()`` instead of the
    array, to any verb, one-way included, or return it from a handler. Until the loan is free nobody may change the array: not
    its author (a change in flight breaks the message's code and with it the session), nor, on the local path, the worker.

    Free means that no view of it exists any more, in flight, in the worker or anywhere else: keep none yourself.

    Args:
        array: C-contiguous memory (numpy, or CPU memory that offers itself as an array).
        on_free: Called each time the loan becomes free, on whichever thread dropped the last view; must not block.

    Raises:
        RpcArgumentError: The array cannot travel, or is not contiguous.
    """

    def __init__(self, array: Any, on_free: Callable[[], object] | None = None) -> None:
        if numpy is None:
            raise RpcArgumentError("numpy is not installed here")
        source = numpy.asarray(array)
        if source.dtype not in _NAMES:
            raise RpcArgumentError(f"arrays of dtype {source.dtype} cannot travel")
        if not source.flags.c_contiguous:
            raise RpcArgumentError("only contiguous memory can be lent; make a copy with numpy.ascontiguousarray")
        self._source = source
        self._on_free = on_free
        self._views = 0
        # Re-entrant: the last view can be dropped by a collection inside any of these sections.
        # Entered by itself: the condition's own ``__exit__`` is Python, and an interrupt there would keep it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def view(self) -> Any:
        """A read-only view to pass on; the loan is not free while it, or anything made from it, exists."""
        source = self._source
        # An object of its own, which every view keeps alive through the buffer protocol, however it was sliced.
        exporter = source.reshape(-1).view(numpy.uint8)
        exporter = exporter.view()
        with self._lock:
            self._views += 1
        weakref.finalize(exporter, self._returned).atexit = False
        data: Any = exporter
        flat = numpy.frombuffer(memoryview(data), numpy.uint8)
        view = flat.view(source.dtype).reshape(source.shape).view(LentArray)
        view.flags.writeable = False
        return view

    @property
    def free(self) -> bool:
        """Whether nobody holds a view any more."""
        return self._views == 0

    def wait_free(self, timeout_s: float | None = None) -> bool:
        """Block until the loan is free; False if it was not in time."""
        with self._lock:
            return self._changed.wait_for(lambda: self._views == 0, timeout_s)

    def _returned(self) -> None:
        with self._lock:
            self._views -= 1
            if self._views:
                return
            self._changed.notify_all()
        if self._on_free is not None:
            call_hook("on_free", self._on_free)


def rebuild(name: str, shape: tuple[int, ...], buffer: memoryview) -> Any:
    """Read-only array over ``buffer``, uncopied.

    Raises:
        ValueError: Unknown element type, or the shape does not fit the bytes.
    """
    if numpy is None:
        raise ValueError("numpy is not installed here")
    dtype = DTYPES.get(name)
    if dtype is None or len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"cannot make an array of dtype {name!r} and {len(shape)} dimensions")
    count = 1
    for extent in shape:
        if extent < 0:
            raise ValueError("an extent of the array is negative")
        count *= extent
    if count * dtype.itemsize != len(buffer):
        raise ValueError(f"{len(buffer)} bytes do not fill shape {shape} of {name}")
    array = numpy.frombuffer(buffer, dtype)
    if array.flags.writeable:
        array.flags.writeable = False
    return array if len(shape) == 1 else array.reshape(shape)
