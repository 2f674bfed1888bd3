"""Exact transfer plans: which writer puts which bytes where.

Theory. A writer's *destination* is a set of bytes of the target. Its canonical form is the list of ranges in ascending
address order with touching ranges joined, so it depends on nothing that only the sender knows (the sender's block ids,
its block size, its strides): the receiver derives it alone from the two shapes and its own block table, and the sender
derives the same list from the address pairs that it is going to copy. Both sides number the bytes of a bounce region by
that order. Who writes what is a function of the shapes: for each (layer, head) of the target the candidates are the
source ranks that hold it; among replicas the target's rank picks one, so that replicated targets spread over replicated
sources.

Everything is vectorised: per share of work the ranges are one broadcast sum of (bases, blocks, heads or tokens), made
at the coarsest grain at which both sides are dense, then joined. Sorting happens only when the sum is not already
ascending.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

import numpy as np

from kv_bounce_planner._errors import LayoutError, PlanRefused
from kv_bounce_planner._reasons import Reason, Refusal
from kv_bounce_planner.layout.model import (
    ADDRESS_MAX,
    BlockTable,
    InstanceLayout,
    Int64Array,
    KVLayout,
    LayerGroup,
    RequestBlocks,
    TokenRange,
    read_only,
)

#: Fragments of one writer, at most: a plan beyond it is refused rather than built (16 B each).
FRAGMENTS_MAX = 1 << 24

_EMPTY = read_only(np.empty(0, np.int64))


# --- ranges -----------------------------------------------------------------------------------------------------------


def ascending(addresses: Int64Array) -> bool:
    """Whether addresses strictly ascend."""
    return bool((addresses[1:] > addresses[:-1]).all())


def sort_ranges(addresses: Int64Array, *others: Int64Array) -> tuple[Int64Array, ...]:
    """All arrays in ascending order of the first; returned as they are when they already ascend."""
    if ascending(addresses):
        return (addresses, *others)
    order = np.argsort(addresses, kind="stable")
    return (addresses[order], *(other[order] for other in others))


def overlaps(addresses: Int64Array, sizes: Int64Array) -> bool:
    """Whether ascending ranges overlap."""
    return bool((addresses[1:] < addresses[:-1] + sizes[:-1]).any())


def join_ranges(addresses: Int64Array, sizes: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Join touching neighbours of ascending, disjoint ranges."""
    if len(addresses) < 2:
        return addresses, sizes
    apart = np.empty(len(addresses), np.bool_)
    apart[0] = True
    np.not_equal(addresses[1:], addresses[:-1] + sizes[:-1], out=apart[1:])
    starts = np.flatnonzero(apart)
    if len(starts) == len(addresses):
        return addresses, sizes
    return addresses[starts], np.add.reduceat(sizes, starts)


def _join_pairs(source: Int64Array, target: Int64Array, sizes: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Join neighbours that touch on both sides."""
    if len(target) < 2:
        return source, target, sizes
    apart = np.empty(len(target), np.bool_)
    apart[0] = True
    np.not_equal(target[1:], target[:-1] + sizes[:-1], out=apart[1:])
    apart[1:] |= source[1:] != source[:-1] + sizes[:-1]
    starts = np.flatnonzero(apart)
    if len(starts) == len(target):
        return source, target, sizes
    return source[starts], target[starts], np.add.reduceat(sizes, starts)


def _freeze(plan: object, *names: str) -> None:
    """Arrays that their maker could still change are copied: what was checked and hashed is what is carried out later."""
    for name in names:
        array = getattr(plan, name)
        if array.flags.writeable:
            object.__setattr__(plan, name, read_only(array.copy()))


# --- plans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WriterPlan:
    """The bytes that one writer, and nobody else, writes. Immutable and canonical.

    Attributes:
        rank: The writer's rank in the source instance.
        target_addresses: int64 (n,), strictly ascending, read-only.
        sizes: int64 (n,), bytes, at least 1 each; ranges are disjoint and never touch (maximally joined).
        fragment_count: Descriptors that a direct write needs at most, seen from the two shapes alone.
        block_count: Target blocks that this writer touches.
    """

    rank: int
    target_addresses: Int64Array
    sizes: Int64Array
    fragment_count: int
    block_count: int

    def __post_init__(self) -> None:
        _freeze(self, "target_addresses", "sizes")

    @property
    def range_count(self) -> int:
        """Ranges, that is scatter pieces."""
        return len(self.target_addresses)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all ranges."""
        return int(self.sizes.sum())

    @cached_property
    def staging_offsets(self) -> Int64Array:
        """int64 (n,): where each range starts in the bounce region."""
        return read_only(np.cumsum(self.sizes) - self.sizes)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes over rank and ranges: equal digests mean equal destinations for the same writer."""
        state = hashlib.sha256(b"kv-writer-plan.1")
        state.update(struct.pack("<qq", self.rank, len(self.sizes)))
        state.update(np.ascontiguousarray(self.target_addresses, "<i8").data)
        uniform = len(self.sizes) > 0 and int(self.sizes.min()) == int(self.sizes.max())
        state.update(struct.pack("<?q", uniform, int(self.sizes[0]) if uniform else 0))
        if not uniform:
            state.update(np.ascontiguousarray(self.sizes, "<i8").data)
        return state.digest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WriterPlan):
            return NotImplemented
        return (
            (self.rank, self.fragment_count, self.block_count) == (other.rank, other.fragment_count, other.block_count)
            and np.array_equal(self.target_addresses, other.target_addresses)
            and np.array_equal(self.sizes, other.sizes)
        )

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, eq=False)
class WriterTransfer:
    """The sender's side of one writer plan: what it copies from where to where.

    Attributes:
        writer: The plan that the receiver derived as well.
        source_addresses, target_addresses, sizes: int64 (m,), read-only; ascending target; joined where both sides touch.
        raw_count: Fragments before joining.
    """

    writer: WriterPlan
    source_addresses: Int64Array
    target_addresses: Int64Array
    sizes: Int64Array
    raw_count: int

    def __post_init__(self) -> None:
        _freeze(self, "source_addresses", "target_addresses", "sizes")

    @property
    def merged_count(self) -> int:
        """Fragments after joining: descriptors of a direct write, gather pieces of a bounce."""
        return len(self.sizes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all fragments."""
        return self.writer.total_bytes

    @cached_property
    def staging_offsets(self) -> Int64Array:
        """int64 (m,): where each fragment goes in the bounce region."""
        return read_only(np.cumsum(self.sizes) - self.sizes)


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Who writes which bytes of one target rank's request.

    Attributes:
        target_rank: Rank of the target in its instance.
        writers: By ascending source rank; only ranks that have bytes to write.
        block_count: Target blocks that receive bytes.
        memory_kind, device_id: Of the target.
        transfers: The sender's sides, where block ids of the source were given; else empty.
    """

    target_rank: int
    writers: Mapping[int, WriterPlan]
    block_count: int
    memory_kind: str = "DRAM"
    device_id: int = 0
    transfers: Mapping[int, WriterTransfer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "writers", MappingProxyType(dict(sorted(self.writers.items()))))
        object.__setattr__(self, "transfers", MappingProxyType(dict(self.transfers)))

    @property
    def writer_ranks(self) -> tuple[int, ...]:
        """Ranks that write, ascending."""
        return tuple(self.writers)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all writers."""
        return sum(writer.total_bytes for writer in self.writers.values())

    @cached_property
    def digest(self) -> bytes:
        """16 bytes over the target rank and every writer's digest."""
        state = hashlib.sha256(b"kv-transfer-plan.1" + struct.pack("<qq", self.target_rank, len(self.writers)))
        for writer in self.writers.values():
            state.update(writer.digest)
        return state.digest()[:16]

    def ranges(self) -> tuple[Int64Array, Int64Array]:
        """(addresses, sizes) that all writers together cover, joined."""
        return join_ranges(*self._all_ranges())

    def _all_ranges(self) -> tuple[Int64Array, Int64Array]:
        if not self.writers:
            return _EMPTY, _EMPTY
        writers = list(self.writers.values())
        if len(writers) == 1:
            return writers[0].target_addresses, writers[0].sizes
        addresses, sizes = sort_ranges(
            np.concatenate([writer.target_addresses for writer in writers]),
            np.concatenate([writer.sizes for writer in writers]),
        )
        return addresses, sizes

    def validate(self) -> None:
        """Re-prove what can be proven from the plan alone: canonical ranges, and no byte written twice.

        Raises:
            PlanRefused: ``NOT_CANONICAL`` or ``OVERLAP``.
        """
        for rank, writer in self.writers.items():
            _check_canonical(rank, writer)
        self._disjoint_ranges()

    def _disjoint_ranges(self) -> tuple[Int64Array, Int64Array]:
        addresses, sizes = self._all_ranges()
        if overlaps(addresses, sizes):
            twice = [rank for rank, writer in self.writers.items() if overlaps(writer.target_addresses, writer.sizes)]
            words = (
                f"writer {twice[0]} would write one byte twice" if twice else "two writers would write the same byte"
            )
            raise PlanRefused(Reason.OVERLAP, words)
        return addresses, sizes

    def validate_cover(self, addresses: Int64Array, sizes: Int64Array) -> None:
        """Prove that the writers cover exactly the given ranges (ascending, joined): no byte less, none more.

        Raises:
            PlanRefused: ``NOT_EXACT_COVER``, or what :meth:`validate` raises.
        """
        for rank, writer in self.writers.items():
            _check_canonical(rank, writer)
        self._prove_cover(addresses, sizes)

    def _prove_cover(self, addresses: Int64Array, sizes: Int64Array) -> None:
        """The same for writers whose ranges ascend and are joined."""
        have, have_sizes = join_ranges(*self._disjoint_ranges())
        if not (np.array_equal(have, addresses) and np.array_equal(have_sizes, sizes)):
            raise PlanRefused(
                Reason.NOT_EXACT_COVER,
                f"writers cover {int(have_sizes.sum())} B in {len(have)} ranges, the request has "
                f"{int(sizes.sum())} B in {len(addresses)}",
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransferPlan):
            return NotImplemented
        return (
            self.target_rank == other.target_rank
            and self.block_count == other.block_count
            and (self.memory_kind, self.device_id) == (other.memory_kind, other.device_id)
            and dict(self.writers) == dict(other.writers)
        )

    def __hash__(self) -> int:
        return hash(self.digest)


def _check_canonical(rank: int, writer: WriterPlan) -> None:
    addresses, sizes = writer.target_addresses, writer.sizes
    if writer.rank != rank or len(addresses) != len(sizes) or len(sizes) == 0:
        raise PlanRefused(Reason.NOT_CANONICAL, f"writer {rank}: an empty or foreign plan")
    if int(sizes.min()) <= 0 or int(addresses[0]) < 0 or int(addresses[-1]) > ADDRESS_MAX - int(sizes[-1]):
        raise PlanRefused(Reason.NOT_CANONICAL, f"writer {rank}: sizes are positive and ranges fit into int64")
    gaps = addresses[1:] - addresses[:-1] - sizes[:-1]
    if len(gaps) and int(gaps.min()) <= 0:
        touching = int(gaps.min()) == 0 and ascending(addresses)
        raise PlanRefused(
            Reason.NOT_CANONICAL if touching else Reason.OVERLAP,
            f"writer {rank}: ranges {'touch' if touching else 'overlap or do not ascend'}",
        )


# --- who writes what --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Share:
    """Layers and heads of one target group that one writer provides from one of its groups."""

    rank: int
    source: LayerGroup
    target: LayerGroup
    layers: tuple[int, ...]
    first_head: int
    head_count: int

    #: By tokens of a piece.
    _shapes: dict[int, _Shape] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def bases(self) -> tuple[Int64Array, Int64Array]:
        """(target, source) addresses of the first head, one per (factor, layer), ascending target."""
        return _target_bases(self)

    @cached_property
    def blocks_outer(self) -> bool:
        """Whether the layers of one block lie inside it, so that ascending addresses run block by block."""
        return _blocks_outer(self.bases[0], self.target)

    def shape(self, tokens: int) -> _Shape:
        """Of a piece of so many tokens."""
        shape = self._shapes.get(tokens)
        if shape is None:
            shape = self._shapes[tokens] = _shape_of(self, tokens)
        return shape


@dataclass(frozen=True, eq=False)
class _Shape:
    """What a share's pieces of so many tokens look like at the target.

    Attributes:
        bases: int64 (n,), ascending: a piece's ranges begin at these, in a block that begins at 0.
        chunk: Bytes of each of them.
        axes: (count, stride) of what is not dense within such a range.
        blocks_outer: As of a share, for these bases.
        gap: From one base to the next, at least (bytes).
        target_count: Fragments of one piece that the target alone asks for, (factor, layer)s not joined.
        pair_count: Fragments of one piece within one (factor, layer), dense on both sides.
    """

    bases: Int64Array
    chunk: int
    axes: tuple[tuple[int, int], ...]
    blocks_outer: bool
    gap: int
    target_count: int
    pair_count: int


def _blocks_outer(bases: Int64Array, target: LayerGroup) -> bool:
    return bool(len(bases) > 1 and int(bases[-1]) - int(bases[0]) < target.block_stride_bytes)


def _shape_of(share: _Share, tokens: int) -> _Shape:
    bases, _ = share.bases
    chunk, axes = _axes(share, tokens, with_source=False)
    target_count = len(bases) * _product(axes)
    if not axes and len(bases) > 1:
        # Keys and values, or layers, that lie side by side in a block are one range, if all do.
        firsts = np.flatnonzero(np.diff(bases, prepend=bases[0] - 2 * chunk) != chunk)
        if len(bases) % len(firsts) == 0 and bool((np.diff(firsts) == len(bases) // len(firsts)).all()):
            bases, chunk = bases[firsts], chunk * (len(bases) // len(firsts))
    return _Shape(
        bases,
        chunk,
        tuple((count, stride) for count, stride, _ in axes),
        _blocks_outer(bases, share.target),
        int(np.diff(bases).min()) if len(bases) > 1 else ADDRESS_MAX,
        target_count,
        _product(_axes(share, tokens)[1]),
    )


#: Layers of the whole model that a slice moves; None: all.
_Layers = range | None

#: Shares of pairs of layouts, by the objects' ids: layouts are immutable, and a request's plan begins with the same ones again.
#: Without a source, the target's own.
_KNOWN_SHARES: OrderedDict[
    tuple[int, int, int | None, _Layers], tuple[InstanceLayout | None, KVLayout, tuple[_Share, ...]]
] = OrderedDict()
_KNOWN_SHARES_MAX: Final = 256


def _shares(
    source: InstanceLayout | None, target: KVLayout, source_adp_rank: int | None, layers: _Layers = None
) -> tuple[_Share, ...]:
    """Who provides what of the target, from the two shapes alone.

    Without a source: all of the target, derived without the writers' shares, against which these are proven.
    """
    key = (id(source), id(target), source_adp_rank, layers)
    known = _KNOWN_SHARES.get(key)
    # An id is used again only after its object has gone, and what is kept here has not.
    if known is not None:
        return known[2]
    if layers is not None:
        every = _shares(source, target, source_adp_rank)
        kept = ((share, tuple(layer for layer in share.layers if layer in layers)) for share in every)
        shares = tuple(replace(share, layers=mine) for share, mine in kept if mine)
    elif source is None:
        shares = tuple(
            _Share(0, group, group, group.layer_ids, group.first_head, group.head_count) for group in target.groups
        )
    else:
        shares = tuple(_derived_shares(source, target, source_adp_rank))
    while len(_KNOWN_SHARES) >= _KNOWN_SHARES_MAX:
        _KNOWN_SHARES.popitem(last=False)
    _KNOWN_SHARES[key] = (source, target, shares)
    return shares


def _derived_shares(source: InstanceLayout, target: KVLayout, source_adp_rank: int | None) -> list[_Share]:
    if source.adp_size > 1 and source_adp_rank is None:
        raise PlanRefused(Reason.WRITER_COHORT_UNKNOWN, f"one of {source.adp_size} attention-DP ranks will write")
    cohort = source.cohort(source_adp_rank or 0)
    holders: dict[int, list[tuple[int, LayerGroup]]] = {}
    for rank in cohort:
        layout = source.ranks[rank]
        if layout is None:
            raise PlanRefused(Reason.RANK_METADATA_MISSING, f"rank {rank} of instance {source.instance_id!r}")
        if layout.layer_total and target.layer_total and layout.layer_total != target.layer_total:
            raise PlanRefused(
                Reason.LAYOUT_MISMATCH,
                f"layer_total is {layout.layer_total} at source rank {rank} and {target.layer_total} at the target",
            )
        for group in layout.groups:
            for layer in group.layer_ids:
                holders.setdefault(layer, []).append((rank, group))
    shares: list[_Share] = []
    for wanted in target.groups:
        by_holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for layer in wanted.layer_ids:
            key = tuple((rank, group.group_id) for rank, group in holders.get(layer, ()))
            by_holders.setdefault(key, []).append(layer)
        for key, layers in by_holders.items():
            if not key:
                raise PlanRefused(Reason.LAYOUT_MISMATCH, f"no source rank holds layers {layers}")
            candidates = holders[layers[0]]
            for rank, group in candidates:
                _check_compatible(rank, group, wanted)
            for holders_of_tokens in _token_holders(candidates, wanted, layers):
                for first, count, rank, group in _split_heads(holders_of_tokens, wanted, target.rank, layers):
                    shares.append(_Share(rank, group, wanted, tuple(layers), first, count))
    return shares


def _token_holders(
    candidates: list[tuple[int, LayerGroup]], target: LayerGroup, layers: list[int]
) -> Iterator[list[tuple[int, LayerGroup]]]:
    """The source's ranks by the tokens that they hold, for every context-parallel rank that holds some of the target's."""
    first = candidates[0][1].token_share
    by_rank: dict[int, list[tuple[int, LayerGroup]]] = {}
    for rank, group in candidates:
        share = group.token_share
        if (share.size, share.interleave_tokens) != (first.size, first.interleave_tokens):
            raise PlanRefused(
                Reason.LAYOUT_MISMATCH, f"the source's ranks share the tokens of layers {layers} in unlike ways"
            )
        by_rank.setdefault(share.rank, []).append((rank, group))
    mine = target.token_share
    alike = (mine.size, mine.interleave_tokens) == (first.size, first.interleave_tokens)
    for cp_rank in (mine.rank,) if alike else range(first.size):
        if cp_rank not in by_rank:
            raise PlanRefused(
                Reason.LAYOUT_MISMATCH,
                f"no source rank holds the tokens of context-parallel rank {cp_rank}, layers {layers}",
            )
        yield by_rank[cp_rank]


def _check_compatible(rank: int, source: LayerGroup, target: LayerGroup) -> None:
    for name in ("kv_factor", "head_total", "head_dim", "element_bytes", "dtype", "opaque"):
        ours, theirs = getattr(target, name), getattr(source, name)
        if ours != theirs:
            raise PlanRefused(
                Reason.LAYOUT_MISMATCH, f"{name} is {theirs!r} at source rank {rank} and {ours!r} at the target"
            )


def _split_heads(
    candidates: list[tuple[int, LayerGroup]], target: LayerGroup, target_rank: int, layers: list[int]
) -> Iterator[tuple[int, int, int, LayerGroup]]:
    """(first head, count, rank, group) in ascending head order, neighbours of one writer joined."""
    low, high = target.first_head, target.first_head + target.head_count
    cuts = sorted(
        {low, high} | {h for _, g in candidates for h in (g.first_head, g.first_head + g.head_count) if low < h < high}
    )
    chosen: list[tuple[int, int, int, LayerGroup]] = []
    for first, end in itertools.pairwise(cuts):
        able = [(r, g) for r, g in candidates if g.first_head <= first and end <= g.first_head + g.head_count]
        if not able:
            reason = Reason.RECURRENT_STATE_SPLIT if target.opaque else Reason.LAYOUT_MISMATCH
            raise PlanRefused(reason, f"no source rank holds heads {first} … {end - 1} of layers {layers}")
        rank, group = able[target_rank % len(able)]
        if chosen and chosen[-1][2] == rank and chosen[-1][3] is group:
            chosen[-1] = (chosen[-1][0], end - chosen[-1][0], rank, group)
        else:
            chosen.append((first, end - first, rank, group))
    yield from chosen


# --- where the tokens lie ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Runs of tokens inside one block: parallel arrays, ascending token order. Two are the same if they are one object.

    Attributes:
        block_ids: int64 (p,).
        slots: int64 (p,), first token slot within the block.
        counts: int64 (p,), tokens.
        tokens: int64 (p,), position of the first token among those of the rank whose table is looked into: the target, and
            after :func:`_of_writer` the source (index of the block for recurrent state).
        block_count: Blocks that the pieces lie in. A table that names one block twice is refused as an overlap.
    """

    block_ids: Int64Array
    slots: Int64Array
    counts: Int64Array
    tokens: Int64Array
    block_count: int

    @cached_property
    def runs(self) -> tuple[tuple[int, Int64Array | slice], ...]:
        """(tokens, index of the pieces with so many tokens)."""
        if len(self.counts) == 0:
            return ()
        low, high = int(self.counts.min()), int(self.counts.max())
        if low == high:
            return ((low, slice(None)),)
        return tuple((int(count), np.flatnonzero(self.counts == count)) for count in np.unique(self.counts))


_NO_PIECES: Final = _Pieces(_EMPTY, _EMPTY, _EMPTY, _EMPTY, 0)


def _table(blocks: RequestBlocks, group: LayerGroup, side: str) -> BlockTable:
    table = blocks.tables.get(group.group_id)
    if table is None:
        raise PlanRefused(Reason.BLOCK_TABLE_MISSING, f"{side} group {group.group_id} has no block table")
    if table.first_token % group.block_tokens:
        raise LayoutError(f"{side} group {group.group_id}: first_token {table.first_token} is not the start of a block")
    ids = table.block_ids
    if ids.size and int(ids.max()) >= group.block_count:
        raise PlanRefused(
            Reason.BLOCK_OUT_OF_RANGE, f"{side} group {group.group_id}: block {int(ids.max())} of {group.block_count}"
        )
    return table


def _target_pieces(group: LayerGroup, blocks: RequestBlocks, tokens: TokenRange) -> _Pieces:
    if not group.layer_ids or (not group.opaque and tokens.count == 0):
        return _NO_PIECES
    if not group.opaque:  # from here on positions count the tokens of this rank
        tokens = TokenRange(*(group.token_share.count_below(end) for end in (tokens.start, tokens.end)))
        if tokens.count == 0:
            return _NO_PIECES
    table = _table(blocks, group, "target")
    ids, size = table.block_ids, group.block_tokens
    if group.opaque:
        index = np.flatnonzero(ids >= 0)
        return _Pieces(ids[index], np.zeros_like(index), np.ones_like(index), index, len(index))
    first, last = (tokens.start - table.first_token) // size, (tokens.end - 1 - table.first_token) // size
    if first < 0 or last >= len(ids):
        raise PlanRefused(
            Reason.BLOCK_TABLE_SHORT,
            f"target group {group.group_id}: blocks hold tokens {table.first_token} … "
            f"{table.first_token + len(ids) * size - 1}, wanted {tokens.start} … {tokens.end - 1}",
        )
    wanted = ids[first : last + 1]
    starts = table.first_token + np.arange(first, last + 1, dtype=np.int64) * size
    begins = starts.copy()
    begins[0] = tokens.start
    counts = np.full(len(wanted), size, np.int64)
    counts[-1] = tokens.end - starts[-1]
    counts[0] -= tokens.start - starts[0]
    present = wanted >= 0
    if present.all():
        return _Pieces(wanted, begins - starts, counts, begins, len(wanted))
    return _Pieces(
        wanted[present], (begins - starts)[present], counts[present], begins[present], int(np.count_nonzero(present))
    )


def _of_writer(pieces: _Pieces, share: _Share) -> _Pieces:
    """The pieces that this writer's context-parallel rank holds, in positions of that rank."""
    mine, theirs = share.target.token_share, share.source.token_share
    if mine == theirs:
        return pieces  # dense in the same tokens on both sides
    if mine.size > 1:
        pieces = _cut(pieces, mine.interleave_tokens)
        rounds, within = np.divmod(pieces.tokens, mine.interleave_tokens)
        pieces = replace(pieces, tokens=(rounds * mine.size + mine.rank) * mine.interleave_tokens + within)
    if theirs.size > 1:
        pieces = _cut(pieces, theirs.interleave_tokens)
        runs, within = np.divmod(pieces.tokens, theirs.interleave_tokens)
        kept = runs % theirs.size == theirs.rank
        blocks = pieces.block_ids[kept]
        tokens = runs[kept] // theirs.size * theirs.interleave_tokens + within[kept]
        pieces = _Pieces(blocks, pieces.slots[kept], pieces.counts[kept], tokens, len(np.unique(blocks)))
    return pieces


def _cut(pieces: _Pieces, block_tokens: int) -> _Pieces:
    """Cut pieces where blocks of the other side (or a rank's runs of tokens) end."""
    first = pieces.tokens // block_tokens
    counts = (pieces.tokens + pieces.counts - 1) // block_tokens - first + 1
    if len(counts) == 0 or int(counts.max()) == 1:
        return pieces
    origin = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(origin), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    start, end = pieces.tokens[origin], (pieces.tokens + pieces.counts)[origin]
    block = (first[origin] + within) * block_tokens
    low = np.maximum(start, block)
    high = np.minimum(end, block + block_tokens)
    slots = pieces.slots[origin] + low - start
    return _Pieces(pieces.block_ids[origin], slots, high - low, low, pieces.block_count)


def _source_pieces(group: LayerGroup, blocks: RequestBlocks, cut: _Pieces) -> _Pieces:
    """The source's blocks for target pieces that were cut at the source's block ends."""
    table = _table(blocks, group, "source")
    ids = table.block_ids
    index = cut.tokens if group.opaque else (cut.tokens - table.first_token) // group.block_tokens
    if len(index) and (int(index.min()) < 0 or int(index.max()) >= len(ids)):
        raise PlanRefused(
            Reason.BLOCK_TABLE_SHORT, f"source group {group.group_id}: its blocks do not reach over the range"
        )
    found = ids[index]
    if len(found) and int(found.min()) < 0:
        position = int(cut.tokens[int(np.argmin(found))])
        raise PlanRefused(
            Reason.SOURCE_BLOCK_MISSING, f"source group {group.group_id}: the block of token {position} was evicted"
        )
    slots = np.zeros_like(index) if group.opaque else cut.tokens % group.block_tokens
    return _Pieces(found, slots, cut.counts, cut.tokens, cut.block_count)


# --- from pieces to addresses -----------------------------------------------------------------------------------------


def _axes(
    share: _Share, tokens: int, *, with_target: bool = True, with_source: bool = True
) -> tuple[int, list[tuple[int, int, int]]]:
    """(chunk bytes, [(count, target stride, source stride), …]) after folding every axis that is dense on all sides."""
    source, target = share.source, share.target
    axes = [
        (share.head_count, target.head_stride_bytes, source.head_stride_bytes),
        (tokens, target.token_stride_bytes, source.token_stride_bytes),
    ]
    axes = [axis for axis in axes if axis[0] > 1]
    chunk = target.element_run_bytes
    folded = True
    while folded:
        folded = False
        for axis in axes:
            count, target_stride, source_stride = axis
            if (not with_target or target_stride == chunk) and (not with_source or source_stride == chunk):
                chunk *= count
                axes.remove(axis)
                folded = True
                break
    axes.sort(key=lambda axis: -axis[1])
    return chunk, axes


def _target_bases(share: _Share) -> tuple[Int64Array, Int64Array]:
    """(target, source) addresses of the share's first head, one per (factor, layer), ascending target."""
    at = {layer: i for i, layer in enumerate(share.target.layer_ids)}
    of = {layer: i for i, layer in enumerate(share.source.layer_ids)}
    target_heads = (share.first_head - share.target.first_head) * share.target.head_stride_bytes
    source_heads = (share.first_head - share.source.first_head) * share.source.head_stride_bytes
    pairs = [
        (target[at[layer]] + target_heads, source[of[layer]] + source_heads)
        for target, source in (
            (share.target.key_bases, share.source.key_bases),
            (share.target.value_bases, share.source.value_bases),
        )
        if target
        for layer in share.layers
    ]
    pairs.sort()
    array = np.array(pairs, np.int64).reshape(-1, 2)
    return array[:, 0].copy(), array[:, 1].copy()


def _spread(bases: Int64Array, offsets: Int64Array, axes: Iterable[tuple[int, int]], pieces_outer: bool) -> Int64Array:
    inner = np.zeros(1, np.int64)
    for count, stride in axes:
        inner = (inner[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    first, second = (offsets, bases) if pieces_outer else (bases, offsets)
    outer = (first[:, None] + second).ravel()
    if len(inner) == 1:
        return outer
    return (outer[:, None] + inner).ravel()


def _check_count(share: _Share, count: int) -> None:
    if count > FRAGMENTS_MAX:
        raise PlanRefused(Reason.TOO_MANY_FRAGMENTS, f"writer {share.rank}: {count} fragments exceed {FRAGMENTS_MAX}")


@dataclass(frozen=True)
class _Ranges:
    """``whole``: they ascend, are disjoint and never touch. Else some neighbours may be joined, and no more is known."""

    addresses: Int64Array
    sizes: Int64Array
    whole: bool


#: A request's ranges from any base, by its pieces, their tokens, the target's strides and the chunk.
_Joined = dict[tuple[_Pieces, int, int, int, int], _Ranges]


def _target_ranges(share: _Share, pieces: _Pieces, joined: _Joined) -> _Ranges:
    """Target ranges of a share, seen from the target alone.

    Args:
        share: Who writes what.
        pieces: Where the tokens lie.
        joined: What other shares of this request have found; gets what this one finds.
    """
    target = share.target
    found: list[_Ranges] = []
    for tokens, index in pieces.runs:
        shape = share.shape(tokens)
        bases, chunk = shape.bases, shape.chunk
        _check_count(share, shape.target_count * len(pieces.counts[index]))
        if shape.axes or shape.blocks_outer:
            offsets = _offsets(target, pieces, index)
            addresses = _spread(bases, offsets, shape.axes, shape.blocks_outer)
            found.append(_Ranges(addresses, np.full(len(addresses), chunk, np.int64), False))
            continue
        # At each base the same blocks, each in one piece: joined once, for all of them and all writers.
        key = pieces, tokens, target.block_stride_bytes, target.token_stride_bytes, chunk
        ranges = joined.get(key)
        if ranges is None:
            ranges = joined[key] = _joined_offsets(_offsets(target, pieces, index), chunk)
        addresses = _spread(bases, ranges.addresses, (), False)
        sizes = ranges.sizes[None].repeat(len(bases), axis=0).ravel()
        span = int(ranges.addresses[-1] + ranges.sizes[-1] - ranges.addresses[0])
        found.append(_Ranges(addresses, sizes, ranges.whole and span < shape.gap))
    return found[0] if len(found) == 1 else _all_of(found)


def _joined_offsets(offsets: Int64Array, chunk: int) -> _Ranges:
    addresses, sizes = join_ranges(offsets, np.full(len(offsets), chunk, np.int64))
    return _Ranges(addresses, sizes, not overlaps(addresses, sizes))


def _all_of(parts: list[_Ranges]) -> _Ranges:
    if not parts:
        return _Ranges(_EMPTY, _EMPTY, True)
    addresses = np.concatenate([part.addresses for part in parts])
    return _Ranges(addresses, np.concatenate([part.sizes for part in parts]), False)


def _whole(parts: list[_Ranges]) -> tuple[Int64Array, Int64Array]:
    """Ranges of several shares, ascending and joined. Joining leaves each byte as often as it was: overlaps still show."""
    ranges = parts[0] if len(parts) == 1 else _all_of(parts)
    if ranges.whole:
        return ranges.addresses, ranges.sizes
    return join_ranges(*sort_ranges(ranges.addresses, ranges.sizes))


def _offsets(target: LayerGroup, pieces: _Pieces, index: Int64Array | slice) -> Int64Array:
    """Where pieces begin, from a layer's base, ascending."""
    offsets = pieces.block_ids[index] * target.block_stride_bytes + pieces.slots[index] * target.token_stride_bytes
    return offsets if ascending(offsets) else np.sort(offsets)


def _product(axes: Iterable[tuple[int, ...]]) -> int:
    product = 1
    for axis in axes:
        product *= axis[0]
    return product


def _pair_count(share: _Share, pieces: _Pieces, cut: dict[tuple[_Pieces, int], _Pieces]) -> int:
    """Fragments that this share needs when no two blocks are neighbours on both sides.

    ``cut``: pieces as other shares of this request have cut them; gets what this one cuts.
    """
    if not share.target.opaque:
        key = pieces, share.source.block_tokens
        if key not in cut:
            cut[key] = _cut(pieces, share.source.block_tokens)
        pieces = cut[key]
    factor = len(share.layers) * share.target.kv_factor
    return factor * sum(len(pieces.counts[index]) * share.shape(tokens).pair_count for tokens, index in pieces.runs)


def _pair_ranges(
    share: _Share, pieces: _Pieces, source_blocks: RequestBlocks
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(source, target, sizes) of a share."""
    if not share.target.opaque:
        pieces = _cut(pieces, share.source.block_tokens)
    theirs = _source_pieces(share.source, source_blocks, pieces)
    target_bases, source_bases = share.bases
    outer = share.blocks_outer
    found: list[tuple[Int64Array, Int64Array, Int64Array]] = []
    for tokens, index in pieces.runs:
        chunk, axes = _axes(share, tokens)
        target_offsets = (
            pieces.block_ids[index] * share.target.block_stride_bytes
            + pieces.slots[index] * share.target.token_stride_bytes
        )
        source_offsets = (
            theirs.block_ids[index] * share.source.block_stride_bytes
            + theirs.slots[index] * share.source.token_stride_bytes
        )
        target_offsets, source_offsets = sort_ranges(target_offsets, source_offsets)
        _check_count(share, len(target_bases) * len(target_offsets) * _product(axes))
        target = _spread(target_bases, target_offsets, [(c, t) for c, t, _ in axes], outer)
        source = _spread(source_bases, source_offsets, [(c, s) for c, _, s in axes], outer)
        found.append((source, target, np.full(len(target), chunk, np.int64)))
    if not found:
        return _EMPTY, _EMPTY, _EMPTY
    if len(found) == 1:
        return found[0]
    return (
        np.concatenate([part[0] for part in found]),
        np.concatenate([part[1] for part in found]),
        np.concatenate([part[2] for part in found]),
    )


# --- public planning --------------------------------------------------------------------------------------------------


def _all_pieces(
    target: KVLayout, blocks: RequestBlocks, tokens: TokenRange, *, states: bool = True
) -> dict[int, _Pieces]:
    """``states``: recurrent state, which is of no token, moves too."""
    return {
        group.group_id: _target_pieces(group, blocks, tokens) if states or not group.opaque else _NO_PIECES
        for group in target.groups
    }


def request_ranges(target: KVLayout, target_blocks: RequestBlocks, tokens: TokenRange) -> tuple[Int64Array, Int64Array]:
    """(addresses, sizes) of every byte that the request's tokens occupy at the target, ascending and joined.

    The allowed ranges of a receive: what all writers together must cover exactly.

    Raises:
        PlanRefused: A block table is missing, short, names a block outside the pool, or names one block twice.
    """
    return _request_ranges(target, _all_pieces(target, target_blocks, tokens), {})


def _request_ranges(
    target: KVLayout, pieces: dict[int, _Pieces], joined: _Joined, layers: _Layers = None
) -> tuple[Int64Array, Int64Array]:
    shares = _shares(None, target, None, layers)
    parts = [_target_ranges(share, pieces[share.target.group_id], joined) for share in shares]
    addresses, sizes = _whole(parts)
    if overlaps(addresses, sizes):
        raise PlanRefused(Reason.OVERLAP, "the target's blocks alias: one byte would hold two tokens")
    return addresses, sizes


def plan_destination(
    source: InstanceLayout,
    target: KVLayout,
    target_blocks: RequestBlocks,
    tokens: TokenRange,
    *,
    source_adp_rank: int | None = None,
) -> TransferPlan:
    """Derive, at the receiver and without the sender's block ids, what each writer must write.

    Pure: equal inputs give equal plans and digests everywhere.

    Args:
        source: The sending instance; every rank of the writing cohort must be known.
        target: This rank's memory.
        target_blocks: The request's blocks here, one table per layer group; -1 entries are not moved.
        tokens: Positions to move.
        source_adp_rank: Which attention-DP rank of the source holds the request; may be None when there is one.

    Returns:
        Canonical plans by writer rank. Proven before return: disjoint, and together exactly the request's slots.

    Raises:
        PlanRefused: With a stable reason; nothing was reserved, fall back to direct writes or to an error.
        LayoutError: A block table does not start at a block.

    Source: docs/design.md#plans; oracle in ``kv_bounce_planner`` tests.
    """
    return _destination(source, target, _all_pieces(target, target_blocks, tokens), source_adp_rank)


def _destination(
    source: InstanceLayout,
    target: KVLayout,
    pieces: dict[int, _Pieces],
    source_adp_rank: int | None,
    layers: _Layers = None,
) -> TransferPlan:
    shares = _shares(source, target, source_adp_rank, layers)
    moved = {share.target.group_id for share in shares}
    joined: _Joined = {}
    cut: dict[tuple[_Pieces, int], _Pieces] = {}
    parts: dict[int, list[_Ranges]] = {}
    fragments: dict[int, int] = {}
    touched: dict[int, dict[int, int]] = {}
    for share in shares:
        mine = _of_writer(pieces[share.target.group_id], share)
        if len(mine.counts) == 0:
            continue
        parts.setdefault(share.rank, []).append(_target_ranges(share, mine, joined))
        fragments[share.rank] = fragments.get(share.rank, 0) + _pair_count(share, mine, cut)
        touched.setdefault(share.rank, {})[share.target.group_id] = mine.block_count
    writers: dict[int, WriterPlan] = {}
    for rank in sorted(parts):
        addresses, sizes = _whole(parts[rank])
        writers[rank] = WriterPlan(
            rank, read_only(addresses), read_only(sizes), fragments[rank], sum(touched[rank].values())
        )
    plan = TransferPlan(
        target_rank=target.rank,
        writers=writers,
        block_count=sum(piece.block_count for group_id, piece in pieces.items() if group_id in moved),
        memory_kind=target.memory_kind,
        device_id=target.device_id,
    )
    plan._prove_cover(*_request_ranges(target, pieces, joined, layers))
    return plan


def try_plan_destination(
    source: InstanceLayout | Refusal,
    target: KVLayout,
    target_blocks: RequestBlocks,
    tokens: TokenRange,
    *,
    source_adp_rank: int | None = None,
) -> TransferPlan | Refusal:
    """:func:`plan_destination` for the part that may still fall back: a doubt is a value, not an error.

    ``source`` may itself be the refusal of :meth:`PeerLayouts.resolve`.
    """
    if isinstance(source, Refusal):
        return source
    try:
        return plan_destination(source, target, target_blocks, tokens, source_adp_rank=source_adp_rank)
    except PlanRefused as refused:
        return Refusal(refused.reason, refused.detail)
    except LayoutError as error:
        return Refusal(Reason.LAYOUT_MISMATCH, str(error))


def plan_writer(
    source: InstanceLayout,
    rank: int,
    source_blocks: RequestBlocks,
    target: KVLayout,
    target_blocks: RequestBlocks,
    tokens: TokenRange,
    *,
    source_adp_rank: int | None = None,
) -> WriterTransfer | None:
    """Derive, at one sender, the address pairs that it copies. None when this rank has nothing to write.

    Args:
        source: The own instance, complete.
        rank: The own rank.
        source_blocks: The request's blocks here.
        target, target_blocks, tokens, source_adp_rank: As the receiver gave them.

    Returns:
        Pairs in ascending target order; ``.writer`` equals what the receiver derived for this rank.

    Raises:
        PlanRefused: As :func:`plan_destination`; also ``SOURCE_BLOCK_MISSING``.
        LayoutError: A block table does not start at a block.
    """
    return _writer(source, rank, source_blocks, target, _all_pieces(target, target_blocks, tokens), source_adp_rank)


def _writer(
    source: InstanceLayout,
    rank: int,
    source_blocks: RequestBlocks,
    target: KVLayout,
    pieces: dict[int, _Pieces],
    source_adp_rank: int | None,
    layers: _Layers = None,
) -> WriterTransfer | None:
    shares = [share for share in _shares(source, target, source_adp_rank, layers) if share.rank == rank]
    parts: list[tuple[Int64Array, Int64Array, Int64Array]] = []
    fragments = 0
    touched: dict[int, int] = {}
    for share in shares:
        mine = _of_writer(pieces[share.target.group_id], share)
        if len(mine.counts) == 0:
            continue
        parts.append(_pair_ranges(share, mine, source_blocks))
        fragments += len(parts[-1][2])
        touched[share.target.group_id] = mine.block_count
    if not parts:
        return None
    targets, sources, sizes = sort_ranges(
        parts[0][1] if len(parts) == 1 else np.concatenate([part[1] for part in parts]),
        parts[0][0] if len(parts) == 1 else np.concatenate([part[0] for part in parts]),
        parts[0][2] if len(parts) == 1 else np.concatenate([part[2] for part in parts]),
    )
    if overlaps(targets, sizes):
        raise PlanRefused(Reason.OVERLAP, f"writer {rank} would write one byte twice")
    sources, targets, sizes = _join_pairs(sources, targets, sizes)
    addresses, lengths = join_ranges(targets, sizes)
    writer = WriterPlan(rank, read_only(addresses), read_only(lengths), fragments, sum(touched.values()))
    return WriterTransfer(writer, read_only(sources), read_only(targets), read_only(sizes), fragments)


def plan_transfer(
    source: InstanceLayout | KVLayout,
    target: KVLayout,
    *,
    tokens: TokenRange,
    target_blocks: RequestBlocks,
    source_blocks: Mapping[int, RequestBlocks] | None = None,
    source_adp_rank: int | None = None,
) -> TransferPlan:
    """Plan both sides at once, for tests, tools and engines that hold both block tables in one place.

    Raises:
        PlanRefused: As :func:`plan_destination` and :func:`plan_writer`; also ``PLAN_COUNT`` when block ids of a
            writing rank are missing, ``NOT_EXACT_COVER`` when the two derivations disagree.
    """
    instance = InstanceLayout.single(source) if isinstance(source, KVLayout) else source
    plan = plan_destination(instance, target, target_blocks, tokens, source_adp_rank=source_adp_rank)
    if source_blocks is None:
        return plan
    transfers: dict[int, WriterTransfer] = {}
    for rank, writer in plan.writers.items():
        if rank not in source_blocks:
            raise PlanRefused(Reason.PLAN_COUNT, f"no source blocks of writer {rank}")
        transfer = plan_writer(
            instance, rank, source_blocks[rank], target, target_blocks, tokens, source_adp_rank=source_adp_rank
        )
        if transfer is None or transfer.writer != writer:
            raise PlanRefused(Reason.NOT_EXACT_COVER, f"the two derivations of writer {rank} disagree")
        transfers[rank] = transfer
    return TransferPlan(plan.target_rank, plan.writers, plan.block_count, plan.memory_kind, plan.device_id, transfers)
