"""The one file that imports nvtx. Ranges show in a profiler which path a call took; without nvtx they cost one test."""

from __future__ import annotations

from typing import Any

try:
    import nvtx
except ImportError:
    nvtx = None

#: Whether ranges are written. The client reads it once per call.
enabled: bool = nvtx is not None


def push(name: str, path: str) -> Any:
    """Open the range ``RPCExecutor.<method>.<local|remote>``."""
    return nvtx.start_range(f"RPCExecutor.{name}.{path}") if nvtx is not None else None


def pop(handle: Any) -> None:
    """Close a range."""
    if nvtx is not None:
        nvtx.end_range(handle)
