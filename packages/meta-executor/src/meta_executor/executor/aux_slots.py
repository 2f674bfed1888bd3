"""Small fixed slots of host memory that travel beside the KV: the first token of a generation-first request.

A slot is owned by its request from the moment its address leaves the process until the transfer is proven, like a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from meta_executor.executor.transceiver import AUX_BYTES


class AuxSlots:
    """A slab of ``slot_count`` slots; the slab is registered with the transport once.

    Args:
        slot_count: Slots (count).
        cuda_device: Keep the slab on this CUDA device, beside the KV of a CUDA engine; None: in host memory.
    """

    def __init__(self, slot_count: int, *, cuda_device: int | None = None) -> None:
        shape = (slot_count, AUX_BYTES // 8)
        if cuda_device is None:
            slab: npt.NDArray[np.int64] = np.full(shape, -1, dtype=np.int64)
            self._slab: Any = slab
            self._address = int(slab.ctypes.data)
        else:
            import torch

            self._slab = torch.full(shape, -1, dtype=torch.int64, device=f"cuda:{cuda_device}")
            self._address = int(self._slab.data_ptr())
        self._slab_bytes = slot_count * AUX_BYTES
        self._free = list(range(slot_count - 1, -1, -1))
        self._held: dict[int, int] = {}

    @property
    def region(self) -> tuple[int, int]:
        """Address and size (bytes) of the slab."""
        return self._address, self._slab_bytes

    @property
    def free_count(self) -> int:
        """Slots that nobody owns (count)."""
        return len(self._free)

    def take(self, request_id: int) -> int:
        """The address of a request's slot; the same one when it has one already.

        Raises:
            MemoryError: Every slot is owned.
        """
        slot = self._held.get(request_id)
        if slot is None:
            if not self._free:
                raise MemoryError("no free AUX slot")
            slot = self._free.pop()
            self._held[request_id] = slot
            self._slab[slot] = -1
        return self._address + slot * AUX_BYTES

    def write(self, request_id: int, token: int) -> None:
        """Put the first token into the request's slot."""
        slot = self._held[request_id]
        self._slab[slot, 0] = token
        self._slab[slot, 1] = request_id
        if not isinstance(self._slab, np.ndarray):
            # The transport reads the device's memory without regard to the stream that wrote it.
            import torch

            torch.cuda.synchronize(self._slab.device)

    def read(self, request_id: int) -> int | None:
        """The first token, or None when the slot does not hold this request's."""
        token, owner = self._slab[self._held[request_id]].tolist()
        return int(token) if int(owner) == request_id else None

    def release(self, request_id: int) -> None:
        """Give the slot back, with proof. Idempotent."""
        slot = self._held.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def quarantine(self, request_id: int) -> None:
        """Never use the slot again. Idempotent."""
        self._held.pop(request_id, None)
