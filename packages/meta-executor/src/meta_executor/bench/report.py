"""Figures of a load, as numbers and as text."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from meta_executor.bench.load import LoadResult
from meta_executor.evidence.verify import VerifyResult
from meta_executor.wire import InstanceStatistics


@dataclass(frozen=True)
class Report:
    """What a trial showed.

    Attributes:
        first_token_s, total_s: Median and 99th percentile (s).
        tokens_per_s: Answer tokens of all requests over the wall time (1/s).
        piece_gap_s: Time between two pieces of one answer: median and 99th percentile (s).
        generator_share: Part of one core that the load generator used (0–1); from 0.85 on, it was itself the limit.
        generator_cpu_us_per_token: Its CPU time over the answers' tokens (µs).
    """

    requests: int
    ok: int
    statuses: dict[int, int]
    errors: tuple[str, ...]
    seconds: float
    tokens: int
    tokens_per_s: float
    first_token_s: tuple[float, float]
    total_s: tuple[float, float]
    piece_gap_s: tuple[float, float]
    generator_share: float
    generator_cpu_us_per_token: float
    generator_was_limit: bool
    statistics: dict[str, InstanceStatistics]
    verified: VerifyResult

    @property
    def good(self) -> bool:
        """Every request answered, every rank decided and drained."""
        return self.ok == self.requests and self.verified.ok

    def to_dict(self) -> dict[str, Any]:
        """For one JSON line."""
        ranks = {
            f"{owner}.{rank.rank}": {
                "opened": rank.agreement_opened, "decided": rank.agreement_decided, "ready_votes": rank.ready_votes,
                "prepares": rank.ready_prepares, "activations": rank.ready_activations,
                "completions": rank.ready_completions, "activation_digest": rank.activation_digest,
            }
            for owner, one in self.statistics.items() if one.role == "context" for rank in one.ranks
        }  # fmt: skip
        return {
            "requests": self.requests,
            "ok": self.ok,
            "failed": self.requests - self.ok,
            "statuses": {str(k): v for k, v in self.statuses.items()},
            "seconds": round(self.seconds, 3),
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "first_token_s": [round(x, 4) for x in self.first_token_s],
            "total_s": [round(x, 4) for x in self.total_s],
            "piece_gap_s": [round(x, 5) for x in self.piece_gap_s],
            "load_generator": {
                "share": round(self.generator_share, 3),
                "cpu_us_per_token": round(self.generator_cpu_us_per_token, 2),
                "was_limit": self.generator_was_limit,
            },
            "context_ranks_before_drain": ranks,
            "instances": [asdict(one) for one in self.verified.instances],
            "findings": list(self.verified.findings),
            "verified": self.verified.ok,
            "result": "PASS" if self.good else "FAIL",
        }

    def text(self) -> str:
        """For a person."""
        statuses = ", ".join(f"{count} × HTTP {status}" for status, count in sorted(self.statuses.items()))
        lines = [
            f"{self.ok} of {self.requests} answered ({statuses}) in {self.seconds:.1f} s",
            f"{self.tokens} answer tokens, {self.tokens_per_s:.1f} tokens/s",
            f"first token p50 {self.first_token_s[0]:.3f} s, p99 {self.first_token_s[1]:.3f} s; "
            f"whole answer p50 {self.total_s[0]:.3f} s, p99 {self.total_s[1]:.3f} s",
            f"load generator: {self.generator_share:.0%} of a core, {self.generator_cpu_us_per_token:.1f} µs a token"
            + ("; it was itself the limit: these figures are its own" if self.generator_was_limit else ""),
            *(f"error: {text}" for text in self.errors[:5]),
            *self.verified.lines,
        ]
        return "\n".join(lines)


def make_report(result: LoadResult, counted: dict[str, InstanceStatistics], verified: VerifyResult) -> Report:
    """Put a trial's parts together."""
    outcomes, seconds = result.outcomes, result.seconds
    good = [o for o in outcomes if o.ok]
    tokens = sum(o.tokens for o in good)
    return Report(
        requests=len(outcomes),
        ok=len(good),
        statuses=dict(Counter(o.status for o in outcomes)),
        errors=tuple(dict.fromkeys(o.error for o in outcomes if o.error)),
        seconds=seconds,
        tokens=tokens,
        tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
        first_token_s=_percentiles([o.first_s for o in good]),
        total_s=_percentiles([o.total_s for o in good]),
        piece_gap_s=_percentiles([after - before for o in good for before, after in pairwise(o.pieces_s)]),
        generator_share=result.share,
        generator_cpu_us_per_token=result.cpu_s * 1e6 / tokens if tokens else 0.0,
        generator_was_limit=result.was_limit,
        statistics=counted,
        verified=verified,
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile; zeros without values."""
    if not values:
        return (0.0, 0.0)
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
