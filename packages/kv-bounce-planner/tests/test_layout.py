"""Layouts: the formula, refusals, engines' shapes, lazy registration."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from kv_bounce_planner.planning import (
    BlockTable,
    InstanceLayout,
    KVLayout,
    LayerGroup,
    LayoutError,
    PeerLayouts,
    Reason,
    Refusal,
    RequestBlocks,
    TensorView,
    TokenRange,
    TokenShare,
    from_kv_memory,
    from_sglang,
    from_tensorrt_llm,
    from_tensors,
    from_vllm,
    gather,
    head_range,
    layer_range,
    plan_destination,
    plan_transfer,
    scatter,
)

GROUP = LayerGroup(
    group_id=0,
    layer_ids=(0, 1),
    key_bases=(0x1000, 0x2000),
    value_bases=(0x1800, 0x2800),
    first_head=0,
    head_count=2,
    head_total=4,
    head_dim=4,
    element_bytes=2,
    dtype="float16",
    block_tokens=4,
    block_count=8,
    block_stride_bytes=64,
    head_stride_bytes=8,
    token_stride_bytes=16,
)


def small(
    rank: int = 0, first_layer: int = 0, layer_count: int = 2, base: int = 0x10_0000, **changes: object
) -> KVLayout:
    fields: dict[str, object] = {
        "rank": rank,
        "first_layer": first_layer,
        "layer_count": layer_count,
        "head_total": 2,
        "head_dim": 4,
        "element_bytes": 2,
        "block_tokens": 4,
        "block_count": 16,
        "key_bases": [base + 0x10000 * i for i in range(layer_count)],
        "value_bases": [base + 0x10000 * i + 0x8000 for i in range(layer_count)],
    }
    fields.update(changes)
    return KVLayout.uniform(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_ids": (1, 1)}, "repeat"),
        ({"key_bases": (0x1000,)}, "one key base"),
        ({"value_bases": (0x1000,)}, "one value base"),
        ({"head_count": 5}, "within head_total"),
        ({"head_count": 0}, "head_count"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"head_dim": True}, "head_dim"),
        ({"token_stride_bytes": 8}, "aliases"),
        ({"block_stride_bytes": 63}, "aliases"),
        ({"key_bases": (-1, 0x2000)}, "addresses"),
        ({"key_bases": (2**63 - 64, 0x2000)}, "addresses"),
        ({"block_count": 2**62, "block_stride_bytes": 2**10}, "fits"),
        ({"dtype": ""}, "dtype"),
        ({"opaque": True}, "opaque"),
    ],
)
def test_malformed_groups_are_refused(changes: dict[str, object], words: str) -> None:
    """Every field has a range; strides that make two elements share a byte could never be an exact cover."""
    with pytest.raises(LayoutError, match=words):
        replace(GROUP, **changes)  # type: ignore[arg-type]


def test_element_formula_matches_numpy_for_both_orders() -> None:
    """NHD and HND are only strides: both name the same element as numpy's own indexing."""
    for order, shape in (("NHD", (16, 4, 2, 4)), ("HND", (16, 2, 4, 4))):
        pool = np.zeros(shape, np.float16)
        layout = small(order=order, key_bases=[pool.ctypes.data] * 1, value_bases=(), layer_count=1)
        group = layout.groups[0]
        for block, token, head in ((0, 0, 0), (3, 2, 1), (15, 3, 1)):
            at = block * group.block_stride_bytes + token * group.token_stride_bytes + head * group.head_stride_bytes
            index = (block, token, head) if order == "NHD" else (block, head, token)
            assert pool.ctypes.data + at == pool[index].ctypes.data


@pytest.mark.parametrize(("total", "size"), [(8, 3), (3, 2), (5, 4), (2, 8), (1, 4), (7, 7)])
def test_head_ranges_cover_every_head_and_replicas_are_neighbours(total: int, size: int) -> None:
    """Non-divisible splits are balanced (3 ranks of 8 heads: 3, 3, 2); more ranks than heads replicate."""
    ranges = [head_range(total, size, rank) for rank in range(size)]
    assert sorted({h for first, count in ranges for h in range(first, first + count)}) == list(range(total))
    counts = [count for _, count in ranges]
    assert max(counts) - min(counts) <= 1
    assert ranges == sorted(ranges)


def test_layer_ranges_partition_and_empty_stages_exist() -> None:
    """79 layers over 4 stages: 20, 20, 20, 19; more stages than layers leave some empty."""
    assert [layer_range(79, 4, r)[1] for r in range(4)] == [20, 20, 20, 19]
    assert [layer_range(2, 3, r) for r in range(3)] == [(0, 1), (1, 1), (2, 0)]


def test_fingerprint_changes_with_every_field() -> None:
    """A restarted pool at another address is another layout."""
    seen = {small().fingerprint()}
    for changes in ({"base": 0x20_0000}, {"block_count": 15}, {"order": "HND"}, {"head_dim": 8}, {"dtype": "bf16"}):
        seen.add(small(**changes).fingerprint())  # type: ignore[arg-type]
    assert len(seen) == 6
    assert small().fingerprint() == small().fingerprint()


def test_json_round_trip_and_hostile_json() -> None:
    """A peer's bytes are validated like a caller's arguments and fail as LayoutError only."""
    layout = small()
    assert KVLayout.from_json(layout.to_json()) == layout
    instance = InstanceLayout("i", (layout, None), tp_size=2)
    assert InstanceLayout.from_json(instance.to_json()) == instance
    good = layout.to_json()
    for bad in (b"", b"[]", b"{", good.replace(b'"rank":0', b'"rank":-1'), good.replace(b"DRAM", b"DISK"), b"\xff" * 9):
        with pytest.raises(LayoutError):
            KVLayout.from_json(bad)
    nested = b"[" * 100_000
    with pytest.raises(LayoutError):
        KVLayout.from_json(nested)
    aliased = good.replace(b'"token_stride_bytes":16', b'"token_stride_bytes":1')
    with pytest.raises(LayoutError, match="alias"):
        KVLayout.from_json(aliased)


def test_a_layer_in_two_groups_is_refused() -> None:
    """One layer, one block table."""
    with pytest.raises(LayoutError, match="two groups"):
        KVLayout(0, (GROUP, replace(GROUP, group_id=1)))


def test_regions_join_touching_pools() -> None:
    """What must be registered: K and V that touch are one region."""
    layout = small(layer_count=1, key_bases=[0x1000], value_bases=[0x1000 + 16 * 4 * 2 * 8])
    assert layout.regions() == ((0x1000, 2 * 16 * 4 * 2 * 8),)
    apart = small(layer_count=1, key_bases=[0x1000], value_bases=[0x9000])
    assert apart.regions() == ((0x1000, 1024), (0x9000, 1024))


def test_block_tables_refuse_what_is_no_id() -> None:
    """-1 is evicted; -2, floats and bools are mistakes; the caller's array may change afterwards without effect."""
    for bad in ([-2], [1.5], [True], [[1]], np.array([2**63], np.uint64)):
        with pytest.raises(LayoutError):
            BlockTable(np.asarray(bad))
    ids = np.array([1, 2, -1])
    table = BlockTable(ids)
    ids[0] = 9
    assert table.block_ids.tolist() == [1, 2, -1]
    with pytest.raises(ValueError):
        table.block_ids[0] = 3
    with pytest.raises(LayoutError):
        TokenRange(3, 2)
    with pytest.raises(LayoutError):
        TokenRange(-1, 2)


# --- shapes of the field's engines ------------------------------------------------------------------------------------


def _check_same_bytes(layout: KVLayout, arrays: dict[tuple[int, int], np.ndarray], axes: str) -> None:
    """arrays[(layer, factor)] indexed by (block, token, head, dim) views of the very tensors."""
    group = layout.groups[0]
    for (layer, factor), view in arrays.items():
        bases = group.value_bases if factor else group.key_bases
        base = bases[group.layer_ids.index(layer)]
        blocks, tokens, heads, _ = view.shape
        assert (group.block_count, group.block_tokens, group.head_count) == (blocks, tokens, heads), axes
        for block, token, head in ((0, 0, 0), (blocks - 1, tokens - 1, heads - 1), (1, 0, heads - 1)):
            at = (
                base
                + block * group.block_stride_bytes
                + token * group.token_stride_bytes
                + head * group.head_stride_bytes
            )
            assert at == view[block, token, head].ctypes.data, axes


def test_vllm_shapes() -> None:
    """FlashAttention, FlashInfer and MLA shapes, and HND by strides, name the tensors' own bytes."""
    flash = [np.zeros((2, 6, 4, 3, 8), np.float16) for _ in range(2)]
    layout = from_vllm(rank=0, layer_ids=[4, 5], tensors=flash, head_total=6, first_head=3)
    _check_same_bytes(layout, {(4 + i, f): flash[i][f] for i in range(2) for f in range(2)}, "flash_attn")
    assert layout.groups[0].first_head == 3 and layout.groups[0].kv_factor == 2
    infer = [np.zeros((6, 2, 4, 3, 8), np.float16)]
    layout = from_vllm(rank=0, layer_ids=[0], tensors=infer, head_total=3, attention="flashinfer")
    _check_same_bytes(layout, {(0, f): infer[0][:, f] for f in range(2)}, "flashinfer")
    hnd = np.zeros((6, 2, 3, 4, 8), np.float16).transpose(0, 1, 3, 2, 4)
    layout = from_vllm(rank=0, layer_ids=[0], tensors=[hnd], head_total=3, attention="flashinfer")
    _check_same_bytes(layout, {(0, f): hnd[:, f] for f in range(2)}, "flashinfer HND")
    latent = [np.zeros((6, 4, 576), np.float16)]
    layout = from_vllm(rank=0, layer_ids=[0], tensors=latent, head_total=128, attention="mla")
    assert layout.groups[0].kv_factor == 1 and layout.groups[0].head_total == 1
    _check_same_bytes(layout, {(0, 0): latent[0][:, :, None, :]}, "mla")


def _cpu_pools(heads: int, block_tokens: int, blocks: int) -> list[np.ndarray]:
    return [np.zeros((blocks, heads, block_tokens, 2 * 8), np.float32) for _ in range(2)]


def _cpu_views(pool: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """K and V as (blocks, heads, tokens, dim), read off a pool as the kernel lays them: K with its tokens innermost."""
    blocks, heads, tokens, joined = pool.shape
    flat = pool.reshape(blocks, heads, 2, tokens * joined // 2)
    keys = flat[:, :, 0].reshape(blocks, heads, joined // 2, tokens).swapaxes(2, 3)
    return keys, flat[:, :, 1].reshape(blocks, heads, tokens, joined // 2)


@pytest.mark.parametrize(("ranks", "source_tokens", "target_tokens"), [(1, 8, 8), (1, 8, 4), (1, 4, 8), (2, 8, 4)])
def test_vllm_cpu_tokens_innermost(ranks: int, source_tokens: int, target_tokens: int) -> None:
    """The CPU kernel's K has its tokens innermost: any block sizes and head splits move every value to its place."""
    random, tokens = np.random.default_rng(1), 21
    sources = [_cpu_pools(4 // ranks, source_tokens, 9) for _ in range(ranks)]
    for pool in (pool for pools in sources for pool in pools):
        pool[:] = random.random(pool.shape, np.float32)
    mine = _cpu_pools(4, target_tokens, 9)
    layouts = [
        from_vllm(
            rank=rank, layer_ids=[0, 1], tensors=pools, head_total=4, first_head=rank * 4 // ranks, attention="cpu_attn",
            memory_kind="DRAM",
        )
        for rank, pools in enumerate(sources)
    ]  # fmt: skip
    target = from_vllm(rank=0, layer_ids=[0, 1], tensors=mine, head_total=4, attention="cpu_attn", memory_kind="DRAM")
    theirs, ours = random.permutation(9), random.permutation(9)
    tables = [
        RequestBlocks({group: BlockTable(ids[: -(-tokens // size)]) for group in (0, 1)})
        for ids, size in ((theirs, source_tokens), (ours, target_tokens))
    ]
    instance = InstanceLayout("ctx", tuple(layouts), pp_size=ranks)
    held = dict.fromkeys(range(ranks), tables[0])
    moved = plan_transfer(
        instance, target, tokens=TokenRange(0, tokens), target_blocks=tables[1], source_blocks=held
    ).transfers
    assert sorted(moved) == list(range(ranks))
    for transfer in moved.values():
        staging = np.zeros(transfer.total_bytes, np.uint8)
        gather(transfer.source_addresses, transfer.sizes, staging.ctypes.data)
        scatter(staging.ctypes.data, transfer.target_addresses, transfer.sizes)
    for layer in range(2):
        for side in range(2):
            sent = np.concatenate([_cpu_views(pools[layer])[side] for pools in sources], axis=1)
            got = _cpu_views(mine[layer])[side]
            for token in range(tokens):
                at = sent[theirs[token // source_tokens], :, token % source_tokens]
                assert np.array_equal(got[ours[token // target_tokens], :, token % target_tokens], at)
    if ranks == 1:
        whole = plan_destination(instance, target, tables[1], TokenRange(0, target_tokens))
        assert whole.writers[0].range_count == 2, "a whole block of a layer is one range"


def test_vllm_cpu_shapes_that_do_not_fit_are_refused() -> None:
    """Guessing where V begins would be silent corruption."""
    pool = np.zeros((3, 2, 4, 16), np.float32)
    for tensors, why in (
        ([pool[:, :, :, :15]], "is not"),
        ([pool[:, :, ::2]], "dense"),
        ([pool, pool[:2]], "one shape"),
        ([pool[:, :1]], "one tensor per layer"),
    ):
        layers = [0] if len(tensors) == 1 and why != "one tensor per layer" else [0, 1]
        with pytest.raises(LayoutError, match=why):
            from_vllm(rank=0, layer_ids=layers, tensors=tensors, head_total=2, attention="cpu_attn")
    for first_head in (1, -1):  # the second would name another layer's heads
        with pytest.raises(LayoutError, match="head_total"):
            from_vllm(rank=0, layer_ids=[1], tensors=[pool], head_total=2, first_head=first_head, attention="cpu_attn")


def test_sglang_and_tensorrt_llm_shapes() -> None:
    """Token pools with pages, and block-major pools with every layer inside a block."""
    keys = [np.zeros((24, 3, 8), np.float16) for _ in range(2)]
    values = [np.zeros((24, 3, 8), np.float16) for _ in range(2)]
    layout = from_sglang(rank=0, layer_ids=[0, 1], key_buffers=keys, value_buffers=values, page_size=4, head_total=3)
    views = {(i, f): (keys, values)[f][i].reshape(6, 4, 3, 8) for i in range(2) for f in range(2)}
    _check_same_bytes(layout, views, "sglang")
    pool = np.zeros((6, 2, 2, 3, 4, 8), np.float16)
    layout = from_tensorrt_llm(rank=0, layer_ids=[7, 8], pool=pool, head_total=3)
    views = {(7 + i, f): pool[:, i, f].transpose(0, 2, 1, 3) for i in range(2) for f in range(2)}
    _check_same_bytes(layout, views, "tensorrt_llm")
    latent = np.zeros((6, 2, 1, 4, 64), np.float16)
    layout = from_tensorrt_llm(rank=0, layer_ids=[7, 8], pool=latent, head_total=128, mla=True)
    _check_same_bytes(layout, {(7 + i, 0): latent[:, i].transpose(0, 2, 1, 3) for i in range(2)}, "tensorrt_llm mla")


def test_torch_tensors_are_read_by_attribute() -> None:
    """The same constructor takes torch tensors; torch is not imported for it."""
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((2, 6, 4, 3, 8), dtype=torch.float16)
    layout = from_vllm(rank=0, layer_ids=[0], tensors=[tensor], head_total=3, memory_kind="DRAM")
    assert layout.groups[0].key_bases == (tensor[0].data_ptr(),)
    assert layout.groups[0].value_bases == (tensor[1].data_ptr(),)
    assert layout.groups[0].dtype == "float16"


@pytest.mark.parametrize(
    "arguments",
    [
        {"axes": ("block", "token", "head")},
        {"axes": ("block", "token", "dim", "head")},
        {"axes": ("slot", "head", "token", "dim")},
        {"axes": ("block", "token", "token", "dim")},
        {"axes": ("kv", "token", "block", "dim")},
    ],
)
def test_axes_that_do_not_fit_are_refused(arguments: dict[str, tuple[str, ...]]) -> None:
    """Guessing an axis would be silent corruption."""
    view = TensorView.of(np.zeros((6, 4, 3, 8), np.float16))
    with pytest.raises(LayoutError):
        from_tensors(rank=0, layer_ids=[0], tensors=[view], head_total=3, **arguments)  # type: ignore[arg-type]


def test_kv_memory_description_is_read_by_attribute() -> None:
    """An engine's own description needs the attributes only."""

    @dataclass
    class Memory:
        layer_base_addresses: tuple[int, ...] = (0x1000, 0x5000)
        block_count: int = 4
        block_tokens: int = 16
        block_stride_bytes: int = 1024
        kv_stride_bytes: int = 512
        head_stride_bytes: int = 8
        token_stride_bytes: int = 16
        head_dim: int = 2
        element_bytes: int = 4
        memory_kind: str = "DRAM"
        device_id: int = 0

    layout = from_kv_memory(Memory(), rank=2, layer_ids=[8, 9], head_total=2)
    assert layout.groups[0].value_bases == (0x1200, 0x5200)
    assert layout.rank == 2 and layout.layer_ids == (8, 9)


# --- lazy registration ------------------------------------------------------------------------------------------------


def test_rank_zero_metadata_is_fetched_once_and_only_when_asked() -> None:
    """The seed's fix: first contact registers the sender's instance at the receiver, lazily, once."""
    instance = InstanceLayout("ctx", (small(),))
    peers, calls = PeerLayouts(), []

    def fetch() -> InstanceLayout:
        calls.append(1)
        return instance

    assert peers.get("ctx") is None and calls == []
    assert peers.resolve("ctx", fetch) == instance
    assert peers.resolve("ctx", fetch) == instance
    assert len(calls) == 1


@pytest.mark.parametrize("error", [KeyError("rank 0"), OSError("gone"), LayoutError("bad"), RuntimeError("x")])
def test_a_failing_registration_falls_back_before_any_reservation(error: Exception) -> None:
    """The seed's bug was a KeyError here, deep in a fallback; here it is a refusal with a code, and nothing is kept."""
    peers = PeerLayouts()

    def fetch() -> InstanceLayout:
        raise error

    refused = peers.resolve("ctx", fetch)
    assert isinstance(refused, Refusal) and refused.reason is Reason.RANK_METADATA_MISSING and not refused
    assert len(peers) == 0


def test_missing_higher_rank_is_refused_and_filled_in_later() -> None:
    """Rank 0 known, rank 1 not: a refusal that names the rank; when it arrives the instance is complete."""
    first, second = small(), small(rank=1, first_layer=2, base=0x50_0000)
    peers = PeerLayouts()
    refused = peers.resolve("ctx", lambda: InstanceLayout("ctx", (first, None), pp_size=2))
    assert isinstance(refused, Refusal) and "[1]" in refused.detail
    assert peers.resolve("ctx", lambda: InstanceLayout("ctx", (None, second), pp_size=2)) == InstanceLayout(
        "ctx", (first, second), pp_size=2
    )


def test_an_instance_cannot_change_under_its_id_and_the_book_is_bounded() -> None:
    """A restarted instance has a new id; least recently used instances leave."""
    peers = PeerLayouts(instances_max=2)
    peers.register(InstanceLayout("a", (small(),)))
    with pytest.raises(LayoutError, match="other contents"):
        peers.register(InstanceLayout("a", (small(base=0x90_0000),)))
    with pytest.raises(LayoutError, match="other contents"):
        peers.register(InstanceLayout("a", (small(), None), tp_size=2))
    for name in ("b", "c"):
        peers.register(InstanceLayout(name, (small(),)))
    assert peers.get("a") is None and peers.get("c") is not None and len(peers) == 2
    assert isinstance(peers.resolve("a", lambda: None), Refusal)
    peers.forget("b")
    assert len(peers) == 1


def test_instance_shape_is_checked() -> None:
    """Ranks in order, as many as the sizes say."""
    with pytest.raises(LayoutError):
        InstanceLayout("x", (small(),), pp_size=2)
    with pytest.raises(LayoutError):
        InstanceLayout("x", (small(rank=1), small()), pp_size=2)
    assert InstanceLayout("x", (small(), small(rank=1), None, None), pp_size=1, tp_size=2, adp_size=2).cohort(1) == (
        2,
        3,
    )


def test_single_takes_any_rank() -> None:
    """A lone layout becomes rank 0 of an instance of one."""
    plan = plan_transfer(
        small(rank=3),
        small(rank=5, base=0x90_0000),
        tokens=TokenRange(0, 4),
        target_blocks=RequestBlocks.single([1]),
        source_blocks={0: RequestBlocks.single([2])},
    )
    assert plan.writer_ranks == (0,) and plan.target_rank == 5


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (3, 4), (4, 16), (2, 64)])
def test_a_token_share_counts_what_dealing_out_gives(size: int, interleave: int) -> None:
    """``count_below`` against dealing the tokens out one by one; the ranks together hold every token once."""
    held = [[token for token in range(200) if token // interleave % size == rank] for rank in range(size)]
    for rank in range(size):
        share = TokenShare(rank, size, interleave)
        assert [share.count_below(end) for end in range(200)] == [
            sum(t < end for t in held[rank]) for end in range(200)
        ]
    assert sorted(token for tokens in held for token in tokens) == list(range(200))


@pytest.mark.parametrize(
    ("fields", "named"),
    [((0, 0, 1), "size"), ((2, 2, 1), "rank"), ((-1, 2, 1), "rank"), ((0, 2, 0), "interleave"), ((0, True, 1), "size")],
)
def test_a_bad_token_share_is_refused_by_name(fields: tuple[int, int, int], named: str) -> None:
    """Before anything is planned with it."""
    with pytest.raises(LayoutError, match=named):
        TokenShare(*fields)


def test_a_recurrent_state_is_not_shared() -> None:
    """It has no tokens: ``sharing_tokens`` leaves such groups whole, a share given to one is refused."""
    layout = small()
    assert {group.token_share for group in layout.sharing_tokens(1, 2, interleave_tokens=4).groups} == {
        TokenShare(1, 2, 4)
    }
    state = LayerGroup(0, (0,), (0x1000,), (), 0, 1, 1, 4, 2, "e2", 1, 4, 8, 8, 8, opaque=True)
    mamba = KVLayout(0, (state,))
    assert mamba.sharing_tokens(1, 2, interleave_tokens=4) == mamba
    with pytest.raises(LayoutError, match="share"):
        replace(state, token_share=TokenShare(1, 2, 4))


def test_rank_orders_of_the_field() -> None:
    """pp, cp, tp with attention-DP outside is the default; another order is said, and cohorts follow it."""
    ranks = tuple(replace(small(), rank=rank) for rank in range(24))
    sizes = {"pp_size": 2, "cp_size": 3, "tp_size": 2, "adp_size": 2}
    default = InstanceLayout("a", ranks, **sizes)
    assert default.coordinates(23) == {"adp": 1, "pp": 1, "cp": 2, "tp": 1}
    assert default.rank_at(pp=1, cp=2, tp=1) == (1 * 3 + 2) * 2 + 1
    assert default.cohort(1) == tuple(range(12, 24))
    inner = InstanceLayout("a", ranks, **sizes, order=("pp", "cp", "tp", "adp"))
    assert inner.cohort(1) == tuple(range(1, 24, 2))
    for instance in (default, inner):
        assert [instance.rank_at(**instance.coordinates(rank)) for rank in range(24)] == list(range(24))
        assert InstanceLayout.from_json(instance.to_json()) == instance
    with pytest.raises(LayoutError, match="order"):
        InstanceLayout("a", ranks, **sizes, order=("pp", "cp", "tp", "tp"))
    with pytest.raises(LayoutError, match="cp 3 of 3"):
        default.rank_at(cp=3)
    peers = PeerLayouts()
    peers.register(default)
    with pytest.raises(LayoutError, match="other contents"):
        peers.register(inner)
