"""Prometheus metrics of the front, under the names that disaggregated servers of the field use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meta_executor.listener.bounds import Ledger
from meta_executor.listener.metrics import ListenerMetrics

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)


#: Of the metrics of whole requests, as that field's engines have them.
_PREFIX = "trtllm_"


class Job(Protocol):
    """What is looked at of a request's job: times on one clock (s)."""

    accepted: float
    first_token_s: float | None


class RoleMetrics:
    """Legs of one role. Times in seconds."""

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        def counter(name: str, words: str) -> Counter:
            return Counter(f"{prefix}_{name}", words, registry=registry)

        self.total = counter("total_requests", "Legs sent")
        self.error = counter("error_requests", "Legs that failed")
        self.retry = counter("retry_requests", "Legs sent again after a refusal that touched nothing")
        self.completed = counter("completed_requests", "Legs that ended well")
        self.first_token = Histogram(
            f"{prefix}_first_token_latency_seconds", "Sent to first token (s)", buckets=_LATENCY_S, registry=registry
        )
        self.complete = Histogram(
            f"{prefix}_complete_latency_seconds", "Sent to end (s)", buckets=_LATENCY_S, registry=registry
        )
        self.per_token = Histogram(
            f"{prefix}_per_token_latency_seconds",
            "Mean time per token after the first (s)",
            buckets=_PER_TOKEN_S,
            registry=registry,
        )


class FrontMetrics:
    """All of the front's metrics, in a registry of their own.

    Those of the disaggregated server have its names; those of whole requests have the prefix and the labels of that field's
    engines, so that dashboards and load tools find them.

    Args:
        ledger: Of the front's listener.
        model_name: Label of the metrics of requests.
    """

    def __init__(self, ledger: Ledger, model_name: str = "") -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(ListenerMetrics(ledger))

        def counter(name: str, words: str) -> Counter:
            return Counter(name, words, registry=registry)

        self.total_requests = counter("total_requests", "Requests to the OpenAI endpoints")
        self.stream_requests = counter("stream_requests", "Of them, streaming")
        self.nonstream_requests = counter("nonstream_requests", "Of them, in one piece")
        self.validation_exceptions = counter("validation_exceptions", "Requests refused for their content")
        self.http_exceptions = counter("http_exceptions", "Requests answered with another error")
        self.internal_errors = counter("internal_errors", "Errors of the front itself")
        self.total_responses = counter("total_responses", "Answers that ended well")
        self.client_disconnects = counter("client_disconnects", "Clients that left before their answer's end")
        self.queue_latency = Histogram(
            "queue_latency_seconds", "Accepted to first leg sent (s)", buckets=_LATENCY_S, registry=registry
        )
        self.without_context = counter(
            "conditional_disagg_requests", "Answers whose prompt the generation instance computed: no context leg"
        )
        self.without_generation = counter(
            "first_token_requests", "Answers that ended at their first token: no generation leg"
        )
        self.running = Gauge("running_requests", "Answers being made now", registry=registry)
        self._labels = {"model_name": model_name, "engine_type": "meta_executor"}

        def labelled(name: str, words: str, *more: str) -> Counter:
            return Counter(f"{_PREFIX}{name}", words, [*self._labels, *more], registry=registry)

        def latency(name: str, words: str, buckets: tuple[float, ...] = _LATENCY_S) -> Histogram:
            made = Histogram(f"{_PREFIX}{name}", words, [*self._labels], buckets=buckets, registry=registry)
            return made.labels(**self._labels)

        self._success = labelled("request_success", "Answers that ended well, by how they ended", "finished_reason")
        self._prompt_tokens = labelled("prompt_tokens", "Tokens of prompts that were answered").labels(**self._labels)
        self._cached_tokens = labelled("cached_prompt_tokens", "Of them, found in a prefix cache").labels(
            **self._labels
        )
        self._generation_tokens = labelled("generation_tokens", "Tokens of answers").labels(**self._labels)
        self._e2e = latency("e2e_request_latency_seconds", "Accepted to the end of the reply (s)")
        self._ttft = latency("time_to_first_token_seconds", "Accepted to the first token (s)")
        self._tpot = latency("time_per_output_token_seconds", "Mean time per token after the first (s)", _PER_TOKEN_S)
        self.context = RoleMetrics("ctx", registry)
        self.generation = RoleMetrics("gen", registry)

    def answered(self, counts: Mapping[str, Any], reasons: Sequence[str], job: Job, now_s: float) -> None:
        """A reply ended well.

        Args:
            counts: Its usage, as the client got it.
            reasons: How each of its answers ended.
            job: Of its first answer.
            now_s: On the clock of the job's times (s).
        """
        self.total_responses.inc()
        for reason in reasons:
            self._success.labels(**self._labels, finished_reason=reason).inc()
        self._prompt_tokens.inc(counts["prompt_tokens"])
        self._cached_tokens.inc(counts["prompt_tokens_details"]["cached_tokens"])
        self._generation_tokens.inc(counts["completion_tokens"])
        self._e2e.observe(max(now_s - job.accepted, 0.0))
        if job.first_token_s is not None:
            self._ttft.observe(max(job.first_token_s - job.accepted, 0.0))
            per_answer = counts["completion_tokens"] / len(reasons)
            if per_answer > 1:
                self._tpot.observe(max(now_s - job.first_token_s, 0.0) / (per_answer - 1))

    def role(self, role: str) -> RoleMetrics:
        """Metrics of one role."""
        return self.context if role == "context" else self.generation

    def values(self) -> dict[str, float]:
        """Every number of the exposition format but the buckets, by its name; those that differ in labels are added up."""
        found: dict[str, float] = {}
        for family in self.registry.collect():
            for sample in family.samples:
                if "le" not in sample.labels and not sample.name.endswith("_created"):
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
