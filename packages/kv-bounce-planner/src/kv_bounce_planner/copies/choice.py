"""The copier for a kind of memory: the fastest of what is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

from kv_bounce_planner._errors import LayoutError
from kv_bounce_planner.copies.gather import HostCopier
from kv_bounce_planner.layout.model import MemoryKind


def default_copier(memory_kind: MemoryKind = "DRAM", device_id: int = 0) -> Any:
    """A ``Copier`` for memory of this kind.

    Args:
        memory_kind: "DRAM" copies in the calling thread; "VRAM" on a stream of its own, by Triton where it is installed
            (compiled here, so that no transfer waits for a compiler), else by torch.
        device_id: CUDA device of "VRAM".

    Raises:
        LayoutError: An unknown kind.
        ImportError: "VRAM" without torch.
    """
    if memory_kind == "DRAM":
        return HostCopier()
    if memory_kind != "VRAM":
        raise LayoutError(f'memory_kind is "DRAM" or "VRAM", not {memory_kind!r}')
    if importlib.util.find_spec("triton") is None:
        from kv_bounce_planner.copies._torch import TorchCopier

        return TorchCopier(f"cuda:{device_id}")
    from kv_bounce_planner.copies._triton import TritonCopier

    copier = TritonCopier(f"cuda:{device_id}")
    copier.warm_up()
    return copier
