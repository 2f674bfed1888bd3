"""What a stage needs beside its hardware, looked for before it starts: Python modules, a torch that sees the GPUs, MPI
worlds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from lifeline import Tethered
from worlds import launcher

from .table import Stage

#: Seconds that torch may take to count devices, and a world to start and end.
_PROBE_TIMEOUT_S = 120.0
_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
if count:
    torch.zeros(1, device="cuda").add_(1).item()
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "devices": [
    torch.cuda.get_device_name(i) for i in range(count)]}))
"""
#: One write per rank: launchers forward what a rank writes at once in one piece, and glue pieces of several ranks together.
_WORLD = "import os; from mpi4py import MPI; os.write(1, b'world of %d;' % MPI.COMM_WORLD.size)"


def stated(stage: Stage) -> str:
    """What a stage needs, in words."""
    needs = [f"{stage.gpus} × {stage.gpu_type} that torch.cuda can use"] if stage.gpus else []
    needs += [f"an MPI launcher for {stage.ranks} ranks"] if stage.ranks > 1 else []
    needs += [f"the Python modules {', '.join(stage.needs)}"] if stage.needs else []
    return "; ".join(needs) or "nothing but this machine"


def missing(stage: Stage) -> str | None:
    """What of that is not here, in words; None: nothing."""
    modules = [name for name in stage.needs if importlib.util.find_spec(name) is None]
    lacks = [f"{sys.executable} has no {', '.join(modules)}"] if modules else []
    if stage.gpus:
        found = cuda()
        if "error" in found:
            lacks.append(f"torch.cuda cannot be used: {found['error']}")
        elif len(found["devices"]) < stage.gpus:
            build = f"CUDA {found['cuda']}" if found["cuda"] else "a CPU build"
            lacks.append(f"torch {found['torch']} ({build}) sees {len(found['devices'])} of {stage.gpus} GPUs")
    if stage.ranks > 1 and "mpi4py" not in modules and (problem := world(stage.ranks)):
        lacks.append(problem)
    return "; ".join(lacks) or None


def python_path(root: Path, *first: str) -> str:
    """``PYTHONPATH`` for a test process: the sources of those packages that are not installed here come after what is given."""
    sources = [
        path.parent.as_posix()
        for path in sorted(root.resolve().glob("packages/*/src/*"))
        if (path / "__init__.py").exists() and importlib.util.find_spec(path.name) is None
    ]
    return os.pathsep.join(filter(None, (*first, os.environ.get("PYTHONPATH"), *sources)))


@lru_cache(maxsize=1)
def cuda() -> dict[str, Any]:
    """What torch sees: ``torch``, ``cuda``, ``devices``; or ``error``. One kernel is run, so that a broken driver shows."""
    code, output, problem = _probe([sys.executable, "-c", _TORCH])
    if code == 0:
        found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
        return found
    return {"error": problem}


@lru_cache(maxsize=8)
def world(ranks: int) -> str | None:
    """Why no world of that many ranks can be started here; None: one was."""
    try:
        found = launcher.find_launcher()
    except launcher.LauncherError as error:
        return str(error)
    code, output, problem = _probe(
        found.command(ranks, [sys.executable, "-c", _WORLD]), launcher.outside_of_a_world(os.environ)
    )
    if code != 0:
        return f"{found} cannot start {ranks} ranks: {problem}"
    if output.count(f"world of {ranks};") != ranks:
        return f"{found} does not start a world of {ranks} ranks for this interpreter's mpi4py: it is another MPI's"
    return None


def launcher_in_words() -> str:
    """For the bundle: which launcher would be used, or why none."""
    try:
        return str(launcher.find_launcher())
    except launcher.LauncherError as error:
        return f"none: {error}"


def _probe(command: list[str], environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, output, and what went wrong in one line."""
    tethered = Tethered(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment,
    )  # fmt: skip
    try:
        output, _ = tethered.process.communicate(timeout=_PROBE_TIMEOUT_S)
        lines = output.strip().splitlines()
        return tethered.process.returncode, output, lines[-1] if lines else f"exit {tethered.process.returncode}"
    except subprocess.TimeoutExpired:
        return 1, "", f"no answer within {_PROBE_TIMEOUT_S:.0f} s"
    finally:
        tethered.cut()
        tethered.process.wait()
