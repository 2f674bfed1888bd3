"""Code of the user's that runs in our threads or in the middle of our work: whatever it raises ends nothing but itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_logger = logging.getLogger("rpc_local_registry")
_T = TypeVar("_T")


def call_hook(name: str, function: Callable[..., object], *args: Any) -> bool:
    """Call a hook; what it raises is logged. Whether it ended well.

    An interrupt of the main thread is raised after that: the program's user wants out, and it need not be the hook's own.
    Callers have done their own work before.
    """
    try:
        function(*args)
        return True
    except Exception:
        _logger.exception("%s failed", name)
    except BaseException:
        _logger.exception("%s failed", name)
        if threading.current_thread() is threading.main_thread():
            raise
    return False


def for_each(function: Callable[[_T], object], items: Iterable[_T]) -> None:
    """Tell all of them, whatever one raises (an interrupt, a hook of the main thread that exits): that comes out at the end.

    Who was being told is told again, because an interrupt may have come before it was.
    """
    raised: BaseException | None = None
    for item in items:
        for _ in range(2):
            try:
                function(item)
                break
            except BaseException as error:  # noqa: BLE001 - raised below
                raised = error
    if raised is not None:
        try:
            raise raised
        finally:
            del raised


def told(error: BaseException) -> str:
    """``Type: text``, for errors whose kind the reader cannot guess."""
    return f"{type(error).__qualname__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """``str(error)``, or a placeholder where that raises, whatever it raises."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - a broken __str__ must not hide the error that carries it
        return "<message unavailable>"
