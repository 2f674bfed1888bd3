"""What this machine has, probed or given in a file, and whether that is what a stage needs."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from .errors import StageError, nearest
from .table import Stage

#: With ``--accept-capability``: whatever card is here.
ANY_GPU = "any"


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes:
        gpu_names: One name per GPU, as the driver gives it.
        compute_capability: Of the first GPU, such as ``9.0``; empty without one.
        gpu_capabilities: Of each GPU; empty where only the first one's is known.
        cpu: ``x86_64`` or ``aarch64``.
        cores: Cores that this process may use (count).
        memory_mib: Host memory (MiB).
        nodes: Machines of the Slurm job that this process is in (count); 1 outside of one.
        linux_distribution: ``ubuntu``, ``debian`` …; empty where it is not known.
        source: ``probed`` or the file it was read from.
    """

    gpu_names: tuple[str, ...] = ()
    compute_capability: str = ""
    gpu_capabilities: tuple[str, ...] = ()
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
    names, capabilities = _nvidia_smi()
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return Hardware(
        gpu_names=names,
        compute_capability=capabilities[0] if capabilities else "",
        gpu_capabilities=capabilities,
        nodes=int(nodes) if nodes.isdigit() and int(nodes) else 1,
        cpu=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        linux_distribution=_distribution(),
    )


def _nvidia_smi() -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return (), ()
    return parse_nvidia_smi(done.stdout) if done.returncode == 0 else ((), ())


def parse_nvidia_smi(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name and compute capability of each GPU."""
    rows = [line.rpartition(",") for line in text.splitlines() if "," in line]
    return tuple(name.strip() for name, _, _ in rows), tuple(capability.strip() for _, _, capability in rows)


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
    except (OSError, ValueError, AttributeError, LookupError, TypeError, yaml.YAMLError) as error:
        raise StageError(f"hardware file {path}: {error}") from error
    if not isinstance(data, dict):
        raise StageError(f"hardware file {path}: want a mapping, got {type(data).__name__}")
    known = {f.name: f for f in fields(Hardware) if f.name != "source"}
    for key, value in data.items():
        if key not in known:
            raise StageError(f"hardware file {path}: unknown field {key!r}{nearest(str(key), known)}")
        default = known[key].default
        if isinstance(default, tuple):
            good, wanted = isinstance(value, list) and all(isinstance(v, str) for v in value), "a list of texts"
        elif isinstance(default, int):
            good, wanted = type(value) is int and value >= 0, "a whole number"
        else:
            good, wanted = isinstance(value, str), "a text (in quotes)"
        if not good:
            raise StageError(f"hardware file {path}: {key}: want {wanted}, got {value!r}")
    lists = {key: tuple(value) for key, value in data.items() if isinstance(value, list)}
    return Hardware(**{**data, **lists, "source": str(path)})


def lacking(stage: Stage, hardware: Hardware, accept_capability: str | None = None) -> str | None:
    """Which GPUs or nodes a stage needs and the machine does not have, in words; None when it can run here."""
    if hardware.nodes < stage.nodes:
        return f"needs {stage.nodes} nodes, there is {hardware.nodes}"
    if stage.gpu_pattern is None:
        return None
    capabilities = hardware.gpu_capabilities or (hardware.compute_capability,) * len(hardware.gpu_names)
    matching = sum(
        bool(re.search(stage.gpu_pattern, name, re.IGNORECASE)) or accept_capability in (capability, ANY_GPU)
        for name, capability in zip(hardware.gpu_names, capabilities, strict=False)
    )
    if matching < stage.gpus:
        return f"needs {stage.gpus} × {stage.gpu_type}, this machine has {describe_gpus(hardware)}"
    return None


def describe_gpus(hardware: Hardware) -> str:
    """GPUs in words."""
    if not hardware.gpu_names:
        return "no GPU"
    counts: dict[str, int] = {}
    for name in hardware.gpu_names:
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} × {name}" for name, count in counts.items())
