"""The OpenAI service over fake instances: answers, streams, refusals, limits."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import openai
import pytest

from meta_executor import wire
from meta_executor.front.servers import TokenLimits

pytestmark = pytest.mark.asyncio
STYLES = pytest.mark.parametrize("style", ["context_first", "generation_first"])


def events_of(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]) for line in lines]


@STYLES
async def test_completion_in_one_piece(make_cluster: Any, style: str) -> None:
    """Text, reason and counts are right; both legs got what they need and were not aborted."""
    async with make_cluster(style) as cluster:
        response = await cluster.complete()
        assert response.status_code == 200
        body = response.json()
        assert body["object"] == "text_completion"
        assert body["choices"] == [{"index": 0, "finish_reason": "stop", "logprobs": None, "text": "Hello, world!"}]
        assert body["usage"] == {
            "prompt_tokens": 9,
            "completion_tokens": 14,
            "total_tokens": 23,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        await cluster.settled()
        (context,), (generation,) = cluster.context.received, cluster.generation.received
        assert context.request_id == generation.request_id
        assert context.token_ids == generation.token_ids
        assert context.schedule_style == generation.schedule_style == style
        assert context.endpoint_generation == generation.context.endpoint_generation == "ctx-0-g1"
        assert generation.context.instance_id == "ctx-0-g1-process"
        assert generation.context.url == cluster.context.url
        assert generation.context.control_addresses == ["ipc:///tmp/ctx-0-0", "ipc:///tmp/ctx-0-1"]
        assert not cluster.context.aborts + cluster.generation.aborts


@STYLES
async def test_chat_stream_with_usage(make_cluster: Any, style: str) -> None:
    """Role first, pieces, reason, then counts without choices, then [DONE]."""
    async with make_cluster(style) as cluster:
        response = await cluster.client.post(
            f"{cluster.url}/v1/chat/completions",
            json={
                "model": "synthetic",
                "messages": [{"role": "user", "content": "Hi"}],
                "max_completion_tokens": 5,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        )
        assert response.headers["content-type"].startswith("text/event-stream")
        events = events_of(response.text)
        assert events[-1] == "[DONE]"
        assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert events[-2]["choices"] == []
        assert events[-2]["usage"]["completion_tokens"] == 5
        pieces = events[1:-2]
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in pieces) == "Hello"
        assert [event["choices"][0]["finish_reason"] for event in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["choices"][0]["finish_reason"] == "length"
        assert all(event["usage"] is None for event in pieces)
        assert len({event["id"] for event in events[:-1]}) == 1
        await cluster.settled()


async def test_stream_without_usage_has_no_counts(make_cluster: Any) -> None:
    """Without include_usage no event has a usage field and none is without choices."""
    async with make_cluster() as cluster:
        events = events_of((await cluster.complete(stream=True)).text)
        assert events[-1] == "[DONE]"
        assert all("usage" not in event and event["choices"] for event in events[:-1])
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Hello, world!"


@STYLES
async def test_openai_client_many_at_once(make_cluster: Any, style: str) -> None:
    """Twenty-four clients at once, streaming and not, chat and plain: each gets its own right answer."""
    async with make_cluster(style, generations=2) as cluster:
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)

        async def one(index: int) -> None:
            tokens = index % 13 + 1
            want = "Hello, world!"[:tokens]
            if index % 2:
                stream = await client.chat.completions.create(
                    model="synthetic",
                    messages=[{"role": "user", "content": "x" * (index + 1)}],
                    max_tokens=tokens,
                    stream=True,
                    stream_options={"include_usage": True},
                )
                text, reason, usage = "", None, None
                async for chunk in stream:
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        reason = choice.finish_reason or reason
            else:
                answer = await client.completions.create(model="synthetic", prompt="x" * (index + 1), max_tokens=tokens)
                text, reason, usage = answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
                assert usage.prompt_tokens == index + 1
            assert (text, reason) == (want, "length")
            assert usage.completion_tokens == tokens
            assert usage.total_tokens == usage.prompt_tokens + tokens

        await asyncio.gather(*(one(index) for index in range(24)))
        await client.close()
        await cluster.settled()
        assert not any(instance.aborts for instance in cluster.instances)
        models = (await cluster.client.get(f"{cluster.url}/v1/models")).json()
        assert [card["id"] for card in models["data"]] == ["synthetic"]
        assert models["data"][0]["max_model_len"] == 400


@pytest.mark.parametrize("chat", [False, True])
async def test_token_ids_for_who_asks(make_cluster: Any, chat: bool) -> None:
    """The answer's ids, end token included, and the prompt's; over a stream each once; not there unasked."""
    async with make_cluster() as cluster:
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
        body = {"model": "synthetic", "max_tokens": 40, "return_token_ids": True, **prompt}
        url = f"{cluster.url}/v1/{'chat/completions' if chat else 'completions'}"
        whole = (await cluster.client.post(url, json=body)).json()
        want = [*cluster.service.tokenizer.encode_user_text("Hello, world!"), 2]
        assert whole["choices"][0]["token_ids"] == want
        assert (whole if chat else whole["choices"][0])["prompt_token_ids"] == cluster.context.received[0].token_ids
        events = events_of((await cluster.client.post(url, json={**body, "stream": True})).text)[:-1]
        pieces = [event["choices"][0] for event in events]
        assert [token for piece in pieces for token in piece.get("token_ids", [])] == want
        prompts = [
            holder["prompt_token_ids"] for holder in (events if chat else pieces) if "prompt_token_ids" in holder
        ]
        assert prompts == [cluster.context.received[0].token_ids]
        unasked = (await cluster.client.post(url, json={**body, "return_token_ids": False})).text
        assert "token_ids" not in unasked


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_first_token_ends_the_answer(make_cluster: Any, stream: bool, chat: bool) -> None:
    """One token: no generation leg, and still text, reason, counts and [DONE]."""
    async with make_cluster() as cluster:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
        path = "chat/completions" if chat else "completions"
        response = await cluster.client.post(
            f"{cluster.url}/v1/{path}", json={"model": "synthetic", "max_tokens": 1, **prompt, **options}
        )
        if stream:
            events = events_of(response.text)
            assert events[-1] == "[DONE]"
            usage = events[-2]["usage"]
            choices = [event["choices"][0] for event in events[:-2]]
            text = "".join(c["delta"].get("content", "") if chat else c["text"] for c in choices)
            reason = choices[-1]["finish_reason"]
        else:
            body = response.json()
            usage, choice = body["usage"], body["choices"][0]
            text = choice["message"]["content"] if chat else choice["text"]
            reason = choice["finish_reason"]
        assert (text, reason, usage["completion_tokens"]) == ("H", "length", 1)
        assert not cluster.generation.received
        await cluster.settled()
        assert not cluster.context.aborts


@STYLES
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_and_aborts(make_cluster: Any, style: str, stream: bool) -> None:
    """Text before the stop string only, split over pieces or not; the instance is told; tokens up to it are counted."""
    async with make_cluster(style) as cluster:
        cluster.generation.answer = cluster.context.answer = "one two three four five six seven"
        cluster.generation.line_gate = asyncio.Event()
        options = {"stream_options": {"include_usage": True}} if stream else {}
        task = asyncio.create_task(cluster.complete(stop=["never", "wo th"], stream=stream, **options))
        await asyncio.sleep(0)
        cluster.generation.line_gate.set()
        response = await task
        if stream:
            events = events_of(response.text)
            text = "".join(event["choices"][0]["text"] for event in events[:-2])
            reason, usage = events[-3]["choices"][0]["finish_reason"], events[-2]["usage"]
            assert events[-1] == "[DONE]"
        else:
            body = response.json()
            text, reason, usage = body["choices"][0]["text"], body["choices"][0]["finish_reason"], body["usage"]
        assert (text, reason, usage["completion_tokens"]) == ("one t", "stop", 10)
        await cluster.settled()
        assert cluster.generation.aborts == [cluster.generation.received[0].request_id]


async def test_characters_of_several_tokens_stay_whole(make_cluster: Any) -> None:
    """A character whose bytes are tokens of their own is never cut between events; a broken one at the end is replaced."""
    async with make_cluster() as cluster:
        cluster.generation.answer = cluster.context.answer = "żółć 🚀 naïve"
        events = events_of((await cluster.complete(stream=True)).text)
        texts = [event["choices"][0]["text"] for event in events[:-1]]
        assert "".join(texts) == "żółć 🚀 naïve"
        assert not any("\ufffd" in text for text in texts)
        cut = (await cluster.complete(max_tokens=12)).json()
        assert cut["choices"][0]["text"] == "żółć \ufffd"
        assert cut["choices"][0]["finish_reason"] == "length"


GOOD = {"model": "synthetic", "prompt": "abc"}
CHAT = {"model": "synthetic", "messages": [{"role": "user", "content": "abc"}]}


WRONG = (
    ("completions", {"prompt": "abc"}, "model"),
    ("completions", {"model": "synthetic"}, "prompt"),
    ("completions", {**GOOD, "model": 5}, "model"),
    ("completions", {**GOOD, "prompt": ""}, "prompt"),
    ("completions", {**GOOD, "prompt": 7}, "prompt"),
    ("completions", {**GOOD, "prompt": []}, "prompt"),
    ("completions", {**GOOD, "prompt": ["a"] * 129}, "prompt"),
    ("completions", {**GOOD, "prompt": ["a", ""]}, "prompt"),
    ("completions", {**GOOD, "prompt": ["a", [1]]}, "prompt"),
    ("completions", {**GOOD, "prompt": [[1], []]}, "prompt"),
    ("completions", {**GOOD, "prompt": [[1, 512]]}, "prompt"),
    ("completions", {**GOOD, "prompt": ["a" * 9, "a" * 400]}, "prompt"),
    ("completions", {**GOOD, "prompt": [1, "b"]}, "prompt"),
    ("completions", {**GOOD, "prompt": [1, True]}, "prompt"),
    ("completions", {**GOOD, "prompt": [1, 512]}, "prompt"),
    ("completions", {**GOOD, "prompt": [-1]}, "prompt"),
    ("completions", {**GOOD, "prompt": "a" * 400}, "prompt"),
    ("completions", {**GOOD, "max_tokens": -1}, "max_tokens"),
    ("completions", {**GOOD, "max_tokens": "9"}, "max_tokens"),
    ("completions", {**GOOD, "max_tokens": 398}, "max_tokens"),
    ("completions", {**GOOD, "temperature": 2.5}, "temperature"),
    ("completions", {**GOOD, "temperature": -0.1}, "temperature"),
    ("completions", {**GOOD, "top_p": 0}, "top_p"),
    ("completions", {**GOOD, "top_p": 1.01}, "top_p"),
    ("completions", {**GOOD, "seed": 2**70}, "seed"),
    ("completions", {**GOOD, "stop": ["a"] * 17}, "stop"),
    ("completions", {**GOOD, "stop": [""]}, "stop"),
    ("completions", {**GOOD, "stop_token_ids": [512]}, "stop_token_ids"),
    ("completions", {**GOOD, "stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ("completions", {**GOOD, "n": 0}, "n"),
    ("completions", {**GOOD, "n": 129}, "n"),
    ("completions", {**GOOD, "n": True}, "n"),
    ("completions", {**GOOD, "n": 3, "best_of": 2}, "best_of"),
    ("completions", {**GOOD, "best_of": 2, "stream": True}, "best_of"),
    ("completions", {**GOOD, "best_of": 200}, "best_of"),
    ("completions", {**GOOD, "logprobs": 21}, "logprobs"),
    ("completions", {**GOOD, "logprobs": True}, "logprobs"),
    ("completions", {**GOOD, "suffix": "x"}, "suffix"),
    ("completions", {**GOOD, "logit_bias": {"512": 2}}, "logit_bias"),
    ("completions", {**GOOD, "logit_bias": {"x": 2}}, "logit_bias"),
    ("completions", {**GOOD, "logit_bias": {"-1": 2}}, "logit_bias"),
    ("completions", {**GOOD, "logit_bias": {"1": 101}}, "logit_bias[...]"),
    ("completions", {**GOOD, "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ("completions", {**GOOD, "presence_penalty": 2.5}, "presence_penalty"),
    ("completions", {**GOOD, "frequency_penalty": -3}, "frequency_penalty"),
    ("completions", {**GOOD, "repetition_penalty": 0}, "repetition_penalty"),
    ("completions", {**GOOD, "top_k": -2}, "top_k"),
    ("completions", {**GOOD, "min_p": 1.5}, "min_p"),
    ("completions", {**GOOD, "min_tokens": 17}, "min_tokens"),
    ("completions", {**GOOD, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ("completions", {**GOOD, "response_format": {"type": "json_object"}}, "response_format"),
    ("completions", {**GOOD, "stream": "yes"}, "stream"),
    ("completions", {**GOOD, "stream_options": {"include_usage": True}}, "stream_options"),
    ("chat/completions", {"model": "synthetic", "messages": []}, "messages"),
    ("chat/completions", {**CHAT, "messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user"}]}, "messages[0].content"),
    (
        "chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {**CHAT, "logprobs": 1}, "logprobs"),
    ("chat/completions", {**CHAT, "top_logprobs": 3}, "top_logprobs"),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"a": "x" * 16400}}, "chat_template_kwargs"),
    ("chat/completions", {**CHAT, "chat_template_kwargs": {"messages": "x"}}, "messages"),
    ("chat/completions", {**CHAT, "continue_final_message": True}, "continue_final_message"),
    ("chat/completions", {**CHAT, "messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {**CHAT, "max_completion_tokens": 1000}, "max_completion_tokens"),
)


async def test_wrong_body_names_the_field(make_cluster: Any) -> None:
    """400 in the API's form, with the field's name in message and param; no instance hears of it."""
    async with make_cluster() as cluster:
        for path, body, param in WRONG:
            response = await cluster.client.post(f"{cluster.url}/v1/{path}", json=body)
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            assert error["param"] == param, body
            assert param in error["message"], body
            assert error["type"] == "invalid_request_error"
        assert not cluster.context.received
        assert cluster.service.running == 0


async def test_harmless_fields_are_taken(make_cluster: Any) -> None:
    """Fields that ask for nothing, or say nothing about the answer, do not stop a request."""
    async with make_cluster() as cluster:
        response = await cluster.complete(
            n=1, best_of=1, echo=False, logprobs=None, logit_bias={}, presence_penalty=0, frequency_penalty=0.0, user="me",
            metadata={"a": "b"}, suffix=None, seed=-5,
        )  # fmt: skip
        assert response.status_code == 200
        assert cluster.context.received[0].sampling.seed == 2**63 - 5
        body = {**CHAT, "response_format": {"type": "text"}, "tools": [], "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "nice"}]},
            {"role": "user", "content": "abc", "name": "me"},
        ]}  # fmt: skip
        response = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body)
        assert response.status_code == 200
        decoded = cluster.service.tokenizer.decode(cluster.context.received[1].token_ids)
        assert decoded == "system\nbe niceuser\nabcassistant\n"
        # The rest of what prompt and answer may have, where a chat does not say.
        assert cluster.context.received[1].sampling.max_tokens == 400 - len(cluster.context.received[1].token_ids)


async def test_limits_are_the_tightest_of_all_instances(make_cluster: Any) -> None:
    """Sequence length and KV pool of either side bound a request; exactly at the bound it passes."""
    async with make_cluster(prepare=False) as cluster:
        for instance, limits in ((cluster.context, (300, 101)), (cluster.generation, (400, 120))):
            instance.limits = wire.Limits(
                max_seq_len=limits[0], kv_tokens=limits[1], max_batch_size=1, max_num_tokens=64, max_queue_size=1,
                pre_active_requests=1,
            )  # fmt: skip
        await cluster.service.directory.prepare()
        assert cluster.service.token_limits() == TokenLimits(total=120, prompt=101)
        assert (await cluster.complete("a" * 100, max_tokens=20)).status_code == 200
        refused = await cluster.complete("a" * 100, max_tokens=21)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert (await cluster.complete("a" * 101, max_tokens=1)).status_code == 200
        assert (await cluster.complete("a" * 102, max_tokens=1)).json()["error"]["param"] == "prompt"
        await cluster.service.directory.aclose()


async def test_a_huge_prompt_is_refused_unread(make_cluster: Any) -> None:
    """Megabytes of prompt are refused by their length, before the tokenizer sees them."""
    async with make_cluster() as cluster:

        def never(*_: object) -> list[int]:
            raise AssertionError("encoded")

        cluster.service.tokenizer.encode_user_text = cluster.service.tokenizer.apply_chat_template = never
        try:
            huge = "a" * 8_000_000
            response = await cluster.complete(huge)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
            body = {**CHAT, "messages": [{"role": "user", "content": huge}]}
            response = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
        finally:
            del cluster.service.tokenizer.encode_user_text, cluster.service.tokenizer.apply_chat_template


async def test_a_long_prompt_is_looked_at_before_it_is_encoded(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose length would do and whose tokens are too many by far is refused by a part of it."""
    monkeypatch.setattr("meta_executor.front.checking._LOOK_CHARACTERS", 100)
    monkeypatch.setattr("meta_executor.front.checking._ENCODE_INLINE_CHARACTERS", 100)
    async with make_cluster() as cluster:

        def never(*_: object, **__: object) -> list[int]:
            raise AssertionError("encoded")

        tokenizer = cluster.service.tokenizer
        text = "a" * 1900
        assert tokenizer.tokens_at_least(text) < 400
        assert (await cluster.complete("a" * 300, max_tokens=1)).status_code == 200
        tokenizer.encode_user_text = tokenizer.apply_chat_template = never
        try:
            response = await cluster.complete(text)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
            body = {**CHAT, "messages": [{"role": "user", "content": text[:950]}] * 2}
            response = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        finally:
            del tokenizer.encode_user_text, tokenizer.apply_chat_template


async def test_other_refusals(make_cluster: Any) -> None:
    """Unknown model and route 404, wrong method 405, no JSON 400, too large 413, too many 429."""
    async with make_cluster(body_bytes_max=1000, max_requests=1) as cluster:
        post = cluster.client.post
        response = await post(f"{cluster.url}/v1/completions", json={**GOOD, "model": "gpt-5"})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert (await cluster.client.get(f"{cluster.url}/v1/models/gpt-5")).status_code == 404
        assert (await cluster.client.get(f"{cluster.url}/v1/models/synthetic")).json()["id"] == "synthetic"
        assert (await post(f"{cluster.url}/v1/nothing")).status_code == 404
        assert (await cluster.client.get(f"{cluster.url}/v1/completions")).status_code == 405
        assert (await post(f"{cluster.url}/v1/completions", content=b"{nonsense")).status_code == 400
        assert (await post(f"{cluster.url}/v1/completions", content=b"[" * 900)).status_code == 400
        assert (await post(f"{cluster.url}/v1/completions", json={**GOOD, "prompt": "a" * 1001})).status_code == 413
        cluster.context.gate = asyncio.Event()
        first = asyncio.create_task(cluster.complete())
        await cluster.context.started.wait()
        busy = await cluster.complete()
        assert (busy.status_code, busy.json()["error"]["type"]) == (429, "rate_limit_error")
        cluster.context.gate.set()
        assert (await first).status_code == 200


async def test_health_means_can_serve(make_cluster: Any) -> None:
    """503 until both roles are prepared, 200 then, 503 while draining; live says 200 all along."""
    async with make_cluster(prepare=False) as cluster:
        cluster.generation.ready = False

        async def status(path: str) -> int:
            return (await cluster.client.get(f"{cluster.url}{path}")).status_code

        assert await status("/health") == 503
        async with cluster.service.directory as directory:
            await directory.prepare()
            assert await status("/health") == 503
            assert (await cluster.client.get(f"{cluster.url}/health")).json()["ready"] == {
                "context": True,
                "generation": False,
            }
            cluster.generation.ready = True
            async with asyncio.timeout(10):
                while await status("/health") != 200:  # the directory probes by itself
                    await asyncio.sleep(0.02)
            wrong = await cluster.client.post(f"{cluster.url}/internal/drain", headers={wire.KEY_HEADER: "cd" * 32})
            assert wrong.status_code == 401
            assert await status("/health") == 200
            cluster.generation.gate = asyncio.Event()
            running = asyncio.create_task(cluster.complete(stream=True))
            await cluster.generation.started.wait()
            drained = await cluster.client.post(f"{cluster.url}/internal/drain", headers={wire.KEY_HEADER: "ab" * 32})
            assert drained.json() == {"draining": True, "active": 1}
            assert await status("/health") == 503
            assert await status("/live") == 200
            assert (await cluster.complete()).status_code == 503
            cluster.generation.gate.set()
            assert (await running).text.endswith("data: [DONE]\n\n")
            await cluster.settled()


async def test_what_operators_ask(make_cluster: Any) -> None:
    """Metrics under the field's names, the cluster's servers, an audit that agrees with itself."""
    async with make_cluster() as cluster:
        await cluster.complete()
        await cluster.complete(stream=True)
        await cluster.complete(max_tokens=-1)
        await cluster.settled()
        text = (await cluster.client.get(f"{cluster.url}/prometheus/metrics")).text
        assert text == (await cluster.client.get(f"{cluster.url}/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        for name, want in {
            "total_requests_total": 3, "stream_requests_total": 1, "nonstream_requests_total": 1,
            "validation_exceptions_total": 1, "http_exceptions_total": 0,
            "client_disconnects_total": 0, "internal_errors_total": 0,
            "total_responses_total": 2, "queue_latency_seconds_count": 2, "ctx_total_requests_total": 2,
            "ctx_completed_requests_total": 2, "ctx_error_requests_total": 0, "ctx_retry_requests_total": 0,
            "ctx_first_token_latency_seconds_count": 2, "ctx_complete_latency_seconds_count": 2,
            "gen_total_requests_total": 2, "gen_completed_requests_total": 2, "gen_error_requests_total": 0,
            "gen_first_token_latency_seconds_count": 2, "gen_complete_latency_seconds_count": 2,
            "gen_per_token_latency_seconds_count": 2,
        }.items():  # fmt: skip
            assert float(values[name]) == want, name
        info = (await cluster.client.get(f"{cluster.url}/cluster_info")).json()
        assert info["roles"]["context"]["ready"] == info["roles"]["generation"]["ready"] == 1
        assert (await cluster.client.get(f"{cluster.url}/debug/reservations")).json()["consistent"] is True
        server = (await cluster.client.get(f"{cluster.url}/server_info")).json()
        assert server["token_limit"] == 400
        assert {s["owner_id"] for s in server["servers"]} == {"ctx-0", "gen-0"}
        assert "version" in (await cluster.client.get(f"{cluster.url}/version")).json()


async def test_front_needs_no_torch_and_no_mpi() -> None:
    """Importing the front leaves torch, mpi4py and nixl alone."""
    code = (
        "import sys\n"
        "for name in ('torch', 'mpi4py', 'nixl'): sys.modules[name] = None\n"
        "import meta_executor.front, meta_executor.front.__main__\n"
        "from meta_executor.engine.tokenizer import Tokenizer\n"
        "assert Tokenizer.for_model('smollm2').encode_user_text('Hello')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", ["encode_user_text", "detokenizer"])
async def test_unknown_error_is_reported_not_hidden(
    make_cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A bug of the front, before or after the legs began, is a 500 for the client and a traceback in the log."""
    async with make_cluster() as cluster:

        def broken(*_: object) -> object:
            raise RuntimeError("deliberately broken")

        monkeypatch.setattr(cluster.service.tokenizer, where, broken)
        response = await cluster.complete()
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "deliberately broken" in caplog.text
        assert cluster.service.metrics.internal_errors.collect()[0].samples[0].value == 1
        await cluster.settled()


async def test_shapes_are_read_by_the_official_types() -> None:
    """Answers and chunks validate, strictly, against the official client's types."""
    from meta_executor.front.shapes import Piece, Shape, usage

    shape = Shape(chat=True, answer_id="1", created=1, model="m")
    body = shape.whole([Piece(0, "hi", "stop")], usage(1, 2, 0))
    whole = openai.types.chat.ChatCompletion.model_validate(body, strict=True)
    assert whole.choices[0].message.content == "hi"
    chunk = openai.types.chat.ChatCompletionChunk.model_validate_json(
        shape.piece(Piece(3, "hi"), with_usage=True), strict=True
    )
    assert (chunk.choices[0].delta.content, chunk.choices[0].index) == ("hi", 3)


@pytest.mark.parametrize("chat", [True, False])
async def test_chunks_are_whole_json_with_what_was_asked_for(chat: bool) -> None:
    """With and without counts, ids, the prompt's ids and a finish reason; what stands beside the choice stays there."""
    from meta_executor.front.shapes import AnswerIds, Piece, Shape, usage

    shape = Shape(chat=chat, answer_id="1", created=1, model='m"')
    kind = "chat.completion.chunk" if chat else "text_completion"
    head = {"id": "chatcmpl-1" if chat else "cmpl-1", "created": 1, "model": 'm"', "object": kind}
    for with_usage in (True, False):
        for ids in (None, AnswerIds([5], None), AnswerIds([5], [1, 2])):
            for reason in (None, "stop"):
                got = json.loads(shape.piece(Piece(2, "a\n", reason, ids), with_usage=with_usage))
                choice = {"index": 2, "logprobs": None, "finish_reason": reason}
                choice |= {"delta": {"content": "a\n"}} if chat else {"text": "a\n"}
                beside = {"usage": None} if with_usage else {}
                if ids is not None:
                    choice["token_ids"] = [5]
                    if ids.prompt:
                        (beside if chat else choice)["prompt_token_ids"] = [1, 2]
                assert got == head | {"choices": [choice]} | beside
    assert json.loads(shape.last(usage(1, 2, 0))) == head | {"choices": [], "usage": usage(1, 2, 0)}
    first = shape.first(0, None, with_usage=False)
    assert (first is None) is not chat
