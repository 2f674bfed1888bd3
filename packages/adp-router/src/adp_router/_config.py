"""Settings: each is read once, becomes a plain number, and is refused by its name and value."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

from adp_router._errors import RouterConfigError
from adp_router._text import shown


def number(value: object) -> float | None:
    """The plain float that a value is, or None. A truth value is not a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value) + 0.0  # there is no -0.0: equal settings have equal texts
    except Exception:  # noqa: BLE001  a caller's object may fail in any way
        return None


def take(settings: object, name: str, read: Callable[[object], Any], wanted: str, holds: Callable[[Any], bool]) -> None:
    """Make a field of a frozen dataclass plain.

    Raises:
        RouterConfigError: It cannot be read, or does not hold (nan holds nowhere).
    """
    given = getattr(settings, name)
    value = read(given)
    if value is None or not holds(value):
        raise RouterConfigError(f"{name} must be {wanted}, got {shown(given)}")
    object.__setattr__(settings, name, value)
