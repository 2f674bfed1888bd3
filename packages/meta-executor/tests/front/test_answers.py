"""Several answers of one request, what is told of them, and their counts and ends in every combination."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.asyncio
STYLES = pytest.mark.parametrize("style", ["context_first", "generation_first"])
HELLO = "Hello, world!"


class Got:
    """A reply, in one piece or as a stream, in the same words."""

    def __init__(self, text: str, *, chat: bool, stream: bool) -> None:
        self.texts: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.usage: Mapping[str, Any] = {}
        self.counts: list[Mapping[str, Any]] = []
        if not stream:
            body = json.loads(text)
            self.usage = body["usage"]
            for choice in body["choices"]:
                self._take(choice, choice["message"]["content"] if chat else choice["text"])
            return
        lines = [line[6:] for line in text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        for line in lines[:-1]:
            event = json.loads(line)
            if event.get("usage"):
                self.usage = event["usage"]
                self.counts.append(event["usage"])
            for choice in event["choices"]:
                self._take(choice, choice["delta"].get("content", "") if chat else choice["text"])

    def _take(self, choice: Mapping[str, Any], text: str) -> None:
        index = choice["index"]
        assert index not in self.reasons, "a piece after the last one"
        self.texts[index] = self.texts.get(index, "") + text
        if choice["finish_reason"] is not None:
            self.reasons[index] = choice["finish_reason"]
        told = choice["logprobs"]
        if told is not None:
            parts = told["content"] if "content" in told else list(zip(*(told[name] for name in NAMES)))
            self.logprobs.setdefault(index, []).extend(parts)


NAMES = ("tokens", "token_logprobs", "text_offset", "top_logprobs")


async def ask(cluster: Any, *, chat: bool = False, stream: bool = False, **fields: Any) -> Got:
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Say hello"}
    if stream:
        fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    body = {"model": "synthetic", "max_tokens": 40, **prompt, **fields}
    url = f"{cluster.url}/v1/{'chat/completions' if chat else 'completions'}"
    response = await cluster.client.post(url, json=body)
    assert response.status_code == 200, response.text
    return Got(response.text, chat=chat, stream=stream)


ENDS: dict[str, tuple[dict[str, Any], str, str, int]] = {
    # what is asked, the answer's text, why it ended, its tokens
    "end token": ({}, HELLO, "stop", 14),
    "stop string": ({"stop": "wor"}, "Hello, ", "stop", 10),
    "stop string over a border": ({"stop": ["o, w", "zzz"]}, "Hell", "stop", 8),
    "stop token": ({}, "Hello", "stop", 6),
    "length": ({"max_tokens": 5}, "Hello", "length", 5),
    "first token by length": ({"max_tokens": 1}, "H", "length", 1),
    "no tokens": ({"max_tokens": 0}, "", "length", 0),
    "length at a stop string": ({"stop": "world!!", "max_tokens": 13}, HELLO, "length", 13),
    "stop string too early": ({"stop": "l", "min_tokens": 4}, "Hello, wor", "stop", 11),
}


@STYLES
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_counts_and_ends_in_every_combination(make_cluster: Any, style: str, chat: bool, stream: bool) -> None:
    """Stream or not, one answer or three, each way to end: text, reason and counts are the same ones."""
    async with make_cluster(style) as cluster:
        comma = cluster.service.tokenizer.encode_user_text(",")
        for (name, (fields, text, reason, tokens)), n in itertools.product(ENDS.items(), (1, 3)):
            fields = {**fields, "stop_token_ids": comma} if name == "stop token" else fields
            got = await ask(cluster, chat=chat, stream=stream, n=n, **fields)
            where = (name, n)
            assert got.texts == dict.fromkeys(range(n), text), where
            assert got.reasons == dict.fromkeys(range(n), reason), where
            prompt = got.usage["prompt_tokens"]
            assert prompt == (9 if not chat else len(cluster.context.received[0].token_ids)), where
            assert got.usage["completion_tokens"] == n * tokens, where
            assert got.usage["total_tokens"] == prompt + n * tokens, where
        await cluster.settled()


@STYLES
async def test_several_prompts_in_one_request(make_cluster: Any, style: str) -> None:
    """Texts or ids: an answer of each, in order, counted together; a chat client's own library reads it."""
    async with make_cluster(style) as cluster:
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        answer = await client.completions.create(
            model="synthetic", prompt=["a", "bb", "ccc"], n=2, max_tokens=3, echo=True, temperature=0.5, seed=7
        )
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == ["aHel", "aHel", "bbHel", "bbHel", "cccHel", "cccHel"]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 18)
        seeds = {(len(one.token_ids), one.sampling.seed) for one in cluster.context.received}
        assert seeds == {(length, seed) for length in (1, 2, 3) for seed in (7, 8)}
        ids = await client.completions.create(model="synthetic", prompt=[[5, 6], [7]], max_tokens=2)
        assert [choice.text for choice in ids.choices] == ["He", "He"]
        assert sorted(one.token_ids for one in cluster.context.received[-2:]) == [[5, 6], [7]]
        texts = dict.fromkeys(range(2), "")
        stream = await client.completions.create(
            model="synthetic", prompt=["a", "bb"], max_tokens=4, echo=True, stream=True
        )
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == {0: "aHell", 1: "bbHell"}
        await client.close()
        await cluster.settled()


async def test_the_first_of_several_is_what_one_alone_would_be(make_cluster: Any) -> None:
    """Its seed is the request's own; those after it have others, also at the end of the range."""
    async with make_cluster() as cluster:
        await ask(cluster, seed=2**63 - 1, n=3, temperature=1)
        assert sorted(one.sampling.seed for one in cluster.context.received) == [0, 1, 2**63 - 1]


async def test_best_of_gives_the_likeliest(make_cluster: Any) -> None:
    """By the mean log probability per token; all candidates are counted, and nothing is told that was not asked for."""
    async with make_cluster() as cluster:
        for instance in cluster.instances:
            instance.malus = 1.0
        got = await ask(cluster, best_of=4, n=2, seed=18, return_token_ids=True)
        assert got.reasons == {0: "stop", 1: "stop"} and not got.logprobs
        assert got.usage["completion_tokens"] == 4 * 14
        # Seeds 18, 19, 20 and 21: the fake takes 8, 9, 0 and 1 from each token.
        told = await ask(cluster, best_of=4, n=2, seed=18, logprobs=0)
        firsts = [told.logprobs[index][0][1] for index in (0, 1)]
        token = cluster.service.tokenizer.encode_user_text("H")[0]
        assert firsts == [pytest.approx(-token / 100), pytest.approx(-token / 100 - 1)]


@STYLES
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_every_token(make_cluster: Any, style: str, stream: bool) -> None:
    """Each token of the text once and in order, with the likeliest beside it; the token that ended the answer is not shown."""
    async with make_cluster(style) as cluster:
        ids = cluster.service.tokenizer.encode_user_text(HELLO)
        plain = await ask(cluster, stream=stream, logprobs=2, n=2)
        for index in (0, 1):
            told = plain.logprobs[index]
            assert "".join(token for token, *_ in told) == HELLO
            assert [logprob for _, logprob, *_ in told] == [pytest.approx(-one / 100) for one in ids]
            assert [offset for _, _, offset, _ in told] == list(range(len(HELLO)))
            assert all(len(top) == 2 and top[token] == logprob for token, logprob, _, top in told)
        chat = await ask(cluster, chat=True, stream=stream, logprobs=True, top_logprobs=1)
        assert bytes(byte for one in chat.logprobs[0] for byte in one["bytes"]).decode() == HELLO
        assert all(one["top_logprobs"][0]["token"] == one["token"] for one in chat.logprobs[0])
        without = await ask(cluster, chat=True, stream=stream, logprobs=True)
        assert [one["top_logprobs"] for one in without.logprobs[0]] == [[]] * len(HELLO)
        assert not (await ask(cluster, chat=True, stream=stream, logprobs=False)).logprobs
        cut = await ask(cluster, stream=stream, logprobs=0, stop="wor")
        assert "".join(token for token, *_ in cut.logprobs[0]) == "Hello, wor"
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        answer = await client.chat.completions.create(
            model="synthetic", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=3, max_tokens=2
        )
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content is not None
        assert [len(one.top_logprobs) for one in answer.choices[0].logprobs.content] == [3, 3]
        await client.close()
        await cluster.settled()


async def test_an_instance_that_tells_no_log_probabilities_is_a_502(make_cluster: Any) -> None:
    """Asked for and not given: the client hears of it rather than get fewer than tokens."""
    async with make_cluster() as cluster:
        cluster.context.tells_nothing = True
        response = await cluster.complete(logprobs=1)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "incomplete")
        await cluster.settled()


async def test_counts_in_every_chunk(make_cluster: Any) -> None:
    """continuous_usage_stats: growing, complete at the end; without include_usage it asks for nothing."""
    async with make_cluster() as cluster:
        options = {"include_usage": True, "continuous_usage_stats": True}
        got = await ask(cluster, stream=True, chat=True, n=2, stream_options=options)
        counts = [one["completion_tokens"] for one in got.counts]
        assert counts == sorted(counts) and counts[-1] == 28 and len(set(counts)) > 4
        alone = await cluster.complete(stream=True, stream_options={"continuous_usage_stats": True})
        assert '"usage"' not in alone.text


async def test_sampling_reaches_both_legs(make_cluster: Any) -> None:
    """Every field that changes the choice, by name, over the wire."""
    async with make_cluster() as cluster:
        fields: dict[str, Any] = {
            "temperature": 0.7, "top_p": 0.8, "top_k": 40, "min_p": 0.05, "min_tokens": 3, "presence_penalty": 0.5,
            "frequency_penalty": -0.5, "repetition_penalty": 1.1, "seed": 9,
        }  # fmt: skip
        assert (await cluster.complete(**fields, logit_bias={"5": -100, "7": 2.5})).status_code == 200
        for leg in (cluster.context.received[0].sampling, cluster.generation.received[0].sampling):
            assert {name: getattr(leg, name) for name in fields} == fields
            assert leg.logit_bias == [(5, -100.0), (7, 2.5)]
            assert leg.max_tokens == 64
        await cluster.complete(top_k=-1)
        assert cluster.context.received[1].sampling.top_k == 0


async def test_one_answer_that_fails_ends_them_all(make_cluster: Any) -> None:
    """The others are stopped, nothing stays reserved, and the client gets the first reason."""
    async with make_cluster() as cluster:
        cluster.generation.refusals = [("ENGINE_FAILED", "step 3 failed")]
        response = await cluster.complete(n=4)
        assert response.status_code == 502 and "step 3 failed" in response.json()["error"]["message"]
        await cluster.settled()


async def test_answers_count_as_requests(make_cluster: Any) -> None:
    """Several answers are as many places; more than there are at all is the request's fault, not the moment's."""
    async with make_cluster(max_requests=8, max_requests_per_client=3) as cluster:
        refused = await cluster.complete(n=4)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        cluster.context.gate = asyncio.Event()
        running = asyncio.create_task(cluster.complete(n=2))
        await cluster.context.started.wait()
        assert (await cluster.client.get(f"{cluster.url}/load")).json() == {"server_load": 2}
        busy = await cluster.complete(n=2)
        assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
        cluster.context.gate.set()
        assert (await running).status_code == 200
        await cluster.settled()


async def test_an_answer_without_tokens_needs_no_instance(make_cluster: Any) -> None:
    """max_tokens 0 with echo gives the prompt back; a prompt that fills the context is allowed then."""
    async with make_cluster() as cluster:
        got = await ask(cluster, prompt="a" * 400, max_tokens=0, echo=True)
        assert (got.texts, got.reasons) == ({0: "a" * 400}, {0: "length"})
        assert got.usage["total_tokens"] == 400
        assert not cluster.context.received and not cluster.generation.received
        assert (await cluster.complete(prompt="a" * 401, max_tokens=0)).status_code == 400
