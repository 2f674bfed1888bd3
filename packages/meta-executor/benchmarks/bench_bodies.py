"""Eight bodies of 16 MB at once beside a stream: the longest time between two of its pieces, with them and without.

A whole service on the synthetic engine, 20 ms a step. Windows of ``WINDOW_S`` in turn: with the bodies, eight of as many kinds
(millions of ids, of members, of brackets), sent by a process of its own at the window's beginning, each to be refused; without
them; and with the same bytes sent to a process that throws them away, because where there are few cores sending them takes
the stream's time, whoever reads them. A round's ratio is that of two longest gaps.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from urllib.parse import urlsplit

from bench_hostile import Streams, launcher_of, whole

from measure import ratio, run_benchmark

ROUNDS, WARM_UP = 25, 1
WINDOW_S = float(os.environ.get("WINDOW_S", "2"))
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


async def sink() -> None:
    """A process that answers at an address, which it prints, and throws away what it reads."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = _BYTES
        while left > 0 and (data := await reader.read(1 << 18)):
            left -= len(data)
        writer.write(b"HTTP/1.1 400 \r\n\r\n")
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0, limit=1 << 18)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


class Child:
    """A process of this file that takes lines, or says one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a process without pipes")
        self._writer, self._reader = process.stdin, process.stdout

    @staticmethod
    async def start(what: str) -> Child:
        """Start it."""
        return Child(
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, what, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        )

    def tell(self, line: str) -> None:
        """A line to it."""
        self._writer.write(line.encode() + b"\n")

    async def hear(self) -> str:
        """A line of it."""
        return (await self._reader.readline()).decode().strip()

    async def end(self) -> None:
        """Kill it."""
        self._process.kill()
        await self._process.wait()


async def windows(url: str) -> tuple[dict[str, list[float]], Counter[str]]:
    """Longest gaps (s) of each kind of window, by round, and what the bodies got."""
    streams = Streams(url)
    await streams.start(1)
    sender, thrower = await Child.start("--send"), await Child.start("--sink")
    elsewhere = await thrower.hear()
    told: Counter[str] = Counter()

    async def sent(to: str) -> None:
        sender.tell(to)
        statuses, _ = await asyncio.gather(sender.hear(), asyncio.sleep(WINDOW_S))
        if to == url:
            told.update(f"{name}: {status}" for name, status in json.loads(statuses).items())

    kinds = {
        "beside": lambda: sent(url),
        "alone": lambda: asyncio.sleep(WINDOW_S),
        "elsewhere": lambda: sent(elsewhere),
    }
    gaps: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(-WARM_UP, ROUNDS):
        for kind in reversed(kinds) if number % 2 else kinds:
            gap_s = await streams.longest_gap_s(asyncio.ensure_future(kinds[kind]()))
            if number >= 0:
                gaps[kind].append(gap_s)
    streams.stop()
    await sender.end()
    await thrower.end()
    return gaps, told


def stream_beside_bodies() -> list[dict[str, object]]:
    """Start a service, measure."""
    launcher = launcher_of({"kv_cache_config": {"max_tokens": 16_384}, "max_seq_len": 8192}, front={})
    with launcher.started():
        gaps, told = asyncio.run(windows(launcher.front_url))
    for name, count in sorted(told.items()):
        print(f"{name:40} {count:4}")
    taken = [name for name in told if not name.rpartition(": ")[2].startswith("4")]
    if taken:
        raise SystemExit(f"not refused: {', '.join(taken)}")
    return [
        ratio(
            "stream_gap_beside_eight_bodies", gaps["beside"], gaps["alone"], unit="ms", scale=1e3, goal=GOAL,
            against="the longest gap of the same stream without them",
        ),
        ratio(
            "stream_gap_front_or_elsewhere", gaps["beside"], gaps["elsewhere"], unit="ms", scale=1e3, goal=None,
            against="that beside the same bytes sent to a process that throws them away",
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--send"]:
        send()
    elif sys.argv[1:2] == ["--sink"]:
        asyncio.run(sink())
    else:
        run_benchmark(stream_beside_bodies)
