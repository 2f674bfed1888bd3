"""Public test helpers: a sender whose sends end when the test says so, and checks that any submitter can be put through."""

from __future__ import annotations

import concurrent.futures
from typing import Any


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


__all__ = ["FakeSender", "Tracker"]
