"""From a row of logits to a token, and why an answer ends.

Randomness is a function of (seed, position) alone, so a request can move between instances, be batched differently or be
run again and still get the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from meta_executor.engine.base import Float32Array, SamplingParams

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


def choose(logits: Float32Array, sampling: SamplingParams, position: int) -> int:
    """Choose one token.

    Args:
        logits: float32, shape (vocabulary,).
        sampling: Temperature 0 takes the first of the largest.
        position: Position of the token that is chosen.

    Returns:
        Token id.
    """
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / sampling.temperature
    scaled -= scaled.max()
    weights = np.exp(scaled)
    # Stable order: largest first, lower id first among equals, so that every instance draws from the same list.
    order = np.argsort(-weights, kind="stable")
    cumulative = np.cumsum(weights[order])
    total = cumulative[-1]
    kept = int(np.searchsorted(cumulative, sampling.top_p * total, side="left")) + 1
    kept = min(kept, len(order))
    drawn = uniform(sampling.seed, position) * cumulative[kept - 1]
    return int(order[min(int(np.searchsorted(cumulative[:kept], drawn, side="right")), kept - 1)])


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
        ``stop`` for an end token (which belongs to the count, not to the text), ``length`` at the limit, else None.
    """
    if token_id in sampling.stop_token_ids or (not sampling.ignore_eos and token_id in eos_token_ids):
        return "stop"
    return "length" if generated_count >= sampling.max_tokens else None
