"""What a send's result says about each request, and how a worker takes a batch in."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rpc_batch_submit._errors import BatchItemFailed, BatchOutcomeError

_T = TypeVar("_T")

#: Text of an item's failure that travels back, characters.
_TEXT_MAX = 2048


def unpack_outcomes(result: object, count: int) -> list[BaseException | None]:
    """One outcome per request from what ``send_batch`` gave back.

    Args:
        result: None (all accepted) or a sequence with one entry per request: None for accepted, a text or an exception
            for a refusal of that request alone.
        count: Requests that were sent.

    Returns:
        One exception or None per request, in order. A result of any other form gives every request
        ``BatchOutcomeError``.
    """
    if result is None or (type(result) is list and result == _accepted(count)):
        return [None] * count
    if not isinstance(result, Sequence) or isinstance(result, (str, bytes)) or len(result) != count:
        problem = BatchOutcomeError(f"{count} requests were answered by {_short(result)}")
        return [problem] * count
    outcomes: list[BaseException | None] = []
    for item in result:
        if item is None or isinstance(item, BaseException):
            outcomes.append(item)
        elif isinstance(item, str):
            outcomes.append(BatchItemFailed(item))
        else:
            outcomes.append(BatchOutcomeError(f"an outcome is None, a text or an exception, not {_short(item)}"))
    return outcomes


@functools.lru_cache(maxsize=8)
def _accepted(count: int) -> list[None]:
    """What a worker that took everything answers; only ever compared with."""
    return [None] * count


def _short(value: object) -> str:
    length = f" of length {len(value)}" if isinstance(value, Sequence) else ""
    return f"{type(value).__qualname__}{length}"


def offer_gil() -> None:
    """Let another thread run.

    A sleep of nothing would give the lock up and win it back before anyone wakes; this one does not.
    """
    time.sleep(1e-6)


def take_in(
    batch: Iterable[_T],
    submit: Callable[[_T], object],
    *,
    hold_s: float = 0.0005,
    clock: Callable[[], float] = time.perf_counter,
    offer: Callable[[], None] = offer_gil,
) -> list[str | None]:
    """Take a batch in, one request after the other; for the worker's ``submit_batch``.

    The batch may be lazy: each request is asked for just before it is submitted. A request that cannot be read or that
    ``submit`` refuses fails alone. The interpreter lock is held for at most ``hold_s`` plus one request at a stretch:
    then ``offer`` gives it up, so a loop in another thread runs between requests however long the batch is.

    Args:
        batch: Requests. An iterator whose ``next`` can go on after an exception loses only the bad request.
        submit: Takes one request; raises to refuse it.
        hold_s: Longest stretch without an offer, seconds, beyond the request under way.

    Returns:
        Per request None or the refusal's text, as ``unpack_outcomes`` reads it.
    """
    outcomes: list[str | None] = []
    requests = iter(batch)
    held_since_s = clock()
    while True:
        try:
            request = next(requests)
        except StopIteration:
            return outcomes
        except Exception as error:  # noqa: BLE001 - one unreadable request must not cost the others
            outcomes.append(_text_of(error))
            continue
        try:
            submit(request)
        except Exception as error:  # noqa: BLE001 - one refused request must not cost the others
            outcomes.append(_text_of(error))
        else:
            outcomes.append(None)
        if clock() - held_since_s >= hold_s:
            offer()
            held_since_s = clock()


def _text_of(error: Exception) -> str:
    return f"{type(error).__qualname__}: {error}"[:_TEXT_MAX]


def is_pending_result(result: Any) -> bool:
    """Whether a send's result is still to come (it can be awaited or asked)."""
    return hasattr(result, "add_done_callback") or hasattr(result, "__await__")
