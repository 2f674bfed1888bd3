"""The packages in engines that are not ours: every example of integration/engines runs, and what each adds conforms."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tokenize
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvicorn

import api_server
import balance
import engine_server
import worker_loop
from adp_router.testing import check_balancer
from endpoint_lifecycle import EndpointOwner, refusal_of
from endpoint_lifecycle.testing import check_instance
from meta_executor.mpi_launcher import find_launcher
from rpc_batch_submit import BatchSubmitConfig
from rpc_batch_submit.testing import check_sender
from rpc_local_registry import RpcPeerDead, RpcServer, new_key

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "integration" / "engines"
PAGE = ROOT / "docs" / "engines.md"


# -- an asyncio API server and a worker's loop -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(server):
    """The application behind uvicorn, and a client of it, once a worker is there."""
    listener = uvicorn.Server(uvicorn.Config(server.app, host="127.0.0.1", port=0, log_level="warning"))
    task = asyncio.create_task(listener.serve())
    while not listener.started:
        await asyncio.sleep(0.01)
    port = listener.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
        try:
            await worker_is_there(http)
            yield http
        finally:
            listener.should_exit = True
            await task


async def worker_is_there(http):
    while (await http.get("/counts")).status_code != 200:
        await asyncio.sleep(0.02)


async def generate(http, prompt, tokens_max):
    reply = await http.post("/generate", json={"prompt": prompt, "tokens_max": tokens_max})
    return reply.status_code, [json.loads(line) for line in reply.text.splitlines()]


@pytest.mark.parametrize("in_process", [False, True])
def test_an_api_server_and_a_workers_loop(in_process, monkeypatch):
    """Answers, batches (one call for many requests, where a call costs something), a refusal, and a client that goes away."""
    monkeypatch.setattr(api_server, "SUBMIT", BatchSubmitConfig(batch_max=8, delay_ms=200))

    async def main():
        async with serving(api_server.Server(in_process=in_process, step_ms=1)) as http:
            prompts = [[i, i + 1] for i in range(24)]
            for prompt, (status, lines) in zip(
                prompts, await asyncio.gather(*(generate(http, prompt, 6) for prompt in prompts)), strict=True
            ):
                assert status == 200
                assert [line["token"] for line in lines] == worker_loop.answer(prompt, 6)
            counts = (await http.get("/counts")).json()
            assert counts["running"] == counts["owed"] == 0
            assert counts["batches"] == 24 if in_process else counts["batches"] < 24
            status, lines = await generate(http, [], 6)
            assert status == 400
            assert "a prompt must have tokens" in lines[0]["error"]
            async with http.stream("POST", "/generate", json={"prompt": [1], "tokens_max": 4096}) as reply:
                await anext(reply.aiter_lines())
            while (counts := (await http.get("/counts")).json())["running"] or counts["owed"]:
                await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("fast_path", [False, True])
def test_the_workers_side_of_a_batch_conforms(fast_path):
    """Order, refusals one by one, and a worker that is lost; over the socket and directly."""
    worker, key = worker_loop.Worker(worker_loop.Engine(0.0)), new_key()
    good = [worker_loop.Request(number, [number], 3) for number in range(1, 7)]
    with RpcServer(worker, "ipc://", key) as server:
        client = api_server.WorkerClient(server.address, key, fast_path=fast_path)
        asyncio.run(
            check_sender(
                lambda batch: client.submit_batch(batch).remote_async(timeout_s=5),
                good,
                worker_loop.Request(99, [], 3),
                arrived=lambda: list(worker._notes),
                lose=server.shutdown,
            )
        )
        client.close()


def test_a_worker_that_dies_costs_what_was_open_and_another_follows(monkeypatch):
    """What was open ends with the reason, on the stream; the next requests are served by the next worker."""
    pids = []
    start = asyncio.create_subprocess_exec

    async def remembered(*program, **options):
        process = await start(*program, **options)
        pids.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", remembered)

    async def main():
        async with serving(api_server.Server(in_process=False, step_ms=1)) as http:
            async with http.stream("POST", "/generate", json={"prompt": [1], "tokens_max": 4096}) as reply:
                lines = reply.aiter_lines()
                assert "token" in json.loads(await anext(lines))
                os.kill(pids[0], signal.SIGKILL)
                assert "RpcPeerDead" in [json.loads(line) async for line in lines][-1]["error"]
            await worker_is_there(http)
            status, answered = await generate(http, [7], 3)
            assert (status, [line["token"] for line in answered]) == (200, worker_loop.answer([7], 3))
        assert len(pids) == 2

    asyncio.run(asyncio.wait_for(main(), 60))


def generate_with(tokens, *bodies):
    """Status and lines for each body, of a server whose session answers by ``tokens``."""
    server = api_server.Server(in_process=True, step_ms=1)
    server.session = SimpleNamespace(tokens=tokens)

    async def main():
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://one", trust_env=False) as http:
            replies = [await http.post("/generate", content=body) for body in bodies]
        return [(reply.status_code, [json.loads(line) for line in reply.text.splitlines()]) for reply in replies]

    return asyncio.run(main())


def test_a_body_that_is_no_request_is_refused_and_names_no_id():
    """By what is wrong with it; an id that a client names would be another client's."""

    async def tokens(request):
        yield request.request_id

    bad = [b"{", b"[]", b'{"prompt": 1, "tokens_max": 2}', b'{"prompt": [1]}']
    found = generate_with(tokens, *bad, b'{"prompt": [1], "tokens_max": 2, "request_id": 77}')
    assert [status for status, _ in found] == [400] * len(bad) + [200]
    assert all(lines[0]["error"] for _, lines in found[:-1])
    assert found[-1][1][0]["token"] < 77


@pytest.mark.parametrize("lost", [RpcPeerDead("it is gone"), ConnectionError("the worker has ended")])
def test_a_stream_whose_worker_ends_says_so(lost):
    """Whichever way it ended: the answer so far, then the reason, and no broken connection."""

    async def tokens(_):
        yield 5
        raise lost

    ((status, lines),) = generate_with(tokens, b'{"prompt": [1], "tokens_max": 2}')
    assert (status, lines[0]) == (200, {"token": 5})
    assert lines[1:] == [{"error": f"{type(lost).__name__}: {lost}"}]


# -- a balancer over data-parallel engines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", balance.POLICIES)
def test_the_balancer_conforms(policy):
    """What it says of the engines is what it placed there and has not ended."""
    check_balancer(balance.Balancer([4, 2, 4], policy), count=80)


def test_a_request_waits_for_a_slot_and_a_client_that_goes_away_gives_up_its_place():
    """In order; whoever leaves while waiting is passed over, and a request of no use is refused by its field."""

    async def main():
        balancer = balance.Balancer([1], "balanced")
        served = []

        async def one(request_id, ended):
            async with balancer.engine_for(request_id, 10):
                served.append(request_id)
                await ended.wait()

        ends = [asyncio.Event() for _ in range(4)]
        tasks = []
        for number, ended in enumerate(ends):
            tasks.append(asyncio.create_task(one(number, ended)))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert served == [0]
        tasks[1].cancel()
        await asyncio.wait(tasks[1:2])
        ends[0].set()
        await asyncio.wait(tasks[:1])
        await asyncio.sleep(0)
        assert served == [0, 2]
        for ended in ends:
            ended.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert served == [0, 2, 3]
        with pytest.raises(ValueError, match="token_count"):
            async with balancer.engine_for(9, -1):
                raise AssertionError("placed")
        assert [(s.request_count, s.token_count) for s in balancer.states()] == [(0, 0)]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_slot_is_not_given_to_who_goes_away_in_the_same_turn():
    """Who waits behind hears of it: nothing else will end that would offer the slot again."""

    async def main():
        balancer = balance.Balancer([1], "balanced")
        served, stay = [], asyncio.Event()

        async def one(request_id):
            async with balancer.engine_for(request_id, 10):
                served.append(request_id)
                await stay.wait()

        tasks = [asyncio.create_task(one(number)) for number in range(3)]
        while not served:
            await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[1].cancel()
        while len(served) < 2:
            await asyncio.sleep(0)
        assert served == [0, 2]
        stay.set()
        await asyncio.wait(tasks)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_id_that_is_taken_is_refused_and_stands_in_nobodys_way():
    """One that is served and one that waits; the others are placed as before."""

    async def main():
        balancer = balance.Balancer([1], "balanced")
        async with balancer.engine_for(1, 10):
            second = balancer.engine_for(2, 10)
            waits = asyncio.create_task(second.__aenter__())
            await asyncio.sleep(0)
            for taken in (1, 2):
                with pytest.raises(ValueError, match=f"request_id: {taken} "):
                    async with balancer.engine_for(taken, 10):
                        raise AssertionError("placed")
        assert await waits == 0
        assert [state.request_count for state in balancer.states()] == [1]
        await second.__aexit__(None, None, None)
        assert [state.request_count for state in balancer.states()] == [0]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_balanced_fleet_is_more_even_than_a_round_robin():
    """The same trace in virtual time: figures, not times, so they are the same everywhere."""
    found = balance.compare(engines=4, requests=150, load=0.8, slots=32, seeds=range(2))
    for mine, other in zip(*found["fullest over mean load"], strict=True):
        assert mine < other
    for mine, other in zip(*found["first token, 99 % (s)"], strict=True):
        assert mine < other


# -- servers behind a lease store ----------------------------------------------------------------------------------------------


def test_the_server_of_one_engine_conforms():
    """Record, generation, refusals, drain; and an engine's own failure is not taken for a refusal."""

    async def main():
        owner = EndpointOwner("one", "one-1", engine_server.ROLE)
        owner.finalize().publish(["tcp://127.0.0.1:1"])

        async def answer(prompt, tokens_max):
            if not prompt:
                raise RuntimeError("the engine has failed")
            return worker_loop.answer(prompt, tokens_max)

        transport = httpx.ASGITransport(engine_server.instance(owner, answer), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://one", trust_env=False) as http:

            async def info():
                return (await http.get("/server_info")).json()

            async def work(generation):
                headers = {engine_server.GENERATION: generation}
                reply = await http.post("/generate", json={"prompt": [1], "tokens_max": 2}, headers=headers)
                return reply.status_code, reply.json()

            async def drain():
                owner.start_draining()

            headers = {engine_server.GENERATION: owner.generation}
            failed = await http.post("/generate", json={"prompt": [], "tokens_max": 2}, headers=headers)
            assert failed.status_code == 500 and refusal_of(failed.status_code, failed.text) is None
            await check_instance(info, work, drain)
        assert owner.in_flight == 0

    asyncio.run(main())


def restarts(*arguments):
    done = subprocess.run(
        [sys.executable, str(ENGINES / "restarts.py"), *arguments], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # The killed server had at most one request of each client; no other may be unknown, and none is lost.
    assert found["unknown at the kill"] <= found["clients"]
    assert found["answered"] > 0


@pytest.mark.slow
@pytest.mark.service
def test_servers_restart_under_load_behind_a_folder():
    """Politely: nothing is lost. Killed: what was under way there, and nothing else."""
    restarts()


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.etcd
@pytest.mark.skipif(
    shutil.which("etcd") is None, reason="MISSING COVERAGE: no etcd binary (Debian: apt-get install etcd-server)"
)
def test_servers_restart_under_load_behind_an_etcd():
    """The same on the store that several hosts would share."""
    restarts("--etcd")


# -- a pipeline of MPI ranks -------------------------------------------------------------------------------------------------


def pipeline(*arguments):
    return subprocess.run(
        find_launcher().command(4, [sys.executable, str(ENGINES / "pipeline.py"), *arguments]),
        capture_output=True, text=True, timeout=110, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.service
def test_a_pipeline_answers_as_one_process_does():
    """Token for token; the request that the last rank cannot hold is refused everywhere; the drain is proven."""
    done = pipeline()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6: 'CAPACITY'" in done.stdout
    assert done.stdout.count("'COMPLETED'") == 6


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_breaks_off_ends_the_pipeline_with_the_reason(rank):
    """Every other rank says which one it was and why, and none waits for its votes."""
    done = pipeline("--break-rank", str(rank))
    assert done.returncode != 0
    assert f"rank {rank}: this rank was told to break off" in done.stdout
    for other in {0, 1, 2, 3} - {rank}:
        said = f"rank {other}: rank {rank} has stopped the pipeline: .*this rank was told to break off"
        assert re.search(said, done.stdout), done.stdout


# -- the page ------------------------------------------------------------------------------------------------------------------


def code_lines(path, section=""):
    """Lines that hold code: no comment, no docstring, no blank one. Of a section: from its rule to the next."""
    text = path.read_text("utf-8").splitlines()
    rules = [number for number, line in enumerate(text, 1) if line.startswith("# -- ")]
    first, last = 1, len(text)
    if section:
        first = next(n for n in rules if text[n - 1].startswith(f"# -- {section}"))
        last = next((n for n in rules if n > first), len(text) + 1) - 1
    held, begins = set(), True
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING):
                begins = True
            elif token.type not in (tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER):
                if not (begins and token.type == tokenize.STRING):
                    held.update(range(token.start[0], token.end[0] + 1))
                begins = False
    return sum(first <= number <= last for number in held)


def test_the_page_states_how_long_the_examples_are():
    """The counts in docs/engines.md are those of the files."""
    rows = re.findall(r"^\| `(\w+\.py)` \|.*\| (\d+) \| (\d+|–) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(path.name for path in ENGINES.glob("*.py"))
    for name, whole, glue in rows:
        path = ENGINES / name
        assert int(whole) == code_lines(path), name
        assert glue == ("–" if "# -- the glue" not in path.read_text("utf-8") else str(code_lines(path, "the glue"))), (
            name
        )
