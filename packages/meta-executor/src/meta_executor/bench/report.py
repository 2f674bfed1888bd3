"""Figures of a load, as numbers and as text."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from meta_executor.bench.load import Outcome
from meta_executor.evidence.verify import VerifyResult
from meta_executor.wire import InstanceStatistics


@dataclass(frozen=True)
class Report:
    """What a trial showed.

    Attributes:
        first_token_s, total_s: Median and 99th percentile (s).
        tokens_per_s: Answer tokens of all requests over the wall time (1/s).
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
            *(f"error: {text}" for text in self.errors[:5]),
            *self.verified.lines,
        ]
        return "\n".join(lines)


def make_report(
    outcomes: Sequence[Outcome], seconds: float, counted: dict[str, InstanceStatistics], verified: VerifyResult
) -> Report:
    """Put a trial's parts together."""
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
        statistics=counted,
        verified=verified,
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile; zeros without values."""
    if not values:
        return (0.0, 0.0)
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
