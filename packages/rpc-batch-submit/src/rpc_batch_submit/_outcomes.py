"""What a send's result says about each request, and how a worker takes a batch in."""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Final, TypeVar

from rpc_batch_submit._errors import (
    BatchItemFailed,
    BatchOutcomeError,
    BatchSendFailed,
    BatchSendUnknown,
    BatchUsageError,
)

_logger = logging.getLogger("rpc_batch_submit")

_T = TypeVar("_T")

#: Text of an item's failure that travels back, characters.
_TEXT_MAX = 2048
#: Requests in a row that ``next`` may refuse to give before an iterator without a length counts as endless.
UNREADABLE_MAX: Final = 1024


def unpack_outcomes(result: object, count: int) -> list[BaseException | None]:
    """One outcome per request from what ``send_batch`` gave back. Never raises.

    Args:
        result: None (all accepted) or a sequence with one entry per request: None for accepted, a text or an exception
            for a refusal of that request alone (one that a future cannot carry, an interrupt say, as the cause of a
            ``BatchItemFailed``).
        count: Requests that were sent.

    Returns:
        One exception or None per request, in order. A result of any other form gives every request a
        ``BatchOutcomeError`` of its own.
    """
    if result is None:
        return [None] * count
    try:
        if isinstance(result, Sequence) and not isinstance(result, (str, bytes)) and len(result) == count:
            # One more than there should be: what tells a length need not end there.
            outcomes = [_outcome(item) for item in itertools.islice(result, count + 1)]
            if len(outcomes) == count:
                return outcomes
    except Exception as error:  # noqa: BLE001 - a sequence that cannot be read is an answer of another form
        return [
            BatchOutcomeError(f"{count} requests were answered by what cannot be read: {told(error)}")
            for _ in range(count)
        ]
    return [BatchOutcomeError(f"{count} requests were answered by {_short(result)}") for _ in range(count)]


def _outcome(item: object) -> BaseException | None:
    if item is None:
        return None
    if isinstance(item, BaseException):
        if isinstance(item, Exception) and not isinstance(item, StopIteration):
            return item
        # Raised from a ticket it would pass for an interrupt of the caller, or for the end of the caller's iterator.
        refusal = BatchItemFailed(told(item))
        refusal.__cause__ = item
        return refusal
    if isinstance(item, str):
        return BatchItemFailed(item)
    return BatchOutcomeError(f"an outcome is None, a text or an exception, not {_short(item)}")


def never_ran(error: BaseException) -> bool:
    """Whether a failed send certainly reached nobody: its exception says so with a true ``nothing_ran`` attribute.

    rpc-local-registry's errors have that attribute. An exception without it leaves the outcome unknown.
    """
    return getattr(error, "nothing_ran", False) is True


def send_failure(cause: BaseException, count: int, refused: Callable[[BaseException], bool]) -> BatchSendFailed:
    """The error of one request of a send that failed. Never raises."""
    try:
        kind = BatchSendFailed if refused(cause) else BatchSendUnknown
    except Exception:
        _logger.exception("classifying a failed send failed")
        kind = BatchSendUnknown
    error = kind(f"sending {count} requests failed: {told(cause)}")
    error.__cause__ = cause
    return error


def told(error: BaseException) -> str:
    """An exception within the text of another. Never raises, and is bounded: its own ``repr`` is foreign code."""
    try:
        return repr(error)[:_TEXT_MAX]
    except Exception:  # noqa: BLE001 - only for the text of an error
        return f"{type(error).__qualname__}(<unreadable>)"


def is_unknown(error: BaseException | None) -> bool:
    """Whether this outcome leaves open if the request was served."""
    return isinstance(error, (BatchSendUnknown, BatchOutcomeError))


def _short(value: object) -> str:
    try:
        length = f" of length {len(value)}" if isinstance(value, Sequence) else ""
    except Exception:  # noqa: BLE001 - only for the text of an error
        length = ""
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
        batch: Requests. An iterator whose ``next`` can go on after an exception loses only the bad request; one that tells
            its length is asked no oftener than that.
        submit: Takes one request; raises to refuse it. No ``async`` function: nothing would run it.
        hold_s: Longest stretch without an offer, seconds, beyond the request under way.

    Returns:
        Per request None or the refusal's text, as ``unpack_outcomes`` reads it.

    Raises:
        BatchOutcomeError: An iterator without a length raised ``UNREADABLE_MAX`` times in a row: it has no end.
        BatchUsageError: ``submit`` is an ``async`` function; no request was asked for.
    """
    if inspect.iscoroutinefunction(submit):
        raise BatchUsageError("submit must not be an async function: nothing would run it")
    outcomes: list[str | None] = []
    requests = iter(batch)
    left = len(requests) if isinstance(requests, Sized) else None
    unreadable = 0
    held_since_s = clock()
    while left is None or len(outcomes) < left:
        try:
            request = next(requests)
        except StopIteration:
            break
        except Exception as error:
            outcomes.append(_text_of(error))
            unreadable += 1
            if left is None and unreadable >= UNREADABLE_MAX:
                raise BatchOutcomeError(f"{unreadable} requests in a row could not be read: {told(error)}") from error
        else:
            unreadable = 0
            try:
                submit(request)
            except Exception as error:  # noqa: BLE001 - one refused request must not cost the others
                outcomes.append(_text_of(error))
            else:
                outcomes.append(None)
        if clock() - held_since_s >= hold_s:
            offer()
            held_since_s = clock()
    return outcomes


def _text_of(error: Exception) -> str:
    try:
        return f"{type(error).__qualname__}: {error}"[:_TEXT_MAX]
    except Exception:  # noqa: BLE001 - a broken __str__ must not cost the other requests
        return f"{type(error).__qualname__}: <message unavailable>"
