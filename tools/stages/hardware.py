"""What this machine has, probed or given in a file, and whether that is what a stage needs."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from .errors import StageError, nearest
from .table import HARDWARE, Stage


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes:
        gpu_names: One name per GPU, as the driver gives it.
        compute_capability: Of the first GPU, such as ``9.0``; empty without one.
        cpu: ``x86_64`` or ``aarch64``.
        cores: Cores that this process may use (count).
        memory_mib: Host memory (MiB).
        nodes: Machines like this one that a run may use (count).
        linux_distribution: ``ubuntu``, ``debian`` …; empty where it is not known.
        source: ``probed`` or the file it was read from.
    """

    gpu_names: tuple[str, ...] = ()
    compute_capability: str = ""
    cpu: str = "x86_64"
    cores: int = 1
    memory_mib: int = 0
    nodes: int = 1
    linux_distribution: str = ""
    source: str = "probed"

    def to_dict(self) -> dict[str, Any]:
        """For a result bundle."""
        return asdict(self)


def probe() -> Hardware:
    """This machine, by nvidia-smi where there is one, else without GPUs."""
    names, capability = _nvidia_smi()
    return Hardware(
        gpu_names=names,
        compute_capability=capability,
        cpu=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        linux_distribution=_distribution(),
    )


def _nvidia_smi() -> tuple[tuple[str, ...], str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return (), ""
    return parse_nvidia_smi(done.stdout) if done.returncode == 0 else ((), "")


def parse_nvidia_smi(text: str) -> tuple[tuple[str, ...], str]:
    """GPU names, and the compute capability of the first."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if "," in line]
    return tuple(row[0] for row in rows), rows[0][1] if rows else ""


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("ID", "")
    except OSError:
        return ""


def read_hardware(path: Path) -> Hardware:
    """A machine described in YAML or JSON, for dry runs.

    Raises:
        StageError: The file cannot be read, or has a field that is not known or of the wrong type.
    """
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise StageError(f"hardware file {path}: {error}") from error
    if not isinstance(data, dict):
        raise StageError(f"hardware file {path}: want a mapping, got {type(data).__name__}")
    known = {f.name: f for f in fields(Hardware) if f.name != "source"}
    for key, value in data.items():
        if key not in known:
            raise StageError(f"hardware file {path}: unknown field {key!r}{nearest(str(key), known)}")
        default = known[key].default
        wanted: type | tuple[type, ...] = (list, tuple) if isinstance(default, tuple) else type(default)
        if not isinstance(value, wanted):
            raise StageError(f"hardware file {path}: {key}: want {wanted}, got {value!r}")
    return Hardware(**{**data, "gpu_names": tuple(data.get("gpu_names", ())), "source": str(path)})


def lacking(stage: Stage, hardware: Hardware, accept_capability: str | None = None) -> str | None:
    """What a stage needs and the machine has not, in words; None when it can run here."""
    pattern = HARDWARE[stage.hardware]
    if pattern is None:
        return None
    have = f"this machine has {describe_gpus(hardware)}"
    if accept_capability is not None and hardware.compute_capability == accept_capability:
        matching = len(hardware.gpu_names)
    else:
        matching = sum(bool(re.search(pattern, name, re.IGNORECASE)) for name in hardware.gpu_names)
    if matching < stage.gpus:
        return f"needs {stage.gpus} × {stage.gpu_type}, {have}"
    if hardware.nodes < stage.nodes:
        return f"needs {stage.nodes} nodes, there is {hardware.nodes}"
    return None


def describe_gpus(hardware: Hardware) -> str:
    """GPUs in words."""
    if not hardware.gpu_names:
        return "no GPU"
    counts: dict[str, int] = {}
    for name in hardware.gpu_names:
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} × {name}" for name, count in counts.items())


def to_json(hardware: Hardware) -> str:
    """One line."""
    return json.dumps(hardware.to_dict(), sort_keys=True)
