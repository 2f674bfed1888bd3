"""litellm against a service: ``python with_litellm.py URL MODEL``. Exit 0 when everything it was asked is right."""

from __future__ import annotations

import sys

import litellm
from asking import check


def main() -> None:
    """Ask."""
    url, model = sys.argv[1:]
    there = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    messages = [{"role": "user", "content": "Hello"}]
    for provider in ("openai", "hosted_vllm"):
        name = f"{provider}/{model}"
        chat = litellm.completion(model=name, messages=messages, max_tokens=6, seed=1, **there)
        text = chat.choices[0].message.content
        check(f"{name}: an answer with counts", bool(text) and chat.usage.completion_tokens <= 6)
        stream = litellm.completion(model=name, messages=messages, max_tokens=6, seed=1, stream=True, **there)
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        check(f"{name}: a stream has the same text", "".join(parts) == text)
        several = litellm.completion(model=name, messages=messages, max_tokens=4, n=3, **there)
        check(f"{name}: three answers", len(several.choices) == 3)
        for error, fields in (
            (litellm.NotFoundError, {"model": f"{provider}/another"}),
            (litellm.BadRequestError, {"model": name, "temperature": 9}),
        ):
            try:
                litellm.completion(messages=messages, **{**there, **fields})
            except error:
                check(f"{name}: {error.__name__}", True)
            else:
                check(f"{name}: {error.__name__} is raised", False)
    plain = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="a", max_tokens=4, **there)
    check("a completion", plain.usage.completion_tokens <= 4)


main()
