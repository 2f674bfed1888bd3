"""Foreign values as the plain numbers and truth values that they are."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index


def plain_integer(value: object) -> int | None:
    """The plain integer that a value is, or None. A truth value is not a count."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return int(index(value))  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  a caller's object may fail in any way
        return None


def plain_flag(value: object) -> bool | None:
    """The truth value that a value is (True, False, 1, 0, and NumPy's), or None."""
    if type(value) is bool:
        return value
    try:
        scalar = value.item() if hasattr(value, "item") else value
        number = scalar if type(scalar) is bool else index(scalar)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001  a caller's object may fail in any way
        return None
    return bool(number) if number in (0, 1) else None


def count_of_type(values: Iterable[object], kind: type) -> int:
    """How many values are of exactly this type. A list of the types counts them faster than a walk that makes none."""
    return [*map(type, values)].count(kind)
