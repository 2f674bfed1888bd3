"""Many clients of one front: who asked what, when each piece came, and how each request ended.

The clients run in a process of their own (:mod:`meta_executor.bench.client`), so that they share no interpreter with
anybody who is measured, and that process says how busy it was: figures of a run whose load generator had no time left are
figures of the load generator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from meta_executor.bench.lengths import Lengths, draw

#: Share of a core above which the load generator had no time left to be on time (0–1).
LIMIT_SHARE = 0.85


class LoadConfig(msgspec.Struct, frozen=True):
    """A load.

    Attributes:
        requests: How many (count).
        concurrency: At most so many at once (count); 0: all of them.
        prompt_tokens: Length of each prompt, or what it is drawn from (tokens).
        answer_tokens: Length of each answer, likewise (tokens).
        rate_per_s: Requests begin at this rate (1/s); 0: as fast as concurrency lets them.
        request_timeout_s: A request without its end after so long has failed (s).
        warm_up: The first so many requests warm up: figures begin when all of them have ended (count).
        seed: What is drawn depends on it alone.
        still: All requests are sent at once, and figures are of the time when each is being answered: none arrives then. Wants
            no warm-up and no rate.
    """

    requests: int = 256
    concurrency: int = 0
    prompt_tokens: Lengths = 64
    answer_tokens: Lengths = 16
    rate_per_s: float = 0.0
    request_timeout_s: float = 3600.0
    warm_up: int = 0
    seed: int = 0
    still: bool = False

    def lengths(self) -> list[tuple[int, int]]:
        """Of each request's prompt and answer, in order (tokens)."""
        prompts = draw(self.prompt_tokens, self.requests, self.seed)
        # Of the same seed they would be long and short together.
        return list(zip(prompts, draw(self.answer_tokens, self.requests, self.seed + 1_000_003)))


class Outcome(msgspec.Struct, frozen=True):
    """One request, as its client saw it.

    Attributes:
        status: HTTP status; 0: no answer at all.
        error: What went wrong, or None.
        late_s: How long after its time it was sent (s); 0 without a rate.
        first_s: Time to the first piece (s).
        total_s: Time to the end (s).
        tokens: Tokens of the answer (count).
        token_ids: The tokens themselves.
        pieces_s: When each piece came, since the request was sent (s).
    """

    number: int
    status: int
    error: str | None
    late_s: float
    first_s: float
    total_s: float
    tokens: int
    token_ids: tuple[int, ...]
    pieces_s: tuple[float, ...]
    finish_reason: str | None
    #: Since the first request of the load was sent (s).
    sent_s: float = 0.0

    @property
    def ok(self) -> bool:
        """Answered to the end."""
        return self.status == 200 and self.error is None and self.finish_reason in ("stop", "length")


class LoadResult(msgspec.Struct, frozen=True):
    """A load that was sent.

    Attributes:
        outcomes: In order of number.
        seconds: First request sent to last end (s).
        cpu_s: CPU time of the load generator in between (s).
        longest_pause_s: Longest time between two looks of the load generator at its connections while it was not waiting (s).
        reconnects: Connections that the server closed while they were idle, found when they were used again (count).
    """

    outcomes: tuple[Outcome, ...]
    seconds: float
    cpu_s: float
    longest_pause_s: float
    reconnects: int
    #: Monotonic time of its begin, on its host (s).
    began_s: float = 0.0

    def window_s(self, load: LoadConfig) -> tuple[float, float]:
        """What figures are of (s since the load's begin).

        From when the warm-up had ended to when the last request was sent: the load was whole then; to the end where that is
        less than a quarter of it. Of a still load from the last first token to the first end; nothing where one ended before.
        """
        if load.still:
            begin_s = max((one.sent_s + one.first_s for one in self.outcomes), default=0.0)
            return begin_s, max(begin_s, min((one.sent_s + one.total_s for one in self.outcomes), default=0.0))
        begin_s = max((one.sent_s + one.total_s for one in self.outcomes[: load.warm_up]), default=0.0)
        end_s = max((one.sent_s for one in self.outcomes), default=0.0)
        return (begin_s, end_s) if end_s - begin_s > self.seconds / 4 else (min(begin_s, self.seconds), self.seconds)

    @property
    def share(self) -> float:
        """Part of one core that the load generator used (0–1)."""
        return self.cpu_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def was_limit(self) -> bool:
        """The load generator itself had no time left."""
        return self.share >= LIMIT_SHARE


class LoadSpec(msgspec.Struct, frozen=True):
    """What the load generator's process is told."""

    url: str
    model: str
    vocab_size: int
    load: LoadConfig


class LoadFailed(RuntimeError):
    """The load generator's process ended without a result."""


def prompt_of(number: int, length: int, vocab_size: int) -> list[int]:
    """A prompt that differs from all others from its first token on (token ids, all above the control tokens' range)."""
    room = max(vocab_size - 64, 1)
    return [32 + (number * 7919 + place * 104_729 + 13) % room for place in range(length)]


def run_load(url: str, model: str, vocab_size: int, load: LoadConfig, *, cpus: Sequence[int] = ()) -> LoadResult:
    """Send the load to a front, from a process of its own.

    Args:
        url: ``http://HOST:PORT`` of a front.
        model: Name that the requests give.
        vocab_size: Prompts hold ids below it.
        load: What to ask.
        cpus: Cores that the load generator may use; empty: any.

    Raises:
        LoadFailed: The process ended without a result. A request that failed is an outcome, never an exception.
    """

    return run_generator(
        "meta_executor.bench.client", msgspec.json.encode(LoadSpec(url, model, vocab_size, load)), cpus
    )


def run_generator(module: str, spec: bytes, cpus: Sequence[int] = ()) -> LoadResult:
    """Run a load generator's process, with what it is told on its standard input.

    Raises:
        LoadFailed: The process ended without a result.
    """

    def settle() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)

    done = subprocess.run(
        [sys.executable, "-m", module],
        input=spec,
        stdout=subprocess.PIPE,
        preexec_fn=settle if cpus else None,
    )
    if done.returncode != 0:
        raise LoadFailed(f"the load generator ended with exit {done.returncode}")
    try:
        return msgspec.msgpack.decode(done.stdout, type=LoadResult)
    except msgspec.DecodeError as error:
        raise LoadFailed(f"the load generator's result of {len(done.stdout)} bytes cannot be read: {error}") from error
