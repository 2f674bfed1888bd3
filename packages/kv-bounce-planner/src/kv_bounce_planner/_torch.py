"""Gather and scatter on a torch device by pointer, with torch alone.

For devices without Triton, and the reference for it. Fragments are copied by indexed assignment over 8-byte words where
every address and size allows, else 4, 2 or 1 bytes; never over uint8 when a wider word fits (several times slower).
On CUDA the copy runs on a stream of its own and a handle's event says when it is done; the calling stream is not waited
for: the caller orders its own writes before ``submit`` (``after=``). On CPU the numpy copier is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kv_bounce_planner._errors import LayoutError, TransportError
from kv_bounce_planner._gather import CopyHandle, CopyTable, HostCopier, PreparedCopy
from kv_bounce_planner._layout import Int64Array
from kv_bounce_planner._tiles import word_bytes_of

#: Fragments in one indexed assignment are expanded to word indices of at most so many bytes at a time.
INDEX_BYTES_MAX = 256 << 20


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
class TorchPrepared:
    """A list resident on the device: word indices relative to the lowest addresses."""

    total_bytes: int
    word_bytes: int
    source_base: int
    source_words: int
    target_base: int
    target_words: int
    source_index: Any
    target_index: Any


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
        if self._cuda and stream is None:
            self._stream = torch.cuda.Stream(device=self.device)

    @property
    def stream(self) -> Any:
        """The copier's own stream (None on CPU)."""
        return self._stream

    def prepare(self, source_addresses: Int64Array, target_addresses: Int64Array, sizes: Int64Array) -> PreparedCopy:
        """Check a list and put its indices on the device. Raises LayoutError."""
        table = CopyTable.of(source_addresses, target_addresses, sizes)
        if not self._cuda:
            return table
        if table.total_bytes > INDEX_BYTES_MAX:
            raise LayoutError(f"{table.total_bytes} B exceed {INDEX_BYTES_MAX}: split the list")
        word = min(word_bytes_of(table.source_addresses, table.target_addresses, table.sizes), 8)
        source_base, target_base = int(table.source_addresses.min()), int(table.target_addresses.min())
        counts = torch.from_numpy(table.sizes // word).to(self.device)
        within = torch.arange(table.total_bytes // word, device=self.device)
        within -= torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
        indices = []
        for addresses, base in ((table.source_addresses, source_base), (table.target_addresses, target_base)):
            first = torch.from_numpy((addresses - base) // word).to(self.device)
            indices.append(torch.repeat_interleave(first, counts) + within)
        torch.cuda.current_stream(self.device).synchronize()
        return TorchPrepared(
            table.total_bytes,
            word,
            source_base,
            (int((table.source_addresses + table.sizes).max()) - source_base) // word,
            target_base,
            (int((table.target_addresses + table.sizes).max()) - target_base) // word,
            indices[0],
            indices[1],
        )

    def submit(self, prepared: PreparedCopy, *, after: Any = None) -> CopyHandle:
        """Start the copy on the copier's stream, after the event ``after`` where given."""
        if isinstance(prepared, CopyTable):
            return self._host.submit(prepared)
        if not isinstance(prepared, TorchPrepared):
            raise LayoutError("a list prepared by another copier")
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            source = device_view(
                prepared.source_base, prepared.source_words * prepared.word_bytes, self.device, prepared.word_bytes
            )
            target = device_view(
                prepared.target_base, prepared.target_words * prepared.word_bytes, self.device, prepared.word_bytes
            )
            target.index_copy_(0, prepared.target_index, source.index_select(0, prepared.source_index))
            event = torch.cuda.Event()
            event.record(self._stream)
        return EventHandle(event, (prepared, source, target))
