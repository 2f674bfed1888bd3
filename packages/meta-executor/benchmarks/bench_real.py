"""A real model: the service against its own engine alone in one process, on the same cores, run in turn.

    python bench_real.py [--rounds N] [--dtype float32|bfloat16] [--threads N]

SmolLM2-135M, 64 + 64 tokens, eight clients and one. The service is one context rank and one generation rank, each with so
many threads; the engine alone has the same threads, prefills its prompts and decodes them together.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from bench_service import figure
from trial import ROOT, load, running

from meta_executor.bench.load import LoadConfig, prompt_of
from meta_executor.config import EngineConfig
from meta_executor.engine.base import SamplingParams, SequenceStep, StageSpec
from meta_executor.engine.factory import create_engine, model_info
from meta_executor.engine.generate import SequenceRunner

TOKENS = 64
#: Groups of clients one after the other in each measurement (count).
GROUPS = 3


def configuration(dtype: str, threads: int) -> dict[str, Any]:
    """The smallest service: on few cores the one that shares them best."""
    one: dict[str, Any] = {"kv_cache_config": {"max_tokens": 8192}, "rpc": {"local_fastpath": True}}
    return {
        "port": 0,
        "engine": {"kind": "llama", "model": "smollm2", "device": "cpu", "dtype": dtype, "threads": threads},
        "context_servers": {**one, "pipeline_parallel_size": 1},
        "generation_servers": {**one, "tensor_parallel_size": 1},
    }


def engine_alone(clients: int, dtype: str, threads: int) -> float:
    """Tokens per second of the engine in this process."""
    config = EngineConfig(model="smollm2", device="cpu", dtype=dtype, threads=threads)  # type: ignore[arg-type]
    info = model_info(config)
    runner = SequenceRunner(create_engine(config, StageSpec(0, 1, 0, info.layer_count)), block_count=512)
    sampling = SamplingParams(TOKENS, ignore_eos=True)

    def group(first: int) -> None:
        numbers = range(first, first + clients)
        newest = [runner.prefill(n, prompt_of(n, TOKENS, info.vocab_size), sampling)[0] for n in numbers]
        tables = [np.asarray(runner.pool.table(n), np.int64) for n in numbers]
        for position in range(TOKENS, 2 * TOKENS - 1):
            rows = [
                SequenceStep(n, np.asarray([token], np.int32), position, table, sampling)
                for n, token, table in zip(numbers, newest, tables, strict=True)
            ]
            made = runner.step(rows).token_ids
            if made is None:
                raise RuntimeError("the step made no tokens")
            newest = made.tolist()
        for n in numbers:
            runner.pool.release(n)

    group(1)
    began_s = time.perf_counter()
    for turn in range(GROUPS):
        group(1000 * (turn + 1))
    rate = GROUPS * clients * TOKENS / (time.perf_counter() - began_s)
    runner.close()
    return rate


def main() -> None:
    """Measure in turn; a table, one figure per number of clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each side (count)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--threads", type=int, default=min(2, len(os.sched_getaffinity(0))), help="of every rank (count)"
    )
    parser.add_argument("--alone", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(engine_alone(options.alone, options.dtype, options.threads)))
        return
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        with running(ROOT, configuration(options.dtype, options.threads)) as service:
            for clients in (8, 1):
                for count in (clients, GROUPS * clients):  # the first warms
                    config = LoadConfig(count, clients, prompt_tokens=TOKENS, answer_tokens=TOKENS)
                    trial = load(service, config, vocab_size=49_152, model="SmolLM2-135M-Instruct")
                if trial.failures:
                    raise RuntimeError(f"the service failed: {trial.failures[:3]}")
                rates.setdefault(("service", clients), []).append(trial.tokens / trial.result.seconds)
        for clients in (8, 1):
            command = [sys.executable, __file__, "--alone", str(clients), "--dtype", options.dtype]
            done = subprocess.run([*command, "--threads", str(options.threads)], stdout=subprocess.PIPE, check=True)
            rates.setdefault(("engine", clients), []).append(json.loads(done.stdout))
        print(
            "   ".join(f"{name} {n} client(s) {all_of[-1]:6.1f} tokens/s" for (name, n), all_of in rates.items()),
            flush=True,
        )
    for clients in (8, 1):
        ratio = statistics.median(
            s / e for s, e in zip(rates["service", clients], rates["engine", clients], strict=True)
        )
        middle = [statistics.median(rates[name, clients]) for name in ("service", "engine")]
        figure(
            f"real model, {clients} client(s): service over its engine alone", round(middle[0], 1), "tokens/s",
            round(middle[1], 1), round(ratio, 3), ">= 0.9", ratio >= 0.9,
        )  # fmt: skip


if __name__ == "__main__":
    main()
