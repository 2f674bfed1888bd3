"""Figures of a load, as numbers and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

import msgspec

from meta_executor.bench.load import LoadConfig, LoadResult, Outcome
from meta_executor.bench.loops import LoopFigures
from meta_executor.bench.sampling import Usage
from meta_executor.bench.spread import Spread
from meta_executor.evidence.verify import VerifyResult
from meta_executor.wire import InstanceStatistics

#: Phases of a context rank's loop in which it agrees with the others, and looks after transfers besides.
_AGREEING = ("update readiness", "vote terminal", "poll")
#: Part of a core from which on a process or thread had no time left (0–1).
BUSY_SHARE = 0.85


class Figure(msgspec.Struct, frozen=True):
    """One number of a trial, which trials are compared by."""

    name: str
    value: float
    unit: str
    better: Literal["less", "more", ""] = "less"


@dataclass(frozen=True)
class Report:
    """What a trial showed; all times in seconds unless they say otherwise.

    Attributes:
        seconds: Length of the window that the figures are of: after the warm-up, and while the load was whole.
        tokens_per_s: Answer tokens that came in the window over its length (1/s).
        first_token_s, total_s: Of the requests behind the warm-up.
        piece_gap_s: Between two pieces of one answer.
        output_speed: Tokens per second of one answer, from its first piece on (1/s); ``p25`` is the slow quarter's.
        generator_share: Part of one core that the load generator used (0–1); from 0.85 on, it was itself the limit.
        generator_cpu_us_per_token: Its CPU time over the answers' tokens (µs).
        loops: Of each rank whose loop was recorded.
        usage: Of the service's processes in the window, where it was sampled.
    """

    requests: int
    ok: int
    statuses: dict[int, int]
    errors: tuple[str, ...]
    seconds: float
    tokens: int
    tokens_per_s: float
    first_token_s: Spread
    total_s: Spread
    piece_gap_s: Spread
    output_speed: Spread
    late_s: Spread
    generator_share: float
    generator_cpu_us_per_token: float
    generator_was_limit: bool
    statistics: dict[str, InstanceStatistics]
    verified: VerifyResult
    loops: tuple[LoopFigures, ...] = ()
    usage: Usage | None = None
    modes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Every request answered, every rank decided and drained."""
        return self.ok == self.requests and self.verified.ok

    def cpu_us_per_token(self, process: str = "") -> float:
        """Processor time of the processes whose names begin so, in the window, over its tokens (µs); 0 where not sampled."""
        tokens = self.tokens_per_s * self.usage.seconds if self.usage is not None else 0.0
        return self.usage.worked_s(process) * 1e6 / tokens if self.usage is not None and tokens else 0.0

    def figures(self) -> tuple[Figure, ...]:
        """What trials are compared by. Of several generation ranks that one's whose step was longest."""
        made = [
            Figure("tokens per second", self.tokens_per_s, "1/s", "more"),
            Figure("first token p50", 1e3 * self.first_token_s.p50, "ms"),
            Figure("first token p99", 1e3 * self.first_token_s.p99, "ms"),
            Figure("gap between pieces p50", 1e3 * self.piece_gap_s.p50, "ms"),
            Figure("gap between pieces p99", 1e3 * self.piece_gap_s.p99, "ms"),
            Figure("request p50", 1e3 * self.total_s.p50, "ms"),
            Figure("output speed of a request p25", self.output_speed.p25, "1/s", "more"),
        ]
        if self.usage is not None:
            made += [
                Figure("processor time per token, service", self.cpu_us_per_token(), "us"),
                Figure("processor time per token, generation", self.cpu_us_per_token("gen"), "us"),
            ]
        decoding = [loop for loop in self.loops if loop.role == "generation"]
        if decoding:
            slowest = max(decoding, key=lambda loop: loop.step_ms.p50)
            made += [
                Figure("step p50", slowest.step_ms.p50, "ms"),
                Figure("step p99", slowest.step_ms.p99, "ms"),
                Figure("host time of a step p50", slowest.host_ms.p50, "ms"),
                Figure("processor time of the loop per step", slowest.worked_ms, "ms"),
                Figure(
                    "wait for the interpreter per step", slowest.lock_mean_ms + slowest.lock_in_turns_ms, "ms"
                ),
            ]  # fmt: skip
        reading = [loop for loop in self.loops if loop.role == "context"]
        if reading:
            slowest = max(reading, key=lambda loop: loop.step_ms.p50)
            agreeing = max(sum(loop.phases_ms.get(name, 0.0) for name in _AGREEING) for loop in reading)
            made += [
                Figure("context step p50", slowest.step_ms.p50, "ms"),
                Figure("agreement and transfers per context step, longest rank", agreeing, "ms"),
            ]
        return tuple(made)

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
            "first_token_s": _short(asdict(self.first_token_s)),
            "total_s": _short(asdict(self.total_s)),
            "piece_gap_s": _short(asdict(self.piece_gap_s)),
            "output_speed": _short(asdict(self.output_speed)),
            "late_s": _short(asdict(self.late_s)),
            "figures": {figure.name: _short(figure.value) for figure in self.figures()},
            "loops": [_short(asdict(loop)) | {"lock_share": _short(loop.lock_share)} for loop in self.loops],
            "usage": None if self.usage is None else _short(asdict(self.usage)),
            "modes": self.modes,
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
            f"{self.ok} of {self.requests} answered ({statuses}); figures of {self.seconds:.1f} s",
            f"{self.tokens} answer tokens, {self.tokens_per_s:.1f} tokens/s",
            f"first token {_said(self.first_token_s)}; whole answer {_said(self.total_s)}",
            f"gap between pieces {_said(self.piece_gap_s)}; output speed of a request p25 {self.output_speed.p25:.1f}, "
            f"p50 {self.output_speed.p50:.1f} tokens/s",
            *(_loop_line(loop) for loop in self.loops),
            *self._usage_lines(),
            f"load generator: {self.generator_share:.0%} of a core, {self.generator_cpu_us_per_token:.1f} µs a token"
            + ("; it was itself the limit: these figures are its own" if self.generator_was_limit else ""),
            *(f"error: {text}" for text in self.errors[:5]),
            *self.verified.lines,
        ]
        return "\n".join(lines)

    def _usage_lines(self) -> list[str]:
        if self.usage is None or self.usage.seconds <= 0:
            return []
        lines = []
        for process, threads in self.usage.threads.items():
            shares = sorted(
                ((worked / self.usage.seconds, name) for name, (worked, _) in threads.items()), reverse=True
            )
            if not shares or shares[0][0] < 0.005:
                continue
            said = ", ".join(f"{name} {share:.0%}" for share, name in shares[:4] if share >= 0.005)
            full = "; has no time left" if shares[0][0] >= BUSY_SHARE else ""
            lines.append(f"{process}: {self.cpu_us_per_token(process):.1f} µs a token; of a core: {said}{full}")
        grown = [(name, *sizes) for name, sizes in self.usage.resident_bytes.items() if sizes[0]]
        if grown:
            said = ", ".join(f"{name} {first >> 20} to {last >> 20}" for name, first, last in grown)
            lines.append(f"resident memory from the window's begin to its end, MiB: {said}")
        waiting = ", ".join(f"{owner} {n} of {self.usage.live[owner]}" for owner, n in self.usage.waiting.items())
        return [*lines, *([f"waiting to be admitted, at most: {waiting} there"] if waiting else [])]


def _said(spread: Spread) -> str:
    return f"p50 {spread.p50:.3f} s, p90 {spread.p90:.3f} s, p99 {spread.p99:.3f} s"


def _loop_line(loop: LoopFigures) -> str:
    phases = sorted(loop.phases_ms.items(), key=lambda item: -item[1])[:4]
    return (
        f"{loop.name}: {loop.steps} steps of {loop.rows:.0f} tokens, p50 {loop.step_ms.p50:.2f} ms, p99 "
        f"{loop.step_ms.p99:.2f} ms; device p50 {loop.device_ms.p50:.2f} ms; loop {loop.worked_ms:.3f} ms a step ("
        + ", ".join(f"{name} {spent:.3f}" for name, spent in phases)
        + f"); waits for the interpreter {loop.lock_mean_ms + loop.lock_in_turns_ms:.3f} ms a step ({loop.lock_share:.1%}), "
        f"for a core {loop.core_wait_ms:.3f} ms" + (f"; {loop.dropped} turns were not kept" if loop.dropped else "")
    )


def _short(value: Any) -> Any:
    """Five digits are enough."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list | tuple) else value


def _tokens_within(outcomes: Sequence[Outcome], window_s: tuple[float, float]) -> float:
    """Tokens that came in the window; what came in one piece came together."""
    found = 0.0
    for one in outcomes:
        inside = sum(window_s[0] <= one.sent_s + at_s <= window_s[1] for at_s in one.pieces_s)
        found += one.tokens * inside / len(one.pieces_s) if one.pieces_s else 0.0
    return found


def _speed(one: Outcome) -> float | None:
    """Tokens per second behind the first piece; None where there is none behind it."""
    if len(one.pieces_s) < 2 or one.pieces_s[-1] <= one.pieces_s[0]:
        return None
    per_piece = one.tokens / len(one.pieces_s)
    return (one.tokens - per_piece) / (one.pieces_s[-1] - one.pieces_s[0])


def make_report(
    result: LoadResult,
    counted: dict[str, InstanceStatistics],
    verified: VerifyResult,
    *,
    load: LoadConfig | None = None,
    loops: tuple[LoopFigures, ...] = (),
    usage: Usage | None = None,
    modes: Mapping[str, dict[str, Any]] | None = None,
) -> Report:
    """Put a trial's parts together."""
    load = load or LoadConfig()
    outcomes = result.outcomes
    good = [o for o in outcomes if o.ok]
    shown = [o for o in outcomes[load.warm_up :] if o.ok]
    window_s = result.window_s(load)
    seconds = window_s[1] - window_s[0]
    tokens = sum(o.tokens for o in good)
    speeds = (_speed(one) for one in shown)
    return Report(
        requests=len(outcomes),
        ok=len(good),
        statuses=dict(Counter(o.status for o in outcomes)),
        errors=tuple(dict.fromkeys(o.error for o in outcomes if o.error)),
        seconds=seconds,
        tokens=tokens,
        tokens_per_s=_tokens_within(good, window_s) / seconds if seconds > 0 else 0.0,
        first_token_s=Spread.of([o.first_s for o in shown]),
        total_s=Spread.of([o.total_s for o in shown]),
        piece_gap_s=Spread.of([after - before for o in shown for before, after in pairwise(o.pieces_s)]),
        output_speed=Spread.of([speed for speed in speeds if speed is not None]),
        late_s=Spread.of([o.late_s for o in shown]),
        generator_share=result.share,
        generator_cpu_us_per_token=result.cpu_s * 1e6 / tokens if tokens else 0.0,
        generator_was_limit=result.was_limit,
        statistics=counted,
        verified=verified,
        loops=loops,
        usage=usage,
        modes=dict(modes or {}),
    )
