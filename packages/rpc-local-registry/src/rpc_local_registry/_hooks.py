"""Code of the user's that runs in our threads or in the middle of our work: whatever it raises ends nothing but itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

_logger = logging.getLogger("rpc_local_registry")


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


def told(error: BaseException) -> str:
    """``Type: text``, for errors whose kind the reader cannot guess."""
    return f"{type(error).__qualname__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """``str(error)``, or a placeholder where that raises, whatever it raises."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - a broken __str__ must not hide the error that carries it
        return "<message unavailable>"
