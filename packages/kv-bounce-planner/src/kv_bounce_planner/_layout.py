"""What lies where: layouts of KV pools, block tables and token ranges.

One formula covers the field's engines. The element of layer ``l``, factor ``f`` (K or V), block ``b``, token slot ``s``,
KV head ``h`` and dimension ``d`` stands at::

    bases[f][l] + b * block_stride + s * token_stride + (h - first_head) * head_stride + d * element

so per-layer or joined pools, separate or interleaved K and V, NHD and HND, padded blocks and differing block sizes are
numbers, not cases. Positions are explicit everywhere: a block table says which token its first block starts with, so a
trimmed table can never be read as trimmed at the other end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

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
        )


@dataclass(frozen=True)
class KVLayout:
    """One rank's KV memory.

    Attributes:
        rank: Rank in its instance.
        groups: Layer groups; a layer stands in one group only.
        memory_kind: "DRAM" or "VRAM".
        device_id: Device of VRAM; 0 for DRAM.
    """

    rank: int
    groups: tuple[LayerGroup, ...]
    memory_kind: MemoryKind = "DRAM"
    device_id: int = 0

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
        ranks: One layout per rank, None where it is not known (yet). Rank order: attention-DP outermost, then
            pipeline, then tensor: ``rank = (adp * pp_size + pp) * tp_size + tp``.
        pp_size, tp_size, adp_size: Sizes of the instance.
    """

    instance_id: str
    ranks: tuple[KVLayout | None, ...]
    pp_size: int = 1
    tp_size: int = 1
    adp_size: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        _require(isinstance(self.instance_id, str) and len(self.instance_id) <= 256, "instance_id is a short name")
        for name in ("pp_size", "tp_size", "adp_size"):
            _require(_is_count(getattr(self, name), 1), f"{name} is at least 1")
        world = self.pp_size * self.tp_size * self.adp_size
        _require(world <= RANKS_MAX, f"{world} ranks exceed {RANKS_MAX}")
        _require(len(self.ranks) == world, f"{len(self.ranks)} layouts for {world} ranks")
        for rank, layout in enumerate(self.ranks):
            _require(layout is None or layout.rank == rank, f"rank {rank} holds another rank's layout")

    def cohort(self, adp_rank: int) -> tuple[int, ...]:
        """Ranks that together hold the requests of one attention-DP rank, ascending."""
        _require(_is_count(adp_rank, 0) and adp_rank < self.adp_size, f"adp_rank {adp_rank} of {self.adp_size}")
        size = self.pp_size * self.tp_size
        return tuple(range(adp_rank * size, (adp_rank + 1) * size))

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
            same_sizes = (known.pp_size, known.tp_size, known.adp_size) == (
                instance.pp_size,
                instance.tp_size,
                instance.adp_size,
            )
            if not same_sizes or any(
                old is not None and new is not None and old != new
                for old, new in zip(known.ranks, instance.ranks, strict=False)
            ):
                raise LayoutError(f"instance {instance.instance_id!r} is known with other contents")
            merged = tuple(
                new if new is not None else old for old, new in zip(known.ranks, instance.ranks, strict=True)
            )
            instance = InstanceLayout(
                instance.instance_id, merged, instance.pp_size, instance.tp_size, instance.adp_size
            )
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
        first_token: Position of the first slot of ``block_ids[0]``: a multiple of the group's ``block_tokens``.
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


# --- constructors for the shapes of the field's engines ---------------------------------------------------------------


@dataclass(frozen=True)
class TensorView:
    """Address, shape and strides of a tensor, without the library that made it.

    Attributes:
        address: Bytes.
        shape: Elements per axis.
        strides_bytes: Bytes per step of each axis.
        element_bytes: Bytes per element.
        dtype: Name of the element type.
    """

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    element_bytes: int
    dtype: str = "unknown"

    @staticmethod
    def of(tensor: Any) -> TensorView:
        """View a torch tensor or a numpy array (read by attribute; neither library is imported for it)."""
        if hasattr(tensor, "data_ptr"):
            element = int(tensor.element_size())
            return TensorView(
                int(tensor.data_ptr()),
                tuple(int(n) for n in tensor.shape),
                tuple(int(n) * element for n in tensor.stride()),
                element,
                str(tensor.dtype).removeprefix("torch."),
            )
        array = np.asarray(tensor)
        return TensorView(
            int(array.__array_interface__["data"][0]), array.shape, array.strides, array.itemsize, str(array.dtype)
        )


Axis = Literal["kv", "block", "token", "head", "dim", "layer", "slot"]


def from_tensors(
    *,
    rank: int,
    layer_ids: Sequence[int],
    tensors: Sequence[TensorView],
    axes: Sequence[Axis],
    head_total: int,
    first_head: int = 0,
    value_tensors: Sequence[TensorView] = (),
    block_tokens: int | None = None,
    memory_kind: MemoryKind = "DRAM",
    device_id: int = 0,
    group_id: int = 0,
) -> KVLayout:
    """Read a layout off the engine's own tensors.

    Args:
        rank: Rank in its instance.
        layer_ids: Model-wide layer numbers, one per tensor; or one per index of the "layer" axis of a single tensor.
        tensors: One per layer, or a single one with a "layer" axis. With ``value_tensors`` these hold K only.
        axes: What each axis of a tensor is, outermost first. "kv" has size 2 (K, then V). "slot" is block and token
            flattened (needs ``block_tokens``). "head" may be absent (MLA's latent). "dim" must be dense.
        head_total, first_head: The model's KV heads and the first one held here.
        value_tensors: V, where K and V are separate tensors.
        block_tokens: Page size, for "slot".
        memory_kind, device_id, group_id: See :class:`KVLayout`.

    Raises:
        LayoutError: Axes and shapes disagree, tensors differ among themselves, or dim is strided.
    """
    _require(len(tensors) > 0, "at least one tensor")
    first = tensors[0]
    names = list(axes)
    _require(len(set(names)) == len(names) == len(first.shape), f"axes {names} for shape {first.shape}")
    for view in (*tensors, *value_tensors):
        _require(
            (view.shape, view.strides_bytes, view.element_bytes)
            == (first.shape, first.strides_bytes, first.element_bytes),
            "tensors of one group have one shape",
        )
    size = dict(zip(names, first.shape, strict=True))
    stride = dict(zip(names, first.strides_bytes, strict=True))
    _require("dim" in size and stride["dim"] == first.element_bytes, "the dim axis is dense")
    if "slot" in size:
        _require("block" not in size and "token" not in size, "slot stands for block and token")
        _require(block_tokens is not None and block_tokens >= 1, "slot needs block_tokens")
        tokens = int(block_tokens or 1)
        blocks, block_stride, token_stride = size["slot"] // tokens, tokens * stride["slot"], stride["slot"]
    else:
        _require("block" in size and "token" in size, "axes name block and token, or slot")
        blocks, tokens = size["block"], size["token"]
        block_stride, token_stride = stride["block"], stride["token"]
        _require(block_tokens in (None, tokens), f"block_tokens {block_tokens} and a token axis of {tokens}")
    if "layer" in size:
        _require(
            len(tensors) == 1 and size["layer"] == len(layer_ids), "one tensor with a layer axis of that many layers"
        )
        keys = [first.address + i * stride["layer"] for i in range(size["layer"])]
        values = [view.address + i * stride["layer"] for view in value_tensors for i in range(size["layer"])]
    else:
        _require(len(tensors) == len(layer_ids), "one tensor per layer")
        keys, values = [view.address for view in tensors], [view.address for view in value_tensors]
    if "kv" in size:
        _require(not value_tensors and size["kv"] == 2, "a kv axis has size 2 and no separate V")
        values = [base + stride["kv"] for base in keys]
    group = LayerGroup(
        group_id=group_id,
        layer_ids=tuple(layer_ids),
        key_bases=tuple(keys),
        value_bases=tuple(values),
        first_head=first_head,
        head_count=size.get("head", 1),
        head_total=head_total,
        head_dim=size["dim"],
        element_bytes=first.element_bytes,
        dtype=first.dtype,
        block_tokens=tokens,
        block_count=blocks,
        block_stride_bytes=block_stride,
        head_stride_bytes=stride.get("head", size["dim"] * first.element_bytes),
        token_stride_bytes=token_stride,
    )
    return KVLayout(rank=rank, groups=(group,), memory_kind=memory_kind, device_id=device_id)


def from_vllm(
    *,
    rank: int,
    layer_ids: Sequence[int],
    tensors: Iterable[Any],
    head_total: int,
    first_head: int = 0,
    attention: Literal["flash_attn", "flashinfer", "mla"] = "flash_attn",
    memory_kind: MemoryKind = "VRAM",
    device_id: int = 0,
) -> KVLayout:
    """vLLM's per-layer cache tensors: (2, blocks, tokens, heads, dim) for "flash_attn", (blocks, 2, tokens, heads, dim)
    for "flashinfer", (blocks, tokens, dim) for "mla". HND is the same shape with other strides, so it is read as it is.
    """
    axes: dict[str, tuple[Axis, ...]] = {
        "flash_attn": ("kv", "block", "token", "head", "dim"),
        "flashinfer": ("block", "kv", "token", "head", "dim"),
        "mla": ("block", "token", "dim"),
    }
    _require(attention in axes, f"attention {attention!r}")
    views = [tensor if isinstance(tensor, TensorView) else TensorView.of(tensor) for tensor in tensors]
    return from_tensors(
        rank=rank,
        layer_ids=layer_ids,
        tensors=views,
        axes=axes[attention],
        head_total=1 if attention == "mla" else head_total,
        first_head=0 if attention == "mla" else first_head,
        memory_kind=memory_kind,
        device_id=device_id,
    )


def from_sglang(
    *,
    rank: int,
    layer_ids: Sequence[int],
    key_buffers: Iterable[Any],
    value_buffers: Iterable[Any] = (),
    page_size: int,
    head_total: int,
    first_head: int = 0,
    memory_kind: MemoryKind = "VRAM",
    device_id: int = 0,
) -> KVLayout:
    """SGLang's token pools: per layer K and V of shape (slots, heads, dim), pages of ``page_size`` slots; for MLA one
    buffer of shape (slots, 1, latent) and no V.
    """
    keys = [tensor if isinstance(tensor, TensorView) else TensorView.of(tensor) for tensor in key_buffers]
    values = [tensor if isinstance(tensor, TensorView) else TensorView.of(tensor) for tensor in value_buffers]
    return from_tensors(
        rank=rank,
        layer_ids=layer_ids,
        tensors=keys,
        value_tensors=values,
        axes=("slot", "head", "dim"),
        block_tokens=page_size,
        head_total=head_total,
        first_head=first_head,
        memory_kind=memory_kind,
        device_id=device_id,
    )


def from_tensorrt_llm(
    *,
    rank: int,
    layer_ids: Sequence[int],
    pool: Any,
    head_total: int,
    first_head: int = 0,
    mla: bool = False,
    memory_kind: MemoryKind = "VRAM",
    device_id: int = 0,
    group_id: int = 0,
) -> KVLayout:
    """TensorRT-LLM's primary pool of one window size: (blocks, layers, 2, heads, tokens, dim), or for MLA
    (blocks, layers, 1, tokens, dim): a block holds every layer, HND.
    """
    view = pool if isinstance(pool, TensorView) else TensorView.of(pool)
    axes: tuple[Axis, ...] = ("block", "layer", "kv", "head", "token", "dim")
    if mla:
        _require(len(view.shape) == 5 and view.shape[2] == 1, "an MLA pool is (blocks, layers, 1, tokens, dim)")
        axes = ("block", "layer", "head", "token", "dim")
    return from_tensors(
        rank=rank,
        layer_ids=layer_ids,
        tensors=[view],
        axes=axes,
        head_total=1 if mla else head_total,
        first_head=0 if mla else first_head,
        memory_kind=memory_kind,
        device_id=device_id,
        group_id=group_id,
    )


@runtime_checkable
class PoolMemory(Protocol):
    """Attributes that :func:`from_kv_memory` reads; any engine's description of its pool can offer them."""

    layer_base_addresses: Sequence[int]
    block_count: int
    block_tokens: int
    block_stride_bytes: int
    kv_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int
    head_dim: int
    element_bytes: int
    memory_kind: str
    device_id: int


def from_kv_memory(
    memory: PoolMemory,
    *,
    rank: int,
    layer_ids: Sequence[int],
    head_total: int,
    first_head: int = 0,
    head_count: int | None = None,
    dtype: str | None = None,
    kv_factor: Literal[1, 2] = 2,
) -> KVLayout:
    """Read a pool's own description: V of a layer stands ``kv_stride_bytes`` after its K."""
    keys = tuple(int(address) for address in memory.layer_base_addresses)
    return KVLayout(
        rank=rank,
        groups=(
            LayerGroup(
                group_id=0,
                layer_ids=tuple(layer_ids),
                key_bases=keys,
                value_bases=tuple(base + int(memory.kv_stride_bytes) for base in keys) if kv_factor == 2 else (),
                first_head=first_head,
                head_count=head_total - first_head if head_count is None else head_count,
                head_total=head_total,
                head_dim=int(memory.head_dim),
                element_bytes=int(memory.element_bytes),
                dtype=dtype if dtype is not None else f"bytes{int(memory.element_bytes)}",
                block_tokens=int(memory.block_tokens),
                block_count=int(memory.block_count),
                block_stride_bytes=int(memory.block_stride_bytes),
                head_stride_bytes=int(memory.head_stride_bytes),
                token_stride_bytes=int(memory.token_stride_bytes),
            ),
        ),
        memory_kind="VRAM" if memory.memory_kind == "VRAM" else "DRAM",
        device_id=int(memory.device_id),
    )
