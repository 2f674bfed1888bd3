"""A listener's accounts for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meta_executor.listener.bounds import Ledger


class ListenerMetrics(Collector):
    """What a listener holds now, and whom it has refused before a route saw the request."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        """Families for the registry."""
        ledger = self._ledger
        refused = CounterMetricFamily(
            "http_refusals", "Requests and connections refused by the listener", labels=["code"]
        )
        for code, count in sorted(ledger.refused.items()):
            refused.add_metric([code], count)
        yield refused
        yield GaugeMetricFamily("http_connections", "Open connections", ledger.connections)
        yield GaugeMetricFamily("http_tls_handshakes", "TLS handshakes under way", ledger.handshakes)
        yield GaugeMetricFamily("http_reading_bytes", "Bytes of bodies that are being read", ledger.reading_bytes)
