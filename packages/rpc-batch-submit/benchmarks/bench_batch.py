"""Request rate at fixed CPU by batch size, and the latency that batching adds at a low rate.

Rates are requests per second of process CPU time, submitter, RPC and worker together in one process: with a co-located
worker that CPU is all rank 0's. Every request has a token list of its own (a shared list would be memoised by some codecs and
flatter batching). Sizes are measured in turn within one run.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from rpc_batch_submit import BatchSubmitConfig, ThreadBatchSubmitter, take_in
from rpc_local_registry import RpcClient, RpcServer, new_key, rpc_method

ROUNDS = 5
COUNT = 2000
SIZES = (1, 8, 16, 32, 64)


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


def cpu_per_request_us(client: RpcClient, size: int, batch: list[Request]) -> float:
    """Process CPU per request, from submit to the last outcome."""

    def send(chunk: list[Request]) -> Any:
        return client.submit_batch(chunk).remote_future()

    start_s = time.process_time()
    with ThreadBatchSubmitter(send, BatchSubmitConfig(batch_max=size, delay_ms=0.5)) as submitter:
        for request in batch:
            submitter.submit(request)
    used_s = time.process_time() - start_s
    if submitter.statistics().failed:
        raise RuntimeError("requests failed")
    return used_s / len(batch) * 1e6


def figure(
    name: str, value: float, unit: str, baseline: float | None, ratio: float | None, goal: str, met: bool
) -> dict:
    """One line of the result."""
    return {
        "name": name, "value": round(value, 4), "unit": unit, "baseline": None if baseline is None else round(baseline, 4),
        "ratio": None if ratio is None else round(ratio, 3), "goal": goal, "met": met,
    }  # fmt: skip


def bench_sweep() -> list[dict]:
    """CPU per request over batch sizes."""
    key, worker, batch = new_key(), Worker(), requests()
    with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key) as client:
        samples: dict[int, list[float]] = {size: [] for size in SIZES}
        for _ in range(ROUNDS):
            for size in SIZES:
                samples[size].append(cpu_per_request_us(client, size, batch))
    medians = {size: statistics.median(values) for size, values in samples.items()}
    figures = []
    for size, cpu_us in medians.items():
        ratio = medians[1] / cpu_us
        goal, met = (">= 6x the rate of batch 1", ratio >= 6.0) if size == 32 else ("printed", True)
        figures.append(
            figure(f"requests_per_cpu_second_batch_{size}", 1e6 / cpu_us, "1/s", 1e6 / medians[1], ratio, goal, met)
        )
    return figures


def quantile(values: list[float], share: float) -> float:
    """Order statistic."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def bench_latency() -> list[dict]:
    """What batching adds at 10 requests/s: from ``submit`` to ``send_batch``, and end to end beside a plain submit."""
    key, worker, delay_ms = new_key(), Worker(), 0.5
    waits: dict[str, list[float]] = {"delay": [], "adaptive": []}
    totals: dict[str, list[float]] = {"off": [], "delay": [], "adaptive": []}
    submitted_s = {"delay": 0.0, "adaptive": 0.0}
    with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key) as client:

        def sender(mode: str) -> Any:
            def send(chunk: list[Request]) -> Any:
                if mode in waits:
                    waits[mode].append((time.perf_counter() - submitted_s[mode]) * 1e3)
                return client.submit_batch(chunk).remote_future()

            return send

        submitters = {
            "off": ThreadBatchSubmitter(sender("off"), BatchSubmitConfig()),
            "delay": ThreadBatchSubmitter(sender("delay"), BatchSubmitConfig(batch_max=32, delay_ms=delay_ms)),
            "adaptive": ThreadBatchSubmitter(
                sender("adaptive"), BatchSubmitConfig(batch_max=32, delay_ms=delay_ms, adaptive=True)
            ),
        }
        # Each mode sees one request every 100 ms; the three take turns a third of that apart.
        due_s = time.perf_counter()
        for request in requests()[:100]:
            for mode, submitter in submitters.items():
                due_s += 1 / 30
                time.sleep(max(0.0, due_s - time.perf_counter()))
                start_s = submitted_s[mode] = time.perf_counter()
                submitter.submit(request).result(10)
                totals[mode].append((time.perf_counter() - start_s) * 1e3)
        for submitter in submitters.values():
            submitter.close(5)
    limit_ms = max(delay_ms, 1.0) + 0.3
    figures = []
    for mode in ("delay", "adaptive"):
        p99_ms = quantile(waits[mode], 0.99)
        figures.append(
            figure(
                f"added_latency_p99_{mode}",
                p99_ms,
                "ms",
                statistics.median(waits[mode]),
                None,
                f"<= {limit_ms} ms",
                p99_ms <= limit_ms,
            )
        )
        end_ms = quantile(totals[mode], 0.99)
        figures.append(
            figure(f"end_to_end_p99_{mode}", end_ms, "ms", quantile(totals["off"], 0.99), None, "printed", True)
        )
    return figures


def main() -> list[dict]:
    """All figures."""
    gc.collect()
    gc.disable()
    try:
        return bench_sweep() + bench_latency()
    finally:
        gc.enable()


def show(figures: list[dict]) -> None:
    """Table, then one JSON line per figure."""
    print(
        f"switch interval {sys.getswitchinterval() * 1e3} ms, {os.cpu_count()} cores, {threading.active_count()} threads"
    )
    for line in figures:
        base = "" if line["baseline"] is None else f"{line['baseline']:>12.2f}"
        ratio = "" if line["ratio"] is None else f"{line['ratio']:>9.2f}"
        print(
            f"{line['name']:<44}{line['value']:>12.3f} {line['unit']:<6}{base:>13}{ratio:>10}  {line['goal']:<28}{line['met']}"
        )
    for line in figures:
        print(json.dumps(line))


if __name__ == "__main__":
    show(main())
