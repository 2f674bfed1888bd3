"""What the front offers besides answers, and what it counts, on a whole service: processes, ranks and sockets, the synthetic
engine. The same over fake instances, with failures that a healthy service has not, is in the package's tests/front."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from meta_executor.config import service_config
from meta_executor.supervise.launch import Launcher

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]
ORIGIN = "https://app.example"
REQUESTS, AT_ONCE, MOST = 500, 40, 32


@dataclass
class Running:
    """What a test needs of the service."""

    launcher: Launcher
    logs: Path

    @property
    def url(self) -> str:
        """The front's address."""
        return self.launcher.front_url

    def client(self, **more: Any) -> httpx.Client:
        """An operator's."""
        return httpx.Client(base_url=self.url, headers=self.launcher.key_header, timeout=60, trust_env=False, **more)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Two context and two generation instances of a rank each."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    side = {"num_instances": 2, "kv_cache_config": {"max_tokens": 16384, "enable_block_reuse": True}}
    config = service_config(
        {
            "port": 0,
            "run_dir": str(folder / "r"),
            "served_model_name": ["shown", "alias"],
            "engine": {"kind": "synthetic", "synthetic": {"vocab_size": 997, "step_ms": 2}},
            "context_servers": {"pipeline_parallel_size": 1, **side},
            "generation_servers": {"tensor_parallel_size": 1, **side},
            "conditional_disagg_config": {"max_local_prefill_length": 3},
            "front": {
                "cors_origins": [ORIGIN],
                "access_log": True,
                "perf_metrics_max_requests": 1000,
                "max_requests": MOST,
                "max_requests_per_client": MOST,
                "context_router": {"type": "kv_cache_aware"},
                "generation_router": {"type": "conversation"},
            },
        }
    )
    launcher = Launcher(config, say=lambda line: None)
    try:
        with launcher.started():
            (run,) = (folder / "r").glob("run-*")
            yield Running(launcher, run / "logs")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def counters(client: httpx.Client) -> Counter[str]:
    """The front's counters, summed over labels; those of ends by how they ended."""
    found: Counter[str] = Counter()
    for line in client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            ended = re.search(r'finished_reason="(\w+)"', name)
            found[name.split("{")[0] + (f" {ended[1]}" if ended else "")] += float(value)  # type: ignore[assignment]
    return found


def test_everything_that_is_asked_besides_answers(running: Running) -> None:
    """Each path by its method, with what its readers look for; who has no key sees what is open and no more."""
    with running.client() as client, httpx.Client(base_url=running.url, timeout=60, trust_env=False) as stranger:
        for path in ("/health", "/live", "/ping"):
            assert stranger.get(path).json() == {"status": "ok"}, path
        assert stranger.get("/version").json().keys() == {"version", "wire_version"}
        assert [card["id"] for card in stranger.get("/v1/models").json()["data"]] == ["shown", "alias"]
        assert stranger.get("/v1/models/alias").json()["root"] == "shown"
        document = stranger.get("/openapi.json").json()
        assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= set(document["paths"])
        page = stranger.get("/docs")
        assert page.headers["content-type"].startswith("text/html") and "/v1/completions" in page.text
        tokens = stranger.post("/tokenize", json={"prompt": "abc"}).json()["tokens"]
        assert stranger.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "abc"}
        assert client.get("/load").json() == {"server_load": 0}
        for name in ("shown", "alias", "synthetic"):
            body = {"model": name, "prompt": f"a prompt for {name}", "max_tokens": 3}
            answer = stranger.post("/v1/completions", json=body, headers={"x-request-id": f"for-{name}"})
            assert (answer.status_code, answer.headers["x-request-id"], answer.json()["model"]) == (
                200,
                f"for-{name}",
                name,
            )
        assert "trtllm_request_success_total{" in client.get("/prometheus/metrics").text
        assert 'trtllm_request_success_total{engine_type="meta_executor"' in client.get("/metrics").text
        info = client.get("/server_info").json()
        assert info["ready"] and {one["owner_id"] for one in info["servers"]} == {"ctx-0", "ctx-1", "gen-0", "gen-1"}
        assert "ctx-0" in client.get("/cluster_info").text
        assert client.get("/debug/reservations").status_code == 200
        routing = client.get("/debug/routing").json()
        assert routing["policy"] == "kv_cache_aware and conversation" and not routing["unknown"]
        story = client.get("/debug/requests/for-alias").json()
        assert {"given to an instance", "sent", "first token", "ended", "answered"} <= {
            e["what"] for e in story["events"]
        }
        (context,) = {d["owner_id"] for d in story["decisions"] if d["role"] == "context"}
        assert [one["request_id"] for one in story["instances"][context]] == story["answers"]
        joined = client.get("/perf_metrics").json()
        assert [one["request_id"] for one in joined] == ["for-shown", "for-alias", "for-synthetic"]
        for one in joined:
            times = [one[f"{leg}_perf_metrics"]["timing_metrics"] for leg in ("ctx", "gen")]
            assert (
                times[0]["sent_time"]
                <= times[0]["first_token_time"]
                <= times[1]["sent_time"]
                <= times[1]["last_token_time"]
            )
        for path in ("/debug/requests/for-alias", "/debug/routing", "/debug/reservations", "/internal/drain"):
            assert stranger.request("POST" if "drain" in path else "GET", path).status_code == 401, path
        lines = (running.logs / "front.log").read_text("utf-8").splitlines()
        (line,) = [one for one in lines if one.endswith("for-alias")]
        assert re.match(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d", line) and "POST /v1/completions 200" in line


def test_errors_have_their_status_and_the_apis_shape(running: Running) -> None:
    """What is wrong is named, by the status that belongs to it; the client's name of the request comes back."""
    with httpx.Client(base_url=running.url, timeout=60, trust_env=False, headers={"x-request-id": "mine"}) as client:
        good = {"model": "shown", "prompt": "abc", "max_tokens": 2}
        for status, param, method, path, body in (
            (400, "max_tokens", "POST", "/v1/completions", {**good, "max_tokens": "many"}),
            (400, "prompt", "POST", "/v1/completions", {**good, "prompt": [997]}),
            (400, "tools", "POST", "/v1/chat/completions", {"model": "shown", "messages": [{"role": "user", "content": "a"}],
                                                            "tools": [{"type": "function"}]}),
            (404, "model", "POST", "/v1/completions", {**good, "model": "another"}),
            (404, None, "GET", "/nowhere", None),
            (405, None, "DELETE", "/v1/completions", None),
        ):  # fmt: skip
            answer = client.request(method, path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], answer.headers["x-request-id"]) == (status, param, "mine"), path
            assert set(error) == {"message", "type", "param", "code"} and error["message"]
        huge = client.post("/v1/completions", content=b" " * (17 << 20))
        assert huge.status_code == 413 and huge.json()["error"]["code"] == "too_large"
        asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
        assert client.options("/v1/completions", headers=asked).headers["access-control-allow-origin"] == ORIGIN
        other = {**asked, "origin": "https://other.example"}
        assert "access-control-allow-origin" not in client.options("/v1/completions", headers=other).headers


def test_metrics_are_what_clients_counted(running: Running) -> None:
    """Five hundred requests, forty at a time and at most thirty-two served: whole and streamed, several answers, stops,
    refusals, too many at once, and clients that leave in the middle. Every count is the same on both sides, no leg is left."""
    with running.client() as client:
        before = counters(client)
        counted = asyncio.run(ask_all(running.url))
        # Those that left may be on their way to their end.
        deadline_s = time.monotonic() + 30
        while client.get("/load").json()["server_load"] and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert client.get("/load").json() == {"server_load": 0}
        told = counters(client)
        told.subtract(before)
        reservations = client.get("/debug/reservations").json()
    assert counted["busy"] and counted["left"] and counted["answers"] > 200, counted
    assert told["total_requests_total"] == REQUESTS
    assert told["validation_exceptions_total"] == counted["refused"]
    assert told["http_exceptions_total"] == counted["busy"]
    assert told["internal_errors_total"] == 0
    # One that left may have had its whole answer before the front saw it leave.
    late = counted["left"] - told["client_disconnects_total"]
    assert 0 <= late <= counted["left"]
    assert told["total_responses_total"] == counted["answers"] + late
    prompts, tokens = told["trtllm_prompt_tokens_total"], told["trtllm_generation_tokens_total"]
    assert counted["prompt_tokens"] <= prompts <= counted["prompt_tokens"] + late * LEAVERS_TOKENS
    assert counted["tokens"] <= tokens <= counted["tokens"] + late * LEAVERS_TOKENS
    if not late:
        assert (prompts, tokens) == (counted["prompt_tokens"], counted["tokens"])
        assert told["trtllm_cached_prompt_tokens_total"] == counted["cached_tokens"]
    for reason in ("stop", "length"):
        less, more = counted[f"ended by {reason}"], counted[f"ended by {reason}"] + late
        assert less <= told[f"trtllm_request_success_total {reason}"] <= more, reason
    for role in ("ctx", "gen"):
        sent = told[f"{role}_total_requests_total"]
        assert sent == told[f"{role}_completed_requests_total"] + told[f"{role}_error_requests_total"], role
    # Legs that ended early are those of clients that left.
    assert told["gen_error_requests_total"] + told["ctx_error_requests_total"] <= 2 * counted["left"]
    assert told["conditional_disagg_requests_total"] > 0
    assert '"count":0' in json.dumps(reservations).replace(" ", "") or not reservations.get("reservations"), (
        reservations
    )


#: Of one that leaves: more than prompt or answer has (tokens).
LEAVERS_TOKENS = 1000


async def ask_all(url: str) -> Counter[str]:
    """What clients saw."""
    counted: Counter[str] = Counter()
    slots = asyncio.Semaphore(AT_ONCE)
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)

    def take(usage: dict[str, Any], reasons: list[str]) -> None:
        counted["answers"] += 1
        counted["prompt_tokens"] += usage["prompt_tokens"]
        counted["tokens"] += usage["completion_tokens"]
        counted["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
        counted.update(f"ended by {reason}" for reason in reasons)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        kind = number % 10
        chat = number % 2 == 1
        path = "/v1/chat/completions" if chat else "/v1/completions"
        text = "ab" if number % 20 == 0 else f"say something about {number % 7}"
        body: dict[str, Any] = {"model": "shown", "max_tokens": 1 + number % 23, "conversation_id": f"c{number % 11}"}
        body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        if kind == 7:
            body |= {"temperature": 9}
        elif kind == 8:
            body |= {"model": "another"}
        elif kind == 9:
            body |= {"stream": True, "max_tokens": 400, "ignore_eos": True}
        elif kind in (5, 6):
            body |= {"stream": True, "stream_options": {"include_usage": True}, "stop": ["e", "t"]}
        else:
            body |= {"n": 1 + number % 3}
        async with slots, client.stream("POST", path, json=body) as answer:
            if kind == 9 and answer.status_code == 200:
                await anext(answer.aiter_bytes())
                counted["left"] += 1
                return
            text = (await answer.aread()).decode()
            if answer.status_code == 429:
                counted["busy"] += 1
            elif answer.status_code in (400, 404):
                counted["refused"] += 1
            elif "stream" in body:
                events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                choices = [choice for event in events for choice in event["choices"]]
                take(events[-1]["usage"], [choice["finish_reason"] for choice in choices if choice["finish_reason"]])
            else:
                whole = json.loads(text)
                take(whole["usage"], [choice["finish_reason"] for choice in whole["choices"]])

    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client:
        await asyncio.gather(*(one(client, number) for number in range(REQUESTS)))
    return counted
