"""MPI worlds for the repository's own runs: the launcher that ``meta_executor.mpi_launcher`` knows, on a lifeline.

That module is loaded by its path, because a package's own test environment does not have meta-executor.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _load() -> ModuleType:
    path = (
        Path(__file__).resolve().parents[1] / "packages" / "meta-executor" / "src" / "meta_executor" / "mpi_launcher.py"
    )
    spec = importlib.util.spec_from_file_location("repository_mpi_launcher", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


launcher = _load()
