"""What this machine has, and whether that is what a stage needs."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .table import Stage

#: With ``--accept-capability``: whatever card is here.
ANY_GPU = "any"
#: More processes than this hold more memory, each with what its tests share, than they save time (count).
WORKERS_MAX = 4


def workers_of(cores: int) -> int:
    """Processes for tests that are safe beside each other: one more than cores, because many of them wait."""
    return min(cores + 1, WORKERS_MAX)


@dataclass(frozen=True)
class Hardware:
    """A machine.

    Attributes:
        gpu_names: One name per GPU, as the driver gives it.
        compute_capability: Of the first GPU, such as ``9.0``; empty without one.
        gpu_capabilities: Of each GPU; empty where only the first one's is known.
        cpu: ``x86_64`` or ``aarch64``.
        cores: Cores that this process may use (count).
        nodes: Machines of the Slurm job that this process is in (count); 1 outside of one.
    """

    gpu_names: tuple[str, ...] = ()
    compute_capability: str = ""
    gpu_capabilities: tuple[str, ...] = ()
    cpu: str = "x86_64"
    cores: int = 1
    nodes: int = 1


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
        cores=usable_cores(),
    )


def usable_cores() -> int:
    """Cores that this process may use (count)."""
    return len(os.sched_getaffinity(0))


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
        return f"needs {stage.gpus} × {stage.gpu_type}, this machine has {describe_gpus(hardware.gpu_names)}"
    return None


def describe_gpus(names: Sequence[str]) -> str:
    """GPUs in words."""
    return ", ".join(f"{count} × {name}" for name, count in Counter(names).items()) or "no GPU"
