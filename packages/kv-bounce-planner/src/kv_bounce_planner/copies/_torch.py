"""Gather and scatter on a torch device by pointer, with torch alone.

For devices without Triton, and the reference for it. Fragments are copied by indexed assignment over the widest word of up to
8 bytes that each allows; never over uint8 when a wider word fits (several times slower).
On CUDA the copy runs on a stream of its own and a handle's event says when it is done; the calling stream is not waited
for: the caller orders its own writes before ``submit`` (``after=``). On CPU the numpy copier is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kv_bounce_planner._errors import LayoutError, TransportError
from kv_bounce_planner.copies.gather import CopyHandle, CopyTable, HostCopier, PreparedCopy
from kv_bounce_planner.copies.tiles import align_classes, cut_tiles
from kv_bounce_planner.layout.model import Int64Array

#: Words after which an indexed assignment ends (it copies less than twice as many): its index tensors take 16 B a word.
WORDS_MAX = 1 << 24


class _DeviceSpan:
    """Device memory by address, for torch's CUDA array interface. Carries no owner."""

    def __init__(self, address: int, words: int, word_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (words,),
            "typestr": {8: "<i8", 4: "<i4", 2: "<i2", 1: "|u1"}[word_bytes],
            "strides": None,
            "stream": None,
        }


def device_view(address: int, size_bytes: int, device: Any, word_bytes: int = 1) -> Any:
    """A one-dimensional tensor over device memory that the caller keeps alive.

    Raises:
        LayoutError: Address or size is not a multiple of the word.
    """
    if address % word_bytes or size_bytes % word_bytes:
        raise LayoutError(f"{address:#x} +{size_bytes} is not a multiple of {word_bytes}")
    return torch.as_tensor(_DeviceSpan(address, size_bytes // word_bytes, word_bytes), device=device)


@dataclass(frozen=True)
class EventHandle:
    """A copy on a device stream."""

    event: Any
    keep: tuple[Any, ...] = field(default=(), repr=False)

    def done(self) -> bool:
        """Whether the event has been reached; never blocks."""
        try:
            return bool(self.event.query())
        except RuntimeError as error:
            raise TransportError(f"the device failed during a copy: {error}") from error

    def wait(self) -> None:
        """Block the calling thread until the copy is done."""
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise TransportError(f"the device failed during a copy: {error}") from error


@dataclass(frozen=True)
class IndexedCopy:
    """Words of one width: indices relative to the lowest address on each side, resident on the device."""

    word_bytes: int
    source_base: int
    source_words: int
    target_base: int
    target_words: int
    source_index: Any
    target_index: Any


@dataclass(frozen=True)
class TorchPrepared:
    """A list resident on the device."""

    total_bytes: int
    copies: tuple[IndexedCopy, ...]


def index_copies(
    source: Int64Array, target: Int64Array, sizes: Int64Array, device: Any, words_max: int = WORDS_MAX
) -> Iterator[IndexedCopy]:
    """Expand a checked list into word indices: one assignment per word width and ``words_max`` words."""
    for wide, from_at, to_at, length in align_classes(source, target, sizes):
        word = min(wide, 8)
        from_at, to_at, length = cut_tiles(from_at, to_at, length, words_max * word)
        group = (np.cumsum(length) - 1) // (words_max * word)
        for number in range(int(group[-1]) + 1):
            part = np.flatnonzero(group == number)
            if len(part):
                yield _indexed(word, from_at[part], to_at[part], length[part], device)


def _indexed(word: int, source: Int64Array, target: Int64Array, sizes: Int64Array, device: Any) -> IndexedCopy:
    source_base, target_base = int(source.min()), int(target.min())
    counts = torch.from_numpy(sizes // word).to(device)
    within = torch.arange(int(sizes.sum()) // word, device=device)
    within -= torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
    indices = [
        torch.repeat_interleave(torch.from_numpy((addresses - base) // word).to(device), counts) + within
        for addresses, base in ((source, source_base), (target, target_base))
    ]
    return IndexedCopy(
        word,
        source_base,
        (int((source + sizes).max()) - source_base) // word,
        target_base,
        (int((target + sizes).max()) - target_base) // word,
        indices[0],
        indices[1],
    )


class TorchCopier:
    """Copies lists of fragments on one torch device.

    Args:
        device: "cuda", "cuda:1", "cpu" or a torch device.
        stream: A CUDA stream; None makes one of its own.
    """

    def __init__(self, device: Any = "cuda", *, stream: Any = None) -> None:
        self.device = torch.device(device)
        self._host = HostCopier()
        self._cuda = self.device.type == "cuda"
        self._stream = stream
        self._uploads: Any = None
        if self._cuda:
            if stream is None:
                self._stream = torch.cuda.Stream(device=self.device)
            # Indices are made beside the copies: an upload must not wait for a running copy.
            self._uploads = torch.cuda.Stream(device=self.device)

    @property
    def stream(self) -> Any:
        """The copier's own stream (None on CPU)."""
        return self._stream

    def prepare(self, source_addresses: Int64Array, target_addresses: Int64Array, sizes: Int64Array) -> PreparedCopy:
        """Check a list and put its indices on the device. Raises LayoutError."""
        table = CopyTable.of(source_addresses, target_addresses, sizes)
        if not self._cuda:
            return table
        with torch.cuda.device(self.device), torch.cuda.stream(self._uploads):
            copies = tuple(index_copies(table.source_addresses, table.target_addresses, table.sizes, self.device))
        self._uploads.synchronize()
        for part in copies:
            # The allocator must not hand the indices out again while a copy reads them, even if its handle was dropped.
            part.source_index.record_stream(self._stream)
            part.target_index.record_stream(self._stream)
        return TorchPrepared(table.total_bytes, copies)

    def submit(self, prepared: PreparedCopy, *, after: Any = None) -> CopyHandle:
        """Start the copy on the copier's stream, after the event ``after`` where given."""
        if isinstance(prepared, CopyTable):
            return self._host.submit(prepared)
        if not isinstance(prepared, TorchPrepared):
            raise LayoutError("a list prepared by another copier")
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for part in prepared.copies:
                word = part.word_bytes
                source = device_view(part.source_base, part.source_words * word, self.device, word)
                target = device_view(part.target_base, part.target_words * word, self.device, word)
                target.index_copy_(0, part.target_index, source.index_select(0, part.source_index))
            event = torch.cuda.Event()
            event.record(self._stream)
        return EventHandle(event, (prepared,))
