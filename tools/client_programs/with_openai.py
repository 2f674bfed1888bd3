"""The official client against a service: ``python with_openai.py URL MODEL``. Exit 0 when everything it was asked is right."""

from __future__ import annotations

import asyncio
import sys

import openai
from asking import check


def main() -> None:
    """Ask."""
    url, model = sys.argv[1:]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Hello"}]
    check("models.list names the model", model in [card.id for card in client.models.list()])
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=8, seed=1)  # type: ignore[arg-type]
    check("chat has text, reason and counts", bool(chat.choices[0].finish_reason) and chat.usage.completion_tokens <= 8)
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, seed=1, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(
        "a stream has the same text and counts",
        (text, chunks[-1].usage) == (chat.choices[0].message.content, chat.usage),
    )
    several = client.completions.create(model=model, prompt=["a", "b"], n=2, max_tokens=4, logprobs=1)
    check("two prompts, two answers each", [choice.index for choice in several.choices] == [0, 1, 2, 3])
    check("log probabilities of each token", all(len(c.logprobs.tokens) <= 4 for c in several.choices))
    told = client.chat.completions.create(model=model, messages=messages, max_tokens=3, logprobs=True, top_logprobs=2)  # type: ignore[call-overload]
    check("log probabilities of a chat", all(len(one.top_logprobs) >= 1 for one in told.choices[0].logprobs.content))
    echo = client.completions.create(model=model, prompt="abc", max_tokens=0, echo=True, logprobs=1)
    told_of = echo.choices[0].logprobs.token_logprobs
    check(
        "log probabilities of an echoed prompt",
        len(told_of) == 3 and told_of[0] is None and echo.choices[0].text == "abc",
    )
    extra = client.completions.create(model=model, prompt="a", max_tokens=4, extra_body={"top_k": 5, "min_tokens": 4})
    check("extra_body reaches the sampler", extra.usage.completion_tokens == 4)
    for error, fields in (
        (openai.NotFoundError, {"model": "another", "prompt": "a"}),
        (openai.BadRequestError, {"model": model, "prompt": "a", "max_tokens": -1}),
        (openai.BadRequestError, {"model": model, "prompt": "a", "temperature": 9}),
    ):
        try:
            client.completions.create(**fields)  # type: ignore[call-overload]
        except error as caught:
            check(f"{error.__name__} with a message and an id", bool(caught.message and caught.request_id))
        else:
            check(f"{error.__name__} is raised", False)
    try:
        client.embeddings.create(model=model, input="a")
    except openai.NotFoundError:
        check("what is not served is NotFoundError", True)
    else:
        check("what is not served is NotFoundError", False)
    asyncio.run(many(url, model, str(chat.choices[0].message.content)))


async def many(url: str, model: str, text: str) -> None:
    """Sixteen at once by the asynchronous client; one that is left early."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, seed=1
                )
                for _ in range(16)
            )
        )
        check("sixteen at once have one text", {answer.choices[0].message.content for answer in answers} == {text})
        stream = await client.completions.create(model=model, prompt="a", max_tokens=400, stream=True)
        async for _ in stream:
            break
        await stream.close()
        check("a stream may be left", True)


main()
