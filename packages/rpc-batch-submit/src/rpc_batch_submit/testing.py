"""Public test helpers: a sender whose sends end when the test says so, a caller's table, a check of senders of your own."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from rpc_batch_submit._asyncio import AsyncioBatchSubmitter
from rpc_batch_submit._config import BatchSubmitConfig
from rpc_batch_submit._errors import BatchSendFailed, BatchSendUnknown

_T = TypeVar("_T")


class FakeSender:
    """A ``send_batch`` that records every batch and leaves each send open until the test ends it.

    Args:
        immediate: End every send at once, with ``result``.
    """

    def __init__(self, *, immediate: bool = False, result: object = None) -> None:
        self.batches: list[list[Any]] = []
        self.futures: list[concurrent.futures.Future[Any]] = []
        self.immediate = immediate
        self.result = result

    def __call__(self, batch: list[Any]) -> concurrent.futures.Future[Any]:
        """Take a batch."""
        self.batches.append(list(batch))
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.futures.append(future)
        if self.immediate:
            future.set_result(self.result)
        return future

    @property
    def requests(self) -> list[Any]:
        """Everything sent, in order."""
        return [request for batch in self.batches for request in batch]

    def accept(self, index: int, outcomes: list[object] | None = None) -> None:
        """End a send."""
        self.futures[index].set_result(outcomes)

    def fail(self, index: int, error: BaseException) -> None:
        """End a send with an error."""
        self.futures[index].set_exception(error)


class Tracker:
    """Plays the caller's tracking table: register before send, rollback on failure.

    ``check`` holds when every request is tracked exactly until it failed.
    """

    def __init__(self) -> None:
        self.tracked: list[Any] = []
        self.rolled_back: list[tuple[Any, BaseException]] = []

    def register(self, request: Any) -> None:
        """For ``register=``."""
        if request in self.tracked:
            raise AssertionError(f"{request!r} was registered twice")
        self.tracked.append(request)

    def rollback(self, request: Any, error: BaseException) -> None:
        """For ``rollback=``."""
        if request not in self.tracked:
            raise AssertionError(f"{request!r} was rolled back without being registered")
        self.tracked.remove(request)
        self.rolled_back.append((request, error))


async def check_sender(
    send_batch: Callable[[list[_T]], Any],
    good: Sequence[_T],
    bad: _T,
    *,
    arrived: Callable[[], Sequence[_T]],
    lose: Callable[[], object] | None = None,
    limit_s: float = 30.0,
) -> None:
    """What a ``send_batch`` and the worker behind it owe a submitter; yours can be checked with it, over whatever carries it.

    Args:
        send_batch: As ``AsyncioBatchSubmitter`` takes it.
        good: Four requests or more that the worker takes in, all different.
        bad: One that it refuses.
        arrived: What the worker has taken in so far, in order.
        lose: Ends the worker; sends must fail from then on. None: that is not checked.
        limit_s: Longest wait for anything.

    Raises:
        AssertionError: Something differs.
    """
    before = list(arrived())
    first, last, lost = list(good[:-2]), good[-2], good[-1]
    submitter = AsyncioBatchSubmitter[_T](send_batch, BatchSubmitConfig(batch_max=len(first) + 1, delay_ms=0.0))
    asked = [first[0], bad, *first[1:]]
    outcomes = await _outcomes([submitter.submit(request) for request in asked], limit_s)
    _expect(isinstance(outcomes.pop(1), Exception), "the bad request was not refused", bad)
    _expect(not any(outcomes), "a good request failed with the bad one", outcomes)
    _expect(list(arrived()) == [*before, *first], "not every good request arrived once, in order", arrived())
    outcomes = await _outcomes([submitter.submit(last)], limit_s)
    _expect(not any(outcomes), "a request alone is not served", outcomes)
    _expect(list(arrived()) == [*before, *first, last], "a request alone did not arrive", arrived())
    if lose is not None:
        lose()
        (outcome,) = await _outcomes([submitter.submit(lost)], limit_s)
        told = isinstance(outcome, BatchSendFailed | BatchSendUnknown)
        _expect(told, "a send to a worker that is lost does not fail", outcome)
    await submitter.aclose(limit_s)


async def _outcomes(tickets: Sequence[asyncio.Future[None]], limit_s: float) -> list[BaseException | None]:
    _, pending = await asyncio.wait(tickets, timeout=limit_s)
    _expect(not pending, "requests have no outcome", len(pending))
    return [ticket.exception() for ticket in tickets]


def _expect(holds: bool, what: str, shown: object) -> None:
    if not holds:
        raise AssertionError(f"{what}: {shown}")


__all__ = ["FakeSender", "Tracker", "check_sender"]
