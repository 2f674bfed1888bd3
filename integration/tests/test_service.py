"""The service as its clients see it: answers equal to the single-process reference, protocol as OpenAI's clients expect."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from meta_executor.config import EngineConfig
from meta_executor.engine.base import SamplingParams, StageSpec
from meta_executor.engine.factory import create_engine, model_info
from meta_executor.engine.generate import SequenceRunner, generate
from meta_executor.engine.tokenizer import Tokenizer

pytestmark = [pytest.mark.service(seconds=35), pytest.mark.timeout(600)]

#: Tokens of an answer: what the one process that they are compared with takes decides how long these tests are.
ANSWER_TOKENS, ANSWER_TOKENS_AT_NIGHT = 16, 32
#: The model's end token; an answer's logprobs do not show it.
END_OF_TEXT = 2
#: Likeliest tokens whose log probabilities are told with each token (count).
LIKELIEST = 3
LONG = "The tide came in and the tide went out, and each time the keeper of the light wrote down the hour. "
PROMPTS = (
    "A",
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "The three primary colours are",
    "Water boils at",
    "In the year 1969,",
    "Dear Sir or Madam,",
    "1, 2, 3, 4,",
    "To make bread you need",
    "The opposite of hot is",
    "My favourite animal is the",
    "She opened the door and",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "A haiku about rain:\n",
    "The largest planet in the solar system is",
    "Roses are red,",
    LONG * 24 + "In short,",
    "Here is a list of words: " + "sea, light, wind, ship, keeper, rope, " * 45 + "and finally",
)


@pytest.fixture(scope="module")
def client(service):
    """OpenAI's own client; it must not retry behind the test's back."""
    return openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=300.0)


@pytest.fixture(scope="module")
def model(client):
    """The one model that is served."""
    return client.models.list().data[0].id


@pytest.fixture(scope="session", autouse=True)
def answers_begun():
    """What one process says, begun before the service's start: each of them leaves a core idle."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(answers_of_one_process, ANSWER_TOKENS)


@pytest.fixture(scope="module")
def reference(answers_begun):
    """What one process says."""
    return answers_begun.result()


def answers_of_one_process(tokens):
    """The same engine in one process, one thread, one prompt at a time."""
    config = EngineConfig(model="smollm2", threads=1)
    info = model_info(config)
    engine = create_engine(config, StageSpec.split(info.layer_count, 1)[0])
    runner = SequenceRunner(engine, block_count=64)
    tokenizer = Tokenizer.for_model(config.model)
    sampling = SamplingParams(max_tokens=tokens, logprobs=LIKELIEST)
    found = [generate(runner, tokenizer, prompt, sampling) for prompt in PROMPTS]
    runner.close()
    return found


def complete(client, model, prompt, tokens=ANSWER_TOKENS):
    """One completion with its token ids."""
    return client.completions.create(
        model=model, prompt=prompt, max_tokens=tokens, temperature=0.0, extra_body={"return_token_ids": True}
    )


def test_answers_equal_the_reference_token_for_token(service, client, model, reference, capsys):
    """Twenty prompts at once through both instances give the tokens that one process gives alone.

    Two prompts have over 500 tokens, one has a single token. Greedy, float32, one thread per rank.
    """
    check_all_at_once(client, model, reference, ANSWER_TOKENS)
    with capsys.disabled():
        print(f"\nsmallest top-two margin over {len(PROMPTS)} prompts: {min(r.margin_min for r in reference):.2e}")


@pytest.mark.slow
def test_longer_answers_equal_the_reference_token_for_token(service, client, model):
    """The same, twice as far."""
    check_all_at_once(client, model, answers_of_one_process(ANSWER_TOKENS_AT_NIGHT), ANSWER_TOKENS_AT_NIGHT)


def test_log_probabilities_equal_the_reference(client, model, reference):
    """Of every token, the first (from the context instance) included, and of the likeliest ones: within 1e-4."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(
                lambda prompt: client.completions.create(
                    model=model, prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, logprobs=LIKELIEST
                ),
                PROMPTS[:8],
            )
        )
    largest = 0.0
    for answer, wanted in zip(answers, reference):
        told = answer.choices[0].logprobs
        shown = [one for one, token in zip(wanted.logprobs, wanted.token_ids) if token != END_OF_TEXT]
        assert len(told.token_logprobs) == len(shown)
        for logprob, top, one in zip(told.token_logprobs, told.top_logprobs, shown, strict=True):
            assert logprob == pytest.approx(one.logprob, abs=1e-4)
            largest = max(largest, abs(logprob - one.logprob))
            # Two tokens with one text are one entry here.
            assert sorted(top.values()) == pytest.approx(sorted(value for _, value in one.top)[-len(top) :], abs=1e-4)
    print(f"\nlargest difference of a log probability: {largest:.1e}")


def test_what_is_told_of_a_prompt_equals_the_reference(client, model):
    """An echoed prompt's tokens, read by four stages in chunks, two prompts at once: within 1e-4 of one process's."""
    config = EngineConfig(model="smollm2", threads=1)
    engine = create_engine(config, StageSpec.split(model_info(config).layer_count, 1)[0])
    runner = SequenceRunner(engine, block_count=64)
    tokenizer = Tokenizer.for_model(config.model)
    prompts = [PROMPTS[2], LONG * 20]
    answer = client.completions.create(
        model=model, prompt=prompts, max_tokens=0, echo=True, logprobs=LIKELIEST, temperature=0.0
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        wanted = generate(runner, tokenizer, prompt, SamplingParams(1, prompt_logprobs=LIKELIEST)).prompt_logprobs
        told = choice.logprobs
        assert choice.text == prompt == "".join(told.tokens) and told.token_logprobs[0] is None
        assert told.token_logprobs[1:] == pytest.approx([one.logprob for one in wanted], abs=1e-4)
        for top, one in zip(told.top_logprobs[1:], wanted, strict=True):
            assert sorted(top.values()) == pytest.approx(sorted(value for _, value in one.top)[-len(top) :], abs=1e-4)
    assert answer.usage.completion_tokens == 0
    runner.close()


def check_all_at_once(client, model, reference, tokens):
    """Every prompt in flight together, each with the tokens that it has alone."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: complete(client, model, prompt, tokens), PROMPTS))
    lengths = [answer.usage.prompt_tokens for answer in answers]
    assert min(lengths) == 1
    assert sum(length > 500 for length in lengths) == 2
    for prompt, answer, wanted in zip(PROMPTS, answers, reference, strict=True):
        choice = answer.choices[0]
        assert choice.model_extra["token_ids"] == list(wanted.token_ids), prompt[:40]
        assert choice.finish_reason == wanted.finish_reason
        assert answer.usage.completion_tokens == len(wanted.token_ids)


def test_eight_clients_mixed_streaming_and_not(service, client, model, reference):
    """Streams end in a finish reason, a usage chunk and [DONE]; whole answers carry the same."""

    def whole(number):
        answer = complete(client, model, PROMPTS[number])
        return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage

    def streamed(number):
        body = {
            "model": model, "prompt": PROMPTS[number], "max_tokens": ANSWER_TOKENS, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        text, reason, usage, events = "", None, None, []
        with httpx.stream(
            "POST", service.url + "/v1/completions", json=body, timeout=300.0, trust_env=False
        ) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line:
                    assert line.startswith("data: ")
                    events.append(line[6:])
        assert events[-1] == "[DONE]"
        for event in map(json.loads, events[:-1]):
            if event["choices"]:
                text += event["choices"][0]["text"]
                reason = event["choices"][0]["finish_reason"] or reason
            usage = event.get("usage") or usage
        return text, reason, usage

    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(streamed if n % 2 else whole, n) for n in range(8)]
        results = [job.result() for job in jobs]
    for number, (text, reason, usage) in enumerate(results):
        wanted = reference[number]
        assert text == wanted.text
        assert reason == wanted.finish_reason
        used = usage if isinstance(usage, dict) else usage.model_dump()
        assert used["completion_tokens"] == len(wanted.token_ids)
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]


def test_sampling_fields_work_between_the_two_instances(client, model, reference):
    """A ban, a bias, a least length and penalties, on the first token (one instance) and on those after it (the other)."""
    first, second = reference[1].token_ids[:2]

    def ids(**fields):
        answer = client.completions.create(
            model=model, prompt=PROMPTS[1], max_tokens=6, temperature=0.0,
            extra_body={"return_token_ids": True, "ignore_eos": True, **fields},
        )  # fmt: skip
        return answer.choices[0].model_extra["token_ids"]

    assert ids()[:2] == [first, second]
    banned = ids(logit_bias={str(first): -100})
    assert first not in banned
    biased = ids(logit_bias={"260": 100})
    assert biased == [260] * 6
    plain = reference[0].token_ids
    answer = client.completions.create(
        model=model, prompt=PROMPTS[0], max_tokens=ANSWER_TOKENS, temperature=0.0, presence_penalty=2, frequency_penalty=2,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    penalised = answer.choices[0].model_extra["token_ids"]
    assert len(set(penalised)) > len(set(plain)) and penalised[0] == plain[0]
    assert ids(stop_token_ids=[second]) == [first, second]
    longer = ids(stop_token_ids=[second], min_tokens=4)
    assert second not in longer[:4] and len(longer) >= 5


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": "many"}, "max_tokens"),
        ("completions", {"prompt": 3}, "prompt"),
        ("completions", {}, "prompt"),
        ("completions", {"prompt": "x", "temperature": -1}, "temperature"),
        ("completions", {"prompt": "x", "top_p": 2}, "top_p"),
        ("completions", {"prompt": "x", "max_tokens": 1_000_000}, "max_tokens"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "content"),
    ],
)
def test_a_wrong_body_gets_400_naming_the_field(service, model, path, body, field):
    """Nothing is dispatched; the message and the `param` name what is wrong."""
    answer = httpx.post(f"{service.url}/v1/{path}", json={"model": model, **body}, timeout=30.0, trust_env=False)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert field in (error.get("param") or "") or field in error["message"]


def test_typed_control_tokens_stay_text(service, client, model):
    """<|im_end|> in a user's message is text: it is not counted as one token, and ends nothing."""
    plain = client.chat.completions.create(
        model=model, max_tokens=1, messages=[{"role": "user", "content": "<|im_end|>"}]
    ).usage.prompt_tokens
    empty = client.chat.completions.create(
        model=model, max_tokens=1, messages=[{"role": "user", "content": "a"}]
    ).usage.prompt_tokens
    assert plain > empty


def test_sampling_is_a_function_of_the_seed(client, model):
    """The same seed gives the same answer, another one a different one.

    One after the other: beside other requests the last bits of logits may differ unless ``deterministic_rows`` is on.
    """

    def sampled(seed):
        return (
            client.completions.create(
                model=model, prompt="Once upon a time", max_tokens=24, temperature=1.0, top_p=0.9, seed=seed
            )
            .choices[0]
            .text
        )

    first, again, other = map(sampled, (7, 7, 8))
    assert first == again
    assert first != other


def test_stop_strings_end_the_answer(client, model, reference):
    """The answer ends before the stop string, with reason stop."""
    wanted = reference[1].text
    stop = wanted[5:9]
    answer = client.completions.create(
        model=model, prompt=PROMPTS[1], max_tokens=ANSWER_TOKENS, temperature=0.0, stop=stop
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == wanted[: wanted.index(stop)]


def test_what_was_opened_was_decided_and_both_paths_were_taken(service, client, model):
    """After all of the above: agreement equal on every context rank, both submit paths used, both ranks routed to."""
    complete(client, model, PROMPTS[1])
    # Each rank's counters travel every tenth of a second: on a busy machine not all of them at the same time.
    deadline_s = time.monotonic() + 20.0
    while True:
        statistics = service.statistics()
        opened = {rank.agreement_opened for s in statistics.values() if s.role == "context" for rank in s.ranks}
        if len(opened) == 1:
            break
        assert time.monotonic() < deadline_s, opened
        time.sleep(0.05)
    context = next(s for s in statistics.values() if s.role == "context")
    generation = next(s for s in statistics.values() if s.role == "generation")
    assert context.rpc_submits > 0
    assert context.local_submits == 0
    assert generation.local_submits > 0
    assert generation.rpc_submits == 0
    assert context.ranks[0].agreement_opened > 0
    assert all(count > 0 for count in generation.routed_per_rank)
    assert sum(r.transfers_coalesced for r in generation.ranks) > 0
    assert sum(r.transfers_direct + r.transfers_merged for r in generation.ranks) > 0


def test_why_a_request_went_where_it_did_is_shown_for_the_whole_service(service, client, model):
    """Under the id that the answer carries: both legs, the instance of each, the rank inside and the reasons."""
    answer = httpx.post(
        f"{service.url}/v1/completions",
        json={"model": model, "prompt": PROMPTS[1], "max_tokens": 4, "temperature": 0},
        timeout=120.0,
        trust_env=False,
    )
    request_id = int(answer.json()["id"].removeprefix("cmpl-"), 16)
    routing = (
        httpx.get(f"{service.url}/debug/routing?limit=256", headers=service.launcher.key_header, trust_env=False)
        .raise_for_status()
        .json()
    )
    assert routing["unknown"] == {}
    legs = [d for d in routing["decisions"] if d["request_id"] == request_id]
    assert {(d["role"], d["owner_id"]) for d in legs} == {("context", "ctx-0"), ("generation", "gen-0")}
    assert all(d["why"] and d["weight"] >= 5 for d in legs)
    inside = {
        instance["owner_id"]: [d for d in instance["decisions"] if d["request_id"] == request_id]
        for instance in routing["instances"]
    }
    assert [d["rank"] for d in inside["ctx-0"]] == [-1]
    (chosen,) = inside["gen-0"]
    assert chosen["rank"] in (0, 1) and chosen["why"].startswith("least loaded")
    statistics = service.statistics()["gen-0"]
    assert next(i for i in routing["instances"] if i["owner_id"] == "gen-0")["decided"] == sum(
        statistics.routed_per_rank
    )


def test_logs_hold_no_traceback_and_the_bounce_really_was_one(service, client, model):
    """No traceback, KeyError or unexplained fallback in any log; a long prompt's transfer was coalesced."""
    complete(client, model, PROMPTS[18])
    texts = {path.name: path.read_text() for path in service.launcher.run.path("logs").iterdir()}
    assert set(texts) == {"ctx-0.log", "gen-0.log", "front.log"}
    for name, text in texts.items():
        for word in ("Traceback", "KeyError", "[kv-bounce] in-place"):
            assert word not in text, f"{name}:\n{text[-2000:]}"
    assert "[kv-bounce] coalesced" in texts["gen-0.log"]
