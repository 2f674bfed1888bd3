"""What the host costs: a whole service on the synthetic engine, against an earlier commit run in turn with it.

    python bench_service.py [--against COMMIT | FOLDER] [--requests N] [--rounds N] [--idle S] [--seconds S] [--small]

PP4 to two attention-DP ranks of 256, a step of 20 ms of device time, 1,024 + 64 tokens, 400 clients; eight prompts fit into a
step of the context instance, so that both instances' steps would allow 20,000 tokens/s. Processor time of every process of
the service per token, of the generation loops per token, tokens per second, failures, iterations of the loops that took long,
and who had no time left; while idle its share of a core, and the first token of a request that comes alone.

Both trees run with this interpreter and their own sources; git is needed only to unpack a commit. Rounds that would not end
within ``--seconds`` are left out, and that is said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial import ROOT, Service, Trial, load, running

from meta_executor.bench.load import LoadConfig

CLIENTS = 400
STEP_MS = 20
PROMPT_TOKENS, ANSWER_TOKENS = 1024, 64
#: Prompts in a step of the context instance (count).
PROMPTS_PER_STEP = 8
#: Edges of the ranks' histograms of turns (ms).
EDGES_MS = (1, 2, 5, 10, 20, 50)
#: Each client's row makes a token in each step; and so many prompts are read.
DEVICE_TOKENS_PER_S = 1000 / STEP_MS * min(CLIENTS, PROMPTS_PER_STEP * ANSWER_TOKENS)
#: Requests one after the other, for the first token of a request that comes alone (count).
ALONE = 15
VOCABULARY = 32_000


def configuration(tree: Path) -> dict[str, Any]:
    """The service; an earlier engine has no setting that keeps its own hashing out of the figures."""
    synthetic: dict[str, Any] = {
        "layer_count": 8,
        "kv_head_count": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "step_ms": STEP_MS,
    }
    if "kv_check" in (tree / "packages/meta-executor/src/meta_executor/config.py").read_text("utf-8"):
        synthetic["kv_check"] = "off"
    rpc = {"local_fastpath": True}
    return {
        "port": 0,
        "engine": {"kind": "synthetic", "synthetic": synthetic},
        "context_servers": {
            "pipeline_parallel_size": 4,
            "max_batch_size": PROMPTS_PER_STEP,
            "max_num_tokens": PROMPTS_PER_STEP * PROMPT_TOKENS,
            "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 131_072},
            "cache_transceiver_config": {
                "enable_async_terminal_agreement": True,
                "enable_async_readiness_agreement": True,
            },
            "rpc": rpc,
        },
        "generation_servers": {
            "tensor_parallel_size": 2,
            "enable_attention_dp": True,
            "max_batch_size": 256,
            "max_num_tokens": 512,
            "kv_cache_config": {"tokens_per_block": 16, "max_tokens": 300_000},
            "rpc": rpc,
        },
    }


@dataclass(frozen=True)
class Measured:
    """One service, loaded once."""

    trial: Trial
    #: Share of a core while idle; None where not asked.
    idle: float | None
    #: First token of a request that comes alone (s).
    alone_s: float
    #: All of it, from the start of the service to its end, without being idle (s).
    took_s: float


def measure(tree: Path, *, requests: int, idle_s: float) -> Measured:
    """Start, warm, be idle for so long (0: not at all), load, drain. How another tree's service ends is said, and no more: its
    figures are taken before."""
    began_s = time.monotonic()
    idle = trial = None
    alone_s = 0.0
    try:
        with running(tree, configuration(tree)) as service:
            send(service, 32, 32, 16)
            if idle_s:
                time.sleep(3.0)
                before = service.usage()
                time.sleep(idle_s)
                idle = service.usage().since(before).total() / idle_s
            alone_s = send(service, ALONE, 1, 8).first_s()
            trial = send(service, requests, CLIENTS, ANSWER_TOKENS)
    except RuntimeError as error:
        if tree == ROOT or trial is None:
            raise
        print(f"{tree}: {error}", flush=True)
    return Measured(trial, idle, alone_s, time.monotonic() - began_s - (idle_s and idle_s + 3.0))


def send(service: Service, requests: int, clients: int, answer_tokens: int) -> Trial:
    """One load."""
    config = LoadConfig(
        requests=requests, concurrency=clients, prompt_tokens=PROMPT_TOKENS, answer_tokens=answer_tokens
    )
    return load(service, config, vocab_size=VOCABULARY)


def unpacked(commit: str, folder: Path) -> Path:
    """The sources of a commit, or of a folder that holds a tree's ``packages``."""
    if (Path(commit) / "packages").is_dir():
        return Path(commit).resolve()
    archive = subprocess.run(["git", "archive", commit, "packages"], cwd=ROOT, capture_output=True)
    if archive.returncode != 0:
        raise SystemExit(f"--against {commit}: {archive.stderr.decode().strip()}")
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


def tell(name: str, trial: Trial) -> None:
    """A row of the table."""
    per_token = trial.per_token_s
    print(
        f"{name:9} {trial.tokens / trial.result.seconds:7.0f} tokens/s  first p50 {trial.first_s():6.2f} s  processor time "
        f"per token {1e6 * per_token():6.0f} us: front {1e6 * per_token('front'):5.0f}, context {1e6 * per_token('ctx'):5.0f}, "
        f"generation {1e6 * per_token('gen'):5.0f} (loops {1e6 * trial.loop_per_token_s():5.1f}); load generator "
        f"{1e6 * trial.result.cpu_s / max(trial.tokens, 1):4.0f}; {len(trial.failures)} failures {trial.failures[:1]}\n"
        f"          {trial.limit(DEVICE_TOKENS_PER_S)}\n"
        f"          turns of the loops: context "
        f"{trial.turns_of('ctx').get('all', 'not counted')}, generation {trial.turns_of('gen') or 'not counted'}",
        flush=True,
    )


def figure(
    name: str,
    value: float,
    unit: str,
    baseline: float | None,
    ratio: float | None,
    goal: str,
    met: object,
    **more: object,
) -> None:
    """Print one."""
    one = {"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio, "goal": goal, "met": met}
    print(json.dumps(one | more), flush=True)


def decided(ratios: list[float], goal: str) -> bool | str:
    """Whether every round's ratio is within the goal (true), or none (false); else their spread does not decide it."""
    sign, bound = goal.split()
    within = [ratio <= float(bound) if sign == "<=" else ratio >= float(bound) for ratio in ratios]
    return within[0] if len(set(within)) == 1 else "undecided"


def middle(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def longest_turn_ms(trials: list[Trial], name: str) -> float | None:
    """The smallest edge that no iteration of a generation loop exceeded (ms; infinite: the last one was exceeded); None where
    turns are not counted."""
    turns = [trial.turns_of("gen") for trial in trials]
    if not any(turns):
        return None
    return next((edge for edge in EDGES_MS if not any(one.get(f"{name}{edge}ms") for one in turns)), float("inf"))


def tell_own(new: list[Measured]) -> None:
    """Figures of this tree alone."""
    trials = [one.trial for one in new]
    failures = sum(len(trial.failures) for trial in trials)
    figure("failures", failures, "requests", None, None, "0", failures == 0)
    idle = [one.idle for one in new if one.idle is not None]
    if idle:
        figure("idle share of a core", round(middle(idle), 4), "core", None, None, "<= 0.02", middle(idle) <= 0.02)
    loop, plain = middle([trial.loop_per_token_s() for trial in trials]), middle([plain_loop_s() for _ in range(5)])
    # The goal of 4 is that of bench_loop.py, which decodes only; here a loop also receives every prompt's KV.
    figure("generation loop, transfers included, over a plain Python loop", round(1e6 * loop, 2), "us/token",
           round(1e6 * plain, 4), round(loop / plain, 1), "none", None)  # fmt: skip
    goal = STEP_MS / 10
    for name, said in (("", "by the clock"), ("worked_over_", "of its own processor time")):
        longest = longest_turn_ms(trials, name)
        if longest is not None:
            figure(f"longest turn of a generation loop, {said}", longest, "ms, at most", None, None,
                   f"<= {goal:g}", longest <= goal)  # fmt: skip


def tell_against(new: list[Measured], old: list[Measured]) -> None:
    """Figures of both trees."""

    def compare(name: str, unit: str, of: Callable[[Measured], float], scale: float, goal: str) -> None:
        values = [[of(one) for one in side] for side in (new, old)]
        value, before = (middle(side) for side in values)
        ratios = [after / earlier for after, earlier in zip(*values)]
        figure(name, round(scale * value, 2), unit, round(scale * before, 2), round(middle(ratios), 4), goal,
               decided(ratios, goal), spread=[round(min(ratios), 4), round(max(ratios), 4)])  # fmt: skip

    compare("service processor time per token", "us", lambda one: one.trial.per_token_s(), 1e6, "<= 0.125")
    compare("generation loop processor time per token", "us", lambda one: one.trial.loop_per_token_s(), 1e6, "<= 0.05")
    compare("tokens per second", "1/s", lambda one: one.trial.tokens / one.trial.result.seconds, 1, ">= 5")
    compare("first token of a request that comes alone", "ms", lambda one: one.alone_s, 1e3, "<= 1")


def main() -> None:
    """Measure in turn, print, one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--against",
        default="7c5a122",
        metavar="COMMIT",
        help="run in turn with it, or with a folder's packages; 'none': alone",
    )
    parser.add_argument("--requests", type=int, default=1200, help="of each load (count)")
    parser.add_argument("--rounds", type=int, default=3, help="loads of each tree (count)")
    parser.add_argument(
        "--idle", type=float, default=60.0, metavar="S", help="idle before the first load; 0: not at all"
    )
    parser.add_argument("--seconds", type=float, default=520.0, help="begin no round that would end later")
    parser.add_argument("--small", action="store_true", help="one short round, to see that it runs; no figures to keep")
    options = parser.parse_args()
    if options.small:
        options.requests, options.rounds, options.idle = 100, 1, 2.0
    began_s = time.monotonic()
    new: list[Measured] = []
    old: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="base-") as scratch:
        tree = None if options.against == "none" else unpacked(options.against, Path(scratch))
        for turn in range(options.rounds):
            idle_s = 0.0 if turn else options.idle
            if turn and time.monotonic() - began_s + new[-1].took_s + (old[-1].took_s if old else 0) > options.seconds:
                print(f"no time for more than {turn} of {options.rounds} rounds in {options.seconds:g} s", flush=True)
                break
            new.append(measure(ROOT, requests=options.requests, idle_s=idle_s))
            tell("this tree", new[-1].trial)
            if tree is not None:
                old.append(measure(tree, requests=options.requests, idle_s=0.0))
                tell(options.against, old[-1].trial)
    tell_own(new)
    if old:
        tell_against(new, old)


if __name__ == "__main__":
    main()
