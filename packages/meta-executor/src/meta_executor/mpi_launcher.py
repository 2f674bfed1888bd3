"""How an MPI world is started on this machine, and what its ranks are told: the one place that knows.

MPICH, Intel MPI and Cray's launchers take ``-n``; Open MPI wants to be told that more ranks than cores are meant, and that root
may run it; Slurm's ``srun`` is used when it is asked for by the setting ``META_EXECUTOR_MPIEXEC``.

Standard library only: the repository's test configuration loads this file by its path, also where the package is not installed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

#: Environment variable: the launcher's command line, such as ``srun --mpi=pmi2`` or ``/opt/mpich/bin/mpiexec``.
SETTING = "META_EXECUTOR_MPIEXEC"
_SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
#: What a launcher leaves in the environment of its ranks; a world that one of them starts must not see it.
_OF_A_WORLD = ("PMI_", "PMIX_", "HYDI_", "OMPI_", "PRTE_", "MPIR_CVAR_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
#: Seconds that a launcher may take to say its version.
_VERSION_TIMEOUT_S = 20.0


class LauncherError(Exception):
    """There is no launcher of MPI worlds, or the one that was set cannot be found."""


@dataclass(frozen=True)
class MpiLauncher:
    """A launcher.

    Attributes:
        words: Its command line, without a count.
        flavour: ``MPICH``, ``Open MPI``, ``Intel MPI``, ``Slurm`` or ``unknown``.
    """

    words: tuple[str, ...]
    flavour: str

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        """The command line that runs ``program`` on that many ranks of this machine.

        Raises:
            ValueError: ``ranks`` is below 1.
        """
        if ranks < 1:
            raise ValueError(f"ranks: want at least 1, got {ranks}")
        options: tuple[str, ...] = ()
        if self.flavour == "Open MPI":
            options = ("--oversubscribe", "--bind-to", "none", *_rights(self.flavour))
        elif self.flavour == "Slurm":
            options = ("--overcommit", "--overlap", "--kill-on-bad-exit=1")
        return [*self.words, *options, "-n", str(ranks), *program]

    def command_on(self, host: str, program: Sequence[str]) -> list[str]:
        """The command line that runs one process of ``program`` on a host, wherever it is typed."""
        options: tuple[str, ...]
        if self.flavour == "Slurm":
            options = (f"--nodelist={host}", "--nodes=1", "--ntasks=1", "--overlap")
        else:
            options = ("--host" if self.flavour == "Open MPI" else "-host", host, "-n", "1")
        return [*self.words, *_rights(self.flavour), *options, *program]

    def __str__(self) -> str:
        return f"{shlex.join(self.words)} ({self.flavour})"


#: Launchers by their usual names, for who writes a command line for another host: what is installed there is not known here.
USUAL_LAUNCHERS = (
    MpiLauncher(("mpiexec",), "MPICH"), MpiLauncher(("mpirun",), "Open MPI"), MpiLauncher(("srun",), "Slurm"),
)  # fmt: skip


def _rights(flavour: str) -> tuple[str, ...]:
    return ("--allow-run-as-root",) if flavour == "Open MPI" and os.geteuid() == 0 else ()


def find_launcher(environ: Mapping[str, str] = os.environ, interpreter: str | None = None) -> MpiLauncher:
    """The launcher that was set, else the one beside the interpreter (its MPI's own), else the first on the path.

    Two MPI distributions both bring an ``mpiexec``; the wrong one starts as many worlds of one rank. Ranks check that.

    Raises:
        LauncherError: There is none; says where it was looked for.
    """
    setting = environ.get(SETTING, "").strip()
    if setting:
        try:
            program, *options = shlex.split(setting)
        except ValueError as error:
            raise LauncherError(f"{SETTING}={setting!r}: {error}") from error
        found = shutil.which(program, path=environ.get("PATH"))
        if found is None:
            raise LauncherError(f"{SETTING}={setting!r}: there is no program {program}")
        return MpiLauncher((found, *options), flavour_of(found))
    interpreter = interpreter or sys.executable
    beside = Path(interpreter).with_name("mpiexec")
    path = environ.get("PATH")
    for candidate in (str(beside) if os.access(beside, os.X_OK) else None, shutil.which("mpiexec", path=path),
                      shutil.which("mpirun", path=path)):  # fmt: skip
        if candidate is not None:
            return MpiLauncher((candidate,), flavour_of(candidate))
    raise LauncherError(
        f"no mpiexec beside {interpreter} nor on PATH: pip install mpich brings one, module load may; "
        f"{SETTING} names another launcher"
    )


@lru_cache(maxsize=16)
def flavour_of(program: str) -> str:
    """Which MPI a launcher belongs to, as it says itself."""
    if Path(program).name == "srun":
        return "Slurm"
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
            timeout=_VERSION_TIMEOUT_S, env=outside_of_a_world(os.environ),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    text = done.stdout + done.stderr
    for pattern, flavour in (
        (r"Open ?MPI|OpenRTE|PRRTE|\bprte", "Open MPI"), (r"Intel\(R\) MPI", "Intel MPI"), (r"HYDRA|MPICH", "MPICH"),
    ):  # fmt: skip
        if re.search(pattern, text, re.IGNORECASE):
            return flavour
    return "unknown"


def world_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks the world has that this process was started in; None: no launcher started it."""
    return next((int(environ[name]) for name in _SIZE_VARIABLES if environ.get(name, "").isdigit()), None)


def rank_of(environ: Mapping[str, str] = os.environ) -> int:
    """The rank that the launcher of the world gave this process; 0 outside of one."""
    return next((int(environ[name]) for name in _RANK_VARIABLES if environ.get(name, "").isdigit()), 0)


def outside_of_a_world(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a launcher told this process: a world that is started with it is a world of its own."""
    return {name: value for name, value in environ.items() if not name.startswith(_OF_A_WORLD)}


__all__ = [
    "SETTING", "USUAL_LAUNCHERS", "LauncherError", "MpiLauncher", "find_launcher", "flavour_of", "outside_of_a_world",
    "rank_of", "world_size",
]  # fmt: skip
