"""From a row of logits to a token, and why an answer ends.

Randomness is a function of (seed, position) alone, so a request can move between instances, be batched differently or be
run again and still get the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from meta_executor.engine.base import Float32Array, SamplingParams, Told
from meta_executor.wire import TokenLogprobs

FinishReason = Literal["stop", "length"]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), the same for the same seed and position everywhere.

    Args:
        seed: Any integer that fits 128 bits signed.
        position: Position of the token that is chosen, >= 0.
    """
    material = seed.to_bytes(16, "little", signed=True) + position.to_bytes(8, "little")
    digest = hashlib.blake2b(material, digest_size=8, person=b"token-choice").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose(logits: Float32Array, sampling: SamplingParams, position: int, told: Told | None = None) -> int:
    """Choose one token.

    Args:
        logits: float32, shape (vocabulary,); changed in place where the sampling changes logits.
        sampling: Temperature 0 takes the first of the largest.
        position: Position of the token that is chosen.
        told: What the sequence has so far; wanted where the sampling changes logits.

    Returns:
        Token id.
    """
    if told is not None and sampling.changes_logits:
        change_logits(logits, sampling, told)
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    # The largest becomes 0 before the division: a temperature near 0 then makes the others -inf, and nothing NaN.
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):
        scaled /= sampling.temperature
    weights = np.exp(scaled)
    # Stable order: largest first, lower id first among equals, so that every instance draws from the same list.
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.min_p > 0.0:
        # The largest weight is 1.
        order = order[: max(1, int(np.count_nonzero(weights[order] >= sampling.min_p)))]
    cumulative = np.cumsum(weights[order])
    total = cumulative[-1]
    kept = int(np.searchsorted(cumulative, sampling.top_p * total, side="left")) + 1
    kept = min(kept, len(order))
    drawn = uniform(sampling.seed, position) * cumulative[kept - 1]
    return int(order[min(int(np.searchsorted(cumulative[:kept], drawn, side="right")), kept - 1)])


def change_logits(logits: Float32Array, sampling: SamplingParams, told: Told) -> None:
    """Put bias, penalties and the ban of end tokens into a row of logits, in place.

    Repetition counts prompt and answer; presence and frequency the answer alone, as the OpenAI API has it.
    """
    if sampling.penalised:
        answer, times = np.unique(np.asarray(told.answer, np.int64), return_counts=True)
        if sampling.repetition_penalty != 1.0:
            seen = np.union1d(answer, told.prompt)
            own = logits[seen]
            logits[seen] = np.where(own > 0, own / sampling.repetition_penalty, own * sampling.repetition_penalty)
        logits[answer] -= (sampling.presence_penalty + sampling.frequency_penalty * times).astype(np.float32)
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if len(told.answer) < sampling.min_tokens:
        logits[list(sampling.stop_token_ids)] = -np.inf


def logprobs_of(logits: Float32Array, token: int, count: int) -> TokenLogprobs:
    """What the model's own logits say of a chosen token and of the likeliest ones.

    Args:
        logits: float32, shape (vocabulary,), as the model made them.
        token: The one that was chosen.
        count: Likeliest tokens to tell (count).
    """
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    if not count:
        return TokenLogprobs(float(shifted[token]))
    count = min(count, len(shifted))
    largest = np.argpartition(-shifted, count - 1)[:count]
    # Largest first, lower id first among equals.
    largest = largest[np.lexsort((largest, -shifted[largest]))]
    return TokenLogprobs(float(shifted[token]), tuple((int(one), float(shifted[one])) for one in largest))


def chosen(
    logits: Float32Array, sampling: SamplingParams, position: int, told: Told | None
) -> tuple[int, TokenLogprobs | None]:
    """:func:`choose`, and what is told of the choice where the sampling asks for it."""
    if sampling.logprobs is None:
        return choose(logits, sampling, position, told), None
    token = choose(logits.copy() if sampling.changes_logits else logits, sampling, position, told)
    return token, logprobs_of(logits, token, sampling.logprobs)


def top_two_margin(logits: Float32Array) -> float:
    """Difference of the two largest logits: how far a greedy choice is from flipping."""
    if len(logits) < 2:
        return float("inf")
    two = np.partition(logits, len(logits) - 2)[-2:]
    return float(two[1] - two[0])


def finish_reason(
    token_id: int, generated_count: int, sampling: SamplingParams, eos_token_ids: Sequence[int]
) -> FinishReason | None:
    """Whether an answer ends with this token.

    Args:
        token_id: The newest token.
        generated_count: Tokens of the answer with it, >= 1.
        sampling: The request's.
        eos_token_ids: The model's end tokens.

    Returns:
        ``stop`` for an end token behind the first ``min_tokens`` (it belongs to the count, not to the text), ``length`` at
        the limit, else None.
    """
    ends = token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in eos_token_ids)
    if ends and generated_count > sampling.min_tokens:
        return "stop"
    return "length" if generated_count >= sampling.max_tokens else None
