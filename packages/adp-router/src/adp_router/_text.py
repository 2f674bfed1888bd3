"""Foreign values as text: nothing that a caller's object does in its ``__repr__`` can fail here."""

from __future__ import annotations

_SHOWN_MAX = 80


def shown(value: object) -> str:
    """A value for a message, cut to a length that a log can bear."""
    if type(value) is int and -(1 << 256) < value < 1 << 256:
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"an integer of {int(value).bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  a caller's object may fail in any way
        return f"an object of type {type(value).__qualname__} that cannot be shown"
    return text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "..."


def canonical(value: object, depth: int = 4) -> str:
    """Text of a value that cannot be used, for the digest: equal in every process, so an object's address never gets in."""
    if value is None or isinstance(value, bool):
        return repr(bool(value)) if value is not None else "None"
    if isinstance(value, int):
        return f"i{int.__index__(value):x}"
    if isinstance(value, float):
        return f"f{float.hex(value)}"
    if isinstance(value, str):
        return f"s{str.__len__(value)}:{str.__str__(value)}"
    if isinstance(value, bytes):
        return f"b{bytes.hex(value)}"
    if depth and type(value) in (list, tuple):
        items = list(value)  # type: ignore[call-overload]
        return f"[{len(items)} {','.join(canonical(item, depth - 1) for item in items)}]"
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
