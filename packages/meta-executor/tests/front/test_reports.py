"""What was reported of other servers with this API, tried here: each a source, a situation and what happens instead.

``docs/reports.md`` shows the table; it is drawn from here (run this file as a program), and a test compares.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from meta_executor.engine.base import SamplingParams
from meta_executor.engine.sampling import choose
from meta_executor.listener.access import KeyFile

pytestmark = pytest.mark.asyncio
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reports.md"
HELLO = "Hello, world!"
MESSAGES = [{"role": "user", "content": "Hi"}]

Try = Callable[[Any], Awaitable[None]]
REPORTS: list[tuple[str, str, str, Try]] = []
#: Tried with API keys, and pages of any origin.
WITH_KEYS: set[str] = set()


def report(source: str, situation: str, here: str, *, keys: bool = False) -> Callable[[Try], Try]:
    """A row: where it was reported, what was done, what happens here."""

    def add(tried: Try) -> Try:
        REPORTS.append((source, situation, here, tried))
        if keys:
            WITH_KEYS.add(source)
        return tried

    return add


async def chat(cluster: Any, status: int = 200, **fields: Any) -> Any:
    body = {"model": "synthetic", "messages": MESSAGES, "max_tokens": 40, **fields}
    response = await cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    return response.json() if not fields.get("stream") or status != 200 else events_of(response.text)


async def plain(cluster: Any, status: int = 200, **fields: Any) -> Any:
    response = await cluster.complete(**fields)
    assert response.status_code == status, response.text
    return response.json() if not fields.get("stream") or status != 200 else events_of(response.text)


def events_of(text: str) -> list[Any]:
    lines = [line[6:] for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@report(
    "vllm-project/vllm#16529",
    "`logit_bias` of a token beyond the vocabulary",
    "400 on `logit_bias`; nothing is dispatched",
)
async def bias_beyond_the_vocabulary(cluster: Any) -> None:
    error = await chat(cluster, 400, logit_bias={"191222": -100, "5": 5})
    assert error["error"]["param"] == "logit_bias" and not cluster.context.received


@report(
    "vllm-project/vllm#5963",
    "`logit_bias` of a word instead of a token",
    "400 on `logit_bias`; later requests are served",
)
async def bias_of_a_word(cluster: Any) -> None:
    assert (await chat(cluster, 400, logit_bias={"AI": -100}))["error"]["param"] == "logit_bias"
    await chat(cluster)


@report("vllm-project/vllm#54195", "`stop_token_ids` beyond the vocabulary", "400 on `stop_token_ids`")
async def stop_token_beyond_the_vocabulary(cluster: Any) -> None:
    assert (await chat(cluster, 400, stop_token_ids=[151645]))["error"]["param"] == "stop_token_ids"


@report("vllm-project/vllm#55164", "more `logit_bias` entries than the engine has room for", "400 on `logit_bias`")
async def too_many_biases(cluster: Any) -> None:
    assert (await chat(cluster, 400, logit_bias={str(i): 1 for i in range(2000)}))["error"]["param"] == "logit_bias"


@report("vllm-project/vllm#4529", "`seed` of 2**64", "400 on `seed`")
async def huge_seed(cluster: Any) -> None:
    assert (await chat(cluster, 400, seed=2**64))["error"]["param"] == "seed"


@report(
    "vllm-project/vllm#6521",
    "`echo` with `logprobs` and `max_tokens` 0",
    "the prompt, its tokens' log probabilities, and no token more",
)
async def echo_with_logprobs_and_no_tokens(cluster: Any) -> None:
    answer = await plain(cluster, prompt="Yes", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == ("Yes", "length", 0)
    told = choice["logprobs"]
    assert told["tokens"] == ["Y", "e", "s"] and told["text_offset"] == [0, 1, 2]
    assert told["token_logprobs"][0] is None and all(one < 0 for one in told["token_logprobs"][1:])
    assert (await plain(cluster, prompt="Yes", echo=True, max_tokens=0))["choices"][0]["text"] == "Yes"


@report("vllm-project/vllm#10432", "`max_tokens` 0", "an empty answer that ended by its length")
async def no_tokens(cluster: Any) -> None:
    choice = (await plain(cluster, max_tokens=0))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")


@report("vllm-project/vllm#6707", "no `max_tokens`", "what fits, at most the model's limit")
async def no_max_tokens(cluster: Any) -> None:
    await chat(cluster, max_tokens=None)
    body = cluster.context.received[0]
    assert body.sampling.max_tokens == 400 - len(body.token_ids)


@report("vllm-project/vllm#2703", "`echo` in a stream", "the prompt once, with the first piece")
async def echo_in_a_stream(cluster: Any) -> None:
    events = await plain(cluster, prompt="abc", echo=True, stream=True)
    assert "".join(event["choices"][0]["text"] for event in events) == f"abc{HELLO}"


@report("vllm-project/vllm#19650", "chunks without `finish_reason`", "null in every chunk but the last")
async def finish_reason_in_every_chunk(cluster: Any) -> None:
    reasons = [event["choices"][0]["finish_reason"] for event in await chat(cluster, stream=True)]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}


@report(
    "vllm-project/vllm#27572", "a stream that ends with a null `finish_reason`", "the last chunk of each answer has one"
)
async def a_reason_at_the_end(cluster: Any) -> None:
    last: dict[int, Any] = {}
    for event in await chat(cluster, stream=True, n=3):
        last[event["choices"][0]["index"]] = event["choices"][0]["finish_reason"]
    assert last == {0: "stop", 1: "stop", 2: "stop"}


@report(
    "vllm-project/vllm#48853",
    "a prompt of ids that ends within a character",
    "its text does not come back in the answer",
)
async def prompt_that_ends_within_a_character(cluster: Any) -> None:
    ids = cluster.service.tokenizer.encode_user_text("Hello world \U0001f336")[:-1]
    events = await plain(cluster, prompt=ids, stream=True)
    assert "".join(event["choices"][0]["text"] for event in events) == HELLO


@report(
    "vllm-project/vllm#6626", "`logprobs` of tokens that are parts of characters", "`bytes:` and their values, distinct"
)
async def tokens_that_are_no_characters(cluster: Any) -> None:
    cluster.context.answer = cluster.generation.answer = "\U0001f336"
    told = (await plain(cluster, logprobs=0))["choices"][0]["logprobs"]["tokens"]
    assert told == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x8c", "bytes:\\xb6"]


@report("vllm-project/vllm#54947", "a client that closes its stream", "the leg that runs is told to stop")
async def a_client_that_leaves(cluster: Any) -> None:
    cluster.generation.line_gate = asyncio.Event()
    body = {"model": "synthetic", "prompt": "a", "max_tokens": 40, "stream": True}
    async with cluster.client.stream("POST", f"{cluster.url}/v1/completions", json=body) as stream:
        await anext(stream.aiter_bytes())
        await cluster.generation.started.wait()
    while not cluster.generation.aborts:  # the test's own deadline ends it
        await asyncio.sleep(0.01)
    cluster.generation.line_gate.set()
    await cluster.settled()
    assert cluster.generation.aborts == [cluster.generation.received[0].request_id]


@report(
    "vllm-project/vllm#10806", "a client killed while it waits for a whole answer", "the leg that runs is told to stop"
)
async def a_client_that_is_killed(cluster: Any) -> None:
    cluster.context.gate = asyncio.Event()
    task = asyncio.create_task(cluster.complete())
    await cluster.context.started.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await cluster.settled()
    assert cluster.context.aborts


@report("vllm-project/vllm#2441", "lists of prompts, of ids, in one request", "an answer of each, in order")
async def lists_of_prompts(cluster: Any) -> None:
    for prompt in (["a", "b"], [[5], [6, 7]]):
        assert [one["index"] for one in (await plain(cluster, prompt=prompt))["choices"]] == [0, 1]


@report(
    "sgl-project/sglang#954", "usage of a stream is null though asked for", "the last chunk has the counts, no choices"
)
async def usage_of_a_stream(cluster: Any) -> None:
    *_, last = await chat(cluster, stream=True, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 14


@report(
    "kubeai-project/kubeai#283", "counts in every chunk though only the last was asked for", "null in all but the last"
)
async def usage_only_at_the_end(cluster: Any) -> None:
    *events, _ = await chat(cluster, stream=True, stream_options={"include_usage": True})
    assert {event["usage"] for event in events} == {None}


@report("sgl-project/sglang#21583", "log probabilities of a stream repeat in each chunk", "each token's once")
async def logprobs_of_a_stream(cluster: Any) -> None:
    told = []
    for event in await chat(cluster, stream=True, logprobs=True):
        told += (event["choices"][0]["logprobs"] or {"content": []})["content"]
    assert "".join(one["token"] for one in told) == HELLO


@report("sgl-project/sglang#1998", "`logprobs` 0 taken for none", "each token's own, without others")
async def logprobs_zero(cluster: Any) -> None:
    told = (await plain(cluster, logprobs=0))["choices"][0]["logprobs"]
    assert len(told["token_logprobs"]) == len(HELLO) and set(map(str, told["top_logprobs"])) == {"None"}


@report("BerriAI/litellm#10686", "`finish_reason` lost in a stream with log probabilities", "it is there")
async def reason_beside_logprobs(cluster: Any) -> None:
    events = await chat(cluster, stream=True, logprobs=True, top_logprobs=1)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@report("modular/modular#5085", "`logprobs` null in a chat stream", "in every chunk with tokens")
async def logprobs_of_a_chat_stream(cluster: Any) -> None:
    pieces = [event["choices"][0] for event in await chat(cluster, stream=True, logprobs=True)]
    assert all(piece["logprobs"]["content"] for piece in pieces if piece["delta"].get("content"))


@report("NVIDIA/TensorRT-LLM#3280", "chunks that hold the whole answer", "each piece once")
async def pieces_not_wholes(cluster: Any) -> None:
    events = await plain(cluster, stream=True)
    assert "".join(event["choices"][0]["text"] for event in events) == HELLO


@report("NVIDIA/TensorRT-LLM#10824", "`min_tokens` does not reach the engine", "it is in both legs, with `ignore_eos`")
async def min_tokens_reach_the_engine(cluster: Any) -> None:
    await plain(cluster, min_tokens=20, ignore_eos=True)
    for leg in (cluster.context.received[0], cluster.generation.received[0]):
        assert (leg.sampling.min_tokens, 2 in leg.sampling.stop_token_ids) == (20, False)


@report(
    "vllm-project/aibrix#2013",
    "a generation leg though the first token ended the answer",
    "no such leg; text, reason and counts",
)
async def ended_at_the_first_token(cluster: Any) -> None:
    events = await chat(cluster, stream=True, max_tokens=1, stream_options={"include_usage": True})
    assert not cluster.generation.received
    assert events[-2]["choices"][0]["finish_reason"] == "length" and events[-1]["usage"]["completion_tokens"] == 1


@report("mudler/LocalAI#3533", "`stop` though the length ended the answer", "`length`")
async def length_is_length(cluster: Any) -> None:
    assert (await chat(cluster, max_tokens=5))["choices"][0]["finish_reason"] == "length"


@report("InternLM/lmdeploy#1589", "an empty answer where prompt and `max_tokens` do not fit", "400 that says what fits")
async def what_does_not_fit(cluster: Any) -> None:
    error = (await chat(cluster, 400, max_tokens=400))["error"]
    assert error["code"] == "context_length_exceeded" and "400" in error["message"]


@report("ollama/ollama#4357", "an empty string as `finish_reason`", "null until the end")
async def no_empty_reason(cluster: Any) -> None:
    reasons = {event["choices"][0]["finish_reason"] for event in await chat(cluster, stream=True)}
    assert reasons == {None, "stop"}


@report(
    "ggml-org/llama.cpp#23463",
    "500 for a `response_format` that is not supported",
    "400 on `response_format` that says why",
)
async def response_format(cluster: Any) -> None:
    error = await chat(
        cluster, 400, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    )
    assert error["error"]["param"] == "response_format" and "constrained decoding" in error["error"]["message"]


@report("tmc/langchaingo#667", "500 for content in parts", "text parts are joined")
async def content_in_parts(cluster: Any) -> None:
    await chat(
        cluster,
        messages=[{"role": "user", "content": [{"type": "text", "text": "How "}, {"type": "text", "text": "many"}]}],
    )
    assert "How many" in cluster.service.tokenizer.decode(cluster.context.received[0].token_ids)


@report("JamePeng/llama-cpp-python#113", "a message without `refusal`", "it is there, null")
async def refusal_is_there(cluster: Any) -> None:
    assert (await chat(cluster))["choices"][0]["message"] == {"role": "assistant", "content": HELLO, "refusal": None}


@report("ggml-org/llama.cpp#11346", "`logprobs` of a completion stay null", "told")
async def logprobs_of_a_completion(cluster: Any) -> None:
    assert len((await plain(cluster, logprobs=1, max_tokens=1))["choices"][0]["logprobs"]["tokens"]) == 1


@report(
    "ggml-org/llama.cpp#11538", "a stop string over several tokens is ignored", "it ends the answer and is not in it"
)
async def stop_string_over_tokens(cluster: Any) -> None:
    choice = (await plain(cluster, stop=["o, w"]))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hell", "stop")


@report("ggml-org/llama.cpp#11738", "the server ends at text that is not UTF-8", "a broken character is replaced")
async def text_that_is_not_utf8(cluster: Any) -> None:
    cluster.context.answer = cluster.generation.answer = "aż"
    assert (await plain(cluster, max_tokens=2))["choices"][0]["text"] == "a\ufffd"


@report("ggml-org/llama.cpp#15001", "a prompt of token ids is refused", "taken as it is")
async def prompt_of_ids(cluster: Any) -> None:
    await plain(cluster, prompt=[5, 6, 7])
    assert cluster.context.received[0].token_ids == [5, 6, 7]


@report(
    "ggml-org/llama.cpp#24496", "generation goes on for a client that has left", "both legs end; nothing is reserved"
)
async def nothing_stays_for_who_left(cluster: Any) -> None:
    await a_client_that_leaves(cluster)


@report("ztjhz/BetterChatGPT#248", "`max_tokens` null is refused", "taken as not given")
async def null_is_not_given(cluster: Any) -> None:
    nothing = ("temperature", "top_p", "n", "stop", "seed", "user", "logit_bias", "stream_options", "max_tokens", "tools",
               "logprobs", "response_format", "presence_penalty", "top_k", "stop_token_ids", "metadata")  # fmt: skip
    assert (await chat(cluster, **dict.fromkeys(nothing)))["choices"][0]["message"]["content"] == HELLO


@report("ai-dynamo/dynamo#312", "/v1/completions knows no model that chat knows", "one model, both endpoints")
async def both_endpoints_know_the_model(cluster: Any) -> None:
    await chat(cluster)
    await plain(cluster)


@report("ai-dynamo/dynamo#3953", "prompts times `n` without a bound", "128 by default; more is a 400")
async def answers_are_bounded(cluster: Any) -> None:
    assert (await plain(cluster, 400, prompt=["a"] * 65, n=2))["error"]["param"] == "n"


@report(
    "NVIDIA-NeMo/Guardrails#1633", "400 for a field that the server does not know", "taken; named in `x-unknown-fields`"
)
async def a_field_that_nobody_knows(cluster: Any) -> None:
    response = await cluster.complete(stream_usage=True)
    assert (response.status_code, response.headers["x-unknown-fields"]) == (200, "stream_usage")


@report(
    "vllm-project/vllm#12886", "errors that are not in the API's shape", "an `error` with message, type, param and code"
)
async def errors_in_shape(cluster: Any) -> None:
    for body in (b"{", b'{"model": "synthetic"}', b'{"model": "x", "prompt": "a"}', b"[]", b""):
        response = await cluster.client.post(f"{cluster.url}/v1/completions", content=body)
        assert response.status_code in (400, 404)
        assert set(response.json()) == {"error"} and set(response.json()["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }


@report("vllm-project/vllm#749", "a failure of the server without an `error` object", "500 in the same shape")
async def failures_in_shape(cluster: Any) -> None:
    def broken(text: str) -> list[int]:
        raise RuntimeError("deliberately broken")

    cluster.service.tokenizer = cluster.service._checker._tokenizer = Broken(cluster.service.tokenizer, broken)
    assert set((await plain(cluster, 500))["error"]) == {"message", "type", "param", "code"}


class Broken:
    """A tokenizer of which one function fails."""

    def __init__(self, tokenizer: Any, encode: Callable[[str], list[int]]) -> None:
        self._tokenizer = tokenizer
        self.encode_user_text = encode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@report("vllm-project/vllm#35438", "500 for a `response_format` that is malformed", "400 on `response_format`")
async def malformed_response_format(cluster: Any) -> None:
    error = await chat(cluster, 400, response_format={"type": "json_schema", "schema": {"type": "object"}})
    assert error["error"]["param"] == "response_format"


@report("sgl-project/sglang#7035", "any name of a model is answered", "404 `model_not_found` that names the served one")
async def another_models_name(cluster: Any) -> None:
    error = (await chat(cluster, 404, model="DeepSeek-XXX"))["error"]
    assert error["code"] == "model_not_found" and "synthetic" in error["message"]


@report("vllm-project/vllm#15845", "the served name is not in the answer", "the name that was asked for is")
async def the_name_in_the_answer(cluster: Any) -> None:
    assert (await chat(cluster))["model"] == "synthetic"
    assert {event["model"] for event in await chat(cluster, stream=True)} == {"synthetic"}


@report("vllm-project/vllm#2754", "`top_k` beside the API's fields does not reach the engine", "it is in both legs")
async def top_k_reaches_the_engine(cluster: Any) -> None:
    await plain(cluster, temperature=0.000001, top_k=3)
    for leg in (cluster.context.received[0], cluster.generation.received[0]):
        assert (leg.sampling.temperature, leg.sampling.top_k) == (0.000001, 3)


@report("vllm-project/vllm#1623", "a temperature or `top_p` of 0.0001 gives NaN", "the likeliest token")
async def tiny_temperature(cluster: Any) -> None:
    logits = np.array([90.0, -40.0, 100.0, 99.0], np.float32)
    for sampling in (SamplingParams(1, temperature=1e-4), SamplingParams(1, temperature=1.0, top_p=1e-4)):
        assert {choose(logits.copy(), sampling, position) for position in range(50)} == {2}


@report(
    "NVIDIA/TensorRT-LLM#17158",
    "NaN passes for `top_p`, `min_p` and `temperature`",
    "refused, in a body and in the engine",
)
async def not_a_number(cluster: Any) -> None:
    for field in ("top_p", "min_p", "temperature"):
        body = b'{"model": "synthetic", "prompt": "a", "' + field.encode() + b'": NaN}'
        assert (await cluster.client.post(f"{cluster.url}/v1/completions", content=body)).status_code == 400
        with pytest.raises(ValueError, match=field):
            SamplingParams(1, **{field: float("nan")})  # type: ignore[arg-type]


@report("EricLBuehler/candle-vllm#307", "`top_p` beside temperature 0 is refused", "taken; the likeliest token")
async def top_p_beside_greedy(cluster: Any) -> None:
    await chat(cluster, temperature=0, top_p=0.95)


@report(
    "camel-ai/camel#3621",
    "a huge `max_tokens` breaks the service",
    "400 that says what fits; later requests are served",
)
async def huge_max_tokens(cluster: Any) -> None:
    assert (await chat(cluster, 400, max_tokens=2_080_000))["error"]["code"] == "context_length_exceeded"
    await chat(cluster)


@report("maximhq/bifrost#1920", "`chat_template_kwargs` does not reach the template", "known, and given to it")
async def template_variables(cluster: Any) -> None:
    response = await cluster.client.post(
        f"{cluster.url}/v1/chat/completions",
        json={"model": "synthetic", "messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}},
    )
    assert response.status_code == 200 and "x-unknown-fields" not in response.headers


@report("ai-dynamo/dynamo#12151", "liveness fails while the engine is not ready", "`/live` is 200, `/health` 503")
async def alive_and_not_ready(cluster: Any) -> None:
    cluster.service.directory.remove_server(cluster.generation.url)
    assert (await cluster.client.get(f"{cluster.url}/live")).status_code == 200
    assert (await cluster.client.get(f"{cluster.url}/health")).status_code == 503
    cluster.instances.remove(cluster.generation)


@report("Neroued/ninfer#155", "`/health` is ok while nothing can be served", "503 that says which role is missing")
async def health_means_can_serve(cluster: Any) -> None:
    cluster.service.directory.remove_server(cluster.context.url)
    assert (await cluster.client.get(f"{cluster.url}/health")).json()["ready"] == {"context": False, "generation": True}
    cluster.instances.remove(cluster.context)


@report(
    "ai-dynamo/dynamo#8590", "requests come while the service leaves", "503 with `retry-after`; health says draining"
)
async def a_service_that_leaves(cluster: Any) -> None:
    cluster.service.start_draining()
    response = await cluster.complete()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert (await cluster.client.get(f"{cluster.url}/health")).json()["status"] == "draining"


@report(
    "ggml-org/llama.cpp#6544",
    "a browser's question before its request is asked for a key",
    "answered without one",
    keys=True,
)
async def preflight_with_keys(cluster: Any) -> None:
    ask = {"origin": "https://app", "access-control-request-method": "POST"}
    async with httpx.AsyncClient(trust_env=False) as browser:
        allowed = await browser.options(f"{cluster.url}/v1/chat/completions", headers=ask)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "*")
        refused = await browser.post(f"{cluster.url}/v1/chat/completions", json={}, headers={"origin": "https://app"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")


@report("vllm-project/vllm#18893", "paths beside `/v1` need no key", "all but health, live and ping do", keys=True)
async def every_path_needs_a_key(cluster: Any) -> None:
    async with httpx.AsyncClient(trust_env=False) as stranger:
        for path in ("/v1/models", "/load", "/tokenize", "/detokenize", "/version", "/metrics", "/server_info", "/docs",
                     "/openapi.json", "/perf_metrics", "/debug/routing", "/nowhere", "/internal/drain"):  # fmt: skip
            assert (await stranger.get(cluster.url + path)).status_code == 401, path
        for path in ("/health", "/live", "/ping"):
            assert (await stranger.get(cluster.url + path)).status_code == 200, path


@report("janhq/jan#4837", "500 for a text part whose text is an object", "400 that names the part's field")
async def a_part_that_is_no_text(cluster: Any) -> None:
    content = [{"type": "text", "text": {"value": "Hola que tal", "annotations": []}}]
    error = (await chat(cluster, 400, messages=[{"role": "user", "content": content}]))["error"]
    assert error["param"] == "messages[0].content[0].text"


@report(
    "containers/ramalama#752",
    "the server ends at a request with `repeat_penalty`",
    "taken; named in `x-unknown-fields`",
)
async def another_servers_field(cluster: Any) -> None:
    response = await cluster.complete(temperature=1.5, top_k=100, top_p=1.0, repeat_penalty=1.2)
    assert (response.status_code, response.headers["x-unknown-fields"]) == (200, "repeat_penalty")


@report("vllm-project/vllm-omni#445", "`max_tokens` of a chat has no effect", "so many tokens, and `length`")
async def max_tokens_of_a_chat(cluster: Any) -> None:
    for tokens in (1, 3, 7):
        answer = await chat(cluster, max_tokens=tokens)
        assert (answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]) == (
            HELLO[:tokens],
            tokens,
        )


@report("vllm-project/vllm#8627", "characters of several tokens come broken", "whole, also over a stream")
async def characters_of_several_tokens(cluster: Any) -> None:
    cluster.context.answer = cluster.generation.answer = "\u6211\u65e0\u6cd5\u8bbf\u95ee"
    assert (await plain(cluster))["choices"][0]["text"] == cluster.context.answer
    texts = [event["choices"][0]["text"] for event in await plain(cluster, stream=True)]
    assert "".join(texts) == cluster.context.answer and not any("\ufffd" in text for text in texts)


@report("huggingface/transformers#45443", "another model's name is silently replaced", "404; nothing is computed")
async def another_name_is_not_replaced(cluster: Any) -> None:
    await plain(cluster, 404, model="Qwen/Qwen2.5-0.5B-Instruct")
    assert not cluster.context.received


@pytest.mark.parametrize("row", REPORTS, ids=[source for source, *_ in REPORTS])
async def test_what_was_reported_elsewhere(make_cluster: Any, tmp_path: Path, row: tuple[str, str, str, Try]) -> None:
    """The situation, and what happens here; then nothing is left of it."""
    more: dict[str, Any] = {}
    if row[0] in WITH_KEYS:
        path = tmp_path / "keys"
        path.write_text("ann " + "k" * 32 + "\n")
        path.chmod(0o600)
        more = {"keys": KeyFile(path), "cors_origins": ("*",)}
    async with make_cluster(**more) as cluster:
        await row[3](cluster)
        await cluster.settled()


def drawn() -> str:
    """The table as the docs show it."""
    lines = ["| reported of | situation | here |", "|---|---|---|"]
    for source, situation, here, _ in REPORTS:
        name, _, number = source.partition("#")
        lines.append(f"| [{source}](https://github.com/{name}/issues/{number}) | {situation} | {here} |")
    return "\n".join(lines)


async def test_the_table_in_the_docs_is_this_one() -> None:
    """Run this file as a program to draw it anew."""
    shown = DOCS.read_text("utf-8").split("<!-- table: begin -->")[1].split("<!-- table: end -->")[0].strip()
    assert shown == drawn()


if __name__ == "__main__":
    head = (
        "# What was reported of other servers with this API\n\n"
        "Each was tried here: `tests/front/test_reports.py`, from which this table is drawn.\n\n"
    )
    DOCS.write_text(f"{head}<!-- table: begin -->\n{drawn()}\n<!-- table: end -->\n", "utf-8")
