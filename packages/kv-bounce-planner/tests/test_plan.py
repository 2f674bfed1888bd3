"""Plans: the field's scenarios and bugs, one by one. Exact ranges, exact refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kv_bounce_planner.planning import (
    InstanceLayout,
    KVLayout,
    LayerGroup,
    LayoutError,
    PlanRefused,
    Reason,
    Refusal,
    RequestBlocks,
    TokenRange,
    TransferPlan,
    WriterPlan,
    head_range,
    layer_range,
    plan_destination,
    plan_transfer,
    plan_writer,
    request_ranges,
    try_plan_destination,
)
from kv_bounce_planner.planning import plan as plan_module


def latent(rank: int, layers: range, base: int, *, slot: int = 100, blocks: int = 64, tokens: int = 1) -> KVLayout:
    """Pools of one head and one factor: a block is ``slot`` bytes, so that scenarios read in bytes."""
    return KVLayout.uniform(
        rank=rank,
        first_layer=layers.start,
        layer_count=len(layers),
        head_total=1,
        head_dim=slot // tokens,
        element_bytes=1,
        block_tokens=tokens,
        block_count=blocks,
        key_bases=[base + i * 0x10000 for i in range(len(layers))],
    )


def heads(
    rank: int,
    tp: tuple[int, int],
    base: int,
    *,
    head_total: int,
    layers: range = range(1),
    order: str = "HND",
    tokens: int = 4,
) -> KVLayout:
    first, count = head_range(head_total, tp[1], tp[0])
    return KVLayout.uniform(
        rank=rank,
        first_layer=layers.start,
        layer_count=len(layers),
        head_total=head_total,
        first_head=first,
        head_count=count,
        head_dim=2,
        element_bytes=2,
        block_tokens=tokens,
        block_count=16,
        key_bases=[base + i * 0x20000 for i in range(len(layers))],
        value_bases=[base + i * 0x20000 + 0x10000 for i in range(len(layers))],
        order=order,  # type: ignore[arg-type]
    )


STAGES_OF_79 = [range(first, first + count) for first, count in (layer_range(79, 4, rank) for rank in range(4))]


def ranges_of(writer: WriterPlan) -> list[tuple[int, int]]:
    return list(zip(writer.target_addresses.tolist(), writer.sizes.tolist()))


ONE = latent(0, range(1), 0x2000)
SOURCE = InstanceLayout.single(latent(0, range(1), 0x900000))


# --- from the reference's lists ---------------------------------------------------------------------------------------


def test_empty_range_is_an_empty_plan() -> None:
    """p1: nothing to move is a plan without writers, not an error; block tables may be absent."""
    plan = plan_destination(SOURCE, ONE, RequestBlocks(), TokenRange(7, 7))
    assert plan.writer_ranks == () and plan.total_bytes == 0 and plan.block_count == 0


def test_single_block() -> None:
    """p2: one block, one range."""
    plan = plan_destination(SOURCE, ONE, RequestBlocks.single([2]), TokenRange(0, 1))
    assert ranges_of(plan.writers[0]) == [(0x2000 + 200, 100)]


def test_reversed_blocks_give_an_ascending_plan_and_pairs_are_sorted_together() -> None:
    """c21, c22: the mapper's order [1, 0] becomes ascending by target, each source staying with its target."""
    target = latent(0, range(1), 0x2000, slot=0x50)
    source = InstanceLayout.single(latent(0, range(1), 0x900000, slot=0x50))
    blocks = RequestBlocks.single([3, 0])
    transfer = plan_writer(source, 0, RequestBlocks.single([5, 9]), target, blocks, TokenRange(0, 2))
    assert transfer is not None
    assert transfer.target_addresses.tolist() == [0x2000, 0x2000 + 3 * 0x50]
    assert transfer.source_addresses.tolist() == [0x900000 + 9 * 0x50, 0x900000 + 5 * 0x50]
    assert transfer.staging_offsets.tolist() == [0, 0x50]


def test_joined_only_where_both_sides_touch() -> None:
    """Target blocks 0,1 touch and are one range; the pairs join only if the source's blocks touch as well."""
    blocks = RequestBlocks.single([0, 1])
    apart = plan_writer(SOURCE, 0, RequestBlocks.single([4, 7]), ONE, blocks, TokenRange(0, 2))
    touching = plan_writer(SOURCE, 0, RequestBlocks.single([4, 5]), ONE, blocks, TokenRange(0, 2))
    assert apart is not None and touching is not None
    assert (apart.merged_count, apart.raw_count, touching.merged_count) == (2, 2, 1)
    assert apart.writer == touching.writer and apart.writer.range_count == 1


def test_uneven_bytes_per_writer_are_planned() -> None:
    """c2, c3: three heads over two writers. Peers refuse the remainder; here each writer has its exact own bytes."""
    source = InstanceLayout(
        "s", tuple(heads(r, (r, 2), 0x900000 + r * 0x100000, head_total=3) for r in range(2)), tp_size=2
    )
    plan = plan_destination(source, heads(0, (0, 1), 0x2000, head_total=3), RequestBlocks.single([1]), TokenRange(0, 4))
    assert {rank: writer.total_bytes for rank, writer in plan.writers.items()} == {0: 2 * 2 * 16, 1: 2 * 16}


def test_groups_of_different_slot_sizes_with_fan_in() -> None:
    """c3: groups of 100 and 200 B with two writers each: refused by peers, exact here."""

    def rank(number: int, layer: int, base: int) -> KVLayout:
        one, two = latent(0, range(1), base), latent(0, range(1), base + 0x8000, slot=200)
        return KVLayout(
            number,
            (
                replace(one.groups[0], layer_ids=(layer,)),
                replace(two.groups[0], layer_ids=(layer + 10,), group_id=1),
            ),
        )

    source = InstanceLayout("s", (rank(0, 0, 0x900000), rank(1, 1, 0xA00000)), pp_size=2)
    both = [latent(0, range(2), 0x20000).groups[0], latent(0, range(2), 0x80000, slot=200).groups[0]]
    target = KVLayout(0, (both[0], replace(both[1], layer_ids=(10, 11), group_id=1)))
    blocks = RequestBlocks({0: RequestBlocks.single([1, 2]).tables[0], 1: RequestBlocks.single([5, 3]).tables[0]})
    plan = plan_destination(source, target, blocks, TokenRange(0, 2))
    assert {r: w.total_bytes for r, w in plan.writers.items()} == {0: 600, 1: 600}
    assert plan.block_count == 4


def test_a_group_without_a_block_table_is_refused() -> None:
    """c5: a second group whose slots are not known."""
    target = KVLayout(0, (ONE.groups[0], replace(latent(0, range(1), 0x80000).groups[0], layer_ids=(1,), group_id=1)))
    source = InstanceLayout.single(latent(0, range(2), 0x900000))
    refused = try_plan_destination(source, target, RequestBlocks.single([1]), TokenRange(0, 1))
    assert isinstance(refused, Refusal) and refused.reason is Reason.BLOCK_TABLE_MISSING


def test_block_id_at_the_pool_end_is_refused() -> None:
    """c18: block 8 of an 8-slot pool, at the target and at the source."""
    target = latent(0, range(1), 0x2000, blocks=8)
    with pytest.raises(PlanRefused) as refused:
        plan_destination(SOURCE, target, RequestBlocks.single([8]), TokenRange(0, 1))
    assert refused.value.reason is Reason.BLOCK_OUT_OF_RANGE
    with pytest.raises(PlanRefused) as refused:
        plan_writer(SOURCE, 0, RequestBlocks.single([64]), target, RequestBlocks.single([7]), TokenRange(0, 1))
    assert refused.value.reason is Reason.BLOCK_OUT_OF_RANGE


def test_evicted_blocks_are_not_counted_and_a_trimmed_suffix_is_exact() -> None:
    """c24: ids [4, -1, 9, -1] of 100 B are 200 B; a trimmed suffix [8, 9] or [31] of 64 B counts only itself."""
    plan = plan_destination(SOURCE, ONE, RequestBlocks.single([4, -1, 9, -1]), TokenRange(0, 4))
    assert plan.total_bytes == 200 and plan.block_count == 2
    assert ranges_of(plan.writers[0]) == [(0x2000 + 400, 100), (0x2000 + 900, 100)]
    target = latent(0, range(1), 0x2000, slot=64, tokens=4)
    source = InstanceLayout.single(latent(0, range(1), 0x900000, slot=64, tokens=4))
    for ids, total in (([8, 9], 128), ([31], 64)):
        suffix = RequestBlocks.single(ids, first_token=8)
        plan = plan_destination(source, target, suffix, TokenRange(8, 8 + 4 * len(ids)))
        assert plan.total_bytes == total


def test_all_blocks_evicted_is_an_empty_plan() -> None:
    """Nothing is wanted, so nobody writes."""
    plan = plan_destination(SOURCE, ONE, RequestBlocks.single([-1, -1]), TokenRange(0, 2))
    assert plan.writer_ranks == ()


def test_aliased_target_blocks_are_refused() -> None:
    """c25: the same slot twice in one request would hold two tokens."""
    with pytest.raises(PlanRefused) as refused:
        plan_destination(SOURCE, ONE, RequestBlocks.single([5, 5]), TokenRange(0, 2))
    assert refused.value.reason is Reason.OVERLAP


def test_two_groups_over_the_same_memory_are_refused() -> None:
    """c25 with pools: two layers at one address can never be an exact cover."""
    group = replace(latent(0, range(2), 0x2000).groups[0], key_bases=(0x2000, 0x2000))
    source = InstanceLayout.single(latent(0, range(2), 0x900000))
    refused = try_plan_destination(source, KVLayout(0, (group,)), RequestBlocks.single([5]), TokenRange(0, 1))
    assert isinstance(refused, Refusal) and refused.reason is Reason.OVERLAP


def test_sharing_a_source_block_is_fine() -> None:
    """A source may hold one block for two positions (reading twice hurts nobody)."""
    transfer = plan_writer(SOURCE, 0, RequestBlocks.single([7, 7]), ONE, RequestBlocks.single([1, 3]), TokenRange(0, 2))
    assert transfer is not None and transfer.source_addresses.tolist() == [0x900000 + 700] * 2


@pytest.mark.parametrize(
    ("mine", "stages", "expected"),
    [
        (range(8), [range(4), range(4, 8)], {0: 4, 1: 4}),
        (range(10, 40), [range(20), range(20, 40)], {0: 10, 1: 20}),
        (range(79), STAGES_OF_79, {0: 20, 1: 20, 2: 20, 3: 19}),
        (range(4, 4), [range(4), range(4, 8)], {}),
        (range(4, 8), [range(4), range(4, 8)], {1: 4}),
    ],
)  # fmt: skip
def test_pipeline_stages_by_interval(mine: range, stages: list[range], expected: dict[int, int]) -> None:
    """c23, 4k: stages of any sizes; a receiver whose interval meets 10 and 20 layers; no layers, no writers."""
    source = InstanceLayout(
        "s", tuple(latent(r, stage, 0x900000 + r * 0x800000) for r, stage in enumerate(stages)), pp_size=len(stages)
    )
    blocks = RequestBlocks.single([3, 1])
    plan = plan_destination(source, latent(0, mine, 0x2000), blocks, TokenRange(0, 2))
    assert {rank: writer.total_bytes for rank, writer in plan.writers.items()} == {
        r: n * 200 for r, n in expected.items()
    }


def test_hybrid_model_counts_blocks_and_state() -> None:
    """c30: 67 MLA blocks of 884,736 B and one recurrent state of 454,459,392 B: the plan's bytes are the sum."""
    state = LayerGroup(1, (9,), (1 << 40,), (), 0, 1, 1, 454_459_392, 1, "u8", 1, 4, 454_459_392, 0, 0, opaque=True)
    attention = latent(0, range(1), 1 << 41, slot=884_736, blocks=128).groups[0]
    source_state = replace(state, key_bases=(1 << 42,))
    source = InstanceLayout.single(
        KVLayout(0, (latent(0, range(1), 1 << 43, slot=884_736, blocks=128).groups[0], source_state))
    )
    blocks = RequestBlocks({0: RequestBlocks.single(range(67)).tables[0], 1: RequestBlocks.single([3]).tables[0]})
    plan = plan_destination(source, KVLayout(0, (attention, state)), blocks, TokenRange(0, 67))
    assert plan.total_bytes == 67 * 884_736 + 454_459_392
    # A trailing group without layers changes nothing, whether or not it has a block table.
    empty = replace(state, group_id=2, layer_ids=(), key_bases=())
    with_table = RequestBlocks({**blocks.tables, 2: RequestBlocks.single([]).tables[0]})
    for tables in (blocks, with_table):
        again = plan_destination(source, KVLayout(0, (attention, state, empty)), tables, TokenRange(0, 67))
        assert again == plan


def test_recurrent_state_moves_whole_whatever_the_token_range() -> None:
    """c19 corrected: state is planned like any block; when it is sharded differently, it is refused with its own code."""
    state = LayerGroup(0, (9,), (0x2000,), (), 0, 1, 1, 64, 1, "u8", 1, 4, 64, 0, 0, opaque=True)
    source = InstanceLayout.single(KVLayout(0, (replace(state, key_bases=(0x900000,)),)))
    plan = plan_destination(source, KVLayout(0, (state,)), RequestBlocks.single([3]), TokenRange(5, 5))
    assert ranges_of(plan.writers[0]) == [(0x2000 + 192, 64)]
    sharded = replace(state, head_total=2, first_head=0)
    other = replace(state, head_total=2, first_head=1, key_bases=(0x900000,))
    refused = try_plan_destination(
        InstanceLayout.single(KVLayout(0, (other,))),
        KVLayout(0, (sharded,)),
        RequestBlocks.single([3]),
        TokenRange(0, 1),
    )
    assert isinstance(refused, Refusal) and refused.reason is Reason.RECURRENT_STATE_SPLIT


# --- bugs of the field ------------------------------------------------------------------------------------------------


def test_front_trim_is_not_an_end_trim() -> None:
    """vLLM #48633 C3, #50558: with a partial prefix hit, position 8 of the source meets position 8 of the target.

    The source holds tokens 0 … 15 in four blocks, the target wants only 8 … 15 and names two blocks. Pairing lists from
    either end by length would copy tokens 0 … 7.
    """
    target = latent(0, range(1), 0x2000, slot=16, tokens=4)
    source = InstanceLayout.single(latent(0, range(1), 0x900000, slot=16, tokens=4))
    transfer = plan_writer(
        source,
        0,
        RequestBlocks.single([10, 11, 12, 13]),
        target,
        RequestBlocks.single([7, 5], first_token=8),
        TokenRange(8, 16),
    )
    assert transfer is not None
    assert transfer.source_addresses.tolist() == [0x900000 + 13 * 16, 0x900000 + 12 * 16]
    assert transfer.target_addresses.tolist() == [0x2000 + 5 * 16, 0x2000 + 7 * 16]


def test_trims_inside_a_block() -> None:
    """Front and end trims need not fall on block ends: only the wanted slots are written."""
    target = latent(0, range(1), 0x2000, slot=16, tokens=4)
    source = InstanceLayout.single(latent(0, range(1), 0x900000, slot=16, tokens=4))
    plan = plan_destination(source, target, RequestBlocks.single([3, 9]), TokenRange(1, 6))
    assert ranges_of(plan.writers[0]) == [(0x2000 + 3 * 16 + 4, 12), (0x2000 + 9 * 16, 8)]


@pytest.mark.parametrize("side", ["target", "source"])
def test_a_table_that_does_not_reach_over_the_range_is_refused(side: str) -> None:
    """A short table is never padded, and one that begins too late is not shifted."""
    full, late, short = (
        RequestBlocks.single([1, 2, 3]),
        RequestBlocks.single([2, 3], first_token=1),
        RequestBlocks.single([1, 2]),
    )
    for bad in (late, short):
        with pytest.raises(PlanRefused) as refused:
            plan_writer(
                SOURCE, 0, bad if side == "source" else full, ONE, bad if side == "target" else full, TokenRange(0, 3)
            )
        assert refused.value.reason is Reason.BLOCK_TABLE_SHORT


def test_first_token_must_be_a_block_start() -> None:
    """A table shifted within a block has no meaning."""
    target = latent(0, range(1), 0x2000, slot=16, tokens=4)
    with pytest.raises(LayoutError, match="start of a block"):
        plan_destination(
            InstanceLayout.single(latent(0, range(1), 0x900000, slot=16, tokens=4)),
            target,
            RequestBlocks.single([1], first_token=2),
            TokenRange(2, 4),
        )


def test_different_block_sizes() -> None:
    """vLLM #43523 and TensorRT-LLM's refusal: 32 tokens per block at the source, 16 at the target, and the reverse."""
    for source_tokens, target_tokens in ((8, 4), (4, 8), (6, 4)):
        source = InstanceLayout.single(latent(0, range(1), 0x900000, slot=source_tokens, tokens=source_tokens))
        target = latent(0, range(1), 0x2000, slot=target_tokens, tokens=target_tokens)
        transfer = plan_writer(
            source,
            0,
            RequestBlocks.single([5, 0, 3, 9, 2, 8][: -(-24 // source_tokens)]),
            target,
            RequestBlocks.single([1, 3, 5, 7, 9, 11][: -(-24 // target_tokens)]),
            TokenRange(0, 24),
        )
        assert transfer is not None and transfer.total_bytes == 24
        # Each fragment lies within one block on both sides.
        for address, size in zip((transfer.source_addresses - 0x900000).tolist(), transfer.sizes.tolist()):
            assert address // source_tokens == (address + size - 1) // source_tokens


def test_an_evicted_source_block_that_is_wanted_is_refused() -> None:
    """The target asks for what the source no longer has: a code, not garbage (vLLM #52234 is what garbage looks like)."""
    with pytest.raises(PlanRefused) as refused:
        plan_writer(SOURCE, 0, RequestBlocks.single([4, -1]), ONE, RequestBlocks.single([1, 3]), TokenRange(0, 2))
    assert refused.value.reason is Reason.SOURCE_BLOCK_MISSING
    # Where the target evicted it too, it is not wanted and all is well.
    transfer = plan_writer(
        SOURCE, 0, RequestBlocks.single([4, -1]), ONE, RequestBlocks.single([1, -1]), TokenRange(0, 2)
    )
    assert transfer is not None and transfer.total_bytes == 100


@pytest.mark.parametrize(
    ("source_tp", "target_tp", "head_total"),
    [(4, 8, 4), (8, 4, 2), (3, 2, 6), (2, 3, 8), (4, 1, 2), (1, 4, 2), (8, 8, 2)],
)
def test_heterogeneous_tensor_parallel_with_replication(source_tp: int, target_tp: int, head_total: int) -> None:
    """SGLang #31295, vLLM #37703: every (layer, head) of every target rank comes from a rank that holds it, inside its
    pool, and replicated targets spread over replicated sources.
    """
    source = InstanceLayout(
        "s",
        tuple(heads(r, (r, source_tp), 0x900000 + r * 0x100000, head_total=head_total) for r in range(source_tp)),
        tp_size=source_tp,
    )
    used: set[int] = set()
    for rank in range(target_tp):
        target = heads(rank, (rank, target_tp), 0x2000, head_total=head_total)
        plan = plan_transfer(
            source,
            target,
            tokens=TokenRange(0, 7),
            target_blocks=RequestBlocks.single([1, 4]),
            source_blocks={r: RequestBlocks.single([2, 9]) for r in range(source_tp)},
        )
        used |= set(plan.writers)
        for writer, transfer in plan.transfers.items():
            layout = source.ranks[writer]
            assert layout is not None
            spans = layout.regions()
            for address, size in zip(transfer.source_addresses.tolist(), transfer.sizes.tolist()):
                assert any(start <= address and address + size <= start + length for start, length in spans)
        assert plan.total_bytes == head_range(head_total, target_tp, rank)[1] * 2 * 7 * 4
    if target_tp >= source_tp:
        assert used == set(range(source_tp)), "replicas are used evenly"


def test_mla_reaches_every_target_rank() -> None:
    """vLLM #45880: a latent is replicated on every target rank, so every one of them plans its own copy."""
    source = InstanceLayout("s", tuple(latent(r, range(2), 0x900000 + r * 0x100000) for r in range(2)), tp_size=2)
    writers = set()
    for rank in range(4):
        plan = plan_destination(
            source, latent(rank, range(2), 0x2000 + rank * 0x100000), RequestBlocks.single([1, 2]), TokenRange(0, 2)
        )
        assert plan.total_bytes == 400 and len(plan.writers) == 1
        writers |= set(plan.writers)
    assert writers == {0, 1}


@pytest.mark.parametrize(
    ("field", "value"), [("head_dim", 50), ("element_bytes", 2), ("dtype", "fp8"), ("head_total", 2)]
)
def test_incompatible_models_are_refused_naming_the_field(field: str, value: object) -> None:
    """What must be equal is named."""
    roomy = replace(SOURCE.ranks[0].groups[0], block_stride_bytes=200)  # type: ignore[union-attr]
    group = replace(roomy, **{field: value})  # type: ignore[arg-type]
    source = InstanceLayout.single(KVLayout(0, (group,)))
    refused = try_plan_destination(source, ONE, RequestBlocks.single([1]), TokenRange(0, 1))
    assert isinstance(refused, Refusal) and refused.reason is Reason.LAYOUT_MISMATCH and field in refused.detail


def test_missing_layers_heads_ranks_and_cohorts_are_refused() -> None:
    """Unknown ranks are refused even if they would not write: their replicas decide who does."""
    blocks, tokens = RequestBlocks.single([1]), TokenRange(0, 1)
    cases = [
        (InstanceLayout("s", (SOURCE.ranks[0], None), tp_size=2), ONE, Reason.RANK_METADATA_MISSING),
        (SOURCE, latent(0, range(2), 0x2000), Reason.LAYOUT_MISMATCH),
        (InstanceLayout("s", (SOURCE.ranks[0], latent(1, range(1), 0xA00000)), adp_size=2), ONE, Reason.WRITER_COHORT_UNKNOWN),
    ]  # fmt: skip
    for source, target, reason in cases:
        refused = try_plan_destination(source, target, blocks, tokens)
        assert isinstance(refused, Refusal) and refused.reason is reason
    half = InstanceLayout.single(heads(0, (0, 2), 0x900000, head_total=4))
    refused = try_plan_destination(half, heads(0, (0, 1), 0x2000, head_total=4), blocks, tokens)
    assert isinstance(refused, Refusal) and "heads 2 … 3" in refused.detail
    assert try_plan_destination(Refusal(Reason.DISABLED), ONE, blocks, tokens) == Refusal(Reason.DISABLED)


def test_attention_dp_rank_selects_the_cohort() -> None:
    """With the owning rank known, only its cohort writes."""
    source = InstanceLayout("s", tuple(latent(r, range(1), 0x900000 + r * 0x100000) for r in range(3)), adp_size=3)
    plan = plan_destination(source, ONE, RequestBlocks.single([1]), TokenRange(0, 1), source_adp_rank=2)
    assert plan.writer_ranks == (2,)
    with pytest.raises(LayoutError):
        plan_destination(source, ONE, RequestBlocks.single([1]), TokenRange(0, 1), source_adp_rank=3)


# --- properties of the plan itself ------------------------------------------------------------------------------------


def _plan() -> TransferPlan:
    return plan_destination(SOURCE, ONE, RequestBlocks.single([4, 9, 1]), TokenRange(0, 3))


def test_plans_are_immutable() -> None:
    """Arrays are read-only, mappings too; the caller's later mutation of its table has no effect (c25)."""
    ids = np.array([4, 9, 1])
    plan = plan_destination(SOURCE, ONE, RequestBlocks.single(ids), TokenRange(0, 3))
    before = plan.digest
    ids[:] = 0
    assert plan.digest == before == _plan().digest
    with pytest.raises(ValueError):
        plan.writers[0].sizes[0] = 1
    with pytest.raises(TypeError):
        plan.writers[1] = plan.writers[0]  # type: ignore[index]
    with pytest.raises(AttributeError):
        plan.target_rank = 2  # type: ignore[misc]


def test_digest_covers_rank_addresses_and_sizes() -> None:
    """A plan of one writer can never pass for another's."""
    writer = _plan().writers[0]
    others = [
        replace(writer, rank=1),
        replace(writer, target_addresses=writer.target_addresses + 1),
        replace(writer, sizes=writer.sizes - 1),
        replace(writer, target_addresses=writer.target_addresses[:2], sizes=writer.sizes[:2]),
    ]
    assert len({writer.digest, *(other.digest for other in others)}) == 5
    assert replace(writer, fragment_count=99).digest == writer.digest, "predictions are not identity"


@pytest.mark.parametrize(
    ("addresses", "sizes", "reason"),
    [
        ([0x100, 0x100], [16, 16], Reason.OVERLAP),
        ([0x200, 0x100], [16, 16], Reason.OVERLAP),
        ([0x100, 0x108], [16, 16], Reason.OVERLAP),
        ([0x100, 0x110], [16, 16], Reason.NOT_CANONICAL),
        ([0x100], [0], Reason.NOT_CANONICAL),
        ([-16], [16], Reason.NOT_CANONICAL),
        ([2**63 - 8], [16], Reason.NOT_CANONICAL),
        ([], [], Reason.NOT_CANONICAL),
        ([0x100, 0x200], [16], Reason.NOT_CANONICAL),
    ],
)
def test_validate_refuses_what_is_not_canonical(addresses: list[int], sizes: list[int], reason: Reason) -> None:
    """The receiver's invariants, one by one (reference §1)."""
    writer = WriterPlan(0, np.array(addresses, np.int64), np.array(sizes, np.int64), 1, 1)
    with pytest.raises(PlanRefused) as refused:
        TransferPlan(0, {0: writer}, 1).validate()
    assert refused.value.reason is reason


def test_validate_refuses_writers_that_overlap_and_covers_that_are_not_exact() -> None:
    """Across writers no byte twice; together no byte less and none more than the request's slots."""

    def writer(rank: int, address: int, size: int) -> WriterPlan:
        return WriterPlan(rank, np.array([address]), np.array([size]), 1, 1)

    with pytest.raises(PlanRefused) as refused:
        TransferPlan(0, {0: writer(0, 0x100, 32), 1: writer(1, 0x110, 32)}, 1).validate()
    assert refused.value.reason is Reason.OVERLAP
    plan = TransferPlan(0, {0: writer(0, 0x100, 16), 1: writer(1, 0x110, 16)}, 1)
    plan.validate_cover(np.array([0x100]), np.array([32]))
    for address, size in ((0x100, 31), (0x100, 33), (0x0FF, 33), (0x101, 31)):
        with pytest.raises(PlanRefused) as refused:
            plan.validate_cover(np.array([address]), np.array([size]))
        assert refused.value.reason is Reason.NOT_EXACT_COVER
    with pytest.raises(PlanRefused):
        TransferPlan(0, {1: writer(0, 0x100, 16)}, 1).validate()


@pytest.mark.parametrize("fault", ["lost", "twice"])
def test_a_planner_that_loses_or_repeats_a_share_is_caught_by_the_proof(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cover is proven against the request's own slots, which are derived without the shares: a wrong division of the
    work can never leave as a plan.
    """
    shares = plan_module._shares
    source = InstanceLayout(
        "s", tuple(latent(r, range(r, r + 1), 0x900000 + r * 0x100000) for r in range(2)), pp_size=2
    )

    def wrong(*arguments: Any) -> Any:
        found = shares(*arguments)
        return found[:-1] if fault == "lost" else [*found, replace(found[-1], rank=0)]

    monkeypatch.setattr(plan_module, "_shares", wrong)
    refused = try_plan_destination(source, latent(0, range(2), 0x2000), RequestBlocks.single([1]), TokenRange(0, 1))
    assert isinstance(refused, Refusal)
    assert refused.reason is (Reason.NOT_EXACT_COVER if fault == "lost" else Reason.OVERLAP)


def test_request_ranges_equal_what_writers_cover() -> None:
    """The union over writers is the request's own slots, derived on its own."""
    plan = _plan()
    addresses, sizes = request_ranges(ONE, RequestBlocks.single([4, 9, 1]), TokenRange(0, 3))
    assert [a.tolist() for a in plan.ranges()] == [addresses.tolist(), sizes.tolist()]


def test_both_orders_meet_at_token_grain() -> None:
    """NHD against HND: neither head nor token runs are dense on both sides, so fragments are one head of one token."""
    source = InstanceLayout.single(heads(0, (0, 1), 0x900000, head_total=3, order="NHD"))
    target = heads(0, (0, 1), 0x2000, head_total=3, order="HND")
    transfer = plan_writer(source, 0, RequestBlocks.single([2]), target, RequestBlocks.single([1]), TokenRange(0, 4))
    assert transfer is not None
    assert transfer.merged_count == 2 * 3 * 4 and set(transfer.sizes.tolist()) == {4}
    assert transfer.writer.range_count == 2, "the receiver scatters K and V as one range each"


def test_missing_source_blocks_of_a_writer() -> None:
    """Planning both sides needs every writer's table."""
    with pytest.raises(PlanRefused) as refused:
        plan_transfer(SOURCE, ONE, tokens=TokenRange(0, 1), target_blocks=RequestBlocks.single([1]), source_blocks={})
    assert refused.value.reason is Reason.PLAN_COUNT


def test_too_many_fragments_are_refused_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake #826, vLLM #48209: huge lists are bounded before memory is taken for them."""
    monkeypatch.setattr("kv_bounce_planner.planning.plan.FRAGMENTS_MAX", 2)
    refused = try_plan_destination(SOURCE, ONE, RequestBlocks.single([1, 3, 5]), TokenRange(0, 3))
    assert isinstance(refused, Refusal) and refused.reason is Reason.TOO_MANY_FRAGMENTS


def test_models_of_different_depth_are_refused_where_both_sides_say_theirs():
    """A source with more layers than the target covers it; only the model's total tells that it is another model."""

    def rank(layers, total):
        layout = KVLayout.uniform(
            rank=0, first_layer=0, layer_count=layers, head_total=1, head_dim=4, element_bytes=2, block_tokens=4,
            block_count=4, key_bases=[4096 * (i + 1) for i in range(layers)],
        )  # fmt: skip
        return replace(layout, layer_total=total)

    blocks, tokens = RequestBlocks.single([1, 2]), TokenRange(0, 8)
    source, target = InstanceLayout.single(rank(6, 6)), rank(4, 4)
    with pytest.raises(PlanRefused, match="layer_total is 6 at source rank 0 and 4 at the target") as refused:
        plan_destination(source, target, blocks, tokens)
    assert refused.value.reason is Reason.LAYOUT_MISMATCH
    for unsaid in (replace(target, layer_total=0), replace(target, layer_total=6)):
        assert plan_destination(source, unsaid, blocks, tokens).total_bytes
    with pytest.raises(LayoutError, match="beyond"):
        rank(4, 3)


def _shared(rank: int, size: int, *, base: int, interleave: int = 4, heads: tuple[int, int] = (0, 2)) -> KVLayout:
    layout = KVLayout.uniform(
        rank=rank, first_layer=0, layer_count=2, head_total=2, first_head=heads[0], head_count=heads[1], head_dim=4,
        element_bytes=2, block_tokens=4, block_count=8, key_bases=(base, base + 0x1000),
        value_bases=(base + 0x2000, base + 0x3000),
    )  # fmt: skip
    return layout.sharing_tokens(rank, size, interleave_tokens=interleave)


def test_a_split_over_context_parallel_ranks_is_gathered_from_all_of_them() -> None:
    """Two source ranks with every other block of four tokens: each writes its tokens, the target holds them in order."""
    source = InstanceLayout("ctx", tuple(_shared(r, 2, base=0x10000 * (r + 1)) for r in range(2)), cp_size=2)
    target = _shared(0, 1, base=0x90000)
    plan = plan_transfer(
        source, target, tokens=TokenRange(0, 14), target_blocks=RequestBlocks.single([5, 1, 2, 7]),
        source_blocks={0: RequestBlocks.single([3, 4]), 1: RequestBlocks.single([6, 0])},
    )  # fmt: skip
    assert [writer.total_bytes for writer in plan.writers.values()] == [8 * 64, 6 * 64]
    assert [writer.block_count for writer in plan.writers.values()] == [2, 2] and plan.block_count == 4
    first = plan.transfers[1]
    at = first.target_addresses.tolist().index(0x90000 + 1 * 64)  # block 1 of the target: tokens 4 … 7
    assert first.source_addresses[at] == 0x20000 + 6 * 64


def test_a_block_that_gets_several_runs_of_one_rank_is_one_block() -> None:
    """Token by token in turn: both source ranks write two runs into each whole block of four."""
    source = InstanceLayout(
        "ctx", tuple(_shared(r, 2, base=0x10000 * (r + 1), interleave=1) for r in range(2)), cp_size=2
    )
    plan = plan_transfer(
        source, _shared(0, 1, base=0x90000), tokens=TokenRange(0, 14), target_blocks=RequestBlocks.single([5, 1, 2, 7]),
        source_blocks={0: RequestBlocks.single([3, 4]), 1: RequestBlocks.single([6, 0])},
    )  # fmt: skip
    assert [writer.total_bytes for writer in plan.writers.values()] == [7 * 64, 7 * 64]
    assert [writer.block_count for writer in plan.writers.values()] == [4, 4]


def test_equal_shares_move_whole_blocks_between_ranks_of_one_number() -> None:
    """The same split on both sides costs nothing: one writer, as many fragments as without context parallelism."""
    source = InstanceLayout(
        "ctx", tuple(_shared(r, 2, base=0x10000 * (r + 1), interleave=1) for r in range(2)), cp_size=2
    )
    target = _shared(1, 2, base=0x90000, interleave=1)
    plan = plan_destination(source, target, RequestBlocks.single([5, 1]), TokenRange(0, 16))
    assert plan.writer_ranks == (1,) and plan.writers[1].fragment_count == 2 * 2 * 2


def test_a_missing_context_parallel_rank_is_refused_by_name() -> None:
    """Tokens that nobody holds, and ranks that deal in unlike ways: refused before anything is reserved."""
    target = _shared(0, 1, base=0x90000)
    alone = InstanceLayout("ctx", (_shared(0, 2, base=0x10000),))
    with pytest.raises(PlanRefused, match="context-parallel rank 1"):
        plan_destination(alone, target, RequestBlocks.single([0]), TokenRange(0, 4))
    unlike = InstanceLayout("ctx", (_shared(0, 2, base=0x10000), _shared(1, 2, base=0x20000, interleave=8)), cp_size=2)
    with pytest.raises(PlanRefused, match="unlike"):
        plan_destination(unlike, target, RequestBlocks.single([0]), TokenRange(0, 4))
