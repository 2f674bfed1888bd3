"""A real model: the service against its own engine alone in one process, and against other engines, run in turn.

    python bench_real.py [--rounds N] [--dtype float32|bfloat16] [--threads N] [--peer NAME[=PYTHON] …]

SmolLM2-135M, 64 + 64 tokens, eight clients and one. The service is one context rank and one generation rank, each with so
many threads; the engine alone has the same threads, prefills its prompts and decodes them together. Others are ``hugging-face``
and ``vllm`` (its CPU build), each with the same weights and threads in an interpreter of its own; one that is not installed is
said to be so and has no figure. What an engine answers must be what the engine alone answers, or that is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_service import decided, figure
from peers import NAMES, write_folder
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


def engine_alone(clients: int, dtype: str, threads: int) -> tuple[float, list[int]]:
    """The engine in this process: tokens per second, and its first answer."""
    config = EngineConfig(model="smollm2", device="cpu", dtype=dtype, threads=threads)  # type: ignore[arg-type]
    info = model_info(config)
    runner = SequenceRunner(create_engine(config, StageSpec(0, 1, 0, info.layer_count)), block_count=512)
    sampling = SamplingParams(TOKENS, ignore_eos=True)
    answer: list[int] = []

    def group(first: int) -> None:
        numbers = range(first, first + clients)
        newest = [runner.prefill(n, prompt_of(n, TOKENS, info.vocab_size), sampling)[0] for n in numbers]
        if first == 1:
            answer.append(newest[0])
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
            if first == 1:
                answer.append(newest[0])
        for n in numbers:
            runner.pool.release(n)

    group(1)
    began_s = time.perf_counter()
    for turn in range(GROUPS):
        group(1000 * (turn + 1))
    rate = GROUPS * clients * TOKENS / (time.perf_counter() - began_s)
    runner.close()
    return rate, answer


def of_peer(name: str, python: str, folder: Path, clients: int, dtype: str, threads: int) -> tuple[float, list[int]]:
    """Another engine's tokens per second, and its first answer, with the prompts that the engine alone has."""
    groups = [[prompt_of(first + n, TOKENS, 49_152) for n in range(clients)] for first in (1, 1000, 2000, 3000)]
    asked = {"groups": groups, "answer_tokens": TOKENS, "threads": threads, "dtype": dtype}
    command = [python, str(Path(__file__).with_name("peers.py")), name, str(folder)]
    done = subprocess.run(command, input=json.dumps(asked).encode(), stdout=subprocess.PIPE, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    return float(said["rate"]), said["first"]


def installed(name: str, python: str) -> bool:
    """Whether that interpreter has the engine."""
    looked = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({NAMES[name]!r}) is None)"
    return subprocess.run([python, "-c", looked]).returncode == 0


def pair(text: str) -> tuple[str, str]:
    """NAME or NAME=PYTHON."""
    name, _, python = text.partition("=")
    if name not in NAMES:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(NAMES)}")
    return name, python or sys.executable


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each side (count)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--threads", type=int, default=min(2, len(os.sched_getaffinity(0))), help="of every rank (count)"
    )
    parser.add_argument(
        "--peer", type=pair, action="append", metavar="NAME[=PYTHON]", help="default: all, with this interpreter"
    )
    parser.add_argument("--alone", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def of_service(dtype: str, threads: int) -> dict[int, tuple[float, list[int]]]:
    """The service, by clients: tokens per second, and the first answer."""
    found = {}
    with running(ROOT, configuration(dtype, threads)) as service:
        for clients in (8, 1):
            for count in (clients, GROUPS * clients):  # the first warms
                config = LoadConfig(count, clients, prompt_tokens=TOKENS, answer_tokens=TOKENS)
                trial = load(service, config, vocab_size=49_152, model="SmolLM2-135M-Instruct")
            if trial.failures:
                raise RuntimeError(f"the service failed: {trial.failures[:3]}")
            second = next(outcome for outcome in trial.result.outcomes if outcome.number == 1)
            found[clients] = trial.tokens / trial.result.seconds, list(second.token_ids)
    return found


def one_round(options: argparse.Namespace, peers: list[tuple[str, str]], folder: Path) -> dict[tuple[str, int], float]:
    """Everybody once, in turn."""
    rates = {}
    for clients, (rate, answer) in of_service(options.dtype, options.threads).items():
        rates["service", clients] = rate
        command = [sys.executable, __file__, "--alone", str(clients), "--dtype", options.dtype]
        done = subprocess.run([*command, "--threads", str(options.threads)], stdout=subprocess.PIPE, check=True)
        rates["engine", clients], wanted = json.loads(done.stdout)
        answers = {"service": answer}
        for name, python in peers:
            rates[name, clients], answers[name] = of_peer(name, python, folder, clients, options.dtype, options.threads)
        for name, answer in answers.items():
            if answer != wanted:
                same = next(
                    (n for n, (a, b) in enumerate(zip(answer, wanted)) if a != b), min(len(answer), len(wanted))
                )
                print(
                    f"{name}, {clients} client(s): another answer than the engine alone from token {same} on",
                    flush=True,
                )
    return rates


def main() -> None:
    """Measure in turn; a table, one figure per number of clients and other engine."""
    options = options_of()
    if options.alone:
        print(json.dumps(engine_alone(options.alone, options.dtype, options.threads)))
        return
    peers = []
    for name, python in options.peer or [(name, sys.executable) for name in NAMES]:
        if installed(name, python):
            peers.append((name, python))
        else:
            print(f"{name}: not installed for {python}")
    rounds: list[dict[tuple[str, int], float]] = []
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        if peers:
            write_folder("smollm2", Path(folder))
        for _ in range(options.rounds):
            rounds.append(one_round(options, peers, Path(folder)))
            told = (f"{name} {n} client(s) {rate:6.1f} tokens/s" for (name, n), rate in rounds[-1].items())
            print("   ".join(told), flush=True)
    for clients in (8, 1):
        goals = {
            "engine": ("its engine alone", 0.9),
            **{name: (name, 1.3 if clients == 8 else 1.0) for name, _ in peers},
        }
        for name, (words, goal) in goals.items():
            ratios = [one["service", clients] / one[name, clients] for one in rounds]
            middle = [statistics.median(one[side, clients] for one in rounds) for side in ("service", name)]
            figure(
                f"real model, {clients} client(s): service over {words}", round(middle[0], 1), "tokens/s",
                round(middle[1], 1), round(statistics.median(ratios), 3), f">= {goal}", decided(ratios, f">= {goal}"),
                spread=[round(min(ratios), 3), round(max(ratios), 3)],
            )  # fmt: skip


if __name__ == "__main__":
    main()
