"""How much memory this process could still take, as its kernel, its container and its CUDA device see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

#: Of a control group's two versions: (limit, usage, key of reclaimable page cache in memory.stat).
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def host_free_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory of the host that this process could still take (bytes): the least of what the kernel has available and what
    the limits of its control groups leave; page cache that can be dropped counts as free.

    Args:
        proc, groups: Where the kernel shows itself.

    Raises:
        OSError: The kernel does not say what is available.
    """
    return min([_available_bytes(proc), *_left_by_groups(proc, groups)])


def device_free_bytes() -> int:
    """Free memory of this rank's CUDA device (bytes)."""
    import torch

    return int(torch.cuda.mem_get_info()[0])


def _available_bytes(proc: Path) -> int:
    for line in (proc / "meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"MemAvailable is missing from {proc}/meminfo")


def _left_by_groups(proc: Path, groups: Path) -> Iterator[int]:
    """What each limit on the way from this process's memory group to the root leaves (bytes)."""
    try:
        told = (proc / "self" / "cgroup").read_text("utf-8").splitlines()
    except OSError:
        return
    for line in told:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = groups
        elif "memory" in controllers.split(","):
            root = groups / "memory"
        else:
            continue
        # Inside a container the path may be the host's: then only the mounted root is there, which is the container's own.
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            left = _left_in(place)
            if left is not None:
                yield left


def _left_in(group: Path) -> int | None:
    for limit_name, usage_name, cache_key in _GROUP_FILES:
        try:
            limit = (group / limit_name).read_text("ascii").strip()
            if limit == "max":
                return None
            usage = int((group / usage_name).read_text("ascii"))
            statistics = (group / "memory.stat").read_text("ascii").splitlines()
        except OSError:
            continue
        cache = next((int(line.split()[1]) for line in statistics if line.split()[0] == cache_key), 0)
        return max(int(limit) - max(usage - cache, 0), 0)
    return None
