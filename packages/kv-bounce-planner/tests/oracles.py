"""Deliberately dumb oracles: one dictionary entry per byte, plain loops, no numpy arithmetic, nothing of the planner.

Loaded by path (tests and tools are no packages). ``random_case`` draws a pair of layouts with block tables; ``byte_map``
says for each target byte which writer copies it from which source byte.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from kv_bounce_planner.planning import (
    BlockTable,
    InstanceLayout,
    KVLayout,
    LayerGroup,
    RequestBlocks,
    TokenRange,
    TokenShare,
    head_range,
    layer_range,
)


@dataclass
class Case:
    """One random transfer."""

    source: InstanceLayout
    source_adp_rank: int | None
    source_blocks: dict[int, RequestBlocks]
    target: KVLayout
    target_blocks: RequestBlocks
    tokens: TokenRange


def element_address(group: LayerGroup, layer: int, factor: int, block: int, slot: int, head: int) -> int:
    """The module formula of the layouts, for the first byte of one head of one token."""
    bases = group.value_bases if factor else group.key_bases
    return (
        bases[group.layer_ids.index(layer)]
        + block * group.block_stride_bytes
        + slot * group.token_stride_bytes
        + (head - group.first_head) * group.head_stride_bytes
    )


@functools.cache
def deal(size: int, interleave_tokens: int, count: int) -> tuple[int, ...]:
    """The context-parallel rank of each token: runs are dealt out in turn, one after the other."""
    owners, turn, left = [], 0, interleave_tokens
    for _ in range(count):
        owners.append(turn)
        left -= 1
        if left == 0:
            turn, left = (turn + 1) % size, interleave_tokens
    return tuple(owners)


def holds(group: LayerGroup, token: int) -> bool:
    """Whether a rank holds a token of the request."""
    share = group.token_share
    return deal(share.size, share.interleave_tokens, 64)[token] == share.rank


def own_before(group: LayerGroup, token: int) -> int:
    """How many tokens before this one the rank holds."""
    share = group.token_share
    return deal(share.size, share.interleave_tokens, 64)[:token].count(share.rank)


def _block_at(blocks: RequestBlocks, group: LayerGroup, token: int) -> tuple[int, int]:
    """Block and slot of a token that this rank holds: its own tokens lie there one after the other."""
    table = blocks.tables[group.group_id]
    index, slot = divmod(own_before(group, token) - table.first_token, group.block_tokens)
    return int(table.block_ids[index]), slot


def wanted_bytes(case: Case) -> set[int]:
    """Every target byte of the request's tokens."""
    wanted: set[int] = set()
    for group in case.target.groups:
        for token in _tokens(case, group):
            block, slot = (
                (int(case.target_blocks.tables[group.group_id].block_ids[token]), 0)
                if group.opaque
                else _block_at(case.target_blocks, group, token)
            )
            if block < 0:
                continue
            for layer in group.layer_ids:
                for factor in range(group.kv_factor):
                    for head in range(group.first_head, group.first_head + group.head_count):
                        at = element_address(group, layer, factor, block, slot, head)
                        wanted.update(range(at, at + group.head_dim * group.element_bytes))
    return wanted


def _tokens(case: Case, group: LayerGroup) -> Sequence[int]:
    if group.opaque:
        return range(len(case.target_blocks.tables[group.group_id].block_ids))
    return [token for token in range(case.tokens.start, case.tokens.end) if holds(group, token)]


def byte_map(case: Case, cells: dict[int, tuple[int, int | None]] | None = None) -> dict[int, tuple[int, int]]:
    """target byte -> (writer rank, source byte); ``cells`` gets target byte -> (layer, token; None for recurrent state)."""
    found: dict[int, tuple[int, int]] = {}
    cohort = case.source.cohort(case.source_adp_rank or 0)
    for group in case.target.groups:
        for layer in group.layer_ids:
            for head in range(group.first_head, group.first_head + group.head_count):
                able = []
                for rank in cohort:
                    for theirs in case.source.ranks[rank].groups:
                        if (
                            layer in theirs.layer_ids
                            and theirs.first_head <= head < theirs.first_head + theirs.head_count
                        ):
                            able.append((rank, theirs))
                for token in _tokens(case, group):
                    holders = [each for each in able if group.opaque or holds(each[1], token)]
                    rank, theirs = holders[case.target.rank % len(holders)]
                    if group.opaque:
                        block, slot = int(case.target_blocks.tables[group.group_id].block_ids[token]), 0
                    else:
                        block, slot = _block_at(case.target_blocks, group, token)
                    if block < 0:
                        continue
                    if group.opaque:
                        from_block, from_slot = (
                            int(case.source_blocks[rank].tables[theirs.group_id].block_ids[token]),
                            0,
                        )
                    else:
                        from_block, from_slot = _block_at(case.source_blocks[rank], theirs, token)
                    assert from_block >= 0
                    for factor in range(group.kv_factor):
                        to = element_address(group, layer, factor, block, slot, head)
                        start = element_address(theirs, layer, factor, from_block, from_slot, head)
                        for i in range(group.head_dim * group.element_bytes):
                            assert to + i not in found, "the oracle wrote a byte twice"
                            found[to + i] = (rank, start + i)
                            if cells is not None:
                                cells[to + i] = layer, None if group.opaque else token
    return found


def in_slice(cell: tuple[int, int | None], tokens: TokenRange, layers: range | None, end: int) -> bool:
    """Whether a slice moves that cell: recurrent state goes with what reaches the request's end."""
    layer, token = cell
    if layers is not None and layer not in layers:
        return False
    return tokens.end == end if token is None else tokens.start <= token < tokens.end


def random_slices(case: Case, rng: random.Random) -> list[tuple[TokenRange, range | None]]:
    """A partition of the request: cuts anywhere, within blocks too, and perhaps unlike cuts of layers for each of them."""
    start, end = case.tokens.start, case.tokens.end
    cuts = sorted({rng.randint(start, end) for _ in range(rng.randint(0, 4))} - {start, end})
    layer_end = 1 + max((layer for group in case.target.groups for layer in group.layer_ids), default=0)
    found: list[tuple[TokenRange, range | None]] = []
    for low, high in zip([start, *cuts], [*cuts, end]):
        if rng.random() < 0.5:
            found.append((TokenRange(low, high), None))
            continue
        ends = sorted({rng.randint(1, layer_end) for _ in range(rng.randint(0, 3))} | {layer_end})
        found += [(TokenRange(low, high), range(first, last)) for first, last in zip([0, *ends], ends)]
    return found


def joined(bytes_wanted: set[int]) -> list[tuple[int, int]]:
    """Maximal ranges of a set of bytes, ascending: the canonical form, the slow way."""
    ranges: list[tuple[int, int]] = []
    for at in sorted(bytes_wanted):
        if ranges and ranges[-1][0] + ranges[-1][1] == at:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((at, 1))
    return ranges


# --- random cases -----------------------------------------------------------------------------------------------------


class _Heap:
    """Hands out addresses for pools, never two that touch unless asked."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.next = rng.choice([0x1000, 0x7F00_0000_0000, (1 << 62)])

    def take(self, size: int) -> int:
        at = self.next
        self.next += size + self.rng.choice([0, 0, 1, 64])
        return at


def _pool(
    rng: random.Random, heap: _Heap, layers: int, factor: int, heads: int, tokens: int, run: int, blocks: int
) -> dict[str, object]:
    """Bases and strides of one of the field's pool shapes, perhaps padded."""
    pad = rng.choice([0, 0, 0, 1, 8])
    if rng.random() < 0.5:
        head_stride, token_stride = run + pad, heads * (run + pad)
        cell = tokens * token_stride
    else:
        token_stride, head_stride = run + pad, tokens * (run + pad)
        cell = heads * head_stride
    cell += rng.choice([0, 0, 3])
    shape = rng.choice(["separate", "joined_outer", "joined_inner", "block_major"])
    if shape == "separate":
        stride = cell
        keys = [heap.take(blocks * cell) for _ in range(layers)]
        values = [heap.take(blocks * cell) for _ in range(layers)] if factor == 2 else []
        if rng.random() < 0.3:
            order = list(range(layers))
            rng.shuffle(order)
            keys = [keys[i] for i in order]
    elif shape == "joined_outer":
        stride = cell
        keys = [heap.take(factor * blocks * cell) for _ in range(layers)]
        values = [key + blocks * cell for key in keys] if factor == 2 else []
    elif shape == "joined_inner":
        stride = factor * cell
        keys = [heap.take(blocks * stride) for _ in range(layers)]
        values = [key + cell for key in keys] if factor == 2 else []
    else:
        stride = layers * factor * cell
        base = heap.take(blocks * stride)
        keys = [base + i * factor * cell for i in range(layers)]
        values = [key + cell for key in keys] if factor == 2 else []
    return {
        "key_bases": tuple(keys),
        "value_bases": tuple(values),
        "block_stride_bytes": stride,
        "head_stride_bytes": head_stride,
        "token_stride_bytes": token_stride,
    }


def _layout(
    rng: random.Random,
    heap: _Heap,
    *,
    rank: int,
    kinds: list[dict[str, object]],
    pp: tuple[int, int],
    tp: tuple[int, int],
    block_tokens: int,
    positions: int,
    share: TokenShare | None = None,
) -> KVLayout:
    groups: list[LayerGroup] = []
    for number, kind in enumerate(kinds):
        all_layers = list(kind["layers"])  # type: ignore[call-overload]
        first, count = layer_range(len(all_layers), pp[1], pp[0])
        mine = all_layers[first : first + count]
        opaque = bool(kind["opaque"])
        head_total = int(kind["heads"])  # type: ignore[call-overload]
        first_head, head_count = (0, 1) if opaque else head_range(head_total, tp[1], tp[0])
        tokens = 1 if opaque else block_tokens
        blocks = positions // tokens + rng.randint(1, 4) + 2
        run = int(kind["dim"]) * int(kind["element"])  # type: ignore[call-overload]
        parts = [mine]
        if len(mine) > 1 and rng.random() < 0.2:
            cut = rng.randint(1, len(mine) - 1)
            parts = [mine[:cut], mine[cut:]]
        for part in parts:
            pool = _pool(rng, heap, len(part), int(kind["factor"]), head_count, tokens, run, blocks)  # type: ignore[call-overload]
            groups.append(
                LayerGroup(
                    group_id=10 * number + len(groups),
                    layer_ids=tuple(part),
                    first_head=first_head,
                    head_count=head_count,
                    head_total=head_total,
                    head_dim=int(kind["dim"]),  # type: ignore[call-overload]
                    element_bytes=int(kind["element"]),  # type: ignore[call-overload]
                    dtype=f"e{kind['element']}",
                    block_tokens=tokens,
                    block_count=blocks,
                    opaque=opaque,
                    **pool,  # type: ignore[arg-type]
                )
            )
    layout = KVLayout(rank=rank, groups=tuple(groups), memory_kind=rng.choice(["DRAM", "VRAM"]))
    if share is None:
        return layout
    return layout.sharing_tokens(share.rank, share.size, interleave_tokens=share.interleave_tokens)


def _tables(
    rng: random.Random,
    layout: KVLayout,
    tokens: TokenRange,
    holes: dict[int, set[int]],
    *,
    target: bool,
    positions: int,
) -> RequestBlocks:
    """Random block ids; a table may begin late and end beyond; holes (by layer's first) are tokens nobody wants."""
    tables = {}
    for group in layout.groups:
        if group.opaque:
            tables[group.group_id] = BlockTable([rng.randrange(group.block_count)])
            continue
        size = group.block_tokens
        own = own_before(group, tokens.start), own_before(group, tokens.end)
        first = rng.randint(0, own[0] // size)
        end = -(-max(own[1], 1) // size) + (rng.random() < 0.3)
        count = max(end - first, 0)
        ids = list(range(group.block_count))
        if rng.random() < 0.7:
            rng.shuffle(ids)
        while len(ids) < count:
            ids.append(-1)
        ids = ids[:count]
        unwanted = holes.get(group.layer_ids[0] if group.layer_ids else -1, set())
        for i in range(len(ids)):
            span = range((first + i) * size, (first + i + 1) * size)
            dead = all(t in unwanted or not own[0] <= t < own[1] for t in span)
            if dead and (target or rng.random() < 0.5):
                ids[i] = -1
        tables[group.group_id] = BlockTable(ids, first * size)
    return RequestBlocks(tables)


def random_case(seed: int) -> Case:
    """A pair of layouts of the same model with everything that may differ differing at random; small enough to count."""
    rng = random.Random(seed)
    heap = _Heap(rng)
    layer_total = rng.randint(1, 5)
    layers = list(range(layer_total))
    kinds: list[dict[str, object]] = []
    while layers:
        take = len(layers) if rng.random() < 0.6 else rng.randint(1, len(layers))
        mla = rng.random() < 0.25
        kinds.append(
            {
                "layers": layers[:take],
                "opaque": rng.random() < 0.08,
                "factor": 1 if mla else 2,
                "heads": 1 if mla else rng.choice([1, 2, 3, 4, 5, 6, 8]),
                "dim": rng.randint(1, 3),
                "element": rng.choice([1, 2]),
            }
        )
        if kinds[-1]["opaque"]:
            kinds[-1].update(factor=1, heads=1)
        layers = layers[take:]
    pp, tp, adp = rng.randint(1, 4), rng.randint(1, 4), rng.choice([1, 1, 1, 2])
    target_pp, target_tp = rng.randint(1, 3), rng.randint(1, 4)
    # Context parallelism on none, one or both sides, with runs of every length against every block size.
    cp, target_cp = rng.choice([1, 1, 1, 2, 3, 4]), rng.choice([1, 1, 1, 2, 3])
    if pp * tp * adp * cp > 24:  # a world that is slow to draw shows nothing that a smaller one does not
        pp, adp = min(pp, 2), 1
    runs = rng.choice([1, 2, 3, 4, 8, 20])
    target_runs = runs if rng.random() < 0.4 else rng.choice([1, 2, 3, 4, 8, 20])
    if target_cp > 1 and rng.random() < 0.4:
        target_cp = cp
    source_tokens = rng.choice([1, 2, 3, 4, 8])
    target_tokens = source_tokens if rng.random() < 0.5 else rng.choice([1, 2, 3, 4, 6, 8])
    positions = rng.randint(1, 20)
    start = rng.choice([0, 0, rng.randint(0, positions)])
    tokens = TokenRange(start, positions - rng.choice([0, 0, rng.randint(0, positions - start)]))
    target_rank = rng.randrange(target_pp * target_cp * target_tp)
    target = _layout(
        rng,
        heap,
        rank=target_rank,
        kinds=kinds,
        pp=(target_rank // target_tp // target_cp, target_pp),
        tp=(target_rank % target_tp, target_tp),
        block_tokens=target_tokens,
        positions=positions,
        share=TokenShare(target_rank // target_tp % target_cp, target_cp, target_runs),
    )
    source_heap = _Heap(rng)
    order = tuple(rng.sample(["adp", "pp", "cp", "tp"], 4))
    sizes = {"adp": adp, "pp": pp, "cp": cp, "tp": tp}
    layouts = []
    for rank in range(pp * cp * tp * adp):
        where, rest = {}, rank
        for name in reversed(order):
            where[name], rest = rest % sizes[name], rest // sizes[name]
        layouts.append(
            _layout(
                rng,
                source_heap,
                rank=rank,
                kinds=kinds,
                pp=(where["pp"], pp),
                tp=(where["tp"], tp),
                block_tokens=source_tokens,
                positions=positions,
                share=TokenShare(where["cp"], cp, runs),
            )
        )
    source = InstanceLayout(
        instance_id=f"case-{seed}",
        ranks=tuple(layouts),
        pp_size=pp,
        tp_size=tp,
        adp_size=adp,
        cp_size=cp,
        order=order,
    )
    # Evicted blocks of the target decide what nobody wants; the source may have evicted those tokens as well.
    holes: dict[int, set[int]] = {}
    target_blocks = _tables(rng, target, tokens, {}, target=True, positions=positions)
    if rng.random() < 0.4:
        tables = {}
        for group in target.groups:
            table = target_blocks.tables[group.group_id]
            ids = [int(b) for b in table.block_ids]
            for i in range(len(ids)):
                if not group.opaque and rng.random() < 0.3:
                    ids[i] = -1
            tables[group.group_id] = BlockTable(ids, table.first_token)
        target_blocks = RequestBlocks(tables)
    source_adp_rank = rng.randrange(adp) if adp > 1 or rng.random() < 0.5 else None
    blocks = {
        rank: _tables(rng, layout, tokens, holes, target=False, positions=positions)
        for rank, layout in enumerate(source.ranks)
        if layout is not None
    }
    return Case(source, source_adp_rank, blocks, target, target_blocks, tokens)
