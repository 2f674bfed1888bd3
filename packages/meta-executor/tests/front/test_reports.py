"""What was reported of other servers with this API, tried here: each a source, a situation and what happens instead.

``docs/reports.md`` shows the table; it is drawn from here (run this file as a program), and a test compares.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio
DOCS = Path(__file__).resolve().parents[2] / "docs" / "reports.md"
HELLO = "Hello, world!"
MESSAGES = [{"role": "user", "content": "Hi"}]

Try = Callable[[Any], Awaitable[None]]
REPORTS: list[tuple[str, str, str, Try]] = []


def report(source: str, situation: str, here: str) -> Callable[[Try], Try]:
    """A row: where it was reported, what was done, what happens here."""

    def add(tried: Try) -> Try:
        REPORTS.append((source, situation, here, tried))
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
    "400 on `echo` that says why; without `logprobs` the prompt",
)
async def echo_with_logprobs_and_no_tokens(cluster: Any) -> None:
    error = await plain(cluster, 400, echo=True, logprobs=1, max_tokens=0)
    assert error["error"]["param"] == "echo"
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


@pytest.mark.parametrize("row", REPORTS, ids=[source for source, *_ in REPORTS])
async def test_what_was_reported_elsewhere(make_cluster: Any, row: tuple[str, str, str, Try]) -> None:
    """The situation, and what happens here; then nothing is left of it."""
    async with make_cluster() as cluster:
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
