"""The load generator's process at the API of an instance: requests go straight to a generation instance's door, as a front
sends them, and each prompt is computed there. One event loop, one task per request that is under way.

A token costs this process what it costs a front's proxy; when each came is kept per hand-over and made out when the load has
ended. Reads a :class:`ProxySpec` as JSON from standard input, writes a
:class:`~meta_executor.bench.load.LoadResult` as MessagePack to standard output.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterable

import msgspec
import numpy as np
import uvloop

from meta_executor.api.proxy import Proxy, ProxyError
from meta_executor.api.service import Submit
from meta_executor.api.worker_client import WorkerClient
from meta_executor.bench.load import LoadConfig, LoadResult, Outcome, prompt_of
from meta_executor.engine.base import SamplingParams
from meta_executor.executor.request import Answers, Request
from meta_executor.wire import STATUS_OF
from rpc_batch_submit import BatchSubmitConfig


class ProxySpec(msgspec.Struct, frozen=True):
    """What the process is told.

    Attributes:
        address: Where the instance's door listens.
        key: The run's key (hex).
        endpoint_generation: The instance's lifetime.
        batch_max, batch_delay_ms: When a batch is sent; 1 is off.
    """

    address: str
    key: str
    endpoint_generation: str
    vocab_size: int
    load: LoadConfig
    batch_max: int = 1
    batch_delay_ms: float = 0.5


class TimedProxy(Proxy):
    """Notes when each hand-over came, and whose tokens were in it."""

    def __init__(self, worker: WorkerClient, batching: BatchSubmitConfig) -> None:
        super().__init__(worker, batching)
        self.hand_overs: list[tuple[float, np.ndarray]] = []

    def _spread(self, answers: Answers) -> None:
        if len(answers):
            self.hand_overs.append((time.monotonic(), answers.request_ids))
        super()._spread(answers)


class _Sent:
    """One request and what became of it."""

    __slots__ = ("due_s", "ended_s", "error", "reason", "sent_s", "status", "tokens")

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.sent_s = self.ended_s = 0.0
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.error: str | None = None
        self.status = 200


def pieces_of(hand_overs: Iterable[tuple[float, np.ndarray]]) -> dict[int, list[float]]:
    """When each request's tokens came, one time per token, by request (s)."""
    listed = list(hand_overs)
    if not listed:
        return {}
    ids = np.concatenate([one for _, one in listed])
    times = np.repeat([at_s for at_s, _ in listed], [len(one) for _, one in listed])
    order = np.argsort(ids, kind="stable")
    ids, times = ids[order], times[order]
    bounds = np.flatnonzero(np.diff(ids)) + 1
    starts = np.concatenate([[0], bounds])
    return {int(ids[start]): part.tolist() for start, part in zip(starts, np.split(times, bounds))}


class Generator:
    """Sends a load through a proxy."""

    def __init__(self, proxy: TimedProxy, spec: ProxySpec) -> None:
        self._proxy = proxy
        self._load = spec.load
        self._generation = spec.endpoint_generation
        self._requests = [
            Request(
                # Ids begin at 1.
                request_id=number + 1,
                token_ids=np.array(prompt_of(number, prompt, spec.vocab_size), np.int32),
                sampling=SamplingParams(answer, ignore_eos=True),
                prefills_here=True,
            )
            for number, (prompt, answer) in enumerate(spec.load.lengths())
        ]
        self._sent: list[_Sent] = []

    async def run(self) -> LoadResult:
        """Send everything, wait for the last end."""
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        rate = self._load.rate_per_s
        self._sent = [_Sent(start_s + number / rate if rate else 0.0) for number in range(len(self._requests))]
        numbers = iter(range(len(self._requests)))
        width = min(self._load.concurrency or len(self._requests), len(self._requests))

        async def one_client() -> None:
            for number in numbers:
                if (wait_s := self._sent[number].due_s - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                await self._serve(number)

        await asyncio.gather(*(one_client() for _ in range(width)))
        seconds, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
        return LoadResult(self._outcomes(start_s), seconds, cpu_s, 0.0, 0, start_s)

    async def _serve(self, number: int) -> None:
        request, sent = self._requests[number], self._sent[number]
        sent.sent_s = time.monotonic()
        try:
            async with asyncio.timeout(self._load.request_timeout_s):
                tracked = await self._proxy.submit(Submit(request, self._generation))
                try:
                    while sent.reason is None:
                        tokens, notices = await tracked.next(whole=True)
                        sent.tokens += tokens
                        for notice in notices:
                            sent.reason = notice.finish_reason or None
                            sent.error = notice.message if notice.failed else None
                finally:
                    self._proxy.leave(tracked, "its time is over")
        except ProxyError as error:
            sent.error, sent.status = str(error), STATUS_OF.get(error.code, 500)
        except TimeoutError:
            sent.error, sent.status = f"no end after {self._load.request_timeout_s:g} s", 0
        sent.ended_s = time.monotonic()

    def _outcomes(self, start_s: float) -> tuple[Outcome, ...]:
        came = pieces_of(self._proxy.hand_overs)
        return tuple(
            Outcome(
                number=number,
                status=sent.status,
                error=sent.error,
                late_s=max(sent.sent_s - sent.due_s, 0.0) if sent.due_s else 0.0,
                first_s=times[0] - sent.sent_s if (times := came.get(number + 1, [])) else 0.0,
                total_s=sent.ended_s - sent.sent_s,
                tokens=len(sent.tokens),
                token_ids=tuple(sent.tokens),
                pieces_s=tuple(at_s - sent.sent_s for at_s in times),
                finish_reason=sent.reason,
                sent_s=sent.sent_s - start_s,
            )
            for number, sent in enumerate(self._sent)
        )


async def send(spec: ProxySpec) -> LoadResult:
    """Send the load to the instance."""
    worker = WorkerClient(spec.address, bytes.fromhex(spec.key), fast_path=False)
    proxy = TimedProxy(worker, BatchSubmitConfig(batch_max=spec.batch_max, delay_ms=spec.batch_delay_ms))
    try:
        generator = Generator(proxy, spec)
        gc.freeze()
        gc.disable()
        return await generator.run()
    finally:
        await proxy.close()
        await asyncio.to_thread(worker.close)


def main() -> None:
    """Read the spec, send the load, write the result."""
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=ProxySpec)
    result = uvloop.run(send(spec))
    sys.stdout.buffer.write(msgspec.msgpack.encode(result))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
