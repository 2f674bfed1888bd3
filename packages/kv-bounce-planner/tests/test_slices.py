"""Slices of one plan: a partition, canonical, each with its own numbering; against the per-byte oracle and by name."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kv_bounce_planner.planning import (
    BlockTable,
    LayoutError,
    PlanRefused,
    Reason,
    RequestBlocks,
    Slice,
    TokenRange,
    choose_slice_count,
    cut_slices,
    plan_destination,
    plan_slices,
    plan_writer,
    plan_writer_slices,
)
from kv_bounce_planner.planning.slices import SLICES_MAX


def _load_oracles() -> Any:
    spec = importlib.util.spec_from_file_location("kv_slices_oracles", Path(__file__).with_name("oracles.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


oracles = _load_oracles()


def slices_of(case: Any, seed: int) -> list[Slice]:
    found = [Slice(tokens, layers) for tokens, layers in oracles.random_slices(case, random.Random(seed))]
    return found if seed % 2 else random.Random(seed).sample(found, len(found))  # in any order, too


def pairs(transfer: Any) -> dict[int, tuple[int, int]]:
    """target byte -> (place in the region, source byte)."""
    found: dict[int, tuple[int, int]] = {}
    columns = (transfer.source_addresses, transfer.target_addresses, transfer.sizes, transfer.staging_offsets)
    for source, target, size, staged in zip(*(column.tolist() for column in columns)):
        found.update(zip(range(target, target + size), zip(range(staged, staged + size), range(source, source + size))))
    assert len(found) == sum(transfer.sizes.tolist()), "a byte is covered twice"
    return found


def check_sliced(seed: int) -> Counter[str]:
    """One random request in random slices: both derivations, byte by byte, and the partition."""
    case = oracles.random_case(seed)
    slices = slices_of(case, seed)
    plan = plan_slices(
        case.source, case.target, case.target_blocks, case.tokens, slices, source_adp_rank=case.source_adp_rank
    )
    cells: dict[int, tuple[int, int | None]] = {}
    every = oracles.byte_map(case, cells)
    by_cell: dict[tuple[int, int | None], list[int]] = {}
    for at, cell in cells.items():
        by_cell.setdefault(cell, []).append(at)
    seen: dict[int, int] = {}
    transfers = {
        rank: plan_writer_slices(
            case.source, rank, case.source_blocks[rank], case.target, case.target_blocks, case.tokens, slices,
            source_adp_rank=case.source_adp_rank,
        )
        for rank in case.source.cohort(case.source_adp_rank or 0)
    }  # fmt: skip
    for index, (each, cut) in enumerate(zip(slices, plan.plans)):
        inside = (cell for cell in by_cell if oracles.in_slice(cell, each.tokens, each.layers, case.tokens.end))
        expected = {at: every[at] for cell in inside for at in by_cell[cell]}
        assert cut.writer_ranks == tuple(sorted({rank for rank, _ in expected.values()})), f"seed {seed}"
        got: dict[int, tuple[int, int]] = {}
        for rank, of_rank in transfers.items():
            transfer = of_rank[index]
            assert (transfer is not None) == (rank in cut.writers)
            if transfer is None:
                continue
            writer = cut.writers[rank]
            assert transfer.writer == writer and transfer.writer.digest == writer.digest
            placed = pairs(transfer)
            # The region of a slice begins at 0 and is as long as the slice: byte k is the k-th of the ascending targets.
            assert [placed[at][0] for at in sorted(placed)] == list(range(writer.total_bytes))
            got |= {at: (rank, source) for at, (_, source) in placed.items()}
            canonical = oracles.joined({at for at, (owner, _) in expected.items() if owner == rank})
            assert list(zip(writer.target_addresses.tolist(), writer.sizes.tolist())) == canonical
        assert got == expected, f"seed {seed}, slice {index}"
        for at in got:
            assert at not in seen, "a byte is in two slices"
            seen[at] = index
    assert set(seen) == oracles.wanted_bytes(case)
    whole = plan_destination(
        case.source, case.target, case.target_blocks, case.tokens, source_adp_rank=case.source_adp_rank
    )
    assert plan.total_bytes == whole.total_bytes and plan.writer_ranks == whole.writer_ranks
    if len(slices) == 1 and slices[0].layers is None:
        assert plan.plans[0] == whole and plan.plans[0].digest == whole.digest
    found = Counter({"several": len([each for each in plan.plans if each.total_bytes]) > 1})
    found["by layer"] = any(each.layers is not None for each in slices) and found["several"]
    sizes = [group.block_tokens for group in case.target.groups if not group.opaque]
    found["within a block"] = found["several"] and any(each.tokens.start % size for each in slices for size in sizes)
    found["fan-in"] = found["several"] and any(len(each.writers) > 1 for each in plan.plans)
    found["state"] = found["several"] and any(group.opaque for group in case.target.groups)
    return found


@pytest.mark.parametrize("chunk", range(4))
def test_random_slices_of_random_layout_pairs_equal_the_per_byte_oracle(chunk: int) -> None:
    """Every slice exactly its bytes, all of them together exactly the request's: 400 a run."""
    seen: Counter[str] = Counter()
    for seed in range(chunk * 100, chunk * 100 + 100):
        seen += check_sliced(seed)
    assert seen["several"] > 35 and all(seen[name] > 15 for name in ("by layer", "within a block", "fan-in")), seen
    assert seen["state"] > 2, seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_random_slice_plans_equal_the_oracle() -> None:
    """On seeds that the quick run does not use."""
    for seed in range(2_000_000, 2_020_000):
        check_sliced(seed)


def a_request(seed: int = 3) -> Any:
    """A random case of more than four tokens without evicted blocks, recurrent state or shared tokens."""
    while True:
        case = oracles.random_case(seed)
        groups, tables = case.target.groups, case.target_blocks.tables.values()
        plain = groups and all(not group.opaque and group.token_share.size == 1 for group in groups)
        if plain and case.tokens.count > 4 and all((table.block_ids >= 0).all() for table in tables):
            return case
        seed += 1


def planned(case: Any, *slices: Slice) -> Any:
    return plan_slices(
        case.source, case.target, case.target_blocks, case.tokens, slices, source_adp_rank=case.source_adp_rank
    )


def test_slices_that_share_a_token_are_refused() -> None:
    """Two writes of one byte: which one is the last would be chance."""
    case = a_request()
    start, end = case.tokens.start, case.tokens.end
    with pytest.raises(PlanRefused) as refused:
        planned(case, Slice(TokenRange(start, start + 2)), Slice(TokenRange(start + 1, end)))
    assert refused.value.reason is Reason.OVERLAP


@pytest.mark.parametrize("missing", ["first", "middle", "last", "layers"])
def test_slices_that_leave_a_token_out_are_refused(missing: str) -> None:
    """A request that never becomes whole would be reported as a success."""
    case = a_request()
    start, end = case.tokens.start, case.tokens.end
    layers = sorted(layer for group in case.target.groups for layer in group.layer_ids)
    slices = {
        "first": [Slice(TokenRange(start + 1, end))],
        "middle": [Slice(TokenRange(start, start + 1)), Slice(TokenRange(start + 2, end))],
        "last": [Slice(TokenRange(start, end - 1))],
        "layers": [Slice(TokenRange(start, end - 1)), Slice(TokenRange(end - 1, end), range(layers[0] + 1, 100))],
    }[missing]
    with pytest.raises(PlanRefused) as refused:
        planned(case, *slices)
    assert refused.value.reason is Reason.NOT_EXACT_COVER


def test_a_slice_outside_the_request_is_an_error() -> None:
    """Its bytes belong to nobody's request."""
    case = a_request()
    with pytest.raises(LayoutError, match="reaches outside"):
        planned(case, Slice(TokenRange(case.tokens.start, case.tokens.end + 1)))
    with pytest.raises(LayoutError, match="reaches outside"):
        plan_writer_slices(
            case.source, 0, case.source_blocks[0], case.target, case.target_blocks, case.tokens,
            [Slice(TokenRange(0, case.tokens.end + 1))],
        )  # fmt: skip


def test_no_slice_and_too_many_are_errors() -> None:
    """An operation names its slice in 16 bits."""
    case = a_request()
    with pytest.raises(LayoutError, match="0 slices"):
        planned(case)
    with pytest.raises(LayoutError, match=f"{SLICES_MAX + 1} slices"):
        planned(case, *[Slice(case.tokens)] * (SLICES_MAX + 1))


@pytest.mark.parametrize("layers", [range(0), range(2, 2), range(3, 0, -1), range(0, 4, 2)])
def test_layers_of_a_slice_ascend_without_a_gap(layers: range) -> None:
    with pytest.raises(LayoutError, match="ascending range"):
        Slice(TokenRange(0, 4), layers)


# --- where to cut -----------------------------------------------------------------------------------------------------


def spans(slices: tuple[Slice, ...]) -> list[tuple[int, int]]:
    return [(each.tokens.start, each.tokens.end) for each in slices]


@pytest.mark.parametrize(
    ("start", "end", "by", "expected"),
    [
        (0, 1000, 256, [(0, 256), (256, 512), (512, 768), (768, 1000)]),
        (300, 1000, 256, [(300, 512), (512, 768), (768, 1000)]),  # a prefix moves no cut
        (256, 512, 256, [(256, 512)]),
        (0, 256, 256, [(0, 256)]),
        (0, 257, 256, [(0, 256), (256, 257)]),
        (255, 257, 256, [(255, 256), (256, 257)]),
        (5, 5, 256, [(5, 5)]),
    ],
)
def test_cuts_are_positions_of_the_prompt(start: int, end: int, by: int, expected: list[tuple[int, int]]) -> None:
    assert spans(cut_slices(TokenRange(start, end), by)) == expected


def test_a_short_last_slice_joins_the_one_before() -> None:
    """A slice of a few tokens costs as many messages as any other."""
    assert spans(cut_slices(TokenRange(0, 520), 256, last_tokens_min=16)) == [(0, 256), (256, 520)]
    assert spans(cut_slices(TokenRange(0, 528), 256, last_tokens_min=16)) == [(0, 256), (256, 512), (512, 528)]
    assert spans(cut_slices(TokenRange(500, 505), 256, last_tokens_min=16)) == [(500, 505)]


def test_layers_are_the_inner_order() -> None:
    """Of each range of tokens the layers follow each other, as a prefill computes them."""
    slices = cut_slices(TokenRange(0, 8), 4, layers=[range(2), range(2, 5)])
    assert slices == tuple(
        Slice(TokenRange(low, low + 4), layers) for low in (0, 4) for layers in (range(2), range(2, 5))
    )


@pytest.mark.parametrize(("by", "least"), [(0, 1), (-1, 1), (4, 0)])
def test_a_cut_of_nothing_is_an_error(by: int, least: int) -> None:
    with pytest.raises(LayoutError, match="at least 1"):
        cut_slices(TokenRange(0, 8), by, last_tokens_min=least)


def test_more_slices_than_an_identity_can_name_are_an_error_before_they_are_made() -> None:
    with pytest.raises(LayoutError, match="more than"):
        cut_slices(TokenRange(0, 1 << 40), 1)
    assert len(cut_slices(TokenRange(0, SLICES_MAX - 2), 1)) == SLICES_MAX - 2


# --- how many ---------------------------------------------------------------------------------------------------------


def wait_s(compute_s: float, transfer_s: float, slice_cost_s: float, count: int) -> float:
    """One slice after the other, by hand: from the prompt's end to the end of the last."""
    free_s = 0.0
    for index in range(count):
        free_s = max(free_s, compute_s * (index + 1) / count) + transfer_s / count + slice_cost_s
    return free_s - compute_s


def test_the_count_has_the_least_sum_of_wait_and_work() -> None:
    """Against every count, moved by hand, on 300 random machines: transfers slower and faster than compute."""
    rng, several = random.Random(5), 0
    for _ in range(300):
        compute_s, transfer_s = rng.choice([0.0, rng.random()]), rng.choice([0.01, 1.0]) * rng.random()
        cost_s, count_max = rng.choice([0.0, 1e-4, 1e-2]), rng.randint(1, 40)
        count = choose_slice_count(compute_s=compute_s, transfer_s=transfer_s, slice_cost_s=cost_s, count_max=count_max)
        sums = [wait_s(compute_s, transfer_s, cost_s, each) + each * cost_s for each in range(1, count_max + 1)]
        assert 1 <= count <= count_max and sums[count - 1] <= min(sums) + 1e-12
        several += 1 < count < count_max
    assert several > 30


def test_nothing_is_sliced_where_it_cannot_pay() -> None:
    """The prompt is computed already, or a slice costs more than it hides."""
    assert choose_slice_count(compute_s=0.0, transfer_s=0.5, slice_cost_s=1e-3, count_max=64) == 1
    assert choose_slice_count(compute_s=1.0, transfer_s=1e-3, slice_cost_s=1e-2, count_max=64) == 1
    assert choose_slice_count(compute_s=1.0, transfer_s=0.0, slice_cost_s=0.0, count_max=64) == 1
    assert choose_slice_count(compute_s=1.0, transfer_s=1.0, slice_cost_s=1e-3, count_max=64) > 8


@pytest.mark.parametrize(
    "wrong",
    [{"compute_s": -1.0}, {"transfer_s": float("nan")}, {"slice_cost_s": float("inf")}, {"count_max": 0},
     {"count_max": SLICES_MAX + 1}],
)  # fmt: skip
def test_durations_and_counts_have_bounds(wrong: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        choose_slice_count(**({"compute_s": 1.0, "transfer_s": 1.0, "slice_cost_s": 0.0, "count_max": 4} | wrong))


# --- what both sides share --------------------------------------------------------------------------------------------


def test_the_digest_is_over_every_slice_in_order() -> None:
    """Equal cuts give equal digests; other cuts, or another order, do not."""
    case = a_request()
    start, end = case.tokens.start, case.tokens.end
    first, second = Slice(TokenRange(start, start + 2)), Slice(TokenRange(start + 2, end))
    assert planned(case, first, second).digest == planned(case, first, second).digest
    assert planned(case, first, second).digest != planned(case, second, first).digest
    assert planned(case, first, second).digest != planned(case, Slice(case.tokens)).digest
    assert planned(case, first, second).counts() == {
        rank: sum(rank in each.writers for each in planned(case, first, second).plans)
        for rank in planned(case, first, second).writer_ranks
    }


def test_a_slice_whose_blocks_were_all_evicted_has_no_writer() -> None:
    """Nothing is asked of anybody for it."""
    case = a_request()
    tables = {
        group.group_id: BlockTable(np.full(-(-case.tokens.end // group.block_tokens), -1), 0)
        for group in case.target.groups
    }
    plan = plan_slices(
        case.source, case.target, RequestBlocks(tables), case.tokens,
        cut_slices(case.tokens, 2), source_adp_rank=case.source_adp_rank,
    )  # fmt: skip
    assert plan.writer_ranks == () and plan.total_bytes == 0 and plan.counts() == {}


def test_a_writer_plans_slices_as_it_plans_requests() -> None:
    """A slice is what a request of its tokens would be: no second way to plan."""
    case = a_request()
    slices = cut_slices(case.tokens, 2)
    for rank in case.source.cohort(case.source_adp_rank or 0):
        several = plan_writer_slices(
            case.source, rank, case.source_blocks[rank], case.target, case.target_blocks, case.tokens, slices,
            source_adp_rank=case.source_adp_rank,
        )  # fmt: skip
        for each, transfer in zip(slices, several):
            alone = plan_writer(
                case.source, rank, case.source_blocks[rank], case.target, case.target_blocks, each.tokens,
                source_adp_rank=case.source_adp_rank,
            )  # fmt: skip
            assert (transfer is None) == (alone is None)
            if transfer is not None and alone is not None:
                assert transfer.writer == alone.writer
                assert np.array_equal(transfer.source_addresses, alone.source_addresses)
