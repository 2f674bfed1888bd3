"""Several answers of one request, what is told of them, and their counts and ends in every combination."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.asyncio
STYLES = pytest.mark.parametrize("style", ["context_first", "generation_first"])
TOPOLOGIES = ("context_first", "generation_first", "generation alone")
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
    "stop string over the least length": ({"stop": "lo, w", "min_tokens": 6}, "Hel", "stop", 8),
    "stop string at once": ({"stop": "H"}, "", "stop", 1),
    "stop string at once, and the length": ({"stop": "H", "max_tokens": 1}, "", "stop", 1),
    "stop string with the last token": ({"stop": "lo", "max_tokens": 5}, "Hel", "stop", 5),
    "stop token at once": ({}, "", "stop", 1),
    "stop token with the last token": ({"max_tokens": 6}, "Hello", "stop", 6),
    "end token at once": ({}, "", "stop", 1),
    "length at the beginning of a stop string": ({"stop": "o, w", "max_tokens": 5}, "Hello", "length", 5),
}


@pytest.mark.parametrize("style", TOPOLOGIES)
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_counts_and_ends_in_every_combination(make_cluster: Any, style: str, chat: bool, stream: bool) -> None:
    """Stream or not, one answer or three, each way to end: text, reason and counts are the same, in the metrics too."""
    alone = style == "generation alone"
    reasons: Counter[str] = Counter()
    tokens_in_all = 0
    async with make_cluster("context_first" if alone else style, local_prefill_max=400 if alone else 0) as cluster:
        for (name, (fields, text, reason, tokens)), n in itertools.product(ENDS.items(), (1, 3)):
            if name.startswith("stop token"):
                stop_at = "H" if "at once" in name else ","
                fields = {**fields, "stop_token_ids": cluster.service.tokenizer.encode_user_text(stop_at)}
            for instance in cluster.instances:
                instance.answer = "" if name == "end token at once" else HELLO
            got = await ask(cluster, chat=chat, stream=stream, n=n, **fields)
            where = (name, n)
            assert got.texts == dict.fromkeys(range(n), text), where
            assert got.reasons == dict.fromkeys(range(n), reason), where
            prompt = got.usage["prompt_tokens"]
            received = (cluster.generation if alone else cluster.context).received
            assert prompt == (9 if not chat else len(received[0].token_ids)), where
            assert got.usage["completion_tokens"] == n * tokens, where
            assert got.usage["total_tokens"] == prompt + n * tokens, where
            reasons[reason] += n
            tokens_in_all += n * tokens
        await cluster.settled()
        assert bool(cluster.context.received) != alone
        values = dict(
            line.rsplit(" ", 1)
            for line in (await cluster.client.get(f"{cluster.url}/metrics")).text.splitlines()
            if line.startswith("trtllm_")
        )
        ended = {
            name.split('finished_reason="')[1].split('"')[0]: float(value)
            for name, value in values.items()
            if name.startswith("trtllm_request_success_total{")
        }
        assert ended == reasons
        (told,) = (float(value) for name, value in values.items() if name.startswith("trtllm_generation_tokens_total{"))
        assert told == tokens_in_all


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


@pytest.mark.parametrize("style", TOPOLOGIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_echoed_prompt_is_told_of_like_the_answer(make_cluster: Any, style: str, stream: bool) -> None:
    """Log probabilities of its tokens behind the first, then of the answer's, with offsets in the whole text; however many
    prompts and answers, also where the answer has no token: then none is counted and the text is the prompt."""
    alone = style == "generation alone"
    async with make_cluster("context_first" if alone else style, local_prefill_max=400 if alone else 0) as cluster:
        for tokens, n in itertools.product((0, 1, 5, 40), (1, 2)):
            prompts = ["héy", "abcdef"]
            got = await ask(cluster, stream=stream, prompt=prompts, max_tokens=tokens, n=n, echo=True, logprobs=2)
            answer = HELLO[:tokens]
            for index in range(2 * n):
                ids = cluster.service.tokenizer.encode_user_text(prompts[index // n])
                told = got.logprobs[index]
                where = (tokens, n, index)
                assert got.texts[index] == prompts[index // n] + answer, where
                assert [one[1] for one in told[: len(ids)]] == [None] + [
                    pytest.approx(-(token + place) / 100) for place, token in enumerate(ids) if place
                ], where
                assert told[0][3] is None and all(len(one[3]) == 2 for one in told[1:]), where
                assert len(told) == len(ids) + len(answer), where
                assert [one[0] for one in told[len(ids) :]] == list(answer), where
                assert [one[2] for one in told[len(ids) :]] == [
                    len(prompts[index // n]) + i for i in range(len(answer))
                ]
                assert got.reasons[index] == ("stop" if tokens == 40 else "length"), where
            assert got.usage["completion_tokens"] == 2 * n * (14 if tokens == 40 else tokens), (tokens, n)
            assert got.usage["prompt_tokens"] == 4 + 6
        await cluster.settled()
        received = (cluster.generation if alone else cluster.context).received
        assert {one.sampling.prompt_logprobs for one in received} == {2}
        client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        whole = await client.completions.create(model="synthetic", prompt="ab", echo=True, logprobs=0, max_tokens=0)
        assert whole.choices[0].logprobs is not None and len(whole.choices[0].logprobs.tokens or ()) == 2
        await client.close()


async def test_so_much_of_a_prompt_is_told(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More is refused before anything is sent; a prompt without room for the one token that is made is, too."""
    monkeypatch.setattr("meta_executor.front.checking._PROMPT_NUMBERS_MAX", 30)
    async with make_cluster() as cluster:
        fields = {"echo": True, "max_tokens": 0}
        assert (await cluster.complete(prompt="a" * 10, logprobs=2, **fields)).status_code == 200
        refused = await cluster.complete(prompt="a" * 11, logprobs=2, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
        assert "33 log probabilities" in refused.json()["error"]["message"]
        monkeypatch.undo()
        assert (await cluster.complete(prompt="a" * 399, logprobs=0, **fields)).status_code == 200
        full = await cluster.complete(prompt="a" * 400, logprobs=0, **fields)
        assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert len(cluster.context.received) == 2


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"logprobs": 1, "echo": True}])
async def test_an_instance_that_tells_no_log_probabilities_is_a_502(make_cluster: Any, fields: dict[str, Any]) -> None:
    """Asked for and not given: the client hears of it rather than get fewer than tokens."""
    async with make_cluster() as cluster:
        cluster.context.tells_nothing = "echo" not in fields
        cluster.context.tells_nothing_of_prompts = True
        response = await cluster.complete(**fields)
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
