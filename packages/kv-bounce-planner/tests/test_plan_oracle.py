"""Random layout pairs against the per-byte oracle: the planner's main proof."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kv_bounce_planner.planning import (
    TransferPlan,
    WriterReport,
    decode_blocks,
    decode_plan,
    decode_report,
    encode_blocks,
    encode_plan,
    encode_report,
    plan_destination,
    plan_transfer,
    plan_writer,
    request_ranges,
    validate_report,
)


def load_oracles() -> ModuleType:
    name = "kv_bounce_planner_test_oracles"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("oracles.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


oracles = load_oracles()


def check_case(seed: int) -> TransferPlan:
    """One pair: both derivations, the expansion into bytes, the canonical form and the codecs, all against the oracle."""
    case = oracles.random_case(seed)
    expected = oracles.byte_map(case)
    assert set(expected) == oracles.wanted_bytes(case)
    plan = plan_transfer(
        case.source,
        case.target,
        tokens=case.tokens,
        target_blocks=case.target_blocks,
        source_blocks=case.source_blocks,
        source_adp_rank=case.source_adp_rank,
    )
    got: dict[int, tuple[int, int]] = {}
    for rank, transfer in plan.transfers.items():
        offset = 0
        for source, target, size, staged in zip(
            transfer.source_addresses.tolist(),
            transfer.target_addresses.tolist(),
            transfer.sizes.tolist(),
            transfer.staging_offsets.tolist(),
        ):
            assert staged == offset
            offset += size
            for i in range(size):
                assert target + i not in got, "a byte is covered twice"
                got[target + i] = (rank, source + i)
    assert got == expected, f"seed {seed}"
    # The receiver's own view, range by range, is the maximal join of each writer's bytes.
    assert plan.writer_ranks == tuple(sorted({rank for rank, _ in expected.values()}))
    for rank, writer in plan.writers.items():
        canonical = oracles.joined({at for at, (owner, _) in expected.items() if owner == rank})
        assert list(zip(writer.target_addresses.tolist(), writer.sizes.tolist())) == canonical
        assert writer.total_bytes == sum(size for _, size in canonical)
        assert not writer.target_addresses.flags.writeable and not writer.sizes.flags.writeable
        # The sender alone derives the same plan; joining never needs more descriptors than promised.
        transfer = plan.transfers[rank]
        assert transfer.writer == writer and transfer.writer.digest == writer.digest
        assert transfer.merged_count <= transfer.raw_count == writer.fragment_count
        report = WriterReport(
            bytes(16), rank, 64, writer.total_bytes, writer.digest, transfer.target_addresses, transfer.sizes
        )
        validate_report(writer, decode_report(encode_report(report)), bound_base=64)
        # Pulled: the receiver derives it from what travels, the sender's layout and its table, byte for byte the same.
        lent, _ = decode_blocks(encode_blocks(case.source_blocks[rank], case.tokens))
        pulled = plan_writer(
            case.source, rank, lent, case.target, case.target_blocks, case.tokens, source_adp_rank=case.source_adp_rank
        )
        assert pulled is not None and pulled.writer == writer
        for name in ("source_addresses", "target_addresses", "sizes"):
            assert np.array_equal(getattr(pulled, name), getattr(transfer, name)), f"seed {seed}: {name}"
    for rank in range(len(case.source.ranks)):
        if rank not in plan.writers and rank in case.source.cohort(case.source_adp_rank or 0):
            silent = plan_writer(
                case.source, rank, case.source_blocks[rank], case.target, case.target_blocks, case.tokens,
                source_adp_rank=case.source_adp_rank,
            )  # fmt: skip
            assert silent is None
    addresses, sizes = request_ranges(case.target, case.target_blocks, case.tokens)
    assert list(zip(addresses.tolist(), sizes.tolist())) == oracles.joined(set(expected))
    assert plan.total_bytes == len(expected)
    # What travels is what was planned: from the decoded request the same plan is derived again.
    assert decode_plan(encode_plan(plan)) == plan
    blocks, tokens = decode_blocks(encode_blocks(case.target_blocks, case.tokens))
    assert (blocks, tokens) == (case.target_blocks, case.tokens)
    again = plan_destination(case.source, case.target, blocks, tokens, source_adp_rank=case.source_adp_rank)
    assert again == plan and again.digest == plan.digest
    return plan


def traits(case: Any, plan: TransferPlan) -> set[str]:
    """What this case is an example of, among what planners get wrong."""
    found = {"fan-in"} if len(plan.writers) > 1 else set()
    if not plan.total_bytes:
        return found
    groups = [group for layout in (case.target, *case.source.ranks) for group in layout.groups]
    plain = [group for group in groups if not group.opaque]
    tp, pp = case.source.tp_size, case.source.pp_size
    found |= {"moving"}
    found |= {"context parallelism"} if any(group.token_share.size > 1 for group in groups) else set()
    found |= {"MLA"} if any(not group.value_bases for group in plain) else set()
    found |= {"heads < TP"} if any(group.head_total < tp for group in plain) else set()
    found |= (
        {"TP does not divide"} if any(group.head_total > tp and group.head_total % tp for group in plain) else set()
    )
    layers = len({layer for group in groups for layer in group.layer_ids})
    found |= {"PP does not divide"} if layers % pp else set()
    found |= {"unlike block sizes"} if len({group.block_tokens for group in plain}) > 1 else set()
    return found


@pytest.mark.parametrize("chunk", range(10))
def test_random_layout_pairs_equal_the_per_element_oracle(chunk: int) -> None:
    """2,000 random pairs a run; tools/fuzz.py runs the 20,000 and more."""
    seen: Counter[str] = Counter()
    for seed in range(chunk * 200, chunk * 200 + 200):
        plan = check_case(seed)
        seen.update(traits(oracles.random_case(seed), plan))
    # The generator really draws each of these: trivial cases would prove nothing.
    assert seen["fan-in"] > 50 and seen["moving"] > 120 and seen["context parallelism"] > 50, seen
    wanted = ("MLA", "heads < TP", "TP does not divide", "PP does not divide", "unlike block sizes")
    assert all(seen[name] > 15 for name in wanted), seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_random_layout_pairs_equal_the_oracle() -> None:
    """The number of the acceptance text, on seeds that the quick run does not use."""
    for seed in range(1_000_000, 1_020_000):
        check_case(seed)
