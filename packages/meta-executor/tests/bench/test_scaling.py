"""What a request costs as ranks and requests grow: counted on the service's own code."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("scaling")


@pytest.mark.parametrize("style", ["context_first", "generation_first"])
def test_a_lone_requests_frames_grow_with_the_ranks_and_no_faster(scaling: ModuleType, style: str) -> None:
    """Agreement, pipeline and KV control are linear in the ranks: twice the ranks is at most a little over twice the frames."""
    two, four, eight = (scaling.count_messages(ranks, 1, style) for ranks in (2, 4, 8))
    for name in ("agreement", "pipeline", "control"):
        a, b, c = (getattr(one, name)[0] for one in (two, four, eight))
        assert a < b < c and (c - b) <= 2 * (b - a) + 1, (name, a, b, c)
    assert four.busiest <= four.agreement[0] + four.pipeline[0]


def test_requests_that_come_together_share_frames(scaling: ModuleType) -> None:
    alone, together = (scaling.count_messages(4, requests, "context_first") for requests in (1, 8))
    assert together.agreement[0] < alone.agreement[0] / 3 and together.pipeline[0] < alone.pipeline[0] / 3


def test_a_line_is_found_and_tells_when_a_core_is_full(scaling: ModuleType) -> None:
    rows = (100, 1000, 10_000)
    fixed, each = scaling.line_through(rows, [1e-4 + 2e-7 * count for count in rows])
    assert (fixed, each) == pytest.approx((1e-4, 2e-7))
    assert scaling.rows_that_fill(fixed, each, 20.0) == pytest.approx((0.85 * 0.02 - 1e-4) / 2e-7, abs=1)
    assert scaling.rows_that_fill(1.0, each, 20.0) == 0


def test_the_loops_cost_is_measured_on_its_own_code(scaling: ModuleType) -> None:
    assert 0 < scaling.per_step_s(16, 4) < 1


def test_of_unit_costs_one_sees_what_is_full_first_and_what_is_wanted(scaling: ModuleType) -> None:
    costs = scaling.Costs(
        machine="m", source="s", answer_tokens=50, front_us_per_token=20.0, context_rank_us_per_request=2000.0,
        generation_rank_us_per_token=10.0, coordinator_us_per_request=30.0, coordinator_ranks=4,
    )  # fmt: skip
    full = costs.full_at()
    assert (full["front"], full["context rank"], full["generation rank"]) == pytest.approx((850, 425, 1700))
    assert full["agreement's coordinator of 64 ranks"] == pytest.approx(0.85e6 / 630)
    rate, wanted = costs.wanted(5000, 50.0)
    assert rate == 2000 and wanted == {"front": 3, "context rank": 5, "generation rank": 2}
    assert "| 100,000 | 100 ms | 20,000 | 24 | 48 | 12 |" in scaling.limits_table(costs)


def test_costs_that_were_kept_can_be_read(scaling: ModuleType) -> None:
    kept = sorted((BENCHMARKS.parents[2] / "docs" / "benchmarks" / "scaling").glob("*.json"))
    assert kept
    for path in kept:
        assert scaling.limits_table(msgspec.json.decode(path.read_bytes(), type=scaling.Costs))
