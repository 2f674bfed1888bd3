"""Request rate at fixed CPU by batch size, and the latency that batching adds at a low rate.

Rates are requests per second of process CPU time, submitter, RPC and worker together in one process: with a co-located
worker that CPU is all rank 0's. Every request has a token list of its own (a shared list would be memoised by some codecs and
flatter batching). Sizes are measured in turn within one run. Latencies are set against a bare timer of the same delay, taken
in turn with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from measure import Figure, Sample, in_turn, ratio, run_benchmark
from rpc_batch_submit import BatchSubmitConfig, ThreadBatchSubmitter, take_in
from rpc_local_registry import RpcClient, RpcServer, new_key, rpc_method

COUNT = 2000
SIZES = (1, 8, 16, 32, 64)
#: So many because a request that leaves alone costs now this, now half as much again: who has the interpreter lock decides.
ROUNDS = 91


class Request(msgspec.Struct):
    """A short prompt."""

    request_id: int
    token_ids: list[int]
    max_tokens: int = 64


class Worker:
    """Takes requests and does nothing with them."""

    def __init__(self) -> None:
        self.taken = 0

    def submit(self, request: Request) -> None:
        """Count."""
        self.taken += 1

    @rpc_method(non_blocking=True)
    def submit_batch(self, requests: Iterator[Request]) -> list[str | None]:
        """Item by item."""
        return take_in(requests, self.submit)


def requests() -> list[Request]:
    """Distinct lists of 16 tokens."""
    return [Request(n, [(n * 31 + k) % 49152 for k in range(16)]) for n in range(COUNT)]


def cpu_per_request(client: RpcClient, size: int, batch: list[Request]) -> Sample:
    """Process CPU per request, from submit to the last outcome."""

    def send(chunk: list[Request]) -> Any:
        return client.submit_batch(chunk).remote_future()

    def sample() -> float:
        start_s = time.process_time()
        with ThreadBatchSubmitter(send, BatchSubmitConfig(batch_max=size, delay_ms=0.5)) as submitter:
            for request in batch:
                submitter.submit(request)
        used_s = time.process_time() - start_s
        if submitter.statistics().failed:
            raise RuntimeError("requests failed")
        return used_s / len(batch)

    return sample


def sweep() -> list[Figure]:
    """CPU of a request that leaves alone against that of one in a batch: how many times more requests the same CPU takes."""
    key, worker, batch = new_key(), Worker(), requests()
    with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key) as client:
        samples = in_turn({str(size): cpu_per_request(client, size, batch) for size in SIZES}, ROUNDS)
    return [
        ratio(
            f"cpu_alone_over_batch_{size}", samples["1"], samples[str(size)], unit="us", scale=1e6,
            goal=">= 6" if size == 32 else None, against=f"a request in a batch of {size}",
        )
        for size in SIZES[1:]
    ]  # fmt: skip


DELAY_S = 0.005
PER_ROUND = 20


def bare_timer() -> float:
    """A thread that waits for the delay on a condition and then runs something: 95th percentile from arming to running."""
    waits: list[float] = []
    changed = threading.Condition()
    for _ in range(PER_ROUND):
        done = threading.Event()
        armed_s = time.perf_counter()

        def wait(armed_s: float = armed_s, done: threading.Event = done) -> None:
            with changed:
                changed.wait(DELAY_S)
            waits.append(time.perf_counter() - armed_s)
            done.set()

        threading.Thread(target=wait).start()
        done.wait()
    return sorted(waits)[int(0.95 * PER_ROUND)]


def submitter_timer(adaptive: bool) -> Sample:
    """From ``submit`` to ``send_batch`` of a request that nobody follows: 95th percentile."""

    def sample() -> float:
        waits: list[float] = []
        submitted_s = 0.0

        def send(_: list[int]) -> None:
            waits.append(time.perf_counter() - submitted_s)

        config = BatchSubmitConfig(batch_max=32, delay_ms=DELAY_S * 1e3, adaptive=adaptive)
        with ThreadBatchSubmitter(send, config) as submitter:
            for number in range(PER_ROUND):
                submitted_s = time.perf_counter()
                submitter.submit(number).result(10)
        return sorted(waits)[int(0.95 * PER_ROUND)]

    return sample


def latency() -> list[Figure]:
    """What batching adds at a low rate."""
    samples = in_turn({"bare": bare_timer, "delay": submitter_timer(False), "adaptive": submitter_timer(True)})
    against = "a bare timer of the same delay"
    return [
        ratio(
            "added_latency_p95_delay",
            samples["delay"],
            samples["bare"],
            unit="ms",
            scale=1e3,
            goal="<= 1.5",
            against=against,
        ),
        ratio(
            "added_latency_p95_adaptive",
            samples["adaptive"],
            samples["bare"],
            unit="ms",
            scale=1e3,
            goal="<= 0.2",
            against=against,
        ),
    ]


if __name__ == "__main__":
    run_benchmark(sweep, latency)
