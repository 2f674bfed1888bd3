"""MPICH's shared-memory segments: mapped by every rank after start-up, so their names can go at once.

A world that is killed cannot remove ``/dev/shm/mpich_shm_*``; a name that is already gone needs no removal.
"""

from __future__ import annotations

from pathlib import Path

_PREFIX = "/dev/shm/mpich_shm_"  # noqa: S108 - a name that MPICH chose, only ever removed


def mapped_mpich_segments(maps: Path = Path("/proc/self/maps")) -> tuple[str, ...]:
    """Paths of this process's mapped MPICH segments that still have a name, in order of address."""
    found: dict[str, None] = {}
    for line in maps.read_text("utf-8", errors="replace").splitlines():
        path = line.split(maxsplit=5)[5] if line.count(" ") >= 5 and len(line.split(maxsplit=5)) == 6 else ""
        if path.startswith(_PREFIX) and not path.endswith(" (deleted)"):
            found[path] = None
    return tuple(found)


def segments_of(pid: int) -> tuple[str, ...]:
    """The same of another process of this user; none where it has ended."""
    try:
        return mapped_mpich_segments(Path(f"/proc/{pid}/maps"))
    except OSError:
        return ()


def unlink_mpich_segments() -> tuple[str, ...]:
    """Remove the names of this process's MPICH segments; call on one rank after all ranks have mapped them (a barrier).

    Returns:
        The paths removed. Ranks that mapped them go on using them.
    """
    removed = []
    for path in mapped_mpich_segments():
        Path(path).unlink(missing_ok=True)
        removed.append(path)
    return tuple(removed)
