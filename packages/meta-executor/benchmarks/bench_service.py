"""What the host costs: a whole service on the synthetic engine, against an earlier commit run in turn with it.

PP4 to two attention-DP ranks of 256, a step of 20 ms of device time, 1,024 + 64 tokens, 400 clients. Processor time of every
process of the service per token, of the generation loops per token, tokens per second, failures; idle, its share of a core.
``BASELINE`` names the commit (``none``: only this tree); ``REQUESTS`` and ``ROUNDS`` make it shorter.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from trial import ROOT, Trial, load, running

from meta_executor.bench.load import LoadConfig

BASELINE = os.environ.get("BASELINE", "7c5a122")
REQUESTS = int(os.environ.get("REQUESTS", "1200"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
CLIENTS = 400
IDLE_S = 60.0
VOCABULARY = 32_000


def configuration(*, new: bool) -> dict[str, Any]:
    """The service; the earlier engine has no setting that keeps its own hashing out of the figures."""
    synthetic: dict[str, Any] = {
        "layer_count": 8,
        "kv_head_count": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "step_ms": 20,
    }
    if new:
        synthetic["kv_check"] = "off"
    return {
        "port": 0,
        "engine": {"kind": "synthetic", "synthetic": synthetic},
        "context_servers": {
            "pipeline_parallel_size": 4,
            "max_batch_size": 8,
            "max_num_tokens": 2048,
            "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 65_536},
            "cache_transceiver_config": {
                "enable_async_terminal_agreement": True,
                "enable_async_readiness_agreement": True,
            },
        },
        "generation_servers": {
            "tensor_parallel_size": 2,
            "enable_attention_dp": True,
            "max_batch_size": 256,
            "max_num_tokens": 512,
            "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 300_000},
        },
    }


def measure(tree: Path, *, new: bool, idle: bool = False) -> tuple[Trial, float]:
    """One service, warmed, loaded once; and its share of a core while idle before that (0 where not asked)."""
    with running(tree, configuration(new=new)) as service:
        load(
            service,
            LoadConfig(requests=32, concurrency=32, prompt_tokens=1024, answer_tokens=16),
            vocab_size=VOCABULARY,
        )
        share = 0.0
        if idle:
            time.sleep(3.0)
            before = service.usage()
            time.sleep(IDLE_S)
            share = service.usage().since(before).total() / IDLE_S
        config = LoadConfig(requests=REQUESTS, concurrency=CLIENTS, prompt_tokens=1024, answer_tokens=64)
        return load(service, config, vocab_size=VOCABULARY), share


def earlier(folder: Path) -> Path | None:
    """The sources of the baseline commit, unpacked; None where git does not have it."""
    if BASELINE == "none":
        return None
    archive = subprocess.run(["git", "archive", BASELINE, "packages"], cwd=ROOT, capture_output=True)
    if archive.returncode != 0:
        return None
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def plain_loop_s() -> float:
    """Seconds per token of a loop that appends 200 tokens to 200 lists and tests their ends."""
    lists: list[list[int]] = [[] for _ in range(200)]
    began_s = time.thread_time()
    for step in range(300):
        for one in lists:
            one.append(step)
            if len(one) >= 64 or one[-1] == -1:
                one.clear()
    return (time.thread_time() - began_s) / (300 * 200)


def figure(
    name: str, value: float, unit: str, baseline: float | None, ratio: float | None, goal: str, met: object
) -> str:
    """One line."""
    return json.dumps(
        {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio, "goal": goal, "met": met}
    )


def tell(name: str, trials: list[Trial]) -> None:
    """A table's rows of one tree."""
    for trial in trials:
        result = trial.result
        firsts = sorted(outcome.first_s for outcome in result.outcomes)
        print(
            f"{name:9} {trial.tokens / result.seconds:9.0f} tokens/s  first p50 {firsts[len(firsts) // 2]:6.2f} s  per token "
            f"{1e6 * trial.per_token_s():7.0f} us: front {1e6 * trial.per_token_s('front'):6.0f}, context "
            f"{1e6 * trial.per_token_s('ctx'):6.0f}, generation {1e6 * trial.per_token_s('gen'):6.0f} (loops "
            f"{1e6 * trial.loop_per_token_s():6.1f}), load generator {100 * result.share:3.0f} % of a core, "
            f"{len(trial.failures)} failures {trial.failures[:1]}",
            flush=True,
        )


def main() -> None:
    """Measure in turn, print, one line per figure."""
    new: list[Trial] = []
    old: list[Trial] = []
    idle = 0.0
    with tempfile.TemporaryDirectory(prefix="base-") as scratch:
        tree = earlier(Path(scratch))
        for turn in range(ROUNDS):
            trial, share = measure(ROOT, new=True, idle=turn == 0)
            idle = idle or share
            new.append(trial)
            tell("this tree", new[-1:])
            if tree is not None:
                old.append(measure(tree, new=False)[0])
                tell(BASELINE, old[-1:])
    failures = sum(len(trial.failures) for trial in new)
    middle = statistics.median
    per_token = middle(trial.per_token_s() for trial in new)
    loop = middle(trial.loop_per_token_s() for trial in new)
    rate = middle(trial.tokens / trial.result.seconds for trial in new)
    print(figure("failures", failures, "requests", None, None, "0", failures == 0))
    print(figure("idle share of a core", round(idle, 4), "core", None, None, "<= 0.02", idle <= 0.02))
    plain = middle(plain_loop_s() for _ in range(5))
    print(
        figure(
            "loop over a plain Python loop",
            1e6 * loop,
            "us/token",
            1e6 * plain,
            loop / plain,
            "<= 4",
            loop / plain <= 4,
        )
    )
    if not old:
        return
    for name, value, unit, before, goal, met in (
        ("service processor time per token", 1e6 * per_token, "us", 1e6 * middle(t.per_token_s() for t in old), "<= 0.125",
         lambda ratio: ratio <= 0.125),
        ("generation loop processor time per token", 1e6 * loop, "us", 1e6 * middle(t.loop_per_token_s() for t in old),
         "<= 0.05", lambda ratio: ratio <= 0.05),
        ("tokens per second", rate, "1/s", middle(t.tokens / t.result.seconds for t in old), ">= 5", lambda ratio: ratio >= 5),
    ):  # fmt: skip
        ratio = value / before
        print(figure(name, round(value, 2), unit, round(before, 2), round(ratio, 4), goal, met(ratio)))


if __name__ == "__main__":
    main()
