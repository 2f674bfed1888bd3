"""The caller's own functions around a request; the one place that calls them, so that none can break the bookkeeping."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from rpc_batch_submit._batcher import Entry
from rpc_batch_submit._errors import BatchConfigError
from rpc_batch_submit._outcomes import is_unknown, never_ran, send_failure

_T = TypeVar("_T")
_logger = logging.getLogger("rpc_batch_submit")


@dataclasses.dataclass(frozen=True)
class Hooks(Generic[_T]):
    """Fields as the drivers' arguments of the same names."""

    send_batch: Callable[[list[_T]], Any]
    register: Callable[[_T], object] | None
    rollback: Callable[[_T, BaseException], object] | None
    on_unknown: Callable[[_T, BaseException], object] | None
    refused: Callable[[BaseException], bool] | None
    size_of: Callable[[_T], int] | None
    id_of: Callable[[_T], Hashable] | None
    bypass: Callable[[], bool] | None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not callable(value) and (value is not None or field.name == "send_batch"):
                raise BatchConfigError(f"{field.name} must be callable, got {value!r}")
            if field.name != "send_batch" and inspect.iscoroutinefunction(value):
                raise BatchConfigError(f"{field.name} must not be an async function: nothing would run it")

    def look_at(self, request: _T) -> tuple[Hashable, int, bool]:
        """(id, bytes, whether it goes direct); before anything is touched, so whatever these raise costs nothing."""
        request_id = None if self.id_of is None else self.id_of(request)
        size_bytes = 0 if self.size_of is None else self.size_of(request)
        return request_id, size_bytes, self.bypass is not None and bool(self.bypass())

    def send_failures(self, cause: BaseException, count: int) -> list[BaseException | None]:
        """One error per request of a send that failed."""
        return [send_failure(cause, count, self.refused or never_ran) for _ in range(count)]

    def failed(self, entry: Entry[_T], error: BaseException) -> None:
        """The request was not, or perhaps not, served: each hook hears of it once. What the hooks raise is logged.

        Raises:
            BaseException: Only what is no ``Exception`` (an interrupt inside a hook), or one that comes between the two; then
                it may be called again.
        """
        on_unknown, rollback, request = self.on_unknown, self.rollback, entry.request
        if on_unknown is not None and is_unknown(error) and not entry.asked:
            try:
                entry.asked = True
                entry.kept = on_unknown(request, error) is True
            except Exception:
                _logger.exception("on_unknown failed for a request")
        if rollback is not None and not entry.kept and not entry.told:
            try:
                entry.told = True
                rollback(request, error)
            except Exception:
                _logger.exception("rollback failed for a request")


def first_interrupt(raised: BaseException | None, error: BaseException, what: str) -> BaseException | None:
    """What to raise when the bookkeeping is done: the first interrupt; an ``Exception`` of a callback is logged instead."""
    if isinstance(error, Exception):
        _logger.error("%s failed", what, exc_info=error)
        return raised
    return raised or error
