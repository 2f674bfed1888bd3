"""How a copy list is cut for a device: words by alignment, tiles by size. Pure numpy, so it is tested without a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kv_bounce_planner._errors import LayoutError
from kv_bounce_planner.layout.model import Int64Array

#: Widest access, bytes.
WORD_BYTES_MAX = 16
#: Fragments from this size on are peeled: an unaligned head and tail, and an aligned body between them.
PEEL_BYTES_MIN = 64


@dataclass(frozen=True)
class KernelShape:
    """How tiles are cut and copied.

    Attributes:
        tile_bytes: Bytes of a full tile (a power of two, at least 16).
        tiles_per_program: Tiles that one program copies, all loads first (a power of two).
        num_warps: Warps per program (a power of two).
    """

    tile_bytes: int = 8192
    tiles_per_program: int = 1
    num_warps: int = 4

    def __post_init__(self) -> None:
        for value in (self.tile_bytes, self.tiles_per_program, self.num_warps):
            if value < 1 or value & (value - 1):
                raise LayoutError(f"{self}: all three must be powers of two")
        if self.tile_bytes < WORD_BYTES_MAX:
            raise LayoutError(f"{self}: a tile must hold at least one word of {WORD_BYTES_MAX} bytes")


def word_bytes_of(*arrays: Int64Array) -> int:
    """The widest word (16, 8, 4, 2 or 1 bytes) of which every value is a multiple."""
    merged = WORD_BYTES_MAX
    for array in arrays:
        if len(array):
            merged |= int(np.bitwise_or.reduce(array))
    return merged & -merged


def align_classes(
    source: Int64Array, target: Int64Array, sizes: Int64Array
) -> Iterator[tuple[int, Int64Array, Int64Array, Int64Array]]:
    """Split a list by the widest word that each fragment allows: (word bytes, source, target, sizes), widest first.

    One odd fragment narrows nothing but itself. A large fragment whose two addresses are equally misaligned is peeled, so
    that its body still goes by the widest word.
    """
    if len(sizes) == 0:
        return
    if word_bytes_of(source, target, sizes) == WORD_BYTES_MAX:
        yield WORD_BYTES_MAX, source, target, sizes
        return
    odd = ((source | target | sizes) & (WORD_BYTES_MAX - 1)) != 0
    peel = odd & (((source - target) & (WORD_BYTES_MAX - 1)) == 0) & (sizes >= PEEL_BYTES_MIN)
    if bool(peel.any()):
        from_at, to_at, length = source[peel], target[peel], sizes[peel]
        head = -from_at & (WORD_BYTES_MAX - 1)
        tail = (length - head) & (WORD_BYTES_MAX - 1)
        body = length - head - tail
        source = np.concatenate([source[~peel], from_at, from_at + head, from_at + head + body])
        target = np.concatenate([target[~peel], to_at, to_at + head, to_at + head + body])
        sizes = np.concatenate([sizes[~peel], head, body, tail])
        present = sizes > 0
        source, target, sizes = source[present], target[present], sizes[present]
    merged = source | target | sizes | WORD_BYTES_MAX
    word = merged & -merged
    for width in (16, 8, 4, 2, 1):
        index = np.flatnonzero(word == width)
        if len(index):
            yield width, source[index], target[index], sizes[index]


def cut_tiles(
    source: Int64Array, target: Int64Array, sizes: Int64Array, tile_bytes: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(source, target, sizes) of the flattened tiles: the only partial tiles are each fragment's last."""
    counts = -(-sizes // tile_bytes)
    if len(counts) == 0 or int(counts.max()) == 1:
        return source, target, sizes
    origin = np.repeat(np.arange(len(counts)), counts)
    within = (np.arange(len(origin), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_bytes
    return source[origin] + within, target[origin] + within, np.minimum(sizes[origin] - within, tile_bytes)


def default_shape(sizes: Int64Array) -> KernelShape:
    """Tiles no larger than what most bytes come in, so that small fragments do not idle lanes.

    Source: docs/design.md#gather-and-scatter; ``benchmarks/bench_gpu.py`` sweeps the shapes.
    """
    if len(sizes) == 0:
        return KernelShape()
    order = np.sort(sizes)
    median = int(order[np.searchsorted(np.cumsum(order), int(order.sum()) // 2)])
    tile = 1 << max(min(median.bit_length() - 1, 13), 7)
    return KernelShape(tile_bytes=tile, tiles_per_program=max(1, 4096 // tile), num_warps=4)
