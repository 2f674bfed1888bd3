"""Layouts read off the engines' own tensors and pools: by attribute, so none of their libraries is imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from kv_bounce_planner.layout.model import KVLayout, LayerGroup, MemoryKind, _require


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
    attention: Literal["flash_attn", "flashinfer", "mla", "cpu_attn"] = "flash_attn",
    memory_kind: MemoryKind = "VRAM",
    device_id: int = 0,
) -> KVLayout:
    """vLLM's per-layer cache tensors: (2, blocks, tokens, heads, dim) for "flash_attn", (blocks, 2, tokens, heads, dim)
    for "flashinfer", (blocks, tokens, dim) for "mla". HND is the same shape with other strides, so it is read as it is.

    "cpu_attn" is the CPU build's vector kernel: (blocks, heads, tokens, 2 * dim), where a head of a block holds K with its
    tokens innermost (dim, token), then V (token, dim). Whatever shows tokens innermost has a stride per head and one per
    element of a head, so each head of each layer is a layer of its own here, K in group 0 and V in group 1, both with the
    request's one block table; tensor parallelism is then ``InstanceLayout(pp_size=ranks)``.
    """
    axes: dict[str, tuple[Axis, ...]] = {
        "flash_attn": ("kv", "block", "token", "head", "dim"),
        "flashinfer": ("block", "kv", "token", "head", "dim"),
        "mla": ("block", "token", "dim"),
    }
    _require(attention in axes or attention == "cpu_attn", f"attention {attention!r}")
    views = [tensor if isinstance(tensor, TensorView) else TensorView.of(tensor) for tensor in tensors]
    if attention == "cpu_attn":
        groups = _tokens_innermost(layer_ids, views, head_total, first_head)
        return KVLayout(rank=rank, groups=groups, memory_kind=memory_kind, device_id=device_id)
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


def _tokens_innermost(
    layer_ids: Sequence[int], views: Sequence[TensorView], head_total: int, first_head: int
) -> tuple[LayerGroup, LayerGroup]:
    """K and V of (blocks, heads, tokens, 2 * dim) tensors whose K lies as (dim, token) within a head of a block."""
    _require(len(views) == len(layer_ids) > 0, "one tensor per layer")
    first = views[0]
    _require(
        all(
            (v.shape, v.strides_bytes, v.element_bytes) == (first.shape, first.strides_bytes, first.element_bytes)
            for v in views
        ),
        "tensors of one group have one shape",
    )
    _require(
        len(first.shape) == 4 and first.shape[3] % 2 == 0,
        f"shape {first.shape} is not (blocks, heads, tokens, 2 * dim)",
    )
    blocks, heads, tokens, joined = first.shape
    block_stride, head_stride, token_stride, element_stride = first.strides_bytes
    element, dim = first.element_bytes, joined // 2
    _require(element_stride == element and token_stride == joined * element, "a head of a block is dense")
    _require(0 <= first_head <= head_total - heads, "heads lie within head_total")
    names = [2 * (layer * head_total + first_head + head) for layer in layer_ids for head in range(heads)]
    bases = [view.address + head * head_stride for view in views for head in range(heads)]
    keys = LayerGroup(
        group_id=0,
        layer_ids=tuple(names),
        key_bases=tuple(bases),
        value_bases=(),
        first_head=0,
        head_count=dim,
        head_total=dim,
        head_dim=1,
        element_bytes=element,
        dtype=first.dtype,
        block_tokens=tokens,
        block_count=blocks,
        block_stride_bytes=block_stride,
        head_stride_bytes=tokens * element,
        token_stride_bytes=element,
    )
    values = replace(
        keys,
        group_id=1,
        layer_ids=tuple(name + 1 for name in names),
        key_bases=tuple(base + tokens * dim * element for base in bases),
        head_count=1,
        head_total=1,
        head_dim=dim,
        head_stride_bytes=dim * element,
        token_stride_bytes=dim * element,
    )
    return keys, values


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
