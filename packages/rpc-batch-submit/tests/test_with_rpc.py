"""Batching over RPC, and over its fast path: the two stack, and neither changes what the other promises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rpc_batch_submit import AsyncioBatchSubmitter, BatchItemFailed, BatchSubmitConfig, ThreadBatchSubmitter, take_in

rpc = pytest.importorskip("rpc_local_registry")


class Worker:
    """Takes batches in item by item."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.batches = 0

    def submit(self, request: int) -> None:
        """One request; 13 is refused."""
        if request == 13:
            raise ValueError("unlucky")
        self.taken.append(request)

    @rpc.rpc_method(non_blocking=True)
    def submit_batch(self, requests: Iterator[int]) -> list[str | None]:
        """Many."""
        self.batches += 1
        return take_in(requests, self.submit)


@pytest.mark.parametrize("fast_path", [False, True], ids=["remote", "local"])
def test_threads_over_rpc(fast_path: bool) -> None:
    """Order, the refused request alone, and on the fast path nothing waits for company."""
    worker, key = Worker(), rpc.new_key()
    with (
        rpc.RpcServer(worker, "ipc://", key) as server,
        rpc.RpcClient(server.address, key, fast_path=fast_path) as client,
        ThreadBatchSubmitter(
            lambda batch: client.submit_batch(batch).remote_future(),
            BatchSubmitConfig(batch_max=8, delay_ms=60_000),
            bypass=lambda: client.path_of("submit_batch") == "local",
        ) as submitter,
    ):
        tickets = [submitter.submit(number) for number in range(40)]
        errors = [ticket.exception(20) for ticket in tickets]
    assert [number for number, error in enumerate(errors) if error is not None] == [13]
    assert isinstance(errors[13], BatchItemFailed)
    assert worker.taken == [number for number in range(40) if number != 13]
    assert worker.batches == (40 if fast_path else 5)


def test_asyncio_over_rpc() -> None:
    """The loop's own driver with ``remote_async``; an unreadable request fails alone."""
    worker, key = Worker(), rpc.new_key()

    async def run() -> list[Any]:
        with rpc.RpcServer(worker, "ipc://", key) as server, rpc.RpcClient(server.address, key) as client:
            async with AsyncioBatchSubmitter(
                lambda batch: client.submit_batch(batch).remote_async(), BatchSubmitConfig(batch_max=4, delay_ms=1)
            ) as submitter:
                requests = [0, "not a number", 2, 3, 4]
                return await asyncio.gather(*(submitter.submit(r) for r in requests), return_exceptions=True)

    results = asyncio.run(run())
    assert [type(result) for result in results] == [type(None), BatchItemFailed, *[type(None)] * 3]
    assert worker.taken == [0, 2, 3, 4]
    assert worker.batches == 2
