"""What is asked besides answers: names of requests and of the model, tokens, descriptions, stories, figures."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from typing import Any

import httpx
import msgspec
import openai
import pytest

from meta_executor import wire
from meta_executor.front.envelope import ACCESS_LOGGER
from meta_executor.front.stories import Story
from meta_executor.listener.access import KeyFile
from meta_executor.observe.request_trace import ToldRequest, request_trace

pytestmark = pytest.mark.asyncio
HELLO = "Hello, world!"


async def test_the_clients_name_of_a_request_comes_back_on_every_answer(make_cluster: Any, tmp_path: Any) -> None:
    """Answers, streams, errors, unknown paths, refusals without a key; what is no name is replaced."""
    path = tmp_path / "keys"
    path.write_text("ann " + "k" * 32 + "\n")
    path.chmod(0o600)
    async with make_cluster(keys=KeyFile(path)) as cluster:
        mine = {"x-request-id": "job-7/a:b"}
        for method, url, body, status in (
            ("POST", "/v1/completions", {"model": "synthetic", "prompt": "a"}, 200),
            ("POST", "/v1/completions", {"model": "synthetic", "prompt": "a", "stream": True}, 200),
            ("POST", "/v1/completions", {"model": "synthetic"}, 400),
            ("POST", "/v1/completions", {"model": "another", "prompt": "a"}, 404),
            ("GET", "/health", None, 200),
            ("GET", "/nowhere", None, 404),
            ("DELETE", "/health", None, 405),
        ):
            response = await cluster.client.request(method, cluster.url + url, json=body, headers=mine)
            assert (response.status_code, response.headers.get_list("x-request-id")) == (status, ["job-7/a:b"]), url
        async with httpx.AsyncClient(trust_env=False) as stranger:
            refused = await stranger.post(f"{cluster.url}/v1/completions", json={}, headers=mine)
            assert (refused.status_code, refused.headers["x-request-id"]) == (401, "job-7/a:b")
        made = set()
        for header in ({}, {"x-request-id": ""}, {"x-request-id": "x" * 129}, {"x-request-id": "a b"}):
            response = await cluster.client.get(f"{cluster.url}/health", headers=header)
            made.add(response.headers["x-request-id"])
            assert response.headers["x-request-id"] not in header.values()
        assert len(made) == 4


async def test_the_access_log_has_a_line_for_each_request(make_cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Who, what, status, time and name; nothing that a client sent breaks the line; off unless configured."""
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    async with make_cluster() as cluster:
        await cluster.complete()
        assert not [one for one in caplog.records if one.name == ACCESS_LOGGER]
    async with make_cluster(access_log=True) as cluster:
        await cluster.client.get(f"{cluster.url}/nowhere%0A{'x' * 300}", headers={"x-request-id": "n1"})
        await cluster.complete(model="another")
        lines = [one.getMessage() for one in caplog.records if one.name == ACCESS_LOGGER]
        assert len(lines) == 2 and all("\n" not in line and len(line) < 400 for line in lines)
        assert lines[0].startswith("127.0.0.1 GET /nowhere%0Axxx") and lines[0].endswith(" ms n1")
        assert " POST /v1/completions 404 " in lines[1]


async def test_the_model_has_several_names(make_cluster: Any) -> None:
    """The first is shown, aliases are listed, its own is taken; an answer repeats the name that was asked for."""
    async with make_cluster(names={"aliases": ("tiny", "synthetic"), "known_as": ("own/name",)}) as cluster:
        cards = (await cluster.client.get(f"{cluster.url}/v1/models")).json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [("synthetic", "synthetic"), ("tiny", "synthetic")]
        assert (await cluster.client.get(f"{cluster.url}/v1/models/")).json()["data"] == cards
        assert (await cluster.client.get(f"{cluster.url}/v1/models/tiny")).json()["id"] == "tiny"
        assert (await cluster.client.get(f"{cluster.url}/v1/models/other")).status_code == 404
        for name in ("synthetic", "tiny", "own/name"):
            assert (await cluster.complete(model=name)).json()["model"] == name
        refused = await cluster.complete(model="other")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_tokens_of_texts_and_texts_of_tokens(make_cluster: Any) -> None:
    """A text or a conversation has the tokens that an answer's request would have; back to the text."""
    async with make_cluster() as cluster:

        async def post(path: str, **body: Any) -> httpx.Response:
            return await cluster.client.post(f"{cluster.url}{path}", json=body)

        made = (await post("/tokenize", prompt="héllo", return_token_strs=True)).json()
        assert made["tokens"] == cluster.service.tokenizer.encode_user_text("héllo")
        assert (made["count"], made["max_model_len"]) == (6, 400)
        assert made["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "l", "l", "o"]
        assert (await post("/detokenize", tokens=made["tokens"])).json() == {"prompt": "héllo"}
        messages = [{"role": "user", "content": "Hi"}]
        chat = (await post("/tokenize", model="synthetic", messages=messages)).json()
        await cluster.client.post(
            f"{cluster.url}/v1/chat/completions", json={"model": "synthetic", "messages": messages}
        )
        assert chat["tokens"] == cluster.context.received[0].token_ids and chat["token_strs"] is None
        shorter = (await post("/tokenize", messages=messages, add_generation_prompt=False)).json()
        assert chat["count"] > shorter["count"] and chat["tokens"][: shorter["count"]] == shorter["tokens"]
        for path, body, param in (
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
            ("/tokenize", {"prompt": 5}, "prompt"),
            ("/tokenize", {"prompt": "a" * 5000}, "prompt"),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": "a"}, "tokens"),
            ("/detokenize", {"tokens": [512]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": [1] * 401}, "tokens"),
        ):
            refused = await post(path, **body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), body
        assert (await post("/tokenize", model="other", prompt="a")).status_code == 404


@pytest.mark.parametrize("here", [True, False])
async def test_texts_of_many_tokens_are_made_beside_the_loop(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """An echo, however many prompts its tokens are of, and /tokenize: streams of others go on meanwhile."""
    monkeypatch.setattr("meta_executor.front.checking._DECODE_INLINE_TOKENS", 6 if here else 5)
    async with make_cluster() as cluster:
        threads = []

        def noting(function: Any) -> Any:
            def call(tokens: Any) -> Any:
                threads.append(threading.current_thread())
                return function(tokens)

            return call

        for name in ("decode", "token_text"):
            monkeypatch.setattr(cluster.service.tokenizer, name, noting(getattr(cluster.service.tokenizer, name)))
        made = await cluster.complete(prompt=["abc", "def"], echo=True, max_tokens=0)
        assert [choice["text"] for choice in made.json()["choices"]] == ["abc", "def"]
        body = {"prompt": "abcdef", "return_token_strs": True}
        told = await cluster.client.post(f"{cluster.url}/tokenize", json=body)
        assert told.json()["token_strs"] == list("abcdef")
        assert len(threads) == 8 and {one is threading.current_thread() for one in threads} == {here}


async def test_the_described_service_is_the_served_one(make_cluster: Any) -> None:
    """Every path and field of the document is there; every answer's status is described; the page needs nothing else."""
    async with make_cluster() as cluster:
        document = (await cluster.client.get(f"{cluster.url}/openapi.json")).json()
        assert document["openapi"].startswith("3.1")
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                response = await cluster.client.request(
                    method, cluster.url + path, json={} if method == "post" else None
                )
                assert response.status_code not in (404, 405), path
                assert str(response.status_code) in operation["responses"], path
        completion = document["components"]["schemas"]["CompletionRequest"]
        assert set(completion["required"]) == {"model", "prompt"}
        assert {"n", "best_of", "logprobs", "echo", "logit_bias", "min_tokens"} <= set(completion["properties"])
        assert "oneOf" in completion["properties"]["prompt"]
        assert completion["properties"]["model"] == {"enum": ["synthetic"]}
        assert document["components"]["schemas"]["TokenizeRequest"]["properties"]["model"] == {
            "enum": ["synthetic", None]
        }
        page = await cluster.client.get(f"{cluster.url}/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "/v1/chat/completions" in page.text and "http:" not in page.text and "https:" not in page.text


async def test_unknown_fields_are_told_and_taken_and_a_strict_service_refuses_them(
    make_cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In a header of the answer, and in the log once for each name; nothing in them can break either."""
    async with make_cluster() as cluster:
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        raw = await client.completions.with_raw_response.create(
            model="synthetic", prompt="a", extra_body={"use_beam_search": False, "ż\r\nx: 1": 2}
        )
        assert raw.headers["x-unknown-fields"] == "use_beam_search, \\u017c\\r\\nx: 1"
        assert raw.parse().choices[0].text == HELLO
        await cluster.complete(use_beam_search=True, stream=True)
        told = [one.getMessage() for one in caplog.records if "no effect" in one.getMessage()]
        assert len(told) == 2 and all("\n" not in line for line in told)
        assert "x-unknown-fields" not in (await cluster.complete()).headers
        kept = await cluster.client.post(
            f"{cluster.url}/v1/chat/completions",
            json={"model": "synthetic", "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None},
                {"role": "user", "content": "b"},
            ]},
        )  # fmt: skip
        assert kept.status_code == 200
        await client.close()
    async with make_cluster(strict_fields=True) as cluster:
        refused = await cluster.complete(use_beam_search=True)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "use_beam_search")


async def test_pages_of_configured_origins_may_call(make_cluster: Any) -> None:
    """A browser's question needs no key; another origin gets no leave; without origins nobody does."""
    ask = {"origin": "https://app.example", "access-control-request-method": "POST",
           "access-control-request-headers": "authorization"}  # fmt: skip
    async with (
        make_cluster(cors_origins=("https://app.example",)) as cluster,
        httpx.AsyncClient(trust_env=False) as browser,
    ):
        allowed = await browser.options(f"{cluster.url}/v1/completions", headers=ask)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        other = await browser.options(f"{cluster.url}/v1/completions", headers={**ask, "origin": "https://evil"})
        assert "access-control-allow-origin" not in other.headers
        body = {"model": "synthetic", "prompt": "a"}
        answer = await browser.post(f"{cluster.url}/v1/completions", json=body, headers={"origin": ask["origin"]})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
    async with make_cluster() as cluster:
        assert (await cluster.client.options(f"{cluster.url}/v1/completions", headers=ask)).status_code == 405


async def test_the_story_of_a_request(make_cluster: Any) -> None:
    """Both legs with their instances, in order, by the client's name or the answer's id; how it ended; for operators only."""
    async with make_cluster() as cluster:
        answer = await cluster.client.post(
            f"{cluster.url}/v1/completions",
            json={"model": "synthetic", "prompt": "abc"},
            headers={"x-request-id": "mine"},
        )
        story = (await cluster.client.get(f"{cluster.url}/debug/requests/mine")).json()
        (number,) = story["answers"]
        assert answer.json()["id"] == f"cmpl-{number:x}"
        told = [(one["what"], one.get("leg"), one.get("server")) for one in story["events"]]
        assert told == [
            ("read: 1 answers, 3 tokens in the first prompt", None, None),
            ("given to an instance", "context", "ctx-0"),
            ("sent", "context", "ctx-0"),
            ("first token", "context", "ctx-0"),
            ("given to an instance", "generation", "gen-0"),
            ("sent", "generation", "gen-0"),
            ("first token", "generation", "gen-0"),
            ("ended", "context", "ctx-0"),
            ("ended", "generation", "gen-0"),
            ("answered", None, None),
        ]
        times = [one["at_s"] for one in story["events"]]
        assert times == sorted(times) and times[0] >= 0
        assert {one["owner_id"] for one in story["decisions"]} == {"ctx-0", "gen-0"}
        assert [one["request_id"] for one in story["instances"]["ctx-0"]] == [number]
        for name in (str(number), f"{number:x}", f"cmpl-{number:x}"):
            assert (await cluster.client.get(f"{cluster.url}/debug/requests/{name}")).json()["request_id"] == "mine"
        await cluster.client.post(
            f"{cluster.url}/v1/completions", json={"model": "synthetic"}, headers={"x-request-id": "bad"}
        )
        bad = (await cluster.client.get(f"{cluster.url}/debug/requests/bad")).json()
        assert [one["what"] for one in bad["events"]] == ["refused with 400"]
        cluster.generation.refusals = [(wire.ENGINE_FAILED, "boom")]
        await cluster.client.post(
            f"{cluster.url}/v1/completions",
            json={"model": "synthetic", "prompt": "a"},
            headers={"x-request-id": "torn"},
        )
        torn = [
            one["what"] for one in (await cluster.client.get(f"{cluster.url}/debug/requests/torn")).json()["events"]
        ]
        assert "told to stop" in torn and torn[-1].startswith("failed with 502: ") and "boom" in torn[-1]
        assert (await cluster.client.get(f"{cluster.url}/debug/requests/nobody")).status_code == 404
        async with httpx.AsyncClient(trust_env=False) as stranger:
            assert (await stranger.get(f"{cluster.url}/debug/requests/mine")).status_code == 401


async def test_a_client_that_leaves_is_in_its_story(make_cluster: Any) -> None:
    """And the leg that was told to stop."""
    async with make_cluster() as cluster:
        cluster.context.gate = asyncio.Event()
        body = {"model": "synthetic", "prompt": "a"}
        call = asyncio.create_task(
            cluster.client.post(f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": "gone"})
        )
        await cluster.context.started.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await cluster.settled()
        story = (await cluster.client.get(f"{cluster.url}/debug/requests/gone")).json()
        whats = [one["what"] for one in story["events"]]
        assert "told to stop" in whats and whats[-1] == "its client has gone"


@pytest.mark.parametrize("style", ["context_first", "generation_first"])
async def test_both_legs_of_what_has_ended_are_told_once(make_cluster: Any, style: str) -> None:
    """Joined in one record, times in order; reading drains; off unless configured, and bounded."""
    async with make_cluster(style, perf_metrics_max_requests=2) as cluster:
        await cluster.complete(max_tokens=1)
        await cluster.complete()
        await cluster.complete(n=2)
        told = (await cluster.client.get(f"{cluster.url}/perf_metrics")).json()
        assert len(told) == 3  # of the last two requests
        for one in told:
            assert (one["ctx_server"], one["gen_server"]) == ("ctx-0", "gen-0")
            context, generation = (one[f"{leg}_perf_metrics"]["timing_metrics"] for leg in ("ctx", "gen"))
            assert one["disagg_server_arrival_time"] <= context["sent_time"] <= context["first_token_time"]
            assert generation["sent_time"] <= generation["first_token_time"] <= generation["last_token_time"]
            assert one["disagg_server_first_token_time"] == min(
                context["first_token_time"], generation["first_token_time"]
            )
        assert (await cluster.client.get(f"{cluster.url}/perf_metrics")).json() == []
    async with make_cluster() as cluster:
        await cluster.complete()
        assert (await cluster.client.get(f"{cluster.url}/perf_metrics")).json() == []


async def test_metrics_agree_with_what_clients_counted(make_cluster: Any) -> None:
    """Tokens, ends and latencies of whole requests, under the field's names with the model's; errors are not answers."""
    async with make_cluster() as cluster:
        prompt = completion = 0
        for index in range(12):
            usage = (await cluster.complete(prompt="a" * (index + 1), n=1 + index % 3)).json()["usage"]
            prompt += usage["prompt_tokens"]
            completion += usage["completion_tokens"]
        await cluster.complete(max_tokens=3)
        cluster.generation.refusals = [(wire.ENGINE_FAILED, "boom")]
        assert (await cluster.complete()).status_code == 502
        values = dict(
            line.rsplit(" ", 1)
            for line in (await cluster.client.get(f"{cluster.url}/metrics")).text.splitlines()
            if not line.startswith("#")
        )
        labels = 'engine_type="meta_executor",model_name="synthetic"'

        def value(name: str, more: str = "") -> float:
            parts = sorted([*labels.split(","), *([more] if more else [])])
            return float(next(v for k, v in values.items() if k.startswith(f"trtllm_{name}{{")
                              and sorted(k[k.index("{") + 1 : -1].split(",")) == parts))  # fmt: skip

        assert value("prompt_tokens_total") == prompt + 9
        assert value("generation_tokens_total") == completion + 3
        assert value("cached_prompt_tokens_total") == 13
        assert value("request_success_total", 'finished_reason="stop"') == 4 * (1 + 2 + 3)
        assert value("request_success_total", 'finished_reason="length"') == 1
        for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds", "time_per_output_token_seconds"):
            assert value(f"{name}_count") == 13
        assert float(values["http_exceptions_total"]) == 1


async def test_a_wrong_method_is_told_the_right_ones(make_cluster: Any) -> None:
    """In the header that HTTP has for it."""
    async with make_cluster() as cluster:
        for path, allowed in (("/v1/completions", {"POST"}), ("/health", {"GET", "HEAD"})):
            response = await cluster.client.request("TRACE", cluster.url + path)
            assert response.status_code == 405
            assert {word.strip() for word in response.headers["allow"].split(",")} == allowed


async def test_probes_of_every_field_are_answered(make_cluster: Any) -> None:
    """/ping as /health, by either method; no key is wanted."""
    async with make_cluster() as cluster:
        for method in ("GET", "POST"):
            assert (await cluster.client.request(method, f"{cluster.url}/ping")).status_code == 200
        cluster.service.start_draining()
        assert (await cluster.client.get(f"{cluster.url}/ping")).status_code == 503
        assert json.loads((await cluster.client.get(f"{cluster.url}/load")).text) == {"server_load": 0}


async def test_a_refusal_says_why(make_cluster: Any) -> None:
    """What this project is not for, in words; and what would be taken."""
    async with make_cluster() as cluster:
        body = {"model": "synthetic", "messages": [{"role": "user", "content": "a"}]}
        for field, value, words in (
            ("tools", [{"type": "function"}], "constrained decoding"),
            ("response_format", {"type": "json_object"}, '{"type":"text"} is taken'),
            ("audio", {"voice": "x"}, "text only"),
            ("reasoning_effort", "high", "no such setting"),
        ):
            refused = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json={**body, field: value})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, field, "unsupported_value")
            assert words in error["message"]


async def test_five_hundred_requests_with_errors_and_disconnects_are_all_counted(make_cluster: Any) -> None:
    """What clients counted is what the metrics say: answers, tokens, refusals, failures and those that left."""
    async with make_cluster(contexts=2, generations=2) as cluster:
        counted: dict[str, int] = {}

        def count(name: str, more: int = 1) -> None:
            counted[name] = counted.get(name, 0) + more

        async def one(index: int) -> None:
            kind = index % 10
            url = f"{cluster.url}/v1/{'chat/completions' if index % 2 else 'completions'}"
            prompt: dict[str, Any] = (
                {"messages": [{"role": "user", "content": "a"}]} if index % 2 else {"prompt": "abc"}
            )
            body = {"model": "synthetic", "max_tokens": 1 + index % 20, **prompt}
            if kind == 7:
                response = await cluster.client.post(url, json={**body, "temperature": 9})
                count("refused", response.status_code == 400)
            elif kind == 8:
                response = await cluster.client.post(url, json={**body, "model": "another"})
                count("refused", response.status_code == 404)
            elif kind == 9:
                async with cluster.client.stream(
                    "POST", url, json={**body, "max_tokens": 40, "stream": True}
                ) as stream:
                    await anext(stream.aiter_bytes())
                count("left")
            elif kind in (5, 6):
                options = {"stream": True, "stream_options": {"include_usage": True}}
                async with cluster.client.stream("POST", url, json={**body, **options}) as stream:
                    events = [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]
                if "error" in events[-1]:
                    count("failed")
                else:
                    count("answers")
                    count("tokens", events[-1]["usage"]["completion_tokens"])
            else:
                response = await cluster.client.post(url, json={**body, "n": 1 + index % 2})
                if response.status_code == 200:
                    count("answers")
                    count("tokens", response.json()["usage"]["completion_tokens"])
                else:
                    count("failed", response.status_code == 502)

        for instance in cluster.instances:
            if instance.role == "generation":
                instance.refusals = [(wire.ENGINE_FAILED, "boom")] * 12
        for begin in range(0, 500, 50):
            await asyncio.gather(*(one(index) for index in range(begin, begin + 50)))
        await cluster.settled()
        text = (await cluster.client.get(f"{cluster.url}/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

        def value(name: str) -> float:
            return sum(float(v) for k, v in values.items() if k.split("{")[0] == name)

        assert counted["left"] == 50 and counted["refused"] == 100 and counted["failed"] >= 1
        # One that left may have been answered to its end before the front saw it leave.
        ended = value("client_disconnects_total") + value("total_responses_total") + value("http_exceptions_total")
        assert ended == 400
        assert value("client_disconnects_total") <= 50
        late = 50 - value("client_disconnects_total")
        assert value("total_responses_total") + value("http_exceptions_total") == 350 + late
        assert counted["failed"] <= value("http_exceptions_total") <= 24
        assert value("validation_exceptions_total") == counted["refused"]
        assert value("total_requests_total") == 500
        tokens = value("trtllm_generation_tokens_total")
        assert counted["tokens"] <= tokens <= counted["tokens"] + 14 * late
        assert value("running_requests") == 0 and value("internal_errors_total") == 0


async def test_a_story_has_an_end(make_cluster: Any) -> None:
    """A request of very many answers tells the beginning, and how much more there was; old ones are forgotten."""
    async with make_cluster() as cluster:
        body = {"model": "synthetic", "prompt": "a", "n": 40, "max_tokens": 2}
        await cluster.client.post(f"{cluster.url}/v1/completions", json=body, headers={"x-request-id": "many"})
        story = (await cluster.client.get(f"{cluster.url}/debug/requests/many")).json()
        assert len(story["answers"]) == 40 and len(story["events"]) == 128 and story["events_left_out"] > 100
        for index in range(1030):
            cluster.service.stories.begin(Story(f"r{index}", "/", "a", 0.0, 0.0))
        for name in ("many", f"cmpl-{story['answers'][0]:x}", "r0"):
            assert (await cluster.client.get(f"{cluster.url}/debug/requests/{name}")).status_code == 404
        assert cluster.service.stories.find("r1029") is not None


async def test_what_a_front_tells_of_a_request_can_be_drawn(make_cluster: Any) -> None:
    """``explain --trace`` reads it: both legs, at the instances that had them."""
    async with make_cluster() as cluster:
        answer = (await cluster.complete()).json()
        told = await cluster.client.get(f"{cluster.url}/debug/requests/{answer['id']}")
        drawn = json.loads(request_trace(msgspec.json.decode(told.content, type=ToldRequest)))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in drawn if e["name"] == "process_name"}
    legs = {(names[e["pid"]], e["name"]) for e in drawn if e["name"].endswith(" leg")}
    assert legs == {("ctx-0", "context leg"), ("gen-0", "generation leg")}
    assert all(e["dur"] >= 0 for e in drawn if e["ph"] == "X")
