"""Eight bodies of 16 MB at once beside a stream: the longest time between two of its pieces, with them and without.

A whole service on the synthetic engine, 20 ms a step. Windows of ``WINDOW_S`` in turn, without and with: eight bodies, each of
another kind (millions of ids, of members, of brackets), sent by a process of its own at the window's beginning; each must be
refused. A round's ratio is that of the two longest gaps; where there are few cores it contains the sender's own processor time.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from urllib.parse import urlsplit

from bench_hostile import Streams, whole

from measure import ratio, run_benchmark
from meta_executor.config import service_config
from meta_executor.supervise.launch import Launcher

ROUNDS, WARM_UP = 11, 1
WINDOW_S = float(os.environ.get("WINDOW_S", "5"))
GOAL = "<= 3"
_BYTES = 16_000_000


def filled(begin: bytes, part: bytes, end: bytes) -> bytes:
    """A body of that many bytes."""
    return begin + part * ((_BYTES - len(begin) - len(end)) // len(part)) + end


def bodies() -> dict[str, bytes]:
    """Name to body."""
    start = b'{"model": "synthetic", "prompt": "a", '
    half = (_BYTES - 60) // 2
    return {
        "a prompt of ids": filled(b'{"model": "synthetic", "prompt": [5', b",5", b"]}"),
        "a prompt of text": filled(b'{"model": "synthetic", "prompt": "', b"word ", b'"}'),
        "prompts": filled(b'{"model": "synthetic", "prompt": ["a"', b',"a"', b"]}"),
        "metadata of numbers": filled(start + b'"metadata": [1', b",1", b"]}"),
        "metadata of members": filled(start + b'"metadata": {"a": 1', b', "a": 1', b"}}"),
        "nested arrays": start + b'"metadata": ' + b"[" * half + b"]" * half + b"}",
        "stop tokens": filled(start + b'"stop_token_ids": [7', b",7", b"]}"),
        "biases": filled(start + b'"logit_bias": {"5": 1', b', "5": 1', b"}}"),
    }


async def send_all(url: str) -> dict[str, str]:
    """All of them at once; the status of each."""
    at = urlsplit(url)

    async def one(body: bytes) -> str:
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        try:
            writer.write(whole(body))
            return (await reader.read(64))[9:12].decode() or "closed"
        except ConnectionError as error:
            return type(error).__name__
        finally:
            writer.close()

    named = bodies()
    return dict(zip(named, await asyncio.gather(*map(one, named.values()))))


def send() -> None:
    """The sender's process: a line in, all bodies out, their statuses as a line."""
    for line in sys.stdin:
        print(json.dumps(asyncio.run(send_all(line.strip()))), flush=True)


async def windows(url: str) -> tuple[list[float], list[float], Counter[str]]:
    """Longest gaps (s) with and without, by round, and what the bodies got."""
    streams = Streams(url)
    await streams.start(1)
    sender = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--send", stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 20
    )
    if sender.stdin is None or sender.stdout is None:
        raise RuntimeError("the sender has no pipes")
    told: Counter[str] = Counter()

    async def attacked() -> None:
        sender.stdin.write(url.encode() + b"\n")
        statuses, _ = await asyncio.gather(sender.stdout.readline(), asyncio.sleep(WINDOW_S))
        told.update(f"{name}: {status}" for name, status in json.loads(statuses).items())

    beside: list[float] = []
    alone: list[float] = []
    for number in range(-WARM_UP, ROUNDS):
        for with_bodies in (True, False) if number % 2 else (False, True):
            during = attacked() if with_bodies else asyncio.sleep(WINDOW_S)
            gap_s = await streams.longest_gap_s(asyncio.ensure_future(during))
            if number >= 0:
                (beside if with_bodies else alone).append(gap_s)
    streams.stop()
    sender.stdin.close()
    await sender.wait()
    return beside, alone, told


def stream_beside_bodies() -> list[dict[str, object]]:
    """Start a service, measure."""
    side = {"kv_cache_config": {"max_tokens": 16_384}, "max_seq_len": 8192}
    service = service_config(
        {
            "port": 0,
            "served_model_name": "synthetic",
            "engine": {"kind": "synthetic", "synthetic": {"vocab_size": 512, "step_ms": 20, "kv_check": "off"}},
            "context_servers": {"pipeline_parallel_size": 1, **side},
            "generation_servers": {"tensor_parallel_size": 1, "enable_attention_dp": True, **side},
        }
    )
    launcher = Launcher(service, say=lambda line: print(line, file=sys.stderr))
    with launcher.started():
        beside, alone, told = asyncio.run(windows(launcher.front_url))
    for name, count in sorted(told.items()):
        print(f"{name:40} {count:4}")
    taken = [name for name in told if not name.rpartition(": ")[2].startswith("4")]
    if taken:
        raise SystemExit(f"not refused: {', '.join(taken)}")
    return [
        ratio(
            "stream_gap_beside_eight_bodies", beside, alone, unit="ms", scale=1e3, goal=GOAL,
            against="the longest gap of the same stream without them",
        )
    ]  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--send"]:
        send()
    else:
        run_benchmark(stream_beside_bodies)
