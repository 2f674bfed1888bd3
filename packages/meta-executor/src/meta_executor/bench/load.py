"""Many clients of one front: who asked what, when the first and the last token came, and how each request ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx


@dataclass(frozen=True)
class LoadConfig:
    """A load.

    Attributes:
        requests: How many (count).
        concurrency: At most so many at once (count); 0: all of them.
        prompt_tokens: Length of each prompt (tokens).
        answer_tokens: Length of each answer (tokens).
        rate_per_s: Requests begin at this rate (1/s); 0: as fast as concurrency lets them.
    """

    requests: int = 256
    concurrency: int = 0
    prompt_tokens: int = 64
    answer_tokens: int = 16
    rate_per_s: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """One request, as its client saw it.

    Attributes:
        status: HTTP status; 0: no answer at all.
        error: What went wrong, or None.
        first_s: Time to the first piece (s).
        total_s: Time to the end (s).
        tokens: Tokens of the answer (count).
        token_ids: The tokens themselves.
    """

    number: int
    status: int
    error: str | None
    first_s: float
    total_s: float
    tokens: int
    token_ids: tuple[int, ...]
    finish_reason: str | None

    @property
    def ok(self) -> bool:
        """Answered to the end."""
        return self.status == 200 and self.error is None and self.finish_reason in ("stop", "length")


def prompt_of(number: int, length: int, vocab_size: int) -> list[int]:
    """A prompt that differs from all others from its first token on (token ids, all above the control tokens' range)."""
    room = max(vocab_size - 64, 1)
    return [32 + (number * 7919 + place * 104_729 + 13) % room for place in range(length)]


async def run_load(url: str, model: str, vocab_size: int, load: LoadConfig) -> tuple[Outcome, ...]:
    """Send the load; outcomes in order of number. Never raises for a request that failed."""
    gate = asyncio.Semaphore(load.concurrency or load.requests)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    start = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(3600.0, connect=60.0), limits=limits) as client:

        async def one(number: int) -> Outcome:
            if load.rate_per_s:
                await asyncio.sleep(max(0.0, start + number / load.rate_per_s - time.monotonic()))
            async with gate:
                return await _ask(client, model, number, prompt_of(number, load.prompt_tokens, vocab_size), load)

        return tuple(await asyncio.gather(*(one(number) for number in range(load.requests))))


async def _ask(client: httpx.AsyncClient, model: str, number: int, prompt: Sequence[int], load: LoadConfig) -> Outcome:
    body = {
        "model": model, "prompt": list(prompt), "max_tokens": load.answer_tokens, "temperature": 0.0, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    begin = time.monotonic()
    first, status, error, reason = 0.0, 0, None, None
    ids: list[int] = []
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            status = response.status_code
            if status != 200:
                error = (await response.aread()).decode(errors="replace")[:500]
            else:
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        error = str(event["error"].get("message", event["error"]))[:500]
                        continue
                    for choice in event["choices"]:
                        first = first or time.monotonic() - begin
                        ids += choice.get("token_ids") or ()
                        reason = choice["finish_reason"] or reason
    except httpx.HTTPError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return Outcome(number, status, error, first, time.monotonic() - begin, len(ids), tuple(ids), reason)
