"""The front as a process of its own: ready message, service, drain, exit code."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from meta_executor import wire
from meta_executor.config import EngineConfig, InstanceSpec, RunSpec, ServiceConfig, SyntheticConfig
from meta_executor.listener.serving import listen
from meta_executor.supervise.report import Listener, Message

pytestmark = pytest.mark.asyncio


PROGRAM = ("-m", "meta_executor.front")
#: The same, and how many objects its garbage collector does not look at, when it leaves.
COUNTING = (
    "-c",
    "import atexit, gc, sys\n"
    "atexit.register(lambda: print(gc.get_freeze_count()))\n"
    "from meta_executor.front.__main__ import main\n"
    "sys.exit(main(sys.argv[1:]))",
)


async def start(
    cluster: Any, tmp_path: Path, program: tuple[str, ...] = PROGRAM
) -> tuple[asyncio.subprocess.Process, Listener]:
    service = ServiceConfig(
        port=0,
        engine=EngineConfig(kind="synthetic", synthetic=SyntheticConfig(vocab_size=512)),
        served_model_name="tiny",
    )
    roles = {"ctx-0": "context", "gen-0": "generation"}
    run = RunSpec(
        run_id="test",
        run_dir=str(tmp_path),
        launcher_pid=os.getpid(),
        service=service,
        instances=tuple(
            InstanceSpec(owner_id=owner, role=role, index=0, config=service.instance(role), port=0)  # type: ignore[arg-type]
            for owner, role in roles.items()
        ),
    )
    run.save()
    (tmp_path / "key").write_text("ab" * 32)
    listener = Listener(tmp_path)
    servers = [f"--server={i.owner_id}={i.url}" for i in cluster.instances]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *program,
        "--run-dir",
        str(tmp_path),
        *servers,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    return process, listener


async def message(listener: Listener, event: str) -> Message:
    async with asyncio.timeout(30):
        while True:
            for found in listener.receive():
                if found.event == event:
                    return found
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["post", "sigterm"])
async def test_serves_drains_and_leaves(make_cluster: Any, tmp_path: Path, how: str) -> None:
    """Ready only when both instances are; a running stream ends whole after the drain began; exit code 0, nothing on stderr."""
    async with make_cluster() as cluster:
        cluster.generation.ready = False
        process, listener = await start(cluster, tmp_path)
        await until_seen(cluster)
        assert not [found for found in listener.receive() if found.event == "ready"]
        cluster.generation.ready = True
        url = (await message(listener, "ready")).fields["url"]
        cluster.generation.line_gate = asyncio.Event()
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{url}/health")).status_code == 200
            cluster.generation.unwell = "rank 1 was not heard for 7 s"
            async with asyncio.timeout(10):
                while (health := await client.get(f"{url}/health")).status_code != 503:
                    await asyncio.sleep(0.02)
            assert health.json()["why"] == {"gen-0": "rank 1 was not heard for 7 s"}
            assert health.json()["ready"] == {"context": True, "generation": False}
            cluster.generation.unwell = ""
            async with asyncio.timeout(10):
                while (await client.get(f"{url}/health")).status_code != 200:
                    await asyncio.sleep(0.02)
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "stream": True}
            async with client.stream("POST", f"{url}/v1/completions", json=body) as stream:
                pieces = stream.aiter_text()
                text = await anext(pieces)
                if how == "post":
                    answer = await client.post(f"{url}/internal/drain", headers={wire.KEY_HEADER: "ab" * 32})
                    assert answer.json()["active"] == 1
                else:
                    process.send_signal(signal.SIGTERM)
                    async with asyncio.timeout(10):
                        while (await client.get(f"{url}/health")).status_code != 503:
                            await asyncio.sleep(0.02)
                assert (await client.post(f"{url}/v1/completions", json=body)).status_code == 503
                cluster.generation.line_gate.set()
                async for piece in pieces:
                    text += piece
                assert text.endswith("data: [DONE]\n\n")
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert (process.returncode, errors) == (0, b"")
        listener.close()


async def until_seen(cluster: Any) -> None:
    async with asyncio.timeout(30):
        while cluster.generation.info_calls < 3:
            await asyncio.sleep(0.02)


async def test_a_body_with_two_lengths_ends_its_connection(make_cluster: Any, tmp_path: Path) -> None:
    """Content-Length and Transfer-Encoding in one request, in either order: 400, and what is behind it is never read."""
    async with make_cluster() as cluster:
        process, listener = await start(cluster, tmp_path)
        url = httpx.URL((await message(listener, "ready")).fields["url"])
        lengths = (b"content-length: 5", b"transfer-encoding: chunked")
        for first, second in (lengths, lengths[::-1]):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n" + first + b"\r\n" + second + b"\r\n\r\n"
            writer.write(head + b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 20)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.count(b"HTTP/1.1") == 1
            writer.close()
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 20)
        listener.close()


async def test_second_signal_cuts(make_cluster: Any, tmp_path: Path) -> None:
    """A second signal does not wait for a request that never ends; the exit code says that something was cut."""
    async with make_cluster() as cluster:
        process, listener = await start(cluster, tmp_path)
        url = (await message(listener, "ready")).fields["url"]
        cluster.context.gate = asyncio.Event()
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 40}
            task = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            await cluster.context.started.wait()
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while (await client.get(f"{url}/health")).status_code != 503:
                    await asyncio.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, errors = await asyncio.wait_for(process.communicate(), 20)
            assert process.returncode == 1
            assert b"cut 1 running requests" in errors
            assert b"Traceback" not in errors
            assert (await task).status_code == 503
        cluster.context.gate.set()
        listener.close()


async def test_answers_do_not_wait_for_acknowledgements() -> None:
    """asyncio switches Nagle's algorithm off only for sockets that name their protocol; accepted ones inherit it."""
    listener = listen("127.0.0.1", 0)
    assert listener.proto == socket.IPPROTO_TCP
    assert not listener.getblocking()
    listener.close()


async def test_what_its_start_has_made_stops_no_stream(make_cluster: Any, tmp_path: Path) -> None:
    """The garbage collector no longer walks modules and tables, which took it 30 ms and more, in which no stream went on."""
    async with make_cluster() as cluster:
        process, listener = await start(cluster, tmp_path, COUNTING)
        await message(listener, "ready")
        process.send_signal(signal.SIGTERM)
        told, _ = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 0 and int(told) > 20_000
        listener.close()


async def test_a_drain_can_be_watched_and_does_not_wait_for_who_watches(make_cluster: Any, tmp_path: Path) -> None:
    """The watcher sees that it drains, and its stream ends whole when the last request has; exit code 0, nothing on stderr."""
    async with make_cluster() as cluster:
        process, listener = await start(cluster, tmp_path)
        url = (await message(listener, "ready")).fields["url"]
        cluster.generation.gate = asyncio.Event()
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            body = {"model": "tiny", "prompt": "abc", "max_tokens": 40}
            task = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            await cluster.generation.started.wait()
            async with client.stream("GET", f"{url}/live/events") as watch:
                lines = watch.aiter_lines()
                async for line in lines:
                    if line.startswith("data: "):
                        look = json.loads(line[6:])
                        if not look["draining"]:
                            assert look["running"] == 1
                            process.send_signal(signal.SIGTERM)
                        else:
                            cluster.generation.gate.set()
                assert look["draining"]
            assert (await task).status_code == 200
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert (process.returncode, errors) == (0, b"")
        listener.close()
