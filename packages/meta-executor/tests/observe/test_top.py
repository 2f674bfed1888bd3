"""Two samples as a frame: levels of the newer, rates between both; and the table."""

from __future__ import annotations

import io
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from meta_executor.config import HttpConfig
from meta_executor.front.metrics import FrontMetrics
from meta_executor.listener.bounds import Ledger
from meta_executor.observe.top import InstanceSample, Sample, frame_of, values_of


def sample(at_s: float, instances: tuple[InstanceSample, ...], front: Any = None) -> Sample:
    return Sample(at_s, "http://f", "ok" if front is not None else "", front, instances)


def generation(tokens: float, *ranks: dict[str, float], status: str = "ok", **totals: float) -> InstanceSample:
    return InstanceSample("gen-0", "generation", status, {"tokens_returned": tokens, **totals}, dict(enumerate(ranks)))


def test_the_exposition_format_is_read_by_its_labels() -> None:
    """Instance values without, rank values with a rank; buckets of histograms are left out; prefixes are cut."""
    registry = CollectorRegistry()
    Gauge("meta_executor_requests_ok", "x", registry=registry).set(5)
    gauge = Gauge("meta_executor_rank_steps", "x", ["rank"], registry=registry)
    gauge.labels(rank="0").set(7)
    gauge.labels(rank="11").set(8)
    Histogram("queue_latency_seconds", "x", registry=registry).observe(0.1)
    values = values_of(generate_latest(registry).decode())
    assert values.totals["requests_ok"] == 5.0 and values.totals["queue_latency_seconds_count"] == 1.0
    assert values.ranks == {0: {"steps": 7.0}, 11: {"steps": 8.0}}


def test_rates_are_growth_over_the_time_between_the_samples() -> None:
    """Half a second: 20 tokens are 40 per second; levels are the newer sample's."""
    before = generation(100, {"steps": 10, "tokens_computed": 50}, requests_ok=1)
    after = generation(
        120,
        {
            "steps": 15, "tokens_computed": 80, "active_now": 3, "kv_blocks_used_now": 25, "kv_blocks_total": 100,
            "agreement_opened": 9, "agreement_decided": 7, "quarantined_bytes_now": 4096,
        },
        requests_ok=3, requests_live_now=4, requests_waiting_now=2, step_p50_ms=8.5, requests_failed=1,
    )  # fmt: skip
    (row,) = frame_of(sample(10.0, (before,)), sample(10.5, (after,))).instances
    assert (row.answer_tokens_per_s, row.requests_per_s) == (40.0, 4.0)
    assert (row.requests, row.waiting, row.step_p50_ms, row.completed, row.failed) == (4, 2, 8.5, 3, 1)
    (rank,) = row.ranks
    assert (rank.steps_per_s, rank.tokens_per_s, rank.requests, rank.kv_share) == (10.0, 60.0, 3, 0.25)
    assert (rank.undecided, rank.quarantined_bytes) == (2, 4096)


@pytest.mark.parametrize("before", [None, generation(500, {"steps": 90}), generation(1)])
def test_where_there_is_nothing_to_compare_with_there_is_no_rate(before: Any) -> None:
    """A new instance, one that began anew, a rank that was not there: never a negative rate, never a guess."""
    earlier = () if before is None else (before,)
    (row,) = frame_of(sample(0.0, earlier), sample(1.0, (generation(3, {"steps": 4}),))).instances
    assert row.answer_tokens_per_s == (2.0 if before is not None and before.totals["tokens_returned"] == 1 else None)
    assert row.ranks[0].steps_per_s is None


def test_the_fronts_own_metrics_are_the_ones_that_are_read() -> None:
    """Names of the real front metrics: a renamed counter would show here."""
    metrics = FrontMetrics(Ledger(HttpConfig()))

    def now() -> dict[str, float]:
        return values_of(metrics.text().decode()).totals

    first = sample(0.0, (), now())
    metrics.total_requests.inc(6)
    metrics.running.set(2)
    metrics.http_exceptions.inc()
    metrics.internal_errors.inc()
    metrics.validation_exceptions.inc(3)
    metrics.client_disconnects.inc(4)
    front = frame_of(first, sample(2.0, (), now())).front
    assert front is not None
    assert (front.running, front.requests, front.requests_per_s) == (2, 6, 3.0)
    assert (front.errors, front.refused, front.left) == (2, 3, 4)


def test_the_table_shows_every_instance_and_rank_and_who_is_gone() -> None:
    """As plain text where there is no terminal."""
    from meta_executor.observe._rich import print_frame

    before = sample(0.0, (generation(0, {"steps": 0.0}, {"steps": 0.0}),), {"total_requests_total": 0.0})
    after = sample(
        1.0,
        (
            InstanceSample("ctx-0", "context", "gone: refused", {}, {}),
            generation(
                42,
                {"steps": 5, "kv_blocks_used_now": 10, "kv_blocks_total": 40},
                {"steps": 6, "quarantined_bytes_now": 8192, "kv_blocks_total": 40},
                requests_waiting_now=13,
            ),
        ),
        {"total_requests_total": 9.0},
    )
    out = io.StringIO()
    print_frame(frame_of(before, after), out)
    lines = out.getvalue().splitlines()
    assert "front http://f ok: 0 running, 9 requests (9.0/s)" in lines[0]
    assert "ctx-0" in lines[2] and "gone: refused" in lines[2]
    assert "gen-0" in lines[3] and "13" in lines[3] and "10/80" in lines[3] and "42.0" in lines[3]
    assert "rank 0" in lines[4] and "25 %" in lines[4] and "5.0" in lines[4]
    assert "rank 1" in lines[5] and "8 KiB in quarantine" in lines[5]


def test_live_frames_compare_with_the_frame_before() -> None:
    """Each frame's rates cover one interval, not the time since the start."""
    from meta_executor.observe import _rich

    taken = [sample(float(n), (generation(tokens, {}),)) for n, tokens in enumerate((0, 10, 30))]
    shown: list[Any] = []
    real = _rich.frame_of

    def frame(before: Sample, after: Sample) -> Any:
        made = real(before, after)
        shown.append(made.instances[0].answer_tokens_per_s)
        return made

    def take() -> Sample:
        if not taken:
            raise KeyboardInterrupt
        return taken.pop(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_rich, "frame_of", frame)
        with pytest.raises(KeyboardInterrupt):
            _rich.run_live(take, 1.0, sleep=lambda seconds: None)
    assert shown == [10.0, 20.0]
