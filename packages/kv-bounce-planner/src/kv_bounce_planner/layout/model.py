"""What lies where: layouts of KV pools, block tables and token ranges.

One formula covers the field's engines. The element of layer ``l``, factor ``f`` (K or V), block ``b``, token slot ``s``,
KV head ``h`` and dimension ``d`` stands at::

    bases[f][l] + b * block_stride + s * token_stride + (h - first_head) * head_stride + d * element

so per-layer or joined pools, separate or interleaved K and V, NHD and HND, padded blocks and differing block sizes are
numbers, not cases. Positions are explicit everywhere: a block table says which token its first block starts with, so a
trimmed table can never be read as trimmed at the other end.

Under context parallelism a rank holds only some tokens (:class:`TokenShare`) and stores them densely: slots, block tables and
``first_token`` then count the rank's own tokens, a :class:`TokenRange` always counts those of the request.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kv_bounce_planner._errors import KVTransferError, LayoutError
from kv_bounce_planner._reasons import Reason, Refusal

Int64Array = npt.NDArray[np.int64]
MemoryKind = Literal["DRAM", "VRAM"]
_Layout = TypeVar("_Layout", "KVLayout", "InstanceLayout")

#: Addresses and ends of ranges stay below 2**63, so that int64 arithmetic on them cannot wrap.
ADDRESS_MAX = (1 << 63) - 1
#: Bounds that a decoded layout must keep (counts, not bytes).
LAYERS_MAX = 4096
GROUPS_MAX = 256
RANKS_MAX = 4096
#: Dimensions of an instance, outermost first.
RANK_ORDER = ("adp", "pp", "cp", "tp")
#: Encoded size of one layout or instance, at most.
LAYOUT_BYTES_MAX = 16 << 20


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LayoutError(message, reason=Reason.BAD_FIELD)


def _is_count(value: object, low: int) -> bool:
    return type(value) is int and low <= value <= ADDRESS_MAX


def read_only(array: Int64Array) -> Int64Array:
    """Freeze an array in place and return it."""
    array.setflags(write=False)
    return array


def frozen_int64(values: npt.ArrayLike) -> Int64Array:
    """A read-only one-dimensional int64 copy; refuses floats, bools, other shapes and values that do not fit.

    What nobody can change any more (read-only, with memory of its own) is returned as it is: copies of large arrays cost
    page faults.
    """
    array = np.asarray(values)
    if array.dtype == np.int64 and array.ndim == 1 and array.flags.owndata and not array.flags.writeable:
        return array
    if array.size == 0 and array.ndim == 1:
        return read_only(np.empty(0, np.int64))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise LayoutError(f"want a one-dimensional integer array, got {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and bool((array > np.uint64(ADDRESS_MAX)).any()):
        raise LayoutError("a value does not fit into int64")
    return read_only(array.astype(np.int64, copy=True))


def head_range(head_total: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """KV heads of one tensor-parallel rank: (first, count).

    With fewer ranks than heads the split is balanced (the first ``head_total % tp_size`` ranks get one more); with more
    ranks than heads each head is replicated on neighbouring ranks.
    """
    _require(_is_count(head_total, 1) and _is_count(tp_size, 1), "head_total and tp_size are at least 1")
    _require(_is_count(tp_rank, 0) and tp_rank < tp_size, f"tp_rank {tp_rank} of {tp_size}")
    if tp_size > head_total:
        return tp_rank * head_total // tp_size, 1
    share, extra = divmod(head_total, tp_size)
    return tp_rank * share + min(tp_rank, extra), share + (tp_rank < extra)


def layer_range(layer_total: int, pp_size: int, pp_rank: int) -> tuple[int, int]:
    """Layers of one pipeline stage: (first, count); the first ``layer_total % pp_size`` stages get one more."""
    _require(_is_count(layer_total, 0) and _is_count(pp_size, 1), "layer_total >= 0 and pp_size >= 1")
    _require(_is_count(pp_rank, 0) and pp_rank < pp_size, f"pp_rank {pp_rank} of {pp_size}")
    share, extra = divmod(layer_total, pp_size)
    return pp_rank * share + min(pp_rank, extra), share + (pp_rank < extra)


@dataclass(frozen=True)
class TokenShare:
    """Which tokens of a request one rank of a context-parallel group holds; the default is all of them.

    Runs of ``interleave_tokens`` consecutive tokens are dealt out in turn: token ``t`` lies on the rank
    ``t // interleave_tokens % size``. vLLM's decode context parallelism is this with its interleave size (1 by default),
    TensorRT-LLM's Helix with the block's tokens; a split into contiguous parts is one with runs as long as a part.

    Attributes:
        rank: Rank within the context-parallel group.
        size: Ranks that share the tokens, >= 1.
        interleave_tokens: Length of a run, >= 1 (count).
    """

    rank: int = 0
    size: int = 1
    interleave_tokens: int = 1

    def __post_init__(self) -> None:
        _require(_is_count(self.size, 1) and self.size <= RANKS_MAX, f"size {self.size!r} of a token share")
        _require(
            _is_count(self.rank, 0) and self.rank < self.size, f"rank {self.rank!r} of {self.size} in a token share"
        )
        _require(
            _is_count(self.interleave_tokens, 1) and self.interleave_tokens <= ADDRESS_MAX // self.size,
            f"interleave_tokens {self.interleave_tokens!r}",
        )

    def count_below(self, token: int) -> int:
        """How many of this rank's tokens lie before a position of the request: the slot that the next one takes."""
        rounds, rest = divmod(token, self.interleave_tokens * self.size)
        within = min(max(rest - self.rank * self.interleave_tokens, 0), self.interleave_tokens)
        return rounds * self.interleave_tokens + within


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one block table and one geometry.

    Attributes:
        group_id: Names the block table in :class:`RequestBlocks` on this side; the other side may number differently.
        layer_ids: Model-wide layer numbers, in the order of the bases, each once.
        key_bases: Address of (block 0, slot 0, first head) of K (or of the latent, or of the state), one per layer, bytes.
        value_bases: The same for V; empty for MLA's single latent and for recurrent state.
        first_head, head_count, head_total: This rank's KV heads within the model's.
        head_dim: Elements per head.
        element_bytes: Bytes per element.
        dtype: Name of the element type; both sides must use the same name.
        block_tokens: Token slots per block.
        block_count: Blocks in the pool; valid ids are 0 … block_count-1.
        block_stride_bytes, head_stride_bytes, token_stride_bytes: See the module's formula.
        opaque: Recurrent state: each block is one state of ``head_dim * element_bytes`` bytes, moved whole whatever
            the token range; ``block_tokens`` and ``head_count`` are then 1.
        token_share: Which tokens this rank holds under context parallelism; a recurrent state is not shared.
    """

    group_id: int
    layer_ids: tuple[int, ...]
    key_bases: tuple[int, ...]
    value_bases: tuple[int, ...]
    first_head: int
    head_count: int
    head_total: int
    head_dim: int
    element_bytes: int
    dtype: str
    block_tokens: int
    block_count: int
    block_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int
    opaque: bool = False
    token_share: TokenShare = TokenShare()

    def __post_init__(self) -> None:
        for name in ("layer_ids", "key_bases", "value_bases"):
            object.__setattr__(self, name, tuple(int(v) for v in getattr(self, name)))
        _require(_is_count(self.group_id, 0), f"group_id {self.group_id!r}")
        _require(len(self.layer_ids) <= LAYERS_MAX, f"{len(self.layer_ids)} layers exceed {LAYERS_MAX}")
        _require(len(set(self.layer_ids)) == len(self.layer_ids), "layer_ids repeat")
        _require(all(0 <= v <= ADDRESS_MAX for v in self.layer_ids), "layer_ids are not negative")
        _require(len(self.key_bases) == len(self.layer_ids), "one key base per layer")
        _require(len(self.value_bases) in (0, len(self.layer_ids)), "one value base per layer, or none at all")
        for name in ("head_count", "head_total", "head_dim", "element_bytes", "block_tokens"):
            _require(_is_count(getattr(self, name), 1), f"{name} is at least 1")
        _require(_is_count(self.first_head, 0), "first_head is not negative")
        _require(self.first_head + self.head_count <= self.head_total, "heads lie within head_total")
        _require(_is_count(self.block_count, 0), "block_count is not negative")
        _require(isinstance(self.dtype, str) and 0 < len(self.dtype) <= 32, "dtype is a short name")
        for name in ("block_stride_bytes", "head_stride_bytes", "token_stride_bytes"):
            _require(_is_count(getattr(self, name), 0), f"{name} is not negative")
        if self.opaque:
            _require(
                self.block_tokens == 1 and self.head_count == 1 and not self.value_bases,
                "opaque: one token, one head, no V",
            )
        _require(isinstance(self.token_share, TokenShare), f"token_share {self.token_share!r} is not a TokenShare")
        _require(not self.opaque or self.token_share.size == 1, "opaque: a state has no tokens to share")
        if self.layer_ids:
            self._check_aliasing()
        last = self.last_byte_offset
        _require(all(0 <= base <= ADDRESS_MAX - last for base in (*self.key_bases, *self.value_bases)), "addresses fit")

    def _check_aliasing(self) -> None:
        """Distinct (block, head, token) must have distinct bytes, or no plan over them could be an exact cover."""
        axes = sorted(
            (stride, count)
            for stride, count in (
                (self.token_stride_bytes, self.block_tokens),
                (self.head_stride_bytes, self.head_count),
                (self.block_stride_bytes, self.block_count),
            )
            if count > 1
        )
        extent = self.head_dim * self.element_bytes
        for stride, count in axes:
            _require(stride >= extent, f"a stride of {stride} B aliases {extent} B beneath it")
            extent = stride * (count - 1) + extent
        _require(extent <= ADDRESS_MAX, "the pool's extent fits into int64")

    @property
    def kv_factor(self) -> int:
        """2 for K and V, 1 for a latent or a state."""
        return 2 if self.value_bases else 1

    @property
    def element_run_bytes(self) -> int:
        """Bytes of one head of one token."""
        return self.head_dim * self.element_bytes

    @property
    def last_byte_offset(self) -> int:
        """Offset from a base to one past the last byte of the pool."""
        if self.block_count == 0:
            return 0
        return (
            (self.block_count - 1) * self.block_stride_bytes
            + (self.block_tokens - 1) * self.token_stride_bytes
            + (self.head_count - 1) * self.head_stride_bytes
            + self.element_run_bytes
        )

    @property
    def token_bytes(self) -> int:
        """Bytes that one token occupies in this group: all layers, factors and heads."""
        return len(self.layer_ids) * self.kv_factor * self.head_count * self.element_run_bytes

    def shape(self) -> tuple[object, ...]:
        """Everything but addresses: what decides who writes which layers and heads."""
        return (
            self.layer_ids,
            self.kv_factor,
            self.first_head,
            self.head_count,
            self.head_total,
            self.head_dim,
            self.element_bytes,
            self.dtype,
            self.block_tokens,
            self.opaque,
            self.token_share,
        )


@dataclass(frozen=True)
class KVLayout:
    """One rank's KV memory.

    Attributes:
        rank: Rank in its instance.
        groups: Layer groups; a layer stands in one group only.
        memory_kind: "DRAM" or "VRAM".
        device_id: Device of VRAM; 0 for DRAM.
        layer_total: Layers of the whole model, count; 0 does not say. Where both sides say it, it must be the same: without
            it a source with more layers than the target looks like one whose other layers are wanted elsewhere.
    """

    rank: int
    groups: tuple[LayerGroup, ...]
    memory_kind: MemoryKind = "DRAM"
    device_id: int = 0
    layer_total: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        _require(_is_count(self.rank, 0), f"rank {self.rank!r}")
        _require(self.memory_kind in ("DRAM", "VRAM"), f"memory_kind {self.memory_kind!r}")
        _require(_is_count(self.device_id, 0), f"device_id {self.device_id!r}")
        _require(len(self.groups) <= GROUPS_MAX, f"{len(self.groups)} groups exceed {GROUPS_MAX}")
        ids = [group.group_id for group in self.groups]
        _require(len(set(ids)) == len(ids), "group ids repeat")
        layers = self.layer_ids
        _require(len(set(layers)) == len(layers), "a layer stands in two groups")
        _require(_is_count(self.layer_total, 0), f"layer_total {self.layer_total!r}")
        beyond = [layer for layer in layers if layer >= self.layer_total > 0]
        _require(not beyond, f"layers {beyond} are beyond the model's {self.layer_total}")

    def sharing_tokens(self, cp_rank: int, cp_size: int, *, interleave_tokens: int) -> KVLayout:
        """The same memory as one of ``cp_size`` context-parallel ranks that share a request's tokens.

        Args:
            cp_rank, cp_size: This rank within its context-parallel group.
            interleave_tokens: Consecutive tokens that lie on one rank, see :class:`TokenShare`.
        """
        share = TokenShare(cp_rank, cp_size, interleave_tokens)
        groups = tuple(group if group.opaque else replace(group, token_share=share) for group in self.groups)
        return replace(self, groups=groups)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Model-wide numbers of the layers held here, group by group."""
        return tuple(layer for group in self.groups for layer in group.layer_ids)

    def group(self, group_id: int) -> LayerGroup:
        """The group of that id."""
        for group in self.groups:
            if group.group_id == group_id:
                return group
        raise LayoutError(f"rank {self.rank} has no layer group {group_id}")

    def regions(self) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of the memory that these pools touch, overlapping and touching pools joined, ascending."""
        spans = sorted(
            (base, base + group.last_byte_offset)
            for group in self.groups
            for base in (*group.key_bases, *group.value_bases)
            if group.block_count
        )
        joined: list[list[int]] = []
        for start, end in spans:
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([start, end])
        return tuple((start, end - start) for start, end in joined)

    @cached_property
    def _fingerprint(self) -> bytes:
        return hashlib.sha256(b"kv-layout.1" + self.to_json()).digest()[:16]

    def fingerprint(self) -> bytes:
        """16 bytes that change with any field, addresses included."""
        return self._fingerprint

    def to_json(self) -> bytes:
        """Canonical JSON: equal layouts give equal bytes."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes | bytearray | memoryview) -> KVLayout:
        """Decode and validate; a peer's bytes are safe to pass. Raises :class:`LayoutError`."""
        return _decode(data, KVLayout)

    @staticmethod
    def uniform(
        *,
        rank: int,
        first_layer: int,
        layer_count: int,
        head_total: int,
        head_dim: int,
        element_bytes: int,
        block_tokens: int,
        block_count: int,
        key_bases: Sequence[int],
        value_bases: Sequence[int] = (),
        first_head: int = 0,
        head_count: int | None = None,
        dtype: str | None = None,
        order: Literal["NHD", "HND"] = "NHD",
        block_stride_bytes: int | None = None,
        head_stride_bytes: int | None = None,
        token_stride_bytes: int | None = None,
        memory_kind: MemoryKind = "DRAM",
        device_id: int = 0,
        group_id: int = 0,
    ) -> KVLayout:
        """A rank whose consecutive layers share one geometry; strides default to the dense ones of ``order``.

        ``order`` is "NHD" (token, head, dim) or "HND" (head, token, dim). ``block_stride_bytes`` defaults to a dense
        block of this rank's heads.
        """
        heads = head_total - first_head if head_count is None else head_count
        run = head_dim * element_bytes
        if order == "NHD":
            head_stride, token_stride = run, heads * run
        elif order == "HND":
            head_stride, token_stride = block_tokens * run, run
        else:
            raise LayoutError(f'order is "NHD" or "HND", not {order!r}')
        group = LayerGroup(
            group_id=group_id,
            layer_ids=tuple(range(first_layer, first_layer + layer_count)),
            key_bases=tuple(key_bases),
            value_bases=tuple(value_bases),
            first_head=first_head,
            head_count=heads,
            head_total=head_total,
            head_dim=head_dim,
            element_bytes=element_bytes,
            dtype=dtype if dtype is not None else f"bytes{element_bytes}",
            block_tokens=block_tokens,
            block_count=block_count,
            block_stride_bytes=block_tokens * heads * run if block_stride_bytes is None else block_stride_bytes,
            head_stride_bytes=head_stride if head_stride_bytes is None else head_stride_bytes,
            token_stride_bytes=token_stride if token_stride_bytes is None else token_stride_bytes,
        )
        return KVLayout(rank=rank, groups=(group,), memory_kind=memory_kind, device_id=device_id)


@dataclass(frozen=True)
class InstanceLayout:
    """All ranks of one instance.

    Attributes:
        instance_id: Names the instance's lifetime: a restarted instance has another.
        ranks: One layout per rank, None where it is not known (yet), in the order of ``order``.
        pp_size, tp_size, adp_size, cp_size: Sizes of the instance: pipeline, tensor, attention-DP and context parallelism.
        order: The four dimensions, outermost first. The default is the field's pp, cp, tp with attention-DP outside:
            ``rank = ((adp * pp_size + pp) * cp_size + cp) * tp_size + tp``.
    """

    instance_id: str
    ranks: tuple[KVLayout | None, ...]
    pp_size: int = 1
    tp_size: int = 1
    adp_size: int = 1
    cp_size: int = 1
    order: tuple[str, ...] = RANK_ORDER

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "order", tuple(self.order))
        _require(isinstance(self.instance_id, str) and len(self.instance_id) <= 256, "instance_id is a short name")
        for name in ("pp_size", "tp_size", "adp_size", "cp_size"):
            _require(_is_count(getattr(self, name), 1), f"{name} is at least 1")
        _require(
            len(self.order) == len(RANK_ORDER) and set(self.order) == set(RANK_ORDER),
            f"order {self.order!r} does not name each of {RANK_ORDER} once",
        )
        world = self.pp_size * self.tp_size * self.adp_size * self.cp_size
        _require(world <= RANKS_MAX, f"{world} ranks exceed {RANKS_MAX}")
        _require(len(self.ranks) == world, f"{len(self.ranks)} layouts for {world} ranks")
        for rank, layout in enumerate(self.ranks):
            _require(layout is None or layout.rank == rank, f"rank {rank} holds another rank's layout")

    def cohort(self, adp_rank: int) -> tuple[int, ...]:
        """Ranks that together hold the requests of one attention-DP rank, ascending."""
        _require(_is_count(adp_rank, 0) and adp_rank < self.adp_size, f"adp_rank {adp_rank} of {self.adp_size}")
        return tuple(rank for rank in range(len(self.ranks)) if self.coordinates(rank)["adp"] == adp_rank)

    def dimensions(self) -> tuple[tuple[str, int], ...]:
        """(name, size) of each dimension, outermost first."""
        return tuple((name, int(getattr(self, f"{name}_size"))) for name in self.order)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands: its rank in each of "adp", "pp", "cp" and "tp"."""
        _require(_is_count(rank, 0) and rank < len(self.ranks), f"rank {rank!r} of {len(self.ranks)}")
        found = {}
        for name, size in reversed(self.dimensions()):
            rank, found[name] = divmod(rank, size)
        return found

    def rank_at(self, *, adp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank that stands there."""
        where, rank = {"adp": adp, "pp": pp, "cp": cp, "tp": tp}, 0
        for name, size in self.dimensions():
            _require(_is_count(where[name], 0) and where[name] < size, f"{name} {where[name]!r} of {size}")
            rank = rank * size + where[name]
        return rank

    def complete(self) -> bool:
        """Whether every rank's layout is known."""
        return all(layout is not None for layout in self.ranks)

    @cached_property
    def _fingerprint(self) -> bytes:
        return hashlib.sha256(b"kv-instance.1" + self.to_json()).digest()[:16]

    def fingerprint(self) -> bytes:
        """16 bytes that change with any field of any rank."""
        return self._fingerprint

    def to_json(self) -> bytes:
        """Canonical JSON: equal instances give equal bytes."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes | bytearray | memoryview) -> InstanceLayout:
        """Decode and validate; a peer's bytes are safe to pass. Raises :class:`LayoutError`."""
        return _decode(data, InstanceLayout)

    @staticmethod
    def single(layout: KVLayout, instance_id: str = "single") -> InstanceLayout:
        """An instance of one rank; whatever the layout's rank was, it is rank 0 of this instance."""
        return InstanceLayout(instance_id=instance_id, ranks=(replace(layout, rank=0),))


def _decode(data: bytes | bytearray | memoryview, kind: type[_Layout]) -> _Layout:
    if len(data) > LAYOUT_BYTES_MAX:
        raise LayoutError(f"{len(data)} B exceed {LAYOUT_BYTES_MAX}", reason=Reason.TOO_LARGE)
    try:
        return msgspec.json.decode(data, type=kind, strict=True)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, LayoutError):
            raise cause from error
        raise LayoutError(str(error), reason=Reason.BAD_FIELD) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutError(f"not a layout: {error}", reason=Reason.BAD_FIELD) from error


class PeerLayouts:
    """Instances known here, registered lazily and bounded; least recently used ones leave first.

    The receiver needs the sender instance's metadata only to derive a bounce plan, so it is fetched at that moment and
    inside the part that may still fall back: a fetch that fails is a :class:`Refusal`, never an error of the request.
    Not thread-safe: one owner.
    """

    def __init__(self, instances_max: int = 1024) -> None:
        _require(_is_count(instances_max, 1), "instances_max is at least 1")
        self._instances_max = instances_max
        self._instances: OrderedDict[str, InstanceLayout] = OrderedDict()

    def __len__(self) -> int:
        return len(self._instances)

    def get(self, instance_id: str) -> InstanceLayout | None:
        """What is registered, without fetching."""
        found = self._instances.get(instance_id)
        if found is not None:
            self._instances.move_to_end(instance_id)
        return found

    def register(self, instance: InstanceLayout) -> None:
        """Remember an instance; a second registration of the same id may fill in ranks but not change one.

        Raises:
            LayoutError: The id is known with other contents: a restarted instance must have another id.
        """
        known = self._instances.get(instance.instance_id)
        if known is not None:
            if known.dimensions() != instance.dimensions() or any(
                old is not None and new is not None and old != new
                for old, new in zip(known.ranks, instance.ranks, strict=False)
            ):
                raise LayoutError(f"instance {instance.instance_id!r} is known with other contents")
            merged = tuple(
                new if new is not None else old for old, new in zip(known.ranks, instance.ranks, strict=True)
            )
            instance = replace(instance, ranks=merged)
        self._instances[instance.instance_id] = instance
        self._instances.move_to_end(instance.instance_id)
        while len(self._instances) > self._instances_max:
            self._instances.popitem(last=False)

    def forget(self, instance_id: str) -> None:
        """Drop an instance; unknown ids are ignored."""
        self._instances.pop(instance_id, None)

    def resolve(self, instance_id: str, fetch: Callable[[], InstanceLayout | None]) -> InstanceLayout | Refusal:
        """The complete instance, fetched and registered when it is not known in full.

        ``fetch`` is the caller's (a cached handshake, a local lookup). Whatever it raises, and an answer that is still
        incomplete, is a refusal with ``RANK_METADATA_MISSING``: this runs before any reservation.
        """
        known = self.get(instance_id)
        if known is not None and known.complete():
            return known
        try:
            fetched = fetch()
            if fetched is None or fetched.instance_id != instance_id:
                return Refusal(Reason.RANK_METADATA_MISSING, f"no metadata of instance {instance_id!r}")
            self.register(fetched)
        except (KVTransferError, LookupError, OSError, ValueError, TypeError, RuntimeError) as error:
            return Refusal(Reason.RANK_METADATA_MISSING, f"instance {instance_id!r}: {type(error).__name__}: {error}")
        found = self._instances[instance_id]
        if not found.complete():
            missing = [rank for rank, layout in enumerate(found.ranks) if layout is None]
            return Refusal(Reason.RANK_METADATA_MISSING, f"instance {instance_id!r} lacks ranks {missing}")
        return found


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Blocks of one request in one layer group.

    Attributes:
        block_ids: int64, shape (blocks,), read-only copy. ``block_ids[i]`` holds the tokens
            ``first_token + i * block_tokens`` onwards; -1 is an evicted or absent block, which is not moved.
        first_token: Position of the first slot of ``block_ids[0]``: a multiple of the group's ``block_tokens``. Under context
            parallelism it counts the tokens that this rank holds, not those of the request.
    """

    block_ids: Int64Array
    first_token: int = 0

    def __post_init__(self) -> None:
        ids = frozen_int64(self.block_ids)
        if ids.size and int(ids.min()) < -1:
            raise LayoutError("a block id is -1 (evicted) or not negative")
        _require(_is_count(self.first_token, 0), f"first_token {self.first_token!r}")
        object.__setattr__(self, "block_ids", ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockTable):
            return NotImplemented
        return self.first_token == other.first_token and np.array_equal(self.block_ids, other.block_ids)

    def __hash__(self) -> int:
        return hash((self.first_token, self.block_ids.tobytes()))


@dataclass(frozen=True)
class RequestBlocks:
    """One request's block tables on one side, by that side's group id."""

    tables: Mapping[int, BlockTable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(len(self.tables) <= GROUPS_MAX, f"{len(self.tables)} tables exceed {GROUPS_MAX}")
        ordered = {int(key): self.tables[key] for key in sorted(self.tables)}
        _require(all(key >= 0 for key in ordered), "group ids are not negative")
        _require(all(isinstance(table, BlockTable) for table in ordered.values()), "tables are BlockTable")
        object.__setattr__(self, "tables", ordered)

    @staticmethod
    def single(block_ids: npt.ArrayLike, first_token: int = 0, group_id: int = 0) -> RequestBlocks:
        """The table of a model with one layer group."""
        return RequestBlocks({group_id: BlockTable(np.asarray(block_ids), first_token)})


@dataclass(frozen=True)
class TokenRange:
    """Tokens ``start`` … ``end - 1`` are moved.

    The front trim is what the target already has, the end trim what the source has not computed.
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        _require(_is_count(self.start, 0) and _is_count(self.end, 0), "positions are not negative integers")
        _require(self.start <= self.end, f"tokens {self.start} … {self.end}")

    @property
    def count(self) -> int:
        """Tokens in the range."""
        return self.end - self.start
