"""Shared test behaviour: a test marked ``mpi(N)`` runs on N ranks, wherever it is started from.

Inside a world of N ranks (``mpiexec -n N python -m pytest ...``) the tests of that size run on every rank and the others
are deselected. Outside any world each such test is started under ``mpiexec -n N`` as a child of its own, and its verdict
is the child's: nothing is skipped, so nothing that did not run can look green.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

#: Set by MPICH's and Open MPI's launchers in each rank's environment.
_WORLD_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
#: A child world may take this long beyond the test's own limit: interpreter start, MPI start and teardown.
_WORLD_START_S = 60.0


def _world_size() -> int | None:
    for name in _WORLD_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    return None


def _ranks_of(item: pytest.Item) -> int | None:
    marker = item.get_closest_marker("mpi")
    if marker is None:
        return None
    if len(marker.args) != 1 or not isinstance(marker.args[0], int) or marker.args[0] < 1:
        raise pytest.UsageError(f"{item.nodeid}: mpi marker wants one rank count >= 1, got {marker.args!r}")
    return marker.args[0]


def pytest_configure(config: pytest.Config) -> None:
    """Tests are always run with bytes of their own: no bytecode races between ranks that share a folder."""
    if _world_size() is not None:
        sys.dont_write_bytecode = True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Inside a world keep exactly the tests of its size."""
    world = _world_size()
    if world is None:
        return
    kept = [item for item in items if _ranks_of(item) == world]
    dropped = [item for item in items if _ranks_of(item) != world]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Outside a world start the test in one."""
    ranks = _ranks_of(pyfuncitem)
    if ranks is None or _world_size() is not None:
        return None
    marker = pyfuncitem.get_closest_marker("timeout")
    limit_s = float(marker.args[0]) if marker and marker.args else float(pyfuncitem.config.getini("timeout") or 120)
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.fail(f"no mpiexec beside {sys.executable}: install the mpich distribution there", pytrace=False)
    path, _, name = pyfuncitem.nodeid.partition("::")
    command = [
        str(mpiexec),
        "-n",
        str(ranks),
        sys.executable,
        "-m",
        "pytest",
        f"{pyfuncitem.config.rootpath / path}::{name}",
        "-q",
        "-x",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-o",
        f"timeout={limit_s}",
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PMI_", "HYDI_"))}
    child = subprocess.Popen(
        command,
        cwd=pyfuncitem.config.rootpath,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=limit_s + _WORLD_START_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        pytest.fail(f"{ranks} ranks did not finish within {limit_s + _WORLD_START_S:.0f} s\n{output}", pytrace=False)
    passed = output.count("1 passed")
    if child.returncode != 0 or passed != ranks:
        pytest.fail(
            f"{ranks} ranks: exit {child.returncode}, {passed} of {ranks} ranks passed\n{output}", pytrace=False
        )
    return True


@pytest.fixture
def world_comm(request: pytest.FixtureRequest) -> object:
    """The world communicator of a test marked ``mpi``; None where the test is only started in a world of its own."""
    if request.node.get_closest_marker("mpi") is None:
        pytest.fail("world_comm without a world: mark the test with @pytest.mark.mpi(ranks)", pytrace=False)
    if _world_size() is None:
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD
