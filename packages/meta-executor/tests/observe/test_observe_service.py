"""``explain`` and ``top`` against a whole service of real processes: launcher, front, MPI ranks, a spawned proxy."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from meta_executor import wire
from meta_executor.cli import main
from meta_executor.config import apply_environment, service_config
from meta_executor.supervise.launch import Launcher

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    """Two context stages behind a proxy of its own, two generation ranks behind a thread; tokens by hash."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    side = {"max_num_tokens": 64, "kv_cache_config": {"max_tokens": 4096}}
    agreement = {"enable_async_terminal_agreement": True, "enable_async_readiness_agreement": True}
    config = service_config(
        {
            "port": 0,
            "run_dir": str(folder / "r"),
            "schedule_style": "generation_first",
            "engine": {"kind": "synthetic", "synthetic": {"vocab_size": 997, "step_ms": 5}},
            "context_servers": {
                **side, "pipeline_parallel_size": 2, "proxy": "spawn", "cache_transceiver_config": agreement,
            },
            "generation_servers": {**side, "tensor_parallel_size": 2, "enable_attention_dp": True},
        }
    )  # fmt: skip
    lines: list[str] = []
    started = Launcher(apply_environment(config, {}), say=lines.append)
    try:
        with started.started():
            yield started
    finally:
        shutil.rmtree(folder, ignore_errors=True)


PROGRAM = (sys.executable, "-m", "meta_executor")


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """The program in this process: a dozen interpreters' starts would be most of this test. ``live_top`` starts a real one."""
    words = [*map(str, arguments)]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patched.setattr(sys, "argv", ["meta-executor", *words])
        with pytest.raises(SystemExit) as left:
            main()
    assert isinstance(left.value.code, int)
    for stream in (out, err):
        stream.seek(0)
    return subprocess.CompletedProcess(words, left.value.code, out.read(), err.read())


def live_top(launcher: Launcher) -> tuple[int, str]:
    """``top`` in a terminal until it has shown a frame, then Ctrl-C. Returns its exit code and what it drew."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "top", "--url", launcher.front_url, "--interval", "0.2"], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )  # fmt: skip
    os.close(theirs)
    drawn, interrupted = "", False
    try:
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            drawn += piece.decode(errors="replace")
            if not interrupted and drawn.count("gen-0") >= 2:
                interrupted = True
                process.send_signal(signal.SIGINT)
        return process.wait(20.0), drawn
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def complete(launcher: Launcher, text: str) -> str:
    """One completion. Returns its id in the decisions."""
    body = {"model": "synthetic", "prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{launcher.front_url}/v1/completions", json=body, timeout=240.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"]).removeprefix("cmpl-")


@contextlib.contextmanager
def writing(launcher: Launcher, text: str) -> Iterator[None]:
    """An answer that is being written all the while; it ends because its reader goes away, not after its many tokens."""
    body = {"model": "synthetic", "prompt": text, "max_tokens": 2400, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{launcher.front_url}/v1/completions", json=body, timeout=240.0, trust_env=False
    ) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()  # kept: the stream is closed with it
        assert next(lines).startswith("data: ")
        yield


def test_explain_and_top_show_what_the_service_did(launcher: Launcher) -> None:
    """Each request's legs, instances, rank and reasons under the id that its client has; then every counter at its place."""
    empty = command("explain", "--url", launcher.front_url)
    assert (empty.returncode, empty.stdout) == (0, "") and "no request has been routed yet" in empty.stderr
    ids = [complete(launcher, "x" * length) for length in (3, 40, 90, 5)]

    # explain, as text and as JSON; the last ones, and one by its id
    told = json.loads(command("explain", "--url", launcher.front_url, "--json").stdout)
    assert [story["request_id"] for story in told["requests"]] == ids and told["unknown"] == {}
    routing = httpx.get(f"{launcher.front_url}/debug/routing", headers=launcher.key_header, trust_env=False).content
    service = msgspec.json.decode(routing, type=wire.ServiceRouting)
    ranks = {f"{d.request_id:x}": d.rank for i in service.instances if i.role == "generation" for d in i.decisions}
    assert set(ranks) == set(ids) and set(ranks.values()) <= {0, 1}
    for story in told["requests"]:
        legs = {leg["role"]: leg for leg in story["legs"]}
        assert set(legs) == {"context", "generation"}
        assert legs["context"]["inside"]["rank"] == -1 and legs["context"]["owner_id"] == "ctx-0"
        assert legs["generation"]["inside"]["rank"] == ranks[story["request_id"]]
        assert legs["generation"]["choice"]["why"] == "the only one that can be picked"
        assert legs["context"]["missing"] == legs["generation"]["missing"] == ""
    text = command("explain", "--url", launcher.front_url, "--last", 2).stdout
    assert [line.split()[1].rstrip(",") for line in text.splitlines() if line.startswith("request")] == ids[-2:]
    one = command("explain", "--url", launcher.front_url, ids[1]).stdout
    assert one.startswith(f"request {ids[1]}, ") and f"rank {ranks[ids[1]]}: least loaded" in one
    assert "all ranks: every stage of the pipeline holds its layers" in one
    unknown = command("explain", "--url", launcher.front_url, "beef")
    assert unknown.returncode == 1 and "no decision is kept of request beef" in unknown.stderr

    # one instance alone, whose API server is a process of its own, wants the key
    context_url = launcher.urls()["ctx-0"]
    refused = command("explain", "--url", context_url)
    assert refused.returncode == 1 and "wants the run's key" in refused.stderr
    alone = command("explain", "--url", context_url, "--run-dir", launcher.run.run_dir, "--json")
    assert [s["request_id"] for s in json.loads(alone.stdout)["requests"]] == ids
    nowhere = command("explain", "--url", context_url, "--run-dir", Path(__file__).parent)
    assert nowhere.returncode == 2 and "no folder of a run" in nowhere.stderr

    # top, while a long answer is being written
    with writing(launcher, "y" * 30):
        frame = json.loads(command("top", "--url", launcher.front_url, "--once", "--json", "--interval", 0.8).stdout)
        shown = command("top", "--url", launcher.front_url, "--once", "--interval", 0.1)
    assert frame["front"]["health"] == "ok" and frame["front"]["running"] == 1 and frame["front"]["requests"] == 5
    context, generation = frame["instances"]
    assert (context["owner_id"], len(context["ranks"]), context["status"]) == ("ctx-0", 2, "ok")
    assert (generation["owner_id"], len(generation["ranks"]), generation["requests"]) == ("gen-0", 2, 1)
    assert generation["completed"] == 4 and generation["answer_tokens_per_s"] > 10
    busy = [rank for rank in generation["ranks"] if rank["requests"]]
    assert len(busy) == 1 and busy[0]["kv_blocks_used"] > 0 and busy[0]["kv_blocks_total"] == 256
    assert busy[0]["tokens_per_s"] > 10 and busy[0]["steps_per_s"] > 10
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith(f"front {launcher.front_url} ok: 1 running, 5 requests")
    assert [line.split()[0] for line in lines[2:]] == ["ctx-0", "rank", "rank", "gen-0", "rank", "rank"]
    code, drawn = live_top(launcher)
    assert code == 0 and "ctx-0" in drawn and "Traceback" not in drawn
