"""Prometheus metrics of the front, under the names that disaggregated servers of the field use."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meta_executor.listener.bounds import Ledger
from meta_executor.listener.metrics import ListenerMetrics

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)


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

    Args:
        ledger: Of the front's listener.
    """

    def __init__(self, ledger: Ledger) -> None:
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
        self.running = Gauge("running_requests", "Requests being answered now", registry=registry)
        self.context = RoleMetrics("ctx", registry)
        self.generation = RoleMetrics("gen", registry)

    def role(self, role: str) -> RoleMetrics:
        """Metrics of one role."""
        return self.context if role == "context" else self.generation

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
