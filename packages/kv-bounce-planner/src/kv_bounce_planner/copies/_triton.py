"""Gather and scatter on a CUDA device by pointer: one Triton kernel over flattened tiles.

Every fragment is cut into tiles of equal size when the list is prepared, so the grid does not depend on the largest
fragment and a skewed list wastes nothing but its last partial tiles. Each program copies a few tiles, loads before
stores, with the widest word that every address and size allows (16 bytes where it can). The tile table is resident on the
device from ``prepare`` on and belongs to the prepared list, never to the stream: two lists in flight cannot overwrite each
other's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kv_bounce_planner._errors import LayoutError
from kv_bounce_planner.copies._torch import EventHandle
from kv_bounce_planner.copies.gather import CopyHandle, CopyTable
from kv_bounce_planner.copies.tiles import KernelShape, align_classes, cut_tiles, default_shape
from kv_bounce_planner.layout.model import Int64Array


@triton.jit(do_not_specialize=["tiles"])  # type: ignore[untyped-decorator]
def _copy_tiles(  # type: ignore[no-untyped-def]  # the kernel language takes no annotations but its own
    source_table,
    target_table,
    count_table,
    tiles,
    ELEMENTS: tl.constexpr,
    TILES: tl.constexpr,
    WORD: tl.constexpr,
):
    """ELEMENTS words per tile, TILES tiles per program, all loads before the first store.

    WORD is the divisor of every address and size: 16 (pairs of int64, one 16-byte access), 8, 4, 2 or 1.
    """
    row = tl.program_id(0) * TILES + tl.arange(0, TILES)
    lane = tl.arange(0, ELEMENTS)
    live = row < tiles
    source = tl.load(source_table + row, mask=live, other=0)
    target = tl.load(target_table + row, mask=live, other=0)
    count = tl.load(count_table + row, mask=live, other=0)
    mask = lane[None, :] < count[:, None]
    if WORD >= 8:
        source_at = source.to(tl.pointer_type(tl.int64))[:, None] + lane[None, :]
        target_at = target.to(tl.pointer_type(tl.int64))[:, None] + lane[None, :]
    elif WORD == 4:
        source_at = source.to(tl.pointer_type(tl.int32))[:, None] + lane[None, :]
        target_at = target.to(tl.pointer_type(tl.int32))[:, None] + lane[None, :]
    elif WORD == 2:
        source_at = source.to(tl.pointer_type(tl.int16))[:, None] + lane[None, :]
        target_at = target.to(tl.pointer_type(tl.int16))[:, None] + lane[None, :]
    else:
        source_at = source.to(tl.pointer_type(tl.int8))[:, None] + lane[None, :]
        target_at = target.to(tl.pointer_type(tl.int8))[:, None] + lane[None, :]
    if WORD == 16:
        # Without the hints an access is 8 bytes wide: the compiler cannot see through a table of addresses.
        source_at = tl.multiple_of(source_at, [1, 16])
        target_at = tl.multiple_of(target_at, [1, 16])
        mask = tl.max_constancy(mask, [1, 2])
    tl.store(target_at, tl.load(source_at, mask=mask), mask=mask)


@dataclass(frozen=True)
class TileLaunch:
    """Tiles of one word width, resident on the device: int64 (3, tiles) of source, target and words."""

    word_bytes: int
    tiles: int
    table: Any


@dataclass(frozen=True)
class TritonPrepared:
    """A list resident on the device: one launch per word width, nearly always one."""

    total_bytes: int
    shape: KernelShape
    launches: tuple[TileLaunch, ...]


def tile_tables(
    source: Int64Array, target: Int64Array, sizes: Int64Array, shape: KernelShape, device: Any
) -> tuple[TileLaunch, ...]:
    """Cut a checked list and copy its tables to the device (on the current stream)."""
    launches = []
    for word, from_at, to_at, length in align_classes(source, target, sizes):
        from_at, to_at, length = cut_tiles(from_at, to_at, length, shape.tile_bytes)
        # Rows begin at multiples of 128 B, so that one compiled kernel serves lists of every length.
        rows = np.zeros((3, -(-len(length) // 16) * 16), np.int64)
        rows[0, : len(length)], rows[1, : len(length)] = from_at, to_at
        rows[2, : len(length)] = length // min(word, 8)
        launches.append(TileLaunch(word, len(length), torch.from_numpy(rows).to(device)))
    return tuple(launches)


def launch_tiles(part: TileLaunch, shape: KernelShape) -> None:
    """One kernel on the current stream; for timing and for capture into a graph."""
    grid = (max(-(-part.tiles // shape.tiles_per_program), 1),)
    _copy_tiles[grid](
        part.table[0],
        part.table[1],
        part.table[2],
        part.tiles,
        ELEMENTS=shape.tile_bytes // min(part.word_bytes, 8),
        TILES=shape.tiles_per_program,
        WORD=part.word_bytes,
        num_warps=shape.num_warps,
    )


class TritonCopier:
    """Copies lists of fragments on one CUDA device.

    Args:
        device: A CUDA device.
        stream: A CUDA stream; None makes one of its own.
        shape: Tile and grid shape; None picks by fragment size.
    """

    def __init__(self, device: Any = "cuda", *, stream: Any = None, shape: KernelShape | None = None) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise LayoutError("TritonCopier copies on CUDA devices; HostCopier and TorchCopier serve the others")
        self._stream = stream if stream is not None else torch.cuda.Stream(device=self.device)
        # Tables are uploaded beside the copies: an upload waits for its own stream, and must not wait for a running copy.
        self._uploads = torch.cuda.Stream(device=self.device)
        self._shape = shape

    @property
    def stream(self) -> Any:
        """The copier's own stream."""
        return self._stream

    def prepare(self, source_addresses: Int64Array, target_addresses: Int64Array, sizes: Int64Array) -> TritonPrepared:
        """Check a list, cut it into tiles and put the tables on the device, there when this returns. Raises LayoutError."""
        checked = CopyTable.of(source_addresses, target_addresses, sizes)
        shape = self._shape or default_shape(checked.sizes)
        with torch.cuda.device(self.device), torch.cuda.stream(self._uploads):
            launches = tile_tables(
                checked.source_addresses, checked.target_addresses, checked.sizes, shape, self.device
            )
        self._uploads.synchronize()
        for part in launches:
            # The allocator must not hand the table out again while a copy reads it, even if its handle was dropped.
            part.table.record_stream(self._stream)
        return TritonPrepared(checked.total_bytes, shape, launches)

    def submit(self, prepared: Any, *, after: Any = None) -> CopyHandle:
        """Launch on the copier's stream, after the event ``after`` where given. The handle keeps the tables alive."""
        if not isinstance(prepared, TritonPrepared):
            raise LayoutError("a list prepared by another copier")
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self.launch(prepared)
            event = torch.cuda.Event()
            event.record(self._stream)
        return EventHandle(event, (prepared,))

    def warm_up(self) -> int:
        """Compile the kernels of the default shapes ahead, so that no transfer waits for a compiler. Returns how many."""
        shapes = {default_shape(np.array([1 << bit], np.int64)) for bit in range(7, 14)}
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            table = torch.zeros((3, 16), dtype=torch.int64, device=self.device)
            for shape in shapes:
                for word in (16, 8):
                    launch_tiles(TileLaunch(word, 0, table), shape)
        self._stream.synchronize()
        return 2 * len(shapes)

    def launch(self, prepared: TritonPrepared) -> None:
        """The kernels alone, on the current stream."""
        for part in prepared.launches:
            launch_tiles(part, prepared.shape)
